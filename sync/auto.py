"""The scheme that suits the gradient and the network, found out while training."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from . import profiling
from .base import Dimensions, SparseScheme
from .costs import Link, Traffic, seconds
from .exchange import Exchange
from .rows import SparseRows
from .schemes import SCHEMES

_CLOSE = 1.5  # a scheme predicted to take so many times the best one's time may still be the best
_TRIALS = 5  # calls in a row of each that is tried, the first of which is not counted
_NEAR, _MORE = 1.2, 12  # those that stay below so many times the best one's time are called so many times in all
_DRIFT = 0.25  # of the units of the sum, by which it is another regime
_PATIENCE = 3  # calls in a row of another regime


@dataclass
class Plan:
    """All that is known about gradients of one shape.

    Attributes:
        traffic: how they are spread, None before the profile.
        predicted: seconds of each scheme by its formula.
        measured: seconds of each call of those that are tried, of the slowest rank.
        chosen: None as long as they are tried.
        units: of the sum when the scheme was chosen; how many calls in a row it has been far from that.
    """

    traffic: Traffic | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)
    chosen: str | None = None
    units: int | None = None
    strange: int = 0

    def pack(self) -> dict[str, Any]:
        """As plain data, with keys that are strings."""
        traffic = asdict(self.traffic) if self.traffic is not None else None
        if traffic is not None:
            traffic["densities"] = [[ranks, density] for ranks, density in traffic["densities"].items()]
        names = ("predicted", "measured", "chosen", "units", "strange")
        return copy.deepcopy({"traffic": traffic, **{name: getattr(self, name) for name in names}})

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Plan:
        """The inverse of `pack`."""
        given = copy.deepcopy(dict(packed))
        if (traffic := given.pop("traffic")) is not None:
            given["traffic"] = Traffic(**{**traffic, "densities": dict(traffic["densities"])})
        return cls(**given)


class Auto(SparseScheme):
    """Profiles, predicts, tries, picks; and does so again when the gradient changes.

    The first call with a shape measures the gradient and, once per group, the network, and predicts every scheme's time with
    `costs`. The next calls try those that come close, five times in a row each, and again those that prove to be nearly as fast
    as the best; the fastest stays. When the sum has had a quarter more or fewer units for three calls in a row, all of it begins
    anew. Whatever is decided is decided from what all ranks know: they always agree. Plans are kept by shape and dtype;
    gradients of one shape that behave differently should have an `Auto` each.
    """

    name = "auto"

    def __init__(self) -> None:
        self._schemes = {name: scheme() for name, scheme in SCHEMES.items()}
        self._links: dict[str, Link] = {}  # by name of the group
        self.plans: dict[tuple[object, ...], Plan] = {}
        self._restored: dict[tuple[object, ...], Plan] = {}  # by key without the group

    @property
    def dimensions(self) -> Dimensions:
        """Those of the scheme chosen last, or of Zen as long as there is none."""
        chosen = [plan.chosen for plan in self.plans.values() if plan.chosen is not None]
        return self._schemes[chosen[-1] if chosen else "zen"].dimensions

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        key = (exchange.group.group_name, gradient.rows, gradient.width, gradient.values.dtype)
        plan = self.plans.get(key) or self._restored.pop(key[1:], Plan())
        if plan.chosen is not None:
            result = self._schemes[plan.chosen].reduce(gradient, exchange)
        else:
            result = self._explore(plan, gradient, exchange)
        self.plans[key] = Plan() if _is_over(plan, len(result.indices)) else plan
        return result

    def state_dict(self) -> dict[str, Any]:
        """All that has been measured, tried and chosen, alike on all ranks."""
        plans = [[*_packed(key), plan.pack()] for key, plan in self.plans.items()]
        plans += [[rows, width, str(dtype), plan.pack()] for (rows, width, dtype), plan in self._restored.items()]
        links = [[name, link.alpha, link.beta] for name, link in self._links.items()]
        return {"plans": plans, "links": links} if plans else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plans.clear()
        self._restored = {
            (rows, width, getattr(torch, dtype.removeprefix("torch."))): Plan.unpack(plan)
            for rows, width, dtype, plan in state.get("plans", ())
        }
        self._links = {name: Link(alpha, beta) for name, alpha, beta in state.get("links", ())}

    def _explore(self, plan: Plan, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        if plan.traffic is None:
            self._predict(plan, gradient, exchange)
        name = contender(plan.measured)
        assert name is not None  # else the scheme would have been chosen
        begin = time.perf_counter()
        result = self._schemes[name].reduce(gradient, exchange)
        plan.measured[name] += profiling.slowest([time.perf_counter() - begin], exchange)
        if contender(plan.measured) is None:
            plan.chosen = fastest(plan.measured)
        return result

    def _predict(self, plan: Plan, gradient: SparseRows, exchange: Exchange) -> None:
        group = exchange.group.group_name
        if group not in self._links:
            self._links[group] = profiling.link(exchange)
        plan.traffic = profiling.traffic(gradient, exchange)
        plan.predicted = {name: seconds(name, plan.traffic, self._links[group]) for name in self._schemes}
        plan.measured = {name: [] for name in candidates(self._schemes, plan.traffic, self._links[group])}


def _packed(key: tuple[object, ...]) -> list[object]:
    _, rows, width, dtype = key
    return [rows, width, str(dtype)]


def candidates(names: Iterable[str], traffic: Traffic, link: Link) -> list[str]:
    """Who comes close to the best by the formulas with latency, or without it: of messages that wait for no other it overlaps."""
    near: set[str] = set()
    for each in (link, Link(0.0, link.beta)):
        predicted = {name: seconds(name, traffic, each) for name in names}
        near |= {name for name, time in predicted.items() if time <= _CLOSE * min(predicted.values())}
    return [name for name in names if name in near]


def contender(measured: Mapping[str, Sequence[float]]) -> str | None:
    """Whom to try next, by the seconds of each one's calls so far; None: enough is known."""
    new = [name for name, times in measured.items() if len(times) < _TRIALS]
    if new:
        return new[0]
    limit = _NEAR * _typical(measured[fastest(measured)])
    near = [name for name, times in measured.items() if _typical(times) <= limit]
    return next((name for name in near if len(measured[name]) < _MORE), None) if len(near) > 1 else None


def fastest(measured: Mapping[str, Sequence[float]]) -> str:
    """Whose calls take least, by their median without the first, which finds cold caches."""
    return min(measured, key=lambda name: _typical(measured[name]))


def _typical(times: Sequence[float]) -> float:
    return statistics.median(times[1:])


def _is_over(plan: Plan, units: int) -> bool:
    """Take note of one more sum; whether the plan is for gradients that there are no more."""
    if plan.chosen is None:
        return False
    if plan.units is None:
        plan.units = units
    plan.strange = plan.strange + 1 if abs(units - plan.units) > _DRIFT * plan.units else 0
    return plan.strange >= _PATIENCE
