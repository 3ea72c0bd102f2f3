"""Real connections on loopback, for `scale.py`: the leader in a process of its own, all other hosts in this one."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection as Pipe

from gemini_ft.agent.collecting import Collector
from gemini_ft.agent.leadership import Leader
from gemini_ft.agent.lifecycle import raise_descriptor_limit
from gemini_ft.agent.reporting import MemberLink
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.ledger import Commit, Ledger
from gemini_ft.core.succession import Succession
from gemini_ft.core.tree import ways_up
from gemini_ft.wire.handshake import Listener, dial, listen
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin
from gemini_ft.wire.tcp import Address, Connection, Handler
from scale_simulation import SECRET, groups, held, holders_of, report, take_all


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
                take_all(leader.take, [report(owner, first, step) for owner in copies[first]])
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


async def follow(pipe: Pipe, hosts: int, steps: int, fan_in: int) -> dict[str, float]:
    """All other hosts, in one process, on real connections to the leader's and among each other."""
    holders = holders_of(hosts)
    copies = held(holders)
    names = sorted(copies)
    ways = ways_up(names, names[0], fan_in)
    there = {name: Collector(name, Gathering(name, theirs)) for name, theirs in groups(ways, holders).items()}
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
            take_all(link.take, [report(owner, name, step) for owner in copies[name]])
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
