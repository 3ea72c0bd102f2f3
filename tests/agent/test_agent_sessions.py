"""Two or three real agents, real sockets, real memory: commits, replicas, and what happens when something breaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from agent_kit import CHUNK, EXTRAS, Job, Proxy, Rank, content, end_agent, eventually, stopped, versions

from gemini_ft.core.layout import Read
from gemini_ft.errors import AgentError, CorruptDataError, PeerError, RecoveryError, SupersededError
from gemini_ft.recovery import readers, restore
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import LocalShard, PeerShard, ShardReaders
from gemini_ft.wire.worker_messages import Granted, Over, Request


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
        ranks[0].wait_for("abort", iteration=2)
        job.commit(ranks, 3)
        assert held(ranks[1], 0, 3, job) == expected(0, 3)

    def test_a_peer_lets_go_of_a_shard_that_is_given_up_on_its_way(self, job: Job) -> None:
        """It is told so; else the sender would close the connection two seconds later, and the next shards would wait for another."""
        ranks = job.start()
        job.commit(ranks, 1)
        ranks[0].request(2)
        ranks[0].copy(2, slice(2))
        eventually(lambda: "2" in str(job.stream("b")["shards"]["0"]), "its arrival")
        ranks[0].give_up(2)
        job.commit(ranks, 3)
        assert "broke off" not in job.log("a")

    def test_of_what_a_device_has_laid_down_the_agent_forms_the_checksums(self, job: Job) -> None:
        """One that is given up while they are formed, and whose slot is granted again, leaves nothing in the next."""
        ranks = job.start()
        for iteration in (1, 2, 3):
            for rank in ranks:
                rank.request(iteration)
            ranks[1].copy(iteration)
            if iteration == 2:
                ranks[0].land(iteration, upto=2 * CHUNK)
                ranks[0].give_up(iteration)
                ranks[1].wait_for("abort", iteration=iteration)
            else:
                ranks[0].land(iteration)
                for rank in ranks:
                    rank.wait_for("commit", iteration=iteration)
                    assert held(rank, 0, iteration, job) == expected(0, iteration)


class TestHangingPeer:
    def test_commits_go_on_without_a_holder_that_is_silent_and_it_counts_again_when_it_is_back(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].address) as to_b:
            addresses = {"a": ranks[0].address, "b": to_b.address}
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
            ranks[0].copy(2)
            eventually(lambda: "complete:2" in job.stream("a")["shards"]["0"], "the copy of the rank whose agent is well")
            patience = time.monotonic() + 2 * 0.5
            eventually(lambda: time.monotonic() > patience, "the end of replica_timeout, twice")
            assert job.stream("a")["committed"] == 1
        ranks[1].copy(2)
        for rank in ranks:
            rank.wait_for("commit", iteration=2)
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
            rank.wait_for("commit", iteration=2)
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
        ranks[0].copy(2)
        ranks[1].copy(2, slice(0, 2))
        end_agent(job.run, "b")
        ranks[1].reconnect(job.version(1))
        ranks[1].give_up(2)
        ranks[0].wait_for("abort", iteration=2)
        job.commit(ranks, 3, 4)


class TestNewIncarnation:
    def test_what_was_in_the_inventory_stays_until_it_has_been_chosen_from(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        for rank in ranks:
            rank.request(3)
            rank.granted(3)
        newcomers = job.join(("a", "b"))
        promised = [versions(rank.inventory()) for rank in newcomers]
        assert all({(0, 2), (1, 2)} <= promise for promise in promised)
        for rank in ranks:
            rank.copy(3)
            rank.request(4)
        assert [versions(rank.inventory()) for rank in newcomers] == promised
        resumed = job.version(2)
        job.open(newcomers, resumed=resumed, sources={0: ["a", "b"], 1: ["a", "b"]})
        job.commit(newcomers, 3, 4)
        assert not any(rank.heard("commit", iteration=3) for rank in ranks)

    def test_that_does_not_come_about_leaves_the_present_one_at_work(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        for newcomer in job.join(("a", "b")):
            newcomer.inventory()
            newcomer.close()
        job.commit(ranks, 2, 3)

    def test_that_was_chosen_before_a_worker_handed_its_copies_back_is_refused(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        committed, present = job.version(2), ranks[0].spec
        end_agent(job.run, "a")
        (newcomer,) = job.join(("a",), preferred_port=present.addresses["a"][1])
        assert newcomer.inventory() == []
        ranks[0].reconnect(committed)
        chosen = job.make_spec([newcomer])
        with pytest.raises(RecoveryError, match=r"host 'a' was handed copies back after rank 0 had asked .* start the job once more"):
            newcomer.open(chosen)
        newcomer.close()
        job.spec = present
        job.commit(ranks, 3)  # nothing is held for those who have failed
        (newcomer,) = job.join(("a",))
        assert {(0, 3), (1, 3)} <= versions(newcomer.inventory())


class TestZombie:
    """A worker of the incarnation before that is still alive."""

    def test_is_told_to_stop(self, job: Job) -> None:
        zombies = job.start()
        job.commit(zombies, 1)
        job.open(job.join(("a", "b")), resumed=job.version(1), sources={0: ["a", "b"], 1: ["a", "b"]})
        zombies[0].progress(2)
        failed = zombies[0].wait_for("failed")
        assert (failed.error, failed.fatal) == ("SupersededError", True)
        with pytest.raises(SupersededError, match=r"incarnation 1-nonce1 comes after 2-nonce2 began; this process belongs to the past"):
            zombies[1].open(zombies[1].spec)

    def test_writes_into_nothing_that_is_used_any_more(self, job: Job) -> None:
        zombies = job.start()
        job.commit(zombies, 1, 2)
        zombies[0].request(3)
        zombies[0].granted(3)
        ranks = job.join(("a", "b"))
        job.open(ranks, resumed=job.version(2), sources={0: ["a", "b"], 1: ["a", "b"]})
        assert not ranks[0].inodes() & zombies[0].inodes()
        job.commit(ranks, 3, 4)
        for zombie in zombies:
            zombie.scribble()
        job.commit(ranks, 5)
        for zombie in zombies:
            zombie.scribble()
        for rank in ranks:
            assert [held(rank, owner, 5, job) for owner in (0, 1)] == [expected(owner, 5) for owner in (0, 1)]
            assert rank.verify(job.version(5)) == [0, 1]

    def test_whose_rank_has_moved_away_does_not_write_into_its_replica(self, job: Job) -> None:
        zombies = job.start("a", "b")
        job.commit(zombies, 1)
        ranks = job.join(("b", "a"))
        job.open(ranks, resumed=job.version(1), sources={0: ["a", "b"], 1: ["a", "b"]})
        job.commit(ranks, 2, 3)
        for zombie in zombies:
            zombie.scribble()
        assert [rank.verify(job.version(3)) for rank in ranks] == [[0, 1], [0, 1]]

    def test_memory_of_a_dead_worker_is_used_again(self, job: Job) -> None:
        victim = job.process("a", 0)
        job.open([victim])
        job.commit([victim], 1, 2)
        inodes = victim.inodes()
        victim.kill()
        rank = job.rank("a", 0)
        eventually(lambda: list(job.status("a")["workers"].values()) == [os.getpid()], "the death of the worker")
        resumed = job.version(2)
        job.open([rank], resumed=resumed, sources={0: ["a"]})
        assert rank.inodes() == inodes
        assert shard_of(LocalShard(rank.client, 0, resumed)) == expected(0, 2)


class TestDeadWorker:
    def test_what_it_was_copying_is_aborted(self, job: Job) -> None:
        ranks = [job.rank("a", 0), job.process("b", 1)]
        job.open(ranks)
        job.commit(ranks, 1)
        for rank in ranks:
            rank.request(2)
        ranks[0].copy(2)
        ranks[1].copy(2, slice(0, 2))
        ranks[1].kill()
        ranks[0].wait_for("abort", iteration=2)

    def test_one_that_has_said_that_its_attempt_is_over_is_given_no_slot(self, job: Job) -> None:
        """Its process lives, and begins the next attempt: a thread of the last one must not write beside that."""
        (rank,) = job.start("a")
        job.commit([rank], 1)
        for _ in range(2):
            rank.client.tell(Over(failed=True))
        rank.client.tell(Request(iteration=2))
        (again,) = job.start("a", resumed=job.version(1))
        job.commit([again], 2)
        assert not [event for event in rank.events if isinstance(event, Granted) and event.iteration == 2]
        assert job.log("a").count("has ended its attempt") == 1

    def test_an_orphan_that_keeps_its_socket_open_does_not_hide_it(self, job: Job) -> None:
        victim = job.process("a", 0)
        orphan = victim.leave_orphan()
        try:
            victim.kill()
            eventually(lambda: not job.status("a")["workers"], "the death of the worker")
            assert os.path.exists(f"/proc/{orphan}/fd")
        finally:
            os.kill(orphan, signal.SIGKILL)

    def test_that_hung_was_killed_by_the_agent(self, job: Job) -> None:
        ranks = [job.process("a", 0), job.rank("b", 1)]
        job.open(ranks, hang_timeout=0.5)
        for iteration in range(1, 6):
            ranks[0].progress(iteration)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        eventually(lambda: not job.status("a")["workers"], "the end of the worker")
        assert "made no progress for" in job.log("a")
        assert list(job.status("b")["workers"]) == ["1"]  # it has not made a step yet, and may still be compiling

    @pytest.mark.parametrize("end", ["say_rubbish", "ask_and_hang_up"])
    def test_whose_connection_has_ended_is_nobodys_to_kill(self, job: Job, end: str) -> None:
        """It trains on without its agent; the agent had taken its silence for a hang."""
        lone, hanging = job.process("a", 0, start_timeout=3.0), job.process("a", 1, start_timeout=3.0)
        getattr(lone, end)()
        eventually(lambda: list(job.status("a")["workers"]) == ["0"], "the end of the worker that says nothing")
        assert not os.path.exists(f"/proc/{hanging.pid}/exe")
        assert os.path.exists(f"/proc/{lone.pid}/exe")


class TestWire:
    def test_a_chunk_that_arrives_damaged_is_sent_again(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].address) as to_b:
            job.open(ranks, addresses={"a": ranks[0].address, "b": to_b.address})
            to_b.damage = 3
            job.commit(ranks, 1, 2)
            assert to_b.damage == 0
            assert job.log("b").count("arrived damaged; asking again") == 3
            assert held(ranks[1], 0, 2, job) == expected(0, 2)

    def test_a_network_that_damages_everything_costs_the_replica_and_nothing_else(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].address) as to_b:
            job.open(ranks, addresses={"a": ranks[0].address, "b": to_b.address}, replica_timeout=0.5)
            to_b.damage = 1_000_000
            job.commit(ranks, 1, 2, 3)
            assert job.stream("a")["excluded"] == [[0, "b"]]
            assert versions(ranks[1].inventory()) == {(1, 3)} | {(1, 2)}

    def test_a_connection_that_breaks_in_the_middle_is_dialled_again(self, job: Job) -> None:
        ranks = job.join(("a", "b"))
        with Proxy(ranks[1].address) as to_b:
            job.open(ranks, addresses={"a": ranks[0].address, "b": to_b.address})
            job.commit(ranks, 1)
            for rank in ranks:
                rank.request(2)
            ranks[0].copy(2, slice(0, 2))
            to_b.cut()
            for rank in ranks:
                rank.copy(2)
            ranks[0].wait_for("commit", iteration=2)
            assert to_b.connections >= 2  # more where the cut has hit the second one too
            assert held(ranks[1], 0, 2, job) == expected(0, 2)


class TestFrozenParameters:
    FROZEN = 3 * CHUNK  # of four chunks

    def sent(self, job: Job, ranks: list[Rank], iteration: int) -> int:
        """Bytes that one commit takes from host a to b."""
        before = job.stream("a")["counters"]["replica_bytes"]
        job.commit(ranks, iteration)
        return int(job.stream("a")["counters"]["replica_bytes"] - before)

    def test_travel_once_into_each_slot(self, job: Job) -> None:
        ranks = job.start("a", "b")
        for rank in ranks:
            rank.frozen = self.FROZEN
        sizes = [self.sent(job, ranks, iteration) for iteration in range(1, 7)]
        assert sizes[0] == 4 * CHUNK + len(EXTRAS)
        assert sizes[-2:] == [CHUNK, CHUNK]  # not even the extras, which never change here
        assert held(ranks[1], 0, 6, job) == (content(0, 6, 4 * CHUNK, self.FROZEN), EXTRAS)

    def test_travel_again_after_a_change(self, job: Job) -> None:
        ranks = job.start("a", "b")
        for first, frozen in ((1, self.FROZEN), (5, 0), (9, 2 * CHUNK)):
            for rank in ranks:
                rank.frozen = frozen
            job.commit(ranks, *range(first, first + 4))
            assert held(ranks[1], 0, first + 3, job) == (content(0, first + 3, 4 * CHUNK, frozen), EXTRAS)

    def test_travel_again_to_an_agent_that_has_lost_them(self, job: Job) -> None:
        ranks = job.start("a", "b")
        ranks[0].frozen = self.FROZEN
        job.commit(ranks, 1, 2, 3)
        for rank in ranks:
            rank.request(4)
        ranks[0].copy(4, slice(0, 2))  # the slot these arrive in is worth nothing to the agent's successor
        end_agent(job.run, "b")
        ranks[1].reconnect(job.version(3))
        ranks[0].give_up(4)
        job.commit(ranks, 5, 6)
        assert held(ranks[1], 0, 6, job) == (content(0, 6, 4 * CHUNK, self.FROZEN), EXTRAS)


class TestRecovery:
    def test_a_shard_is_read_from_a_peer(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        shard = PeerShard("b", ranks[1].address, job.claims(), b"s" * 16, 0, job.version(2), timeout=10.0)
        assert shard.where == "peer b"
        assert shard_of(shard) == expected(0, 2)

    def test_what_a_peer_does_not_have_is_said(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        with pytest.raises(PeerError, match="host b has no complete copy of rank 0's shard of iteration 7 of incarnation 1"):
            PeerShard("b", ranks[1].address, job.claims(), b"s" * 16, 0, job.version(7), timeout=10.0)
        with pytest.raises(AgentError, match="host b has no copy of rank 0's shard of iteration 7 of incarnation 1 any more"):
            LocalShard(ranks[1].client, 0, job.version(7))

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_bit_that_flips_in_memory_is_found_and_the_copy_is_given_up(
        self, threads: int, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(readers, "threads_of_a_reader", lambda: threads)
        ranks = job.start()
        job.commit(ranks, 1, 2)
        ranks[0].corrupt(1)
        with pytest.raises(CorruptDataError, match="chunk 0 of rank 1's shard in this host's memory does not match its checksum"):
            held(ranks[0], 1, 2, job)
        assert ranks[0].verify(job.version(2)) == [0]
        assert ranks[1].verify(job.version(2)) == [0, 1]
        assert versions(ranks[0].inventory()) >= {(0, 1), (0, 2), (1, 1)}
        assert (1, 2) not in versions(ranks[0].inventory())

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("damaged", ["peer b", "own memory"])
    def test_what_comes_damaged_into_live_tensors_is_overwritten_by_the_next_peer(
        self, damaged: str, threads: int, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bytes are received where they belong: of the damaged copy some are there before that is known."""

        def refuse(*_: object) -> None:
            raise AssertionError("bytes were copied")

        monkeypatch.setattr(readers, "threads_of_a_reader", lambda: threads)
        monkeypatch.setattr(restore, "copy_into", refuse)
        ranks = job.start()
        job.commit(ranks, 1)
        one, other = ranks if damaged == "own memory" else reversed(ranks)
        one.corrupt(0)
        plan = RecoveryPlan(kind="memory", version=job.version(1), sources={0: (one.host, other.host)})
        addresses = {rank.host: rank.address for rank in ranks}
        host = one.host if damaged == "own memory" else "another"
        sources = ShardReaders(ranks[0].client, host, plan, addresses, job.claims(), b"s" * 16, 10.0)
        cut, end = CHUNK + 192, 4 * CHUNK
        tensors = {"head": torch.zeros(cut, dtype=torch.uint8), "tail": torch.zeros(end - cut, dtype=torch.uint8)}
        reads = [
            Read(owner=0, offset=0, nbytes=cut, name="head", start=0, stop=cut),
            Read(owner=0, offset=cut, nbytes=end - cut, name="tail", start=0, stop=end - cut),
        ]
        seen: list[bytes] = []

        def use(shard: LocalShard | PeerShard) -> tuple[str, int]:
            seen.append(bytes(tensors["head"]))
            return restore.scatter(shard, reads, tensors)

        assert sources.read(0, 0, use) == (f"peer {other.host}", end)
        data, _ = expected(0, 1)
        assert seen[0] == bytes(cut)
        assert seen[1][:CHUNK] not in (bytes(CHUNK), data[:CHUNK])
        assert bytes(tensors["head"]) + bytes(tensors["tail"]) == data

    def test_a_host_that_has_lost_everything_gets_its_replicas_back(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1, 2)
        end_agent(job.run, "b")
        newcomers = job.join(("a", "b"))
        resumed = job.version(2)
        spec = job.make_spec(newcomers, resumed=resumed, sources={0: ["a"], 1: ["a"]})
        for rank in newcomers:
            rank.open(spec)
        newcomers[1].progress(4)  # rebuilding begins with the second step
        whole = ["complete:2", "empty:-"]
        eventually(lambda: job.stream("b")["shards"] == {"0": whole, "1": whole}, "the return of the replicas")
        assert newcomers[1].verify(resumed) == [0, 1]

    def test_a_reader_of_the_former_incarnation_pins_nothing(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        reader = PeerShard("a", ranks[0].address, job.claims(), b"s" * 16, 0, job.version(1), timeout=10.0)
        job.commit(ranks, 2)
        ranks = job.join(("a", "b"))
        job.open(ranks, resumed=job.version(2), sources={0: ["a", "b"], 1: ["a", "b"]})
        job.commit(ranks, *range(3, 8))
        with pytest.raises(PeerError):
            list(reader.chunks())
        reader.close()
