"""Chooses an option of the decision tree for each tensor: whether it is compressed, where, and how it travels. Pure.

Espresso (Wang et al., EuroSys 2023), section 4: algorithm 1 chooses among the options that use the GPU only, one tensor after
the other; algorithm 2 then moves some of the compression to the CPU.

    best = plan(backward, costs)
    best.options[index], best.seconds

Both ask for F(S) (section 4.1): the time at which all tensors have been exchanged under strategy S, each by its own option. There are four
resources: GPU, CPU, the links within machines and those between them. Each has two queues: one for what a tensor asks of it first, one
for what it asks of it later. Both serve the tensors in the order of the backward pass, so that all ranks issue the same collectives in
the same order whatever their timing. The backward pass is in the first queue of the GPU: a tensor that is compressed there at
once delays those after it. And no resource does more than a second of work per second: F is at least its total work.

With the order fixed, what tensor j does to the queues is linear in the (max, +) algebra. So the state of the queues before j
and the weights of the queues after j say all about the other tensors, and F for another option of j is known from j alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add

import numpy as np

from .costs import Floats
from .espresso_options import UNCOMPRESSED, Codec, Load, Option, Processor, TensorCosts, loads, options
from .timeline import Backward
from .topology import Scope

_GPU, _CPU, _INTRA, _INTER = range(4)
_QUEUES = 8  # resource r: 2 r is its first queue, 2 r + 1 the one for what comes later
_EXHAUSTIVE = 500  # strategies that algorithm 2 tries at most before it goes over to one group at a time
_BETTER = 1 - 1e-12  # of the best F so far: what comes closer to it differs by rounding

Work = tuple[tuple[int, float], ...]


class OptionTable:
    """Options by number, and what they ask of the queues for tensors of each size."""

    def __init__(self, candidates: Iterable[Option], others: Iterable[Option], costs: TensorCosts) -> None:
        chosen = sorted(dict.fromkeys(candidates), key=lambda option: -len(option.operations))
        # longest first among the ``choices`` first ones, which are candidates for every tensor; then those which are only ever assigned
        self.options = tuple(dict.fromkeys((*chosen, *others)))
        self.choices = len(chosen)
        self.number = {option: number for number, option in enumerate(self.options)}
        self._costs = costs
        self._loads: dict[Load, int] = {}
        self._queues = [tuple(_queues(option, costs.topology.machines == 1)) for option in self.options]
        self._ids = [[self._loads.setdefault(load, len(self._loads)) for load in loads(option, costs.topology)] for option in self.options]
        steps = max(map(len, self._ids))
        lengths = [len(ids) for ids in self._ids[: self.choices]]
        self._padded = np.array([ids + [len(self._loads)] * (steps - len(ids)) for ids in self._ids], dtype=np.intp).T
        owners = np.array([[queue // 2 for queue in queues] + [0] * (steps - len(queues)) for queues in self._queues], dtype=np.intp)
        self._uses = np.stack([(owners == resource).T for resource in range(4)])
        self.cells = [  # of step t, in an array with one row of queues for each candidate; those that have ended are left out
            np.array([row * _QUEUES + self._queues[row][step] for row, length in enumerate(lengths) if length > step], dtype=np.intp)
            for step in range(max(lengths))
        ]
        self._sizes: dict[int, Size] = {}

    def size(self, nbytes: int) -> Size:
        """The seconds of all options for tensors of ``nbytes`` dense bytes."""
        if nbytes not in self._sizes:
            elements, rest = divmod(nbytes, self._costs.itemsize)
            if rest:
                raise ValueError(f"a tensor of {nbytes} bytes: is not a whole number of elements of {self._costs.itemsize} bytes")
            seconds = [self._costs.seconds(load, elements) for load in self._loads]
            durations = np.array([*seconds, 0.0])[self._padded]
            self._sizes[nbytes] = Size(durations, self.choices, (durations * self._uses).sum(axis=1).T)
        return self._sizes[nbytes]

    def work(self, nbytes: int, number: int) -> Work:
        """The work of one option for a tensor of ``nbytes`` dense bytes: queue and seconds of each operation."""
        queues = self._queues[number]
        return tuple(zip(queues, self.size(nbytes).of_each[: len(queues), number].tolist(), strict=True))


class Size:
    """The seconds that a table's options take for tensors of one size (float64)."""

    def __init__(self, of_each: Floats, choices: int, totals: Floats) -> None:
        self.of_each = of_each  # by step and option; 0 where an option has no such step
        self.candidates = np.ascontiguousarray(of_each[:, :choices])  # the same of the candidates only
        self.totals = totals  # by option and resource
        self.sums: Floats = totals.sum(axis=1)  # by option


