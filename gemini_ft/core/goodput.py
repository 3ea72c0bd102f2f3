"""The ledger of a run's time: the seconds of each phase, and the cost of each failure. Pure; times are arguments, in seconds of one clock.

Every second between the first and the last call belongs to exactly one phase: each call books the time since the call before. Only the
time between an orderly end and the next start of the run belongs to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

MOST_FAILURES = 2**10  # of a ledger that somebody else has kept
LATEST = 5e10  # seconds before or after 1970: no clock says that
_KEPT = 8  # failures that are kept each by itself; of the older ones those of a cause are added up
_CAUSES = 64  # that are told apart
_REST = "other"  # the cause of all further ones
_LONGEST = 2**10  # characters of a cause, or of a host's name
_MOST_SECONDS = 1e12  # of a phase
_MOST = 2**53 - 1  # of a step, an incarnation or a count


class Phase(StrEnum):
    """The phases of a run, to which its time is booked."""

    TRAINING = "training"  # steps that are trained for the first time
    VALIDATION = "validation"  # for which the loop was paused, before a step that is trained for the first time
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
    count: int = 1  # number of failures of one cause that are added up here; the rest is told of the last of them
    seconds: dict[Phase, float] = field(default_factory=dict)  # time lost by phase, the replay included


def by_cause(failures: Iterable[FailureCost]) -> list[FailureCost]:
    """Adds up the failures of each cause, in the order in which the causes came first; beyond 64 causes, those of all others."""
    found: dict[str, FailureCost] = {}
    for failure in failures:
        if failure.cause not in found and len(found) >= _CAUSES:
            failure = replace(failure, cause=_REST)
        if (before := found.get(failure.cause)) is not None:
            phases = before.seconds.keys() | failure.seconds.keys()
            seconds = {phase: before.seconds.get(phase, 0.0) + failure.seconds.get(phase, 0.0) for phase in phases}
            failure = replace(failure, host="", count=before.count + failure.count, seconds=seconds)
        found[failure.cause] = failure
    return list(found.values())


class BookedTime:
    """Time by phase, ``seconds``, and the ``failures`` that some of it was lost to, the oldest first."""

    seconds: dict[Phase, float]
    failures: Sequence[FailureCost]

    @property
    def total(self) -> float:
        """Seconds from the beginning until now, without those for which the run was over."""
        return sum(self.seconds.values())

    def shares(self) -> Mapping[Phase, float]:
        """The share of each phase in the total time; the shares add up to 1, or are all 0 before any time has passed."""
        return {phase: seconds / self.total if self.total else 0.0 for phase, seconds in self.seconds.items()}

    @property
    def goodput(self) -> float:
        """The share of the time that the script has used for its own ends."""
        shares = self.shares()
        return shares[Phase.TRAINING] + shares[Phase.VALIDATION]


@dataclass(frozen=True, kw_only=True)
class RunTime(BookedTime):
    """A ledger as it is kept: in the manifest of each checkpoint, and by ranks that join for hosts whose agents are new."""

    seconds: dict[Phase, float]  # time of the run by phase; a phase that is not given has had none
    incarnation: int = 0  # number of the last attempt
    furthest: int = 0  # the newest step that was trained
    failures: tuple[FailureCost, ...] = ()  # the oldest first, in seconds of the system's clock; of each cause the older ones are added up
    is_lost: bool = False  # whether the time from here on is lost to the newest failure
    is_over: bool = False  # whether the last attempt has come to an orderly end
    is_done: bool = False  # whether it has finished its work

    def __post_init__(self) -> None:
        """Refuses what no ledger comes to: it may have been read from storage, and goes on into every later one."""
        if len(self.failures) > MOST_FAILURES or (self.is_lost and not self.failures):
            raise ValueError(f"{len(self.failures)} failures")
        _refuse_wrong(self.seconds, self.incarnation, self.furthest)
        for failure in self.failures:
            _refuse_wrong(failure.seconds, failure.step, failure.incarnation, failure.resumed or 0, failure.count)
            if not (-LATEST < failure.at < LATEST) or failure.count < 1 or max(len(failure.cause), len(failure.host)) > _LONGEST:
                raise ValueError(f"{failure.count} failures at {failure.at!r}")
        for phase in Phase:
            self.seconds.setdefault(phase, 0.0)

    @property
    def extent(self) -> tuple[int, float]:
        """How much of the run it has seen: the last attempt, and the seconds in all. The largest is the ledger to go on from."""
        return self.incarnation, self.total


def longer(one: RunTime | None, other: RunTime | None) -> RunTime | None:
    """The ledger of two that has seen the later attempt, or more of the same one."""
    return max((each for each in (one, other) if each is not None), key=lambda each: each.extent, default=None)


@dataclass(frozen=True, kw_only=True)
class PastTime:
    """The time of a run before an agent serves an attempt."""

    time: RunTime | None = None  # that which is booked, for an agent that has not seen it; None: nothing
    waited: float = 0.0  # seconds for which the ranks waited for storage before they joined
    under_way: float | None = None  # seconds for which the attempt has been at work, with another agent; None: it begins
    restored: float | None = None  # seconds for which the rank that tells has had its state back; None: it has none to get, or not yet
    replayed: tuple[float, int] | None = None  # (seconds since the last step that was trained again, and that step); None: there was none


def _refuse_wrong(seconds: Mapping[Phase, float], *numbers: int) -> None:
    if wrong := [value for value in seconds.values() if not (0 <= value <= _MOST_SECONDS)]:
        raise ValueError(f"{wrong[0]!r} seconds")
    if beyond := [number for number in numbers if not (0 <= number <= _MOST)]:
        raise ValueError(f"number {beyond[0]!r}")


def _possible(seconds: Mapping[Phase, float]) -> dict[Phase, float]:
    return {phase: max(0.0, min(value, _MOST_SECONDS)) for phase, value in seconds.items()}


class TimeLedger(BookedTime):
    """The ledger of one stream of one run.

    The reports of all ranks are booked together: a phase lasts until the last rank has left it, and a step ends with the first rank.

    ``began``: seconds, on the clock by which all calls tell the time.
    """

    def __init__(self, began: float) -> None:
        self.seconds = dict.fromkeys(Phase, 0.0)  # time by phase, up to the last call
        self.failures: list[FailureCost] = []  # the oldest first; of each cause the older ones are added up
        # The part of ``seconds`` that came after ``began``, and that no other ledger had booked. No phase of it ever becomes less: seconds
        # that were moved to another phase are made up for by those that are booked later.
        self.own = dict.fromkeys(Phase, 0.0)
        self._overbooked = dict.fromkeys(Phase, 0.0)
        self._began = self._at = began
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

    def go_on(self, before: RunTime, clock: float, at: float) -> None:
        """Goes on from what others have booked of the run, unless this ledger has seen the same attempts itself.

        If their last attempt has neither ended orderly nor is known to have failed, nobody is left to tell why it failed.

        Args:
            before: their ledger.
            clock: seconds that this ledger's clock is behind theirs.
            at: when the ranks of the next attempt were about to join, or to wait for storage; a new ledger books from its beginning on,
                or from ``at`` if that was earlier, another one from ``at`` on.
        """
        if self._incarnation and before.incarnation <= self._incarnation:
            return
        self._at = at if self._incarnation else min(self._at, at)
        unseen = dict.fromkeys(Phase, 0.0) if self._incarnation else self.seconds
        self.seconds = {phase: before.seconds[phase] + seconds for phase, seconds in unseen.items()}
        self.failures = [replace(failure, at=failure.at - clock, seconds=dict(failure.seconds)) for failure in before.failures]
        self._incarnation, self._step, self._furthest = before.incarnation, before.furthest, before.furthest
        self._is_lost, self._is_done = before.is_lost, before.is_done
        self._is_running = self._is_over = self._is_interrupted = False
        self._booked, self._charged = 0.0, None
        if before.incarnation and not (before.is_lost or before.is_over):
            self._begin_failure(at=self._at, cause="", host="")

    def kept(self, clock: float) -> RunTime | None:
        """The ledger up to the last call, for others whose clock is ``clock`` seconds ahead; None: it has seen no attempt yet."""
        if not self._incarnation:
            return None
        failures = tuple(
            replace(
                failure,
                at=min(max(failure.at + clock, 1 - LATEST), LATEST - 1),
                host=failure.host[:_LONGEST],
                count=min(failure.count, _MOST),
                seconds=_possible(failure.seconds),
            )
            for failure in self.failures
        )
        return RunTime(
            seconds=_possible(self.seconds),
            incarnation=self._incarnation,
            furthest=self._furthest,
            failures=failures,
            is_lost=self._is_lost,
            is_over=self._is_over,
            is_done=self._is_done or (self._is_over and not self._is_interrupted),
        )

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
        self._train(at - min(blocked, max(0.0, at - self._at)), step)
        self._close(at, Phase.STALL)
        self._step, self._furthest = step, max(step, self._furthest)

    def validated(self, at: float, seconds: float) -> None:
        """Books the last ``seconds``, for which a rank's loop was paused."""
        if self._is_running:
            self._train(at - min(seconds, max(0.0, at - self._at)), self._step + 1)
            self._close(at, Phase.VALIDATION if self._trained is Phase.TRAINING else Phase.REPLAY)

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
                seen = min(moved, self.own[self._trained] - self._overbooked[self._trained])
                self._overbooked[self._trained] += seen
                self.own[Phase.DETECTION] += seen
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

    # -- inside

    def _train(self, at: float, step: int) -> None:
        """Books the time up to ``at`` to a step that is under way, or has just ended."""
        is_new = step > self._furthest
        self._is_lost = self._is_lost and not is_new
        trained = Phase.TRAINING if is_new else Phase.REPLAY
        self._booked = (self._booked if trained is self._trained else 0.0) + max(0.0, at - self._at)
        self._trained, self._charged = trained, self.failures[-1] if self._is_lost else None
        self._close(at, trained)

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
        if len(self.failures) >= 2 * _KEPT:
            self.failures = [*by_cause(self.failures[:-_KEPT]), *self.failures[-_KEPT:]]
        self._is_running, self._is_lost = False, True

    def _close(self, at: float, phase: Phase, begins: tuple[str, str] | None = None) -> None:
        """Books the time up to ``at``. Clocks of hosts may differ a little: no second is booked twice, and no duration is negative."""
        if begins is not None:
            self._begin_failure(at, *begins)
        seconds = max(0.0, at - self._at)
        counted = max(0.0, at - max(self._at, self._began))
        made_up = min(counted, self._overbooked[phase])
        self._overbooked[phase] -= made_up
        self.own[phase] += counted - made_up
        self._at = max(self._at, at)
        self.seconds[phase] += seconds
        if self._is_lost:
            booked = self.failures[-1].seconds
            booked[phase] = booked.get(phase, 0.0) + seconds
