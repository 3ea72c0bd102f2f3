"""Every optimizer is captured and restored to the last bit, or refused by name: torch's with each flag, and those of public packages."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from capture_kit import SAM, Lookahead, give, take
from eight_bits import Blockwise, Wrapped
from torch import nn
from torch.optim import Optimizer

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.base import PlainState
from gemini_ft.testing import digest

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[list[nn.Parameter]], Any]


class Averaging(torch.optim.SGD):
    """State of every kind in attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count, self.total = 0, torch.zeros(())
        self.generator = torch.Generator().manual_seed(3)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.by_parameter = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}
        self.by_id = {id(p): 0 for group in self.param_groups for p in group["params"]}
        self.first = self.param_groups[0]["params"][0]
        self.helper = Helper()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        self.helper.seen.append(self.count)
        for slow, (p, average) in zip(self.slow, self.by_parameter.items(), strict=True):
            average.lerp_(p, 0.1)
            slow.lerp_(p, 0.5)
            p.add_(torch.randn(p.shape, generator=self.generator) * 1e-3 + slow * 1e-2 + average * 1e-2 * self.by_id[id(p)])
            self.by_id[id(p)] += 1
        self.first.mul_(1 + 1e-3 * len(self.helper.seen))
        self.total = self.total + self.first.sum()
        self.first.add_(self.total * 1e-4)
        return loss


class Helper:
    def __init__(self) -> None:
        self.seen: list[int] = []


class Projecting(torch.optim.SGD):
    """An object in the state of each parameter, as GaLore has it; for a small one its basis is None. It keeps a method when it is used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if (projector := self.state[param].setdefault("projector", Projector())).turns % 3 == 0 and len(param) > 4:
                projector.basis = torch.linalg.svd(param.grad, full_matrices=False)[2][:1]
            if not hasattr(projector, "kept"):
                projector.kept = projector.turn
            projector.kept()
            if projector.basis is not None:
                param.grad = param.grad @ projector.basis.t() @ projector.basis
        return super().step()


class Projector:
    kept: Callable[[], None]

    def __init__(self) -> None:
        self.basis: torch.Tensor | None = None
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1


def optim(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, **options)


def torch_optimizers() -> Iterator[tuple[str, Make]]:
    """All of torch.optim as they are, and with each flag that they have."""
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind in (Optimizer, torch.optim.SparseAdam):
            continue
        needed: dict[str, Any] = {"lr": 1e-2} if name != "Adadelta" else {}
        yield name, optim(name, **needed)
        for flag, parameter in inspect.signature(kind).parameters.items():
            options = dict(needed)
            if flag in ("foreach", "fused", "maximize", "amsgrad", "nesterov", "centered", "decoupled_weight_decay"):
                options[flag] = True
                options |= {"momentum": 0.9} if flag == "nesterov" and name == "SGD" else {}
            elif flag in ("momentum", "weight_decay") and parameter.default == 0:
                options[flag] = 0.3
            elif flag == "line_search_fn":
                options[flag] = "strong_wolfe"
            elif flag == "lr" and name in ("Adam", "AdamW"):
                options[flag] = torch.tensor(1e-2)
            else:
                continue
            yield f"{name}-{flag}", optim(name, **options)


OURS: dict[str, Make] = {
    "SAM over SGD": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "SAM over Adam": lambda params: SAM(params, torch.optim.Adam, lr=0.1),
    "attributes": Averaging,
    "objects in the state": lambda params: Projecting(params, lr=0.1),
    "one that has not called torch's __init__": lambda params: Lookahead(torch.optim.Adam(params, lr=0.1)),
    "eight bits in blocks": lambda params: Blockwise(params, lr=0.1),
}
TORCH = dict(torch_optimizers())


def build(make: Make, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    return model, make(list(model.parameters()))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward(create_graph=getattr(optimizer, "create_graph", False))
            return loss  # type: ignore[no-any-return]

        closure()
        optimizer.step(closure)


def check(make: Make) -> str:
    """Capture in mid-training, throw everything away, build it anew, restore and go on: the bits, or a refusal by name."""
    model, optimizer = build(make, seed=0)
    PlainState.of(model, optimizer, None).watch()  # as a Checkpointer does
    train(model, optimizer, range(4))
    try:
        taken = take(PlainState.of(model, optimizer, None))
    except UnsupportedStateError as error:
        return f"refused: {error}"
    torch.manual_seed(5)  # a Checkpointer has the generators as well
    train(model, optimizer, range(4, 7))
    again, other = build(make, seed=1)
    give(taken, PlainState.of(again, other, None))
    torch.manual_seed(5)
    train(again, other, range(4, 7))
    assert digest(again.state_dict()) == digest(model.state_dict())
    assert digest(plain(other.state_dict())) == digest(plain(optimizer.state_dict()))
    return "captured"


def plain(value: Any) -> Any:
    """A state dict as values alone: some have parameters as keys, or objects."""
    if isinstance(value, dict):
        keys = sorted(value, key=str) if all(isinstance(key, str | int) for key in value) else value
        return [plain(value[key]) for key in keys]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, torch.Tensor | int | float | str | None) else type(value).__qualname__


@pytest.mark.parametrize("name", OURS)
def test_what_optimizers_hold_is_captured(name: str) -> None:
    assert check(OURS[name]) == "captured"


def test_state_in_tensors_of_another_class_is_refused_by_name() -> None:
    assert "weight.momentum is a eight_bits.State8bit, a tensor type whose memory" in check(lambda params: Wrapped(params, lr=0.1))


@pytest.mark.parametrize("name", TORCH)
def test_all_of_torch(name: str) -> None:
    assert check(TORCH[name]) == "captured"


def package_optimizers(package: str) -> Iterator[tuple[str, Make]]:
    module = importlib.import_module(package)
    for name, kind in sorted(vars(module).items()):
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            yield name, kind


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2},
    {"base_optimizer": torch.optim.Adam, "lr": 1e-2},
    {"optimizer": torch.optim.Adam, "lr": 1e-2},
]


@pytest.mark.parametrize("package", ["pytorch_optimizer", "torch_optimizer", "schedulefree", "prodigyopt", "lion_pytorch"])
def test_optimizers_of_public_packages_are_captured_or_refused(package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}: pip install --no-deps {package}")
    outcomes: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in package_optimizers(package):
            if (make := next((make for make in ways_to_make(kind) if is_deterministic(make)), None)) is not None:
                try:
                    outcomes[name] = check(make)
                except Exception as error:
                    outcomes[name] = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    assert not {name: text for name, text in outcomes.items() if text.startswith("FAILED")}
    assert "captured" in outcomes.values()


def ways_to_make(kind: Any) -> Iterator[Make]:
    for arguments in ARGUMENTS:

        def make(params: list[nn.Parameter], arguments: dict[str, Any] = arguments) -> Any:
            optimizer = kind(params, **arguments)
            getattr(optimizer, "train", lambda: None)()
            return optimizer

        yield make


def is_deterministic(make: Make) -> bool:
    """Whether it can be made so, and trains this model to the same bits twice."""
    ends = []
    for _ in range(2):
        try:
            model, optimizer = build(make, 0)
            train(model, optimizer, range(7))
        except Exception:
            return False
        ends.append(digest(model.state_dict()))
    return ends[0] == ends[1]
