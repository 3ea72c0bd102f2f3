"""The pieces in which a shard goes to S3: cut, counted, checked, and held back where a limit or a lack of room says so."""

from __future__ import annotations

import base64
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

PART_BYTES = 16 * 2**20  # S3 wants at least 5 MiB, and at most 10,000 parts: 160 GB per shard
_BLOCK = 256 * 1024  # bytes that are hashed, or given to a connection, at a time
_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power of x first


class PartBody:
    """Memory that is uploaded, as the file that botocore takes for a body: its bytes are read where they lie, and never copied."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._blocks = [view[at : at + _BLOCK] for view in views for at in range(0, view.nbytes, _BLOCK)]
        self._next = 0
        self.nbytes = sum(view.nbytes for view in views)

    def __len__(self) -> int:
        return self.nbytes

    def read(self, _size: int = -1) -> memoryview | bytes:
        """The next block, whatever size is asked for: urllib3 asks for 16 KiB, for which a system call takes longer than the bytes."""
        block = self._blocks[self._next] if self._next < len(self._blocks) else b""
        self._next += 1
        return block

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        """Begins again, before another attempt; botocore wants nothing else."""
        if (offset, whence) != (0, os.SEEK_SET):
            raise ValueError(f"seek({offset}, {whence}): a piece can only be read from its beginning")
        self._next = 0

    def tell(self) -> int:
        """The place from which botocore reads: the beginning."""
        return 0

    def crc32(self) -> int:
        crc = 0
        for block in self._blocks:
            crc = zlib.crc32(block, crc)
        return crc


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces that lie one after the other, from the CRC-32 and the bytes of each: they are not read again."""
    whole = 0
    for crc, nbytes in pieces:
        whole = _times(_power(8 * nbytes), whole) ^ crc
    return whole


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power(exponent: int) -> int:
    """x to the power of ``exponent``, modulo CRC-32's polynomial."""
    square, product = 1 << 30, 1 << 31  # x, and 1
    while exponent:
        if exponent & 1:
            product = _times(square, product)
        square, exponent = _times(square, square), exponent >> 1
    return product


class RateLimit:
    """A limit of bytes per second that lets callers through, all threads together; None: there is none. It may be changed at any time."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        if (limit := self.limit) is None:
            return
        with self._lock:
            now = time.monotonic()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + nbytes / limit
        time.sleep(wait)


def encoded(crc: int) -> str:
    """CRC-32 as S3 writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def checksum_of_all(head: Mapping[str, Any]) -> str | None:
    """The CRC-32 of the whole object, where the store keeps one."""
    checksum = head.get("ChecksumCRC32")
    return None if head.get("ChecksumType") == "COMPOSITE" or "-" in (checksum or "") else checksum


def regroup(parts: Iterable[memoryview | bytes]) -> Iterator[PartBody]:
    """The same bytes in pieces of `PART_BYTES`, the last one shorter."""
    views, room = list[memoryview](), PART_BYTES
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            views.append(view[:room])
            view, room = view[room:], room - views[-1].nbytes
            if not room:
                yield PartBody(views)
                views, room = [], PART_BYTES
    if views:
        yield PartBody(views)
