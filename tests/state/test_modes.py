"""What a module remembers beside its state dict, and what hooks remember: captured, thrown away, built anew and restored."""

from __future__ import annotations

import datetime
import logging
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from capture_kit import give, take
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from gemini_ft.state import codec
from gemini_ft.state.base import PlainState
from gemini_ft.state.methods import kept_by, set_by
from gemini_ft.state.modes import Modes
from gemini_ft.state.optimizer_steps import OptimizerSteps, weak_hook


class Scaling:
    """A hook with a count of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 1 / self.calls)


class Remembering(nn.Module):
    """Noise of a generator of its own, a history in a list, an average that is no buffer, and a hook that counts in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.history: list[float] = []
        self.average = torch.zeros(())
        self.rate, self.constant = 0.1, 1.0
        self.counts = defaultdict(lambda: 0.5)
        self.windows = {"means": defaultdict(lambda: deque([0.0], maxlen=2))}
        self.layer = nn.Linear(4, 4)
        self.register_forward_hook(Scaling())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + self.rate * x.detach().mean()
        self.history = [*self.history, self.average.item()][-3:]
        self.counts[len(self.counts)] += 1  # each entry is a new one
        self.windows["means"]["all"].append(self.average.item() * len(self.counts))
        noise = torch.randn(x.shape, generator=self.generator)
        out: torch.Tensor = self.layer(x) + 0.1 * noise + self.average + sum(self.history) + sum(self.windows["means"]["all"])
        return out


class Damping:
    """A hook of a gradient, with a generator and a count of its own."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, random.Random(4)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return grad * self.generator.random() / self.calls


def hooked() -> nn.Module:
    """A layer whose hooks, and those of its parameters, draw from generators that they hold or enclose."""
    layer, forwards, backwards = nn.Linear(4, 4), random.Random(1), random.Random(2)
    layer.register_forward_hook(lambda _, inputs, output: output * forwards.random())
    layer.weight.register_hook(lambda grad: grad * backwards.random())
    layer.bias.register_hook(Damping())
    return layer


def step(model: nn.Module, number: int) -> str:
    return str(model(torch.full((2, 4), float(number))).sum().item().hex())


def test_what_follows_is_the_same() -> None:
    model, again = Remembering(), Remembering()
    again.load_state_dict(model.state_dict())
    state, fresh = PlainState.of(model, [], None), PlainState.of(again, [], None)
    for number in range(3):
        step(model, number)
    model.rate = 0.5
    model.layer.requires_grad_(False)
    model.layer.eval()
    taken = take(state)
    give(taken, fresh)
    assert [step(model, number) for number in range(3, 6)] == [step(again, number) for number in range(3, 6)]
    assert (again.layer.training, again.layer.weight.requires_grad) == (False, False)


def test_hooks_of_modules_and_of_parameters_go_on_with_their_generators_and_counts() -> None:
    def gradients(layer: nn.Module) -> list[Any]:
        layer.zero_grad()
        layer(torch.ones(2, 4)).sum().backward()
        return [param.grad.tolist() for param in layer.parameters() if param.grad is not None]

    layer, again = hooked(), hooked()
    again.load_state_dict(layer.state_dict())
    state, fresh = PlainState.of(layer, [], None), PlainState.of(again, [], None)
    gradients(layer)
    give(take(state), fresh)
    assert gradients(layer) == gradients(again)


def test_what_came_in_the_place_of_none_and_cannot_be_kept_is_the_new_processs_own_if_it_is_there() -> None:
    """As a second loader that `on_train_start` makes."""
    model, again = Remembering(), Remembering()
    for each in (model, again):
        each.made = each.late = None
    state, fresh = PlainState.of(model, [], None), PlainState.of(again, [], None)
    model.made, again.made, again.late = (DataLoader(range(3)) for _ in range(3))  # type: ignore[arg-type]
    made = again.made
    give(take(state), fresh)
    assert (again.made, again.late) == (made, None)


def test_modes_of_an_older_version_say_nothing_of_what_was_lost() -> None:
    model = Remembering()
    modules = {"model": model}
    modes = Modes(modules)
    model.rate = 0.5
    state = modes.collect(modules)
    assert state.pop("lost") == []
    model.rate = 0.1
    modes.restore(state, modules)
    assert model.rate == 0.5


class Shaking:
    """A hook of optimizers, with a generator and a count of its own."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, torch.Generator().manual_seed(5)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.calls += 1
        for param in optimizer.param_groups[0]["params"]:
            param.grad.add_(torch.randn(param.shape, generator=self.generator), alpha=1 / self.calls)


