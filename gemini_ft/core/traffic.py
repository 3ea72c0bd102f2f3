"""Models the training's network traffic in a step, and the traffic that fits in between. Pure: no torch, no clock, no I/O.

GEMINI (SOSP'23), section 5: the collectives of a step are observed for some steps; where their order repeats, so do the spans
between them in which the network is idle. A span is named by how many collectives have begun before it.

    profiler.add(step)                       # after each one; where that settles, profiler.profile is there
    room(moments, profile.gaps, ...)         # bytes that may leave now

Sending by `room`, first byte first, is algorithm 2 carried out online: where the steps are as they were profiled, the same bytes travel in
the same spans; where they are not, a chunk waits for the next span.

    plan = schedule(spans, Transfer(nbytes, copies, ...), LinkCost(alpha, bandwidth))
    interval = steps_per_snapshot(spans, transfer, link)    # 1 where plan.overflow_bytes is 0

Algorithm 2 cuts a shard into chunks that fit one of ``parts`` sub-buffers of a small reserved buffer, and puts them into the spans, in
order, as many as a span can carry with a safety factor. What fits into no span is *overflow*: it would delay the next update, so it is
measured, and the interval between snapshots grows until it is gone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

OVERFLOW = -1  # the span of chunks for which there is no room


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The cost of one message: ``alpha`` seconds, and its bytes at ``bandwidth`` bytes per second."""

    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.bandwidth > 0 and math.isfinite(self.alpha + self.bandwidth)):
            raise ValueError(f"alpha={self.alpha} s and bandwidth={self.bandwidth} bytes/s: must be finite, alpha >= 0, bandwidth > 0")

    def seconds(self, nbytes: int) -> float:
        """Seconds that one message of ``nbytes`` bytes takes."""
        return self.alpha + nbytes / self.bandwidth

    def carries(self, seconds: float) -> int:
        """Bytes of one message that can travel in ``seconds``."""
        return max(0, math.floor((seconds - self.alpha) * self.bandwidth))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The data that has to travel once per snapshot."""

    nbytes: int  # of the shard
    copies: int = 1  # peers it travels to, one after the other (replicas minus the owner's own)
    buffer_bytes: int = 128 * 2**20  # reserved on the device for chunks under way (R)
    parts: int = 4  # sub-buffers of it (p), so that one is received into while others are drained
    gamma: float = 0.8  # part of each span that is used; the rest is for jitter

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.copies < 0:
            raise ValueError(f"nbytes={self.nbytes}, copies={self.copies}: must not be negative")
        if self.parts < 1 or self.buffer_bytes < self.parts:
            raise ValueError(f"parts={self.parts}, buffer_bytes={self.buffer_bytes}: there must be at least one part of one byte")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma}: must be above 0 and at most 1")

    @property
    def chunk_bytes(self) -> int:
        """The most that travels at a time: what one sub-buffer holds."""
        return self.buffer_bytes // self.parts


@dataclass(frozen=True, kw_only=True)
class ScheduledChunk:
    """Bytes ``offset:offset + nbytes`` of the shard, to peer number ``copy``, in span number ``span`` (or `OVERFLOW`)."""

    span: int
    copy: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All chunks of one snapshot, in the order in which they travel."""

    chunks: tuple[ScheduledChunk, ...]  # those of a span follow each other; overflow comes last
    used: tuple[float, ...]  # seconds of each span that its chunks take by the cost model
    overflow_bytes: int  # bytes for which no span has room
    overflow_seconds: float  # how long they delay the next update, by the cost model


def schedule(spans: Sequence[float], transfer: Transfer, link: LinkCost) -> Schedule:
    """Puts every byte of every copy into spans, in order (algorithm 2).

    ``spans``: seconds of each idle span, in the order of the step.

    Returns:
        Every byte exactly once per copy; no span holds more than ``gamma`` of its seconds.
    """
    at, total = 0, transfer.nbytes * transfer.copies  # of all copies end to end
    chunks: list[ScheduledChunk] = []
    used = []

    def rest(most: int) -> int:
        """Bytes of the next chunk, which ends where its copy does; 0: none may travel, or all have."""
        return min(most, transfer.chunk_bytes, transfer.nbytes - at % transfer.nbytes) if at < total else 0

    for index, seconds in enumerate(spans):
        left = budget = transfer.gamma * seconds
        while (size := rest(link.carries(left))) > 0:
            copy, offset = divmod(at, transfer.nbytes)
            chunks.append(ScheduledChunk(span=index, copy=copy, offset=offset, nbytes=size))
            at += size
            left -= link.seconds(size)
        used.append(budget - left)
    overflow = list[ScheduledChunk]()
    while size := rest(total):
        copy, offset = divmod(at, transfer.nbytes)
        overflow.append(ScheduledChunk(span=OVERFLOW, copy=copy, offset=offset, nbytes=size))
        at += size
    late = sum(link.seconds(chunk.nbytes) for chunk in overflow)
    return Schedule(
        chunks=(*chunks, *overflow), used=tuple(used), overflow_bytes=sum(chunk.nbytes for chunk in overflow), overflow_seconds=late
    )


def steps_per_snapshot(spans: Sequence[float], transfer: Transfer, link: LinkCost, most: int = 1000) -> int:
    """The fewest steps over which the spans can carry one snapshot; ``most`` where that many steps cannot either.

    The spans of a step repeat in each of its successors. Each step is filled as the first one is, until nothing is left.
    """
    plan = schedule(spans, transfer, link)
    total = transfer.nbytes * transfer.copies
    if not plan.overflow_bytes:
        return 1
    carried = total - plan.overflow_bytes
    steps = min(most, -(-total // carried)) if carried else most
    # Where a copy ends in the middle of a span, a short chunk costs as much delay as a long one: a step may carry less.
    while transfer.copies > 1 and steps < most and schedule([*spans] * steps, transfer, link).overflow_bytes:
        steps += 1
    return steps


def arrival(begins: Sequence[float], spans: Sequence[float], period: float, transfer: Transfer, link: LinkCost) -> float | None:
    """Predicts when the last byte of a snapshot arrives, in seconds since the beginning of the step at which it was taken.

    Args:
        begins: of each span, in seconds since its step began.
        spans: seconds of each.
        period: seconds of a step; the next ones have the same spans.

    Returns:
        None: the spans of many steps cannot carry it.
    """
    steps = steps_per_snapshot(spans, transfer, link)
    plan = schedule(spans, transfer, link)
    if steps > 1:  # the first ones carry as much as they can, the last one the rest
        total = transfer.nbytes * transfer.copies
        rest = max(0, total - (steps - 1) * (total - plan.overflow_bytes))
        plan = schedule(spans, replace(transfer, nbytes=rest, copies=1), link)
    if plan.overflow_bytes:
        return None
    if not plan.chunks:
        return (steps - 1) * period
    last = plan.chunks[-1].span
    return (steps - 1) * period + begins[last] + plan.used[last]


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
