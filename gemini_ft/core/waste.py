"""The formulas of wasted time: GEMINI's (section 2), and the best interval between checkpoints by Young and by Daly. Pure; seconds.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974. J. T. Daly, A higher order estimate of the
optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.
"""

from __future__ import annotations

from math import sqrt

DAY = 86400.0  # seconds


def wasted_time(checkpoint: float, interval: float, retrieval: float) -> float:
    """Expected time that one failure wastes, by GEMINI: t_ckpt + 1 / (2 f) + t_rtvl.

    Args:
        checkpoint: from the moment that a state exists until its checkpoint can be used.
        interval: between two checkpoints, 1 / f; failures come at any moment of it alike.
        retrieval: until the checkpoint is loaded.
    """
    return checkpoint + interval / 2 + retrieval


def effective_ratio(failures_per_day: float, wasted: float, writing: float = 0.0) -> float:
    """The part of the time in which training gets on, where failures are so rare that none falls into the recovery of another.

    Args:
        failures_per_day: of the whole job.
        wasted: by each of them, restart included.
        writing: part of the time in which training stands still for checkpoints.
    """
    return max(0.0, 1.0 - writing - failures_per_day * wasted / DAY)


def young_interval(cost: float, between_failures: float) -> float:
    """The best time of training between two checkpoints that stop it for ``cost`` each, to the first order."""
    return sqrt(2 * cost * between_failures)


def daly_interval(cost: float, between_failures: float) -> float:
    """The same to a higher order; where writing takes longer than the failures allow, the mean time between them."""
    if cost >= 2 * between_failures:
        return between_failures
    part = cost / (2 * between_failures)
    return young_interval(cost, between_failures) * (1 + sqrt(part) / 3 + part / 9) - cost
