"""Draws anew, in a forked worker, the numbers that the server's imports have drawn: else all ranks and restarts would share them.

Operating system, OpenSSL, ``secrets``, ``uuid4`` and Python's global generator see to themselves after a fork. Not so the global
generators of torch and numpy, generators that a library makes for itself when it is imported (sympy has three), and the key that
``multiprocessing`` proves its identity with. A generator that a library has seeded with a number of its own stays as it is.

Standard library only: it renews whatever happens to be loaded.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DRAWN_BITS = 64  # numpy draws 128 bits for a generator without a seed; no user writes a seed that long


class Renewal:
    """The random state that imports have made in the server, renewed in each worker."""

    def __init__(self) -> None:
        self._unseeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._bit_generators: list[Any] = []

    @contextmanager
    def watching_imports(self) -> Iterator[None]:
        """Inside, notes which of Python's generators are made without a seed; afterwards finds those of numpy."""
        seed = random.Random.seed

        def noting(this: random.Random, a: Any = None, version: int = 2) -> None:
            (self._unseeded.add if a is None else self._unseeded.discard)(this)
            seed(this, a, version)

        random.Random.seed = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
            self._bit_generators = _unseeded_bit_generators()

    def draw_anew(self) -> None:
        """Gives this process, a forked worker, random state of its own."""
        for generator in self._unseeded:
            generator.seed()
        for bits in self._bit_generators:
            bits.state = type(bits)().state
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.set_bit_generator(numpy_random.MT19937())  # as the import does; seed() would leave it without a seed sequence
        if torch := sys.modules.get("torch"):
            torch.default_generator.seed()  # CUDA's are made, and seeded, at first use
        if process := sys.modules.get("multiprocessing.process"):
            process.current_process().authkey = os.urandom(32)
        if "uuid" in sys.modules:
            vars(sys.modules["uuid"]).update(_node=None, _last_timestamp=None)  # the node is drawn on a host without a network card
        if "tempfile" in sys.modules:
            vars(sys.modules["tempfile"]).update(tempdir=None)  # TMPDIR is read again


def _unseeded_bit_generators() -> list[Any]:
    """numpy's bit generators, but for the global one, that were made without a seed."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return []
    everywhere = numpy_random.mtrand._rand._bit_generator
    found = [item for item in gc.get_objects() if issubclass(type(item), numpy_random.BitGenerator) and item is not everywhere]
    return [item for item in found if isinstance(entropy := getattr(item.seed_seq, "entropy", None), int) and entropy >> _DRAWN_BITS]
