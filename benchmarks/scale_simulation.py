"""The commit protocol in one process: the agents' own code with a simulated clock and an in-memory network.

Every host has its real place in the commit (`Failover`: a leader with its ledger, a member, a collector);
messages are packed and checked as on a socket. Simulated are time and the way between: a frame takes the link's latency, and the leader
and each collector, which have one thread, handle one message after the other, each as long as it has really taken this machine.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from gemini_ft.agent.commit import collector, failover, leader, member
from gemini_ft.agent.commit.failover import Failover
from gemini_ft.agent.commit.leader import Leader
from gemini_ft.config import LEADER_TIMEOUT
from gemini_ft.core.decisions import Abort, Commit
from gemini_ft.core.effects import Completed, Skipped
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.placement import place
from gemini_ft.core.tree import Succession, candidates, ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.peer_messages import PeerMessage, Rejoin
from gemini_ft.wire.tcp import Connection, Handler
from scale_network import Processor, SimulatedLoop, Traffic, Wire

RANKS = 8  # per host
REPLICAS = 2
PATIENCE = 3.0  # simulated seconds after which a late holder is left out
LATE = 0.5  # simulated seconds by which the copies of the late one are late: the others, and its own, do not wait for them
PERIOD = 0.9  # simulated seconds between steps: shorter than between heartbeats of members, which are left out then
INCARNATION = Incarnation(1, "0123abcd")
SECRET = b"of this benchmark"
Placed = dict[int, tuple[str, ...]]
CLOCKED = collector, failover, leader, member  # modules that read the clock


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


def groups(ways: Mapping[str, Sequence[str]], holders: Placed) -> dict[str, Placed]:
    """Each collector's part of the placement, that of its own hosts: all of them are in one process here."""
    copies, members = held(holders), dict[str, set[str]]()
    for host, (up, *others) in ways.items():
        if others:
            members.setdefault(up, {up}).add(host)
    return {name: {owner: holders[owner] for host in hosts for owner in copies[host]} for name, hosts in sorted(members.items())}


def version(step: int, incarnation: int = INCARNATION.number) -> Version:
    return Version(Incarnation(incarnation, INCARNATION.nonce), step)


def root(owner: int, step: int) -> str:
    """Another one for each shard of each version, as long as a real one."""
    return f"{step:08x}{owner:024x}"


def report(owner: int, host: str, step: int) -> Completed:
    return Completed(owner=owner, host=host, version=version(step), layout="l" * 16, digest="", root=root(owner, step))


_MOST = 120.0  # simulated seconds after which a decision that has not come to all never will
_BACK = 5.0  # simulated seconds in which an agent that was restarted has found the leader


