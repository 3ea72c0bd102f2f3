"""Holds replicas back until the training's own network is idle.

Every byte that leaves this host for a peer passes here, a slice at a time: while no local worker communicates and the span that
began then is long enough (`gemini_ft.core.traffic.room`). A slice that has waited for too long goes anyway, and is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from gemini_ft.agent.replication.carriers import Carrier
from gemini_ft.config import TrafficConfig
from gemini_ft.core.autopsy import GroupTrail
from gemini_ft.core.traffic import LinkCost, Profile, room
from gemini_ft.wire.control_page import ControlPage

LEAST = 16 * 2**10  # bytes that must be free before anything may go, if there are as many
_PART = 16  # and a sixteenth of a slice, so that lanes do not wake for every few bytes that arrive
SLICE = 128 * 2**10  # bytes of a slice while the speed of the network is not known, and at least: smaller ones would measure delays
# Seconds for which an unforeseen collective may have to wait for the network. Pieces that workers carry cost more each, so they are larger.
_SLICE_SECONDS = {"tcp": 0.004, "rdma": 0.004, "collective": 0.02}
PATIENCE = 1.0  # seconds that a snapshot has for idle network, while the length of a step is not known
_BREATH = 0.001  # seconds between looks at how much is on its way
_OVERDUE = 0.05  # seconds between looks at whether a collective that was to come has not


@dataclass(frozen=True)
class Pass:
    """Permission to send ``nbytes`` in a span (step, collectives begun); ``outside`` of any, because the bytes were late."""

    nbytes: int
    span: tuple[int, int] | None = None
    outside: bool = False


class Gate:
    """The gate of one stream on one host."""

    def __init__(self, traffic: TrafficConfig) -> None:
        self._traffic = traffic
        self._pages: dict[int, ControlPage] = {}  # rank -> its page
        self.profiles: dict[int, Profile] = {}
        self.link: LinkCost | None = None
        self.interval = 1  # steps between snapshots
        self._in_flight: dict[object, Carrier] = {}  # sender -> its carrier
        self._waiting = 0
        self._changed = asyncio.Event()

    # -- the workers that communicate

    def watch(self, rank: int, page: ControlPage) -> None:
        """Makes the gate wait for this worker too; it owns the page from here on."""
        self.forget(rank)
        self._pages[rank] = page
        page.listen(self._waiting > 0)
        asyncio.get_running_loop().add_reader(page.bell, self._rung, page)

    def forget(self, rank: int) -> None:
        """Ends waiting for this worker: it is gone."""
        page = self._pages.pop(rank, None)
        self.profiles.pop(rank, None)
        if page is not None:
            asyncio.get_running_loop().remove_reader(page.bell)
            page.close()
        self.poke()

    def trails(self, rank: int) -> tuple[GroupTrail, ...] | None:
        """The collectives that a rank of this host has entered; None: they are not observed."""
        return self._pages[rank].trails() if rank in self._pages else None

    def close(self) -> None:
        for rank in list(self._pages):
            self.forget(rank)

    # -- the links that send

    def register(self, sender: object, carrier: Carrier) -> None:
        """Counts the bytes that this sender has under way."""
        self._in_flight[sender] = carrier

    def release(self, sender: object) -> None:
        self._in_flight.pop(sender, None)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None: not known yet."""
        return max((profile.seconds for profile in self.profiles.values()), default=None)

    @property
    def patience(self) -> float:
        """Seconds that a snapshot has to travel in idle network: until the next one is due."""
        return PATIENCE if self.step_seconds is None else self.interval * self.step_seconds

    def poke(self) -> None:
        """Makes all that wait look again: something has changed, or bytes have left."""
        self._changed.set()

    async def leave(self, nbytes: int, late_at: Callable[[], float]) -> Pass:
        """Waits until some of ``nbytes`` may be sent.

        Args:
            nbytes: that are ready.
            late_at: the time (monotonic clock) from which on they may not wait any more; asked anew after each `poke`.
        """
        if self._traffic.when == "ready" or not self._pages:
            return Pass(nbytes)
        self._listen(1)
        try:
            while (found := self._look(nbytes, late_at() - time.monotonic())) is None:
                self._changed.clear()
                try:
                    # No bell rings when the last bytes arrive, nor when a collective does not come.
                    seconds = min(late_at() - time.monotonic(), _BREATH if self._under_way else _OVERDUE)
                    async with asyncio.timeout(max(_BREATH, seconds)):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            return found
        finally:
            self._listen(-1)

    # -- inside

    def _look(self, nbytes: int, left: float) -> Pass | None:
        if not self._pages:
            return Pass(nbytes)
        if left <= 0:
            return Pass(min(nbytes, self._part), outside=True)
        moments = {rank: page.read() for rank, page in self._pages.items()}
        gaps = {rank: profile.gaps for rank, profile in self.profiles.items()}
        free = room(moments, gaps, time.monotonic(), self._under_way, link=self.link, gamma=self._traffic.gamma, most=self._slice)
        if free < min(nbytes, max(LEAST, self._part // _PART)):
            return None
        moment = next(iter(moments.values()))
        return Pass(min(nbytes, free, self._part), span=(moment.step, moment.begun))

    @property
    def _slice(self) -> int:
        if self.link is None:
            return SLICE
        return max(SLICE, int(_SLICE_SECONDS[self._traffic.transport] * self.link.bandwidth))

    @property
    def _part(self) -> int:
        """Bytes of a slice for one lane: what a collective may have to wait for is shared, so that no lane waits for the others."""
        return max(SLICE, self._slice // max(1, sum(carrier.lanes for carrier in self._in_flight.values())))

    @property
    def _under_way(self) -> int:
        return sum(carrier.unacknowledged for carrier in self._in_flight.values())

    def _listen(self, more: int) -> None:
        self._waiting += more
        if self._waiting in (0, 1):
            for page in self._pages.values():
                page.listen(self._waiting > 0)

    def _rung(self, page: ControlPage) -> None:
        page.answer()
        self._changed.set()
