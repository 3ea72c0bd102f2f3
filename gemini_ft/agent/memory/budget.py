"""The budget of an agent: the bytes of slots that this host may hold, and what the host or its control group leaves."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

from gemini_ft.errors import MemoryBudgetError

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes this process could still take: the host's, or what its cgroup leaves."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    """The bytes that each cgroup around this process still allows; a limit anywhere above counts as well."""
    found = []
    for folder, limit_name, used_name in cgroup_folders():
        for place in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # "max", or no limit at this level
                limit, used = int((place / limit_name).read_text()), int((place / used_name).read_text())
                found.append(max(0, limit - used))
            if place == CGROUPS:
                break
    return found


def cgroup_folders() -> list[tuple[Path, str, str]]:
    """The control groups that this process is in, each with the names of the files of its limit and of what it uses."""
    names = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    folders = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, files in names.items():
            if controller in controllers.split(","):
                folders.append((CGROUPS / controller / path.lstrip("/"), *files))
    return folders


class Budget:
    """The bytes of slots that this host may hold. One owner: the agent, whose threads take and give back."""

    _PART = 0.6  # of the available memory, where the user has stated no limit

    def __init__(self, limit: int | None) -> None:
        self.limit = limit if limit is not None else int(self._PART * available_memory())
        self.stated = limit is not None
        self.used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, what: str) -> None:
        """Counts ``nbytes`` as used. Raises MemoryBudgetError: they do not fit; the text has the numbers and the way out."""
        with self._lock:
            if self.used + nbytes > self.limit:
                source = "memory_limit" if self.stated else "60 % of the memory available when the agent started"
                raise MemoryBudgetError(
                    f"{what} needs {nbytes:,} bytes; this host's agent may hold {self.limit:,} ({source}) and holds {self.used:,}. "
                    "Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas, or use more hosts."
                )
            if nbytes > (available := available_memory()):
                raise MemoryBudgetError(
                    f"{what} needs {nbytes:,} bytes; only {available:,} are available on this host. Lower replicas, or use more hosts."
                )
            self.used += nbytes

    def take_over(self, nbytes: int) -> None:
        """Counts memory that a former agent took: it was not available when this one started, and would be without it."""
        with self._lock:
            self.used += nbytes
            if not self.stated:
                self.limit += int(self._PART * nbytes)

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes
