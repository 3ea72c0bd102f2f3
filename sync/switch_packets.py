"""Packets between workers and a switch: many at once, as arrays, and the datagrams that carry them.

A datagram is a header of 36 bytes and, unless it only says its ``side``, the values of one packet. Numbers are little-endian:

    kind u8 | rank u8 | part u16 | slot u32 | round u32 | tag 16 bytes | side i64 | values

The tag is AES-GMAC (NIST SP 800-38D) under the key of one job, with the first twelve bytes as the nonce. They are never the same
for two contents: within a job a rank gives a round of a slot once, and what is sent again is the same. Every job has a key of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

GIVEN, SUMMED = 1, 2  # kinds: of a worker, of the switch
SWITCH = 255  # the rank in what the switch sends
MOST_RANKS = 64  # bits of a slot's bitmap
HEADER = np.dtype([("kind", "u1"), ("rank", "u1"), ("part", "<u2"), ("slot", "<u4"), ("round", "<u4"), ("tag", "u1", 16), ("side", "<i8")])
_NONE: Array = np.zeros(0, np.int64)
_NONCE, _TAGGED = 12, 28  # where the nonce ends, and where begins what follows the tag


@dataclass(frozen=True, kw_only=True)
class Packets:
    """Packets of one sender.

    Attributes:
        slots: int64 [k].
        rounds: int64 [k], how often the slot was used before in this job.
        sides: int64 [k], the word beside the values: an exponent, or the next block.
        values: uint8 [k, bytes], or None where only the sides are said.
    """

    slots: Array
    rounds: Array
    sides: Array
    values: Array | None

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, chosen: Array) -> Packets:
        """Selects the packets at the given places, or where a mask is set."""
        values = self.values[chosen] if self.values is not None else None
        return Packets(slots=self.slots[chosen], rounds=self.rounds[chosen], sides=self.sides[chosen], values=values)

    def apart(self) -> Iterator[Packets]:
        """The same in portions in which no slot occurs twice."""
        rest = self
        while not (rest.slots[1:] > rest.slots[:-1]).all():  # ascending is how they come, unless they were lost or reordered
            first = np.unique(rest.slots, return_index=True)[1]
            yield rest.pick(first)
            rest = rest.pick(np.setdiff1d(np.arange(len(rest)), first))
        if len(rest):
            yield rest

    @staticmethod
    def join(parts: Sequence[Packets]) -> list[Packets]:
        """The same packets in as few portions as possible: those with values, and those without."""
        kinds = ([part for part in parts if part.values is not None], [part for part in parts if part.values is None])
        return [_concatenate(kind) if len(kind) > 1 else kind[0] for kind in kinds if kind]


def _concatenate(parts: Sequence[Packets]) -> Packets:
    slots, rounds, sides = (np.concatenate([getattr(part, name) for part in parts]) for name in ("slots", "rounds", "sides"))
    values = [part.values for part in parts if part.values is not None]
    return Packets(slots=slots, rounds=rounds, sides=sides, values=np.concatenate(values) if values else None)


def span(places: Array) -> Array | slice:
    """The same places as a slice if they follow each other, since numpy copies nothing then."""
    count = len(places)
    if count and places[-1] - places[0] == count - 1 and (places[1:] - places[:-1] == 1).all():
        return slice(int(places[0]), int(places[0]) + count)
    return places


def encode(packets: Packets, kind: int, rank: int, part: int, key: AESGCM) -> Array:
    """Sealed datagrams, uint8 [k, length]."""
    width = 0 if packets.values is None else packets.values.shape[1]
    datagrams = np.empty((len(packets), HEADER.itemsize + width), np.uint8)
    header = datagrams[:, : HEADER.itemsize].view(HEADER)[:, 0]
    header["kind"], header["rank"], header["part"] = kind, rank, part
    header["slot"], header["round"], header["side"] = packets.slots, packets.rounds, packets.sides
    if packets.values is not None:
        datagrams[:, HEADER.itemsize :] = packets.values
    lines, length, seal = datagrams.reshape(-1).data, datagrams.shape[1], key.encrypt
    for at in range(0, len(lines), length):
        lines[at + _NONCE : at + _TAGGED] = seal(lines[at : at + _NONCE], b"", lines[at + _TAGGED : at + length])
    return datagrams


def decode(datagrams: Array, kind: int, rank: int, part: int, key: AESGCM) -> tuple[Packets, int]:
    """The packets in datagrams of equal length that are from this sender and sealed by it, and how many are not."""
    length, unseal = datagrams.shape[1], key.decrypt
    if length < HEADER.itemsize:
        return Packets(slots=_NONE, rounds=_NONE, sides=_NONE, values=None), len(datagrams)
    header = datagrams[:, : HEADER.itemsize].view(HEADER)[:, 0]
    good = (header["kind"] == kind) & (header["rank"] == rank) & (header["part"] == part)
    lines = np.ascontiguousarray(datagrams).reshape(-1).data
    for number in np.flatnonzero(good).tolist():
        at = number * length
        try:
            unseal(lines[at : at + _NONCE], lines[at + _NONCE : at + _TAGGED], lines[at + _TAGGED : at + length])
        except InvalidTag:
            good[number] = False
    if not good.all():
        datagrams, header = datagrams[good], header[good]
    values = datagrams[:, HEADER.itemsize :] if length > HEADER.itemsize else None
    packets = Packets(
        slots=header["slot"].astype(np.int64), rounds=header["round"].astype(np.int64), sides=header["side"].astype(np.int64), values=values
    )
    return packets, len(good) - len(packets)
