"""A device that is none, for whole jobs: the CPU says that it is an accelerator whose side streams lag behind.

Copies that are queued on another stream than the training's own are made a little later, by a thread; until then the bytes at their targets
are poison. The training's own work is done at once, or, where a job asks for it (`delay_training`), what it writes in place is late, too:
the host returns from an optimizer's step before the step is made. What the package has not ordered is seen as a difference in bits at the
end of the job; what a real device, or its driver, would not forgive ends the process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
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
        self.wanted = threading.Event()  # another stream has come to where it waits for this one

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

    def wait_event(self, event: Event) -> None:
        self.put(event.wanted.set)
        self.put(event.synchronize)

    def _run(self) -> None:
        while True:
            due, work = self._queue.get()
            self._await(due)
            work()

    def _await(self, due: float) -> None:
        time.sleep(max(0.0, due - time.monotonic()))


class TrainingStream(LateStream):
    """The training's own queue, where that is late: from each event on for ``lag`` seconds, or until another stream waits for an event."""

    def __init__(self, lag: float) -> None:
        super().__init__(lag)
        self._held_until = 0.0
        self._marks: list[Event] = []  # of what is not done yet
        self._is_empty = True  # for the training thread, which alone fills it

    def put(self, work: Callable[[], None]) -> None:
        self._is_empty = False
        super().put(work)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        self._held_until = time.monotonic() + self._lag
        self._marks = [*(each for each in self._marks if not each.query()), event]
        return super().record_event(event)

    def synchronize(self) -> None:
        if not self._is_empty:
            done = threading.Event()
            self.put(done.set)
            assert done.wait(60)
            self._is_empty = True

    def _await(self, _due: float) -> None:
        while time.monotonic() < self._held_until and not any(mark.wanted.is_set() and not mark.query() for mark in self._marks):
            time.sleep(0.001)


def _die(what: str) -> None:
    print(f"the device would not forgive it: {what}", file=sys.stderr, flush=True)
    os._exit(70)


_pending: set[int] = set()  # addresses to which copies are under way


class _Behind(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues what the training writes in place; whatever else it does waits for that, as if it read the result."""

    def __init__(self, stream: TrainingStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns, kwargs = func._schema.returns, kwargs or {}
        is_alias = all(each.alias_info is not None for each in returns) and not ("out" in kwargs or torch.Tag.inplace_view in func.tags)
        if not is_alias or not func._schema.is_mutable:
            if not is_alias and func.namespace != "profiler":
                self._stream.synchronize()
            return func(*args, **kwargs)

        def work() -> None:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # the write was counted when it was queued
                func(*args, **kwargs)

        self._stream.put(work)
        return args[0] if returns else None


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
        _pending.update(places := {target.data_ptr() for target in targets})

        def work() -> None:
            func(*args, **(kwargs or {}))
            _pending.difference_update(places)

        self._stream.put(work)
        if not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking")):
            self._stream.synchronize()
        return args[0] if func is torch.ops.aten.copy_.default else None


class Module:
    """A double of `torch.cuda`, as far as the package uses it."""

    def __init__(self, lag: float) -> None:
        self.Event, self.Stream = Event, lambda *_: LateStream(lag)
        self.default = Stream()
        self._local, self._thread = threading.local(), threading.get_ident()

    def current_stream(self, _device: Any = None) -> Stream:
        found: Stream = getattr(self._local, "stream", self.default)
        if found is self.default and threading.get_ident() != self._thread:
            _die(f"{threading.current_thread().name} uses the training's queue, in which it stands behind what may wait for another rank")
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = getattr(self._local, "stream", self.default), stream
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
    module, sizes = Module(lag), dict[int, int]()

    def pin(_device: Any, address: int, nbytes: int) -> bool:
        sizes[address] = nbytes
        return True

    def unpin(_device: Any, address: int) -> None:
        end = address + sizes.pop(address)
        if any(address <= place < end for place in list(_pending)):
            _die("memory is taken away while copies into it are under way")

    accelerator.module_of = lambda device: module
    accelerator.holds = lambda tensor: True
    accelerator.pin, accelerator.unpin = pin, unpin


def is_copying() -> bool:
    """Whether copies are in the queues."""
    return bool(_pending)


def delay_training(accelerator: Any, lag: float) -> None:
    """Lets what this thread writes in place from now on be late by so many seconds, on the device that is installed."""
    accelerator.module_of(torch.device("cpu")).default = stream = TrainingStream(lag)
    _Behind(stream).__enter__()  # type: ignore[no-untyped-call]


def on_device(lag: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``function``, which trains, with the device in place; for ranks of `rank_kit.World`."""
    from gemini_ft import accelerator

    install(accelerator, lag)
    return function(*arguments)
