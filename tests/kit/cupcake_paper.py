"""Cupcake's own search (Wang et al., MLSys 2023, algorithm 1), the reference for `gemini_ft.compression.cupcake.plan`."""

from __future__ import annotations

import math
from itertools import accumulate

from gemini_ft.compression.costs import FREE
from gemini_ft.compression.cupcake import GroupingPlan
from gemini_ft.compression.timeline import Backward, GroupCosts, Grouping, even, simulate


def algorithm_1(backward: Backward, costs: GroupCosts, *, bound: bool = True, prefix: bool = True) -> GroupingPlan:
    """The paper's own search (algorithm 1), as a reference: of exponential time in the worst case.

    Args:
        backward: the tensors.
        costs: without decoding, encoded on the compute stream: the paper knows nothing else.
        bound: pruning 1: leave groups out whose lower bound is above the best plan. Safe where one group costs no more than its
            parts do together.
        prefix: pruning 2: leave groups out that are encoded while the network is still busy, except the largest of them. Safe
            for affine costs. **Not safe** for others: with an encoder that is flat first and linear above, a smaller group
            can be better, because dividing what follows differently saves encoding time.

    Returns:
        The plan; its ``bound`` is minus infinity: the search proves nothing by itself.

    Raises:
        ValueError: the costs have a decoder, or an encoder beside the backward pass.
    """
    if costs.decode != FREE or costs.encode_on != "compute":
        raise ValueError("algorithm 1 has neither decoding nor an encode stream: give decode=FREE, encode_on='compute', or call plan()")
    return _Search(backward, costs, bound, prefix).best()


class _Search:
    def __init__(self, backward: Backward, costs: GroupCosts, bound: bool, prefix: bool) -> None:
        self._backward, self._costs, self._bound, self._prefix = backward, costs, bound, prefix
        self._ready, self._filled = [0.0, *accumulate(backward.seconds)], [0, *accumulate(backward.nbytes)]
        tensors = len(backward)
        first = even(tensors, min(2, tensors))
        self._best = GroupingPlan(grouping=first, seconds=simulate(backward, costs, first), bound=-math.inf)

    def best(self) -> GroupingPlan:
        self._find((), 0, 0.0, 0.0)
        return self._best

    def _find(self, ends: tuple[int, ...], begin: int, computed: float, communicated: float) -> None:
        tensors = len(self._backward)
        if begin == tensors:
            if communicated + self._backward.forward < self._best.seconds:
                seconds = communicated + self._backward.forward
                self._best = GroupingPlan(grouping=Grouping(ends), seconds=seconds, bound=-math.inf)
            return
        for end in range(self._first_end(begin, communicated - computed) if self._prefix and ends else begin + 1, tensors + 1):
            if self._bound and self._lower_bound(begin, end, computed, communicated) > self._best.seconds:
                continue
            encoded = computed + self._compute(begin, end)
            self._find((*ends, end), end, encoded, max(encoded, communicated) + self._communicate(begin, end))

    def _first_end(self, begin: int, delay: float) -> int:
        hidden = [end for end in range(begin + 1, len(self._ready)) if self._compute(begin, end) <= delay]
        return max(hidden, default=begin + 1)

    def _lower_bound(self, begin: int, end: int, computed: float, communicated: float) -> float:
        last = len(self._backward)
        encoded = computed + self._compute(begin, end)
        network = max(encoded, communicated) + self._communicate(begin, end) + self._communicate(end, last)
        return self._backward.forward + max(encoded + self._compute(end, last), network)

    def _compute(self, begin: int, end: int) -> float:
        if begin == end:
            return 0.0
        return self._ready[end] - self._ready[begin] + self._costs.encode(self._filled[end] - self._filled[begin])

    def _communicate(self, begin: int, end: int) -> float:
        return self._costs.communicate(self._filled[end] - self._filled[begin]) if end > begin else 0.0
