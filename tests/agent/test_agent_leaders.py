"""Leaders' agents as processes: killed, stopped and gone on with, during an upload, a drain and the end of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Job, Rank, agent_pid, eventually, stopped

from gemini_ft.agent import lifecycle
from gemini_ft.core.stragglers import WorkTime
from gemini_ft.errors import RecoveryError
from gemini_ft.events import read_events
from gemini_ft.recovery.agent_memory import open_newest, remembered
from gemini_ft.storage.checkpoints import checkpoint_folder, list_checkpoints, read_manifest, shard_key
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.retention import read_back
from gemini_ft.wire.worker_messages import AskDrain, Draining, GetInventory, Inventory, Worked


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "events"))
    with Job(tmp_path) as job:
        yield job


def start(job: Job, hosts: str = "abc", **fields: Any) -> list[Rank]:
    """Every shard on two hosts, agents that nobody takes for hung, and a first commit; "a" leads."""
    holders = {owner: [host, hosts[owner - 1]] for owner, host in enumerate(hosts)}
    ranks = job.start(*hosts, hello={"agent_timeout": 0.0}, holders=holders, **fields)
    job.commit(ranks, 1)
    return ranks


def leads(job: Job, host: str, *others: str) -> None:
    """Waits until a host leads, and others report to it."""

    def is_so() -> bool:
        return all((job.stream(other)["leader"], job.stream(other)["reaches_leader"]) == (host, True) for other in (host, *others))

    eventually(is_so, f"the time at which {host} leads")


def answers(asked: Rank, hearing: Rank, iteration: int) -> None:
    """One rank's word reaches the leader, and the leader's another host: which takes no copies of the host whose agent is gone."""
    asked.request(iteration)
    asked.give_up(iteration)
    hearing.wait_for("abort", iteration=iteration)


def test_the_next_host_leads_when_the_leaders_agent_is_killed_and_the_next_one_after_it(job: Job, tmp_path: Path) -> None:
    first, second, third = ranks = start(job)
    os.kill(job.pid("a"), signal.SIGKILL)
    leads(job, "b", "c")
    answers(second, third, 2)
    first.reconnect(job.version(1))
    leads(job, "b", "a", "c")
    job.commit(ranks, 3)
    os.kill(job.pid("b"), signal.SIGKILL)
    leads(job, "c", "a")
    second.reconnect(job.version(3))
    job.commit(ranks, 4)
    assert {job.stream(host)["epoch"] for host in "abc"} == {2}
    [memory] = remembered(job.run)
    assert set(memory.roots_of_leader(job.version(4))) == {0, 1, 2}  # the one that leads now has all of them
    said = [(event["leader"], event["epoch"], event["host"]) for event in read_events(tmp_path / "events") if event["event"] == "leader"]
    assert said == [("b", 1, "b"), ("c", 2, "c")]


def test_what_is_whole_in_memory_is_not_read_from_outside_before_any_agent_knows_that_it_was_committed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_FAULTS_DIR", str(tmp_path / "faults"))
    monkeypatch.setenv("GEMINI_FAULTS", "step=1:moment=agent_decides:sigkill")
    holders = {owner: ["abc"[owner], "abc"[owner - 1]] for owner in range(3)}
    ranks = job.start(*"abc", hello={"agent_timeout": 0.0}, holders=holders, leader_timeout=0.0)  # so that nobody leads after it
    leader = job.pid("a")
    for rank in ranks:
        rank.snapshot(1)
    eventually(lambda: not Path(f"/proc/{leader}").exists() or agent_pid(job.run, "a") is None, "the death of the agent that leads")
    [memory] = remembered(job.run)
    assert (memory.committed, memory.missing(job.version(1))) == (None, [])
    with pytest.raises(RecoveryError, match="hold no committed step yet"):
        open_newest(memory, None)


def compare(ranks: list[Rank], iteration: int, *digests: str) -> None:
    """Ranks take a snapshot with digests of what they must hold alike."""
    for rank in ranks:
        rank.request(iteration)
    for rank, digest in zip(ranks, digests, strict=True):
        rank.copy(iteration, digest=digest)


def test_what_ranks_agreed_on_under_the_leader_before_is_not_given_up_when_they_differ_under_the_next_one(job: Job) -> None:
    first, *_ = ranks = start(job)
    for iteration in (2, 3):
        compare(ranks, iteration, "same", "same", "same")
        for rank in ranks:
            rank.wait_for("commit", iteration=iteration)
    os.kill(job.pid("a"), signal.SIGKILL)
    leads(job, "b", "c")
    first.reconnect(job.version(3))
    leads(job, "b", "a", "c")
    compare(ranks, 4, "same", "same", "other")
    for rank in ranks:
        rank.wait_for("failed", error="ReplicaDivergedError")
    for inventory in [rank.client.call(GetInventory(), Inventory)[0] for rank in ranks]:
        assert inventory.given_up == []
        assert job.version(3) in {slot.version for slot in inventory.slots}


def work(ranks: list[Rank], window: int, slow: int | None) -> None:
    """Ranks say for how long they worked alone in the steps of a window."""
    for rank in ranks:
        rank.client.tell(Worked(window=window, times=WorkTime(step=1.0, alone=0.9 if rank.rank == slow else 0.1)))


def test_the_next_leader_and_another_agent_know_the_stragglers_and_all_hear_when_they_are_over(job: Job, tmp_path: Path) -> None:
    first, *_ = ranks = start(job, straggler_factor=1.5)
    for window in (8, 16, 24):
        work(ranks, window, 1)
    for host in "abc":
        eventually(lambda host=host: job.stream(host)["stragglers"] == [1])  # type: ignore[misc]
    os.kill(job.pid("a"), signal.SIGKILL)
    leads(job, "b", "c")
    first.reconnect(job.version(1))
    leads(job, "b", "a", "c")
    eventually(lambda: job.stream("a")["stragglers"] == [1])
    for window in (32, 40, 48):
        work(ranks, window, None)
    for host in "abc":
        eventually(lambda host=host: job.stream(host)["stragglers"] == [])  # type: ignore[misc]
    told = [(event["host"], event["ranks"]) for event in read_events(tmp_path / "events") if event["event"] == "straggler"]
    assert sorted(told) == [("a", []), ("a", [1]), ("a", [1]), ("b", []), ("b", [1]), ("c", []), ("c", [1])]


def test_nobody_is_slow_any_more_when_the_workers_have_left(job: Job) -> None:
    """Agents outlive them, and an alert must not."""
    ranks = start(job, straggler_factor=1.5)
    for window in (8, 16, 24):
        work(ranks, window, 1)
    eventually(lambda: job.stream("a")["stragglers"] == [1])
    ranks[0].goodbye()
    eventually(lambda: job.stream("a")["stragglers"] == [])
    assert job.stream("b")["stragglers"] == [1], "its worker is at work"


def test_a_leader_that_is_stopped_and_goes_on_obeys_the_one_that_has_replaced_it(job: Job) -> None:
    """What it had heard of an iteration before it was stopped is heard by the other one as well."""
    first, second, third = ranks = start(job)
    for rank in (second, third):
        rank.snapshot(2)
    with stopped(job.pid("a")):
        leads(job, "b", "c")
        answers(second, third, 3)
        first.request(2)
    first.copy(2)
    for rank in ranks:
        rank.wait_for("commit", iteration=2)
    leads(job, "b", "a", "c")
    job.commit(ranks, 4)


@pytest.mark.soak
def test_an_upload_during_which_the_leader_is_lost_is_made_again(job: Job, tmp_path: Path) -> None:
    url = (tmp_path / "storage").as_uri()
    first, *_ = ranks = start(job, storage={"url": url, "every_steps": 2, "keep_last": 1, "max_bandwidth": 100_000.0})
    for rank in ranks:
        rank.wait_for("commit", digest_at=2)
        rank.snapshot(2, digest="of all")
    ranks[1].wait_for("commit", iteration=2)
    eventually(lambda: job.stream("b")["storage"]["uploading"], "an upload")
    os.kill(job.pid("a"), signal.SIGKILL)
    leads(job, "b", "c")
    first.reconnect(job.version(2))
    leads(job, "b", "a", "c")
    for rank in ranks:
        rank.snapshot(3, digest="of all")
    storage = LocalStorage(tmp_path / "storage")
    [info] = eventually(lambda: list_checkpoints(storage), "a manifest")
    assert info.iteration == 3
    read_back(storage, read_manifest(storage, info.folder))
    left = [shard_key(checkpoint_folder(job.run, "main", job.version(2)), owner) for owner in (1, 2)]
    eventually(lambda: not {*left} & {*storage.list(f"{job.run}/")}, "the end of what was uploaded in vain")


@pytest.mark.soak
def test_a_drain_and_the_end_of_the_job_under_the_second_leader(job: Job, tmp_path: Path) -> None:
    """A rank that has finished under the first leader counts under the second, and the last step is stored."""
    ranks = start(job, "abcd", storage={"url": (tmp_path / "storage").as_uri(), "every_steps": 2})
    with stopped(job.pid("a")):
        leads(job, "b", "c", "d")
        assert isinstance(lifecycle.ask(job.run, "b", AskDrain(host="d")), Draining)
        ranks[3].wait_for("stop_after_step")
    leads(job, "b", "a", "c", "d")
    for rank in ranks:
        rank.wait_for("commit", digest_at=2)
        rank.snapshot(2, digest="of all")
    eventually(lambda: [info.iteration for info in list_checkpoints(LocalStorage(tmp_path / "storage"))] == [2], "the manifest")
    for rank in ranks[1:]:
        rank.goodbye()
    with stopped(job.pid("b")):
        leads(job, "c", "a", "d")
    leads(job, "c", "b")
    ranks[0].goodbye()
    eventually(lambda: all(job.stream(host)["finished"] for host in "abcd"), "the word that all have finished")


@pytest.mark.soak
def test_leaders_are_stopped_and_killed_above_the_fan_in(job: Job) -> None:
    """Two collectors, "b" and "e"; the leader is "a", then "c", which reports to "b" before."""
    ranks = start(job, "abcdefg", fan_in=2)
    with stopped(job.pid("a")):
        leads(job, "c", *"bdefg")
        answers(ranks[5], ranks[3], 2)
    leads(job, "c", *"abdefg")
    job.commit(ranks, 3)
    os.kill(job.pid("c"), signal.SIGKILL)
    leads(job, "d", *"abefg")
    ranks[2].reconnect(job.version(3))
    leads(job, "d", *"abcefg")
    job.commit(ranks, 4, 5)
