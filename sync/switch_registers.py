"""The interface of a switch's registers. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import ClassVar

from .switch_packets import MOST_RANKS, Array


class Adder(ABC):
    """Registers for ``rows`` times ``nbytes`` bytes of values.

    Attributes:
        register_bytes: of memory per byte of values.
        most: ranks whose values can be added.
        counts: events by name.
    """

    register_bytes: ClassVar[float] = 1.0
    most: ClassVar[int] = MOST_RANKS

    def __init__(self, rows: int, nbytes: int) -> None:
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def store(self, rows: Array, values: Array) -> None:
        """Writes the first values of a round: uint8 [k, nbytes], in k different rows."""

    @abstractmethod
    def add(self, rows: Array, values: Array) -> None:
        """Adds further values of a round."""

    @abstractmethod
    def read(self, rows: Array) -> Array:
        """The sums, as they travel: uint8 [k, nbytes]. To be used before the next call: they may be the registers themselves."""
