"""One incarnation of a stream on one host: links to the peers, a place in the commit, storage. All of it ends with the incarnation.

`Incoming` takes in the peers that dial this host: readers at any time, senders and reporting hosts only in their own incarnation.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import time
from collections.abc import Mapping
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.autopsy import Autopsy, Inquest
from gemini_ft.agent.commit.collector import HEARTBEAT, CollectorPort
from gemini_ft.agent.commit.failover import Failover, Refusal
from gemini_ft.agent.commit.leader import Leader, MemberPort
from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.replication.receive import Inbound, Receiver
from gemini_ft.agent.replication.send import Outbound
from gemini_ft.agent.replication.serve import Fetcher
from gemini_ft.agent.storing import Storing
from gemini_ft.agent.tasks import RateLimitedLog, Tasks
from gemini_ft.core.decisions import Cadence
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.stragglers import StragglerWatch, WorkTime
from gemini_ft.core.tree import Succession, candidates, ways_up
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, PeerError, SupersededError
from gemini_ft.wire.handshake import certificate_at, dial
from gemini_ft.wire.network import FairShare
from gemini_ft.wire.peer_messages import Claims, PeerMessage, Rejoin, ReportWork, UploadSoon
from gemini_ft.wire.tcp import Connection, Handler
from gemini_ft.wire.worker_messages import SessionSpec

MOST_OF_A_HOST = 8  # connections at a time; one that has been lost may not be known to be so when the host dials again
_SILENCE = 5 * HEARTBEAT  # seconds after which a process that cannot be called back is given up
_TCP_INFO = struct.Struct("=52xI")  # of linux/tcp.h: tcpi_last_data_recv
READERS = 512  # connections of all readers of a stream at a time, where a job is not so large that its ranks need more

if TYPE_CHECKING:
    from gemini_ft.agent.stream import Stream


class AgentSession:
    """The connections that this host opens for one incarnation. ``goes_on``: whether it has begun with an agent before this one."""

    def __init__(self, stream: Stream, spec: SessionSpec, goes_on: bool = False) -> None:
        context = stream.context
        self._context, self._spec, self.decide, self.log = context, spec, stream.decide, context.log
        self._is_drained = False  # whether this host leaves: a leader must hear that the next version is due for storage
        self.is_left_out = False  # whether another host has said that it is in a later incarnation
        self._began = time.monotonic()
        self.outbound = Outbound(context, spec)
        self.storing = Storing(context, spec, self) if spec.storage is not None else None
        self._ways = ways_up(spec.hosts, spec.leader, spec.fan_in)
        order, size = candidates(spec.hosts, spec.leader, self._ways), len(set(spec.hosts))
        self.succession = Succession(context.host.name, order, size, self._began, spec.leader_timeout, goes_on)
        self.autopsy = Autopsy(context, spec, self.outbound.gate)
        self._work: tuple[int, dict[int, WorkTime]] = (0, {})  # the newest window, and the times of the ranks here that have reported it
        self.failover = Failover(self.succession, self._ways, context.host.holders, self)

    def close(self) -> None:
        for part in (self.outbound, self.autopsy, self.failover, self.storing.uploader if self.storing is not None else None):
            if part is not None:
                part.close()

    # -- the leader, on whichever host that is

    def make_leader(self, epoch: int, failover: Failover) -> Leader:
        book = _book(self._context, self._spec, self.storing, self._began)
        host = self._context.host
        return Leader(
            host.name,
            book,
            self._spec.world_size,
            self.storing,
            failover,
            patience=self.patience,
            ways=self._ways,
            epoch=epoch,
            may_be_committed=host.may_be_committed,
            inquest=Inquest(self._spec, self._context.run.run_id),
            stragglers=StragglerWatch(self._spec.hosts, self._spec.straggler_factor, self._context.stragglers),
        )

    async def dial(self, host: str, epoch: int, handler: Handler) -> Connection:
        """Connects to a host, which is asked to lead an epoch: its answer, `WayUp`, says whether it does."""
        claims = self._context.claims("report", host).model_copy(update={"epoch": epoch, "promised": self.succession.epoch})
        further = self._spec.further.get(host, ())
        try:
            return await dial(self._spec.addresses[host], claims, self._context.run.secret, handler, further=further)
        except PeerError as error:
            theirs = re.search(r"speaks for incarnation \S+, this host is at (\d+)-", str(error))
            self.is_left_out = self.is_left_out or (theirs is not None and int(theirs[1]) > self._spec.incarnation.number)
            raise

    def led(self) -> None:
        self._context.led(self.succession.epoch, self.succession.leader)

    @property
    def leads_in(self) -> int | None:
        """The epoch in which this host decides what is stored and deleted; None: it does not."""
        return self.succession.epoch if self.failover.leader is not None else None

    @property
    def job(self) -> dict[str, int] | None:
        """The figures of the whole job, on the host that leads."""
        leader, spec = self.failover.leader, self._spec
        if leader is None:
            return None
        absent = len(leader.missing(time.monotonic()))
        return {"ranks": spec.world_size, "hosts": len(set(spec.hosts)), "absent": absent, "left_out": len(leader.book.excluded)}

    def accounts(self) -> dict[str, tuple[float, str]]:
        """The newest accounts of all hosts, on the host that leads, which are asked for new ones; host -> when it came, and the account."""
        if (leader := self.failover.leader) is None:
            return {}
        leader.ask_accounts()
        return leader.accounts

    @property
    def unheard(self) -> list[str]:
        """The hosts of which nothing was heard just now, on the host that leads."""
        return self.failover.leader.unheard(time.monotonic()) if self.failover.leader is not None else []

    @property
    def is_obeyed(self) -> bool:
        """Whether this host leads, and it is certain that no other one does by now."""
        return self.failover.leader is not None and self.failover.leader.is_obeyed

    def join(self, connection: Connection, claims: Claims) -> MemberPort | CollectorPort | Refusal:
        return self.failover.join(connection, claims.host, claims.epoch, claims.promised)

    def report(self, message: PeerMessage) -> None:
        """Tells the leader, on whichever host that is."""
        self._is_drained = self._is_drained or isinstance(message, UploadSoon)
        self.failover.take(message)

    def worked(self, rank: int, window: int, times: WorkTime) -> None:
        """Takes a rank's times of a window; they are reported once all ranks of this host have theirs."""
        if window != self._work[0]:
            self._work = (window, {})
        ranks, host = self._work[1], self._context.host.name
        ranks[rank] = times
        if len(ranks) == self._spec.hosts.count(host):
            self.report(ReportWork(host=host, window=window, ranks=ranks))

    @property
    def reaches_leader(self) -> bool:
        return self.failover.reaches_leader

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard; the leader knows all, of the last few commits; another host those of what it holds."""
        if self.failover.leader is not None and (roots := self.failover.leader.committed_roots(version)):
            return roots
        return self._context.host.committed_roots(version)

    @property
    def patience(self) -> float:
        """Seconds for which the last upload of the job is tried again."""
        return self.storing.uploader.config.patience if self.storing is not None else 0.0

    @property
    def uploading(self) -> bool:
        """Whether this host still reads a slot for storage, or waits for others to do so before it writes the manifest."""
        leader = self.failover.leader
        awaited = leader is not None and (leader.book.uploading is not None or leader.ending)
        return awaited or (self.storing is not None and self.storing.uploader.busy)

    @property
    def uploads(self) -> bool:
        """Whether a version is on its way to storage."""
        return self.storing is not None and self.storing.uploader.version is not None

    def undecided(self) -> list[PeerMessage]:
        host, need = self._context.host, self.outbound.pacing.need
        uploading, said = (self.storing.uploader.version, self.storing.said) if self.storing is not None else (None, [])
        attempt = time.monotonic_ns()  # goes on when the agent is restarted
        unstored = self.storing.uploader.unstored if self.storing is not None else ""
        epoch, committed, roots = self.succession.epoch, host.committed, host.heard_roots
        rejoin = Rejoin(epoch=epoch, attempt=attempt, committed=committed, uploading=uploading, roots=roots, unstored=unstored)
        return [rejoin, *host.reports(), *said, *([need] if need is not None else []), *([UploadSoon()] if self._is_drained else [])]


def _book(context: StreamContext, spec: SessionSpec, storing: Storing | None, began: float) -> Ledger:
    """The book of a leader: of a new session, or in place of one that is lost. ``began``: when the session did here."""
    cadence: Cadence | None = None
    if spec.storage is not None and storing is not None:
        start, last = spec.resumed.iteration if spec.resumed else 0, began
        if (stored := storing.uploader.stored) is not None and stored[0].incarnation == spec.incarnation:
            start, last = max(start, stored[0].iteration), max(began, time.monotonic() - max(0.0, time.time() - stored[1]))
        due: dict[str, Any] = {name: spec.storage.get(name) for name in ("every_steps", "every_seconds")}
        cadence = Cadence(**due, last_iteration=start, last_time=last, at_end=storing.uploader.config.at_end)
    book = Ledger(context.host.holders, context.host.committed, spec.replica_timeout, cadence)
    known = [version for version in (context.host.agreed, spec.resumed) if version is not None]  # all ranks have begun with the second
    book.agreed = max(known, default=None)
    book.obstacle = "storage has not been looked through yet" if cadence is not None else ""
    return book


class Incoming:
    """The connections that peers have opened for one stream."""

    def __init__(self, stream: Stream, inbound: Inbound) -> None:
        self._stream, self._context, self._inbound = stream, stream.context, inbound
        self.log = stream.context.log
        self._connections: set[Connection] = set()  # that may hold slots
        self._senders: dict[str, Connection] = {}  # host -> the one on which it sends its shards
        self._callers = Callers(self)
        self._readers = FairShare[Connection](READERS, self._end_reading)
        self._log_rarely = RateLimitedLog(self.log)

    def close(self) -> None:
        """Ends all connections that may hold slots."""
        self._callers.close()
        self._callers = Callers(self)
        for connection in list(self._connections):
            connection.abort("the session is over")

    def accept(self, connection: Connection, claims: Claims) -> Handler:
        """Takes in a peer that has proved to know the secret."""
        spec, session = self._context.spec, self._stream.present_session
        if claims.role == "fetch":
            self._readers.most = self._most_readers
            self._readers.take(connection, connection.peer)
            return self._tracked(connection, Fetcher(self._context, connection, claims.host, self))
        if spec is None or session is None or claims.incarnation != spec.incarnation:
            mine = spec.incarnation if spec is not None else "none"
            raise SupersededError(f"host {claims.host!r} speaks for incarnation {claims.incarnation}, this host is at {mine}")
        if claims.host not in spec.addresses:
            raise AgentError(f"host {claims.host!r} has no part in incarnation {spec.incarnation}")
        self._callers.let_in(connection, claims.host)
        if claims.role == "report":
            return session.join(connection, claims)
        if (earlier := self._senders.get(claims.host)) is not None:
            # Bytes on their way there must not land in a slot that this connection fills from now on.
            earlier.abort(f"host {claims.host} has dialled again")
        self._senders[claims.host] = connection
        return self._tracked(connection, Receiver(self._inbound, connection, claims.host))

    @property
    def _most_readers(self) -> int:
        """Readers at a time: in a job that goes on in another size, every rank reads every shard, and keeps the connections."""
        host, spec = self._context.host, self._context.spec
        held = sum(host.name in hosts for hosts in host.holders.values())
        most, descriptors = max(READERS, held * spec.world_size if spec is not None else 0), getrlimit(RLIMIT_NOFILE)[0]
        return most if descriptors == RLIM_INFINITY else max(1, min(most, descriptors // 16))

    def _end_reading(self, connection: Connection) -> None:
        text = f"{self._readers.most} readers are more than this agent has room for, and most of them come from its address"
        self._log_rarely(f"{connection.peer} may read no longer: {text}")
        connection.abort(text)

    async def certificate_of(self, host: str) -> bytes:
        """The certificate that is shown at a host's address."""
        spec = self._context.spec
        assert spec is not None
        return await certificate_at(spec.addresses[host], self._context.run.secret, further=spec.further.get(host, ()))

    def disown(self, host: str) -> None:
        """Forgets what a process has said that used a host's name, and whose connections are gone."""
        if (session := self._stream.present_session) is not None and session.failover.leader is not None:
            session.failover.leader.disown(host)

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        return (self._stream.present_session or self._context.host).committed_roots(version)

    def _tracked(self, connection: Connection, handler: Handler) -> Handler:
        """Keeps a handler's connection, to end it with the session."""
        self._connections.add(connection)
        return _Tracked(self, connection, handler)

    def lost(self, connection: Connection, reason: str) -> None:
        self._connections.discard(connection)
        self._readers.give_back(connection)
        if connection.refused:
            self.log(f"{connection.peer}: {reason}")


