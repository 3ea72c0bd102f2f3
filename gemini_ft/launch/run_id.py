"""The name of a run, by which the same command, started again, finds the memory of the time before."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Sequence

from gemini_ft import hosts
from gemini_ft.launch import ray_train

VARIABLES = "GEMINI_RUN_ID_VARIABLES"  # names of variables whose values tell jobs apart
_OF_ARRAYS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "LSB_JOBINDEX", "SGE_TASK_ID")  # a task of a job array is a job


def default_run_id(command: Sequence[str] | None = None) -> str:
    """Sixteen hex digits out of user, working directory, command and some variables; the same on every host and in every rank.

    ``gemini run`` computes it from its arguments and a worker under plain torchrun from its own: the results agree. For workers of Ray
    Train, which have Ray's command and folders of their own, the name of their run takes the place of both.
    Host, rank and torchrun's options do not enter; the task of a job array does, and so do the variables that GEMINI_RUN_ID_VARIABLES
    names. Two jobs of one user that run the same command in the same directory at the same time need one of these,
    ``--run-id`` or ``GEMINI_RUN_ID``.

    Args:
        command: the script (or ``-m`` and the module's name) and its arguments; default: those of this process, so
            call it before the script changes its directory or ``sys.argv``.
    """
    what, *arguments = own_command() if command is None else command
    named = [name.strip() for name in os.environ.get(VARIABLES, "").split(",") if name.strip()]
    if command is None and ray_train.run_name() is not None:
        identity: list[object] = [os.getuid(), what, *arguments]
    else:
        identity = [os.getuid(), os.path.realpath(os.getcwd()), os.path.realpath(what) if what != "-m" else what, *arguments]
    if values := {name: os.environ.get(name) for name in sorted({*named, *_OF_ARRAYS}) if name in named or name in os.environ}:
        identity.append(values)
    if is_passing(command):
        identity.append(f"{os.getpid()} {hosts.began(os.getpid())}")  # no other process of this machine has these two numbers
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def is_passing(command: Sequence[str] | None = None) -> bool:
    """Whether the command does not name its program (a pipe, ``-c``, a notebook), so that its default id is good for one process only."""
    if command is None and hasattr(sys, "ps1"):  # the prompt of Python's shell; IPython and the kernels of notebooks set it, too
        return True
    what = (own_command() if command is None else command)[0]
    if what in ("", "-", "-c"):
        return True
    try:
        return what != "-m" and not (stat.S_ISREG(mode := os.stat(what).st_mode) or stat.S_ISDIR(mode))
    except OSError:
        return False  # it will fail by itself


def own_command() -> list[str]:
    """The script (or ``-m`` and the module's name) and arguments of this process; of a worker of Ray Train the name of its run."""
    if (name := ray_train.run_name()) is not None:
        return ["-m", "ray.train", name]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:  # python script.py
        return list(sys.argv)
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]  # python -m module: argv[0] is the file found for it
