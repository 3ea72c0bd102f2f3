"""The scheme that suits the gradient and the network, found out while training by measurements on all ranks together."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gemini_ft.trials import Trial, TrialRules

from . import wire
from .base import SparseScheme
from .costs import Link, Traffic, seconds
from .exchange import Exchange
from .omnireduce import BLOCK
from .partition import EvenPartition
from .rows import SparseRows, add_up, union
from .schemes import SCHEMES

_CLOSE = 1.5  # a scheme predicted to take this many times the best one's time may still be the best
_TERMS = TrialRules(visit=6, rounds=2, slower={1: 1.2})
_DRIFT = 0.25  # of the units of the sum, by which it is another regime
_PATIENCE = 3  # calls in a row of another regime


@dataclass(kw_only=True)
class Findings:
    """All that is known about gradients of one shape."""

    traffic: Traffic | None = None  # how they are spread, None before the profile
    predicted: Mapping[str, float] = field(default_factory=dict)  # seconds of each scheme by its formula
    least: Mapping[str, float] = field(default_factory=dict)  # the same without latency: its bytes alone take so long
    tried: list[str] = field(default_factory=list)  # names of the schemes that are tried now
    trial: Trial = field(default_factory=lambda: Trial.of(0))  # of those, by the slowest rank's seconds
    judged: list[str] = field(default_factory=list)  # names of all that have been tried
    chosen: str | None = None  # None as long as they are tried
    units: int | None = None  # of the sum when the scheme was chosen; how many calls in a row it has been far from that
    strange: int = 0

    def pack(self) -> dict[str, Any]:
        """The plan as plain data, with keys that are strings."""
        packed = asdict(self)
        if self.traffic is not None:
            packed["traffic"]["densities"] = [list(each) for each in self.traffic.densities.items()]
        return packed

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Findings:
        given = copy.deepcopy(dict(packed))
        if (traffic := given.pop("traffic")) is not None:
            given["traffic"] = Traffic(**{**traffic, "densities": dict(traffic["densities"])})
        return cls(trial=Trial(**given.pop("trial")), **given)


class Auto(SparseScheme):
    """Profiles, predicts, tries, picks; and does so again when the gradient changes.

    The first call with a shape measures the gradient and, once per group, the network, and predicts every scheme's time with
    `costs`. The next calls try those that come close, six times in a row each, and again those that prove to be nearly as fast
    as the best. A formula knows bytes only, so without latency it is the least that a scheme takes; where processors are short, the
    best one takes far longer than its bytes do. Then all others whose bytes take less time than that are tried beside it. The fastest
    stays. When the sum has had a quarter more or fewer units for three calls in a row, all of it begins anew. Whatever is decided is
    decided from what all ranks know: they always agree. Plans are kept by shape and dtype; gradients of one shape that behave
    differently should have an `Auto` each.
    """

    name = "auto"

    def __init__(self) -> None:
        self._schemes = {name: scheme() for name, scheme in SCHEMES.items()}
        self._links: dict[str, Link] = {}  # by name of the group
        self.plans: dict[tuple[object, ...], Findings] = {}
        self._restored: dict[tuple[object, ...], Findings] = {}  # by key without the group

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        if exchange.size == 1:  # nothing travels, so there is nothing to choose
            exchange.agree()
            return add_up([gradient])
        key = (exchange.group.group_name, gradient.rows, gradient.width, gradient.values.dtype)
        plan = self.plans.get(key) or self._restored.pop(key[1:], Findings())
        if plan.chosen is not None:
            result = self._schemes[plan.chosen].reduce(gradient, exchange)
        else:
            result = self._explore(plan, gradient, exchange)
        self.plans[key] = Findings() if _is_over(plan, len(result.indices)) else plan
        return result

    def state_dict(self) -> dict[str, Any]:
        """All that has been measured, tried and chosen, alike on all ranks."""
        known = {key[1:]: plan for key, plan in self.plans.items()}
        plans = [[rows, width, str(dtype), plan.pack()] for (rows, width, dtype), plan in [*known.items(), *self._restored.items()]]
        links = [[name, link.alpha, link.beta] for name, link in self._links.items()]
        return {"plans": plans, "links": links} if plans else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plans.clear()
        self._restored = {
            (rows, width, getattr(torch, dtype.removeprefix("torch."))): Findings.unpack(plan)
            for rows, width, dtype, plan in state.get("plans", ())
        }
        self._links = {name: Link(alpha=alpha, beta=beta) for name, alpha, beta in state.get("links", ())}

    def _explore(self, plan: Findings, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        if plan.traffic is None:
            self._predict(plan, gradient, exchange)
        begin = time.perf_counter()
        result = self._schemes[plan.tried[plan.trial.current]].reduce(gradient, exchange)
        [took] = slowest([time.perf_counter() - begin], exchange)
        if plan.trial.note(_TERMS, took) and (best := plan.trial.judge(_TERMS, plan.trial.medians())) is not None:
            _settle(plan, plan.tried[best], plan.trial.medians()[best])
        return result

    def _predict(self, plan: Findings, gradient: SparseRows, exchange: Exchange) -> None:
        group = exchange.group.group_name
        if group not in self._links:
            self._links[group] = link(exchange)
        plan.traffic = traffic(gradient, exchange)
        rate = self._links[group]
        plan.predicted = {name: seconds(name, plan.traffic, rate) for name in self._schemes}
        plan.least = {name: seconds(name, plan.traffic, Link(alpha=0.0, beta=rate.beta)) for name in self._schemes}
        plan.tried = candidates(self._schemes, plan.traffic, rate)
        plan.trial = Trial.of(len(plan.tried))


def _settle(plan: Findings, best: str, took: float) -> None:
    """Chooses the best, unless a scheme that was never tried could take less."""
    plan.judged += plan.tried
    more = [name for name, least in plan.least.items() if least < took and name not in plan.judged]
    if more:
        plan.tried, plan.trial = [best, *more], Trial.of(1 + len(more))
    else:
        plan.chosen = best


def candidates(names: Iterable[str], traffic: Traffic, link: Link) -> list[str]:
    """The schemes that come close to the best by the formulas, with latency or without it, as messages may overlap."""
    near: set[str] = set()
    for each in (link, Link(alpha=0.0, beta=link.beta)):
        predicted = {name: seconds(name, traffic, each) for name in names}
        near |= {name for name, time in predicted.items() if time <= _CLOSE * min(predicted.values())}
    return [name for name in names if name in near]


def _is_over(plan: Findings, units: int) -> bool:
    """Counts one more sum; returns whether the plan is for gradients that do not come any more."""
    if plan.chosen is None:
        return False
    if plan.units is None:
        plan.units = units
    plan.strange = plan.strange + 1 if abs(units - plan.units) > _DRIFT * plan.units else 0
    return plan.strange >= _PATIENCE


_PROBES = 2**18, 3 * 2**18  # bytes: more than a link lets through at once after a pause
_TRIES = 5


def traffic(gradient: SparseRows, exchange: Exchange) -> Traffic:
    """Measures density, densification and skew by an all-gather of all ranks' indices, without values."""
    bare = wire.encode(SparseRows(rows=gradient.rows, indices=gradient.indices, values=gradient.values[:, :0]), ("coo", "bitmap"))
    dtype = gradient.values.dtype
    sets = [wire.decode(each, gradient.rows, 0, dtype).indices for each in exchange.all_gather(bare)]
    return describe(sets, gradient.rows, gradient.width, dtype.itemsize)


