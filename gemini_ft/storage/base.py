"""The operations of the slow tier: put, get, list and delete objects under a prefix.

All calls block; the agent makes them in threads, several at once on one `Storage`.

A key is a path of one or more words, ``run-7/main/manifest.json``; a word has letters, digits and ``. _ -``
and does not begin with a dot; only the last one may be ``.metadata``, as torch.distributed.checkpoint calls a file.
An object is visible whole or not at all.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from gemini_ft.errors import ConfigError, CorruptDataError, ObjectGoneError, StorageError

_LOOKS, _LOOK_PAUSE = 4, 1.0  # how often another host's object is looked for, and seconds in between
WORD = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_KEY = re.compile(rf"({WORD}/)*({WORD}|\.metadata)")


SMALL = 256 * 2**20  # bytes; no object that is read in one piece, a manifest or a mark, comes near


def check_small(where: str, nbytes: int) -> None:
    """Checks that an object may be read in one piece: else any writer to the storage could take all memory.

    Raises CorruptDataError: it is larger than any that this package writes.
    """
    if nbytes > SMALL:
        raise CorruptDataError(f"{where} has {nbytes:,} bytes, more than the {SMALL:,} that are read in one piece; it is not of gemini-ft")


class Steps:
    """A `RangeReader` each of whose readings is a request of its own."""

    def __init__(self, storage: Storage, key: str, offset: int) -> None:
        self._storage, self._key, self._offset = storage, key, offset

    def read(self, out: memoryview) -> None:
        self._storage.get_range(self._key, self._offset, out)
        self._offset += out.nbytes

    def close(self) -> None:
        """Implements `RangeReader.close`."""


class TransferCount(Protocol):
    """A count of the bytes of one transfer."""

    def add(self, nbytes: int) -> None:
        """Counts bytes that are there now; called on any thread."""


class _Uncounted:
    def add(self, nbytes: int) -> None:
        """Does nothing: nobody asks."""


UNCOUNTED: TransferCount = _Uncounted()


class RangeReader(Protocol):
    """Bytes of an object that come one after the other, and are read as they are wanted, perhaps long after it was opened."""

    def read(self, out: memoryview) -> None:
        """Fills ``out`` with the next bytes. Raises as `Storage.get_range`."""

    def close(self) -> None:
        """Ends the reading; what was not read is not wanted."""


class Storage(Protocol):
    """A place for objects, addressed by ``url``.

    Every method raises `StorageError` when the tier cannot be used: unreachable, full, not allowed.
    """

    url: str
    is_one_place: (
        bool  # whether every host finds the same under this URL, as with a bucket; a folder is another one where a mount is missing
    )

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        """Writes the parts end to end as one durable object, in place of any that has this key.

        ``parts`` is consumed once and in order. If it raises, or the process dies, nothing becomes visible.
        ``transfer`` counts the bytes that are there.
        """

    def get(self, key: str) -> bytes:
        """Returns a whole object; meant for small ones."""
        ...

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """Fills ``out`` with the object's bytes from ``offset`` on. Raises CorruptDataError: the object ends before that."""

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        """Opens ``nbytes`` of the object's bytes from ``offset`` on, to be read in one request where requests take time."""
        ...

    def list(self, prefix: str = "") -> Sequence[str]:
        """Returns all keys that begin with ``prefix``, sorted. Objects whose names are no keys are left out.

        Raises StorageError: the storage cannot be listed, which is never taken for an empty listing.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes an object; one that does not exist is already removed."""

    def check(self) -> None:
        """Proves that objects can be written, read and deleted here, and clears away leftovers of dead writers."""


def is_key(name: str) -> bool:
    """Whether an object of this name can be one of ours; listings leave out those that cannot."""
    return _KEY.fullmatch(name) is not None


def exists(storage: Storage, key: str) -> bool:
    """Whether there is an object; it is read, as a listing may leave it out. Raises `StorageError` where the storage failed."""
    try:
        storage.get(key)
    except ObjectGoneError:
        return False
    return True


def check_key(key: str) -> str:
    """Returns ``key``, or raises `StorageError` because it could lead out of the prefix or not be a name everywhere."""
    if not is_key(key):
        raise StorageError(f"key {key!r}: must be words of letters, digits and . _ - between slashes, none beginning with a dot")
    return key


def round_trip(storage: Storage) -> None:
    """Writes, reads and deletes one small object, for `Storage.check`."""
    key = f"gemini-check-{secrets.token_hex(8)}"
    storage.put(key, [key.encode()])
    try:
        if storage.get(key) != key.encode():
            raise StorageError(f"{storage.url}: a small object came back with other bytes; do not trust this storage")
    finally:
        storage.delete(key)


def find_sign(storage: Storage, key: str, writer: str, reader: str) -> None:
    """Makes sure that host ``reader`` sees the object ``key`` that host ``writer`` has just written.

    Raises ConfigError: it does not: the two hosts have different places under one name. StorageError: the storage failed.
    """
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(_LOOK_PAUSE)  # NFS may remember for a moment that an object was missing
        with suppress(ObjectGoneError):
            if storage.get(key) == key.encode():
                return
    raise ConfigError(
        f"storage.url={storage.url!r}: host {reader} does not see what host {writer} has just written there: it is not shared. "
        "Mount one file system at this path on all hosts (is a mount missing?), or use s3://bucket/prefix"
    )
