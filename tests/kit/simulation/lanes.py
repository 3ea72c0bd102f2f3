"""Lanes between agents: the orders of a lane's thread, carried out on the loop as their bytes come."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gemini_ft.core.roots import checksum
from gemini_ft.errors import PeerError
from gemini_ft.wire.lane_thread import _TCP_INFO, LaneThread, Outcome

if TYPE_CHECKING:
    from simulation.network import End


class FakeSocket:
    """Takes all options, and knows how many bytes have arrived."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.acked = 0

    def setsockopt(self, *_: Any) -> None: ...

    def getsockopt(self, *_: Any) -> bytes:
        return _TCP_INFO.pack(1000, self.acked, self.acked)

    def shutdown(self, _: int) -> None: ...

    def close(self) -> None: ...


class _LaneEnd:
    """The part of `BlockingLane` that `LaneThread` uses; `SimulatedLane` calls ``receive`` when all bytes are there."""

    def __init__(self, end: End) -> None:
        self.end, self.socket, self.peer, self.stopped = end, end.socket, end.far.host, False
        self.buffer = bytearray()

    def send(self, part: memoryview, is_last: bool) -> None:
        if not self.end.is_open:
            raise PeerError(f"the lane to {self.peer} is broken")
        self.end.send(self.end.network.garbled(bytes(part)))

    def receive(self, targets: Sequence[memoryview] | None, nbytes: int) -> int:
        data = bytes(self.buffer[:nbytes])
        del self.buffer[:nbytes]
        if targets is not None:
            (target,) = targets  # a `LaneThread` has one
            target[:] = data
        return checksum(data)

    def stop(self) -> None:
        self.stopped = True


class SimulatedLane(LaneThread):
    """A `LaneThread` whose orders are carried out on the loop."""

    def __init__(self, end: End) -> None:
        super().__init__(_LaneEnd(end))  # type: ignore[arg-type]
        self._end, self._todo = end, deque[tuple[Any, Callable[[Outcome], None]]]()
        self._broken: Exception | None = None
        self._idle = False  # whether its thread does not run
        end.listen(self._heard, self._lost)

    @property
    def unacknowledged(self) -> int:
        return sum(len(data) for _, data in self._end.queue)

    def _order(self, deed: Any, done: Callable[[Outcome], None]) -> None:
        self._todo.append((deed, done))
        if deed.func == self._send and (pause := self._end.network.descheduled()):
            self._idle = True
            self._loop.call_later(pause, self._wake)
        self._work_on()

    def _wake(self) -> None:
        self._idle = False
        self._work_on()

    def _heard(self, data: bytes) -> None:
        self._lane.buffer += data  # type: ignore[attr-defined]
        self._work_on()

    def _lost(self, error: Exception | None) -> None:
        self._broken = error or PeerError("closed the connection in the middle of a payload")
        self._work_on()

    def _work_on(self) -> None:
        while self._todo and not self._lane.stopped:
            deed, done = self._todo[0]
            if deed.func == self._send and self._idle:
                return
            if deed.func == self._lane.receive and len(self._lane.buffer) < deed.args[1]:  # type: ignore[attr-defined]
                if self._broken is None:
                    return
                self._tear()
                outcome: Outcome = PeerError(str(self._broken))
            else:
                try:
                    outcome = deed()
                except Exception as error:
                    outcome = error
            self._todo.popleft()
            self._loop.call_soon(self._over, done, outcome)

    def _over(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        if not self._lane.stopped:
            done(outcome)

    def _tear(self) -> None:
        """The bytes that have come are in the memory, although the rest will not come."""
        deed, _ = self._todo[0]
        if deed.func == self._lane.receive and deed.args[0] is not None:
            part = bytes(self._lane.buffer)[: deed.args[1]]  # type: ignore[attr-defined]
            deed.args[0][0][: len(part)] = part

    def stop(self) -> None:
        if self._lane.stopped:
            return
        if self._todo:
            self._tear()
        self._todo.clear()
        self._lane.stop()
        self._ready = asyncio.Queue()
        self._end.hang_up()
