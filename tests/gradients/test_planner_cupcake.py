"""Cupcake (MLSys 2023): costs and their fits, the timeline by hand, and planners against every grouping there is."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cupcake_paper import algorithm_1

from gemini_ft.compression.costs import FREE, Affine, Cost, Measured, Sample, fit_line, interpolate
from gemini_ft.compression.cupcake import GroupingPlan, plan
from gemini_ft.compression.timeline import Backward, GroupCosts, Grouping, buckets, even, layer_wise, simulate


def every_grouping(tensors: int) -> list[Grouping]:
    inner = range(1, tensors)
    return [Grouping((*ends, tensors)) for count in range(tensors) for ends in combinations(inner, count)]


def least(backward: Backward, costs: GroupCosts) -> float:
    return min(simulate(backward, costs, grouping) for grouping in every_grouping(len(backward)))


def some_backward(dice: random.Random, tensors: int) -> Backward:
    sizes = tuple(dice.randint(0, dice.choice([100, 2000])) for _ in range(tensors))
    return Backward(nbytes=sizes, seconds=tuple(dice.random() * dice.choice([0.1, 1]) for _ in range(tensors)), forward=dice.random())


def line(dice: random.Random) -> Affine:
    return Affine(alpha=dice.choice([0, dice.random()]), beta=dice.choice([0, dice.random() * 1e-3]))


def points(dice: random.Random) -> Measured:
    sizes = sorted(dice.sample(range(4000), 4))
    return Measured(nbytes=tuple(sizes), seconds=tuple(dice.random() for _ in sizes))


def either(dice: random.Random) -> Cost:
    return dice.choice([line, points])(dice)


class TestCosts:
    def test_a_line_and_pieces(self) -> None:
        pieces = Measured(nbytes=(10, 20, 40), seconds=(1.0, 1.0, 3.0))
        assert [pieces(x) for x in (0, 10, 15, 20, 30, 50)] == [1.0, 1.0, 1.0, 1.0, 2.0, 4.0]
        assert Measured(nbytes=(10, 20), seconds=(1.0, 3.0))(0) == 0.0  # the line would go below 0
        assert Affine(alpha=2.0, beta=0.5)(10) == 7.0

    def test_sums_and_multiples_are_exact(self) -> None:
        dice = random.Random(1)
        for _ in range(300):
            one, other, size, times = either(dice), either(dice), dice.uniform(0.01, 3), dice.uniform(0, 4)
            inside = dice.uniform(max(getattr(c, "nbytes", [0])[0] for c in (one, other)), 3000)
            total, multiple = one + other, one.scaled(size, times)
            if all(inside <= getattr(cost, "nbytes", [4000])[-1] for cost in (one, other)):
                assert total(inside) == pytest.approx(one(inside) + other(inside))
            assert multiple(inside) == pytest.approx(times * one(size * inside))
            sizes = np.linspace(0, 5000, 7)
            assert one.of(sizes).tolist() == pytest.approx([one(x) for x in sizes])

    def test_a_line_is_found_again(self) -> None:
        fit = fit_line(Sample(nbytes=x, seconds=0.5 + 0.25 * x) for x in (1, 10, 100, 10_000))
        assert isinstance(fit.cost, Affine)
        assert (fit.cost.alpha, fit.cost.beta) == (pytest.approx(0.5), pytest.approx(0.25))
        assert fit.worst == pytest.approx(0, abs=1e-9)

    def test_the_fit_has_the_least_relative_error_and_no_negative_part(self) -> None:
        dice = random.Random(2)
        for _ in range(200):
            samples = [Sample(nbytes=dice.choice([1, 5, 20, 50]) * x, seconds=dice.uniform(0.1, 10)) for x in (1, 2, 3, 4)]
            cost = fit_line(samples).cost
            assert isinstance(cost, Affine)

            def loss(alpha: float, beta: float, samples: list[Sample] = samples) -> float:
                return sum(((alpha + beta * s.nbytes) / s.seconds - 1) ** 2 for s in samples)

            for up, right in ((0.01, 0), (0, 0.001), (-0.01, 0), (0, -0.001), (0.01, -0.001), (-0.01, 0.001)):
                near = max(0.0, cost.alpha + up), max(0.0, cost.beta + right)
                assert loss(cost.alpha, cost.beta) <= loss(*near) + 1e-9

    def test_errors_of_a_fit_are_those_at_the_samples(self) -> None:
        flat = [
            Sample(nbytes=1, seconds=1.0),
            Sample(nbytes=10, seconds=1.0),
            Sample(nbytes=100, seconds=1.0),
            Sample(nbytes=1000, seconds=10.0),
        ]
        fit = fit_line(flat)
        errors = [abs(fit.cost(s.nbytes) - s.seconds) / s.seconds for s in flat]
        assert (fit.mean, fit.worst) == (pytest.approx(sum(errors) / 4), pytest.approx(max(errors)))
        assert fit.worst > 0.1

    def test_pieces_take_medians_and_are_judged_by_what_they_have_not_seen(self) -> None:
        fit = interpolate(
            [
                Sample(nbytes=0, seconds=1.0),
                Sample(nbytes=10, seconds=2.0),
                Sample(nbytes=10, seconds=2.0),
                Sample(nbytes=10, seconds=9.0),
                Sample(nbytes=20, seconds=1.0),
            ]
        )
        assert fit.cost(10) == 2.0
        assert fit.mean == pytest.approx((2.0 + 0.5 + 0.5 + 8 / 9 + 2.0) / 5)  # without 10: 1.0; without an end: 3.0
        assert fit.worst == pytest.approx(2.0)
        assert interpolate([Sample(nbytes=0, seconds=1.0), Sample(nbytes=10, seconds=2.0)]).worst == 0

    @pytest.mark.parametrize("wrong", [(-1, 0), (0, -1), (math.inf, 0), (math.nan, 0)])
    def test_impossible_lines(self, wrong: tuple[float, float]) -> None:
        with pytest.raises(ValueError, match="at least 0"):
            Affine(alpha=wrong[0], beta=wrong[1])

    @pytest.mark.parametrize(
        ("sizes", "seconds", "says"),
        [((1,), (1,), "at least 2"), ((1, 2), (1,), "as many"), ((2, 1), (1, 1), "ascend"), ((1, 2), (1, -1), "finite")],
    )
    def test_impossible_pieces(self, sizes: tuple[float, ...], seconds: tuple[float, ...], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            Measured(nbytes=sizes, seconds=seconds)

    def test_impossible_samples(self) -> None:
        with pytest.raises(ValueError, match="two different sizes"):
            fit_line([Sample(nbytes=5, seconds=1.0), Sample(nbytes=5, seconds=2.0)])
        with pytest.raises(ValueError, match="two different sizes"):
            interpolate([])
        with pytest.raises(ValueError, match="above 0"):
            Sample(nbytes=5, seconds=0.0)
        with pytest.raises(ValueError, match="size=0"):
            Measured(nbytes=(1, 2), seconds=(1, 1)).scaled(size=0)


class TestTimeline:
    backward = Backward(nbytes=(10, 20, 30), seconds=(1.0, 2.0, 3.0), forward=100.0)

    def test_by_hand(self) -> None:
        """Equation 2: the encoder of the first group delays the second one's gradients."""
        costs = GroupCosts(encode=Affine(alpha=1, beta=0), communicate=Affine(alpha=0, beta=0.5), decode=Affine(alpha=2, beta=0))
        # The first group is ready at 1, encoded at 2, there at 7, decoded at 9; the second one at 7, 8, 33 and 35.
        assert simulate(self.backward, costs, Grouping((1, 3))) == 135
        assert simulate(self.backward, replace(costs, communicate=FREE, decode=FREE), Grouping((1, 3))) == 108

    def test_an_encoder_beside_does_not_delay(self) -> None:
        beside = GroupCosts(encode=Affine(alpha=4, beta=0), communicate=FREE, encode_on="beside")
        assert simulate(self.backward, beside, layer_wise(3)) == 113  # groups are ready at 1, 3 and 6, and encoded at 5, 9 and 13
        assert simulate(self.backward, replace(beside, encode_on="compute"), layer_wise(3)) == 118  # ready at 1, 7 and 14

    def test_groupings(self) -> None:
        assert layer_wise(3).ends == (1, 2, 3)
        assert even(7, 3).ends == (2, 4, 7)
        assert buckets([5, 5, 5, 20, 1], 10).ends == (2, 4, 5)
        assert buckets([5], 10).ends == (1,)
        assert Grouping((2, 5)).groups == (range(2), range(2, 5))

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Backward(nbytes=(), seconds=())
        with pytest.raises(ValueError, match="bytes"):
            Backward(nbytes=(-1,), seconds=(0,))
        with pytest.raises(ValueError, match="seconds"):
            Backward(nbytes=(1,), seconds=(math.nan,))
        with pytest.raises(ValueError, match="ascend"):
            Grouping((2, 2))
        with pytest.raises(ValueError, match="ascend"):
            Grouping(())
        with pytest.raises(ValueError, match="last tensor"):
            simulate(self.backward, GroupCosts(encode=FREE, communicate=FREE), Grouping((2,)))
        with pytest.raises(ValueError, match="groups"):
            even(3, 4)
        with pytest.raises(ValueError, match="capacity"):
            buckets([1], 0)
        with pytest.raises(ValueError, match="beside"):
            GroupCosts(encode=FREE, communicate=FREE, encode_on="elsewhere")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="most"):
            plan(self.backward, GroupCosts(encode=FREE, communicate=FREE, decode=FREE, encode_on="beside"), most=0)


