"""A rank's side of recording: layout, slots, snapshots under way, and the agent's messages about each of them.

Below the public face (``gemini_ft.checkpointer``), above the copying (``gemini_ft.worker.snapshot``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemini_ft import accelerator
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient, as_error
from gemini_ft.agent.memory import extras_room
from gemini_ft.config import GeminiConfig
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.core.ledger import Abort, Commit
from gemini_ft.core.roots import layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, GeminiError
from gemini_ft.events import EventLog
from gemini_ft.faults import inject as faults
from gemini_ft.faults.plan import World
from gemini_ft.state import codec
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copy_plan import CopyPlan, Slot, map_slots
from gemini_ft.state.divergence import check_replicas, replicated_digest
from gemini_ft.state.tensors import Source, fingerprint
from gemini_ft.state.writes import WriteWatch
from gemini_ft.wire.messages import Failed, Notice, Paced
from gemini_ft.wire.worker_messages import (
    Adopt,
    Collect,
    Dispatch,
    Excuse,
    Goodbye,
    Granted,
    Opened,
    OpenSession,
    Progress,
    Reserve,
    Reserved,
    Room,
    ToWorker,
    Travelled,
)
from gemini_ft.worker.courier import Courier
from gemini_ft.worker.memory_need import check_memory, slot_bytes
from gemini_ft.worker.observation import Observation
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise
from gemini_ft.worker.session import Session, join
from gemini_ft.worker.snapshot import Job, Snapshotter
from gemini_ft.worker.stats import Stats

_log = logging.getLogger("gemini_ft")
_POLL = 0.001  # seconds
_SILENCE = 60.0  # seconds before the same warning is given again


class Recorder:
    """Records one stream for one rank. Constructing it joins the run: collective.

    Raises:
        GeminiError: a rank could not join; the same text on all ranks.
    """

    def __init__(self, config: GeminiConfig, name: str, stats: Stats, resizable: bool) -> None:
        self._config, self._stats = config, stats
        self._fatal: GeminiError | None = None
        self._layout: Layout | None = None
        self._layout_digest = b""
        self._sources: list[Source] = []
        self._fingerprint: tuple[Any, ...] = ()
        self._frozen: dict[str, bool] = {}
        self._extras_bytes = 0  # as it was when slots were reserved
        self._ended: dict[int, float] = {}  # iteration -> when it ended, until its fate is known
        self._newest = 0  # iteration of the last snapshot
        self._at = 0  # iteration that ended last
        self._paces = [(0, config.fixed_interval or 1)]  # (from iteration, steps between snapshots)
        self._observation: Observation | None = None
        self._courier: Courier | None = None
        self._has_room = False  # for slots that this rank could not get when it asked
        self._suspended = 0
        self._slots_lock = threading.RLock()  # held to replace slots or submit a snapshot, which two threads may do when the agent has died
        self._warned: dict[str, float] = {}  # reason -> when it was last said
        self._digest_at: int | None = None
        self._at_step = config.copy_when == "at_step"
        self._writes: WriteWatch | None = None
        self._snapshotter: Snapshotter | None = None  # events may come before it exists
        self.session: Session = join(config, name, self._on_event, resizable)
        self._snapshotter = Snapshotter(
            self.session.rank,
            self._root,
            lambda message: self.client.tell(message),
            lambda: self.client.lost,
            self._reconnect,
            self._on_discard,
            config.verify,
            config.waits,
            config.timeout,
            config.agent_timeout + config.replica_timeout if config.agent_timeout else None,
        )
        self._observe()
        self._employ()
        self._digest_at = _first_digest(self.session)
        self.events = EventLog(stream=name, rank=self.session.rank, host=self.session.host)
        self._announce()

    @property
    def client(self) -> AgentClient:
        return self.session.client

    # -- the training thread

    def interval(self, iteration: int) -> int:
        """Steps between snapshots at this point, the same on all ranks."""
        return next(interval for start, interval in reversed(self._paces) if iteration >= start)

    def record(self, iteration: int, state: TrainingState, extras: Any, given: Any) -> None:
        """Takes a snapshot: state that may change at any time is copied now, the rest in the background.

        Args:
            iteration: how often the optimizers have stepped.
            state: what is captured.
            extras: the caller's own.
            given: hyperparameters as the script gave them.

        Raises:
            GeminiError: something that must stop the job has happened since the last call.
        """
        self.raise_fatal()
        self._step_over(iteration)
        snapshotter = self._copying
        snapshotter.settle()
        suspicious = self._judge_writes()
        with self._slots_lock:
            self._submit(iteration, state, {"extras": extras, "given": given}, suspicious)
        self._stats.snapshots += 1

    def _submit(self, iteration: int, state: TrainingState, beside: dict[str, Any], suspicious: bool) -> None:
        snapshotter = self._copying
        live = state.survey()
        blob = codec.encode({"tensors": state.extras(live)} | beside, self.session.secret)
        if (now := fingerprint(live)) != self._fingerprint:
            self._plan(state.describe(live, self.session.rank, self.session.world_size), len(blob))
            self._fingerprint = now
        if len(blob) > extras_room(self._extras_bytes) or self._has_room:
            self._reserve_or_mend(max(len(blob), self._extras_bytes))
        plan = snapshotter.plan
        assert plan is not None
        plan.stage()
        digest_due = self._digest_at is not None and iteration >= self._digest_at
        self._newest = iteration
        self._ended[iteration] = time.perf_counter()
        ready = accelerator.module_of(plan.device).current_stream(plan.device).record_event() if plan.device is not None else None
        job = Job(iteration, blob, self._digest if digest_due else None, plan.marks(), ready)
        if suspicious:
            self._writes = WriteWatch(plan, job.marks)
        snapshotter.submit(job)

    def _judge_writes(self) -> bool:
        """Switches to copies at the end of each step if a snapshot was given up because its state was written in forward."""
        written, self._copying.written = self._copying.written, []
        watch, self._writes = self._writes, None
        if watch is not None:
            watch.end()
        if not written or self._at_step or self._config.copy_when != "auto":
            return False
        if watch is None or watch.early is None:
            return True
        if watch.early:
            self._on_discard(
                self._newest,
                f"{', '.join(watch.early[:5])} written between the snapshot and the next forward; if that is the end of an iteration, take "
                "the snapshot after it (checkpointer.step() is the last statement), if it is the beginning of one, set copy_when='at_step'",
            )
            return True
        self._at_step, self._fingerprint = True, ()
        _log.warning(
            "%s written in forward or backward, while the state is copied: from iteration %d on it is copied at once at the end of each "
            "step, which makes the step longer by that copy and takes %s bytes more of this worker's memory (copy_when='at_step')",
            ", ".join(written[:5]),
            self._at,
            f"{self._stats.shard_bytes:,}",
        )
        self.events.write("copied at step", iteration=self._at, tensors=written[:5])
        return False

    def marks(self) -> dict[str, list[tuple[int, int]]]:
        """Marks by which a write to the last snapshot's tensors is seen; empty before the first one."""
        return self._copying.plan.all_marks() if self._copying.plan is not None else {}

    def before_update(self) -> None:
        """Returns when the snapshot under way has read all that the update will write."""
        self.raise_fatal()
        with self._standing_still():
            self._copying.before_update()

    def settle(self) -> None:
        """Returns when no copy is under way."""
        self._copying.settle()

    def alive(self, iteration: int) -> None:
        """Gives a sign of life for the hang detection after a step without a snapshot. ``record`` does so by itself."""
        self._step_over(iteration)
        self._sign_of_life(iteration)

    def _sign_of_life(self, iteration: int) -> None:
        with contextlib.suppress(AgentError):  # its death is noticed, and mended, by the snapshot thread
            self.client.tell(Progress(iteration=iteration, suspended=self._suspended > 0))

    def excuse(self) -> None:
        """Excuses the resumed state from the failure that follows."""
        with contextlib.suppress(AgentError):
            self.client.tell(Excuse())

    @contextlib.contextmanager
    def suspended(self, iteration: int) -> Any:
        """Makes no sign of life due meanwhile."""
        self._suspended += 1
        self._sign_of_life(iteration)
        try:
            yield
        finally:
            self._suspended -= 1
            self._sign_of_life(iteration)

    def close(self, finished: bool, interrupted: bool) -> None:
        """Leaves the run; the agent hears why, unless this is a failure."""
        if finished:
            self.flush()
        self._copying.stop()
        if self._observation is not None:
            self._observation.close()
        if self._courier is not None:
            self._courier.close()
        if finished or interrupted:
            with contextlib.suppress(AgentError):
                self.client.tell(Goodbye(finished=finished))
        self.client.close()
        if interrupted:  # by a connection of its own: the interrupt may have struck in the middle of a message on ours
            lifecycle.leave(self.session.run, self.session.host)
        self.events.write("left", finished=finished, interrupted=interrupted)
        self.events.close()

    def flush(self) -> None:
        """Returns when the last snapshot is committed or given up: only then is it known whether it is due for storage."""
        self.settle()
        end = time.monotonic() + self._config.timeout
        with self._standing_still():
            while self._newest in self._ended and not self.client.lost and time.monotonic() < end:
                time.sleep(_POLL)

    def _standing_still(self) -> contextlib.AbstractContextManager[None]:
        """Lets replicas travel freely meanwhile, as the training stands still."""
        return self._observation.waiting() if self._observation is not None else contextlib.nullcontext()

    def raise_fatal(self) -> None:
        """Raises an error that the agents found in the background, if it must stop the job."""
        if self._fatal is not None:
            raise self._fatal

    def _announce(self) -> None:
        """Notes that this rank has joined, and prepares for the faults that were asked for."""
        session = self.session
        number, version = session.spec.incarnation.number, session.plan.version
        iteration = version.iteration if version is not None else 0
        self.events.write("joined", incarnation=number, hosts=session.spec.hosts, resuming=session.plan.kind, iteration=iteration)
        if session.orders.text:
            world = World(session.spec.hosts, session.spec.holders)
            url = self._config.storage.url if self._config.storage is not None else None
            has_past = number > 1 or version is not None
            scene = faults.Scene(session.run, has_past, session.rank, world, url, lambda: self.client, self.events)
            exchange_or_raise(lambda: faults.arm(session.orders, scene), self._config.timeout)

    def _observe(self) -> None:
        """Shows the agent when the network is idle, where replicas travel at all."""
        if self._travels and self._config.traffic.when == "idle":
            observation = Observation(lambda message, fds: self.client.tell(message, fds), self._config.traffic.profile_steps)
            try:
                observation.introduce()
            except AgentError:
                observation.close()
                raise
            self._observation = observation

    def _employ(self) -> None:
        """Lets this worker carry replicas, where that is wanted. Collective."""
        if self._travels and self._config.traffic.transport == "collective":
            config = self._config
            self._courier = Courier(
                config.traffic,
                config.replica_timeout,
                lambda message: self.client.tell(message),
                lambda: self._copying.slots,
                lambda: self.client.custody,
            )

    @property
    def _travels(self) -> bool:
        return any(len(hosts) > 1 for hosts in self.session.spec.holders.values())

    def _step_over(self, iteration: int) -> None:
        self._at = iteration
        if self._observation is not None:
            with contextlib.suppress(AgentError):  # its death is noticed, and mended, by the snapshot thread
                self._observation.step_over()

    # -- layout and slots

    @property
    def _copying(self) -> Snapshotter:
        assert self._snapshotter is not None
        return self._snapshotter

    def _plan(self, sources: list[Source], extras_bytes: int) -> None:
        """Lays the state out; at the first time compares it across ranks and checks that every host has room for its part."""
        before = self._layout
        specs = [self._settled(source.spec) for source in sources]
        layout = build_layout(specs, self.session.rank, self.session.world_size)
        self._sources, self._layout = sources, layout
        self._stats.shard_bytes = layout.nbytes
        self._copying.plan = CopyPlan(sources, layout, self.session.spec.chunk_bytes, self._at_step)
        if layout == before:  # the same tensors at other addresses (LBFGS makes new ones every step)
            for slot in self._copying.slots.values():
                slot.forget()
        elif before is None:
            check_replicas(sources, exchange)
            need = slot_bytes(self.session, layout, extras_room(extras_bytes))
            check_memory(self.session, exchange(need, self._config.timeout))
            exchange_or_raise(lambda: self._reserve_or_mend(extras_bytes), self._config.timeout + 10)
        else:
            self._reserve_or_mend(extras_bytes)

    def _settled(self, spec: TensorSpec) -> TensorSpec:
        """Fixes which tensors are frozen when they are first seen: training that freezes and unfreezes in turns moves nothing."""
        return replace(spec, frozen=self._frozen.setdefault(spec.name, spec.frozen))

    def _reserve_or_mend(self, extras_bytes: int) -> None:
        """Does what `_reserve` does, on the training thread, and starts another agent if that dies over it."""
        try:
            self._reserve(extras_bytes)
        except AgentError:
            if not self.client.lost:
                raise
            self._extras_bytes = extras_bytes
            self._reconnect()

    def _reserve(self, extras_bytes: int) -> None:
        """Gets slots from the agent for the present layout and this much small state, and maps them."""
        layout, snapshotter = self._layout, self._copying
        self._has_room = False
        assert layout is not None
        assert snapshotter.plan is not None
        blob = layout.to_bytes()
        self._layout_digest = layout_digest(blob)
        message = Reserve(layout=blob, layout_hash=layout.logical_hash, data_bytes=layout.nbytes, extras_capacity=extras_room(extras_bytes))
        reserved, fds = self.client.call(message, Reserved)
        before, snapshotter.slots = snapshotter.slots, {}
        for slot in before.values():
            slot.close()
        self._extras_bytes = extras_bytes
        snapshotter.slots = dict(zip(reserved.slots, map_slots(fds, reserved, snapshotter.plan.device), strict=True))
        with contextlib.suppress(RuntimeError):  # no thread can be started: the pages come with the first copy
            threading.Thread(target=_prefault, args=(list(snapshotter.slots.values()),), name="gemini-prefault", daemon=True).start()

    def _root(self, job: Job) -> str:
        """The root of a copy of this rank's shard."""
        session, layout = self.session, self._layout
        assert layout is not None
        version = Version(session.spec.incarnation, job.iteration)
        sizes = layout.nbytes, len(job.extras), session.spec.chunk_bytes
        return shard_root(session.rank, version, self._layout_digest, sizes, job.checksums)

    def _digest(self) -> str:
        return replicated_digest(self._sources) or "none"

    # -- other threads

    def _on_event(self, message: ToWorker) -> None:
        """Takes a message of the agent, on the client's thread."""
        match message:
            case Room():
                self._has_room = True
            case Granted(iteration=iteration, slot=slot):
                self._copying.granted(iteration, slot)
            case Commit(Version(iteration=iteration), digest_at=digest_at):
                self._stats.committed = iteration
                self._digest_at = digest_at
                self.events.write("committed", iteration=iteration)
                if (ended := self._ended.pop(iteration, None)) is not None:
                    self._stats.note_commit(iteration, time.perf_counter() - ended, self._at - iteration)
                for older in [other for other in list(self._ended) if other < iteration]:
                    self._given_up(older)  # its abort may have been lost with an agent
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
            case Abort(Version(iteration=iteration)):
                self._given_up(iteration)
                self._copying.aborted(iteration)
            case Failed():
                self._fatal = as_error(message)
            case Notice(text=text):
                _log.warning("%s", text)

    def _given_up(self, iteration: int) -> None:
        """Takes note that a snapshot will never be committed. Every rank that gives one up says so, and all hear it."""
        if self._ended.pop(iteration, None) is not None:
            self._stats.skipped += 1
            self.events.write("skipped", iteration=iteration)

    def _on_discard(self, iteration: int, reason: str) -> None:
        """Logs why this rank has no snapshot of an iteration, each reason once a minute."""
        now = time.monotonic()
        if now - self._warned.get(reason, -_SILENCE) >= _SILENCE:
            self._warned = {other: at for other, at in self._warned.items() if now - at < _SILENCE} | {reason: now}
            committed = "none yet" if self._stats.committed is None else f"that of iteration {self._stats.committed}"
            text = "iteration %d has no snapshot: %s. Training goes on unharmed, and a later one is tried (newest that is committed: %s)"
            _log.warning(text, iteration, reason, committed)

    def _reconnect(self) -> None:
        """Starts another agent in place of a dead one and hands it the slots that this worker holds. On the snapshot thread, or instead of
        it.
        """
        with self._slots_lock:
            if self.client.lost:
                self._start_another()
            self._reserve(self._extras_bytes)

    def _start_another(self) -> None:
        session, spec = self.session, self.session.spec
        _log.warning("this host's agent has ended; starting another and giving it the memory back")
        old = session.client
        fds = [slot.fd for slot in self._copying.slots.values()] + list(old.custody.values())
        hello = session.hello.model_copy(update={"secret": session.secret, "preferred_port": spec.addresses[session.host][1]})
        client = AgentClient(session.run, session.host, hello, self._on_event, self._config.timeout)
        try:
            for start in range(0, len(fds), 100):
                part = fds[start : start + 100]
                client.tell(Adopt(count=len(part), incarnation=spec.incarnation), part)
            reopening = OpenSession(spec=spec, secret=session.secret, readopt=True, committed=self._committed, reached=self._copying.newest)
            client.call(reopening, Opened)
        except GeminiError:
            client.close()
            raise
        session.client = client
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


def _first_digest(session: Session) -> int | None:
    """The first iteration that may be uploaded: from it on, ranks digest their replicated state."""
    settings, start = session.spec.storage, session.plan.version.iteration if session.plan.version is not None else 0
    if settings is None:
        return None
    every = settings.get("every_steps")
    return (start // every + 1) * every if isinstance(every, int) else start + 1


def _prefault(slots: Sequence[Slot]) -> None:
    lifecycle.yield_to_training()
    for slot in slots:
        slot.prefault()
