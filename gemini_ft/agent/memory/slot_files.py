"""Slots as files in a folder of memory, for places where everything that runs is killed at once and the folder stays.

A memfd is gone with the last process that holds it: the agent, and the workers beside it. Where a container runtime or a scheduler ends all
of them, a file on a tmpfs that outlives them (/dev/shm, or a volume of the pod) does not go, and the next agent of this run on this
host takes it up as it would take up what a hung agent leaves. Files have no seals: whoever runs as the same user could truncate one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path

from gemini_ft.errors import ConfigError
from gemini_ft.wire.private import check_way, own_folder

SLOT, IDENTITY = "/gemini-slot-", "/gemini-identity"  # in the names of files, by which a process's mappings are known
KNOWLEDGE = 2**20  # bytes for an agent's own knowledge
_TMPFS = 0x01021994  # TMPFS_MAGIC

_libc = ctypes.CDLL(None, use_errno=True)


class SlotFiles:
    """The files of one run on one host, in a folder of their own; of mode 0600 in folders of mode 0700.

    ``root``: the folder that the user has named, on a tmpfs.

    Raises ConfigError: the folder is no memory, or not this user's alone, or another user could put an old one in its place.
    """

    def __init__(self, root: Path, run: str, host: str) -> None:
        self.root, self.folder = root, folder_of(root, run, host)
        if (kind := _file_system(next(place for place in [root, *root.absolute().parents] if place.exists()))) != _TMPFS:
            raise ConfigError(
                f"memory.folder={str(root)!r} is on a file system of type {kind:#x} and not on a tmpfs, which writes. "
                "Name a folder under /dev/shm, or on a volume whose medium is memory"
            )
        try:
            with contextlib.suppress(FileNotFoundError):  # an agent that leaves has removed it between two steps; `claim` makes it again
                self._make_folder()
                os.close(self.identity())
        except OSError as error:
            way_out = "make room there" if error.errno == errno.ENOSPC else "name one on a tmpfs that this user may write to"
            raise ConfigError(f"memory.folder={str(root)!r}: {error.strerror}; {way_out}") from None

    def _make_folder(self) -> None:
        check_way(self.root)
        own_folder(self.folder.parent)
        own_folder(self.folder)

    def make(self, nbytes: int) -> int:
        """The descriptor of a new file whose memory is reserved: a full tmpfs is an error now, and no SIGBUS later. Raises OSError."""
        path = f"{self.folder}{SLOT}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    def identity(self) -> int:
        """The descriptor of the file with an agent's own knowledge, which is new where no agent has been before; it has room for that.

        Raises ConfigError: others could have prepared it. OSError: the folder is full.
        """
        path = f"{self.folder}{IDENTITY}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not _is_own(fd):
            os.close(fd)
            raise ConfigError(f"{path} is not a plain file of mode 0600 and uid {os.getuid()}; remove it")
        try:
            os.posix_fallocate(fd, 0, KNOWLEDGE)
        except OSError:
            os.close(fd)
            raise
        return fd

    def claim(self) -> int | None:
        """The same descriptor, locked until its process ends; None: another agent is at work here, or still removes what it had.

        Abstract sockets are known in their own network namespace only, and an agent that leaves closes its own before it clears the folder:
        without the lock two agents could write to the same slots, or the one that leaves remove those of its successor.

        Raises ConfigError: others could have prepared it.
        """
        with contextlib.suppress(FileNotFoundError):  # the folder is being removed
            self._make_folder()
            fd = self.identity()
            if lock(fd) and os.fstat(fd).st_nlink:
                return fd
            os.close(fd)
        return None

    def left(self) -> list[int]:
        """Descriptors of the slots that an agent before this one has left; files that others could have prepared are left alone."""
        found = []
        for path in sorted(self.folder.glob(f"{SLOT[1:]}*")):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                if _is_own(fd):
                    found.append(fd)
                else:
                    os.close(fd)
        return found

    def clear(self) -> None:
        """Gives all of it back: the run is over."""
        remove(self.folder)


def lock(fd: int) -> bool:
    """Locks the file of an agent's own knowledge, for as long as it is open here; False: another agent has done so."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def in_use(folder: Path) -> bool:
    """Whether an agent is at work in a run's folder, here or where it cannot be reached from here."""
    try:
        fd = os.open(f"{folder}{IDENTITY}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not lock(fd)
    finally:
        os.close(fd)


def folder_of(root: Path, run: str, host: str) -> Path:
    digest = hashlib.sha256(f"{run}\0{host}".encode()).hexdigest()[:24]
    return root / f"gemini-ft-{os.getuid()}" / digest


def remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in [*folder.glob(f"{SLOT[1:]}*"), *folder.glob(IDENTITY[1:])]:
            path.unlink(missing_ok=True)
        folder.rmdir()


def forget(fd: int) -> None:
    """Removes the name of a slot's file; a memfd has none. Its memory goes with the last process that maps it."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if SLOT in path and os.stat(path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
            os.unlink(path)


def is_safe(fd: int, nbytes: int) -> bool:
    """Whether a descriptor that was handed over is a slot's file of this user, and holds all of it."""
    return _is_own(fd) and SLOT in os.readlink(f"/proc/self/fd/{fd}") and os.fstat(fd).st_size >= nbytes


def _is_own(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077 and found.st_nlink <= 1


def _file_system(path: Path) -> int:
    """The kernel's number for the type of a file system."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return ctypes.c_ulong.from_buffer(buffer).value