def _queues(option: Option, one_machine: bool) -> Iterable[int]:
    asked = {_GPU}  # by the backward pass
    for index, operation in enumerate(option.operations):
        if isinstance(operation, Codec):
            resource = _GPU if operation.processor is Processor.GPU else _CPU
            yield 2 * resource + (index > 0)
        else:
            resource = _INTRA if operation.scope is Scope.INTRA or one_machine else _INTER
            yield 2 * resource + (resource in asked)
            asked.add(resource)


class TrialStrategy:
    """A strategy that is changed one tensor at a time, and its F."""

    def __init__(self, backward: Backward, table: OptionTable, options: Sequence[Option]) -> None:
        if len(options) != len(backward):
            raise ValueError(f"{len(options)} options for {len(backward)} tensors: there must be one for each")
        self._seconds, self.table, self._forward_pass = backward.seconds, table, backward.forward
        self._nbytes, self._sizes = backward.nbytes, [table.size(nbytes) for nbytes in backward.nbytes]
        self.numbers = [table.number[option] for option in options]
        self._works = [table.work(nbytes, number) for nbytes, number in zip(self._nbytes, self.numbers, strict=True)]
        tensors = len(backward)
        self._states = [[0.0] * _QUEUES for _ in range(tensors + 1)]  # before each tensor: when each queue is done
        self._weights = [[0.0] * _QUEUES for _ in range(tensors + 1)]  # from each tensor on: from a queue being done to the end
        self._bubbles = [False] * tensors  # whether all links are idle when the tensor's first collective begins
        self._states_to, self._weights_from = 0, tensors  # these are up to date, and all before or after them
        self._last = 0  # assigned: the next one is likely to be near
        self._totals = sum((size.totals[number] for size, number in zip(self._sizes, self.numbers, strict=True)), np.zeros(4))
        self._totals[_GPU] += math.fsum(backward.seconds)

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(self.table.options[number] for number in self.numbers)

    def assign(self, tensor: int, number: int) -> None:
        """Gives one tensor the option of this number in the table."""
        totals = self._sizes[tensor].totals
        self._totals = self._totals + totals[number] - totals[self.numbers[tensor]]
        self.numbers[tensor] = number
        self._works[tensor] = self.table.work(self._nbytes[tensor], number)
        self._states_to = min(self._states_to, tensor)
        self._weights_from = max(self._weights_from, tensor + 1)
        self._last = tensor

    def seconds(self) -> float:
        """F, with the forward pass."""
        self._update_states(self._last)
        self._update_weights(self._last)
        end = float(max(map(add, self._states[self._last], self._weights[self._last])))
        return self._forward_pass + max(end, float(self._totals.max()))

    def last_bubble(self) -> int:
        """The last tensor whose first collective begins when all links have been idle; 0: there is none.

        What is exchanged before it is done before it: to compress it cannot help (property 1 of the paper), unless F is the
        total work of a link. Then less work helps wherever it is, and there is no bubble in that sense.
        """
        self._update_states(len(self.numbers))
        if max(self._states[-1]) <= self._totals.max():
            return 0
        return max((tensor for tensor, bubble in enumerate(self._bubbles) if bubble), default=0)

    def seconds_with(self, tensor: int) -> Floats:
        """F with each candidate of the table as the option of one tensor (float64, by number)."""
        self._update_states(tensor)
        self._update_weights(tensor + 1)
        size, choices = self._sizes[tensor], self.table.choices
        queues = np.tile(self._states[tensor], choices)
        queues[::_QUEUES] += self._seconds[tensor]
        now = queues[::_QUEUES].copy()
        for cells, durations in zip(self.table.cells, size.candidates, strict=False):
            active = len(cells)
            ends = np.maximum(now[:active], queues[cells]) + durations[:active]
            queues[cells] = now[:active] = ends
        ends = (queues.reshape(choices, _QUEUES) + self._weights[tensor + 1]).max(axis=1)
        others = self._totals - size.totals[self.numbers[tensor]]
        least: Floats = np.maximum(ends, (size.totals[:choices] + others).max(axis=1)) + self._forward_pass
        return least

    def sums(self, tensor: int) -> Floats:
        """Seconds of all operations of each candidate together (float64, by number), whatever they overlap with."""
        return self._sizes[tensor].sums[: self.table.choices]

    # Planning spends most of its time below, so the innermost loops make no calls.

    def _update_states(self, tensor: int) -> None:
        links = 2 * _INTRA
        for index in range(self._states_to, tensor):
            queues = self._states[index].copy()
            busy = max(queues[links:])
            now = queues[0] = queues[0] + self._seconds[index]
            first = None
            for queue, seconds in self._works[index]:
                start = queues[queue]
                if start < now:
                    start = now
                if first is None and queue >= links:
                    first = start
                now = queues[queue] = start + seconds
            self._bubbles[index] = first is not None and first > busy
            self._states[index + 1] = queues
        self._states_to = max(self._states_to, tensor)

    def _update_weights(self, tensor: int) -> None:
        for index in range(self._weights_from - 1, tensor - 1, -1):
            weights = self._weights[index + 1].copy()
            now = -math.inf
            for queue, seconds in reversed(self._works[index]):
                later = weights[queue]
                if now < later:
                    now = later
                now = weights[queue] = now + seconds
            weights[0] = max(now, weights[0]) + self._seconds[index]
            self._weights[index] = weights
        self._weights_from = min(self._weights_from, tensor)


