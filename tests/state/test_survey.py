"""What a survey remembers from step to step is right at every step: a change is noticed, whatever it is, and nothing else is.

Each change is made between two surveys of the same surveyor, which then finds what one that has never looked before finds.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state import codec, tensors
from gemini_ft.state.base import PlainState
from gemini_ft.state.modules import collect_extras
from gemini_ft.state.survey import Survey, Surveyor, survey


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.spare, self.resting = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


class Saving(nn.Linear):
    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: Any) -> None:
        pass


def build() -> tuple[Any, Any]:
    model = Net()
    optimizer = torch.optim.Adam(
        [{"params": model.a.parameters()}, {"params": model.b.parameters()}, {"params": model.resting.parameters()}], lr=0.1
    )
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[2]["lr"] = torch.tensor(0.1)
    return model, optimizer


def found_in(found: Survey) -> Any:
    """All that a snapshot takes from a survey, or why it cannot be taken."""
    live: list[Any] = [(item.name, id(item.tensor), item.role, id(item.param), item.same_as) for item in found.live]
    live += [
        (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for tensor in (item.tensor for item in found.live)
    ]
    try:
        return live, codec.encode(collect_extras(found)), list(found.modules)
    except UnsupportedStateError as error:
        return live, str(error), list(found.modules)


def _swap(optimizer: Optimizer, one: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


def _replace_state(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _move(table: dict[str, Any], key: str, other: dict[str, Any]) -> None:
    """From the end of what one module has to the beginning of what the next one has: in one list after the other, nothing moves."""
    assert list(table)[-1] == key
    assert not other
    other[key] = table.pop(key)


def _have(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    tensor.data = memory


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "parameter replaced": lambda model, _: setattr(model.spare, "weight", nn.Parameter(torch.zeros(3, 3))),
    "parameter removed": lambda model, _: setattr(model.spare, "bias", None),
    "parameter renamed": lambda model, _: model.spare.register_parameter("offset", model.spare._parameters.pop("bias")),
    "parameter under another name": lambda model, _: model.spare.register_parameter("twice", model.a.weight),
    "parameters exchanged": lambda model, _: model.a.__setattr__("weight", model.b[0].weight),
    "buffer replaced": lambda model, _: setattr(model, "table", model.table + 1),
    "buffer in no state dict": lambda model, _: model.register_buffer("table", model.table, persistent=False),
    "buffer registered again": lambda model, _: model.register_buffer("table", torch.zeros(3)),
    "parameter moves to the next module": lambda model, _: _move(model.a._parameters, "bias", model.b._parameters),
    "module moves into the next one": lambda model, _: _move(model._modules, "resting", model.a._modules),
    "memory replaced": lambda model, _: _have(model.a.weight, torch.zeros(3, 3)),
    "memory of state replaced": lambda model, optimizer: _have(optimizer.state[model.a.weight]["exp_avg"], torch.zeros(3, 3)),
    "another shape in the same memory": lambda model, _: _have(model.table, model.table.view(1, 3)),
    "other strides in the same memory": lambda model, _: _have(model.b[0].weight, model.b[0].weight.detach().t()),
    "other numbers in the same memory": lambda model, _: _have(model.b[1].running_mean, model.b[1].running_mean.view(torch.int32)),
    "storage resized": lambda model, _: model.table.untyped_storage().resize_(2**16),
    "frozen": lambda model, _: model.b[0].bias.requires_grad_(not model.b[0].bias.requires_grad),
    "buffer added": lambda model, _: model.register_buffer("new", torch.zeros(1)),
    "module replaced": lambda model, _: setattr(model, "spare", nn.Linear(3, 3)),
    "module added": lambda model, _: model.b.append(nn.Linear(3, 3)),
    "module without tensors added": lambda model, _: model.b.append(nn.ReLU()),
    "module becomes another": lambda model, _: _become(model.spare, Saving),
    "group added": lambda model, optimizer: optimizer.add_param_group({"params": list(model.spare.parameters())}),
    "parameter moves to the next group": lambda _, optimizer: optimizer.param_groups[1]["params"].insert(
        0, optimizer.param_groups[0]["params"].pop()
    ),
    "group removed": lambda _, optimizer: [optimizer.state.pop(param, None) for param in optimizer.param_groups.pop()["params"]],
    "parameter of no model": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "order in a group": lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(),
    "order in a group without state": lambda _, optimizer: optimizer.param_groups[2]["params"].reverse(),
    "learning rate in place": lambda _, optimizer: optimizer.param_groups[2]["lr"].mul_(0.5),
    "learning rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "option added": lambda _, optimizer: optimizer.param_groups[1].update(initial_lr=0.5),
    "state gone": lambda model, optimizer: optimizer.state.pop(model.a.weight),
    "state comes": lambda model, optimizer: optimizer.state[model.a.weight].update(fresh=torch.zeros(3, 3)),
    "state replaced": lambda model, optimizer: optimizer.state[model.a.weight].update(exp_avg=torch.zeros(3, 3)),
    "state under another name": lambda model, optimizer: optimizer.state[model.a.weight].update(
        second=optimizer.state[model.a.weight].pop("exp_avg")
    ),
    "state exchanged": lambda model, optimizer: _swap(optimizer, model.a.weight, model.b[0].weight),
    "state moves to the next one": lambda model, optimizer: optimizer.state.update(
        {model.a.bias: optimizer.state.pop(model.a.weight), model.a.weight: {}}
    ),
    "state loaded": lambda _, optimizer: _replace_state(optimizer),
    "all state replaced": lambda _, optimizer: setattr(
        optimizer, "state", {param: copy.deepcopy(entry) for param, entry in optimizer.state.items()}
    ),
    "state shared": lambda model, optimizer: optimizer.state[model.a.weight].update(also=optimizer.state[model.a.bias]["exp_avg"]),
    "number in the state": lambda model, optimizer: optimizer.state[model.a.weight].update(count=1),
    "number counts up": lambda model, optimizer: optimizer.state[model.a.weight].update(
        count=optimizer.state[model.a.weight].get("count", 1) + 1
    ),
    "number becomes a tensor": lambda model, optimizer: optimizer.state[model.a.weight].update(count=torch.ones(())),
    "dictionary of the state replaced": lambda model, optimizer: optimizer.state.update(
        {model.a.weight: {**optimizer.state[model.a.weight], "count": 10}}
    ),
    "state of no parameter": lambda _, optimizer: optimizer.state.update({"common": 3}),
    "attribute of the optimizer": lambda _, optimizer: setattr(optimizer, "phase", [1, 2]),
    "optimizer in an attribute": lambda model, optimizer: setattr(
        optimizer, "inner", torch.optim.SGD(model.spare.parameters(), 0.1, momentum=0.9)
    ),
}


@pytest.mark.parametrize("has_guards", [True, False], ids=["with torch's guards", "without"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, has_guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_guards:
        monkeypatch.setattr(tensors, "guard_of", lambda _: None)
    model, optimizer = build()
    look = Surveyor({"model": model}, [optimizer])
    first = look()
    before = found_in(first)
    assert look() is look() is first  # the first of these makes the guards, the second one asks them
    CHANGES[name](model, optimizer)
    after = found_in(look())
    assert after[0] == before[0] or look() is not first  # copies are planned anew
    assert after == found_in(survey({"model": model}, [optimizer]))
    assert after != before


def test_where_a_step_ends_is_no_change_and_hides_none() -> None:
    """Torch's guards say no inside autocast, and where gradients are not wanted, to what they were made for outside."""
    model, optimizer = build()
    look = Surveyor({"model": model}, [optimizer])
    first = look()
    for place in (torch.autocast("cpu"), torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()) * 2:
        with place:
            assert look() is first
            assert look() is first
    with torch.autocast("cpu"):
        model.a.weight.requires_grad_(False)
        assert look() is not first


@pytest.mark.parametrize("seed", range(4))
def test_one_change_after_another_is_noticed(seed: int) -> None:
    model, optimizer = build()
    look = Surveyor({"model": model}, [optimizer])
    for name in random.Random(seed).sample(list(CHANGES), len(CHANGES)):
        try:
            CHANGES[name](model, optimizer)
        except (ValueError, LookupError, AttributeError, AssertionError):
            continue  # it does not go together with those before
        assert found_in(look()) == found_in(survey({"model": model}, [optimizer])), name


def test_ordinary_steps_change_nothing() -> None:
    model, optimizer = build()
    state = PlainState.of(model, optimizer, replicated=None)
    first = state.survey()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        assert state.survey() is first
    for number in range(1000, 1003):  # each is an object of its own
        optimizer.state[model.a.weight]["count"] = number
        found = state.survey()
        assert number == 1000 or found is first
        first = found
