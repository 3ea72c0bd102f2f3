"""Finds out, while training, which gradients had better travel together, and whether compressing them pays.

A rule with a planned fusion begins with buckets. After some steps the ready times of the gradients are known; then costs are
measured, and Cupcake's or Espresso's planner chooses. ``auto`` lets both of them, all-reduce and all-reduce in bfloat16 be planned,
tries what is predicted to be close to the best in a few real steps each, and keeps the fastest: never one that was slower than bfloat16.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gemini_ft.compression import cupcake
from gemini_ft.compression.timeline import Backward, Grouping
from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.measuring import Costs, measure, slowest
from gemini_ft.pipeline.plan import Group, Tensor, grouped, in_order
from gemini_ft.pipeline.rules import PLANNED
from gemini_ft.pipeline.watch import Watch

_log = logging.getLogger("gemini_ft")
_CLOSE = 1.5  # of the best predicted time, up to which a candidate is tried
_TRIED = 5  # steps each, the first of which is not counted


@dataclass(frozen=True)
class Candidate:
    """One way to do one rule.

    Attributes:
        label: what users are told.
        groups: of the rule's tensors.
        predicted: seconds of one iteration.
        error: the largest relative error of the costs behind it.
    """

    label: str
    groups: tuple[Group, ...]
    predicted: float
    error: float


@dataclass
class _Trial:
    """Candidates of one rule that are being tried, one after the other."""

    rule: int
    candidates: list[Candidate]
    at: int = 0
    seconds: list[list[float]] = field(default_factory=list)


class Tuner:
    """Changes an averager's plan between steps; all ranks do so at the same step.

    Args:
        averager: whose plan it is.
        watch: knows when gradients become ready.
        profile_steps: steps to watch before planning, at least 2.
    """

    def __init__(self, averager: Averager, watch: Watch, profile_steps: int, device: torch.device) -> None:
        self._averager, self._watch, self._device = averager, watch, device
        self._profile_steps = max(2, profile_steps)
        self._rules = [number for number, rule in enumerate(averager.rules) if rule.fusion in PLANNED]
        self._count = 0
        self._settled = not self._rules
        self._trials: list[_Trial] = []
        self._last = time.perf_counter()
        self.errors: dict[int, float] = {}  # rule -> worst relative error of the costs that its plan is made of

    def step_over(self) -> None:
        """A step is over, and nothing is under way. Collective at some steps."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._settled:
            return
        self._count += 1
        if self._trials:
            self._tried(seconds)
        elif self._count >= self._profile_steps:
            self._plan()
        self._last = time.perf_counter()

    @property
    def settled(self) -> bool:
        """Whether the plan stays as it is."""
        return self._settled

    def state_dict(self) -> dict[str, Any]:
        """A plan that is still being looked for is looked for anew."""
        return {"settled": self._settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._settled, self._count, self._trials = state["settled"], 0, []

    # -- planning

    def _plan(self) -> None:
        tensors, forward, ready = self._order()
        self._averager.tensors = tensors
        for rule in self._rules:
            found = self._candidates(rule, tensors, forward, ready)
            best = min(found, key=lambda candidate: candidate.predicted)
            self._adopt(rule, best)
            if self._averager.rules[rule].fusion == "auto":
                close = [each for each in found if each.predicted <= _CLOSE * best.predicted or each.label == "bf16"]
                self._trials.append(_Trial(rule, sorted(close, key=lambda each: each.predicted)))
        self._settled = not self._trials
        if self._trials:
            self._adopt(self._trials[0].rule, self._trials[0].candidates[0])

    def _order(self) -> tuple[list[Tensor], float, dict[str, float]]:
        """Tensors in the order in which their gradients become ready, as all ranks have seen it; when they do."""
        names = [tensor.name for tensor in self._averager.tensors]
        forward, *at = slowest(self._watch.typical(names), self._averager.group)
        known = max((time for time in at if time != float("inf")), default=0.0)
        ready = {name: time if time != float("inf") else known for name, time in zip(names, at, strict=True)}
        return sorted(self._averager.tensors, key=lambda tensor: ready[tensor.name]), forward, ready

    def _candidates(self, number: int, tensors: Sequence[Tensor], forward: float, ready: Mapping[str, float]) -> list[Candidate]:
        own = [tensor for tensor in tensors if tensor.rule == number and not tensor.sparse]
        rule = self._averager.rules[number]
        backward = _backward(own, forward, ready)
        ways = ["rule", "plain", "bf16"] if rule.fusion == "auto" else ["rule"]
        found = [self._by_cupcake(number, own, backward, way) for way in ways] if rule.fusion != "espresso" else []
        return self._shared(found)

    def _by_cupcake(self, number: int, own: Sequence[Tensor], backward: Backward, way: str) -> Candidate:
        costs = self._costs(number, way, own)
        best = cupcake.plan(backward, costs.group) if len(own) > 1 else cupcake.Plan(Grouping((1,)), 0.0, 0.0)
        label = {"rule": "cupcake"}.get(way, way)
        return Candidate(label, tuple(grouped(number, own, best.grouping, way)), best.seconds, costs.worst)

    def _costs(self, number: int, way: str, own: Sequence[Tensor]) -> Costs:
        return measure(lambda: self._averager.routes.fresh(number, way), own, self._averager.group, self._device)

    def _shared(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those of rank 0, so that not even rounding can part the ranks. Collective."""
        if self._averager.group is None:
            return candidates
        everything: list[Any] = [candidates]
        dist.broadcast_object_list(everything, group=self._averager.group, group_src=0)
        found: list[Candidate] = everything[0]
        return found

    # -- trying

    def _tried(self, seconds: float) -> None:
        trial = self._trials[0]
        if len(trial.seconds) <= trial.at:
            trial.seconds.append([])
        trial.seconds[trial.at].append(seconds)
        if len(trial.seconds[trial.at]) < _TRIED:
            return
        trial.at += 1
        if trial.at < len(trial.candidates):
            self._adopt(trial.rule, trial.candidates[trial.at])
            return
        times = slowest([statistics.median(each[1:]) for each in trial.seconds], self._averager.group)
        measured = dict(zip((each.label for each in trial.candidates), times, strict=True))
        chosen = min(trial.candidates, key=lambda each: measured[each.label])
        _log.info("gradient_pipeline rule %d: %s", trial.rule + 1, _account(trial.candidates, measured, chosen))
        self._adopt(trial.rule, chosen)
        del self._trials[0]
        if self._trials:
            self._adopt(self._trials[0].rule, self._trials[0].candidates[0])
        self._settled = not self._trials

    def _adopt(self, rule: int, candidate: Candidate) -> None:
        plan = self._averager.plan
        mine = {name for group in candidate.groups for name in group.names}
        others = [group for group in plan.groups if not mine.issuperset(group.names)]
        groups = in_order([*others, *candidate.groups], self._averager.tensors)
        label = f"{candidate.label}, {len(candidate.groups)} groups"
        self.errors[rule] = candidate.error
        self._averager.plan = replace(
            plan, groups=groups, fusion={**plan.fusion, rule: label}, predicted={**plan.predicted, rule: candidate.predicted}
        )


def _backward(tensors: Sequence[Tensor], forward: float, ready: Mapping[str, float]) -> Backward:
    at = [0.0, *(ready[tensor.name] for tensor in tensors)]
    seconds = tuple(max(0.0, after - before) for before, after in pairwise(at))
    return Backward(tuple(tensor.nbytes for tensor in tensors), seconds, forward)


def _account(candidates: Sequence[Candidate], measured: Mapping[str, float], chosen: Candidate) -> str:
    tried = ", ".join(f"{each.label} {1e3 * measured[each.label]:.1f} ms (predicted {1e3 * each.predicted:.1f})" for each in candidates)
    return f"{chosen.label} from {tried}"
