"""Judges, on a device, whether a copy that begins now is over before the next update is due."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini_ft.worker.snapshot import PendingSnapshot

_REMEMBERED = 4  # snapshots
_SHARE = 0.1  # of the window is always left: where copies take all of it, one that begins at once makes the update wait
_LEAST = 3.0  # milliseconds that are always left: until a slot comes, however short the steps are
_COST = 0.02  # of the time, that updates may be held back by copies which do not fit beside a step
_IN_A_ROW = 16  # snapshots that are refused before one is let through: what is known of copies may be true no more


class CopyWindow:
    """The time that forward and backward leave for a copy, by the device's own events of the last snapshots.

    A slot may come late in a step, because the snapshot before was committed late. A copy that began then would hold back the update; it
    is better given up.
    """

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds from the final state to the moment when the update was due
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds
        self._open: deque[PendingSnapshot] = deque(maxlen=_REMEMBERED)  # snapshots whose update the device has not come to
        self._refused = 0  # in a row

    def follow(self, job: PendingSnapshot) -> None:
        """Takes the next snapshot, and what the device has done since the last one."""
        for each in list(self._open):
            if each.ready is not None and each.reached is not None and each.reached.query():
                self._open.remove(each)
                self._windows.append(each.ready.elapsed_time(each.reached))
                if each.begun is not None and each.copied is not None and each.copied.query():
                    self._copies.append(each.begun.elapsed_time(each.copied))
        self._open.append(job)

    def is_too_late(self, milliseconds: float) -> bool:
        """Whether a copy should not begin so long, in the device's time, after the state was final; that snapshot is refused then."""
        if self._refused >= _IN_A_ROW or milliseconds <= self.latest_begin:
            return False
        self._refused += 1
        return True

    def begin(self) -> None:
        """Takes note that a copy begins."""
        self._refused = 0

    @property
    def need(self) -> tuple[int, str]:
        """The least number of steps between snapshots whose copies hold updates back for at most 2 % of the time, and why; 1: they fit.

        Medians, because a first copy can take several times as long as later ones, and so can a step during which torch compiles.
        """
        if min(len(self._windows), len(self._copies)) < _REMEMBERED:
            return 1, ""
        window, copy = statistics.median(self._windows), statistics.median(self._copies)
        why = f"the copies of a snapshot take {copy:.0f} ms, forward and backward {window:.0f} ms"
        return max(1, math.ceil((copy - window) / (_COST * max(window, _LEAST)))), why

    @property
    def latest_begin(self) -> float:
        """Milliseconds after the state is final; infinite while nothing is known."""
        if not self._windows or not self._copies:
            return math.inf
        window = min(self._windows)
        return max(window - max(self._copies), _SHARE * window, _LEAST)
