"""What a loop uses and has forgotten to give is found, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
import weakref
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from capture_kit import give, take
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft
from gemini_ft.errors import StateError
from gemini_ft.state import iterators
from gemini_ft.state.base import PlainState
from gemini_ft.state.iterators import check_epochs
from gemini_ft.state.left_out import Generators, left_out
from gemini_ft.state.loop import LoopWatch
from gemini_ft.state.remembered import Attributes
from gemini_ft.state.rng import private_generators


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
    scaler, unused, disabled = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, True, False))
    scaler.scale(torch.ones(()))
    assert left_out([model], [optimizer]) == ["AveragedModel", "GradScaler", "LinearLR", "SequentialLR", "StepLR"]
    assert left_out([model, nn.ModuleList([average]), Holder(chain), scaler], [optimizer]) == []
    assert left_out([average, scaler, chain], [optimizer, other]) == ["ExponentialLR"]
    del unrelated, unused, disabled


def test_a_generator_of_a_parametrization_deep_in_a_model_is_known_wherever_else_it_is_found() -> None:
    noisy: Any = nn.Identity()
    noisy.generator = torch.Generator()
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    nn.utils.parametrize.register_parametrization(model[0][0], "weight", noisy)
    beside = SimpleNamespace(found=noisy.generator)
    generators = Generators([model])
    torch.rand((), generator=beside.found)
    assert generators.drawn_from() == []


def test_generators_of_all_layers_of_a_large_model_are_known() -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(8))) for _ in range(40)))
    found = [torch.Generator() for _ in model]
    for layer, generator in zip(model, found, strict=True):
        vars(layer)["generator"] = generator
    generators = Generators([model])
    for each in found:
        torch.rand((), generator=each)
    assert generators.drawn_from() == []


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


@pytest.mark.parametrize("does", ["the same seed", "another seed", "draws", "nothing", "steps first"])
def test_a_seed_that_is_set_again_before_an_epoch_goes_on_is_named_and_stays(
    does: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what an undisturbed loop may do as well: another seed for each step, numbers that it draws before the batch."""
    monkeypatch.setattr(iterators, "resumption", iterators.Resumption())
    data: Any = gemini_ft.resumable(DataLoader(range(8), 2))  # type: ignore[arg-type]
    torch.manual_seed(7)
    batches = iter(data)
    next(batches)
    torch.randn(3)
    data.load_state_dict(data.state_dict())
    iterators.resumption.note_resume()
    if does == "steps first":
        iterators.resumption.random = None
    if does == "draws":
        torch.randn(3)
    elif does != "nothing":
        torch.manual_seed(8 if does == "another seed" else 7)
    expected = torch.get_rng_state()
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5], [6, 7]]
    assert torch.equal(torch.get_rng_state(), expected)
    named = [line for line in caplog.messages if line.startswith("this loop has set the seed 7 again between its resume and the batch")]
    assert len(named) == (does == "the same seed")
    assert iterators.resumption.random is None


def test_loaders_of_two_owners_leave_nothing_to_go_on() -> None:
    """A loader whose position is loaded twice counts once among those that are to go on."""
    loader = gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    before = iterators.resumption.to_go_on
    other.load_state_dict(state)
    other.load_state_dict(state)
    assert [batch[0].tolist() for batch in other] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert iterators.resumption.to_go_on == before


def loader() -> Any:
    return gemini_ft.resumable(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))


def accumulates_over_epochs(data: Any) -> Iterator[None]:
    for number in range(15):
        for count, _ in enumerate(data, 4 * number + 1):
            if count % 5 == 0:
                yield


def cycles_a_short_one(data: Any) -> Iterator[None]:
    short = iter(())
    for count in range(1, 13):
        short = iter(data) if count % 4 == 1 else short
        next(short)
        if count % 4 == 0:
            next(short, None)
        if count > 4:
            yield


def skips_the_first(data: Any) -> Iterator[None]:
    """The first batch of the second epoch is a bad one, and so is one of the third."""
    for epoch in range(3):
        for index, _ in enumerate(data):
            if (epoch, index) not in ((1, 0), (2, 1)):
                yield


def looks_at_the_first(data: Any) -> Iterator[None]:
    """Compiles with the first batch before it trains with the others."""
    batches = iter(data)
    next(batches)
    for _ in batches:
        yield


@pytest.mark.parametrize("loop", [accumulates_over_epochs, cycles_a_short_one, skips_the_first, looks_at_the_first])
def test_a_loop_that_would_go_on_alike_is_not_warned(loop: Callable[[Any], Iterator[None]], caplog: pytest.LogCaptureFixture) -> None:
    data = loader()
    watched = LoopWatch([data], has_resumed=False)
    for _ in loop(data):
        watched.look([], {"data": data}, [])
    assert [record.getMessage() for record in caplog.records if "numbers its batches" not in record.getMessage()] == []


