"""The bytes that ranks train in place of tensors, and how histories name versions."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Version

EXTRAS = b"small state"


def text(version: Version) -> str:
    """A version as histories name it."""
    return f"{version.incarnation}:{version.iteration}"


@lru_cache(maxsize=256)
def content(owner: int, version: Version, nbytes: int) -> bytes:
    """The bytes of a rank's shard after an iteration of an incarnation; no two iterations have the same."""
    seed = [owner, version.iteration, *version.incarnation.nonce.encode(), version.incarnation.number]
    return np.random.default_rng(seed).bytes(nbytes)


@lru_cache(maxsize=256)
def checksums(owner: int, version: Version, nbytes: int, chunk: int) -> list[int]:
    """The checksums of the chunks of that shard, and of the small state behind it."""
    body = content(owner, version, nbytes)
    return [*(checksum(body[start : start + chunk]) for start in range(0, nbytes, chunk)), checksum(EXTRAS)]
