"""An agent's own knowledge that no slot repeats, in memory that its successor finds when the agent has to be killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

import msgpack
import xxhash

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
        """Writes it over what was there before, which stays where a full tmpfs has no room for more."""
        body = msgpack.packb([past.secret, past.known, {stream: spec.model_dump_json() for stream, spec in past.specs.items()}])
        written = len(body).to_bytes(4, "big") + xxhash.xxh3_64_digest(body) + body
        with contextlib.suppress(OSError):
            os.posix_fallocate(self._fd, 0, len(written))
            os.pwrite(self._fd, written, 0)

    def take_over(self, fd: int) -> Past:
        """Continues a predecessor's identity; returns what it left, or nothing if it died before it knew anything."""
        os.close(self._fd)
        self._fd = fd
        raw = os.pread(fd, os.fstat(fd).st_size, 0)
        try:
            body = raw[12 : 12 + int.from_bytes(raw[:4], "big")]
            if raw[4:12] != xxhash.xxh3_64_digest(body):
                return Past()  # its writer was killed in the middle, or had written nothing
            secret, known, specs = msgpack.unpackb(body)
            read = {str(stream): SessionSpec.model_validate_json(text) for stream, text in specs.items()}
            return Past(bytes(secret), Incarnation(*known) if known is not None else None, read)
        except (ValueError, TypeError, AttributeError):  # of another release: the slots repeat what matters most
            return Past()
