"""The commit protocol at 16 to 10 000 hosts: the agents' own code with a simulated clock and an in-memory network.

Every host has the real end of the reporting connection (`MemberLink`), collectors the real `Collector`, the leader the real ledger;
messages are packed and checked as on a socket. Simulated are time and the way between: a frame takes the link's latency, and the leader
and each collector, which have one thread, handle one message after the other, each as long as it has really taken this machine. What
sockets and TLS cost is measured with real processes on loopback. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import selectors
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any, cast

import common
from gemini_ft.agent import collecting, leadership, reporting
from gemini_ft.agent.collecting import Collector
from gemini_ft.agent.leadership import Leader
from gemini_ft.agent.lifecycle import raise_descriptor_limit
from gemini_ft.agent.reporting import MemberLink
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.effects import Completed
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.ledger import Commit, Ledger
from gemini_ft.core.placement import describe, place
from gemini_ft.core.succession import Succession
from gemini_ft.core.tree import FAN_IN, ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.handshake import Listener, dial, listen
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin, peers
from gemini_ft.wire.tcp import Address, Connection, Handler

RANKS = 8  # per host
REPLICAS = 2
PERIOD = 0.9  # simulated seconds between steps: shorter than between heartbeats, which are left out then
INCARNATION = Incarnation(1, "0123abcd")
SECRET = b"of this benchmark"
Holders = dict[int, tuple[str, ...]]
CLOCKED = collecting, leadership, reporting  # modules that read the clock


def holders_of(hosts: int) -> Holders:
    placed = place([f"host-{i:05}" for i in range(hosts)], REPLICAS)
    return {number * RANKS + rank: placed[host] for number, host in enumerate(sorted(placed)) for rank in range(RANKS)}


def held(holders: Holders) -> dict[str, list[int]]:
    """Host -> owners of the shards that it holds."""
    out: dict[str, list[int]] = {}
    for owner, hosts in holders.items():
        for host in hosts:
            out.setdefault(host, []).append(owner)
    return out


def below(ways: Mapping[str, Sequence[str]], holders: Holders) -> dict[str, Collector]:
    """The collectors, each with what it must know of its own hosts: all of them are in one process here."""
    copies, groups = held(holders), dict[str, set[str]]()
    for host, (up, *others) in ways.items():
        if others:
            groups.setdefault(up, {up}).add(host)
    known = {name: {owner: holders[owner] for host in hosts for owner in copies[host]} for name, hosts in sorted(groups.items())}
    return {name: Collector(name, Gathering(name, theirs)) for name, theirs in known.items()}


def report(owner: int, host: str, step: int) -> Completed:
    return Completed(owner, host, Version(INCARNATION, step), "l" * 16, "", f"{owner:032x}")


# -- the simulation ---------------------------------------------------------------------------------


class Clock(selectors.DefaultSelector):
    """Time passes when nothing is left to do at this moment: waiting for the next timer moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(0.0, timeout)
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
        ledger = Ledger(self.holders, None, 30.0)
        self._leader = Leader(self.first, ledger, len(self.holders), None, partial(self._on_decision, self.first), ways=ways)
        self._links = {name: self._link(name, ways[name][0]) for name in self.names[1:]}

    def _link(self, name: str, up: str) -> MemberLink:
        bundles = Bundles(name, {owner: self.holders[owner] for owner in self.copies[name]})
        ways, dial = [up] * (up != self.first), partial(self._connect, name)
        told = partial(self._on_decision, name)
        return MemberLink(ways, dial, first_leads(name, self.first), told, rejoin, print, bundles, self.collectors.get(name))

    async def _connect(self, host: str, up: str, _epoch: int, handler: Handler) -> Connection:
        near, far = (Wire(self._loop, self._latency, self.processors.get(name)) for name in (host, up))
        near.far, far.far, near.handler = far, near, handler
        join = self._leader.join if up == self.first else self.collectors[up].join
        far.handler = self.processors[up].work(lambda: join(cast("Connection", far), host))
        return cast("Connection", near)

    def _on_decision(self, host: str, message: PeerMessage) -> None:
        if isinstance(message, Commit):
            self.heard[host] = self.processors[host].free_at if host in self.processors else self._loop.time()

    def report(self, step: int) -> None:
        """All hosts have all of their copies."""
        for name in reversed(self.names):
            take = self._leader.take if name == self.first else self._links[name].take
            reports = [report(owner, name, step) for owner in self.copies[name]]
            tell = partial(_each, take, reports)
            self.processors[name].work(tell) if name in self.processors else tell()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._leader.close()


