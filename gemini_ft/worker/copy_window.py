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
_COARSE, _ROUNDING = 1.25, 1e-9  # to whose powers the need is rounded up, and the error of a logarithm
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
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds of one step, from one snapshot to the next
        self._before: PendingSnapshot | None = None  # the last one whose update the device has come to
        self._needed = 1  # see `need`
        self._open: deque[PendingSnapshot] = deque(maxlen=_REMEMBERED)  # snapshots whose update the device has not come to
        self._refused = 0  # in a row

    def follow(self, job: PendingSnapshot) -> None:
        """Takes the next snapshot, and what the device has done since the last one."""
        for each in list(self._open):
            has_copied = each.begun is None or (each.copied is not None and each.copied.query())  # a copy may end after the update was due
            if each.ready is not None and each.reached is not None and each.reached.query() and has_copied:
                self._open.remove(each)
                self._windows.append(each.ready.elapsed_time(each.reached))
                if each.begun is not None and each.copied is not None:
                    self._copies.append(each.begun.elapsed_time(each.copied))
                before, self._before = self._before, each
                if before is not None and before.ready is not None and each.iteration > before.iteration:
                    self._steps.append(before.ready.elapsed_time(each.ready) / (each.iteration - before.iteration))
        self._open.append(job)

    def is_too_late(self, milliseconds: float) -> bool:
        """Whether a copy should not begin so long, in the device's time, after the state was final; that snapshot is refused then."""
        if self._refused >= _IN_A_ROW or milliseconds <= self.latest_begin:
            return False
        self._refused += 1
        return True

    def begin(self) -> None:
        self._refused = 0

    @property
    def need(self) -> tuple[int, str]:
        """The number of steps between snapshots at which copies hold updates back for at most 2 % of the time, and why; 1: they fit.

        Medians, because a first copy can take several times as long as later ones, and so can a step during which torch compiles. It is
        rounded up to a power of 1.25, and falls by two of these at least: a hundredth more or less of the copies shall not change it.
        """
        if min(len(self._windows), len(self._copies), len(self._steps) + 1) < _REMEMBERED:
            return 1, ""
        window, copy, step = map(statistics.median, (self._windows, self._copies, self._steps))
        least = max(1.0, (copy - window) / (_COST * max(step, _LEAST)))
        rounded = math.ceil(_COARSE ** math.ceil(math.log(least, _COARSE) - _ROUNDING))
        if rounded > self._needed or rounded * _COARSE**2 <= self._needed:
            self._needed = rounded
        return self._needed, f"the copies of a snapshot take {copy:.0f} ms, of a step of {step:.0f} ms which leaves them {window:.0f} ms"

    @property
    def latest_begin(self) -> float:
        """Milliseconds after the state is final; infinite while nothing is known."""
        if not self._windows or not self._copies:
            return math.inf
        window = min(self._windows)
        return max(window - max(self._copies), _SHARE * window, _LEAST)
