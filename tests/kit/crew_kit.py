"""Hosts that lead one after the other: the real parts of the commit on real connections, in one process and without memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gemini_ft.agent.commit.failover import Failover
from gemini_ft.agent.commit.leader import Leader
from gemini_ft.core.decisions import Cadence, Commit, Thaw
from gemini_ft.core.effects import Completed
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.tree import Succession, candidates, ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.handshake import Listener, dial, listen
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin
from gemini_ft.wire.tcp import Address, Connection, Handler

INCARNATION = Incarnation(1, "a")
SECRET = b"secret"


def version(iteration: int) -> Version:
    return Version(INCARNATION, iteration)


class Crew:
    """Hosts "h0", "h1", ..., each with the shard of its number and that of the host before it; "h0" leads first.

    Args:
        size: how many.
        fan_in: hosts that report to the leader; more of them do by way of collectors.
        timeout: seconds without a sign of life after which the first leader counts as lost.
        every: iterations between uploads.
    """

    def __init__(self, size: int, fan_in: int = 64, timeout: float = 0.5, every: int | None = None, patience: float = 30.0) -> None:
        self.names = [f"h{number}" for number in range(size)]
        self.holders = {number: (name, self.names[number - 1]) for number, name in enumerate(self.names)}
        self.ways = ways_up(self.names, "h0", fan_in)
        self.timeout, self.every, self.patience = timeout, every, patience
        self.addresses: dict[str, Address] = {}
        self.cut: set[tuple[str, str]] = set()  # (dials, is dialled): no connection comes about
        self.hosts = {name: Member(self, name) for name in self.names}
        self.lines: list[str] = []

    def __getitem__(self, number: int) -> Member:
        return self.hosts[f"h{number}"]

    async def __aenter__(self) -> Crew:
        for host in self.hosts.values():
            await host.listen()
        for host in self.hosts.values():
            host.begin()
        await self.until(lambda: all(host.failover.reaches_leader for host in self.hosts.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.end()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)

    def cut_off(self, host: str, *others: str) -> None:
        """Ends every connection that others have dialled to a host, and lets them dial no more."""
        for other in others or self.names:
            self.cut.add((other, host))
        for other, connection in self.hosts[host].incoming:
            if (other, host) in self.cut:
                connection.abort("cut")

    @property
    def alive(self) -> list[Member]:
        return [host for host in self.hosts.values() if not host.ended]

    def report(self, iteration: int, hosts: Iterable[Member] | None = None) -> None:
        """Hosts have all copies of a version that they are to hold."""
        for host in self.alive if hosts is None else hosts:
            host.complete(iteration)

    async def commit(self, iteration: int) -> None:
        """All hosts report a version, and hear that it is committed."""
        self.report(iteration)
        await self.until(lambda: all(host.committed == version(iteration) for host in self.alive))

    @property
    def epochs(self) -> set[int]:
        return {host.failover.succession.epoch for host in self.alive}

    @property
    def leaders(self) -> list[str]:
        return [host.name for host in self.alive if host.failover.leader is not None]


class Member:
    """One host: an agent's part in the commit, and what it would hold."""

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew, self.name = crew, name
        self.heard: list[PeerMessage] = []
        self.complete_versions: set[int] = set()  # iterations above the committed one
        self.committed: Version | None = None
        self.uploading: Version | None = None
        self.unstored = ""
        self.storing: object | None = None
        self.incoming: list[tuple[str, Connection]] = []
        self.ended = False
        self.listener: Listener
        self.failover: Failover

    async def listen(self, port: int = 0) -> None:
        self.listener = await listen(
            "127.0.0.1", None, lambda: SECRET, self._accept, self.crew.lines.append, lambda stream: True, preferred=port
        )
        self.crew.addresses[self.name] = self.listener.address

    def begin(self, goes_on: bool = False) -> None:
        """Opens the session, or goes on with it as an agent that was restarted."""
        crew = self.crew
        self.ended = False
        order = candidates(crew.names, "h0", crew.ways)
        self.succession = Succession(self.name, order, len(crew.names), time.monotonic(), crew.timeout, goes_on)
        self.failover = Failover(self.succession, crew.ways, crew.holders, self)  # type: ignore[arg-type]

    def end(self) -> None:
        """The agent is killed."""
        self.ended = True
        self.listener.close()
        self.failover.close()
        for _, connection in self.incoming:
            connection.abort("killed")

    async def restart(self) -> None:
        """Another agent takes the place of one that was killed, at the same address."""
        await self.listen(self.crew.addresses[self.name][1])
        self.begin(goes_on=True)

    def complete(self, iteration: int) -> None:
        self.complete_versions.add(iteration)
        for report in self._reports(iteration):
            self.failover.take(report)

    def _reports(self, iteration: int) -> list[Completed]:
        held = [owner for owner, hosts in self.crew.holders.items() if self.name in hosts]
        return [
            Completed(owner=owner, host=self.name, version=version(iteration), layout="l", digest="d", root=f"root {owner}")
            for owner in held
        ]

    def undecided(self) -> list[PeerMessage]:
        roots = {owner: f"root {owner}" for owner, hosts in self.crew.holders.items() if self.name in hosts} if self.committed else {}
        known = {"committed": self.committed, "uploading": self.uploading, "roots": roots, "unstored": self.unstored}
        rejoin = Rejoin(epoch=self.succession.epoch, attempt=time.monotonic_ns(), **known)  # type: ignore[arg-type]
        return [rejoin, *(report for iteration in sorted(self.complete_versions) for report in self._reports(iteration))]

    def decide(self, message: PeerMessage) -> None:
        self.heard.append(message)
        if isinstance(message, Commit):
            self.committed = max(message.version, self.committed or message.version)
            self.complete_versions = {each for each in self.complete_versions if each > self.committed.iteration}
            self.uploading = message.version if message.freeze else self.uploading
        elif isinstance(message, Thaw):
            self.uploading, self.unstored = None, message.error

    def led(self) -> None:
        """Nobody asks."""

    def log(self, text: str) -> None:
        self.crew.lines.append(f"{self.name}: {text}")

    def make_leader(self, epoch: int, failover: Failover) -> Leader:
        crew = self.crew
        cadence = Cadence(every_steps=crew.every) if crew.every else None
        book = Ledger(crew.holders, self.committed, crew.patience, cadence)
        return Leader(self.name, book, len(crew.names), self.storing, failover, patience=5.0, ways=crew.ways, epoch=epoch)  # type: ignore[arg-type]

    def _accept(self, connection: Connection, claims: Claims) -> Handler:
        if (claims.host, self.name) in self.crew.cut:
            raise PeerError("cut")
        self.incoming.append((claims.host, connection))
        return self.failover.join(connection, claims.host, claims.epoch, claims.promised)

    async def dial(self, host: str, epoch: int, handler: Handler) -> Connection:
        if (self.name, host) in self.crew.cut:
            raise PeerError("cut")
        promised = self.succession.epoch
        claims = Claims(run="r", stream="s", host=self.name, to=host, role="report", incarnation=None, epoch=epoch, promised=promised)
        return await dial(self.crew.addresses[host], claims, SECRET, handler)
