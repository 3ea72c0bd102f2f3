"""Receives peers' shards on this host: slots with pages in them, and workers that take pieces where those carry replicas."""

from __future__ import annotations

from collections.abc import Callable

from gemini_ft.agent.home import Home
from gemini_ft.agent.memory import SlotMemory, SlotShape
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.messages import ShardLayout
from gemini_ft.wire.peer_messages import End, Parcel
from gemini_ft.wire.worker_messages import Collect, Collected

REPLICA_SLOTS = 2  # one complete, one in progress
Landed = Callable[[int, int, str], None]
"""Hears that a worker has received a piece: source, tag, and the error if it could not."""


def shape_of(home: Home, owner: int, wanted: ShardLayout) -> SlotShape:
    """The shape that a slot for a shard must have."""
    spec = home.spec
    assert spec is not None
    sizes = wanted.data_bytes, wanted.extras_capacity, spec.chunk_bytes
    return SlotShape(home.run.run_id, home.name, owner, spec.world_size, wanted.layout_hash, wanted.layout, *sizes)


def may_be_written_by_another(home: Home, owner: int, worker: WorkerConnection | None = None) -> bool:
    """Whether a worker that had the shard's slots before, perhaps in a former incarnation, still lives."""
    before, spec = home.workers.get(owner), home.spec
    if before is not None and before is not worker and before.alive:
        return True
    past = [giver for giver in home.vault.givers(owner) if spec is not None and giver.incarnation != spec.incarnation]
    return any(giver.worker is not worker and giver.worker.alive for giver in past)


class Inbound:
    """Makes room for what receivers take in, for all sessions of a stream."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._collecting: dict[tuple[int, int], tuple[Landed, int]] = {}  # (source, tag) of a piece -> who hears of it, and its rank

    def end_session(self) -> None:
        """Drops the pieces that are awaited: the session is over."""
        self._collecting.clear()

    def entrust_all(self) -> None:
        """Lets a worker that has just come keep the replicas that no worker keeps."""
        for (held, _), memory in self._home.vault.memory.items():
            if not self._home.host.owns(held):
                self._home.custodians.entrust(memory)

    def worker_lost(self, rank: int) -> None:
        """Ends what a lost worker was receiving: it will not arrive, and the worker writes nowhere any more."""
        for source, tag in [piece for piece, (_, target) in self._collecting.items() if target == rank]:
            self.collected(Collected(source=source, tag=tag, error=f"rank {rank} is gone"))

    def collected(self, message: Collected) -> None:
        """Takes a worker's report that it has received a piece, or could not."""
        if (waiting := self._collecting.pop((message.source, message.tag), None)) is not None:
            waiting[0](message.source, message.tag, message.error)

    @property
    def host_name(self) -> str:
        return self._home.host.name

    def log(self, text: str) -> None:
        self._home.log(text)

    async def make_room(self, owner: int, wanted: ShardLayout) -> None:
        """Makes slots for a peer's shard, their pages already faulted in."""
        vault, spec = self._home.vault, self._home.spec
        before = {memory for (of, _), memory in vault.memory.items() if of == owner}
        shape = shape_of(self._home, owner, wanted)

        def reuse() -> bool:
            return not (may_be_written_by_another(self._home, owner) or self._is_kept_by_stranger(owner))

        indices = await vault.ensure_beside(owner, shape, REPLICA_SLOTS, reuse, lambda: self._home.spec is spec)
        fresh = [index for index in indices if vault.memory[owner, index] not in before]  # a number may be that of a slot just freed
        await vault.prefault(owner, fresh)
        for index in fresh:
            if (memory := vault.memory.get((owner, index))) is not None:  # else it was freed meanwhile
                self._home.custodians.entrust(memory)

    def keeper(self, owner: int) -> int | None:
        return next((keeper.rank for keeper in self._keepers(owner)), None)

    def collect(self, parcel: Parcel, memory: SlotMemory | None, landed: Landed) -> None:
        self._collecting[parcel.source, parcel.tag] = landed, parcel.target
        worker = self._home.workers.get(parcel.target)
        if worker is None or not worker.alive:
            self.collected(Collected(source=parcel.source, tag=parcel.tag, error=f"rank {parcel.target} is not there"))
            return
        key, position = "", 0
        if memory is not None:
            key, position = str(id(memory)), memory.shape.data_offset + parcel.chunk.offset + parcel.start
        worker.send(Collect(tag=parcel.tag, source=parcel.source, key=key, position=position, nbytes=parcel.nbytes))

    def begin_receive(self, owner: int, iteration: int, committed: Version | None) -> SlotMemory | None:
        host = self._home.host
        if host.owns(owner) or host.name not in host.holders.get(owner, ()):
            raise PeerError(f"host {host.name!r} does not hold rank {owner}'s shard")
        slot = host.receive(owner, self._home.version(iteration), committed)
        self._home.vault.sync_headers()
        if slot is None:
            return None
        memory = self._home.vault.memory[owner, slot.index]
        memory.clear()
        return memory

    def end_receive(self, end: End) -> bool:
        version = self._home.version(end.iteration)
        memory = self._home.vault.writing(end.owner, version)
        if memory is None or not memory.is_whole(end.extras_bytes):
            return False
        if not memory.finish(version, end.extras_bytes, end.root):
            self._home.counters["damaged"] += 1
            text = f"rank {end.owner}'s shard of {version} arrived with another root than its owner's copy has"
            self.log(f"{text}: asking for all of it again, on another connection")
            raise PeerError(text)
        self._home.perform(self._home.host.received(end.owner, version, end.layout, end.digest, memory.root))
        return True

    def fail_receive(self, owner: int, iteration: int) -> None:
        self._home.perform(self._home.host.receive_failed(owner, self._home.version(iteration)))

    def receives(self, owner: int, iteration: int) -> bool:
        return self._home.vault.writing(owner, self._home.version(iteration)) is not None

    def holds(self, owner: int, iteration: int) -> bool:
        return self._home.host.slots(owner).complete_version(self._home.version(iteration)) is not None

    # -- inside

    def _keepers(self, owner: int) -> list[WorkerConnection]:
        """Workers that keep memory of a replica, and live."""
        kept = [self._home.custodians.keeper(memory) for (of, _), memory in self._home.vault.memory.items() if of == owner]
        return [keeper for keeper in kept if keeper is not None]

    def _is_kept_by_stranger(self, owner: int) -> bool:
        """Whether a worker of a former incarnation, which may still receive into a replica's memory, lives."""
        spec = self._home.spec
        return any(spec is not None and keeper.incarnation != spec.incarnation for keeper in self._keepers(owner))
