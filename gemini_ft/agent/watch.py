"""Workers that hang: no progress for too long, and the agent kills them, so that the job restarts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_FIRST_STEPS = 3  # compilation, caches and lazy state make the first steps slow
_DEFAULT = 300.0  # seconds
_MEDIANS = 10


@dataclass
class HangDetector:
    """Judges one worker. Times in seconds on any one clock; ``limit`` None: the greater of 300 s and 10 median steps."""

    limit: float | None = None
    _last: float | None = None
    _steps: int = 0
    _suspended: bool = False
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def take_over(self, now: float) -> None:
        """Another agent has watched it until now: its first steps are behind it."""
        self._last, self._steps = now, _FIRST_STEPS

    def progress(self, now: float, suspended: bool | None = None) -> None:
        """A sign of life; ``suspended``: whether more of them are due, None: as before."""
        suspended = self._suspended if suspended is None else suspended
        if self._last is not None and not self._suspended:
            self._durations.append(now - self._last)
            self._steps += 1
        self._last, self._suspended = now, suspended

    @property
    def patience(self) -> float:
        """Seconds without progress that are still fine."""
        if self.limit is not None:
            return self.limit
        return max(_DEFAULT, _MEDIANS * median(self._durations)) if self._durations else _DEFAULT

    def hangs(self, now: float) -> float | None:
        """Seconds since the last progress if they are too many, else None."""
        if self._last is None or self._suspended or self._steps < _FIRST_STEPS or self.limit == 0:
            return None
        silent = now - self._last
        return silent if silent > self.patience else None
