"""Registers of a switch: one class per way of adding, each vectorised over packets. Pure.

A row is one copy of one slot. Values travel as bytes; the registers may be wider.

FPISA (Yuan et al., NSDI 2022) adds floating-point numbers with the integer operations that a switch has. A sum is an exponent E and a
signed 32-bit mantissa M, with the implied one written out. To add (e, m), the mantissa of the smaller exponent is shifted right and M
becomes their sum; only what leaves the switch is normalised. Both times bits that do not fit are rounded to nearest, ties to even: cut
bits would make every sum smaller. Above the mantissa there are as many bits as the sums of 64 workers need, and what is left of 31 are
guard bits below it: one for float32, 14 and 17 for float16 and bfloat16. The paper has none, and shifts that round down.

FPISA-A is for switches that cannot shift what they have stored: a larger exponent shifts its own mantissa left, by as many bits as are
free, and if it is larger still it overwrites the sum. Both are counted where they lose something. For the sake of that room it has no
guard bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .switch_packets import MOST_RANKS, Array, span

_BITS = 31  # of FPISA's registers, without the sign


class Adder(ABC):
    """Registers for ``rows`` times ``nbytes`` bytes of values."""

    register_bytes: ClassVar[float] = 1.0  # of memory per byte of values

    def __init__(self, rows: int, nbytes: int) -> None:
        self.counts: Counter[str] = Counter()  # events by name

    @abstractmethod
    def store(self, rows: Array, values: Array) -> None:
        """Writes the first values of a round: uint8 [k, nbytes], in k different rows."""

    @abstractmethod
    def add(self, rows: Array, values: Array) -> None:
        """Adds further values of a round."""

    @abstractmethod
    def read(self, rows: Array) -> Array:
        """The sums, as they travel: uint8 [k, nbytes]. To be used before the next call: they may be the registers themselves."""


class FpisaAdder(Adder):
    """FPISA on float32."""

    fraction: ClassVar[int] = 23  # bits
    exponent: ClassVar[int] = 8  # bits
    travels: ClassVar[type[np.uint32 | np.uint16]] = np.uint32
    guarded: ClassVar[bool] = True
    register_bytes = 2.0

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__(rows, nbytes)
        free = _BITS - self.fraction - 1 - (MOST_RANKS - 1).bit_length()
        assert free >= 0, "so many sums of the same exponent could overflow"
        self._guards = free if self.guarded else 0
        elements = nbytes // np.dtype(self.travels).itemsize
        self._exponents, self._mantissas = np.zeros((rows, elements), np.int32), np.zeros((rows, elements), np.int32)

    def store(self, rows: Array, values: Array) -> None:
        places = span(rows)
        self._exponents[places], self._mantissas[places] = self._unpack(values)

    def add(self, rows: Array, values: Array) -> None:
        places = span(rows)
        held = self._exponents[places], self._mantissas[places]
        self._exponents[places], self._mantissas[places] = self._sum(*held, *self._unpack(values))

    def read(self, rows: Array) -> Array:
        """Normalises, and rounds to the fraction."""
        exponent, mantissa = self._exponents[span(rows)], self._mantissas[span(rows)]
        size = np.abs(mantissa.astype(np.int64))
        shift = np.frexp(size.astype(np.float64))[1] - 1 - self.fraction  # exact: a mantissa has 32 bits
        field = exponent + shift - self._guards
        shift = np.where(field > 0, shift, 1 - exponent + self._guards)  # below the smallest exponent numbers stay as they are
        rounded = _nearest(size << np.clip(-shift, 0, _BITS), np.maximum(shift, 0))
        # A fraction that is rounded up to the next power of two carries into the exponent, from the largest one to infinity.
        bits = (np.maximum(field - 1, 0).astype(np.int64) << self.fraction) + rounded
        bits = np.minimum(bits, ((1 << self.exponent) - 1) << self.fraction)
        bits = np.where(size == 0, 0, bits) | ((mantissa < 0).astype(np.int64) << (self.fraction + self.exponent))
        found: Array = bits.astype(self.travels)
        return found.view(np.uint8)

    def _unpack(self, values: Array) -> tuple[Array, Array]:
        bits = values.view(self.travels).astype(np.int64)
        exponent = (bits >> self.fraction) & ((1 << self.exponent) - 1)
        mantissa = (bits & ((1 << self.fraction) - 1)) | ((exponent > 0).astype(np.int64) << self.fraction)
        negative = bits >> (self.fraction + self.exponent) & 1
        return np.maximum(exponent, 1).astype(np.int32), (np.where(negative, -mantissa, mantissa) << self._guards).astype(np.int32)

    def _sum(self, exponent: Array, mantissa: Array, other: Array, given: Array) -> tuple[Array, Array]:
        ahead = other - exponent
        total = _nearest(mantissa, np.maximum(ahead, 0)) + _nearest(given, np.maximum(-ahead, 0))
        return np.maximum(exponent, other), total.astype(np.int32)


class FpisaAAdder(FpisaAdder):
    """FPISA-A on float32: what it counts is ``overwritten`` sums and ``overflowed`` ones, which wrap."""

    guarded = False

    def _sum(self, exponent: Array, mantissa: Array, other: Array, given: Array) -> tuple[Array, Array]:
        room, ahead = _BITS - self.fraction - 1, other - exponent
        over = (ahead > room) & (given != 0)
        aligned = np.where(ahead > 0, given.astype(np.int64) << np.clip(ahead, 0, room), _nearest(given, np.maximum(-ahead, 0)))
        total = np.where(over, given, mantissa + aligned)
        wrapped = total.astype(np.int32)
        self.counts["overwritten"] += int((over & (mantissa != 0)).sum())
        self.counts["overflowed"] += int((wrapped != total).sum())
        return np.where(over, other, exponent), wrapped


def _nearest(values: Array, shift: Array) -> Array:
    """``values / 2**shift``, rounded to the nearest integer and ties to even, int64. ``shift`` is not below 0."""
    wide, shift = values.astype(np.int64), np.minimum(shift, 62)
    half = (np.int64(1) << shift) >> 1
    found: Array = (wide + np.where(shift > 0, half - 1 + (wide >> shift & 1), 0)) >> shift
    return found


class IntegerAdder(Adder):
    """Adds 32-bit integers; their order makes no difference. Workers see to it that no sum overflows; it would wrap."""

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__(rows, nbytes)
        self._sums = np.zeros((rows, nbytes // 4), np.int32)

    def store(self, rows: Array, values: Array) -> None:
        self._sums[span(rows)] = values.view(np.int32)

    def add(self, rows: Array, values: Array) -> None:
        self._sums[span(rows)] += values.view(np.int32)

    def read(self, rows: Array) -> Array:
        return self._sums[span(rows)].view(np.uint8)  # perhaps the registers themselves


class FloatAdder(Adder):
    """Adds floating-point numbers in the order in which they come; those of 16 bits in 32 bits, rounded once."""

    travels: ClassVar[type[np.floating[Any]]] = np.float32
    adds: ClassVar[type[np.floating[Any]]] = np.float32

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__(rows, nbytes)
        self._sums = np.zeros((rows, nbytes // np.dtype(self.travels).itemsize), self.adds)

    def store(self, rows: Array, values: Array) -> None:
        self._sums[span(rows)] = self._widen(values)

    def add(self, rows: Array, values: Array) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are values like others
            self._sums[span(rows)] += self._widen(values)

    def read(self, rows: Array) -> Array:
        with np.errstate(over="ignore"):
            return self._narrow(self._sums[span(rows)])

    def _widen(self, values: Array) -> Array:
        return values.view(self.travels)

    def _narrow(self, sums: Array) -> Array:
        return np.ascontiguousarray(sums.astype(self.travels, copy=False)).view(np.uint8)


class BFloatAdder(FloatAdder):
    """bfloat16, which numpy lacks: the upper half of a float32."""

    register_bytes = 2.0
    travels = np.float16  # for its size

    def _widen(self, values: Array) -> Array:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def _narrow(self, sums: Array) -> Array:
        bits = np.ascontiguousarray(sums).view(np.uint32)
        even = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest, ties to even
        return np.where(np.isnan(sums), 0x7FC0, even >> 16).astype(np.uint16).view(np.uint8)


_HALF = {"fraction": 10, "exponent": 5, "travels": np.uint16, "register_bytes": 4.0}
_BFLOAT = _HALF | {"fraction": 7, "exponent": 8}

ADDERS: Mapping[str, type[Adder]] = {
    "int32": IntegerAdder,
    "float32": FloatAdder,
    "float64": type("DoubleAdder", (FloatAdder,), {"travels": np.float64, "adds": np.float64}),
    "float16": type("HalfAdder", (FloatAdder,), {"travels": np.float16, "register_bytes": 2.0}),
    "bfloat16": BFloatAdder,
    "fpisa-float32": FpisaAdder,
    "fpisa-float16": type("FpisaHalf", (FpisaAdder,), _HALF),
    "fpisa-bfloat16": type("FpisaBFloat", (FpisaAdder,), _BFLOAT),
    "fpisa-a-float32": FpisaAAdder,
    "fpisa-a-float16": type("FpisaAHalf", (FpisaAAdder,), _HALF),
    "fpisa-a-bfloat16": type("FpisaABFloat", (FpisaAAdder,), _BFLOAT),
}
"""All of them, by the name under which a job asks for one."""
