"""Agents that are paused at every message of a snapshot and of a recovery, for less and for longer than `agent_timeout`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import CHUNK, EXTRAS, Job, Rank, content, eventually

from gemini_ft.errors import AgentError
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import LocalShard, ShardReaders

PATIENCE = {"agent_timeout": 1.0}
SHORT = 0.4  # seconds
_SOAK = pytest.mark.soak


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def shard_of(shard: LocalShard) -> tuple[bytes, bytes]:
    """Data and extras."""
    with contextlib.closing(shard):
        return b"".join(bytes(view) for _, view in shard.chunks()), shard.extras()


def pause(job: Job, host: str, for_good: bool) -> None:
    """Stop a host's agent, and wake it up soon or never."""
    pid = job.pid(host)
    os.kill(pid, signal.SIGSTOP)
    if not for_good:
        threading.Timer(SHORT, os.kill, (pid, signal.SIGCONT)).start()


def has_same_bytes(job: Job, ranks: list[Rank], iteration: int) -> None:
    """Every host holds every shard of an iteration, to the last bit."""
    for rank in ranks:
        for owner in range(len(ranks)):
            expected = content(owner, iteration, 4 * CHUNK), EXTRAS
            assert shard_of(LocalShard(rank.client, owner, job.version(iteration))) == expected


def mend(job: Job, rank: Rank, iteration: int) -> None:
    """What a worker does whose agent was replaced: reconnect, and give up what was under way."""
    eventually(lambda: rank.client.lost, "the end of the agent that hung")
    rank.reconnect(job.version(iteration - 1))
    rank.give_up(iteration)


def shards(job: Job, host: str, owner: int) -> list[str]:
    """State and version of a shard's slots on a host."""
    found: list[str] = job.status(host)["streams"]["main"]["shards"][str(owner)]
    return found


LENGTHS = pytest.mark.parametrize("for_good", [False, pytest.param(True, marks=_SOAK)], ids=["short", "for good"])
VICTIMS = pytest.mark.parametrize("victim", [0, pytest.param(1, marks=_SOAK)], ids=["leader", "member"])


@LENGTHS
@VICTIMS
@pytest.mark.parametrize("moment", [pytest.param("request", marks=_SOAK), "chunks", pytest.param("copied", marks=_SOAK)])
def test_a_pause_in_a_snapshot_costs_at_most_that_snapshot(job: Job, moment: str, victim: int, for_good: bool) -> None:
    ranks = job.start(hello=PATIENCE)  # no holder is left out meanwhile: all copies can be compared at the end
    job.commit(ranks, 1, 2)
    for rank in ranks:
        rank.request(3)
    if moment == "request":
        pause(job, ranks[victim].host, for_good)
    begin = time.monotonic()
    hung = [ranks[victim]] if for_good else []
    for rank in [rank for rank in ranks if moment != "request" or rank not in hung]:
        rank.granted(3)
    if moment == "chunks":
        for rank in ranks:
            rank.copy(3, slice(0, 2))
        pause(job, ranks[victim].host, for_good)
    for rank in [rank for rank in ranks if rank not in hung or moment == "copied"]:
        rank.copy(3)
    if moment == "copied":
        pause(job, ranks[victim].host, for_good)
    for rank in hung:
        mend(job, rank, 3)
    if not for_good:
        for rank in ranks:
            rank.wait_for("commit", iteration=3)
    job.commit(ranks, 4, 5)
    print(f"{moment}, {'leader' if victim == 0 else 'member'}, {'for good' if for_good else 'short'}: {time.monotonic() - begin:.2f} s")
    has_same_bytes(job, ranks, 5)


