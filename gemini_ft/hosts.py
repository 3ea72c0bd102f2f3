"""The names of this host and of this machine, and the beginnings of its processes. Standard library only."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_id() -> str:
    """Name of this host: GEMINI_HOST_ID, the node's in a SLURM job, or the hostname with the boot id (two containers may share a name)."""
    return os.environ.get("GEMINI_HOST_ID") or os.environ.get("SLURMD_NODENAME") or f"{socket.gethostname()}-{machine_id()[:8]}"


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
