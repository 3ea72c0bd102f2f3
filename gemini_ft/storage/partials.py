"""Temporary files of writers: named after host, process and time, and cleared away once their writer is certainly dead.

A lock proves that a writer lives, wherever it is. A file without a lock proves its writer dead only where both
would see the same lock: on NFS with ``nolock`` and on Lustre with ``localflock`` every host has locks of its own. A file
therefore names its lock domain: the kernel (by its boot) and the mounted file system (by its device). In another domain
only age counts, by the file system's own clock.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ABANDONED = 3600.0  # seconds since the last byte after which another lock domain's file counts as its dead writer's
_NAME = re.compile(r"[A-Za-z0-9-]+\.(?P<domain>[0-9a-f]+-[0-9a-f]+)\.\d+\.\d+\.[0-9a-f]{8}")  # host, domain, process, begun, nonce


def last_byte(path: Path) -> float:
    """The time when a file was last written to, by the clock of the file system."""
    return path.lstat().st_mtime


def create(folder: Path, prefix: str = "") -> tuple[Path, int]:
    """Makes an empty file in ``folder``, its name beginning with ``prefix``, locked by this process until its descriptor is closed."""
    while True:
        path = folder / f"{prefix}{_name(folder)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # no locks on this file system: only age counts
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # swept in the instant before it was locked


def sweep(
    folder: Path,
    now: float | None = None,
    prefix: str = "",
    written: Callable[[Path], float] = last_byte,
    remove: Callable[[Path], None] = Path.unlink,
) -> None:
    """Removes leftovers of dead writers.

    Args:
        folder: where; it may be missing. What has another kind of name, or is no plain file, is left alone.
        now: by the clock of the file system; None: it is not known yet, and nothing is judged by its age.
        prefix: with which the names begin.
        written: tells when the writer of a file has last written something.
        remove: takes a dead writer's file away.
    """
    with suppress(FileNotFoundError):
        domain = _domain(folder)
        for name in os.listdir(folder):
            if name.startswith(prefix) and (found := _NAME.fullmatch(name.removeprefix(prefix))):
                path = folder / name
                with suppress(OSError):  # removed by another process meanwhile, or not ours to touch
                    old = now is not None and written(path) < now - ABANDONED
                    if found["domain"] == domain or old:
                        _remove_if_dead(path, old, remove)


def _remove_if_dead(path: Path, old: bool, remove: Callable[[Path], None]) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        return
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its writer lives
            return
        except OSError:  # no locks on this file system
            if not old:
                return
        remove(path)
    finally:
        os.close(fd)


def _name(folder: Path) -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"
    return f"{host[:64]}.{_domain(folder)}.{os.getpid()}.{int(time.time())}.{secrets.token_hex(4)}"


def _domain(folder: Path) -> str:
    """The domain in which locks are the same: this boot of this kernel, on this mounted file system."""
    return f"{boot_id()}-{folder.stat().st_dev:x}"


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return _UNKNOWN_BOOT


_UNKNOWN_BOOT = secrets.token_hex(4)
