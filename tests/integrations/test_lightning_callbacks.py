"""Every callback that ships with Lightning: a fit that crashed in mid-epoch ends as one that did not, or it is refused by name."""

from __future__ import annotations

import copy
import csv
import datetime
import itertools
import logging
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch.callbacks as shipped
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from test_lightning_hooks import Boom, Case, fit, table, weights
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanMetric

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.lightning.trainer_checkpoints import Files
from gemini_ft.lightning.trainer_loggers import Logs

__all__ = ["fit"]  # the fixture
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The loggers you have set.*:UserWarning"),
    # Where OnExceptionCheckpoint is there, Lightning looks for its newest file.
    pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
]


class Tuned(Case):
    """Logs its loss; optimizes what is not frozen, as Lightning's finetuning callbacks ask for."""

    lr = 0.01
    batch_size = 4
    flops_per_batch = 100

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return table(self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], self.lr)


class Unseeded(Tuned):
    """Begins with other weights than the process before."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()


class Unfreeze(shipped.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer)


class Counting(shipped.LambdaCallback):
    """A function of the user's, which counts in the module."""

    def __init__(self) -> None:
        super().__init__(on_train_epoch_start=lambda trainer, module: setattr(module.backbone[2], "p", 0.1 * (1 + trainer.current_epoch)))


CRASH = (1, 5)  # late enough for a snapshot of this epoch where two batches make a step
Maker = Callable[[], Any]
SOAK = pytest.mark.soak  # these have no state that the training depends on
# Name -> how to make it, and whether it is refused.
CALLBACKS: dict[str, tuple[Maker, str]] = {
    "BackboneFinetuning": (lambda: shipped.BackboneFinetuning(1, lambda epoch: 1.5, train_bn=False), ""),
    "BaseFinetuning": (Unfreeze, ""),
    "BasePredictionWriter": (shipped.BasePredictionWriter, ""),
    "BatchSizeFinder": (shipped.BatchSizeFinder, "BatchSizeFinder trains by itself"),
    "Callback": (shipped.Callback, ""),
    "Checkpoint": (shipped.Checkpoint, ""),
    "DeviceStatsMonitor": (shipped.DeviceStatsMonitor, ""),
    "EarlyStopping": (lambda: shipped.EarlyStopping("loss", min_delta=10.0, patience=2, check_on_train_epoch_end=True), ""),
    "GradientAccumulationScheduler": (lambda: shipped.GradientAccumulationScheduler({1: 2}), ""),
    "LambdaCallback": (Counting, ""),
    "LearningRateFinder": (shipped.LearningRateFinder, "LearningRateFinder trains by itself"),
    "LearningRateMonitor": (lambda: shipped.LearningRateMonitor("step"), ""),
    "ModelCheckpoint": (lambda: shipped.ModelCheckpoint(monitor="loss", save_top_k=2, every_n_train_steps=2), ""),
    "ModelPruning": (lambda: shipped.ModelPruning("l1_unstructured", amount=0.3), ""),
    "ModelSummary": (shipped.ModelSummary, ""),
    "OnExceptionCheckpoint": (lambda: shipped.OnExceptionCheckpoint("exceptions"), ""),
    "ProgressBar": (shipped.ProgressBar, ""),
    "RichModelSummary": (shipped.RichModelSummary, ""),
    "RichProgressBar": (shipped.RichProgressBar, ""),
    "StochasticWeightAveraging": (lambda: shipped.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1), ""),
    "SpikeDetection": (shipped.SpikeDetection, "SpikeDetection does not save"),
    "ThroughputMonitor": (lambda: shipped.ThroughputMonitor(len, window_size=3), ""),
    "Timer": (lambda: shipped.Timer(datetime.timedelta(hours=1)), ""),
    "TQDMProgressBar": (shipped.TQDMProgressBar, ""),
    "EMAWeightAveraging": (lambda: shipped.EMAWeightAveraging(decay=0.8), ""),
    "WeightAveraging": (lambda: shipped.WeightAveraging(), ""),  # Lightning 2.5 has none
}
STATELESS = {"BasePredictionWriter", "Callback", "Checkpoint", "DeviceStatsMonitor", "LearningRateMonitor", "ModelSummary"}
STATELESS |= {"OnExceptionCheckpoint", "ProgressBar", "RichModelSummary", "RichProgressBar", "ThroughputMonitor", "TQDMProgressBar"}


