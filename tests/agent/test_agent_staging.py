"""A shard of a stored checkpoint is laid down in an agent's memory, before a session opens or not at all."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from agent_kit import CHUNK, EXTRAS, Job, Rank, content, eventually, slot_store, stream_context, versions

from gemini_ft.agent import storing as staging
from gemini_ft.agent.client import as_error
from gemini_ft.agent.memory.budget import Budget
from gemini_ft.agent.memory.slot_memory import EXTRAS_ROOM, SlotMemory, SlotShape, extras_room
from gemini_ft.agent.memory.slot_store import SlotStore
from gemini_ft.agent.storing import Stagings
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.protocol import Host
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, MemoryBudgetError, StorageError
from gemini_ft.recovery.readers import LocalShard
from gemini_ft.storage import shard as stored_shards
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.s3errors import BrokenError, GarbledError
from gemini_ft.storage.shard import Committed, ShardRecord, write_shard
from gemini_ft.wire.frames import FrameBuffer
from gemini_ft.wire.messages import Failed
from gemini_ft.wire.worker_messages import Stage, Staged, to_worker

NBYTES = 4 * CHUNK
STORED = Version(Incarnation(1, "earlier"), 7)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def store(storage: LocalStorage, owner: int = 0, chunk: int = CHUNK) -> ShardRecord:
    layout = build_layout([TensorSpec(name="weight", dtype="uint8", shape=(2 * NBYTES,), group=(0, 1))], owner, 2)
    data = content(owner, 7, NBYTES)
    parts = [data[at : at + chunk] for at in range(0, NBYTES, chunk)]
    extras = [EXTRAS[at : at + chunk] for at in range(0, len(EXTRAS), chunk)]
    checksums = [checksum(part) for part in [*parts, *extras]]
    root = shard_root(owner, STORED, layout_digest(layout.to_bytes()), (NBYTES, len(EXTRAS), chunk), checksums)
    return write_shard(storage, f"shard-{owner}", layout, memoryview(data), EXTRAS, committed=Committed(owner, STORED, root, chunk))


def stage(rank: Rank, storage: LocalStorage, record: ShardRecord, owner: int = 0) -> None:
    settings: dict[str, object] = {"url": storage.root.as_uri(), "every_steps": 1}
    order = Stage(owner=owner, version=STORED, record=record.model_dump_json(), storage=settings)
    rank.client.call(order, Staged)


@pytest.mark.parametrize("error", [BrokenError("it broke off"), GarbledError("s3://b", "cannot read a", "no XML")])
def test_an_answer_of_s3_that_is_broken_reaches_the_worker_as_an_error_of_storage(error: StorageError) -> None:
    """Which it asks storage for again; an error that workers do not know would end the start of the job."""

    async def refused() -> bytes:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            ours.setblocking(False)
            worker = WorkerConnection(Mock(), ours, os.getpid())
            worker.refuse(Stage(call=7, owner=0, version=STORED, record="", storage={}), error)
            worker.close()
            return theirs.recv(2**16)

    (body,) = FrameBuffer().bodies(memoryview(asyncio.run(refused())))
    answer = to_worker.unpack(body)
    assert isinstance(answer, Failed)
    assert answer.call == 7
    assert type(as_error(answer)) is StorageError
    assert str(as_error(answer)) == str(error)


def test_it_is_a_copy_like_any_other(job: Job, storage: LocalStorage) -> None:
    (rank,) = job.join(["a"])
    rank.inventory()
    stage(rank, storage, store(storage))
    assert versions(rank.inventory()) == {(0, 7)}
    shard = LocalShard(rank.client, 0, STORED)
    assert b"".join(bytes(view) for _, view in shard.chunks()) == content(0, 7, NBYTES)
    assert shard.extras() == EXTRAS
    shard.close()


def test_it_is_read_once_however_often_it_is_asked_for(job: Job, storage: LocalStorage) -> None:
    (rank,) = job.join(["a"])
    record = store(storage)
    for _ in range(3):
        stage(rank, storage, record)
    assert job.log("a").count("from storage") == 1
    assert len(rank.inventory()) == 1


@pytest.mark.parametrize("damage", ["bit", "gone"])
def test_what_storage_does_not_give_back_costs_no_memory(job: Job, storage: LocalStorage, damage: str) -> None:
    (rank,) = job.join(["a"])
    record = store(storage)
    path = storage.root / "shard-0"
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)
    if damage == "gone":
        path.unlink()
    with pytest.raises(CorruptDataError if damage == "bit" else StorageError):
        stage(rank, storage, record)
    assert rank.inventory() == []
    assert job.status("a")["memory"]["used"] == 0


def test_a_sound_object_that_is_another_shard_is_refused(job: Job, storage: LocalStorage) -> None:
    (rank,) = job.join(["a"])
    with pytest.raises(CorruptDataError, match="every part is sound, and together they are not what was committed"):
        stage(rank, storage, store(storage, owner=1), owner=0)
    assert rank.inventory() == []


def test_it_is_in_the_rotation_of_the_next_session(job: Job, storage: LocalStorage) -> None:
    ranks = job.join(("a", "b"))
    for owner, rank in enumerate(ranks):
        rank.inventory()
        stage(rank, storage, store(storage, owner), owner)
    spec = job.make_spec(ranks, resumed=STORED, sources={0: ["a"], 1: ["b"]})
    for rank in ranks:
        rank.open(spec)
    for rank in ranks:
        rank.reserve(extras_capacity=EXTRAS_ROOM)
        rank.progress(9)  # replicas are rebuilt from the second step on
    slot = job.status("a")["memory"]["used"] // 2
    eventually(lambda: "complete:7" in job.stream("a")["shards"]["1"], "the replica of what was read from storage")
    job.commit(ranks, 8, 9, 10)
    assert job.status("a")["memory"]["used"] < 5 * slot  # two of its own, two replicas


class Copy:
    """In the place of a `StoredCopy`."""

    def __init__(self, extras_capacity: int = 4096) -> None:
        self.shape = SlotShape(
            run="run",
            stream="main",
            owner=0,
            world_size=1,
            layout_hash="0" * 16,
            layout=b"",
            data_bytes=NBYTES,
            extras_capacity=extras_capacity,
            chunk_bytes=CHUNK,
        )

    def fill(self, memory: SlotMemory) -> None:
        for index, cut in enumerate(memory.cuts(0)):
            memory.put_chunk(index, *cut, digest=0)
        memory.finish(STORED, 0, None)


def new_vault(limit: int) -> tuple[SlotStore, Budget]:
    budget = Budget(limit)
    return slot_store(Host(name="a"), budget), budget


def test_one_that_comes_too_late_is_dropped() -> None:
    vault, budget = new_vault(2**30)
    asyncio.run(vault.stage(Copy(), STORED, wanted=lambda: False))  # type: ignore[arg-type]
    assert (vault.memory, budget.used) == ({}, 0)


def test_slots_in_which_there_is_nothing_make_room() -> None:
    copy = Copy()
    vault, budget = new_vault(2 * copy.shape.total)
    vault.ensure(0, copy.shape, 2, reuse=True)
    asyncio.run(vault.stage(copy, STORED, wanted=lambda: True))  # type: ignore[arg-type]
    assert budget.used == copy.shape.total
    vault.ensure(0, copy.shape, 2, reuse=True)
    assert budget.used == 2 * copy.shape.total


@pytest.mark.parametrize("in_one_request", [True, False])
@pytest.mark.parametrize("damage", ["bit", "gone"])
def test_a_shard_that_cannot_be_read_gives_its_memory_back_at_once(
    storage: LocalStorage, damage: str, in_one_request: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its budget is given back, and it is read again while the first error is still being handled."""
    monkeypatch.setattr(stored_shards, "ONE_REQUEST", 0)  # nothing of the data comes with the small parts
    if not in_one_request:
        monkeypatch.setattr(staging, "CHUNKS_AT_A_TIME", 1)
    stream = f"{damage}-{in_one_request}"  # in the name of its memory
    settings: dict[str, object] = {"url": storage.root.as_uri(), "every_steps": 1}
    record, path = store(storage), storage.root / "shard-0"
    copy = staging.StoredCopy(
        stream_context(name=stream), Stage(owner=0, version=STORED, record=record.model_dump_json(), storage=settings)
    )
    staging.hang_up()
    blob = bytearray(path.read_bytes())
    blob[record.data.offset] ^= 1
    path.write_bytes(blob)
    if damage == "gone":
        path.unlink()
    vault, budget = new_vault(2**30)
    with pytest.raises(CorruptDataError if damage == "bit" else StorageError) as held:
        asyncio.run(vault.stage(copy, STORED, wanted=lambda: True))
    assert f"gemini:{stream}:" not in Path("/proc/self/maps").read_text(), f"kept by the frames of {held.value}"
    assert budget.used == 0


