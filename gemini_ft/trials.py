"""Trials of several ways to do one thing, in real steps: all take turns, and the slower ones drop out. Pure; for sync/ and pipeline/."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_UNKNOWN = 1e9  # seconds of a way whose every step has been interrupted


@dataclass(frozen=True, kw_only=True)
class TrialRules:
    """The rules by which a trial goes on."""

    visit: int  # steps that one way is tried in a row; the first of several, which finds cold caches, is not counted
    rounds: int  # visits of a way that is not slower than others
    enough: float = math.inf  # seconds of all counted steps from which on no other round begins
    slower: Mapping[int, float]  # round -> multiple of the best median above which a way drops out after that round


@dataclass(kw_only=True)
class Trial:
    """The ways, by number, and the time that each has taken so far."""

    left: list[int]  # ways that have not dropped out
    seconds: list[list[float]] = field(default_factory=list)  # of every counted step, by way
    round: int = 0  # how many are over
    turn: int = 0  # which of those that are left is tried now
    steps: int = 0  # of this visit

    @classmethod
    def of(cls, ways: int) -> Trial:
        """Makes a trial of ways 0 to ``ways`` - 1."""
        return cls(left=list(range(ways)), seconds=[[] for _ in range(ways)])

    @property
    def current(self) -> int:
        """The number of the way to take in the next step."""
        return self.left[self.turn]

    def note(self, terms: TrialRules, seconds: float | None) -> bool:
        """Records a step, None if it was interrupted; returns whether a round is over: then `judge` is due."""
        if terms.visit == 1 and seconds is None:
            return False
        self.steps += 1
        if seconds is not None and (self.steps > 1 or terms.visit == 1):
            self.seconds[self.current].append(seconds)
        if self.steps < terms.visit:
            return False
        self.steps, self.turn = 0, self.turn + 1
        if self.turn < len(self.left):
            return False
        self.turn, self.round = 0, self.round + 1
        return True

    def medians(self) -> list[float]:
        """Typical seconds of each way."""
        return [statistics.median(each or [_UNKNOWN]) for each in self.seconds]

    @property
    def spent(self) -> float:
        """Seconds of all counted steps."""
        return math.fsum(map(math.fsum, self.seconds))

    def judge(self, terms: TrialRules, medians: Sequence[float], spent: float = 0.0) -> int | None:
        """Lets the slower ways drop out; returns the fastest one once the trial is over. All ranks agree on what is given."""
        if (limit := terms.slower.get(self.round)) is not None:
            best = min(medians[way] for way in self.left)
            self.left = [way for way in self.left if medians[way] <= limit * best]
        is_over = self.round == terms.rounds or len(self.left) == 1 or spent >= terms.enough
        return min(self.left, key=medians.__getitem__) if is_over else None
