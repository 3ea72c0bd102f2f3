"""No checkpoint at all: its "lost" is the noise of the measurement."""

from __future__ import annotations

from pathlib import Path

from load import Load
from peers import Adapter


class Nothing(Adapter):
    """Does nothing, as fast as it can."""

    def setup(self, load: Load, folder: Path) -> None:
        return

    def save(self, step: int) -> None:
        return

    def wait_complete(self) -> None:
        return
