"""Detects workers that hang: the agent kills those that make no progress for too long, so that the job restarts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_FIRST_STEPS = 3  # compilation, caches and lazy state make the first steps slow
_DEFAULT = 300.0  # seconds
_MEDIANS = 10


@dataclass
class HangDetector:
    """Judges one worker. Times in seconds on any one clock; a limit of 0 is never reached.

    While it joins, restores and makes its first steps, whatever it says is progress; afterwards only steps are.
    """

    limit: float | None = None  # None: the greater of 300 s and 10 median steps
    start_limit: float = 0.0
    last: float | None = None
    _stepping: bool = False  # the first sign of life of a step has come; it ends no step
    _steps: int = 0
    _suspended: bool = False
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def take_over(self, now: float) -> None:
        """Takes over from another agent that has watched it until now: the first steps are over."""
        self.last, self._stepping, self._steps = now, True, _FIRST_STEPS

    def heard(self, now: float) -> None:
        """Takes note of a sign of life."""
        if not self._stepping:
            self.last = now

    def progress(self, now: float, suspended: bool | None = None) -> None:
        """A sign of life; ``suspended``: whether more of them are due, None: as before."""
        suspended = self._suspended if suspended is None else suspended
        if self._stepping and self.last is not None and not self._suspended:
            self._durations.append(now - self.last)
            self._steps += 1
        self.last, self._stepping, self._suspended = now, True, suspended

    @property
    def starting(self) -> bool:
        return self._steps < _FIRST_STEPS

    @property
    def patience(self) -> float:
        """Seconds without progress that are still fine."""
        if self.starting:
            return self.start_limit
        if self.limit is not None:
            return self.limit
        return max(_DEFAULT, _MEDIANS * median(self._durations)) if self._durations else _DEFAULT

    @property
    def reason(self) -> str:
        """The option that decides, and its value."""
        return f"{'start' if self.starting else 'hang'}_timeout {self.patience:.1f} s"

    def hangs(self, now: float) -> float | None:
        """Seconds since the last progress if the worker hangs, else None."""
        if self.last is None or self._suspended or not self.patience:
            return None
        silent = now - self.last
        return silent if silent > self.patience else None
