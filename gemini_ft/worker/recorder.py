"""A rank's side of recording: begins snapshots, takes the agent's messages about them, and starts another agent when that one dies.

Below the public face (``gemini_ft.checkpointer``), above the slots (``reservation``), the copying (``snapshot``) and what becomes of
each snapshot (``outcomes``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from gemini_ft import failpoints
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient, as_error
from gemini_ft.config import GeminiConfig
from gemini_ft.core.decisions import Abort, Commit
from gemini_ft.core.diligence import Diligence
from gemini_ft.core.faults import World
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, GeminiError, ReplayError, ReplicaDivergedError
from gemini_ft.events import EventLog
from gemini_ft.faults import inject as faults
from gemini_ft.launch import notes
from gemini_ft.launch.launched import ray_run_name
from gemini_ft.state import codec
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copy_plan import CopyPlan
from gemini_ft.state.writes import CopyWhen
from gemini_ft.wire.messages import Failed, Notice, Paced
from gemini_ft.wire.worker_messages import (
    Adopt,
    AskDrain,
    Collect,
    Dispatch,
    Draining,
    Excuse,
    GetStatus,
    Goodbye,
    Granted,
    Miscomputed,
    Opened,
    OpenSession,
    Over,
    Progress,
    Queued,
    Room,
    Status,
    StopAfterStep,
    ToWorker,
    Travelled,
    Verified,
    Verify,
    WriteRecord,
)
from gemini_ft.worker import drain
from gemini_ft.worker.attempt import arrived, has_failed, is_in_place, leave_if_over
from gemini_ft.worker.collectives import UNSEEN, Observation, write_record
from gemini_ft.worker.courier import Courier
from gemini_ft.worker.drain import Drain
from gemini_ft.worker.outcomes import Outcomes, Stats
from gemini_ft.worker.rendezvous import exchange_or_raise
from gemini_ft.worker.replay import refusal
from gemini_ft.worker.reservation import Reservation
from gemini_ft.worker.session import WorkerSession, join
from gemini_ft.worker.snapshot import PendingSnapshot, Snapshotter

_log = logging.getLogger("gemini_ft")
_POLL = 0.001  # seconds


class Recorder:
    """Records one stream for one rank. Constructing it joins the run: collective.

    Raises GeminiError: a rank could not join; the same text on all ranks.
    """

    def __init__(self, config: GeminiConfig, name: str, stats: Stats, resizable: bool) -> None:
        self._config, self._stats = config, stats
        self.fatal: GeminiError | None = None  # found by the agents in the background; it must stop the job
        self._has_left = False
        self._at = 0  # iteration that ended last
        self._recorded = 0  # iteration of the last snapshot, committed or not
        self.checked: int | None = None  # `verify: replay`: the last snapshot, if the iteration after it is checked
        self._paces = [(0, config.fixed_interval or 1)]  # (from iteration, steps between snapshots)
        self._has_noted_commit = False
        self._observation: Observation | None = None
        self._courier: Courier | None = None
        self._suspended = 0
        self.slots_lock = threading.RLock()  # held to replace slots or submit a snapshot, which two threads may do when the agent has died
        self._digest_at: int | None = None
        self._room = threading.Event()  # the agent has room for slots that this rank could not get when it asked
        self.drain = Drain(config)
        self._outcomes = Outcomes(stats, lambda event, **facts: self.events.write(event, **facts))
        self._copy_when = CopyWhen(config.copy_when, lambda reason: self._outcomes.discarded(self._outcomes.newest, reason))
        on_event = weakref.WeakMethod(self._on_event)  # weak: injected faults keep the client for longer than this object may live

        def hear(message: ToWorker) -> None:
            if (alive := on_event()) is not None:
                alive(message)

        self._hear = hear
        self.session: WorkerSession = join(config, name, self._hear, resizable)
        drain.attend(self.session.run, self.session.host)
        self._diligence = Diligence(config.agent_timeout)  # used by several threads, whose looks may overlap
        try:
            self.events = EventLog(self.session.run, stream=name, rank=self.session.rank, host=self.session.host)
            self._copying = Snapshotter(
                self.session.rank,
                root=lambda job: self._reservation.root(job),
                client=lambda: self.client,
                recover=self._reconnect,
                on_discard=self._outcomes.discarded,
                raises=config.verify is True,
                on_compare=self._scrub if config.verify == "replay" else lambda: None,
                waits=config.waits,
                timeout=config.timeout,
                grant_timeout=config.agent_timeout + config.replica_timeout if config.agent_timeout else None,
                diligence=self._diligence,
            )
        except BaseException:
            self.client.close()
            raise
        self._reservation = Reservation(self.session, self._copying, self._room, self._reconnect)
        self._digest_at = _first_digest(self.session)
        self._recorded = self.session.plan.version.iteration if self.session.plan.version is not None else 0
        try:
            self._observe()
            if self._travels and self._config.traffic.transport == "collective":  # this worker carries replicas
                self._courier = Courier(
                    config.traffic,
                    config.replica_timeout,
                    lambda message: self.client.tell(message),
                    lambda: self._copying.slots,
                    lambda: self.client.custody,
                )
            self._announce()
            self.drain.heed()
        except BaseException:
            self.close(finished=False, interrupted=False)
            raise

    @property
    def client(self) -> AgentClient:
        return self.session.client

    # -- the training thread

    def interval(self, iteration: int) -> int:
        """Steps between snapshots at this point, the same on all ranks."""
        return next(interval for start, interval in reversed(self._paces) if iteration >= start)

    def record(self, iteration: int, state: TrainingState, extras: Any, given: Any, *, is_drifting: bool = False) -> None:
        """Takes a snapshot: state that may change at any time is copied now, the rest in the background.

        ``iteration``: how often the optimizers have stepped. ``given``: hyperparameters as the script gave them. ``is_drifting``: whether
        ranks may come to differ by what the model does (`gemini_ft.state.writes.is_drifting`), so that each snapshot is compared.

        Raises GeminiError: something that must stop the job has happened since the last call.
        """
        self.raise_fatal()
        self._step_over(iteration)
        self.session.forget_sources()
        self._copying.make_way()
        written, self._copying.written = self._copying.written, []
        if self._copy_when.judge(written, iteration):
            self.events.write("copied at step", iteration=iteration, tensors=written[:5])
        is_due = self._is_due(iteration)  # asked for each iteration by all ranks, those too that leave this one out
        is_compared = (is_due or is_drifting) and self.session.world_size > 1
        self.checked = iteration if is_due and self._config.verify == "replay" else None
        if self.slots_lock.acquire(blocking=self._config.waits or not self._stats.snapshots):
            try:
                self._submit(iteration, state, {"extras": extras, "given": given}, is_compared)
            finally:
                self.slots_lock.release()
        else:  # the snapshot thread is bringing another agent up
            self._outcomes.begin(iteration)
            self._copying.leave_out(iteration)
        self._stats.snapshots += 1

    def _submit(self, iteration: int, state: TrainingState, beside: dict[str, Any], is_compared: bool) -> None:
        plan, blob = self._fit(state, beside)
        self._stats.shard_bytes = plan.nbytes
        plan.stage()
        digest_due = is_compared or (self._digest_at is not None and iteration >= self._digest_at)
        self._outcomes.begin(iteration)
        digest = self._reservation.digest() if digest_due else None
        held = self._stats.unsaid
        self._stats.unsaid = []
        job = PendingSnapshot(
            iteration=iteration,
            extras=blob,
            digest=digest,
            marks=plan.marks(),
            ready=plan.ready(),
            is_checked=self._config.verify is True or self.checked is not None,
            held=held,
        )
        self._copy_when.follow(plan, job.marks)
        self._copying.submit(job)

    def _fit(self, state: TrainingState, beside: dict[str, Any]) -> tuple[CopyPlan, bytes]:
        """The way to copy the state, and the values captured beside it."""
        live = state.survey()
        blob = codec.encode({"tensors": state.extras()} | beside, self.session.secret)
        return self._reservation.fit(state, live, len(blob), self._copy_when.at_step), blob

    def prepare(self, state: TrainingState, extras: Any, given: Any) -> None:
        """Gets the memory for snapshots of a state that has been resumed, so that no rank's first one needs another rank. Collective."""
        with self.slots_lock:
            self._fit(state, {"extras": extras, "given": given})

    def compare(self, state: TrainingState) -> None:
        """Compares what all ranks must hold alike, now. Collective. Raises ReplicaDivergedError: it differs."""
        self._reservation.compare(state, state.survey())

    def _is_due(self, iteration: int) -> bool:
        """Whether the ranks' replicated state is compared after ``iteration`` though no upload is due; the same on all ranks."""
        before, self._recorded, every = self._recorded, iteration, self._config.compare_every
        return iteration // every > before // every

    def take_differing(self) -> list[str]:
        """Takes what had other bytes, before the last update, than the copy that was made of it."""
        differing, self._copying.differing = self._copying.differing, []
        return [f"{name} (in memory)" for name in dict.fromkeys(differing)]

    def refuse(self, found: list[list[str]]) -> None:
        """Raises ReplayError, as a checked iteration came out with other bits; by rank, what has."""
        error = refusal(self._recorded, found, self.session.spec.hosts)
        ranks = {str(rank): names for rank, names in enumerate(found) if names}
        self.events.write("replayed", iteration=self._recorded, ranks=ranks, text=str(error))
        if self._speaks_for_host:
            with contextlib.suppress(AgentError):
                self.client.tell(Miscomputed())
        self._note_suspicion(error)
        raise error

    def _note_suspicion(self, error: GeminiError) -> None:
        """Tells the launcher if an error names this rank as one with other results."""
        session = self.session
        if isinstance(error, ReplayError | ReplicaDivergedError) and f"rank {session.rank} (host {session.host})" in str(error):
            notes.say(notes.SUSPECTED)

    @property
    def _speaks_for_host(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.session.spec.hosts.index(self.session.host) == self.session.rank

    def _scrub(self) -> None:
        """Has the agent compare the copies that this host has of the last commit with their checksums; it names those that differ.

        Called when the next snapshot has its slot, and is not whole: the last commit is known, and nothing of it is written to.
        """
        if (version := self._committed) is not None and self._speaks_for_host:
            with contextlib.suppress(AgentError):
                self.client.call(Verify(version=version), Verified)

    def marks(self) -> dict[str, list[tuple[int, int]]]:
        """Marks by which a write to the last snapshot's tensors is seen; empty before the first one."""
        return self._copying.plan.all_marks() if self._copying.plan is not None else {}

    def before_update(self, changed: Sequence[str] = ()) -> None:
        """Returns when the snapshot under way has read all that the update will write.

        ``changed``: what has changed since the snapshot was begun although nobody wrote it: that snapshot is given up.
        """
        self.raise_fatal()
        with self._standing_still():
            self._copying.differing += changed
            self._copying.before_update()

    def settle(self) -> None:
        """Returns when no copy is under way."""
        self._copying.settle()

    def alive(self, iteration: int) -> None:
        """Gives a sign of life for the hang detection after a step without a snapshot. ``record`` does so by itself."""
        self._step_over(iteration)
        self._sign_of_life(iteration)

    def _sign_of_life(self, iteration: int, validated: float = 0.0) -> None:
        with contextlib.suppress(AgentError):  # its death is noticed, and mended, by the snapshot thread
            self.client.tell(Progress(iteration=iteration, suspended=self._suspended > 0, validated=validated))

    def excuse(self) -> None:
        """Excuses the resumed state from the failure that follows."""
        with contextlib.suppress(AgentError):
            self.client.tell(Excuse())

    @contextlib.contextmanager
    def suspended(self, iteration: int, *, validates: bool) -> Any:
        """Makes no sign of life due meanwhile; ``validates``: the ledger of time has a phase for it."""
        self._suspended += 1
        began = time.monotonic()
        self._diligence.begin()
        self._sign_of_life(iteration)
        try:
            yield
        finally:
            self._suspended -= 1
            seconds = time.monotonic() - began if validates and not self._suspended else 0.0
            self._sign_of_life(iteration, seconds)
            if seconds:
                self.events.write("validated", iteration=iteration, seconds=seconds)

    def leave_if_drained(self, iteration: int) -> None:
        """Ends this rank if its host is drained and the snapshot of ``iteration`` is safe; else a later one may be.

        Raises DrainedError: it is.
        """
        if not self.drain.begun:
            return
        if not self.drain.announced:  # the other workers of this host, and the leader, do not know
            self.drain.announced = True
            with contextlib.suppress(GeminiError):
                self.client.call(AskDrain(), Draining)
        self.flush()
        if self.drain.may_leave(iteration, self._stats.committed):
            self.events.write("drained", iteration=iteration)
            self.drain.leave(iteration)

    def close(self, finished: bool, interrupted: bool) -> None:
        """Leaves the run; the agent hears why, unless this is a failure.

        Raises GeminiError: something that must stop the job was found by the last snapshot.
        """
        self.drain.forget()
        if finished:
            self.settle()
            self.await_last(self._config.timeout)
            if self.fatal is not None:
                try:
                    raise self.fatal
                except GeminiError:
                    self._leave(finished=False, interrupted=False)
                    raise
        self._leave(finished, interrupted)

    def _leave(self, finished: bool, interrupted: bool) -> None:
        if self._has_left:  # a script may close again what has raised an error when it was closed
            return
        self._has_left = True
        self.halt(goes_on=is_in_place() and not finished and not interrupted)
        if finished or interrupted:
            with contextlib.suppress(AgentError):
                self.client.tell(Goodbye(finished=finished, last=ray_run_name() is not None))
        elif (failed := has_failed()) is not None:
            self.say_over(failed)
        self.client.close()
        if interrupted:  # by a connection of its own: the interrupt may have struck in the middle of a message on ours
            lifecycle.leave(self.session.run, self.session.host)
        self.events.write("left", finished=finished, interrupted=interrupted)
        self.events.close()

    def say_over(self, failed: bool) -> None:
        """Tells the agent that this worker is gone, though its process lives.

        Not while a copy is under way: the agent would grant to others the slot that this process still writes to.
        """
        if not self._copying.slots:
            with contextlib.suppress(AgentError):
                self.client.tell(Over(failed=failed))

    def halt(self, *, goes_on: bool = False) -> None:
        """Ends the threads that call torch, or hold objects of torch, and leaves everything else as it is.

        ``goes_on``: another attempt in this process will need the same slots.

        Python ends a daemon thread that comes back into an interpreter that is being taken apart by unwinding its stack; where torch's
        C++ is on that stack, the whole process ends in ``terminate called without an active exception``.
        """
        self._copying.stop(goes_on=goes_on)
        self._reservation.close()
        self.session.forget_sources()
        if self._observation is not None:
            self._observation.close()
        if self._courier is not None:
            self._courier.close()

    def flush(self) -> None:
        """Returns when the last snapshot is committed or given up: only then is it known whether it is due for storage."""
        self.settle()
        self.await_outcome(self._config.timeout)

    def outcome(self, iteration: int) -> bool | None:
        return self._outcomes.known(iteration)

    def await_outcome(self, seconds: float) -> None:
        """Returns when the last snapshot is committed or given up, or after that time."""
        self._copying.await_newest()
        end = time.monotonic() + seconds
        with self._standing_still():
            while self._outcomes.is_open and self.fatal is None and not self.client.lost and time.monotonic() < end:
                leave_if_over()
                time.sleep(_POLL)

    def await_last(self, seconds: float) -> None:
        """Returns when the job's last snapshot has its outcome; an agent that has died is replaced first, as nobody will do so later."""
        self.await_outcome(seconds)
        with contextlib.suppress(AgentError):  # no answer: it is lost, or will have been replaced
            self.client.call(GetStatus(), Status, seconds)
        if self.client.lost and self._copying.slots:
            try:
                self.settle()  # a device may still be copying into the slots, which go
                self._reconnect()
            except Exception as error:  # also one that has ended the thread which copies
                _log.warning("what was trained is lost, but for what is stored: this host's agent has ended, and %s", error)
            self.await_outcome(seconds)

    def _standing_still(self) -> contextlib.AbstractContextManager[None]:
        """Lets replicas travel freely meanwhile, as the training stands still."""
        return self._observation.waiting() if self._observation is not None else contextlib.nullcontext()

    @property
    def has_past(self) -> bool:
        """Whether this run was begun before."""
        return self.session.spec.incarnation.number > 1 or self.session.plan.version is not None

    def raise_fatal(self) -> None:
        """Raises an error that the agents found in the background, if it must stop the job; ends an attempt that is over."""
        leave_if_over()
        if self.fatal is not None:
            raise self.fatal

    def _announce(self) -> None:
        """Notes that this rank has joined, and prepares for the faults that were asked for."""
        session = self.session
        number, version = session.spec.incarnation.number, session.plan.version
        iteration = version.iteration if version is not None else 0
        self.events.write("joined", incarnation=number, hosts=session.spec.hosts, resuming=session.plan.kind, iteration=iteration)
        if version is not None:
            self._note_commit()
        if session.orders.text:
            world = World(session.spec.hosts, session.spec.holders)
            url = self._config.storage.url if self._config.storage is not None else None
            scene = faults.Scene(
                run=session.run,
                has_past=self.has_past,
                rank=session.rank,
                world=world,
                storage=url,
                client=lambda: session.client,  # not this object's, which the faults outlive
                events=self.events,
            )
            exchange_or_raise(lambda: faults.arm(session.orders, scene), self._config.timeout)

    def _note_commit(self) -> None:
        """Tells the launcher, which outlives this host's agent and its memory, once which hosts have what is committed."""
        if not self._has_noted_commit:
            self._has_noted_commit = True
            session = self.session
            notes.say_committed(session.run, session.spec.stream, {*session.spec.hosts})

    def _observe(self) -> None:
        """Shows the agent which collectives are under way: for replicas that wait for an idle network, for hangs and stragglers."""
        traffic = self._config.traffic
        is_profiled = self._travels and traffic.when == "idle"
        is_judged = self._config.hang_timeout != 0 or self._config.straggler_factor > 0
        if is_profiled or (self.session.world_size > 1 and is_judged):
            try:
                observation = Observation(
                    lambda message, fds: self.client.tell(message, fds),
                    traffic.profile_steps,
                    is_profiled,
                    is_timed=self.session.world_size > 1 and self._config.straggler_factor > 0,
                )
            except Exception:  # of another torch: it must never cost the training
                _log.warning(UNSEEN, exc_info=True)
                return
            try:
                observation.introduce()
            except AgentError:
                observation.close()
                raise
            self._observation = observation

    @property
    def _travels(self) -> bool:
        return any(len(hosts) > 1 for hosts in self.session.spec.holders.values())

    def _step_over(self, iteration: int) -> None:
        arrived()
        self._at = iteration
        self.session.step_over(iteration)
        if self._observation is not None:
            with contextlib.suppress(AgentError):  # its death is noticed, and mended, by the snapshot thread
                self._observation.step_over(iteration)

    # -- other threads

    def _on_event(self, message: ToWorker) -> None:
        """Takes a message of the agent, on the client's thread."""
        match message:
            case Room():
                self._room.set()
            case Granted(iteration=iteration, slot=slot):
                self._copying.granted(iteration, slot)
            case Queued():
                self._copying.answered()
            case StopAfterStep():
                self.drain.announced = True
                self.drain.begin()
            case Commit(version=Version(iteration=iteration), freeze=freeze, digest_at=digest_at):
                self._stats.committed = iteration
                self._note_commit()
                self._diligence.committed()
                self.drain.committed(iteration, freeze)
                self._digest_at = digest_at
                self._outcomes.committed(iteration, self._at)
            case Dispatch() if self._courier is not None:
                self._courier.dispatch(message)
            case Collect() if self._courier is not None:
                self._courier.collect(message)
            case Travelled():
                self._stats.note_travelled(message)
                self.events.write("travelled", **message.model_dump())
            case Paced(start=start, interval=interval, why=why):
                if (start, interval) != self._paces[-1]:
                    current = next(at for at, _ in reversed(self._paces) if at <= self._at or at == self._paces[0][0])
                    self._paces = [*(pace for pace in self._paces if pace[0] >= current), (start, interval)]
                    self.events.write("paced", iteration=start, interval=interval)
                    _log.warning("from iteration %d on, a snapshot every %d steps: %s", start, interval, why)
            case Abort(Version(iteration=iteration), reason):
                self._stats.note_aborted(iteration, reason)
                self._outcomes.given_up(iteration)
                self._copying.aborted(iteration)
            case Failed():
                self.fatal = as_error(message)
                self._note_suspicion(self.fatal)
            case WriteRecord(path=path):
                write_record(f"{path}-rank_{self.session.rank}")
            case Notice(text=text):
                _log.warning("%s", text)

    def _reconnect(self) -> None:
        """Starts another agent in place of a dead one and hands it the slots that this worker holds. On the snapshot thread, or instead of
        it.
        """
        with self.slots_lock:
            if self.client.lost:
                self._start_another()
            self._reservation.renew()

    def _start_another(self) -> None:
        session, spec = self.session, self.session.spec
        _log.warning("this host's agent has ended; starting another and giving it the memory back")
        old = session.client
        fds = [slot.fd for slot in self._copying.slots.values()] + list(old.custody.values())
        hello = session.hello.model_copy(update={"secret": session.secret, "preferred_port": spec.addresses[session.host][1]})
        client = AgentClient(session.run, session.host, hello, self._hear, self._config.timeout)
        try:
            for start in range(0, len(fds), 100):
                part = fds[start : start + 100]
                client.tell(Adopt(count=len(part), incarnation=spec.incarnation), part)
            failpoints.reached("worker_hands_over", rank=session.rank)
            reopening = OpenSession(
                spec=spec,
                secret=session.secret,
                readopt=True,
                committed=self._committed,
                past=session.so_far,
                reached=self._copying.newest,
            )
            client.call(reopening, Opened)
        except GeminiError:
            client.close()
            raise
        session.client = client
        self._diligence.replaced(time.monotonic())
        # The next agent gives numbers of its own: until they have come, nothing that it grants may be taken for one of the old slots.
        self._copying.slots = {-1 - number: slot for number, slot in enumerate(self._copying.slots.values())}
        old.close()
        if self._courier is not None:
            self._courier.forget()
        if self._observation is not None:
            self._observation.introduce()
        self._sign_of_life(self._at)  # messages of the training thread meanwhile went to the old one

    @property
    def _committed(self) -> Version | None:
        resumed, committed = self.session.plan.version, self._stats.committed
        if committed is None or (resumed is not None and committed == resumed.iteration):
            return resumed
        return Version(self.session.spec.incarnation, committed)


def _first_digest(session: WorkerSession) -> int | None:
    """The first iteration that may be uploaded: from it on, ranks digest their replicated state."""
    settings, start = session.spec.storage, session.plan.version.iteration if session.plan.version is not None else 0
    if settings is None:
        return None
    every = settings.get("every_steps")
    return (start // every + 1) * every if isinstance(every, int) else start + 1
