"""Delay-aware control on links that change: in time where it can be, and more than the safest fixed ratio where there is room."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_kit import World

from gemini_ft.compression.collective import slowest
from gemini_ft.compression.control import LADDER, DelayControl, LinkEstimate

ELEMENTS, RANKS, DEADLINE = 1_000_000, 4, 0.05


def drive(control: DelayControl, rate: Callable[[int], float], steps: int, noise: float = 0.02) -> list[tuple[float, float]]:
    """(ratio, seconds) of each step on a link of 1 ms and ``rate(step)`` bytes per second."""
    chance, found = random.Random(7), []
    for step in range(steps):
        ratio, nbytes = control.ratio, control.nbytes(control.ratio)
        seconds = (0.001 + nbytes / rate(step)) * (1 + noise * chance.gauss(0, 1))
        control.observe(nbytes, seconds)
        found.append((ratio, seconds))
    return found


def best_fixed(rate: float) -> float:
    """The highest rung that is in time on a steady link."""
    control = DelayControl(ELEMENTS, RANKS, DEADLINE)
    return next((rung for rung in LADDER if 0.001 + control.nbytes(rung) / rate <= DEADLINE), LADDER[-1])


@pytest.mark.parametrize("rate", [1e6, 3e6, 2e7, 1e8, 1e9])
def test_a_steady_link_gets_the_highest_ratio_that_is_in_time(rate: float) -> None:
    settled = drive(DelayControl(ELEMENTS, RANKS, DEADLINE), lambda _: rate, 200)[100:]
    assert {ratio for ratio, _ in settled} == {best_fixed(rate)}


def test_a_step_down_is_followed_within_two_decisions() -> None:
    found = drive(DelayControl(ELEMENTS, RANKS, DEADLINE), lambda step: 1e9 if step < 100 else 1e7, 150)
    assert found[99][0] == 1.0
    assert all(seconds <= 1.1 * DEADLINE for _, seconds in found[110:])


def test_a_step_up_is_used() -> None:
    found = drive(DelayControl(ELEMENTS, RANKS, DEADLINE), lambda step: 1e7 if step < 100 else 1e9, 250)
    assert found[-1][0] == best_fixed(1e9) > found[99][0]


@pytest.mark.parametrize(
    "rate",
    [lambda step: 5e7 * (1.2 + math.sin(step / 40)), lambda step: 2e8 if step // 100 % 2 == 0 else 1e7],
    ids=["sinusoid", "on and off"],
)
def test_more_is_sent_than_at_the_only_fixed_ratio_that_is_never_late(rate: Callable[[int], float]) -> None:
    steps = 800
    found = drive(DelayControl(ELEMENTS, RANKS, DEADLINE), rate, steps)
    safe = best_fixed(min(rate(step) for step in range(steps)))
    assert sum(ratio for ratio, _ in found) > 1.5 * steps * safe
    late = sum(seconds > 1.2 * DEADLINE for _, seconds in found)
    assert late < 0.1 * steps


def test_noise_does_not_make_it_swing() -> None:
    ratios = [ratio for ratio, _ in drive(DelayControl(ELEMENTS, RANKS, DEADLINE), lambda _: 2e7, 500, noise=0.1)][100:]
    assert sum(one != other for one, other in itertools.pairwise(ratios)) <= 4


def test_a_lone_outlier_changes_nothing() -> None:
    one, other = (DelayControl(ELEMENTS, RANKS, DEADLINE) for _ in range(2))
    for control in (one, other):
        drive(control, lambda _: 2e7, 102)
    before = (one.link.alpha, one.link.beta, one.ratio)
    one.observe(one.nbytes(one.ratio), 3.0)
    assert (one.link.alpha, one.link.beta, one.ratio) == before


def test_both_parameters_of_a_link_are_found() -> None:
    link = LinkEstimate()
    for step in range(300):
        nbytes = 1e5 * (1 + step % 3)
        link.observe(nbytes, 0.002 + nbytes / 1e8)
    assert link.alpha == pytest.approx(0.002, rel=0.05)
    assert link.beta == pytest.approx(1e-8, rel=0.05)
    assert link.carries(link.predict(2e5)) == pytest.approx(2e5)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.integers(1, 64), st.booleans())
def test_ranks_that_are_told_the_same_agree_and_stay_on_the_ladder(delays: list[float], world: int, divisible: bool) -> None:
    one, other = (DelayControl(1000, world, 0.01, divisible=divisible) for _ in range(2))
    for number, seconds in enumerate(delays):
        ratios = {control.observe(control.nbytes(control.ratio), seconds) for control in (one, other)}
        assert len(ratios) == 1
        assert ratios <= set(LADDER)
        if number % 7 == 3:  # and one that is restored
            other = DelayControl(1000, world, 0.01, divisible=divisible)
            other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("wrong", [{"elements": 0}, {"world": 0}, {"deadline": 0.0}, {"every": 0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        DelayControl(**{"elements": 10, "world": 2, "deadline": 1.0, **wrong})
    with pytest.raises(ValueError, match="seconds above 0"):
        DelayControl(10, 2, 1.0).observe(10, 0.0)


def _slowest() -> float:
    dist.init_process_group("gloo")
    longest = slowest(0.1 + 0.1 * dist.get_rank())
    dist.destroy_process_group()
    return longest


def test_ranks_agree_on_the_slowest(tmp_path: Path) -> None:
    assert slowest(0.25) == 0.25
    with World(tmp_path, 2) as ranks:
        assert ranks.finish(_slowest, restarts=0) == [0.2, 0.2]
