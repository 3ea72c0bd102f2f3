"""``python -u -m gemini_ft.cold [-m] SCRIPT ARGUMENTS...``: a worker of ``gemini run`` that is not forked.

Like one that is (`gemini_ft.forkserver`), it differs from ``python -u SCRIPT`` in two points only: ``deepspeed.initialize``
knows the "gemini" section (`gemini_ft.wrapping`), and torch's launcher learns of an exception.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gemini_ft import forkserver

_MODULE = "gemini_ft.cold"


def command(python: Sequence[str], program: Sequence[str]) -> tuple[str, ...]:
    """What starts ``program`` (script and arguments, or ``-m``, module name and arguments) in this way."""
    return (*python, "-m", _MODULE, *program)


def main() -> None:
    """Run the program that the command line names."""
    program = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path[0] = forkserver.import_root(program)
    forkserver.run(program)


if __name__ == "__main__":
    main()
