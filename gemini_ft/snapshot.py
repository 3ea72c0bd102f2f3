"""From live tensors into a slot, in the background, while the next forward and backward run.

Between two updates parameters and optimizer state are normally only read. "Normally" is checked: a tensor whose
version counter or address changed during the copy makes the snapshot worthless, and it is discarded by name.
What changes at other times (buffers, RNG, counters) is copied at once, before ``submit`` returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import xxhash

from gemini_ft.agent.memory import keep_from_children, populate
from gemini_ft.copies import Copy, plan_copies
from gemini_ft.errors import AgentError, ConcurrentWriteError, GeminiError
from gemini_ft.layout import Layout
from gemini_ft.messages import Chunk, Copied, GiveUp, Message, Request
from gemini_ft.sources import Source

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_GRANT_POLL = 0.25  # seconds between looks at whether the agent still lives


class JobState(StrEnum):
    """How far one snapshot has come."""

    WAITING = "waiting"  # for a slot
    COPYING = "copying"
    ISSUED = "issued"  # CUDA: all copies are in the stream's queue
    DONE = "done"  # copied, or given up


@dataclass
class Job:
    """One snapshot on its way into its slot."""

    iteration: int
    extras: bytes
    digest: Callable[[], str] | None  # computes the digest of the replicated state, where one is due
    marks: list[tuple[int, int]]  # version counter and address of each source when the snapshot was taken
    ready: Any = None  # CUDA event: the state is final from here on
    copied: Any = None  # CUDA event: all copies have been made
    state: JobState = JobState.WAITING
    slot: int | None = None
    cancelled: str = ""
    finished: bool = False  # verify: nobody declares it copied before it was compared
    submitted: float = field(default_factory=time.perf_counter)


class Slot:
    """A slot's data area, mapped; on CUDA its pages are registered, so that copies can run beside computation."""

    def __init__(self, fd: int, data_offset: int, capacity: int, pinned: bool) -> None:
        total = data_offset + max(1, capacity)
        self.fd = fd  # kept: a restarted agent gets it back
        self.memory = mmap.mmap(fd, total)
        keep_from_children(self.memory)
        self.view = memoryview(self.memory)[data_offset : data_offset + capacity]
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8) if capacity else torch.empty(0, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self._pinned = pinned
        if pinned and capacity:
            torch.cuda.check_error(_cudart().cudaHostRegister(self.address, capacity, _PORTABLE))

    def prefault(self) -> None:
        """Touch all pages now, from this process: they come from its own NUMA node, and not during the first copy."""
        populate(self.memory, 0, len(self.memory))

    def close(self) -> None:
        if self._pinned and self.address:
            _cudart().cudaHostUnregister(self.address)
        # The mapping goes when the last tensor view of it does.


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CopyPlan:
    """Which bytes go where; made once per layout, used for every snapshot of it.

    Copies are made in the order of their place in the slot, so a chunk is whole as soon as they have passed its end.
    """

    def __init__(self, sources: Sequence[Source], layout: Layout, chunk_bytes: int) -> None:
        self.sources = sources  # kept alive: their addresses are in the plan
        self.nbytes, self.chunk_bytes = layout.nbytes, chunk_bytes
        copies = plan_copies(sources, layout, chunk_bytes)
        self.device = next((copy.view.device for copy in copies if copy.view.is_cuda), None)
        self.background = [copy for copy in copies if not copy.mutable]
        self._mutable = [copy for copy in copies if copy.mutable]
        self._staged = [torch.empty_like(copy.view, device="cpu", memory_format=torch.contiguous_format) for copy in self._mutable]
        staged = {id(copy): target for copy, target in zip(self._mutable, self._staged, strict=True)}
        self.moves = [(copy.offset, staged.get(id(copy), copy.view)) for copy in copies]

    @property
    def on_cuda(self) -> bool:
        return self.device is not None

    def marks(self) -> list[tuple[int, int]]:
        """Version counter and address of every tensor that is copied in the background."""
        return [(_version(copy.view), copy.view.data_ptr()) for copy in self.background]

    def stage(self) -> None:
        """Copy what may change before the next update."""
        for copy, target in zip(self._mutable, self._staged, strict=True):
            target.copy_(copy.view)

    def changed(self, marks: list[tuple[int, int]]) -> list[str]:
        """Names of tensors that were written or moved since ``marks``."""
        names = (copy.name for copy, before, now in zip(self.background, marks, self.marks(), strict=True) if before != now)
        return list(dict.fromkeys(names))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Snapshotter:
    """Copies snapshots into slots on a thread of its own, one at a time.

    Args:
        owner: this rank.
        tell: sends a message to the agent; raises AgentError when it is gone.
        lost: whether the agent is gone.
        recover: called on the thread when the agent is gone; brings a new one up, or raises GeminiError.
        on_discard: called with iteration and reason when a snapshot is given up.
        verify: compare each copy with the live state before the update, and declare it copied only then.
        on_late: ``skip`` or ``wait``, see GeminiConfig.
        timeout: seconds a wait may take.
    """

    def __init__(
        self,
        owner: int,
        tell: Callable[[Message], None],
        lost: Callable[[], bool],
        recover: Callable[[], None],
        on_discard: Callable[[int, str], None],
        verify: bool,
        on_late: str,
        timeout: float,
    ) -> None:
        self._owner, self._tell, self._lost, self._recover, self._on_discard = owner, tell, lost, recover, on_discard
        self._verify, self._on_late, self._timeout = verify, on_late, timeout
        self.plan: CopyPlan | None = None
        self.slots: dict[int, Slot] = {}
        self._job: Job | None = None
        self._condition = threading.Condition()
        self._stop = False
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="gemini-snapshot", daemon=True)
        self._thread.start()

    # -- the training thread

    def submit(self, job: Job) -> None:
        """Start one snapshot; the one before must be over (``settle``)."""
        assert self._job is None or self._job.state is JobState.DONE
        with self._condition:
            self._job = job
            self._condition.notify_all()

    def before_update(self) -> None:
        """The training thread is about to write: wait for the copy, or give it up when it could not begin.

        Raises:
            ConcurrentWriteError: ``verify`` found a difference.
        """
        job = self._job
        if job is None:
            return
        with self._condition:
            if job.state is JobState.WAITING and self._on_late == "skip":
                job.cancelled = "the snapshot before was still uncommitted at the next update"
                self._condition.notify_all()
                self._job = None
                return
            on_cuda = job.ready is not None and job.digest is None and not self._verify
            enough = (JobState.ISSUED, JobState.DONE) if on_cuda else (JobState.DONE,)
            if not self._condition.wait_for(lambda: job.state in enough, self._timeout):
                job.cancelled = f"it was not copied within {self._timeout:g} s"
                raise AgentError(
                    f"iteration {job.iteration} was not copied within {self._timeout:g} s (state {job.state}); is the agent stuck?"
                )
        if on_cuda and job.copied is not None:
            torch.cuda.current_stream().wait_event(job.copied)
            return
        if self._verify and not job.cancelled:
            self._compare(job)

    def settle(self) -> None:
        """Wait until no copy is under way (before layouts change, or the process ends)."""
        job = self._job
        if job is not None:
            with self._condition:
                if not self._condition.wait_for(lambda: job.state is JobState.DONE, self._timeout):
                    job.cancelled = "it took too long"
                    self._condition.notify_all()
            if self._verify and not job.cancelled and not job.finished:
                self._compare(job)

    def granted(self, iteration: int, slot: int) -> None:
        """From the agent."""
        with self._condition:
            if self._job is not None and self._job.iteration == iteration:
                self._job.slot = slot
                self._condition.notify_all()

    def aborted(self, iteration: int) -> None:
        """From the agent: another rank has no snapshot of this iteration."""
        with self._condition:
            if self._job is not None and self._job.iteration == iteration and self._job.state is JobState.WAITING:
                self._job.cancelled = "aborted"
                self._condition.notify_all()

    def stop(self) -> None:
        with self._condition:
            self._stop = True
            self._condition.notify_all()
        self._thread.join(timeout=5)

    def _compare(self, job: Job) -> None:
        """Compare the copy with the live state; only then is it declared copied."""
        assert self.plan is not None
        assert job.slot is not None
        slot = self.slots[job.slot]
        if slot.view.nbytes and (different := [c.name for c in self.plan.background if not _same(slot, c)]):
            text = f"iteration {job.iteration}: {', '.join(different[:5])} changed between the snapshot and the next update"
            self._discard(job, text)
            raise ConcurrentWriteError(f"{text}; write inside `with checkpointer.mutate():`")
        self._declare(job)

    # -- the snapshot thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stop or (self._job is not None and self._job.state is JobState.WAITING))
                if self._stop:
                    return
                job = self._job
            assert job is not None
            try:
                self._take(job)
            except GeminiError as error:
                self._fail(job, error)
            finally:
                with self._condition:
                    job.state = JobState.DONE
                    self._condition.notify_all()

    def _take(self, job: Job) -> None:
        self._tell(Request(iteration=job.iteration))
        with self._condition:
            while not self._condition.wait_for(lambda: job.slot is not None or job.cancelled or self._stop, _GRANT_POLL):
                if self._lost():
                    raise AgentError("the agent ended")
            if job.cancelled or self._stop or job.slot is None:
                if job.cancelled != "aborted":
                    self._discard(job, job.cancelled or "the process ends")
                return
            job.state = JobState.COPYING
        self._copy(job, self.slots[job.slot])
        assert self.plan is not None
        if changed := self.plan.changed(job.marks):
            shown = ", ".join(changed[:5])
            self._discard(job, f"{shown} written during the copy (write inside `with checkpointer.mutate():`)")
        elif not self._verify:
            self._declare(job)

    def _copy(self, job: Job, slot: Slot) -> None:
        assert self.plan is not None
        events = self._queue_cuda_copies(job, slot) if self.plan.on_cuda else []
        published = 0
        for number, (offset, source) in enumerate(self.plan.moves):
            if events:
                events[number].synchronize()
            else:
                _move(slot, offset, source)
            published = self._publish_until(job, slot, published, offset + source.nbytes)
        self._publish_until(job, slot, published, self.plan.nbytes, last=True)
        self._copy_extras(job, slot)

    def _publish_until(self, job: Job, slot: Slot, published: int, done: int, last: bool = False) -> int:
        """Announce every chunk that ends before ``done``; returns how many have been announced."""
        assert self.plan is not None
        step = self.plan.chunk_bytes
        while (published + 1) * step <= done or (last and published * step < done):
            start = published * step
            self._publish(job, published, slot, start, min(step, self.plan.nbytes - start))
            published += 1
        return published

    def _queue_cuda_copies(self, job: Job, slot: Slot) -> list[Any]:
        """Queue every copy on a side stream, after the state is final; the events say when each has arrived."""
        assert self.plan is not None
        if self._stream is None:
            torch.cuda.set_device(self.plan.device)  # a thread begins on device 0, whatever the rank's is
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        events: list[Any] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            for offset, source in self.plan.moves:
                _move(slot, offset, source)
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record(self._stream)
            job.copied = events[-1]
        with self._condition:
            job.state = JobState.ISSUED
            self._condition.notify_all()
        return events

    def _copy_extras(self, job: Job, slot: Slot) -> None:
        assert self.plan is not None
        start, step = self.plan.nbytes, self.plan.chunk_bytes
        slot.view[start : start + len(job.extras)] = job.extras
        chunks = -(-start // step)
        for number, offset in enumerate(range(start, start + len(job.extras), step)):
            self._publish(job, chunks + number, slot, offset, min(step, start + len(job.extras) - offset))

    def _publish(self, job: Job, index: int, slot: Slot, offset: int, nbytes: int) -> None:
        digest = xxhash.xxh3_64_intdigest(slot.view[offset : offset + nbytes])
        self._tell(Chunk(owner=self._owner, iteration=job.iteration, index=index, offset=offset, nbytes=nbytes, digest=digest))

    def _declare(self, job: Job) -> None:
        job.finished = True
        digest = job.digest() if job.digest is not None else ""
        self._tell(Copied(iteration=job.iteration, extras_bytes=len(job.extras), digest=digest))

    def _discard(self, job: Job, reason: str) -> None:
        job.cancelled = job.cancelled or reason
        job.finished = True
        self._on_discard(job.iteration, reason)
        self._tell(GiveUp(iteration=job.iteration, reason=reason))

    def _fail(self, job: Job, error: GeminiError) -> None:
        """The agent went away in the middle: bring it back, and tell it that this one is lost."""
        job.cancelled = str(error)
        self._on_discard(job.iteration, str(error))
        with contextlib.suppress(GeminiError):
            self._recover()
            self._tell(GiveUp(iteration=job.iteration, reason="this host's agent was restarted"))


def _move(slot: Slot, offset: int, source: torch.Tensor) -> None:
    if source.is_cuda or not source.is_contiguous():
        target = slot.tensor[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=source.is_cuda)
    else:
        # torch would start a pool of threads of its own for a large copy, beside those that train
        _libc.memcpy(slot.address + offset, source.data_ptr(), source.nbytes)


def _same(slot: Slot, copy: Copy) -> bool:
    copied = slot.tensor[copy.offset : copy.offset + copy.nbytes]
    live = copy.view.cpu().contiguous().view(-1).view(torch.uint8)  # bytes, not values: NaN equals itself
    return bool(torch.equal(copied, live))