@LENGTHS
@VICTIMS
@pytest.mark.parametrize("moment", [pytest.param(m, marks=_SOAK) for m in ("hello", "inventory", "open", "reserve")] + ["verify"])
def test_a_pause_in_a_recovery_loses_nothing(job: Job, moment: str, victim: int, for_good: bool) -> None:
    ranks = job.start(hello=PATIENCE, replica_timeout=1.0)
    job.commit(ranks, 1, 2)
    resumed = job.version(2)
    for rank in ranks:
        rank.close()

    def recover(stall: str) -> list[Rank]:
        if stall == "hello":
            pause(job, "ab"[victim], for_good)
        again = job.join(["a", "b"], **PATIENCE)
        sources = {0: ["a", "b"], 1: ["b", "a"]}
        spec = job.make_spec(again, resumed=resumed, sources=sources, replica_timeout=1.0)
        for step in ("inventory", "verify", "open", "reserve"):
            if step == stall:
                pause(job, "ab"[victim], for_good)
            for rank in again:
                match step:
                    case "inventory":
                        held = {(slot.owner, slot.version) for slot in rank.inventory()}
                        assert {(0, resumed), (1, resumed)} <= held
                    case "verify":
                        assert rank.verify(resumed) == [0, 1]
                    case "open":
                        rank.open(spec)
                    case "reserve":
                        rank.reserve()
        return again

    try:
        ranks = recover(moment)
    except AgentError:  # its agent was replaced in the middle: the attempt fails, and the job starts once more
        assert for_good
        ranks = recover("")
    for rank in ranks:
        for owner in (0, 1):
            assert shard_of(LocalShard(rank.client, owner, resumed)) == (content(owner, 2, 4 * CHUNK), EXTRAS)
    job.commit(ranks, 3, 4)
    has_same_bytes(job, ranks, 4)


def test_what_a_hung_agent_was_told_is_not_waited_for(job: Job) -> None:
    """A snapshot that is given up meanwhile: nobody else can take another until the leader hears of it."""
    ranks = job.start(hello=PATIENCE)
    job.commit(ranks, 1)
    for rank in ranks:
        rank.request(2)
    ranks[0].copy(2)
    ranks[1].granted(2)
    pause(job, "b", for_good=True)
    ranks[1].give_up(2)
    eventually(lambda: ranks[1].client.lost, "the end of the agent that hung")
    ranks[1].reconnect(job.version(1))
    job.commit(ranks, 3)
    has_same_bytes(job, ranks, 3)


@pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
def test_what_was_copied_and_had_not_travelled_travels_after_the_agent_was_replaced(job: Job, victim: int) -> None:
    """The ledger need not wait until it leaves the other holder out: it would, for an hour."""
    ranks = job.start(hello=PATIENCE, replica_timeout=3600.0)
    job.commit(ranks, 1)
    for rank in ranks:
        rank.request(2)
    last, other = ranks[victim], ranks[1 - victim]
    other.copy(2)
    last.granted(2)
    for rank in ranks:
        eventually(lambda rank=rank: "complete:2" in shards(job, rank.host, other.rank), "the copies of the other's shard")
    pause(job, other.host, for_good=True)  # nothing more arrives there
    last.copy(2)
    eventually(lambda: "complete:2" in shards(job, last.host, last.rank), "its own copy")
    pause(job, last.host, for_good=True)
    for rank in ranks:
        eventually(lambda rank=rank: rank.client.lost, "the end of the agent that hung")
        rank.reconnect(job.version(1))
    for rank in ranks:
        rank.wait_for("commit", iteration=2)
    has_same_bytes(job, ranks, 2)


@pytest.mark.parametrize("for_good", [pytest.param(False, marks=_SOAK), True], ids=["short", "for good"])
def test_a_pause_of_a_peer_that_is_read_leads_to_the_next_copy(job: Job, for_good: bool) -> None:
    ranks = job.start(hello=PATIENCE)
    job.commit(ranks, 1, 2)
    plan = RecoveryPlan(kind="memory", version=job.version(2), sources={0: ("b", "a")})
    addresses = {rank.host: rank.address for rank in ranks}
    sources = ShardReaders(ranks[0].client, "another", plan, addresses, job.claims(), b"s" * 16, 2 * SHORT)
    pause(job, "b", for_good)
    found = sources.read(0, 0, lambda shard: (shard.where, b"".join(bytes(view) for _, view in shard.chunks())))
    assert found == ("peer a" if for_good else "peer b", content(0, 2, 4 * CHUNK))
    if for_good:
        eventually(lambda: ranks[1].client.lost, "the end of the agent that hung")
