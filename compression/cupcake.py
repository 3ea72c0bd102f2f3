"""Chooses consecutive tensors to compress and communicate as one, for the least predicted iteration time. Pure.

Cupcake (Wang et al., MLSys 2023), sections 3 and 4. Of N tensors there are 2^(N-1) groupings. The paper searches them with two
prunings (algorithm 1); `plan` finds the same minimum in polynomial time where costs are lines, and also where the paper's
second pruning is not safe: with measured costs, with decoding, and with an encoder beside the backward pass.

    best = plan(backward, costs)
    best.grouping.groups, best.seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .costs import FREE, Affine, Floats
from .timeline import Backward, GroupCosts, Grouping, even, layer_wise, simulate

_ROUNDING = 1 + 1e-9  # a bound and the plan that it bounds are added up in different orders


@dataclass(frozen=True, kw_only=True)
class GroupingPlan:
    """A grouping, and the seconds of one iteration that the timeline predicts for it."""

    grouping: Grouping
    seconds: float  # predicted, of one iteration
    bound: float  # no grouping takes less; where this is ``seconds``, the plan is proven to be the best


def plan(backward: Backward, costs: GroupCosts, most: int = 64) -> GroupingPlan:
    """The grouping of the least predicted time.

    Args:
        costs: of their groups, of any shape.
        most: ways to exchange the first k tensors that are followed up for each k, where costs are not affine, or there is
            decoding or an encoder of its own. Fewer are needed nearly always, and then the plan is the best one; if not,
            `GroupingPlan.bound` says how much better another one could be.

    Raises ValueError: ``most`` is below 1.
    """
    if most < 1:
        raise ValueError(f"most={most}: must be at least 1")
    is_of_the_paper = costs.decode == FREE and costs.encode_on == "compute"
    if isinstance(costs.encode, Affine) and isinstance(costs.communicate, Affine) and is_of_the_paper:
        grouping, bound = _by_number_of_groups(backward, costs.encode, costs.communicate), math.inf
    else:
        grouping, bound = _by_labels(backward, costs, most)
    seconds = simulate(backward, costs, grouping)
    return GroupingPlan(grouping=grouping, seconds=seconds, bound=min(seconds, bound))


def _group_bytes(backward: Backward) -> Floats:
    """Dense bytes of the group ``begin:end``, at ``[begin, end]``; NaN where that is no group."""
    filled = np.array([0, *accumulate(backward.nbytes)], dtype=np.float64)
    sizes = filled[None, :] - filled[:, None]
    sizes[np.tril_indices(len(filled))] = np.nan
    return sizes


def _by_number_of_groups(backward: Backward, encode: Affine, communicate: Affine) -> Grouping:
    """Dynamic programme over (tensors, groups), O(N^2 G) for a best plan of about G groups.

    With affine encoding, the encoder of k tensors in a groups has run for ``beta bytes + a alpha``, however they are divided:
    what is left to choose is only when the network is done with them, and earlier is never worse.
    """
    tensors = len(backward)
    ready = np.array([0.0, *accumulate(backward.seconds)])
    filled = np.array([0.0, *accumulate(backward.nbytes)])
    communication = np.nan_to_num(communicate.of(_group_bytes(backward)), nan=np.inf)
    done = np.full(tensors + 1, np.inf)  # of the first k tensors, in as many groups as there have been rounds
    done[0] = 0.0
    before: list[NDArray[np.intp]] = []
    best, groups = math.inf, 0
    for number in range(1, tensors + 1):
        encoded = ready + encode.beta * filled + number * encode.alpha
        if encoded[-1] >= best:
            break
        ends = np.maximum(done[:, None], encoded[None, :]) + communication
        before.append(ends.argmin(axis=0))
        done = ends.min(axis=0)
        if done[-1] < best:
            best, groups = float(done[-1]), number
    ends_of_groups = [tensors]
    for choice in reversed(before[1:groups]):
        ends_of_groups.append(int(choice[ends_of_groups[-1]]))
    return Grouping(tuple(reversed(ends_of_groups)))


@dataclass(kw_only=True)
class _Labels:
    """Ways to have exchanged the first tensors. One column each, never changed: later ones refer to earlier ones by number."""

    times: Floats = field(default_factory=lambda: np.zeros((3, 1)))  # rows: when encoding, the network and decoding are done with them
    tensors: NDArray[np.intp] = field(default_factory=lambda: np.zeros(1, np.intp))  # how many
    before: NDArray[np.intp] = field(default_factory=lambda: np.zeros(1, np.intp))  # the column of the way without the last group

    def add(self, times: Floats, tensors: int, before: NDArray[np.intp]) -> None:
        self.times = np.concatenate([self.times, times], axis=1)
        self.tensors = np.concatenate([self.tensors, np.full(len(before), tensors)])
        self.before = np.concatenate([self.before, before])

    def grouping(self, column: int) -> Grouping:
        ends = []
        while column:
            ends.append(int(self.tensors[column]))
            column = int(self.before[column])
        return Grouping(tuple(reversed(ends)))


def _by_labels(backward: Backward, costs: GroupCosts, most: int) -> tuple[Grouping, float]:
    """Label setting: of all ways to have exchanged the first tensors, keep those that no other one is ahead of in every queue.

    Nothing is lost by that: a way that is behind in every queue stays behind, whatever groups follow. Ways that cannot beat a
    known plan are dropped as well. The bound is the paper's pruning 1, but with the cheapest division of the rest in place of
    one single group, so that it also holds for costs that grow faster than their bytes.

    Returns the best grouping found, and the least bound of the ways that were dropped only because there were too many.
    """
    tensors = len(backward)
    ready = np.array([0.0, *accumulate(backward.seconds)])
    sizes = _group_bytes(backward)
    encode, communicate, decode = (cost.of(sizes) for cost in (costs.encode, costs.communicate, costs.decode))
    bound = _Bound(ready, encode, communicate, decode, costs.encode_on == "compute")
    usual = min(_usual(tensors), key=lambda grouping: simulate(backward, costs, grouping))
    best = simulate(backward, costs, usual) - backward.forward
    given_up = math.inf

    def extended(times: Floats, begin: NDArray[np.intp], end: int) -> Floats:
        start = times[0] + (ready[end] - ready[begin]) if costs.encode_on == "compute" else np.maximum(times[0], ready[end])
        encoded = start + encode[begin, end]
        communicated = np.maximum(encoded, times[1]) + communicate[begin, end]
        return np.stack([encoded, communicated, np.maximum(communicated, times[2]) + decode[begin, end]])

    labels = _Labels()
    for end in range(1, tensors + 1):
        times = extended(labels.times, labels.tensors, end)
        bounds = bound(times, end)
        columns = np.flatnonzero(bounds <= best * _ROUNDING)
        columns = columns[np.lexsort((*times[::-1, columns], bounds[columns]))]  # ways that are ahead in every queue come first
        columns, rest = _not_behind(times, columns, most)
        if len(rest):
            given_up = min(given_up, float(bounds[rest[0]]))
        if end < tensors and len(columns):
            best = min(best, float(extended(times[:, columns], np.full(len(columns), end), tensors)[2].min()))
        labels.add(times[:, columns], end, columns)
    last = np.flatnonzero(labels.tensors == tensors)
    if not len(last):
        return usual, given_up + backward.forward
    return labels.grouping(int(last[labels.times[2, last].argmin()])), given_up + backward.forward


def _usual(tensors: int) -> Iterator[Grouping]:
    yield layer_wise(tensors)
    groups = 1
    while groups < tensors:
        yield even(tensors, groups)
        groups *= 2


def _not_behind(times: Floats, columns: NDArray[np.intp], most: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Splits columns: up to ``most``, in order, that beat every earlier one in some row; and the columns that are left."""
    kept: list[np.intp] = []
    while len(columns) and len(kept) < most:
        kept.append(columns[0])
        columns = columns[(times[:, columns] < times[:, columns[:1]]).any(axis=0)]
    return np.array(kept, dtype=np.intp), columns


