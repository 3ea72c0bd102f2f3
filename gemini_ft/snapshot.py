"""From live tensors into a slot, in the background, while the next forward and backward run.

Between two updates parameters and optimizer state are normally only read. "Normally" is checked: a tensor whose
version counter or address changed during the copy makes the snapshot worthless, and it is discarded by name.
What changes at other times (buffers, RNG, counters) is copied at once, before ``submit`` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import xxhash

from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.copyplan import CopyPlan, Slot, same_bytes
from gemini_ft.errors import AgentError, ConcurrentWriteError, GeminiError
from gemini_ft.messages import Chunk, Copied, GiveUp, Message, Request

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


class Snapshotter:
    """Copies snapshots into slots on a thread of its own, one at a time.

    Args:
        owner: this rank.
        tell: sends a message to the agent; raises AgentError when it is gone.
        lost: whether the agent is gone.
        recover: called on the thread when the agent is gone; brings a new one up, or raises GeminiError.
        on_discard: called with iteration and reason when a snapshot is given up.
        verify: compare each copy with the live state before the update, and declare it copied only then.
        waits: whether an update waits for a snapshot that is late; else the snapshot is given up.
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
        waits: bool,
        timeout: float,
    ) -> None:
        self._owner, self._tell, self._lost, self._recover, self._on_discard = owner, tell, lost, recover, on_discard
        self._verify, self._waits, self._timeout = verify, waits, timeout
        self.plan: CopyPlan | None = None
        self.slots: dict[int, Slot] = {}
        self._job: Job | None = None
        self._condition = threading.Condition()
        self._stop = False
        self._broken: Exception | None = None  # what ended the thread: a fault of ours
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="gemini-snapshot", daemon=True)
        self._thread.start()

    # -- the training thread

    def submit(self, job: Job) -> None:
        """Start one snapshot; the one before must be over (``settle``)."""
        assert self._job is None or self._job.state is JobState.DONE
        self._raise_broken()
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
        on_cuda = job.ready is not None and job.digest is None and not self._verify
        with self._condition:
            if job.state is JobState.WAITING and not self._waits:
                self._forget(job, "the snapshot before was still uncommitted at the next update")
                return
            self._wait(job, (JobState.ISSUED, JobState.DONE) if on_cuda else (JobState.DONE,))
        if on_cuda and job.copied is not None:
            torch.cuda.current_stream().wait_event(job.copied)
        else:
            self._finish(job)

    def settle(self) -> None:
        """Wait until no copy is under way (before layouts change, or the process ends)."""
        job = self._job
        if job is not None:
            with self._condition:
                self._wait(job, (JobState.DONE,))
            self._finish(job)

    def _wait(self, job: Job, enough: tuple[JobState, ...]) -> None:
        """Wait for the thread; a snapshot that has no slot after all this time is given up, and the job goes on.

        Raises:
            AgentError: the copy has begun, and does not end.
        """
        if self._condition.wait_for(lambda: job.state in enough, self._timeout):
            return
        text = f"it was not copied within {self._timeout:g} s"
        if job.state is not JobState.WAITING:
            raise AgentError(f"iteration {job.iteration}: {text}; is the agent stuck?")
        self._forget(job, text)

    def _forget(self, job: Job, reason: str) -> None:
        job.cancelled = reason
        self._job = None
        self._condition.notify_all()

    def _finish(self, job: Job) -> None:
        if self._verify and not job.cancelled and not job.finished:
            self._compare(job)
        self._raise_broken()

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

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
        if not self._thread.is_alive():
            for slot in self.slots.values():
                slot.close()
            self.slots = {}

    def _compare(self, job: Job) -> None:
        """Compare the copy with the live state; only then is it declared copied."""
        assert self.plan is not None
        assert job.slot is not None
        slot = self.slots[job.slot]
        if slot.view.nbytes and (different := [c.name for c in self.plan.background if not same_bytes(slot, c)]):
            text = f"iteration {job.iteration}: {', '.join(different[:5])} changed between the snapshot and the next update"
            self._discard(job, text)
            raise ConcurrentWriteError(f"{text}; write inside `with checkpointer.mutate():`")
        self._declare(job)

    # -- the snapshot thread

    def _run(self) -> None:
        yield_to_training()
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
            except Exception as error:
                self._broken = error  # for the training thread
                return
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
        step = self.plan.chunk_bytes
        for number, batch in enumerate(self.plan.batches):
            if events:
                events[number].synchronize()
            else:
                slot.write(number, batch)
            self._publish(job, number, slot, number * step, min(step, self.plan.nbytes - number * step))
        self._copy_extras(job, slot)

    def _queue_cuda_copies(self, job: Job, slot: Slot) -> list[Any]:
        """Queue every copy on a side stream, after the state is final; the events say when each batch has arrived."""
        assert self.plan is not None
        if self._stream is None:
            torch.cuda.set_device(self.plan.device)  # a thread begins on device 0, whatever the rank's is
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        events: list[Any] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            for number, batch in enumerate(self.plan.batches):
                slot.write(number, batch)
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
        try:
            self._recover()
            self._tell(GiveUp(iteration=job.iteration, reason="this host's agent was restarted"))
        except GeminiError as failure:
            self._on_discard(job.iteration, f"training goes on without snapshots: {failure}")
