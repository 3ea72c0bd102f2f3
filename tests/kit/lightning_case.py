"""A training that draws on everything a restart could lose. Run by test_lightning_recovery.py, never imported.

Usage: lightning_case.py '{"out": FOLDER, "runs": [RUN, ...]}'. Each RUN has a "name", and options; see the functions.
Every value that training produces is written to FOLDER/NAME/rank-R in hexadecimal, as soon as it is known.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lagging_device
import lightning
import numpy as np
import pytorch_lightning
import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

import gemini_ft
import gemini_ft.accelerator

FEATURES, SAMPLES, BATCH = 8, 48, 4
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Diary:
    """Writes down what happens, and kills this process where the run says so, once each."""

    def __init__(self, folder: Path, kills: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kills = folder, kills
        self._file = open(folder / f"rank-{RANK}", "a", buffering=1)  # noqa: SIM115  # as long as the process
        self.life = sum(1 for _ in folder.glob(f"life-{RANK}-*"))
        (folder / f"life-{RANK}-{self.life}").touch()

    def note(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.item()
        self._file.write(json.dumps([self.life, key, value.hex() if isinstance(value, float) else value]) + "\n")

    def reached(self, event: str, number: int) -> None:
        """``kills`` holds texts such as "1:step:13": rank 1 dies at step 13."""
        if (kill := f"{RANK}:{event}:{number}") in self._kills and not (marker := self._folder / f"killed-{kill}").exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset[torch.Tensor]):
    """Random augmentation from the three generators that users draw from."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.linspace(-1, 1, FEATURES) * (index + 1) / SAMPLES
        return sample + 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand())


class Stream(IterableDataset[torch.Tensor]):
    """Nobody knows how long it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples()
        for index in range(RANK, SAMPLES, WORLD_SIZE):
            yield samples[index]


def train_loader(run: dict[str, Any]) -> Any:
    if run.get("stream"):
        return DataLoader(Stream(), BATCH)
    loader = DataLoader(Samples(), BATCH, shuffle=True, **run.get("loader", {}))
    return [loader, DataLoader(Samples(20), BATCH, shuffle=True)] if run.get("two_loaders") else loader


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, FEATURES)
    )


def digest(module: nn.Module) -> str:
    """Of all parameters and buffers, this rank's parts."""
    total = xxhash.xxh3_64()
    for name, tensor in sorted(module.state_dict().items()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total.update(name.encode())
        total.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def make_module(package: Any, run: dict[str, Any], diary: Diary) -> Any:
    class Case(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.average = network().requires_grad_(False)  # weights averaged outside of any optimizer
            self.average.load_state_dict(self.net.state_dict())
            self.register_buffer("speed", torch.zeros(()))
            self.seen = MeanMetric()
            self.errors = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError(), "mse2": MeanSquaredError()})
            self.automatic_optimization = not run.get("manual")
            self.batches = 0
            self.validations = 0

        def on_train_start(self) -> None:
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(RANK + 1)

        def configure_model(self) -> None:
            if run.get("sharded"):
                from torch.distributed.fsdp import fully_shard

                for layer in (self.net[0], self.net[4], self.net[6], self.net):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            batch = batch[0] + batch[1].mean(0) if isinstance(batch, list) else batch
            step = self.trainer.fit_loop.total_batch_idx
            diary.reached("step", step)
            output = self.net(batch + 0.05 * torch.randn_like(batch) + 0.01 * random.random())
            loss = functional.mse_loss(output, batch)
            self.seen.update(loss.detach())
            self.errors.update(output.detach(), batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=bool(run.get("sync")), batch_size=BATCH)
            self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max", batch_size=BATCH)
            self.log("seen", self.seen, on_step=False, on_epoch=True, batch_size=BATCH)
            self.log_dict(self.errors, on_step=False, on_epoch=True, batch_size=BATCH)
            diary.note(f"step {step}", [batch_idx, float(batch.sum()).hex(), float(loss).hex()])
            if not self.automatic_optimization:
                self.manual_step(loss)
            return loss

        def manual_step(self, loss: torch.Tensor) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in (first, second):
                optimizer.step()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            step = self.trainer.fit_loop.total_batch_idx
            diary.reached("update", step)
            if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
                self.update_average()
            diary.note(f"after {step}", [group["lr"].hex() for group in self.trainer.optimizers[0].param_groups])

        def update_average(self) -> None:
            with torch.no_grad():
                for mean, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
                    mean.lerp_(new.full_tensor() if hasattr(new, "full_tensor") else new, 0.1)
                self.speed.mul_(0.9).add_(torch.rand(()))

        def on_train_epoch_start(self) -> None:
            diary.reached("epoch_start", self.current_epoch)

        def on_train_epoch_end(self) -> None:
            diary.reached("epoch_end", self.current_epoch)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            validation = self.trainer.fit_loop.total_batch_idx
            if not self.trainer.sanity_checking:
                diary.reached("validation", validation)
            self.log("val_loss", functional.mse_loss(self.average(batch) + torch.rand(()), batch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                diary.note(f"validation after {self.trainer.fit_loop.total_batch_idx}", self.trainer.callback_metrics["val_loss"])

        def configure_optimizers(self) -> Any:
            if run.get("manual"):
                return torch.optim.AdamW(self.net[:4].parameters(), 1e-2), torch.optim.SGD(self.net[4:].parameters(), 1e-2, momentum=0.9)
            optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
            if run.get("plateau"):
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Iterating(Case):
        def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    class Reloading(Case):
        def train_dataloader(self) -> Any:
            return train_loader(run)

    return {"iterating": Iterating, "reloading": Reloading}.get(run.get("module", ""), Case)()


def make_callbacks(package: Any, run: dict[str, Any]) -> list[Any]:
    callbacks = package.callbacks

    makers = {
        "averaging": lambda: callbacks.EMAWeightAveraging(decay=0.5),
        "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    }
    return [makers[name]() for name in run.get("callbacks", [])]


def make_logger(diary: Diary) -> Any:
    """Whatever Lightning logs, with the step it logs it for."""

    class Recorder(lightning.pytorch.loggers.Logger, pytorch_lightning.loggers.Logger):  # type: ignore[misc]
        name = version = "diary"

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            diary.note(
                f"logged {step} {'val' if 'val_loss' in metrics else sorted(metrics)}", {k: float(v).hex() for k, v in metrics.items()}
            )

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    return Recorder()


def make_strategy(package: Any, run: dict[str, Any]) -> Any:
    name, options = run.get("strategy", "gemini"), run.get("strategy_options", {})
    if name == "model_parallel":
        return package.strategies.ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)
    if not options:
        return name
    if name == "ddp":
        return package.strategies.DDPStrategy(**options)
    return importlib.import_module(f"gemini_ft.{run['package']}").GeminiStrategy(**options)


def train(run: dict[str, Any], diary: Diary, out: Path) -> None:
    package = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}[run.setdefault("package", "lightning")]
    package.seed_everything(7, workers=True, verbose=False)
    checkpoints = package.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{step}")
    trainer = package.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=make_strategy(package, run),
        logger=make_logger(diary),
        callbacks=[checkpoints, *make_callbacks(package, run)],
        default_root_dir=out / run["name"] / "root",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        **{"max_epochs": 3, "val_check_interval": 1.0 if run.get("stream") else 0.5} | run.get("trainer", {}),
    )
    module = make_module(package, run, diary)
    training = None if run.get("module") == "reloading" else train_loader(run)
    validation = DataLoader(Samples(8), BATCH, **run.get("loader", {}))
    whole = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}  # Lightning 2.5 reads all
    trainer.fit(module, training, validation, ckpt_path=run.get("ckpt_path"), **whole)
    diary.note("final", [digest(module), trainer.global_step, trainer.current_epoch, float(torch.rand(())).hex()])
    if checkpoints.best_model_score is not None:
        names = sorted(Path(path).stem.partition("-v")[0] for path in checkpoints.best_k_models)  # -v1: a file saved again
        diary.note("best", [float(checkpoints.best_model_score).hex(), names])