def test_a_look_keeps_nothing_of_a_step() -> None:
    """Before Python 3.13 frames keep what is asked of their variables, as long as they are under way."""
    data, watched, lived = loader(), LoopWatch(), list[weakref.ref[torch.Tensor]]()

    def batches() -> Iterator[torch.Tensor]:
        for batch in data:
            doubled = 2 * batch[0]
            lived.append(weakref.ref(doubled))
            yield doubled

    for _, batch in enumerate(batches()):
        logits = batch + 1
        lived.append(weakref.ref(logits))
        watched.look([nn.Linear(2, 2)], {"data": data}, [])
    del batch, logits
    assert [each() for each in lived] == [None] * 8


class Rows(list[torch.Tensor]):
    """Rows of a dataset, which are many."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self[:9000]
        raise AssertionError("all of them are looked at, at a step")


def test_what_a_turn_sets_before_it_reads_it_is_not_carried(caplog: pytest.LogCaptureFixture) -> None:
    """Nor are data, counters of steps, clocks, comprehensions, caches of the model's own tensors, and what an outer loop sets anew."""
    rows, watched, model, step = Rows([torch.ones(1, 2)] * 9999), LoopWatch(), nn.Linear(2, 1), int("0")  # as resume() gives it
    params, began, weights = list(model.parameters()), time.monotonic(), model.state_dict()
    for epoch in range(3):
        mean, seen = float(epoch), {"epoch": epoch}
        while step < 4 * (epoch + 1):
            row = rows[step]
            loss = sum(row.sum() * step for row in rows[:2]) if step % 2 else row.sum()
            params[0].data.add_(loss + mean)
            took, began = time.monotonic() - began, time.monotonic()
            step += 1
            watched.look([model], {}, [], {"epoch": epoch}, step)
            del took
        mean, seen["epoch"] = mean / 2, -epoch
    assert [record.getMessage() for record in caplog.records] == []
    del weights


