"""Objects as files below one folder: a local disk, or a file system that all hosts mount.

Until a file is whole it is a temporary one, named after its writer's host, process and time, and cleared away once that writer is
certainly dead. A lock proves that a writer lives, wherever it is. A file without a lock proves its writer dead only where both
would see the same lock: on NFS with ``nolock`` and on Lustre with ``localflock`` every host has locks of its own. A file
therefore names its lock domain: the kernel (by its boot) and the mounted file system (by its device). In another domain
only age counts, by the file system's own clock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from gemini_ft.errors import CorruptDataError, ObjectGoneError, StorageError
from gemini_ft.hosts import machine_id
from gemini_ft.storage.base import UNCOUNTED, RangeReader, Steps, TransferCount, check_key, check_small, is_key, round_trip

ABANDONED = 3600.0  # seconds since the last byte after which another lock domain's file counts as its dead writer's
_NAME = re.compile(r"[A-Za-z0-9-]+\.(?P<domain>[0-9a-f]+-[0-9a-f]+)\.\d+\.\d+\.[0-9a-f]{8}")  # host, domain, process, begun, nonce
_log = logging.getLogger(__name__)
_told: set[Path] = set()  # links that this process has spoken of
_UNKNOWN = secrets.token_hex(4)
_LEASE = 60.0  # seconds; the kernel takes a lease back after 45 (``/proc/sys/fs/lease-break-time``)
_DEPTH = 16  # of folders in each other, which is more than a key has
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
    errno.ELOOP: "links are not followed below the storage folder: put the files themselves there, or give storage.url their own folder",
}


def last_byte(path: Path) -> float:
    """The time when a file was last written to, by the clock of the file system."""
    return path.lstat().st_mtime


def create(folder: Path, prefix: str = "") -> tuple[Path, int]:
    """Makes an empty file in ``folder``, its name beginning with ``prefix``, locked by this process until its descriptor is closed."""
    host = (re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host")[:64]
    while True:
        path = folder / f"{prefix}{host}.{_domain(folder)}.{os.getpid()}.{int(time.time())}.{secrets.token_hex(4)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # no locks on this file system: only age counts
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # swept in the instant before it was locked


def sweep(
    folder: Path,  # where; it may be missing. What has another kind of name, or is no plain file, is left alone
    now: float | None = None,  # by the clock of the file system; None: it is not known yet, and nothing is judged by its age
    prefix: str = "",
    written: Callable[[Path], float] = last_byte,  # tells when the writer of a file has last written something
    remove: Callable[[Path], None] = Path.unlink,
) -> None:
    """Removes leftovers of dead writers."""
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


def _domain(folder: Path) -> str:
    """The domain in which locks are the same: this boot of this kernel, on this mounted file system."""
    return f"{boot_id()}-{folder.stat().st_dev:x}"


def boot_id() -> str:
    """The kernel's boot in eight digits; where it is not known, others, so that leftovers of other processes are judged by age alone."""
    found = machine_id()[:8]
    return found if re.fullmatch("[0-9a-f]{8}", found) else _UNKNOWN


