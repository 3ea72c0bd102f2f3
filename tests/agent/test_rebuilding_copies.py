"""Copies that are lost come back when the restart is over, and take only part of the network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit import Job, Proxy, Rank, end_agent, eventually

from gemini_ft.agent.replication.rebuild import Throttle
from gemini_ft.wire.messages import Message
from gemini_ft.wire.peer_messages import Describe, Fetch


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def lose_a_host(job: Job) -> list[Rank]:
    """Two hosts with all copies of iteration 1, of which the second has lost its own, and their next workers."""
    job.commit(job.start(), 1)
    end_agent(job.run, "b")
    return job.join(("a", "b"))


def open_both(job: Job, newcomers: list[Rank], address: tuple[str, int], replica_timeout: float) -> None:
    """The next session, in which the first host is reached at ``address``."""
    addresses, sources = {"a": address, "b": newcomers[1].address}, {0: ["a"], 1: ["a"]}
    spec = job.make_spec(newcomers, resumed=job.version(1), sources=sources, addresses=addresses, replica_timeout=replica_timeout)
    for newcomer in newcomers:
        newcomer.open(spec)


def is_rebuilt(job: Job) -> bool:
    return "complete:1" in job.stream("b")["shards"].get("0", [])


def test_nothing_is_asked_of_peers_before_the_second_step(job: Job) -> None:
    newcomers = lose_a_host(job)
    reached, asked = [0], list[int]()
    with Proxy(newcomers[0].address) as to_a:

        def note(message: Message) -> Message:
            if isinstance(message, Describe):
                asked.append(reached[0])
            return message

        to_a.rewrite = note
        open_both(job, newcomers, to_a.address, replica_timeout=1000.0)
        for reached[0] in (1, 2, 3):
            newcomers[1].progress(reached[0])
            assert not is_rebuilt(job) or reached[0] == 3
        eventually(lambda: is_rebuilt(job), "the copy")
    assert set(asked) == {3}


def test_workers_that_make_no_step_are_not_waited_for_for_ever(job: Job) -> None:
    newcomers = lose_a_host(job)
    open_both(job, newcomers, newcomers[0].address, replica_timeout=0.1)
    eventually(lambda: is_rebuilt(job), "the copy")


@pytest.mark.soak
def test_a_host_that_rests_between_two_chunks_keeps_its_source(job: Job) -> None:
    """Its rest may be longer than the lease of a reader that gives no sign of life."""
    newcomers = lose_a_host(job)
    fetches: list[Fetch] = []
    with Proxy(newcomers[0].address) as to_a:

        def slow(message: Message) -> Message:
            if isinstance(message, Fetch):
                fetches.append(message)
                if len(fetches) == 1:
                    time.sleep(2.5)  # a slow link: three times as long is the rest, and five seconds the lease
            return message

        to_a.rewrite = slow
        open_both(job, newcomers, to_a.address, replica_timeout=0.1)
        eventually(lambda: is_rebuilt(job), "the copy")
    assert len({fetch.offset for fetch in fetches}) == len(fetches)  # none was asked for again
    assert "no sign of life" not in job.log("a")


def test_a_throttle_leaves_the_rest_of_the_time_to_others() -> None:
    now, rested = [0.0], [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        rested[0] += seconds

    async def work() -> None:
        throttle = Throttle(0.25, lambda: now[0], sleep)
        for seconds in (1.0, 0.0, 3.0):
            async with throttle.piece():
                now[0] += seconds

    asyncio.run(work())
    assert (now[0], rested[0]) == (16.0, 12.0)
