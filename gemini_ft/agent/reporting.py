"""Another host's end of the commit: reports go to the leader's agent, or to a collector's, and decisions come from there.

A connection that broke is dialled again, at the next of those that will take the reports if need be (`gemini_ft.core.tree.ways_up`), and
everything undecided is reported once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from gemini_ft.agent.collecting import GATHER, HEARTBEAT, SILENCE, Collector
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.effects import Completed
from gemini_ft.core.ledger import Holders
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.messages import pack
from gemini_ft.wire.peer_messages import Admitted, Heartbeat, PeerMessage, Relayed, ReportFinished, WayUp, peers
from gemini_ft.wire.tcp import Connection, Handler

_DELAY = 0.05  # seconds after the first connection that fails; twice as many after each further one
TRIES = 6  # connections in a row that must fail before the next host is dialled: agents begin a session, and are restarted, within seconds
_LOOKS = 3  # looks in a row that must have heard nothing: this process may have been stopped itself

Dial = Callable[[Handler], Awaitable[Connection]]


class MemberLink:
    """A host's connection to the leader, or to a collector.

    Args:
        dials: connect to those that may take the reports, the preferred one first; the last one is the leader.
        on_decision: carries decisions out on this host.
        reports: everything undecided, which a leader that is reached anew must hear; the greeting is the first.
        log: takes lines for the agent's log.
        bundles: gathers what is complete here, so that it is one message per step.
        collector: takes the reports of other hosts; None: none come here.
    """

    def __init__(
        self,
        dials: Sequence[Dial],
        on_decision: Callable[[PeerMessage], None],
        reports: Callable[[], Sequence[PeerMessage]],
        log: Callable[[str], None],
        bundles: Bundles,
        collector: Collector | None = None,
    ) -> None:
        self._dials, self._on_decision, self._reports, self._log, self._bundles = dials, on_decision, reports, log, bundles
        self.collector = collector
        self._at = 0  # which of them is dialled, or connected
        self._late: asyncio.TimerHandle | None = None  # sends what waits, complete or not
        self._spoke = self._heard = 0.0  # when something was sent, and heard
        self._looks = 0  # since something was heard
        self._admitted = False  # whether the leader has heard a collector's word that this host is there
        self.connection: Connection | None = None
        self._finished: set[int] = set()
        self._lost = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._task.cancel()
        self._stop_waiting()
        if self.collector is not None:
            self.collector.close()
        if self.connection is not None:
            self.connection.abort("the session is over")

    @property
    def reaches_leader(self) -> bool:
        """Whether what is taken now goes to the leader at once."""
        return self.connection is not None and (self._is_leader or self._admitted)

    def take(self, message: PeerMessage) -> None:
        """Sends a report now, or with all others once the leader is reached again."""
        if isinstance(message, ReportFinished):
            self._finished.add(message.rank)
        if self.connection is None:
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
            self._send(message)

    @property
    def _is_leader(self) -> bool:
        """Whether the one that is dialled, or connected, is the leader."""
        return self._at == len(self._dials) - 1

    def _flush(self) -> None:
        self._stop_waiting()
        for copies in self._bundles.take():
            if self.collector is not None:
                self.collector.gather(copies)
            else:
                self._send(copies)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _send(self, message: PeerMessage) -> None:
        if self.connection is not None:
            self._spoke = time.monotonic()
            self.connection.send(message)

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self._heard, self._looks = time.monotonic(), 0
        match message:
            case Heartbeat():
                pass
            case WayUp(is_open=is_open):
                self._admitted = False
                if is_open:
                    self._greet()
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
        return None

    def _decide(self, message: PeerMessage) -> None:
        if isinstance(message, Holders):
            self._bundles.exclude(message.excluded)
            if self.collector is not None:
                self.collector.exclude(message.excluded)
        self._on_decision(message)

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        raise PeerError("raw bytes on a reporting connection")

    def on_lost(self, reason: str) -> None:
        self.connection, self._admitted = None, False
        self._stop_waiting()
        if self.collector is not None:
            self.collector.shut()
        self._lost.set()

    def _greet(self) -> None:
        """Says everything that a leader must hear that knows nothing of this host."""
        self._bundles.forget()
        for message in [*self._reports(), *(ReportFinished(rank=rank) for rank in self._finished)]:
            self.take(message)
        self._flush()

    async def _run(self) -> None:
        delay, failures = _DELAY, 0
        while True:
            self._lost.clear()
            dialled = time.monotonic()
            try:
                self.connection = await self._dials[self._at](self)
            except GeminiError as error:
                if not failures:
                    self._log(f"leader: {error}")
                failures += 1
                is_silent = time.monotonic() - dialled > SILENCE  # as an agent that is stopped, for which its kernel takes connections
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)
                if is_silent or failures % TRIES == 0:
                    delay = delay if self._is_leader else _DELAY  # once all have been tried, it is the leader that is waited for
                    self._at = (self._at + 1) % len(self._dials)
                continue
            delay, failures = _DELAY, 0
            self._heard, self._looks = time.monotonic(), 0
            if self.collector is not None:
                self.collector.open(self._send)
            self._greet()
            await self._stay()

    async def _stay(self) -> None:
        """Gives signs of life until the connection is lost, or a collector gives none."""
        while not self._lost.is_set():
            if (quiet := time.monotonic() - self._spoke) >= HEARTBEAT:
                self._send(Heartbeat())
                quiet = 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    HEARTBEAT - quiet
                ):  # wait_for would forget that it is cancelled if the connection is lost meanwhile
                    await self._lost.wait()
            self._looks += 1
            is_silent = self._looks > _LOOKS and time.monotonic() - self._heard > SILENCE
            if is_silent and not self._is_leader and self.connection is not None:
                self._log("the host that takes this host's reports to the leader is silent; another one is asked")
                self.connection.abort("it is silent")
                await self._lost.wait()
                self._at += 1
