"""Real connections on loopback, for `scale.py`: the leader in a process of its own, all other hosts in as many as are wanted."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from gemini_ft.agent.commit.collector import Collector
from gemini_ft.agent.commit.leader import Leader
from gemini_ft.agent.commit.member import MemberLink
from gemini_ft.agent.lifecycle import raise_descriptor_limit
from gemini_ft.core.decisions import Commit
from gemini_ft.core.gathering import Bundles, Gathering
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.tree import Succession, ways_up
from gemini_ft.wire.handshake import Listener, dial, listen
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin
from gemini_ft.wire.tcp import Address, Connection, Handler
from scale_simulation import SECRET, groups, held, holders_of, report, take_all

_AT_A_TIME, _PAUSE = 16, 0.2  # hosts that connect, and seconds until the next ones do: a listener takes few strangers at a time
_TIMEOUT = 120.0  # seconds for hosts to connect, or to hear of a commit


class Job:
    """All hosts, and where they report: the first one leads."""

    def __init__(self, hosts: int, fan_in: int) -> None:
        self.holders = holders_of(hosts)
        self.copies = held(self.holders)
        self.names = sorted(self.copies)
        self.ways = ways_up(self.names, self.names[0], fan_in)
        self.collected = groups(self.ways, self.holders)
        self.turns = {name: turn for turn, name in enumerate(sorted(self.names, key=lambda name: name not in self.collected))}  # to connect


def lead(pipe: Pipe, job: Job) -> None:
    """The leader's process: tells its address, then after each word its processor time so far."""
    raise_descriptor_limit()

    async def serve() -> None:
        first = job.names[0]
        leader = Leader(first, Ledger(job.holders, None, 30.0), len(job.holders), None, Mock(), ways=job.ways)
        listener = await take_in(leader)
        pipe.send(listener.address)
        loop = asyncio.get_running_loop()
        while (step := await loop.run_in_executor(None, pipe.recv)) is not None:
            if step > 0:
                take_all(leader.take, [report(owner, first, step) for owner in job.copies[first]])
            pipe.send(time.process_time())

    asyncio.run(serve())


async def take_in(part: Leader | Collector) -> Listener:
    return await listen(
        "127.0.0.1", None, lambda: SECRET, lambda connection, claims: part.join(connection, claims.host), print, lambda stream: True
    )


async def connect(addresses: Mapping[str, Address], host: str, up: str, _epoch: int, handler: Handler) -> Connection:
    claims = Claims(run="r", stream="s", host=host, to=up, role="report", incarnation=None)
    return await dial(addresses[up], claims, SECRET, handler)


def rejoin() -> list[PeerMessage]:
    return [Rejoin(committed=None, uploading=None)]


def first_leads(name: str, first: str) -> Succession:
    """A host's knowledge that the first one leads, and no other ever does."""
    return Succession(name, [first], 0, 0.0, timeout=0.0)


class Hosts:
    """Some of the other hosts, in a process of their own, on real connections to the leader and to those that collect."""

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        self._job, self._names = job, names
        self.there = {name: Collector(name, Gathering(name, job.collected[name])) for name in names if name in job.collected}
        self._links: dict[str, MemberLink] = {}
        self._heard: set[str] = set()
        self._everybody = asyncio.Event()

    def _on_decision(self, name: str, message: PeerMessage) -> None:
        if isinstance(message, Commit):
            self._heard.add(name)
            if len(self._heard) == len(self._names):
                self._everybody.set()

    async def connect(self, addresses: Mapping[str, Address]) -> None:
        """Reports to those that take reports; collectors before others, and a few hosts at a time."""
        job = self._job
        begin = time.monotonic()
        for name in sorted(self._names, key=job.turns.__getitem__):
            await asyncio.sleep(max(0.0, begin + _PAUSE * (job.turns[name] // _AT_A_TIME) - time.monotonic()))
            up = job.ways[name][0]
            ways, told, order = [up] * (up != job.names[0]), partial(self._on_decision, name), first_leads(name, job.names[0])
            bundles = Bundles(name, {owner: job.holders[owner] for owner in job.copies[name]})
            party = SimpleNamespace(dial=partial(connect, addresses, name), decide=told, undecided=rejoin, log=print)
            self._links[name] = MemberLink(ways, order, bundles, cast("Any", party), self.there.get(name))
        async with asyncio.timeout(_TIMEOUT):
            while not all(link.reaches_leader for link in self._links.values()):
                await asyncio.sleep(0.1)

    async def report(self, step: int) -> None:
        """All copies of these hosts are complete; ends when all of them have heard of the commit."""
        self._heard.clear()
        self._everybody.clear()
        for name, link in self._links.items():
            take_all(link.take, [report(owner, name, step) for owner in self._job.copies[name]])
        async with asyncio.timeout(_TIMEOUT):
            await self._everybody.wait()

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def play(pipe: Pipe, job: Job, names: Sequence[str]) -> None:
    """The process of some hosts: tells where its collectors listen, then ends each step that it is told when they know of the commit."""
    raise_descriptor_limit()

    async def serve() -> None:
        hosts, loop = Hosts(job, names), asyncio.get_running_loop()
        pipe.send({name: (await take_in(part)).address for name, part in hosts.there.items()})
        await hosts.connect(await loop.run_in_executor(None, pipe.recv))
        pipe.send("connected")
        while (step := await loop.run_in_executor(None, pipe.recv)) is not None:
            await hosts.report(step)
            pipe.send("heard")
        hosts.close()
        await asyncio.sleep(0.1)

    asyncio.run(serve())


def real(hosts: int, steps: int, fan_in: int, processes: int = 1) -> dict[str, float]:
    """Figures of the leader's process; all other hosts are in so many others."""
    job = Job(hosts, fan_in)
    context = multiprocessing.get_context("fork")  # a process for each of two hundred hosts: what they have read is shared

    def start(what: Callable[..., None], *arguments: object) -> tuple[Pipe, multiprocessing.process.BaseProcess]:
        ours, theirs = context.Pipe()
        process = context.Process(target=what, args=(theirs, job, *arguments), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    others = job.names[1:]
    started = [start(lead), *(start(play, others[number::processes]) for number in range(processes))]
    (leader, *crowd), children = [pipe for pipe, _ in started], [process for _, process in started]

    def asked(step: int) -> float:
        leader.send(step)
        return float(leader.recv())

    try:
        addresses = {job.names[0]: leader.recv()}
        for pipe in crowd:
            addresses |= pipe.recv()
        tell(crowd, addresses)
        took, delays = [], []
        for step in range(1, steps + 1):
            before, begin = asked(0), time.monotonic()
            asked(step)
            tell(crowd, step)
            delays.append(time.monotonic() - begin)
            took.append(asked(0) - before)
        for pipe in (leader, *crowd):
            pipe.send(None)
        return {"leader_ms": 1e3 * statistics.median(took[1:]), "latency_ms": 1e3 * statistics.median(delays[1:])}
    finally:
        for process in children:
            process.join(10)
            process.kill()
            process.join()


def tell(crowd: Sequence[Pipe], what: object) -> None:
    """Tells all processes something, and waits for their answers."""
    for pipe in crowd:
        pipe.send(what)
    for pipe in crowd:
        pipe.recv()
