"""Models the training's network traffic in a step, and the traffic that fits in between. Pure: no torch, no clock, no I/O.

GEMINI (SOSP'23), section 5: the collectives of a step are observed for some steps; where their order repeats, so do the spans
between them in which the network is idle. A span is named by how many collectives have begun before it.

    profiler.add(step)                       # after each one; where that settles, profiler.profile is there
    room(moments, profile.gaps, ...)         # bytes that may leave now

Sending by `room`, first byte first, is algorithm 2 (gemini_ft.core.schedule) carried out online: where the steps are as they were
profiled, the same bytes travel in the same spans; where they are not, a chunk waits for the next span.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemini_ft.core.schedule import LinkCost

_STRANGERS = 3  # steps in a row with another order of collectives, until that one counts
_LOW = 0.1  # the quantile of a span's length that is relied upon
_OVERDUE = 0.05  # seconds by which a span may exceed its profile before the profile does not hold any more
_FALLS = 2  # reports in a row after which an interval that is longer than needed is shortened


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A worker's present use of the network."""

    in_flight: int = 0  # collectives of the training that have begun and are not over
    begun: int = 0  # collectives that have begun since the step did
    step: int = 0  # steps that have ended
    since: float = 0.0  # when ``in_flight`` last fell to zero, or the step began if that was later; seconds of the monotonic clock
    waiting: bool = False  # whether the training stands still until a snapshot has travelled


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One operation of the training. Times in seconds since its step began; ``end`` is that of the step where it went on."""

    name: str
    nbytes: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """One step of the training, on one rank."""

    collectives: tuple[Collective, ...]  # in the order in which they began
    seconds: float  # how long it took
    carried: float = 0.0  # until when collectives of the step before went on, in seconds since this one began
    began: float = 0.0  # by the host's monotonic clock, in seconds

    @property
    def order(self) -> tuple[str, ...]:
        """The operations that must repeat for idle spans to repeat. Sizes may differ, as with sequences of other lengths."""
        return tuple(each.name for each in self.collectives)

    def idle(self) -> list[tuple[float, float]]:
        """The spans in which nothing is in flight, as (begin, seconds), by the number of collectives begun: one more than there are."""
        spans, over = [], self.carried
        for begin, end in [*((each.begin, each.end) for each in self.collectives), (self.seconds, self.seconds)]:
            spans.append((over, max(0.0, begin - over)))
            over = max(over, end)
        return spans


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps whose collectives come in the same order."""

    gaps: tuple[float, ...]  # seconds of idle network, by the number of collectives that have begun; a low quantile over the steps
    begins: tuple[float, ...]  # when each of these begins, in seconds since the step did; median
    spread: tuple[float, ...]  # standard deviation of each gap, in seconds
    seconds: float  # median length of a step
    steps: int  # how many were observed

    @property
    def idle(self) -> float:
        """Seconds of a step that can be relied upon."""
        return sum(self.gaps)


class Profiler:
    """Watches one rank's steps. ``window``: steps of the same order that make a profile."""

    def __init__(self, window: int) -> None:
        self.profile: Profile | None = None
        self._order: tuple[str, ...] | None = None
        self._steps: deque[ObservedStep] = deque(maxlen=window)
        self._strangers = 0
        self._fresh = 0  # steps since the last look

    def add(self, step: ObservedStep) -> bool:
        """Takes in a step; returns whether ``profile`` has changed: after each window, and when it became void.

        Single steps of another order (a logged value that is reduced now and then) are passed over. When they follow each
        other, the order has changed: the profile is void until the new order has been seen long enough.
        """
        if step.order != self._order:
            self._strangers += 1
            if self._strangers < _STRANGERS and self._order is not None:
                return False
            self._order, void = step.order, self.profile is not None
            self._steps.clear()
            self._strangers = self._fresh = 0
            self._steps.append(step)
            self.profile = None
            return void
        self._strangers = 0
        self._steps.append(step)
        self._fresh += 1
        if len(self._steps) < (self._steps.maxlen or 0) or self._fresh < len(self._steps):
            return False
        self._fresh = 0
        self.profile = summary(self._steps)
        return True


def summary(steps: Iterable[ObservedStep]) -> Profile:
    """The profile of steps that all have the same order of collectives."""
    steps = list(steps)
    spans = list(zip(*(step.idle() for step in steps), strict=True))  # of each number of collectives, those of all steps
    lengths = [[seconds for _, seconds in each] for each in spans]
    return Profile(
        gaps=tuple(sorted(each)[math.floor(_LOW * (len(each) - 1))] for each in lengths),
        begins=tuple(statistics.median(begin for begin, _ in each) for each in spans),
        spread=tuple(map(statistics.pstdev, lengths)),
        seconds=statistics.median(step.seconds for step in steps),
        steps=len(steps),
    )


def common(profiles: Sequence[Profile]) -> Profile:
    """The idle spans of a host's network, from the profiles of its ranks.

    Ranks of one job mostly do the same: then the shortest is taken for each span. Where they do not (pipelines), the profile of the
    rank that is idle for the shortest time is taken; at run time all are asked anyway.
    """
    tightest = min(profiles, key=lambda profile: profile.idle)
    if len({len(profile.gaps) for profile in profiles}) > 1:
        return tightest
    return replace(tightest, gaps=tuple(map(min, zip(*(profile.gaps for profile in profiles), strict=True))))


def room(
    moments: Mapping[int, Moment],  # of the host's ranks
    gaps: Mapping[int, Sequence[float]],  # of those that have been profiled (``Profile.gaps``)
    now: float,
    outstanding: int,  # bytes that have been let out and are not acknowledged; never more than twice ``most``
    *,
    link: LinkCost | None,  # what sending costs; None: not known yet
    gamma: float,  # part of a span that is used
    most: int,  # bytes that may leave at a time: what a collective that comes unforeseen has to wait for
) -> int:
    """Bytes that may leave a host now; 0: not before something changes."""
    most = min(most, 2 * most - outstanding)
    for rank, moment in moments.items():
        if moment.in_flight:
            return 0
        spans, elapsed = gaps.get(rank), now - moment.since
        if spans is None or link is None or moment.begun >= len(spans) or moment.waiting:
            continue
        if elapsed > 2 * spans[moment.begun] + _OVERDUE:
            continue
        most = min(most, link.carries(gamma * spans[moment.begun] - elapsed) - outstanding)
    return max(0, most)


@dataclass
class Pace:
    """The number of steps between two snapshots, the same for all hosts: as few as the slowest of them can carry.

    It rises at once, and falls when every host has needed less for some time.
    """

    interval: int = 1
    _needs: dict[str, int] = field(default_factory=dict)  # host -> steps per snapshot
    _lower: int = 0  # reports in a row by which it could be shorter

    def report(self, host: str, steps: int) -> bool:
        """Takes one host's need; returns whether ``interval`` has changed."""
        self._needs[host] = steps
        need = max(self._needs.values())
        self._lower = self._lower + 1 if need < self.interval else 0
        if need == self.interval or 0 < self._lower < _FALLS * len(self._needs):
            return False
        self.interval, self._lower = need, 0
        return True