@pytest.mark.parametrize("of_all", [False, True], ids=["of one", "of all"])
def test_hooks_of_optimizers_go_on_with_their_generators_and_counts(of_all: bool) -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def state_with_a_hook() -> PlainState:
        hook = Shaking()
        handles.append(register_optimizer_step_pre_hook(hook) if of_all else optimizer.register_step_pre_hook(hook))
        return PlainState.of(layer, optimizer, None)

    def steps() -> list[Any]:
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return [param.tolist() for param in layer.parameters()]

    ours = register_optimizer_step_pre_hook(weak_hook(OptimizerSteps(lambda: None).announced))  # which the new process does not have yet
    handles: list[RemovableHandle] = []
    state = state_with_a_hook()
    steps()
    taken = take(state)
    then = steps()
    handles.pop().remove()
    ours.remove()
    fresh = state_with_a_hook()
    give(taken, fresh)
    assert steps() == then
    handles.pop().remove()


class Counted(torch.optim.SGD):
    """Has a method of its own as a hook."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.calls = 0
        self.register_step_post_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1


def test_an_optimizer_with_a_method_of_its_own_as_a_hook_is_captured_as_others_are(caplog: pytest.LogCaptureFixture) -> None:
    def built() -> tuple[Counted, PlainState]:
        layer = nn.Linear(2, 2)
        optimizer = Counted(layer.parameters())
        return optimizer, PlainState.of(layer, optimizer, None)

    optimizer, state = built()
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    again, fresh = built()
    give(take(state), fresh)
    assert (again.calls, again.param_groups[0]["lr"], len(again.state)) == (1, 0.05, 2)
    assert not caplog.messages


@pytest.mark.parametrize("before", [None, {"outer": None}], ids=["at the top", "inside"])
def test_a_defaultdict_that_was_made_while_training_is_named(before: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No snapshot has its function, and a new process does not have it either."""
    model = Remembering()
    model.made = before
    state = PlainState.of(model, [], None)
    made = defaultdict(lambda: 1, there=2)
    model.made = made if before is None else {"outer": made}
    with caplog.at_level(logging.WARNING):
        take(state)
    assert [text.partition(" changed")[0] for text in caplog.messages] == ["model.made"]


def test_constants_that_a_script_changes_between_two_runs_stay_as_it_says() -> None:
    model, again = Remembering(), Remembering()
    again.constant = 2.0
    fresh = PlainState.of(again, [], None)
    state = PlainState.of(model, [], None)
    step(model, 0)
    give(take(state), fresh)
    assert again.constant == 2.0
    assert again.average == model.average


CONSTANT = [1, 2]


class Holder:
    """Holds what another object holds as well."""

    def __init__(self, held: dict[str, Any]) -> None:
        vars(self).update(held)


def _holding() -> tuple[nn.Module, Holder]:
    """A module and another object that hold the same; some of it is a constant of the script, or has two names."""
    held = {"list": [0], "dict": {}, "set": set(), "deque": deque([0], maxlen=2), "array": np.zeros(2), "tensor": torch.zeros(2)}
    module, beside = nn.Module(), Holder(held)
    for name, value in held.items():
        setattr(module, name, value)
    module.constant, module.best = CONSTANT, (now := [0])
    module.now = module.last = module.first = now
    return module, beside


def _advance(module: Any) -> None:
    module.list.append(1)
    module.dict[len(module.dict)] = 1
    module.set.add(len(module.set))
    module.deque.append(3)
    module.array += 1
    module.tensor += 1
    module.now.append(4)
    module.constant = [*module.constant, 9]


