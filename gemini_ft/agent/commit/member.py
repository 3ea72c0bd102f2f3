"""Another host's end of the commit: reports go to the leader's agent, or to a collector's, and decisions come from there.

A connection that broke is dialled again, at the next of those that will take the reports if need be (`gemini_ft.core.tree.ways_up`), and
everything undecided is reported once more. Where the leader is lost, those that come after it are asked, in the order of
`gemini_ft.core.tree`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from gemini_ft.agent.commit.collector import GATHER, HEARTBEAT, SILENCE, Collector, ask
from gemini_ft.core.decisions import Holders
from gemini_ft.core.effects import Completed
from gemini_ft.core.gathering import Bundles
from gemini_ft.core.tree import Succession
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.handshake import TIMEOUT
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import Admitted, Heartbeat, PeerMessage, Relayed, WayUp, peers
from gemini_ft.wire.tcp import Connection, MessagesOnly

if TYPE_CHECKING:
    from gemini_ft.agent.commit.failover import Failover

_DELAY = 0.05  # seconds after the first connection that fails; twice as many after each further one
_LONGEST = 1.0  # the most of these
TRIES = 6  # connections in a row that must fail before the next host is dialled: agents begin a session within seconds of each other
_TRIES_AGAIN = 3  # of a collector that was lost: another one is there, and no commit goes on meanwhile
_LOOKS = 3  # looks in a row that must have heard nothing: this process may have been stopped itself
_AGAIN = 4  # times that a host that declines to lead is asked before the leader is dialled again
LOOK = 0.25  # seconds between looks at whether the leader is silent
RETURN = 30.0  # seconds, up to twice as many, between looks of a host that reports elsewhere at whether its own collector is there again


class _End(Enum):
    """The end of an attempt to report to a host."""

    UNREACHABLE = "it cannot be dialled"
    SILENT = "nothing was heard from it"
    DECLINED = "it does not take reports"
    BROKEN = "the connection broke"


class MemberLink:
    """A host's connection to the leader, or to a collector.

    Args:
        ways: the collectors that may take the reports, the preferred one first; after them comes the leader.
        bundles: gathers the complete copies of this host into one message per step.
        collector: takes the reports of other hosts; None: none come here.
    """

    def __init__(self, ways: Sequence[str], succession: Succession, bundles: Bundles, party: Failover, collector: Collector | None) -> None:
        self._ways, self._succession, self._bundles, self._party, self.collector = ways, succession, bundles, party, collector
        self._at = 0  # the collector that is dialled, or connected; after the last one comes the leader
        self._late: asyncio.TimerHandle | None = None  # sends what waits, complete or not
        self._spoke = self._heard = 0.0  # when something was sent, and heard
        self._looks = 0  # since something was heard
        self._is_open = False  # whether what is said goes to the leader, or to a collector that reaches it
        self._admitted = False  # whether the leader has heard a collector's word that this host is there
        self.connection: Connection | None = None
        self._way = _Way(self)  # that of the connection; what comes on any other counts for nothing
        self._early: WayUp | None = None  # came before the dialling was over
        self._end = _End.BROKEN
        self._redial_in: float = _DELAY  # seconds
        self._has_served = False  # the collector that is dialled: it has taken reports
        self._was_open = False  # whether this connection has led to the leader at any time
        self._begin_anew()
        self._lost = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._task.cancel()
        if self.collector is not None:
            self.collector.close()
        self._leave(_End.BROKEN, "the session is over")

    def turn(self) -> None:
        """Leaves the host that is dialled or connected: another one leads."""
        self._task.cancel()
        self._leave(_End.BROKEN, "another host leads")
        self._at = 0
        self._begin_anew()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def reaches_leader(self) -> bool:
        """Whether reports taken now are sent to the leader at once."""
        return self._is_open and (self._is_leader or self._admitted)

    def take(self, message: PeerMessage) -> None:
        """Sends a report now, or with all others once the leader is reached again."""
        if not self._is_open:
            return
        if isinstance(message, Completed):
            if self._bundles.add(message):
                self._flush()
            elif self._late is None:
                self._late = asyncio.get_running_loop().call_later(GATHER, self._flush)
        else:
            self._flush()  # what was said before comes before
            if self.collector is not None:
                self.collector.flush()
            self.send(message)

    @property
    def _is_leader(self) -> bool:
        """Whether the one that is dialled, or connected, is a leader, or is asked to be."""
        return self._at >= len(self._ways)

    def _flush(self) -> None:
        self._stop_waiting()
        for copies in self._bundles.take():
            if self.collector is not None:
                self.collector.gather(copies)
            else:
                self.send(copies)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def send(self, message: PeerMessage) -> None:
        """Sends a message by the present connection, if there is one."""
        if self.connection is not None:
            self._spoke = time.monotonic()
            self.connection.send(message)

    # -- what comes down

    def hear(self, message: PeerMessage, way: _Way) -> None:
        """Takes what comes on a connection, unless it has been left."""
        if way is not self._way:
            return
        self._heard, self._looks = time.monotonic(), 0
        match message:
            case Heartbeat():
                pass
            case WayUp() if self.connection is None:
                self._early = message
            case WayUp():
                self._on_way_up(message)
            case _ if not self._is_open:
                raise PeerError("a decision before the greeting")
            case Admitted() if self.collector is None:
                self._admitted = True
            case Admitted(host=host, attempt=attempt) if self.collector is not None:
                self.collector.admit(host, attempt)
            case Relayed(hosts=hosts, body=body) if self.collector is not None:
                if self.collector.name in hosts:
                    self._decide(peers.unpack(body))
                self.collector.pass_down(hosts, len(body).to_bytes(4, "big") + body)
            case _:
                self._decide(message)
                if self.collector is not None:
                    self.collector.pass_down(self.collector.admitted, pack(message))

    def _decide(self, message: PeerMessage) -> None:
        if isinstance(message, Holders):
            self._bundles.exclude(message.excluded)
            if self.collector is not None:
                self.collector.exclude(message.excluded)
        self._party.decide(message)

    def _take_early(self) -> None:
        if self._early is not None:
            self._on_way_up(self._early)

    def _on_way_up(self, told: WayUp) -> None:
        """Greets on a way to the leader of an epoch, if that is the newest one of which this host has heard."""
        self._shut()
        if self._succession.follow(told.epoch, time.monotonic()):
            self._party.led()
        if told.epoch != self._succession.epoch or not (told.is_open or not self._is_leader):
            self._leave(_End.DECLINED, "it does not lead")
        elif told.is_open:
            self._succession.reach()
            self._is_open = self._was_open = True
            if self.collector is not None:
                self.collector.open(self, told.epoch)
            self._greet()
        else:  # a collector, which looks for the leader itself
            self._succession.lose(time.monotonic())

    def _greet(self) -> None:
        """Says everything that a leader must hear that knows nothing of this host."""
        self._bundles.forget()
        for message in self._party.undecided():
            self.take(message)
        self._flush()

    def on_lost(self, reason: str, way: _Way | None = None) -> None:
        if way in (None, self._way):
            self._leave(_End.BROKEN, reason)

    def _shut(self) -> None:
        self._is_open = self._admitted = False
        self._stop_waiting()
        if self.collector is not None:
            self.collector.shut()

    def _leave(self, end: _End, reason: str) -> None:
        self._end, self._way, self._early = end, _Way(self), None
        connection, self.connection = self.connection, None
        self._shut()
        if connection is not None:
            connection.abort(reason)
        self._lost.set()

    # -- the way up

    async def _run(self) -> None:
        while (own := self._succession.own_turn(time.monotonic())) is None:
            asks = self._is_leader and bool(self._asking)
            epoch = self._asking.pop(0) if asks else self._succession.epoch
            host = self._succession.leader_of(epoch) if self._is_leader else self._ways[self._at]
            before = self._succession.epoch
            served, end = False, _End.UNREACHABLE
            if host != self._succession.name:  # else the agent before this one has led
                served, end = await self._report_to(host, epoch)
            if served or self._succession.epoch > before:
                self._begin_anew()
            if self._is_leader and (served or not asks):
                if end in (_End.SILENT, _End.DECLINED):  # it may hang, and would take the next connection too; or is another agent
                    self._succession.give_up()
                else:
                    self._succession.lose(time.monotonic())
            if not self._is_next_clear(asks, served, end):
                await asyncio.sleep(self._redial_in)
                self._redial_in = min(2 * self._redial_in, _LONGEST)
        self._party.lead(own)

    def _begin_anew(self) -> None:
        self._asking: list[int] = []  # epochs whose leaders are asked next, as the present one is lost
        self._redial_in = _DELAY
        self._failures, self._declined, self._rounds = 0, 0, 0
        self._has_said = False  # in the log, that nothing is reached

    def _is_next_clear(self, asks: bool, served: bool, end: _End) -> bool:
        """Chooses the host that is dialled next; returns whether that is done at once."""
        if not self._is_leader:
            self._failures += not served
            self._has_served |= served
            if end is _End.SILENT or (not served and self._failures % (_TRIES_AGAIN if self._has_served else TRIES) == 0):
                self._at, self._redial_in = self._at + 1, _DELAY
                if self._has_served:
                    self._has_served, self._failures = False, 0
            return served
        if end is _End.DECLINED:  # the one that was asked still hears the leader, or does not miss it yet
            self._declined += 1
            self._asking = self._ask() if self._declined % _AGAIN else []
            return False
        if asks and not served:
            return bool(self._asking)
        self._asking = self._ask()
        self._failures += not served
        if self._ways and self._failures >= TRIES:
            self._at, self._failures = 0, 0
        return served or bool(self._asking)

    def _ask(self) -> list[int]:
        now = time.monotonic()
        self._rounds += self._succession.suspects(now)
        return self._succession.to_ask(now, self._rounds)

    async def _report_to(self, host: str, epoch: int) -> tuple[bool, _End]:
        """Reports to a host, until it is lost. Returns whether it took reports at all, and how that ended."""
        self._lost.clear()
        self._way = way = _Way(self)
        self._early, self._was_open = None, False
        patience = TIMEOUT
        if self._is_leader and self._succession.silence:
            patience = min(TIMEOUT, self._succession.silence * 2 ** min(self._failures, 8))
        dialled = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                connection = await self._party.dial(host, epoch, way)
        except (GeminiError, TimeoutError) as error:
            is_silent = time.monotonic() - dialled > min(SILENCE, 0.9 * patience)  # an agent that is stopped: its kernel takes connections
            if not self._has_said:
                self._has_said = True
                self._party.log(f"host {host!r}, to which this one reports: {str(error) or f'it did not answer for {patience:g} s'}")
            return False, _End.SILENT if is_silent else _End.UNREACHABLE
        if self._lost.is_set():  # while it was dialled
            connection.abort("it is lost")
            return False, _End.BROKEN
        self.connection = connection
        self._heard, self._looks = time.monotonic(), 0
        self._take_early()
        returning = asyncio.get_running_loop().create_task(self._return()) if self._at else None
        try:
            await self._stay()
        finally:
            if returning is not None:
                returning.cancel()
        return self._was_open, self._end

    async def _return(self) -> None:
        """Turns to this host's own collector when that takes reports again: else, in time, all hosts would report to a few.

        Everything undecided is said again there, so that no commit is lost by it.
        """
        own = self._ways[0]
        while True:
            await asyncio.sleep(RETURN * (1 + random.random()))  # the hosts of one collector come back one by one
            told = await ask(self._party, own, self._succession.epoch)
            if told is not None and told.is_open and told.epoch == self._succession.epoch:
                self._at = 0
                self._leave(_End.BROKEN, f"host {own!r} takes this host's reports again")
                return

    async def _stay(self) -> None:
        """Gives signs of life until the connection is lost, or gives none."""
        while not self._lost.is_set():
            if (quiet := time.monotonic() - self._spoke) >= HEARTBEAT:
                self.send(Heartbeat())
                quiet = 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    min(HEARTBEAT - quiet, LOOK if self._is_leader else HEARTBEAT)
                ):  # wait_for would forget that it is cancelled if the connection is lost meanwhile
                    await self._lost.wait()
            self._looks += 1
            silence = self._succession.silence if self._is_leader else SILENCE
            if silence and self._looks > _LOOKS and time.monotonic() - self._heard > silence and not self._lost.is_set():
                self._party.log(
                    "the leader is silent; the next host is asked"
                    if self._is_leader
                    else "the host that takes this host's reports to the leader is silent; another one is asked"
                )
                self._leave(_End.SILENT, "it is silent")


class _Way(MessagesOnly):
    """One connection of a `MemberLink`."""

    def __init__(self, link: MemberLink) -> None:
        self._link = link

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self._link.hear(message, self)
        return None

    def on_lost(self, reason: str) -> None:
        self._link.on_lost(reason, self)
