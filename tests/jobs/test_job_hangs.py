"""Jobs that hang as jobs do: before a worker is killed, the report names the rank that keeps the others waiting, and why."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agent_kit import eventually
from rank_kit import World
from session_case import loop

from gemini_ft.events import read_events

AT = 6  # the iteration after which one rank does what the others do not
CULPRIT = 1


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def locks() -> None:
    """Waits for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def computes() -> None:
    while True:
        sum(range(1000))


def broadcasts() -> None:
    dist.broadcast(torch.ones(3, 2), CULPRIT)


def leaves() -> bool:
    return True


def odd_one(act: Callable[[], bool | None], iteration: int, *_: Any) -> bool:
    """Does at one rank, once, what the others do not."""
    return bool(act()) if (iteration, dist.get_rank()) == (AT, CULPRIT) else False


def hang(act: Callable[[], bool | None]) -> dict[str, Any]:
    """Trains; where that ends, the process goes on with something else until the job has been judged, as one that ends fails the others."""
    result = loop(10**6, during=partial(odd_one, act), hang_timeout=3.0 if act is leaves else 1.0, close=True)
    eventually(lambda: hangs(os.environ["GEMINI_EVENTS"]))
    return result


def hangs(path: str | Path) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == "hang"]


@pytest.mark.parametrize(
    ("act", "cause", "why"),
    [
        (stops, "stopped", "is stopped, by SIGSTOP or a debugger"),
        (locks, "asleep", "is asleep outside of all collectives"),
        (computes, "at work", "is at work outside of all collectives"),
        (broadcasts, "mismatch", "is not the same on all ranks: rank 0"),
        (leaves, "left", "is done: it has left the loop"),
    ],
)
@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a", "a", "a"]], ids=["three hosts", "one host"])
def test_the_rank_that_keeps_the_others_waiting_is_named(
    tmp_path: Path, hosts: list[str], act: Callable[[], bool | None], cause: str, why: str
) -> None:
    with World(tmp_path, hosts=hosts, GEMINI_EVENTS=str(tmp_path / "events")) as world:
        results = world.outcome(hang, act)
        assert [isinstance(result, Exception) for result in results] == [act is not leaves or rank != CULPRIT for rank in range(3)]
        told = hangs(tmp_path / "events")
        assert sorted(event["host"] for event in told) == sorted({*hosts})
        for event in told:
            assert (event["cause"], event["ranks"]) == (cause, [CULPRIT])
            assert why in event["text"]
            assert "wait in allreduce_ float32[49]" in event["text"]
            report = Path(event["report"]).read_text()
            assert event["text"] in report
            for rank in range(3):
                assert f"threads of rank {rank} (host {hosts[rank]}" in report
            assert report.count("in hang\n") == 3  # of the training threads
            assert act is leaves or f"in {act.__name__}" in report
            assert event["report"] in world.log(event["host"])
