"""Shards that are read once for all ranks: which they are, what that costs the busiest host, and what becomes of bytes that are wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from agent_kit import WAIT, Job, content
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.layout import Layout, Read, TensorSpec, build_layout, plan_reads
from gemini_ft.core.placement import place
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, PeerError, RecoveryError
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import ShardReaders
from gemini_ft.recovery.spread import Landing, Outflow, SharedShard, owners_to_spread
from gemini_ft.wire.peer_messages import Claims, Description

VERSION = Version(Incarnation(1, "a"), 7)
WORLD, CHUNK, BLOCK = 3, 128, 192  # a block is no multiple of a chunk, so that their borders never meet
EVERYONE = tuple(range(WORLD))


# -- the choice


def job(hosts: int, ranks: int, lost: int = 0) -> tuple[RecoveryPlan, list[str]]:
    """A job of so many hosts with two copies of everything, some of which were lost (one of each group) and replaced."""
    names = [f"h{number:02}" for number in range(hosts)]
    placed = place(names, min(2, hosts))
    gone = set(names[0 : 2 * lost : 2])
    by_rank = [host for host in names for _ in range(ranks)]
    sources = {rank: tuple(sorted(set(placed[host]) - gone)) for rank, host in enumerate(by_rank)}
    return RecoveryPlan(kind="memory", version=VERSION, sources=sources, world_size=len(by_rank)), by_rank


def traffic(plan: RecoveryPlan, hosts: list[str]) -> Counter[tuple[str, str]]:
    """Shards that each host sends and receives, counted one by one from what every rank does."""
    client: Any = None
    claims: Any = None
    passed: Counter[tuple[str, str]] = Counter()
    spread = owners_to_spread(plan, hosts)
    for rank, host in enumerate(hosts):
        readers = ShardReaders(client, host, plan, {}, claims, b"", 1.0)
        for owner in plan.sources:
            if owner not in spread or owner == rank:
                source = readers.candidates(owner, rank)[0]
                if source != host:
                    passed["out", source] += 1
                    passed["in", host] += 1
    if spread and len(set(hosts)) > 1:  # in a ring every rank hands on all shards but that of the next one
        for rank, host in enumerate(hosts):
            after = hosts[(rank + 1) % len(hosts)]
            if after != host:
                passed["out", host] += len(hosts) - 1
                passed["in", after] += len(hosts) - 1
    return passed


@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 4))
def test_no_host_sends_or_receives_more_than_twice_the_state(hosts: int, ranks: int, lost: int) -> None:
    plan, by_rank = job(hosts, ranks, min(lost, hosts // 2))
    busiest = max(traffic(plan, by_rank).values(), default=0)
    assert busiest <= 2 * hosts * ranks


@given(st.integers(1, 24), st.integers(1, 8), st.integers(0, 4))
def test_no_rank_dials_more_than_a_few_times(hosts: int, ranks: int, lost: int) -> None:
    plan, by_rank = job(hosts, ranks, min(lost, hosts // 2))
    spread = owners_to_spread(plan, by_rank)
    for rank, host in enumerate(by_rank):
        assert sum(host not in sources and (owner not in spread or owner == rank) for owner, sources in plan.sources.items()) <= 8


def test_copies_that_are_where_they_are_needed_are_not_spread() -> None:
    assert owners_to_spread(*job(2, 8)) == frozenset()  # a worker that failed: everything is in both hosts' memory
    assert owners_to_spread(*job(2, 1, lost=1)) == frozenset()  # one reader
    assert owners_to_spread(*job(2, 2, lost=1)) == frozenset(range(4))
    assert owners_to_spread(*job(3, 3)) == frozenset(range(9))  # 9 shards fetched by the three ranks of each host; 8 if they go round


# -- the bytes


def shards(per_rank: int = 0) -> tuple[dict[int, bytes], dict[int, Description], dict[str, torch.Tensor], list[TensorSpec]]:
    """The shards of a job whose ranks all hold ``a`` and ``b``, and each a tensor of its own: bytes, accounts, and the tensors' values."""
    values = {name: torch.from_numpy(np.random.default_rng(n).random(size, np.float32)) for n, (name, size) in enumerate(SIZES.items())}
    common = [TensorSpec(name=name, dtype="float32", shape=(size,), group=EVERYONE) for name, size in SIZES.items()]
    contents, accounts = {}, {}
    for rank in EVERYONE:
        own = [TensorSpec(name="own", dtype="float32", shape=(per_rank,), group=(rank,), logical=f"per rank {rank}")] if per_rank else []
        layout = build_layout([*common, *own], rank, WORLD)
        memory = bytearray(layout.nbytes)
        for piece in layout.pieces:
            source = values.get(piece.name, torch.full((per_rank,), rank + 1.0))[piece.start : piece.stop]
            memory[piece.offset : piece.offset + piece.nbytes] = source.numpy().tobytes()
        contents[rank], accounts[rank] = bytes(memory), account(rank, layout, bytes(memory))
    return contents, accounts, values, common


