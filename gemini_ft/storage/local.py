"""Objects as files below one folder: a local disk, or a file system that all hosts mount."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from gemini_ft.errors import CorruptDataError, ObjectGoneError, StorageError
from gemini_ft.storage.base import check_key, ignore, round_trip

_PARTIAL = ".partial"  # no key begins with a dot
_WAY_OUT = {
    errno.ENOSPC: "free some space or lower storage.keep_last",
    errno.EDQUOT: "raise the quota or lower storage.keep_last",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EROFS: "mount it writable",
    errno.ENOTDIR: "choose a path that is a folder all the way",
    errno.ENOENT: "the object is gone; was it deleted while in use?",
}


class LocalStorage:
    """Files below ``root``, which is created when first written to.

    A file is written under `.partial`, synced to disk and then renamed, so that a torn one never has a key. Its
    writer holds a lock on it: a file there that nobody has locked was left by a dead writer, on whatever host.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.url = "file://" + quote(str(self.root))

    def put(self, key: str, parts: Iterable[memoryview | bytes], sent: Callable[[int], None] = ignore) -> None:
        """See `Storage.put`."""
        target = self.root / check_key(key)
        with self._explain(f"cannot write {key}"):
            self._sweep()
            partial, fd = self._create_partial()
            try:
                for part in parts:
                    _write(fd, memoryview(part).cast("B"))
                    sent(len(part))
                os.fsync(fd)
                _rename(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        with self._explain(f"cannot read {key}"):
            return (self.root / check_key(key)).read_bytes()

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """See `Storage.get_range`."""
        with self._explain(f"cannot read {key}"):
            fd = os.open(self.root / check_key(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                while out.nbytes and (count := os.preadv(fd, [out], offset)):
                    out, offset = out[count:], offset + count
            finally:
                os.close(fd)
        if out.nbytes:
            raise CorruptDataError(f"{self.url}: {key} ends at byte {offset}, it should have {out.nbytes} more; use an older checkpoint")

    def list(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.list`."""
        folder = prefix.rpartition("/")[0]
        with self._explain(f"cannot list {prefix}"):
            keys = (path.relative_to(self.root).as_posix() for path in _files(self.root / folder))
            return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """See `Storage.delete`. Folders that become empty go too."""
        path = self.root / check_key(key)
        with self._explain(f"cannot delete {key}"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone already
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def check(self) -> None:
        """See `Storage.check`."""
        round_trip(self)

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Turn an OSError into a StorageError that says where, why, and what to do about it."""
        try:
            yield
        except OSError as error:
            way_out = _WAY_OUT.get(error.errno or 0, "is the file system mounted and healthy?")
            kind = ObjectGoneError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self.url}: {what}: {error.strerror or error}{self._free(error)}; {way_out}") from error

    def _free(self, error: OSError) -> str:
        if error.errno != errno.ENOSPC:
            return ""
        with suppress(OSError):
            return f" ({shutil.disk_usage(self.root).free / 1e6:.1f} MB free)"
        return ""

    def _create_partial(self) -> tuple[Path, int]:
        """An empty file in `.partial`, locked by this process until its descriptor is closed."""
        folder = self.root / _PARTIAL
        _make_folder(folder)
        while True:
            path = folder / secrets.token_hex(8)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with suppress(OSError):  # no locks on this file system; _sweep finds out likewise and removes nothing
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)  # swept in the instant before it was locked

    def _sweep(self) -> None:
        """Remove what dead writers have left in `.partial`."""
        for path in _files(self.root / _PARTIAL):
            with suppress(OSError):  # locked: its writer lives; or swept by another process
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)


def _files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` whose path from there has no part that begins with a dot; folders may vanish meanwhile."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(folder / entry.name)
        else:
            yield folder / entry.name


def _write(fd: int, part: memoryview) -> None:
    while part.nbytes:
        part = part[os.write(fd, part) :]


def _rename(partial: Path, target: Path) -> None:
    """Give the file its name, durably. A `delete` elsewhere may at any time take the folder away while it is still empty."""
    while True:
        try:
            _make_folder(target.parent)
            partial.rename(target)
            break
        except FileNotFoundError:
            if not partial.exists():
                raise
    _sync_folder(target.parent)


def _make_folder(folder: Path) -> None:
    """``mkdir -p``, synced to disk level by level."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
