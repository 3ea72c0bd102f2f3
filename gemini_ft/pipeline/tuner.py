"""Finds out, while training, which gradients should travel together, and whether compressing them pays.

A rule with a planned fusion begins with buckets. After some steps the ready times of the gradients are known; then costs are
measured, and the planners predict an iteration's time for each way in which the rule's gradients could be exchanged (`Candidates`). What
is predicted to be close to the best is tried in real steps (`Tuner`), and the fastest stays. With ``auto`` all-reduce as it is and in
bfloat16 are what is tried, and ring8, which trains as they do (`gemini_ft.pipeline.qualities`), and, with ``quality: any``, the rule's
method: none is kept that is slower. Where steps are long, few candidates are tried, and none for long.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from gemini_ft.compression import cupcake, espresso
from gemini_ft.compression.base import layout_of
from gemini_ft.compression.costs import Affine, FittedCost
from gemini_ft.compression.espresso_options import (
    Codec,
    ExchangePart,
    Option,
    PlannedCollective,
    Processor,
    Routine,
    TensorCosts,
    alpha_beta,
)
from gemini_ft.compression.timeline import Backward, even, simulate
from gemini_ft.compression.topology import Scope, Topology
from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.measuring import Costs, ReadyTimes, measure, slowest
from gemini_ft.pipeline.plan import Group, Tensor, are_exact, grouped, in_order
from gemini_ft.pipeline.qualities import LOCAL, RING, WAYS
from gemini_ft.pipeline.route_table import option_way
from gemini_ft.pipeline.routes import Plain, of_all_ranks
from gemini_ft.pipeline.rules import PLANNED, payload_of_one_length
from gemini_ft.trials import Trial, TrialRules

_log = logging.getLogger("gemini_ft")
CLOSE = 2.0  # of the best predicted time, up to which a candidate is tried
LONG = 1.0  # predicted seconds of the best candidate's step from which on a visit is one step, and few candidates are tried:
FEW, NEAR = 4, 1.5  # so many, up to so many times the best predicted time
WATCHED = 10.0  # seconds after which a plan is made, though fewer steps have been watched than were asked for
TERMS = TrialRules(visit=3, rounds=16, slower={1: 1.25, 4: 1.08, 8: 1.04}, enough=40.0)
_EVEN = (1, 4, 16)  # groups of about as many tensors each, that the planner's grouping is to beat


class Candidate(NamedTuple):
    """A way to do one rule.

    Attributes:
        label: what users are told.
        groups: of the rule's tensors.
        predicted: seconds of one iteration: forward, backward, exchange.
        error: the largest relative error of the costs behind it.
    """

    label: str
    groups: tuple[Group, ...]
    predicted: float
    error: float


_CANDIDATES = TypeAdapter(list[Candidate])


class Candidates:
    """Measures and plans, by all ranks together; every rank gets the same.

    Args:
        averager: whose rules they are; it must be idle.
        tensors: in the order in which gradients become ready.
        ready: name -> seconds from its end until the gradient is there.
    """

    def __init__(
        self, averager: Averager, device: torch.device, tensors: Sequence[Tensor], forward: float, ready: Mapping[str, float]
    ) -> None:
        self._averager, self._device, self._tensors = averager, device, tensors
        self._forward, self._ready = forward, ready
        self._measured: dict[tuple[int, str], Costs] = {}

    def of(self, number: int) -> list[Candidate]:
        """The candidates of one rule, the best predicted one first. Collective."""
        rule = self._averager.rules[number]
        own = [tensor for tensor in self._tensors if tensor.rule == number and not tensor.sparse]
        found: list[Candidate] = []
        lossy = rule.is_whole or (rule.compress is not None and rule.cast is not torch.bfloat16)
        if rule.fusion == "cupcake" or (rule.fusion == "auto" and lossy):
            found += self._by_cupcake(number, own, "rule", rule.sync.scheme if rule.is_whole else "cupcake")
        if rule.fusion == "espresso":
            found.append(self._by_espresso(number, own))
        if rule.fusion == "auto":
            found += self._by_cupcake(number, own, "plain", "all-reduce")
            if not are_exact(own):
                found += self._by_cupcake(number, own, "bf16", "bf16")
            if WAYS[RING].is_alike and not rule.is_whole and rule.quality != "all-reduce" and not are_exact(own):
                found += self._by_cupcake(number, own, "ring8", "ring8")
        return self._shared(sorted(found, key=lambda candidate: candidate.predicted))

    def apart(self, number: int, computing: Sequence[float]) -> float | None:
        """The seconds of a step of ranks that train alone: computing, and its share of an average in bfloat16. Collective.

        None: some rank does not know what its steps compute.
        """
        own = [tensor for tensor in self._tensors if tensor.rule == number]
        costs, nbytes = self._costs(number, "bf16", own), sum(tensor.nbytes for tensor in own)
        average = costs.encode.cost(nbytes) + costs.communicate.cost(nbytes) + costs.decode.cost(nbytes)
        known = computing or [self._forward + max(self._ready.values())]
        # Steps differ, in their batches too, and the first ones may be slow. Ranks of one machine take processors from each other, a
        # different one in each step: so their mean counts, and besides that no rank is quicker than in its quickest step.
        everybody = of_all_ranks([statistics.median_low(known) or inf, min(known)], self._averager.group)
        alone = max(statistics.fmean(typical for typical, _ in everybody), *(least for _, least in everybody))
        found = alone + average / (self._averager.rules[number].apart.every or 1)
        return found if found < inf else None

    def _by_cupcake(self, number: int, own: Sequence[Tensor], way: str, label: str) -> list[Candidate]:
        """The planner's grouping, and the even ones that it is to beat: models do not know how threads get in each other's way."""
        costs = self._costs(number, way, own)
        backward, group_costs = self._backward(own), costs.group(self._device)
        groupings = {cupcake.plan(backward, group_costs).grouping: label}
        for count in _EVEN:
            groupings.setdefault(even(len(own), min(count, len(own))), "even" if label == "cupcake" else f"{label} even")
        return [
            Candidate(
                f"{name}, {len(grouping.ends)} groups",
                tuple(grouped(number, own, grouping, way)),
                simulate(backward, group_costs, grouping),
                costs.worst,
            )
            for grouping, name in groupings.items()
        ]

    def _by_espresso(self, number: int, own: Sequence[Tensor]) -> Candidate:
        """The candidate in which every tensor is a group, with its own option."""
        topology, itemsize = self._averager.routes.topology, own[0].itemsize
        inner = payload_of_one_length(self._averager.rules[number].compress.make())  # type: ignore[union-attr]
        assert inner is not None

        def wire_bytes(elements: int) -> int:
            return inner.wire_bytes(layout_of(("",), ((elements,),), (torch.float32,), inner.align))

        codecs = {processor: self._costs(number, option_way(_gathered(processor)), own) for processor in processors(self._device)}
        tensor_costs = TensorCosts(
            topology=topology,
            network=alpha_beta(topology, *self.links(topology, own)),
            compress={processor: costs.encode.cost for processor, costs in codecs.items()},
            decompress={processor: costs.decode.cost.scaled(times=1 / topology.world) for processor, costs in codecs.items()},
            wire_bytes=wire_bytes,
            itemsize=itemsize,
        )
        best = espresso.plan(self._backward(own), tensor_costs)
        groups = tuple(Group(number, (t.name,), option_way(option)) for t, option in zip(own, best.options, strict=True))
        return Candidate(f"espresso, {len(groups)} groups", groups, best.seconds, max(costs.worst for costs in codecs.values()))

    def links(self, topology: Topology, own: Sequence[Tensor]) -> tuple[Affine, Affine]:
        """The costs of a message within a machine and between two, derived from those of an all-reduce."""
        scoped = self._averager.routes.scoped
        groups = {Scope.INTRA: scoped.intra, Scope.INTER: scoped.inter} if scoped is not None else {Scope.FLAT: self._averager.group}
        found = {
            scope: _message(measure(Plain, own, group, self._device).communicate, topology.members(scope))
            for scope, group in groups.items()
        }
        flat = found.get(Scope.FLAT)
        return (flat, flat) if flat is not None else (found[Scope.INTRA], found[Scope.INTER])

    def _costs(self, number: int, way: str, own: Sequence[Tensor]) -> Costs:
        if (number, way) not in self._measured:
            make = partial(self._averager.routes.fresh, number, way)
            self._measured[number, way] = measure(make, own, self._averager.group, self._device)
        return self._measured[number, way]

    def _backward(self, tensors: Sequence[Tensor]) -> Backward:
        at = [0.0, *(self._ready[tensor.name] for tensor in tensors)]
        seconds = tuple(max(0.0, after - before) for before, after in pairwise(at))
        return Backward(nbytes=tuple(tensor.nbytes for tensor in tensors), seconds=seconds, forward=self._forward)

    def _shared(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates of rank 0, so that not even rounding can part the ranks. Collective."""
        if self._averager.group is None:
            return candidates
        everything: list[Any] = [candidates]
        dist.broadcast_object_list(everything, group=self._averager.group, group_src=0)
        found: list[Candidate] = everything[0]
        return found


