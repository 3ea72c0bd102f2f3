"""Limits how long a silent reader may keep a slot: a process that is stopped keeps its connection, and would keep the slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_ft.wire.tcp import Connection

_LEAST = 5.0  # seconds
_LOOKS = 4  # in a lease


class Lease:
    """Ends a connection on which no request and no progress is seen for ``seconds``.

    Args:
        connection: the reader's.
        seconds: of silence, but never less than five.
        expired: called before the connection is closed.
    """

    def __init__(self, connection: Connection, seconds: float, expired: Callable[[float], None]) -> None:
        self._connection, self._seconds, self._expired = connection, max(seconds, _LEAST), expired
        self._idle = 0
        self._progress = (0, 0)
        self._timer = self._schedule()

    def renew(self) -> None:
        """Takes note of a sign of life."""
        self._idle = 0

    def end(self) -> None:
        """Ends the lease: the reader has gone."""
        self._timer.cancel()

    def _schedule(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        progress = self._connection.backlog, self._connection.unacknowledged
        self._idle = self._idle + 1 if progress == self._progress else 0
        self._progress = progress
        if self._idle >= _LOOKS:  # counted in looks: this agent may have been stopped itself
            self._expired(self._seconds)
            self._connection.abort(f"the reader gave no sign of life for {self._seconds:g} s")
        else:
            self._timer = self._schedule()