class TestPlanner:
    def test_affine_equals_every_grouping_and_the_paper(self) -> None:
        dice = random.Random(3)
        for _ in range(1000):
            backward, costs = some_backward(dice, dice.randint(1, 8)), GroupCosts(encode=line(dice), communicate=line(dice))
            best = least(backward, costs)
            assert plan(backward, costs).seconds == pytest.approx(best)
            for bound in (False, True):
                for prefix in (False, True):
                    assert algorithm_1(backward, costs, bound=bound, prefix=prefix).seconds == pytest.approx(best)

    @pytest.mark.parametrize("encode_on", ["compute", "beside"])
    def test_any_shape_equals_every_grouping(self, encode_on: str) -> None:
        dice = random.Random(4)
        for _ in range(1000):
            backward = some_backward(dice, dice.randint(1, 8))
            costs = GroupCosts(encode=either(dice), communicate=either(dice), decode=either(dice), encode_on=encode_on)  # type: ignore[arg-type]
            found = plan(backward, costs)
            assert found.seconds == pytest.approx(least(backward, costs))
            assert found.bound == pytest.approx(found.seconds)

    def test_twelve_tensors(self) -> None:
        dice = random.Random(5)
        for _ in range(12):
            backward = some_backward(dice, 12)
            for costs in (
                GroupCosts(encode=line(dice), communicate=line(dice)),
                GroupCosts(encode=either(dice), communicate=either(dice), decode=either(dice)),
            ):
                assert plan(backward, costs).seconds == pytest.approx(least(backward, costs))

    def test_labels_and_numbers_of_groups_agree_on_many_tensors(self) -> None:
        """A decoder that takes a 10^-12 of the rest sends the same costs through the other planner."""
        dice = random.Random(6)
        for _ in range(10):
            backward, encode, communicate = (
                some_backward(dice, 60),
                Affine(alpha=0.1, beta=1e-4),
                Affine(alpha=0.2, beta=dice.uniform(0, 1e-3)),
            )
            one, other = (
                plan(backward, GroupCosts(encode=encode, communicate=communicate)),
                plan(backward, GroupCosts(encode=encode, communicate=communicate, decode=Affine(alpha=1e-12, beta=0))),
            )
            assert one.seconds == pytest.approx(other.seconds, rel=1e-9)

    def test_the_bound_holds_where_ways_are_given_up(self) -> None:
        dice = random.Random(7)
        proven = 0
        for _ in range(300):
            backward, costs = some_backward(dice, 8), GroupCosts(encode=line(dice), communicate=either(dice), decode=either(dice))
            found, best = plan(backward, costs, most=1), least(backward, costs)
            assert found.bound <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
            proven += found.bound == found.seconds
        assert 0 < proven < 300, "both cases have to occur"

    def test_pruning_2_is_unsafe_for_an_encoder_that_is_flat_first(self) -> None:
        """Encoding takes max(10, 2 bytes). After the first group the network is busy for 12.5 s; the encoder of the next two
        tensors is done in 12 s, so that the pruning never ends the second group with one tensor. But the fourth tensor is free
        for the encoder in the third group, which takes 10 s with or without it, and costs 2 s in the second."""
        backward = Backward(nbytes=(4, 7, 5, 1, 4), seconds=(1.0, 0.0, 0.0, 0.0, 1.0))
        costs = GroupCosts(encode=Measured(nbytes=(0, 5, 50), seconds=(10, 10, 100)), communicate=Affine(alpha=7, beta=0.5))
        assert plan(backward, costs) == GroupingPlan(grouping=Grouping((2, 3, 5)), seconds=54.5, bound=54.5)
        assert algorithm_1(backward, costs, prefix=False).seconds == 54.5
        assert algorithm_1(backward, costs).seconds == 55.0

    def test_pruning_1_stays_safe_there(self) -> None:
        dice = random.Random(8)
        for _ in range(300):
            knee = dice.randint(2, 8)
            hinge = Measured(nbytes=(0, knee, 10 * knee), seconds=(knee, knee, 10 * knee))
            backward = Backward(nbytes=tuple(dice.randint(1, 8) for _ in range(6)), seconds=tuple(dice.random() * 3 for _ in range(6)))
            costs = GroupCosts(encode=hinge, communicate=line(dice))
            assert algorithm_1(backward, costs, prefix=False).seconds == pytest.approx(least(backward, costs))

    def test_the_paper_knows_no_decoder(self) -> None:
        with pytest.raises(ValueError, match="decode=FREE"):
            algorithm_1(Backward(nbytes=(1,), seconds=(1.0,)), GroupCosts(encode=FREE, communicate=FREE, decode=Affine(alpha=1, beta=0)))

    def test_edges(self) -> None:
        assert (
            plan(
                Backward(nbytes=(5,), seconds=(1.0,), forward=2.0),
                GroupCosts(encode=Affine(alpha=1, beta=0), communicate=Affine(alpha=1, beta=0)),
            ).seconds
            == 5.0
        )
        for decode in (FREE, Affine(alpha=0.0, beta=1e-9)):
            nothing = Backward(nbytes=(0, 0, 0), seconds=(0.0, 0.0, 0.0))
            assert plan(nothing, GroupCosts(encode=FREE, communicate=FREE, decode=decode)).seconds == 0.0
            assert plan(nothing, GroupCosts(encode=Affine(alpha=1, beta=0), communicate=FREE, decode=decode)).grouping == even(3, 1)

    def test_what_costs_the_extremes_make_best(self) -> None:
        backward = Backward(nbytes=(8,) * 6, seconds=(1.0,) * 6)
        assert plan(backward, GroupCosts(encode=FREE, communicate=Affine(alpha=0, beta=0.125))).grouping == layer_wise(6)
        assert plan(backward, GroupCosts(encode=Affine(alpha=100, beta=0), communicate=Affine(alpha=0, beta=0.001))).grouping == even(6, 1)


def test_planning_needs_no_torch() -> None:
    code = "import sys, gemini_ft.compression.cupcake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
