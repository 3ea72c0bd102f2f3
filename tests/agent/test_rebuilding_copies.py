"""Copies that are lost come back when the restart is over, and take only part of the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_kit import CHUNK, Job, Proxy, Rank, end_agent, eventually, shape_of

from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.rebuild import Rebuilding, Throttle
from gemini_ft.agent.replication.serve import describe
from gemini_ft.config import TrafficConfig
from gemini_ft.core.layout import build_layout
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.handshake import listen
from gemini_ft.wire.messages import Message
from gemini_ft.wire.peer_messages import Claims, Data, Describe, Fetch, Heartbeat, PeerMessage
from gemini_ft.wire.tcp import Connection


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def lose_a_host(job: Job) -> list[Rank]:
    """Two hosts with all copies of iteration 1, of which the second has lost its own, and their next workers."""
    job.commit(job.start(), 1)
    end_agent(job.run, "b")
    return job.join(("a", "b"))


def open_both(job: Job, newcomers: list[Rank], address: tuple[str, int], replica_timeout: float) -> None:
    """The next session, in which the first host is reached at ``address``."""
    addresses, sources = {"a": address, "b": newcomers[1].address}, {0: ["a"], 1: ["a"]}
    spec = job.make_spec(newcomers, resumed=job.version(1), sources=sources, addresses=addresses, replica_timeout=replica_timeout)
    for newcomer in newcomers:
        newcomer.open(spec)


def is_rebuilt(job: Job) -> bool:
    return "complete:1" in job.stream("b")["shards"].get("0", [])


def test_nothing_is_asked_of_peers_before_the_second_step(job: Job) -> None:
    newcomers = lose_a_host(job)
    reached, asked = [0], list[int]()
    with Proxy(newcomers[0].address) as to_a:

        def note(message: Message) -> Message:
            if isinstance(message, Describe):
                asked.append(reached[0])
            return message

        to_a.rewrite = note
        open_both(job, newcomers, to_a.address, replica_timeout=1000.0)
        for reached[0] in (1, 2, 3):
            newcomers[1].progress(reached[0])
            assert not is_rebuilt(job) or reached[0] == 3
        eventually(lambda: is_rebuilt(job), "the copy")
    assert set(asked) == {3}


def test_workers_that_make_no_step_are_not_waited_for_for_ever(job: Job) -> None:
    newcomers = lose_a_host(job)
    open_both(job, newcomers, newcomers[0].address, replica_timeout=0.1)
    eventually(lambda: is_rebuilt(job), "the copy")


def test_a_copy_of_a_layout_that_is_over_takes_no_slot_from_the_next_one(job: Job) -> None:
    """The owner's host has been told that there is room for the next one, and sends on."""
    a, b = newcomers = lose_a_host(job)
    open_both(job, newcomers, a.address, replica_timeout=1000.0)
    a.reserve(2 * CHUNK, name="another")
    b.reserve(2 * CHUNK, name="another")
    a.snapshot(2)
    eventually(lambda: "complete:2" in job.stream("b")["shards"].get("0", []), "the replica of the next layout")
    b.progress(3)
    eventually(lambda: "rebuilding rank 0's replica" in job.log("b"), "the rebuilding")
    b.snapshot(2)
    a.wait_for("commit", version=job.version(2))
    job.commit(newcomers, 3)
    assert "broke off" not in job.log("a")


@pytest.mark.soak
def test_a_host_that_rests_between_two_chunks_keeps_its_source(job: Job) -> None:
    """Its rest may be longer than the lease of a reader that gives no sign of life."""
    newcomers = lose_a_host(job)
    fetches: list[Fetch] = []
    with Proxy(newcomers[0].address) as to_a:

        def slow(message: Message) -> Message:
            if isinstance(message, Fetch):
                fetches.append(message)
                if len(fetches) == 1:
                    time.sleep(2.5)  # a slow link: three times as long is the rest, and five seconds the lease
            return message

        to_a.rewrite = slow
        open_both(job, newcomers, to_a.address, replica_timeout=0.1)
        eventually(lambda: is_rebuilt(job), "the copy")
    assert len({fetch.offset for fetch in fetches}) == len(fetches)  # none was asked for again
    assert "no sign of life" not in job.log("a")


