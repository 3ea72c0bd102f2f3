"""The figures of a gradient pipeline in the last steps, by rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini_ft.pipeline.lanes import GroupCost
from gemini_ft.pipeline.plan import NO_RULE, Group
from gemini_ft.pipeline.rules import Rules


@dataclass(frozen=True, kw_only=True)
class RuleTraffic:
    """The figures of one rule in one step, on this rank.

    Attributes:
        dense_bytes: of the gradients.
        sent_bytes: handed to collectives.
        encode, communicate, decode: seconds, added up over groups.
        density: mean share of the units that were present, of gradients that a sparse scheme has added up; else None.
    """

    dense_bytes: int
    sent_bytes: int
    encode: float
    communicate: float
    decode: float
    density: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The figures of one step on this rank.

    Attributes:
        seconds: from the beginning of the forward pass until the last average was there; 0 if unknown.
        blocked: seconds that training waited for gradients after the backward pass.
        rules: by the rule's name.
    """

    number: int
    seconds: float
    blocked: float
    rules: Mapping[str, RuleTraffic]

    @property
    def overlap(self) -> float:
        """Share of the communication that training did not wait for."""
        communicate = sum(traffic.communicate for traffic in self.rules.values())
        return max(0.0, 1 - self.blocked / communicate) if communicate else 1.0


class Telemetry:
    """The figures of the newest steps."""

    def __init__(self, rules: Rules) -> None:
        self._names = {NO_RULE: "no rule"} | {number: f"{number + 1}: {rule}" for number, rule in enumerate(rules)}
        self.last: Step | None = None

    def add(self, number: int, seconds: float, blocked: float, groups: Sequence[tuple[Group, GroupCost]]) -> None:
        by_rule: dict[int, list[GroupCost]] = {}
        for group, figures in groups:
            by_rule.setdefault(group.rule, []).append(figures)
        self.last = Step(
            number=number,
            seconds=seconds,
            blocked=blocked,
            rules={self._names[rule]: self._traffic(found) for rule, found in sorted(by_rule.items())},
        )

    @staticmethod
    def _traffic(groups: Sequence[GroupCost]) -> RuleTraffic:
        densities = [density for figures in groups for density in figures.densities]
        return RuleTraffic(
            dense_bytes=sum(figures.dense for figures in groups),
            sent_bytes=sum(figures.nbytes for figures in groups),
            encode=sum(figures.encode for figures in groups),
            communicate=sum(figures.communicate for figures in groups),
            decode=sum(figures.decode for figures in groups),
            density=statistics.fmean(densities) if densities else None,
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """The last step in the words of `gemini_ft.state.gradients.GradientState`, by rule; figures of no rule are under "step"."""
        if self.last is None:
            return {}
        step = {"number": self.last.number, "ms": 1e3 * self.last.seconds, "blocked_ms": 1e3 * self.last.blocked}
        return {"step": step, **{name: _figures(traffic, self.last.overlap) for name, traffic in self.last.rules.items()}}


def _figures(traffic: RuleTraffic, overlap: float) -> dict[str, float]:
    known = {} if traffic.density is None else {"density": traffic.density}
    return known | {
        "bytes_before": traffic.dense_bytes,
        "bytes_after": traffic.sent_bytes,
        "encode_ms": 1e3 * traffic.encode,
        "communication_ms": 1e3 * traffic.communicate,
        "decode_ms": 1e3 * traffic.decode,
        "overlap": overlap,
    }
