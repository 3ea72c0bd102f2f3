"""Everything that can go wrong in a simulated job; each fault draws its victims from the world's own generator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from simulation import visitor
from simulation.made import EXTRAS, text

if TYPE_CHECKING:
    from gemini_ft.agent.memory.slot_memory import SlotMemory
    from gemini_ft.core.slots import Slot
    from gemini_ft.core.versions import Version
    from simulation.hosts import Agent, Host
    from simulation.loop import Process
    from simulation.world import World


def _kill_worker(world: World) -> None:
    if hosts := [host for host in world.hosts if host.worker is not None]:
        host = world.rng.choice(hosts)
        first = world.rng.choice(host.workers) if len(host.workers) > 1 else None
        world.kill_worker(host, "a fault", first=first)


def _kill_agent(world: World) -> None:
    if hosts := [host for host in world.hosts if host.agent is not None]:
        host = world.rng.choice(hosts)
        world.record("agent killed", host=host.name)
        assert host.agent is not None
        world.kill_agent(host.agent)


def _kill_all_agents(world: World) -> None:
    share = world.rng.choice([0.7, 1.0])
    for host in world.hosts:
        if host.agent is not None and world.rng.random() < share:
            world.record("agent killed", host=host.name)
            world.kill_agent(host.agent)


def _lose_host(world: World) -> None:
    world.lose_host(world.rng.choice(world.hosts))


def _kill_leader(world: World) -> None:
    """Kills the agent that leads; each of them where two believe that they do."""
    for agent in world.leading:
        world.record("agent killed", host=agent.host.name)
        world.kill_agent(agent)


def _stop_leader(world: World) -> None:
    """Stops the agent that leads for so long that another one may lead."""
    for agent in world.leading:
        stop(world, agent.process, world.rng.choice([5.0, 15.0]))


def _lose_all(world: World) -> None:
    """All memory is lost, but perhaps that of one host."""
    _hide(world)
    spared = world.rng.choice([None, None, *world.hosts])
    for host in world.hosts:
        if host is not spared:
            world.lose_host(host)


def _lose_crew(world: World) -> None:
    """All memory is lost, but that of hosts without a part in the job, which may have something older."""
    _hide(world)
    for host in world.hosts:
        if host.worker is not None:
            world.lose_host(host)


def _hide(world: World) -> None:
    """Lists may lack for a while what was stored just now, when they are needed; nobody can know of it where nothing was reported yet."""
    if world.rng.random() < 0.7 and any(key.endswith(".stored.json") for key in world.bucket.objects):
        seconds = 150.0 if world.is_quiet else 200.0
        world.bucket.lagging, world.bucket.late = 1.0, seconds
        world.loop.outside(world.loop.time() + seconds + 10.0, setattr, world.bucket, "lagging", 0.0)


def _orphan(world: World) -> None:
    """A launcher is lost, and its worker, which does nothing at first, lives on for a while beside the next one; its agent may die, too."""
    if hosts := [host for host in world.hosts if host.worker is not None]:
        host = world.rng.choice(hosts)
        for worker in host.workers:
            stop(world, worker.process, world.rng.uniform(0.0, 15.0))
        world.kill_worker(host, "its launcher is lost", world.rng.uniform(5.0, 30.0))
        if host.agent is not None and world.rng.random() < 0.7:
            world.record("agent killed", host=host.name)
            world.kill_agent(host.agent)


def _damage(world: World) -> None:
    """A bit flips in one copy of what was committed last, which ranks resume at once."""
    known = [stream.context.host.committed for _, stream in world.streams if stream.context.host.committed is not None]
    if known:
        flip_one(world, only=max(known))
        _restart_all(world)


def _ruin(world: World) -> None:
    """Bits flip in all copies of one shard of what was committed last, which ranks resume at once: only something older is left."""
    known = [stream.context.host.committed for _, stream in world.streams if stream.context.host.committed is not None]
    if known and any(key.endswith(".stored.json") for key in world.bucket.objects):
        flip_one(world, only=max(known), everywhere=True)
        _restart_all(world)


def _misspeak(world: World) -> None:
    """A bit flips in the checksum of a chunk that a rank says, and not in what it forms the root of its copy of."""
    world.misspeaking += world.rng.choice([1, 1, 3])


def _forge(world: World) -> None:
    """A bit flips in the root that an agent has formed of a replica, before it tells anybody (`forged`)."""
    world.forging += 1 if world.is_quiet else world.rng.choice([1, 3])


def forged(world: World, host: str) -> None:
    """Sees to it, now and then, that this host does not hear what is committed next, and that ranks choose then."""
    if world.is_quiet or world.rng.random() < 0.3:
        return
    for near in [agent.host.name for agent in world.leading if agent.host.name != host]:
        world.record("one way", near=near, far=host, seconds=6.0)
        world.network.block(near, host, 6.0)
    world.loop.outside(world.loop.time() + min(4.0, world.step) * world.rng.uniform(0.1, 1.0), _restart_all, world)


def _bypass(world: World, tries: int = 20) -> None:
    """A host is cut off when copies are on their way from it, and comes back when others choose what to resume without it."""
    crew, later = [host for host in world.hosts if host.worker is not None], len(world.attempts)
    writing = [host for host in crew if any(worker.writing >= 0 for worker in host.workers)]
    if not writing or len(crew) < 2:
        if tries and not world.is_quiet:
            world.loop.outside(world.loop.time() + 0.13 * world.step, _bypass, world, tries - 1)
        return
    leads = [agent.host for agent in world.leading if agent.host in writing]  # whatever is undecided stays so
    apart, seconds = world.rng.choice(leads or writing), world.rng.uniform(2.0, 9.0)
    cut_off(world, apart, seconds)
    for host in crew:
        if host is not apart:
            world.kill_worker(host, "a fault")

    def choosing() -> None:
        for attempt in world.attempts[later:]:
            stop(world, world.rng.choice(attempt.scripts).process, 3.0)

    world.loop.outside(world.loop.time() + seconds - 1.0, choosing)


def _half_cut(world: World) -> None:
    """A replica does not come, and then nothing is heard of its owner's host."""
    crew = [host for host in world.hosts if host.worker is not None]
    if len(crew) > 1:
        near, far = world.rng.sample(crew, 2)
        world.record("one way", near=near.name, far=far.name, seconds=60.0)
        world.network.block(near.name, far.name, 60.0)
        world.loop.outside(world.loop.time() + world.step * world.rng.uniform(0.5, 2.0), cut_off, world, near, 40.0)


