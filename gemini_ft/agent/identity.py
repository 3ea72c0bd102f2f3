"""An agent's own knowledge that no slot repeats, in memory that its successor finds when the agent has to be killed."""

from __future__ import annotations

import os

import msgpack

from gemini_ft.versions import Incarnation


class Identity:
    """A memfd with the run secret and the newest incarnation; readable by this user only, as the agent's socket is."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemini-agent", os.MFD_CLOEXEC)

    def write(self, secret: bytes, known: Incarnation | None) -> None:
        body = msgpack.packb([secret, known])
        os.pwrite(self._fd, len(body).to_bytes(4, "big") + body, 0)

    def take_over(self, fd: int) -> tuple[bytes, Incarnation | None]:
        """Go on with a predecessor's; what it says. Nothing, if that died before it knew anything."""
        os.close(self._fd)
        self._fd = fd
        raw = os.pread(fd, 2**16, 0)
        if len(raw) < 4:
            return b"", None
        secret, known = msgpack.unpackb(raw[4 : 4 + int.from_bytes(raw[:4], "big")])
        return secret, Incarnation(*known) if known is not None else None
