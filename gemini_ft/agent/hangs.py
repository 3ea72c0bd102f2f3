"""Detects workers that hang: the agent kills those that make no progress for too long, so that the job restarts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from gemini_ft.agent.autopsy import doing_of
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.autopsy import Doing

if TYPE_CHECKING:
    from gemini_ft.agent.requests import Requests

_FIRST_STEPS = 3  # compilation, caches and lazy state make the first steps slow
_DEFAULT = 300.0  # seconds
_MEDIANS = 10


@dataclass(kw_only=True)
class HangDetector:
    """Judges one worker. Times in seconds on any one clock; a limit of 0 is never reached.

    While it joins, restores and makes its first steps, every message counts as progress; afterwards only steps do.
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


class HangWatch:
    """Judges all workers of this host, and kills those that hang, once ``requests`` has looked at why."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.killed = 0  # workers
        self._detectors: dict[WorkerConnection, HangDetector] = {}
        self._tasks = Tasks()

    def begin(self, worker: WorkerConnection, start_timeout: float) -> None:
        self._detectors[worker] = HangDetector(start_limit=start_timeout, last=time.monotonic())

    def open(self, worker: WorkerConnection, hang_timeout: float | None, readopt: bool) -> None:
        """Records a worker's session; ``readopt``: it has gone on under another agent until now."""
        detector = self._detectors.setdefault(worker, HangDetector())
        detector.limit = hang_timeout
        if readopt:
            detector.take_over(time.monotonic())

    def end(self, worker: WorkerConnection) -> None:
        self._detectors.pop(worker, None)

    def heard(self, worker: WorkerConnection) -> None:
        if worker in self._detectors:
            self._detectors[worker].heard(time.monotonic())

    def progress(self, worker: WorkerConnection, suspended: bool | None = None) -> None:
        if worker in self._detectors:
            self._detectors[worker].progress(time.monotonic(), suspended)
            if worker.parting == "hang":
                self._requests.log(f"rank {worker.rank} (pid {worker.pid}) makes progress again, and is not killed")
                worker.parting = ""

    def kill_hanging(self) -> None:
        now = time.monotonic()
        for worker, detector in list(self._detectors.items()):
            silent = detector.hangs(now)
            if silent is not None and worker.alive and worker.parting != "hang" and not (detector.starting and self._trains(worker.pid)):
                self._requests.log(
                    f"rank {worker.rank} (pid {worker.pid}) made no progress for {silent:.1f} s ({detector.reason}): killing it"
                )
                if doing_of(worker.pid) is Doing.STOPPED:  # the autopsy wakes it, so that progress would prove nothing
                    del self._detectors[worker]
                worker.parting, worker.stood = "hang", silent
                self._tasks.spawn(self._kill(worker))

    async def _kill(self, worker: WorkerConnection) -> None:
        try:
            await self._requests.examine(worker)
        finally:
            if worker.parting == "hang":  # it has neither left nor made progress meanwhile
                self.killed += 1
                worker.kill()

    def _trains(self, pid: int) -> bool:
        """Whether a stream of this process is watched step by step: others may have joined long before they begin."""
        return any(worker.pid == pid and not detector.starting for worker, detector in self._detectors.items())
