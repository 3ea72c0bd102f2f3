"""The commit protocol in one process: the agents' own code with a simulated clock and an in-memory network.

Every host has the real end of the reporting connection (`MemberLink`), collectors the real `Collector`, the leader the real ledger;
messages are packed and checked as on a socket. Simulated are time and the way between: a frame takes the link's latency, and the leader
and each collector, which have one thread, handle one message after the other, each as long as it has really taken this machine.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from gemini_ft.agent import collecting, leadership, reporting
from gemini_ft.agent.collecting import Collector
from gemini_ft.agent.leadership import Leader
from gemini_ft.agent.reporting import MemberLink
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.effects import Completed, Skipped
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.ledger import Commit, Ledger
from gemini_ft.core.placement import place
from gemini_ft.core.tree import ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import PeerMessage, Rejoin, peers
from gemini_ft.wire.tcp import Connection, Handler

RANKS = 8  # per host
REPLICAS = 2
PATIENCE = 3.0  # simulated seconds after which a late holder is left out
LATE = 0.5  # simulated seconds by which the copies of the late one are late: the others, and its own, do not wait for them
PERIOD = 0.9  # simulated seconds between steps: shorter than between heartbeats, which are left out then
INCARNATION = Incarnation(1, "0123abcd")
SECRET = b"of this benchmark"
Placed = dict[int, tuple[str, ...]]
CLOCKED = collecting, leadership, reporting  # modules that read the clock


def holders_of(hosts: int) -> Placed:
    placed = place([f"host-{i:05}" for i in range(hosts)], REPLICAS)
    return {number * RANKS + rank: placed[host] for number, host in enumerate(sorted(placed)) for rank in range(RANKS)}


def held(holders: Placed) -> dict[str, list[int]]:
    """Host -> owners of the shards that it holds."""
    out: dict[str, list[int]] = {}
    for owner, hosts in holders.items():
        for host in hosts:
            out.setdefault(host, []).append(owner)
    return out


def below(ways: Mapping[str, Sequence[str]], holders: Placed) -> dict[str, Collector]:
    """The collectors, each with what it must know of its own hosts: all of them are in one process here."""
    copies, groups = held(holders), dict[str, set[str]]()
    for host, (up, *others) in ways.items():
        if others:
            groups.setdefault(up, {up}).add(host)
    known = {name: {owner: holders[owner] for host in hosts for owner in copies[host]} for name, hosts in sorted(groups.items())}
    return {name: Collector(name, Gathering(name, theirs)) for name, theirs in known.items()}


def version(step: int, incarnation: int = INCARNATION.number) -> Version:
    return Version(Incarnation(incarnation, INCARNATION.nonce), step)


def root(owner: int, step: int) -> str:
    """Another one for each shard of each version, as long as a real one."""
    return f"{step:08x}{owner:024x}"


def report(owner: int, host: str, step: int) -> Completed:
    return Completed(owner, host, version(step), "l" * 16, "", root(owner, step))


# -- the simulation ---------------------------------------------------------------------------------


_LEAST = 1e-9  # seconds; without it, a wait for what is left of a second may take no time, again and again


class Clock(selectors.DefaultSelector):
    """Time passes when nothing is left to do at this moment: waiting for the next timer moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(_LEAST, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio on a `Clock`."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Processor:
    """The thread of the leader or of a collector: handles one thing after the other, each as long as it really takes."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop, self.free_at = loop, 0.0
        self._outgoing: list[tuple[Wire, bytes]] | None = None
        self.reset()

    def reset(self) -> None:
        """Begins to count anew."""
        self.seconds, self.messages, self.sent, self.bytes = 0.0, 0, 0, 0

    def send(self, wire: Wire, frame: bytes) -> None:
        self.sent += 1
        self.bytes += len(frame)
        if self._outgoing is None:
            wire.depart(frame, self._loop.time())
        else:
            self._outgoing.append((wire, frame))

    def work(self, what: Callable[[], Any]) -> Any:
        self._outgoing = []
        begin = time.thread_time()
        result = what()
        took = time.thread_time() - begin
        self.seconds += took
        self.free_at = max(self.free_at, self._loop.time()) + took
        for wire, frame in self._outgoing:
            wire.depart(frame, self.free_at)
        self._outgoing = None
        return result


class Wire:
    """One end of a connection in memory; the other end is ``far``. ``processor``: of its host, unless that has no other host to hear."""

    far: Wire

    def __init__(self, loop: SimulatedLoop, latency: float, processor: Processor | None) -> None:
        self._loop, self._latency, self._processor = loop, latency, processor
        self.handler: Handler

    def send(self, message: PeerMessage) -> None:
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes) -> None:
        if self._processor is not None:
            self._processor.send(self, frame)
        else:
            self.depart(frame, self._loop.time())

    def depart(self, frame: bytes, at: float) -> None:
        self._loop.call_at(at + self._latency, self.far.arrive, frame)

    def arrive(self, frame: bytes) -> None:
        if self._processor is None:
            self.handler.on_message(peers.unpack(memoryview(frame)[4:]))
            return
        self._processor.messages += 1
        self._processor.bytes += len(frame)
        self._processor.work(lambda: self.handler.on_message(peers.unpack(memoryview(frame)[4:])))

    def abort(self, reason: str) -> None:
        """The benchmark is over."""


class Crowd:
    """A leader, its collectors and all other hosts; the first in the order of names leads."""

    def __init__(self, loop: SimulatedLoop, hosts: int, latency: float, fan_in: int) -> None:
        self._loop, self._latency = loop, latency
        self.holders = holders_of(hosts)
        self.copies = held(self.holders)
        self.names = sorted(self.copies)
        self.first = self.names[0]
        self.heard: dict[str, float] = {}  # host -> when it heard of the commit
        ways = ways_up(self.names, self.first, fan_in)
        self.collectors = below(ways, self.holders)
        self.processors = {name: Processor(loop) for name in (self.first, *self.collectors)}
        ledger = Ledger(self.holders, None, PATIENCE)
        self._leader = Leader(self.first, ledger, len(self.holders), None, partial(self._on_decision, self.first), ways=ways)
        self._links = {name: self._link(name, ways[name][0]) for name in self.names[1:]}

    def _link(self, name: str, up: str) -> MemberLink:
        bundles = Bundles(name, {owner: self.holders[owner] for owner in self.copies[name]})
        dials = [partial(self._connect, name, up)]
        return MemberLink(dials, partial(self._on_decision, name), rejoin, print, bundles, self.collectors.get(name))

    async def _connect(self, host: str, up: str, handler: Handler) -> Connection:
        near, far = (Wire(self._loop, self._latency, self.processors.get(name)) for name in (host, up))
        near.far, far.far, near.handler = far, near, handler
        join = self._leader.join if up == self.first else self.collectors[up].join
        far.handler = self.processors[up].work(lambda: join(cast("Connection", far), host))
        return cast("Connection", near)

    def _on_decision(self, host: str, message: PeerMessage) -> None:
        if isinstance(message, Commit):
            self.heard[host] = self.processors[host].free_at if host in self.processors else self._loop.time()

    def report(self, step: int, late: float | None = 0.0) -> None:
        """All hosts have all of their copies, but the last one has those of other hosts' shards this much later; None: never."""
        for name in reversed(self.names):
            reports = [report(owner, name, step) for owner in self.copies[name]]
            if name == self.names[-1] and late != 0.0:
                others = [each for each in reports if self.holders[each.owner][0] != name]
                if late is not None:
                    self._loop.call_later(late, self._say, name, others)
                reports = [each for each in reports if self.holders[each.owner][0] == name]
            self._say(name, reports)

    def skip(self, step: int) -> None:
        """No rank has a snapshot of this step."""
        for name in self.names:
            self._say(name, [Skipped(owner, version(step), "late") for owner in self.copies[name] if self.holders[owner][0] == name])

    def _say(self, name: str, reports: Sequence[PeerMessage]) -> None:
        tell = partial(take_all, self._leader.take if name == self.first else self._links[name].take, reports)
        if name in self.processors:
            self.processors[name].work(tell)
        else:
            tell()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._leader.close()


def take_all(take: Callable[[PeerMessage], None], reports: Sequence[PeerMessage]) -> None:
    for each in reports:
        take(each)


def rejoin() -> Sequence[PeerMessage]:
    return [Rejoin(committed=None, uploading=None)]


class Scenario:
    """Steps of one crowd, and the figures of each."""

    def __init__(self, loop: SimulatedLoop, hosts: int, latency: float, fan_in: int) -> None:
        self._loop, self._hosts = loop, hosts
        self.crowd = Crowd(loop, hosts, latency, fan_in)
        self.leader, *self.others = self.crowd.processors.values()

    async def step(self, happens: Callable[[], None], commits: bool = True) -> dict[str, float]:
        """The figures of one step; ``commits``: it is over when all hosts have heard of the commit."""
        gc.collect()
        self.crowd.heard.clear()
        for processor in self.crowd.processors.values():
            processor.reset()
        begin = self._loop.time()
        happens()
        await asyncio.sleep(PERIOD)
        while commits and len(self.crowd.heard) < self._hosts:
            await asyncio.sleep(PERIOD)
        busiest = max(self.others, key=lambda processor: processor.seconds, default=self.leader)
        return {
            "leader_ms": 1e3 * self.leader.seconds,
            "collector_ms": 1e3 * busiest.seconds if self.others else 0.0,
            "latency_ms": 1e3 * (max(self.crowd.heard.values(), default=begin) - begin),
            "leader_bytes": self.leader.bytes,
            "leader_messages": self.leader.messages,
            "collector_messages": busiest.messages if self.others else 0,
            "collector_bytes": busiest.bytes if self.others else 0,
        }

    async def well(self, steps: range) -> dict[str, float]:
        """Medians over steps in which all goes well; the first one is not counted."""
        found = [await self.step(partial(self.crowd.report, step)) for step in steps]
        return {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}

    async def troubled(self, step: int) -> dict[str, float]:
        """The leader's and the busiest collector's milliseconds in steps in which one host has trouble with others' copies."""
        crowd, found = self.crowd, dict[str, dict[str, float]]()
        found["late"] = await self.step(partial(crowd.report, step, LATE))
        crowd.report(step + 1, None)
        await asyncio.sleep(PERIOD)
        found["skipped"] = await self.step(partial(crowd.skip, step + 2), commits=False)
        await asyncio.sleep(PATIENCE)  # in which the late one is left out
        found["left_out"] = await self.step(partial(crowd.report, step + 3, None))
        return {f"{who}_ms_{name}": figures[f"{who}_ms"] for name, figures in found.items() for who in ("leader", "collector")}


async def simulate(loop: SimulatedLoop, hosts: int, steps: int, latency: float, fan_in: int, trouble: bool) -> dict[str, float]:
    """Figures of one size; those of a step are medians over all steps but the first."""
    scenario = Scenario(loop, hosts, latency, fan_in)
    await asyncio.sleep(PERIOD / 2)
    gc.freeze()  # the collector of a real leader does not look through ten thousand hosts
    joining = scenario.leader.seconds
    found = await scenario.well(range(1, steps + 1))
    if trouble:
        found |= await scenario.troubled(steps + 1)
    scenario.crowd.close()
    gc.unfreeze()
    await asyncio.sleep(PERIOD)
    return {**found, "collectors": len(scenario.others), "joining_ms": 1e3 * joining}


def simulated(hosts: int, steps: int, latency: float, fan_in: int, trouble: bool = False) -> dict[str, float]:
    loop = SimulatedLoop()
    for module in CLOCKED:
        module.time = SimpleNamespace(monotonic=loop.time)  # type: ignore[attr-defined]
    try:
        return loop.run_until_complete(simulate(loop, hosts, steps, latency, fan_in, trouble))
    finally:
        for module in CLOCKED:
            module.time = time  # type: ignore[attr-defined]
        loop.close()
