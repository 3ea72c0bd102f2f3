"""FPISA's registers (Yuan et al., NSDI 2022): floating-point sums with integer operations that a switch has. Pure.

A sum is an exponent E and a signed 32-bit mantissa M, with the implied one written out. To add (e, m), the mantissa of the smaller
exponent is shifted right and M becomes their sum. Only what leaves the switch is normalised, so nothing is rounded in between, but bits
that are shifted out are lost. Above the mantissa of float32 there are seven bits and the sign: 128 additions cannot overflow.

FPISA-A is for switches that cannot shift what they have stored: a larger exponent shifts its own mantissa left, by as many bits as are
free, and if it is larger still it overwrites the sum. Both are counted where they lose something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from .switch_packets import MOST_RANKS, Array, span
from .switch_registers import Adder

_BITS = 31  # of a register, without its sign


class FpisaAdder(Adder):
    """FPISA on float32."""

    fraction: ClassVar[int] = 23  # bits
    exponent: ClassVar[int] = 8  # bits
    travels: ClassVar[type[np.uint32 | np.uint16]] = np.uint32
    register_bytes = 2.0

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__(rows, nbytes)
        assert 2 ** (_BITS - self.fraction - 1) >= MOST_RANKS, "so many sums of the same exponent could overflow"
        elements = nbytes // np.dtype(self.travels).itemsize
        self._exponents, self._mantissas = np.zeros((rows, elements), np.int32), np.zeros((rows, elements), np.int32)

    def store(self, rows: Array, values: Array) -> None:
        places = span(rows)
        self._exponents[places], self._mantissas[places] = self._unpack(values)

    def add(self, rows: Array, values: Array) -> None:
        places = span(rows)
        self._exponents[places], self._mantissas[places] = self._sum(
            self._exponents[places], self._mantissas[places], *self._unpack(values)
        )

    def read(self, rows: Array) -> Array:
        """Normalises, cutting what does not fit the fraction."""
        exponent, mantissa = self._exponents[span(rows)], self._mantissas[span(rows)]
        size = np.abs(mantissa.astype(np.int64))
        shift = np.frexp(size.astype(np.float64))[1] - 1 - self.fraction  # exact: a mantissa has 32 bits
        field = exponent + shift
        right = np.clip(np.where(field > 0, shift, 1 - exponent), 0, 62)  # below the smallest exponent numbers stay as they are
        left = np.clip(-np.where(field > 0, shift, 1 - exponent), 0, 62)
        fraction = ((size >> right) << left) & ((1 << self.fraction) - 1)
        top = (1 << self.exponent) - 1
        infinite = field >= top
        bits = np.where(infinite, top << self.fraction, (np.maximum(field, 0).astype(np.int64) << self.fraction) | fraction)
        bits = np.where(size == 0, 0, bits) | ((mantissa < 0).astype(np.int64) << (self.fraction + self.exponent))
        found: Array = bits.astype(self.travels)
        return found.view(np.uint8)

    def _unpack(self, values: Array) -> tuple[Array, Array]:
        bits = values.view(self.travels).astype(np.int64)
        exponent = (bits >> self.fraction) & ((1 << self.exponent) - 1)
        mantissa = (bits & ((1 << self.fraction) - 1)) | ((exponent > 0).astype(np.int64) << self.fraction)
        negative = bits >> (self.fraction + self.exponent) & 1
        return np.maximum(exponent, 1).astype(np.int32), np.where(negative, -mantissa, mantissa).astype(np.int32)

    def _sum(self, exponent: Array, mantissa: Array, other: Array, given: Array) -> tuple[Array, Array]:
        ahead = other - exponent
        total = (mantissa >> np.clip(ahead, 0, _BITS)) + (given >> np.clip(-ahead, 0, _BITS))
        return np.maximum(exponent, other), total


class FpisaAAdder(FpisaAdder):
    """FPISA-A on float32: what it counts is ``overwritten`` sums and ``overflowed`` ones, which wrap."""

    def _sum(self, exponent: Array, mantissa: Array, other: Array, given: Array) -> tuple[Array, Array]:
        room, ahead = _BITS - self.fraction - 1, other - exponent
        over = (ahead > room) & (given != 0)
        aligned = np.where(ahead > 0, given.astype(np.int64) << np.clip(ahead, 0, room), given >> np.clip(-ahead, 0, _BITS))
        total = np.where(over, given, mantissa + aligned)
        wrapped = total.astype(np.int32)
        self.counts["overwritten"] += int((over & (mantissa != 0)).sum())
        self.counts["overflowed"] += int((wrapped != total).sum())
        return np.where(over, other, exponent), wrapped


class FpisaHalf(FpisaAdder):
    fraction, exponent, travels, register_bytes = 10, 5, np.uint16, 4.0


class FpisaBFloat(FpisaAdder):
    fraction, exponent, travels, register_bytes = 7, 8, np.uint16, 4.0


class FpisaAHalf(FpisaAAdder):
    fraction, exponent, travels, register_bytes = 10, 5, np.uint16, 4.0


class FpisaABFloat(FpisaAAdder):
    fraction, exponent, travels, register_bytes = 7, 8, np.uint16, 4.0


FPISA: Mapping[str, Mapping[str, type[Adder]]] = {
    "fpisa": {"float32": FpisaAdder, "float16": FpisaHalf, "bfloat16": FpisaBFloat},
    "fpisa-a": {"float32": FpisaAAdder, "float16": FpisaAHalf, "bfloat16": FpisaABFloat},
}
"""By mode and dtype."""