def test_what_several_objects_hold_stays_one_object_and_what_they_held_before_stays_as_it_is() -> None:
    """A list of the module and of a callback; and one that was the same at first, and has been replaced in one of them."""
    module, beside = _holding()
    modes = Modes({"": module}, {"beside": beside})
    module.first = [*module.now]  # and is equal to what it was
    _advance(module)
    module.best, module.last = [*module.now], [*module.now]
    state = codec.decode(codec.encode(modes.collect({"": module})))
    again, beside_again = _holding()
    Modes({"": again}, {"beside": beside_again}).restore(state, {"": again})
    for each in (module, again):
        _advance(each)
    for name in (*vars(beside), "best", "now", "last", "first", "constant"):
        assert str(getattr(again, name)) == str(getattr(module, name)), name
    assert [str(value) for value in vars(beside_again).values()] == [str(value) for value in vars(beside).values()]
    assert CONSTANT == [1, 2]


def test_a_weight_that_was_the_parameters_own_memory_at_first_is_not_written_into_it() -> None:
    """The old spectral norm sets ``weight_orig.data`` as the weight, and each forward pass another tensor, some of which have its id."""

    def made() -> tuple[nn.Module, Modes]:
        torch.manual_seed(0)
        layer = nn.utils.spectral_norm(nn.Linear(4, 4))
        return layer, Modes({"": layer})

    layer, modes = made()
    first = id(layer.weight)
    for _ in range(500):
        layer(torch.ones(1, 4)).sum().backward()
        if id(layer.weight) == first:
            break
    state = modes.collect({"": layer})
    again, fresh = made()
    before = again.weight_orig.detach().clone()
    fresh.restore(state, {"": again})
    assert torch.equal(again.weight_orig, before)
    assert torch.equal(again.weight, layer.weight)


def test_what_several_objects_held_is_given_back_where_this_process_has_something_else_or_nothing() -> None:
    """The script of the new process makes a list when it is needed, and an array of another size."""
    module, _ = _holding()
    modes = Modes({"": module})
    _advance(module)
    state = codec.decode(codec.encode(modes.collect({"": module})))
    again, _ = _holding()
    del again.dict
    again.list, again.array, again.tensor, again.deque = None, np.zeros(3), torch.zeros(3), ()
    Modes({"": again}).restore(state, {"": again})
    for name in ("list", "dict", "array", "tensor", "deque"):
        assert str(getattr(again, name)) == str(getattr(module, name)), name


