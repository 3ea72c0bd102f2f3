"""Scripts that come through a pipe: standard input, a FIFO, ``<(...)``. They can be read once, but every rank and restart needs them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gemini_ft.errors import ConfigError


@contextmanager
def copied_from_pipe(program: Sequence[str]) -> Iterator[Path | None]:
    """A copy of the script, if it comes through a pipe, for as long as the context lasts; else None.

    Args:
        program: script and arguments; ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read.
    """
    script = program[0]
    if script != "-" and (stat.S_ISREG(mode := os.stat(script).st_mode) or stat.S_ISDIR(mode)):
        yield None
        return
    try:
        with open(sys.stdin.fileno() if script == "-" else script, "rb", closefd=script != "-") as pipe:
            text = pipe.read()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the script {script!r} cannot be read ({error}); give the path of a file") from error
    with open(os.memfd_create("gemini-script", os.MFD_CLOEXEC), "wb", buffering=0) as copy:  # which is gone with this process
        copy.write(text)
        yield Path(f"/proc/{os.getpid()}/fd/{copy.fileno()}")
