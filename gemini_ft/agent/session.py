"""One incarnation of a stream on one host: links to the peers, a place in the commit, storage. All of it ends with the incarnation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from gemini_ft.agent.collecting import Collector, CollectorPort
from gemini_ft.agent.home import Home
from gemini_ft.agent.leadership import Leader, MemberPort
from gemini_ft.agent.outbound import Outbound
from gemini_ft.agent.reporting import MemberLink
from gemini_ft.agent.storing import Storing
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.gathering import Gathering
from gemini_ft.core.ledger import Cadence, Ledger
from gemini_ft.core.tree import collectors, ways_up
from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.peer_messages import PeerMessage, Rejoin, UploadSoon
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import SessionSpec


class Session:
    """The connections that this host opens for one incarnation.

    Args:
        home: the stream.
        spec: the incarnation, as its workers have agreed on it.
        on_decision: carries out the leader's decisions on this host.
    """

    def __init__(self, home: Home, spec: SessionSpec, on_decision: Callable[[PeerMessage], None]) -> None:
        self._home = home
        self._is_drained = False  # whether this host leaves: a leader must hear that the next version is due for storage
        self.outbound = Outbound(home, spec)
        self.storing = Storing(home, spec) if spec.storage is not None else None
        self._leader: Leader | None = None
        self._member: MemberLink | None = None
        name, holders = home.host.name, home.host.holders
        ways = ways_up(spec.hosts, spec.leader, spec.fan_in)
        if spec.leader == name:
            self._leader = Leader(name, _book(home, spec), spec.world_size, self.storing, on_decision, self.patience, ways)
        else:
            dials = [partial(dial, spec.addresses[up], home.claims("report", up), home.run.secret) for up in ways[name]]
            collector = Collector(name, Gathering(name, holders)) if name in collectors(ways) else None
            self._member = MemberLink(dials, on_decision, self._undecided, home.log, Bundles(name, holders), collector)

    def close(self) -> None:
        for part in (self.outbound, self._leader, self._member, self.storing.uploader if self.storing is not None else None):
            if part is not None:
                part.close()

    def join(self, connection: Connection, host: str) -> MemberPort | CollectorPort:
        """Takes in a host that reports to this one."""
        collector = self._leader or (self._member.collector if self._member is not None else None)
        if collector is None:
            raise PeerError(f"host {self._home.host.name!r} neither leads this run nor collects reports for its leader")
        return collector.join(connection, host)

    def report(self, message: PeerMessage) -> None:
        """Tells the leader, on whichever host that is."""
        self._is_drained = self._is_drained or isinstance(message, UploadSoon)
        if self._leader is not None:
            self._leader.take(message)
        elif self._member is not None:
            self._member.take(message)

    @property
    def reaches_leader(self) -> bool:
        """Whether what is reported now goes out at once."""
        return self._leader is not None or (self._member is not None and self._member.reaches_leader)

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard; the leader knows all, of the last few commits; another host those of what it holds."""
        if self._leader is not None:
            return self._leader.committed_roots(version)
        return self._home.host.committed_roots(version)

    @property
    def patience(self) -> float:
        """Seconds for which the last upload of the job is tried again."""
        return self.storing.uploader.config.patience if self.storing is not None else 0.0

    @property
    def uploading(self) -> bool:
        """Whether this host still reads a slot for storage, or waits for others to do so before it writes the manifest."""
        awaited = self._leader is not None and (self._leader.book.uploading is not None or self._leader.ending)
        return awaited or (self.storing is not None and self.storing.uploader.busy)

    @property
    def uploads(self) -> bool:
        """Whether a version is on its way to storage."""
        return self.storing is not None and self.storing.uploader.version is not None

    def _undecided(self) -> list[PeerMessage]:
        """Everything that a leader must hear that has been restarted, or could not be reached for a while."""
        host, need = self._home.host, self.outbound.pacing.need
        uploading, said = (self.storing.uploader.version, self.storing.said) if self.storing is not None else (None, [])
        attempt = time.monotonic_ns()  # goes on when the agent is restarted
        rejoin = Rejoin(attempt=attempt, committed=host.committed, uploading=uploading, roots=host.heard_roots)
        return [rejoin, *host.reports(), *said, *([need] if need is not None else []), *([UploadSoon()] if self._is_drained else [])]


def _book(home: Home, spec: SessionSpec) -> Ledger:
    """The leader's book of a new session."""
    if spec.storage is None:
        return Ledger(home.host.holders, home.host.committed, spec.replica_timeout, None)
    start = spec.resumed.iteration if spec.resumed else 0
    every_steps, every_seconds = spec.storage.get("every_steps"), spec.storage.get("every_seconds")
    cadence = Cadence(every_steps, every_seconds, start, asyncio.get_running_loop().time())  # type: ignore[arg-type]
    book = Ledger(home.host.holders, home.host.committed, spec.replica_timeout, cadence)
    book.obstacle = "storage has not been looked through yet"
    return book
