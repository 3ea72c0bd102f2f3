"""Registers of a switch: one class per way of adding, each vectorised over packets. Pure.

A row is one copy of one slot. Values travel as bytes; the registers may be wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .fpisa_registers import FPISA
from .switch_packets import Array, span
from .switch_registers import Adder


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


class DoubleAdder(FloatAdder):
    travels = adds = np.float64


class HalfAdder(FloatAdder):
    register_bytes = 2.0
    travels = np.float16


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


ADDERS: Mapping[str, type[Adder]] = {
    "int32": IntegerAdder,
    "float32": FloatAdder,
    "float64": DoubleAdder,
    "float16": HalfAdder,
    "bfloat16": BFloatAdder,
    **{f"{mode}-{name}": adder for mode, adders in FPISA.items() for name, adder in adders.items()},
}
"""By the name under which a job asks for one."""