@dataclass(frozen=True)
class OptionPlan:
    """An option for each tensor, and the seconds of one iteration that the timeline predicts for them."""

    options: tuple[Option, ...]
    seconds: float


def predict(backward: Backward, costs: TensorCosts, chosen: Sequence[Option]) -> float:
    """Seconds of one iteration with these options, one for each tensor.

    Raises ValueError: other numbers of options than of tensors, or an option without costs.
    """
    return TrialStrategy(backward, OptionTable(chosen, (), costs), chosen).seconds()


def plan(backward: Backward, costs: TensorCosts) -> OptionPlan:
    """Runs algorithm 1, and algorithm 2 where the CPU has costs too; what comes out is not predicted to be slower than all-reduce alone.

    Raises ValueError: costs are missing.
    """
    candidates = options((Processor.GPU if Processor.GPU in costs.compress else Processor.CPU,), flat_only=costs.topology.flat_only)
    moved = [option.on(Processor.CPU) for option in candidates] if Processor.CPU in costs.compress else []
    exchange = TrialStrategy(backward, OptionTable(candidates, moved, costs), [UNCOMPRESSED] * len(backward))
    choose(exchange, backward.nbytes)
    if moved:
        offload(exchange, backward.nbytes, _EXHAUSTIVE)
    return OptionPlan(exchange.options, exchange.seconds())


def choose(exchange: TrialStrategy, nbytes: Sequence[int], *, skip: bool = True) -> None:
    """Algorithm 1: for each tensor, the largest first and of equal ones the last in the backward pass, the option of the least F.

    Of options with the same F the one with the least work, and none that is not better than what the tensor has.

    Args:
        exchange: the strategy, which is changed; nothing is compressed at first.
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