class Callers:
    """The hosts that have dialled this one in a session, and the certificate by which each is known.

    Each process has a certificate of its own (`gemini_ft.wire.trust`), which does not name its host. But the workers of a session have
    agreed on the address of each host: where two processes give one name, the process that answers at that address is taken for the host.
    """

    def __init__(self, doors: Incoming) -> None:
        self._doors = doors
        self._open: dict[str, list[Connection]] = {}  # by host; all connections of one host have the same certificate
        self._proved: dict[str, bytes] = {}  # by host: the certificate that it showed when it was called back
        self._asked: set[str] = set()  # hosts that are being called back
        self._tasks = Tasks()

    def close(self) -> None:
        self._tasks.cancel()

    def let_in(self, connection: Connection, host: str) -> None:
        """Takes in a connection of a host, which is believed as long as no other process gives that host's name.

        Raises AgentError: another process gives it, too. The host is called back, and the one of the two that is the host may dial again.
        """
        there = [each for each in self._open.get(host, ()) if not each.closed.is_set()]
        known = self._proved.get(host) or (there[0].certificate if there else connection.certificate)
        if connection.certificate != known:
            if host not in self._asked:
                self._asked.add(host)
                self._tasks.spawn(self._call_back(host))
            raise AgentError(f"another process is known here as host {host!r}, which is called back at its address; dial again")
        self._open[host] = [*there, connection]
        if len(there) >= MOST_OF_A_HOST:
            there[0].abort(f"host {host} has dialled {MOST_OF_A_HOST} times since")

    async def _call_back(self, host: str) -> None:
        try:
            self._proved[host] = found = await self._doors.certificate_of(host)
        except Exception:  # of any kind. Nobody answers there: once the present connections are gone, the next process is believed
            self._proved.pop(host, None)
            self._give_up_if_silent(host)
        else:
            if impostors := [each for each in self._open.get(host, ()) if each.certificate != found and not each.closed.is_set()]:
                self._doors.log(f"a process that is not at its address has called itself host {host!r}: its connections are closed")
                for connection in impostors:
                    connection.abort(f"it is not host {host}")
                for connection in impostors:
                    await connection.closed.wait()
                self._doors.disown(host)
        finally:
            self._asked.discard(host)

    def _give_up_if_silent(self, host: str) -> None:
        """Ends the connections of a process that has been lost, or stopped, and keeps the host's next one out: its kernel may live on."""
        there = [each for each in self._open.get(host, ()) if not each.closed.is_set()]
        if there and min(map(silence_of, there)) > _SILENCE:
            self._doors.log(
                f"host {host!r} is not at its address, and has been silent for more than {_SILENCE:g} s: its connections are closed"
            )
            for connection in there:
                connection.abort(f"host {host} is silent, and another process gives its name")


def silence_of(connection: Connection) -> float:
    """Seconds since anything has come from a peer, be it a message or a part of a payload; that its kernel lives does not count."""
    found = float("inf")
    sockets = [connection.transport.get_extra_info("socket")] if connection.transport is not None else []
    for sock in [*sockets, *connection.payload_sockets]:
        with contextlib.suppress(OSError):  # it has been closed
            (milliseconds,) = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
            found = min(found, milliseconds / 1000)
    return found


class _Tracked:
    """A handler whose end is noticed."""

    def __init__(self, doors: Incoming, connection: Connection, inner: Handler) -> None:
        self._doors, self._connection, self._inner = doors, connection, inner
        self.on_message, self.on_bytes = inner.on_message, inner.on_bytes

    def on_lost(self, reason: str) -> None:
        self._doors.lost(self._connection, reason)
        self._inner.on_lost(reason)
