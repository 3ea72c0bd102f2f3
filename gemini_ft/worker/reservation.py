"""Memory for this rank's snapshots: the layout of its shard, and the slots that the agent reserves for it.

Before the first copy the need of every host is compared with its limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gemini_ft import accelerator
from gemini_ft.agent.lifecycle import yield_to_training
from gemini_ft.agent.memory.slot_memory import SlotShape, extras_room
from gemini_ft.core.layout import Layout, build_layout
from gemini_ft.core.roots import layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, MemoryBudgetError
from gemini_ft.ordered import Ordered
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copy_plan import CopyPlan, MappedSlot, map_slots
from gemini_ft.state.replicas import begin_digest, check_replicas, replicated_digest
from gemini_ft.state.tensors import Fingerprint, Live, Source
from gemini_ft.wire.worker_messages import Reserve, Reserved
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise
from gemini_ft.worker.session import WorkerSession
from gemini_ft.worker.snapshot import PendingSnapshot, Snapshotter


def slot_bytes(session: WorkerSession, layout: Layout, room: int) -> int:
    """Bytes that one slot of this rank takes of an agent's budget."""
    spec, blob = session.spec, layout.to_bytes()
    size, chunk = layout.nbytes, spec.chunk_bytes
    return SlotShape(
        run=session.run,
        stream=spec.stream,
        owner=session.rank,
        world_size=session.world_size,
        layout_hash=layout.logical_hash,
        layout=blob,
        data_bytes=size,
        extras_capacity=room,
        chunk_bytes=chunk,
    ).total


def check_memory(session: WorkerSession, slot_bytes: Sequence[int]) -> None:
    """Refuses, before the first copy and on all ranks alike, a state that would exceed the memory in the middle of the training."""
    need: dict[str, int] = {}
    for owner, holders in session.spec.holders.items():
        for place, host in enumerate(holders):
            slots = 3 if place == 0 and session.spec.storage is not None else 2
            need[host] = need.get(host, 0) + slots * slot_bytes[owner]
    limits: Mapping[str, int] = {info.host: info.memory_limit for info in session.infos}
    for host, limit in limits.items():
        if need.get(host, 0) > limit:
            raise MemoryBudgetError(
                f"host {host} must hold {need[host]:,} bytes of snapshots; its agent may hold {limit:,}. "
                f"Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas (now {session.config.replicas}), or use more hosts."
            )


