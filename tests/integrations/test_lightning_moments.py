"""Drills may strike at Lightning's epochs and validations."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gemini_ft.faults import inject as faults
from gemini_ft.lightning.callbacks import watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def trainer_and_module(package: str) -> tuple[Any, Any]:
    lightning: Any = importlib.import_module(package)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, log_every_n_steps=1, num_sanity_val_steps=0, **options)
    return trainer, Module()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_tells_of_its_moments(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    monkeypatch.setenv("GEMINI_FAULTS", "step=1:rank=0:moment=epoch_end:sigkill")
    monkeypatch.setattr(faults, "at_step", lambda iteration, moment: seen.append((iteration, moment)))
    trainer, module = trainer_and_module(package)
    watch(trainer, package)
    watch(trainer, package)  # a second fit of the same trainer
    data = DataLoader(torch.ones(6, 2), batch_size=2)
    trainer.fit(module, data, data)
    epochs = [(0, "epoch_start"), (3, "validation_start"), (3, "validation_end"), (3, "epoch_end")]
    assert seen == [*epochs, *((iteration + 3, moment) for iteration, moment in epochs)]


def test_without_faults_the_trainer_is_left_alone() -> None:
    trainer, _ = trainer_and_module("lightning.pytorch")
    before = list(trainer.callbacks)
    watch(trainer, "lightning.pytorch")
    assert trainer.callbacks == before
