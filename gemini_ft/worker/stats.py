"""Counts of what a process has recorded, and figures of its last steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from gemini_ft.wire.worker_messages import Travelled


@dataclass
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

    KEPT: ClassVar[int] = 1_000  # steps; a job makes millions

    def note_blocked(self, seconds: float) -> None:
        """Counts a step that is over."""
        self.blocked.append(seconds)
        if len(self.blocked) >= 2 * self.KEPT:
            del self.blocked[: -self.KEPT]

    def note_commit(self, iteration: int, seconds: float, lag: int) -> None:
        """Counts a committed snapshot of this rank."""
        self.commit_seconds[iteration], self.lag[iteration] = seconds, lag
        _forget_oldest(self.commit_seconds, self.KEPT)
        _forget_oldest(self.lag, self.KEPT)

    def note_travelled(self, message: Travelled) -> None:
        """Counts a replica of this rank that has arrived."""
        self.traffic.setdefault(message.iteration, []).append(message)
        _forget_oldest(self.traffic, self.KEPT)


def _forget_oldest(table: dict[int, Any], kept: int) -> None:
    while len(table) > kept:
        del table[next(iter(table))]
