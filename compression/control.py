"""Delay-aware control of the compression ratio, in the manner of DC2 (Abdelmoniem and Canini, INFOCOM 2021).

The paper describes what its control couples (ratio and observed delay), not how; the rules here are this module's own. Pure: no
clock, no communication. All ranks that are told the same delays hold the same ratio.

    control = DelayControl(elements=d, world=p, deadline=0.02)
    method.ratio = control.ratio                            # 1.0: leave nothing out, an all-reduce is cheaper
    control.observe(nbytes, slowest(seconds, group))        # gemini_ft.compression.collective
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LADDER = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)

_FORGET = 0.1  # weight of a new measurement
_OUTLIER = 3.0  # median absolute deviations
_WINDOW = 16  # residuals that deviations are taken from
_BELIEVED = 3  # outliers in a row that are no outliers any more, but another network
_LATE, _EARLY = 1.1, 0.9  # delay over deadline beyond which feedback acts
_RISE = 0.3  # of the ratio, added when there is time left
_BAND = 2.0  # how far feedback may move from the model's ratio
_CLIMB = 1.2  # of a higher rung that must be affordable before it is taken


@dataclass(kw_only=True)
class LinkEstimate:
    """The network as it is measured: ``seconds = alpha + beta nbytes``, by regression with exponentially fading weights."""

    count: int = 0  # measurements taken in since the last change of the network
    nbytes: float = 0.0  # faded mean
    seconds: float = 0.0  # faded mean
    spread: float = 0.0  # faded variance of the bytes
    covariance: float = 0.0  # of bytes and seconds, faded
    residuals: list[float] = field(default_factory=list)  # the newest, in seconds
    strange: int = 0  # outliers in a row, at the end

    @property
    def beta(self) -> float:
        """Seconds per byte; without messages of different sizes, all of the time is ascribed to the bytes."""
        known = self.spread > (0.01 * self.nbytes) ** 2 and self.covariance > 0
        slope = self.covariance / self.spread if known else 0.0
        through_zero = self.seconds / self.nbytes if self.nbytes else 0.0
        return min(slope, through_zero) if known else through_zero

    @property
    def alpha(self) -> float:
        """Seconds that even a message of no bytes takes."""
        return max(0.0, self.seconds - self.beta * self.nbytes)

    def predict(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` bytes take."""
        return self.alpha + self.beta * nbytes

    def carries(self, seconds: float) -> float:
        """Bytes that can be sent in ``seconds``."""
        return max(0.0, seconds - self.alpha) / self.beta if self.beta else 0.0

    def observe(self, nbytes: float, seconds: float) -> bool:
        """Takes in one measurement; returns whether the network has changed. A lone outlier changes nothing."""
        residual = seconds - self.predict(nbytes)
        if self._is_outlier(residual):
            self.strange += 1
            if self.strange < _BELIEVED:
                return False
            self.count, self.residuals = 0, []
        changed, self.strange = self.strange >= _BELIEVED, 0
        self._learn(nbytes, seconds)
        self.residuals = [*self.residuals[1 - _WINDOW :], seconds - self.predict(nbytes)]
        return changed

    def _is_outlier(self, residual: float) -> bool:
        if len(self.residuals) < _WINDOW // 2:
            return False
        middle = statistics.median(self.residuals)
        deviation = statistics.median(abs(each - middle) for each in self.residuals)
        return abs(residual - middle) > max(_OUTLIER * deviation, 0.05 * self.seconds)

    def _learn(self, nbytes: float, seconds: float) -> None:
        if self.count == 0:
            self.nbytes, self.seconds, self.spread, self.covariance = nbytes, seconds, 0.0, 0.0
        self.count += 1
        weight = max(_FORGET, 1 / self.count)
        off = nbytes - self.nbytes
        self.nbytes += weight * off
        self.spread += weight * ((1 - weight) * off * off - self.spread)
        self.covariance += weight * ((1 - weight) * off * (seconds - self.seconds) - self.covariance)
        self.seconds += weight * (seconds - self.seconds)


