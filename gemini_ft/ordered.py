"""Threads that carry out calls: in order, for sync/, pipeline/ and worker/, or each by itself, for agent/, cli/, launch/ and storage/."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")
_END_SECONDS = 1.0  # for each thread at the end of the process


def on_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Begins a call on a thread of its own, which can be given up: what it calls may hang, and cannot be interrupted."""
    outcome = Future[T]()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


class Ordered:
    """A thread that carries out calls one after the other, in the order in which they are put.

    It ends before the interpreter, if its calls are over within a second, so that Python need not unwind it out of torch, which would
    abort the process.

    ``within``: makes the context in which it runs.

    Raises RuntimeError: no thread can be started.
    """

    def __init__(self, name: str, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=_serve, args=(self._calls, within), name=name, daemon=True)
        self._thread.start()
        _all.add(self)

    def put(self, call: Callable[[], None]) -> None:
        """Adds a call, which must not raise."""
        self._calls.put(call)

    def wait(self) -> None:
        """Waits until every call that was put has returned."""
        self._calls.join()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread after all calls that were put, and waits for that, ``timeout`` seconds at most."""
        if not self._thread.is_alive():
            return  # or this is a forked child
        self._calls.put(None)
        if not self.is_current:
            self._thread.join(timeout)


_all: weakref.WeakSet[Ordered] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for each in list(_all):
        each.close(_END_SECONDS)


def _serve(calls: queue.Queue[Callable[[], None] | None], within: Callable[[], AbstractContextManager[object]]) -> None:
    with within():
        while (call := calls.get()) is not None:
            call()
            calls.task_done()
            del call  # it holds tensors