def _each(take: Callable[[PeerMessage], None], reports: Sequence[Completed]) -> None:
    for each in reports:
        take(each)


def first_leads(name: str, first: str) -> Succession:
    """A host's knowledge that the first one leads, and no other ever does."""
    return Succession(name, [first], 0, 0.0, timeout=0.0)


def rejoin() -> Sequence[PeerMessage]:
    return [Rejoin(committed=None, uploading=None)]


async def simulate(loop: SimulatedLoop, hosts: int, steps: int, latency: float, fan_in: int) -> dict[str, float]:
    """Figures of one size; those of a step are medians over all steps but the first."""
    crowd = Crowd(loop, hosts, latency, fan_in)
    leader, *others = crowd.processors.values()
    await asyncio.sleep(PERIOD / 2)
    gc.freeze()  # the collector of a real leader does not look through ten thousand hosts
    joining = leader.seconds
    found: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        gc.collect()
        crowd.heard.clear()
        for processor in crowd.processors.values():
            processor.reset()
        begin = loop.time()
        crowd.report(step)
        await asyncio.sleep(PERIOD)
        while len(crowd.heard) < hosts:
            await asyncio.sleep(PERIOD)
        busiest = max(others, key=lambda processor: processor.seconds, default=leader)
        found.append(
            {
                "leader_ms": 1e3 * leader.seconds,
                "collector_ms": 1e3 * busiest.seconds if others else 0.0,
                "latency_ms": 1e3 * (max(crowd.heard.values()) - begin),
                "leader_bytes": leader.bytes,
                "leader_messages": leader.messages,
                "collector_messages": busiest.messages if others else 0,
            }
        )
    crowd.close()
    gc.unfreeze()
    await asyncio.sleep(PERIOD)
    medians = {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}
    return {**medians, "collectors": len(others), "joining_ms": 1e3 * joining}


def simulated(hosts: int, steps: int, latency: float, fan_in: int) -> dict[str, float]:
    loop = SimulatedLoop()
    for module in CLOCKED:
        module.time = SimpleNamespace(monotonic=loop.time)  # type: ignore[attr-defined]
    try:
        return loop.run_until_complete(simulate(loop, hosts, steps, latency, fan_in))
    finally:
        for module in CLOCKED:
            module.time = time  # type: ignore[attr-defined]
        loop.close()


def memory_of(hosts: int) -> float:
    """MiB of the leader's ledger in the middle of a step, all reports but one being there."""
    holders = holders_of(hosts)
    tracemalloc.start()
    book = Ledger(holders, None, 30.0)
    pairs = [(owner, host) for owner, hosts in holders.items() for host in hosts]
    for owner, host in pairs[:-1]:
        book.report(report(owner, host, 1), 0.0)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / 2**20


def placing(hosts: int) -> float:
    """Milliseconds in which rank 0 places the hosts, 32 to a rack, and describes what that survives."""
    names = [f"host-{i:05}" for i in range(hosts)]
    racks = {name: f"rack-{i // 32}" for i, name in enumerate(names)}
    begin = time.process_time()
    describe(place(names, REPLICAS, racks), racks)
    return 1e3 * (time.process_time() - begin)


# -- real processes ---------------------------------------------------------------------------------


def lead(pipe: Pipe, hosts: int, fan_in: int) -> None:
    """The leader's process: tells its address, then after each word its processor time so far."""
    raise_descriptor_limit()

    async def serve() -> None:
        holders = holders_of(hosts)
        copies = held(holders)
        first = min(copies)
        ways = ways_up(sorted(copies), first, fan_in)
        leader = Leader(first, Ledger(holders, None, 30.0), len(holders), None, lambda message: None, ways=ways)
        listener = await take_in(leader)
        pipe.send(listener.address)
        loop = asyncio.get_running_loop()
        while (step := await loop.run_in_executor(None, pipe.recv)) is not None:
            if step > 0:
                _each(leader.take, [report(owner, first, step) for owner in copies[first]])
            pipe.send(time.process_time())

    asyncio.run(serve())


