"""Copies live tensors into a slot, in the background, while the next forward and backward run.

Between two updates parameters and optimizer state are normally only read. "Normally" is checked: a tensor whose
version counter, address or sampled elements changed during the copy makes the snapshot worthless, and it is discarded by name.
State that changes at other times (buffers, RNG, counters) is copied at once, before ``submit`` returns.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from gemini_ft import accelerator
from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.core.diligence import Diligence
from gemini_ft.core.roots import checksum
from gemini_ft.errors import AgentError, ConcurrentWriteError, GeminiError
from gemini_ft.state.copy_plan import CopyPlan, MappedSlot, Marks, same_bytes
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.worker_messages import ENDING, LATE, WRITTEN, Copied, GiveUp, HoldsBack, Landed, Request
from gemini_ft.worker.attempt import leave_if_over
from gemini_ft.worker.copy_window import CopyWindow

_GRANT_POLL = 0.25  # seconds between looks at whether the agent still lives
_GLANCE = 0.1  # seconds between looks for the end of the attempt
_RETRY = 20.0  # seconds between attempts to start another
_UNSEEN = 8  # snapshots
_LOOK = 0.001  # seconds between looks at how far the device has come
PER_EVENT = 6  # batches of a device that end with an event for the host: whoever wakes takes the interpreter lock from the training
_END_SECONDS = 5.0  # that a copy under way has left when the process ends, and again that its last chunk and the digest may take


class SnapshotState(StrEnum):
    """The progress of one snapshot."""

    WAITING = "waiting"  # for a slot
    COPYING = "copying"
    ISSUED = "issued"  # from an accelerator: all copies are in the stream's queue
    DONE = "done"  # copied, or given up


@dataclass(kw_only=True)
class PendingSnapshot:
    """A snapshot on its way into its slot.

    Attributes:
        ready: the device's event that the state is final from here on; None: nothing is copied beside the training's own queue.
        begun, copied: the device's events around all copies, once they are queued.
    """

    iteration: int  # what it is a snapshot of
    extras: bytes  # the encoded small state
    digest: Callable[[], str] | None  # gives the digest of the replicated state, where one is due
    marks: Marks  # of the sources when the snapshot was taken; see `CopyPlan.marks`
    ready: accelerator.Event | None
    begun: accelerator.Event | None = None
    copied: accelerator.Event | None = None
    reached: accelerator.Event | None = None  # the device's event that the next update was due; None: not yet asked for
    written: list[str] | None = None  # names of what was written since, at the latest when the update was let through; None: not asked yet
    state: SnapshotState = SnapshotState.WAITING
    is_awaited: bool = False  # a caller waits for it, and no update is held back by that
    is_seen: bool = False  # by the snapshot thread, which tells the agent of it
    slot: int | None = None
    cancelled: str = ""  # why there will be no snapshot
    checksums: list[int] = field(default_factory=list)  # of the chunks in the slot that this process has formed
    is_checked: bool = False  # it is compared with the live state before the next update, and declared copied only then
    finished: bool = False  # it is declared, or given up
    held: list[tuple[float, float]] = field(default_factory=list)  # of the steps before it, see `Request`


class Snapshotter:
    """Copies snapshots into slots on a thread of its own, one at a time.

    On a device a snapshot may be submitted while the one before is still being copied: its copies are in the device's queue then, and both
    the update between the two and the next copies stand behind them.

    ``on_compare``: called before a copy that is compared is declared: the last commit cannot be overwritten before.
    """

    def __init__(
        self,
        owner: int,
        *,
        root: Callable[[PendingSnapshot], str],  # forms the root of a copy that is whole
        client: Callable[[], AgentClient],  # the connection to the present agent
        recover: Callable[[], None],  # called on the thread when the agent is gone; brings a new one up, or raises GeminiError
        on_discard: Callable[[int, str], None],  # called with iteration and reason when a snapshot is given up
        raises: bool,  # a difference from the live state is an error at once; else it is noted in ``differing``
        on_compare: Callable[[], None] = lambda: None,
        waits: bool,  # whether an update waits for a snapshot that is late; else the snapshot is given up
        timeout: float,
        diligence: Diligence,  # by which the agent is judged: its requests and answers are noted there
        grant_timeout: float | None = None,  # seconds an update waits for a slot
    ) -> None:
        self._client, self._diligence = client, diligence
        self._grant_timeout = timeout if grant_timeout is None else min(timeout, grant_timeout)
        self._owner, self._root, self._recover, self._on_discard = owner, root, recover, on_discard
        self._raises, self._on_compare, self._waits, self._timeout = raises, on_compare, waits, timeout
        self.plan: CopyPlan | None = None
        self.slots: dict[int, MappedSlot] = {}
        self.newest: int | None = None  # iteration of the newest snapshot that the thread has taken up
        self.differing: list[str] = []  # names of the tensors that had other bytes than the copy, or than when it was begun
        self.written: list[str] = []  # names of the tensors whose writes made the last copy be given up
        self._job: PendingSnapshot | None = None  # the newest one
        self._at_hand: PendingSnapshot | None = None  # the one that the thread is at, or was at last
        self._window = CopyWindow()
        self._holds_back = False  # copies have been too long to be made beside each step
        # Given up before the thread came to them; all the same the agent hears of each. While an agent is being replaced training goes on,
        # and older ones may be forgotten: what an owner says of a later iteration ends the earlier ones (gemini_ft.core.ledger).
        self._unseen: deque[PendingSnapshot] = deque(maxlen=_UNSEEN)
        self._condition = threading.Condition()
        self._stop_by = math.inf  # when a copy under way is given up; finite: the thread is to end
        self._next_try = 0.0  # when the agent may be brought back, after this has failed
        self._impatient = False  # a slot did not come in time: none is waited for until one is granted
        self._broken: Exception | None = None  # the error that ended the thread: a fault of ours
        self._stream: accelerator.DeviceStream | None = None
        self._thread = threading.Thread(target=self._run, name="gemini-snapshot", daemon=True)
        self._thread.start()

    # -- the training thread

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot waits for its slot, or is being copied."""
        job = self._job
        return job is not None and job.state is not SnapshotState.DONE

    def submit(self, job: PendingSnapshot) -> None:
        """Starts one snapshot; the one before must be out of the way (``make_way``)."""
        assert self._job is None or self._job.state in (SnapshotState.ISSUED, SnapshotState.DONE)
        self._raise_broken()
        with self._condition:
            self._job = job
            self._condition.notify_all()

    def leave_out(self, iteration: int) -> None:
        """Leaves out a snapshot that would wait for another agent; that one hears of it."""
        job = PendingSnapshot(
            iteration=iteration, extras=b"", digest=None, marks=([], [], b""), ready=None, cancelled="this host's agent is being replaced"
        )
        with self._condition:
            self._unseen.append(job)
            self._condition.notify_all()

    def before_update(self) -> None:
        """Waits for the copy, as the training thread is about to write; gives it up when it could not begin.

        Raises ConcurrentWriteError: there is a difference, and it ``raises``.
        """
        job = self._job
        if job is None:
            return
        device = self._device_beside(job)
        if device is not None and job.reached is None:
            job.reached = accelerator.event_on(accelerator.stream_of(device), device, timed=True)
        with self._condition:
            if job.state is SnapshotState.WAITING and not self._is_worth_waiting(job):
                self._forget(job, LATE)
                return
        self._let_write(job)

    def make_way(self) -> None:
        """Waits until the next snapshot may be staged and submitted: until the last one's copies are queued on the device, or made."""
        if self._job is not None:
            self._let_write(self._job)

    def settle(self) -> None:
        """Waits until no copy is under way (before layouts change, or the process ends)."""
        self.await_newest()
        newest = self._job
        for job in (self._at_hand, newest):
            if job is not None:
                with self._condition:
                    self._wait(job, (SnapshotState.DONE,))
        if newest is not None:
            self._finish(newest)

    def await_newest(self) -> None:
        """Lets the newest snapshot be copied even if its slot comes late: no update follows."""
        if self._job is not None:
            self._job.is_awaited = True

    def _let_write(self, job: PendingSnapshot) -> None:
        """Lets the training write what the snapshot has: on a device behind the copies in its queue, else when they have been made."""
        device = self._device_beside(job)
        with self._condition:
            self._wait(job, (SnapshotState.DONE,) if device is None else (SnapshotState.ISSUED, SnapshotState.DONE))
            if job.copied is not None:
                self._judge(job)
        if device is not None and job.copied is not None:
            accelerator.stream_of(device).wait_event(job.copied)
        self._finish(job)

    def _device_beside(self, job: PendingSnapshot) -> torch.device | None:
        """The device whose queue keeps a snapshot and the update apart; None: the host does, which has to see the copy made."""
        if job.ready is None or job.is_checked:
            return None
        assert self.plan is not None
        return self.plan.device

    def _is_worth_waiting(self, job: PendingSnapshot) -> bool:
        """Whether to let the update wait for a slot; called with the condition held.

        Where the host is ahead of the device, it waits as long as the device has work before the update: that costs nothing.
        """
        if self._waits or job.is_checked or job.reached is None:
            return (self._waits or job.is_checked) and not self._impatient
        while job.state is SnapshotState.WAITING and not job.reached.query():
            self._condition.wait(_LOOK)
        return job.state is not SnapshotState.WAITING

    def _wait(self, job: PendingSnapshot, enough: tuple[SnapshotState, ...]) -> None:
        """Waits for the thread; a snapshot that has no slot after all this time is given up, and the job goes on.

        Raises AgentError: the copy has begun, and does not end.
        """
        if not self._comes_to(job, (SnapshotState.COPYING, SnapshotState.ISSUED, SnapshotState.DONE), self._grant_timeout):
            self._impatient = True
            self._forget(job, f"no slot became free for it within {self._grant_timeout:g} s")
        elif not self._comes_to(job, enough, self._timeout):
            raise AgentError(f"iteration {job.iteration}: it was not copied within {self._timeout:g} s; is the agent stuck?")

    def _comes_to(self, job: PendingSnapshot, states: tuple[SnapshotState, ...], seconds: float) -> bool:
        """Waits, with the condition held. A device that has yet to come to the state itself costs no patience."""
        end = time.monotonic() + seconds
        while not self._condition.wait_for(lambda: job.state in states, min(_GLANCE, seconds)):
            leave_if_over()
            if time.monotonic() >= end:
                if job.ready is None or job.ready.query():
                    return False
                end += seconds
        return True

    def _forget(self, job: PendingSnapshot, reason: str) -> None:
        job.cancelled = reason
        if self._job is job:
            self._job = None
        if not job.is_seen:
            self._unseen.append(job)
        self._condition.notify_all()

    def _judge(self, job: PendingSnapshot) -> list[str]:
        """Names the tensors that were written since the snapshot. Looks once: an update counts from the moment it is queued, and a device
        may make it long after, in order behind the copy."""
        assert self.plan is not None
        if job.written is None:
            job.written = self.plan.changed(job.marks)
            self.written = job.written or self.written
        return job.written

    def _finish(self, job: PendingSnapshot) -> None:
        if job.is_checked and not job.cancelled and not job.finished:
            self._compare(job)
        self._raise_broken()

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def answered(self) -> None:
        """Records that the agent has answered a request, even if only to say that no slot is free yet."""
        self._diligence.answered()

    def granted(self, iteration: int, slot: int) -> None:
        self.answered()
        with self._condition:
            self._impatient = False
            if self._job is not None and self._job.iteration == iteration:
                self._job.slot = slot
                self._condition.notify_all()

    def aborted(self, iteration: int) -> None:
        """Takes the agent's word that another rank has no snapshot of this iteration."""
        self.answered()
        with self._condition:
            if self._job is not None and self._job.iteration == iteration and self._job.state is SnapshotState.WAITING:
                self._job.cancelled = "aborted"
                self._condition.notify_all()

    def stop(self, *, goes_on: bool = False) -> None:
        """Ends the thread; a copy under way has a few seconds left. ``goes_on``: this process will need the same slots again."""
        with self._condition:
            self._stop_by = time.monotonic() + _END_SECONDS
            self._condition.notify_all()
        self._thread.join(timeout=2 * _END_SECONDS)
        if not self._thread.is_alive():
            for slot in self.slots.values():
                if goes_on and self.plan is not None and self.plan.device is None:
                    slot.rest()
                else:
                    slot.close()
            self.slots = {}

    def _compare(self, job: PendingSnapshot) -> None:
        """Compares the copy with the live state; only then is it declared copied."""
        assert self.plan is not None
        assert job.slot is not None
        slot, step = self.slots[job.slot], self.plan.chunk_bytes
        if job.ready is not None:  # formed before the comparison, so that those of the agent are of what has been compared, or differ
            starts = range(0, self.plan.nbytes, step)
            job.checksums[:0] = [checksum(slot.view[start : min(start + step, self.plan.nbytes)]) for start in starts]
        self._on_compare()
        different = self.differing or [c.name for c in self.plan.background if slot.view.nbytes and not same_bytes(slot, c)]
        if different:
            text = f"iteration {job.iteration}: {', '.join(different[:5])} changed between the snapshot and the next update"
            self._discard(job, text)
            if self._raises:
                raise ConcurrentWriteError(f"{text}; write inside `with checkpointer.mutate():`")
            self.differing = different
            return
        self._declare(job)

    # -- the snapshot thread

    def _run(self) -> None:
        yield_to_training()
        while True:
            with self._condition:
                due = self._condition.wait_for(lambda: self._stop or self._has_work, _GRANT_POLL)
                if self._stop:
                    return
                job = self._unseen.popleft() if self._unseen else self._job
                if job is not None:
                    job.is_seen, self._at_hand = True, job
            if not due:
                if self._client().lost and self.slots:  # the other hosts cannot commit without it
                    with contextlib.suppress(GeminiError):
                        self._bring_back()
                continue
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
                    job.state = SnapshotState.DONE
                    self._condition.notify_all()

    @property
    def _stop(self) -> bool:
        return self._stop_by < math.inf

    @property
    def _has_work(self) -> bool:
        return bool(self._unseen) or (self._job is not None and self._job.state is SnapshotState.WAITING)

    def _bring_back(self) -> None:
        """Revives the agent; where that fails it takes its time, and training shall not wait for it at every step.

        A copy that ends only after the worker has left the run brings no agent back, which nobody would use or end.
        """
        if self._stop or time.monotonic() < self._next_try:
            raise AgentError("this host has no agent; another try to start one follows")
        self._next_try = time.monotonic() + _RETRY
        self._recover()
        self._next_try = 0.0

    def _say_what_copies_need(self) -> None:
        """Tells the agent with each snapshot how many steps apart they must be; a lower figure counts only after several of them."""
        steps, why = self._window.need
        if not self._waits and (steps > 1 or self._holds_back):
            self._client().tell(HoldsBack(steps=steps, why=why))
        self._holds_back |= steps > 1

    def _take(self, job: PendingSnapshot) -> None:
        self._window.follow(job)
        self._say_what_copies_need()
        self.newest = job.iteration
        self._diligence.asked(time.monotonic())
        self._client().tell(Request(iteration=job.iteration, held=job.held))
        while not self._has_answer(job):
            self._look(job)
            self._give_up_if_late(job)
        self._give_up_if_late(job)
        if job.slot is None:
            self._look(job)
        with self._condition:
            if job.cancelled or self._stop or job.slot is None:
                if job.cancelled != "aborted":
                    self._discard(job, job.cancelled or ENDING)
                return
            job.state = SnapshotState.COPYING
        if job.slot not in self.slots:
            # The answer that says where it lies was lost. Unless this one is given up, the agent waits for it and grants no other.
            self._discard(job, f"the agent granted slot {job.slot}, which this worker does not map; asking for its slots anew")
            self._recover()
            return
        if not self._copy(job, self.slots[job.slot]):
            self._discard(job, ENDING)
            return
        assert self.plan is not None
        with self._condition:
            changed = self._judge(job)
        if changed:
            self._discard(job, f"{', '.join(changed[:5])} {WRITTEN}")
        elif not job.is_checked:
            self._declare(job)

    def _look(self, job: PendingSnapshot) -> None:
        """Looks whether the agent lives, and works. Raises AgentError: it does not."""
        self._client().judge(self._diligence)
        if self._client().lost:
            raise AgentError("the agent ended")

    def _has_answer(self, job: PendingSnapshot) -> bool:
        """Whether the snapshot has its slot, or will have none; waits a little for that."""
        seconds = _GRANT_POLL if job.ready is None or self._waits else _LOOK
        with self._condition:
            return self._condition.wait_for(lambda: job.slot is not None or bool(job.cancelled) or self._stop, seconds)

    def _give_up_if_late(self, job: PendingSnapshot) -> None:
        """Gives up a snapshot whose copy, begun now, would make the update wait, by what the last ones took (`CopyWindow`)."""
        if job.ready is None or self._waits or job.is_awaited or job.cancelled:
            return
        device, stream = self._queue()
        if not job.ready.query():
            return
        now = accelerator.event_on(stream, device, timed=True)
        now.synchronize()
        if self._window.is_too_late(job.ready.elapsed_time(now)):
            with self._condition:
                job.cancelled = job.cancelled or LATE

    def _queue(self) -> tuple[torch.device, accelerator.DeviceStream]:
        """The plan's device, and this thread's own stream there."""
        assert self.plan is not None
        assert self.plan.device is not None
        if self._stream is None:
            self._stream = accelerator.own_stream(self.plan.device)
        return self.plan.device, self._stream

    def _copy(self, job: PendingSnapshot, slot: MappedSlot) -> bool:
        """Whether the copy is whole: not, if it takes longer than the process has left."""
        assert self.plan is not None
        if not (self._copy_from_device(job, slot) if job.ready is not None else self._copy_from_host(job, slot)):
            return False
        self._copy_extras(job, slot)
        return True

    def _copy_from_host(self, job: PendingSnapshot, slot: MappedSlot) -> bool:
        assert self.plan is not None
        step = self.plan.chunk_bytes
        for number, batch in enumerate(self.plan.batches):
            slot.write(number, batch)
            self._publish(job, number, slot, number * step, min(step, self.plan.nbytes - number * step))
            if time.monotonic() > self._stop_by:
                return False
        return True

    def _copy_from_device(self, job: PendingSnapshot, slot: MappedSlot) -> bool:
        """Queues the copies on a side stream, after the state is final, and tells the agent how far they have come.

        All are queued at once, so that no update waits for the host. The agent forms the checksums: hashing here would take this process's
        interpreter lock.
        """
        assert self.plan is not None
        assert job.ready is not None
        device, stream = self._queue()
        self._window.begin()
        stream.wait_event(job.ready)
        job.begun = accelerator.event_on(stream, device, timed=True)
        landings: list[tuple[int, accelerator.Event]] = []
        for number, batch in enumerate(self.plan.batches, start=1):
            with accelerator.on_stream(stream, device):
                slot.write(number - 1, batch)
            accelerator.give_way(stream, device)
            if number % PER_EVENT == 0 or number == len(self.plan.batches):
                upto = min(number * self.plan.batch_bytes, self.plan.nbytes)
                landings.append((upto, accelerator.event_on(stream, device, sleeps=True)))
        job.copied = accelerator.event_on(stream, device, timed=True)
        with self._condition:
            job.state = SnapshotState.ISSUED
            self._condition.notify_all()
        for upto, event in landings:
            event.synchronize()
            self._client().tell(Landed(iteration=job.iteration, upto=upto))
        return True

    def _copy_extras(self, job: PendingSnapshot, slot: MappedSlot) -> None:
        assert self.plan is not None
        start, step = self.plan.nbytes, self.plan.chunk_bytes
        slot.view[start : start + len(job.extras)] = job.extras
        chunks = -(-start // step)
        for number, offset in enumerate(range(start, start + len(job.extras), step)):
            self._publish(job, chunks + number, slot, offset, min(step, start + len(job.extras) - offset))

    def _publish(self, job: PendingSnapshot, index: int, slot: MappedSlot, offset: int, nbytes: int) -> None:
        digest = checksum(slot.view[offset : offset + nbytes])
        job.checksums.append(digest)
        self._client().tell(Chunk(owner=self._owner, iteration=job.iteration, index=index, offset=offset, nbytes=nbytes, digest=digest))

    def _declare(self, job: PendingSnapshot) -> None:
        job.finished = True
        digest = self._digest(job) if job.digest is not None else ""
        root = self._root(job) if job.ready is None or job.is_checked else ""  # else the agent alone forms it
        self._client().tell(Copied(iteration=job.iteration, extras_bytes=len(job.extras), digest=digest, root=root))

    def _digest(self, job: PendingSnapshot) -> str:
        assert job.digest is not None
        if job.ready is None:
            return job.digest()
        device, queue = self._queue()
        with accelerator.on_stream(queue, device):  # in the training's it would stand behind the next pass
            return job.digest()

    def _discard(self, job: PendingSnapshot, reason: str) -> None:
        job.cancelled = job.cancelled or reason
        job.finished = True
        self._on_discard(job.iteration, reason)
        self._client().tell(GiveUp(iteration=job.iteration, reason=reason))

    def _fail(self, job: PendingSnapshot, error: GeminiError) -> None:
        """Revives an agent that went away in the middle, and tells it that this snapshot is lost."""
        job.cancelled = str(error)
        self._on_discard(job.iteration, str(error))
        if self._stream is not None:
            self._stream.synchronize()  # copies that are given up need their slots, which go when there is another agent, or none
        with self._condition:
            job.state = SnapshotState.DONE  # the update need not wait for another agent
            self._condition.notify_all()
        try:
            self._bring_back()
            self._client().tell(GiveUp(iteration=job.iteration, reason="this host's agent was restarted"))
        except GeminiError as failure:
            self._on_discard(job.iteration, f"training goes on without snapshots: {failure}")
