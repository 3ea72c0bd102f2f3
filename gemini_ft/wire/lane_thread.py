"""A lane with a thread of its own, which hashes, seals and moves payloads while the event loop does other things.

The loop gives orders and hears of the outcome; all that the thread does to the bytes releases the GIL. Memory that an order names is in
use until the thread has said so, or until `LaneThread.stop` has returned: after that not one byte is read or written any more. A thread
that does not let go (memory that the kernel cannot bring) is waited for, as its process must not end by itself: the slots are open in no
other. Such an agent is silent, so what watches it (`gemini_ft.agent.watchdog`) takes the slots over, kills it and starts another with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from gemini_ft.errors import PeerError
from gemini_ft.wire.lane import TAG_BYTES, BlockingLane
from gemini_ft.wire.network import processors_near

Valve = Callable[[int], Awaitable[int]]  # given how many bytes are ready, waits, and says how many of them may go
Outcome = BaseException | int
_TCP_INFO = struct.Struct("=68xI48xQ40xQ")  # of linux/tcp.h: tcpi_rtt, tcpi_bytes_acked, tcpi_busy_time
PATIENCE = 5.0  # seconds that a thread which was told to stop is waited for in silence


@dataclass(frozen=True, kw_only=True)
class Meter:
    """The kernel's counts for one way to a peer."""

    acked: int  # bytes that the peer's kernel has acknowledged
    busy: float  # seconds in which there was something to send
    rtt: float  # seconds to the peer and back, smoothed


def metered(sock: socket.socket) -> Meter:
    """The kernel's counts for a socket. Raises OSError: it is closed."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    rtt, acked, busy = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))
    return Meter(acked=acked, busy=busy / 1e6, rtt=rtt / 1e6)


class BusyTime:
    """Seconds in which at least one of several threads was at work, as they say themselves: the event loop hears of it late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work, self._since, self._before = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._since = self._since if self._at_work else time.monotonic()
            self._at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self._before += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._before + (time.monotonic() - self._since if self._at_work else 0.0)


class LaneThread:
    """One end of a lane, on the event loop. ``lane``: of which this thread has the only use from now on."""

    def __init__(self, lane: BlockingLane) -> None:
        self._lane = lane
        self.socket = lane.socket
        self._loop = asyncio.get_running_loop()
        self._orders: SimpleQueue[tuple[Callable[[], Outcome | None], Callable[[Outcome], None]] | None] = SimpleQueue()
        self._ready: asyncio.Queue[tuple[memoryview, Valve | None, Callable[[Outcome], None]]] = asyncio.Queue()
        self._thread: threading.Thread | None = None
        self._given = 0  # bytes that may go, with tags

    # -- sending

    def send(self, payload: memoryview, valve: Valve | None, sent: Callable[[Outcome], None]) -> None:
        """Queues a payload.

        Args:
            payload: must not change until it has left.
            valve: asked before each part of the payload; None: it all goes.
            sent: called as each part has left, with 1 after the last of them and 0 before, or with the error.
        """
        self._ready.put_nowait((payload, valve, sent))

    async def feed(self, busy: BusyTime) -> None:
        """Hands payloads to the thread, which counts in ``busy``, as their valves allow, and never returns."""
        while True:
            payload, valve, sent = await self._ready.get()
            while payload:
                allowed = len(payload) if valve is None else await valve(len(payload))
                part, payload = payload[:allowed], payload[allowed:]
                self._given += len(part) + (0 if payload else TAG_BYTES)
                self._order(partial(self._send, part, not payload, busy), sent)

    def _send(self, part: memoryview, is_last: bool, busy: BusyTime) -> int:
        with busy:
            self._lane.send(part, is_last)
        return int(is_last)

    @property
    def unacknowledged(self) -> int:
        """Bytes that may go, or have gone, and that the peer's kernel has not acknowledged."""
        if self._lane.stopped:
            return 0
        return max(0, self._given - metered(self.socket).acked)

    # -- receiving

    def receive(self, target: memoryview | None, nbytes: int, done: Callable[[Outcome], None]) -> None:
        """Receives a payload of ``nbytes``, after those that were ordered before.

        Args:
            target: where it goes; None: it is thrown away.
            done: called with the payload's checksum when it is whole and is what the other end sent, or with the error.
        """
        self._order(partial(self._lane.receive, None if target is None else [target], nbytes), done)

    # -- the thread

    def _order(self, deed: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gemini-lane", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise PeerError(f"no thread can be started for a lane to {self._lane.peer} ({error}); see `ulimit -u`") from None
        self._orders.put((deed, done))

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed, or the processors were taken away just now
            if near := processors_near(self.socket.getsockname()[0]):
                os.sched_setaffinity(0, near)
        while (order := self._orders.get()) is not None:
            deed, done = order
            try:
                outcome = deed() if not self._lane.stopped else None
            except BaseException as error:  # of any kind: the waiting caller must get it
                outcome = error.with_traceback(None)  # whose frames would keep views of the memory
            del order, deed
            if outcome is not None and not self._lane.stopped:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(done, outcome)
            del done, outcome

    def stop(self) -> None:
        """Ends all that is under way, and returns when no memory is read or written any more."""
        if self._lane.stopped:
            return
        self._lane.stop()
        self._orders.put(None)
        self._ready = asyncio.Queue()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                print(f"a lane to {self._lane.peer} does not let go of its memory: waiting for it", file=sys.stderr, flush=True)
                self._thread.join()
        self.socket.close()
