"""A worker's judgement of its host's agent: whether it is too slow to be kept. Pure; time is an argument.

An agent that gets a fiftieth of the processor answers every ping in time, and still ends the commits of all hosts: no update waits for a
slot, so a snapshot is given up when the grant comes later than the update, and a commit needs a snapshot of every owner. An agent is judged
slow when, for as long as it might be silent, it was found owing its worker an answer more often than not and nothing was committed.

Delays that the agent does not cause do not count. It answers a request at once, if only to say that no slot is free, so that a slow
peer, network or storage leaves it owing nothing. Time spent at work, on a processor or in the queue for one, excuses it, and so does
memory that others wait for as well: another agent on such a host, or with as many bytes to hash, would be no faster. Where the kernel
does not tell that time, nothing is held against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LATE = 0.1  # seconds that an answer may take before a look counts against the agent; it takes milliseconds
_LOOKS = 3  # that must count against it: this process may have been stopped itself
_MOST = 8  # times the first patience, where agents are replaced one after the other
_CALM = 60  # times the first patience without a replacement, after which patience is what it was


@dataclass(kw_only=True)
class _Trial:
    """The looks since the first one that counted against the agent."""

    began: float  # when that was
    work: float | None  # seconds that the agent had been at work until then; None: unknown
    looked: float  # when the last look was
    late: int = 0  # looks that count against it
    others: int = 0  # looks that found it owing nothing, or not for long
    owed: float = 0.0  # seconds between looks in which it owed an answer


class Diligence:
    """One worker's view of its host's agent, and of the next ones if that is replaced.

    ``patience``: seconds without a commit after which an agent that owes answers is slow; 0: none ever is.
    """

    def __init__(self, patience: float) -> None:
        self._first = self.patience = patience
        self._asked: float | None = None  # when the oldest request was made that has no answer yet
        self._trial: _Trial | None = None
        self._replaced: float | None = None  # when an agent was replaced that was late with answers

    def asked(self, now: float) -> None:
        """Records a request that the agent answers as soon as it comes to it."""
        if self._asked is None:
            self._asked = now

    def answered(self) -> None:
        """Records an answer. An agent reads what it is sent in order, so that later requests are not far from theirs."""
        self._asked = None

    def committed(self) -> None:
        """Records a commit, which clears the agent of the suspicion of being too slow."""
        self._trial = None

    def begin(self) -> None:
        """Forgets earlier observations, as nothing is asked for a while."""
        self._asked = self._trial = None

    def replaced(self, now: float) -> None:
        """Records that the agent was replaced. Every worker of the host calls this, whichever of them found the last one slow.

        Patience doubles where agents that were late are replaced one after the other: the reason may lie elsewhere, and each start takes
        work. One that ended without having been late was no slow one.
        """
        if self._trial is not None:
            is_calm = self._replaced is None or now - self._replaced >= _CALM * self._first
            self.patience = self._first if is_calm else min(2 * self.patience, _MOST * self._first)
            self._replaced = now
        self.begin()

    def look(self, now: float, work: Callable[[], float | None]) -> bool:
        """Looks at the agent; returns whether it is slow and must be replaced.

        ``work``: returns the seconds for which the agent has been at work, or has waited for a processor; None: unknown.
        """
        asked, trial = self._asked, self._trial
        if not self.patience or (asked is None and trial is None):
            return False
        if asked is None or now - asked < LATE:
            if trial is not None:
                trial.others, trial.looked = trial.others + 1, now
            return False
        if trial is None:
            self._trial = _Trial(began=now, work=work(), looked=now)
            return False
        trial.late, trial.owed, trial.looked = trial.late + 1, trial.owed + now - max(asked, trial.looked), now
        if now - trial.began < self.patience:
            return False
        self._trial = None
        if trial.late < max(_LOOKS, trial.others + 1) or trial.work is None:
            return False
        if (worked := work()) is None or worked - trial.work >= trial.owed / 2:
            return False
        self._trial = _Trial(began=now, work=worked, looked=now)  # of the same agent, where it cannot be replaced
        return True
