"""A simulated clock, and an in-memory network with threads that take their time, for `scale.py`."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import PeerMessage, peers
from gemini_ft.wire.tcp import Handler

_LEAST = 1e-9  # seconds; without it, a wait for what is left of a second may take no time, again and again


class Clock(selectors.DefaultSelector):
    """Time passes when nothing is left to do at this moment: waiting for the next timer moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(_LEAST, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio on a `Clock`."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Processor:
    """The thread of the leader or of a collector: handles one thing after the other, each as long as it really takes."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop, self.free_at = loop, 0.0
        self._outgoing: list[tuple[Wire, bytes]] | None = None
        self.reset()

    def reset(self) -> None:
        """Begins to count anew."""
        self.seconds, self.messages, self.sent, self.bytes = 0.0, 0, 0, 0

    def send(self, wire: Wire, frame: bytes) -> None:
        self.sent += 1
        self.bytes += len(frame)
        if self._outgoing is None:
            wire.depart(frame, self._loop.time())
        else:
            self._outgoing.append((wire, frame))

    def work(self, what: Callable[[], Any]) -> Any:
        self._outgoing = []
        begin = time.thread_time()
        result = what()
        took = time.thread_time() - begin
        self.seconds += took
        self.free_at = max(self.free_at, self._loop.time()) + took
        for wire, frame in self._outgoing:
            wire.depart(frame, self.free_at)
        self._outgoing = None
        return result


class Traffic:
    """Counts the messages, and their bytes, that hosts without a `Processor` send and receive, all of them together."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def add(self, frame: bytes) -> None:
        self.messages += 1
        self.bytes += len(frame)


class Wire:
    """One end of a connection in memory; the other end is ``far``.

    Args:
        loop: of the simulation.
        latency: seconds that a frame takes.
        processor: of this end's host, unless that has no other host to hear.
        traffic: counts the frames of this end then.
        runs: whether this end's host does, which may have been stopped.
    """

    far: Wire

    def __init__(
        self, loop: SimulatedLoop, latency: float, processor: Processor | None, traffic: Traffic, runs: Callable[[], bool]
    ) -> None:
        self._loop, self._latency, self._processor, self._traffic, self._runs = loop, latency, processor, traffic, runs
        self.is_open = True
        self._arrives = 0.0  # the last frame, at the other end
        self.handler: Handler

    def send(self, message: PeerMessage) -> None:
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes) -> None:
        if not self.is_open or not self._runs():
            return
        if self._processor is not None:
            self._processor.send(self, frame)
        else:
            self._traffic.add(frame)
            self.depart(frame, self._loop.time())

    def depart(self, frame: bytes, at: float) -> None:
        self._arrives = max(at + self._latency, self._arrives + _LEAST)  # asyncio does not keep the order of what is due at the same time
        self._loop.call_at(self._arrives, self.far.arrive, frame)

    def arrive(self, frame: bytes) -> None:
        if not self.is_open or not self._runs():
            return
        if self._processor is None:
            self._traffic.add(frame)
            self.handler.on_message(peers.unpack(memoryview(frame)[4:]))
            return
        self._processor.messages += 1
        self._processor.bytes += len(frame)
        self._processor.work(lambda: self.handler.on_message(peers.unpack(memoryview(frame)[4:])))

    def abort(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.call_later(self._latency, self.far.lose, reason)

    def lose(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            if self._runs():
                self.handler.on_lost(reason)
