"""As in_place_case.py, by transformers' Trainer: KEEPER is "transformers", which `gemini run` protects, or "transformers-alone"."""

from __future__ import annotations

import os
from typing import Any

import torch
from huggingface_case import Texts, model
from in_place_case import FOLDER, STEPS, main, reached
from transformers import Trainer, TrainerCallback, TrainingArguments

from gemini_ft.testing import digest


def transform() -> None:
    """Trains by transformers' Trainer, which `gemini run` protects."""

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reached(state.global_step, named["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **named: Any) -> None:
            if "loss" in logs:
                print("step", state.global_step, float(logs["loss"]).hex(), file=trace)

    with open(f"{FOLDER}/rank-{os.environ['RANK']}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)
        reached("start")
        quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        arguments = TrainingArguments(FOLDER, use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS, seed=3, **quiet)
        trainer = Trainer(model(), arguments, train_dataset=Texts(22), callbacks=[Noting()])
        trainer.train()
        final = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(final), file=trace)


if __name__ == "__main__":
    main(transform)
