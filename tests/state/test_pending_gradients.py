"""Which gradients wait for an optimizer."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_kit import Taken, give, take
from fake_accelerator import installed
from torch import nn

from gemini_ft.state import codec
from gemini_ft.state.base import PlainState
from gemini_ft.state.pending import PendingGradients


class Fading(torch.optim.SGD):
    """Keeps a part of each gradient for the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(0.5)


def _training(kind: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer, PlainState]:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    state = PlainState.of({"model": model}, [optimizer], None)
    state.watch()
    return model, optimizer, state


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _waiting(state: PlainState) -> set[str]:
    found: set[str] = set(codec.decode(take(state).extras)["pending"]["waiting"])
    return found


def test_gradients_that_were_zeroed_in_place_wait_for_nothing() -> None:
    model, optimizer, state = _training()
    _step(model, optimizer)
    assert _waiting(state) == set()
    model(torch.ones(4, 3)).sum().backward()
    assert _waiting(state) == {"model.weight", "model.bias"}
    model.zero_grad(set_to_none=False)
    assert _waiting(state) == set()


def test_a_model_that_has_made_one_step_is_freed() -> None:
    """And an attempt that has failed after its first step leaves nothing in its process."""
    model, optimizer, state = _training()
    _step(model, optimizer)
    trainer: list[Any] = [model(torch.ones(4, 3))]
    trainer.append(trainer)
    left = weakref.ref(model.weight)
    del model, optimizer, state, trainer
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("past", ["data", "buffer"])
def test_what_is_written_past_the_version_counter_of_a_zeroed_gradient_waits(past: str) -> None:
    """As a communication hook of DDP does that reduces its bucket in place, of which the gradients are views."""
    model, optimizer, state = _training()
    bucket = torch.zeros(6)
    if past == "buffer":
        model.weight.grad = bucket.data.view(2, 3)
    _step(model, optimizer)
    assert _waiting(state) == set()
    if past == "buffer":
        bucket.add_(1.0)
    else:
        assert model.weight.grad is not None
        model.weight.grad.data.add_(1.0)
    assert _waiting(state) == {"model.weight"}


def test_a_zero_grad_that_keeps_something_is_believed_nothing() -> None:
    model, optimizer, state = _training(Fading)
    _step(model, optimizer)
    assert _waiting(state) == {"model.weight", "model.bias"}


@pytest.mark.parametrize("is_older", [False, True])
def test_a_loop_that_never_zeroes_keeps_its_gradients_from_the_first_step_after_a_resume(is_older: bool) -> None:
    """Snapshots of older versions do not say which gradients are added to: these are noticed by the second backward pass again."""
    model, optimizer, state = _training()
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    taken = take(state)
    if is_older:
        extras = codec.decode(taken.extras)
        del extras["pending"]["added_to"]
        taken = Taken(taken.layout, taken.shard, codec.encode(extras))
    model, optimizer, state = _training()
    give(taken, state)
    for step in range(2):
        assert model.bias.grad is not None
        assert model.bias.grad.tolist() == [12.0 + 4 * step] * 2
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert _waiting(state) == ({"model.weight", "model.bias"} if not is_older or step else set())


def test_a_gradient_of_inference_mode_stops_nothing() -> None:
    """Torch counts no writes to it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = PendingGradients()
    handles = pending.watch([optimizer])
    with torch.inference_mode():
        gradient = torch.ones(1, 2)
    model.weight.grad = gradient
    optimizer.step()
    assert pending.collect({"weight": model.weight})["waiting"] == {}
    for handle in handles:
        handle.remove()


def test_a_device_is_waited_for_once_for_all_gradients_that_may_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `zero_grad(set_to_none=False)`."""
    waits: list[int] = []
    with installed(0) as fake:
        params: Any = {str(number): SimpleNamespace(grad=fake.tensor(torch.zeros(5))) for number in range(20)}
        params["7"].grad.fill_(-0.0)
        run_until = fake.run_until
        monkeypatch.setattr(fake, "run_until", lambda is_over: (waits.append(1), run_until(is_over)))
        found = PendingGradients().collect(params)
    assert [*found["waiting"]] == ["7"]
    assert found["present"] == [str(number) for number in range(20) if number != 7]
    assert len(waits) == 1
