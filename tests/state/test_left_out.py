"""What a loop uses and has forgotten to give is found, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft
from gemini_ft.errors import StateError
from gemini_ft.loaders.bookmark import Bookmark
from gemini_ft.state.iterators import check_epochs
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


def test_only_an_epoch_that_was_gone_through_is_one_that_is_repeated() -> None:
    """A loop that takes the first batch of a new iteration in each step does not repeat an epoch, and a constant does not count epochs."""

    def resumed(take: Callable[[Any], object]) -> Any:
        loaders = [gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)) for _ in range(2)]
        take(loaders[0])
        loaders[1].load_state_dict(loaders[0].state_dict())
        take(loaders[1])
        return loaders[1]

    scalars = {"epoch": 0, "epochs": 3}
    check_epochs([resumed(lambda loader: next(iter(loader)))], then=scalars, now=scalars)
    through = resumed(list)
    check_epochs([through], then=scalars, now={"epoch": 1, "epochs": 3})
    with pytest.raises(StateError, match="gone through that epoch again"):
        check_epochs([through], then=scalars, now=scalars)


def test_loaders_of_two_owners_leave_nothing_to_go_on() -> None:
    """A loader whose position is loaded twice counts once among those that are to go on."""
    loader = gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    before = Bookmark.to_go_on
    other.load_state_dict(state)
    other.load_state_dict(state)
    assert [batch[0].tolist() for batch in other] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert Bookmark.to_go_on == before
