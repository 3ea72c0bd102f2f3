"""The ledger of a run's time: the seconds of each phase, and the cost of each failure. Pure; times are arguments, in seconds of one clock.

Every second between the first and the last call belongs to exactly one phase: each call books the time since the call before. Only the
time between an orderly end and the next start of the run belongs to none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The phases of a run, to which its time is booked."""

    TRAINING = "training"  # steps that are trained for the first time
    STALL = "checkpoint stall"  # the part of any step for which snapshots held up the training thread
    DETECTION = "detection"  # from the last step that ended until a worker was known to have failed
    RENDEZVOUS = "rendezvous"  # from there, or from the start, until all ranks have joined: processes end, start and meet
    STORAGE = "waiting for storage"  # before joining: storage could not say what it has
    RESTORE = "restore"  # from joining until the last rank has its state back
    REPLAY = "replay"  # steps that are trained again


@dataclass(kw_only=True)
class FailureCost:
    """One failure, and the time that it has cost."""

    at: float  # time at which it was known
    cause: str  # why the first worker failed; empty: unknown
    host: str  # that worker's host; empty: unknown
    step: int  # the last step that had ended
    incarnation: int = 0  # number of the attempt that it has ended
    resumed: int | None = None  # the step that was resumed; None: none yet
    seconds: dict[Phase, float] = field(default_factory=dict)  # time lost by phase, the replay included


class TimeLedger:
    """The ledger of one stream of one run.

    The reports of all ranks are booked together: a phase lasts until the last rank has left it, and a step ends with the first rank.

    ``began``: seconds, on the clock by which all calls tell the time.
    """

    def __init__(self, began: float) -> None:
        self.seconds = dict.fromkeys(Phase, 0.0)  # time by phase, up to the last call
        self.failures: list[FailureCost] = []  # all failures, the oldest first
        self._at = began
        self._is_running = False  # an attempt is under way, and no failure of it is known
        self._incarnation = 0
        self._joined_at = began  # the last rank of the present attempt, so far
        self._is_over = False  # the attempt has come to an orderly end: its ranks have finished, or the user has interrupted them
        self._is_interrupted = False
        self._step = 0  # of the present attempt
        self._trained = Phase.TRAINING  # what the last step was booked to
        self._booked = 0.0  # seconds of the present attempt that are booked to it
        self._charged: FailureCost | None = None  # the failure to which they are booked, too
        self._furthest = 0
        self._is_done = False  # the last attempt had finished its work, and no other one has begun
        self._is_lost = False  # the present time is booked to the newest failure, too

    def joined(self, at: float, incarnation: int, step: int) -> None:
        """Books the time until a rank has joined an attempt that goes on after ``step``."""
        if incarnation < self._incarnation:
            return
        if incarnation > self._incarnation:
            self._leave_attempt(at)
            if self._is_done and not step:  # the training begins anew: nothing is trained again
                self._furthest = 0
            self._incarnation, self._step, self._is_running, self._is_done = incarnation, step, True, False
            self._booked, self._charged = 0.0, None
            if self.failures and self._is_lost:
                self.failures[-1].resumed = step
        self._close(at, Phase.RENDEZVOUS)
        self._joined_at = self._at

    def waited(self, at: float, seconds: float) -> None:
        """Books the last ``seconds``, for which a rank waited for storage before it joined."""
        if at - seconds > self._joined_at:  # else the clock of a rank that has joined the same attempt is behind
            self._leave_attempt(at - seconds)
        open_for = max(0.0, at - self._at)
        self._close(at - min(seconds, open_for), Phase.RENDEZVOUS)
        self._close(at, Phase.STORAGE)

    def restored(self, at: float) -> None:
        """Books the time until a rank has its state back."""
        self._close(at, Phase.RESTORE)

    def stepped(self, at: float, step: int, blocked: float) -> None:
        """Books the time of a step that a rank has ended; snapshots held up the step before it for ``blocked`` seconds."""
        if not self._is_running or step <= self._step:
            return
        stall = min(blocked, max(0.0, at - self._at))
        is_new = step > self._furthest
        self._is_lost = self._is_lost and not is_new
        trained = Phase.TRAINING if is_new else Phase.REPLAY
        self._booked = (self._booked if trained is self._trained else 0.0) + max(0.0, at - stall - self._at)
        self._trained, self._charged = trained, self.failures[-1] if self._is_lost else None
        self._close(at - stall, trained)
        self._close(at, Phase.STALL)
        self._step, self._furthest = step, max(step, self._furthest)

    def failed(self, at: float, cause: str, host: str, incarnation: int | None = None, stood: float = 0.0) -> None:
        """Books the time until the failure of a worker was known.

        A worker that was stopped is woken for the autopsy of a hang, and may end steps before it is killed: ``stood`` are the seconds
        for which it had made no progress by then, none of which was training.

        The ends of the other workers, which follow, do not count as failures, nor do those of an ``incarnation`` of the past, of which an
        agent tells late, or those after an interrupt. A worker that fails when others have finished does.
        """
        is_past = incarnation is not None and incarnation < self._incarnation
        if self._is_running and not self._is_interrupted and not is_past:
            self._is_over = False
            self._close(at, Phase.DETECTION, begins=(cause, host))
            booked = self.failures[-1].seconds
            if (moved := min(stood - booked[Phase.DETECTION], self._booked, self.seconds[self._trained])) > 0:
                self.seconds[self._trained] -= moved
                self.seconds[Phase.DETECTION] += moved
                booked[Phase.DETECTION] += moved
                if self._charged is not None:
                    self._charged.seconds[self._trained] -= moved

    def ended(self, at: float, is_interrupted: bool = False) -> None:
        """Books the time until a rank has left with its work finished, or as the user wanted; from its last step on it is training, too."""
        if self._is_running:
            self._is_lost = False
            self._close(at, Phase.TRAINING)
        self._is_interrupted = self._is_interrupted or is_interrupted
        self._is_over = self._is_over or self._is_running or is_interrupted

    @property
    def total(self) -> float:
        """Seconds from the beginning until now, without those for which the run was over."""
        return sum(self.seconds.values())

    def shares(self) -> Mapping[Phase, float]:
        """The share of each phase in the total time; the shares add up to 1, or are all 0 before any time has passed."""
        return {phase: seconds / self.total if self.total else 0.0 for phase, seconds in self.seconds.items()}

    # -- inside

    def _leave_attempt(self, at: float) -> None:
        """Notes that another attempt began by ``at``: the one before had come to an orderly end, or has failed, also if nobody told."""
        if self._is_over:
            self._at = max(self._at, at)
            self._is_done = self._is_done or not self._is_interrupted
            self._is_running = self._is_lost = self._is_over = self._is_interrupted = False
        elif self._is_running:
            self._begin_failure(at=self._at, cause="", host="")

    def _begin_failure(self, at: float, cause: str, host: str) -> None:
        self.failures.append(FailureCost(at=at, cause=cause, host=host, step=self._step, incarnation=self._incarnation))
        self._is_running, self._is_lost = False, True

    def _close(self, at: float, phase: Phase, begins: tuple[str, str] | None = None) -> None:
        """Books the time up to ``at``. Clocks of hosts may differ a little: no second is booked twice, and no duration is negative."""
        if begins is not None:
            self._begin_failure(at, *begins)
        seconds = max(0.0, at - self._at)
        self._at = max(self._at, at)
        self.seconds[phase] += seconds
        if self._is_lost:
            booked = self.failures[-1].seconds
            booked[phase] = booked.get(phase, 0.0) + seconds
