"""What hooks set, shards that are taken in turn, and metrics with attributes: a fit that crashed in mid-epoch ends as one that did not."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from test_lightning_zoo import Counting, Told
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric, MetricTracker, MinMaxMetric, RunningMean

import gemini_ft.lightning
from gemini_ft.agent import lifecycle
from gemini_ft.errors import StateError, UnsupportedStateError

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning"),
]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
EPOCHS, CRASH = 3, (1, 3)  # before that batch of that epoch


class Boom(Exception):
    """The crash of these tests."""


diaries: weakref.WeakKeyDictionary[Case, dict[tuple[int, int], str]] = weakref.WeakKeyDictionary()  # an attribute would be restored


class Case(LightningModule):
    """A frozen backbone, a head, and a diary of all losses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Linear(8, 4)
        self.crash: tuple[int, int] | None = None

    @property
    def diary(self) -> dict[tuple[int, int], str]:
        """The losses of this process alone, by epoch and batch."""
        return diaries.setdefault(self, {})

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.crash == (self.current_epoch, batch_idx):
            raise Boom
        if batch.dim() == 1:  # of a loader that gives single numbers
            batch = batch.sum().expand(4, 4)
        loss = (self.head(self.backbone(batch.float())) - batch).square().mean()
        loss = self.changed(loss)
        self.diary[self.current_epoch, batch_idx] = f"{batch.sum().item().hex()} {loss.item().hex()}"
        return loss

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Table(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 4) * (index + 1) / 24


def table(batch_size: int = 4) -> DataLoader[torch.Tensor]:
    return DataLoader(Table(), batch_size, shuffle=True)


class InTurns(Case):
    """Two optimizers, one of which accumulates while the other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for every, optimizer in zip((2, 5), optimizers, strict=True):
            if self.trainer.fit_loop.total_batch_idx % every == 1:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.backbone.parameters(), 0.05), torch.optim.SGD(self.head.parameters(), 0.05)


class TakingTwo(Case):
    """Takes its batches itself, two for the first step of an epoch, whose end lowers the rate."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        if batch_idx == 0:
            more, batch_idx, _ = next(dataloader_iter)
            batch = torch.cat([batch, more])
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.diary[self.current_epoch, 10 + self.trainer.fit_loop.batch_idx] = f"begun with {batch_idx}"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Unfreezing(Case):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch > 0)


class Resting(Case):
    def on_train_epoch_start(self) -> None:
        self.backbone.train(self.current_epoch == 0)


class Telling(Case):
    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)


class Remaking(Case):
    """Makes the data of each epoch anew, and more of it than would be kept."""

    def on_train_epoch_start(self) -> None:
        generator = torch.Generator().manual_seed(self.current_epoch)
        self.trainer.train_dataloader.dataset.data = torch.randn(24, 4, 1000, generator=generator)


class Remade(Table):
    data = torch.zeros(24, 4, 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index].mean(1)


class Annealing(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.backbone[2].p = 0.1 + 0.2 * trainer.current_epoch


class Weighing(Callback):
    """Keeps a number of its own from step to step."""

    def __init__(self) -> None:
        self.weight = 1.0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weight *= 0.9
        module.head.bias.grad = None
        with trainer.strategy.checkpointer.mutate() if hasattr(trainer.strategy, "checkpointer") else torch.no_grad(), torch.no_grad():
            module.head.bias.mul_(self.weight)


class Options(dict[str, Any]):
    """A dict with a class of its own, as configurations are."""


@dataclass(slots=True)
class Gain:
    value: float = 1.0


class Averaging(Case):
    """An average that is neither a buffer nor in any state dict, a history of it, and a buffer that comes and grows.

    Under names with an underscore, in objects with slots, in a dict of a class of its own and in hyperparameters, too.
    """

    seen: torch.Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.average = torch.zeros(())
        self._history: list[float] = []
        self.gain, self.options = Gain(), Options(scale=1.0)

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.average = self.hparams["decay"] * self.average + 0.1 * loss.detach()
        self.hparams["decay"] *= 0.9
        self._history = [*self._history, self.average.item()][-5:]
        self.gain.value *= 0.9
        self.options["scale"] *= 0.8
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(0))
        self.seen = torch.cat([self.seen, loss.detach().view(1)])[-8:]
        return loss * (1 + self.average) * self.gain.value * self.options["scale"] + sum(self._history) + self.seen.sum()


