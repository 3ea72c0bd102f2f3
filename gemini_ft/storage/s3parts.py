"""The pieces in which a shard goes to S3: cut, counted, checked, and held back where a limit or a lack of room says so."""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PART_BYTES = 16 * 2**20  # S3 wants at least 5 MiB, and at most 10,000 parts: 160 GB per shard
Piece = bytes | bytearray


class Whole:
    """Size and CRC-32 of all pieces that pass."""

    def __init__(self) -> None:
        self.nbytes, self._crc = 0, 0

    def watch(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.nbytes += len(piece)
            self._crc = zlib.crc32(piece, self._crc)
            yield piece

    @property
    def checksum(self) -> str:
        return encoded(self._crc)


class RateLimit:
    """A limit of bytes per second that lets callers through, all threads together."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + nbytes / self._limit
        time.sleep(wait)


def encoded(crc: int) -> str:
    """CRC-32 as S3 writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def checksum_of_all(head: Mapping[str, Any]) -> str | None:
    """The CRC-32 of the whole object, where the store keeps one."""
    checksum = head.get("ChecksumCRC32")
    return None if head.get("ChecksumType") == "COMPOSITE" or "-" in (checksum or "") else checksum


def regroup(parts: Iterable[memoryview | bytes]) -> Iterator[bytearray]:
    """The same bytes in pieces of `PART_BYTES`, the last one shorter; each byte is copied once."""
    buffer = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            take = min(view.nbytes, PART_BYTES - len(buffer))
            buffer += view[:take]
            view = view[take:]
            if len(buffer) == PART_BYTES:
                yield buffer
                buffer = bytearray()
    if buffer:
        yield buffer


def when_there_is_room(room: threading.Semaphore, bodies: Iterator[Piece]) -> Iterator[Piece]:
    """Asks for the next piece only when there is room for it."""
    while True:
        room.acquire()
        body = next(bodies, None)
        if body is None:
            return
        yield body
