"""Hosts that are not well: a command that judges a host, the list of hosts out of use, and the drain of one that is slow.

The list is part of the state of the rendezvous, where every launcher of the job sees it. Each keeps a copy of it in a file for
``gemini status``, and takes hosts back that ``gemini hosts --take-back`` names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from gemini_ft.hosts import lasting_name
from gemini_ft.launch.notes import SUSPECTED, Notes
from gemini_ft.launch.out_of_use import out_of_use, publish, taken_back

UNHEALTHY = 71  # EX_OSERR
_OUT = "gemini_out"  # in the state of the rendezvous: lasting name -> why the host is out of use
_SLOW = "gemini_slow"  # there: (a name, ranks) of the last drain of a slow host
SLOW_SECONDS = 10.0  # for which a rank must have been named as slow, which takes up to thirty steps itself
_BETWEEN = 600.0  # seconds between two drains of slow hosts
LOOK = 1.0  # seconds between two questions to the agent
_SHOWN = 300  # characters of the command's output
_log = logging.getLogger(__name__)


class UnhealthyError(SignalException):
    """This host is out of use; the others' rendezvous stays open, as after a signal."""

    def __init__(self, message: str) -> None:
        super().__init__(message, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """The options of the package that are about this."""

    command: str | None = None
    seconds: float = 60.0
    drains: bool = False


def judge(command: str, seconds: float) -> str:
    """Runs a health command by ``sh``; returns what is wrong, or nothing."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["sh", "-c", command], **pipes, text=True, errors="replace", start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"the health command took longer than {seconds:g} s"
    said = f": {' '.join(output.split())[-_SHOWN:]}" if output.strip() else ""
    return f"the health command ended with status {process.returncode}{said}" if process.returncode else ""


class HostHealth:
    """Keeps a host that is not well out of the job, on behalf of its launcher.

    Args:
        account: gives the account of this host's agent.
        drain: begins the drain of this host.

    Attributes:
        reason: why this host is out of use, until the list says so.
        ranks: of this host's workers.
    """

    def __init__(
        self,
        run: str,
        options: HealthOptions,
        notes: Notes,
        account: Callable[[], Mapping[str, Any]] = dict,
        drain: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._options, self._notes, self._account, self.drain = run, options, notes, account, drain
        self._clock = clock
        self._last_drain: tuple[str, list[int]] | None = None  # of a slow host, as the state has it
        self._last_seen = 0.0  # when that was seen first
        self.name = lasting_name()
        self.reason = ""
        self._why: str | None = "before it joins"  # it is to be judged; None: it is not suspected
        self._suspected = 0  # how often workers had said that they are, at the last look
        self._slow_since: float | None = None
        self._slow: list[int] = []  # ranks of this host
        self._has_judged_slow = False
        self._next_look = 0.0
        self._published = out_of_use(run)  # of the launcher before this one, perhaps
        self.ranks: set[int] = set()

    def suspect(self, why: str) -> None:
        """Has this host judged before it joins once more."""
        self._why = why

    def stays_away(self, state: Any) -> bool:
        """Judges this host where that is due, as it is about to join; whether the state has changed, and is to be written.

        Raises:
            UnhealthyError: it is out of use, and the list says so.
        """
        changed = self.tend(state)
        if (reason := _out(state).get(self.name)) is not None:
            raise UnhealthyError(
                f"host {self.name} is out of use in run {self._run}: {reason}. "
                f"`gemini hosts --run-id {self._run} --take-back {self.name}` on a host of the job takes it back"
            )
        if (said := self._notes.count(SUSPECTED)) > self._suspected:
            self._suspected, self._why = said, "as its results differ"
        if self._why is not None and self._options.command is not None and not self.reason:
            _log.info("judging this host %s: %s", self._why, self._options.command)
            self.reason = judge(self._options.command, self._options.seconds)
        self._why = None
        return self._put_out(state) or changed

    def tend(self, state: Any) -> bool:
        """Takes hosts back as the user wishes, and publishes the list; whether the state has changed, and is to be written."""
        if (last := getattr(state, _SLOW, None)) != self._last_drain:
            self._last_drain, self._last_seen = last, self._clock()
        back = taken_back(self._run, _out(state)) if _out(state) else set()
        if back:
            setattr(state, _OUT, {name: why for name, why in _out(state).items() if name not in back})
            _log.warning("taken back into the job: %s", ", ".join(sorted(back)))
        if _out(state) != self._published:
            self._published = _out(state)
            publish(self._run, self._published)
        return bool(back)

    def at_work(self, state: Any) -> bool:
        """Looks after this host while it trains; whether the state has changed, and is to be written."""
        changed = self.tend(state)
        if (now := self._clock()) >= self._next_look and (self._options.drains or self._options.command is not None):
            self._next_look = now + LOOK
            self._look(now)
        if self._slow_since is None or now - self._slow_since < SLOW_SECONDS or not _has_spare(state):
            return changed
        if self.reason:
            _log.error("this host is put out of use, and a spare takes its place: %s", self.reason)
        elif not (self._options.drains and self._may_drain()):
            return changed
        else:
            _log.warning("this host is slow, and is drained, as a spare waits: ranks %s", self._slow)
        self._put_out(state)
        setattr(state, _SLOW, (uuid.uuid4().hex, self._slow))
        self._slow_since = None
        self.drain()
        return True

    def _look(self, now: float) -> None:
        """Asks the agent which ranks are slow; a host that has had slow ones for long is judged once, beside the training."""
        streams = self._account().get("streams", {}).values()
        self._slow = sorted({rank for stream in streams for rank in stream.get("stragglers", ())} & self.ranks)
        if not self._slow:
            self._slow_since, self._has_judged_slow = None, False
            return
        self._slow_since = self._slow_since or now
        if self._options.command is not None and not self._has_judged_slow:
            self._has_judged_slow = True
            threading.Thread(target=self._judge_slow, args=(self._options.command,), name="gemini-health", daemon=True).start()

    def _judge_slow(self, command: str) -> None:
        if reason := judge(command, self._options.seconds):
            _log.error("this host is slow, and %s; it goes on until a spare waits", reason)
            self.reason = reason

    def _may_drain(self) -> bool:
        """Whether no host was drained for the same just now: then the next one is slow for another reason than its own."""
        return self._last_drain is None or (self._clock() - self._last_seen >= _BETWEEN and self._last_drain[1] != self._slow)

    def _put_out(self, state: Any) -> bool:
        if not self.reason or self.name in _out(state):
            return False
        setattr(state, _OUT, _out(state) | {self.name: self.reason})
        return True


def _out(state: Any) -> dict[str, str]:
    return dict(getattr(state, _OUT, {}))


def _has_spare(state: Any) -> bool:
    """Whether a host waits that gives signs of life, and no change of hosts is under way."""
    return bool(state.complete and not state.closed and state.redundancy_list & state.last_heartbeats.keys())
