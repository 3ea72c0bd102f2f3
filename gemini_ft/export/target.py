"""The target of an export, a local folder or an S3 prefix; the export appears there whole, or not at all.

It is written into a folder beside the target first. What exports that were killed have left there is found and removed.

.gemini-export-<writer>       a lock, held while the export runs; named as `gemini_ft.storage.local` has it
.gemini-export-<writer>.new   the files that are being written
.gemini-export-<writer>.old   the former target, where a file system cannot exchange two folders in one go
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.storage import local
from gemini_ft.storage.base import Storage
from gemini_ft.storage.opening import open_storage

PREFIX = ".gemini-export-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h
_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # errors of file systems that cannot exchange
_PART = 16 * 2**20  # bytes read at a time
_WAY_OUT = "choose another --to, or give --overwrite"
_log = logging.getLogger("gemini_ft")
_libc = ctypes.CDLL(None, use_errno=True)


class StagingFolder:
    """A folder to write into. ``folder``: it is empty at first."""

    def __init__(self, lock: Path, fd: int) -> None:
        self.folder, self._old = folders_of(lock)
        self._fd = fd

    def take_place(self, target: Path, own: str) -> None:
        """Lets the folder take the place of ``target``, in one go where the file system can; ``target`` may be missing.

        Args:
            target: in the same folder as this one.
            own: pattern of the names of old content that may be deleted; anything else moves over.
        """
        if not target.exists():
            self.folder.rename(target)
            return
        before = self.folder if exchange(self.folder, target) else self._change_over(target)
        for path in list(before.iterdir()):
            if not re.fullmatch(own, path.name):
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
    """A staging folder in ``where``; afterwards it is gone, and so is what killed exports have left there."""
    clear_leftovers(where)
    lock, fd = local.create(where, PREFIX)
    try:
        clear_leftovers(where, now=local.last_byte(lock))
        made = StagingFolder(lock, fd)
        made.folder.mkdir(mode)
        yield made
    finally:
        shutil.rmtree(folders_of(lock)[0], ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(fd)


def clear_leftovers(where: Path, now: float | None = None) -> None:
    """Removes leftovers of dead exports in ``where``; ``now`` as for `gemini_ft.storage.local.sweep`."""
    local.sweep(where, now, PREFIX, _written, _remove)


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
    newest = local.last_byte(lock)
    for path in folders_of(lock)[0].rglob("*"):
        with suppress(FileNotFoundError):
            newest = max(newest, local.last_byte(path))
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """The files that one format writes."""

    name: str | None = None  # the one file; None: a folder of several
    last: str = ""  # the file that names the others, and without which they are no checkpoint
    own: str = ""  # a pattern of the names in such a folder; files in folders go by their first part
    tagged: bool = False  # ``last`` holds the name of the folder that all others are in


DCP = Target(last=".metadata", own=r"\.metadata|.*\.distcp")
DEEPSPEED = Target(last="latest", own=r"latest|global_step\d+(-[0-9a-f]+)?(/.*)?", tagged=True)


@contextmanager
def staged(to: str, target: Target, overwrite: bool = False, endpoint_url: str | None = None) -> Iterator[Path]:
    """A folder to write into; its files appear in ``to`` when the block ends well.

    Args:
        to: local folder, ``file:///folder`` or ``s3://bucket/prefix``. For the latter the files lie in the temporary directory first.
            Until everything is there, what was there before stays as it was.
        overwrite: replace what exists: that file, or that folder if there is nothing else in it.

    Raises ConfigError: the target exists already. StorageError: it cannot be written.
    """
    scheme = urlsplit(to).scheme
    if scheme not in ("", "file", "s3"):
        raise ConfigError(f"--to {to}: must be a local folder, file:///folder or s3://bucket/prefix")
    if scheme == "s3":
        try:
            with stage(Path(tempfile.gettempdir()), 0o700) as place:
                storage = open_storage(to, endpoint_url)
                old = _existing(storage.list(), target, to, overwrite)
                yield place.folder
                _upload(storage, place.folder, target, old)
        except OSError as error:
            temporary = tempfile.gettempdir()
            raise StorageError(f"{temporary}: cannot write there: {error.strerror or error}; set TMPDIR to a folder with room") from error
        return
    folder = Path(unquote(urlsplit(to).path) if scheme == "file" else to).resolve()
    if target.name is None and folder.is_mount():
        raise ConfigError(f"{folder} is a mount point, which cannot be exchanged for what is written; choose a folder below it")
    try:
        with _local(folder, target, overwrite) as place:
            yield place
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write there: {error.strerror or error}; choose a folder you may write to, with room"
        ) from error


@contextmanager
def _local(folder: Path, target: Target, overwrite: bool) -> Iterator[Path]:
    name = target.name
    for parent in (folder, folder.parent):  # where one file, and where a folder would have been staged
        clear_leftovers(parent)
    _existing([path.name for path in folder.iterdir()] if folder.exists() else [], target, str(folder), overwrite)
    (folder.parent if name is None else folder).mkdir(parents=True, exist_ok=True)
    with stage(folder.parent if name is None else folder) as place:
        yield place.folder
        for path in (place.folder, *place.folder.rglob("*")):
            local.sync(path)
        if name is not None:
            (place.folder / name).replace(folder / name)
            local.sync(folder)
        else:
            place.take_place(folder, target.own)
            local.sync(folder.parent)


def _existing(found: Sequence[str], target: Target, to: str, overwrite: bool) -> Sequence[str]:
    """The files that will be replaced. Raises ConfigError: it must not be."""
    name = target.name
    old = [path for path in found if name in (None, path)]
    if old and not overwrite:
        torn = f" (without {target.last}, as an export leaves it that was killed)" if name is None and target.last not in old else ""
        raise ConfigError(f"{to}{'' if name is None else '/' + name} exists already{torn}; {_WAY_OUT}")
    if name is None and (others := [path for path in old if not re.fullmatch(target.own, path)]):
        raise ConfigError(f"{to} has {others[0]} in it ({len(others)} files that are of no export); choose an empty or a new folder")
    return old


def _upload(storage: Storage, folder: Path, target: Target, old: Sequence[str]) -> None:
    """Writes the new files beside the old ones, then replaces the file that names them, and deletes the old ones last."""
    if target.tagged:
        _make_unlike(folder, target, old)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for key in sorted(files, key=lambda path: path == target.last):
        storage.put(key, _read(folder / key))
    if target.name is None:
        for key in sorted({*old} - {*files}):
            storage.delete(key)
        if missing := sorted({*files} - {*storage.list()}):
            raise StorageError(
                f"{storage.url}: {missing[0]} is gone again; was something else exported there at the same time? Do it once more"
            )


def _make_unlike(folder: Path, target: Target, old: Sequence[str]) -> None:
    """Renames the folder of an export if the old export has one of the same name."""
    tag = (folder / target.last).read_text()
    if any(key.startswith(f"{tag}/") for key in old):
        other = f"{tag}-{secrets.token_hex(4)}"
        (folder / tag).rename(folder / other)
        (folder / target.last).write_text(other)


def _read(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while part := file.read(_PART):
            yield part
