"""Processes that are slow instead of dead: one that is stopped and woken in turns, and so gets a share of its time.

A process of its own does it (``python -m gemini_ft.faults.slowing``), which outlives whoever asked for it: nothing stays stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from gemini_ft.hosts import is_readable

PERIOD = 1.0  # seconds from one stop to the next


def slow_down(pid: int, share: float, seconds: float, period: float = PERIOD) -> subprocess.Popen[bytes]:
    """Makes a process slow, until the one that is returned ends: after that time, with the slow one, or at SIGTERM.

    ``share``: of each period, in which it may run.

    Raises ProcessLookupError: there is no such process.
    """
    pidfd = os.pidfd_open(pid)
    try:
        arguments = [sys.executable, "-m", "gemini_ft.faults.slowing", str(pidfd), str(share), str(seconds), str(period)]
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=[pidfd], start_new_session=True)
    finally:
        os.close(pidfd)


def _alternate(pidfd: int, *, share: float, seconds: float, period: float) -> None:
    """Stops a process and wakes it up again, in turns."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
        try:
            while time.monotonic() < end:
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                if is_readable(pidfd, period * (1 - share)):
                    return
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                if is_readable(pidfd, period * share):
                    return
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _alternate(int(sys.argv[1]), share=float(sys.argv[2]), seconds=float(sys.argv[3]), period=float(sys.argv[4]))