class Crowd:
    """A leader, its collectors and all other hosts; the first in the order of names leads, and then the next candidate."""

    def __init__(self, loop: SimulatedLoop, hosts: int, latency: float, fan_in: int) -> None:
        self._loop, self._latency = loop, latency
        self.holders = holders_of(hosts)
        self.copies = held(self.holders)
        self.names = sorted(self.copies)
        self.first = self.names[0]
        self.heard: dict[str, float] = {}  # host -> when it heard of the commit, or of a snapshot that was skipped
        self._gone: set[str] = set()  # killed: nothing listens there
        self._stopped: set[str] = set()  # hung: connections are taken, and nothing is answered
        self._committed: Version | None = None
        self._skipped: Version | None = None  # by a rank of the last host, which the next leader must hear
        self._greetings = 0
        self._ways = ways_up(self.names, self.first, fan_in)
        self._order = candidates(self.names, self.first, self._ways)
        self.collectors = groups(self._ways, self.holders)
        self.processors = {name: Processor(loop) for name in (self.first, *self.collectors, self._order[1])}
        self.traffic = Traffic()
        self._hosts = {name: self._place(name) for name in self.names}

    @property
    def next(self) -> str:
        """The host that leads once the first one is lost."""
        return self._order[1]

    def _place(self, name: str, goes_on: bool = False) -> Failover:
        """A host's place in the commit; ``goes_on``: its agent was restarted."""
        succession = Succession(name, self._order, len(self.names), self._loop.time(), LEADER_TIMEOUT, goes_on)
        knows = self.collectors.get(name) or {owner: self.holders[owner] for owner in self.copies[name]}
        party = SimpleNamespace(
            dial=partial(self._connect, name),
            make_leader=partial(self._lead, name),
            decide=partial(self._on_decision, name),
            undecided=partial(self._words, name),
            led=lambda: None,
            log=lambda line: None,
        )
        return Failover(succession, self._ways, knows, cast("Any", party))

    def _lead(self, name: str, epoch: int, failover: Failover) -> Leader:
        book = Ledger(self.holders, self._committed, PATIENCE)
        return Leader(name, book, len(self.holders), None, failover, ways=self._ways, epoch=epoch)

    async def _connect(self, host: str, up: str, epoch: int, handler: Handler) -> Connection:
        await asyncio.sleep(self._latency)
        if up in self._gone:
            raise PeerError("nothing listens there")
        while up in self._stopped:
            await asyncio.sleep(PERIOD)
        near, far = (
            Wire(self._loop, self._latency, self.processors.get(name), self.traffic, partial(self._runs, name)) for name in (host, up)
        )
        near.far, far.far, near.handler = far, near, handler
        join = partial(self._hosts[up].join, cast("Connection", far), host, epoch, self._hosts[host].succession.epoch)
        far.handler = self.processors[up].work(join) if up in self.processors else join()
        return cast("Connection", near)

    def _runs(self, name: str) -> bool:
        return name not in self._stopped

    def _words(self, name: str) -> list[PeerMessage]:
        """A host's words to a leader that knows nothing of it, as an agent says them."""
        self._greetings += 1
        epoch, at = self._hosts[name].succession.epoch, self._committed
        roots = {} if at is None else {owner: root(owner, at.iteration) for owner in self.copies[name]}
        words: list[PeerMessage] = [Rejoin(epoch=epoch, attempt=self._greetings, committed=at, uploading=None, roots=roots)]
        if self._skipped is None or name != self.names[-1]:
            return words
        own = next(owner for owner in self.copies[name] if self.holders[owner][0] == name)
        return [*words, Skipped(own, self._skipped, "late")]

    def _on_decision(self, host: str, message: PeerMessage) -> None:
        if isinstance(message, Commit) or (isinstance(message, Abort) and message.version == self._skipped):
            self.heard.setdefault(host, self.processors[host].free_at if host in self.processors else self._loop.time())

    def lose(self, name: str, step: int, hangs: bool) -> None:
        """A host's agent dies or hangs, when a rank of the last host has skipped a step: which all hear once there is a way again."""
        self._skipped = version(step)
        if hangs:
            self._stopped.add(name)
        else:
            self._gone.add(name)
            self._hosts[name].close()

    @property
    def collector_of_the_last(self) -> str | None:
        return self._ways[self.names[-1]][0] if self.collectors else None

    def restart(self, committed: int) -> None:
        """The first host's agent is another one, which asks who leads; ``committed``: the last step that was."""
        self._committed, self._skipped = version(committed), None
        if self._stopped:
            self._stopped.clear()
            self._hosts[self.first].close()
        self._gone.clear()
        self._hosts[self.first] = self._place(self.first, goes_on=True)

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
        tell = partial(take_all, self._hosts[name].take, reports)
        if name in self.processors:
            self.processors[name].work(tell)
        else:
            tell()

    async def joined(self) -> None:
        """Returns when the leader reaches all: what a host has said before, an agent would say again, and a host here does not."""
        while not all(host.member is None or host.member.reaches_leader for host in self._hosts.values()):
            await asyncio.sleep(PERIOD / 2)

    def trouble(self) -> str:
        """The hosts that have not heard of a decision, and what the leader and two of them know."""
        deaf = [name for name in self.names if name not in self.heard]
        leader, members = self._hosts[self.first].leader, [self._hosts[name].member for name in deaf[:2]]
        known = None if leader is None else (leader.book.committed, vars(leader.book), vars(leader))
        what = deaf[:8], [vars(each) for each in members if each is not None], known
        return f"{len(deaf)} of {len(self.names)} hosts have not heard of a decision: {what}"[:20_000]

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def take_all(take: Callable[[PeerMessage], None], reports: Sequence[PeerMessage]) -> None:
    for each in reports:
        take(each)


