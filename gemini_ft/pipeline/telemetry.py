"""What a gradient pipeline did in the last steps, by rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gemini_ft.pipeline.lanes import Figures
from gemini_ft.pipeline.plan import NO_RULE, Group
from gemini_ft.pipeline.rules import Rules


@dataclass(frozen=True)
class Traffic:
    """One rule in one step, on this rank.

    Attributes:
        dense_bytes: of the gradients.
        sent_bytes: handed to collectives.
        encode, communicate, decode: seconds, added up over groups.
        density: mean share of the units that were present, of gradients that a sparse scheme has added up; else 1.
    """

    dense_bytes: int
    sent_bytes: int
    encode: float
    communicate: float
    decode: float
    density: float


@dataclass(frozen=True)
class Step:
    """One step on this rank.

    Attributes:
        number: of the step.
        blocked: seconds that training waited for gradients after the backward pass.
        rules: by the rule's name.
    """

    number: int
    blocked: float
    rules: Mapping[str, Traffic]

    @property
    def overlap(self) -> float:
        """Share of the communication that training did not wait for."""
        communicate = sum(traffic.communicate for traffic in self.rules.values())
        return max(0.0, 1 - self.blocked / communicate) if communicate else 1.0


class Telemetry:
    """The newest steps.

    Args:
        rules: of the pipeline.
    """

    def __init__(self, rules: Rules) -> None:
        self._names = {NO_RULE: "no rule"} | {number: f"{number + 1}: {rule}" for number, rule in enumerate(rules)}
        self.last: Step | None = None

    def add(self, number: int, blocked: float, groups: Sequence[tuple[Group, Figures]]) -> None:
        """A step is over."""
        by_rule: dict[int, list[tuple[Group, Figures]]] = {}
        for group, figures in groups:
            by_rule.setdefault(group.rule, []).append((group, figures))
        self.last = Step(number, blocked, {self._names[rule]: self._traffic(found) for rule, found in sorted(by_rule.items())})

    def _traffic(self, groups: Sequence[tuple[Group, Figures]]) -> Traffic:
        densities = [density for _, figures in groups for density in figures.densities]
        return Traffic(
            sum(figures.dense for _, figures in groups),
            sum(figures.nbytes for _, figures in groups),
            sum(figures.encode for _, figures in groups),
            sum(figures.communicate for _, figures in groups),
            sum(figures.decode for _, figures in groups),
            statistics.fmean(densities) if densities else 1.0,
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """The last step as plain data: rule -> figure -> value; what belongs to no rule is under "step"."""
        if self.last is None:
            return {}
        step = {"number": self.last.number, "blocked": self.last.blocked, "overlap": self.last.overlap}
        return {"step": step, **{name: asdict(traffic) for name, traffic in self.last.rules.items()}}
