"""The commit protocol at 16 to 10 000 hosts: the agents' own code with a simulated clock and an in-memory network.

Every host has the real end of the reporting connection (`MemberLink`), the leader the real ledger and all members; messages are packed and
checked as on a socket. Simulated are time and the way between: a frame takes the link's latency, and the leader, which has one thread,
handles one message after the other, each as long as it has really taken this machine. What sockets and TLS cost is measured with real
processes on loopback. See benchmarks/README.md.
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
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any, cast

import common
from gemini_ft.agent import leadership
from gemini_ft.agent.leadership import Leader, MemberLink, MemberPort
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.effects import Completed
from gemini_ft.core.ledger import Commit, Ledger
from gemini_ft.core.placement import describe, place
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.handshake import dial, listen
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin, peers
from gemini_ft.wire.tcp import Connection, Handler

RANKS = 8  # per host
REPLICAS = 2
PERIOD = 0.9  # simulated seconds between steps: shorter than between heartbeats, which are left out then
INCARNATION = Incarnation(1, "0123abcd")
SECRET = b"of this benchmark"
Holders = dict[int, tuple[str, ...]]


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
    """The leader's thread: handles one thing after the other, each as long as it really takes."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop, self.free_at, self.seconds = loop, 0.0, 0.0
        self.messages = self.sent = 0
        self.bytes = 0
        self._outgoing: list[tuple[Wire, bytes]] = []

    def send(self, wire: Wire, frame: bytes) -> None:
        self._outgoing.append((wire, frame))

    def work(self, what: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = what()
        took = time.thread_time() - begin
        self.seconds += took
        self.free_at = max(self.free_at, self._loop.time()) + took
        for wire, frame in self._outgoing:
            self.sent += 1
            wire.depart(frame, self.free_at)
        self._outgoing.clear()
        return result


class Wire:
    """One end of a connection in memory; the other end is ``far``."""

    far: Wire

    def __init__(self, loop: SimulatedLoop, handler: Handler, latency: float, processor: Processor, at_leader: bool) -> None:
        self._loop, self.handler, self._latency, self._processor, self._at_leader = loop, handler, latency, processor, at_leader

    def send(self, message: PeerMessage) -> None:
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes) -> None:
        if self._at_leader:
            self._processor.send(self, frame)
        else:
            self.depart(frame, self._loop.time())

    def depart(self, frame: bytes, at: float) -> None:
        self._processor.bytes += len(frame)
        self._loop.call_at(at + self._latency, self.far.arrive, frame)

    def arrive(self, frame: bytes) -> None:
        if not self._at_leader:
            self.handler.on_message(peers.unpack(memoryview(frame)[4:]))
            return
        self._processor.messages += 1
        self._processor.work(lambda: self.handler.on_message(peers.unpack(memoryview(frame)[4:])))

    def abort(self, reason: str) -> None:
        """The benchmark is over."""


