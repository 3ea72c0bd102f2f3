"""A collector: takes the reports of other hosts to the leader in few messages, and the leader's decisions to them.

`gemini_ft.core.gathering` is its pure part, `gemini_ft.core.tree` says which hosts are collectors, and for whom. `ask` is a short question
to another host: whether reports go to the leader from there, and in which epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from gemini_ft.agent.tasks import Tasks
from gemini_ft.core.effects import Copies, Skipped
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.rounds import Pair
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire import peer_messages as wire
from gemini_ft.wire.messages import kind_of, pack
from gemini_ft.wire.tcp import Connection, MessagesOnly

if TYPE_CHECKING:
    from gemini_ft.agent.commit.failover import Failover
    from gemini_ft.agent.commit.member import MemberLink

SILENCE = 2.5  # seconds after which a host, or a collector, of which nothing is heard may be lost
GATHER = 0.25  # seconds for which a host waits for more to report, and a collector for hosts that have not reported
_TICK = 0.5  # seconds between looks at who is silent
HEARTBEAT = 1.0  # seconds without a word after which a member, or a collector, gives a sign of life
_REPORTS = (
    wire.Rejoin | Copies | Skipped | wire.ReportUploaded | wire.ReportFinished | wire.ReportNeed | wire.UploadSoon | wire.DrainHost
    | wire.Examined | wire.ReportWork | wire.ReportAccount
)  # fmt: skip


class Collector:
    """The hosts that report to this one. They stay connected while the leader is lost, and greet again when it is back."""

    def __init__(self, name: str, gathering: Gathering) -> None:
        self.name, self._gathering = name, gathering
        self._ports: dict[str, CollectorPort] = {}  # host -> its newest connection
        self._link: MemberLink | None = None  # to the leader; None: it is not reached
        self._gone: set[str] = set()  # hosts that have greeted on the present way to the leader, and are not connected any more
        self._silent: list[str] = []  # as the leader was told
        self._late: asyncio.TimerHandle | None = None  # sends what waits, complete or not
        self._epoch = 0  # that is led, as far as is known
        self._tasks = Tasks()
        self._tasks.spawn(self._tick())

    def close(self) -> None:
        self._tasks.cancel()
        self.shut()
        for port in list(self._ports.values()):
            port.connection.abort("the session is over")

    # -- the way to the leader

    def open(self, link: MemberLink, epoch: int = 0) -> None:
        """Begins to pass reports on to the leader of an epoch by a new connection, that of ``link``."""
        self._gathering.begin()
        self._link, self._epoch, self._silent, self._gone = link, epoch, [], set()
        for port in self._ports.values():
            port.send_frame(pack(self.way_up))

    @property
    def way_up(self) -> wire.WayUp:
        """The answer to a host that reports here."""
        return wire.WayUp(is_open=self._link is not None, epoch=self._epoch)

    def shut(self) -> None:
        """Stops passing reports on, as the leader is lost."""
        if self._link is not None:
            self._link = None
            self._gathering.begin()
            self._stop_waiting()
            for port in self._ports.values():
                port.send_frame(pack(self.way_up))

    # -- upwards

    def join(self, connection: Connection, host: str) -> CollectorPort:
        if (earlier := self._ports.get(host)) is not None:
            earlier.connection.abort(f"host {host} has dialled again")
            self.leave(earlier)
        self._ports[host] = port = CollectorPort(self, connection, host)
        asyncio.get_running_loop().call_soon(lambda: port.send_frame(pack(self.way_up)))  # after the word that it is accepted
        return port

    def leave(self, port: CollectorPort) -> None:
        if self._ports.get(port.host) is port:
            del self._ports[port.host]
            self._gone |= {port.host} & self._gathering.greeted.keys()
            self._gathering.leave(port.host)

    def hear(self, message: wire.PeerMessage, port: CollectorPort) -> None:
        """Takes what a host says: its copies wait for those of others, all else goes up at once, and what it said before goes before.

        The times of its steps, which come every few steps from each host, go up without that.

        Raises PeerError: it speaks for another one, or that is no report.
        """
        if not isinstance(message, _REPORTS):
            raise PeerError(f"{kind_of(message)!r} is not a report")
        if isinstance(message, Copies) and message.host != port.host:
            raise PeerError(f"host {port.host!r} reports copies of host {message.host!r}")
        is_heard = message.epoch == self._epoch if isinstance(message, wire.Rejoin) else port.host in self._gathering.greeted
        if self._link is None or self._ports.get(port.host) is not port or not is_heard:
            return
        if isinstance(message, Copies):
            self.gather(message)
            return
        if isinstance(message, Skipped) and self._gathering.skip(port.host, message):
            self._wait()
            return
        if not isinstance(message, wire.ReportWork | wire.ReportAccount):
            self.flush()
        if isinstance(message, wire.Rejoin):
            self._gathering.greet(port.host, message.attempt)
            self._gone.discard(port.host)
        self._link.send(wire.Relayed.of([port.host], message))

    def gather(self, copies: Copies) -> None:
        """Takes the copies of one host, perhaps this one; they go up when there is nothing more to wait for, or after a moment."""
        if self._gathering.add(copies):
            self.flush()
        else:
            self._wait()

    def _wait(self) -> None:
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(GATHER, self.flush)

    def flush(self) -> None:
        self._stop_waiting()
        for message in self._gathering.take():
            if self._link is None:
                continue
            if isinstance(message, Copies) and message.host != self.name:
                self._link.send(wire.Relayed.of([message.host], message))
            else:
                self._link.send(message)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # -- downwards

    @property
    def admitted(self) -> Collection[str]:
        """The hosts to which everything goes that the leader tells all."""
        return self._gathering.admitted

    def admit(self, host: str, attempt: int) -> None:
        """Records that the leader has heard a host's greeting."""
        if self._gathering.admit(host, attempt):
            self.pass_down([host], pack(wire.Admitted(host=host, attempt=attempt)))

    def exclude(self, pairs: Iterable[Pair]) -> None:
        """Replaces the set of holders that are left out."""
        self._gathering.exclude(pairs)

    def pass_down(self, hosts: Iterable[str], frame: bytes) -> None:
        """Sends a message of the leader to those of the hosts that it has admitted."""
        for host in hosts:
            if host in self._gathering.admitted:
                self._ports[host].send_frame(frame)

    async def _tick(self) -> None:
        beat = pack(wire.Heartbeat())
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            for port in self._ports.values():
                if now - port.spoke >= HEARTBEAT:
                    port.send_frame(beat)
            silent = sorted({*self._gone, *(host for host in self._gathering.greeted if now - self._ports[host].heard > SILENCE)})
            if self._link is not None and silent != self._silent:
                self._silent = silent
                self._link.send(wire.Silent(hosts=silent))


