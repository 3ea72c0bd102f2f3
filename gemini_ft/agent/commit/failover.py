"""This host's place in the commit, which changes while the session goes on: it leads, or it reports to the host that does.

`gemini_ft.core.tree` says who leads. A host that leads makes itself known to those that have not come; one that hears of a newer
epoch than its own steps down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemini_ft.agent.commit.collector import Collector, CollectorPort, ask
from gemini_ft.agent.commit.leader import Leader, MemberPort
from gemini_ft.agent.commit.member import MemberLink
from gemini_ft.agent.tasks import Tasks
from gemini_ft.core.gathering import Bundles, Gathering
from gemini_ft.core.tree import Succession, collectors
from gemini_ft.errors import PeerError
from gemini_ft.wire.messages import kind_of
from gemini_ft.wire.peer_messages import AllFinished, DrainHost, Heartbeat, PeerMessage, ReportFinished, WayUp
from gemini_ft.wire.tcp import Connection, MessagesOnly

if TYPE_CHECKING:
    from gemini_ft.agent.session import AgentSession

_LOOK = 0.5  # seconds between looks at who has not come to this leader
_AT_ONCE = 16  # hosts that a leader dials at a time to make itself known


class Failover:
    """Either a `Leader` or a `MemberLink`, one after the other, as often as the leader changes.

    Args:
        ways: of each host, those by way of which it may report while the first one leads (`gemini_ft.core.tree.ways_up`).
        holders: owner -> hosts, the owner's own first.
    """

    def __init__(
        self, succession: Succession, ways: Mapping[str, Sequence[str]], holders: Mapping[int, tuple[str, ...]], party: AgentSession
    ) -> None:
        self.succession, self._ways, self._holders, self._party = succession, ways, holders, party
        self.dial, self.led, self.log = party.dial, party.led, party.log
        self.leader: Leader | None = None
        self.member: MemberLink | None = None
        self._finished: dict[int, ReportFinished] = {}  # by rank; each leader must hear them
        self._drained: dict[str, DrainHost] = {}  # hosts that were asked to leave; the same
        self._calls = Tasks()  # to hosts that have not come
        self._is_closed = False
        if succession.begins_as_leader:
            self.lead(succession.epoch, begins=True)
        else:
            self._report()

    def close(self) -> None:
        self._is_closed = True
        self._calls.cancel()
        for part in (self.leader, self.member):
            if part is not None:
                part.close()

    # -- what this host has to say

    def take(self, message: PeerMessage) -> None:
        """Takes a report to the leader, whichever host that is."""
        self._remember(message)
        if self.leader is not None:
            self.leader.take(message)
        elif self.member is not None:
            self.member.take(message)

    def decide(self, message: PeerMessage) -> None:
        """Has a decision carried out on this host."""
        self._remember(message)
        self._party.decide(message)

    def _remember(self, message: PeerMessage) -> None:
        """Keeps what the next leader must hear as well: this one may be lost before it has reached all whom it concerns."""
        if isinstance(message, ReportFinished):
            if not message.lost or message.rank not in self._finished:
                self._finished[message.rank] = message
        elif isinstance(message, AllFinished):  # the hosts of some ranks may have left by now
            self._finished = {rank: ReportFinished(rank=rank) for rank in self._holders}
        elif isinstance(message, DrainHost):
            self._drained[message.host] = message

    def undecided(self) -> list[PeerMessage]:
        """Everything that a leader must hear that knows nothing of this host; the greeting is the first."""
        return [*self._party.undecided(), *self._drained.values(), *self._finished.values()]

    @property
    def reaches_leader(self) -> bool:
        return self.leader is not None or (self.member is not None and self.member.reaches_leader)

    # -- the other hosts

    def join(self, connection: Connection, host: str, epoch: int, promised: int) -> MemberPort | CollectorPort | Refusal:
        """Takes in a host that reports to this one, or asks it to lead; or hears of a leader that makes itself known.

        ``epoch``: the one that this host is asked to lead. ``promised``: the newest one of which that host knows.
        """
        self.hear(promised)
        if self.leader is None and self.succession.is_asked(epoch, time.monotonic()):
            self.lead(epoch)
        if self.leader is not None:
            return self.leader.join(connection, host)
        if self.member is not None and self.member.collector is not None and host != self.succession.leader:
            return self.member.collector.join(connection, host)
        return Refusal(connection, self.succession.epoch)

    def hear(self, epoch: int) -> None:
        """Records an epoch that is led: this host follows it, if it knows of no newer one."""
        if self._is_closed or not self.succession.follow(epoch, time.monotonic()):
            return
        self.led()
        if self.leader is not None:
            self._calls.cancel()
            self.leader.close()
            self._report()
        elif self.member is not None:
            self.member.turn()

    # -- the two places

    def _report(self) -> None:
        self.leader = None
        name, holders = self.succession.name, self._holders
        collector = Collector(name, Gathering(name, holders)) if name in collectors(self._ways) else None
        self.member = MemberLink(self._ways.get(name, ())[:-1], self.succession, Bundles(name, holders), self, collector)

    def lead(self, epoch: int, begins: bool = False) -> None:
        """Makes this host the leader of an epoch."""
        if self.member is not None:
            self.member.close()
            self.member = None
        if self.succession.follow(epoch, time.monotonic()):
            self.led()
        self.succession.reach()
        self.leader = self._party.make_leader(epoch, self)
        for message in [] if begins else self.undecided():
            self.leader.take(message)
        self._calls.spawn(self._call_missing(self.leader))

    async def _call_missing(self, leader: Leader) -> None:
        """Makes this leader known to hosts that have not come: they may hear another one, or not know that this one leads."""
        while True:
            await asyncio.sleep(_LOOK)
            missing = leader.missing(time.monotonic())
            for at in range(0, len(missing), _AT_ONCE):
                await asyncio.gather(*(self._call(host) for host in missing[at : at + _AT_ONCE]))

    async def _call(self, host: str) -> None:
        answer = await ask(self, host, self.succession.epoch)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.hear, answer.epoch)  # which may end this task


class Refusal(MessagesOnly):
    """The end of a connection of a host that this one cannot help: it hears which epoch is led."""

    def __init__(self, connection: Connection, epoch: int) -> None:
        asyncio.get_running_loop().call_soon(connection.send, WayUp(is_open=False, epoch=epoch))  # after the word that it is accepted

    def on_message(self, message: PeerMessage) -> memoryview | None:
        if not isinstance(message, Heartbeat):
            raise PeerError(f"{kind_of(message)!r} to a host that neither leads this run nor collects reports for its leader")
        return None

    def on_lost(self, reason: str) -> None:
        """Does nothing: whoever dialled has its answer."""
