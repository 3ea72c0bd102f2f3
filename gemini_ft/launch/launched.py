"""One launch of a job by its user: how it is told from other launches of the same run, and what has changed since another one."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemini_ft.config import PASSWORD
from gemini_ft.errors import ConfigError
from gemini_ft.hosts import began
from gemini_ft.launch import ray_train
from gemini_ft.launch.run_id import own_command
from gemini_ft.wire.worker_messages import Launch

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


def launch_id() -> str:
    """Name of the launch that this process belongs to; what rank 0 says counts for all ranks.

    Under ``gemini run`` it is the launcher's, under torchrun it is made of torchrun's process, under Ray Train of the driver's job, and
    elsewhere of this process.
    """
    pid = _starter()
    return os.environ.get(LAUNCH) or ray_train.launch_name() or f"{socket.gethostname()}-{pid}-{began(pid)}"


def this_launch(name: str) -> Launch:
    """This process's knowledge of the launch ``name``."""
    pid = _starter()
    ticks = began(pid) or 0
    return Launch(
        id=name,
        pid=pid,
        ticks=ticks,
        started=_boot_time() + ticks / os.sysconf("SC_CLK_TCK"),
        command=without_secrets(own_command()),
        folder=os.getcwd() if ray_train.run_name() is None else "",  # Ray makes one for each session of a cluster
        script=_digest_of_script(),
        environ=relevant(_environment_at_start()),
    )


def _starter() -> int:
    """Process id of what restarts this process: its launcher, or itself."""
    if "GEMINI_LAUNCHER_PID" in os.environ:
        if not (given := os.environ["GEMINI_LAUNCHER_PID"]).isdecimal() or len(given) > _DIGITS:
            raise ConfigError(f"GEMINI_LAUNCHER_PID={given[:_DIGITS]!r}: must be the number of a process; unset it, `gemini run` sets it")
        return int(given)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _boot_time() -> float:
    return float(next(line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")))


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