OURS = np.random.default_rng(5)


class Scripted(Case):
    """Draws from a generator of the script's, and follows schedulers of its own, of which Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        OURS.bit_generator.state = np.random.default_rng(5).bit_generator.state

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingWarmRestarts(optimizer, 3)]
        self.rates = [SequentialLR(optimizer, parts, [4]), ReduceLROnPlateau(optimizer, patience=1)]
        return optimizer

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.rates[0].step()
        self.rates[1].step(loss.item())
        return loss * OURS.random()


class ByHand(Case):
    """Goes over to manual optimization in the second epoch."""

    def on_train_epoch_start(self) -> None:
        self.automatic_optimization = self.current_epoch == 0

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss * 3 + self.head.weight.sum())
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Setting(Case):
    """Changes settings of the Trainer, and keeps a number there."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.gradient_clip_val = 0.01
            self.trainer.fit_loop.max_epochs = EPOCHS + 1

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("loss", loss)
        self.trainer.weight = 0.9 * getattr(self.trainer, "weight", 1.0)  # type: ignore[attr-defined]
        return loss * self.trainer.weight  # type: ignore[attr-defined, no-any-return]


class Growing(Case):
    """Doubles its batches, by loaders that are made anew in each epoch."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return table(self.batch_size)

    def on_train_epoch_end(self) -> None:
        self.batch_size *= 2


class Restarting(Case):
    """Begins the second epoch with fresh moments."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [self.configure_optimizers()]


class Metrics(Case):
    """Metrics with attributes that are no metric states."""

    def __init__(self) -> None:
        super().__init__()
        self.extremes = MinMaxMetric(MeanMetric())
        self.running = RunningMean(3)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        for metric in (self.extremes, self.running, self.tracker):
            metric.update(loss.detach())
        self.log("running", self.running, on_step=True, on_epoch=True)
        values = [*self.extremes.compute().values(), self.running.compute(), *self.tracker.compute_all()]
        return loss + torch.stack([torch.as_tensor(value) for value in values]).sum()


