"""Called with ``[--copy=FILE] [-m] SCRIPT ARGUMENTS...`` (`gemini_ft.script.starter`): a worker of ``gemini run`` that is not forked.

Like one that is (`gemini_ft.forkserver`), it differs from ``python -u SCRIPT`` in two points only: ``deepspeed.initialize``
knows the "gemini" section (`gemini_ft.wrapping`), and torch's launcher learns of an exception. FILE has the text of a script that the
launcher has read from a pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.script import import_root, run, starter

_MODULE = "gemini_ft.cold"
_COPY = "--copy="


def command(line: Sequence[str], copy: Path | None = None) -> tuple[str, ...]:
    """The command line that starts in this way what ``line`` does: ``python -u``, then script and arguments or -m, module and arguments."""
    python, program = line[:2], line[2:]
    return (*python, *starter(_MODULE), *([f"{_COPY}{copy}"] if copy else []), *program)


def main() -> None:
    """Run the program that the command line names."""
    copy, program = None, sys.argv[1:]
    if program[0].startswith(_COPY):
        copy = program.pop(0).removeprefix(_COPY)
    if not sys.flags.safe_path:
        sys.path.insert(0, import_root(program))
    run(program, copy)
