"""Plans that are found while training, on one rank: what is tried, what is kept, what is restored."""

from __future__ import annotations

import copy
import math
import re
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gemini_ft.compression.base import Turn
from gemini_ft.pipeline import GradientSynchronizer, tuner
from gemini_ft.pipeline.lanes import Work
from gemini_ft.pipeline.measuring import measure
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.qualities import Known
from gemini_ft.pipeline.routes import Gradients, Plain

LAYERS = 20
LONG = 1000  # steps in which every plan has been found


class Clock:
    """Stands for the tuner's: a step takes what the test says that its plan takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tuner, "time", types.SimpleNamespace(perf_counter=clock.perf_counter))
    terms = replace(tuner.TERMS, rounds=max(tuner.TERMS.slower) + 1)  # more rounds tell more only where times are not exact
    monkeypatch.setattr(tuner, "TERMS", terms)
    return clock


@pytest.fixture
def make() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def training(fusion: str, clock: Clock, seconds: Callable[[str], float], profile_steps: int = 2, **more: Any) -> Training:
        made.append(Training(fusion, clock, seconds, profile_steps, **more))
        return made[-1]

    yield training
    for each in made:
        each.synchronizer.close()


class Training:
    def __init__(
        self, fusion: str, clock: Clock, seconds: Callable[[str], float], profile_steps: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for _ in range(LAYERS)))
        topk = {"compress": {"method": "topk", "ratio": 0.25}}
        more: Any = {"auto": {}, "auto all-reduce": {"quality": "all-reduce"}, "auto any": {**topk, "quality": "any"}}.get(fusion, topk)
        more = {"sync": "ring8", "quality": "any"} if fusion == "auto ring8" else more
        rule = {"params": "*", "fusion": fusion.partition(" ")[0], **more}
        self.synchronizer = GradientSynchronizer(self.model, [rule], profile_steps=profile_steps)
        self._clock, self._seconds = clock, seconds
        self.seen: list[str] = []

    @property
    def label(self) -> str:
        return self.synchronizer.averager.plan.fusion[0]

    def step(self) -> None:
        self.model.zero_grad()
        self.model(torch.ones(2, 8, dtype=self.model[0].weight.dtype)).square().sum().abs().backward()
        self._clock.now += self._seconds(self.label)
        self.seen.append(self.label)
        names = [name for group in self.synchronizer.averager.plan.groups for name in group.names]
        assert sorted(names) == sorted(name for name, _ in self.model.named_parameters())
        self.synchronizer.synchronize()

    def until_settled(self) -> None:
        for _ in range(LONG):
            if self.synchronizer.settled:
                return
            self.step()
        raise AssertionError(f"no plan after {LONG} steps: {self.seen}")


@pytest.fixture
def all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is predicted: how long things take on this machine decides nothing."""
    monkeypatch.setattr(tuner, "CLOSE", math.inf)
    monkeypatch.setattr(tuner, "NEAR", math.inf)


@pytest.mark.usefixtures("all_tried")
def test_what_is_measured_decides_and_not_what_is_predicted(clock: Clock, make: Callable[..., Training]) -> None:
    training = make("cupcake", clock, lambda label: 1.0 if label.endswith(", 4 groups") else 1.1)
    training.until_settled()
    tried = {label for label in training.seen[2:] if "," in label}
    assert any(label.endswith(", 4 groups") for label in tried)
    assert len(tried) > 1
    assert training.label.endswith(", 4 groups")


@pytest.mark.usefixtures("all_tried")
@pytest.mark.parametrize("fast", ["bf16", "all-reduce", "cupcake", "even", "ring8"])
def test_auto_keeps_the_fastest(clock: Clock, make: Callable[..., Training], fast: str) -> None:
    training = make("auto ring8" if fast == "ring8" else "auto any", clock, lambda label: 1.0 if label.startswith(fast) else 2.0)
    training.until_settled()
    tried = {label.partition(",")[0] for label in training.seen}
    assert fast in tried
    assert training.label.startswith(fast)


@pytest.mark.usefixtures("all_tried")
def test_auto_compares_what_trains_alike(clock: Clock, make: Callable[..., Training], caplog: pytest.LogCaptureFixture) -> None:
    """Without being told otherwise; and says what was predicted beside what was measured."""
    training = make("auto", clock, lambda label: 0.2)
    with caplog.at_level("INFO", "gemini_ft"):
        training.until_settled()
    assert {label.partition(",")[0].removesuffix(" even") for label in training.seen[2:]} == {"all-reduce", "bf16", "ring8"}
    assert re.search(r"chose [^;]+; tried: .* 200.0 ms a step \([\d.]+ of the [\d.]+ ms predicted\)", caplog.text)