@pytest.mark.parametrize(
    ("before", "after", "is_named"),
    [
        (torch.relu, torch.tanh, True),
        (partial(torch.clamp, min=0.0), partial(torch.clamp, min=1.0), True),
        (partial(torch.clamp, min=0.0), partial(torch.clamp, min=0.0), False),
        (lambda x: x, lambda x: -x, True),
        (Scaling().__call__, Scaling().__call__, False),
        (None, torch.relu, False),
    ],
    ids=["function", "partial", "the same partial", "lambda", "the same method", "made when needed"],
)
def test_a_function_in_the_place_of_another_is_named(before: Any, after: Any, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that the training exchanges; the process that goes on has the first one."""
    module: Any = nn.Module()
    module.loss = before
    modes = Modes({"model": module})
    module.loss = after
    modes.collect({"model": module})
    assert ("model.loss changed while training and will not be restored" in caplog.text) is is_named


def test_modules_that_come_later_are_followed() -> None:
    model, again = nn.Sequential(Remembering()), nn.Sequential(Remembering(), Remembering())
    state = PlainState.of(model, [], None, can_rebuild=True)
    model.append(Remembering())
    for number in range(2):
        step(model, number)
    saved = codec.decode(take(state).extras, b"secret of a test")["modes"]
    assert saved["attributes"]["model.1"]["rate"] == 0.1
    fresh = PlainState.of(nn.Sequential(Remembering()), [], None, can_rebuild=True)
    rebuilt = PlainState.of(again, [], None, can_rebuild=True, before=fresh)
    give(take(state), rebuilt)
    assert step(again, 2) == step(model, 2)


def test_an_attribute_that_comes_while_another_goes_is_seen() -> None:
    module, again = nn.Linear(2, 2), nn.Linear(2, 2)
    for each in (module, again):
        each.before = 1  # type: ignore[assignment]
    state, fresh = PlainState.of(module, [], None), PlainState.of(again, [], None)
    take(state)
    del module.before
    module.after = 2  # type: ignore[assignment]
    give(take(state), fresh)
    assert again.after == 2


def test_what_changes_in_modules_that_had_stayed_as_they_were_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU())
    modules = {str(index): module for index, module in enumerate(model)}
    modes = Modes(modules)
    for _ in range(2):
        assert modes.collect(modules)["attributes"] == {}
    model[0].fresh = 3
    assert modes.collect(modules)["attributes"] == {"0": {"fresh": 3}}
    object.__setattr__(model[1], "__dict__", {**vars(model[1]), "p": 0.9})
    assert modes.collect(modules)["attributes"] == {"0": {"fresh": 3}, "1": {"p": 0.9}}
    del model[0].fresh
    model[1].p = 0.1
    assert modes.collect(modules)["attributes"] == {}


def test_what_is_too_large_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Remembering()
    state = PlainState.of(model, [], None)
    model.history = [0.0] * 1000
    model.handles = [model.layer.weight.register_hook(lambda grad: None)]  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            take(state)
    said = [record.getMessage() for record in caplog.records if "will not be restored" in record.getMessage()]
    assert [text.split()[0] for text in said] == ["model.history"]
    assert {item.where: str(item.rule.fate) for item in state.findings()}["model.history"] == "the user's"


def test_a_list_of_a_modules_own_parameters_is_captured_with_these(caplog: pytest.LogCaptureFixture) -> None:
    """Recurrent layers of torch have one, `_flat_weights`, and an optimizer writes to what is in it."""
    model = nn.LSTM(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = PlainState.of(model, [optimizer], None)
    model(torch.ones(4, 2))[0].sum().backward()
    optimizer.step()
    with caplog.at_level(logging.WARNING):
        take(state)
    assert caplog.messages == []


def test_a_tensor_in_the_place_of_none_is_taken_for_a_cache_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.mask, model.average, model._external_params = None, None, {}  # type: ignore[assignment]
    state, fresh = PlainState.of(model, [], None), PlainState.of(nn.Module(), [], None)
    mask, average = torch.ones(2**17), torch.zeros(2**17)
    with caplog.at_level(logging.INFO):
        model.mask, model.average = mask, average  # type: ignore[assignment]
        model._external_params = {0: nn.Parameter(torch.ones(2**17))}  # type: ignore[assignment]
        for _ in range(2):
            give(take(state), fresh)
            average.add_(1)
    said = [(record.levelname, record.getMessage().split(" c")[0]) for record in caplog.records]
    assert said == [("INFO", "model.average, model.mask"), ("WARNING", "model.average")]
    caplog.clear()
    fresh.models["model"].average = average  # type: ignore[assignment]
    take(fresh)  # resumed, it says nothing again
    assert not caplog.records


def test_a_large_tensor_that_is_let_go_of_is_gone_after_a_resume_too() -> None:
    models = [nn.Module(), nn.Module()]
    for model in models:
        model.prior = torch.zeros(2**17)  # type: ignore[assignment]
    state, fresh = (PlainState.of(model, [], None) for model in models)
    models[0].prior = None  # type: ignore[assignment]
    give(take(state), fresh)
    assert models[1].prior is None


def test_predictions_of_a_validation_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Torch counts no writes to what is made in inference mode."""
    model = nn.Module()
    with torch.inference_mode():
        model.before, after = torch.zeros(2**17), torch.ones(2**17)  # type: ignore[assignment]
    state = PlainState.of(model, [], None)
    with caplog.at_level(logging.WARNING):
        take(state)
        model.before = after  # type: ignore[assignment]
        take(state)
    assert [text.partition(" changed")[0] for text in caplog.messages] == ["model.before"]


def test_the_census_names_hooks_and_generators() -> None:
    found = {(item.where, item.note) for item in PlainState.of(Remembering(), [], None).findings()}
    assert {("model", "Scaling"), ("model.generator", "")} <= found


def test_what_a_training_lets_go_of_is_not_kept_alive() -> None:
    holder = SimpleNamespace(teacher=nn.Linear(2, 2))
    gone = weakref.ref(holder.teacher)
    modes = Modes({}, {"callback": holder})
    holder.teacher = None
    assert gone() is None
    assert modes.collect({})["attributes"] == {"callback": {"teacher": None}}


class Slots:
    __slots__ = ("__private", "plain")

    def __init__(self) -> None:
        self.__private, self.plain = 0, 0

    def count(self) -> list[int]:
        self.__private += 1
        self.plain += 2
        return [self.__private, self.plain]


class Below(Slots):
    """Has a ``__dict__`` beside the slots of its base, and hands on what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.own = 0

    def count(self) -> list[int]:
        self.own += 3
        return [*super().count(), self.own]

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Namespace(dict[str, Any]):
    __getattr__ = dict.__getitem__


def holding() -> nn.Module:
    model = nn.Module()
    model.slots, model.below, model.stats = Slots(), Below(), Namespace(first=1, count=0)  # type: ignore[assignment]
    model.warm, model.since, model.folder = True, None, None  # type: ignore[assignment]
    return model


def test_wherever_a_class_keeps_its_attributes_they_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    models: list[Any] = [holding(), holding()]
    state, fresh = (PlainState.of(model, [], None) for model in models)
    for _ in range(2):
        models[0].slots.count(), models[0].below.count()
    models[0].since, models[0].folder = datetime.timedelta(days=3), Path("best")
    give(take(state), fresh)
    assert caplog.messages == []
    assert [model.slots.count() + model.below.count() for model in models] == [[3, 6, 3, 6, 9]] * 2
    assert (models[1].since, models[1].folder) == (datetime.timedelta(days=3), Path("best"))


def test_a_namespace_stays_one_and_what_is_deleted_is_gone_after_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    models: list[Any] = [holding(), holding()]
    state, fresh = (PlainState.of(model, [], None) for model in models)
    take(state)
    models[0].stats |= {f"key {index}": index for index in range(100)}
    del models[0].stats["first"], models[0].warm
    for _ in range(2):  # what it says does not depend on the number of looks
        give(take(state), fresh)
    assert models[1].stats == models[0].stats
    assert not hasattr(models[1], "warm")
    assert caplog.messages == []
    models[0].stats |= {f"many {index}": index for index in range(2000)}
    take(state)
    assert [text.partition(" changed")[0] for text in caplog.messages] == ["model.stats"]


def test_what_cannot_be_kept_is_named_when_it_changes_in_place(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Module()
    model.table, model.money, model.teacher = [[0] * 100, [0.5]], Decimal(0), nn.Linear(2, 2)
    state = PlainState.of(nn.ModuleDict({"inner": model}), [], None)
    model.rows = nn.Module()
    take(state)
    model.table[0][7] = 1
    model.money += 1
    model.money_before = None
    take(state)
    assert [text.partition(" changed")[0] for text in caplog.messages] == ["model.inner.money, model.inner.table"]


class OwnRandom(random.Random):
    """Counts what it has drawn."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random() * self.drawn


class OwnGenerator(np.random.Generator):
    drawn = 0

    def next(self) -> float:
        self.drawn += 1
        return float(self.random()) * self.drawn


def _scaled(scaler: torch.amp.GradScaler) -> float:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


# How an object that is no plain value is made, and what it gives next.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "spawning generator": (lambda: np.random.default_rng(1), lambda rng: rng.spawn(1)[0].random()),
    "seed sequence": (lambda: np.random.SeedSequence(1), lambda seeds: np.random.default_rng(seeds.spawn(2)[1]).random()),
    "branch of a seed sequence": (
        lambda: np.random.SeedSequence([3, 4], spawn_key=(5,), pool_size=8),
        lambda seeds: float(seeds.spawn(1)[0].generate_state(1)[0]),
    ),
    "bit generator": (lambda: np.random.Philox(3), lambda bits: float(bits.random_raw())),
    "sobol": (
        lambda: torch.quasirandom.SobolEngine(2, scramble=True, seed=3),  # type: ignore[no-untyped-call]
        lambda engine: engine.draw().sum().item(),
    ),
    "scaler": (lambda: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2), _scaled),
    "random of the script": (lambda: OwnRandom(1), lambda own: own.random()),
    "numpy's generator of the script": (lambda: OwnGenerator(np.random.PCG64(1)), lambda own: own.next()),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_with_a_state_that_is_no_attribute_go_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, following = OBJECTS[name]
    models: list[Any] = [nn.Linear(1, 1) for _ in range(2)]
    for model in models:
        model.held = {"one": make()}
    first, second = models
    states = [PlainState.of(model, [], None) for model in models]
    for _ in range(3):
        following(first.held["one"])
    taken = take(states[0])
    expected = [following(first.held["one"]) for _ in range(3)]
    for _ in range(5):
        following(second.held["one"])  # of a process that goes on, and not back to what its script has made
    give(taken, states[1])
    assert [following(second.held["one"]) for _ in range(3)] == expected
    assert caplog.messages == []


