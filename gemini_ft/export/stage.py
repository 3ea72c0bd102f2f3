"""A folder beside the target to write an export into; leftovers of killed exports are found and removed.

.gemini-export-<writer>       a lock, held while the export runs; named as `gemini_ft.storage.partials` has it
.gemini-export-<writer>.new   the files that are being written
.gemini-export-<writer>.old   the former target, where a file system cannot exchange two folders in one go
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini_ft.storage import partials

PREFIX = ".gemini-export-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h
_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # errors of file systems that cannot exchange
_log = logging.getLogger("gemini_ft")
_libc = ctypes.CDLL(None, use_errno=True)


class StagingFolder:
    """A folder to write into.

    Attributes:
        folder: it is empty at first.
    """

    def __init__(self, lock: Path, fd: int) -> None:
        self.folder, self._old = folders_of(lock)
        self._fd = fd

    def take_place(self, target: Path, own: Callable[[str], bool]) -> None:
        """Lets the folder take the place of ``target``, in one go where the file system can; ``target`` may be missing.

        Args:
            target: in the same folder as this one.
            own: tells by its name what of the old content may be deleted; anything else moves over.
        """
        if not target.exists():
            self.folder.rename(target)
            return
        before = self.folder if exchange(self.folder, target) else self._change_over(target)
        for path in list(before.iterdir()):
            if not own(path.name):
                path.rename(target / path.name)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        before.rmdir()

    def _change_over(self, target: Path) -> Path:
        """Takes the place of the target in two steps; returns where the old content is now."""
        os.write(self._fd, os.fsencode(target.name))  # a process that finds the old one without a new one puts it back
        os.fsync(self._fd)
        target.rename(self._old)
        try:
            self.folder.rename(target)
        except OSError:
            self._old.rename(target)
            raise
        return self._old


@contextmanager
def stage(where: Path, mode: int = 0o777) -> Iterator[StagingFolder]:
    """A stage in ``where``; afterwards it is gone, and so is what killed exports have left there."""
    clear_leftovers(where)
    lock, fd = partials.create(where, PREFIX)
    try:
        clear_leftovers(where, now=partials.last_byte(lock))
        made = StagingFolder(lock, fd)
        made.folder.mkdir(mode)
        yield made
    finally:
        shutil.rmtree(folders_of(lock)[0], ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(fd)


def clear_leftovers(where: Path, now: float | None = None) -> None:
    """Removes leftovers of dead exports in ``where``; ``now`` as for `gemini_ft.storage.partials.sweep`."""
    partials.sweep(where, now, PREFIX, _written, _remove)


def _remove(lock: Path) -> None:
    if lock.parent.stat().st_mode & stat.S_ISVTX and lock.lstat().st_uid != os.geteuid():
        return  # as in /tmp: another user may have made it up
    new, old = folders_of(lock)
    name = os.fsdecode(lock.read_bytes())
    if old.exists() and name == Path(name).name and not (lock.parent / name).exists():
        old.rename(lock.parent / name)
    for folder in (new, old):
        if folder.exists():
            _log.info("removing %s, which an export that was killed has left", folder)
            shutil.rmtree(folder)
    lock.unlink()


def _written(lock: Path) -> float:
    """The time at which an export last wrote something."""
    newest = partials.last_byte(lock)
    for path in folders_of(lock)[0].rglob("*"):
        with suppress(FileNotFoundError):
            newest = max(newest, partials.last_byte(path))
    return newest


def folders_of(lock: Path) -> tuple[Path, Path]:
    return lock.with_name(f"{lock.name}.new"), lock.with_name(f"{lock.name}.old")


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one go; False: this file system or this kernel cannot."""
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(other))
