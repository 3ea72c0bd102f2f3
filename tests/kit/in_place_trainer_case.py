"""As in_place_case.py, by Lightning's Trainer or by Fabric: KEEPER is "trainer-" or "fabric-", and a strategy.

It is a file of its own since launchers import ahead what a script names.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from in_place_case import FOLDER, KEEPER, STEPS, main, network, reached, whole
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from gemini_ft.testing import digest


class Module(L.LightningModule):
    """Notes each of its losses."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self.net, self.trace = network(), trace

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        reached(self.trainer.global_step, self.net)
        print("step", self.trainer.global_step, float(loss.item()).hex(), file=self.trace)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("valid", self.net(batch[0]).square().mean())

    def configure_model(self) -> None:
        if "fsdp2" in KEEPER and not any(isinstance(param, DTensor) for param in self.parameters()):
            mesh: Any = self.device_mesh
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


class Hooks(L.Callback):
    """Fails in hooks."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        reached("setup")

    def on_validation_batch_start(self, *arguments: Any) -> None:
        reached("validation")

    def on_save_checkpoint(self, *arguments: Any) -> None:
        reached("saving")

    def on_train_epoch_end(self, *arguments: Any) -> None:
        reached("epoch")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        reached("teardown")


def fit() -> None:
    """Trains by Lightning's Trainer."""
    L.seed_everything(3)
    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        module, loader = Module(trace), DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1)
        checkpoints, logger = (
            ModelCheckpoint(f"{FOLDER}/checkpoints", save_top_k=-1),
            CSVLogger(FOLDER, name="csv", flush_logs_every_n_steps=1),
        )
        strategy: Any = KEEPER.removeprefix("trainer-")
        if strategy == "fsdp2":
            strategy = ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        options: dict[str, Any] = {"strategy": strategy, "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"])}
        trainer = L.Trainer(max_epochs=4, logger=logger, callbacks=[checkpoints, Hooks()], **options, **quiet)
        trainer.fit(module, loader, DataLoader(TensorDataset(torch.ones(2, 8)), 2))
        final = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)


def fabric() -> None:
    """Trains by Fabric."""
    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        fabric = Fabric(strategy=KEEPER.removeprefix("fabric-"), accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
        fabric.launch()
        fabric.seed_everything(3)
        net = network()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader: Any = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "step": 0}
        strategy: Any = fabric.strategy
        if "gemini" in KEEPER:
            strategy.protect(state)
        while state["epoch"] < 4:
            loader.sampler.set_epoch(state["epoch"])
            for batch in loader:
                loss = model(batch[0]).square().mean()
                fabric.backward(loss)
                reached(state["step"], model)
                optimizer.step()
                optimizer.zero_grad()
                print("step", state["step"], loss.item().hex(), file=trace)
                state["step"] += 1
            state["epoch"] += 1
        final = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)
        if "gemini" in KEEPER:
            strategy.close()


if __name__ == "__main__":
    main(fit if KEEPER.startswith("trainer") else fabric)
