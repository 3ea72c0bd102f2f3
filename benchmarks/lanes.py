"""GB/s and processor seconds per GB between two agents' connections on one host, for 1 to 16 lanes, with and without tags and encryption.

Two processes, each with an event loop as an agent has, dial each other over loopback and send chunks from memory to memory by the code that
carries replicas (`gemini_ft.wire.tcp`, `gemini_ft.agent.replication.carriers`). A row is a number of lanes and a kind of payload: `sealed`,
as it is by default; `encrypted`; `bare`, without any tag, which no run has; `gated`, sealed through the gate of a host whose worker
communicates with nobody, as replicas go by default. `one way` has one sender and one receiver, all others are both.
Each row is measured for a time, after a time to settle; rows come in random order, as often as there are rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import mmap
import multiprocessing
import random
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any, cast

import common
from gemini_ft.agent.replication.carriers import ByAgents
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.pacing import Outgoing, Pacing
from gemini_ft.config import TrafficConfig
from gemini_ft.core.traffic import Moment
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire import handshake, lane
from gemini_ft.wire.control_page import ControlPage
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.peer_messages import Claims, PeerMessage
from gemini_ft.wire.tcp import Address, Connection

PACKAGES = ("gemini-ft", "cryptography", "xxhash")
CHUNK = 8 * 2**20
SOURCE, TARGET = 24, 48  # chunks: larger than the caches, and more than travel at a time
LANES = (1, 2, 4, 8, 16)
KINDS = ("sealed", "gated", "encrypted", "bare", "one way")
SETTLE = 0.3  # seconds before those that count
ROUNDS, SECONDS, QUICK_SECONDS = 5, 2.0, 0.8
IN_FLIGHT = 4  # as gemini_ft.agent.replication.send has it

Row = tuple[str, int]  # kind, lanes


SEALING: dict[Any, Any] = {lane.Seal: lane.Seal.add, lane.Unseal: lane.Unseal.add}
BARE: dict[Any, Any] = {lane.Seal: lambda seal, piece: piece, lane.Unseal: lambda unseal, piece: None}  # tags over nothing


class Receiving:
    """Takes chunks into memory, in turn, and counts them."""

    def __init__(self, memory: memoryview) -> None:
        self.nbytes = 0
        self.lost: str | None = None
        self._memory, self._places = memory, itertools.cycle(range(0, len(memory), CHUNK))

    def on_message(self, message: PeerMessage) -> memoryview | None:
        at = next(self._places)
        return self._memory[at : at + CHUNK]

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        self.nbytes += CHUNK

    def on_lost(self, reason: str) -> None:
        self.lost = reason


class Gated:
    """A gate that nothing closes, and the speed of the link behind it, learned as the links of a session learn it."""

    def __init__(self, connection: Connection, carrier: ByAgents, traffic: TrafficConfig) -> None:
        self._carrier, self._gate, page = carrier, Gate(traffic), ControlPage.create()
        page.write(Moment(since=time.monotonic()))
        self._gate.watch(0, page)
        self._gate.register(connection, carrier)
        connection.drained = self._gate.poke
        context: Any = SimpleNamespace(host=SimpleNamespace(name="host"), report=lambda message: None, tell_workers=lambda message: None)
        self._pacing = Pacing(context, cast("Any", SimpleNamespace(traffic=traffic, interval=None)), self._gate)
        self._out = Outgoing(owner=0, version=Version(Incarnation(1, "n"), 1), slot=0, memory=None, busy_before=carrier.meter())  # type: ignore[arg-type]

    async def allowed(self, nbytes: int) -> int:
        leave = await self._gate.leave(nbytes, lambda: time.monotonic() + 1)
        self._out.sent_bytes += leave.nbytes
        self._pacing.under_way(self._out, self._carrier.meter())
        return leave.nbytes

    def close(self) -> None:
        self._gate.close()


async def _at_once(nbytes: int) -> int:
    return nbytes


async def _pump(connection: Connection, memory: memoryview, is_gated: bool) -> None:
    traffic = TrafficConfig.model_validate({"when": "idle" if is_gated else "ready"})
    carrier = ByAgents(connection, traffic)
    gated = Gated(connection, carrier, traffic) if is_gated else None
    try:
        for index in itertools.count():
            at = index % SOURCE * CHUNK
            chunk = Chunk(owner=0, iteration=1, index=index, offset=at, nbytes=CHUNK, digest=0)
            carrier.send_chunk(chunk, 0, memory[at : at + CHUNK], gated.allowed if gated is not None else _at_once)
            await carrier.flushed(IN_FLIGHT)
            if connection.closed.is_set():
                break
    finally:
        if gated is not None:
            gated.close()


def _memory(chunks: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, chunks * CHUNK))
    memory[:] = random.Random(0).randbytes(CHUNK) * chunks
    return memory


async def _row(pipe: Pipe, row: Row, sends: bool, seconds: float, source: memoryview, target: memoryview) -> None:
    """Measures one row, at one end: tells the parent the address, then bytes received, seconds, processor seconds."""
    kind, lanes = row
    for end, add in (BARE if kind == "bare" else SEALING).items():
        end.add = add
    receiving, theirs = Receiving(target), []

    def accept(connection: Connection, claims: Claims) -> Receiving:
        theirs.append(connection)
        return receiving

    listener = await handshake.listen("127.0.0.1", None, lambda: b"secret", accept, print, lambda stream: kind == "encrypted")
    pipe.send(listener.address)
    address: Address = await asyncio.to_thread(pipe.recv)
    claims = Claims(run="r", stream="s", host="h", to="", role="replicate", incarnation=None, lanes=lanes)
    sending = Receiving(target)
    mine = await handshake.dial(address, claims, b"secret", sending)
    pump = asyncio.create_task(_pump(mine, source, kind == "gated")) if sends else None
    await asyncio.sleep(SETTLE)
    before, nbytes, begin = resource.getrusage(resource.RUSAGE_SELF), receiving.nbytes, time.perf_counter()
    await asyncio.sleep(seconds)
    after, took, nbytes = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begin, receiving.nbytes - nbytes
    if (broken := sending.lost or receiving.lost) is not None:
        raise SystemExit(f"{row}: {broken}")
    pipe.send((nbytes, took, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime))
    await asyncio.to_thread(pipe.recv)
    if pump is not None:
        pump.cancel()
    for connection in (mine, *theirs):
        connection.abort("done")
    listener.close()
    await asyncio.sleep(0.05)


def _end(pipe: Pipe) -> None:
    """One of the two processes."""
    source, target = _memory(SOURCE), _memory(TARGET)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        row, sends, seconds = order
        asyncio.run(_row(pipe, row, sends, seconds, source, target))
        pipe.send("done")


class Ends:
    """The two processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self._processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_end, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def measure(self, row: Row, seconds: float) -> dict[str, float]:
        """GB/s into (and out of) an agent, and seconds per GB that both ends together take for one that travels."""
        for pipe, sends in zip(self.pipes, (True, row[0] != "one way"), strict=True):
            pipe.send((row, sends, seconds))
        addresses = [pipe.recv() for pipe in self.pipes]
        for pipe, address in zip(self.pipes, reversed(addresses), strict=True):
            pipe.send(address)
        found = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send("stop")
        for pipe in self.pipes:
            pipe.recv()
        total = sum(nbytes for nbytes, *_ in found) / 1e9
        if not total:
            raise SystemExit(f"{row}: not one byte has arrived in {seconds} s; the machine is too busy to measure")
        return {
            "gb_per_s": max(nbytes / took for nbytes, took, *_ in found) / 1e9,
            "user": sum(each[2] for each in found) / total,
            "kernel": sum(each[3] for each in found) / total,
        }

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)


