"""Capture and restore of the training state: after a restore, training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from capture_kit import collect, shard_of
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from gemini_ft.core.layout import Layout, build_layout, plan_reads, stored_specs
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state import codec
from gemini_ft.state.base import PlainState
from gemini_ft.state.copies import copy_into
from gemini_ft.state.modules import apply_extras, collect_extras, destinations
from gemini_ft.state.optimizer_steps import OptimizerSteps
from gemini_ft.state.rng import rng_state, set_rng_state
from gemini_ft.state.survey import survey
from gemini_ft.state.tensors import HOST, Fingerprint, Source, describe, split_state_name, state_name
from gemini_ft.state.writes import name_loads

pytestmark = pytest.mark.usefixtures("one_thread")

Models = Mapping[str, nn.Module]


class Snapshot(NamedTuple):
    layouts: dict[int, Layout]
    shards: dict[int, torch.Tensor]
    extras: bytes


def snapshot(models: Models, optimizers: Sequence[Any], world: int = 3) -> Snapshot:
    """What ``world`` ranks that hold the same would store; per-rank tensors are the same on all of them here."""
    layouts, shards, extras = {}, {}, b""
    for rank in range(world):
        sources, loose = collect(models, optimizers, rank, world, replicated=True)
        layouts[rank] = build_layout([source.spec for source in sources], rank, world)
        shards[rank] = shard_of(sources, layouts[rank])
        extras = codec.encode(loose)
    return Snapshot(layouts, shards, extras)


def restore(taken: Snapshot, models: Models, optimizers: Sequence[Any], rank: int = 1) -> None:
    sources = destinations(models, optimizers, stored_specs(rank, taken.layouts), rank, len(taken.layouts), replicated=True)
    tensors = {source.spec.name: source.tensor for source in sources}
    for read in plan_reads([source.spec for source in sources], rank, taken.layouts):
        copy_into(tensors[read.name], read.start, read.stop, taken.shards[read.owner][read.offset : read.offset + read.nbytes])
    apply_extras(models, optimizers, codec.decode(taken.extras))


class Net(nn.Module):
    """Parameters of several strides, a frozen one, a shared one, a scalar, buffers of both kinds."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(3)
        self.a = nn.Linear(12, 5)
        self.b = nn.Linear(5, 12, bias=False)
        self.b.weight = nn.Parameter(self.a.weight.detach().t().clone().t().contiguous().t())  # not contiguous
        self.tied = self.a
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        out: torch.Tensor = self.b(self.tied(self.norm(self.conv(x)).flatten(1)))
        return (out * self.scale).pow(2).mean()


def matrices() -> nn.Module:
    """Only contiguous matrices."""
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
    # LBFGS wants contiguous gradients, Muon only matrices: both get the plain model.
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=4, max_iter=3),
    "lbfgs-wolfe": lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe", max_iter=3),
    "muon": lambda p: torch.optim.Muon(p),
}