SIZES = {"a": 500, "b": 77}


def account(rank: int, layout: Layout, content: bytes) -> Description:
    digests = [checksum(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK)]
    blob = layout.to_bytes()
    root = shard_root(rank, VERSION, layout_digest(blob), (len(content), 0, CHUNK), digests)
    sizes = {"data_bytes": len(content), "extras_bytes": 0, "extras_capacity": 0, "chunk_bytes": CHUNK}
    return Description(owner=rank, version=VERSION, layout=blob, layout_hash=layout.logical_hash, digests=digests, root=root, **sizes)


class Copy:
    """A copy on some host, of which reading fails after so many bytes."""

    def __init__(self, where: str, content: bytes, fails_after: int | None = None) -> None:
        self.where, self._content, self._fails_after = where, content, fails_after

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        for at in range(0, len(self._content), CHUNK):
            if self._fails_after is not None and at >= self._fails_after:
                raise PeerError(f"{self.where} is gone")
            yield at, memoryview(bytearray(self._content[at : at + CHUNK]))

    def stay(self) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        """Nothing to let go of."""


def readers(*copies: Copy, owner: int = 0) -> ShardReaders:
    """Where a rank's shard is."""

    class Copies(ShardReaders):
        def open(self, owner: int, host: str) -> Any:
            return next(copy for copy in copies if copy.where == host)

    client: Any = None
    claims: Any = None
    plan = RecoveryPlan(kind="memory", version=VERSION, sources={owner: tuple(copy.where for copy in copies)})
    return Copies(client, "here", plan, {}, claims, b"", 1.0)


def reads_of(owner: int, accounts: dict[int, Description], specs: list[TensorSpec], rank: int) -> list[Read]:
    layouts = {each: Layout.from_bytes(about.layout) for each, about in accounts.items()}
    own = [spec for spec in layouts[rank].pieces if spec.name == "own"]
    mine = [*specs, *(TensorSpec(name=p.name, dtype=p.dtype, shape=p.shape, group=p.group, logical=p.logical) for p in own)]
    return [read for read in plan_reads(mine, rank, layouts) if read.owner == owner]


def pour(outflow: Outflow) -> list[bytes]:
    """All blocks of an outflow."""
    blocks = []
    while (block := outflow.next_block()) is not None:
        blocks.append(bytes(block))
        outflow.give_back(block)
    outflow.close()
    assert outflow.next_block() is None
    return blocks


@pytest.mark.parametrize("fails_after", [None, 0, 11 * CHUNK, 13 * CHUNK])
def test_a_stream_fills_the_tensors_of_all_ranks(fails_after: int | None) -> None:
    """Also where the copy that is read fails in the middle: the next one goes on with the byte that was due."""
    contents, accounts, values, specs = shards(per_rank=300)
    shard = SharedShard(accounts[0], accounts[0].root, WORLD)
    assert shard.nbytes < len(contents[0]) - 300 * 4 + 2 * CHUNK  # no more of what is this rank's alone than its chunks have
    sender = {name: torch.zeros(size) for name, size in SIZES.items()} | {"own": torch.zeros(300)}
    first, second = Copy("first", contents[0], fails_after), Copy("second", contents[0])
    outflow = Outflow(
        readers(first, second), shard, reads_of(0, accounts, specs, 0), sender, [memoryview(bytearray(BLOCK)) for _ in range(2)]
    )
    blocks = pour(outflow)
    assert outflow.read is not None
    assert outflow.read[0] == ("first" if fails_after is None else "second")
    assert torch.equal(sender["own"], torch.ones(300))
    receiver = {name: torch.zeros(size) for name, size in SIZES.items()}
    reads = reads_of(0, accounts, specs, 1)
    landing = Landing(shard, reads, receiver)
    assert shard.covers(reads)
    for block in blocks:
        assert not landing.is_complete
        landing.take(memoryview(bytearray(block)))
    assert landing.is_complete
    for read in reads:
        assert torch.equal(receiver[read.name][read.start : read.stop], values[read.name][read.start : read.stop])
        assert torch.equal(sender[read.name][read.start : read.stop], values[read.name][read.start : read.stop])
    assert landing.nbytes == sum(read.nbytes for read in reads)


