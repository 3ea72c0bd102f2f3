"""The end of a worker's process, as its host's agent must hear it: until all have ended well, what was trained can be had again.

The end of a loop says nothing yet: the script may fail while it saves or tests, and a restart must not train everything once more. Under
``gemini run`` the launcher knows how processes have ended, and tells the agent. Elsewhere each process says by itself that it ends well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from multiprocessing.util import Finalize

from gemini_ft.agent import lifecycle
from gemini_ft.errors import GeminiError, is_refusal
from gemini_ft.wire.worker_messages import Ended


def attend(run: str, host: str) -> None:
    """Lets the agent hear of the end of this process."""
    _attend(run, host, os.getpid())


@functools.cache
def _attend(run: str, host: str, pid: int) -> None:
    # An exit handler would not do: processes that multiprocessing forks, as notebooks do, end without those.
    Finalize(None, _part, (run, host, pid), exitpriority=0)


def _part(run: str, host: str, pid: int) -> None:
    error = sys.exception() or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and not error.code:
        error = None
    is_told = "GEMINI_LAUNCHER_PID" in os.environ and not is_refusal(error)
    if pid != os.getpid() or is_told or (error is not None and not is_refusal(error)):
        return
    with contextlib.suppress(GeminiError, OSError):
        lifecycle.ask(run, host, Ended(refused=str(error) if error is not None else ""))
