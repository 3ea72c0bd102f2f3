"""What a loop uses and has forgotten to give is found, and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from gemini_ft.state.left_out import left_out


class Holder:
    """A script's own object with a state, which keeps a scheduler in a list."""

    def __init__(self, scheduler: lr_scheduler.LRScheduler) -> None:
        self.parts = {"schedulers": [scheduler]}


def test_schedulers_scalers_and_averages_are_found_unless_they_are_given_somewhere() -> None:
    model = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedulers = [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.LinearLR(optimizer)]
    chain = lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])
    unrelated = lr_scheduler.ExponentialLR(other, 0.9)
    average = AveragedModel(model)
    scaler, unused = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert left_out([model], [optimizer]) == ["AveragedModel", "GradScaler", "LinearLR", "SequentialLR", "StepLR"]
    assert left_out([model, nn.ModuleList([average]), Holder(chain), scaler], [optimizer]) == []
    assert left_out([average, scaler, chain], [optimizer, other]) == ["ExponentialLR"]
    del unrelated, unused
