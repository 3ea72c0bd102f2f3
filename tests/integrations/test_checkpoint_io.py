"""Files of `trainer.save_checkpoint` that `GeminiCheckpointIO` writes out of memory are those that Lightning writes by itself."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch

pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
import lightning.fabric.plugins.io.torch_io as torch_io
import three_ways
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from test_lightning_hooks import CRASH, Boom, Case, fit, table

from gemini_ft import checkpoint_io
from gemini_ft.checkpoint_io import GeminiCheckpointIO
from gemini_ft.errors import ConfigError, RecoveryError, StateError
from gemini_ft.state import codec
from gemini_ft.testing import EmulatedHosts, assert_identical

__all__ = ["fit"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]
CELLS = {"all": three_ways.Cell({"keep": -1}, ["1:step:7", "0:step:11"]), "newest": three_ways.Cell({"keep": 1}, ["0:step:9"])}


@pytest.mark.timeout(300)
@pytest.mark.preloaded("lightning")
def test_files_are_those_of_plain_ddp_undisturbed_and_killed(tmp_path: Path) -> None:
    case = Path(__file__).parents[1] / "kit" / "files_case.py"
    folders = three_ways.run_side_by_side(case, tmp_path, CELLS)
    for name, cell in CELLS.items():
        assert three_ways.differing(folders, name, cell) == []


@pytest.mark.timeout(400)
@pytest.mark.preloaded("lightning")
def test_files_have_the_shards_of_all_hosts_and_a_lost_host_costs_none(tmp_path: Path) -> None:
    case, cell = Path(__file__).parents[1] / "kit" / "files_case.py", three_ways.Cell({"keep": -1})
    folders = {way: tmp_path / way for way in three_ways.WAYS}
    for folder in folders.values():
        folder.mkdir()
    three_ways.run(case, "ddp", folder=folders["ddp"], cells={"files": cell})
    for way, faults in (("undisturbed", ""), ("killed", "step=5:rank=0:sigkill; step=9:host=1:kill")):
        env = {"GEMINI_ON_LATE": "wait", "GEMINI_FAULTS": faults}
        arguments = [str(folders[way]), "gemini", json.dumps({"files": [cell.options | {"hosts": 2}, []]})]
        with EmulatedHosts(2, [str(case), *arguments], folders[way], env=env) as hosts:
            if faults:
                hosts.add()
            hosts.finish()
            assert len(hosts.lost) == bool(faults)
            restarts = {event["incarnation"] for event in hosts.events("joined")}
            assert restarts == ({1, 2, 3} if faults else {1})
    assert three_ways.differing(folders, "files", cell) == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name of a file -> thread that has written it last."""
    found: dict[str, str] = {}
    save = torch_io._atomic_save

    def noted(checkpoint: Any, path: Any) -> None:
        found[Path(path).name] = threading.current_thread().name
        save(checkpoint, path)

    monkeypatch.setattr(torch_io, "_atomic_save", noted)
    return found


def saving(folder: Path | str, **options: Any) -> Callable[[], Any]:
    return lambda: ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, **options)


def dying(then: Callable[[], object]) -> type[Case]:
    """A case that calls ``then`` before it crashes."""

    class Dying(Case):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if self.crash == (self.current_epoch, batch_idx):
                then()
            return super().training_step(batch, batch_idx)

    return Dying


def lost(*_: Any) -> Any:
    raise RecoveryError("a host was lost")


def loaded(folder: Path) -> dict[str, Any]:
    """Name -> content of each file."""
    return {path.name: torch.load(path, weights_only=False) for path in folder.iterdir()}


