"""The commit, out of band: every host's agent reports to the leader's, which keeps the ledger and tells all.

``Leader`` runs in one agent, beside rank 0; `gemini_ft.agent.commit.member` has the end of all others. Both hand
decisions to their stream as the same messages.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from gemini_ft import failpoints
from gemini_ft.agent.autopsy import Inquest
from gemini_ft.agent.commit.collector import SILENCE
from gemini_ft.agent.storing import Storing
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.uploads import UnclearUploadError
from gemini_ft.core.decisions import Abort, Commit, Decision, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.ledger import ENDED, Ledger
from gemini_ft.core.stragglers import StragglerWatch
from gemini_ft.core.traffic import Pace
from gemini_ft.core.tree import Ways
from gemini_ft.core.versions import Version
from gemini_ft.core.words import named
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire import peer_messages as wire
from gemini_ft.wire.messages import Notice, Paced, kind_of, pack
from gemini_ft.wire.tcp import Connection, MessagesOnly

if TYPE_CHECKING:
    from gemini_ft.agent.commit.failover import Failover

_LONGEST = 128  # characters of a hash or a nonce; a report with a longer one is ignored
_REMEMBERED = 16  # commits whose roots are kept for readers: the job has moved on when they ask
_TICK = 0.25  # seconds between looks for late holders
_AT_LEAST = 3.0  # seconds for which the last upload is tried, however little patience there is
_SETTLING = 1.0  # seconds for what is under way at the end of a job to be decided, beyond the replicas' time
_AGAIN = 5.0  # seconds between two attempts at the last upload of a job
SLOW_UPLOAD = 600.0  # seconds
WITHHELD = 60.0  # seconds without a commit while a version is under way: more than an agent that is slow takes to be replaced
LOST_SECONDS = 20.0  # of silence, after which a host's part of an upload is not waited for any longer
NO_COLLECTORS: Mapping[str, Sequence[str]] = MappingProxyType({})
TIDY_AGAIN = 2.0  # seconds between two attempts to delete old checkpoints
_LONGEST_ACCOUNT = 2**18  # characters of a host's account of itself
_ALL_ACCOUNTS = 2**26  # of all hosts' accounts, of which each host has an equal part in any case
_AHEAD = 8  # steps that a change of pace is announced before it counts; a rank that hears it later loses a snapshot


def _names(report: Completed | Copies | Gathered | Skipped | GatheredSkips) -> Iterator[str]:
    """The nonce and the hashes in a report: texts whose length the reporting host chooses."""
    yield report.version.incarnation.nonce
    if not isinstance(report, Skipped | GatheredSkips):
        yield from (report.layout, report.digest)
    if isinstance(report, Completed):
        yield report.root
    elif isinstance(report, Copies):
        yield from report.roots.values()


class Leader:
    """Keeps the ledger, and the connections of the other hosts.

    Args:
        storing: writes manifests and deletes old checkpoints; None: nothing is stored.
        party: carries decisions out on this host.
        patience: seconds for which the last upload is tried again.
        ways: of each other host, those by way of which it may report (`gemini_ft.core.tree.ways_up`).
        epoch: the one that it leads (`gemini_ft.core.tree`).
        may_be_committed: whether another host is believed when it says that a version was committed.
    """

    def __init__(
        self,
        host: str,
        book: Ledger,
        world_size: int,
        storing: Storing | None,
        party: Failover,
        *,
        patience: float = 0.0,
        ways: Mapping[str, Sequence[str]] = NO_COLLECTORS,
        epoch: int = 0,
        may_be_committed: Callable[[Version], bool] = lambda version: True,
        inquest: Inquest | None = None,
        stragglers: StragglerWatch | None = None,
    ) -> None:
        self._host, self._allowed, self._epoch, self._may_be_committed = host, ways, epoch, may_be_committed
        self.book, self._world_size, self._storing, self._party, self._patience = book, world_size, storing, party, patience
        self._ends_by: float | None = None  # until when the last upload of a finished job is tried again
        self._again_at, self._settled_by, self._ended = 0.0, 0.0, False
        self._ways: Ways[MemberPort] = Ways()
        self._ports: set[MemberPort] = set()  # all that are connected, also those that have not greeted
        self._lost: dict[str, float] = {}  # host that cannot be reached -> when something was heard of it last, as far as is known
        self._finished: set[int] = set()
        self._has_named_alone = False
        self._at_work = {rank for rank in book.holders if book.owns(host, rank)}  # ranks of this host that have not finished
        self._pace: Pace | None = None  # begins with the knowledge of the first to report: this leader may have been restarted
        self._paced: Paced | None = None  # the last change
        self._inquest, self._stragglers = inquest, stragglers
        self.accounts: dict[str, tuple[float, str]] = {}  # host -> when its account of itself came, and that account
        self._of_accounts = 0  # characters
        self._began = time.monotonic()
        self._newest = 0  # iteration that was spoken of
        self._upload: tuple[Version | None, float] = (None, 0.0)  # under way, since (or when that was last said)
        self._committed: tuple[Version | None, float] = (None, self._began)  # that was, and since when the next one is under way
        self._gone: dict[str, float] = {}  # host of which nothing is heard while an upload is under way -> since when
        self._writing: Version | None = None  # the upload of which all shards are stored, and the manifest is being written
        self._drained: set[str] = set()  # hosts that were asked to leave; one that could not be told is when it joins again
        self._roots: deque[tuple[Version, Mapping[int, str]]] = deque(maxlen=_REMEMBERED)
        self._tasks = Tasks()
        self._tasks.spawn(self._tick())
        if book.obstacle:
            self._tasks.spawn(self._tidy())

    def close(self) -> None:
        self._tasks.cancel()
        if self._inquest is not None:
            self._inquest.close()
        for port in list(self._ports):
            port.connection.abort("the session is over")

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard, of a version that was committed not long ago."""
        if self.book.committed == version:
            return self.book.roots
        return next((roots for known, roots in self._roots if known == version), {})

    def join(self, connection: Connection, host: str) -> MemberPort:
        port = MemberPort(self, connection, host)
        self._ports.add(port)
        asyncio.get_running_loop().call_soon(port.tell, wire.WayUp(is_open=True, epoch=self._epoch))  # after the word that it is accepted
        return port

    def through(self, port: MemberPort) -> set[str]:
        """The hosts that are reached on a connection."""
        return self._ways.through(port)

    def disown(self, host: str) -> None:
        """Forgets the greetings in the name of a host that another process has sent, once its connections are gone.

        The host's own next one counts then. One that is reached by another way, through a collector, has greeted there itself.
        """
        self._ways.forget_lost(host)

    def leave(self, port: MemberPort) -> None:
        self._ports.discard(port)
        lost = self._ways.lose(port)
        self._lost |= {host: -math.inf if host in port.silent else port.heard for host in lost}

    def hear(self, message: wire.PeerMessage, host: str, port: MemberPort) -> None:
        """Takes what another host says, unless it has turned elsewhere since it said that (`gemini_ft.core.tree.Ways`).

        It is not believed about anything that belongs to another host.

        Raises PeerError: it speaks for a third one, does not report by way of that connection's host, or that is no report.
        """
        if host != port.host and port.host not in self._allowed.get(host, ()):
            raise PeerError(f"host {port.host!r} is no collector for host {host!r}")
        if isinstance(message, wire.Rejoin):
            is_late = message.epoch != self._epoch or host == self._host
            if is_late or not self._ways.greet(host, message.attempt, port):
                return
            self._lost.pop(host, None)
            can_be = message.committed is not None and self._may_be_committed(message.committed)  # else a lie, or of memory not known here
            roots = {owner: root for owner, root in message.roots.items() if can_be and host in self.book.holders.get(owner, ())}
            message = message.model_copy(update={"committed": message.committed if can_be else None, "roots": roots})
            if host != port.host:
                port.connection.send(wire.Admitted(host=host, attempt=message.attempt))
        elif not self._ways.counts(host, port):
            return
        if isinstance(message, Gathered | GatheredSkips) or (isinstance(message, Completed | Copies) and message.host != host):
            raise PeerError(f"host {host!r} reports copies of another host")
        match message:
            case Skipped(owner=rank) | wire.ReportUploaded(owner=rank) if not self.book.owns(host, rank):
                return
            case wire.ReportNeed(host=of) | wire.Examined(host=of) | wire.ReportWork(host=of) | wire.ReportAccount(host=of) if of != host:
                return
            case wire.ReportFinished(rank=rank, lost=lost) if not self.book.owns(host, rank):  # the leader before this one may have told it
                if not lost:
                    self._finish(rank)
            case _:
                self.take(message, Audience({host}, port))

    def hear_gathered(self, message: Gathered | GatheredSkips, port: MemberPort) -> None:
        """Takes what a collector has gathered, of the hosts that still report by way of it."""
        kept = message.only({host for host in message.hosts if self._ways.counts(host, port)})
        if isinstance(kept, GatheredSkips):
            owned = {host: [rank for rank in ranks if self.book.owns(host, rank)] for host, ranks in kept.owners.items()}
            kept = replace(kept, owners={host: ranks for host, ranks in owned.items() if ranks})
        if kept.hosts:
            self.take(kept, Audience(set(kept.hosts), port))

    def take(self, message: wire.PeerMessage, member: Audience | None = None) -> None:
        """Takes a report, of another host or our own; ``member``: who hears the answer, if it is for nobody else."""
        now = time.monotonic()
        if isinstance(message, Completed | Copies | Gathered | Skipped | GatheredSkips):
            if max(map(len, _names(message))) > _LONGEST:  # the book keeps them
                return
            self._newest = max(self._newest, message.version.iteration)
            is_late = not isinstance(message, Skipped | GatheredSkips) and message.version in self.book.aborted
            decisions = self.book.report(message, now)
            self._name_alone(decisions)
            if is_late:  # all others have heard it: if every host were answered before all, that would be its square
                self._repeat(decisions, member)
            else:
                self._apply(decisions)
        elif isinstance(message, wire.ReportUploaded):
            outcome = (
                self.book.upload_over(message.version, message.error)
                if message.error
                else self.book.uploaded(message.owner, message.version, message.record)
            )
            self._apply(outcome)
        elif isinstance(message, wire.Rejoin):
            self._welcome(message, now, member)
        elif isinstance(message, wire.ReportNeed):
            self._pace = self._pace or Pace(message.interval)
            if self._pace.report(message.host, message.steps):
                self._paced = Paced(start=self._newest + _AHEAD, interval=self._pace.interval, why=message.why)
                self.tell(self._paced)
            elif message.interval != self._pace.interval:  # it has not heard of a change, perhaps by the leader before this one
                self.tell(self._paced or Paced(start=self._newest + _AHEAD, interval=self._pace.interval, why=message.why), member)
        elif isinstance(message, wire.UploadSoon):
            self._apply(self.book.upload_soon(now))
        elif isinstance(message, wire.DrainHost):
            if message.host in self.book.hosts and message.host not in self._drained:  # hosts repeat it to a new leader
                self._drained.add(message.host)
                self.tell(message)
        elif isinstance(message, wire.Examined) and self._inquest is not None:
            self._inquest.hear(message, self)
        elif isinstance(message, wire.ReportWork) and self._stragglers is not None:
            if (text := self._stragglers.add(message.host, message.window, message.ranks)) is not None:
                self.tell(wire.Stragglers(ranks=sorted(self._stragglers.slow), text=text))
        elif isinstance(message, wire.ReportAccount):
            length, others = len(message.document), self._of_accounts - len(self.accounts.get(message.host, (now, ""))[1])
            if length <= min(_LONGEST_ACCOUNT, max(_ALL_ACCOUNTS - others, _ALL_ACCOUNTS // len(self.book.hosts))):
                self.accounts[message.host], self._of_accounts = (now, message.document), others + length
        elif isinstance(message, wire.ReportFinished):
            self._apply(self.book.finish(message.rank))
            if message.lost:
                return
            if member is None and message.rank in self._at_work:  # other hosts remember their own ranks
                self._at_work.discard(message.rank)
                self._tell_others(message)  # the next leader, perhaps with this host's next agent, hears it from them
            self._finish(message.rank)
        else:
            raise PeerError(f"{kind_of(message)!r} is not a report")

    def _name_alone(self, decisions: Sequence[Decision]) -> None:
        """Says once that ranks make steps although another one has finished: none of these can be committed."""
        for each in decisions if self._finished and not self._has_named_alone else ():
            if isinstance(each, Abort) and each.reason.endswith(ENDED):
                self._has_named_alone = True
                text = f"iteration {each.version.iteration} has no snapshot: {each.reason}. No later one will have any, and a failure "
                self.tell(Notice(text=f"{text}costs them all. Give all ranks the same number of steps to protect each"))

    def _finish(self, rank: int) -> None:
        """Counts a rank as finished. The job has finished when all ranks have, and those of this host have said so themselves."""
        if rank in self.book.holders:
            self._finished.add(rank)
        if len(self._finished) == self._world_size and not self._at_work and self._ends_by is None:
            now = time.monotonic()
            self._ends_by, self._settled_by = now + max(self._patience, _AT_LEAST), now + self.book.replica_timeout + _SETTLING
            self._end(now)

    def _repeat(self, decisions: Sequence[Decision], member: Audience | None) -> None:
        """Tells one host again that a version is aborted, which was decided before its copies were complete, or while it was away."""
        for decision in dict.fromkeys(decision for decision in decisions if isinstance(decision, Abort)):
            if member is not None:
                member.send(decision)
            else:
                self._party.decide(decision)

    def _welcome(self, message: wire.Rejoin, now: float, member: Audience | None) -> None:
        """Tells a host that has joined what it may have missed; all others as well, if it is news to this leader too."""
        before = self.book.committed
        host = next(iter(member.hosts)) if member is not None else ""
        for decision in self.book.rejoin(message.committed, now, message.roots, host):
            if member is None or (isinstance(decision, Commit) and self.book.committed != before):
                self._apply([decision])
            else:
                member.send(self.book.addressed(decision, host) if isinstance(decision, Commit) else decision)
        if message.committed is not None:
            self._newest = max(self._newest, message.committed.iteration)
        if message.unstored:
            self.book.note_unstored(message.unstored)
        self._settle_upload(message.uploading, member)
        if self._epoch:  # the leader before this one may have left out others
            self.tell(Holders(epoch=self.book.epoch, excluded=frozenset(self.book.excluded), newly=frozenset()), member)
        if self._paced is not None:
            self.tell(self._paced, member)
        if member is not None and self._stragglers is not None and self._stragglers.slow:  # one that knows it already says nothing of it
            self.tell(wire.Stragglers(ranks=sorted(self._stragglers.slow), text=self._stragglers.text), member)
        if member is not None and host in self._drained:
            self.tell(wire.DrainHost(host=host), member)
        if member is not None and self._ended:
            self.tell(wire.AllFinished(unstored=self.book.unstored), member)

    @property
    def ending(self) -> bool:
        """Whether all ranks have finished and the last upload has not."""
        return self._ends_by is not None and not self._ended

    def _end(self, now: float) -> None:
        """Uploads what a finished job has committed last, for as long as configured, and then tells all that it is over."""
        if self._ended or self._ends_by is None or self.book.uploading is not None:
            return
        if self.book.is_under_way and now < self._settled_by:  # `Ledger.tick` decides it
            self._ends_by = max(self._ends_by, now + _AT_LEAST)
            return
        if self._epoch and not self.book.upload_error and self.book.is_overdue(now):
            self.book.note_unstored("the host that led the commits was lost before it was stored")
        if not self.book.unstored or self.book.has_diverged or now >= self._ends_by:
            self._ended = True
            self.tell(wire.AllFinished(unstored=self.book.unstored))
        elif now >= self._again_at and not self.book.obstacle:
            self._again_at = now + _AGAIN
            self._tasks.spawn(self._store_last())

    async def _store_last(self) -> None:
        version = self.book.committed
        if self._storing is not None and version is not None and await self._storing.uploader.holds(version):
            self.book.stored = version  # by an attempt before this one, which has failed after its work
        else:
            self._apply(self.book.upload_last())

    def _settle_upload(self, theirs: Version | None, member: Audience | None) -> None:
        """Ends an upload in the middle of which one side was restarted: it cannot become whole any more."""
        uploading = self.book.uploading
        if uploading is not None and theirs != uploading and self._writing != uploading:
            self._apply(self.book.upload_over(uploading, "an agent was restarted during the upload"))
        if theirs is not None and theirs != self.book.uploading:
            error = "the leader's agent was lost during the upload"
            self.book.note_unstored(error)
            self.tell(Thaw(version=theirs, error=error, unclear=True), member)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            self._apply(self.book.tick(now, self._absent(now)))
            self._watch_upload(now)
            self._watch_owners(now)
            self._end(now)
            for port in self._ports:
                if now - port.spoke >= _TICK:
                    port.tell(wire.Heartbeat())

    def missing(self, now: float) -> list[str]:
        """Hosts that have not been here, or are not any more, and of which nothing is heard."""
        here = {host for port in self._ways.open for host in self._ways.through(port)}
        lost = (host for host in self.book.hosts if host not in here and host != self._host)
        return [host for host in lost if now - max(self._lost.get(host, -math.inf), self._began) > SILENCE / 2]

    def unheard(self, now: float) -> list[str]:
        """Hosts of which nothing was heard just now, whether their connections are known to be lost or not."""
        silent = (host for port in self._ways.open if now - port.heard > SILENCE / 2 for host in self._ways.through(port))
        return sorted({*self.missing(now), *silent})

    @property
    def is_obeyed(self) -> bool:
        """Whether every other host reports here, and was just heard: none of them obeys another leader, then."""
        heard = [port for port in self._ways.open if time.monotonic() - port.heard < SILENCE / 2]
        return set(self.book.hosts) <= {self._host, *(host for port in heard for host in self._ways.through(port) - port.silent)}

    def _absent(self, now: float) -> set[str]:
        found = {host for host, heard in self._lost.items() if now - heard > SILENCE}
        for port in self._ways.open:
            hosts = self._ways.through(port)
            found |= hosts if now - port.heard > SILENCE else hosts & port.silent
        return found

    def _watch_upload(self, now: float) -> None:
        """Ends an upload that a lost host keeps from its end, and warns when storage takes very long: it may hang.

        Meanwhile nothing else is uploaded.
        """
        absent = {*self._absent(now), *self.missing(now)} if self.book.uploading is not None else set[str]()
        self._gone = {host: self._gone.get(host, now) for host in absent}
        self._apply(self.book.miss([host for host, since in self._gone.items() if now - since >= LOST_SECONDS]))
        version, since = self._upload
        if self.book.uploading != version:
            self._upload = (self.book.uploading, now)
        elif version is not None and now - since > SLOW_UPLOAD:
            self._upload = (version, now)
            self.tell(Notice(text=f"storage: the upload of {version} is not over after {SLOW_UPLOAD:g} s more; does the storage hang?"))

    def _watch_owners(self, now: float) -> None:
        """Names, once, the hosts whose own shards do not come: no commit can do without them, nor is anything known of them."""
        if self._committed[0] != self.book.committed or not self.book.is_under_way:
            self._committed = (self.book.committed, now)
        elif now - self._committed[1] > WITHHELD and (hosts := self.book.withholding):
            self._committed = (self.book.committed, math.inf)
            text = f"nothing has been committed for {WITHHELD:g} s, as hosts have not reported their own shards: {named(hosts)}"
            self.tell(Notice(text=f"{text}. If that goes on, start the job again without them"))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, WriteManifest):
                self._tasks.spawn(self._manifest(decision))
            else:
                if isinstance(decision, Commit):
                    failpoints.reached("agent_decides", decision.version.iteration)
                    self._roots.append((decision.version, decision.roots))
                self.tell(decision)

    async def _manifest(self, decision: WriteManifest) -> None:
        error, unclear, self._writing = "", False, decision.version
        try:
            assert self._storing is not None
            await self._storing.uploader.write_manifest(decision.version, dict(decision.records))
            if trouble := await self._storing.tidy():
                self.book.obstacle = trouble
                self._tasks.spawn(self._tidy(TIDY_AGAIN))
        except GeminiError as failure:
            error, unclear = str(failure), isinstance(failure, UnclearUploadError)
        except Exception as failure:  # a fault of ours must not leave the upload unfinished for ever
            error, unclear = f"{type(failure).__name__}: {failure}", True
        self._writing = None
        self._apply(self.book.upload_over(decision.version, error, unclear))

    async def _tidy(self, pause: float = 0.0) -> None:
        """Deletes old checkpoints; nothing is uploaded until that has succeeded."""
        await asyncio.sleep(pause)
        assert self._storing is not None
        while trouble := await self._storing.tidy():
            self.book.obstacle = trouble
            await asyncio.sleep(TIDY_AGAIN)
        self._apply(self.book.unobstructed(time.monotonic()))

    def ask_accounts(self) -> None:
        """Asks all hosts for their accounts of themselves, which come in `accounts`."""
        self.tell(wire.AskAccount())

    def tell(self, message: wire.PeerMessage, member: Audience | None = None) -> None:
        """Tells all hosts, this one last; or one of them alone."""
        if member is not None:
            member.send(message)
            return
        self._tell_others(message)
        self._party.decide(self.book.addressed(message, self._host) if isinstance(message, Commit) else message)

    def _tell_others(self, message: wire.PeerMessage) -> None:
        now = time.monotonic()
        general, apart = message, frozenset[str]()
        if isinstance(message, Commit):
            general, apart = replace(message, roots={}, agreed=True), frozenset(self.book.apart(message))
        frame = pack(general)  # once, as nearly all hosts hear the same
        for port, hosts in self._ways.audiences(apart):
            if hosts is None:
                port.spoke = now
                port.connection.send_frame(frame)
            elif isinstance(message, Commit) and hosts <= apart:
                Audience(hosts, port).send(self.book.addressed(message, next(iter(hosts))))
            else:
                Audience(hosts, port).send(general)


@dataclass(frozen=True)
class Audience:
    """Some of the hosts that are reached on one connection."""

    hosts: set[str]
    port: MemberPort

    def send(self, message: wire.PeerMessage) -> None:
        """Sends to these hosts; a message that is not relayed reaches every host behind the connection."""
        connection = self.port.connection
        connection.send(message if self.port.is_alone else wire.Relayed.of(sorted(self.hosts), message))


class MemberPort(MessagesOnly):
    """The leader's end of another host's connection, on which a collector also passes on what others say."""

    def __init__(self, leader: Leader, connection: Connection, host: str) -> None:
        self._leader, self.connection, self.host = leader, connection, host
        self.heard = self.spoke = time.monotonic()  # when something was heard, and sent to all that are reached here
        self.silent: frozenset[str] = frozenset()  # hosts of a collector of which it hears nothing

    def tell(self, message: wire.PeerMessage) -> None:
        self.spoke = time.monotonic()
        self.connection.send(message)

    @property
    def is_alone(self) -> bool:
        return self._leader.through(self) <= {self.host}

    def on_message(self, message: wire.PeerMessage) -> memoryview | None:
        self.heard = time.monotonic()
        match message:
            case wire.Heartbeat():
                pass
            case wire.Silent(hosts=hosts):
                self.silent = frozenset(hosts)
            case Gathered() | GatheredSkips():
                self._leader.hear_gathered(message, self)
            case wire.Relayed(hosts=[host], body=body):
                self._leader.hear(wire.peers.unpack(body), host, self)
            case _:
                self._leader.hear(message, self.host, self)
        return None

    def on_lost(self, reason: str) -> None:
        self._leader.leave(self)