async def take_in(part: Leader | Collector) -> Listener:
    return await listen(
        "127.0.0.1", None, lambda: SECRET, lambda connection, claims: part.join(connection, claims.host), print, lambda stream: True
    )


async def connect(addresses: Mapping[str, Address], host: str, up: str, _epoch: int, handler: Handler) -> Connection:
    claims = Claims(run="r", stream="s", host=host, to=up, role="report", incarnation=None)
    return await dial(addresses[up], claims, SECRET, handler)


async def follow(pipe: Pipe, hosts: int, steps: int, fan_in: int) -> dict[str, float]:
    """All other hosts, in one process, on real connections to the leader's and among each other."""
    holders = holders_of(hosts)
    copies = held(holders)
    names = sorted(copies)
    ways = ways_up(names, names[0], fan_in)
    there = below(ways, holders)
    addresses = {names[0]: pipe.recv(), **{name: (await take_in(part)).address for name, part in there.items()}}
    heard: set[str] = set()
    everybody = asyncio.Event()

    def on_decision(name: str, message: PeerMessage) -> None:
        if isinstance(message, Commit):
            heard.add(name)
            if len(heard) == hosts - 1:
                everybody.set()

    def asked(step: int) -> float:
        pipe.send(step)
        return float(pipe.recv())

    links = {}
    for name in sorted(ways, key=lambda name: name not in there):
        up = ways[name][0]
        ways_to, told = [up] * (up != names[0]), partial(on_decision, name)
        bundles, order = Bundles(name, holders), first_leads(name, names[0])
        links[name] = MemberLink(ways_to, partial(connect, addresses, name), order, told, rejoin, print, bundles, there.get(name))
        if len(links) % 16 == 0:
            await asyncio.sleep(0.2)  # a listener takes few strangers at a time
    async with asyncio.timeout(120):
        while not all(link.reaches_leader for link in links.values()):
            await asyncio.sleep(0.1)
    took, delays = [], []
    for step in range(1, steps + 1):
        heard.clear()
        everybody.clear()
        before, begin = asked(0), time.monotonic()
        for name, link in links.items():
            _each(link.take, [report(owner, name, step) for owner in copies[name]])
        asked(step)
        async with asyncio.timeout(120):
            await everybody.wait()
        delays.append(time.monotonic() - begin)
        took.append(asked(0) - before)
    for link in links.values():
        link.close()
    pipe.send(None)
    await asyncio.sleep(0.1)
    return {"leader_ms": 1e3 * statistics.median(took[1:]), "latency_ms": 1e3 * statistics.median(delays[1:])}


def real(hosts: int, steps: int, fan_in: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lead, args=(theirs, hosts, fan_in))
    process.start()
    try:
        return asyncio.run(follow(ours, hosts, steps, fan_in))
    finally:
        process.join(10)
        process.kill()
        process.join()