class _Bound:
    """A lower bound, in seconds since the backward pass began, on every way to go on."""

    def __init__(self, ready: Floats, encode: Floats, communicate: Floats, decode: Floats, delays: bool) -> None:
        self._rest = np.stack([_cheapest_division(cost) for cost in (encode, communicate, decode)])
        if delays:
            self._rest[0] += ready[-1] - ready
        last = np.stack([encode[:, -1] + communicate[:, -1] + decode[:, -1], communicate[:, -1] + decode[:, -1], decode[:, -1]])
        last = np.minimum.accumulate(np.nan_to_num(last, nan=np.inf)[:, ::-1], axis=1)[:, ::-1]
        self._after = np.where(np.isfinite(last), last, 0.0)  # of the last group, wherever it begins; 0: there is none any more
        self._ready = ready[-1]

    def __call__(self, times: Floats, end: int) -> Floats:
        rest, (everything, network, decoding) = times + self._rest[:, end : end + 1], self._after[:, end]
        encoded = np.maximum(rest[0] + network, self._ready + everything)
        least: Floats = np.maximum(encoded, np.maximum(rest[1] + decoding, rest[2]))
        return least


def _cheapest_division(cost: Floats) -> Floats:
    """The least total cost of the tensors from each one on, over all ways to divide them."""
    tensors = len(cost) - 1
    least = np.zeros(tensors + 1)
    for begin in reversed(range(tensors)):
        least[begin] = (cost[begin, begin + 1 :] + least[begin + 1 :]).min()
    return least
