"""The slow tier under real jobs: what is uploaded, what is resumed from it, and what a bad one costs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import agent_pid, end_agent, eventually
from rank_kit import World
from session_case import loop, wait_for_upload

from gemini_ft.agent import lifecycle
from gemini_ft.errors import ConfigError, StateError, StorageError
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage


def run(store: Path, steps: int = 6, storage: dict[str, Any] | None = None, **options: Any) -> Any:
    """Uploads of every second step, each over before the next step begins."""
    settings = {"url": f"file://{store}", "every_steps": 2, **(storage or {})}
    return (_loop, steps, {"storage": settings, "during": wait_for_upload, **options})


def _loop(steps: int, options: dict[str, Any]) -> Any:
    return loop(steps, **options)


def _loop_after_an_error(steps: int, options: dict[str, Any]) -> Any:
    """A loop in a process where something before it has failed, as in a notebook an earlier cell may have."""
    sys.last_value = ZeroDivisionError()
    return loop(steps, **options)


def _bar_the_third_and_fourth_iteration(iteration: int, *others: Any) -> None:
    """A rank's hook: an upload that is due then finds a file where its folder was."""
    wait_for_upload(iteration, *others)
    run = os.environ["GEMINI_RUN_ID"]
    (stream,) = json.loads(lifecycle.status(run) or "")["streams"].values()
    folder = Path(stream["storage"]["url"].removeprefix("file://")) / run
    if iteration == 2:
        folder.rename(folder.with_name("aside"))
        folder.write_text("in the way")
    elif iteration == 4:
        folder.unlink()
        folder.with_name("aside").rename(folder)


def told(result: Any, text: str) -> bool:
    return any(text in said for said in result["told"])


def iterations(store: Path) -> list[int]:
    return [info.iteration for info in list_checkpoints(open_storage(f"file://{store}"))]


def lose_all(world: World) -> None:
    for host in world.hosts:
        end_agent(world.run, host)


def shard_of(store: Path, iteration: int, owner: int = 1) -> Path:
    (path,) = store.glob(f"*/*/step-{iteration:08}-*/shard-{owner:05}.safetensors")
    return path


def counter(world: World, host: str, name: str) -> int:
    status = lifecycle.status(world.run, host)
    assert status is not None
    return int(json.loads(status)["streams"]["main"]["counters"][name])


class TestUploads:
    def test_come_as_often_as_asked_and_the_oldest_go(self, two: World, store: Path) -> None:
        two.outcome(*run(store, 7))
        assert iterations(store) == [6, 4]
        assert len(list(store.glob("*/*/*"))) == 2

    def test_by_the_clock(self, one: World, store: Path) -> None:
        one.outcome(*run(store, 4, {"every_steps": None, "every_seconds": 0.001, "keep_last": 9}))
        assert iterations(store) == [3, 1]  # the ranks learn with one commit that the next may be uploaded

    @pytest.mark.parametrize("job", [_loop, _loop_after_an_error], ids=["", "after an error"])
    def test_the_last_step_is_uploaded_before_the_agents_leave(self, two: World, store: Path, job: Callable[..., Any]) -> None:
        _, *arguments = run(store, 4, during=None, close=True, pause=0.2)
        attempt = two.start(job, *arguments)
        assert attempt.wait()
        for process in attempt.processes:
            process.join(30)  # it says how it ends
        eventually(lambda: all(agent_pid(two.run, host) is None for host in two.hosts), "the leaving of the agents")
        assert iterations(store)[0] == 4

    def test_one_that_fails_is_said_and_the_next_is_tried(self, one: World, store: Path) -> None:
        (result,) = one.outcome(*run(store, 8, during=_bar_the_third_and_fourth_iteration))
        assert told(result, "training goes on, the next upload is tried")
        assert counter(one, "host0", "failed_uploads") == 1
        assert iterations(store) == [8, 6]