def _split_leader(world: World) -> None:
    """The host that leads tells others what is committed, but not all, and its agent dies."""
    for agent in [*world.leading]:
        far = world.rng.choice([host for host in world.hosts if host is not agent.host]).name
        world.record("one way", near=agent.host.name, far=far, seconds=5.0)
        world.network.block(agent.host.name, far, 5.0)

        def die(agent: Agent = agent) -> None:
            if agent.process.alive:
                world.record("agent killed", host=agent.host.name)
                world.kill_agent(agent)

        world.loop.outside(world.loop.time() + min(4.0, world.step) * world.rng.uniform(0.1, 1.2), die)


def _garble(world: World) -> None:
    world.network.garbling += world.rng.choice([1, 1, 5])


def _rot(world: World) -> None:
    world.bucket.rot()
    if world.rng.random() < 0.3:
        _lose_all(world)


def _restart_all(world: World) -> None:
    for host in world.hosts:
        if world.rng.random() < 0.8:
            world.kill_worker(host, "a restart")


def _partition(world: World) -> None:
    cut_off(world, world.rng.choice(world.hosts))


def cut_off(world: World, host: Host, seconds: float = 0.0) -> None:
    """Cuts a host off from all others; ``seconds``: for how long, else it is drawn."""
    seconds = seconds or world.rng.choice([0.5, 5.0, 40.0, 150.0])
    world.record("cut", host=host.name, seconds=seconds)
    for other in world.hosts:
        if other is not host:
            world.network.block(host.name, other.name, seconds)
            world.network.block(other.name, host.name, seconds)


def _one_way(world: World) -> None:
    near, far = world.rng.sample(world.hosts, 2)
    seconds = world.rng.choice([0.5, 5.0, 40.0, 150.0])
    world.record("one way", near=near.name, far=far.name, seconds=seconds)
    world.network.block(near.name, far.name, seconds)


