"""How a worker leaves: a rank whose host is drained, and a process that ends.

A rank of a host that is drained finishes its step, waits until that is committed, and ends with a status that says so. No rank of
another host is asked to stop: what this rank has finished, the others finish too, since their collectives were the same. They commit it
together; only then does this rank leave, and the step that the others have begun meanwhile is the only one that is made again.

The end of a loop says nothing of the end of a process: the script may fail while it saves or tests, and a restart must not train everything
once more. Under ``gemini run`` the launcher knows how processes have ended, and tells the agent. Elsewhere each process says that it ends
well.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections import defaultdict
from multiprocessing.util import Finalize
from types import FrameType

from gemini_ft.agent import lifecycle
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import GeminiError
from gemini_ft.hosts import own_status
from gemini_ft.launch import failures, notes
from gemini_ft.wire.worker_messages import Ended

_log = logging.getLogger("gemini_ft")


class DrainedError(SystemExit):
    """Ends a rank whose host is drained; its last step is committed. A SystemExit, which loops and frameworks let through."""

    exit_status = notes.DRAINED_STATUS

    def __init__(self) -> None:
        super().__init__(self.exit_status)

    def __reduce__(self) -> tuple[type[DrainedError], tuple[()]]:
        """To other ranks: torch.distributed.checkpoint tells all of them what one of them has raised."""
        return DrainedError, ()


class Drain:
    """The wish that this rank leaves after a step, from wherever it comes: a signal to this process, or the host's agent."""

    def __init__(self, config: GeminiConfig) -> None:
        self._signal, self._seconds, self._stores = config.drain_signal, config.drain_seconds, config.storage is not None
        self._since: float | None = None
        self._stored = 0  # newest iteration that is on its way to storage
        self.announced = False  # whether the host's agent knows

    @property
    def begun(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        """Takes the wish; once is enough."""
        self._since = self._since or time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether it has taken longer than it may."""
        return self._since is not None and time.monotonic() - self._since >= self._seconds

    def committed(self, iteration: int, stored: bool) -> None:
        """Records a commit; ``stored``: it is uploaded as well."""
        if stored and self.begun:
            self._stored = iteration

    def may_leave(self, iteration: int, committed: int | None) -> bool:
        """Whether this rank may leave after ``iteration``: it is committed, and goes to storage unless that has taken half of the time."""
        if self._since is None or committed != iteration:
            return False
        return not self._stores or self._stored == iteration or time.monotonic() - self._since > self._seconds / 2

    def leave(self, iteration: int) -> None:
        """Ends this rank. Raises DrainedError: always."""
        notes.say(notes.DRAINED)
        _log.warning("drained: iteration %d is committed; this rank leaves with status %d", iteration, DrainedError.exit_status)
        raise DrainedError

    def heed(self) -> None:
        """Begins at a signal to this process from now on, unless the script, or a framework, has its own use of it."""
        if self._signal == "none" or threading.current_thread() is not threading.main_thread():
            return
        number = signal.Signals[self._signal]
        handler = signal.getsignal(number)
        if handler is _on_signal or (handler is signal.SIG_DFL and not int(own_status("SigCgt"), 16) >> (number - 1) & 1):
            _heeding[number].add(self)
            signal.signal(number, _on_signal)

    def forget(self) -> None:
        for number, drains in _heeding.items():
            drains.discard(self)
            if not drains and signal.getsignal(number) is _on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)


# Weak, so that a stream which was never closed is not asked for ever.
_heeding: defaultdict[int, weakref.WeakSet[Drain]] = defaultdict(weakref.WeakSet)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Notes the wish. Once the time is over, the signal ends the process as if nobody heeded it: the launcher sends it then."""
    drains = list(_heeding[number])
    if not drains or any(drain.is_over for drain in drains):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for drain in drains:
        drain.begin()


def attend(run: str, host: str) -> None:
    """Lets the agent hear of the end of this process, in which training begins."""
    failures.begin_anew()
    _attend(run, host, os.getpid())


@functools.cache
def _attend(run: str, host: str, pid: int) -> None:
    # An exit handler would not do: processes that multiprocessing forks, as notebooks do, end without those.
    Finalize(None, _part, (run, host, pid), exitpriority=0)


def _part(run: str, host: str, pid: int) -> None:
    error = failures.error_at_end()
    if isinstance(error, SystemExit) and not error.code:
        error = None
    refusal = failures.refusal_behind(error)
    is_told = "GEMINI_LAUNCHER_PID" in os.environ and refusal is None
    if pid != os.getpid() or is_told or (error is not None and refusal is None):
        return
    with contextlib.suppress(GeminiError, OSError):
        lifecycle.ask(run, host, Ended(refused=str(refusal) if refusal is not None else ""))
