"""The ledger of a run's time: which seconds were training, and which were lost to what. Pure; times are arguments, in seconds of one clock.

Every second between the first and the last call belongs to exactly one phase: each call closes the stretch since the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a stretch of time went into."""

    TRAINING = "training"  # steps that were trained for the first time
    STALL = "checkpoint stall"  # of any step: its training thread was held up by snapshots
    DETECTION = "detection"  # from the last step that ended until a worker was known to have failed
    RENDEZVOUS = "rendezvous"  # from there, or from the start, until all ranks have joined: processes end and start, and meet
    STORAGE = "waiting for storage"  # of that: storage could not say what it has
    RESTORE = "restore"  # until the last rank has its state back
    REPLAY = "replay"  # steps that had been trained before


@dataclass(kw_only=True)
class FailureCost:
    """One failure, and what it has cost.

    Attributes:
        at: when it was known.
        cause: of the first worker that failed; empty: nobody knows.
        host: of that worker.
        step: the last one that had ended.
        resumed: the one that was resumed; None: it has not been yet.
        seconds: by phase, those of the replay included.
    """

    at: float
    cause: str
    host: str
    step: int
    resumed: int | None = None
    seconds: dict[Phase, float] = field(default_factory=dict)


class TimeLedger:
    """The ledger of one stream.

    What ranks report is taken together: a phase begins and ends with the rank for which it lasts longest, and a step with the first.

    Args:
        began: time of the beginning.

    Attributes:
        seconds: by phase, without the stretch that is open.
        failures: in their order.
    """

    def __init__(self, began: float) -> None:
        self.seconds = dict.fromkeys(Phase, 0.0)
        self.failures: list[FailureCost] = []
        self._at = began
        self._is_running = False  # all are believed to live and to have joined
        self._incarnation = 0
        self._step = 0  # of the present attempt
        self._furthest = 0
        self._is_lost = False  # what is spent now is the newest failure's

    def joined(self, at: float, incarnation: int, step: int) -> None:
        """A rank has joined an attempt that goes on after ``step``."""
        if incarnation < self._incarnation:
            return
        if incarnation > self._incarnation:
            if self._incarnation and self._is_running:  # nobody has told of a failure
                self._begin_failure(at=self._at, cause="", host="")
            self._incarnation, self._step, self._is_running = incarnation, step, True
            if self.failures and self._is_lost:
                self.failures[-1].resumed = step
        self._close(at, Phase.RENDEZVOUS)

    def waited(self, at: float, seconds: float) -> None:
        """Before it joined, a rank has waited for storage, for that long until now."""
        open_for = max(0.0, at - self._at)
        self._close(at - min(seconds, open_for), Phase.RENDEZVOUS)
        self._close(at, Phase.STORAGE)

    def restored(self, at: float) -> None:
        """A rank has its state back."""
        self._close(at, Phase.RESTORE)

    def stepped(self, at: float, step: int, blocked: float) -> None:
        """A rank has ended a step; the step before that was held up for ``blocked`` seconds by its snapshot."""
        if not self._is_running or step <= self._step:
            return
        stall = min(blocked, max(0.0, at - self._at))
        is_new = step > self._furthest
        self._is_lost = self._is_lost and not is_new
        self._close(at - stall, Phase.TRAINING if is_new else Phase.REPLAY)
        self._close(at, Phase.STALL)
        self._step, self._furthest = step, max(step, self._furthest)

    def failed(self, at: float, cause: str, host: str) -> None:
        """A worker has failed. The others follow, which is no failure of theirs."""
        if self._is_running:
            self._close(at, Phase.DETECTION, begins=(cause, host))

    def ended(self, at: float) -> None:
        """A rank has left after its work was finished; what comes after its last step is training too."""
        if self._is_running:
            self._is_lost = False
            self._close(at, Phase.TRAINING)

    @property
    def total(self) -> float:
        """Seconds from the beginning until now."""
        return sum(self.seconds.values())

    def shares(self) -> Mapping[Phase, float]:
        """The part of all time that each phase has had; together 1, or all 0 before any time has passed."""
        return {phase: seconds / self.total if self.total else 0.0 for phase, seconds in self.seconds.items()}

    # -- inside

    def _begin_failure(self, at: float, cause: str, host: str) -> None:
        self.failures.append(FailureCost(at=at, cause=cause, host=host, step=self._step))
        self._is_running, self._is_lost = False, True

    def _close(self, at: float, phase: Phase, begins: tuple[str, str] | None = None) -> None:
        """Books the stretch up to ``at``. Clocks of several hosts may differ a little: none is booked twice, and none less than nothing."""
        if begins is not None:
            self._begin_failure(at, *begins)
        seconds = max(0.0, at - self._at)
        self._at = max(self._at, at)
        self.seconds[phase] += seconds
        if self._is_lost:
            booked = self.failures[-1].seconds
            booked[phase] = booked.get(phase, 0.0) + seconds
