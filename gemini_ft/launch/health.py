"""Hosts that are not well: a command that judges a host, the list of hosts out of use, and the drain of one that is slow.

The list is part of the state of the rendezvous, where every launcher of the job sees it. Each keeps a copy of it in a file for
``gemini status``, and takes hosts back that ``gemini hosts --take-back`` names.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from gemini_ft.errors import ConfigError, printable
from gemini_ft.hosts import lasting_name
from gemini_ft.launch.notes import SUSPECTED, Notes
from gemini_ft.launch.out_of_use import out_of_use, publish, wished_back

UNHEALTHY = 71  # EX_OSERR
_OUT = "gemini_out"  # in the state of the rendezvous: lasting name -> why the host is out of use
_SLOW = "gemini_slow"  # there: (a name, ranks, its place) of the last drain of a slow host
NAMES = "gemini_names"  # there: the lasting name of each launcher that lives and has taken a place in a round
SLOW_SECONDS = 10.0  # for which a rank must have been named as slow, which takes up to thirty steps itself
_BETWEEN = 600.0  # seconds between two drains of slow hosts
LOOK = 1.0  # seconds between two questions to the agent
_WAIT = 0.2  # seconds of a look for the command to end, as it mostly does at once
_LAST = 1.0  # seconds for a command to end that was killed
_SHOWN = 300  # characters of the command's output
_READ = 4096  # its last bytes
_HELD = 2**20  # bytes of it that may be in memory when the command is looked at
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


class Judgement:
    """A run of a health command by ``sh``. What the command leaves in the background goes on if it ends in time, and is heard no more.

    The output goes into memory, and not through a pipe, which would end whatever writes to it when this process is gone.
    """

    def __init__(self, command: str, seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._output = os.memfd_create("gemini-health", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # what is written after it was cut begins at its new end
        weakref.finalize(self, os.close, self._output)
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(["sh", "-c", command], **pipes, start_new_session=True)
        self._last = b""  # of the output that was cut

    def outcome(self, wait: float = 0.0) -> str | None:
        """Returns what is wrong, or nothing; None: the command is still at work after ``wait`` seconds."""
        try:
            status = self._process.wait(max(0.0, min(wait, self._until - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() < self._until:
                if os.fstat(self._output).st_size > _HELD:
                    self._cut()
                return None
            self.end()
            self._seal()
            return f"the health command took longer than {self._seconds:g} s"
        self._cut()
        self._seal()
        text = printable(" ".join(self._last.decode(errors="replace").split()))[-_SHOWN:]
        return f"the health command ended with status {status}{text and f': {text}'}" if status else ""

    def _cut(self) -> None:
        """Frees the memory of the output, but for its last bytes."""
        more = os.pread(self._output, _READ, max(0, os.fstat(self._output).st_size - _READ))
        with contextlib.suppress(OSError):  # the command may have sealed it
            os.ftruncate(self._output, 0)
        self._last = (self._last + more)[-_READ:]

    def _seal(self) -> None:
        """Takes no more memory for the output: what writes to it from now on gets an error, and not a signal as from a pipe."""
        with contextlib.suppress(OSError):  # the command may have done so, or forbidden it
            fcntl.fcntl(self._output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)

    def end(self) -> None:
        """Kills the command if it is still at work; one that even then does not end, as a device holds it, is left behind."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST)


class Stay(Enum):
    """Why a host does not join now."""

    CHANGED = auto()  # the state has changed, and is to be written first
    JUDGED = auto()  # its health command is at work