def describe(sets: Sequence[torch.Tensor], rows: int, width: int, itemsize: int) -> Traffic:
    """The traffic of ranks' indices, each [n] ascending, in an index space of ``rows`` units of ``width`` values."""
    ranks, unit = len(sets), max(1, width * itemsize)
    densities, groups = {}, list(sets)
    for size in (*(1 << power for power in range((ranks - 1).bit_length())), ranks):
        groups = [union(sets[first : first + size], rows)[0] for first in range(0, ranks, size)]
        densities[size] = max(len(each) for each in groups) / max(1, rows)
    parts = EvenPartition(rows, ranks)
    pushed = torch.tensor([[len(part.indices) for part in parts.split(_bare(each, rows))] for each in sets])
    pulled = torch.tensor([len(part.indices) for part in parts.split(_bare(groups[0], rows))])
    block = BLOCK * itemsize
    blocks = -(-rows * width // BLOCK)
    return Traffic(
        ranks=ranks,
        nbytes=rows * unit,
        unit=unit,
        densities=densities,
        push_skew=_ratio(int(pushed.sum(0).max()), max(map(len, sets))),
        pull_skew=_ratio(ranks * int(pulled.max()), len(groups[0])),
        push_blocks=max(_fullest(_blocks(each, width, blocks), blocks, ranks) for each in sets),
        pull_blocks=_fullest(_blocks(groups[0], width, blocks), blocks, ranks),
        index=wire.index_bytes(rows),
        block=block,
    )


def link(exchange: Exchange) -> Link:
    """Measures the slowest rank's latency, and time per byte of a single stream while all ranks send at once.

    The time per byte is the difference between two long messages: what a pause has saved up for either (a token bucket, empty
    buffers) passes at any speed.
    """
    if exchange.size == 1:
        return Link(alpha=0.0, beta=1.0)  # nothing will travel
    neighbours = (exchange.rank + 1) % exchange.size, (exchange.rank - 1) % exchange.size

    def shift(message: torch.Tensor) -> Callable[[], object]:
        return lambda: exchange.shift(message, *neighbours)

    latency, short, long = (_seconds(shift(wire.new(size, exchange.device)), exchange) for size in (0, *_PROBES))
    return Link(alpha=latency, beta=max(long - short, 1e-12) / (_PROBES[1] - _PROBES[0]))


def slowest(seconds: Sequence[float], exchange: Exchange) -> list[float]:
    """The longest time of any rank, for each of ``seconds``. Collective."""
    own = wire.wrap(wire.as_bytes(torch.tensor(seconds, dtype=torch.float64, device=exchange.device)))
    everybody = torch.stack([wire.payload(each).view(torch.float64) for each in exchange.share(own)])
    return [float(each) for each in everybody.amax(0)]


def _seconds(call: Callable[[], object], exchange: Exchange) -> float:
    """The shortest time of some calls, as every disturbance makes them longer."""
    times = []
    for _ in range(_TRIES):
        exchange.agree()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(slowest(times, exchange))


def _bare(indices: torch.Tensor, rows: int) -> SparseRows:
    return SparseRows(rows=rows, indices=indices, values=indices.new_zeros(len(indices), 0))


def _blocks(indices: torch.Tensor, width: int, rows: int) -> torch.Tensor:
    """Numbers of the blocks, of ``rows``, that units reach into, ascending."""
    first, last = indices * width // BLOCK, (indices * width + max(0, width - 1)) // BLOCK
    reach = torch.arange(width // BLOCK + 2, device=indices.device)
    return union([torch.minimum(first.unsqueeze(1) + reach, last.unsqueeze(1)).flatten()], rows)[0]


def _fullest(blocks: torch.Tensor, count: int, parts: int) -> float:
    pieces = EvenPartition(count, parts).split(_bare(blocks, count))
    return max(_ratio(len(piece.indices), piece.rows) for piece in pieces)


def _ratio(top: int, bottom: int) -> float:
    return top / bottom if bottom else 0.0
