"""All streams of a run on one host: found by name, taken over from an agent before this one, and open to peers.

`AgentIdentity` keeps what the agent knows and no slot repeats, in memory that its successor finds when the agent has to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgpack
import xxhash

from gemini_ft.agent.context import RunContext
from gemini_ft.agent.memory import slot_files
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.memory.slot_store import SlotDonor
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.tasks import RateLimitedLog
from gemini_ft.core.versions import MOST, Incarnation
from gemini_ft.errors import AgentError, CorruptDataError, FormatError, GeminiError
from gemini_ft.wire.handshake import Listener, listen
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.tcp import Address, Connection, Handler
from gemini_ft.wire.worker_messages import Hello, SessionSpec


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
            if known is not None and not (isinstance(known[1], str) and 0 <= known[0] <= MOST):
                return Past()
            return Past(bytes(secret), Incarnation(*known) if known is not None else None, read)
        except (LookupError, ValueError, TypeError, AttributeError):  # of another release: the slots repeat what matters most
            return Past()


class Streams:
    """The streams of one run on one host."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.by_name: dict[str, Stream] = {}  # all of them
        self.known: Incarnation | None = None  # the newest incarnation of any; None: there has been none
        self._identity = AgentIdentity()
        self._server: Listener | None = None
        self._listening: asyncio.Task[None] | None = None

    def named(self, name: str) -> Stream:
        if name not in self.by_name:
            self.by_name[name] = Stream(name, self._run)
        return self.by_name[name]

    def note(self, incarnation: Incarnation) -> None:
        self.known = incarnation if self.known is None else max(self.known, incarnation)

    # -- before and after this agent

    def remember(self) -> None:
        """Notes the secret and all sessions for a successor."""
        specs = {name: stream.last_spec for name, stream in self.by_name.items() if stream.last_spec is not None}
        self._identity.write(Past(self._run.secret, self.known, specs))

    def adopt(self, fds: Sequence[int], shared: Sequence[bool] = (), donor: SlotDonor | None = None) -> None:
        """Takes over slots that another agent has made; ``shared``: those that a process other than the giver may still write to."""
        for fd, is_shared in zip(fds, shared or [False] * len(fds), strict=True):
            try:
                memory = SlotMemory.adopt(fd)
                self.named(memory.shape.stream).adopt(memory, is_shared, donor)
            except (CorruptDataError, FormatError, OSError, ValueError) as error:
                self._run.log(f"a slot could not be adopted: {error}")
                if not isinstance(error, FormatError):
                    slot_files.forget(fd)  # an agent that was killed while it made the file, for example: nobody else gives the memory back
                os.close(fd)

    def inherit(self, slots: str, identity: int, former: str = "an agent that hung") -> None:
        """Begins with a former agent's estate: ``5,6!`` are descriptors of its slots, ! those that others may still write to."""
        entries = [entry for entry in slots.split(",") if entry]
        fds = [int(entry.rstrip("!")) for entry in entries]
        for fd in [*fds, *([identity] if identity >= 0 else [])]:
            os.set_inheritable(fd, False)
        self.adopt(fds, [entry.endswith("!") for entry in entries])
        if identity >= 0:
            past = self._identity.take_over(identity)
            self._run.secret, self.known = past.secret, past.known
            for name, spec in past.specs.items():
                self.named(name).inherited = spec
        self._run.log(f"begins with {len(fds)} slots of {former}")

    # -- peers

    @property
    def address(self) -> Address | None:
        """The address at which peers reach this host; None: it does not listen yet."""
        return self._server.address if self._server is not None else None

    @property
    def further(self) -> list[str]:
        return self._server.further if self._server is not None else []

    async def listen(self, hello: Hello) -> None:
        """Listens to peers where the first worker says; returns when this host can be reached.

        Raises GeminiError: it cannot; the next worker may have better luck.
        """
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen(hello))
        try:
            await self._listening
        except GeminiError:
            self._listening = None
            raise

    async def _listen(self, hello: Hello) -> None:
        run = self._run
        self._server = await listen(
            hello.bind,
            hello.ports,
            lambda: run.secret,
            self._accept,
            RateLimitedLog(run.log),
            lambda stream: self.by_name[stream].context.encrypt,
            preferred=hello.preferred_port,
            further=hello.further,
        )

    def _accept(self, connection: Connection, claims: Claims) -> Handler:
        run = self._run
        if claims.to != run.host:
            raise AgentError(f"host {claims.host!r} takes this host for {claims.to!r}, but it is {run.host!r}; two hosts share an address")
        if claims.run != run.run_id or claims.stream not in self.by_name:
            raise AgentError(
                f"host {claims.host!r} asks for stream {claims.stream!r} of run {claims.run!r}; this agent serves {run.run_id!r}"
            )
        return self.by_name[claims.stream].incoming.accept(connection, claims)