class CollectorPort(MessagesOnly):
    """A collector's end of a host's connection."""

    def __init__(self, collector: Collector, connection: Connection, host: str) -> None:
        self._collector, self.connection, self.host = collector, connection, host
        self.heard = self.spoke = time.monotonic()  # when something was heard, and sent

    def send_frame(self, frame: bytes) -> None:
        self.spoke = time.monotonic()
        self.connection.send_frame(frame)

    def on_message(self, message: wire.PeerMessage) -> memoryview | None:
        self.heard = time.monotonic()
        if not isinstance(message, wire.Heartbeat):
            self._collector.hear(message, self)
        return None

    def on_lost(self, reason: str) -> None:
        self._collector.leave(self)


async def ask(party: Failover, host: str, epoch: int) -> wire.WayUp | None:
    """The answer of a host that is asked whether reports go to the leader from there; None: there is none in time."""
    answer = _Answer()
    with contextlib.suppress(GeminiError, TimeoutError):
        async with asyncio.timeout(SILENCE):
            connection = await party.dial(host, epoch, answer)
            try:
                return await answer.told
            finally:
                connection.abort("it has answered")
    return None


class _Answer(MessagesOnly):
    """The end of a connection that is for one answer."""

    def __init__(self) -> None:
        self.told: asyncio.Future[wire.WayUp | None] = asyncio.get_running_loop().create_future()

    def on_message(self, message: wire.PeerMessage) -> memoryview | None:
        if isinstance(message, wire.WayUp) and not self.told.done():
            self.told.set_result(message)
        return None

    def on_lost(self, reason: str) -> None:
        if not self.told.done():
            self.told.set_result(None)
