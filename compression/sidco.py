"""SIDCo (Abdelmoniem et al., MLSys 2021): a threshold in closed form, from a distribution fitted to the magnitudes.

Each stage fits the tail that the stage before it has left ("peaks over threshold"); a controller per tensor changes their number
until the share that is selected is near the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from . import kernels
from .base import State, Turn
from .kernels import moderate
from .options import Ratio
from .sparse import RatioSparsifier, above, kept, within

Fit: TypeAlias = Callable[[Tensor, float, float], float]

_FIRST_RATIO = 0.25  # of the first stage
_EVERY = 5  # steps between two decisions of the controller
_TOLERANCE = 0.2
_FLAT = 1e-6  # a shape parameter below is that of an exponential distribution
_NEWTON_STEPS = 12
_EQUAL = 1e-6  # difference of two logarithms in float32 that only rounding may have made: all values are the same


def exponential(values: Tensor, at: float, ratio: float) -> float:
    """Threshold above which ``ratio`` of ``values`` lie, if these are exponential from ``at`` on (section 2.3, SIDCo-E)."""
    return at - (float(values.mean()) - at) * math.log(ratio)


def generalized_pareto(values: Tensor, at: float, ratio: float) -> float:
    """The same for a generalized Pareto distribution, by its moments (SIDCo-P)."""
    centre = values.mean()
    mean, deviations = float(centre) - at, values - centre
    variance = float(torch.dot(deviations, deviations)) / values.numel()
    if mean <= 0 or variance <= 0:
        return at
    shape = 0.5 * (mean * mean / variance - 1)
    scale = 0.5 * mean * (mean * mean / variance + 1)
    log = math.log(ratio)
    return at + scale * (-math.expm1(shape * log) / shape if abs(shape) > _FLAT else -log)


def gamma(values: Tensor, at: float, ratio: float) -> float:
    """The same for a gamma distribution from 0 on (first stage of SIDCo-GP); its quantile by Newton's method."""
    positive = values if float(values.min()) > 0 else values[values != 0]
    if positive.numel() == 0:
        return 0.0
    mean = float(positive.mean())
    spread = math.log(mean) - kernels.mean_log(positive)
    if spread <= _EQUAL:
        return mean
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return mean / shape * gamma_quantile(shape, ratio * values.numel() / positive.numel())


def gamma_quantile(shape: float, upper: float) -> float:
    """x with Q(shape, x) = upper, the regularised upper incomplete gamma function; from Wilson and Hilferty's
    approximation on, or that for small x.
    """
    if upper >= 1:
        return 0.0
    normal = -math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * upper - 1, dtype=torch.float64)))
    cube = 1 - 1 / (9 * shape) + normal / (3 * math.sqrt(shape))
    x = shape * cube**3 if cube > 0.5 else ((1 - upper) * math.gamma(1 + shape)) ** (1 / shape)
    alpha = torch.tensor(shape, dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        above = float(torch.special.gammaincc(alpha, torch.tensor(x, dtype=torch.float64)))
        slope = math.exp((shape - 1) * math.log(x) - x - math.lgamma(shape))
        if slope == 0:
            break
        x = min(max(x + (above - upper) / slope, x / 4), x * 4)
    return x


_FITS: dict[str, tuple[Fit, Fit]] = {  # of the first stage, and of the later ones
    "exponential": (exponential, exponential),
    "pareto": (generalized_pareto, generalized_pareto),
    "gamma": (gamma, generalized_pareto),
}


@dataclass(kw_only=True)
class Stages:
    """The controller of one tensor: the number of stages, and the shares they have selected since the last decision.

    Algorithm 1 (Adapt_Stages) takes a stage away where too much is selected and adds one where it is too little. That is the first
    move here. But whether more stages select more depends on the distribution, and one stage that selects too much cannot become
    fewer: a move that has made it worse is taken back, and the ends of the range turn round.
    """

    stages: int = 1
    steps: int = 0
    achieved: float = 0.0  # sum of selected / target over these steps
    direction: int = 0  # of the last move; 0: none yet
    error: float = 0.0  # that led to it: how far selected / target was from 1, as a logarithm

    def observe(self, achieved: float, most: int) -> None:
        """Records one step's result; every fifth call decides."""
        self.steps += 1
        self.achieved += achieved
        if self.steps < _EVERY:
            return
        mean = self.achieved / _EVERY
        self.steps, self.achieved = 0, 0.0
        if not 1 - _TOLERANCE <= mean <= 1 + _TOLERANCE:
            self._move(mean, most)

    def _move(self, mean: float, most: int) -> None:
        error = abs(math.log(max(mean, 1e-9)))
        if self.direction == 0:
            self.direction = -1 if mean > 1 else 1
        elif error > self.error:
            self.direction = -self.direction
        if not 1 <= self.stages + self.direction <= most:
            self.direction = -self.direction
        self.error = error
        self.stages = min(max(1, self.stages + self.direction), most)


class SIDCo(RatioSparsifier):
    """Sends about ``ratio`` of each tensor, above a threshold fitted in O(d).

    Where nothing or more than twice the target is above it, since the values are not distributed like that, exactly the largest are taken.

    ``distribution``: of the magnitudes; "gamma" fits generalized Pareto distributions from the second stage on.
    """

    def __init__(self, ratio: Ratio = 0.001, distribution: Literal["exponential", "pareto", "gamma"] = "exponential") -> None:
        if distribution not in _FITS:
            raise ValueError(f"distribution={distribution!r}: must be one of {', '.join(_FITS)}")
        self.ratio = ratio
        self._first, self._later = _FITS[distribution]
        self.stages: dict[str, Stages] = {}

    def choose(self, name: str, magnitudes: Tensor, turn: Turn) -> Tensor:
        control = self.stages.setdefault(name, Stages())
        found = above(magnitudes, self.threshold(magnitudes, control.stages))
        target = kept(magnitudes.numel(), self.ratio)
        control.observe(found.numel() / target, max(1, math.ceil(math.log(self.ratio, 0.5))))
        return within(magnitudes, found, target)

    def threshold(self, magnitudes: Tensor, stages: int) -> float:
        """The threshold that ``stages`` stages estimate; NaN where magnitudes are not finite, 0 where all are zero."""
        magnitudes, factor = moderate(magnitudes)
        return self._estimate(magnitudes, stages) / factor

    def _estimate(self, magnitudes: Tensor, stages: int) -> float:
        if stages == 1 or self.ratio >= _FIRST_RATIO:
            return self._first(magnitudes, 0.0, self.ratio)
        threshold = self._first(magnitudes, 0.0, _FIRST_RATIO)
        ratio = (self.ratio / _FIRST_RATIO) ** (1 / (stages - 1))
        for _ in range(stages - 1):
            magnitudes = magnitudes.index_select(0, above(magnitudes, threshold))
            if magnitudes.numel() == 0:
                break
            threshold = self._later(magnitudes, float(magnitudes.min()), ratio)
        return threshold

    def state_dict(self) -> State:
        return {name: asdict(control) for name, control in sorted(self.stages.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stages = {name: Stages(**control) for name, control in state.items()}
