"""The names of this host and of this machine, and the beginnings and ends of its processes. Standard library only."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

HOSTNAME = "GEMINI_HOSTNAME"  # in the environment of all that `gemini run` starts
_BOOT = 8  # digits of the boot id in a host's name


def host_id() -> str:
    """Name of this host: GEMINI_HOST_ID, the node's in a SLURM job, or the hostname with the boot id (two containers may share a name)."""
    return given_id() or f"{_hostname()}-{machine_id()[:_BOOT]}"


def is_earlier_boot(before: str, host: str, machine: str) -> bool:
    """Whether ``before`` is the default name that ``host``, now with ``machine``'s boot id, had before a reboot: it ends with that id.

    Two hosts of a job need different hostnames; where they have not, this says nothing.
    """
    hostname, _, boot = host.rpartition("-")
    then = re.fullmatch(rf"{re.escape(hostname)}-[0-9a-f]{{{_BOOT}}}", before)
    return boot == machine[:_BOOT] and before != host and then is not None


def uptime() -> float:
    """Seconds since the kernel began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def given_id() -> str:
    """The name that the user or SLURM gives this host; empty: none."""
    return os.environ.get("GEMINI_HOST_ID") or os.environ.get("SLURMD_NODENAME") or ""


def lasting_name() -> str:
    """A name of this host that it keeps when it starts again; two hosts may share it."""
    return given_id() or _hostname()


def lasting_names(host: str) -> set[str]:
    """The names that a host with that id may have as its lasting one."""
    return {host, re.sub(rf"-[0-9a-f]{{{_BOOT}}}$", "", host)}


def _hostname() -> str:
    """The hostname as it was when `gemini run` began, as workers that are restarted would not find their agent under another one."""
    return os.environ.get(HOSTNAME) or socket.gethostname()


def machine_id() -> str:
    """The kernel's boot id: equal on two hosts exactly when they run on the same machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-machine"


def began(pid: int) -> int | None:
    """When a process began, in the kernel's clock ticks since boot; None: there is none, or it is dead and only waits to be collected."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def kill(pid: int, is_meant: Callable[[int], bool]) -> None:
    """Kills a process if ``is_meant`` recognises it, and never another one that has been given the same number."""
    with suppress(OSError):  # it has ended
        pidfd = os.pidfd_open(pid)
        try:
            if is_meant(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def own_status(field: str) -> str:
    """A field of what the kernel says of this process in /proc/self/status."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return next(value.strip() for name, _, value in lines if name == field)


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor can be read from now, or within that time; a pidfd can once its process has ended.

    ``select.select`` would refuse descriptors from 1024 on, and a training process may have that many files open.
    """
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))