class DelayControl:
    """The ratio at which one group of gradients is exchanged in time.

    Every ``every`` steps: feed-forward from the link's model, bounding a feedback that divides the ratio by how late it was and adds
    to it while there is time; then the ladder, with hysteresis.

    Args:
        deadline: seconds that the collective may take: until the backward pass is over, or what the user wants.
        divisible: sent by parts (`TwoPhase`, an all-reduce, a sparse scheme) and not by an all-gather.
        entry: bytes of an element that is sent, its index included.
        every: steps between decisions.
    """

    def __init__(self, elements: int, world: int, deadline: float, *, divisible: bool = False, entry: int = 8, every: int = 5) -> None:
        if elements < 1 or world < 1 or every < 1 or not deadline > 0:
            raise ValueError(f"elements={elements}, world={world}, every={every}, deadline={deadline} s: all must be above 0")
        self.elements, self.world, self.deadline, self.every = elements, world, deadline, every
        self._dense_factor = 2 * (world - 1) / world
        self._factor, self._entry = self._dense_factor if divisible else world - 1, entry
        self.link = LinkEstimate()
        self.ratio = LADDER[0]
        self._wanted = LADDER[0]  # before it is put on the ladder
        self._delays: list[float] = []  # since the last decision

    def nbytes(self, ratio: float) -> float:
        """Bytes that reach one rank in one step at some ratio; 1.0 is a dense all-reduce of float32."""
        return min(4 * self.elements * self._dense_factor, self._sparse(ratio)) if ratio < 1.0 else 4 * self.elements * self._dense_factor

    @property
    def dense(self) -> bool:
        """Whether a dense all-reduce brings no more bytes than the present ratio does."""
        return self.ratio == 1.0 or self._sparse(self.ratio) >= self.nbytes(1.0)

    def received(self, sent: float) -> float:
        """Bytes that reach a rank at the present ratio, where every rank hands ``sent`` bytes to collectives."""
        return sent * (self._dense_factor if self.dense else self._factor)

    def _sparse(self, ratio: float) -> float:
        return self._entry * ratio * self.elements * self._factor

    def observe(self, nbytes: float, seconds: float) -> float:
        """One step's collective: bytes that reached this rank, and the slowest rank's seconds. Returns the ratio for the next."""
        if not seconds > 0 or nbytes < 0:
            raise ValueError(f"{nbytes} bytes in {seconds} s: give what was measured, seconds above 0")
        changed = self.link.observe(nbytes, seconds)
        self._delays.append(seconds)
        if changed or len(self._delays) >= self.every:
            self._decide(seconds if changed else statistics.median(self._delays))
            self._delays = []
        return self.ratio

    def feed_forward(self) -> float:
        """The ratio whose bytes the link carries by the deadline."""
        carried = self.link.carries(self.deadline)
        if carried >= self.nbytes(1.0):
            return 1.0
        return carried / self._sparse(1.0) if self._factor else 1.0

    def _decide(self, delay: float) -> None:
        error, model = delay / self.deadline, self.feed_forward()
        if error > _LATE:
            self._wanted /= error
        elif error < _EARLY:
            self._wanted *= 1 + _RISE
        self._wanted = min(max(self._wanted, model / _BAND), model * _BAND if model < 1 else 1.0)
        self._wanted = min(max(self._wanted, LADDER[-1]), LADDER[0])
        self.ratio = self._rung()

    def _rung(self) -> float:
        """The highest rung that is affordable; a higher one than now only with a margin, so that noise does not make it swing."""
        affordable = [rung for rung in LADDER if rung <= self._wanted and (rung <= self.ratio or self._safely(rung))]
        return max(affordable, default=LADDER[-1])

    def _safely(self, rung: float) -> bool:
        return self._wanted >= min(1.0, _CLIMB * rung) and self.link.predict(self.nbytes(rung)) <= self.deadline

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data: numbers, and lists and dicts of them."""
        return {"link": asdict(self.link), "ratio": self.ratio, "wanted": self._wanted, "delays": list(self._delays)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.link = LinkEstimate(**{**state["link"], "residuals": list(state["link"]["residuals"])})
        self.ratio, self._wanted, self._delays = state["ratio"], state["wanted"], list(state["delays"])
