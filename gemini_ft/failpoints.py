"""Moments inside agents, workers and launchers at which GEMINI_FAULTS kills, stops or delays the process, or makes it fail.

`gemini_ft.core.faults` has the language, and the table of these moments. Without such faults a moment is one comparison.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.core.faults import PROCESS_MOMENTS, Fault, parse
from gemini_ft.errors import ConfigError
from gemini_ft.wire.private import runtime_folder

_log = logging.getLogger("gemini_ft")


class InjectedFault(RuntimeError):
    """The error that a process raises for a fault of kind ``exception``."""


def notes_folder(run: str) -> Path:
    """The folder with a file for each fault of a run that has happened, named as `Fault.occurrence` says."""
    chosen = os.environ.get("GEMINI_FAULTS_DIR")
    return Path(chosen) if chosen else runtime_folder() / f"faults-{run}"


def arm(run: str, host: str) -> None:
    """Prepares this process for the moments that GEMINI_FAULTS names; a text that cannot be understood is refused when ranks join."""
    global armed
    faults: list[Fault] = []
    with contextlib.suppress(ConfigError):
        faults = [fault for fault in parse(os.environ.get("GEMINI_FAULTS", "")) if fault.moment in PROCESS_MOMENTS]
    armed = Failpoints(faults, notes_folder(run), host) if faults else None


def disarm() -> None:
    """Lets no fault happen in this process any more, and says so in its log."""
    global armed
    armed = None
    _log.warning("fault injection: what an earlier launch has asked for is off")


def reached(moment: str, iteration: int | None = None, rank: int | None = None) -> None:
    """Carries out the faults that are due now.

    Args:
        moment: a key of ``gemini_ft.core.faults.PROCESS_MOMENTS``.
        iteration: of the snapshot that it is about, if it is about one.
        rank: whose shard, or whose worker, it is about, if it is about one.

    Raises InjectedFault: asked for by a fault of kind ``exception``.
    """
    if armed is not None:
        armed.reached(moment, iteration, rank)


class Failpoints:
    """The faults that can happen to one process. Of all processes that come to the moment of a fault, it happens to the first one."""

    def __init__(self, faults: Sequence[Fault], folder: Path, host: str) -> None:
        self._faults, self._folder, self._host = faults, folder, host

    def reached(self, moment: str, iteration: int | None, rank: int | None) -> None:
        for fault in self._faults:
            if fault.moment == moment and fault.is_about(self._host, iteration, rank) and self._is_first(fault):
                _log.warning("fault injection on host %s, %s: %s", self._host, moment, fault.text)
                strike(fault)

    def _is_first(self, fault: Fault) -> bool:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(self._folder / fault.name, "x") as note:
                note.write(f"{fault.text}\n")
        except FileExistsError:
            return False
        return True


armed: Failpoints | None = None


def strike(fault: Fault) -> None:
    """Carries out, on this process, a fault of a kind that strikes a single process.

    Raises InjectedFault: asked for by a fault of kind ``exception``.
    """
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            while True:  # the agent lets a hanging worker go on for a moment, to write down its stacks
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.1)
        case "exception":
            raise InjectedFault(fault.text)
        case "exit":
            os._exit(fault.code)
        case "delay":
            time.sleep(fault.seconds)
