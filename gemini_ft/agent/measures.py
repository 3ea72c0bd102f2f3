"""Figures that are kept for metrics alone, of one stream on one host. Where nobody asks for metrics there are none."""

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
_UNDECIDED = 64  # iterations that may wait for their commit; one that is never decided must not stay


class Distribution:
    """How many values were at most as large as each bound.

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
        """(bound, number of values up to it), as a histogram of Prometheus has them; the last bound is infinite."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))


class Measures:
    """Figures of one stream since this agent began.

    Attributes:
        step: the last one that a worker of this host has ended; None: none yet.
        commit_seconds: from the end of a step here until it was committed.
        blocked_seconds: for which each step of each worker was held up.
        waited_seconds: the part of that for which its update waited for the copy.
        skips: reason -> snapshots that a worker of this host gave up.
        restarts: cause -> incarnations that followed another one.
        time: what the time went into, as far as it is known here: waiting for storage counts as rendezvous.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.commit_seconds, self.blocked_seconds, self.waited_seconds = Distribution(), Distribution(), Distribution()
        self.skips = Counter(dict.fromkeys(("late", "written", "ending", "other"), 0))
        self.restarts = Counter(dict.fromkeys(("died", "hang", "drain", "elsewhere"), 0))
        self.time = TimeLedger(time.monotonic())
        self._ended: dict[int, float] = {}  # iteration -> when the first worker said that it has ended
        self._is_restoring = False
        self._cause = ""  # of the restart that is to come

    def opened(self, number: int, resumed: Version | None, is_restart: bool) -> None:
        """Takes note of a new incarnation, of that number."""
        self.time.joined(time.monotonic(), number, resumed.iteration if resumed is not None else 0)
        self._is_restoring = resumed is not None
        if is_restart:
            self.restarts[self._cause or "elsewhere"] += 1
        self._cause = ""
        self._ended.clear()
        self.step = None

    def reserved(self) -> None:
        """Takes note that a worker has asked for its slots, as it does once it has its state back."""
        if self._is_restoring:
            self.time.restored(time.monotonic())

    def reached(self, iteration: int, held: Sequence[tuple[float, float]]) -> None:
        """Takes note that a worker has ended an iteration, and of what its last ones were held up."""
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
        """Takes note of a commit."""
        if (ended := self._ended.get(iteration)) is not None:
            self.commit_seconds.add(time.monotonic() - ended)
        self._ended = {later: at for later, at in self._ended.items() if later > iteration}

    def skipped(self, reason: str) -> None:
        """Takes note that a worker gave a snapshot up."""
        kind = {ENDING: "ending", LATE: "late"}.get(reason, "written" if reason.endswith(WRITTEN) else "other")
        self.skips[kind] += 1

    def lost(self, cause: str) -> None:
        """Takes note that a worker has ended; the first one is why the others are restarted."""
        self._cause = self._cause or cause
        self.time.failed(time.monotonic(), cause, "")
