"""What the slow tier must be able to do: put, get, list and delete objects under a prefix.

All calls block; the agent makes them in threads, several at once on one `Storage`.

A key is a path of one or more words, ``run-7/main/manifest.json``; a word has letters, digits and ``. _ -``
and does not begin with a dot; only the last one may be ``.metadata``, as torch.distributed.checkpoint calls a file.
An object is visible whole or not at all.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from gemini_ft.errors import ConfigError, StorageError

WORD = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_KEY = re.compile(rf"({WORD}/)*({WORD}|\.metadata)")


def ignore(nbytes: int) -> None:
    """Where nobody wants to know how far a transfer is."""


class Storage(Protocol):
    """A place for objects, addressed by ``url``.

    Every method raises `StorageError` when the tier cannot be used: unreachable, full, not allowed.
    """

    url: str

    def put(self, key: str, parts: Iterable[memoryview | bytes], sent: Callable[[int], None] = ignore) -> None:
        """Write the parts end to end as one durable object, in place of any that has this key.

        ``parts`` is consumed once and in order. If it raises, or the process dies, nothing becomes visible.
        ``sent`` is told, on any thread, how many bytes more are there.
        """

    def get(self, key: str) -> bytes:
        """Return a whole object; meant for small ones."""
        ...

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``offset`` on.

        Raises:
            CorruptDataError: the object ends before that.
        """

    def list(self, prefix: str = "") -> Sequence[str]:
        """Return all keys that begin with ``prefix``, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is already removed."""

    def check(self) -> None:
        """Prove that objects can be written, read and deleted here, and clear away what dead writers have left."""


def open_storage(url: str, endpoint_url: str | None = None, max_bandwidth: int | None = None) -> Storage:
    """Return the storage behind ``file:///folder`` or ``s3://bucket/prefix``; nothing is touched before it is used.

    Args:
        url: where.
        endpoint_url: of an S3-compatible store; default: boto3's own choice.
        max_bandwidth: bytes per second that uploads to S3 may take.

    Raises:
        ConfigError: the URL is none that this version can open, or boto3 is not installed.
    """
    parsed = urlsplit(url)
    if parsed.scheme == "s3" and parsed.netloc:
        try:
            from gemini_ft.storage.s3 import S3Storage
        except ModuleNotFoundError as error:
            raise ConfigError(f"storage.url={url!r} needs {error.name}; pip install 'gemini-ft[s3]'") from None
        return S3Storage(parsed.netloc, parsed.path.strip("/"), endpoint_url, max_bandwidth)
    if parsed.scheme != "file" or parsed.netloc or not parsed.path.startswith("/"):
        raise ConfigError(f"storage.url={url!r}: must be file:///folder with an absolute path, or s3://bucket/prefix")
    from gemini_ft.storage.local import LocalStorage

    return LocalStorage(unquote(parsed.path))


def check_key(key: str) -> str:
    """Return ``key``, or raise `StorageError` because it could lead out of the prefix or not be a name everywhere."""
    if not _KEY.fullmatch(key):
        raise StorageError(f"key {key!r}: must be words of letters, digits and . _ - between slashes, none beginning with a dot")
    return key


def round_trip(storage: Storage) -> None:
    """Write, read and delete one small object, for `Storage.check`."""
    key = f"gemini-check-{secrets.token_hex(8)}"
    storage.put(key, [key.encode()])
    try:
        if storage.get(key) != key.encode():
            raise StorageError(f"{storage.url}: a small object came back with other bytes; do not trust this storage")
    finally:
        storage.delete(key)
