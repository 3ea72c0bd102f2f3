"""What ranks send each other when Lightning wraps the model: nothing that the snapshot is about to replace."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from rank_kit import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from gemini_ft.testing import digest

LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


class Interrupted(Exception):
    """The end of an attempt."""


def fit(until: int, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Whether DDP sent the weights round, and what they were before the first step and when a failure ended the attempt."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    wrap, given, begun = DistributedDataParallel.__init__, list[bool](), list[str]()

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        given.append(kwargs.get("init_sync", True))
        wrap(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(int(os.environ["RANK"]) + os.getpid())  # no two are alike
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            self.register_buffer("noise", torch.randn(5), persistent=False)

        def on_train_start(self) -> None:
            begun.append(self.now())  # not on the module, where a resume would put back what was there

        def now(self) -> str:
            return digest({**dict(self.named_parameters()), **dict(self.named_buffers())})

        def on_train_batch_start(self, batch: torch.Tensor, _: int) -> None:
            if self.global_step == until:  # before the forward pass, in which DDP gives all ranks the buffers of rank 0
                self.trainer.strategy.checkpointer.flush()
                raise Interrupted

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module = Module()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="gemini", max_steps=20, default_root_dir=folder, **options)
    with contextlib.suppress(Interrupted):
        trainer.fit(module, DataLoader(torch.linspace(-1, 1, 1600).view(400, 4) ** 3, batch_size=2), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(f"{folder}/{until}.ckpt")
    return {"sent": given, "begin": begun[0], "end": module.now()}


def test_weights_that_are_about_to_be_restored_are_not_sent_first(tmp_path: Path) -> None:
    with World(tmp_path, hosts=["host0", "host0"], GEMINI_ON_LATE="wait", **LAUNCHED) as world:
        first = world.outcome(fit, 3, str(tmp_path))
        assert [said["sent"] for said in first] == [[True]] * 2
        assert first[0]["begin"] == first[1]["begin"]
        second = world.outcome(fit, 5, str(tmp_path))
        assert [said["sent"] for said in second] == [[False]] * 2
        assert [said["begin"] for said in second] == [said["end"] for said in first]  # buffers that are in no checkpoint, too
        newer = torch.load(tmp_path / "3.ckpt", weights_only=False) | {"global_step": 100}
        torch.save(newer, tmp_path / "newer.ckpt")
        third = world.outcome(fit, 6, str(tmp_path), f"{tmp_path}/newer.ckpt")
        assert [said["sent"] for said in third] == [[False]] * 2
        assert third[0]["begin"] == third[1]["begin"]  # the file lacks a buffer, which is sent after all
        assert third[0]["begin"] != second[0]["end"]