class Scenario:
    """Steps of one crowd, and the figures of each."""

    def __init__(self, loop: SimulatedLoop, hosts: int, latency: float, fan_in: int) -> None:
        self._loop, self._hosts = loop, hosts
        self.crowd = Crowd(loop, hosts, latency, fan_in)
        self.leader, *self.others = self.crowd.processors.values()

    async def step(self, happens: Callable[[], None], deaf: int | None = 0) -> dict[str, float]:
        """The figures of one step, which is over when all hosts but so many have heard of the decision; None: it is not waited for."""
        gc.collect()
        self.crowd.heard.clear()
        for processor in self.crowd.processors.values():
            processor.reset()
        traffic = self.crowd.traffic
        traffic.messages = traffic.bytes = 0
        begin = self._loop.time()
        happens()
        await asyncio.sleep(PERIOD)
        while deaf is not None and len(self.crowd.heard) < self._hosts - deaf:
            await asyncio.sleep(PERIOD)
            if self._loop.time() - begin > _MOST:
                raise RuntimeError(self.crowd.trouble())
        busiest = max(self.others, key=lambda processor: processor.seconds, default=self.leader)
        plain = max(1, self._hosts - len(self.crowd.processors))
        return {
            "leader_ms": 1e3 * self.leader.seconds,
            "collector_ms": 1e3 * busiest.seconds if self.others else 0.0,
            "latency_ms": 1e3 * (max(self.crowd.heard.values(), default=begin) - begin),
            "leader_bytes": self.leader.bytes,
            "leader_messages": self.leader.messages,
            "leader_sent": self.leader.sent,
            "collector_messages": busiest.messages if self.others else 0,
            "collector_sent": busiest.sent if self.others else 0,
            "host_messages": traffic.messages / plain,
            "host_bytes": traffic.bytes / plain,
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
        found["skipped"] = await self.step(partial(crowd.skip, step + 2), deaf=None)
        await asyncio.sleep(PATIENCE)  # in which the late one is left out
        found["left_out"] = await self.step(partial(crowd.report, step + 3, None))
        return {f"{who}_ms_{name}": figures[f"{who}_ms"] for name, figures in found.items() for who in ("leader", "collector")}

    async def led_anew(self, step: int, hangs: bool) -> dict[str, float]:
        """The time from the leader's loss to the next one's first decision at the last host, and what that takes of its processor.

        The lost host's agent comes back then, as another one, and a step is committed under the next leader.
        """
        crowd = self.crowd
        found = await self.step(partial(crowd.lose, crowd.first, step, hangs), deaf=1)
        took = crowd.processors[crowd.next].seconds
        crowd.restart(step - 1)
        await asyncio.sleep(_BACK)
        await self.step(partial(crowd.report, step + 1))
        return {"seconds": found["latency_ms"] / 1e3, "leader_ms": 1e3 * took}

    async def collected_anew(self, step: int, hangs: bool) -> dict[str, float]:
        """The time from a collector's loss until all other hosts have heard a decision that one below it has brought about."""
        name = self.crowd.collector_of_the_last
        if name is None:
            return {}
        found = await self.step(partial(self.crowd.lose, name, step, hangs), deaf=1)
        return {"collector_seconds": found["latency_ms"] / 1e3}


async def simulate_change(loop: SimulatedLoop, hosts: int, latency: float, fan_in: int, hangs: bool) -> dict[str, float]:
    found = dict[str, float]()
    for lose in (Scenario.led_anew, Scenario.collected_anew):
        scenario = Scenario(loop, hosts, latency, fan_in)
        await scenario.crowd.joined()
        await scenario.well(range(1, 3))
        found |= await lose(scenario, 3, hangs)
        scenario.crowd.close()
        await asyncio.sleep(PERIOD)
    return found


async def simulate(loop: SimulatedLoop, hosts: int, steps: int, latency: float, fan_in: int, trouble: bool) -> dict[str, float]:
    """Figures of one size; those of a step are medians over all steps but the first."""
    scenario = Scenario(loop, hosts, latency, fan_in)
    await scenario.crowd.joined()
    gc.freeze()  # the collector of a real leader does not look through ten thousand hosts
    joining = scenario.leader.seconds
    found = await scenario.well(range(1, steps + 1))
    if trouble:
        found |= await scenario.troubled(steps + 1)
    scenario.crowd.close()
    gc.unfreeze()
    await asyncio.sleep(PERIOD)
    return {**found, "collectors": len(scenario.crowd.collectors), "joining_ms": 1e3 * joining}


def simulated(hosts: int, steps: int, latency: float, fan_in: int, trouble: bool = False) -> dict[str, float]:
    return on_simulated_time(lambda loop: simulate(loop, hosts, steps, latency, fan_in, trouble))


def changed(hosts: int, latency: float, fan_in: int) -> dict[str, float]:
    """A change of leaders, and of a collector, because its agent is killed, and because it hangs."""
    figures = dict[str, float]()
    for how, hangs in (("killed", False), ("hung", True)):
        what = partial(simulate_change, hosts=hosts, latency=latency, fan_in=fan_in, hangs=hangs)
        figures |= {f"{name}_{how}": value for name, value in on_simulated_time(what).items()}
    return figures


def on_simulated_time(what: Callable[[SimulatedLoop], Coroutine[Any, Any, dict[str, float]]]) -> dict[str, float]:
    loop = SimulatedLoop()
    for module in CLOCKED:
        module.time = SimpleNamespace(monotonic=loop.time)  # type: ignore[attr-defined]
    try:
        return loop.run_until_complete(what(loop))
    finally:
        for module in CLOCKED:
            module.time = time  # type: ignore[attr-defined]
        loop.close()