class Reservation:
    """The memory of one session's snapshots; keeps plan and slots of the snapshotter up to date.

    Args:
        room: set when the agent has room for slots that this rank could not get when it asked.
        mend: starts another agent where that has died, which ends in ``renew``.
    """

    def __init__(self, session: WorkerSession, snapshotter: Snapshotter, room: threading.Event, mend: Callable[[], None]) -> None:
        self._session, self._snapshotter, self._room, self._mend = session, snapshotter, room, mend
        self._layout: Layout | None = None
        self._layout_digest = b""
        self._sources: list[Source] = []
        self._fitted: tuple[Fingerprint | None, bool] = None, False  # the state that the plan is made for, and how that is copied
        self._live: Sequence[Live] = ()  # the survey that was last found to be that state
        self._frozen: dict[str, bool] = {}
        self._extras_bytes = 0  # as it was when slots were reserved
        self._prefaulting: Ordered | None = None

    def fit(self, state: TrainingState, live: Sequence[Live], extras_bytes: int, at_step: bool) -> CopyPlan:
        """Makes layout, plan and slots fit ``state``, whose tensors are ``live``; ``at_step``: it is copied at once when the step ends."""
        if (live is not self._live or at_step != self._fitted[1]) and (now := (Fingerprint(live), at_step)) != self._fitted:
            self._snapshotter.settle()
            self._plan(state.describe(live, self._session.rank, self._session.world_size), extras_bytes, at_step)
            self._fitted = now
        self._live = live
        if extras_bytes > extras_room(self._extras_bytes) or self._room.is_set():
            self._snapshotter.settle()
            self._reserve_or_mend(max(extras_bytes, self._extras_bytes))
        assert self._snapshotter.plan is not None
        return self._snapshotter.plan

    def compare(self, state: TrainingState, live: Sequence[Live]) -> None:
        """Compares the replicas of ``state`` across ranks; raises ReplicaDivergedError where they differ. Collective."""
        check_replicas(state.describe(live, self._session.rank, self._session.world_size), exchange)

    def renew(self) -> None:
        """Gets as many slots as before, of an agent that may be another one."""
        self._reserve(self._extras_bytes)

    def root(self, job: PendingSnapshot) -> str:
        """The root of a copy of this rank's shard."""
        session, layout = self._session, self._layout
        assert layout is not None
        version = Version(session.spec.incarnation, job.iteration)
        sizes = layout.nbytes, len(job.extras), session.spec.chunk_bytes
        return shard_root(session.rank, version, self._layout_digest, sizes, job.checksums)

    def digest(self) -> Callable[[], str]:
        """Gives the digest of the state that all ranks hold alike; to be asked for before the next update, or begun on the device.

        Which of the two formulas it is, follows from where tensors are and not from how they are copied, which differs between ranks.
        """
        assert self._snapshotter.plan is not None
        if not any(accelerator.holds(source.tensor) for source in self._sources):
            return partial(replicated_digest, self._sources)
        digest = begin_digest(self._sources)
        if self._snapshotter.plan.device is not None:
            return digest
        formed = digest()  # the copies are in the training's own queue, which no other thread waits for
        return lambda: formed

    def _plan(self, sources: list[Source], extras_bytes: int, at_step: bool) -> None:
        """Lays the state out; at the first time compares it across ranks and checks that every host has room for its part."""
        session, before, timeout = self._session, self._layout, self._session.config.timeout
        specs = [replace(source.spec, frozen=self._frozen.setdefault(source.spec.name, source.spec.frozen)) for source in sources]
        layout = build_layout(specs, session.rank, session.world_size)
        self._sources, self._layout = sources, layout
        self._snapshotter.plan = CopyPlan(sources, layout, session.spec.chunk_bytes, at_step)
        if layout == before:  # the same tensors at other addresses (LBFGS makes new ones every step)
            for slot in self._snapshotter.slots.values():
                slot.forget()
        elif before is None:
            check_replicas(sources, exchange)
            check_memory(session, exchange(slot_bytes(session, layout, extras_room(extras_bytes)), timeout))
            exchange_or_raise(lambda: self._reserve_or_mend(extras_bytes), timeout + 10)
        else:
            self._reserve_or_mend(extras_bytes)

    def _reserve_or_mend(self, extras_bytes: int) -> None:
        """Does what `_reserve` does, on the training thread, and starts another agent if that dies over it."""
        try:
            self._reserve(extras_bytes)
        except AgentError:
            if not self._session.client.lost:
                raise
            self._extras_bytes = extras_bytes
            self._mend()

    def _reserve(self, extras_bytes: int) -> None:
        """Gets slots from the agent for the present layout and this much small state, and maps them."""
        layout, snapshotter = self._layout, self._snapshotter
        self._room.clear()
        assert layout is not None
        assert snapshotter.plan is not None
        blob = layout.to_bytes()
        self._layout_digest = layout_digest(blob)
        message = Reserve(layout=blob, layout_hash=layout.logical_hash, data_bytes=layout.nbytes, extras_capacity=extras_room(extras_bytes))
        reserved, fds = self._session.client.call(message, Reserved)
        before, snapshotter.slots = snapshotter.slots, {}
        for slot in before.values():
            slot.close()
        self._extras_bytes = extras_bytes
        if self._session.plan.version is not None and self._session.restored is None:
            self._session.restored = time.monotonic()
        snapshotter.slots = dict(zip(reserved.slots, map_slots(fds, reserved, snapshotter.plan.device), strict=True))
        with contextlib.suppress(RuntimeError):  # no thread can be started: the pages come with the first copy
            prefaulting = self._prefaulting = self._prefaulting or Ordered("gemini-prefault")
            prefaulting.put(partial(_prefault, list(snapshotter.slots.values())))

    def close(self) -> None:
        """Ends the thread that touches the slots' pages, after 64 MiB at most, if they are closed."""
        if self._prefaulting is not None:
            self._prefaulting.close(timeout=5)


def _prefault(slots: Sequence[MappedSlot]) -> None:
    yield_to_training()
    for slot in slots:
        slot.prefault()
