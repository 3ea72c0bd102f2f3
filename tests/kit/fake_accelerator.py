"""A double of an accelerator's module: streams whose work is done late, in an order that a seed chooses, and memory that is poisoned
until its work is done.

Nothing runs when it is queued. Work runs when the host waits, and then in any order that streams and events allow: work of other streams
may come first. So what the code under test has not ordered happens in the wrong order for some seed, and what it reads without having
waited is poison. Tensors of the double say that they lie on "xpu:0", of which a machine for tests has none; their bytes are a CPU tensor's.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

DEVICE = torch.device("xpu", 0)
POISON = 0xA5
PATIENCE = 10.0  # seconds for another thread to queue what one waits for


@dataclass
class Event:
    """A place in a stream's queue."""

    accelerator: FakeAccelerator
    is_timed: bool = False
    is_over: bool = True  # one that was never recorded
    when: float = 0.0  # seconds; when it was over

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.accelerator.current_stream()
        self.is_over = False
        stream.put(self._end)

    def _end(self) -> None:
        self.is_over, self.when = True, time.monotonic()

    def elapsed_time(self, end_event: Event) -> float:
        assert self.is_timed, "as torch says it of an event without enable_timing"
        assert end_event.is_timed
        assert self.is_over, "as CUDA says it of an event that is not over"
        assert end_event.is_over
        return 1000 * (end_event.when - self.when)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.accelerator.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.accelerator.run_until(lambda: self.is_over)


@dataclass(eq=False)
class Stream:
    """Work in the order in which it was queued; an event in the queue holds back what stands behind it."""

    accelerator: FakeAccelerator
    queue: deque[Callable[[], None] | Event] = field(default_factory=deque)

    def put(self, work: Callable[[], None] | Event) -> None:
        with self.accelerator.condition:
            self.queue.append(work)
            self.accelerator.condition.notify_all()

    def wait_event(self, event: Event) -> None:
        self.put(event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.accelerator)
        event.record(self)
        return event

    def query(self) -> bool:
        return not self.queue

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeAccelerator:
    """What the package uses of `torch.cuda` and its like.

    Args:
        seed: chooses the order in which streams go on.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.condition = threading.Condition()
        self._held = False
        self.streams: list[Stream] = []
        self._local = threading.local()
        self._default = Stream(self)
        self.streams.append(self._default)
        self.Event = lambda enable_timing=False, **_: Event(self, enable_timing)
        self.Stream = self._new_stream

    # -- what torch's modules have

    def _new_stream(self, *_: Any, **__: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, _device: Any = None) -> Stream:
        found: Stream = getattr(self._local, "stream", self._default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def synchronize(self, _device: Any = None) -> None:
        for stream in list(self.streams):
            stream.synchronize()

    def set_device(self, _device: Any) -> None:
        pass

    def is_initialized(self) -> bool:
        return True

    # -- what a test does

    def tensor(self, given: torch.Tensor) -> Tensor:
        """A tensor of the device; its work is done on this accelerator's streams."""
        return Tensor(given.clone(), self)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The device does nothing meanwhile: who waits for it waits."""
        self._held = True
        try:
            yield
        finally:
            with self.condition:
                self._held = False
                self.condition.notify_all()

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let streams go on, in the seed's order, until the host has what it waits for."""
        with self.condition:
            assert self.condition.wait_for(lambda: not self._held, 60), "the test holds the device, and the code under test waits for it"
            for _ in range(self._random.randrange(3) * self._waiting()):  # the device has been at work for some time
                self._advance()
            while not is_over():
                if not self._advance():
                    assert self.condition.wait(PATIENCE), "the code under test waits for what nothing in the queues leads to"

    def _waiting(self) -> int:
        return sum(len(stream.queue) for stream in self.streams)

    def _advance(self) -> bool:
        """Whether anything could be done."""
        ready = [s for s in self.streams if s.queue and not (isinstance(s.queue[0], Event) and not s.queue[0].is_over)]
        if not ready:
            return False
        work = self._random.choice(ready).queue.popleft()
        if not isinstance(work, Event):
            work()
        return True


