"""The progress of a long transfer, and an outage of storage, as the log and their users hear of them."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini_ft.agent.context import StreamContext

_EVERY = 10.0  # seconds between two lines in the log


class TransferProgress:
    """Counts the bytes of one transfer; any thread may add to it.

    Attributes:
        what: the transfer in words, such as ``upload of rank 0's shard``.
        total: bytes to transfer.
        done: bytes transferred so far.
    """

    def __init__(self, what: str, total: int, context: StreamContext) -> None:
        self.what, self.total, self.done = what, total, 0
        self._log, self._began = context.log, time.monotonic()
        self._said = self._began
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Counts ``nbytes`` more; every ten seconds the log says how long the rest will take."""
        with self._lock:
            self.done = min(self.total, self.done + nbytes)  # headers count as well
            now = time.monotonic()
            if now - self._said < _EVERY:
                return
            self._said = now
        self._log(f"{self.what}: {self.done:,} of {self.total:,} bytes, {self.seconds_left:.0f} s left")

    @property
    def seconds_left(self) -> float:
        """Seconds that the rest takes at the mean speed so far; infinite before the first byte."""
        speed = self.done / max(1e-9, time.monotonic() - self._began)
        return (self.total - self.done) / speed if speed else float("inf")

    def finish(self) -> None:
        """Logs the time that the transfer took."""
        seconds = time.monotonic() - self._began
        self._log(f"{self.what}: {self.total:,} bytes in {seconds:.1f} s ({self.total / max(1e-9, seconds) / 1e6:,.0f} MB/s)")


_REASONS = 8  # that are told of one outage


@dataclass
class Outage:
    """The time in which an operation does not work."""

    since: float  # its beginning, on the system's clock
    error: str = ""  # the newest
    _told: set[str] = field(default_factory=set, init=False)  # reasons of which the user has heard

    def again(self, error: str) -> bool:
        """Records an error; returns whether to report it to the user. One reason may hide behind another, but numbers and ids make none."""
        self.error = error
        reason = re.sub(r"\S*\d\S*", "", error)
        if reason in self._told or len(self._told) == _REASONS:
            return False
        self._told.add(reason)
        return True
