"""A short question to another host: whether reports go to the leader from there, and in which epoch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from gemini_ft.agent.collecting import SILENCE, ReportingEnd
from gemini_ft.errors import GeminiError
from gemini_ft.wire.peer_messages import PeerMessage, WayUp
from gemini_ft.wire.tcp import Connection, Handler

Dial = Callable[[str, int, Handler], Awaitable[Connection]]
"""Connects to a host, which is asked to lead an epoch: its answer, `WayUp`, says whether it does."""


async def ask(dial: Dial, host: str, epoch: int) -> WayUp | None:
    """The answer of a host that is asked whether reports go to the leader from there; None: there is none in time."""
    answer = _Answer()
    with contextlib.suppress(GeminiError, TimeoutError):
        async with asyncio.timeout(SILENCE):
            connection = await dial(host, epoch, answer)
            try:
                return await answer.told
            finally:
                connection.abort("it has answered")
    return None


class _Answer(ReportingEnd):
    """The end of a connection that is for one answer."""

    def __init__(self) -> None:
        self.told: asyncio.Future[WayUp | None] = asyncio.get_running_loop().create_future()

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if isinstance(message, WayUp) and not self.told.done():
            self.told.set_result(message)
        return None

    def on_lost(self, reason: str) -> None:
        if not self.told.done():
            self.told.set_result(None)