def same(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    assert mine.keys() == plain.keys()
    for name, content in mine.items():
        assert_identical({**content, "callbacks": None}, {**plain[name], "callbacks": None})


def test_a_thread_writes_what_the_snapshot_has(
    fit: Callable[..., Case], tmp_path: Path, written: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gemini_ft")
    options: dict[str, Any] = {"enable_checkpointing": True}
    fit(Case, table, "ddp", callbacks=[saving(tmp_path / "plain")], seed=None, **options)
    assert {*written.values()} == {"MainThread"}
    module = fit(Case, table, "gemini", callbacks=[saving(tmp_path / "mine")], seed=None, plugins=[GeminiCheckpointIO()], **options)
    *before, last = (f"step={step}.ckpt" for step in range(2, 19, 2))
    assert written == dict.fromkeys(before, "gemini-files") | {last: "MainThread"}
    assert f"{last}: written as without GeminiCheckpointIO: no update comes after it" in caplog.text
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()
    same(loaded(tmp_path / "mine"), loaded(tmp_path / "plain"))


def test_files_of_steps_without_a_snapshot_or_whose_copies_are_gone_are_written_at_once(
    fit: Callable[..., Case], tmp_path: Path, written: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gemini_ft")
    options: dict[str, Any] = {"enable_checkpointing": True, "seed": None}
    fit(Case, table, "ddp", callbacks=[saving(tmp_path / "plain")], **options)
    opened = checkpoint_io.shards_of

    def missing(run: str, stream: str, step: int, names: set[str]) -> Any:
        if step == 6:
            raise RecoveryError("its copies are gone")
        return opened(run, stream, step, names | {"model.more"} if step == 12 else names)

    monkeypatch.setattr(checkpoint_io, "shards_of", missing)
    mine = {"plugins": [GeminiCheckpointIO()], "strategy_options": {"interval": 3}}
    fit(Case, table, "gemini", callbacks=[saving(tmp_path / "mine")], **options, **mine)
    assert {*written.values()} == {"MainThread"}
    assert "step=4.ckpt: written as without GeminiCheckpointIO: step 4 has no snapshot" in caplog.text
    assert "step=6.ckpt: written as without GeminiCheckpointIO: its copies are gone" in caplog.text
    assert "step=12.ckpt: written as without GeminiCheckpointIO: its snapshot leaves out model.more (1 in all)" in caplog.text
    same(loaded(tmp_path / "mine"), loaded(tmp_path / "plain"))


def test_files_go_to_s3_too(fit: Callable[..., Case], tmp_path: Path, written: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs, by which Lightning reaches S3: pip install s3fs")
    options: dict[str, Any] = {"enable_checkpointing": True, "seed": None}
    fit(Case, table, "ddp", callbacks=[saving(tmp_path / "plain")], **options)
    with s3_server.serve(tmp_path / "s3", "bucket") as server:
        for name, value in (s3_server.CREDENTIALS | {"AWS_ENDPOINT_URL": server.endpoint}).items():
            monkeypatch.setenv(name, value)
        fit(Case, table, "gemini", callbacks=[saving("s3://bucket/run")], plugins=[GeminiCheckpointIO()], **options)
    assert written["step=2.ckpt"] == "gemini-files"
    same(loaded(tmp_path / "s3" / "bucket" / "run"), loaded(tmp_path / "plain"))


class Clamping(Case):
    """Writes its weights after ModelCheckpoint has saved them."""

    through_data = False

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.head.weight
        with torch.no_grad():
            (weight.data if self.through_data else weight).clamp_(-0.01, 0.01)


class ClampingData(Clamping):
    through_data = True


@pytest.mark.parametrize("kind", [Clamping, ClampingData])
def test_what_is_written_after_a_save_is_refused_by_name(fit: Callable[..., Case], kind: type[Case], tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"step=2\.ckpt: model\.head\.weight \(1 in all\) was written between save_checkpoint and the"):
        fit(kind, table, "gemini", callbacks=[saving(tmp_path)], plugins=[GeminiCheckpointIO()], enable_checkpointing=True)


@pytest.mark.parametrize(
    ("is_there", "why"), [(True, ""), (False, "it cannot be now: a host was lost"), (False, "it cannot be without GeminiCheckpointIO")]
)
def test_a_file_that_a_failure_has_prevented_is_made_up_for_or_named(
    fit: Callable[..., Case], is_there: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process dies while another thread writes; the file that this one takes the place of is kept until then."""
    folder, reading = tmp_path / "files", checkpoint_io.WholeTensors.read
    dead, alive = threading.Event(), threading.Event()
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [GeminiCheckpointIO()]}
    names: list[list[str]] = []

    def read(tensors: Any) -> Any:
        if [*folder.glob("*")] and not alive.is_set():
            assert dead.wait(200)
            raise RecoveryError("dead")
        return reading(tensors)

    def newest() -> Any:
        names.append(sorted(path.name for path in folder.glob("*")))
        return ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=1, monitor="step", mode="max")

    monkeypatch.setattr(checkpoint_io.WholeTensors, "read", read)
    fit(Case, table, "ddp", callbacks=[saving(tmp_path / "plain")], enable_checkpointing=True)
    with pytest.raises(Boom):
        fit(dying(dead.set), table, "gemini", CRASH, callbacks=[newest], **options)
    alive.set()
    if not is_there:
        monkeypatch.setattr(checkpoint_io, "shards_of", lost)
    if "without" in why:
        del options["plugins"]
    with pytest.raises(Boom):
        fit(Case, table, "gemini", (1, 4), callbacks=[newest], **options)
    newest()
    assert names == [[], ["step=4.ckpt"], ["step=8.ckpt"] if is_there else ["step=4.ckpt"]]
    assert (f"step=8.ckpt: not known to be written before the failure, and {why}" in caplog.text) == (not is_there)
    if is_there:
        same(loaded(folder), {"step=8.ckpt": loaded(tmp_path / "plain")["step=8.ckpt"]})


def test_a_failure_is_told_and_none_of_its_files_also_if_it_cannot_wait_for_them(
    fit: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the wait for the thread that writes, the live tensors, which are others by now, are not asked for what it writes."""
    calls: list[int] = []

    class Interrupted(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("interrupted")
            return super().exception(timeout)

    def newest() -> Any:
        return ModelCheckpoint(tmp_path / "files", "{step}", every_n_train_steps=4, save_top_k=-1)

    calls.append(0)
    monkeypatch.setattr(checkpoint_io, "Future", Interrupted)
    with pytest.raises(Boom):
        fit(dying(calls.clear), table, "gemini", (0, 5), callbacks=[newest], enable_checkpointing=True, plugins=[GeminiCheckpointIO()])
    assert len(calls) > 1
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["step=4.ckpt"]


@pytest.mark.filterwarnings("ignore:.fit.ckpt_path=.last.. is set, but there is no last checkpoint:UserWarning")
def test_a_link_is_there_before_its_file_and_keeps_no_start_from_going_on_if_that_is_lost(
    fit: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the first one, in a folder that is not there yet; ``ckpt_path="last"`` follows it."""
    dead, reading = threading.Event(), checkpoint_io.WholeTensors.read

    def files() -> Any:
        return ModelCheckpoint(tmp_path / "files", "{step}", every_n_train_steps=4, save_top_k=-1, save_last="link")

    def last(trainer: Any, module: Case) -> None:
        monkeypatch.setattr(trainer, "fit", partial(trainer.fit, ckpt_path="last"))

    def read(tensors: Any) -> Any:
        if (tmp_path / "files" / "step=4.ckpt").exists():
            assert dead.wait(200)
            raise RecoveryError("dead")
        return reading(tensors)

    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [GeminiCheckpointIO()], "before": last, "callbacks": [files]}
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_io.WholeTensors, "read", read)
        with pytest.raises(Boom):
            fit(dying(dead.set), table, "gemini", CRASH, **options)
    assert os.readlink(tmp_path / "files" / "last.ckpt") == "step=8.ckpt"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_io, "shards_of", lost)
        with pytest.raises(Boom):
            fit(Case, table, "gemini", (1, 4), **options)
    assert "step=8.ckpt: not known to be written before the failure, and it cannot be now: a host was lost" in caplog.text
    with pytest.raises(Boom):
        fit(Case, table, "gemini", (1, 5), **options)
    fit(Case, table, "gemini", **options)
    assert os.readlink(tmp_path / "files" / "last.ckpt") == "step=16.ckpt"


def test_a_writer_that_returns_before_its_file_is_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"GeminiCheckpointIO\(AsyncCheckpointIO\(...\)\): .*; leave it out"):
        GeminiCheckpointIO(AsyncCheckpointIO())


def test_a_fit_goes_on_with_it_that_had_begun_without(fit: Callable[..., Case], tmp_path: Path, written: dict[str, str]) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True}
    with pytest.raises(Boom):
        fit(Case, table, "gemini", CRASH, callbacks=[saving(tmp_path)], **options)
    fit(Case, table, "gemini", callbacks=[saving(tmp_path)], plugins=[GeminiCheckpointIO()], **options)
    assert written["step=8.ckpt"] == "MainThread"
    assert written["step=10.ckpt"] == "gemini-files"


class Inner(TorchCheckpointIO):
    """Fails once in the thread that writes, and has threads of its own to end."""

    fails = False
    has_ended = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.fails and "step=8" in str(path):
            raise OSError("no space left")
        super().save_checkpoint(checkpoint, path, storage_options)

    def teardown(self) -> None:
        self.has_ended = True


class Awaiting(Case):
    """Takes no snapshot before the file is there, or has failed."""

    def on_train_batch_end(self, *_: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "gemini-files":
                thread.join()


def test_a_file_that_could_not_be_written_is_not_taken_for_written(
    fit: Callable[..., Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Inner()
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [GeminiCheckpointIO(inner)]}
    options["callbacks"] = [saving(tmp_path / "mine")]
    inner.fails = True
    with pytest.raises(Boom):
        fit(Awaiting, table, "gemini", CRASH, **options)
    assert "no space left" in caplog.text
    inner.fails = False
    fit(Case, table, "gemini", **options)
    is_named = "step=8.ckpt: not known to be written before the failure" in caplog.text
    assert is_named != (tmp_path / "mine" / "step=8.ckpt").exists()
    assert inner.has_ended


def test_a_snapshot_with_files_to_be_written_is_read_without_the_secret(fit: Callable[..., Case], tmp_path: Path) -> None:
    found = list[list[str]]()

    class Looking(Case):
        def on_train_batch_start(self, *_: Any) -> None:
            late = self.trainer.strategy.checkpoint_io.state()  # type: ignore[attr-defined]
            if late is not None:
                found.append(codec.decode(codec.encode(late, b"secret"))["paths"])

    fit(Looking, table, "gemini", callbacks=[saving(tmp_path)], seed=None, plugins=[GeminiCheckpointIO()], enable_checkpointing=True)
    assert [str(tmp_path / "step=2.ckpt")] in found


def test_files_are_there_for_the_hooks_that_end_the_training(fit: Callable[..., Case], tmp_path: Path) -> None:
    found: list[bool] = []

    class Reading(Case):
        def on_train_end(self) -> None:
            found.append(Path(self.trainer.checkpoint_callback.best_model_path).exists())  # type: ignore[union-attr]

    fit(Reading, table, "gemini", callbacks=[saving(tmp_path)], seed=None, plugins=[GeminiCheckpointIO()], enable_checkpointing=True)
    assert found == [True]