def test_a_throttle_leaves_the_rest_of_the_time_to_others() -> None:
    now, rested = [0.0], [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        rested[0] += seconds

    async def work() -> None:
        throttle = Throttle(0.25, lambda: now[0], sleep)
        for seconds in (1.0, 0.0, 3.0):
            async with throttle.piece():
                now[0] += seconds

    asyncio.run(work())
    assert (now[0], rested[0]) == (16.0, 12.0)


class Source:
    """A host that serves a shard of one chunk, holds back its last bytes, and may send it twice."""

    NBYTES = 2**25

    def __init__(self) -> None:
        shape = shape_of(build_layout([], 0, 1), data_bytes=self.NBYTES, extras_capacity=2**20, chunk_bytes=self.NBYTES)
        self.version = Version(Incarnation(1, "a"), 1)
        self.memory, self.copy = SlotMemory.create(shape), SlotMemory.create(shape)
        self.memory.data(0, self.NBYTES)[:] = b"s" * self.NBYTES
        self.memory.put_chunk(0, 0, self.NBYTES, checksum(self.memory.data(0, self.NBYTES)))
        self.memory.finish(self.version, 0, None)
        self.times = 1
        self.allowed = self.NBYTES

    def accept(self, connection: Connection, claims: Claims) -> Source:
        self.connection = connection
        return self

    async def valve(self, nbytes: int) -> int:
        if nbytes <= self.NBYTES - self.allowed:
            await asyncio.Event().wait()
        return min(nbytes, self.allowed)

    def on_message(self, message: PeerMessage) -> None:
        if isinstance(message, Describe):
            self.connection.send(describe(self.memory, message))
        elif not isinstance(message, Heartbeat):
            assert isinstance(message, Fetch)
            data = Data(call=message.call, owner=0, version=self.version, offset=0, nbytes=self.NBYTES)
            for _ in range(self.times):
                self.connection.send(data, self.memory.data(0, self.NBYTES), self.valve)

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        raise AssertionError

    def on_lost(self, reason: str) -> None:
        pass

    async def rebuild(self) -> Rebuilding:
        """A host that lacks this shard begins to copy it."""
        self.listener = await listen("127.0.0.1", None, lambda: b"secret", self.accept, print, lambda stream: False)
        slots = SimpleNamespace(committed=self.version, complete_version=lambda _: None, find=lambda _: None)
        host: Any = SimpleNamespace(
            name="b", slots=lambda _: slots, owns=lambda _: False, roots={}, rebuild=lambda *_: SimpleNamespace(index=0)
        )
        self.said: list[str] = []
        host.receive_failed = lambda *_: self.said.append("failed")
        host.rebuilt = lambda *_: self.said.append("rebuilt")
        stream: Any = SimpleNamespace(
            host=host,
            run=SimpleNamespace(secret=b"secret"),
            slot_store=SimpleNamespace(memory={(0, 0): self.copy}),
            log=self.said.append,
            perform=lambda _: None,
            claims=lambda role, to: Claims(run="run", stream="main", host="b", to=to, role=role, incarnation=None),
        )

        async def make_room(*_: object, offered: bool) -> None:
            pass

        spec: Any = SimpleNamespace(
            resumed=self.version,
            holders={0: ["a", "b"]},
            sources={0: ["a"]},
            further={},
            addresses={"a": self.listener.address},
            replica_timeout=0.01,
        )
        inbound: Any = SimpleNamespace(make_room=make_room)
        return Rebuilding(stream, inbound, spec, Gate(TrafficConfig.model_validate({})))

    def close(self) -> None:
        self.listener.close()
        self.connection.abort("the end")
        self.memory.close()
        self.copy.close()


def test_not_one_byte_lands_when_it_was_cancelled() -> None:
    """The slots are those of the next session from that very moment on."""

    async def work() -> None:
        source = Source()
        rebuilding = await source.rebuild()
        while not source.copy.data(2**20, 1)[0]:
            await asyncio.sleep(0.0001)
        rebuilding.cancel()
        there = bytes(source.copy.data(0, source.NBYTES))
        time.sleep(0.3)  # the loop stands still, and whoever sends and receives does not
        assert source.copy.data(0, source.NBYTES) == there
        await rebuilding.end()
        source.close()
        await asyncio.sleep(0.01)

    asyncio.run(work())


def test_bytes_that_were_not_asked_for_are_refused() -> None:
    """They would land in a slot whose chunk has been verified."""

    async def work() -> None:
        source = Source()
        source.times, source.allowed = 2, source.NBYTES
        rebuilding = await source.rebuild()
        async with asyncio.timeout(20):
            while not any("bytes came that were not asked for" in line for line in source.said):
                await asyncio.sleep(0.01)
        assert "rebuilt" not in source.said
        await rebuilding.end()
        source.close()
        await asyncio.sleep(0.01)

    asyncio.run(work())
