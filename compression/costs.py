"""The seconds that compressing, decompressing and communicating take, as functions of bytes. Pure.

Two shapes: a straight line, and straight pieces between measured points. Measurements of GPU encoders are flat up to a few MB
and linear above (Cupcake, MLSys 2023, figure 2): a line does not fit them, pieces do. Sums and multiples of either are of these
two shapes again, without any loss: a group that needs two collectives costs ``values + indices``, one that decodes the
payloads of four workers costs ``decode.scaled(times=4)``.

    fitted = fit_line(samples)
    cost = fitted.cost if fitted.worst < 0.1 else interpolate(samples).cost
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Affine:
    """``alpha`` seconds, and ``beta`` seconds per byte. Raises ValueError: either is negative or not finite."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0 and math.isfinite(self.alpha + self.beta)):
            raise ValueError(f"alpha={self.alpha} s, beta={self.beta} s/byte: both must be finite and at least 0")

    def __call__(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` bytes take."""
        return self.alpha + self.beta * nbytes

    def of(self, nbytes: Floats) -> Floats:
        """Seconds for each of many sizes, in the shape of ``nbytes`` (float64)."""
        return self.alpha + self.beta * nbytes

    def __add__(self, other: Cost) -> Cost:
        """The cost of one after the other, for the same bytes."""
        if isinstance(other, Affine):
            return Affine(alpha=self.alpha + other.alpha, beta=self.beta + other.beta)
        return other + self

    def scaled(self, size: float = 1.0, times: float = 1.0) -> Affine:
        """``times`` repetitions, each for ``size`` times the bytes."""
        return Affine(alpha=self.alpha * times, beta=self.beta * size * times)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Straight pieces between measured points; the first and the last piece go on beyond them, but never below 0.

    Raises ValueError: fewer than two points, sizes that do not ascend, or anything negative or not finite.
    """

    nbytes: tuple[float, ...]  # sizes that were measured, ascending, at least two
    seconds: tuple[float, ...]  # what each took

    def __post_init__(self) -> None:
        if len(self.nbytes) != len(self.seconds) or len(self.nbytes) < 2:
            raise ValueError(f"{len(self.nbytes)} sizes and {len(self.seconds)} times: there must be as many of both, at least 2")
        if not all(0 <= number < math.inf for number in (*self.nbytes, *self.seconds)):
            raise ValueError(f"sizes {self.nbytes} and seconds {self.seconds}: must be finite and at least 0")
        if any(low >= high for low, high in pairwise(self.nbytes)):
            raise ValueError(f"sizes {self.nbytes}: must ascend; of repeated measurements give the median (interpolate() does)")

    def __call__(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` bytes take."""
        piece = min(max(bisect_right(self.nbytes, nbytes) - 1, 0), len(self.nbytes) - 2)
        (low, high), (begin, end) = self.nbytes[piece : piece + 2], self.seconds[piece : piece + 2]
        return max(0.0, begin + (end - begin) * (nbytes - low) / (high - low))

    def of(self, nbytes: Floats) -> Floats:
        """Seconds for each of many sizes, in the shape of ``nbytes`` (float64)."""
        x, y = np.array(self.nbytes), np.array(self.seconds)
        piece = np.clip(np.searchsorted(x, nbytes, side="right") - 1, 0, len(x) - 2)
        low, begin = x[piece], y[piece]
        seconds: Floats = np.maximum(0.0, begin + (y[piece + 1] - begin) * (nbytes - low) / (x[piece + 1] - low))
        return seconds

    def __add__(self, other: Cost) -> Measured:
        """The cost of one after the other, for the same bytes."""
        points = sorted({*self.nbytes, *(other.nbytes if isinstance(other, Measured) else ())})
        return Measured(nbytes=tuple(points), seconds=tuple(self(point) + other(point) for point in points))

    def scaled(self, size: float = 1.0, times: float = 1.0) -> Measured:
        """``times`` repetitions, each for ``size`` times the bytes (``size`` > 0)."""
        if not size > 0:
            raise ValueError(f"size={size}: must be above 0")
        return Measured(nbytes=tuple(point / size for point in self.nbytes), seconds=tuple(second * times for second in self.seconds))


Cost = Affine | Measured
FREE = Affine(alpha=0.0, beta=0.0)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement: ``nbytes`` took ``seconds``."""

    nbytes: float
    seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.nbytes < math.inf and 0 < self.seconds < math.inf):
            raise ValueError(f"{self.nbytes} bytes in {self.seconds} s: bytes must be finite and at least 0, seconds above 0")


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """A cost model, and how far it is from the samples it was made of."""

    cost: Cost
    mean: float  # mean over the samples of ``|predicted - measured| / measured``
    worst: float  # the largest of these


def fit_line(samples: Iterable[Sample]) -> FittedCost:
    """The line with the least squares of *relative* errors, so that small sizes count as much as large ones.

    Neither ``alpha`` nor ``beta`` becomes negative: where the best line would have it so, the best line through zero, or the
    best constant, takes its place.

    Raises ValueError: fewer than two different sizes.
    """
    points = _at_least_two_sizes(samples)
    weights = [point.seconds**-2 for point in points]
    ww = math.fsum(weights)
    wx = math.fsum(w * p.nbytes for w, p in zip(weights, points, strict=True))
    wy = math.fsum(w * p.seconds for w, p in zip(weights, points, strict=True))
    x0, y0 = wx / ww, wy / ww
    slope = math.fsum(w * (p.nbytes - x0) * (p.seconds - y0) for w, p in zip(weights, points, strict=True))
    beta = max(0.0, slope / math.fsum(w * (p.nbytes - x0) ** 2 for w, p in zip(weights, points, strict=True)))
    if (alpha := y0 - beta * x0) < 0:
        wxy = math.fsum(w * p.nbytes * p.seconds for w, p in zip(weights, points, strict=True))
        alpha, beta = 0.0, wxy / math.fsum(w * p.nbytes**2 for w, p in zip(weights, points, strict=True))
    cost = Affine(alpha=alpha, beta=beta)
    return _fit(cost, [abs(cost(p.nbytes) - p.seconds) / p.seconds for p in points])


def interpolate(samples: Iterable[Sample]) -> FittedCost:
    """Straight pieces between the medians of each size.

    Such a model is right at its own points whatever they are. What is reported is what it says of sizes that it has not seen:
    the error at each size with that size left out. With two sizes, where nothing can be left out, it is that of the medians.

    Raises ValueError: fewer than two different sizes.
    """
    points = _at_least_two_sizes(samples)
    sizes = sorted({point.nbytes for point in points})
    medians = [statistics.median(p.seconds for p in points if p.nbytes == size) for size in sizes]
    cost = Measured(nbytes=tuple(sizes), seconds=tuple(medians))

    def without(index: int) -> Measured:
        return Measured(nbytes=cost.nbytes[:index] + cost.nbytes[index + 1 :], seconds=cost.seconds[:index] + cost.seconds[index + 1 :])

    models = {size: without(index) if len(sizes) > 2 else cost for index, size in enumerate(sizes)}
    return _fit(cost, [abs(models[p.nbytes](p.nbytes) - p.seconds) / p.seconds for p in points])


def _fit(cost: Cost, errors: Sequence[float]) -> FittedCost:
    return FittedCost(cost=cost, mean=statistics.fmean(errors), worst=max(errors))


def _at_least_two_sizes(samples: Iterable[Sample]) -> list[Sample]:
    points = list(samples)
    if len({point.nbytes for point in points}) < 2:
        raise ValueError(f"{len(points)} samples of {len({p.nbytes for p in points})} sizes: measure at least two different sizes")
    return points