async def simulate(loop: SimulatedLoop, hosts: int, steps: int, latency: float) -> dict[str, float]:
    """Figures of one size; times of a step are medians over all steps but the first."""
    holders = holders_of(hosts)
    copies, processor = held(holders), Processor(loop)
    heard: dict[str, float] = {}

    def on_decision(host: str, message: PeerMessage) -> None:
        if isinstance(message, Commit):
            heard[host] = processor.free_at if host == names[0] else loop.time()

    names = sorted(copies)
    leader = Leader(Ledger(holders, None, 30.0), len(holders), None, partial(on_decision, names[0]))

    async def connect(host: str, handler: Handler) -> Connection:
        near = Wire(loop, handler, latency, processor, at_leader=False)
        far = Wire(loop, handler, latency, processor, at_leader=True)
        near.far, far.far = far, near
        far.handler = cast("MemberPort", processor.work(lambda: leader.join(cast("Connection", far), host)))
        return cast("Connection", near)

    def rejoin() -> Sequence[PeerMessage]:
        return [Rejoin(committed=None, uploading=None)]

    links = {
        name: MemberLink(partial(connect, name), partial(on_decision, name), rejoin, print, Bundles(name, holders)) for name in names[1:]
    }
    await asyncio.sleep(PERIOD / 2)
    gc.freeze()  # the collector of a real leader does not look through ten thousand hosts
    joining = processor.seconds
    took, delays, traffic, received, sent = [], [], [], [], []
    for step in range(1, steps + 1):
        gc.collect()
        heard.clear()
        processor.seconds, processor.bytes, processor.messages, processor.sent = 0.0, 0, 0, 0
        begin = loop.time()
        for name, link in links.items():
            for owner in copies[name]:
                link.take(report(owner, name, step))
        for owner in copies[names[0]]:
            processor.work(partial(leader.take, report(owner, names[0], step)))
        await asyncio.sleep(PERIOD)
        while len(heard) < hosts:
            await asyncio.sleep(PERIOD)
        took.append(processor.seconds)
        delays.append(max(heard.values()) - begin)
        traffic.append(processor.bytes / hosts)
        received.append(processor.messages / hosts)
        sent.append(processor.sent / hosts)
    for link in links.values():
        link.close()
    leader.close()
    gc.unfreeze()
    await asyncio.sleep(PERIOD)
    return {
        "leader_ms": 1e3 * statistics.median(took[1:]),
        "latency_ms": 1e3 * statistics.median(delays[1:]),
        "bytes_per_host": statistics.median(traffic[1:]),
        "messages_to_leader": statistics.median(received[1:]),
        "messages_from_leader": statistics.median(sent[1:]),
        "joining_ms": 1e3 * joining,
    }


def simulated(hosts: int, steps: int, latency: float) -> dict[str, float]:
    loop = SimulatedLoop()
    leadership.time = SimpleNamespace(monotonic=loop.time)  # type: ignore[assignment,attr-defined]
    try:
        return loop.run_until_complete(simulate(loop, hosts, steps, latency))
    finally:
        leadership.time = time  # type: ignore[attr-defined]
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


def lead(pipe: Pipe, hosts: int) -> None:
    """The leader's process: tells its address, then after each word its processor time so far."""

    async def serve() -> None:
        holders = holders_of(hosts)
        names = sorted(held(holders))
        leader = Leader(Ledger(holders, None, 30.0), len(holders), None, lambda message: None)
        listener = await listen(
            "127.0.0.1", None, lambda: SECRET, lambda connection, claims: leader.join(connection, claims.host), print, lambda stream: True
        )
        pipe.send(listener.address)
        loop = asyncio.get_running_loop()
        while (step := await loop.run_in_executor(None, pipe.recv)) is not None:
            if step > 0:
                for owner in held(holders)[names[0]]:
                    leader.take(report(owner, names[0], step))
            pipe.send(time.process_time())

    asyncio.run(serve())


async def follow(pipe: Pipe, hosts: int, steps: int) -> dict[str, float]:
    """All other hosts, in one process, on real connections to the leader's."""
    holders = holders_of(hosts)
    copies = held(holders)
    names = sorted(copies)
    address = pipe.recv()
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

    def rejoin() -> Sequence[PeerMessage]:
        return [Rejoin(committed=None, uploading=None)]

    links = {}
    for name in names[1:]:
        claims = Claims(run="r", stream="s", host=name, to=names[0], role="report", incarnation=None)
        bundles = Bundles(name, holders)
        links[name] = MemberLink(partial(dial, address, claims, SECRET), partial(on_decision, name), rejoin, print, bundles)
        if len(links) % 16 == 0:
            await asyncio.sleep(0.2)  # a listener takes few strangers at a time
    async with asyncio.timeout(120):
        while not all(link.connection for link in links.values()):
            await asyncio.sleep(0.1)
    took, delays = [], []
    for step in range(1, steps + 1):
        heard.clear()
        everybody.clear()
        before, begin = asked(0), time.monotonic()
        for name, link in links.items():
            for owner in copies[name]:
                link.take(report(owner, name, step))
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


def real(hosts: int, steps: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lead, args=(theirs, hosts))
    process.start()
    try:
        return asyncio.run(follow(ours, hosts, steps))
    finally:
        process.join(10)
        process.kill()
        process.join()


