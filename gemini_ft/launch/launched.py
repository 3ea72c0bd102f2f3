"""The name of a run, by which the same command finds its memory again; one launch of it, and what has changed since another one.

Under Ray Train both have the names that its public interface tells; that is asked only where the process has it loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemini_ft.config import PASSWORD
from gemini_ft.errors import ConfigError
from gemini_ft.hosts import began
from gemini_ft.wire.worker_messages import Launch

VARIABLES = "GEMINI_RUN_ID_VARIABLES"  # names of variables whose values tell jobs apart
_OF_ARRAYS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "LSB_JOBINDEX", "SGE_TASK_ID")  # a task of a job array is a job
LAUNCH = "GEMINI_LAUNCH"  # in the environment of workers of `gemini run`: the name of the launch, the same on all hosts
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|PIN", re.IGNORECASE)  # names whose values no log must show
_PLAIN = re.compile(r"[+-]?[\d_]{0,12}\.?\d{0,12}(e[+-]?\d{1,3})?|true|false|none", re.IGNORECASE)  # values that are no secret
_DIGEST = "sha256 "  # before the digest of a value, by which two are compared; no log shows it, since a short value can be guessed from it
_CREDENTIALS = re.compile(
    PASSWORD + r"|\b(hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{8,}|(?<![\w/.+=-])[A-Za-z0-9+=_-]{32,}(?![\w/.+=-])"
)
_HIDDEN = "..."
_DIGITS = 10  # of the number of a process, at most
# Variables that say where and by whom a process was started, and nothing of what it does.
_OF_THE_START = re.compile(
    "_|PATH|LANG|LC_.*|PWD|OLDPWD|SHLVL|SHELL|HOME|USER|LOGNAME|MAIL|TERM.*|COLORTERM|COLUMNS|LINES|LS_COLORS|PS[1-4]|DISPLAY|HOSTNAME|TMPDIR|TMUX.*|STY"
    "|WINDOW.*|EDITOR|PAGER|LESS.*|SSH_.*|XDG_.*|DBUS_.*|VSCODE_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|KUBE(RNETES|FLOW)_.*|SLURMD?_.*|PBS_.*"
    "|LSB_.*|RANK|LOCAL_RANK|GROUP_.*|ROLE_.*|LOCAL_WORLD_SIZE|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|TORCH_NCCL_.*|PET_.*|RAY_.*|CUDA_VISIBLE_DEVICES"
    "|GEMINI_.*|PYTEST_.*"
)


def default_run_id(command: Sequence[str] | None = None) -> str:
    """Sixteen hex digits out of user, working directory, command and some variables; the same on every host and in every rank.

    ``gemini run`` computes it from its arguments and a worker under plain torchrun from its own: the results agree. For workers of Ray
    Train, which have Ray's command and folders of their own, the name of their run takes the place of both.
    Host, rank and torchrun's options do not enter; the task of a job array does, and so do the variables that GEMINI_RUN_ID_VARIABLES
    names. Two jobs of one user that run the same command in the same directory at the same time need one of these,
    ``--run-id`` or ``GEMINI_RUN_ID``.

    ``command``: the script (or ``-m`` and the module's name) and its arguments; default: those of this process, so call it before the
    script changes its directory or ``sys.argv``.
    """
    what, *arguments = own_command() if command is None else command
    named = [name.strip() for name in os.environ.get(VARIABLES, "").split(",") if name.strip()]
    if command is None and ray_run_name() is not None:
        identity: list[object] = [os.getuid(), what, *arguments]
    else:
        identity = [os.getuid(), os.path.realpath(os.getcwd()), os.path.realpath(what) if what != "-m" else what, *arguments]
    if values := {name: os.environ.get(name) for name in sorted({*named, *_OF_ARRAYS}) if name in named or name in os.environ}:
        identity.append(values)
    if is_passing(command):
        identity.append(f"{os.getpid()} {began(os.getpid())}")  # no other process of this machine has these two numbers
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
    if (name := ray_run_name()) is not None:
        return ["-m", "ray.train", name]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:  # python script.py
        return list(sys.argv)
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]  # python -m module: argv[0] is the file found for it


def ray_run_name() -> str | None:
    """The name of the run (``RunConfig(name=...)``), the same in all its workers and over all its restarts; None: this is none of them."""
    context = _ray_context()
    return context.get_experiment_name() if context is not None else None


def ray_launch_name() -> str | None:
    """A name for what one driver starts under this name of a run: its job, in its cluster. None: this process is no worker of Ray Train."""
    if (name := ray_run_name()) is None:
        return None
    runtime = sys.modules["ray"].get_runtime_context()
    return f"ray-{runtime.gcs_address}-{runtime.get_job_id()}-{name}"


def _ray_context() -> Any:
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        return train.get_context()
    except (RuntimeError, DeprecationWarning):  # outside of a training function; in a trial of Ray Tune
        return None


def launch_id() -> str:
    """Name of the launch that this process belongs to; what rank 0 says counts for all ranks.

    Under ``gemini run`` it is the launcher's, under torchrun it is made of torchrun's process, under Ray Train of the driver's job, and
    elsewhere of this process.
    """
    pid = _starter()
    return os.environ.get(LAUNCH) or ray_launch_name() or f"{socket.gethostname()}-{pid}-{began(pid)}"


def this_launch(name: str) -> Launch:
    """This process's knowledge of the launch ``name``."""
    pid = _starter()
    ticks = began(pid) or 0
    booted = float(next(line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")))
    return Launch(
        id=name,
        pid=pid,
        ticks=ticks,
        started=booted + ticks / os.sysconf("SC_CLK_TCK"),
        command=[_told(word) for word in without_secrets(own_command())],
        folder=_told(os.getcwd()) if ray_run_name() is None else "",  # Ray makes one for each session of a cluster
        script=_digest_of_script(),
        environ=relevant(_environment_at_start()),
    )


def _told(text: str) -> str:
    """The text as it travels and is compared: the bytes of a file's name may be none of the locale's encoding."""
    return text.encode(errors="backslashreplace").decode()


def _starter() -> int:
    """Process id of what restarts this process: its launcher, or itself."""
    if "GEMINI_LAUNCHER_PID" in os.environ:
        if not (given := os.environ["GEMINI_LAUNCHER_PID"]).isdecimal() or len(given) > _DIGITS:
            raise ConfigError(f"GEMINI_LAUNCHER_PID={given[:_DIGITS]!r}: must be the number of a process; unset it, `gemini run` sets it")
        return int(given)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _digest_of_script() -> str:
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:  # a pipe has been read, and would be waited for
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and os.path.isfile(path) else ""
    except OSError:
        return ""


def _environment_at_start() -> dict[str, str]:
    """As it was before imports and the script have set anything."""
    pairs = (entry.decode(errors="replace").partition("=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a script may read, with what may be kept of their values."""
    return {name: _kept(name, value) for name, value in environ.items() if not _OF_THE_START.fullmatch(name)}


def _kept(name: str, value: str) -> str:
    is_shown = _PLAIN.fullmatch(value) and not _SECRET.search(name)
    return repr(value) if is_shown else f"{_DIGEST}{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line as logs may show it: without passwords in URLs, what looks like a token, and values of options with such names."""
    found, is_value = [], False
    for argument in command:
        name, sign, value = argument.partition("=")
        is_secret = _SECRET.search(name) is not None
        if is_value and not argument.startswith("-"):
            shown = argument if _PLAIN.fullmatch(argument) else _HIDDEN
        elif is_secret and sign:
            shown = argument if _PLAIN.fullmatch(value) else f"{name}={_HIDDEN}"
        else:
            shown = _CREDENTIALS.sub(_HIDDEN, argument)
        is_value = is_secret and not sign and argument.startswith("-")
        found.append(shown)
    return found


def changes(before: Launch, now: Launch) -> list[str]:
    """The differences in words; names of variables in their order."""
    found = []
    if before.command != now.command:
        found.append(f"the command was `{' '.join(before.command)}` and is `{' '.join(now.command)}`")
    if before.folder != now.folder:
        found.append(f"the folder was {before.folder} and is {now.folder}")
    if before.script != now.script:
        found.append(f"{now.command[0] if now.command[0] != '-m' else now.command[1]} is another than it was")
    for name in sorted(before.environ.keys() | now.environ.keys()):
        then, this = before.environ.get(name), now.environ.get(name)
        if then != this and {(then or "")[: len(_DIGEST)], (this or "")[: len(_DIGEST)]} & {_DIGEST}:
            found.append(f"{name} is another than it was" if then and this else f"{name} {'is' if this else 'was'} set")
        elif then != this:
            found.append(f"{name} was {then or 'not set'} and is {this or 'not set'}")
    return found
