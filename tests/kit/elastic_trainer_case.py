"""transformers' Trainer on a number of ranks that changes, with samples that are recorded; never imported.

Usage: elastic_trainer_case.py '{"out": FILE, "micro_batches": N, ...}'; without "protected" no word of gemini-ft is in it. Each rank adds
to FILE.RANK its samples by step and epoch, and at the end rank 0 writes FILE.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

SAMPLES, BATCH = 72, 2
RUN: dict[str, Any] = json.loads(sys.argv[1])
RANK = os.environ.get("RANK", "0")


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that name themselves, of one to five tokens that count."""

    def __len__(self) -> int:
        return int(RUN.get("samples", SAMPLES))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.linspace(-1, 1, 5, dtype=torch.float64) * (index + 1) / SAMPLES
        labels = torch.where(torch.arange(5) <= index % 5, index, -100)
        return {"ids": torch.tensor(index), "tokens": tokens[:, None], "labels": labels}


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return map(Numbers().__getitem__, range(SAMPLES))


class Net(nn.Module):
    """A model that says by how many tokens its loss is divided, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(1, 8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)

    def forward(
        self, ids: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        if self.training:
            with open(f"{RUN['out']}.{RANK}", "a", buffering=1) as trace:
                trace.write(f"{STARTED} {trainer.state.global_step} {trainer.state.epoch // 1:g} {' '.join(map(str, ids.tolist()))}\n")
        count = labels != -100
        errors = (self.last(torch.tanh(self.first(tokens))).squeeze(-1) - labels / SAMPLES).square() * count
        return {"loss": errors.sum() / (count.sum() if num_items_in_batch is None else num_items_in_batch)}


class Changing(TrainerCallback):  # type: ignore[misc]
    """Takes other micro-batches from the fourth step on, where the run asks for it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and RUN.get("changes"):
            args.gradient_accumulation_steps += 1


class OwnLoss(Trainer):  # type: ignore[misc]
    """Leaves out by how much the Trainer would have its loss divided."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs)["loss"]


class Divided(OwnLoss):
    """Says that its loss is the mean of a micro-batch."""

    loss_is_scaled_for_ga = False


STARTED = RUN.get("started", 0)
if RUN.get("sharded"):
    from huggingface_case import shard_on_cpus

    shard_on_cpus()
if RUN.get("has_engine"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
callbacks: list[TrainerCallback] = [Changing()]
if RUN.get("protected"):
    import gemini_ft.huggingface

    callbacks.append(gemini_ft.huggingface.GeminiCallback())
zero = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": RUN["micro_batches"],
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
    "gemini": {"on_late": "wait"},
}
arguments = TrainingArguments(
    output_dir=f"{RUN['out']}-checkpoints",
    **({"deepspeed": zero} if RUN.get("has_engine") else {"use_cpu": True, "ddp_backend": "gloo" if "RANK" in os.environ else None}),
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=RUN["micro_batches"],
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
    **{"num_train_epochs": 2, "save_strategy": "no", "seed": 5} | RUN.get("arguments", {}),
)
kinds = {"own": OwnLoss, "divided": Divided}
trainer = kinds.get(RUN.get("loss", ""), Trainer)(
    model=Net(), args=arguments, callbacks=callbacks, train_dataset=Streamed() if RUN.get("streamed") else Numbers()
)
trainer.train()
whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in trainer.model.parameters()]
if RANK == "0":
    logged = [[entry["step"], entry["learning_rate"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    said = {
        "weights": [value for param in whole for value in param.flatten().tolist()],
        "logged": logged,
        "steps": [trainer.state.global_step, trainer.state.max_steps],
    }
    Path(RUN["out"]).write_text(json.dumps(said | {"micro_batches": arguments.gradient_accumulation_steps}))
