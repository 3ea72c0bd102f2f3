"""Everything that can go wrong in a simulated job; each fault draws its victims from the world's own generator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from simulation import visitor
from simulation.made import EXTRAS, text

if TYPE_CHECKING:
    from simulation.hosts import Host
    from simulation.loop import Process
    from simulation.world import World


def _kill_worker(world: World) -> None:
    if hosts := [host for host in world.hosts if host.worker is not None]:
        world.kill_worker(world.rng.choice(hosts), "a fault")


def _kill_agent(world: World) -> None:
    if hosts := [host for host in world.hosts if host.agent is not None]:
        host = world.rng.choice(hosts)
        world.record("agent killed", host=host.name)
        assert host.agent is not None
        world.kill_agent(host.agent)


def _kill_all_agents(world: World) -> None:
    for host in world.hosts:
        if host.agent is not None and world.rng.random() < 0.7:
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
    spared = world.rng.choice([None, None, *world.hosts])
    for host in world.hosts:
        if host is not spared:
            world.lose_host(host)


def _lose_crew(world: World) -> None:
    """All memory is lost, but that of hosts without a part in the job, which may have something older."""
    for host in world.hosts:
        if host.worker is not None:
            world.lose_host(host)


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


def cut_off(world: World, host: Host) -> None:
    """Cuts a host off from all others."""
    seconds = world.rng.choice([0.5, 5.0, 40.0, 150.0])
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


def strike(world: World, process: Process) -> bool:
    """Does something to a process at a moment inside it; returns whether it dies of that."""
    match world.rng.choice(["dies", "dies", "stops", "is cut off", "flips"]):
        case "stops":
            stop(world, process, 10.0)
        case "is cut off":
            cut_off(world, next(host for host in world.hosts if host.name == process.host))
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


def flip_one(world: World, on: str = "") -> None:
    """A bit of a copy in memory changes: in its bytes, its checksums or its header; ``on``: on which host, by name."""
    held = [
        (host, memory, slot.version)
        for host in world._up()
        if host.agent is not None and on in ("", host.name)
        for stream in host.agent.streams.by_name.values()
        for (owner, index), memory in stream.context.slot_store.memory.items()
        if (slot := stream.context.host.slots(owner).slots.get(index)) is not None and slot.version is not None
    ]
    if held:
        host, memory, version = world.rng.choice(held)
        shape = memory.shape
        held_bytes = shape.data_bytes + world.rng.choice([0, len(EXTRAS)])  # of a state that no step changes
        at = world.rng.choice([shape.data_offset + world.rng.randrange(held_bytes), 4096 + world.rng.randrange(8)])
        world.record("flip", host=host.name, owner=shape.owner, version=text(version))
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


def _full(world: World) -> None:
    """Other processes of a host take all memory that is left there, for a while."""
    host, seconds = world.rng.choice(world.hosts).name, world.rng.choice([5.0, 60.0])
    world.full.add(host)
    asyncio.BaseEventLoop.call_at(world.loop, world.loop.time() + seconds, world.full.discard, host)


def _clock(world: World) -> None:
    """The system's clock of a host is set."""
    world.skew[world.rng.choice(world.hosts).name] = world.rng.choice([-86400.0, -30.0, 0.0, 30.0, 86400.0])


def _visit(world: World) -> None:
    """Another process reads the newest snapshot."""
    pause = world.rng.choice([0.0, 0.5] if world.is_quiet else [0.0, 2.0, 15.0])
    visitor.visit(world, world.rng.choice(world.hosts).name, pause)


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
}
SHARES = {  # a job that has lost its memory shows little for a while
    **dict.fromkeys(("lose_host", "lose_all", "lose_crew", "kill_all_agents"), 0.3),
    **dict.fromkeys(("flip", "garble", "rot", "storage", "visit", "stop", "stop_leader"), 2.0),
}
PROBES = ("kill_worker", "kill_agent", "kill_leader", "stop_leader", "stop", "reset", "restart_all", "visit", "garble")
