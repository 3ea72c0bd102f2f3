"""Two or three real agents, real sockets, real memory: commits, replicas, and what happens when something breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import CHUNK, EXTRAS, Job, Proxy, Rank, content, end_agent, eventually, stopped, versions

from gemini_ft.recovery import LocalShard, PeerShard


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def shard_of(shard: LocalShard | PeerShard) -> tuple[bytes, bytes]:
    """Data and extras."""
    try:
        return b"".join(bytes(view) for _, view in shard.chunks()), shard.extras()
    finally:
        shard.close()


def held(rank: Rank, owner: int, iteration: int, job: Job) -> tuple[bytes, bytes]:
    """A shard as this host's agent holds it."""
    return shard_of(LocalShard(rank.client, owner, job.version(iteration)))


def expected(owner: int, iteration: int, nbytes: int = 4 * CHUNK) -> tuple[bytes, bytes]:
    return content(owner, iteration, nbytes), EXTRAS


class TestCommit:
    def test_every_step_is_committed_and_held_by_both_hosts(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, *range(1, 8))
        for rank in ranks:
            for owner in (0, 1):
                assert held(rank, owner, 7, job) == expected(owner, 7)
        assert job.stream("a")["shards"] == {"0": ["complete:7", "complete:6"], "1": ["complete:7", "complete:6"]}

    def test_a_step_that_one_rank_gives_up_is_aborted_on_all_and_the_next_is_committed(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        ranks[0].snapshot(2)
        ranks[1].give_up(2)
        ranks[0].wait_for("aborted", iteration=2)
        job.commit(ranks, 3)
        assert held(ranks[1], 0, 3, job) == expected(0, 3)


class TestHangingPeer:
    def test_commits_go_on_without_a_holder_that_is_silent_and_it_counts_again_when_it_is_back(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].client.welcome.info.address) as to_b:
            addresses = {"a": ranks[0].client.welcome.info.address, "b": to_b.address}
            job.open(ranks, addresses=addresses, replica_timeout=0.5)
            job.commit(ranks, 1, 2)
            to_b.withhold()
            job.commit(ranks, *range(3, 20))
            assert "host b (shard of rank 0)" in ranks[1].wait_for("notice").text
            assert job.stream("a")["excluded"] == [[0, "b"]]
            to_b.let_pass()
            iterations = iter(range(20, 100_000))
            eventually(lambda: job.commit(ranks, next(iterations)) or job.stream("a")["excluded"] == [], "the return of host b")
            last = next(iterations)
            job.commit(ranks, last)
            assert held(ranks[1], 0, last, job) == expected(0, last)

    def test_without_a_rank_whose_own_agent_hangs_nothing_is_committed_until_it_is_back(self, job: Job) -> None:
        ranks = job.start(replica_timeout=0.5)
        job.commit(ranks, 1)
        with stopped(job.pid("b")):
            for rank in ranks:
                rank.request(2)
            ranks[0].copy(2, ranks[0].granted(2))
            assert not ranks[0].heard("committed", iteration=2)
        ranks[1].copy(2, ranks[1].granted(2))
        for rank in ranks:
            rank.wait_for("committed", iteration=2)
        job.commit(ranks, 3)


class TestDeadAgent:
    """Workers hold the memory too: an agent that was restarted gets everything back."""

    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_its_successor_takes_the_memory_over_and_commits_go_on(self, job: Job, victim: int) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2, 3)
        end_agent(job.run, ranks[victim].host)
        ranks[victim].reconnect(job.version(3))
        shards = job.stream(ranks[victim].host)["shards"]
        assert {owner: set(slots) for owner, slots in shards.items()} == {o: {"complete:2", "complete:3"} for o in "01"}
        job.commit(ranks, 4, 5, 6)
        for owner in (0, 1):
            assert held(ranks[victim], owner, 6, job) == expected(owner, 6)

    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_a_commit_that_the_worker_had_not_heard_of_is_caught_up_with(self, job: Job, victim: int) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2, 3)
        end_agent(job.run, ranks[victim].host)
        ranks[victim].reconnect(job.version(2))
        job.commit(ranks, 4, 5, 6)

    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_a_snapshot_that_was_complete_but_not_committed_does_not_block_the_next(self, job: Job, victim: int) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        ranks[victim].snapshot(2)
        eventually(lambda: "complete:2" in job.stream(ranks[1 - victim].host)["shards"][str(victim)], "the copy")
        end_agent(job.run, ranks[victim].host)
        ranks[victim].reconnect(job.version(1))
        ranks[1 - victim].snapshot(2)
        for rank in ranks:
            rank.wait_for("committed", iteration=2)
        job.commit(ranks, 3, 4)

    def test_alone_in_the_world_it_commits_what_was_complete(self, job: Job) -> None:
        (rank,) = job.start("a")
        job.commit([rank], 1, 2)
        end_agent(job.run, "a")
        rank.reconnect(job.version(1))
        job.commit([rank], 3, 4)

    def test_a_snapshot_under_way_is_given_up_and_the_next_is_committed(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        for rank in ranks:
            rank.request(2)
        ranks[0].copy(2, ranks[0].granted(2))
        ranks[1].copy(2, ranks[1].granted(2), slice(0, 2))
        end_agent(job.run, "b")
        ranks[1].reconnect(job.version(1))
        ranks[1].give_up(2)
        ranks[0].wait_for("aborted", iteration=2)
        job.commit(ranks, 3, 4)


class TestNewIncarnation:
    def test_what_was_in_the_inventory_stays_until_it_has_been_chosen_from(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        for rank in ranks:
            rank.request(3)
        slots = [rank.granted(3) for rank in ranks]
        newcomers = job.join(("a", "b"))
        promised = [versions(rank.inventory()) for rank in newcomers]
        assert all({(0, 2), (1, 2)} <= promise for promise in promised)
        for rank, slot in zip(ranks, slots, strict=True):
            rank.copy(3, slot)
            rank.request(4)
        assert [versions(rank.inventory()) for rank in newcomers] == promised
        resumed = job.version(2)
        job.open(newcomers, resumed=resumed, sources={0: ["a", "b"], 1: ["a", "b"]})
        job.commit(newcomers, 3, 4)
        assert not any(rank.heard("committed", iteration=3) for rank in ranks)

    def test_that_does_not_come_about_leaves_the_present_one_at_work(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        for newcomer in job.join(("a", "b")):
            newcomer.inventory()
            newcomer.close()
        job.commit(ranks, 2, 3)