def test_nobody_waits_for_the_bytes_of_one_rank_alone() -> None:
    contents, accounts, _, specs = shards(per_rank=300)
    shard = SharedShard(accounts[1], accounts[1].root, WORLD)
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()} | {"own": torch.zeros(300)}
    is_over = threading.Event()

    class Slow(Copy):
        def chunks(self) -> Iterator[tuple[int, memoryview]]:
            for at, view in super().chunks():
                if at > max(shard.offsets) and not is_over.wait(WAIT):
                    raise PeerError("the stream did not end before this")
                yield at, view

    blocks = [memoryview(bytearray(BLOCK)) for _ in range(2)]
    outflow = Outflow(readers(Slow("first", contents[1]), owner=1), shard, reads_of(1, accounts, specs, 1), tensors, blocks)
    taken = 0
    while (block := outflow.next_block()) is not None:
        taken += len(block)
        outflow.give_back(block)
    is_over.set()
    outflow.close()
    assert taken >= shard.nbytes
    assert outflow.failure is None
    assert outflow.read is not None
    assert torch.equal(tensors["own"], torch.full((300,), 2.0))


@pytest.mark.soak
def test_a_reader_that_others_hold_up_keeps_its_source(tmp_path: Path) -> None:
    """Its lease is five seconds, and other ranks need eight for a round, once in each third of the shard."""
    nbytes, client = 96 * 2**20, cast(Any, None)
    with Job(tmp_path) as job:
        ranks = job.join(("a", "b"))
        spec = job.make_spec(ranks, replica_timeout=1.0)
        for rank in ranks:
            rank.open(spec)
            rank.reserve(nbytes)
        job.commit(ranks, 1)
        plan = RecoveryPlan(kind="memory", version=job.version(1), sources={0: ("a",)}, world_size=2)
        claims = Claims(run=job.run, stream="main", host="c", to="", role="fetch", incarnation=None)
        with contextlib.closing(ShardReaders(client, "c", plan, {"a": ranks[0].address}, claims, b"s" * 16, WAIT)) as sources:
            about = sources.read(0, 0, lambda copy: copy.about)
            shard, tensors = SharedShard(about, None, 2), {"weight": torch.zeros(2 * nbytes, dtype=torch.uint8)}
            reads = [
                Read(owner=0, offset=piece.offset, nbytes=piece.nbytes, name=piece.name, start=piece.start, stop=piece.stop)
                for piece in shard.layout.pieces
            ]
            outflow = Outflow(sources, shard, reads, tensors, [memoryview(bytearray(2**20)) for _ in range(2)])
            taken = 0
            while (block := outflow.next_block()) is not None:
                taken += len(block)
                if taken % (nbytes // 3) == 0:
                    time.sleep(8)
                outflow.give_back(block)
            outflow.close()
        assert outflow.read == ("peer a", nbytes)
        assert "taken back" not in job.log("a")
    assert bytes(tensors["weight"][:nbytes].numpy()) == content(0, 1, nbytes)


def test_a_shard_that_cannot_be_read_ends_the_stream_and_says_why() -> None:
    contents, accounts, _, specs = shards()
    shard = SharedShard(accounts[0], accounts[0].root, WORLD)
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()}
    gone = readers(Copy("first", contents[0], CHUNK), Copy("second", contents[0], 2 * CHUNK))
    outflow = Outflow(gone, shard, reads_of(0, accounts, specs, 0), tensors, [memoryview(bytearray(BLOCK)) for _ in range(2)])
    pour(outflow)
    assert outflow.read is None
    assert isinstance(outflow.failure, RecoveryError)
    assert "first is gone; second is gone" in str(outflow.failure)


def test_a_reader_whose_blocks_are_not_wanted_any_more_ends() -> None:
    contents, accounts, _, specs = shards()
    shard = SharedShard(accounts[0], accounts[0].root, WORLD)
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()}
    blocks = [memoryview(bytearray(BLOCK))]
    outflow = Outflow(readers(Copy("first", contents[0])), shard, reads_of(0, accounts, specs, 0), tensors, blocks)
    assert outflow.next_block() is not None
    outflow.close()
    assert outflow.read is None
    assert outflow.failure is None


def test_a_bit_that_flips_on_the_way_is_noticed() -> None:
    contents, accounts, _, specs = shards()
    shard = SharedShard(accounts[1], accounts[1].root, WORLD)
    landing = Landing(shard, reads_of(1, accounts, specs, 0), {name: torch.zeros(size) for name, size in SIZES.items()})
    damaged = bytearray(contents[1])
    damaged[CHUNK + 5] ^= 1
    landing.take(memoryview(damaged)[:BLOCK])
    with pytest.raises(CorruptDataError, match="rank 1's shard was damaged on its way"):
        landing.take(memoryview(damaged)[BLOCK : 2 * BLOCK])


@pytest.mark.parametrize("field", ["layout", "digests", "data_bytes", "root"])
def test_an_account_that_is_not_of_what_was_committed_is_refused(field: str) -> None:
    _, accounts, _, _ = shards()
    about, other = accounts[0], accounts[1]
    wrong = {"layout": other.layout, "digests": other.digests, "data_bytes": about.data_bytes + CHUNK, "root": other.root}[field]
    committed = other.root if field == "root" else about.root
    with pytest.raises(CorruptDataError, match="is not what was committed"):
        SharedShard(about.model_copy(update={field: wrong}), committed, WORLD)
