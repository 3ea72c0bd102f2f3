"""What a host does with shards that come in over one connection (docs/design.md, sections 6 and 7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from agent_kit import WAIT, Job, eventually
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.receive import Inbound, Receiver
from gemini_ft.agent.tasks import Tasks
from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.peer_messages import (
    Ack,
    Astray,
    Begin,
    Drop,
    End,
    Exposed,
    Offer,
    Parcel,
    PeerMessage,
    Readable,
    Refused,
    Resend,
    Taken,
)

NBYTES = 64  # of a shard, in two chunks


class Room:
    """A host with a slot for everything that comes, unless it is full."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.failed: list[int] = []
        self.memories: list[SlotMemory] = []
        self.full = False
        self.torn = False  # the slot is not in rotation any more
        self.refusal = ""  # of what has come whole
        self.collected: list[tuple[Parcel, SlotMemory | None]] = []
        self.log_lines: list[str] = []
        self.host_name = "b"
        self.pulls = Tasks()
        self.fabric = asyncio.Event()  # brings what is to be read
        self.broken = set[int]()  # tags of pieces that it brings with other bytes

    def check_sender(self, sender: str, owner: int) -> None:
        """Every host may bring every shard."""

    def begin_receive(self, owner: int, iteration: int, committed: Version | None) -> SlotMemory | None:
        if self.full:
            return None
        self.memories.append(
            SlotMemory.create(
                SlotShape(
                    run="run",
                    stream="main",
                    owner=owner,
                    world_size=1,
                    layout_hash="0" * 16,
                    layout=b"layout",
                    data_bytes=NBYTES,
                    extras_capacity=8,
                    chunk_bytes=NBYTES // 2,
                )
            )
        )
        return self.memories[-1]

    def end_receive(self, end: End) -> bool:
        if self.refusal:
            raise PeerError(self.refusal)
        if not self.torn:
            self.kept.append(end.iteration)
        return not self.torn

    def receives(self, owner: int, iteration: int) -> bool:
        return not self.torn

    def fail_receive(self, owner: int, iteration: int) -> None:
        self.failed.append(iteration)

    def holds(self, owner: int, iteration: int) -> bool:
        return iteration in self.kept

    def collect(self, parcel: Parcel, memory: SlotMemory | None, landed: object) -> None:
        self.collected.append((parcel, memory))

    async def pull(self, exposed: Exposed, piece: Readable, memory: SlotMemory) -> None:
        await self.fabric.wait()
        at = piece.chunk.offset + piece.start
        memory.data(at, piece.nbytes)[:] = CONTENT[at : at + piece.nbytes]
        if piece.tag in self.broken:
            memory.data(at, 1)[0] ^= 1
            raise PeerError("a piece was changed on its way")

    def log(self, text: str) -> None:
        self.log_lines.append(text)


class Wire:
    """The way back to the sender."""

    def __init__(self) -> None:
        self.said: list[PeerMessage] = []
        self.aborted: list[str] = []

    def send(self, message: PeerMessage) -> None:
        self.said.append(message)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    @property
    def acknowledged(self) -> list[tuple[int, bool]]:
        assert all(isinstance(message, Ack) for message in self.said)
        return [(message.iteration, message.ok) for message in self.said if isinstance(message, Ack)]


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    for memory in room.memories:
        memory.close()


def begin(iteration: int) -> Begin:
    return Begin(owner=0, iteration=iteration, committed=None)


def end(iteration: int) -> End:
    return End(owner=0, iteration=iteration, extras_bytes=0, chunks=0, layout="0" * 16, digest="", root="")


