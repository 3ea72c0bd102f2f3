"""The order of the indices that a sampler has drawn, by which an order that is drawn again after a failure is compared with it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

_PLAIN = {int, str}
_MOST = 4096  # digests that are kept: an epoch may have any number of indices, of which few are drawn ahead of the batches


class DrawnOrder:
    """Digests of the latest indices of one iteration, each with all that were drawn before it. ``count``: of the indices so far."""

    def __init__(self) -> None:
        self.go_on(0, 0)

    def go_on(self, count: int, digest: int | None) -> None:
        """Records that an iteration begins, or goes on with the index behind so many, whose digest this is. None: it cannot be known."""
        self.count, self._digests = count, deque([digest], maxlen=_MOST)

    def add(self, index: Any) -> None:
        """Records the next index, or the indices of the next batch."""
        before, text = self._digests[-1], _text_of(index)
        self._digests.append(None if before is None or text is None else xxh3_64_intdigest(f"{before} {text}".encode()))
        self.count += 1

    def at(self, count: int) -> int | None:
        """The digest of the first indices, so many of them. None: it is not known, or has been forgotten."""
        ahead = self.count - count
        return self._digests[-1 - ahead] if 0 <= ahead < len(self._digests) else None


def digest_of(indices: list[Any]) -> int | None:
    """The digest of the first indices of an iteration, as `DrawnOrder.at` gives it."""
    order = DrawnOrder()
    for index in indices:
        order.add(index)
    return order.at(len(indices))


def _text_of(index: Any) -> str | None:
    """A text that is the same in each process; None for an index of an unknown kind."""
    if isinstance(index, (np.ndarray, np.integer)) or (isinstance(index, torch.Tensor) and index.device.type == "cpu"):
        index = index.tolist()
    if type(index) in _PLAIN:
        return repr(index)
    if type(index) not in (list, tuple):
        return None
    kinds = set(map(type, index))
    if kinds <= _PLAIN:
        return repr(index)
    if all(issubclass(kind, np.integer) for kind in kinds):
        return repr([*map(int, index)])
    texts = [_text_of(part) for part in index]
    return None if None in texts else f"({','.join(filter(None, texts))})"