def _exchanges(place: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(place, value)


# What changes in place and cannot be kept.
UNKEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "objects": (lambda: np.array([1, "a"], dtype=object), _exchanges(0, 2)),
    "masked": (lambda: np.ma.masked_array([1.0, 2.0], [False, True]), _exchanges(0, 2.0)),
    "records": (lambda: np.rec.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]), lambda held: held.a.__imul__(2)),
    "flags": (lambda: np.zeros(1_000_000, bool), _exchanges(77_777, True)),
    "columns": (lambda: np.zeros((90_000, 3))[:, 1], _exchanges(77_777, 1.0)),
    "data": (lambda: torch.zeros(300, 300), lambda held: held.data[5].add_(1)),
    "half": (lambda: torch.zeros(500, 500, dtype=torch.bfloat16), lambda held: held.data[5].add_(1)),
    "many": (lambda: [SimpleNamespace(seen=0) for _ in range(100)], lambda held: setattr(held[80], "seen", 1)),
}


@pytest.mark.parametrize("name", UNKEPT)
def test_wherever_something_large_or_odd_is_written_to_it_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, change = UNKEPT[name]
    model: Any = nn.Linear(1, 1)
    model.held = make()
    modes = Modes({"model": model})
    modes.collect({"model": model})
    assert caplog.messages == []
    change(model.held)
    modes.collect({"model": model})
    assert [text.partition(" changed")[0] for text in caplog.messages] == ["model.held"]


