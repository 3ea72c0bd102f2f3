"""Storage that lies, lags or is away when a job comes back: it never begins anew, nor from older state, without proof."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from agent_kit import agent_pid, eventually
from rank_kit import World
from test_job_storage import iterations, lose_all, run, told

from gemini_ft.agent import lifecycle
from gemini_ft.cli.goodput import ledgers
from gemini_ft.core.goodput import Phase
from gemini_ft.errors import StorageError, StorageUnclearError
from gemini_ft.events import read_events
from gemini_ft.storage.checkpoints import read_manifest
from gemini_ft.storage.opening import open_storage

AWAY = {"patience": 0.0}


def damage(store: Path) -> None:
    """Flip a bit in every shard; the second time mends it."""
    for path in store.glob("*/*/*/shard-*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_checkpoints_that_all_read_as_damaged_are_no_reason_to_begin_anew(one: World, store: Path) -> None:
    one.outcome(*run(store, 6))
    lose_all(one)
    damage(store)
    for resume in ("auto", "require"):
        (error,) = one.outcome(*run(store, 4, AWAY, resume=resume))
        assert type(error) is StorageUnclearError
        assert "2 checkpoints are there, but none is sound" in str(error)
        assert f"GEMINI_RUN_ID={one.run}-2" in str(error)
    assert iterations(store) == [6, 4]
    damage(store)
    assert one.outcome(*run(store, 1))[0]["start"] == 6


@pytest.mark.parametrize("required", [True, False])
def test_a_folder_that_is_not_mounted_is_no_first_start(one: World, store: Path, required: bool) -> None:
    one.outcome(*run(store, 4))
    lose_all(one)
    away = store.rename(store.with_name("away"))
    (error,) = one.outcome(*run(store, 4, {**AWAY, "required": required}))
    assert type(error) is StorageUnclearError
    assert "this run has stored up to iteration 4 of incarnation 1, but no checkpoint of it is listed" in str(error)
    assert not (store / one.run).exists()
    shutil.rmtree(store, ignore_errors=True)
    away.rename(store)
    assert one.outcome(*run(store, 1))[0]["start"] == 4


def test_storage_that_comes_back_is_waited_for_and_the_ledger_of_time_has_how_long(one: World, store: Path, tmp_path: Path) -> None:
    one.outcome(*run(store, 4))
    lose_all(one)
    away = store.rename(store.with_name("away"))
    attempt = one.start(*run(store, 1, {"patience": 60.0}), GEMINI_EVENTS=str(tmp_path / "events"))
    attempt.processes[0].join(2)  # time to look once; were it too short, the job would find storage well at once
    away.rename(store)
    (result,) = attempt.results()
    assert result["start"] == 4
    waited = ledgers(read_events(tmp_path / "events"))["main"].seconds[Phase.STORAGE]
    assert (waited > 0) == told(result, "asking again for up to 60 s (storage.patience)")


def test_whole_memory_is_resumed_from_while_storage_is_away(one: World, store: Path) -> None:
    one.outcome(*run(store, 4))
    away = store.rename(store.with_name("away"))
    store.write_text("in the way")
    (result,) = one.outcome(*run(store, 3, during=None))
    assert result["start"] == 4
    assert told(result, "the job resumes from memory: training goes on, uploads are tried when they are due")
    store.unlink()
    away.rename(store)
    (result,) = one.outcome(*run(store, 3))
    assert result["start"] == 7
    assert iterations(store)[0] > 7


def test_a_first_start_on_storage_that_cannot_say_is_none(one: World, store: Path) -> None:
    """As root one cannot be denied to read: a link that leads nowhere but in a circle is as good."""
    os.symlink("store", store)
    for required in (True, False):
        (error,) = one.outcome(*run(store, 4, {**AWAY, "required": required}))
        assert type(error) is StorageUnclearError
    (result,) = one.outcome(*run(store, 4, {**AWAY, "required": False}, resume="never", during=None))
    assert result["committed"] == 4


def test_two_histories_are_told_and_the_user_chooses(one: World, store: Path, tmp_path: Path) -> None:
    one.outcome(*run(store, 4, {"keep_last": 1}))
    lose_all(one)
    away = store.rename(store.with_name("away"))
    one.outcome(*run(store, 2), GEMINI_STATE_DIR=str(tmp_path / "fresh"))  # a host that has never taken part, and an empty mount
    lose_all(one)
    shutil.copytree(away, store, dirs_exist_ok=True)
    storage = open_storage(f"file://{store}")
    folders = {path.parent.relative_to(store).as_posix() for path in store.glob("*/*/*/manifest.json")}
    histories = {manifest.iteration: str(manifest.incarnation) for manifest in (read_manifest(storage, folder) for folder in folders)}
    (error,) = one.outcome(*run(store, 4))
    assert type(error) is StorageUnclearError
    assert "there are 2 histories that do not descend from each other: step" in str(error)
    assert all(f"history {history}" in str(error) for history in histories.values())
    for iteration in (2, 4):
        kept = shutil.copytree(store, tmp_path / f"chosen-{iteration}")
        (result,) = one.outcome(*run(kept, 4, {"history": histories[iteration]}))
        assert result["start"] == iteration
        assert iterations(kept) == sorted(iterations(kept), reverse=True)
        lose_all(one)
        assert one.outcome(*run(kept, 1))[0]["start"] == iteration + 4  # from now on it is known which one goes on
        assert {2, 4} - {iteration} <= set(iterations(kept))  # the other history lost nothing
        lose_all(one)


def test_a_silly_folder_does_not_make_a_run_unusable(one: World, store: Path) -> None:
    for name in ("step-00000009-inc-99999999999999999999999-x", "step-00000009-inc-999999999-x"):
        folder = store / one.run / "main" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (error,) = one.outcome(*run(store, 4, AWAY))
    assert isinstance(error, StorageError)  # there may have been something
    (result,) = one.outcome(*run(store, 4, AWAY, resume="never"))
    assert result["committed"] == 4
    assert 4 in iterations(store)
    lose_all(one)
    assert one.outcome(*run(store, 1))[0]["start"] == 4


@pytest.mark.parametrize("patience", [60.0, 0.5])
def test_the_last_upload_is_waited_for_and_its_failure_is_said(
    one: World, store: Path, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_HOST_ID", "host0")
    one.outcome(*run(store, 4))
    folder = store / one.run
    aside = folder.rename(store.parent / "aside")
    folder.write_text("in the way")
    attempt = one.start(*run(store, 2, {"patience": patience}, close=True))
    assert attempt.wait()
    attempt.kill()
    if patience > 1:
        eventually(lambda: "nothing more is stored until that works" in one.log("host0"), "the failure")
        folder.unlink()
        aside.rename(folder)
        assert lifecycle.job_finished(one.run, stores=True) == ""
        assert iterations(store) == [6, 4]
    else:
        assert "choose a path that is a folder all the way" in lifecycle.job_finished(one.run, stores=True)
    eventually(lambda: agent_pid(one.run, "host0") is None, "the leaving of the agent")
