"""Figures of one stream on one host that only ``/metrics`` needs. They are kept only where the option ``metrics`` is set."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from gemini_ft.core.goodput import TimeLedger
from gemini_ft.core.versions import Version
from gemini_ft.wire.worker_messages import ENDING, LATE, WRITTEN

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_UNDECIDED = 64  # the most iterations that are remembered until they are committed; some never are


class Distribution:
    """Counts of values that were at most as large as each bound.

    Attributes:
        total: sum of all values.
    """

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns (bound, number of values up to it), as a histogram of Prometheus has them; the last bound is infinite."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))


class Measures:
    """Figures of one stream since this agent began.

    Attributes:
        step: the newest step that a worker of this host has ended; None: none yet.
        commit_seconds: time from the end of a step here until it was committed.
        blocked_seconds: time for which snapshots held up each step of each worker.
        waited_seconds: the part of that time for which the update waited for the copy.
        skips: reason -> number of snapshots that a worker of this host gave up.
        restarts: cause -> number of incarnations that followed another one.
        time: the time of the run by phase, as this host sees it: waiting for storage counts as rendezvous.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.commit_seconds, self.blocked_seconds, self.waited_seconds = Distribution(), Distribution(), Distribution()
        self.skips = Counter(dict.fromkeys(("late", "written", "ending", "other"), 0))
        self.restarts = Counter(dict.fromkeys(("died", "failed", "hang", "drain", "elsewhere"), 0))
        self.time = TimeLedger(time.monotonic())
        self._ended: dict[int, float] = {}  # iteration -> when the first worker said that it has ended
        self._is_restoring = False
        self._cause = ""  # of the restart that is to come

    def opened(self, number: int, resumed: Version | None, is_restart: bool) -> None:
        """Begins a new incarnation; a restart is counted under the cause that was seen here."""
        self.time.joined(time.monotonic(), number, resumed.iteration if resumed is not None else 0)
        self._is_restoring = resumed is not None
        if is_restart:
            self.restarts[self._cause or "elsewhere"] += 1
        self._cause = ""
        self._ended.clear()
        self.step = None

    def reserved(self) -> None:
        """Counts the restore as over, as a worker asks for its slots once it has its state back."""
        if self._is_restoring:
            self.time.restored(time.monotonic())

    def reached(self, iteration: int, held: Sequence[tuple[float, float]]) -> None:
        """Records that a worker has ended an iteration.

        Args:
            iteration: the newest one that it has ended.
            held: of its last iterations the seconds for which each was held up, and the part of these at the update.
        """
        if self.step is None or iteration > self.step:
            self.step, self._is_restoring = iteration, False
            self.time.stepped(time.monotonic(), iteration, held[-1][0] if held else 0.0)
            self._ended[iteration] = time.monotonic()
            if len(self._ended) > _UNDECIDED:
                del self._ended[next(iter(self._ended))]
        for blocked, waited in held:
            self.blocked_seconds.add(blocked)
            self.waited_seconds.add(waited)

    def committed(self, iteration: int) -> None:
        """Records a commit."""
        if (ended := self._ended.get(iteration)) is not None:
            self.commit_seconds.add(time.monotonic() - ended)
        self._ended = {later: at for later, at in self._ended.items() if later > iteration}

    def skipped(self, reason: str) -> None:
        """Counts a snapshot that a worker gave up."""
        kind = {ENDING: "ending", LATE: "late"}.get(reason, "written" if reason.endswith(WRITTEN) else "other")
        self.skips[kind] += 1

    def lost(self, cause: str) -> None:
        """Records the end of a worker; the first end since the last restart is the cause of the next one."""
        self._cause = self._cause or cause
        self.time.failed(time.monotonic(), cause, "")
