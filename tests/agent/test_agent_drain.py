"""A host's agent that drains it: what the leader must learn of it, and what the next session must not take for progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import Job, end_agent, eventually

from gemini_ft.agent import lifecycle
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
