"""Keeps the order in which a group's schemes send, because it must be the same on all ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from gemini_ft import accelerator
from gemini_ft.ordered import Ordered

T = TypeVar("T")


class Line:
    """The calls of one group. Those in the background share a thread, which ends when the group is gone."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._background: Ordered | None = None

    def now(self, call: Callable[[], T]) -> T:
        """Runs a call after all that were put in the background before it."""
        self._refuse_callbacks()
        if self._background is not None:
            self._background.wait()
        with self._one:
            return call()

    def later(self, call: Callable[[], T]) -> torch.futures.Future[T]:
        """Runs a call in the background, on the device stream that is current now."""
        self._refuse_callbacks()
        future: Any = torch.futures.Future()  # its set_exception is annotated as if errors were results
        module = accelerator.in_use()
        stream = module.current_stream() if module is not None else None

        def run() -> None:
            try:
                with self._one:
                    value = _on(module, stream, call)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._background = self._background or Ordered("gradient synchronisation")
        self._background.put(run)
        result: torch.futures.Future[T] = future
        return result

    def _refuse_callbacks(self) -> None:
        if self._background is not None and self._background.is_current:
            raise RuntimeError(
                "all_reduce was called from a callback of an earlier one's future: when callbacks run differs from rank to rank, and so "
                "would the order of the calls; wait for the future, then call it"
            )

    def end(self) -> None:
        if self._background is not None:
            self._background.close(timeout=0)


_lines: weakref.WeakKeyDictionary[ProcessGroup, Line] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def line_of(group: ProcessGroup) -> Line:
    """The line that all calls of a group share."""
    with _making:
        if group not in _lines:
            _lines[group] = line = Line()
            weakref.finalize(group, line.end)
        return _lines[group]


def _on(module: Any, stream: Any, call: Callable[[], T]) -> T:
    """Runs a call on the caller's stream, so after the work that is queued there; its results can be used on other streams, too."""
    if stream is None:
        return call()
    with module.stream(stream):
        result = call()
        stream.synchronize()
    return result
