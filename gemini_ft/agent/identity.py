"""An agent's own knowledge that no slot repeats, in memory that its successor finds when the agent has to be killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack

from gemini_ft.core.versions import Incarnation, Version


class Origin(NamedTuple):
    """The last incarnation of a stream on this host, and its descent; see `SessionSpec`."""

    incarnation: Incarnation
    lineage: list[Version]
    overtaken: list[Incarnation]
    aside: list[Incarnation]


class Past(NamedTuple):
    """Everything that an agent leaves to its successor beside the slots."""

    secret: bytes = b""
    known: Incarnation | None = None
    origins: Mapping[str, Origin] = {}  # by stream


class AgentIdentity:
    """A memfd with an agent's `Past`; readable by this user only, as the agent's socket is."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemini-agent", os.MFD_CLOEXEC)

    def write(self, past: Past) -> None:
        body = msgpack.packb([past.secret, past.known, {stream: [*origin] for stream, origin in past.origins.items()}])
        os.pwrite(self._fd, len(body).to_bytes(4, "big") + body, 0)

    def take_over(self, fd: int) -> Past:
        """Continues a predecessor's identity; returns what it left, or nothing if it died before it knew anything."""
        os.close(self._fd)
        self._fd = fd
        raw = os.pread(fd, os.fstat(fd).st_size, 0)
        if len(raw) < 4:
            return Past()
        try:
            secret, known, origins = msgpack.unpackb(raw[4 : 4 + int.from_bytes(raw[:4], "big")])
        except ValueError:  # its writer was killed, or is of another release: the slots repeat the most important part
            return Past()
        return Past(secret, Incarnation(*known) if known is not None else None, {stream: _origin(*of) for stream, of in origins.items()})


def _origin(incarnation: Any, lineage: Any, overtaken: Any, aside: Any) -> Origin:
    ancestors = [Version(Incarnation(*of), iteration) for of, iteration in lineage]
    return Origin(Incarnation(*incarnation), ancestors, [Incarnation(*one) for one in overtaken], [Incarnation(*one) for one in aside])
