"""A device that is none, for whole jobs: the CPU says that it is an accelerator whose side streams lag behind.

Work of the training's own stream is done at once. Copies that are queued on another stream are made a little later, by a thread; until then
the bytes at their targets are poison. What the package has not ordered is seen as a
difference in bits at the end of the job.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xA5


class Event:
    """A place in a stream's queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.over = threading.Event()
        self.over.set()  # one that was never recorded
        self.when = 0.0

    def query(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        assert self.over.wait(60)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1000 * (end.when - self.when)

    def end(self) -> None:
        self.when = time.monotonic()
        self.over.set()


class Stream:
    """The training's own stream, on which everything is done at once."""

    def put(self, work: Callable[[], None]) -> None:
        work()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.over.clear()
        self.put(event.end)
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class LateStream(Stream):
    """A queue that a thread works off, ``lag`` seconds behind."""

    def __init__(self, lag: float) -> None:
        self._lag = lag
        self._queue: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="lagging-device").start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put((time.monotonic() + self._lag, work))

    def _run(self) -> None:
        while True:
            due, work = self._queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            work()


def _void(_: Any) -> None:
    """Takes the result of a call that is made for what it does."""


class _Late(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues copies in place of doing them; the host waits for those that are not said to be non-blocking, as it does on a device."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten._foreach_copy_.default, torch.ops.aten.copy_.default):
            return func(*args, **(kwargs or {}))
        targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        for target in targets:
            if target.is_contiguous():
                target.view(-1).view(torch.uint8).fill_(POISON)
        self._stream.put(lambda: _void(func(*args, **(kwargs or {}))))
        if not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking")):
            self._stream.synchronize()
        return args[0] if func is torch.ops.aten.copy_.default else None


class Module:
    """A double of `torch.cuda`, as far as the package uses it."""

    def __init__(self, lag: float) -> None:
        self.Event, self.Stream = Event, lambda *_: LateStream(lag)
        self._default = Stream()
        self._local = threading.local()

    def current_stream(self, _device: Any = None) -> Stream:
        found: Stream = getattr(self._local, "stream", self._default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            with _Late(stream):
                yield
        finally:
            self._local.stream = before

    def synchronize(self, _device: Any = None) -> None:
        pass

    def set_device(self, _device: Any) -> None:
        pass


def install(accelerator: Any, lag: float) -> None:
    """Puts the device in the place of the CPU; ``accelerator`` is the package's module of that name, ``lag`` in seconds."""
    module = Module(lag)
    accelerator.module_of = lambda device: module
    accelerator.holds = lambda tensor: True


def on_device(lag: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``function``, which trains, with the device in place; for ranks of `rank_kit.World`."""
    from gemini_ft import accelerator

    install(accelerator, lag)
    return function(*arguments)
