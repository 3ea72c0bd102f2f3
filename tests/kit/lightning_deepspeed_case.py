"""What the ranks of test_lightning_deepspeed.py run: a Trainer over DeepSpeed. Each value that training produces is noted."""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@dataclass(frozen=True)
class Case:
    """One training job: batches 0 to 5 in each of three epochs."""

    stage: int
    accumulate: int = 2
    offload: bool = False  # parameters and optimizer to CPU memory, as for a GPU
    precision: str = "32-true"
    package: str = "lightning"
    schedule: bool = True
    validate_every: float = 0.5  # epochs
    ckpt_path: str = ""


def make_strategy(package: Any, case: Case, plain: bool) -> Any:
    """Lightning's own strategy, or ours, for CPUs and for a small model."""
    import importlib

    from gemini_ft.lightning.deepspeed import EnginesOnCpu

    small = {"reduce_bucket_size": 5000, "allgather_bucket_size": 100_000, "stage3_param_persistence_threshold": 64}
    offloads = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if case.offload else {}
    config = {"zero_optimization": {"stage": case.stage, **small, **offloads}, "zero_allow_untested_optimizer": True}
    if plain:
        base = package.strategies.DeepSpeedStrategy
        return type("PlainDeepSpeedStrategy", (EnginesOnCpu, base), {})(config=config)
    return importlib.import_module(f"gemini_ft.{case.package}").GeminiDeepSpeedStrategy(config=config | {"gemini": {"on_late": "wait"}})


def make_module(package: Any, case: Case, diary: Any, said: dict[str, Any]) -> Any:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from lightning_case import BATCH, network
    from torch.nn import functional
    from torchmetrics import MeanMetric

    from gemini_ft.deepspeed.state import EngineState
    from gemini_ft.testing import digest

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.seen = MeanMetric()

        def on_train_start(self) -> None:
            torch.manual_seed(self.global_rank + 1)
            checkpointer = getattr(self.trainer.strategy, "checkpointer", None)
            said.update(start=self.trainer.model.global_steps, restored=checkpointer.stats.restored if checkpointer else {})

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            output = self.net(batch + 0.05 * torch.randn_like(batch))
            loss = functional.mse_loss(output, batch)
            self.seen.update(loss.detach())
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
            self.log("seen", self.seen, on_step=False, on_epoch=True, batch_size=BATCH)
            diary.note(f"step {self.trainer.fit_loop.total_batch_idx}", [batch_idx, float(batch.sum()).hex(), float(loss).hex()])
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            diary.note(f"after {self.trainer.fit_loop.total_batch_idx}", [lr.hex(), self.trainer.global_step])

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", functional.mse_loss(self.net(batch + torch.rand_like(batch)), batch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                diary.note(f"validation after {self.trainer.fit_loop.total_batch_idx}", self.trainer.callback_metrics["val_loss"])

        def on_train_end(self) -> None:
            engine = self.trainer.model
            state = {item.name: item.tensor for item in EngineState(engine).survey()}
            diary.note("final", [digest(state), engine.global_steps, engine.micro_steps, float(torch.rand(())).hex()])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["of the user"] = self.trainer.fit_loop.total_batch_idx

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            said["loaded"] = checkpoint["of the user"]

        def configure_optimizers(self) -> Any:
            optimizer = (DeepSpeedCPUAdam if case.offload else torch.optim.AdamW)(self.net.parameters(), 1e-2)
            if not case.schedule:
                return optimizer
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def train(case: Case, out: str, plain: bool = False) -> dict[str, Any]:
    """Train to the end. The diary of rank R is the file ``<out>/rank-R``."""
    warnings.simplefilter("ignore")  # pytest has made them errors
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    import lightning.pytorch
    import pytorch_lightning
    from lightning_case import BATCH, Diary, Samples, make_logger, train_loader
    from torch.utils.data import DataLoader

    package = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}[case.package]
    package.seed_everything(7, workers=True, verbose=False)
    diary, said = Diary(Path(out), []), dict[str, Any]()
    checkpoints = package.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{step}")
    trainer = package.Trainer(
        accelerator="cpu",
        devices=int(world_size),
        strategy=make_strategy(package, case, plain),
        precision=case.precision,
        logger=make_logger(diary),
        callbacks=[checkpoints],
        default_root_dir=f"{out}/root",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        max_epochs=3,
        val_check_interval=case.validate_every,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=1.0,
    )
    module = make_module(package, case, diary, said)
    whole = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}  # Lightning 2.5 reads all
    trainer.fit(module, train_loader({}), DataLoader(Samples(8), BATCH), ckpt_path=case.ckpt_path or None, **whole)
    names = sorted(Path(path).stem.partition("-v")[0] for path in checkpoints.best_k_models)  # -v1: saved again
    diary.note("best", [float(checkpoints.best_model_score).hex(), names])
    return said


def writes_weights(out: str, at: int, counted: bool = True) -> list[str]:
    """Writes a weight between two steps, and no master: after the step of this number, or after each one (0). Returns what was told.

    ``counted``: whether torch counts the writes.
    """
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    import lightning.pytorch
    import torch
    from lightning_case import BATCH, Samples, network
    from session_case import Recorded
    from torch.utils.data import DataLoader

    class Clamping(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = (self.net(batch) - batch).square().mean()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if at in (0, self.global_step):
                with torch.no_grad():
                    weight = next(self.net.parameters())
                    (weight if counted else weight.data).clamp_(-0.01, 0.01)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    told = Recorded()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = make_strategy(lightning.pytorch, Case(1), False)
    trainer = lightning.pytorch.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=6, default_root_dir=out, **quiet)
    trainer.fit(Clamping(), DataLoader(Samples(32), BATCH))
    return told.texts
