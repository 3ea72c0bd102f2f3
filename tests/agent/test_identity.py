"""No answer and no copy is taken for another one: every byte that is resumed was committed as this shard of this version."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_kit import (
    CHUNK,
    EXTRAS,
    WAIT,
    Job,
    Proxy,
    Rank,
    content,
    end_agent,
    eventually,
    open_fds,
    slots_of_this_process,
    stopped,
    versions,
)

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.pacing import Outgoing
from gemini_ft.agent.replication.send import PeerLink
from gemini_ft.config import DEFAULT_TRAFFIC
from gemini_ft.core.effects import Effect
from gemini_ft.core.protocol import Host
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import AgentTimeoutError, CorruptDataError, PeerError, RecoveryError, SupersededError
from gemini_ft.hosts import host_id
from gemini_ft.recovery import readers
from gemini_ft.recovery.agent_memory import RememberedShard, open_newest, remembered
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import LocalShard, PeerShard, ShardReaders
from gemini_ft.wire import tcp
from gemini_ft.wire.handshake import listen
from gemini_ft.wire.messages import Message
from gemini_ft.wire.peer_messages import Begin, Claims, Describe, Fetch, Offer, Ready
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import Reserve

SECRET = b"s" * 16  # of the kit's ranks
MIB = 2**20


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def bytes_of(shard: LocalShard | PeerShard | RememberedShard) -> bytes:
    return b"".join(bytes(view) for _, view in shard.chunks())


def read(host: str, address: tuple[str, int], job: Job, owner: int, iteration: int) -> bytes:
    """A shard's data, over the network."""
    with contextlib.closing(PeerShard(host, address, job.claims(), SECRET, owner, job.version(iteration), timeout=10.0)) as shard:
        return bytes_of(shard)


class TestLateAnswers:
    def test_to_a_worker_are_not_taken_for_answers_to_its_next_call(self, job: Job) -> None:
        """The agent was stopped for longer than a worker's patience, and then answers everything it was ever asked."""
        ranks = [job.rank("a", number, timeout=1.0) for number in (0, 1)]
        job.open(ranks)
        job.commit(ranks, 1)
        client, descriptors = ranks[0].client, open_fds(os.getpid())
        with stopped(job.pid("a")), pytest.raises(AgentTimeoutError, match="did not answer 'map' within 1 s"):
            LocalShard(client, 0, job.version(1))
        shard = LocalShard(client, 1, job.version(1))
        assert bytes_of(shard) == content(1, 1, 4 * CHUNK)
        shard.close()
        assert client.late_answers == 1
        assert open_fds(os.getpid()) == descriptors

    def test_a_call_that_is_refused_late_fails_no_other_one(self, job: Job) -> None:
        (rank,) = [job.rank("a", 0, timeout=1.0)]
        job.open([rank])
        job.commit([rank], 1)
        with stopped(job.pid("a")), pytest.raises(AgentTimeoutError):
            LocalShard(rank.client, 7, job.version(1))
        LocalShard(rank.client, 0, job.version(1)).close()
        assert rank.client.late_answers == 1

    @pytest.mark.parametrize("threads", [1, 3])
    def test_of_a_peer_are_what_a_reader_has_left_unread(self, threads: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "threads_of_a_reader", lambda: threads)
        ranks = job.start()
        job.commit(ranks, 1)
        shard = PeerShard("b", ranks[1].address, job.claims(), SECRET, 0, job.version(1), timeout=10.0)
        assert next(shard.chunks())[0] == 0
        assert shard.extras() == EXTRAS
        assert bytes_of(shard) == content(0, 1, 4 * CHUNK)
        shard.close()

    def test_that_never_come_end_a_reader_of_several_threads(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "threads_of_a_reader", lambda: 2)
        ranks = job.start()
        job.commit(ranks, 1)
        reader = PeerShard("b", ranks[1].address, job.claims(), SECRET, 0, job.version(1), timeout=0.5)
        with contextlib.closing(reader), stopped(job.pid("b")), pytest.raises(PeerError, match="stopped answering"):
            bytes_of(reader)