@pytest.mark.parametrize("kept", [False, True])
def test_the_place_in_an_inner_range_is_named_unless_it_is_kept(kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    watched, iteration = LoopWatch(), int("0")  # as resume() gives it
    for epoch in range(2):
        for place in range(0, 80, 20):
            iteration += 1
            watched.look([nn.Linear(2, 1)], {}, [], {"epoch": epoch} | ({"place": place} if kept else {}), iteration)
    assert sum("changes place while it trains" in line for line in caplog.messages) == (not kept)


def test_a_place_that_is_the_same_in_every_snapshot_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Steps inside of an accumulation."""
    watched, iteration = LoopWatch(), int("0")  # as resume() gives it
    for epoch in range(6):
        for micro in range(4):
            iteration += 1
            watched.look([nn.Linear(2, 1)], {}, [], {"epoch": epoch}, iteration, micro == 3)
    assert not caplog.messages


def test_flags_are_named_and_what_a_loop_only_adds_to_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Beside tensors that have no memory to ask for."""
    watched, model, warm, total, seen = LoopWatch(), nn.Linear(2, 1), False, 0.0, list[float]()
    optimizer, adjacency = torch.optim.SGD(model.parameters(), lr=0.1), torch.eye(3).to_sparse()
    with torch.inference_mode():
        features = torch.ones(3)
    with caplog.at_level(logging.INFO):
        for step in range(1, 20):
            if not warm and step > 5:
                warm = True
            total += 0.7 * step
            seen.append(0.5)
            watched.look([model], {}, [optimizer], {}, step)
    said = [(record.levelname, record.getMessage().partition(",")[0]) for record in caplog.records]
    assert ("WARNING", "this script changes warm while it trains") in said
    assert {level for level, text in said if "warm" not in text} == {"INFO"}
    assert "adds to seen, total" in caplog.text
    del adjacency, features


def test_a_generator_that_was_seeded_once_is_named_when_it_is_drawn_from() -> None:
    own = torch.Generator()
    watched = Generators([])
    own.manual_seed(5)
    torch.rand(1, generator=own)
    assert watched.drawn_from() == []
    torch.rand(1, generator=own)
    assert watched.drawn_from() == ["own"]


def test_variables_that_the_script_has_asked_for_stay_its_own() -> None:
    given = locals()
    given["option"] = 5
    LoopWatch().look([], {}, [])
    assert given["option"] == 5


class AttrDict(dict[str, Any]):
    """A namespace as many a script has one, which raises KeyError where an attribute is missing."""

    __getattr__ = dict.__getitem__


class Unreadable(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError


def test_a_loop_goes_on_with_variables_that_cannot_be_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    data, watched = loader(), LoopWatch()
    drawing, unreadable = random.SystemRandom(), Unreadable(0)
    seen, averages = random.Random(0), AttrDict(state_dict=None)
    check_epochs([averages], then={}, now={})

    def batches(options: Any) -> Iterator[Any]:
        yield from (batch for batch in data if options.wanted)

    for batch in enumerate(batches(AttrDict(wanted=True))):
        del batch
        watched.look([], {"data": data, "averages": averages}, [])
        seen.random(), drawing.random(), unreadable.random()
    assert [record.getMessage()[:44] for record in caplog.records] == ["this loop draws from the generator seen, whi"]


class Odd(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("no parameters yet")


class Lazy:
    """Stands for an object that it makes when it is first asked for anything."""

    asked: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)

    @property
    def __class__(self) -> Any:
        self.asked.append("__class__")
        return random.Random

    @__class__.setter
    def __class__(self, _: Any) -> None: ...


class Lazier(Lazy):
    """Hides its attributes as well."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        self.asked.append("__dict__")
        return {}


class Costly(dict[str, Any]):
    def items(self) -> Any:
        Lazy.asked.append("items")
        return super().items()


def test_a_look_asks_lazy_objects_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lazy, lazier, given, rows, watched = Lazy(), Lazier(), Lazy(), Costly(rate=0.1), LoopWatch()
    for _ in range(4):
        lazy.count -= 1
        rows["rate"] *= 0.9
        watched.look([], {"data": loader()}, [], {"given": given})
    Attributes({"lazy": lazy, "lazier": lazier, "rows": rows}).changes()
    private_generators(lazy=lazy, lazier=lazier, rows=rows)
    assert Lazy.asked == []
    assert ["changes lazy.count, rows while" in text for text in caplog.messages] == [True]


def test_a_look_makes_no_text_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would be waited for many times for each parameter in an optimizer's state."""
    optimizer, watched = torch.optim.Adam([torch.zeros(2, requires_grad=True)]), LoopWatch()
    held = {torch.zeros(1): random.Random(0)}
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": 1}
    monkeypatch.setattr(torch._tensor_str, "_str", lambda *_, **__: pytest.fail("text of a tensor"))
    for _ in range(2):
        watched.look([], {"data": loader()}, [], {})
    assert [*private_generators(optimizer=optimizer, held=held)] == ["held.0"]


def test_what_cannot_be_looked_at_is_named_once_and_the_rest_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    odd, given, watched, hidden = Odd(), Odd(), LoopWatch(), torch.zeros(1)
    for _ in range(2):
        hidden = hidden + 1
        watched.look([], {"given": given}, [])
    assert ["no parameters yet" in record.getMessage() for record in caplog.records] == [True, False]
    assert "whether odd changes while" in caplog.messages[0]
    assert "changes hidden while" in caplog.messages[1]
    del odd


def test_a_look_keeps_nothing_of_the_scripts_alive() -> None:
    """Nor does one at what is made anew in each epoch: lists, tensors, objects, classes."""
    watched, lived = LoopWatch(), list[weakref.ref[Any]]()
    for _ in range(3):
        data, large = Stats(), torch.zeros(2**17)
        rows, table = [Stats() for _ in range(99)], {"rows": [data], "large": large}
        lived += [weakref.ref(each) for each in (data, large, rows[0])]
        for _ in range(4):
            watched.look([], {}, [])
    del data, large, rows, table
    assert [each() for each in lived] == [None] * 9


class Stats:
    """A meter as scripts write it."""

    seen = 0

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 2

    def reset(self) -> None:
        self.total, self.count = 0.0, 0


class Base:
    __slots__ = ("__hidden", "__weakref__")

    def __init__(self) -> None:
        self.__hidden = 0.0

    def bump(self) -> None:
        self.__hidden += 3


class Slotted(Base):
    """Has a slot, a mangled one of its base, and a ``__dict__``."""


class Clamped:
    """A descriptor that keeps its values for itself."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __set__(self, owner: object, value: float) -> None:
        self.values[id(owner)] = value

    def __get__(self, owner: object, _: type) -> float:
        return self.values.get(id(owner), 0.0)


class Described:
    rate = Clamped()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    best: float = 0.0


class Pair(NamedTuple):
    low: float
    high: float


def counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 7
        return calls

    return count


def remembering(value: float, before: list[float] = []) -> None:  # noqa: B006
    before.append(value)


def rates() -> Iterator[float]:
    rate = 1.0
    while True:
        rate *= 0.9
        yield rate


STATE: dict[str, float] = {}


def test_however_a_loop_holds_what_it_carries_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    slotted, frozen, pair, count, schedule = Slotted(), Frozen(), Pair(0.0, 1.0), counting(), rates()
    tally, sums, window = Counter[str](), defaultdict[str, float](float), deque([0.0], maxlen=3)
    money, buffer, ids, described, entry = Decimal(0), bytearray(8), itertools.count(), Described(), SimpleNamespace(best=None)
    table, worked, since, outer = [0] * 100, array("d", [0.0]), Fraction(1), {"inner": {"best": 0.0}}
    watched, thirds, counted = LoopWatch(), itertools.count(Fraction(1, 3)), itertools.count(0, 7)
    for step in range(4):
        slotted.bump()
        frozen = dataclasses.replace(frozen, best=frozen.best - 1)
        pair = Pair(pair.low - 1, pair.high)
        count(), next(schedule), next(thirds), next(counted), remembering(0.5), [next(ids) for _ in range(9)]
        tally["seen"] += 9
        sums["loss"] += 0.5
        window.append(step / 3)
        money, since = money + 1, since / 2
        buffer[0] = table[3] = step + 50
        worked[0] += 0.1
        described.rate = described.rate + 0.3
        entry.best = frozen if step > 2 and sum(window) else None
        outer["inner"]["best"] -= 0.5
        STATE["global"] = step * 0.7
        Stats.seen += 7
        watched.look([], {}, [], {}, 1000 + step)
    carried = {name for text in caplog.messages for name in text.partition("changes ")[2].partition(" while")[0].split(", ")}
    assert {"slotted._Base__hidden", "frozen.best", "pair", "count.calls", "schedule.rate", "remembering.before"} <= carried
    assert {"Stats.seen", "Described.rate.values", "STATE", "thirds", "counted"} <= carried
    assert {
        "tally",
        "sums",
        "window",
        "money",
        "since",
        "buffer",
        "table",
        "worked",
        "ids",
        "thirds",
        "counted",
        "entry.best",
        "outer",
    } <= carried


def test_the_scalars_that_snapshots_have_are_no_variables_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    watched, scalars = LoopWatch(), {"best": 0.0}
    for _ in range(4):
        scalars["best"] -= 0.3
        watched.look([], {}, [], scalars)
    assert caplog.messages == []


def test_a_count_that_begins_with_a_constant_is_named_though_it_equals_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    watched, begun, resumed = LoopWatch(), 0, int("0")
    for step in range(1, 5):
        begun += 1
        resumed += 1
        if begun % 3 == resumed % 3 == 0:
            continue
        watched.look([], {}, [], {}, step)
    assert ["changes begun while" in text for text in caplog.messages] == [True]


def test_meters_are_told_of_and_data_is_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    meter, meters, watched = Stats(), list[Stats](), LoopWatch()
    meters.append(meter)

    class Data:
        at = 0.0

        def __init__(self) -> None:
            self.at = 0.0

        def __iter__(self) -> Iterator[float]:
            for _ in range(3):
                self.at += 0.3
                yield self.at

    data = Data()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for loss in data:
                meter.update(loss)
                watched.look([], {}, [])
            meter.reset()
    said = [(record.levelname, record.getMessage().partition(",")[0]) for record in caplog.records]
    assert said == [
        ("WARNING", "this script iterates over an object that changes data.at"),
        ("INFO", "this script adds to meter.count"),
    ]


def test_each_thing_is_said_once_in_a_job(caplog: pytest.LogCaptureFixture) -> None:
    states = [PlainState.of(nn.Linear(2, 1), [], None) for _ in range(2)]
    for number, state in enumerate(states):
        watched, hidden, more = LoopWatch(), torch.zeros(1), torch.zeros(1)
        watched.named = state.named
        for _ in range(2):
            hidden = hidden + 1
            more = more + number
            watched.look([], {}, [])
        give(take(state), states[1])
    assert [text.partition(" while")[0] for text in caplog.messages] == ["this script changes hidden", "this script changes more"]


def test_batches_done_of_what_can_be_iterated_once_are_those_of_the_iteration() -> None:
    def stream() -> Any:
        return gemini_ft.resumable(iter(range(20)))

    first, second, third = stream(), stream(), stream()
    assert [*itertools.islice(first, 5)] == [0, 1, 2, 3, 4]
    assert [*itertools.islice(first, 2)] == [5, 6]
    second.load_state_dict(first.state_dict())
    assert [*itertools.islice(enumerate(second, second.batches_done), 1)] == [(2, 7)]
    third.load_state_dict(second.state_dict())
    assert [*itertools.islice(enumerate(third, third.batches_done), 2)] == [(3, 8), (4, 9)]
    assert third.batches_done == 0
    assert [*itertools.islice(third, 1)] == [10]
