"""A slot as the worker maps it, and the plan of the copies into it: made once, used for every snapshot."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby

import torch

from gemini_ft import accelerator
from gemini_ft.agent.memory.slot_memory import keep_from_children, populate, use_huge_pages
from gemini_ft.core.layout import ALIGNMENT, Layout
from gemini_ft.errors import MemoryBudgetError
from gemini_ft.state.copies import Copy, plan_copies
from gemini_ft.state.tensors import Source, version_of
from gemini_ft.wire.worker_messages import Reserved

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
Marks = tuple[list[int], list[int], bytes]  # version counters, addresses, some elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # as which elements of any type can be read, by their bytes
_SAMPLED = 8  # elements of a flat view, at most, by which a write shows that no counter does; of others the last one
LANDING = 64 * 2**20  # bytes that a device copies from one event to the next, at least: each event takes the interpreter lock
_LARGEST_CLONE = 2**20  # bytes; residuals are as large as the gradients, and the device's memory is the training's
_LARGE = 64 * 1024  # bytes; from here on a copy of its own, below it one call for many


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The copies that begin in one chunk: (offset in the slot, source)."""

    small: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # and all that are not plain memory
    large: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # contiguous CPU memory
    gathered: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # places in buffers of the device, and what goes there first


class MappedSlot:
    """A slot's data area, mapped; its pages are registered with the driver of ``device``, so that copies can run beside computation."""

    def __init__(self, fd: int, data_offset: int, capacity: int, device: torch.device | None = None) -> None:
        total = data_offset + max(1, capacity)
        self.fd = fd  # kept: a restarted agent gets it back
        self.memory = mmap.mmap(fd, total)
        use_huge_pages(self.memory, data_offset, capacity)
        keep_from_children(self.memory)
        self.view = memoryview(self.memory)[data_offset : data_offset + capacity]
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8) if capacity else torch.empty(0, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.is_closed = False
        self.key = _key(fd, data_offset, capacity)
        self._targets: dict[int, list[torch.Tensor]] = {}  # number of a batch -> where its small tensors go
        self._pinned_for = device if capacity and accelerator.pin(device, self.address, capacity) else None

    def prefault(self) -> None:
        """Touches all pages, from this process: they come from its own NUMA node, and not during the first copy."""
        populate(self.memory, len(self.memory), lambda: not self.is_closed)

    def write(self, number: int, batch: Batch) -> None:
        """Lays down one batch of a plan, always the same one; from an accelerator, queues that on the current stream."""
        if batch.gathered[0]:
            torch._foreach_copy_(*batch.gathered, non_blocking=True)
        if batch.small:
            if number not in self._targets:
                self._targets[number] = [self._target(offset, source) for offset, source in batch.small]
            torch._foreach_copy_(self._targets[number], [source for _, source in batch.small], non_blocking=True)
        for offset, source in batch.large:
            # torch would start a pool of threads of its own for a large copy, beside those that train
            _libc.memcpy(self.address + offset, source.data_ptr(), source.nbytes)

    def forget(self) -> None:
        """Forgets the plan: another one follows."""
        self._targets.clear()

    def _target(self, offset: int, source: torch.Tensor) -> torch.Tensor:
        return self.tensor[offset : offset + source.nbytes].view(source.dtype).view(source.shape)

    def close(self) -> None:
        self.is_closed = True
        try:
            if self._pinned_for is not None:
                accelerator.unpin(self._pinned_for, self.address)
        finally:
            os.close(self.fd)  # it alone would keep the memory; the mapping goes when the last tensor view of it does

    def rest(self) -> None:
        """Keeps the mapping, with its pages, for the process's next attempt (`map_slots`); nothing writes to it meanwhile."""
        self.is_closed = True
        self.forget()
        _resting[self.key] = self

    def wake(self) -> MappedSlot:
        self.is_closed = False
        return self


_inherited: list[MappedSlot] = []  # from the process that has forked this one
_resting: dict[tuple[int, ...], MappedSlot] = {}  # each holds its file, so that the kernel gives the number to no other one


def _key(fd: int, data_offset: int, capacity: int) -> tuple[int, ...]:
    """Returns the number of a slot's file, and the place and size of its data: the same for all mappings of one slot."""
    file = os.fstat(fd)
    return file.st_dev, file.st_ino, data_offset, capacity


def end_rest() -> None:
    """Closes what has been kept for an attempt that needs it no more."""
    for key in list(_resting):  # two threads may do this at a time
        if (slot := _resting.pop(key, None)) is not None:
            slot.close()


def _forget_files() -> None:
    """Closes the files that a forked child has got, which would keep the memory. It has none of the mappings."""
    files = {key[:2] for key in _resting}
    _inherited.extend(_resting.values())  # so that nothing unmaps them: something else may lie there
    _resting.clear()
    for fd in map(int, os.listdir("/proc/self/fd")) if files else ():  # `mmap` has a copy of each
        with contextlib.suppress(OSError):
            if (file := os.fstat(fd)) and (file.st_dev, file.st_ino) in files:
                os.close(fd)


os.register_at_fork(after_in_child=_forget_files)


def map_slots(fds: Sequence[int], reserved: Reserved, device: torch.device | None) -> list[MappedSlot]:
    """Maps all slots that the agent has handed over, or none; the descriptors are this function's.

    Slots that this process has mapped in an attempt before need no pages again: that costs three times as much as a copy into them.

    Raises MemoryBudgetError: the kernel, or the driver of the device, gives no memory for that.
    """
    mapped: list[MappedSlot] = []
    try:
        found = [_resting.pop(_key(fd, reserved.data_offset, reserved.capacity), None) for fd in fds]
        end_rest()  # the agent has given other slots in the place of the rest: their memory would stay, beside that of the new ones
        for fd, slot in zip(fds, found, strict=True):
            if slot is not None:
                mapped.append(slot.wake())
                os.close(fd)
            else:
                mapped.append(MappedSlot(fd, reserved.data_offset, reserved.capacity, device))
    except (OSError, RuntimeError) as error:
        for slot in mapped:
            slot.close()
        for fd in fds[len(mapped) :]:
            os.close(fd)
        what = f"{len(fds)} slots of {reserved.capacity:,} bytes"
        raise MemoryBudgetError(f"this worker cannot map {what} ({error}); see `ulimit -v`, `ulimit -l` and the control group's") from None
    return mapped


class CopyPlan:
    """The copies from live tensors into a slot; planned once per layout, used for every snapshot of it.

    There is one batch of copies per chunk, on a device one for several (``batch_bytes``). A copy that crosses the end of a batch belongs to
    the one in which it begins, so a chunk is whole when its own batch and all before it have been laid down.

    ``at_step``: copy everything at once when the step ends, into memory of this process; from there it goes to the slot.
    """

    def __init__(self, sources: Sequence[Source], layout: Layout, chunk_bytes: int, at_step: bool = False) -> None:
        self.sources = sources  # kept alive: their addresses are in the plan
        self.nbytes, self.chunk_bytes = layout.nbytes, chunk_bytes
        devices = {source.tensor.device for source in sources if accelerator.holds(source.tensor)}
        at_step = at_step or len(devices) > 1  # no queue has all of them
        self.device = None if at_step else next(iter(devices), None)
        self.batch_bytes = chunk_bytes if self.device is None else chunk_bytes * max(1, LANDING // chunk_bytes)
        copies = plan_copies(sources, layout, self.batch_bytes)
        self._all = copies
        self.background = [] if at_step else [copy for copy in copies if not copy.mutable]
        self._views = [copy.view for copy in self.background]
        self._counting = [view for view in self._views if not view.is_inference()]  # the others count no writes
        self._samples = _Samples(self._views if self.device is None else [])  # whoever reads those of a device waits for it
        self._mutable = copies if at_step else [copy for copy in copies if copy.mutable]
        # Small ones on their device, where a copy costs nothing: a copy to this process's memory waits for all that is queued there.
        self._staged = [
            torch.empty_like(copy.view, memory_format=torch.contiguous_format)
            if copy.nbytes <= _LARGEST_CLONE and not at_step
            else torch.empty_like(copy.view, device="cpu", memory_format=torch.contiguous_format)
            for copy in self._mutable
        ]
        staged = {id(copy): target for copy, target in zip(self._mutable, self._staged, strict=True)}
        moves = [(copy.offset, staged.get(id(copy), copy.view)) for copy in copies]
        self.batches = [_batch(moves, start, start + self.batch_bytes) for start in range(0, layout.nbytes, self.batch_bytes)]

    def marks(self) -> Marks:
        """Version counter and address of every tensor that is copied in the background.

        And some elements of each, unless one of them is on a device: reading that would wait for all that is queued there.
        """
        return [view._version for view in self._counting], list(map(torch.Tensor.data_ptr, self._views)), self._samples.take()

    def all_marks(self) -> dict[str, list[tuple[int, int]]]:
        """Name -> version counters and addresses, of every tensor that is captured."""
        found: dict[str, list[tuple[int, int]]] = {}
        for copy in self._all:
            found.setdefault(copy.name, []).append((version_of(copy.view), copy.view.data_ptr()))
        return found

    def stage(self) -> None:
        """Copies, at once, the tensors that may change before the next update; those of a device in the order of its current stream, which
        must have left the last snapshot's copies behind."""
        if self._staged:
            torch._foreach_copy_(self._staged, [copy.view for copy in self._mutable])

    def ready(self) -> accelerator.Event | None:
        """An event that comes after all that the training has queued until now; None where nothing is copied beside it."""
        return None if self.device is None else accelerator.event_on(accelerator.stream_of(self.device), self.device, timed=True)

    def changed(self, marks: Marks) -> list[str]:
        """Names of tensors that were written or moved since ``marks``."""
        if (now := self.marks()) == marks:
            return []
        moves = zip(self._counting + self._views, chain(*marks[:2]), chain(*now[:2]), strict=True)
        written = {id(view) for view, old, new in moves if old != new} | self._samples.differing(marks[2], now[2])
        return list(dict.fromkeys(copy.name for copy in self.background if id(copy.view) in written))


class _Samples:
    """Some elements of each of many views, by which most writes show that torch counts no version for: through ``.data``, or by numpy."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        found = [(id(view), sample) for view in views if (sample := _sample(view)) is not None]
        found.sort(key=lambda pair: pair[1].itemsize)
        self._groups = [[sample for _, sample in group] for _, group in groupby(found, key=lambda pair: pair[1].dtype)]
        self._ends = list(accumulate(sample.nbytes for _, sample in found))
        self._views = [view for view, _ in found]

    def take(self) -> bytes:
        """The elements, as they are now."""
        return b"".join(torch.cat(group).numpy().tobytes() for group in self._groups)

    def differing(self, then: bytes, now: bytes) -> set[int]:
        """The ids of the views of which elements differ between two results of `take`."""
        places = zip(self._views, [0, *self._ends], self._ends, strict=False)
        return {view for view, start, stop in places if then[start:stop] != now[start:stop]}


def _sample(view: torch.Tensor) -> torch.Tensor | None:
    """A view of a few elements, to be read as integers; None: they cannot be."""
    if view.itemsize not in _INTEGERS or view.is_conj() or view.is_neg() or view.is_quantized or view.layout is not torch.strided:
        return None
    last = view.detach()[(-1,) * view.ndim].reshape(1) if view.ndim != 1 else view.detach()[:: -(-view.numel() // _SAMPLED)]
    return last.view(_INTEGERS[view.itemsize])


def _batch(moves: Sequence[tuple[int, torch.Tensor]], start: int, stop: int) -> Batch:
    mine, gathered = _gather([(offset, source) for offset, source in moves if start <= offset < stop])
    is_large = [source.nbytes >= _LARGE and _is_plain_memory(source) for _, source in mine]
    parts: tuple[list[tuple[int, torch.Tensor]], ...] = ([], [])
    for move, large in zip(mine, is_large, strict=True):
        parts[large].append(move)
    return Batch(small=parts[False], large=parts[True], gathered=gathered)


def _gather(
    moves: Sequence[tuple[int, torch.Tensor]],
) -> tuple[list[tuple[int, torch.Tensor]], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Lets small neighbours on a device go through a buffer there: one copy over PCIe in place of one for each."""
    found, places, sources = list[tuple[int, torch.Tensor]](), list[torch.Tensor](), list[torch.Tensor]()
    for is_small, group in groupby(moves, key=lambda move: accelerator.holds(move[1]) and move[1].nbytes < _LARGE):
        run = list(group)
        if is_small and len(run) > 1:
            first, (last, source) = run[0][0], run[-1]
            pad = first % ALIGNMENT  # so that every piece is as aligned in the buffer as it is in the slot
            buffer = source.new_zeros(pad + last + source.nbytes - first, dtype=torch.uint8)[pad:]
            for offset, source in run:
                place = buffer[offset - first : offset - first + source.nbytes]
                places.append(place.view(source.dtype).view(source.shape))
                sources.append(source)
            run = [(first, buffer)]
        found += run
    return found, (places, sources)


def _is_plain_memory(source: torch.Tensor) -> bool:
    """Whether the bytes at its address are its values in order: a view may conjugate or negate what lies there."""
    return source.is_contiguous() and not accelerator.holds(source) and not source.is_conj() and not source.is_neg()


def same_bytes(slot: MappedSlot, copy: Copy) -> bool:
    """Whether the slot holds the live bytes; bytes, not values: NaN equals itself."""
    copied = slot.tensor[copy.offset : copy.offset + copy.nbytes]
    live = copy.view.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return bool(torch.equal(copied, live))
