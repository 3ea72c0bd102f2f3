"""Plans which chunk of which copy travels in which idle span of the training's own traffic. Pure: no torch, no clock, no I/O.

GEMINI (SOSP'23), section 5 and algorithm 2: a shard is cut into chunks that fit one of ``parts`` sub-buffers of a small reserved
buffer; chunks are put into the spans between collectives, in order, as many as the span can carry with a safety factor.
What fits into no span is *overflow*: it would delay the next update, so it is measured, and the interval between snapshots
grows until it is gone.

    plan = schedule(spans, Transfer(nbytes, copies, ...), LinkCost(alpha, bandwidth))
    interval = steps_per_snapshot(spans, transfer, link)    # 1 where plan.overflow_bytes is 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