def measured(rows: list[Row], rounds: int, seconds: float) -> dict[Row, dict[str, float]]:
    """Row -> medians of all rounds."""
    ends = Ends()
    found: dict[Row, list[dict[str, float]]] = {row: [] for row in rows}
    for row in (each for _ in range(rounds) for each in random.sample(rows, len(rows))):
        found[row].append(ends.measure(row, seconds))
    ends.close()
    return {
        row: {key: round(statistics.median(one[key] for one in each), 4) for key in ("gb_per_s", "user", "kernel")}
        for row, each in found.items()
    }


def report(found: dict[Row, dict[str, float]]) -> str:
    """The body of the dated report."""
    lines = [
        [kind, str(lanes), f"{one['gb_per_s']:.2f}", f"{one['user'] + one['kernel']:.3f}", f"{one['user']:.3f}", f"{one['kernel']:.3f}"]
        for (kind, lanes), one in found.items()
    ]
    return common.table(["payloads", "lanes", "GB/s in each direction", "s/GB, both ends", "user", "kernel"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, no report")
    parser.add_argument("--lanes", type=int, nargs="+", default=list(LANES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    rows = [(kind, lanes) for kind in arguments.kinds for lanes in arguments.lanes]
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    found = measured(rows, rounds, QUICK_SECONDS if arguments.quick else SECONDS)
    text = report(found)
    print(text, flush=True)
    if not arguments.quick:
        told = f"{__doc__.partition(chr(10))[2].strip()}\n\n{text}"  # type: ignore[union-attr]
        path = common.write_report("lanes", "Lanes between two agents", told, common.versions(PACKAGES))
        print(f"report: benchmarks/results/{path.name}", file=sys.stderr)
    results = {f"{kind}, {lanes} lanes": one for (kind, lanes), one in found.items()}
    few, many = min(arguments.lanes), max(arguments.lanes)
    ratios: dict[str, float | None] = {}
    for kind in arguments.kinds:
        least, most = found[kind, few], found[kind, many]
        ratios[f"{kind}: speed of {many} lanes to {few}"] = common.ratio(most["gb_per_s"], least["gb_per_s"])
        ratios[f"{kind}: seconds per GB of {many} lanes to {few}"] = common.ratio(*(one["user"] + one["kernel"] for one in (most, least)))
    common.print_result("lanes", results, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