class TestResume:
    def test_when_all_memory_is_lost(self, two: World, store: Path) -> None:
        two.outcome(*run(store, 7))
        lose_all(two)
        results = two.outcome(*run(store, 1))
        assert [result["start"] for result in results] == [6, 6]
        # Each shard is read from storage once, by its owner, and by the other rank from there.
        assert [set(result["restored"]) for result in results] == [{"storage", "peer host1"}, {"storage", "peer host0"}]
        assert told(results[0], "no copies in memory: falling back to storage, iteration 6")

    def test_when_a_shard_is_lost_says_how_much_work_goes_with_it(self, two: World, store: Path) -> None:
        two.outcome(*run(store, 7, replicas=1))
        end_agent(two.run, "host1")
        results = two.outcome(*run(store, 1, replicas=1))
        assert [result["start"] for result in results] == [6, 6]
        assert told(results[0], "copies in memory exist but no common iteration: falling back to storage, iteration 6, 1 steps lost")

    def test_from_memory_while_it_is_newer(self, two: World, store: Path) -> None:
        two.outcome(*run(store, 7))
        assert [result["start"] for result in two.outcome(*run(store, 1))] == [7, 7]

    @pytest.mark.parametrize("damage", ["bit", *(pytest.param(damage, marks=pytest.mark.soak) for damage in ("end", "all"))])
    def test_from_the_one_before_when_the_newest_is_damaged(self, two: World, store: Path, damage: str) -> None:
        two.outcome(*run(store, 6))
        lose_all(two)
        path = shard_of(store, 6)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "bit" else content[: len(content) // 2])
        if damage == "all":
            path.unlink()
        results = two.outcome(*run(store, 4))
        assert [result["start"] for result in results] == [4, 4]
        lose_all(two)
        assert [result["start"] for result in two.outcome(*run(store, 1))] == [8, 8]

    def test_does_not_see_a_torn_upload(self, two: World, store: Path) -> None:
        two.outcome(*run(store, 6))
        lose_all(two)
        (newest,) = store.glob("*/*/step-00000006-*")
        torn = shutil.copytree(newest, newest.with_name(newest.name.replace("00000006", "00000008")))
        (torn / "manifest.json").unlink()
        assert [result["start"] for result in two.outcome(*run(store, 1))] == [6, 6]

    def test_new_checkpoints_count_as_newer_than_those_that_were_not_wanted(self, one: World, store: Path) -> None:
        one.outcome(*run(store, 6))
        lose_all(one)
        one.outcome(*run(store, 2, resume="never"))
        lose_all(one)
        assert one.outcome(*run(store, 1))[0]["start"] == 2

    def test_pickles_are_loaded_only_when_their_signature_is_right_or_all_are_trusted(self, one: World, store: Path) -> None:
        one.outcome(*run(store, 2, odd=True), GEMINI_SECRET="ours")
        for secret, trusted, start in (("theirs", False, None), ("ours", False, 2), ("theirs", True, 2)):
            lose_all(one)
            (result,) = one.outcome(*run(store, 1, {"trust_pickle": trusted}, odd=True), GEMINI_SECRET=secret)
            if start is None:
                assert isinstance(result, StateError)
                assert "deep" in str(result)
                assert "trust_pickle" in str(result)
            else:
                assert result["start"] == start


class TestUnusable:
    def test_storage_that_is_required_stops_the_job_before_it_begins(self, two: World, store: Path) -> None:
        store.write_text("a file")
        results = two.outcome(*run(store / "below"))
        assert [type(result) for result in results] == [StorageError, StorageError]
        assert "choose a path that is a folder all the way" in str(results[0])
        assert str(results[0]) == str(results[1])

    def test_storage_that_is_not_required_is_done_without(self, two: World, store: Path) -> None:
        store.write_text("a file")
        results = two.outcome(*run(store / "below", storage={"required": False}))
        assert [result["committed"] for result in results] == [6, 6]
        assert all(told(result, "storage cannot be used now, and it is not required: training goes on") for result in results)


def test_a_folder_that_is_not_shared_is_refused_by_the_names_of_the_hosts(two: World) -> None:
    """The folder has one name on all hosts, and is another one on each."""
    results = two.outcome(_apart, str(two.folder))
    assert [type(result) for result in results] == [ConfigError, ConfigError]
    assert "host0 does not see what host host1 has just written there: it is not shared" in str(results[0])
    assert [list(two.folder.glob(f"host{rank}/store/gemini-check-*")) for rank in range(2)] == [[], []]


def _apart(folder: str) -> Any:
    own = Path(folder, os.environ["GEMINI_HOST_ID"])
    own.mkdir()
    os.chdir(own)
    return loop(2, storage={"url": "file:///proc/self/cwd/store", "every_steps": 2})