def _stop(world: World) -> None:
    if processes := world.loop.processes:
        stop(world, world.rng.choice(processes), world.rng.choice([0.05, 1.0, 4.0, 15.0, 30.0]))


def stop(world: World, process: Process, seconds: float) -> None:
    """Lets a process do nothing for so long."""
    world.record("stop", process=process.name, seconds=seconds)
    process.stop(seconds)


def strike(world: World, process: Process, deed: str = "") -> bool:
    """Does something to a process at a moment inside it, a certain thing or one that is drawn; returns whether it dies of that."""
    match deed or world.rng.choice(["dies", "dies", "stops", "is cut off", "flips"]):
        case "stops":
            stop(world, process, 10.0)
        case "is cut off":
            cut_off(world, next(host for host in world.hosts if host.name == process.host), 10.0 if deed else 0.0)
            if deed:  # others come before it then
                world.bucket.slowness = 3.0
                world.loop.outside(world.loop.time() + 30.0, setattr, world.bucket, "slowness", 0.02)
        case "flips":
            flip_one(world, process.host)
        case _:
            return True
    return False


def _slow(world: World) -> None:
    host = world.rng.choice(world.hosts).name
    world.network.slow[host] = world.rng.choice([1.0, 1.0, 10.0, 50.0])


def _reset(world: World) -> None:
    world.network.reset(world.rng)


def flip_one(world: World, on: str = "", only: Version | None = None, *, everywhere: bool = False) -> None:
    """A bit of a copy in memory changes: in its bytes or its checksums.

    Args:
        on: on which host, by name; there it is one that is to be uploaded, if any is.
        only: of which version.
        everywhere: whether one changes in each copy of that shard.
    """
    held = [
        (host, memory, slot)
        for host, stream in world.streams
        if host.is_up and on in ("", host.name)
        for (owner, index), memory in stream.context.slot_store.memory.items()
        if (slot := stream.context.host.slots(owner).slots.get(index)) is not None and slot.version is not None
        if only in (None, slot.version)
    ]
    if held:
        frozen = [each for each in held if on and each[2].frozen]
        chosen = world.rng.choice(frozen or held)
        for each in [each for each in held if everywhere and each[1].shape.owner == chosen[1].shape.owner] or [chosen]:
            _flip_in(world, *each, data_only=everywhere)


def _flip_in(world: World, host: Host, memory: SlotMemory, slot: Slot, *, data_only: bool) -> None:
    assert slot.version is not None
    shape = memory.shape
    held_bytes = shape.data_bytes + world.rng.choice([0, len(EXTRAS)])  # of a state that no step changes
    at = world.rng.choice([shape.data_offset + world.rng.randrange(held_bytes), 4096 + world.rng.randrange(8)][: 2 - data_only])
    world.record("flip", host=host.name, owner=shape.owner, version=text(slot.version))
    memory._view[at] ^= 1 << world.rng.randrange(8)


def _flip(world: World) -> None:
    """Bits flip, and often that is found out at once: ranks must choose again."""
    for _ in range(world.rng.choice([1, 1, 3])):
        flip_one(world)
    if world.rng.random() < 0.5:
        world.rng.choice([_kill_worker, _restart_all])(world)


def _storage(world: World) -> None:
    bucket, rng = world.bucket, world.rng
    bucket.failing, bucket.lagging = rng.choice([0.0, 0.0, 0.1, 0.5]), rng.choice([0.0, 0.0, 0.5])
    bucket.slowness, bucket.down = rng.choice([0.01, 0.05, 1.0]), rng.random() < 0.15
    bucket.late, bucket.halving = rng.choice([5.0, 60.0]), rng.choice([0.0, 0.0, 0.2, 0.5])
    bucket.away = {host.name for host in world.hosts if rng.random() < 0.1}
    bucket.deleting = rng.choice([0.0, 0.0, 10.0])


def _full(world: World) -> None:
    """Other processes of a host take all memory that is left there, for a while."""
    host, seconds = world.rng.choice(world.hosts).name, world.rng.choice([5.0, 60.0])
    world.full.add(host)
    world.loop.outside(world.loop.time() + seconds, world.full.discard, host)


def _clock(world: World) -> None:
    """The system's clock of a host is set."""
    world.skew[world.rng.choice(world.hosts).name] = world.rng.choice([-86400.0, -30.0, 0.0, 30.0, 86400.0])