def chunk_of(iteration: int, index: int, digest: int, offset: int | None = None) -> Chunk:
    place = index * NBYTES // 2 if offset is None else offset
    return Chunk(owner=0, iteration=iteration, index=index, offset=place, nbytes=NBYTES // 2, digest=digest)


def hear(room: Room, *messages: PeerMessage) -> list[tuple[int, bool]]:
    """What is acknowledged."""
    wire = Wire()
    receiver = Receiver(room, wire, "b")  # type: ignore[arg-type]
    for message in messages:
        receiver.on_message(message)
    return wire.acknowledged


def test_a_replica_is_brought_by_the_host_that_owns_it_and_no_other(tmp_path: Path) -> None:
    """The first offer of another host took the replica away for the rest of the session: it had another shape."""
    with Job(tmp_path) as job:
        ranks = job.join(["a", "b"])
        job.open(ranks, addresses={rank.host: rank.address for rank in ranks} | {"test": ("127.0.0.1", 1)})
        job.commit(ranks, 1)
        claims = job.claims("replicate", to="b", incarnation=job.version(1).incarnation)
        said = "host 'test' does not own rank 0's shard"
        with contextlib.closing(BlockingWire(ranks[1].address, claims, b"s" * 16, WAIT)) as wire:
            wire.send(Offer(call=1, owner=0, layout=b"", layout_hash="x", data_bytes=4096, extras_capacity=64))
            assert wire.receive() == Refused(call=1, owner=0, text=said)
            wire.send(Begin(owner=0, iteration=7, committed=None))
            with pytest.raises(PeerError):
                wire.receive()
        eventually(lambda: said in job.log("b"), "the line in the log")
        job.commit(ranks, 2, 3)


def test_a_sender_that_goes_on_leaves_the_older_iteration_behind(room: Room) -> None:
    """Section 7: what was late "is then skipped"; the newer one takes its place."""
    assert hear(room, begin(2), begin(3), end(2), end(3)) == [(3, True)]
    assert (room.failed, room.kept) == ([2], [3])


def test_an_older_iteration_that_starts_over_does_not_push_out_the_newer(room: Room) -> None:
    """Section 7: the commit of 3 waits for all holders; it must not wait for what this one has thrown away."""
    assert hear(room, begin(3), begin(2), end(2), end(3), Drop(owner=0, iteration=2)) == [(3, True), (2, False)]
    assert (room.failed, room.kept) == ([], [3])


def test_an_iteration_that_is_here_already_is_acknowledged_again(room: Room) -> None:
    """Section 6: a connection that breaks is dialled again, and what was not acknowledged comes once more."""
    assert hear(room, begin(2), end(2)) == [(2, True)]
    assert hear(room, begin(2), end(2)) == [(2, True)]


def test_a_shard_whose_slot_was_taken_away_is_asked_for_anew(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 7: what an earlier connection still had to say, with another layout, must not make its sender wait for ever."""
    monkeypatch.setattr("gemini_ft.agent.replication.receive.FULL", 0.0)

    async def story() -> list[PeerMessage]:
        wire = Wire()
        receiver = Receiver(room, wire, "b")  # type: ignore[arg-type]
        receiver.on_message(begin(2))
        room.torn = True
        receiver.on_message(end(2))
        async with asyncio.timeout(10):
            while not wire.said:
                await asyncio.sleep(0)
        room.torn = False
        receiver.on_message(begin(2))
        receiver.on_message(end(2))
        return wire.said

    asked, acknowledged = asyncio.run(story())
    assert isinstance(asked, Resend)
    assert asked.restart
    assert isinstance(acknowledged, Ack)
    assert (room.failed, room.kept) == ([2], [2])


CONTENT = bytes(range(NBYTES))


def parcel(tag: int, start: int, nbytes: int, chunk: int = 0, iteration: int = 1) -> Parcel:
    """A piece of a chunk; of rank 0, to rank 1."""
    half = NBYTES // 2
    at = chunk * half
    digest = xxhash.xxh3_64_intdigest(CONTENT[at : at + half])
    whole = Chunk(owner=0, iteration=iteration, index=chunk, offset=at, nbytes=half, digest=digest)
    return Parcel(chunk=whole, start=start, nbytes=nbytes, tag=tag, source=0, target=1)


class ByWorkers:
    """A receiver whose bytes come by way of a local worker."""

    def __init__(self, room: Room) -> None:
        self.room, self.wire = room, Wire()
        self.receiver = Receiver(room, self.wire, "a")  # type: ignore[arg-type]

    def hear(self, *messages: PeerMessage) -> None:
        for message in messages:
            self.receiver.on_message(message)

    def land(self, tag: int, content: bytes = CONTENT, error: str = "") -> None:
        """The worker has received a piece: it lays it down where it was told."""
        piece, memory = next((piece, memory) for piece, memory in self.room.collected if piece.tag == tag)
        if memory is not None and not error:
            at = piece.chunk.offset + piece.start
            memory.data(at, piece.nbytes)[:] = content[at : at + piece.nbytes]
        self.receiver.collected(piece.source, tag, error)

    def chunks(self, memory: int = 0) -> set[int]:
        return set(self.room.memories[memory].chunks)


@pytest.fixture
def workers(room: Room) -> ByWorkers:
    return ByWorkers(room)


class TestPieces:
    @given(st.permutations(range(4)))
    def test_land_in_any_order(self, order: list[int]) -> None:
        room = Room()
        workers = ByWorkers(room)
        workers.hear(begin(1), *(parcel(tag, 8 * tag, 8) for tag in range(4)))
        for tag in order[:-1]:
            workers.land(tag)
            assert not workers.chunks()
        workers.land(order[-1])
        assert workers.chunks() == {0}
        assert not workers.wire.said
        room.memories[0].close()

    def test_that_land_after_the_end_was_said_complete_the_shard(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), parcel(1, 0, 16), parcel(2, 16, 16), end(1))
        workers.land(2)
        assert not room.kept
        workers.land(1)
        assert room.kept == [1]
        assert workers.wire.acknowledged == [(1, True)]

    def test_that_make_a_damaged_chunk_are_asked_for_again(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), parcel(1, 0, 16), parcel(2, 16, 16))
        workers.land(1, bytes(NBYTES))
        workers.land(2)
        assert workers.wire.said == [Resend(owner=0, iteration=1, chunks=[0])]
        assert not workers.chunks()
        assert "chunk 0 of rank 0 from host a arrived damaged" in room.log_lines[0]
        workers.hear(parcel(3, 0, 32))
        workers.land(3)
        assert workers.chunks() == {0}

    def test_of_several_chunks_are_counted_for_each(self, workers: ByWorkers) -> None:
        workers.hear(begin(1), parcel(1, 0, 16), parcel(2, 0, 16, chunk=1), parcel(3, 16, 16, chunk=1), parcel(4, 16, 16))
        for tag, whole in ((1, set()), (2, set()), (3, {1}), (4, {0, 1})):
            workers.land(tag)
            assert workers.chunks() == whole

    @pytest.mark.parametrize(("start", "nbytes"), [(-1, 8), (0, 0), (0, -1), (0, 33), (25, 8), (32, 1)])
    def test_outside_of_their_chunk_are_refused(self, start: int, nbytes: int, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1))
        with pytest.raises(PeerError, match=rf"host a sent bytes {start}\+{nbytes} of a chunk of 32"):
            workers.hear(parcel(1, start, nbytes))
        assert not room.collected

    def test_of_a_chunk_outside_of_the_shard_are_refused(self, workers: ByWorkers, room: Room) -> None:
        piece = parcel(1, 0, 8)
        workers.hear(begin(1))
        with pytest.raises(PeerError, match=r"host a sent chunk 0 at 60\+32, which is not its place in the shard's 72 bytes"):
            workers.hear(piece.model_copy(update={"chunk": piece.chunk.model_copy(update={"offset": 60})}))
        assert not room.collected

    def test_that_do_not_come_are_said_to_have_gone_astray(self, workers: ByWorkers) -> None:
        workers.hear(begin(1), parcel(1, 0, 32))
        workers.land(1, error="connection reset")
        assert workers.wire.said == [Astray(text="host b: connection reset")]
        assert not workers.chunks()

    def test_that_complete_a_shard_with_another_root_end_the_connection(self, workers: ByWorkers, room: Room) -> None:
        """The next one brings all of it again; on this one its sender would wait for an answer that does not come."""
        room.refusal = "it arrived with another root"
        workers.hear(begin(1), parcel(1, 0, 32), end(1))
        workers.land(1)
        assert workers.wire.aborted == ["it arrived with another root"]

    def test_of_which_nothing_is_known_are_nobodys(self, workers: ByWorkers) -> None:
        workers.receiver.collected(0, 1, "")
        workers.receiver.collected(0, 1, "an error")
        assert not workers.wire.said


class TestPiecesThatAreReadByRdma:
    """The process that reads may still write to the memory of a shard: until the last read is over, nobody else gets it."""

    @staticmethod
    def story(room: Room, *messages: PeerMessage) -> tuple[list[int], list[PeerMessage]]:
        """The shards whose memory is given up before the fabric brings anything, and all that was said."""

        async def heard() -> tuple[list[int], list[PeerMessage]]:
            wire, place = Wire(), parcel(1, 0, 32)
            receiver = Receiver(room, wire, "a")  # type: ignore[arg-type]
            receiver.on_message(begin(1))
            for message in messages:
                receiver.on_message(message)
            receiver.on_message(Readable(chunk=place.chunk, start=0, nbytes=32, tag=1, address=0, seal=b""))
            receiver.on_message(Drop(owner=0, iteration=1))
            await asyncio.sleep(0)
            before = [*room.failed]
            room.fabric.set()
            async with asyncio.timeout(10):
                while not any(isinstance(message, Taken) for message in wire.said):
                    await asyncio.sleep(0)
            return before, wire.said

        return asyncio.run(heard())

    def test_keep_the_memory_of_a_shard_that_was_given_up(self, room: Room) -> None:
        before, said = self.story(room, Exposed(name="a", metadata=b"", key=b""))
        assert before == []
        assert room.failed == [1]
        assert said == [Ack(owner=0, iteration=1, ok=False), Taken(tag=1)]

    def test_of_slots_that_nobody_has_told_of_are_not_read(self, room: Room) -> None:
        assert self.story(room)[0] == [1]
        assert bytes(room.memories[0].data(0, 32)) == bytes(32)

    @pytest.mark.parametrize("has_begun", [True, False])
    def test_are_not_read_once_the_session_is_over(self, room: Room, has_begun: bool) -> None:
        """The next session gives their slots to others; the process that reads ends, also for what it has not been told yet."""
        ended: list[str] = []
        inbound = Inbound(SimpleNamespace(run=SimpleNamespace(rdma=SimpleNamespace(close=ended.append))))  # type: ignore[arg-type]

        async def story() -> list[PeerMessage]:
            wire, room.pulls = Wire(), inbound.pulls
            receiver = Receiver(room, wire, "a")  # type: ignore[arg-type]
            receiver.on_message(begin(1))
            receiver.on_message(Exposed(name="a", metadata=b"", key=b""))
            receiver.on_message(Readable(chunk=parcel(1, 0, 32).chunk, start=0, nbytes=32, tag=1, address=0, seal=b""))
            if has_begun:
                await asyncio.sleep(0)
            inbound.end_session()
            room.fabric.set()
            for _ in range(10):
                await asyncio.sleep(0)
            return wire.said

        assert asyncio.run(story()) == []
        assert ended == ["the session is over"]
        assert bytes(room.memories[0].data(0, 32)) == bytes(32)

    def test_that_fail_leave_no_chunk_whole_that_came_before(self, room: Room) -> None:
        """A shard that starts over on a connection brings chunks twice, and the second one lands where the first one was."""
        room.broken = {2}

        async def story() -> list[PeerMessage]:
            wire, chunk = Wire(), parcel(1, 0, 32).chunk
            receiver = Receiver(room, wire, "a")  # type: ignore[arg-type]
            receiver.on_message(begin(1))
            receiver.on_message(Exposed(name="a", metadata=b"", key=b""))
            for tag in (1, 2):
                receiver.on_message(Readable(chunk=chunk, start=0, nbytes=32, tag=tag, address=0, seal=b""))
            room.fabric.set()
            async with asyncio.timeout(10):
                while not any(isinstance(message, Astray) for message in wire.said):
                    await asyncio.sleep(0)
            return wire.said

        assert asyncio.run(story()) == [Taken(tag=1), Taken(tag=2), Astray(text="host b: a piece was changed on its way")]
        assert not room.memories[0].chunks


class TestPiecesOfAShardThatWasGivenUp:
    """A worker may still write to its memory: until the last piece has landed, nobody else gets it."""

    def test_keep_its_memory_until_the_last_has_landed(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), parcel(1, 0, 16), parcel(2, 16, 16), Drop(owner=0, iteration=1))
        assert workers.wire.acknowledged == [(1, False)]
        workers.land(1)
        assert not room.failed
        workers.land(2)
        assert room.failed == [1]
        assert workers.wire.acknowledged == [(1, False)]

    def test_do_so_when_the_connection_is_lost(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), parcel(1, 0, 32))
        workers.receiver.on_lost("cut")
        assert not room.failed
        workers.land(1, error="connection reset")
        assert room.failed == [1]
        assert not workers.wire.said

    def test_do_so_when_the_sender_goes_on(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), parcel(1, 0, 32), begin(2), parcel(2, 0, 32, iteration=2))
        workers.land(2)
        assert workers.chunks(1) == {0}
        assert not room.failed
        workers.land(1)
        assert room.failed == [1]
        assert not workers.chunks(0)

    def test_that_was_never_begun_are_thrown_away(self, workers: ByWorkers, room: Room) -> None:
        workers.hear(begin(1), Drop(owner=0, iteration=1), parcel(1, 0, 32))
        assert room.collected[0][1] is None
        workers.land(1)
        assert room.failed == [1]
        assert workers.wire.acknowledged == [(1, False)]


def test_pieces_that_were_thrown_away_do_not_count_when_the_shard_starts_over(workers: ByWorkers, room: Room) -> None:
    """There was no slot for it at first; what was under way then lands nowhere, and makes no chunk whole."""

    async def work() -> None:
        room.full = True
        workers.hear(begin(1), parcel(1, 0, 32))
        room.full = False
        workers.hear(begin(1), parcel(2, 0, 32), end(1))
        workers.land(1)
        assert not workers.chunks()
        assert not room.log_lines
        workers.land(2)
        assert workers.chunks() == {0}
        assert room.kept == [1]
        assert workers.wire.acknowledged == [(1, True)]

    asyncio.run(work())


def test_an_error_of_a_piece_that_was_thrown_away_says_so_too(workers: ByWorkers, room: Room) -> None:
    """The workers of the two hosts cannot reach each other, whatever it was they carried."""

    async def work() -> None:
        room.full = True
        workers.hear(begin(1), parcel(1, 0, 32))
        workers.land(1, error="connection reset")
        assert workers.wire.said == [Astray(text="host b: connection reset")]

    asyncio.run(work())


def test_what_was_hashed_on_arrival_is_not_hashed_again(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane hashes every slice while it is in the cache; bytes that came in another way have no checksum yet."""
    hashed: list[int] = []

    def checksum(data: memoryview) -> int:
        hashed.append(len(data))
        return xxhash.xxh3_64_intdigest(data)

    monkeypatch.setattr("gemini_ft.agent.replication.receive.checksum", checksum)
    wire = Wire()
    receiver = Receiver(room, wire, "b")  # type: ignore[arg-type]
    receiver.on_message(begin(2))
    half, digest = bytes(range(NBYTES // 2)), xxhash.xxh3_64_intdigest(bytes(range(NBYTES // 2)))
    first, second = (chunk_of(2, index, digest) for index in range(2))
    target = receiver.on_message(first)
    assert target is not None
    target[:] = half
    receiver.on_bytes(first, digest)
    receiver.on_message(Parcel(chunk=second, start=0, nbytes=len(half), tag=1, source=0, target=0))
    room.memories[0].data(second.offset, len(half))[:] = half
    receiver.collected(0, 1, "")
    assert room.memories[0].chunks == {index: (index * len(half), len(half), digest) for index in range(2)}
    assert hashed == [len(half)]
    receiver.on_message(wrong := Chunk(owner=0, iteration=2, index=0, offset=0, nbytes=len(half), digest=digest))
    receiver.on_bytes(wrong, digest ^ 1)  # of the bytes that came
    assert [type(message) for message in wire.said] == [Resend]


class TestChunk:
    """A sender that knows the secret, and is wrong."""

    DIGEST = xxhash.xxh3_64_intdigest(bytes(NBYTES // 2))

    @pytest.fixture
    def receiver(self, room: Room) -> Receiver:
        receiver = Receiver(room, Wire(), "b")  # type: ignore[arg-type]
        receiver.on_message(begin(1))
        receiver.on_message(chunk := chunk_of(1, 0, self.DIGEST))
        receiver.on_bytes(chunk, self.DIGEST)
        assert set(room.memories[0].chunks) == {0}
        return receiver

    def test_at_the_place_of_another_is_refused(self, receiver: Receiver) -> None:
        """Its bytes would lie where others have been verified, and the root would still be that of the owner's copy."""
        with pytest.raises(PeerError, match=r"sent chunk 1 at 0\+32"):
            receiver.on_message(chunk_of(1, 1, self.DIGEST, offset=0))

    def test_that_comes_a_second_time_counts_for_nothing_until_it_is_there(self, receiver: Receiver, room: Room) -> None:
        receiver.on_message(again := chunk_of(1, 0, self.DIGEST))
        assert not room.memories[0].chunks
        receiver.on_bytes(again, self.DIGEST ^ 1)
        assert not room.memories[0].chunks

    def test_that_is_announced_while_it_comes_is_refused(self, receiver: Receiver) -> None:
        """Two threads would write to the same place."""
        receiver.on_message(chunk_of(1, 1, self.DIGEST))
        with pytest.raises(PeerError, match="host b sent chunk 1 while it was coming already"):
            receiver.on_message(chunk_of(1, 1, self.DIGEST))
