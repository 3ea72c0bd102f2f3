"""An agent's own knowledge that no slot repeats, in memory that its successor finds when the agent has to be killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import msgpack

from gemini_ft.core.versions import Incarnation
from gemini_ft.wire.worker_messages import SessionSpec


class Past(NamedTuple):
    """Everything that an agent leaves to its successor beside the slots."""

    secret: bytes = b""
    known: Incarnation | None = None
    specs: Mapping[str, SessionSpec] = {}  # of the last session of each stream


class AgentIdentity:
    """A memfd with an agent's `Past`; readable by this user only, as the agent's socket is."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemini-agent", os.MFD_CLOEXEC)

    def write(self, past: Past) -> None:
        body = msgpack.packb([past.secret, past.known, {stream: spec.model_dump_json() for stream, spec in past.specs.items()}])
        os.pwrite(self._fd, len(body).to_bytes(4, "big") + body, 0)

    def take_over(self, fd: int) -> Past:
        """Continues a predecessor's identity; returns what it left, or nothing if it died before it knew anything."""
        os.close(self._fd)
        self._fd = fd
        raw = os.pread(fd, os.fstat(fd).st_size, 0)
        try:
            secret, known, specs = msgpack.unpackb(raw[4 : 4 + int.from_bytes(raw[:4], "big")])
            read = {str(stream): SessionSpec.model_validate_json(text) for stream, text in specs.items()}
            return Past(bytes(secret), Incarnation(*known) if known is not None else None, read)
        except (
            ValueError,
            TypeError,
            AttributeError,
        ):  # its writer was killed, or is of another release: the slots repeat what matters most
            return Past()