# -- what is shown ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 to 1000 hosts, 16 and 32 real ones; writes no report")
    parser.add_argument("--sizes", type=int, nargs="+", help="hosts (default: 16 to 10 000)")
    parser.add_argument("--real", type=int, nargs=2, help="a smaller and a larger number of real hosts (default: 32 and 192)")
    parser.add_argument("--steps", type=int, default=0, help="per size (default: 6; --quick: 3)")
    options = parser.parse_args()
    common.clean_up_on_sigterm()
    sizes = options.sizes or ([16, 128, 1000] if options.quick else [16, 64, 128, 512, 1000, 4000, 10000])
    steps = options.steps or (3 if options.quick else 6)
    small, large = options.real or ((16, 32) if options.quick else (32, 192))
    found = {hosts: simulated(hosts, steps, 10e-6) for hosts in sizes}
    for hosts, figures in found.items():
        figures["latency_ms_100us"] = simulated(hosts, steps, 100e-6)["latency_ms"]
        figures["memory_mib"], figures["placing_ms"] = memory_of(hosts), placing(hosts)
    measured = {hosts: real(hosts, 3 * steps) for hosts in (small, large)}
    beside = {hosts: simulated(hosts, 3 * steps, 10e-6)["leader_ms"] for hosts in (small, large)}
    per_host = (measured[small]["leader_ms"] - beside[small]) / (small - 1)  # a message in and one out, through TLS and the kernel
    predicted = beside[large] + per_host * (large - 1)

    def leader_ms(hosts: int) -> float | None:
        return round(found[hosts]["leader_ms"], 2) if hosts in found else None

    growth = found[1000]["leader_ms"] / 1000 / (found[128]["leader_ms"] / 128) if {128, 1000} <= found.keys() else None
    header = ["hosts x 8", "leader, ms of processor per step", "with sockets (estimated)", "messages per host, in + out", "bytes per host",
              "commit after the last copy, ms (10 us)", "(100 us)", "joining, ms", "ledger, MiB", "placing, ms"]  # fmt: skip
    rows = [
        [str(hosts), f"{f['leader_ms']:.2f}", f"{f['leader_ms'] + per_host * (hosts - 1):.1f}",
         f"{f['messages_to_leader']:.2f} + {f['messages_from_leader']:.2f}", f"{f['bytes_per_host']:.0f}", f"{f['latency_ms']:.2f}",
         f"{f['latency_ms_100us']:.2f}", f"{f['joining_ms']:.1f}", f"{f['memory_mib']:.1f}", f"{f['placing_ms']:.1f}"]
        for hosts, f in found.items()
    ]  # fmt: skip
    proof = [[str(hosts), f"{measured[hosts]['leader_ms']:.2f}", f"{beside[hosts]:.2f}", f"{measured[hosts]['latency_ms']:.1f}"]
             for hosts in measured]  # fmt: skip
    body = (
        f"{common.table(header, rows)}\n\nReal processes on loopback, the leader in one of its own:\n\n"
        f"{common.table(['hosts', 'leader, ms of processor per step', 'of which simulated', 'commit, ms'], proof)}\n\n"
        f"A message in and one out cost {1e3 * per_host:.0f} us in TLS, asyncio and the kernel beyond what is simulated, by the smaller "
        f"of the two; with it the larger one is predicted to take {predicted:.2f} ms.\n"
    )
    print(body)
    if not options.quick:
        common.write_report("scale", "The commit protocol at 16 to 10 000 hosts", body, common.versions(["msgpack", "pydantic"]))
    common.print_result(
        "scale",
        {"simulated": found, "real": measured, "us_per_host_in_sockets": round(1e3 * per_host, 1)},
        {
            "leader_ms_1000x8": leader_ms(1000),
            "leader_ms_10000x8": leader_ms(10000),
            "growth_128_to_1000": round(growth, 2) if growth else None,
            "simulated_vs_real": common.ratio(predicted, measured[large]["leader_ms"]),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
