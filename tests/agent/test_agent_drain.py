"""A host's agent that drains it: what the leader must learn of it, and what the next session must not take for progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import Job, end_agent, eventually

from gemini_ft.agent import lifecycle
from gemini_ft.launch.launched import this_launch
from gemini_ft.wire.worker_messages import AskDrain, Draining, Failed


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def rarely_stored(folder: Path) -> dict[str, object]:
    return {"url": (folder / "storage").as_uri(), "every_steps": 1000}


def drain(job: Job, host: str) -> None:
    answer = lifecycle.ask(job.run, host, AskDrain())
    assert isinstance(answer, Draining)
    assert answer.workers == 1


def test_a_leader_that_is_away_learns_when_it_is_back_that_the_next_version_goes_to_storage(job: Job, tmp_path: Path) -> None:
    ranks = job.start(storage=rarely_stored(tmp_path))
    job.commit(ranks, 1)
    end_agent(job.run, "a")
    eventually(lambda: isinstance(lifecycle.ask(job.run, "b", AskDrain(host="a")), Failed), "the end of the connection")
    ranks[1].forget()
    drain(job, "b")
    ranks[0].reconnect(job.version(1))
    ranks[1].wait_for("commit", digest_at=2)  # in place of 1000


def test_a_drain_before_the_first_commit_is_no_progress(job: Job, tmp_path: Path) -> None:
    storage = rarely_stored(tmp_path)
    (rank,) = job.start("a", storage=storage)
    job.commit([rank], 1)
    again = {"resumed": job.version(1), "sources": {0: ["a"]}, "storage": storage}
    (rank,) = job.join(["a"])
    job.open([rank], **again)
    drain(job, "a")
    rank.wait_for("commit", digest_at=2)
    (rank,) = job.join(["a"])
    job.open([rank], **again)
    (rank,) = job.join(["a"])
    assert rank.client.welcome.attempts == 2


def test_workers_that_a_launcher_starts_while_its_host_is_drained_are_told_as_well(job: Job, tmp_path: Path) -> None:
    """Torch restarts all workers when a host comes or goes; a launcher that comes to this host later is another matter."""
    storage, launch = rarely_stored(tmp_path), this_launch("launch")
    (rank,) = job.start("a", hello={"launch": launch}, storage=storage)
    job.commit([rank], 1)
    drain(job, "a")
    rank.wait_for("stop_after_step")
    again = {"resumed": job.version(1), "sources": {0: ["a"]}, "storage": storage}
    (rank,) = job.join(["a"], launch=launch)
    job.open([rank], **again)
    rank.wait_for("stop_after_step")
    rank.wait_for("commit", digest_at=2)
    (rank,) = job.join(["a"], launch=launch.model_copy(update={"ticks": launch.ticks + 1}))
    job.open([rank], **again)
    job.commit([rank], 2)
    assert not rank.heard("stop_after_step")  # whoever has to leave is told before this


def test_an_upload_that_dies_as_others_restart_is_made_up_for_soon(job: Job, tmp_path: Path) -> None:
    """A drained host has left after a version that was on its way to storage; nobody else would store it before the next is due."""
    storage = rarely_stored(tmp_path)
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / ".partial").write_text("a file where a folder is due: an upload fails, and is tried again")
    (rank,) = job.start("a", storage=storage)
    job.commit([rank], 1)
    drain(job, "a")
    rank.request(2)
    rank.copy(2, digest="the same everywhere")
    rank.wait_for("commit", freeze=True)
    again = {"resumed": job.version(2), "sources": {0: ["a"]}, "storage": storage}
    (rank,) = job.join(["a"])
    job.open([rank], **again)
    job.commit([rank], 3)
    rank.wait_for("commit", digest_at=4)  # in place of 1000