# -- what is shown ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 to 1000 hosts, 16, 32 and 200 real ones; writes no report")
    parser.add_argument("--sizes", type=int, nargs="+", help="hosts (default: 16 to 10 000)")
    parser.add_argument(
        "--real", type=int, nargs=2, help="a smaller and a larger number of real hosts, without collectors (default: 32, 192)"
    )
    parser.add_argument("--real-collected", type=int, help="real hosts with collectors (default: 1000)")
    parser.add_argument("--steps", type=int, default=0, help="per size (default: 6; --quick: 3)")
    options = parser.parse_args()
    common.clean_up_on_sigterm()
    raise_descriptor_limit()
    sizes = options.sizes or ([16, 128, 1000] if options.quick else [16, 64, 128, 512, 1000, 4000, 10000])
    steps = options.steps or (3 if options.quick else 6)
    small, large = options.real or ((16, 32) if options.quick else (32, 192))
    collected = options.real_collected or (200 if options.quick else 1000)
    found = {hosts: simulated(hosts, steps, 10e-6, FAN_IN) for hosts in sizes}
    for hosts, figures in found.items():
        figures["latency_ms_100us"] = simulated(hosts, steps, 100e-6, FAN_IN)["latency_ms"]
        figures["memory_mib"], figures["placing_ms"] = memory_of(hosts), placing(hosts)
    measured = {hosts: real(hosts, 3 * steps, fan_in) for hosts, fan_in in ((small, small), (large, large), (collected, FAN_IN))}
    beside = {hosts: simulated(hosts, 3 * steps, 10e-6, fan_in) for hosts, fan_in in ((small, small), (large, large), (collected, FAN_IN))}
    per_way = (measured[small]["leader_ms"] - beside[small]["leader_ms"]) / (
        small - 1
    )  # a message in and one out, through TLS and the kernel
    rest = measured[collected]["leader_ms"] - beside[collected]["leader_ms"] - per_way * beside[collected]["leader_messages"]
    per_byte = max(0.0, rest / beside[collected]["leader_bytes"])  # collectors' messages are long
    predicted = beside[large]["leader_ms"] + per_way * (large - 1)

    def with_sockets(figures: dict[str, float], who: str) -> float:
        """A host's cost; bytes count where they are many, at a leader with collectors."""
        by_bytes = per_byte * figures["leader_bytes"] if who == "leader" and figures["collectors"] else 0.0
        return figures[f"{who}_ms"] + per_way * figures[f"{who}_messages"] + by_bytes

    for figures in found.values():
        figures |= {f"{who}_ms_with_sockets": with_sockets(figures, who) for who in ("leader", "collector")}

    def ratio(name: str, hosts: int) -> float | None:
        return round(found[hosts][name], 2) if hosts in found else None

    growth = found[1000]["leader_ms"] / 1000 / (found[128]["leader_ms"] / 128) if {128, 1000} <= found.keys() else None
    header = ["hosts x 8", "collectors", "leader, ms of processor per step", "with sockets (estimated)", "busiest collector, ms",
              "with sockets (estimated)", "leader's messages in", "leader's kB", "commit after the last copy, ms (10 us)", "(100 us)",
              "joining, ms", "ledger, MiB", "placing, ms"]  # fmt: skip
    rows = [
        [str(hosts), f"{f['collectors']:.0f}", f"{f['leader_ms']:.2f}", f"{f['leader_ms_with_sockets']:.1f}", f"{f['collector_ms']:.2f}",
         f"{f['collector_ms_with_sockets']:.1f}", f"{f['leader_messages']:.0f}", f"{f['leader_bytes'] / 1e3:.0f}", f"{f['latency_ms']:.2f}",
         f"{f['latency_ms_100us']:.2f}", f"{f['joining_ms']:.1f}", f"{f['memory_mib']:.1f}", f"{f['placing_ms']:.1f}"]
        for hosts, f in found.items()
    ]  # fmt: skip
    proof = [[str(hosts), f"{beside[hosts]['collectors']:.0f}", f"{measured[hosts]['leader_ms']:.2f}", f"{beside[hosts]['leader_ms']:.2f}",
              f"{measured[hosts]['latency_ms']:.1f}"] for hosts in measured]  # fmt: skip
    body = (
        f"{common.table(header, rows)}\n\nReal connections on loopback, the leader in a process of its own:\n\n"
        f"{common.table(['hosts', 'collectors', 'leader, ms of processor per step', 'of which simulated', 'commit, ms'], proof)}\n\n"
        f"A message in and one out cost {1e3 * per_way:.0f} us in TLS, asyncio and the kernel beyond what is simulated, by the smallest "
        f"of these; with it the one of {large} hosts is predicted to take {predicted:.2f} ms. With collectors there are "
        f"{1e6 * per_byte:.1f} ms beyond that for each megabyte of their messages.\n"
    )
    print(body)
    if not options.quick:
        common.write_report("scale", "The commit protocol at 16 to 10 000 hosts", body, common.versions(["msgpack", "pydantic"]))
    common.print_result(
        "scale",
        {"simulated": found, "real": measured, "us_per_message_in_sockets": round(1e3 * per_way, 1)},
        {
            "leader_ms_1000x8": ratio("leader_ms_with_sockets", 1000),
            "leader_ms_10000x8": ratio("leader_ms_with_sockets", 10000),
            "collector_ms_10000x8": ratio("collector_ms_with_sockets", 10000),
            "growth_128_to_1000": round(growth, 2) if growth else None,
            "simulated_vs_real": common.ratio(predicted, measured[large]["leader_ms"]),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