def build(name: str, seed: int = 0) -> tuple[Any, Optimizer]:
    torch.manual_seed(seed)
    model = matrices() if name.startswith(("muon", "lbfgs")) else Net()
    return model, OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        shape = (4, 2, 2, 2) if isinstance(model, Net) else (4, 8)
        x = torch.randn(shape, generator=generator).to(next(model.parameters()).device)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All state in plain form, by a way that shares nothing with the code under test."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "tensors": {name: plain(value) for name, value in tensors.items()},
        "state": plain(optimizer.state_dict()["state"]),
        "groups": plain(groups),
    }


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        return (
            str(value.dtype),
            value.device.type,
            tuple(value.shape),
            dense.flatten().view(torch.uint8).tolist() if value.numel() else [],
        )
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize("stepped", [0, 2], ids=["into a fresh optimizer", "into a used optimizer"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_training_goes_on_bit_for_bit(name: str, stepped: int) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    taken = snapshot({"model": model}, [optimizer])
    at_snapshot = everything(model, optimizer)
    train(model, optimizer, range(3, 6))

    other, other_optimizer = build(name, seed=99)
    train(other, other_optimizer, range(50, 50 + stepped))
    for group in other_optimizer.param_groups:
        group["lr"] = group["lr"] * 7
    restore(taken, {"model": other}, [other_optimizer])
    assert everything(other, other_optimizer) == at_snapshot
    train(other, other_optimizer, range(3, 6))
    assert everything(other, other_optimizer) == everything(model, optimizer)


@pytest.mark.parametrize("name", ["adam", "lbfgs", "momentum"])
def test_a_snapshot_before_the_first_step_clears_an_optimizer_that_has_state(name: str) -> None:
    model, optimizer = build(name)
    taken, fresh = snapshot({"model": model}, [optimizer]), everything(model, optimizer)
    other, other_optimizer = build(name, seed=99)
    train(other, other_optimizer, range(2))
    restore(taken, {"model": other}, [other_optimizer])
    assert everything(other, other_optimizer) == fresh
    assert not other_optimizer.state
    train(model, optimizer, range(2))
    train(other, other_optimizer, range(2))
    assert everything(other, other_optimizer) == everything(model, optimizer)


def test_a_restore_keeps_the_tensors_that_fit() -> None:
    """Graphs and fused kernels may hold their addresses."""
    model, optimizer = build("adamw-tensor-lr")
    train(model, optimizer, range(2))
    taken = snapshot({"model": model}, [optimizer])
    held = [model.scale, model.scale.data_ptr(), optimizer.state[model.scale]["exp_avg"], optimizer.param_groups[0]["lr"]]
    train(model, optimizer, range(2, 4))
    restore(taken, {"model": model}, [optimizer])
    assert held[0] is model.scale
    assert held[1] == model.scale.data_ptr()
    assert held[2] is optimizer.state[model.scale]["exp_avg"]
    assert held[3] is optimizer.param_groups[0]["lr"]


def test_state_is_never_cast() -> None:
    """`load_state_dict` would cast this state to the parameter's dtype."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    precise = torch.tensor([1 + 2**-20, 3.0, -1e-30, float("nan")])
    optimizer.state[weight] = {
        "master": precise,
        "counts": torch.tensor([2**40], dtype=torch.int64),
        "kind": torch.zeros(3, dtype=torch.bool),
    }
    taken = snapshot({}, [optimizer])
    fresh = torch.optim.SGD([nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))], lr=0.1)
    restore(taken, {}, [fresh])
    (state,) = fresh.state.values()
    assert plain(state["master"]) == plain(precise)
    assert state["counts"].tolist() == [2**40]
    assert state["kind"].dtype == torch.bool


def test_new_state_takes_the_strides_of_its_parameter() -> None:
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    other, other_optimizer = build("adam", seed=1)
    restore(snapshot({"model": model}, [optimizer]), {"model": other}, [other_optimizer])
    for param in other.conv.weight, other.b.weight:
        assert not param.is_contiguous()
        assert other_optimizer.state[param]["exp_avg"].stride() == param.stride()


def names(models: Models, optimizers: Sequence[Any] = (), replicated: bool = True) -> dict[str, Source]:
    return {source.spec.name: source for source in collect(models, optimizers, 1, 3, replicated)[0]}


def test_names_groups_and_flags() -> None:
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    found = names({"model": model}, [optimizer])
    assert found["model.conv.weight"].spec.group == (0, 1, 2)
    assert found["optim0.model.conv.weight.exp_avg"].spec.group == (0, 1, 2)
    assert found["optim0.model.conv.weight.step"].spec.shape == ()
    for name in ("model.norm.running_mean", "model.norm.num_batches_tracked", "model.table"):
        assert found[name].spec.group == (1,)
    buffers = {"model.table", "model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"}
    assert {name for name, source in found.items() if source.mutable} == buffers
    assert [name for name, source in found.items() if source.spec.frozen] == ["model.frozen.weight", "model.frozen.bias"]
    assert not any(name.startswith("model.tied") for name in found), "a shared parameter is captured once"
    assert all(source.tensor.data_ptr() for source in found.values())
    assert found["model.scale"].tensor.data_ptr() == model.scale.data_ptr()


def test_without_replication_everything_is_per_rank() -> None:
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    assert {source.spec.group for source in names({"model": model}, [optimizer], replicated=False).values()} == {(1,)}


def test_the_version_counter_is_that_of_the_live_tensor() -> None:
    model, _ = build("sgd")
    source = names({"model": model})["model.scale"]
    before = source.tensor._version
    with torch.no_grad():
        model.scale.add_(1)
    assert source.tensor._version == before + 1


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    return wrapped  # type: ignore[no-any-return]


def test_wrappers_do_not_enter_names() -> None:
    plain_model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    expected = list(names({"model": plain_model}))
    inner = copy.deepcopy(plain_model)
    inner[1] = compiled(inner[1])
    assert list(names({"model": compiled(nn.DataParallel(inner))})) == expected
    assert list(names({"model": nn.DataParallel(plain_model)})) == expected


def test_parameters_outside_the_models_are_captured_by_place() -> None:
    model, extra = nn.Linear(2, 1), nn.Parameter(torch.tensor([3.0]))
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [extra], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    (model(torch.ones(1, 2)).sum() * extra).backward()
    optimizer.step()
    assert list(names({"model": model}, [optimizer]))[2:] == [
        "optim0.group1.param0",
        "optim0.model.weight.momentum_buffer",
        "optim0.model.bias.momentum_buffer",
        "optim0.group1.param0.momentum_buffer",
    ]
    taken, before = snapshot({"model": model}, [optimizer]), extra.item()
    with torch.no_grad():
        extra.zero_()
    restore(taken, {"model": model}, [optimizer])
    assert extra.item() == before


def test_two_optimizers_over_the_same_parameters() -> None:
    param = nn.Parameter(torch.ones(2))
    first, second = torch.optim.Adam([param]), torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.sum().backward()  # type: ignore[no-untyped-call]
    first.step()
    second.step()
    assert list(names({}, [first, second])) == [
        "optim0.group0.param0",
        "optim0.group0.param0.step",
        "optim0.group0.param0.exp_avg",
        "optim0.group0.param0.exp_avg_sq",
        "optim1.optim0.group0.param0.momentum_buffer",
    ]
    taken = snapshot({}, [first, second])
    expected = plain([first.state_dict(), second.state_dict()])
    first.step()
    second.step()
    restore(taken, {}, [first, second])
    assert plain([first.state_dict(), second.state_dict()]) == expected


def test_several_models_share_parameters_once() -> None:
    shared = nn.Linear(2, 2)
    found = names({"actor": nn.Sequential(shared), "critic": nn.Sequential(shared, nn.Linear(2, 1))})
    assert list(found) == ["actor.0.weight", "actor.0.bias", "critic.1.weight", "critic.1.bias"]


def test_state_that_is_shared_stays_shared() -> None:
    params: list[torch.Tensor] = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    clock = torch.zeros(())
    for param in params[:2]:
        optimizer.state[param] = {"clock": clock, "anchor": params[2]}
    taken = snapshot({}, [optimizer])
    clock.add_(5)
    fresh = torch.optim.SGD([nn.Parameter(torch.zeros(2)) for _ in range(3)], lr=0.1)
    restore(taken, {}, [fresh])
    first, second, third = fresh.param_groups[0]["params"]
    assert fresh.state[first]["clock"] is fresh.state[second]["clock"]
    assert fresh.state[first]["clock"].item() == 0
    assert fresh.state[second]["anchor"] is third


def test_odd_optimizer_state_round_trips() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {
        "a.b%2E": torch.tensor([7]),
        "plan": [torch.ones(2, dtype=torch.float64), (1, None)],
        3: torch.tensor(4),
        "n": 2**70,
    }
    optimizer.state["global"] = {"count": 5}  # type: ignore[index]
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    taken, expected = snapshot({}, [optimizer]), plain(optimizer.state_dict())
    fresh = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.3)
    fresh.state["stale"] = 1  # type: ignore[index]
    restore(taken, {}, [fresh])
    found = plain(fresh.state_dict())
    assert found["param_groups"] == expected["param_groups"]
    assert {key: sorted(value.items(), key=str) for key, value in found["state"].items()} == {
        key: sorted(value.items(), key=str) for key, value in expected["state"].items()
    }


@pytest.mark.parametrize("key", ["step", "a.b", "a%2Eb", "%", "..", ""])
def test_names_of_state_can_be_split_again(key: str) -> None:
    assert split_state_name(state_name("optim0.model.fc.weight", key)) == ("optim0.model.fc.weight", key)


def test_a_scheduler_still_steers_the_restored_optimizer() -> None:
    model, optimizer = build("adamw-tensor-lr")
    scheduler = StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    taken = snapshot({"model": model}, [optimizer])
    other, other_optimizer = build("adamw-tensor-lr")
    other_scheduler = StepLR(other_optimizer, 1, 0.5)
    train(other, other_optimizer, range(1))
    restore(taken, {"model": other}, [other_optimizer])
    other_scheduler.load_state_dict(scheduler.state_dict())
    for steps in (scheduler, other_scheduler):
        steps.step()
    assert optimizer.param_groups[0]["lr"].item() == other_optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-2 / 4)


class WithExtra(nn.Linear):
    history: tuple[Any, ...] = ()

    def get_extra_state(self) -> object:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


def test_modules_extra_state_comes_back() -> None:
    first, second = WithExtra(1, 1), WithExtra(1, 1)
    model = nn.Sequential(first, second)
    first.history, second.history = (1, 2), (3,)
    taken = snapshot({"model": model}, [])
    for layer in (first, second):
        layer.history = ()
    restore(taken, {"model": model}, [])
    assert [layer.history for layer in (first, second)] == [(1, 2), (3,)]


# When sources must be described again


def changed(model: nn.Module, optimizer: Optimizer, change: Callable[[], object]) -> bool:
    live = survey({"model": model}, [optimizer]).live
    before, sources = Fingerprint(live), describe(live, 0, 1, True)
    change()
    after = Fingerprint(survey({"model": model}, [optimizer]).live)
    del sources  # kept until here: while they live, their memory cannot be used again
    return before != after


def test_the_fingerprint_stays_through_ordinary_steps() -> None:
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    assert not changed(model, optimizer, lambda: train(model, optimizer, range(1, 3)))


CHANGES: dict[str, Callable[[Any, Optimizer], object]] = {
    "first step": lambda model, optimizer: train(model, optimizer, range(1)),
    "data replaced": lambda model, _: setattr(model.scale, "data", torch.tensor(2.0)),
    "buffer replaced": lambda model, _: setattr(model, "table", model.table + 1),
    "frozen": lambda model, _: model.conv.requires_grad_(False),
    "module replaced": lambda model, _: setattr(model, "a", nn.Linear(12, 5)),
    "resized": lambda model, _: model.table.resize_(2),
    "other strides": lambda model, _: setattr(model.a.weight, "data", model.a.weight.data.as_strided((5, 12), (1, 5))),
    "other kind of numbers": lambda model, _: setattr(model.norm.running_mean, "data", model.norm.running_mean.data.view(torch.int32)),
    "group added": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "state loaded": lambda model, optimizer: optimizer.state[model.scale].update(step=torch.zeros(())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_fingerprint_changes_when(name: str) -> None:
    model, optimizer = build("adam")
    assert changed(model, optimizer, lambda: CHANGES[name](model, optimizer))


def test_looking_does_not_create_state() -> None:
    model, optimizer = build("adam")
    collect({"model": model}, [optimizer], 0, 1, True)
    assert len(optimizer.state) == 0


# What is refused, by name


class Marked(torch.Tensor):
    pass


def with_buffer(value: torch.Tensor) -> Any:
    model = nn.Linear(1, 1)
    model.register_buffer("odd", value)
    return model


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: torch.eye(2).to_sparse(), r"has the layout torch\.sparse_coo; only dense tensors"),
        (lambda: torch.empty(2, device="meta"), "is on the meta device and has no values yet"),
        (lambda: torch.zeros(2).as_subclass(Marked), r"is a .*Marked, a tensor type whose memory is not known here; use"),
        (lambda: torch.zeros(4).as_strided((2, 2), (1, 1)), "has elements that share memory"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), r"is a .*NestedTensor, a tensor type"),
        (lambda: torch.empty(2, dtype=torch.bits8), r"has the dtype torch\.bits8; supported: bfloat16, bool"),
    ],
    ids=["sparse", "meta", "subclass", "overlapping", "nested", "dtype"],
)
def test_tensors_that_cannot_be_captured_are_refused_by_name(value: Callable[[], torch.Tensor], says: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"^model\.odd {says}"):
        collect({"model": with_buffer(value())}, [], 0, 1, True)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_tensors_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"^model\.odd has the dtype torch\.qint8"):
        collect({"model": with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))}, [], 0, 1, True)


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"^model\.weight is a .*UninitializedParameter"):
        collect({"model": nn.LazyLinear(2)}, [], 0, 1, True)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: with_buffer(torch.eye(2).to_sparse()), r"model\.odd has the layout torch\.sparse_coo"),
        (lambda: nn.LazyLinear(2), r"model\.weight is a .*UninitializedParameter"),
    ],
    ids=["sparse", "lazy"],
)
def test_a_snapshot_refuses_them_by_name_too(model: Callable[[], nn.Module], says: str) -> None:
    state = PlainState({"model": model()}, ())
    live = state.survey()
    state.extras()
    with pytest.raises(UnsupportedStateError, match=f"^{says}"):
        Fingerprint(live)


def test_an_expanded_buffer_is_captured_and_restored() -> None:
    model = with_buffer(torch.arange(3).view(3, 1).expand(3, 4))
    taken = snapshot({"model": model}, [])
    model.odd[:, :1] += 7
    restore(taken, {"model": model}, [])
    assert model.odd.tolist() == [[row] * 4 for row in range(3)]


def test_optimizer_in_backward_is_refused_by_name() -> None:
    model = nn.Linear(1, 1)
    model.weight._in_backward_optimizers = [torch.optim.SGD([model.weight])]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedStateError, match=r"^model\.weight is updated during backward"):
        collect({"model": model}, [], 0, 1, True)


class Lookahead(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_weights": []}


class Polite(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class NotAnOptimizer:
    pass


def test_optimizers_with_hidden_state_are_refused_by_name() -> None:
    params = list(nn.Linear(1, 1).parameters())
    with pytest.raises(UnsupportedStateError, match=r"^Lookahead keeps state outside of optimizer\.state \(slow_weights\)"):
        collect({}, [Lookahead(params)], 0, 1, True)
    collect({}, [Polite(params)], 0, 1, True)
    with pytest.raises(UnsupportedStateError, match=r"^NotAnOptimizer is not a torch\.optim\.Optimizer"):
        collect({}, [NotAnOptimizer()], 0, 1, True)


def test_state_of_strange_tensors_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.state[torch.zeros(4, 2)] = {}
    with pytest.raises(
        UnsupportedStateError, match=r"SGD keeps state for a tensor of shape \(4, 2\) that is in none of its parameter groups"
    ):
        collect_extras(survey({}, [optimizer]))


@pytest.mark.parametrize("name", ["optim0", "group3", "a.b"])
def test_names_of_models_that_would_be_ambiguous_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"a model cannot be named '{name}'"):
        collect({name: nn.Linear(1, 1)}, [], 0, 1, True)


# What does not fit the snapshot


def test_another_model_is_refused_with_the_names() -> None:
    model, optimizer = build("adam")
    taken = snapshot({"model": model}, [optimizer])
    other = nn.Linear(2, 2)
    with pytest.raises(LayoutMismatchError, match=r"model\.bias .*is missing from the snapshot|model\.weight .*is missing"):
        restore(taken, {"model": other}, [torch.optim.Adam(other.parameters())])


def test_another_optimizer_is_refused() -> None:
    model, optimizer = build("sgd")
    taken = snapshot({"model": model}, [optimizer])
    other, adam = build("adam")
    with pytest.raises(
        LayoutMismatchError, match=r"optim0: class: 'Adam' now and 'SGD' in the snapshot; resume with the script that made it"
    ):
        restore(taken, {"model": other}, [adam])
    with pytest.raises(LayoutMismatchError, match=r"number of optimizers: 2 now and 1 in the snapshot"):
        restore(taken, {"model": model}, [optimizer, torch.optim.SGD([model.scale])])


def test_parameters_in_another_order_are_refused() -> None:
    model = nn.Linear(2, 2)
    taken = snapshot({"model": model}, [torch.optim.SGD([model.weight, model.bias])])
    with pytest.raises(LayoutMismatchError, match="optim0: hash of the parameters' names"):
        restore(taken, {"model": model}, [torch.optim.SGD([model.bias, model.weight])])
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    with pytest.raises(LayoutMismatchError, match=r"optim0: parameters per group: \[1, 1\] now and \[2\] in the snapshot"):
        restore(taken, {"model": model}, [torch.optim.SGD(groups)])


def test_other_modules_with_extra_state_are_refused() -> None:
    taken = snapshot({"model": nn.Sequential(WithExtra(1, 1))}, [])
    with pytest.raises(LayoutMismatchError, match=r"modules with extra state: \[\] now and \['model\.0'\] in the snapshot"):
        restore(taken, {"model": nn.Sequential(nn.Linear(1, 1))}, [])


# Wrappers of optimizers


def test_lightning_and_fabric_optimizers_are_unwrapped() -> None:
    fabric_wrappers = pytest.importorskip("lightning.fabric.wrappers", reason="needs lightning: pip install lightning")
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="needs lightning: pip install lightning")
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    expected = list(names({"model": model}, [optimizer]))
    assert list(names({"model": model}, [core.LightningOptimizer(optimizer)])) == expected
    fabric = fabric_wrappers._FabricOptimizer(optimizer, strategy=None)
    assert list(names({"model": fabric_wrappers._FabricModule(model, strategy=None)}, [fabric])) == expected


def test_an_optimizer_that_accelerate_has_prepared_is_unwrapped_and_its_steps_are_noticed() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    model, optimizer = build("adam")
    train(model, optimizer, range(1))
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert list(names({"model": model}, [prepared])) == list(names({"model": model}, [optimizer]))
    waited = []
    steps = OptimizerSteps(lambda: waited.append(optimizer))
    steps.follow(PlainState({"model": model}, [prepared]), [], hooks=True)
    assert not steps.take()
    prepared.step()
    steps.refuse_stranger()
    assert (steps.take(), steps.made, waited) == (True, 1, [optimizer])
    steps.forget()


# Random generators


def draws() -> list[Any]:
    return [random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist(), random.gauss(0, 1), np.random.randn()]


def test_random_generators_go_on_where_they_were() -> None:
    draws()
    saved = codec.encode(rng_state())
    expected = draws()
    draws()
    set_rng_state(codec.decode(saved))
    assert draws() == expected


def test_another_generator_of_numpy_goes_on_where_it_was() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        test_random_generators_go_on_where_they_were()
    finally:
        np.random.set_bit_generator(usual)


# On an accelerator


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "adam-fused", "momentum", "adafactor", "lbfgs"])
def test_training_on_an_accelerator_goes_on_bit_for_bit(name: str) -> None:
    def on_cuda(seed: int) -> tuple[Any, Optimizer]:
        model = build(name, seed)[0].cuda()
        return model, OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])

    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        model, optimizer = on_cuda(0)
        train(model, optimizer, range(3))
        taken, at_snapshot = snapshot({"model": model}, [optimizer]), everything(model, optimizer)
        train(model, optimizer, range(3, 5))
        other, other_optimizer = on_cuda(99)
        restore(taken, {"model": other}, [other_optimizer])
        assert everything(other, other_optimizer) == at_snapshot
        train(other, other_optimizer, range(3, 5))
        assert everything(other, other_optimizer) == everything(model, optimizer)


@pytest.mark.gpu
def test_state_that_stays_on_the_host_is_marked() -> None:
    param = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.Adam([param])
    param.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    found = names({}, [optimizer])
    assert found["optim0.group0.param0.step"].spec.logical == HOST
    assert found["optim0.group0.param0.exp_avg"].spec.logical == ""


@pytest.mark.gpu
def test_random_generators_of_the_accelerator_go_on_where_they_were() -> None:
    torch.rand(3, device="cuda")
    saved = codec.encode(rng_state())
    expected = torch.rand(3, device="cuda").tolist()
    set_rng_state(codec.decode(saved))
    assert torch.rand(3, device="cuda").tolist() == expected


def test_what_is_loaded_over_what_was_resumed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Until the first step; a copy of it may be loaded at any time."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = name_loads([model], [optimizer])
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    assert not caplog.messages
    for item in (model, optimizer, model):
        item.load_state_dict(item.state_dict())
        if item is optimizer:
            for handle in handles:
                handle.remove()
    assert [line.partition(" that ")[0] for line in caplog.messages] == ["a Linear", "a SGD"]


class WithoutConstructor(torch.optim.Optimizer):
    """As Lookahead in pytorch_optimizer and in timm, which call no constructor of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults


def test_what_cannot_be_watched_is_no_reason_to_end_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = name_loads([model], [WithoutConstructor(inner), inner])
    inner.load_state_dict(inner.state_dict())
    for handle in handles:
        handle.remove()
    assert [line.partition(" that ")[0] for line in caplog.messages] == ["a SGD"]
