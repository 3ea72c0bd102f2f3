"""The name of a run, by which the same command, started again, finds the memory of the time before."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence


def default_run_id(command: Sequence[str] | None = None) -> str:
    """Sixteen hex digits out of user, working directory and command; the same on every host and in every rank.

    ``gemini run`` computes it from its arguments and a worker under plain torchrun from its own: the results agree.
    Host, rank and torchrun's options do not enter. Two jobs of one user that run the same command in the same
    directory at the same time need ``--run-id`` or ``GEMINI_RUN_ID``.

    Args:
        command: the script (or ``-m`` and the module's name) and its arguments; default: those of this process, so
            call it before the script changes its directory or ``sys.argv``.
    """
    what, *arguments = _own_command() if command is None else command
    if what != "-m":
        what = os.path.realpath(what)
    identity = json.dumps([os.getuid(), os.path.realpath(os.getcwd()), what, *arguments])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _own_command() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:  # python script.py
        return sys.argv
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]  # python -m module: argv[0] is the file found for it
