"""A worker's connection to a peer's agent, as blocking code uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from gemini_ft.errors import PeerError
from gemini_ft.wire import handshake
from gemini_ft.wire.peer_messages import Claims, PeerMessage
from gemini_ft.wire.tcp import Address, Connection
from simulation.loop import Fiber


class SimulatedWire:
    """In place of `frames.BlockingWire`: a worker's connection to a peer's agent."""

    def __init__(self, address: Address, claims: Claims, secret: bytes, timeout: float, *, further: Sequence[str] = ()) -> None:
        fiber = Fiber.here()
        assert fiber is not None
        self._fiber, self._timeout = fiber, timeout
        self._loop = fiber.loop
        self._heard: deque[PeerMessage | Exception] = deque()
        self._payloads: deque[tuple[memoryview, int]] = deque()
        self._targets: dict[int, memoryview] = {}
        self._arrived: asyncio.Future[None] | None = None
        self._connection: Connection | None = None
        done: asyncio.Future[Connection] = self._loop.create_future()
        fiber.process.soon(self._begin, address, claims, secret, done)
        if not fiber.wait_for(done, timeout):
            done.cancel()
            raise PeerError(f"the agent at {address} did not answer within {timeout:g} s")
        self._connection = done.result()

    def _begin(self, address: Address, claims: Claims, secret: bytes, done: asyncio.Future[Connection]) -> None:
        async def work() -> None:
            try:
                connection = await handshake.dial(address, claims, secret, self)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if done.done():
                    connection.abort("too late")
                else:
                    done.set_result(connection)

        self._task = self._loop.create_task(work())

    # -- of a handler

    def on_message(self, message: PeerMessage) -> memoryview | None:
        nbytes = getattr(message, "nbytes", 0)
        target = None
        if nbytes:
            target = memoryview(bytearray(nbytes))
            self._targets[id(message)] = target
        self._note(message)
        return target

    def on_bytes(self, message: PeerMessage, digest: int) -> None:
        self._payloads.append((self._targets.pop(id(message)), digest))
        self._tell()

    def on_lost(self, reason: str) -> None:
        self._note(PeerError(f"the agent stopped answering ({reason})"))

    def _note(self, what: PeerMessage | Exception) -> None:
        self._heard.append(what)
        self._tell()

    def _tell(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # -- on the fiber

    def _wait(self, there: Callable[[], bool]) -> None:
        end = self._loop.time() + self._timeout
        while not there():
            self._arrived = self._loop.create_future()
            if not self._fiber.wait_for(self._arrived, end - self._loop.time()):
                raise PeerError("the agent stopped answering (timed out)")

    def send(self, message: PeerMessage) -> None:
        self._fiber.check()
        assert self._connection is not None
        self._connection.send(message)

    def receive(self) -> PeerMessage:
        self._wait(lambda: bool(self._heard))
        message = self._heard.popleft()
        if isinstance(message, Exception):
            self._heard.appendleft(message)
            raise message
        return message

    def payload(self) -> Callable[[Sequence[memoryview]], int]:
        def take(out: Sequence[memoryview]) -> int:
            self._wait(lambda: bool(self._payloads) or any(isinstance(each, Exception) for each in self._heard))
            if not self._payloads:
                raise PeerError("the agent closed the connection")
            data, digest = self._payloads.popleft()
            (memory,) = out  # no tensor waits for it
            memory[:] = data
            return digest

        return take

    def close(self) -> None:
        if self._connection is not None:
            self._fiber.process.soon(self._connection.abort, "closed")