class Shards(LightningDataModule):
    """Gives another shard each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(Shard(self.asked), 4, shuffle=True)


class Shard(Table):
    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.number


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Case]]:
    run, environment = f"hooks-{os.getpid()}-{tmp_path.name}", dict(os.environ)
    for name, value in {"RUN_ID": run, "ON_LATE": "wait", "LINGER": "60"}.items():
        monkeypatch.setenv(f"GEMINI_{name}", value)

    def start(
        make: Callable[[], Case], data: Callable[[], Any] | None, strategy: str, crash: Any = None, seed: int | None = 99, **options: Any
    ) -> Case:
        monkeypatch.setattr("gemini_ft.worker.attempt.named", Counter())
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        callbacks = [callback() for callback in options.pop("callbacks", [])]
        strategy_options, before = options.pop("strategy_options", {}), options.pop("before", None)
        module = make()
        module.crash = crash
        if strategy == "gemini" and crash is None and seed is not None:  # the resumed process is another one
            torch.manual_seed(seed)
            random.seed(seed)
        trainer = Trainer(
            strategy=gemini_ft.lightning.GeminiStrategy(**strategy_options) if strategy == "gemini" else strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            default_root_dir=tmp_path,
            callbacks=callbacks,
            **QUIET | options,
        )
        if before is not None:
            before(trainer, module)
        trainer.fit(module, data() if data else None)
        return module

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    lifecycle.job_finished(run, stores=False)


def weights(module: nn.Module) -> list[str]:
    return [value.hex() for tensor in module.state_dict().values() for value in tensor.double().flatten().tolist()]


CASES: dict[str, tuple[Callable[[], Case], Callable[[], Any] | None, dict[str, Any]]] = {
    "in-turns": (InTurns, table, {}),
    "batches-by-itself": (TakingTwo, lambda: table(3), {}),
    "unfrozen": (Unfreezing, table, {}),
    "resting": (Resting, table, {}),
    "told": (Telling, lambda: DataLoader(Told(), 4, shuffle=True), {}),
    "callback-sets-a-rate": (Case, table, {"callbacks": [Annealing]}),
    "callback-counts": (Case, table, {"callbacks": [Weighing]}),
    "attributes": (Averaging, table, {}),
    "scripted": (Scripted, table, {}),
    "settings": (Setting, table, {"gradient_clip_val": 1.0}),
    "batch-size": (Growing, None, {"reload_dataloaders_every_n_epochs": 1}),
    "shards": (Case, Shards, {"reload_dataloaders_every_n_epochs": 1}),
    "optimizer-made-anew": (Restarting, table, {}),
    "metrics": (Metrics, table, {}),
    "own-state-unsized": (Case, Counting, {}),
    "rerun": (Remaking, lambda: DataLoader(Remade(), 4, shuffle=True), {"strategy_options": {"epoch_hooks": "rerun"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_with_the_bits_of_an_undisturbed_fit(name: str, fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    make, data, options = CASES[name]
    plain = fit(make, data, "ddp", **{key: value for key, value in options.items() if key != "strategy_options"})
    with pytest.raises(Boom):
        fit(make, data, "gemini", CRASH, **options)
    resumed = fit(make, data, "gemini", **options)
    assert [text for text in caplog.messages if text.startswith("trainer.")] == []
    assert min(resumed.diary) in ((1, 1), (1, 2), (1, 3))  # in the middle of the epoch
    for step, value in resumed.diary.items():
        assert value == plain.diary[step], f"epoch and batch {step}"
    assert max(resumed.diary) == max(plain.diary)
    assert weights(resumed) == weights(plain)


class Doubling(Case):
    """Its batches grow with each epoch, in a loader that stays."""

    def on_train_epoch_end(self) -> None:
        self.trainer.train_dataloader.batch_sampler.batch_size *= 2


def test_batches_are_counted_as_when_their_loader_was_made(fit: Callable[..., Case]) -> None:
    """Lightning counts them once, and validates after so many."""
    plain = fit(Doubling, table, "ddp")
    with pytest.raises(Boom):
        fit(Doubling, table, "gemini", (1, 2))
    resumed = fit(Doubling, table, "gemini")
    assert (resumed.trainer.num_training_batches, resumed.trainer.val_check_batch) == (6, 6)
    assert (plain.trainer.num_training_batches, plain.trainer.val_check_batch) == (6, 6)
    assert weights(resumed) == weights(plain)


def test_settings_that_a_restarted_script_gives_anew_stay(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Boom):
        fit(Setting, table, "gemini", CRASH, gradient_clip_val=1.0)
    resumed = fit(Setting, table, "gemini", gradient_clip_val=5.0, before=lambda trainer, _: setattr(trainer.fit_loop, "max_epochs", 7))
    assert max(resumed.diary) == (6, 5)
    assert resumed.trainer.gradient_clip_val == 5.0
    named = [text for text in caplog.messages if text.startswith("trainer.")]
    assert [text.partition(", which")[0] for text in named] == [
        "trainer.gradient_clip_val stays at 5.0",
        "trainer.fit_loop.max_epochs stays at 7",
    ]
    assert resumed.trainer.weight == pytest.approx(0.9**42)  # type: ignore[attr-defined]  # what the script keeps there goes on


def test_what_epochs_leave_in_the_data_is_refused_without_rerun(fit: Callable[..., Case]) -> None:
    make, data, _ = CASES["rerun"]
    with pytest.raises(UnsupportedStateError, match=r"dataset\.data changed since the first epoch began"):
        fit(make, data, "gemini")


def test_another_optimizer_is_refused_when_it_comes(fit: Callable[..., Case]) -> None:
    class Switching(Case):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(UnsupportedStateError, match=r"strategy\.optimizers was replaced .* Return all that are used from configure_optim"):
        fit(Switching, table, "gemini")


def test_a_module_that_has_gone_over_to_manual_optimization_goes_on_by_hand(fit: Callable[..., Case]) -> None:
    """Lightning counts those steps from 0: there are snapshots once they are more than the ones before, and none is waited for."""
    plain = fit(ByHand, table, "ddp")
    with pytest.raises(Boom):
        fit(ByHand, table, "gemini", (2, 3))
    resumed = fit(ByHand, table, "gemini")
    assert min(resumed.diary) > (2, 0)
    assert resumed.diary.items() <= plain.diary.items()
    assert weights(resumed) == weights(plain)


class Uncounted(Case):
    """Steps with an optimizer that Lightning has not wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def changed(self, loss: torch.Tensor) -> torch.Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_steps_that_lightning_does_not_count_are_named(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    for kind in (Uncounted, InTurns):
        fit(kind, table, "gemini")
    assert [text.partition(",")[0] for text in caplog.messages if "global_step" in text] == [
        "optimizers have made 10 steps that trainer.global_step has not counted"
    ]


class Hiding(Case):
    """Steps with an optimizer that Lightning does not know."""

    hidden: type[torch.optim.Optimizer] = torch.optim.Adam

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.other = self.hidden(self.head.parameters(), 0.01)  # type: ignore[call-arg]
        return torch.optim.SGD(self.backbone.parameters(), 0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        self.other.step()


class Temporary(Hiding):
    """Makes one for a single step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.other = self.hidden(self.head.parameters(), 0.0)  # type: ignore[call-arg]
        self.other.step()
        del self.other


class WithoutState(Hiding):
    hidden = torch.optim.SGD


class LooksOnly(torch.optim.SGD):
    """Has an empty dict for each parameter."""

    def step(self, closure: Any = None) -> Any:
        assert not any(self.state[param] for group in self.param_groups for param in group["params"])
        return super().step(closure)


class WithEmptyState(Hiding):
    hidden = LooksOnly


class Saving(Hiding):
    """Saves the optimizer itself."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["other"] = self.other.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.other.load_state_dict(checkpoint["other"])


def test_an_optimizer_that_lightning_does_not_know_is_named_if_it_has_a_state(
    fit: Callable[..., Case], caplog: pytest.LogCaptureFixture
) -> None:
    fit(Hiding, table, "gemini")
    named = [text for text in caplog.messages if "was not given has stepped, a Adam" in text]
    assert ["return it from Lightning's configure_optimizers" in text for text in named] == [True]


def test_an_optimizer_that_the_script_saves_itself_goes_on(fit: Callable[..., Case]) -> None:
    plain = fit(Saving, table, "ddp")
    with pytest.raises(Boom):
        fit(Saving, table, "gemini", CRASH)
    assert weights(fit(Saving, table, "gemini")) == weights(plain)


@pytest.mark.parametrize("kind", [Temporary, WithoutState, WithEmptyState])
def test_an_optimizer_that_leaves_nothing_behind_may_step(
    kind: Callable[[], Case], fit: Callable[..., Case], caplog: pytest.LogCaptureFixture
) -> None:
    assert weights(fit(kind, table, "gemini", seed=None)) == weights(fit(kind, table, "ddp"))
    assert not [text for text in caplog.messages if "was not given" in text]


def test_attributes_that_are_not_kept_are_named_once(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    class Gathering(Case):
        def changed(self, loss: torch.Tensor) -> torch.Tensor:
            self.outputs = [torch.zeros(10**6)]
            return loss

    with caplog.at_level(logging.WARNING):
        fit(Gathering, table, "gemini")
    said = [record.getMessage() for record in caplog.records if "will not be restored" in record.getMessage()]
    assert [text.partition(" changed")[0] for text in said] == ["module.outputs"]


class Asked(Metrics):
    """Asks for the census in mid-epoch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if (self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx) == (1, 2):
            found = self.trainer.strategy.checkpointer.census.take()
            self.census = {item.where: (str(item.rule.fate), item.note) for item in found}


def test_the_census_of_a_trainer(fit: Callable[..., Case], tmp_path: Path) -> None:
    """Everything that hangs on it is in it."""
    callbacks = [Annealing, lambda: EarlyStopping("running", patience=9, check_on_train_epoch_end=True)]
    module = fit(Asked, Shards, "gemini", callbacks=callbacks, logger=CSVLogger(tmp_path), reload_dataloaders_every_n_epochs=1)
    expected = {
        "model": ("captured", "9 tensors of Asked"),
        "optim0": ("captured", "18 tensors of AdamW"),
        "trainer": ("captured", "0 schedulers"),
        "train_dataloader[0]": ("captured", "ResumableDataLoader, by skip"),
        "extremes": ("captured", "MinMaxMetric"),
        "running": ("captured", "RunningMean"),
        "tracker.1": ("captured", "MeanMetric"),
        "callback.0": ("derived", "Annealing"),
        "callback.1": ("captured", "EarlyStopping"),
        "logger.0": ("captured", "CSVLogger"),
        "flags": ("captured", "0 parameters frozen, 0 of 14 modules in eval mode"),
        "module.backbone.2.p": ("captured", "float"),
        "datamodule.asked": ("captured", "int"),
    }
    assert {where: module.census.get(where) for where in expected} == expected
    loader = pickle.loads(pickle.dumps(module.trainer.train_dataloader))  # a fit leaves nothing that stands in the way of torch.save
    assert type(loader) is DataLoader
    assert "dataloader" not in vars(module.trainer.fit_loop._data_source)


def test_a_loader_of_another_length_is_refused(fit: Callable[..., Case]) -> None:
    with pytest.raises(Boom):
        fit(Case, table, "gemini", CRASH)
    with pytest.raises(RuntimeError) as caught:  # Lightning fails once more when it tears down
        fit(Case, lambda: DataLoader(TensorDataset(torch.zeros(20, 4)), 4, shuffle=True), "gemini")
    assert isinstance(caught.value.__context__, StateError)
    assert "is of another loader: the number of batches was 6 and is 5; the length of the dataset was 24 and is 20" in str(
        caught.value.__context__
    )


class Given(Case):
    """Its script says what the optimizer and the scheduler get, and keeps a hyperparameter."""

    def __init__(self, rate: float = 0.01, gamma: float = 0.5, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters("depth")
        self.rate, self.gamma = rate, gamma

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)]


def test_changed_hyperparameters_are_named_at_every_resume(fit: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if "HYPERPARAMETERS" in record.getMessage()]
        caplog.clear()
        return texts

    with caplog.at_level(logging.WARNING):
        with pytest.raises(Boom):
            fit(Given, table, "gemini", CRASH)
        with pytest.raises(Boom):
            fit(Given, table, "gemini", (1, 5))  # the schedule has changed the rate, and the script has not
        assert said() == []
        for crash in ((2, 3), None):
            with pytest.raises(Boom) if crash else contextlib.nullcontext():
                resumed = fit(lambda: Given(0.3, 0.7, 3), table, "gemini", crash)
            (text,) = said()
            assert "the snapshot's stay in force (lr of optim0 (SGD): 0.01 -> 0.3; " in text
            assert "gamma of scheduler 0 (StepLR): 0.5 -> 0.7" in text
            assert "the script's are in force (depth of Given: 2 -> 3)" in text
            assert "start with GEMINI_RESUME=never or another GEMINI_RUN_ID" in text
    assert resumed.trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**EPOCHS


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_fabric_without_a_loader_in_its_state_is_told_so(is_loaded: bool, fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric(strategy="gemini", accelerator="cpu", devices=1)
    fabric.launch()
    linear = nn.Linear(2, 2)
    model, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), 0.1))
    if is_loaded:
        fabric.strategy.protect({"model": model, "optimizer": optimizer})
    for _ in range(20):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    (text,) = [text for record in caplog.records if "fabric.strategy.protect(state)" in (text := record.getMessage())]
    assert ("no snapshot was taken in 8 steps" if is_loaded else "NOTHING IS PROTECTED") in text
    fabric.strategy.close()


class Saves:
    """Counts the snapshots that it is asked for its state by."""

    def __init__(self) -> None:
        self.count = 0
        self.at: Callable[[], object] = lambda: None  # called at each

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        self.at()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loop:
    """A loop of Fabric with two models, which are in other modes, or gradients, when it asks for batches than when it steps."""

    def __init__(self, **loaders: Any) -> None:
        self.fabric: Any = Fabric(strategy="gemini", accelerator="cpu", devices=1)
        self.fabric.launch()
        nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
        both = [self.fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
        self.models, self.optimizers = [model for model, _ in both], [optimizer for _, optimizer in both]
        self.saves = Saves()
        self.state: dict[str, Any] = {name: self.fabric.setup_dataloaders(loader) for name, loader in loaders.items()}
        for number in range(2):
            self.state |= {f"model{number}": self.models[number], f"optimizer{number}": self.optimizers[number]}
        self.state["saves"] = self.saves
        self.fabric.strategy.protect(self.state)

    def train(self, mode: bool) -> None:
        for model in self.models:
            model.train(mode)

    def step(self, number: int, batch: torch.Tensor) -> None:
        self.fabric.backward(self.models[number](batch.float()).sum())
        self.optimizers[number].step()

    def evaluate(self, name: str) -> None:
        self.train(False)
        with torch.no_grad():
            for batch in self.state[name]:
                self.models[0](batch.float())

    def usual(self, batch: torch.Tensor) -> None:
        self.step(0, batch)

    def evaluated(self, batch: torch.Tensor) -> None:
        self.train(True)
        self.step(0, batch)
        self.evaluate("other")

    def evaluated_first(self, batch: torch.Tensor) -> None:
        self.evaluate("other")
        self.train(True)
        self.step(0, batch)
        self.train(False)

    def without_gradients(self, batch: torch.Tensor) -> None:
        with torch.enable_grad():
            self.step(0, batch)

    def adversarial(self, batch: torch.Tensor) -> None:
        for number in range(2):
            self.models[number].eval()
            self.step(1 - number, batch)
            self.models[number].train()


@pytest.mark.parametrize("step", [Loop.usual, Loop.evaluated, Loop.evaluated_first, Loop.without_gradients, Loop.adversarial])
def test_a_loop_of_fabric_in_any_mode_gets_a_snapshot_of_each_step(step: Any, fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(loader=table(), other=table(), later=table(8))
    loop.train(step not in (Loop.evaluated, Loop.evaluated_first))
    with torch.set_grad_enabled(step is not Loop.without_gradients):
        for epoch in range(2):
            for batch in loop.state["loader"]:
                step(loop, batch)
            assert loop.saves.count == 6 * (epoch + 1)
        for batch in loop.state["later"]:
            step(loop, batch)
    loop.fabric.strategy.close()
    assert loop.saves.count == 12 + 3
    assert not any("no snapshot was taken" in text for text in caplog.messages)


@pytest.mark.parametrize("is_zipped", [False, True])
def test_a_loop_of_fabric_over_two_loaders_has_both_where_its_step_has_ended(is_zipped: bool, fit: Any) -> None:
    loop = Loop(one=table(), two=table(), other=table())
    taken, found = Counter[str](), list[tuple[int, int]]()

    def counted(name: str) -> Iterator[torch.Tensor]:
        for batch in loop.state[name]:
            taken[name] += 1
            yield batch

    loop.saves.at = lambda: found.append((taken["one"], taken["two"]))
    loop.evaluate("other")
    two = counted("two")
    for batch, _ in zip(counted("one"), two, strict=False) if is_zipped else ((batch, None) for batch in counted("one")):
        loop.train(True)
        if not is_zipped:
            next(two)
        loop.step(0, batch)
        loop.evaluate("other")
    loop.fabric.strategy.close()
    assert found[:5] == [(step, step) for step in range(1, 6)]


def test_fabric_keeps_no_loader_that_the_script_has_left(fit: Any) -> None:
    loop, data = Loop(), []
    for _ in range(3):
        loop.state["loader"] = loop.fabric.setup_dataloaders(table())
        data.append(weakref.ref(loop.state["loader"].dataset))
        for batch in loop.state["loader"]:
            loop.usual(batch)
    gc.collect()
    loop.fabric.strategy.close()
    assert loop.saves.count == 18
    assert [there() is not None for there in data] == [False, False, True]


@pytest.mark.parametrize("is_given", [False, True])
def test_an_optimizer_that_fabric_was_not_given_is_named(is_given: bool, fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric(strategy="gemini", accelerator="cpu", devices=1)
    fabric.launch()
    linear = nn.Linear(4, 4)
    model, optimizer = fabric.setup(linear, torch.optim.SGD([linear.weight], 0.1))
    other, loader = torch.optim.Adam([linear.bias], 0.1), fabric.setup_dataloaders(table())
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    fabric.strategy.protect(state | {"other": other} if is_given else state)
    for batch in loader:
        fabric.backward(model(batch).sum())
        optimizer.step()
        other.step()
    fabric.strategy.close()
    named = [text for text in caplog.messages if "was not given has stepped, a Adam" in text]
    assert ["put it into the state of Fabric" in text for text in named] == [True] * (not is_given)


class Damping:
    """A callback of Fabric on which the loss depends."""

    def __init__(self) -> None:
        self.factor, self.generator = 1.0, torch.Generator()

    def on_batch(self) -> None:
        self.factor *= 0.9 + 0.01 * float(torch.rand((), generator=self.generator))


def test_what_a_loop_of_fabric_keeps_beside_its_state_is_named(fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    damping = Damping()
    fabric = Fabric(strategy="gemini", accelerator="cpu", devices=1, callbacks=[damping, Damping()])
    fabric.launch()
    linear = nn.Linear(4, 4)
    model, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), 0.1))
    loader: Any = fabric.setup_dataloaders(table())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9) for _ in range(2)]
    generator, baseline = torch.Generator(), 1.0
    state = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": schedulers[0], "step": 0, "losses": []}
    fabric.strategy.protect(state)
    for _, batch in enumerate(loader):
        fabric.call("on_batch")
        loss = model(batch + torch.randn(4, generator=generator)).sum() * baseline * damping.factor
        fabric.backward(loss)
        optimizer.step()
        baseline *= 0.9
        state["step"] += 1
        state["losses"].append(loss.item())
    fabric.strategy.close()
    said = [record.getMessage() for record in caplog.records if "in no snapshot" in record.getMessage()]
    assert [text.split(":")[0] for text in said] == [
        "this script has a ExponentialLR that is in no snapshot",
        "this loop draws from the generator callbacks.1.generator, damping.generator, generator, which is in no snapshot",
    ]
    told = "this script changes baseline, callbacks.1.factor, damping.factor while it trains, which no snapshot has"
    assert any(told in record.getMessage() for record in caplog.records)
    assert sum("by enumerate(loader)" in text and "count in the state that is protected" in text for text in caplog.messages) == 1