class TestAnswersAboutAnotherShard:
    """Something between two hosts, or a fault in one of them, answers well, and of something else."""

    @pytest.mark.parametrize("kind", [Describe, Fetch])
    @pytest.mark.parametrize("change", [{"owner": 1}, {"call": 77}], ids=["owner", "call"])
    def test_are_refused(self, job: Job, kind: type[Message], change: dict[str, Any]) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        with Proxy(ranks[1].address) as to_b:
            to_b.rewrite = lambda message: message.model_copy(update=change) if isinstance(message, kind) else message
            with pytest.raises(PeerError, match=rf"asked for {next(iter(change))} \d+, the answer .* is about"):
                read("b", to_b.address, job, 0, 1)

    def test_rebuild_nothing(self, job: Job) -> None:
        ranks = job.start("a", "b", "c", holders={0: ["a", "b"], 1: ["b", "a"], 2: ["c", "a"]})
        job.commit(ranks, 1)
        with Proxy(ranks[0].address) as to_a:
            to_a.rewrite = lambda message: message.model_copy(update={"owner": 1}) if isinstance(message, Fetch) else message
            newcomers = job.join(("a", "b", "c"))
            addresses = {"a": to_a.address, "b": ranks[1].address, "c": ranks[2].address}
            spec = job.make_spec(newcomers, resumed=job.version(1), sources={0: ["a"], 1: ["a"], 2: ["a"]}, addresses=addresses)
            newcomers[2].open(spec.model_copy(update={"holders": {0: ["a", "c"], 1: ["b", "a"], 2: ["c", "a"]}}))
            newcomers[2].progress(3)
            eventually(lambda: "failed: " in job.log("c"), "the refusal")
            assert "is about owner 1" in job.log("c")


class _Replies:
    """A replica's host that answers offers when it is told to."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.changed = asyncio.Event()
        self.connection: Connection | None = None

    def accept(self, connection: Connection, claims: Claims) -> _Replies:
        self.connection = connection
        return self

    def on_message(self, message: Message) -> memoryview | None:
        self.heard.append(message)
        self.changed.set()
        return None

    def on_bytes(self, message: Message, digest: int | None) -> None:
        """Not of interest."""

    def on_lost(self, reason: str) -> None:
        """Not of interest."""

    async def nth(self, kind: type[Message], count: int) -> Any:
        while len(found := [message for message in self.heard if isinstance(message, kind)]) < count:
            self.changed.clear()
            await self.changed.wait()
        return found[count - 1]


class _Context:
    """A stream, as far as a link needs one here."""

    def __init__(self) -> None:
        self.counters = {"late_answers": 0, "replica_bytes": 0}
        self.host, self.run = Host(name="a"), SimpleNamespace(secret=SECRET)
        self.lines: list[str] = []

    def perform(self, effects: list[Effect]) -> None:
        """Nothing but slots that become free."""

    def log(self, text: str) -> None:
        self.lines.append(text)


def outgoing(owner: int, iteration: int, layout: bytes) -> Outgoing:
    memory = SlotMemory.create(
        SlotShape(
            run="r",
            stream="main",
            owner=owner,
            world_size=8,
            layout_hash="0" * 16,
            layout=layout,
            data_bytes=64,
            extras_capacity=8,
            chunk_bytes=32,
        )
    )
    return Outgoing(owner=owner, version=Version(Incarnation(1, "x"), iteration), slot=0, memory=memory)


@contextlib.asynccontextmanager
async def linked(peer: _Replies, context: _Context) -> AsyncIterator[PeerLink]:
    """A link from host a to host b."""
    server = await listen("127.0.0.1", None, lambda: SECRET, peer.accept, print, lambda stream: False)
    claims = Claims(run="r", stream="main", host="a", to="", role="replicate", incarnation=None)
    session = SimpleNamespace(context=context, traffic=DEFAULT_TRAFFIC, gate=Gate(DEFAULT_TRAFFIC), pacing=None)
    link = PeerLink(session, "b", server.address, claims)  # type: ignore[arg-type]
    yield link
    link.close()
    assert peer.connection is not None
    await peer.connection.closed.wait()
    server.close()


def test_two_versions_of_different_layouts_do_not_take_the_room_from_each_other() -> None:
    """A layout changes while the copy before is on its way: the peer makes room once, for the newer one."""

    async def work() -> None:
        peer, context = _Replies(), _Context()
        async with linked(peer, context) as link:
            link.send(outgoing(0, 1, b"one layout"))
            await peer.nth(Offer, 1)
            link.send(outgoing(0, 2, b"another one"))
            newer = await peer.nth(Offer, 2)
            await asyncio.sleep(0.05)
            assert [message.layout for message in peer.heard if isinstance(message, Offer)] == [b"one layout", b"another one"]
            assert peer.connection is not None
            peer.connection.send(Ready(call=newer.call, owner=0))
            assert (await peer.nth(Begin, 1)).iteration == 2

    asyncio.run(work())


def test_room_for_a_former_layout_is_not_taken_for_room_for_the_present_one() -> None:
    """The shape of a shard changes while its holder still makes room for the former one."""

    async def work() -> None:
        peer, context = _Replies(), _Context()
        async with linked(peer, context) as link:
            link.send(outgoing(0, 1, b"one layout"))
            first = await peer.nth(Offer, 1)
            link.cancel(0, Version(Incarnation(1, "x"), 1))
            link.send(outgoing(0, 2, b"another one"))
            second = await peer.nth(Offer, 2)
            assert peer.connection is not None
            peer.connection.send(Ready(call=first.call, owner=0))
            while not context.counters["late_answers"]:
                await asyncio.sleep(0.01)
            assert not any(isinstance(message, Begin) for message in peer.heard)
            peer.connection.send(Ready(call=second.call, owner=0))
            await peer.nth(Begin, 1)

    asyncio.run(asyncio.wait_for(work(), WAIT))


def test_a_host_of_many_ranks_offers_one_large_layout_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together they were more than may wait for a peer, which was given up, and dialled, and given up again."""
    monkeypatch.setattr(tcp, "UNREAD", 2 * MIB)

    async def work() -> None:
        peer, context = _Replies(), _Context()
        async with linked(peer, context) as link:
            for owner in range(8):
                link.send(outgoing(owner, 1, bytes(MIB)))
            await peer.nth(Offer, 8)
            assert [message.owner for message in peer.heard if isinstance(message, Offer)] == list(range(8))
            assert not context.lines

    asyncio.run(asyncio.wait_for(work(), WAIT))


