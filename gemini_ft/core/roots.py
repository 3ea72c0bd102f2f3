"""The identity of a shard's copy: one root over what it is, where its tensors lie, and every byte.

    owner, at the copy:     forms the root of the bytes it has laid down
    holders, on arrival:    check every chunk against its checksum, then report the root of their bytes with the version
    leader:                 commits only equal roots, and sends them with the commit
    reader of a copy:       forms the root of the bytes it was given before it uses any of them

A copy whose root is another one is damaged, whatever its checksums say of it. Every checksum in memory and between hosts comes from
here, so that a keyed one takes this module alone. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgpack
import xxhash

from gemini_ft.core.versions import Version

_ROOT_BYTES = 16


def checksum(data: bytes | bytearray | memoryview) -> int:
    """64 bits of XXH3 over one chunk; releases the interpreter lock where the chunk is large."""
    return xxhash.xxh3_64_intdigest(data)


def running_checksum() -> xxhash.xxh3_64:
    """The same, of bytes that come piece by piece: its ``intdigest`` is the `checksum` of all that its ``update`` was given."""
    return xxhash.xxh3_64()


def layout_digest(layout: bytes) -> bytes:
    """The part of the root that stays the same from step to step; made once per layout, because layouts can be large."""
    return blake2b(layout, digest_size=_ROOT_BYTES, person=b"gemini layout").digest()


def shard_root(owner: int, version: Version, layout: bytes, sizes: tuple[int, int, int], checksums: Sequence[int]) -> str:
    """The root of one copy, in 32 hex digits.

    Args:
        layout: the `layout_digest` of what lies where in it.
        sizes: bytes of tensors, of extras, and of a chunk at most: they say where chunks begin.
        checksums: of all chunks, the tensors' first.
    """
    said = msgpack.packb((owner, version, layout, sizes))
    root = blake2b(said, digest_size=_ROOT_BYTES, person=b"gemini root")
    root.update(struct.pack(f"<{len(checksums)}Q", *checksums))
    return root.hexdigest()
