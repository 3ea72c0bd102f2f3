"""Ratios that follow the network: what a rule's ``control: dc2`` does while training.

After a step every rank has measured how long its collectives took; the slowest one's figures, which travel with `RankComparison`'s hashes
beside the update, are the same on all ranks by the next step's first average, and so is the ratio that `DelayControl` makes of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini_ft.compression.control import DelayControl
from gemini_ft.compression.sparse import RandomK
from gemini_ft.pipeline.lanes import GroupCost
from gemini_ft.pipeline.plan import Group, Tensor
from gemini_ft.pipeline.rules import Rule, Rules, steerable

_FIGURES = 3  # that a rank tells of each rule in a step: bytes, nanoseconds of collectives, nanoseconds of computing
_WINDOW = 16  # steps whose computing is looked at
_FIRST_DEADLINE = 1.0  # seconds; replaced before it is used


@dataclass(kw_only=True)
class _Steered:
    """One rule under control.

    Attributes:
        delay: decides; the same on all ranks.
        deadline: that the user has given, in seconds; None: as long as the step computes.
        computing: seconds of the slowest rank in the last steps, for want of a deadline.
        told: this rank's figures of a step that has not been decided on.
    """

    delay: DelayControl
    deadline: float | None
    computing: list[float] = field(default_factory=list)
    told: list[int] = field(default_factory=lambda: [0] * _FIGURES)


class Controls:
    """The rules under control, and their ratios."""

    def __init__(self, rules: Rules, tensors: Sequence[Tensor], world: int) -> None:
        self._steered: dict[int, _Steered] = {}
        for number, rule in enumerate(rules):
            elements = sum(math.prod(tensor.shape) for tensor in tensors if tensor.rule == number and not tensor.sparse)
            if rule.control is not None and elements and world > 1:
                self._steered[number] = _Steered(delay=_delay_control(rule, elements, world), deadline=rule.control.deadline)

    def of(self, rule: int) -> DelayControl | None:
        """The control of a rule; None: it has none, or there is one rank only."""
        return self._steered[rule].delay if rule in self._steered else None

    def ratios(self) -> list[float]:
        """The present ratio of each rule under control; 1.0: an all-reduce of everything."""
        return [1.0 if each.delay.dense else each.delay.ratio for each in self._steered.values()]

    def note(self, groups: Sequence[tuple[Group, GroupCost]], computing: float) -> None:
        """Records this rank's figures of a step. ``computing``: seconds of the step in which training waited for no average; 0: unknown."""
        for number, each in self._steered.items():
            mine = [figures for group, figures in groups if group.rule == number and group.way == "rule"]
            received = each.delay.received(sum(figures.nbytes for figures in mine))
            each.told = [round(received), *(round(1e9 * seconds) for seconds in (sum(figures.communicate for figures in mine), computing))]

    def told(self) -> list[int]:
        """This rank's figures of the last step, as many in every step."""
        return [number for each in self._steered.values() for number in each.told]

    def heard(self, most: Sequence[int]) -> None:
        """Decides, given the largest figures of all ranks."""
        for place, each in enumerate(self._steered.values()):
            nbytes, seconds, computing = most[_FIGURES * place : _FIGURES * (place + 1)]
            each.told = [0] * _FIGURES
            if computing:
                each.computing = [*each.computing[1 - _WINDOW :], 1e-9 * computing]
            if each.deadline is None and each.computing:
                each.delay.deadline = statistics.median(each.computing)
            if seconds and (each.deadline is not None or each.computing):
                each.delay.observe(nbytes, 1e-9 * seconds)

    def common(self) -> dict[str, Any]:
        """All that is the same on all ranks as long as nothing is wrong, as plain data."""
        return {str(number): [each.delay.state_dict(), each.computing] for number, each in self._steered.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that ratios depend on, by rule, as plain data."""
        return {
            str(number): {"delay": each.delay.state_dict(), "computing": list(each.computing), "told": list(each.told)}
            for number, each in self._steered.items()
        }

    def problem(self, state: Mapping[str, Any], world: int) -> str | None:
        strange = sorted(set(state) - {str(number) for number in self._steered})
        if world == 1 or not strange:
            return None
        return f"the state has ratios under control of rules {', '.join(strange)}, which control nothing here; load one of this pipeline"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, saved in state.items():
            if (steered := self._steered.get(int(number))) is None:
                continue  # one rank alone has no network to follow; see `problem`
            steered.delay.load_state_dict(saved["delay"])
            steered.computing, steered.told = list(saved["computing"]), list(saved["told"])
            if steered.deadline is None and steered.computing:
                steered.delay.deadline = statistics.median(steered.computing)


def _delay_control(rule: Rule, elements: int, world: int) -> DelayControl:
    assert rule.control is not None
    assert rule.compress is not None
    reducer = steerable(rule.compress.make())
    assert reducer is not None
    summed = isinstance(reducer.inner, RandomK)  # indices do not travel
    return DelayControl(
        elements,
        world,
        rule.control.deadline or _FIRST_DEADLINE,
        divisible=summed or rule.is_sparse,
        entry=4 if summed or rule.compress.method == "adaq" else 8,
        every=rule.control.every,
    )
