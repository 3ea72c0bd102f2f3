"""The host agent without protection between hosts, to measure what that costs: no TLS, and tags over nothing. Nothing else uses it.

Whoever reaches the port of such an agent can do everything.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from gemini_ft.agent.main import main
from gemini_ft.wire import lane

_connect, _take = asyncio.BaseEventLoop.create_connection, asyncio.BaseEventLoop.connect_accepted_socket


async def _connect_plainly(loop: Any, *arguments: Any, ssl: object, server_hostname: object) -> Any:
    return await _connect(loop, *arguments)


async def _take_plainly(loop: Any, *arguments: Any, ssl: object) -> Any:
    return await _take(loop, *arguments)


if __name__ == "__main__":
    vars(lane)["Seal"].add = lambda seal, piece: piece
    vars(lane)["Unseal"].add = lambda unseal, piece: None
    for name, plain in (("create_connection", _connect_plainly), ("connect_accepted_socket", _take_plainly)):
        setattr(asyncio.BaseEventLoop, name, plain)
    sys.exit(main())