class Scored(Tuned):
    """Trains by what its ModelCheckpoint has seen last."""

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        score = getattr(self.trainer.checkpoint_callback, "current_score", None)
        return super().changed(loss if score is None else loss * score)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SOAK if name in STATELESS else ()) for name in shipped.__all__])
def test_every_callback(name: str, fit: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, refused = CALLBACKS[name]  # a new one is to be added there
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger(tmp_path, "logs")
    options: dict[str, Any] = {"callbacks": [make], "logger": logger, "log_every_n_steps": 1, "enable_checkpointing": "Checkpoint" in name}
    options |= {"enable_progress_bar": "Bar" in name, "enable_model_summary": "Summary" in name}
    if refused:
        with pytest.raises(UnsupportedStateError, match=refused):
            fit(Tuned, None, "gemini", **options)
        return
    plain = fit(Scored, None, "ddp", **copy.deepcopy(options))
    with pytest.raises(Boom):
        fit(Scored, None, "gemini", CRASH, **copy.deepcopy(options))
    resumed = fit(Scored, None, "gemini", **copy.deepcopy(options))
    assert (1, 1) <= min(resumed.diary) <= CRASH  # in the middle of the epoch
    for step, value in resumed.diary.items():
        assert value == plain.diary[step], f"epoch and batch {step}"
    assert max(resumed.diary) == max(plain.diary)
    assert weights(resumed) == weights(plain)


class Saving(shipped.Callback):
    """Saves a part of what it keeps, or all of it, and sets the rate by all of it."""

    def __init__(self) -> None:
        self.batches, self.mean, self.seen = 0, 0.0, list(range(100))
        self.recent: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        self.mean = 0.9 * self.mean + 0.1 * self.batches
        self.recent = [*self.recent[-2:], self.batches]
        self.seen.append(self.batches)
        trainer.optimizers[0].param_groups[0]["lr"] = 0.001 * (self.mean + sum(self.recent) + self.seen[-1] - self.batches)


class Half(Saving):
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.seen = state["batches"], [*state["seen"]]


class Whole(Saving):
    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Helped(Saving):
    """Has methods for what it saves."""

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts(), "seen": self.copies["seen"]}

    def counts(self) -> list[int]:
        return [self.batches]

    @property
    def copies(self) -> dict[str, Any]:
        return {"seen": [*self.seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        [self.batches] = state["counts"]
        self.see(state["seen"])

    def see(self, seen: list[int]) -> None:
        self.seen = [*seen]


@pytest.mark.parametrize("kind", [Half, Whole, Helped])
def test_what_a_callback_keeps_beside_its_own_state_is_captured(
    kind: type[Saving], fit: Callable[..., Case], caplog: pytest.LogCaptureFixture
) -> None:
    plain = fit(Tuned, None, "ddp", callbacks=[kind])
    with caplog.at_level(logging.WARNING, "gemini_ft"):
        with pytest.raises(Boom):
            fit(Tuned, None, "gemini", CRASH, callbacks=[kind])
        assert weights(fit(Unseeded, None, "gemini", callbacks=[kind])) == weights(plain)
    assert [text for text in caplog.messages if text.startswith("callback.")] == []


def test_files_of_another_run_are_not_written_over(fit: Callable[..., Case], tmp_path: Path) -> None:
    def make() -> Any:
        return shipped.ModelCheckpoint(tmp_path / "shared", every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last="link")

    with pytest.raises(Boom):
        fit(Tuned, None, "gemini", CRASH, callbacks=[make], enable_checkpointing=True)
    steps = {int(path.stem.removeprefix("step=")) for path in (tmp_path / "shared").glob("step=*.ckpt")}
    (tmp_path / "shared" / f"step={max(steps) + 1}.ckpt").write_text("of another run")
    fit(Tuned, None, "gemini", callbacks=[make], enable_checkpointing=True)
    assert (tmp_path / "shared" / f"step={max(steps) + 1}.ckpt").read_text() == "of another run"
    versioned = {path.name for path in (tmp_path / "shared").glob("*-v*")}
    assert versioned == {f"step={max(steps) + 1}-v1.ckpt"}


class Copying(shipped.Callback):
    """Copies and pickles what hangs on the Trainer; notes what that failed with."""

    failures: ClassVar[dict[str, str]] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.note("at the start", trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.note(f"in epoch {trainer.current_epoch}", trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.note("at the end", trainer)

    def note(self, moment: str, trainer: Any) -> None:
        parts = [trainer, *(getattr(trainer, name) for name in ("strategy", "callbacks", "loggers", "fit_loop", "train_dataloader"))]
        for part, way in itertools.product(parts, (copy.deepcopy, copy.copy, pickle.dumps)):
            try:
                way(part)
            except Exception as error:
                self.failures[f"{type(part).__name__} by {way.__name__} {moment}"] = repr(error)


def test_what_hangs_on_the_trainer_is_copied_and_pickled_as_under_ddp(fit: Callable[..., Case], tmp_path: Path) -> None:
    def failures(strategy: str, crash: Any = None) -> dict[str, str]:
        Copying.failures.clear()
        callbacks = [Copying, lambda: shipped.ModelCheckpoint(tmp_path / strategy, save_top_k=-1, every_n_train_steps=1)]
        with pytest.raises(Boom) if crash else nullcontext():
            fit(Tuned, None, strategy, crash, callbacks=callbacks, logger=CSVLogger(tmp_path, strategy), enable_checkpointing=True)
        return dict(Copying.failures)

    assert failures("gemini", CRASH) == {}
    assert failures("gemini") == failures("ddp")


PRUNING: dict[str, dict[str, Any]] = {
    "without-lottery": {"pruning_fn": "l1_unstructured", "use_lottery_ticket_hypothesis": False, "amount": 3},
    "lottery-once": {"pruning_fn": "l1_unstructured", "use_lottery_ticket_hypothesis": lambda epoch: epoch == 1, "amount": 0.3},
    "resampled": {"pruning_fn": "random_unstructured", "resample_parameters": True, "make_pruning_permanent": False},
    "local": {"pruning_fn": "l1_unstructured", "use_global_unstructured": False, "amount": 1},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SOAK if name != "lottery-once" else ()) for name in PRUNING])
def test_every_way_to_prune(name: str, fit: Callable[..., Case]) -> None:
    def make() -> Any:
        return shipped.ModelPruning(**PRUNING[name])

    plain = fit(Tuned, None, "ddp", callbacks=[make])
    with pytest.raises(Boom):
        fit(Tuned, None, "gemini", CRASH, callbacks=[make])
    resumed = fit(Unseeded, None, "gemini", callbacks=[make])
    assert resumed.diary == {step: value for step, value in plain.diary.items() if step >= min(resumed.diary)}
    assert weights(resumed) == weights(plain)


class Logging(Tuned):
    """Something for every step, every epoch, and one that comes late."""

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.current_epoch:
            self.log("late", loss)
        return loss


class Killed(CSVLogger):
    """Ends as one whose process is killed."""

    def finalize(self, status: str) -> None: ...


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", [CSVLogger, Killed], ids=["failed", "killed"])
def test_a_csv_goes_on_in_its_version(kind: Any, fit: Callable[..., Case], tmp_path: Path) -> None:
    """What was logged twice is there once, and what had not reached the file is."""
    options = {"log_every_n_steps": 1}
    fit(Logging, table, "ddp", logger=CSVLogger(tmp_path, "plain", flush_logs_every_n_steps=4), **options)
    with pytest.raises(Boom):
        fit(Logging, table, "gemini", CRASH, logger=kind(tmp_path, "ours", flush_logs_every_n_steps=4), **options)
    fit(Logging, table, "gemini", logger=CSVLogger(tmp_path, "ours", flush_logs_every_n_steps=4), **options)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["version_0"]
    assert rows_of(tmp_path / "ours" / "version_0") == rows_of(tmp_path / "plain" / "version_0")


def test_rows_that_a_later_fit_had_logged_are_there_when_that_is_resumed(tmp_path: Path) -> None:
    """The fits of a script are resumed one after the other, the first at its end; a failure may come in between."""

    def started() -> tuple[CSVLogger, SimpleNamespace]:
        logger = CSVLogger(tmp_path, "log")
        return logger, SimpleNamespace(loggers=[logger], is_global_zero=True)

    def log(logger: CSVLogger, steps: range) -> None:
        for step in steps:
            logger.log_metrics({"loss": float(step)}, step)
        logger.save()

    logger, trainer = started()
    log(logger, range(3))
    first = Logs(trainer, "lightning.pytorch").state()
    log(logger, range(3, 6))
    second = Logs(trainer, "lightning.pytorch").state()
    log(logger, range(6, 7))
    for _ in range(2):
        logger, trainer = started()
        logs = Logs(trainer, "lightning.pytorch")
        logs.go_on(first, 3, is_same_launch=True)
        logs.close()
        assert [row["step"] for row in rows_of(tmp_path / "log" / "version_0")] == ["0", "1", "2"]
    logs = Logs(trainer, "lightning.pytorch")
    logs.go_on(second, 6, is_same_launch=True)
    log(logger, range(6, 8))
    logs.close()
    assert [row["step"] for row in rows_of(tmp_path / "log" / "version_0")] == [str(step) for step in range(8)]
    assert not [*tmp_path.rglob("*.aside")]
    trainer.loggers = []  # as a callback may have it at the end of a fit
    logs.close()


@pytest.mark.parametrize("launch", ["the same", "another"])
def test_folders_that_a_script_names_by_the_time_are_those_of_the_first_start(
    launch: str, fit: Callable[..., Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that starts the script anew gets other names (as from Hydra), but means the same; a user may mean another folder."""

    def run(folder: str, strategy: str, crash: Any = None) -> Case:
        path = tmp_path / folder
        best = shipped.ModelCheckpoint(path, monitor="loss", mode="max", save_top_k=3, every_n_train_steps=1, filename="{step}")
        options = {"enable_checkpointing": True, "log_every_n_steps": 1, "logger": CSVLogger(path, "log", version=folder)}
        options["logger"].log_hyperparams({"begun": "before the fit"})
        case = fit(Logging, table, strategy, crash, callbacks=[lambda: best], **options)
        options["logger"].log_hyperparams({"ended": "well"})
        return case

    def files(folder: str) -> set[str]:
        return {path.name for path in (tmp_path / folder).glob("*.ckpt")}

    run("plain", "ddp")
    monkeypatch.setenv("GEMINI_LAUNCH", "the same")
    with pytest.raises(Boom):
        run("10-30", "gemini", CRASH)
    monkeypatch.setenv("GEMINI_LAUNCH", launch)
    is_same = launch == "the same"
    with nullcontext() if is_same else pytest.warns(UserWarning, match="The dirpath has changed"):  # Lightning's
        run("10-31", "gemini")
    if not is_same:
        assert files("10-31")
        return
    assert not files("10-31")
    assert files("10-30") == files("plain")
    logs = tmp_path / "10-30" / "log" / "10-30", tmp_path / "plain" / "log" / "plain"
    assert rows_of(logs[0]) == rows_of(logs[1])
    assert len({(log / "hparams.yaml").read_text() for log in logs}) == 1


def test_tensorboard_goes_on_in_its_version(fit: Callable[..., Case], tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: pip install tensorboard"
    )
    options = {"log_every_n_steps": 1}
    fit(Logging, table, "ddp", logger=TensorBoardLogger(tmp_path, "plain"), **options)
    with pytest.raises(Boom):
        fit(Logging, table, "gemini", CRASH, logger=TensorBoardLogger(tmp_path, "ours"), **options)
    fit(Logging, table, "gemini", logger=TensorBoardLogger(tmp_path, "ours"), **options)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["version_0"]
    curves = []
    for name in ("plain", "ours"):
        events = reading.EventAccumulator(str(tmp_path / name / "version_0"))
        events.Reload()
        tags = events.Tags()["scalars"]
        curves.append({tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags})
    assert curves[0] == curves[1]


class Scheduled(Tuned):
    """With a scheduler that the callback below replaces by its own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


# How it averages, and before which batch the fit crashes. Epoch 3 computes the statistics of BatchNorm anew.
AVERAGING: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "annealing": ({"swa_epoch_start": 1, "annealing_epochs": 4}, (1, 3)),
    "linear": ({"swa_epoch_start": 2, "annealing_epochs": 4, "annealing_strategy": "linear"}, (1, 3)),
    "last-epoch": ({"swa_epoch_start": 2, "annealing_epochs": 2}, (2, 4)),
    "statistics": ({"swa_epoch_start": 2, "annealing_epochs": 2}, (3, 4)),
    "before-it-begins": ({"swa_epoch_start": 2, "annealing_epochs": 2}, (0, 4)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SOAK if name in ("last-epoch", "linear") else ()) for name in AVERAGING])
def test_averaging_goes_on_in_mid_epoch(name: str, fit: Callable[..., Case]) -> None:
    options, crash = AVERAGING[name]

    def make() -> Any:
        return shipped.StochasticWeightAveraging(0.05, **options)

    plain = fit(Scheduled, None, "ddp", callbacks=[make])
    with pytest.raises(Boom):
        fit(Scheduled, None, "gemini", crash, callbacks=[make])
    resumed = fit(Scheduled, None, "gemini", callbacks=[make])
    assert min(resumed.diary) in ({(2, 5)} if name == "statistics" else {(crash[0], batch) for batch in range(1, crash[1] + 1)})
    assert resumed.diary == {step: value for step, value in plain.diary.items() if step >= min(resumed.diary)}
    assert weights(resumed) == weights(plain)


class Stopped(Tuned):
    """Gets worse, has its rate lowered for it and is stopped, and crashes after that."""

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("loss", 1.0 + self.current_epoch)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss"}}

    def on_train_end(self) -> None:
        if self.crash is not None:
            raise Boom


def test_what_was_stopped_before_the_crash_stays_stopped(fit: Callable[..., Case]) -> None:
    def make() -> Any:
        return shipped.EarlyStopping("loss", patience=0, check_on_train_epoch_end=True)

    plain = fit(Stopped, None, "ddp", callbacks=[make])
    with pytest.raises(Boom):
        fit(Stopped, None, "gemini", (9, 9), callbacks=[make])
    resumed = fit(Stopped, None, "gemini", callbacks=[make])
    assert max(plain.diary) == (1, 5)  # of three epochs
    assert min(resumed.diary) > (1, 0)
    assert resumed.diary == {step: value for step, value in plain.diary.items() if step >= min(resumed.diary)}
    assert weights(resumed) == weights(plain)
    for of in (resumed, plain):
        assert (of.trainer.current_epoch, of.trainer.callbacks[0].stopped_epoch) == (2, 1)
        assert of.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001)


class Searched(Tuned):
    """Counts its batches; the crash comes in the search, where one of them is meant."""

    crash_in_search: int | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.max_steps == SEARCHED and self.crash_in_search == batch_idx:
            raise Boom
        return super().training_step(batch, batch_idx)


SEARCHED = 16  # steps of a search


@pytest.mark.parametrize("crash", ["in the search", "after it"])
def test_a_search_for_a_rate_is_no_training(crash: str, fit: Callable[..., Case], tmp_path: Path) -> None:
    found: list[float] = []

    def search(trainer: Any, module: Any) -> None:
        crash, module.crash = module.crash, None
        finder = Tuner(trainer).lr_find(module, num_training=SEARCHED, early_stop_threshold=None, update_attr=False)
        module.crash = crash
        module.diary.clear()
        module.lr = finder.suggestion()
        found.append(module.lr)

    def crashing() -> Case:
        module = Searched()
        module.crash_in_search = 3
        return module

    plain = fit(Searched, None, "ddp", before=search)
    with pytest.raises(Boom):
        fit(crashing if crash == "in the search" else Searched, None, "gemini", CRASH, before=search)
    resumed = fit(Searched, None, "gemini", seed=None, before=search)
    assert len({rate.hex() for rate in found}) == 1
    assert (min(resumed.diary) > (0, 5)) == (crash == "after it")
    assert resumed.diary == {step: value for step, value in plain.diary.items() if step >= min(resumed.diary)}
    assert weights(resumed) == weights(plain)


def test_a_search_for_a_batch_size_is_refused_by_lightning(fit: Callable[..., Case]) -> None:
    def search(trainer: Any, module: Any) -> None:
        Tuner(trainer).scale_batch_size(module)

    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        fit(Tuned, None, "gemini", before=search)


class Keeping(shipped.Callback):
    """An average of the weights, as users write it: in a mapping of its own, in a copy of the module, and a metric."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.teacher = nn.Linear(8, 4)
        self.seen = MeanMetric()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.seen.update(outputs["loss"].detach())
        pl_module.head.bias.grad = None
        with trainer.strategy.checkpointer.mutate() if hasattr(trainer.strategy, "checkpointer") else nullcontext(), torch.no_grad():
            pl_module.head.bias.add_(self.seen.compute() * 1e-3)
            for name, param in pl_module.named_parameters():
                self.shadow.setdefault(name, torch.zeros(400, 400))[0, 0].lerp_(param.flatten()[0], 0.1)
            self.teacher.weight.lerp_(pl_module.head.weight, 0.1)


def slowing() -> shipped.Callback:
    """One of Lightning's callbacks with a function of the script's, which draws."""
    drawn = random.Random(3)

    def slow(trainer: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * drawn.random()

    return shipped.LambdaCallback(on_train_batch_end=slow)


def test_what_callbacks_keep_is_named_or_captured(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    plain = fit(Tuned, None, "ddp", callbacks=[Keeping, slowing])
    with caplog.at_level(logging.WARNING), pytest.raises(Boom):
        fit(Tuned, None, "gemini", CRASH, callbacks=[Keeping, slowing])
    said = [record.getMessage() for record in caplog.records if "will not be restored" in record.getMessage()]
    assert [text.partition(" changed")[0] for text in said] == ["callback.0.shadow, callback.0.teacher"]
    assert weights(fit(Tuned, None, "gemini", callbacks=[Keeping, slowing])) == weights(plain)  # metric and generator are captured


def _itself(what: Any, *_: Any, **__: Any) -> Any:
    return what


def test_files_of_an_attempt_that_came_to_no_commit_are_written_over(tmp_path: Path) -> None:
    """By the next attempt of its launch; not by another launch, and not where that fit has ended well, had a commit that is lost now, or
    goes on from a file. What a fit that goes on had written after its snapshot is written over in any case."""
    callback, path = shipped.ModelCheckpoint(tmp_path / "files"), tmp_path / "files" / "step=1.ckpt"
    path.parent.mkdir()
    trainer: Any = SimpleNamespace(
        checkpoint_callbacks=[callback], is_global_zero=True, strategy=SimpleNamespace(broadcast=_itself, reduce_boolean_decision=_itself)
    )

    def is_seen(launch: str, *, commits: bool = False, saved: dict[str, list[str]] | None = None) -> bool:
        files = Files(trainer)
        files.begin(saved, tmp_path / "note", launch)
        seen = callback.file_exists(str(path), trainer)
        path.touch()
        files.writes(path)
        files.end()
        if commits:
            files.keep()
        return seen

    assert [is_seen(launch) for launch in ("one", "one", "two")] == [False, False, True]
    assert [is_seen("two", commits=True), is_seen("two")] == [False, True]
    assert [is_seen("two", commits=True), is_seen("two", saved={str(path.parent): []})] == [False, False]
    assert [is_seen(""), is_seen("")] == [True, True]