class Tensor(torch.Tensor):
    """Bytes of the fake device; every operation on them is put into the current stream."""

    elem: torch.Tensor
    accelerator: FakeAccelerator

    @staticmethod
    def __new__(cls, elem: torch.Tensor, _accelerator: FakeAccelerator) -> Tensor:
        made: Tensor = torch.Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype, device=DEVICE
        )
        return made

    def __init__(self, elem: torch.Tensor, accelerator: FakeAccelerator) -> None:
        self.elem, self.accelerator = elem, accelerator

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.elem!r} on {DEVICE}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            return args[0].elem.data_ptr()
        if func is torch.Tensor.__getitem__:  # which would ask torch for the real device
            start, stop, _ = args[1].indices(len(args[0]))
            return args[0].narrow(0, start, stop - start)
        if func is torch.Tensor.copy_ and isinstance(args[0], Tensor):  # likewise
            torch.autograd.graph.increment_version(args[0])
            return cls.__torch_dispatch__(torch.ops.aten.copy_.default, types, args, kwargs)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        every: list[Tensor] = []
        tree_map(lambda item: every.append(item) if isinstance(item, Tensor) else None, (args, kwargs))
        accelerator = every[0].accelerator
        plain_args, plain_kwargs = tree_map(lambda item: item.elem if isinstance(item, Tensor) else item, (args, kwargs))
        if plain_kwargs.get("device") == DEVICE:
            plain_kwargs["device"] = torch.device("cpu")
        schema, returns = func._schema, func._schema.returns
        stream = accelerator.current_stream()

        def run() -> Any:
            return func(*plain_args, **plain_kwargs)

        if schema.is_mutable:
            written = [item for item in _written(func, args, kwargs) if not isinstance(item, Tensor)]
            is_host_involved = any(
                isinstance(item, torch.Tensor) and item.dim() for item in _flat((args, kwargs)) if not isinstance(item, Tensor)
            )
            for item in written:
                _poison(item)
            stream.put(run)
            if is_host_involved and not _is_non_blocking(func, args, kwargs):
                stream.synchronize()
            return args[0] if returns else None
        if returns and all(each.alias_info is not None for each in returns):
            return tree_map(lambda item: Tensor(item, accelerator) if isinstance(item, torch.Tensor) else item, run())
        if kwargs.get("device", DEVICE).type == "cpu" or func is torch.ops.aten._local_scalar_dense.default:
            stream.synchronize()
            return run()
        shaped = run()
        outputs = [item for item in _flat(shaped) if isinstance(item, torch.Tensor)]
        if not outputs:
            stream.synchronize()
            return run()
        for item in outputs:
            _poison(item)

        def fill() -> None:
            for item, value in zip(outputs, (each for each in _flat(run()) if isinstance(each, torch.Tensor)), strict=True):
                item.copy_(value)

        stream.put(fill)
        return tree_map(lambda item: Tensor(item, accelerator) if isinstance(item, torch.Tensor) else item, shaped)


def _flat(given: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, given)
    return found


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    return _flat([value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write])


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return "non_blocking" in names[: len(args)] and bool(args[names.index("non_blocking")])


def _poison(tensor: torch.Tensor) -> None:
    if tensor.numel() and tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(POISON)


@contextlib.contextmanager
def installed(seed: int) -> Iterator[FakeAccelerator]:
    """A fake accelerator in the place of the real one."""
    from gemini_ft import accelerator

    fake = FakeAccelerator(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "module_of", lambda device: None if device.type == "cpu" else fake)
        patch.setattr(accelerator, "in_use", lambda: fake)
        patch.setattr(accelerator, "current_device", lambda: DEVICE)
        yield fake
