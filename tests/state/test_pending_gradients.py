"""Which gradients wait for an optimizer, seen without reading the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from capture_kit import take
from torch import nn

from gemini_ft.state import codec, pending
from gemini_ft.state.base import PlainState


class Fading(torch.optim.SGD):
    """Keeps a part of each gradient for the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(0.5)


def _training(kind: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer, PlainState]:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, PlainState.of({"model": model}, [optimizer], None)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _waiting(state: PlainState) -> set[str]:
    found: set[str] = set(codec.decode(take(state).extras)["pending"]["waiting"])
    return found


def test_gradients_zeroed_in_place_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = _training()
    state.watch()
    _step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(pending, "_is_zero", lambda _: pytest.fail("a gradient was read"))
        assert _waiting(state) == set()
    model(torch.ones(4, 3)).sum().backward()
    assert _waiting(state) == {"model.weight", "model.bias"}
    model.zero_grad(set_to_none=False)  # no optimizer has said so: they are looked at
    assert _waiting(state) == set()


def test_a_zero_grad_that_keeps_something_is_believed_nothing() -> None:
    model, optimizer, state = _training(Fading)
    state.watch()
    _step(model, optimizer)
    assert _waiting(state) == {"model.weight", "model.bias"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped since"])
def test_nothing_is_left_of_the_hook(wrapped: bool) -> None:
    model, optimizer, state = _training()
    handles, calls = state.watch(), []
    if wrapped:
        inner = optimizer.zero_grad

        def outer(set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            inner(set_to_none)

        optimizer.zero_grad = outer  # type: ignore[method-assign]
    for handle in handles:
        handle.remove()
    assert ("zero_grad" in vars(optimizer)) == wrapped
    _step(model, optimizer)
    assert calls == ([False] if wrapped else [])
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


def test_a_copy_of_a_watched_optimizer_zeroes_its_own_gradients() -> None:
    model, optimizer, state = _training()
    state.watch()
    model(torch.ones(4, 3)).sum().backward()
    other = copy.deepcopy(optimizer)
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in other.param_groups[0]["params"])
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())