@pytest.mark.usefixtures("all_tried")
def test_auto_keeps_a_ring_that_trains_alike_without_being_asked(
    clock: Clock, make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says that gradients have 8 bits then, and how to have none of that."""

    def seconds(label: str) -> float:
        return 0.1 if label.startswith("ring8") else 0.2

    training = make("auto", clock, seconds)
    with caplog.at_level("INFO", "gemini_ft"):
        training.until_settled()
    assert training.label.startswith("ring8")
    assert "rule 1: gradients travel in 8 bits; quality: all-reduce has none of that" in caplog.text
    without = make("auto all-reduce", clock, seconds)
    without.until_settled()
    assert {label.partition(",")[0].removesuffix(" even") for label in without.seen[2:]} == {"all-reduce", "bf16"}
    monkeypatch.setitem(tuner.WAYS, tuner.RING, Known(rule={"sync": "ring8"}, accuracy=1.0, words=1.1))
    other = make("auto", clock, seconds)
    other.until_settled()
    assert not any(label.startswith("ring8") for label in other.seen)


@pytest.mark.usefixtures("all_tried")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_auto_rounds_no_gradients_of_more_than_32_bits(clock: Clock, make: Callable[..., Training], dtype: torch.dtype) -> None:
    training = make("auto", clock, lambda label: 0.2 if label.startswith("all-reduce") else 0.1, dtype=dtype)
    assert {group.way for group in training.synchronizer.averager.plan.groups} == {"rule"}
    training.until_settled()
    assert {label.partition(",")[0].removesuffix(" even") for label in training.seen[2:]} == {"all-reduce"}


@pytest.mark.usefixtures("all_tried")
def test_long_steps_are_tried_few_times(clock: Clock, make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pace of a small GPT at 50 Mbit/s the choice takes at most two minutes, and the slowest way one step."""
    monkeypatch.setattr(tuner, "LONG", 0.0)  # whatever this machine predicts

    def seconds(label: str) -> float:
        return 3.9 if label.startswith("ring8") else 11.9 if label.startswith("all-reduce") else 6.3

    training = make("auto", clock, seconds, profile_steps=5)
    training.until_settled()
    assert training.label.startswith("ring8")
    assert clock.now <= 120
    counts = Counter(label for label in training.seen if "," in label)
    assert len(counts) == tuner.FEW
    assert {count for label, count in counts.items() if not label.startswith("ring8")} == {1}


def test_a_slow_exchange_is_measured_once_and_no_larger_one() -> None:
    calls: list[int] = []

    class Slow(Plain):
        def average(self, gradients: Gradients, turn: Turn, group: Any, scale: float) -> Work:
            calls.append(len(gradients))
            time.sleep(0.3)
            return (yield from super().average(gradients, turn, group, scale))

    tensors = [Tensor(name=f"t{number}", shape=(10 + number,), itemsize=4, rule=0) for number in range(16)]
    costs = measure(Slow, tensors, None, torch.device("cpu"))
    assert len(calls) == 2
    assert costs.decode.cost(1000) >= 0.25


def test_bfloat16_is_always_tried(clock: Clock, make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "CLOSE", 1.0)
    training = make("auto any", clock, lambda label: 1.0)
    training.until_settled()
    assert any(label.startswith("bf16") for label in [*training.seen, training.label])


def test_a_compression_that_is_slower_than_bfloat16_is_not_kept(clock: Clock, make: Callable[..., Training]) -> None:
    training = make("auto any", clock, lambda label: 1.0 if label.startswith("bf16") else 1.01)
    training.until_settled()
    assert training.label.startswith("bf16")


def test_one_slow_step_does_not_decide(clock: Clock, make: Callable[..., Training]) -> None:
    calls: dict[str, int] = {}

    def seconds(label: str) -> float:
        calls[label] = calls.get(label, 0) + 1
        return 9.0 if label.startswith("bf16") and calls[label] == 4 else 1.0 if label.startswith("bf16") else 1.2

    training = make("auto any", clock, seconds)
    training.until_settled()
    assert training.label.startswith("bf16")


def test_a_settled_plan_is_restored_and_stays(clock: Clock, make: Callable[..., Training]) -> None:
    training = make("auto any", clock, lambda label: 1.0)
    training.until_settled()
    other = make("auto any", clock, lambda label: 1.0)
    other.synchronizer.load_state_dict(training.synchronizer.state_dict())
    assert other.synchronizer.settled
    assert other.synchronizer.averager.plan == training.synchronizer.averager.plan
    before = other.label
    for _ in range(10):
        other.step()
    assert other.label == before


@pytest.mark.usefixtures("all_tried")
def test_trials_go_on_where_they_were(clock: Clock, make: Callable[..., Training]) -> None:
    def seconds(label: str) -> float:
        return 0.01 + 1e-5 * sum(map(ord, label))

    training = make("auto any", clock, seconds)
    for _ in range(7):
        training.step()
    assert not training.synchronizer.settled
    other = make("auto any", clock, seconds)
    other.synchronizer.load_state_dict(copy.deepcopy(training.synchronizer.state_dict()))
    assert other.synchronizer.state_dict()["tuner"] == training.synchronizer.state_dict()["tuner"]
    before = len(training.seen)
    training.until_settled()
    other.until_settled()
    assert other.seen == training.seen[before:]
    assert other.label == training.label


def test_without_planned_fusions_there_is_nothing_to_find_out(clock: Clock, make: Callable[..., Training]) -> None:
    training = make("layer-wise", clock, lambda label: 1.0)
    assert training.synchronizer.settled
