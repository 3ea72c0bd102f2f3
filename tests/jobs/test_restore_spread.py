"""Ranks that give each other the state after a failure: what each reads and takes, and that nobody waits for ever in trouble."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agent_kit import end_agent
from plain_case import start_ranks
from rank_kit import Failed, World
from session_case import settle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.errors import PeerError, RecoveryError
from gemini_ft.recovery import restore
from gemini_ft.recovery.readers import Live, PeerShard, ShardReaders, nowhere
from gemini_ft.recovery.spread import Outflow
from gemini_ft.testing import digest
from gemini_ft.worker import spreading

HOSTS = ["host0", "host0", "host1", "host1"]
VICTIM = 2  # a rank of the host that is replaced
WIDTH = 192


def train(steps: int, trouble: Callable[[], None] | None = None, **options: Any) -> dict[str, Any]:
    """Resumes, takes a few steps, and tells what the state was at the beginning and at the end, and where it had come from."""
    rank, _ = start_ranks()
    spreading.ROUND = 0  # the least that goes round at a time: many rounds
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", timeout=20.0, chunk_bytes=2**16, **options)
    if trouble is not None:
        trouble()
    start = checkpointer.resume()
    begin = digest({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, WIDTH), float(rank))).square().mean().backward()
        optimizer.step()
        checkpointer.step()
    settle(checkpointer)
    end = digest({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    return {"start": start, "begin": begin, "end": end, "restored": checkpointer.stats.restored}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Two hosts of two ranks, one of which has lost its memory after three steps; ``expected`` is the state of then."""
    with World(tmp_path, hosts=HOSTS) as world:
        yield world


def lose_a_host(world: World) -> str:
    """Trains, loses a host's memory, and returns the state that must come back."""
    first = world.outcome(train, 3)
    assert len({said["end"] for said in first}) == 1, first
    end_agent(world.run, "host1")
    return str(first[0]["end"])


def is_victim() -> bool:
    return int(os.environ["RANK"]) == VICTIM


def die_in_the_middle() -> None:
    """The victim dies without a word when it should give its second block."""
    give, given = Outflow.next_block, [0]

    def next_block(self: Outflow) -> memoryview | None:
        given[0] += 1
        if is_victim() and given[0] == 2:
            os._exit(9)
        return give(self)

    Outflow.next_block = next_block  # type: ignore[method-assign]


def lose_all_copies() -> None:
    """The victim finds no copy of its shard that can be read to its end."""
    read = ShardReaders.read

    def fail(self: ShardReaders, owner: int, reader: int, use: Any, keep: bool = False, part: int = 0) -> Any:
        def broken(shard: Any) -> Any:
            chunks = shard.chunks

            def some() -> Iterator[tuple[int, memoryview]]:
                with contextlib.closing(chunks()) as there:
                    yield next(there)
                raise PeerError("its host is gone")

            shard.chunks = some
            return use(shard)

        return read(self, owner, reader, broken if is_victim() and owner == VICTIM else use, keep, part)

    ShardReaders.read = fail  # type: ignore[method-assign]


def cut_shards_in_parts() -> None:
    """Has shards of the size that they have here read in parts, as those of a large model are."""
    restore.PART = 2**14