def _are_long(candidates: Sequence[Candidate]) -> bool:
    return min(candidate.predicted for candidate in candidates) >= LONG


def _worth_trying(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are predicted to come close to the first, and the best one in bfloat16; of long steps the best of each way."""
    best: dict[str, Candidate] = {}
    for each in found:
        best.setdefault(each.groups[0].way, each)
    limit = (NEAR if _are_long(found) else CLOSE) * found[0].predicted
    close = [each for each in found if each.predicted <= limit or each is best.get("bf16")]
    if not _are_long(found):
        return close
    others = [each for each in close if each is not best[each.groups[0].way]]
    return [each for each in close if each not in others[max(0, FEW - len(close) + len(others)) :]]


def processors(device: torch.device) -> tuple[Processor, ...]:
    """The processors that could compress gradients on a device; on CPUs there are no others."""
    return (Processor.GPU, Processor.CPU) if device.type != "cpu" else (Processor.GPU,)


def _gathered(processor: Processor) -> Option:
    """The plainest option with all compressing and decompressing on one processor; for the CPU with the way there and back."""
    payloads = PlannedCollective(Routine.ALL_GATHER, Scope.FLAT, ExchangePart.WHOLE, compressed=True)
    return Option((Codec(True, processor), payloads, Codec(False, processor)))


def _message(all_reduce: FittedCost, ranks: int) -> Affine:
    """The cost of a message between two ranks, if an all-reduce is a ring of 2 (n - 1) messages of a n-th each."""
    if ranks == 1:
        return Affine(alpha=0.0, beta=0.0)
    start, slope = all_reduce.cost(0), max(0.0, (all_reduce.cost(2**24) - all_reduce.cost(2**20)) / (2**24 - 2**20))
    return Affine(alpha=start / (2 * (ranks - 1)), beta=slope * ranks / (2 * (ranks - 1)))


@dataclass
class _RuleTrial:
    """The candidates of one rule."""

    rule: int
    candidates: list[Candidate]
    trial: Trial
    apart: float | None = None  # predicted seconds of a step of ranks that train alone; None: they may not

    @property
    def terms(self) -> TrialRules:
        return replace(TERMS, visit=1) if _are_long(self.candidates) else TERMS

    @property
    def current(self) -> Candidate:
        return self.candidates[self.trial.current]

    def pack(self) -> dict[str, Any]:
        candidates = _CANDIDATES.dump_python(self.candidates, mode="json")
        return {"rule": self.rule, "candidates": candidates, "apart": self.apart, **asdict(self.trial)}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> _RuleTrial:
        given = deepcopy(dict(packed))
        rule, candidates, apart = given.pop("rule"), _CANDIDATES.validate_python(given.pop("candidates")), given.pop("apart", None)
        return cls(rule, candidates, Trial(**given), apart)


class Tuner:
    """Changes an averager's plan between steps; all ranks do so at the same step.

    Args:
        profile_steps: steps to watch before planning, at least 2.

    Attributes:
        settled: whether the plan stays as it is.
        apart: predicted seconds of a step where ranks are to train alone from now on; None: they are not.
    """

    def __init__(self, averager: Averager, ready_times: ReadyTimes, profile_steps: int, device: torch.device) -> None:
        self._averager, self._ready_times, self._device = averager, ready_times, device
        self._profile_steps = max(2, profile_steps)
        self._rules = [number for number, rule in enumerate(averager.rules) if rule.fusion in PLANNED]
        self._count = 0
        self._trials: list[_RuleTrial] = []
        self._begun = 0.0  # when the first step was over
        self._last: float | None = time.perf_counter()  # the end of the step before
        self._computing: list[float] = []  # seconds of the steps that were watched, without averages, where they are known
        self.settled = not self._rules
        self.apart: float | None = None
        self._watch()

    def step_over(self) -> None:
        """Records that a step is over, and nothing is under way. Collective at some steps."""
        seconds = time.perf_counter() - self._last if self._last is not None else None
        if not self.settled:
            self._count += 1
            self._begun = self._begun or time.perf_counter()
            if self._averager.is_apart and self._averager.computing:
                self._computing.append(self._averager.computing)
            if self._trials:
                self._tried(seconds)
            elif self._count >= self._profile_steps or (self._count > 1 and self._has_watched()):
                self._plan()
        self._last = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The candidates that were tried, their times here, and those that are left; before that, what steps have computed here."""
        watched = {"watched": [*self._computing, self._averager.computing]} if self._averager.is_apart else {}
        return {"settled": self.settled, "count": self._count, "trials": [each.pack() for each in self._trials], **watched}

    def common(self) -> dict[str, Any]:
        """The same state without the times, which differ between ranks."""
        trials = [{**each.pack(), "candidates": [one.label for one in each.candidates], "seconds": None} for each in self._trials]
        return {"settled": self.settled, "count": self._count, "trials": trials}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. The present step is not timed: it began before, or in another process."""
        self.settled, self._count = state["settled"], state["count"]
        self._trials = [_RuleTrial.unpack(each) for each in state["trials"]]
        self._last, self.apart = None, None
        *self._computing, self._averager.computing = state.get("watched", [0.0])  # the last one is heard of when the step is counted
        self._watch()

    def _watch(self) -> None:
        """Keeps averages apart from what is computed in steps that are watched, if training alone is predicted from them."""
        self._averager.is_apart = self._averager.may_part and not (self.settled or self._trials)

    def _plan(self) -> None:
        tensors, forward, ready = self._order()
        self._averager.tensors = tensors
        candidates = Candidates(self._averager, self._device, tensors, forward, ready)
        for rule in self._rules:
            count = sum(tensor.rule == rule and not tensor.sparse for tensor in tensors)
            if not count or (count == 1 and self._averager.rules[rule].fusion == "cupcake"):
                continue
            found = candidates.of(rule)
            self._adopt(rule, found[0])
            apart = candidates.apart(rule, self._computing) if self._averager.rules[rule].quality == "loss" else None
            if len(close := _worth_trying(found)) > 1 or apart is not None:
                self._trials.append(_RuleTrial(rule, close, Trial.of(len(close)), apart))
        self._begin_trial()
        self._watch()

    def _has_watched(self) -> bool:
        """Whether steps have been watched for so long on any rank. Collective."""
        return slowest([time.perf_counter() - self._begun], self._averager.group)[0] >= WATCHED

    def _order(self) -> tuple[list[Tensor], float, dict[str, float]]:
        """The tensors in the order in which their gradients become ready, as all ranks have seen it; and when they do."""
        names = [tensor.name for tensor in self._averager.tensors]
        forward, *at = slowest(self._ready_times.typical(names), self._averager.group)
        known = max((time for time in at if time != float("inf")), default=0.0)
        ready = {name: time if time != float("inf") else known for name, time in zip(names, at, strict=True)}
        return sorted(self._averager.tensors, key=lambda tensor: ready[tensor.name]), forward, ready

    def _begin_trial(self) -> None:
        self.settled = not self._trials
        if self.settled:
            self._averager.routes.keep(self._averager.plan.groups)
        else:
            self._adopt(self._trials[0].rule, self._trials[0].current)

    def _tried(self, seconds: float | None) -> None:
        each = self._trials[0]
        if each.trial.note(each.terms, seconds):
            *times, spent = slowest([*each.trial.medians(), each.trial.spent], self._averager.group)
            if (chosen := each.trial.judge(each.terms, times, spent)) is not None:
                self._end_trial(chosen, times)
                return
        self._adopt(each.rule, each.current)

    def _end_trial(self, chosen: int, times: Sequence[float]) -> None:
        trial = self._trials.pop(0)
        tried = ", ".join(
            f"{each.label} {1e3 * seconds:.1f} ms a step ({seconds / each.predicted:.2f} of the {1e3 * each.predicted:.1f} ms predicted)"
            for each, seconds in zip(trial.candidates, times, strict=True)
        )
        if self._averager.rank == 0:
            _log.info("gradient_pipeline, rule %d: chose %s; tried: %s", trial.rule + 1, trial.candidates[chosen].label, tried)
            if any(group.way == "ring8" for group in trial.candidates[chosen].groups):
                _log.info("gradient_pipeline, rule %d: gradients travel in 8 bits; quality: all-reduce has none of that", trial.rule + 1)
        self._adopt(trial.rule, trial.candidates[chosen])
        if trial.apart is not None:
            self._compare_apart(trial.apart, trial.candidates[chosen].label, times[chosen])
        self._begin_trial()

    def _compare_apart(self, apart: float, label: str, seconds: float) -> None:
        words = WAYS[LOCAL].words
        assert words is not None
        is_ahead = words * apart < seconds
        if is_ahead:
            self.apart = apart
            self._trials.clear()
        if self._averager.rank == 0:
            _log.info(
                "gradient_pipeline, quality loss: %s, %.1f ms a step predicted, times %.2f words to a loss, against %.1f ms of %s: %s; %s",
                *(LOCAL, 1e3 * apart, words, 1e3 * seconds, label),
                *("ranks train alone from here on" if is_ahead else "gradients are averaged in each step", WAYS[LOCAL]),
            )

    def _adopt(self, rule: int, candidate: Candidate) -> None:
        plan = self._averager.plan
        mine = {name for group in candidate.groups for name in group.names}
        others = [group for group in plan.groups if not mine.issuperset(group.names)]
        groups = in_order([*others, *candidate.groups], self._averager.tensors)
        fusion = {**plan.fusion, rule: candidate.label}
        self._averager.plan = replace(plan, groups=groups, fusion=fusion, predicted={**plan.predicted, rule: candidate.predicted})