class LocalStorage:
    """A `Storage` of files below ``root``, which is created when first written to; it may be a link, but no link is followed below it.

    A file is written under `.partial`, synced to disk and then renamed, so that a torn one
    never has a key. Files and folders whose names are no keys are another program's: they are never looked at.
    """

    is_one_place = False

    def __init__(self, root: str | Path, deletes: bool = True) -> None:
        self.root, self._deletes = Path(root), deletes
        self.url = "file://" + quote(str(self.root))

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        target = self.root / check_key(key)
        folder = self.root / _PARTIAL
        with self._explain(f"cannot write {key}"):
            for place in (target.parent, folder):
                self._refuse_links(place)
            sweep(folder)  # first of all: a full disk may be full of this
            _make_folder(folder)
            partial, fd = create(folder)
            try:
                sweep(folder, now=os.fstat(fd).st_mtime)
                size = 0
                for part in parts:
                    size += _write(fd, memoryview(part).cast("B"))
                    transfer.add(len(part))
                os.fsync(fd)
                _rename(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            if (kept := target.stat().st_size) != size:
                target.unlink()
                what = f"cannot write {key}: {kept} of {size} bytes were kept without an error"
                raise StorageError(f"{self.url}: {what}; do not trust this storage")

    def get(self, key: str) -> bytes:
        with self._explain(f"cannot read {key}"), open(self._open(key), "rb") as file:
            check_small(f"{self.url}: {key}", os.fstat(file.fileno()).st_size)
            return file.read()

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        with self._explain(f"cannot read {key}"), open(self._open(key), "rb", buffering=0) as file:
            while out.nbytes and (count := os.preadv(file.fileno(), [out], offset)):
                out, offset = out[count:], offset + count
        if out.nbytes:
            raise CorruptDataError(f"{self.url}: {key} ends at byte {offset}, it should have {out.nbytes} more; use an older checkpoint")

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        return Steps(self, key, offset)

    def list(self, prefix: str = "") -> Sequence[str]:
        folder = self.root / prefix.rpartition("/")[0]
        with self._explain(f"cannot list {prefix}"):
            self._refuse_links(folder)
            files = self._files(folder, prefix.rpartition("/")[2])
            return sorted(filter(is_key, (path.relative_to(self.root).as_posix() for path in files)))

    def delete(self, key: str) -> None:
        """Implements `Storage.delete`. Folders that become empty go too."""
        path = self.root / check_key(key)
        if not self._deletes:
            return
        with self._explain(f"cannot delete {key}"):
            self._refuse_links(path.parent)
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone already
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def check(self) -> None:
        round_trip(self)

    # -- inside

    def _open(self, key: str) -> int:
        path = self.root / check_key(key)
        self._refuse_links(path.parent)
        deadline = time.monotonic() + _LEASE
        while True:
            try:
                return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would have no end
            except BlockingIOError:  # another process has a lease on the file, as file servers do, and has been told to let go
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _refuse_links(self, folder: Path) -> None:
        """Raises OSError: a folder on the way from the root to ``folder`` is a link."""
        path = self.root
        for word in folder.relative_to(self.root).parts:
            path = path / word
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{path} is a link")

    def _files(self, folder: Path, start: str = "", depth: int = _DEPTH) -> Iterator[Path]:
        """All files in and below ``folder`` whose names may be parts of a key, ``folder``'s own begin with ``start``.

        Folders may vanish meanwhile; those more than ``depth`` levels below ``folder`` are not looked into.
        """
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            path = folder / entry.name
            if not is_key(entry.name) or not entry.name.startswith(start):
                continue
            if entry.is_symlink():
                if path not in _told:
                    _log.warning("%s: %s is a link, which is not followed; %s", self.url, path, _WAY_OUT[errno.ELOOP])
                _told.add(path)
            elif entry.is_dir():
                yield from self._files(path, depth=depth - 1) if depth else ()
            elif entry.is_file():
                yield path

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Turns an OSError into a StorageError that says where, why, and what to do about it."""
        try:
            yield
        except OSError as error:
            way_out = _WAY_OUT.get(error.errno or 0, "is the file system mounted and healthy?")
            kind = ObjectGoneError if isinstance(error, FileNotFoundError | NotADirectoryError) else StorageError
            raise kind(f"{self.url}: {what}: {error.strerror or error}{self._free(error)}; {way_out}") from error

    def _free(self, error: OSError) -> str:
        if error.errno != errno.ENOSPC:
            return ""
        with suppress(OSError):
            return f" ({shutil.disk_usage(self.root).free / 1e6:.1f} MB free)"
        return ""


def _write(fd: int, part: memoryview) -> int:
    """Writes all of the bytes; returns their number."""
    size = part.nbytes
    while part.nbytes:
        part = part[os.write(fd, part) :]
    return size


def _rename(partial: Path, target: Path) -> None:
    """Gives the file its name, durably. A `delete` elsewhere may remove the folder at any time while it is empty."""
    while True:
        try:
            _make_folder(target.parent)
            partial.rename(target)
            break
        except FileNotFoundError:
            if not partial.exists():
                raise
    sync(target.parent)


def _make_folder(folder: Path) -> None:
    """``mkdir -p``, synced to disk level by level. The folder may be gone again, if others delete what is empty."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        with suppress(FileNotFoundError):  # one look tells both: gone again, or something else in its place
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise
    sync(folder.parent)


def sync(path: Path) -> None:
    """Syncs a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
