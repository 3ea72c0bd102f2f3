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


class Tied(nn.Module):
    """Two embeddings, one of which the head shares; two numbers, and two of the next step; the layer that is active."""

    current: torch.Tensor
    following: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    apart: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.one.weight
        for name in ("a", "b", "apart"):
            self.register_buffer(name, torch.rand(1), persistent=name != "apart")
        self.register_buffer("current", self.a)
        self.register_buffer("following", self.b)
        self.active: nn.Module = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.following += 0.5  # in place
        return self.head(self.active(self.one(self.two(x)))) * self.current.sum() + self.apart.sum()  # type: ignore[no-any-return]


def tied_job() -> tuple[Tied, torch.optim.Optimizer, PlainState]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, optimizer, PlainState.of(model, optimizer, None)


def tie_to_the_other(model: Tied) -> None:
    model.head.weight = model.two.weight


def exchange(model: Tied) -> None:
    model.current, model.following = model.following, model.current


def untie(model: Tied) -> None:
    model.current = model.current.clone()


def tie(model: Tied) -> None:
    model.apart = model.b


def grow(model: Tied) -> None:
    model.a = model.current = torch.cat([model.a, model.b])


def grow_and_untie(model: Tied) -> None:
    model.a = torch.cat([model.a, model.b])


def become_the_only_one(model: Tied) -> None:
    del model.a


def activate_another(model: Tied) -> None:
    model.active = model.two


def name_again(model: Tied) -> None:
    model.spare = model.two


def prune_the_further(model: Tied) -> None:
    prune.l1_unstructured(model.head, "weight", 0.5)  # type: ignore[no-untyped-call]


def prune_the_first(model: Tied) -> None:
    prune.l1_unstructured(model.one, "weight", 0.5)  # type: ignore[no-untyped-call]


TIES = [
    tie_to_the_other,
    exchange,
    untie,
    tie,
    grow,
    grow_and_untie,
    become_the_only_one,
    activate_another,
    name_again,
    prune_the_further,
    prune_the_first,
]


@pytest.mark.parametrize("change", TIES)
def test_names_of_the_same_tensor_or_module_are_followed(change: Callable[[Tied], None]) -> None:
    model, optimizer, state = tied_job()
    update(model, optimizer)
    take(state)
    change(model)
    update(model, optimizer)
    taken = take(state)
    expected = [update(model, optimizer) for _ in range(2)]
    again, fresh_optimizer, fresh = tied_job()
    give(taken, fresh)
    assert [update(again, fresh_optimizer) for _ in range(2)] == expected
    assert list(dict(again.named_modules(remove_duplicate=False))) == list(dict(model.named_modules(remove_duplicate=False)))
    assert list(again.state_dict()) == list(model.state_dict())


def test_a_name_that_comes_before_the_first_snapshot_is_followed() -> None:
    model, _, state = tied_job()
    model.register_buffer("third", model.b)
    taken = take(state)
    again, _, fresh = tied_job()
    give(taken, fresh)
    assert again.get_buffer("third") is again.b


def test_a_tied_parameter_that_gets_its_own_is_refused() -> None:
    model, _, state = tied_job()
    take(state)
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(UnsupportedStateError, match=r"the parameter model\.head\.weight was added.*rebuild="):
        take(state)


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