def _visit(world: World) -> None:
    """Another process reads the newest snapshot."""
    pause = world.rng.choice([0.0, 0.5] if world.is_quiet else [0.0, 2.0, 15.0])
    visitor.visit(world, world.rng.choice(world.hosts).name, pause)


def _read_stored(world: World) -> None:
    """Another process reads the newest checkpoint in storage."""
    visitor.read_stored(world, world.rng.choice(world.hosts).name, world.rng.choice([0.5, 10.0]))


FAULTS = {
    "kill_worker": _kill_worker,
    "kill_agent": _kill_agent,
    "kill_all_agents": _kill_all_agents,
    "kill_leader": _kill_leader,
    "stop_leader": _stop_leader,
    "lose_host": _lose_host,
    "lose_all": _lose_all,
    "lose_crew": _lose_crew,
    "restart_all": _restart_all,
    "partition": _partition,
    "one_way": _one_way,
    "stop": _stop,
    "slow": _slow,
    "reset": _reset,
    "flip": _flip,
    "garble": _garble,
    "rot": _rot,
    "storage": _storage,
    "full": _full,
    "clock": _clock,
    "visit": _visit,
    "read_stored": _read_stored,
    "orphan": _orphan,
    "damage": _damage,
    "ruin": _ruin,
    "misspeak": _misspeak,
    "forge": _forge,
    "bypass": _bypass,
    "half_cut": _half_cut,
    "split_leader": _split_leader,
}
SHARES = {  # a job that has lost its memory shows little for a while
    **dict.fromkeys(("lose_host", "lose_all", "lose_crew", "kill_all_agents"), 0.3),
    **dict.fromkeys(("flip", "garble", "rot", "storage", "visit", "stop", "stop_leader"), 2.0),
}
PROBES = (
    *("kill_worker", "kill_agent", "kill_leader", "kill_all_agents", "stop_leader"),
    *("stop", "reset", "restart_all", "visit", "garble", "damage", "ruin", "misspeak", "forge"),
)


class Theme(NamedTuple):
    """Makes a rare order of events likely in some seeds.

    Attributes:
        faults: that strike more often than others.
        moment: inside a process at which something happens to it more often than at others.
        deed: the thing that happens then; empty: any.
        stores: whether there is a storage to which much is uploaded.
        of_storage: how that behaves (attributes of `Bucket`), whatever else happens.
        of_world: attributes of `World`.
        settings: of the job.
    """

    faults: tuple[str, ...] = ()
    moment: str = ""
    deed: str = ""
    stores: bool = False
    of_storage: Mapping[str, float] = MappingProxyType({})
    of_world: Mapping[str, float] = MappingProxyType({})
    settings: Mapping[str, float] = MappingProxyType({})


_SELDOM = {"fault_seconds": 60.0, "suddenness": 0.0}  # so that uploads are not broken off
THEMES = (  # one seed after the other has each
    Theme(),
    Theme(faults=("bypass",), of_world={"step": 5.0, "copying": 1.0, "nbytes": 1536, "fault_seconds": 20.0}),
    Theme(faults=("half_cut",), of_world={"fan_in": 1, "fault_seconds": 30.0}, settings={"replica_timeout": 14.0}),
    Theme(faults=("lose_crew",), stores=True, of_world={"fault_seconds": 40.0, "step": 2.0, "boot_seconds": 8.0}),
    Theme(faults=("split_leader", "forge")),
    Theme(faults=("damage", "ruin"), moment="agent_uploads", deed="flips", stores=True, of_world={"fault_seconds": 20.0}),
    Theme(faults=("orphan", "misspeak"), of_world={"fault_seconds": 20.0, "step": 5.0}),
    Theme(moment="agent_manifest", deed="is cut off", stores=True, of_world=_SELDOM, settings={"leader_timeout": 3.0}),
    Theme(faults=("read_stored", "kill_all_agents"), stores=True),
    Theme(
        faults=("kill_agent",),
        stores=True,
        of_storage={"deleting": 60.0, "slowness": 0.3},
        of_world={"fault_seconds": 25.0, "step": 0.5, "copying": 0.01},
    ),
)
