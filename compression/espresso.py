"""Chooses an option of the decision tree for each tensor: whether it is compressed, where, and how it travels. Pure.

Espresso (Wang et al., EuroSys 2023), section 4: algorithm 1 chooses among the options that use the GPU only, one tensor after
the other; algorithm 2 then moves some of the compression to the CPU.

    best = plan(backward, costs)
    best.options[index], best.seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .espresso_costs import TensorCosts
from .espresso_options import UNCOMPRESSED, Option, Processor, options
from .espresso_timeline import OptionTable, TrialStrategy
from .timeline import Backward

_BETTER = 1 - 1e-12  # less is rounding


@dataclass(frozen=True)
class OptionPlan:
    """An option for each tensor, and the seconds of one iteration that the timeline predicts for them."""

    options: tuple[Option, ...]
    seconds: float


def predict(backward: Backward, costs: TensorCosts, chosen: Sequence[Option]) -> float:
    """Seconds of one iteration with these options, one for each tensor.

    Raises:
        ValueError: other numbers of options than of tensors, or an option without costs.
    """
    return TrialStrategy(backward, OptionTable(chosen, (), costs), chosen).seconds()


def plan(backward: Backward, costs: TensorCosts, candidates: Iterable[Option] | None = None, exhaustive: int = 500) -> OptionPlan:
    """Runs both algorithms; by its prediction the result is never slower than an all-reduce of every tensor.

    Args:
        backward: the tensors.
        costs: of exchanging them. With costs for the CPU, algorithm 2 is run too.
        candidates: options of algorithm 1; by default all that use the GPU only, or the CPU where only that has costs.
        exhaustive: algorithm 2 tries this many strategies at most before it goes over to one group at a time.

    Raises:
        ValueError: ``exhaustive`` is below 1, or costs are missing.
    """
    if exhaustive < 1:
        raise ValueError(f"exhaustive={exhaustive}: must be at least 1")
    processors = (Processor.GPU,) if Processor.GPU in costs.compress else (Processor.CPU,)
    if candidates is None:
        candidates = options(processors, flat_only=costs.topology.flat_only)
    candidates = (UNCOMPRESSED, *candidates)
    moved = [option.on(Processor.CPU) for option in candidates] if Processor.CPU in costs.compress else []
    exchange = TrialStrategy(backward, OptionTable(candidates, moved, costs), [UNCOMPRESSED] * len(backward))
    choose(exchange, backward.nbytes)
    if moved:
        offload(exchange, backward.nbytes, exhaustive)
    return OptionPlan(exchange.options, exchange.seconds())


def choose(exchange: TrialStrategy, nbytes: Sequence[int], *, skip: bool = True) -> None:
    """Algorithm 1: for each tensor, the largest first and of equal ones the last in the backward pass, the option of the least F.

    Of options with the same F the one with the least work, and none that is not better than what the tensor has.

    Args:
        exchange: the strategy, which is changed; nothing is compressed at first.
        nbytes: of each tensor.
        skip: leave out tensors that are exchanged before a bubble, as the paper does; the result is the same without.
    """
    seconds, done_before = exchange.seconds(), exchange.last_bubble() if skip else 0
    for tensor in sorted(range(len(nbytes)), key=lambda index: (-nbytes[index], -index)):
        if tensor < done_before:
            continue
        with_each = exchange.seconds_with(tensor)
        least = float(with_each.min())
        if least >= seconds * _BETTER:
            continue
        work = np.where(with_each <= least / _BETTER, exchange.sums(tensor), math.inf)
        exchange.assign(tensor, int(work.argmin()))
        seconds, done_before = least, exchange.last_bubble() if skip else 0


def offload(exchange: TrialStrategy, nbytes: Sequence[int], exhaustive: int) -> None:
    """Algorithm 2: of each group of tensors with the same size and option, move the codecs of the first few to the CPU.

    Lemma 1 of the paper: of a group, those that are ready first are the best to move. All combinations of how many of each
    group are tried (theorem 1) if they are no more than ``exhaustive``. Otherwise one group after the other takes the best
    number for what the others have, until nothing changes: not slower, but not proven to be the best.
    """
    groups = [_Group(exchange, tensors) for tensors in _alike(exchange, nbytes)]
    if math.prod(len(group.tensors) + 1 for group in groups) <= exhaustive:
        best, counts = exchange.seconds(), [0] * len(groups)
        for tried in _counts(groups):
            if (seconds := exchange.seconds()) < best * _BETTER:
                best, counts = seconds, tried
        for group, count in zip(groups, counts, strict=True):
            group.move(count)
        return
    improving = True
    while improving:
        improving = False
        for group in groups:
            improving |= group.improve()


def _alike(exchange: TrialStrategy, nbytes: Sequence[int]) -> Iterator[list[int]]:
    """Tensors with the same size and option, of those that are compressed on the GPU; each group in backward order."""

    def alike(tensor: int) -> tuple[int, int]:
        return -nbytes[tensor], exchange.numbers[tensor]

    on_gpu = [tensor for tensor, option in enumerate(exchange.options) if Processor.GPU in option.processors]
    for _, group in groupby(sorted(on_gpu, key=alike), key=alike):
        yield list(group)


class _Group:
    """Tensors that are exchanged by the same option; it runs on the CPU for the first ``count`` of them, on the GPU for the others."""

    def __init__(self, exchange: TrialStrategy, tensors: list[int]) -> None:
        self.tensors, self._exchange, self._count = tensors, exchange, 0
        table = exchange.table
        self._gpu = exchange.numbers[tensors[0]]
        self._cpu = table.number[table.options[self._gpu].on(Processor.CPU)]

    def move(self, count: int) -> None:
        """Puts ``count`` of the group's tensors on the CPU."""
        for index in range(min(count, self._count), max(count, self._count)):
            self._exchange.assign(self.tensors[index], self._cpu if index < count else self._gpu)
        self._count = count

    def improve(self) -> bool:
        """Takes the best number of tensors; returns whether that made F less."""
        before = self._count
        best, count = self._exchange.seconds(), before
        for tried in range(len(self.tensors) + 1):
            self.move(tried)
            if (seconds := self._exchange.seconds()) < best * _BETTER:
                best, count = seconds, tried
        self.move(count)
        return count != before


def _counts(groups: Sequence[_Group]) -> Iterator[list[int]]:
    """All combinations of counts, each of which is in force when it is yielded."""
    if not groups:
        yield []
        return
    for count in range(len(groups[0].tensors) + 1):
        groups[0].move(count)
        for others in _counts(groups[1:]):
            yield [count, *others]