class HostHealth:
    """Keeps a host that is not well out of the job, on behalf of its launcher.

    ``account``: gives the account of this host's agent. ``drain``: begins the drain of this host.
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
        self._last_drain: tuple[str, list[int], Any] | None = None  # of a slow host, as the state has it
        self._last_seen = 0.0  # when that was seen first
        self.name = lasting_name()
        self._why: str | None = "before it joins"  # it is to be judged; None: it is not suspected
        self._judgement: Judgement | None = None  # which is under way
        self._unfit = ""  # what was wrong when it was judged before it joins
        self._unwell = ""  # what was wrong when it was judged at work, as it was slow
        self._suspected = 0  # how often workers had said that they are, at the last look
        self._slow_since: float | None = None
        self._slow: list[int] = []  # ranks of this host
        self._has_judged_slow = False
        self._next_look = 0.0
        self._published = out_of_use(run)  # of the launcher before this one, perhaps
        self._has_complained = False
        self._is_drained = False
        self.leaves = False  # whether this host is drained once the state is written as `at_work` has left it
        self.ranks: set[int] = set()  # of this host's workers

    def suspect(self, why: str) -> None:
        """Has this host judged before it joins once more."""
        self._why = why

    def stays_away(self, state: Any, node: Any) -> Stay | None:
        """Judges this host where that is due, as it is about to join; None: it may.

        Raises UnhealthyError: it is out of use, and the list says so.
        """
        if self.tend(state):
            return Stay.CHANGED
        if (reason := _out(state).get(self.name)) is not None:
            raise UnhealthyError(
                f"host {self.name} is out of use in run {self._run}: {reason}. "
                f"`gemini hosts --run-id {self._run} --take-back {self.name}` on a host of the job takes it back"
            )
        if (said := self._notes.count(SUSPECTED)) > self._suspected:
            self._suspected, self._why = said, "as its results differ"
        if self._unwell:
            self._unwell, self._why = "", self._why or "as it was slow and not well"
        if self._why is not None and self._options.command is not None:
            if self._judgement is None:
                _log.info("judging this host %s: %s", self._why, self._options.command)
                self._judgement = Judgement(self._options.command, self._options.seconds)
            if (outcome := self._judgement.outcome(_WAIT)) is None:
                return Stay.JUDGED
            self._judgement, self._unfit = None, outcome
        self._why = None
        if not self._unfit:
            return None
        setattr(state, _OUT, _out(state) | {self.name: self._unfit})
        if node not in state.participants:
            for group in (state.wait_list, state.redundancy_list):
                group.discard(node)
            state.last_heartbeats.pop(node, None)  # nobody is to wait for it
        return Stay.CHANGED

    def tend(self, state: Any) -> bool:
        """Takes hosts back as the user wishes, and publishes the list; whether the state has changed, and is to be written."""
        if (last := getattr(state, _SLOW, None)) != self._last_drain:
            self._last_drain, self._last_seen = last, self._clock()
        if self._published and self._options.command is not None and not hasattr(state, _OUT):
            setattr(state, _OUT, dict(self._published))  # the store is new
            return True
        out = _out(state)
        if not out and not self._published:
            return False
        back = set[str]()
        try:
            back = wished_back(self._run, out)
            if out != self._published:
                publish(self._run, out)
        except (OSError, ConfigError) as error:
            if not self._has_complained:
                _log.warning("the list of hosts out of use cannot be kept in a file for `gemini status` and `gemini hosts`: %s", error)
            self._has_complained = True
        self._published = out
        if back:
            setattr(state, _OUT, {name: why for name, why in out.items() if name not in back})
            _log.warning("taking back into the job: %s", ", ".join(sorted(back)))
        return bool(back)

    def at_work(self, state: Any, node: Any, lacking: int = 0) -> bool:
        """Looks after this host while it trains; whether the state has changed, and is to be written.

        ``node``: this host's in the state. ``lacking``: places of the present round whose hosts have left.
        """
        self.leaves = False
        changed = self.tend(state)
        if self._is_drained or not (self._options.drains or self._options.command is not None):
            return changed
        if (now := self._clock()) >= self._next_look:
            self._next_look = now + LOOK
            self._look(now)
        if self._slow_since is None or now - self._slow_since < SLOW_SECONDS or not self._has_spare(state, node, lacking):
            return changed
        if not self._unwell and not (self._options.drains and self._may_drain()):
            return changed
        if self._unwell:
            setattr(state, _OUT, _out(state) | {self.name: self._unwell})
        setattr(state, _SLOW, (uuid.uuid4().hex, self._slow, node))
        self.leaves = True
        return True

    def written(self) -> None:
        """The state has been written as `at_work` left it: the spare is this host's if this one ``leaves``, which is drained now."""
        if not self.leaves:
            return
        self.leaves, self._is_drained = False, True
        if self._unwell:
            _log.error("this host is put out of use, and a spare takes its place: %s", self._unwell)
        else:
            _log.warning("this host is slow, and is drained, as a spare waits: ranks %s", self._slow)
        self.drain()

    def end(self) -> None:
        """Ends a health command that is still at work. To be called at the end of the launch."""
        if self._judgement is not None:
            self._judgement.end()

    def _look(self, now: float) -> None:
        """Asks the agent which ranks are slow; a host that has slow ones is judged once, beside the training."""
        streams = self._account().get("streams", {}).values()
        self._slow = sorted({rank for stream in streams for rank in stream.get("stragglers", ())} & self.ranks)
        if self._judgement is not None and (outcome := self._judgement.outcome()) is not None:
            self._judgement, self._unwell = None, outcome
            if self._slow and outcome:
                _log.error("this host is slow, and %s; it goes on until a spare waits", outcome)
        if not self._slow:
            self._slow_since, self._has_judged_slow, self._unwell = None, False, ""
            return
        self._slow_since = self._slow_since or now
        if self._options.command is not None and not self._has_judged_slow:
            self._has_judged_slow = True
            self._judgement = self._judgement or Judgement(self._options.command, self._options.seconds)

    def _may_drain(self) -> bool:
        """Whether no host was drained for the same just now: then the next one is slow for another reason than its own."""
        return self._last_drain is None or (self._clock() - self._last_seen >= _BETWEEN and self._last_drain[1] != self._slow)

    def _has_spare(self, state: Any, node: Any, lacking: int) -> bool:
        """Whether a host waits that gives signs of life, and that no host which leaves needs; and no change of hosts is under way."""
        if not state.complete or state.closed:
            return False
        names, out = getattr(state, NAMES, {}), _out(state)
        leaving = {other for other in state.participants if other != node and names.get(other) in out}
        if self._last_drain is not None:
            leaving |= {self._last_drain[2]} & (state.participants.keys() - {node})
        return len(state.redundancy_list & state.last_heartbeats.keys()) > len(leaving) + lacking


def _out(state: Any) -> dict[str, str]:
    return dict(getattr(state, _OUT, {}))
