"""INCEPTIONN's codec (Li et al., MICRO 2018): each float32 as a word of 0, 8, 16 or 32 bits, by its magnitude, and a tag of 2 bits.

With an error bound of 2^-b a magnitude

- below 2^-b is left out (tag 0),
- from there, but below 2^-floor(b / 2), takes 8 bits (tag 1): a whole number of 2^-(floor(b / 2) + 7),
- from there, but below 1, takes 16 bits (tag 2): a whole number of 2^-15,
- from 1 on takes all 32 bits (tag 3), as infinities and NaN do.

Whole numbers are rounded towards zero, so each error is below 2^-b, and a value that was decoded is encoded again without any.

Public code, and as far as we know the paper, counts the bits of 8-bit words from 2^-1 down, although magnitudes begin at 2^-floor(b / 2)
there: the first of them are always zero, and errors come to 2^-7 whatever the bound is. Counted from the top of the range, the same 8
bits keep to the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gemini_ft.accelerator import holds

MOST = 14  # of b: with more, the 7 bits that begin at 2^-floor(b / 2) end before 2^-b
Bound = Annotated[int, Field(ge=1, le=MOST, description=f"b of the error bound 2^-b, from 1 to {MOST}")]
_WORDS = (torch.uint8, torch.int8, torch.int16, torch.float32)  # by tag; values of the first have no word
BLOCK = 2**17  # elements that fit into a core's own cache with their tags; a multiple of 4


def encode(flat: Tensor, bound: int) -> list[Tensor]:
    """The words of 32, of 16 and of 8 bits, in the order of their values, and the tags: four a byte, the first in the lowest bits.

    ``flat``: float32 (n,). ``bound``: b, from 1 to `MOST`.
    """
    tags = torch.zeros(4 * packed(flat.numel()), dtype=torch.uint8, device=flat.device)
    words: dict[int, list[Tensor]] = {3: [], 2: [], 1: []}
    for block in _blocks(flat):
        values = flat[block]
        found = _tag(values.abs(), bound, tags[block])
        for tag, parts in words.items():
            picked = values.index_select(0, _places(found, tag))
            parts.append(picked.mul_(1 / _unit(tag, bound)).to(_WORDS[tag]))
    lanes = tags.view(torch.int32)  # the tags of one byte, a byte each
    return [*map(torch.cat, words.values()), (lanes | lanes >> 6 | lanes >> 12 | lanes >> 18).to(torch.uint8)]


def decode(data: Tensor, out: Tensor, bound: int) -> Tensor:
    """Fills ``out`` with the values of an encoded tensor; returns it.

    Args:
        data: what `encode` has made, one after the other, uint8.
        out: float32 (n,), contiguous.
        bound: b, the encoder's.

    Raises ValueError: ``data`` has not as many bytes as its tags say.
    """
    count = out.numel()
    end = len(data) - packed(count)
    tags = _unpack(data[max(end, 0) :])[:count]
    at, begins = 0, {}  # of the next word of each tag that there is
    for tag in (3, 2, 1):
        if words := _count(tags, tag):
            begins[tag] = at
            at += _WORDS[tag].itemsize * words
    if at != end:
        raise ValueError(f"{len(data)} bytes of {count} truncated values, of which {end} are words: tags ask for {at}; were they cut?")
    for block in _blocks(out):
        part, found = out[block].zero_(), tags[block]
        for tag, begin in begins.items():
            places = _places(found, tag)
            begins[tag] = begin + _WORDS[tag].itemsize * len(places)
            values = data[begin : begins[tag]].view(_WORDS[tag]).float()
            part.scatter_(0, places, values.mul(_unit(tag, bound)))
    return out


def packed(count: int) -> int:
    """Bytes of the tags of ``count`` values."""
    return -(-count // 4)


def _unit(tag: int, bound: int) -> float:
    """The value of a word of one, a power of two."""
    return (0.0, 2.0 ** -(bound // 2 + 7), 2.0**-15, 1.0)[tag]


def _tag(magnitudes: Tensor, bound: int, out: Tensor) -> Tensor:
    """The tag of each magnitude, in ``out``; NaN is below no limit. On a CPU numpy compares ten times as fast as torch."""
    out.fill_(3)
    for limit in (2.0**-bound, 2.0 ** -(bound // 2), 1.0):
        below = magnitudes.lt(limit) if holds(out) else torch.from_numpy(np.less(magnitudes.numpy(), np.float32(limit)))
        out.sub_(below.view(torch.uint8))
    return out


def _places(tags: Tensor, tag: int) -> Tensor:
    """The indices of the values with a tag, ascending, int64."""
    return (tags == tag).nonzero().view(-1) if holds(tags) else torch.from_numpy(np.flatnonzero(tags.numpy() == np.uint8(tag)))


def _count(tags: Tensor, tag: int) -> int:
    """The number of values with a tag."""
    return int((tags == tag).sum()) if holds(tags) else int(np.count_nonzero(tags.numpy() == np.uint8(tag)))


def _unpack(packed: Tensor) -> Tensor:
    table = _table(packed.device)
    if holds(packed):
        return table.index_select(0, packed.int()).view(torch.uint8)
    return torch.from_numpy(np.take(table.numpy(), packed.numpy(), mode="clip").view(np.uint8))


@cache
def _table(device: torch.device) -> Tensor:
    """The four tags of each byte, a byte each, int32 (256,)."""
    return (torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, 2) & 3).to(torch.uint8).view(torch.int32).view(-1).to(device)


def _blocks(flat: Tensor) -> Iterator[slice]:
    """The parts of a tensor that are handled one after the other: on an accelerator there is one; on a CPU as many as caches ask for."""
    count = flat.numel()
    length = max(1, count) if holds(flat) else BLOCK
    return (slice(begin, min(begin + length, count)) for begin in range(0, max(1, count), length))
