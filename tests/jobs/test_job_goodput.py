"""The ledger of time of a real job that is killed twice; its figures are compared with each other, and with the events."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_kit import agent_pid, end_agent
from rank_kit import World
from session_case import loop, wait_for_upload

from gemini_ft.agent import lifecycle
from gemini_ft.cli import main as cli
from gemini_ft.events import read_events

LOST = ("detection", "rendezvous", "waiting for storage", "restore", "replay", "checkpoint stall")


def test_the_time_of_a_rank_that_is_stopped_is_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is woken to tell what it does, and may end further steps before it is killed."""
    events = tmp_path / "events"
    environ = {"GEMINI_EVENTS": str(events), "GEMINI_FAULTS": "step=8:rank=1:sigstop", "GEMINI_HANG_TIMEOUT": "2"}
    with World(tmp_path, 2, hosts=["a", "a"], **environ) as world:
        world.finish(partial(loop, close=True), 20)
        assert world.restarts == 1
    assert cli.main(["goodput", "--json", str(events)]) == 0
    found = json.loads(capsys.readouterr().out)["main"]
    (failure,) = found["failures"]
    assert failure["cause"] == "hang"
    assert failure["seconds"]["detection"] > 2
    lost = [event for event in read_events(events) if event["event"] == "lost" and event["cause"] == "hang"]
    assert lost
    assert all(2 < event["stood"] < 60 for event in lost)
    assert found["seconds"]["training"] == pytest.approx(found["total_seconds"] - sum(found["seconds"][lost] for lost in LOST))
    assert sum(found["seconds"].values()) == pytest.approx(found["total_seconds"])


def _validate(iteration: int, net: Any, optimizer: Any, checkpointer: Any) -> bool:
    if iteration == 9:
        with checkpointer.paused():
            time.sleep(0.15)
            with checkpointer.paused():
                time.sleep(0.15)
        with checkpointer.paused(validates=False):
            time.sleep(0.8)
    return False


def test_the_time_of_a_job_that_is_killed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events"
    faults = "step=8:rank=1:sigkill; step=14:rank=0:sigkill"
    with World(tmp_path, 2, hosts=["a", "a"], GEMINI_EVENTS=str(events), GEMINI_FAULTS=faults) as world:
        world.finish(partial(loop, close=True, during=_validate), 20)
        assert world.restarts == 2
        told_by_agent = json.loads(lifecycle.status(world.run, "a") or "")["streams"]["main"]["measures"]["run"]["seconds"]
    assert cli.main(["goodput", "--json", str(events)]) == 0
    found = json.loads(capsys.readouterr().out)["main"]
    told = read_events(events)
    joined = [event for event in told if event["event"] == "joined"]
    left = [event for event in told if event["event"] == "left" and event["finished"]]
    assert found["total_seconds"] == pytest.approx(max(event["at"] for event in left) - min(event["at"] for event in joined), abs=1e-3)
    assert sum(found["seconds"].values()) == pytest.approx(found["total_seconds"])
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["seconds"]["training"] > 0
    assert found["seconds"]["checkpoint stall"] > 0
    assert found["seconds"]["waiting for storage"] == 0
    for seconds in (found["seconds"], told_by_agent):
        assert 0.3 <= seconds["validation"] < 1.0
    assert [failure["cause"] for failure in found["failures"]] == ["died", "died"]
    assert [failure["host"] for failure in found["failures"]] == ["a", "a"]
    assert [failure["resumed"] for failure in found["failures"]] == [
        event["iteration"] for event in joined if event["rank"] == 0 and event["incarnation"] > 1
    ]
    lost = [event for event in told if event["event"] == "lost"]
    assert lost[0]["rank"] == 1
    assert sorted({event["incarnation"] for event in lost}) == [1, 2]
    assert len({event["run"] for event in told}) == 1
    for failure, step in zip(found["failures"], (8, 14), strict=True):
        assert failure["step"] == step
        assert failure["at"] in [event["at"] for event in lost]
        assert failure["lost_seconds"] == pytest.approx(sum(failure["seconds"].values()))
        assert failure["seconds"]["detection"] > 0
        assert failure["seconds"]["rendezvous"] > 0
        assert failure["seconds"]["restore"] > 0
        assert ("replay" in failure["seconds"]) == (failure["resumed"] < step)
    for phase in ("detection", "restore", "replay"):  # only failures cost these
        assert sum(failure["seconds"].get(phase, 0) for failure in found["failures"]) == pytest.approx(found["seconds"][phase])


def _lose_an_agent(iteration: int, *rest: Any) -> None:
    wait_for_upload(iteration, *rest)
    if iteration == _AGENT_LOST_AT and os.environ["RANK"] == "0" and (pid := agent_pid(os.environ["GEMINI_RUN_ID"], "a")) is not None:
        os.kill(pid, signal.SIGKILL)


_AGENT_LOST_AT = 20


def test_a_job_of_which_only_storage_is_left_goes_on_with_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So do a host whose agent alone is new, and an agent that its worker has started in the middle of an attempt."""
    url = f"file://{tmp_path}/store"
    train = partial(loop, storage={"url": url, "every_steps": 2}, during=_lose_an_agent)

    def ledger(*options: str) -> dict[str, Any]:
        assert cli.main(["goodput", "--json", world.run, *options]) == 0
        found = json.loads(capsys.readouterr().out)["main"]
        assert sum(found["seconds"].values()) == pytest.approx(found["total_seconds"])
        return dict(found)

    def of_host(host: str) -> Any:
        return json.loads(lifecycle.status(world.run, host) or "")["streams"]["main"]["measures"]

    with World(tmp_path, 2, hosts=["a", "b"], GEMINI_FAULTS="step=5:rank=1:sigkill") as world:
        world.finish(train, 8)
        assert world.restarts == 1
        for host in "ab":
            end_agent(world.run, host)
        stored = ledger("--storage", url)
        assert stored["causes"].keys() == {"died"}
        world.outcome(train, 3)
        again = ledger()
        assert [failure["cause"] for failure in again["failures"]] == ["died", None]
        assert again["causes"]["died"] == stored["causes"]["died"]
        assert again["causes"]["?"]["seconds"]["restore"] > 0
        assert all(again["seconds"][phase] >= seconds for phase, seconds in stored["seconds"].items())
        of_a = of_host("a")
        assert of_a["run"]["seconds"]["training"] - of_a["seconds"]["training"] == pytest.approx(stored["seconds"]["training"])
        end_agent(world.run, "b")
        world.outcome(train, 3)
        assert len(of_host("b")["run"]["failures"]) == 3
        assert sum(of_host("b")["run"]["seconds"].values()) > again["total_seconds"]
        before = of_host("a")["run"]["seconds"]
        world.outcome(train, 6)
        assert len(re.findall(r"agent \d+ of run", world.log("a"))) == 3
        after = of_host("a")["run"]["seconds"]
        assert all(after[phase] >= seconds for phase, seconds in before.items()), (before, after)
        assert after["restore"] > before["restore"], "the worker has told the new agent"
