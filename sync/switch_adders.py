"""Registers of a switch: one class per way of adding, each vectorised over packets. Pure.

A row is one copy of one slot. Values travel as bytes; the registers may be wider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from .switch_packets import MOST_RANKS, Array, span


class Adder(ABC):
    """Registers for ``rows`` times ``nbytes`` bytes of values.

    Attributes:
        register_bytes: of memory per byte of values.
        most: ranks whose values can be added.
    """

    register_bytes: ClassVar[float] = 1.0
    most: ClassVar[int] = MOST_RANKS

    @abstractmethod
    def __init__(self, rows: int, nbytes: int) -> None: ...

    @abstractmethod
    def store(self, rows: Array, values: Array) -> None:
        """Writes the first values of a round: uint8 [k, nbytes], in k different rows."""

    @abstractmethod
    def add(self, rows: Array, values: Array) -> None:
        """Adds further values of a round."""

    @abstractmethod
    def read(self, rows: Array) -> Array:
        """The sums, as they travel: uint8 [k, nbytes]. To be used before the next call: they may be the registers themselves."""


class IntegerAdder(Adder):
    """Adds 32-bit integers; their order makes no difference. Workers see to it that no sum overflows; it would wrap."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self._sums = np.zeros((rows, nbytes // 4), np.int32)

    def store(self, rows: Array, values: Array) -> None:
        self._sums[span(rows)] = values.view(np.int32)

    def add(self, rows: Array, values: Array) -> None:
        self._sums[span(rows)] += values.view(np.int32)

    def read(self, rows: Array) -> Array:
        return self._sums[span(rows)].view(np.uint8)  # perhaps the registers themselves


ADDERS: Mapping[str, type[Adder]] = {"int32": IntegerAdder}
"""By the name under which a job asks for one."""
