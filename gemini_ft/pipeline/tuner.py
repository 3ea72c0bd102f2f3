"""Finds out, while training, which gradients should travel together, and whether compressing them pays.

A rule with a planned fusion begins with buckets. After some steps the ready times of the gradients are known; then costs are
measured, the planners choose, and what is predicted to be close to the best is tried in real steps. The fastest stays. With ``auto``
all-reduce as it is and in bfloat16 are what is tried, and, with ``quality: any``, the rule's method: none is kept that is slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.candidates import Candidate, Candidates
from gemini_ft.pipeline.measuring import slowest
from gemini_ft.pipeline.plan import Tensor, in_order
from gemini_ft.pipeline.ready_times import ReadyTimes
from gemini_ft.pipeline.rules import PLANNED
from gemini_ft.trials import Trial, TrialRules

_log = logging.getLogger("gemini_ft")
CLOSE = 2.0  # of the best predicted time, up to which a candidate is tried
TERMS = TrialRules(visit=3, rounds=16, slower={1: 1.25, 4: 1.08, 8: 1.04})


@dataclass
class _RuleTrial:
    """The candidates of one rule."""

    rule: int
    candidates: list[Candidate]
    trial: Trial

    @property
    def current(self) -> Candidate:
        return self.candidates[self.trial.current]

    def pack(self) -> dict[str, Any]:
        """The trial as plain data."""
        return {"rule": self.rule, "candidates": [each.pack() for each in self.candidates], **asdict(self.trial)}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> _RuleTrial:
        """Makes a trial of the plain data that `pack` gave."""
        given = deepcopy(dict(packed))
        rule, candidates = given.pop("rule"), [Candidate.unpack(each) for each in given.pop("candidates")]
        return cls(rule, candidates, Trial(**given))


class Tuner:
    """Changes an averager's plan between steps; all ranks do so at the same step.

    Args:
        averager: whose plan it is.
        ready_times: knows when gradients become ready.
        profile_steps: steps to watch before planning, at least 2.
        device: of the gradients.

    Attributes:
        settled: whether the plan stays as it is.
    """

    def __init__(self, averager: Averager, ready_times: ReadyTimes, profile_steps: int, device: torch.device) -> None:
        self._averager, self._ready_times, self._device = averager, ready_times, device
        self._profile_steps = max(2, profile_steps)
        self._rules = [number for number, rule in enumerate(averager.rules) if rule.fusion in PLANNED]
        self._count = 0
        self._trials: list[_RuleTrial] = []
        self._last: float | None = time.perf_counter()  # the end of the step before
        self.settled = not self._rules

    def step_over(self) -> None:
        """Takes note that a step is over, and nothing is under way. Collective at some steps."""
        seconds = time.perf_counter() - self._last if self._last is not None else None
        if not self.settled:
            self._count += 1
            if self._trials:
                self._tried(seconds)
            elif self._count >= self._profile_steps:
                self._plan()
        self._last = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The candidates that were tried, their times here, and those that are left."""
        return {"settled": self.settled, "count": self._count, "trials": [each.pack() for each in self._trials]}

    def common(self) -> dict[str, Any]:
        """The same state without the times, which differ between ranks."""
        trials = [{**each.pack(), "candidates": [one.label for one in each.candidates], "seconds": None} for each in self._trials]
        return {"settled": self.settled, "count": self._count, "trials": trials}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. The present step is not timed: it began before, or in another process."""
        self.settled, self._count = state["settled"], state["count"]
        self._trials = [_RuleTrial.unpack(each) for each in state["trials"]]
        self._last = None

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
            bf16 = next((each for each in found if each.label.startswith("bf16")), None)
            close = [each for each in found if each.predicted <= CLOSE * found[0].predicted or each is bf16]
            if len(close) > 1:
                self._trials.append(_RuleTrial(rule, close, Trial.of(len(close))))
        self._begin_trial()

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
        if each.trial.note(TERMS, seconds):
            times = slowest(each.trial.medians(), self._averager.group)
            if (chosen := each.trial.judge(TERMS, times)) is not None:
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
        self._adopt(trial.rule, trial.candidates[chosen])
        self._begin_trial()

    def _adopt(self, rule: int, candidate: Candidate) -> None:
        plan = self._averager.plan
        mine = {name for group in candidate.groups for name in group.names}
        others = [group for group in plan.groups if not mine.issuperset(group.names)]
        groups = in_order([*others, *candidate.groups], self._averager.tensors)
        fusion = {**plan.fusion, rule: candidate.label}
        self._averager.plan = replace(plan, groups=groups, fusion=fusion, predicted={**plan.predicted, rule: candidate.predicted})
