"""Runs of W&B and MLflow that a restarted training continues, and the ledger of time in the loggers of Trainers."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_trackers import FakeTracker, install
from rank_kit import World
from torch.utils.data import DataLoader

from gemini_ft import trackers
from gemini_ft.cli.goodput import ledgers
from gemini_ft.core.goodput import Phase
from gemini_ft.events import read_events
from gemini_ft.launch import endings
from gemini_ft.trackers import continued, open_runs

pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from test_lightning_hooks import CRASH, EPOCHS, Boom, Case, fit, table

__all__ = ["fit"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[FakeTracker, FakeTracker]]]:
    """Gives a process the doubles of both packages, as if it had just begun."""
    before = dict(sys.modules)
    for kind in ("wandb._WANDB", "mlflow._MLFLOW", "mlflow._MLFLOW_SYNCHRONOUS"):
        monkeypatch.setattr(f"lightning.pytorch.loggers.{kind}_AVAILABLE", True)
    yield lambda: install(tmp_path / "trackers")
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("wandb", "mlflow"):
            del sys.modules[name]


def test_runs_of_lightnings_loggers_go_on_and_are_not_begun_anew(
    fit: Callable[..., Case], anew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GEMINI_LOG_TIME", "1")

    def loggers(**options: Any) -> list[Any]:
        return [WandbLogger(project="p", **options), MLFlowLogger("e"), CSVLogger(tmp_path, "csv")]

    anew()
    with pytest.raises(Boom):
        fit(Case, table, "gemini", CRASH, logger=loggers(), log_every_n_steps=1)
    wandb, mlflow = anew()
    fit(Case, table, "gemini", logger=loggers(), log_every_n_steps=1)
    assert set(wandb.begun()) == {"wandb-0"}
    assert set(mlflow.begun()) == {"mlflow-0"}
    for tracker in (wandb, mlflow):
        assert {line["run"] for line in tracker.told() if line["what"] == "logged"} == {f"{tracker.told()[0]['tracker']}-0"}
        assert {name for line in tracker.told() for name in line.get("names", ())} >= {"gemini/training_seconds", "gemini/goodput"}
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {f"gemini/{name}" for name in ("training_seconds", "restore_seconds", "rendezvous_seconds", "goodput", "restarts")}
    assert names <= rows[0].keys()
    assert max(float(row["gemini/restarts"]) for row in rows if row["gemini/restarts"]) == 1
    assert "continue the old one" not in caplog.text
    _, mlflow = anew()
    mlflow.begin("mine", True)
    given = WandbLogger(project="p", id="my-own")  # the script's word counts
    fit(Case, table, "gemini", logger=[given, MLFlowLogger("e", run_id="mine")], log_every_n_steps=1)
    assert given.version == "my-own"
    anew()
    early = WandbLogger(project="p")
    assert early.experiment.id not in ("wandb-0", "my-own")
    fit(Case, table, "gemini", logger=early, log_every_n_steps=1)
    assert "WandbLogger has begun run" in caplog.text


@pytest.mark.parametrize("how", ["lost", "deleted"])
def test_a_run_that_mlflow_no_longer_has_gives_way_to_a_new_one(
    fit: Callable[..., Case], anew: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    _, mlflow = anew()
    with pytest.raises(Boom):
        fit(Case, table, "gemini", CRASH, logger=MLFlowLogger("e"), log_every_n_steps=1)
    if how == "lost":  # as on a new host, whose own folder is empty
        (tmp_path / "trackers").unlink()
        mlflow.begin("of-another", True)
    else:
        mlflow.write("mlflow-0", "deleted")
    before = len(mlflow.told())
    fit(Case, table, "gemini", logger=MLFlowLogger("e"), log_every_n_steps=1)
    assert {line["run"] for line in mlflow.told()[before:]} == {"mlflow-1"}
    assert "MLflow cannot go on with run mlflow-0" in caplog.text


def trained(folder: Path, steps: int, doubles: bool = True) -> list[dict[str, Any]]:
    """Trains by transformers' Trainer with its callbacks for both trackers, and ends as a crash would after so many steps."""
    lines = install(folder / "trackers") if doubles else ()
    from huggingface_case import Texts, model
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations import MLflowCallback, WandbCallback

    from gemini_ft.huggingface import GeminiCallback

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == steps:
                raise KeyError("over")

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # without a process group
        os.environ.pop(name)
    options: dict[str, Any] = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    options |= {"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 100, "dataloader_pin_memory": False}
    options |= {"eval_strategy": "steps", "eval_steps": 2}
    callbacks = [WandbCallback(), MLflowCallback(), Ends(), GeminiCallback(on_late="wait", log_time=True)]
    trainer = Trainer(model=model(), args=TrainingArguments(**options), train_dataset=Texts(22), eval_dataset=Texts(2), callbacks=callbacks)
    with pytest.raises(KeyError, match="over"):
        trainer.train()
    assert not (doubles and {"WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"} & os.environ.keys())
    return [line for tracker in lines for line in tracker.told()]


@pytest.mark.preloaded("deepspeed", "transformers")  # one interpreter for this test and those of test_huggingface.py
def test_runs_of_transformers_callbacks_go_on_and_are_not_begun_anew(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    with World(tmp_path, GEMINI_EVENTS=str(tmp_path / "events")) as world:
        world.outcome(trained, tmp_path, 3)
        (told,) = world.outcome(trained, tmp_path, 6)
    assert {event["iteration"] for event in read_events(tmp_path / "events") if event["event"] == "validated"} == {1, 3}
    for tracker in ("wandb", "mlflow"):
        lines = [line for line in told if line["tracker"] == tracker]
        runs = [(line["run"], line["what"]) for line in lines if line["what"] != "logged"]
        assert runs == [(f"{tracker}-0", what) for what in ("begun", "continued")]
        assert {line["step"] for line in lines if line["what"] == "logged"} == {1, 2, 3, 4, 5, 6}
        assert any(name.endswith("gemini/goodput") for line in lines for name in line.get("names", ()))


def test_the_ledger_hears_of_validations_and_not_of_files(
    fit: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Validated(Case):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            time.sleep(0.05)

        def val_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(torch.zeros(4, 4), 4)  # type: ignore[arg-type]

    def files() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "files", every_n_train_steps=1, save_top_k=-1)

    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "events"))
    fit(Validated, table, "gemini", num_sanity_val_steps=1, callbacks=[files], enable_checkpointing=True)
    told = read_events(tmp_path / "events")
    validated = [event for event in told if event["event"] == "validated"]
    assert len(validated) == 1 + EPOCHS
    assert all(0.05 <= event["seconds"] < 5 for event in validated)
    assert ledgers(told)["fit-0"].seconds[Phase.VALIDATION] >= 0.05 * len(validated)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """MLflow's own server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    place = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1", *place]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # else eight further processes
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        yield f"http://{host}:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.preloaded("deepspeed", "transformers")
@pytest.mark.timeout(600)  # MLflow takes a minute to start on a busy machine
def test_runs_of_the_packages_themselves_go_on_at_mlflows_server_and_offline_at_wandb(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    environ = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    with mlflow_server(tmp_path) as address, World(tmp_path, MLFLOW_TRACKING_URI=address, **environ) as world:
        for steps in (3, 6):
            world.outcome(trained, tmp_path, steps, False)
        client = mlflow.MlflowClient(address)
        (run,) = client.search_runs(["0"])
        assert {point.step for point in client.get_metric_history(run.info.run_id, "loss")} == {1, 2, 3, 4, 5, 6}
        assert "gemini/goodput" in "".join(run.data.metrics)
    ids = [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(ids) == 2
    assert len({*ids}) == 1, "W&B takes both for parts of one run when they are synchronized"


# -- without a training


def test_the_environment_is_as_before_and_the_users_word_counts(anew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_runs() == {}
    _, mlflow = anew()
    assert open_runs() == {}
    mlflow.begin("mine", True)
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    with continued({"wandb": "one", "mlflow": "two", "another": "three"}):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"], os.environ["MLFLOW_RUN_ID"]) == ("one", "allow", "mine")
    assert os.environ.get("WANDB_RUN_ID") is None
    sys.modules["wandb"].init(id="other")  # type: ignore[attr-defined]
    sys.modules["mlflow"].start_run()  # type: ignore[attr-defined]
    assert open_runs() == {"wandb": "other", "mlflow": "mine"}
    with continued({"wandb": "one"}):
        assert "WANDB_RUN_ID" not in os.environ


def test_the_environment_names_no_run_that_mlflow_no_longer_has(anew: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, mlflow = anew()
    for run in ("known", "deleted"):
        mlflow.begin(run, True)
    mlflow.write("deleted", "deleted")
    for run in ("deleted", "lost", "known"):
        with continued({"mlflow": run}):
            assert os.environ.get("MLFLOW_RUN_ID") == ("known" if run == "known" else None)
            if run == "lost":
                assert sys.modules["mlflow"].start_run().info.run_id == "mlflow-2"  # type: ignore[attr-defined]
                anew()
    assert "run known" not in caplog.text
    assert "cannot go on with run lost" in caplog.text
    assert "cannot go on with run deleted: it was deleted" in caplog.text


def test_figures_are_asked_for_now_and_then_and_an_agent_that_is_away_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], list[str]()
    accounts: list[dict[str, Any]] = [{}, {"streams": {"other": {}}}]
    runs = [
        {"seconds": {"training": 2.0, "validation": 1.0, "replay": 1.0}, "failures": [{"count": 2}, {"count": 1}]},
        {"seconds": {"training": 0.0}, "failures": []},
        None,
    ]
    accounts += [{"streams": {"main": {"measures": {"run": run}}}} for run in runs]

    def account_of(run: str, seconds: float) -> dict[str, Any]:
        asked.append(run)
        return accounts.pop(0)

    monkeypatch.setattr(endings, "account_of", account_of)
    monkeypatch.setattr(trackers.time, "monotonic", lambda: now[0])
    figures, found = trackers.TimeFigures("r", "main"), []
    for _ in range(5):
        found.append(figures.due())
        assert figures.due() == {}
        now[0] += 31
    assert asked == ["r"] * 5
    told = {"gemini/training_seconds": 2.0, "gemini/validation_seconds": 1.0, "gemini/replay_seconds": 1.0}
    told |= {"gemini/goodput": 0.75, "gemini/restarts": 3.0}
    assert found == [{}, {}, told, {"gemini/training_seconds": 0.0, "gemini/goodput": 0.0, "gemini/restarts": 0.0}, {}]
