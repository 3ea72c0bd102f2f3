"""The order of the indices that a sampler has drawn, by which an order that is drawn again after a failure is compared with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

_PLAIN = {int, str}


class DrawnOrder:
    """Digests of the indices of one iteration, each with all that were drawn before it."""

    def __init__(self) -> None:
        self._last: tuple[int, int | None] = (0, 0)  # how many indices there were, and their digest; None: it cannot be known
        self._digests: dict[int, int | None] = {}

    def begin(self) -> None:
        """Records that an iteration begins."""
        self._last, self._digests = (0, 0), {0: 0}

    def add(self, index: Any) -> None:
        """Records the next index, or the indices of the next batch."""
        count, before = self._last
        text = _text_of(index)
        self._last = count + 1, None if before is None or text is None else xxh3_64_intdigest(f"{before} {text}".encode())
        self._digests[count + 1] = self._last[1]

    def at(self, count: int) -> int | None:
        """The digest of the first indices, so many of them; those of fewer ones are forgotten. None: it is not known."""
        self._digests = {number: digest for number, digest in self._digests.items() if number >= count}
        return self._digests.get(count)


def _text_of(index: Any) -> str | None:
    """A text that is the same in each process; None for an index of an unknown kind."""
    if type(index) in _PLAIN or isinstance(index, np.integer):
        return repr(index)
    if type(index) not in (list, tuple):
        return None
    if _PLAIN.issuperset(map(type, index)):
        return repr(index)
    texts = [_text_of(part) for part in index]
    return None if None in texts else f"({','.join(filter(None, texts))})"
