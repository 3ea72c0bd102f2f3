"""Starts a worker of ``gemini run`` that is not forked; called with ``LAUNCHER [--copy=FILE] [-m] SCRIPT ARGUMENTS...``.

Like one that is (`gemini_ft.launch.forkserver`), it differs from ``python -u SCRIPT`` in three points only: ``deepspeed.initialize``
knows the "gemini" section (`gemini_ft.launch.autoprotect`), torch's launcher learns of an exception, and the worker dies with it.
LAUNCHER is its process id, FILE has the text of a script that it has read from a pipe. `gemini_ft.launch.script.starter` has the way
to call this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.launch.script import die_with, import_root, run, starter

_MODULE = "gemini_ft.launch.cold_start"
_COPY = "--copy="


def command(line: Sequence[str], copy: Path | None = None) -> tuple[str, ...]:
    """The command line that starts in this way what ``line`` does: ``python -u``, then script and arguments or -m, module and arguments."""
    python, program = line[:2], line[2:]
    return (*python, *starter(_MODULE), str(os.getpid()), *([f"{_COPY}{copy}"] if copy else []), *program)


def main() -> None:
    """Runs the program that the command line names."""
    copy, launcher, program = None, int(sys.argv[1]), sys.argv[2:]
    die_with(launcher)
    if program[0].startswith(_COPY):
        copy = program.pop(0).removeprefix(_COPY)
    if not sys.flags.safe_path:
        sys.path.insert(0, import_root(program))
    run(program, copy)
