"""Storage as several hosts see it: one hangs at it, one was never there, its disk is full, and what is told at a job's end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from agent_kit import eventually
from disks import small_disk
from rank_kit import World
from session_case import loop
from test_job_storage import iterations, lose_all, run, told

from gemini_ft.errors import StorageError, StorageUnclearError
from gemini_ft.storage.checkpoints import list_checkpoints, read_manifest
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing import DrillError, EmulatedHosts

SCRIPT = """
import contextlib, os, time
from pathlib import Path
import torch, gemini_ft
from torch.nn.parallel import DistributedDataParallel

store, run = Path(os.environ["STORE"]), os.environ["GEMINI_RUN_ID"]
gemini_ft.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
storage = {"url": store.as_uri(), "every_steps": 2, "patience": 2.0}
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", storage=storage)
for iteration in range(checkpointer.resume(), 4):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpointer.step()
    while not (store / run / "main.stored.json").exists() and iteration == 1:
        time.sleep(0.01)
    torch.distributed.barrier()
    while iteration == 1 and torch.distributed.get_rank() == 0 and not (store / run).is_file():
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # an upload that has not quite ended may make its folder anew
            (store / run).rename(store / f"aside{time.monotonic_ns()}")
            (store / run).write_text("in the way")
    torch.distributed.barrier()
checkpointer.close()
"""


def test_a_job_that_is_finished_and_not_stored_says_so_on_every_host_by_its_exit_status(tmp_path: Path) -> None:
    """Agents stay for as long as it is tried, even if they would leave sooner after a crash."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {"STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GEMINI_STATE_DIR": str(tmp_path)}
    environ["GEMINI_LINGER"] = "0.5"
    with EmulatedHosts(2, [str(tmp_path / "train.py")], tmp_path, env=environ) as hosts:
        with pytest.raises(DrillError) as failure:
            hosts.finish(120)
        assert "the job failed: {'host0': 73, 'host1': 73}" in str(failure.value)
        for host in ("host0", "host1"):
            assert "the job has finished, but its last step is not stored, as far as is known" in (tmp_path / f"{host}.log").read_text()


@pytest.mark.parametrize("required", [True, False])
def test_one_rank_that_hangs_at_the_storage_is_named_and_storage_with_it(two: World, store: Path, required: bool) -> None:
    results = two.outcome(_one_hangs, store.as_uri(), required)
    if required:
        assert [type(result) for result in results] == [StorageError, StorageError]
        assert "rank 1: " in str(results[0])
        assert "storage did not answer within" in str(results[0])
    else:
        assert [result["committed"] for result in results] == [2, 2]
        assert told(results[0], "storage cannot be used now, and it is not required: training goes on")


def _one_hangs(url: str, required: bool) -> Any:
    if os.environ["RANK"] == "1":
        LocalStorage.check = lambda self: time.sleep(600)  # type: ignore[method-assign]
    return loop(2, storage={"url": url, "every_steps": 2, "required": required}, timeout=2.0)


def test_one_host_that_has_taken_part_is_enough_to_know_that_a_mount_is_missing(two: World, store: Path, tmp_path: Path) -> None:
    two.outcome(*run(store, 4))
    lose_all(two)
    away = store.rename(store.with_name("away"))
    fresh = [{"GEMINI_STATE_DIR": str(tmp_path / "fresh")}, {}]
    attempt = two.start(*run(store, 4, {"patience": 0.0}), per_rank=fresh)
    results = attempt.results()
    attempt.kill()
    assert [type(result) for result in results] == [StorageUnclearError, StorageUnclearError]
    assert "this run has stored up to iteration 4 of incarnation 1" in str(results[0])
    shutil.rmtree(store, ignore_errors=True)
    away.rename(store)
    assert [result["start"] for result in two.outcome(*run(store, 1))] == [4, 4]


@pytest.mark.parametrize("chosen", ["memory", "storage"])
def test_memory_and_storage_of_two_histories_are_told_and_the_user_chooses(one: World, store: Path, tmp_path: Path, chosen: str) -> None:
    one.outcome(*run(store, 4))
    lose_all(one)
    away = store.rename(store.with_name("away"))
    one.outcome(*run(store, 6), GEMINI_STATE_DIR=str(tmp_path / "fresh"))  # in memory from now on; a host that has never taken part
    (beside,) = {history_of(store)}
    shutil.rmtree(store)
    away.rename(store)
    (error,) = one.outcome(*run(store, 1))
    assert type(error) is StorageUnclearError
    assert f"memory has step 6 of history {beside}, storage has step 4" in str(error)
    assert f"(history {history_of(store)}" in str(error)
    history, start = (beside, 6) if chosen == "memory" else (history_of(store), 4)
    (result,) = one.outcome(*run(store, 2, {"history": history}))
    assert result["start"] == start
    assert iterations(store)[0] == start + 2


def history_of(store: Path) -> str:
    storage = open_storage(store.as_uri())
    return str(read_manifest(storage, list_checkpoints(storage)[0].folder).incarnation)


def test_a_disk_full_of_torn_uploads_recovers_by_itself(one: World, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        store = disk / "store"
        one.outcome(*run(store, 4, width=6000))
        lose_all(one)
        (newest, *_) = store.glob("*/*/step-00000004-*")
        content, free = (newest / "shard-00000.safetensors").read_bytes(), 0
        for step in range(5, 100):
            torn = newest.with_name(newest.name.replace("00000004", f"{step:08}"))
            torn.mkdir()
            free = shutil.disk_usage(disk).free
            (torn / "shard-00000.safetensors").write_bytes(content[:free])
            if free < len(content):
                break
        assert shutil.disk_usage(disk).free == 0
        (result,) = one.outcome(*run(store, 2, width=6000))
        assert result["start"] == 4
        eventually(lambda: iterations(store) == [6, 4], "the next checkpoint")
        assert len(list(store.glob("*/*/step-*"))) == 2