class Local(threading.local):
    def __init__(self) -> None:
        self.count = 0


def test_attributes_of_this_thread_are_captured() -> None:
    model = nn.Linear(1, 1)
    model.local, modules = Local(), {"model": model}  # type: ignore[assignment]
    modes = Modes(modules)
    model.local.count = 5
    assert modes.collect(modules)["attributes"] == {"model.local": {"count": 5}}


def test_attributes_are_found_in_classes_without_source() -> None:
    text = """
class Made:
    def run(self, other):
        self.plain = 1
        self.added += other
        (self.a, self.b), other.not_mine = other, 2
        def inner(other):
            other.not_mine_either = self.read
            self.deep = 3
        self.plain.of_another = 4
    @staticmethod
    def alone():
        return 1
    @property
    def value(self): return 1
    @value.setter
    def value(self, value): self._value = value
class Saving:
    unseen = 1
    def __init__(self): self.kept = self.counted = self.unseen = 0
    def state_dict(self): return {"kept": self.kept, "more": self.more(), "value": [self.value for _ in range(2)]}
    def more(self): return f"{self}" if self.again else 1
    @property
    def value(self): return self.deep
    def load_state_dict(self, state): self.set(state, self.unused(state).mine)
    def set(self, state, more): self.loaded = state
class Below(Saving):
    def more(self): return self.below
    def unused(self, other): return other.not_mine
class Whole:
    def __init__(self, other): self.every = self.one = other
    def state_dict(self): return vars(self)
class OneAfterAnother:
    def state_dict(self, other): return self.one if other else f(other, self)
    def run(self): self.set = 1
"""
    made: dict[str, Any] = {}
    exec(text, made)
    assert set_by(made["Made"]) == {"plain", "added", "a", "b", "deep", "_value"}
    assert kept_by(made["Saving"]) == {"kept", "loaded", "unused"}
    assert kept_by(made["Below"]) == {"kept", "loaded"}
    assert kept_by(made["Whole"]) == {"every", "one"}
    assert kept_by(made["OneAfterAnother"]) == {"one", "set"}


@pytest.mark.gpu
def test_a_tensor_on_an_accelerator_counts_when_it_is_written() -> None:
    module = nn.Linear(2, 2)
    module.seen, module.constant = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")  # type: ignore[assignment]
    modes = Modes({"": module})
    assert modes.collect({"": module})["attributes"] == {}
    module.seen.add_(3)
    [found] = modes.collect({"": module})["attributes"].values()
    assert {name: value.tolist() for name, value in found.items()} == {"seen": [3.0, 3.0]}
