"""The outcomes of this rank's snapshots: which were committed, which were given up, and why.

`Stats` has the counts of these, and figures of the process's last steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gemini_ft.wire.worker_messages import ENDING, LATE, Travelled

_SILENCE = 60.0  # seconds before the same warning is given again
_log = logging.getLogger("gemini_ft")


@dataclass(kw_only=True)
class Stats:
    """Counts of this process since it started, and what it remembers of its last steps. Seconds are of the training thread."""

    snapshots: int = 0
    committed: int | None = None  # newest committed iteration
    skipped: int = 0  # snapshots given up, by this rank or another
    blocked: list[float] = field(default_factory=list)  # seconds per step
    shard_bytes: int = 0
    restored: dict[str, int] = field(default_factory=dict)  # "own memory", "peer <host>", "other ranks", "storage" -> bytes
    restore_seconds: float = 0.0
    commit_seconds: dict[int, float] = field(default_factory=dict)  # iteration -> from its end until all replicas were verified
    lag: dict[int, int] = field(default_factory=dict)  # iteration -> steps that had ended after it when it was committed
    traffic: dict[int, list[Travelled]] = field(default_factory=dict)  # iteration -> how it got to each peer
    aborted: dict[int, str] = field(default_factory=dict)  # iteration -> why the hosts will never commit it
    # Per step of which the agent has not heard: seconds that it was held up, and those of them at updates.
    unsaid: list[tuple[float, float]] = field(default_factory=list)

    KEPT: ClassVar[int] = 1_000  # steps; a job makes millions

    def has_committed(self, iteration: int) -> bool:
        return self.committed is not None and self.committed >= iteration

    def note_blocked(self, seconds: float, waited: float = 0.0) -> None:
        """Counts a step that is over; ``waited``: the part of it that its update waited."""
        self.blocked.append(seconds)
        if len(self.unsaid) < self.KEPT:
            self.unsaid.append((seconds, waited))
        if len(self.blocked) >= 2 * self.KEPT:
            del self.blocked[: -self.KEPT]

    def note_commit(self, iteration: int, seconds: float, lag: int) -> None:
        self.commit_seconds[iteration], self.lag[iteration] = seconds, lag
        _forget_oldest(self.commit_seconds, self.KEPT)
        _forget_oldest(self.lag, self.KEPT)

    def note_aborted(self, iteration: int, reason: str) -> None:
        self.aborted[iteration] = reason
        _forget_oldest(self.aborted, self.KEPT)

    def note_travelled(self, message: Travelled) -> None:
        """Counts a replica of this rank that has arrived."""
        self.traffic.setdefault(message.iteration, []).append(message)
        _forget_oldest(self.traffic, self.KEPT)


def _forget_oldest(table: dict[int, Any], kept: int) -> None:
    while len(table) > kept:
        del table[next(iter(table))]


class Outcomes:
    """The snapshots whose outcome this rank waits for. ``stats``: where outcomes are counted. ``write``: appends an event to the run's."""

    def __init__(self, stats: Stats, write: Callable[..., None]) -> None:
        self._stats, self._write = stats, write
        self._ended: dict[int, float] = {}  # iteration -> when it ended, until its outcome is known
        self._warned: dict[str, float] = {}  # reason -> when it was last said
        self._since = time.monotonic()
        self.newest = 0  # iteration of the last snapshot

    def begin(self, iteration: int) -> None:
        self.newest = iteration
        self._ended[iteration] = time.perf_counter()

    @property
    def is_open(self) -> bool:
        """Whether the newest snapshot is neither committed nor given up yet."""
        return self.newest in self._ended

    def known(self, iteration: int) -> bool | None:
        """Whether a snapshot that was begun has been committed, or a later one; None: it is still open."""
        return None if iteration in self._ended else self._stats.has_committed(iteration)

    def committed(self, iteration: int, now: int) -> None:
        self._write("committed", iteration=iteration)
        if (ended := self._ended.pop(iteration, None)) is not None:
            self._stats.note_commit(iteration, time.perf_counter() - ended, now - iteration)
        for older in [other for other in list(self._ended) if other < iteration]:
            self.given_up(older)  # its abort may have been lost with an agent

    def given_up(self, iteration: int) -> None:
        """Records that a snapshot will never be committed. Every rank that gives one up reports it, and all ranks are told."""
        if self._ended.pop(iteration, None) is not None:
            self._stats.skipped += 1
            self._write("skipped", iteration=iteration)

    def discarded(self, iteration: int, reason: str) -> None:
        """Logs why this rank has no snapshot of an iteration, each reason once a minute.

        In the first minute being late is no reason to warn, as pages are touched for the first time and peers are dialled; at the end
        there is nothing to say.
        """
        now = time.monotonic()
        if reason != ENDING and now - self._warned.get(reason, -_SILENCE) >= _SILENCE:
            self._warned = {other: at for other, at in self._warned.items() if now - at < _SILENCE} | {reason: now}
            committed = "none yet" if self._stats.committed is None else f"that of iteration {self._stats.committed}"
            text = "iteration %d has no snapshot: %s. Training goes on unharmed, and a later one is tried (newest that is committed: %s)"
            is_usual = reason == LATE and now - self._since < _SILENCE
            _log.log(logging.INFO if is_usual else logging.WARNING, text, iteration, reason, committed)
