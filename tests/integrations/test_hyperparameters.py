"""A script whose hyperparameters have changed is told at every resume, whatever runs its loop. (For Lightning: test_lightning_hooks.py.)"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_case import start_ranks
from rank_kit import World
from session_case import Recorded
from torch import nn

import gemini_ft

os.environ.setdefault("DS_ACCELERATOR", "cpu")
STEPS = 3  # of every attempt, which then ends as a crash would


def in_a_plain_loop(folder: Path, rate: float, gamma: float) -> list[str]:
    told = Recorded()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma)  # it changes the rate, and the script does not
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler}, on_late="wait")
    begin = checkpointer.resume()
    for _ in range(begin, begin + STEPS):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
    checkpointer.flush()
    return told.texts


def under_deepspeed(folder: Path, rate: float, gamma: float) -> list[str]:
    import deepspeed

    import gemini_ft.deepspeed

    gemini_ft.init_process_group("gloo")
    told = Recorded()
    net = nn.Linear(2, 2)
    engine, *_ = gemini_ft.deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), rate),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gemini": {"on_late": "wait"},
        },
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    for _ in range(engine.global_steps, engine.global_steps + STEPS):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.gemini.checkpointer.flush()
    return told.texts


class _Crash(Exception):
    pass


def under_transformers_trainer(folder: Path, rate: float, gamma: float) -> list[str]:
    from huggingface_case import Texts, model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gemini_ft.huggingface import GeminiCallback

    class Crashing(TrainerCallback):
        steps = 0

        def on_step_end(self, *_: object, **__: object) -> None:
            self.steps += 1
            if self.steps > STEPS:  # the snapshot of a step is taken when the next one begins
                raise _Crash

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # without a process group
        os.environ.pop(name)
    told = Recorded()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=rate,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"factor": gamma},
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        num_train_epochs=3,
    )
    callbacks = [GeminiCallback(on_late="wait"), Crashing()]
    trainer = Trainer(model=model(), args=arguments, train_dataset=Texts(22), eval_dataset=Texts(2), callbacks=callbacks)
    with pytest.raises(_Crash):
        trainer.train()
    return told.texts


@pytest.mark.parametrize(
    ("train", "vendors", "rates", "factor"),
    [
        (in_a_plain_loop, [], "lr of optim0 (SGD)", "gamma of state['scheduler']"),
        (under_deepspeed, ["deepspeed"], "lr of the engine's AdamW", "gamma of the engine's StepLR"),
        pytest.param(
            under_transformers_trainer,
            ["transformers", "accelerate"],
            "lr of optim0 (AdamW)",
            "factor of the Trainer's ReduceLROnPlateau",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["plain loop", "deepspeed", "transformers"],
)
def test_changes_are_named_at_every_resume_and_only_they(
    train: Callable[[Path, float, float], list[str]], vendors: list[str], rates: str, factor: str, tmp_path: Path
) -> None:
    for vendor in vendors:
        pytest.importorskip(vendor, reason=f"needs {vendor}: pip install {vendor}")
    with World(tmp_path) as world:
        for given, is_told in [((0.01, 0.5), False), ((0.01, 0.5), False), ((0.3, 0.7), True), ((0.3, 0.7), True)]:
            (texts,) = world.outcome(train, tmp_path, *given)
            assert isinstance(texts, list), texts
            said = [text for text in texts if "HYPERPARAMETERS HAVE CHANGED" in text]
            assert len(said) == is_told
            if is_told:
                assert f"the snapshot's stay in force ({rates}: 0.01 -> 0.3; " in said[0]
                assert f"{factor}: 0.5 -> 0.7" in said[0]
                assert "start with GEMINI_RESUME=never or another GEMINI_RUN_ID; to go on with them, set them in the optimizer's" in said[0]


def of_its_own_in_each_rank(rates: list[float]) -> list[str]:
    start_ranks()
    told = Recorded()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), rates[int(os.environ["RANK"])])
    checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=False, on_late="wait")
    checkpointer.resume()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpointer.step()
    checkpointer.flush()
    return [text for text in told.texts if "HYPERPARAMETERS HAVE CHANGED" in text]


def test_a_change_on_another_rank_is_told_too(two: World) -> None:
    assert two.outcome(of_its_own_in_each_rank, [0.1, 0.2]) == [[], []]
    [first], rest = two.outcome(of_its_own_in_each_rank, [0.1, 0.5])
    assert first.startswith("On 1 of 2 ranks, as on rank 1: HYPERPARAMETERS HAVE CHANGED")
    assert "(lr of optim0 (SGD): 0.2 -> 0.5)" in first
    assert rest == []
