"""SwitchML (Sapio et al., NSDI 2021): whole gradients, added up as integers by a switch.

A packet's exponent e is such that all its values are below 2^e in magnitude (section 3.7, appendix C). Workers scale by
f = (2^31 - 1) / (n 2^e), with the largest exponent of all n workers, which the switch finds out one round ahead: a packet carries the
exponent for the next one of its column. So no sum overflows, every worker scales alike, and a sum is off by n / (2 f) at most, beside the
roundings of float32.
"""

from __future__ import annotations

import numpy as np
import torch

from .switch_packets import Array, span
from .switch_scheme import DenseSwitchScheme
from .switch_worker import PacketStream


class SwitchML(DenseSwitchScheme):
    """Sums integers in a switch: each rank sends a gradient once and receives it once, however many ranks there are.

    Values are scaled per packet, to 32 bits less what the number of ranks takes, so a sum is off by n / (2 f) at most
    (see above). It does not depend on the order of arrival. Packets with a NaN, an infinity or a magnitude from 2^126 on go by
    the backend's all-reduce. 16-bit values are added in 32 bits and rounded once; float64 is rounded to float32 first.
    """

    name = "switchml"

    def _adder(self, dtype: torch.dtype) -> str:
        return "int32"

    def _stream(self, packets: torch.Tensor, slots: int, world: int) -> SwitchMLStream:
        return SwitchMLStream(packets.numpy(), slots, world)


LEAST, SPECIAL = -90, 127  # exponents: less is treated as this, so that f stays finite; of packets that integers cannot carry
_MOST_INTEGER = 2**31 - 1


def exponents(packets: Array) -> Array:
    """The exponent of each packet: float32 [k, elements] to int64 [k]; SPECIAL for NaN, infinities and 2^126 or more in magnitude."""
    largest = np.maximum(packets.max(1, initial=0), -packets.min(1, initial=0))  # NaN stays
    found = (np.ascontiguousarray(largest).view(np.int32) >> 23 & 0xFF).astype(np.int64) - 126
    return np.where(found >= SPECIAL, SPECIAL, np.maximum(found, LEAST))


def factors(exponent: Array, world: int) -> Array:
    """The factors of the values, float32 [k, 1]."""
    factor: Array = _MOST_INTEGER / (world * np.exp2(exponent.astype(np.float64)))
    rounded: Array = factor.astype(np.float32)[:, None]
    return rounded


def to_integers(packets: Array, factor: Array) -> Array:
    """Scaled and rounded, halves away from zero: int32 [k, elements]."""
    scaled = packets * factor
    whole = np.trunc(scaled)
    whole += np.copysign(np.abs(scaled - whole) >= 0.5, scaled)
    integers: Array = whole.astype(np.int32)
    return integers


def to_floats(sums: Array, factor: Array, out: Array, places: Array | slice) -> None:
    """The inverse for sums, into some rows of ``out``, float32 [n, elements]."""
    found = sums.astype(np.float32)
    if isinstance(places, slice):
        np.divide(found, factor, out=out[places])
    else:
        out[places] = np.divide(found, factor, out=found)


class SwitchMLStream(PacketStream):
    """One tensor. ``packets``: float32 [k, elements]."""

    def __init__(self, packets: Array, slots: int, world: int) -> None:
        super().__init__(packets, slots)
        self._world, self._given = world, exponents(packets)
        self._factors = np.ones((self.columns, 1), np.float32)

    def first(self) -> Array:
        return self._given[: self.columns]

    def _take(self, columns: Array, packets: Array, values: Array) -> None:
        to_floats(values.view(np.int32), self._factors[columns], self.sums, span(packets))

    def _give(self, columns: Array, packets: Array, sides: Array) -> tuple[Array, Array]:
        self.special[packets] = special = sides == SPECIAL
        self._factors[columns] = factor = factors(np.minimum(sides, SPECIAL - 1), self._world)
        given = self._packets[span(packets)]
        if special.any():
            given = np.where(special[:, None], np.float32(0), given)
        ahead = packets + self.columns
        exponent = np.where(ahead < self._count, self._given[np.minimum(ahead, self._count - 1)], LEAST)
        return exponent, to_integers(given, factor).view(np.uint8)
