"""Tells the launcher that only the same number of ranks can load the job's state. Standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FIXED = "GEMINI_FIXED_FILE"  # names, in the worker's environment, the file that it makes to say so


def say_fixed() -> None:
    """Tells ``gemini run``, if that has started this worker, that the job must keep its number of ranks."""
    if path := os.environ.get(FIXED):
        with contextlib.suppress(OSError):  # the launcher is gone, and with it the job
            Path(path).touch()