def test_without_room_it_is_refused_with_the_numbers() -> None:
    vault, budget = new_vault(1000)
    with pytest.raises(MemoryBudgetError, match=r"rank 0's shard from storage needs [\d,]+ bytes; this host's agent may hold 1,000"):
        asyncio.run(vault.stage(Copy(), STORED, wanted=lambda: True))  # type: ignore[arg-type]
    assert budget.used == 0


@pytest.mark.parametrize("nbytes", [0, 1, EXTRAS_ROOM // 2, EXTRAS_ROOM, 3 * EXTRAS_ROOM + 17])
def test_small_state_may_grow_by_a_quarter(nbytes: int) -> None:
    assert extras_room(nbytes) >= max(EXTRAS_ROOM, nbytes + nbytes // 4)
    assert extras_room(nbytes) == extras_room(nbytes + nbytes // 1000)


def two_orders(storage: LocalStorage, vault: object) -> tuple[Stagings, list[Stage]]:
    """A stream that stages into ``vault``, and orders for two stored shards."""

    host = SimpleNamespace(slots=lambda owner: SimpleNamespace(complete_version=lambda version: None))
    stream = SimpleNamespace(context=stream_context(spec=None, host=host, slot_store=vault), end_rebuilding=AsyncMock())
    settings: dict[str, object] = {"url": storage.root.as_uri(), "every_steps": 1}
    orders = [Stage(owner=owner, version=STORED, record=store(storage, owner).model_dump_json(), storage=settings) for owner in (0, 1)]
    return Stagings(stream), orders  # type: ignore[arg-type]


def test_shards_that_come_together_share_a_storage_and_nothing_keeps_it(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that looks damaged is read again on another connection; and credentials change while an agent lives."""
    opened: list[str] = []

    def reopened(url: str, *_: object) -> LocalStorage:
        opened.append(url)
        return storage

    async def corrupt(*_: object, **__: object) -> None:
        raise CorruptDataError("as it seems")

    monkeypatch.setattr(staging, "open_storage", reopened)
    stagings, orders = two_orders(storage, SimpleNamespace(stage=corrupt))

    async def work() -> None:
        for _ in range(2):
            before = len(opened)
            found = await asyncio.gather(*(stagings.stage(order) for order in orders), return_exceptions=True)
            assert [type(each) for each in found] == [CorruptDataError] * 2
            assert 2 <= len(opened) - before <= 4  # each has had a second look elsewhere

    asyncio.run(work())
    staging.hang_up()


def test_a_small_one_is_read_in_one_go_however_small_its_chunks_are(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in one answer, which is taken as a whole or not at all."""
    read, pieces = stored_shards.StoredShard.read, list[int]()

    def noted(self: stored_shards.StoredShard, offset: int, into: memoryview) -> None:
        pieces.append(into.nbytes)
        read(self, offset, into)

    monkeypatch.setattr(stored_shards.StoredShard, "read", noted)
    settings: dict[str, object] = {"url": storage.root.as_uri(), "every_steps": 1}
    order = Stage(owner=0, version=STORED, record=store(storage, chunk=CHUNK // 8).model_dump_json(), storage=settings)
    copy = staging.StoredCopy(stream_context(), order)
    memory = SlotMemory.create(copy.shape)
    copy.fill(memory)
    assert pieces == [NBYTES]
    monkeypatch.setattr(staging, "ONE_REQUEST", NBYTES - 1)
    copy.fill(memory)
    assert pieces[1:] == [CHUNK] * 4
    assert bytes(memory.data(0, NBYTES)) == content(0, 7, NBYTES)
    memory.close()


def test_shards_that_come_together_are_read_side_by_side(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one waits until the other is being read, too: one after the other they would never end."""
    both = threading.Barrier(2, timeout=30)
    read = stored_shards.StoredShard.read

    def meeting(self: stored_shards.StoredShard, offset: int, into: memoryview) -> None:
        both.wait()
        read(self, offset, into)

    monkeypatch.setattr(stored_shards.StoredShard, "read", meeting)
    vault, _ = new_vault(2**30)
    stagings, orders = two_orders(storage, vault)

    async def work() -> None:
        await asyncio.gather(*(stagings.stage(order) for order in orders))

    asyncio.run(work())
    staging.hang_up()
    for owner in (0, 1):
        ((_, memory),) = [(key, each) for key, each in vault.memory.items() if key[0] == owner]
        assert bytes(memory.data(0, NBYTES)) == content(owner, 7, NBYTES)
