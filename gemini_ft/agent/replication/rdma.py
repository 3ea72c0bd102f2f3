"""Pulls pieces of shards out of the slots of other hosts by RDMA: the agent's side of the process that does it, and their tags.

The receiver reads. No peer is given the right to write here, so that neither a late write nor a hostile one is part of the protocol; and
after `Rdma.close` nothing is written any more, as the process is gone. UCX proves of nobody who it is: a piece counts once its tag fits,
which has come with its announcement through TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hmac import compare_digest
from typing import Any

import msgpack
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication.rdma_process import PACKET
from gemini_ft.errors import PeerError
from gemini_ft.wire.network import rdma_variables
from gemini_ft.wire.peer_messages import Exposed, Readable

_THREADS = 2  # that form tags; the loop's own may all hang in storage
_PATIENCE = 5.0  # seconds for a piece, of one chunk at most
_START = 20.0  # seconds for the process to begin, and to take the next slot in; less than a holder has by default (`replica_timeout`)


def tag_of(key: bytes, number: int, piece: memoryview) -> bytes:
    """The AES-GMAC of a piece; ``number``: never twice under one ``key``."""
    context = Cipher(AES(key), GCM(number.to_bytes(12, "big"))).encryptor()
    context.authenticate_additional_data(piece)
    context.finalize()
    return context.tag


class Rdma:
    """The process of one agent. ``addresses``: of the networks that replicas travel on."""

    def __init__(self, addresses: Sequence[str], log: Callable[[str], None]) -> None:
        self.name, self._log = uuid.uuid4().hex, log
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "gemini_ft.agent.replication.rdma_process", str(theirs.fileno()), self.name]
            environ = {**os.environ, **rdma_variables(addresses)}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/", env=environ)
        self._socket.setblocking(False)
        self._threads = ThreadPoolExecutor(_THREADS, "gemini-rdma")
        self._numbers = itertools.count()
        self._slots: weakref.WeakKeyDictionary[SlotMemory, str] = weakref.WeakKeyDictionary()  # -> its key there
        self._answers: dict[str | int, tuple[asyncio.Future[Any], float]] = {}  # of a slot, its address; of a pull, None; and when asked
        self._taking_in, self._took_in = set[str](), 0.0  # slots that are to be taken in, and when the last one was
        self._known: set[bytes] = set()  # metadata of peers that the process has
        self.metadata = b""  # by which peers find the slots of this host
        self.is_over = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._hear)

    async def expose(self, memory: SlotMemory) -> int:
        """Lets peers that have the `metadata` of then read a slot; returns its address in the process. Raises PeerError: that is over."""
        address: int = await self._answer(self._key(memory), "a slot was not taken in")
        return address

    async def pull(self, peer: Exposed, piece: Readable, memory: SlotMemory) -> None:
        """Reads a piece into its place in a slot. Raises PeerError: it did not come, or its tag does not fit."""
        key, at = self._key(memory), piece.chunk.offset + piece.start
        await self.expose(memory)
        if peer.metadata not in self._known:
            self._known.add(peer.metadata)
            self._say("peer", peer.metadata)
        number = next(self._numbers)
        self._ask(number)
        self._say("pull", number, peer.name, piece.address, key, memory.shape.data_offset + at, piece.nbytes)
        try:
            await self._answer(number, f"a piece of {piece.nbytes:,} bytes did not come")
        finally:
            self._answers.pop(number, None)
        if not compare_digest(await self.tag(peer.key, piece.tag, memory.data(at, piece.nbytes)), piece.seal):
            raise PeerError("a piece was changed on its way; something stands between the two hosts")

    async def tag(self, key: bytes, number: int, piece: memoryview) -> bytes:
        """Forms `tag_of` a piece, on a thread."""
        return await self._loop.run_in_executor(self._threads, tag_of, key, number, piece)

    def close(self, reason: str) -> None:
        """Ends the process, and with it all that is under way: no slot is written any more when this returns."""
        if self.is_over:
            return
        self.is_over = True
        self._log(f"RDMA is over: {reason}")
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._threads.shutdown(wait=False)
        self._process.kill()
        self._process.wait()
        for answer, _ in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerError(f"RDMA: {reason}"))
                answer.exception()  # somebody may wait for it, or nobody

    # -- inside

    def _key(self, memory: SlotMemory) -> str:
        if memory not in self._slots:
            self._slots[memory] = key = str(next(self._numbers))
            self._ask(key)
            self._taking_in.add(key)
            weakref.finalize(memory, self._forget, key).atexit = False
            self._say("slot", key, fd=memory.fd)
        return self._slots[memory]

    def _forget(self, key: str) -> None:
        self._answers.pop(key, None)
        self._taking_in.discard(key)
        self._say("drop", key)

    def _ask(self, to: str | int) -> None:
        self._answers[to] = self._loop.create_future(), self._loop.time()

    async def _answer(self, to: str | int, failure: str) -> Any:
        """Returns what the process answers. It has longer while it takes slots in, which stops it; whoever asks again gives it no more."""
        if self.is_over:
            raise PeerError("RDMA: the process that reads and is read from has ended")
        answer, asked = self._answers[to]
        while not answer.done():
            seconds = _START if self._taking_in else _PATIENCE
            if (left := max(asked, self._took_in) + seconds - self._loop.time()) > 0:
                await asyncio.wait([answer], timeout=left)
            else:
                self.close(f"{failure} in {seconds:g} s")
                break
        return answer.result()  # raises what it was closed with

    def _say(self, *words: Any, fd: int = -1) -> None:
        if self.is_over:
            return
        try:
            socket.send_fds(self._socket, [msgpack.packb(words)], [fd] if fd >= 0 else [])
        except OSError as error:  # it hears nothing any more, or has not heard for long
            self.close(f"its process hears nothing ({error})")

    def _hear(self) -> None:
        packet = b""
        with contextlib.suppress(OSError):
            packet = self._socket.recv(PACKET)
        if not packet:
            self.close("its process has ended, and has said why above")
            return
        kind, to, outcome, *metadata = msgpack.unpackb(packet)
        self.metadata = metadata[0] if metadata else self.metadata
        if kind == "pulled" and outcome:
            self.close(outcome)  # parts of the piece may still be on their way
            return
        if kind == "slot":
            self._taking_in.discard(to)
            self._took_in = self._loop.time()
        answer, _ = self._answers.get(to, (None, 0.0))
        if answer is not None and not answer.done():
            answer.set_result(outcome)


def rdma_of(context: StreamContext) -> Rdma:
    """The process of this agent; another one where the last has ended. Raises GeminiError: this host cannot."""
    run, spec = context.run, context.spec
    assert spec is not None
    if run.rdma is None or run.rdma.is_over:
        try:
            run.rdma = Rdma([spec.addresses[run.host][0], *spec.further.get(run.host, ())], run.log)
        except OSError as error:
            raise PeerError(f"RDMA: no process can be started ({error})") from None
    return run.rdma