def lose_a_peer_in_the_middle() -> None:
    """Breaks off, after a chunk, whatever the victim receives from one of its peers."""
    cut_shards_in_parts()
    chunks = PeerShard.chunks

    def some(self: PeerShard, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        for number, chunk in enumerate(chunks(self, live, start, stop)):
            if number and self.where == "peer host1":
                raise PeerError("its host is gone")
            yield chunk

    PeerShard.chunks = some  # type: ignore[method-assign]


def read_slowly() -> None:
    """The victim needs longer for its first block than collectives of a step may take."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    read = Outflow.next_block

    def slowly(self: Outflow) -> memoryview | None:
        if is_victim():
            time.sleep(2)
            Outflow.next_block = read  # type: ignore[method-assign]
        return read(self)

    Outflow.next_block = slowly  # type: ignore[method-assign]


def flip_a_bit() -> None:
    """In every part that reaches the victim by the collectives."""
    gather = spreading.all_gather_single

    def damaged(everything: torch.Tensor, own: torch.Tensor, async_op: bool) -> Any:
        work = gather(everything, own, async_op=async_op)
        if is_victim():
            work.wait()
            everything[:: len(own)] ^= 1
        return work

    spreading.all_gather_single = damaged


def say_that_no_rank_can_go_on() -> None:
    """Forges that word in every part that reaches any rank."""
    gather = spreading.all_gather_single

    def forged(everything: torch.Tensor, own: torch.Tensor, async_op: bool) -> Any:
        work = gather(everything, own, async_op=async_op)
        work.wait()
        everything[len(own) - spreading.TRAILER :: len(own)] ^= 1
        return work

    spreading.all_gather_single = forged


def test_each_shard_is_fetched_by_one_rank_and_reaches_all(world: World) -> None:
    expected = lose_a_host(world)
    results = world.outcome(train, 2)
    assert [(said["start"], said["begin"]) for said in results] == [(3, expected)] * 4
    assert [set(said["restored"]) for said in results] == [{"own memory", "other ranks"}] * 2 + [{"peer host0", "other ranks"}] * 2
    shard = results[0]["restored"]["own memory"]
    assert all(said["restored"]["other ranks"] == pytest.approx(3 * shard, abs=1000) for said in results)
    assert {said["end"] for said in results} == {results[0]["end"]}

    end_agent(world.run, "host1")
    encrypted = world.outcome(train, 0, GEMINI_ENCRYPT="true")  # which the training's collectives are not
    assert [said["begin"] for said in encrypted] == [results[0]["end"]] * 4
    assert [set(said["restored"]) for said in encrypted] == [{"own memory"}] * 2 + [{"peer host0"}] * 2


def test_bytes_that_are_damaged_on_the_way_are_read_from_their_holders(world: World) -> None:
    expected = lose_a_host(world)
    results = world.outcome(train, 0, flip_a_bit)
    assert [said["begin"] for said in results] == [expected] * 4
    assert [set(said["restored"]) for said in results] == [
        {"own memory", "other ranks"},
        {"own memory", "other ranks"},
        {"peer host0"},
        {"peer host0", "other ranks"},
    ]


def test_a_forged_word_that_a_rank_cannot_go_on_stops_nobody(world: World) -> None:
    expected = lose_a_host(world)
    results = world.outcome(train, 0, say_that_no_rank_can_go_on)
    assert [said["begin"] for said in results] == [expected] * 4
    assert [set(said["restored"]) for said in results] == [{"own memory"}] * 2 + [{"peer host0"}] * 2


def test_a_rank_may_read_for_longer_than_a_collective_of_a_step_may_take(world: World) -> None:
    expected = lose_a_host(world)
    results = world.outcome(train, 0, read_slowly)
    assert [said["begin"] for said in results] == [expected] * 4
    assert [set(said["restored"]) for said in results[VICTIM:]] == [{"peer host0", "other ranks"}] * 2


def test_a_shard_of_which_no_copy_can_be_read_is_the_same_error_on_all_ranks(world: World) -> None:
    lose_a_host(world)
    errors = world.outcome(train, 0, lose_all_copies)
    assert {type(error) for error in errors} == {RecoveryError}
    assert len({str(error) for error in errors}) == 1
    assert "rank 2: no copy of rank 2's shard" in str(errors[0])
    assert "its host is gone" in str(errors[0])


def test_a_rank_that_dies_in_the_middle_costs_one_attempt(world: World) -> None:
    expected = lose_a_host(world)
    errors = world.outcome(train, 0, die_in_the_middle)
    assert isinstance(errors[VICTIM], Failed)
    assert all(isinstance(error, PeerError) for rank, error in enumerate(errors) if rank != VICTIM)
    assert "while the ranks gave each other the state" in str(errors[0])
    assert [said["begin"] for said in world.outcome(train, 0)] == [expected] * 4


def test_parts_of_a_shard_come_from_several_peers_at_once(tmp_path: Path) -> None:
    with World(tmp_path, hosts=["host0", "host1", "host2"], GEMINI_REPLICAS="3", GEMINI_ENCRYPT="true") as world:
        expected = world.outcome(train, 3)[0]["end"]
        for trouble, sources in ((cut_shards_in_parts, {"peer host0", "peer host1"}), (lose_a_peer_in_the_middle, {"peer host0"})):
            end_agent(world.run, "host2")
            results = world.outcome(train, 0, trouble)
            assert [(said["start"], said["begin"]) for said in results] == [(3, expected)] * 3
            assert [set(said["restored"]) for said in results] == [{"own memory"}, {"own memory"}, sources]
