"""What a loop does to its modules and optimizers while it trains: followed by a fresh process, or refused when it happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_kit import give, take
from torch import nn
from torch.nn.utils import prune

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.base import PlainState
from gemini_ft.state.rebuilding import ModuleTree


class Branches(nn.Module):
    """Two branches that are applied in the order in which they stand, an activation, and a number."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.activation: nn.Module = nn.ReLU()
        self.backbone = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for branch in self.branches.values():
            x = self.activation(branch(x))
        out: torch.Tensor = self.backbone(x) * self.count
        return out


def job() -> tuple[Branches, torch.optim.Optimizer, PlainState]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(
        [{"params": model.branches.parameters()}, {"params": [*model.backbone.parameters()][:1]}], 0.1, momentum=0.9
    )
    return model, optimizer, PlainState.of(model, optimizer, None)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One step; its loss and the norm of its gradients, to the last bit."""
    model.zero_grad()
    loss = model(torch.arange(8.0, dtype=next(model.parameters()).dtype).view(2, 4)).square().sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    optimizer.step()
    return f"{loss.item().hex()} {norm.item().hex()}"


def reorder(model: Branches, _: torch.optim.Optimizer) -> None:
    model.branches["first"] = model.branches.pop("first")


def prune_and_make_permanent(model: Branches, _: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model.backbone, "weight", 0.5)  # type: ignore[no-untyped-call]
    prune.remove(model.backbone, "weight")  # type: ignore[no-untyped-call]


def extend_a_group(model: Branches, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(model.backbone.bias)


def change_groups(model: Branches, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def count_halves(model: Branches, _: torch.optim.Optimizer) -> None:
    model.count = model.count + 0.5


def double(model: Branches, _: torch.optim.Optimizer) -> None:
    model.double()


@pytest.mark.parametrize("change", [reorder, prune_and_make_permanent, extend_a_group, change_groups, count_halves, double])
def test_is_followed(change: Callable[[Branches, torch.optim.Optimizer], None]) -> None:
    model, optimizer, state = job()
    update(model, optimizer)
    take(state)
    change(model, optimizer)
    update(model, optimizer)
    taken = take(state)
    expected = [update(model, optimizer) for _ in range(2)]
    again, fresh_optimizer, fresh = job()
    update(again, fresh_optimizer)
    give(taken, fresh)
    assert [update(again, fresh_optimizer) for _ in range(2)] == expected


def test_another_activation_is_refused_when_it_comes() -> None:
    model, optimizer, state = job()
    update(model, optimizer)
    take(state)
    model.activation = nn.GELU()
    with pytest.raises(UnsupportedStateError, match=r"the module model.activation was a ReLU and is a GELU now: .*rebuild="):
        take(state)


def test_a_module_that_goes_is_refused_when_it_goes() -> None:
    model, _, state = job()
    take(state)
    model.activation = nn.Identity()
    with pytest.raises(UnsupportedStateError, match="was a ReLU and is a Identity now"):
        take(state)


def test_a_module_that_the_first_iteration_makes_is_the_scripts() -> None:
    model, optimizer, state = job()
    model.add_module("loss", nn.MSELoss())
    update(model, optimizer)
    take(state)
    model.add_module("noise", nn.Dropout())
    with pytest.raises(UnsupportedStateError, match=r"the module model\.noise was not there and is a Dropout now"):
        take(state)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:`torch.jit.script` is not supported in Python 3.14")
def test_scripted_modules_are_walked() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    take(PlainState.of(model, torch.optim.SGD(model.parameters(), 0.1), None))


def test_equal_modules_are_not_the_same() -> None:
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 0

    model = nn.ModuleList([Equal(2, 2)])
    tree = ModuleTree({"model": model})
    assert tree.modules() is tree.modules()
    model[0] = Equal(2, 2)
    assert tree.modules()["model.0"] is model[0]
