"""Drains this host at a signal: its workers finish their step, commit it, and end; only then does the launcher, with a status that says so.

The wish goes by way of the host's agent and not by a signal to the workers, so that handlers of scripts and frameworks, which stop a
job in their own ways, are left for the case that this one does not come to an end in time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_api

from gemini_ft.agent import lifecycle
from gemini_ft.errors import AgentTimeoutError, GeminiError
from gemini_ft.hosts import host_id
from gemini_ft.launch import grace
from gemini_ft.launch.notes import DRAINED_STATUS
from gemini_ft.wire.worker_messages import AskDrain, Draining, ToWorker

_log = logging.getLogger(__name__)

LEFT = DRAINED_STATUS
_STRAGGLERS = 10.0  # seconds for the other workers of a host, once one has left
_RESTART = 10.0  # seconds for workers that are being restarted to join their run once more
_POLL = 0.1  # seconds


class HostDrain:
    """The drain of this host, which a signal to the launcher begins.

    Args:
        run: run id.
        seconds: that it may take.
        signum: the signal; None: only workers, and the host's agent, can be told.
        have_joined: whether workers of this launcher have joined the run: if there are none now, they are being restarted.
    """

    def __init__(self, run: str, seconds: float, signum: signal.Signals | None, have_joined: Callable[[], bool] = lambda: False) -> None:
        self._run, self._seconds, self._signum, self._have_joined = run, seconds, signum, have_joined
        self._begun_at: float | None = None
        self._given_up = False
        self._over = threading.Event()
        self._is_heeded = False
        self._sending = threading.Lock()  # held while the signal is sent once more, and while `_is_heeded` changes

    @property
    def begun(self) -> bool:
        """Whether workers have been told, and are still given time."""
        return self._begun_at is not None and not self._given_up

    def heard(self) -> bool:
        """Takes the signal, on the thread that hears all of them; False: it ends the job as SIGTERM does."""
        if self._given_up:
            return False
        if self._begun_at is None:
            self._begun_at = time.monotonic()
            threading.Thread(target=self._tell, name="gemini-drain", daemon=True).start()
        else:
            self._give_up("the signal has come a second time")
        return True

    def _tell(self) -> None:
        try:
            answer = self._asked()
        except (GeminiError, OSError) as error:
            self._give_up(str(error))
            return
        if not isinstance(answer, Draining) or not answer.workers:
            self._give_up("no worker of this host has joined a run, so there is nothing to finish")
            return
        _log.warning("this host is drained: its workers end after a step that is committed, within %g s", self._seconds)
        if not self._over.wait(self._seconds):
            self._give_up(f"no step has been committed within {self._seconds:g} s (drain_seconds)")

    def _asked(self) -> ToWorker | None:
        """The agent's answer. One that hangs is killed by its workers, and its successor asked: there is time for that.

        The same goes for workers that are being restarted. From then on the agent tells all those that this launcher starts.
        """
        begun = time.monotonic()
        while True:
            try:
                answer = lifecycle.ask(self._run, host_id(), AskDrain())
                is_told = isinstance(answer, Draining) and answer.workers
                if is_told or not self._have_joined() or time.monotonic() > begun + min(_RESTART, self._seconds):
                    return answer
            except AgentTimeoutError:
                if time.monotonic() > begun + self._seconds:
                    raise
            if self._over.wait(_POLL):
                return None

    def _give_up(self, why: str) -> None:
        with self._sending:
            if not self._is_heeded:
                return  # nobody takes the signal any more: it would end this process
            _log.warning("ending the workers without a drain: %s", why)
            self._given_up = True
            assert self._signum is not None
            os.kill(os.getpid(), self._signum)  # once more, and this time it is passed on

    def _at_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._given_up:
            getattr(torch_api, grace.TO_HANDLER)(signal.SIGTERM, frame)

    def await_uploads(self) -> None:
        """Returns when this host's part of the upload that the drain has asked for is over, or the time is. The workers have left."""
        self._over.set()
        end = (self._begun_at or time.monotonic()) + self._seconds
        while uploading := _uploading(self._run):
            if time.monotonic() > end:
                _log.warning("left before the upload of %s was over: %g s (drain_seconds) have passed", ", ".join(uploading), self._seconds)
                return
            time.sleep(_POLL)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Inside, the signal begins the drain. To be entered by the main thread."""
        if self._signum is None:
            yield
            return
        before = signal.signal(self._signum, self._at_signal)
        grace.watched[self._signum] = self.heard
        self._is_heeded = True
        try:
            yield
        finally:
            self._over.set()
            with self._sending:
                self._is_heeded = False
            del grace.watched[self._signum]
            signal.signal(self._signum, before)


def account_of(run: str) -> dict[str, Any]:
    """The account that this host's agent gives of a run, as `gemini status --json` has it; empty: there is none to be had now."""
    try:
        return dict(json.loads(lifecycle.status(run) or "{}"))
    except (GeminiError, OSError, ValueError):
        return {}


def _uploading(run: str) -> list[str]:
    """The versions that this host's agent still takes part in storing."""
    try:
        document = json.loads(lifecycle.status(run) or "{}")
    except AgentTimeoutError:
        return ["a version that is not known, as the agent does not answer,"]
    except (GeminiError, OSError):
        return []
    stores = [stream["storage"] for stream in document.get("streams", {}).values()]
    return [store["uploading"] for store in stores if store and store["uploading"]]


def await_workers(context: Any) -> None:
    """Waits for the workers of torch's process context: one may be in the midst of its farewell, or wait for one that has left."""
    end = time.monotonic() + _STRAGGLERS
    while any(handler.proc.poll() is None for handler in context.subprocess_handlers.values()):
        if time.monotonic() > end:
            context.close(signal.SIGKILL)  # SIGTERM would be another wish to save, which a worker that waits for others never hears
            return
        time.sleep(_POLL)