def train_with_fabric(run: dict[str, Any], diary: Diary) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=run.get("strategy", "gemini"))
    fabric.launch()
    fabric.seed_everything(7 + fabric.global_rank, workers=True, verbose=False)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 30)
    loader: Any = fabric.setup_dataloaders(train_loader(run))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "epoch": 0, "step": 0}
    resumable = run.get("strategy", "gemini") == "gemini"
    strategy: Any = fabric.strategy
    if resumable:
        strategy.protect(state) if run.get("asked") else fabric.load("gemini://latest", state)
    for epoch in range(state["epoch"], 3):
        state["epoch"] = epoch
        for batch in loader:
            step = state["step"]
            diary.reached("step", step)
            if step == 3:  # once: a process that goes on later does not do it again
                next(part for part in model.modules() if isinstance(part, nn.Dropout)).p = 0.5
            loss = functional.mse_loss(model(batch + 0.05 * torch.randn_like(batch)), batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            diary.note(f"step {step}", [float(batch.sum()).hex(), float(loss).hex(), float(scheduler.get_last_lr()[0]).hex()])
            state["step"] += 1
            if resumable and not run.get("asked"):
                fabric.save("gemini://latest", state)
            diary.reached("update", step)
    diary.note("final", [digest(model), state["step"], float(torch.rand(())).hex()])
    if resumable:
        strategy.close()


def main() -> None:
    job = json.loads(sys.argv[1])
    assert gemini_ft.__version__
    if job["lag"]:
        lagging_device.install(gemini_ft.accelerator, job["lag"])
    for run in job["runs"]:
        out = Path(job["out"])
        diary = Diary(out / run["name"], run.get("kills", []))
        if run.get("fabric"):
            train_with_fabric(run, diary)
        else:
            train(run, diary, out)


if __name__ == "__main__":
    main()