# -- roots


def slot_of(rank: Rank, version: Version) -> Any:
    """The memory of this rank's own copy of a version, as it is shared with the agent."""
    for fd in rank.fds:
        memory = SlotMemory.adopt(os.dup(fd))
        if memory.version == version:
            return memory
        memory.close()
    raise AssertionError(f"rank {rank.rank} holds no {version}")


def flip_layout(memory: SlotMemory) -> None:
    """What failing memory does to one bit of a stored layout."""
    at = memory.shape.layout_offset + len(memory.shape.layout) // 2
    byte = os.pread(memory.fd, 1, at)
    os.pwrite(memory.fd, bytes([byte[0] ^ 1]), at)


def forge(memory: SlotMemory) -> str:
    """Exchange the first byte of a copy, with all checksums on this host; returns the copy's new root."""
    version, extras_bytes = memory.version, memory.extras_bytes
    assert version is not None
    memory.data(0, 1)[0] ^= 1
    for index, (offset, nbytes) in enumerate(memory.cuts(extras_bytes)):
        memory.put_chunk(index, offset, nbytes, checksum(memory.data(offset, nbytes)))
    assert memory.finish(version, extras_bytes, None)
    return memory.root


class TestStoredLayout:
    def test_one_flipped_bit_gives_the_copy_up_and_the_next_one_is_taken(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        with contextlib.closing(slot_of(ranks[0], job.version(2))) as memory:
            flip_layout(memory)
        with pytest.raises(CorruptDataError, match=r"rank 0's copy of iteration 2 .* is damaged: its layout or its checksums"):
            LocalShard(ranks[0].client, 0, job.version(2))
        assert ranks[0].verify(job.version(2)) == [1]
        assert (0, 2) not in versions(ranks[0].inventory())
        assert read("b", ranks[1].address, job, 0, 2) == content(0, 2, 4 * CHUNK)

    def test_an_agent_that_takes_its_memory_back_leaves_it_out(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        with contextlib.closing(slot_of(ranks[0], job.version(2))) as memory:
            flip_layout(memory)
        end_agent(job.run, "a")
        ranks[0].reconnect(job.version(2))
        assert "a slot could not be adopted: rank 0's copy of iteration 2" in job.log("a")
        assert job.stream("a")["shards"] == {"0": ["complete:1", "empty:-"], "1": ["complete:1", "complete:2"]}
        job.commit(ranks, 3, 4)


class TestRoots:
    def test_bytes_that_are_exchanged_with_their_checksums_on_the_way_are_not_committed(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].address) as to_b:
            job.open(ranks, addresses={"a": ranks[0].address, "b": to_b.address}, replica_timeout=0.5)
            to_b.forge = True
            job.commit(ranks, 1, 2)
            assert "another root than its owner's copy" in job.log("b")
            assert not any(slot.startswith("complete") for slot in job.stream("b")["shards"]["0"])
            to_b.forge = False
            iterations = iter(range(3, 100_000))
            eventually(lambda: job.commit(ranks, next(iterations)) or job.stream("a")["excluded"] == [], "the return of host b")
            last = next(iterations)
            job.commit(ranks, last)
            assert read("b", ranks[1].address, job, 0, last) == content(0, last, 4 * CHUNK)

    def test_a_copy_whose_checksums_do_not_come_to_its_owners_root_is_skipped(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        for rank in ranks:
            rank.request(2)
        ranks[0].copy(2)
        ranks[1].copy(2, slice(0, 99))
        ranks[1].finish_copy(2, root="0" * 32)
        for rank in ranks:
            rank.wait_for("abort", iteration=2)
        assert "is not the one that its owner made" in ranks[1].wait_for("notice").text
        job.commit(ranks, 3)

    def test_every_reader_refuses_a_copy_that_is_not_the_planned_one(self, job: Job) -> None:
        """All its own checksums, and its own root, are right: it is somebody else's history."""
        ranks = job.start()
        job.commit(ranks, 1, 2)
        infos = ranks[1].inventory()
        root = next(info.root for info in infos if (info.owner, info.version) == (0, job.version(2)))
        with contextlib.closing(slot_of(ranks[0], job.version(2))) as memory:
            assert forge(memory) != root
        with pytest.raises(CorruptDataError, match="in this host's memory is not what was committed: its root is"):
            LocalShard(ranks[0].client, 0, job.version(2), root=root)
        assert ranks[0].verify(job.version(2)) == [1]  # the agent knows which root it has reported
        plan = RecoveryPlan(kind="memory", version=job.version(2), sources={0: ("a", "b")}, roots={0: root})
        addresses = {"a": ranks[0].address, "b": ranks[1].address}
        sources = ShardReaders(ranks[0].client, "a", plan, addresses, job.claims(), SECRET, 10.0)
        assert sources.read(0, 0, bytes_of) == content(0, 2, 4 * CHUNK)
        with pytest.raises(CorruptDataError, match="from peer b is not what was committed"):
            PeerShard("b", ranks[1].address, job.claims(), SECRET, 0, job.version(2), timeout=10.0, root="0" * 32)

    def test_an_export_asks_the_leader_where_this_machine_has_no_copy(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = job.start("a", "b", "c", holders={0: ["a"], 1: ["b"], 2: ["c"]})
        job.commit(ranks, 1, 2)
        monkeypatch.setattr(lifecycle, "addresses", lambda: [lifecycle.socket_name(job.run, "b")])
        (memory,) = remembered(job.run)
        version, shards = open_newest(memory, None)
        with contextlib.ExitStack() as stack:
            for shard in shards:
                stack.callback(shard.close)
            assert [bytes_of(shard) for shard in shards] == [content(owner, 2, 4 * CHUNK) for owner in range(3)]
            assert [shard.root for shard in shards] == [info.root for rank in ranks for info in rank.inventory() if info.version == version]
            with pytest.raises(RecoveryError, match=r"rank 2's shard of .*peer c: its root is [0-9a-f]+, should be 0+$"):
                shards[2].expect("0" * 32)

    def test_a_shard_that_is_read_twice_is_dialled_once(self, job: Job) -> None:
        """First its layout, to find out what is where; unless the connection is lost meanwhile."""
        ranks = job.start()
        job.commit(ranks, 1)
        with Proxy(ranks[1].address) as to_b:
            plan = RecoveryPlan(kind="memory", version=job.version(1), sources={0: ("b",)})
            sources = ShardReaders(ranks[0].client, "a", plan, {"b": to_b.address}, job.claims(), SECRET, 10.0)
            with contextlib.closing(sources):
                for dialled in (1, 3):
                    sources.read(0, 0, lambda shard: shard.layout, keep=True)
                    if dialled == 3:
                        to_b.cut()
                    assert sources.read(0, 0, bytes_of) == content(0, 1, 4 * CHUNK)
                    assert to_b.connections == dialled

    def test_small_state_and_tensors_of_a_shard_come_over_one_connection(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        with Proxy(ranks[1].address) as to_b:
            plan = RecoveryPlan(kind="memory", version=job.version(1), sources={0: ("b",), 1: ("b",)}, world_size=2)
            sources = ShardReaders(ranks[0].client, "a", plan, {"b": to_b.address}, job.claims(), SECRET, 10.0)
            with contextlib.closing(sources):
                for owner in (0, 1):
                    found = sources.read(owner, 0, lambda shard: shard.extras(), keep=True)
                    assert found == EXTRAS
                    assert sources.read(owner, 0, bytes_of) == content(owner, 1, 4 * CHUNK)
                    assert to_b.connections == owner + 1

    def test_a_lost_copy_is_rebuilt_from_what_was_committed_only(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        roots = {info.owner: info.root for info in ranks[0].inventory() if info.version == job.version(2)}
        end_agent(job.run, "b")
        newcomers = job.join(("a", "b"))
        resumed, sources = job.version(2), {0: ["a"], 1: ["a"]}
        spec = job.make_spec(newcomers, resumed=resumed, sources=sources, roots={0: roots[0], 1: "0" * 32})
        newcomers[1].open(spec)
        newcomers[1].progress(4)
        eventually(lambda: "complete:2" in job.stream("b")["shards"].get("0", []), "the sound one")
        eventually(lambda: "another root than the committed one" in job.log("b"), "the refusal")
        assert versions(newcomers[1].inventory()) == {(0, 2)}


# -- memory that comes back after its agent's death


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_agent_that_dies_before_the_first_step_gets_left_over_copies_from_each_worker_in_turn(job: Job, order: tuple[int, int]) -> None:
    """What the second worker hands over comes after the first has let the incarnation go on: it belongs to the past all the same."""
    victims = [job.process("a", number) for number in (0, 1)]
    job.open(victims)
    job.commit(victims, 1, 2)
    victims[order[1]].snapshot(3)
    eventually(lambda: "complete:3" in job.stream("a")["shards"][str(order[1])], "the copy")
    resumed = job.version(2)
    victims[order[1]].kill()  # the other one lives on for a while; else the third is given up at once
    ranks = [job.rank("a", number) for number in (0, 1)]
    eventually(lambda: job.status("a")["workers"][str(order[1])] == os.getpid(), "the death of the worker")
    job.open(ranks, resumed=resumed, sources={0: ["a"], 1: ["a"]})
    end_agent(job.run, "a")
    for number in order:
        ranks[number].reconnect(resumed)
    assert "complete:3" in job.stream("a")["shards"][str(order[1])]  # until a host trains, another might still go back to it
    job.commit(ranks, 3, 4, 5)
    assert [bytes_of(LocalShard(ranks[0].client, owner, job.version(5))) for owner in (0, 1)] == [content(o, 5, 4 * CHUNK) for o in (0, 1)]


@pytest.mark.parametrize("first", ["zombie", "present"])
def test_what_a_worker_of_the_past_hands_back_is_never_granted(job: Job, first: str) -> None:
    """It lives, and writes where it was once allowed to."""
    (zombie,) = job.start("a")
    job.commit([zombie], 1, 2)
    (rank,) = job.join(("a",))
    job.open([rank], resumed=job.version(2), sources={0: ["a"]})
    job.commit([rank], 3)
    end_agent(job.run, "a")
    if first == "present":
        rank.reconnect(job.version(3))
    with contextlib.closing(zombie.client), contextlib.suppress(SupersededError):
        zombie.reconnect(Version(Incarnation(1, "nonce1"), 2))
    if first == "zombie":
        rank.reconnect(job.version(3))
    for iteration in (4, 5, 6):
        job.commit([rank], iteration)
        zombie.scribble()
    assert bytes_of(LocalShard(rank.client, 0, job.version(6))) == content(0, 6, 4 * CHUNK)


def test_what_was_committed_before_the_state_grew_outlives_the_agent(job: Job) -> None:
    """Its slots have another shape than those that the worker has by then, and nobody else may have a copy."""
    (rank,) = job.start("a")
    job.commit([rank], 1, 2)
    before = rank.fds
    rank.reserve(8 * CHUNK)
    for fd in before:
        os.close(fd)
    end_agent(job.run, "a")
    rank.reconnect(job.version(2))
    assert bytes_of(LocalShard(rank.client, 0, job.version(2))) == content(0, 2, 4 * CHUNK)


def test_a_slot_of_an_earlier_shape_that_another_worker_hands_back_late_is_not_granted(job: Job) -> None:
    """The owner has the slots of its present shape by then, and does not map this one."""
    ranks = job.start("b", "a", "a", holders={0: ["b"], 1: ["a"], 2: ["a"]})
    job.commit(ranks, 1, 2)
    for rank in ranks:
        before = rank.fds
        rank.reserve(8 * CHUNK)
        for fd in before:
            os.close(fd)
    owner, keeper = ranks[1:]
    eventually(lambda: bool(keeper.client.custody), "the owner's slot")
    end_agent(job.run, "a")
    owner.reconnect(job.version(2), 8 * CHUNK)
    keeper.reconnect(job.version(2), 8 * CHUNK)
    assert "complete:2" in job.stream("a")["shards"]["1"]
    job.commit(ranks, 3, 4, 5, 6)
    assert bytes_of(LocalShard(owner.client, 1, job.version(6))) == content(1, 6, 8 * CHUNK)


def test_numbers_of_slots_that_a_dead_agent_gave_mean_nothing_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent numbers what it takes back anew, and its answer with the numbers comes too late."""
    monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path))
    run, host = f"numbers-{os.getpid()}", host_id()
    others = {os.fstat(fd).st_ino for fd in slots_of_this_process()}  # of other tests, which may not be collected yet
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {*lifecycle.started}  # by other tests
    with contextlib.ExitStack() as ending:
        ending.callback(
            lambda: eventually(lambda: all(child.poll() is not None for child in {*lifecycle.started} - before), "the end of all agents")
        )
        ending.callback(end_agent, run, host)
        checkpointer = gemini_ft.Checkpointer(model, optimizer, run_id=run, replicas=1, on_late="wait", timeout=5.0)
        ending.callback(checkpointer.close, finished=False)
        checkpointer.resume()

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                checkpointer.step()

        train(4)
        checkpointer.flush()
        first_of = {os.fstat(fd).st_ino: fd for fd in sorted(slots_of_this_process(), reverse=True)}  # a mapping has one of its own
        own = sorted(fd for inode, fd in first_of.items() if inode not in others)
        older, newest = (SlotMemory.adopt(os.dup(fd)) for fd in own)  # in the order of their numbers
        assert (older.version, newest.version) < (newest.version, older.version)
        assert newest.version is not None
        flip_layout(older)  # so that it is not taken back, and the others have other numbers
        sound = checksum(newest.data(0, newest.shape.data_bytes))
        call, lost = AgentClient.call, list[Message]()

        def lose_one(client: AgentClient, message: Message, *args: Any, **options: Any) -> Any:
            answer = call(client, message, *args, **options)
            if isinstance(message, Reserve) and not lost:
                lost.append(message)
                for fd in answer[1]:
                    os.close(fd)
                raise AgentTimeoutError("the answer came too late")
            return answer

        monkeypatch.setattr(AgentClient, "call", lose_one)
        end_agent(run, host)
        train(2)
        with checkpointer.mutate():  # nothing is being copied inside
            assert lost
        assert checksum(newest.data(0, newest.shape.data_bytes)) == sound  # still the newest that is committed
        eventually(lambda: train(1) or (checkpointer.stats.committed or 0) > 6, "a commit by the next agent")
        older.close()
        newest.close()
