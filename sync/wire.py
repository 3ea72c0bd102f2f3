"""Messages: a header, the indices in one of three formats, and the values.

A message is a uint8 tensor. Its header of five int64 words: the digest of what the sender was given and bytes of all that it
sends at once (both stamped by the exchange), bytes of this message, format, number of units. Numbers are in the machine's byte
order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from .rows import SparseRows

HEADER = 40  # bytes
ALIGNMENT = 8  # of values, and of messages within messages: a view needs that of its dtype

Format = Literal["coo", "bitmap", "dense"]
_FORMATS: tuple[Format, ...] = ("coo", "bitmap", "dense")


def new(payload: int, device: torch.device | None = None) -> torch.Tensor:
    """A message with room for ``payload`` bytes after its header; their content is undefined."""
    return _new(payload, 0, 0, device)


def wrap(payload: torch.Tensor) -> torch.Tensor:
    """A message of these bytes, uint8."""
    message = new(len(payload), payload.device)
    message[HEADER:] = payload
    return message


def _new(payload: int, number: int, count: int, device: torch.device | None) -> torch.Tensor:
    message = torch.empty(HEADER + payload, dtype=torch.uint8, device=device)
    _words(message).copy_(torch.tensor([0, 0, len(message), number, count]))
    return message


def stamp(message: torch.Tensor, digest: int, total: int) -> None:
    """Writes the sender's digest and the bytes of all that it sends."""
    _words(message)[:2] = torch.tensor([digest, total])


def read_stamp(message: torch.Tensor) -> tuple[int, int]:
    digest, total, *_ = _words(message).tolist()
    return digest, total


def length(message: torch.Tensor) -> int:
    """Bytes of the whole message, of which this may be a beginning."""
    return int(_words(message)[2])


def payload(message: torch.Tensor) -> torch.Tensor:
    """The bytes that follow the header."""
    return message[HEADER:]


def index_bytes(rows: int) -> int:
    """Bytes of one index among ``rows`` units: 4, or 8 where 31 bits cannot count them."""
    return 4 if rows <= 2**31 else 8


def encode(part: SparseRows, formats: tuple[Format, ...] = ("coo", "dense")) -> torch.Tensor:
    """The units of ``part`` in whichever of ``formats`` is smallest. A bitmap needs ascending indices."""
    chosen = min(formats, key=lambda each: _size(each, part))
    message = _new(_size(chosen, part), _FORMATS.index(chosen), len(part.indices), part.values.device)
    start = _values_at(chosen, part.rows, len(part.indices))
    if chosen == "dense":
        matrix(message[start:], part.values.dtype, part.rows, part.width).zero_().index_copy_(0, part.indices, part.values)
        return message
    at = message[HEADER : HEADER + _index_size(chosen, part.rows, len(part.indices))]
    at.copy_(pack(part.indices, part.rows) if chosen == "bitmap" else _narrow(part.indices, part.rows))
    matrix(message[start:], part.values.dtype, *part.values.shape).copy_(part.values)
    return message


def bitmap_limit(rows: int) -> int:
    """Bytes of the longest message without values that `encode` makes of ``rows`` units if it may make bitmaps."""
    return _values_at("bitmap", rows, rows)


def count(message: torch.Tensor) -> int:
    return int(_words(message)[4])


def decode(message: torch.Tensor, rows: int, width: int, dtype: torch.dtype) -> SparseRows:
    """Decodes a message; the values are a view of it. All units of a dense one are present."""
    *_, number, count = _words(message).tolist()
    chosen = _FORMATS[number]
    if chosen == "dense":
        count = rows
    values = matrix(message[_values_at(chosen, rows, count) :], dtype, count, width)
    at = message[HEADER : HEADER + _index_size(chosen, rows, count)]
    if chosen == "bitmap":
        return SparseRows(rows=rows, indices=unpack(at, rows), values=values)
    if chosen == "dense":
        return SparseRows(rows=rows, indices=torch.arange(rows, device=message.device), values=values)
    return SparseRows(rows=rows, indices=at.view(torch.int32 if index_bytes(rows) == 4 else torch.int64).long(), values=values)


def decode_like(message: torch.Tensor, gradient: SparseRows) -> SparseRows:
    """Decodes a message with units of the shape and dtype that a rank's own gradient has."""
    return decode(message, gradient.rows, gradient.width, gradient.values.dtype)


def pack(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """One bit per unit, least significant first: uint8 [ceil(rows / 8)]."""
    bits = torch.zeros(-(-rows // 8) * 8, dtype=torch.uint8, device=indices.device)
    bits[indices] = 1
    if bits.device.type == "cpu":  # four times as fast as the general way below
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack(bitmap: torch.Tensor, rows: int) -> torch.Tensor:
    """The indices of the bits that are set, ascending."""
    if bitmap.device.type == "cpu":
        bits = np.unpackbits(bitmap.numpy(), count=rows, bitorder="little")
        return torch.from_numpy(np.flatnonzero(bits.view(np.bool_)))  # of bool, numpy skips zeros by the word
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return ((bitmap.unsqueeze(1) >> shifts) & 1).flatten()[:rows].nonzero().flatten()


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as uint8 [bytes]."""
    return values.contiguous().flatten().view(torch.uint8)


def matrix(data: torch.Tensor, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Bytes as the [rows, width] values they are; shares their memory."""
    return data.view(dtype).view(rows, width)


def _words(message: torch.Tensor) -> torch.Tensor:
    return message[:HEADER].view(torch.int64)


def _narrow(indices: torch.Tensor, rows: int) -> torch.Tensor:
    return as_bytes(indices.to(torch.int32) if index_bytes(rows) == 4 else indices)


def _index_size(chosen: Format, rows: int, count: int) -> int:
    return {"coo": index_bytes(rows) * count, "bitmap": -(-rows // 8), "dense": 0}[chosen]


def _values_at(chosen: Format, rows: int, count: int) -> int:
    return -(-(HEADER + _index_size(chosen, rows, count)) // ALIGNMENT) * ALIGNMENT


def _size(chosen: Format, part: SparseRows) -> int:
    count = part.rows if chosen == "dense" else len(part.indices)
    start = _values_at(chosen, part.rows, len(part.indices))
    return start - HEADER + count * part.width * part.values.element_size()
