"""Keeps every optimizer step of a torch training loop in memory that outlives it. The public face of the package.

    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}, replicas=2)
    for iteration in range(checkpointer.resume(), iterations):
        ...                      # forward, backward, optimizer.step(), scheduler.step()
        checkpointer.step()      # the iteration's last statement
    checkpointer.close()

The integrations use the finer grain: ``open``, ``bind``, ``load_tensors``, ``save``, ``wait_before_update``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft import codec
from gemini_ft.agent.client import AgentClient, as_error
from gemini_ft.config import GeminiConfig, load_config
from gemini_ft.copies import copy_into
from gemini_ft.errors import AgentError, ConfigError, GeminiError, MemoryBudgetError, RecoveryError, StateError
from gemini_ft.layout import Layout, Read, build_layout, owners_needed, plan_reads, stored_specs
from gemini_ft.messages import (
    Aborted,
    Adopt,
    Committed,
    Failed,
    Goodbye,
    Granted,
    Message,
    Notice,
    Opened,
    OpenSession,
    Progress,
    Reserve,
    Reserved,
)
from gemini_ft.recovery import LocalShard, PeerShard, StorageShard
from gemini_ft.rendezvous import exchange, exchange_or_raise
from gemini_ft.replicas import check_replicas, replicated_digest
from gemini_ft.rng import rng_state, set_rng_state
from gemini_ft.session import Session, join
from gemini_ft.snapshot import CopyPlan, Job, Slot, Snapshotter
from gemini_ft.sources import Source, describe, fingerprint, survey
from gemini_ft.state import apply_extras, collect_extras, destinations
from gemini_ft.versions import Version

_log = logging.getLogger("gemini_ft")
_READERS = 4  # shards read at a time during recovery
_EXTRAS_ROOM = 2**20  # bytes of small state a slot has room for at least


@dataclass(frozen=True)
class Snapshot:
    """What ``open`` found."""

    iteration: int
    extras: Any
    source: str  # "memory" or "storage"


@dataclass
class Stats:
    """Counts of this process since it started. Seconds are of the training thread."""

    snapshots: int = 0
    committed: int | None = None  # newest committed iteration
    skipped: int = 0  # snapshots given up, by this rank or another
    blocked: list[float] = field(default_factory=list)  # seconds per step
    shard_bytes: int = 0
    restored: dict[str, int] = field(default_factory=dict)  # "own memory", "peer <host>", "storage" -> bytes
    restore_seconds: float = 0.0
    commit_seconds: dict[int, float] = field(default_factory=dict)  # iteration -> from its end until all replicas were verified


class Checkpointer:
    """Snapshots of one stream of training state, replicated to peers, resumed after a failure.

    Args:
        model: module, or name -> module.
        optimizers: one, or several. Their ``step`` is hooked: it waits for the copy under way.
        state: name -> object with ``state_dict``/``load_state_dict`` (schedulers, scalers, loaders).
        config: options; default: from ``options``, ``GEMINI_*`` and ``GEMINI_CONFIG``.
        name: of the stream; several at a time need different ones.
        hooks: False: the caller calls ``wait_before_update`` and ``save`` itself.
        replicated: whether plain parameters hold the same bytes on all ranks; default: whether a model is a DDP one.
        **options: fields of ``GeminiConfig``.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        state: Mapping[str, Any] | None = None,
        config: GeminiConfig | None = None,
        name: str = "main",
        hooks: bool = True,
        replicated: bool | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"give either config or single options, not both: {sorted(options)}")
        self.config = config if config is not None else load_config(options)
        self.name = name
        self.scalars: dict[str, Any] = {}
        self.stats = Stats()
        self._stateful = dict(state or {})
        self._hooks, self._replicated = hooks, replicated
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Any] = []
        self._session: Session | None = None
        self._snapshotter: Snapshotter | None = None
        self._layout: Layout | None = None
        self._sources: list[Source] = []
        self._fingerprint: tuple[Any, ...] = ()
        self._extras_capacity = 0
        self._state_extras: Any = None  # of the resumed snapshot, until load_tensors
        self._iteration = 0
        self._stepped = False
        self._fatal: GeminiError | None = None
        self._digest_at: int | None = None
        self._ended: dict[int, float] = {}
        self._blocked = 0.0
        self._suspended = 0
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        if model is not None:
            self.bind(model, optimizers)

    # -- the plain loop

    def resume(self) -> int:
        """Join the run and load the newest state there is, into everything given to the constructor.

        Collective. Returns the number of iterations already done: 0 at a first start.

        Raises:
            GeminiError: see ``open`` and ``load_tensors``.
        """
        found = self.open()
        if found is None:
            return 0
        self.load_tensors()
        saved = found.extras["state"]
        if saved.keys() != self._stateful.keys():
            raise StateError(
                f"the snapshot has state of {sorted(saved)}, this job has {sorted(self._stateful)}; give the same `state` as before"
            )
        for name, value in saved.items():
            self._stateful[name].load_state_dict(value)
        self.scalars = found.extras["scalars"]
        set_rng_state(found.extras["rng"])
        return found.iteration

    def step(self, **scalars: Any) -> None:
        """The iteration is over: take a snapshot, if the optimizer has stepped and the interval says so.

        In the middle of an accumulation there is none: its gradients would be lost.

        Args:
            **scalars: values to find in ``scalars`` after a resume; those not given keep their last value.

        Raises:
            GeminiError: something that must stop the job has happened since the last call.
        """
        begin = time.perf_counter()
        self._iteration += 1
        self.scalars.update(scalars)
        if self._stepped and self._iteration % self.config.interval == 0:
            extras = {
                "state": {name: value.state_dict() for name, value in self._stateful.items()},
                "scalars": self.scalars,
                "rng": rng_state(),
            }
            self._stepped = False
            self._save(self._iteration, extras)
        else:
            self._alive(self._iteration)
        self._note_blocked(time.perf_counter() - begin)
        self.stats.blocked.append(self._blocked)
        self._blocked = 0.0

    # -- finer grain

    def open(self) -> Snapshot | None:
        """Join the run, and find out what to resume. Collective over the default process group.

        Raises:
            GeminiError: a rank could not join, or the state cannot be resumed; the same text on all ranks.
        """
        _log_to_stderr()
        session = self._session = join(self.config, self.name, self._on_event)
        self._snapshotter = Snapshotter(
            session.rank,
            self._tell,
            lambda: self._client.lost,
            self._reconnect,
            self._on_discard,
            self.config.verify,
            self.config.on_late,
            self.config.timeout,
        )
        start = session.plan.version.iteration if session.plan.version is not None else 0
        settings = session.spec.storage
        if settings is not None and settings.get("every_steps"):
            every = int(str(settings["every_steps"]))
            self._digest_at = (start // every + 1) * every
        elif settings is not None:
            self._digest_at = start + 1
        if session.plan.version is None:
            return None
        self._iteration = start
        self.stats.committed = start
        return self._read_extras(session)

    def _read_extras(self, session: Session) -> Snapshot:
        trust = session.plan.kind == "memory" or bool(self.config.storage and self.config.storage.trust_pickle)

        def read() -> Any:
            blob = session.sources.read(session.rank, session.rank, lambda shard: shard.extras())
            return codec.decode(blob, session.secret, trust_pickle=trust)

        extras = exchange_or_raise_local(read)
        self._state_extras = extras["tensors"]
        return Snapshot(self._iteration, extras["extras"], session.plan.kind)

    def bind(self, models: nn.Module | Mapping[str, nn.Module], optimizers: Any = ()) -> None:
        """Say what to capture; as early as the objects exist."""
        self._models = {"model": models} if isinstance(models, nn.Module) else dict(models)
        self._optimizers = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._hooks:
            for optimizer in self._optimizers:
                self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.wait_before_update()))
                self._handles.append(optimizer.register_step_post_hook(lambda *_: self._mark_stepped()))

    def load_tensors(self) -> None:
        """Fill the bound models and optimizers with what ``open`` found. Collective.

        Raises:
            LayoutMismatchError: the snapshot is of another model; the first differences are named.
            RecoveryError: a shard could not be read from anywhere.
        """
        session = self._joined()
        if session.plan.version is None:
            raise RecoveryError("load_tensors() was called, but open() found nothing to resume")
        begin = time.perf_counter()
        exchange_or_raise(lambda: self._load(session), self.config.timeout + 600)
        self.stats.restore_seconds = time.perf_counter() - begin
        if session.rank == 0:
            restored = ", ".join(f"{nbytes:,} bytes from {where}" for where, nbytes in sorted(self.stats.restored.items()))
            _log.info(
                "resumed at iteration %d: rank 0 read %s in %.2f s", self._iteration, restored or "nothing", self.stats.restore_seconds
            )

    def _load(self, session: Session) -> None:
        rank, sources = session.rank, session.sources
        own = sources.read(rank, rank, lambda shard: shard.layout)
        owners = {owner for piece in own.pieces for owner in piece.group} | {rank}
        layouts = {owner: sources.read(owner, rank, lambda shard: shard.layout) for owner in owners - {rank}} | {rank: own}
        # A rank that owns nothing of a tensor (a small one, cut among many) learns of it from the others.
        specs = stored_specs(rank, layouts)
        if missing := owners_needed(specs, rank) - layouts.keys():
            layouts |= {owner: sources.read(owner, rank, lambda shard: shard.layout) for owner in missing}
        live = destinations(self._models, self._optimizers, stored_specs(rank, layouts), rank, session.world_size, self._is_replicated)
        reads = plan_reads([source.spec for source in live], rank, layouts)
        by_owner: dict[int, list[Read]] = {}
        for read in reads:
            by_owner.setdefault(read.owner, []).append(read)
        tensors = {source.spec.name: source.tensor for source in live}

        def fill(owner: int) -> tuple[str, int]:
            return sources.read(owner, rank, lambda shard: _scatter(shard, by_owner[owner], tensors))

        with ThreadPoolExecutor(_READERS) as pool:
            for where, nbytes in pool.map(fill, by_owner):
                self.stats.restored[where] = self.stats.restored.get(where, 0) + nbytes
        apply_extras(self._models, self._optimizers, self._state_extras)
        self._state_extras = None

    def save(self, iteration: int, extras: Any) -> None:
        """Take a snapshot of the state after ``iteration``: what may change at once is copied now, the rest in the background.

        Raises:
            GeminiError: something that must stop the job has happened since the last call.
        """
        begin = time.perf_counter()
        self._iteration = iteration
        self._save(iteration, extras)
        self.stats.blocked.append(self._blocked + time.perf_counter() - begin)
        self._blocked = 0.0

    def wait_before_update(self) -> None:
        """Call before parameters or optimizer state are written: returns when the copy under way has read them."""
        begin = time.perf_counter()
        self._raise_fatal()
        if self._snapshotter is not None:
            self._snapshotter.before_update()
        self._note_blocked(time.perf_counter() - begin)

    @contextlib.contextmanager
    def mutate(self) -> Iterator[None]:
        """Write parameters or optimizer state outside the optimizer's step (weight averaging, pruning, clamping)."""
        if self._snapshotter is not None:
            self._snapshotter.settle()
        yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No progress is expected meanwhile (validation, saving): hang detection is off."""
        self._suspended += 1
        self._alive(self._iteration)
        try:
            yield
        finally:
            self._suspended -= 1
            self._alive(self._iteration)

    def close(self, finished: bool = True, interrupted: bool = False) -> None:
        """Leave the run. Only a finished or interrupted one lets its agents go; after a failure they keep the state."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._session is None:
            return
        if self._snapshotter is not None:
            if finished:
                self._snapshotter.settle()
            self._snapshotter.stop()
        with contextlib.suppress(AgentError):
            if finished or interrupted:
                self._client.tell(Goodbye(finished=finished))
        self._client.close()
        self._session = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(finished=kind is None, interrupted=kind is not None and issubclass(kind, KeyboardInterrupt))

    # -- taking a snapshot

    def _save(self, iteration: int, extras: Any) -> None:
        session = self._joined()
        self._raise_fatal()
        assert self._snapshotter is not None
        self._snapshotter.settle()
        live = survey(self._models, self._optimizers)
        if (now := fingerprint(live)) != self._fingerprint:
            self._plan(session, describe(live, session.rank, session.world_size, self._is_replicated))
            self._fingerprint = now
        tensors = collect_extras(self._models, self._optimizers, live)
        blob = codec.encode({"tensors": tensors, "extras": extras}, session.secret)
        plan = self._snapshotter.plan
        assert plan is not None
        if len(blob) > self._extras_capacity:
            self._reserve(session, 2 * len(blob))
        plan.stage()
        digest = None
        if self._digest_at is not None and iteration >= self._digest_at:
            digest = self._digest
        ready = None
        if plan.on_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._ended[iteration] = time.perf_counter()
        self._snapshotter.submit(Job(iteration, blob, digest, plan.marks(), ready))
        self._alive(iteration)
        self.stats.snapshots += 1

    def _digest(self) -> str:
        return replicated_digest(self._sources) or "none"

    def _plan(self, session: Session, sources: list[Source]) -> None:
        """Lay the state out; at the first time compare it across ranks and check that every host has room for its part."""
        first = self._layout is None
        layout = build_layout([source.spec for source in sources], session.rank, session.world_size)
        self._sources, self._layout = sources, layout
        self.stats.shard_bytes = layout.nbytes
        assert self._snapshotter is not None
        self._snapshotter.plan = CopyPlan(sources, layout, session.spec.chunk_bytes)
        if first:
            check_replicas(sources, exchange)
            self._check_memory(session, layout.nbytes)
            exchange_or_raise(lambda: self._reserve(session, _EXTRAS_ROOM), self.config.timeout + 10)
        else:
            self._reserve(session, max(_EXTRAS_ROOM, self._extras_capacity))

    def _check_memory(self, session: Session, nbytes: int) -> None:
        """Refuse before the first copy what would end in the middle of the training otherwise; all ranks alike."""
        sizes = exchange(nbytes, self.config.timeout)
        need: dict[str, int] = {}
        for owner, holders in session.spec.holders.items():
            for place, host in enumerate(holders):
                slots = 3 if place == 0 and session.spec.storage is not None else 2
                need[host] = need.get(host, 0) + slots * (sizes[owner] + _EXTRAS_ROOM)
        for info in {info.host: info for info in session.infos}.values():
            if need.get(info.host, 0) > info.memory_limit:
                raise MemoryBudgetError(
                    f"host {info.host} must hold {need[info.host]:,} bytes of snapshots; its agent may hold {info.memory_limit:,}. "
                    f"Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas (now {self.config.replicas}), or use more hosts."
                )

    def _reserve(self, session: Session, extras_capacity: int) -> None:
        """Get slots for the present layout from the agent, and map them."""
        layout, snapshotter = self._layout, self._snapshotter
        assert layout is not None
        assert snapshotter is not None
        assert snapshotter.plan is not None
        message = Reserve(
            layout=layout.to_bytes(), layout_hash=layout.logical_hash, data_bytes=layout.nbytes, extras_capacity=extras_capacity
        )
        reserved, fds = self._client.call(message, Reserved)
        for slot in snapshotter.slots.values():
            slot.close()
        pinned = snapshotter.plan.on_cuda
        snapshotter.slots = {
            index: Slot(fd, reserved.data_offset, reserved.capacity, pinned) for index, fd in zip(reserved.slots, fds, strict=True)
        }
        self._extras_capacity = extras_capacity
        for slot in snapshotter.slots.values():
            slot.prefault()

    @property
    def _is_replicated(self) -> bool:
        if self._replicated is not None:
            return self._replicated
        return any(isinstance(model, DistributedDataParallel) for model in self._models.values())

    # -- the agent

    @property
    def _client(self) -> AgentClient:
        return self._joined().client

    def _joined(self) -> Session:
        if self._session is None:
            raise StateError("the Checkpointer has not joined a run; call resume() (or open()) before the first step")
        return self._session

    def _tell(self, message: Message) -> None:
        self._client.tell(message)

    def _alive(self, iteration: int) -> None:
        with contextlib.suppress(AgentError):  # its death is noticed, and mended, by the snapshot thread
            self._tell(Progress(iteration=iteration, suspended=self._suspended > 0))

    def _on_event(self, message: Message) -> None:
        """From the agent, on the client's thread."""
        snapshotter = self._snapshotter
        match message:
            case Granted(iteration=iteration, slot=slot) if snapshotter is not None:
                snapshotter.granted(iteration, slot)
            case Committed(iteration=iteration, digest_at=digest_at):
                self.stats.committed = iteration
                self._digest_at = digest_at
                if (ended := self._ended.pop(iteration, None)) is not None:
                    self.stats.commit_seconds[iteration] = time.perf_counter() - ended
            case Aborted(iteration=iteration) if snapshotter is not None:
                self.stats.skipped += 1
                self._ended.pop(iteration, None)
                snapshotter.aborted(iteration)
            case Failed():
                self._fatal = as_error(message)
            case Notice(text=text):
                _log.warning("%s", text)

    def _on_discard(self, iteration: int, reason: str) -> None:
        """This rank has no snapshot of an iteration; say why, once per reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("iteration %d has no snapshot: %s", iteration, reason)

    def _reconnect(self) -> None:
        """The agent died: start another and hand it the slots that we hold too. On the snapshot thread."""
        session, snapshotter = self._joined(), self._snapshotter
        assert snapshotter is not None
        _log.warning("this host's agent has ended; starting another and giving it the memory back")
        old = session.client
        fds = [slot.fd for slot in snapshotter.slots.values()] + list(old.custody.values())
        hello = session.hello.model_copy(update={"secret": session.secret, "preferred_port": session.spec.addresses[session.host][1]})
        client = AgentClient(session.run, session.host, hello, self._on_event, self.config.timeout)
        for start in range(0, len(fds), 100):
            part = fds[start : start + 100]
            client.tell(Adopt(count=len(part)), part)
        committed = Version(session.spec.incarnation, self.stats.committed) if self.stats.committed is not None else None
        if session.plan.version is not None and self.stats.committed == session.plan.version.iteration:
            committed = session.plan.version
        client.call(OpenSession(spec=session.spec, secret=session.secret, readopt=True, committed=committed), Opened)
        session.client = client
        old.close()
        self._reserve(session, self._extras_capacity)

    # -- bookkeeping

    def _mark_stepped(self) -> None:
        self._stepped = True

    def _note_blocked(self, seconds: float) -> None:
        self._blocked += seconds

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal


def exchange_or_raise_local(read: Any) -> Any:
    """Run ``read`` on every rank, raise everywhere if it fails anywhere, and return this rank's own result."""
    mine: list[Any] = []
    exchange_or_raise(lambda: mine.append(read()))
    return mine[0]


def _scatter(shard: LocalShard | PeerShard | StorageShard, reads: Sequence[Read], tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Copy the bytes of one shard to where they belong, as they arrive."""
    pending = list(reads)
    total = 0
    for offset, view in shard.chunks():
        end = offset + len(view)
        while pending and pending[0].offset < end:
            read = pending[0]
            low, high = max(offset, read.offset), min(end, read.offset + read.nbytes)
            size = read.nbytes // (read.stop - read.start)
            start = read.start + (low - read.offset) // size
            copy_into(tensors[read.name], start, start + (high - low) // size, view[low - offset : high - offset])
            total += high - low
            if high < read.offset + read.nbytes:
                break
            pending.pop(0)
    return shard.where, total


def _log_to_stderr() -> None:
    """Let a user without any logging set-up see what happens to the job."""
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[gemini %(levelname).1s rank " + os.environ.get("RANK", "0") + "] %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
