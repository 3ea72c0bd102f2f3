"""Judges, on a device, whether a copy that begins now is over before the next update is due."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini_ft.worker.snapshot import Job

_REMEMBERED = 4  # snapshots
_AT_LEAST = 0.1  # of the window: where copies take longer than all of it, one that begins at once makes the update wait


class CopyWindow:
    """The time that forward and backward leave for a copy, by the device's own events of the last snapshots.

    A slot may come late in a step, because the snapshot before was committed late. A copy that began then would hold back the update; it
    is better given up. Nothing here depends on how far the host is ahead of the device.
    """

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds from the final state to the moment when the update was due
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds
        self._last: Job | None = None

    def follow(self, job: Job) -> None:
        """Takes the next snapshot, and what became of the one before: its copies have been made, and its update, if any, is due."""
        last, self._last = self._last, job
        if last is None or last.ready is None or not last.ready.query():
            return
        if last.begun is not None and last.copied is not None and last.copied.query():
            self._copies.append(last.begun.elapsed_time(last.copied))
        if last.reached is not None and last.reached.query():
            self._windows.append(last.ready.elapsed_time(last.reached))

    @property
    def latest_begin(self) -> float:
        """Milliseconds after the state is final; infinite while nothing is known."""
        if not self._windows or not self._copies:
            return math.inf
        window = min(self._windows)
        return max(window - max(self._copies), _AT_LEAST * window)
