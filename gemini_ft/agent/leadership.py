"""The commit, out of band: every host's agent reports to the leader's, which keeps the ledger and tells all.

``Leader`` runs in one agent, beside rank 0; ``MemberLink`` in all others. Both hand decisions to their stream as
the same messages. A connection that broke is dialled again and everything undecided is reported once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gemini_ft.agent.storing import Storing
from gemini_ft.agent.tasks import Tasks
from gemini_ft.core.bundles import Bundles
from gemini_ft.core.effects import Completed, Copies, Skipped
from gemini_ft.core.ledger import Abort, Commit, Decision, Holders, Ledger, Manifest, Thaw
from gemini_ft.core.traffic import Pace
from gemini_ft.core.versions import Version
from gemini_ft.errors import GeminiError, PeerError
from gemini_ft.wire.messages import Notice, Paced, kind_of, pack
from gemini_ft.wire.peer_messages import (
    AllFinished,
    DrainHost,
    Heartbeat,
    PeerMessage,
    Rejoin,
    ReportFinished,
    ReportNeed,
    ReportUploaded,
    UploadSoon,
)
from gemini_ft.wire.tcp import Connection, Handler

_REMEMBERED = 16  # commits whose roots are kept for readers: the job has moved on when they ask
_TICK = 0.25  # seconds between looks for late holders
_GATHER = 0.25  # seconds for which a host waits for more to report, unless it has all it holds
_HEARTBEAT = 1.0  # seconds
_SILENCE = 2.5  # seconds after which a host of which nothing is heard may be lost
_AGAIN = 5.0  # seconds between two attempts at the last upload of a job
SLOW_UPLOAD = 600.0  # seconds
TIDY_AGAIN = 2.0  # seconds between two attempts to delete old checkpoints
_AHEAD = 8  # steps that a change of pace is announced before it counts; a rank that hears it later loses a snapshot


class Leader:
    """Keeps the ledger, and the connections of the other hosts.

    Args:
        book: the ledger.
        world_size: ranks of the job.
        storing: writes manifests and deletes old checkpoints; None: nothing is stored.
        on_decision: carries decisions out on this host.
        patience: seconds for which the last upload is tried again.
    """

    def __init__(
        self, book: Ledger, world_size: int, storing: Storing | None, on_decision: Callable[[PeerMessage], None], patience: float = 0.0
    ) -> None:
        self.book, self._world_size, self._storing, self._on_decision, self._patience = book, world_size, storing, on_decision, patience
        self._ends_by: float | None = None  # until when the last upload of a finished job is tried again
        self._again_at, self._ended = 0.0, False
        self._members: dict[Connection, str] = {}  # -> host
        self._heard: dict[str, float] = {}  # host -> when it last said something
        self._finished: set[int] = set()
        self._pace: Pace | None = None  # begins with the knowledge of the first to report: this leader may have been restarted
        self._paced: Paced | None = None  # the last change
        self._newest = 0  # iteration that was spoken of
        self._upload: tuple[Version | None, float] = (None, 0.0)  # under way, since (or when that was last said)
        self._drained: set[str] = set()  # hosts that were asked to leave; one that could not be told is when it joins again
        self._roots: deque[tuple[Version, Mapping[int, str]]] = deque(maxlen=_REMEMBERED)
        self._tasks = Tasks()
        self._tasks.spawn(self._tick())
        if book.obstacle:
            self._tasks.spawn(self._tidy())

    def close(self) -> None:
        self._tasks.cancel()
        for member in list(self._members):
            member.abort("the session is over")

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard, of a version that was committed not long ago."""
        if self.book.committed == version:
            return self.book.roots
        return next((roots for known, roots in self._roots if known == version), {})

    def join(self, connection: Connection, host: str) -> MemberPort:
        self._members[connection] = host
        self.hear(host)
        return MemberPort(self, connection, host)

    def hear(self, host: str) -> None:
        """Takes note of a sign of life of a host."""
        self._heard[host] = time.monotonic()

    def leave(self, connection: Connection) -> None:
        self._members.pop(connection, None)

    def take(self, message: PeerMessage, member: Connection | None = None) -> None:
        """Takes a report, from another host (on its connection ``member``) or our own."""
        now = time.monotonic()
        if isinstance(message, Completed | Copies | Skipped):
            self._newest = max(self._newest, message.version.iteration)
            is_late = not isinstance(message, Skipped) and message.version in self.book.aborted
            decisions = self.book.report(message, now)
            if is_late:  # all others have heard it: if every host were answered before all, that would be its square
                self._repeat(decisions, member)
            else:
                self._apply(decisions)
        elif isinstance(message, ReportUploaded):
            outcome = (
                self.book.upload_over(message.version, message.error)
                if message.error
                else self.book.uploaded(message.owner, message.version, message.record)
            )
            self._apply(outcome)
        elif isinstance(message, Rejoin):
            self._welcome(message, now, member)
        elif isinstance(message, ReportNeed):
            self._pace = self._pace or Pace(message.interval)
            if self._pace.report(message.host, message.steps):
                self._paced = Paced(start=self._newest + _AHEAD, interval=self._pace.interval, why=message.why)
                self._tell(self._paced)
        elif isinstance(message, UploadSoon):
            self._apply(self.book.upload_soon(now))
        elif isinstance(message, DrainHost):
            self._drained.add(message.host)
            self._tell(message)
        elif isinstance(message, ReportFinished):
            self._finished.add(message.rank)
            if len(self._finished) == self._world_size and self._ends_by is None:
                self._ends_by = now + self._patience
                self._end(now)
        else:
            raise PeerError(f"{kind_of(message)!r} is not a report")

    def _repeat(self, decisions: Sequence[Decision], member: Connection | None) -> None:
        """Tells one host again that a version is aborted, which was decided before its copies were complete, or while it was away."""
        for decision in dict.fromkeys(decision for decision in decisions if isinstance(decision, Abort)):
            if member is not None:
                member.send(decision)
            else:
                self._on_decision(decision)

    def _welcome(self, message: Rejoin, now: float, member: Connection | None) -> None:
        """Tells a host that has joined what it may have missed; all others as well, if it is news to this leader too."""
        before = self.book.committed
        host = self._members.get(member, "") if member is not None else ""
        for decision in self.book.rejoin(message.committed, now, message.roots, host):
            if member is None or (isinstance(decision, Commit) and self.book.committed != before):
                self._apply([decision])
            else:
                member.send(self.book.addressed(decision, host) if isinstance(decision, Commit) else decision)
        self._settle_upload(message.uploading, member)
        if self._paced is not None:
            self._tell(self._paced, member)
        if member is not None and host in self._drained:
            self._tell(DrainHost(host=host), member)

    @property
    def ending(self) -> bool:
        """Whether all ranks have finished and the last upload has not."""
        return self._ends_by is not None and not self._ended

    def _end(self, now: float) -> None:
        """Lets the agents of a finished job go once its last upload is over, which is tried again for as long as configured."""
        if self._ended or self._ends_by is None or self.book.uploading is not None:
            return
        if not self.book.upload_error or now >= self._ends_by:
            self._ended = True
            self._tell(AllFinished(unstored=self.book.upload_error))
        elif now >= self._again_at:
            self._again_at = now + _AGAIN
            self._apply(self.book.upload_last())

    def _settle_upload(self, theirs: Version | None, member: Connection | None) -> None:
        """Ends an upload in the middle of which one side was restarted: it cannot become whole any more."""
        if self.book.uploading is not None and theirs != self.book.uploading:
            self._apply(self.book.upload_over(self.book.uploading, "an agent was restarted during the upload"))
        if theirs is not None and theirs != self.book.uploading:
            self._tell(Thaw(version=theirs, error="the leader's agent was restarted during the upload"), member)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            absent = [host for host, heard in self._heard.items() if now - heard > _SILENCE]
            self._apply(self.book.tick(now, absent))
            self._watch_upload(now)
            self._end(now)

    def _watch_upload(self, now: float) -> None:
        """Warns when storage takes very long: it may hang, and meanwhile nothing else is uploaded."""
        version, since = self._upload
        if self.book.uploading != version:
            self._upload = (self.book.uploading, now)
        elif version is not None and now - since > SLOW_UPLOAD:
            self._upload = (version, now)
            self._tell(Notice(text=f"storage: the upload of {version} is not over after {SLOW_UPLOAD:g} s more; does the storage hang?"))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Manifest):
                self._tasks.spawn(self._manifest(decision))
            else:
                if isinstance(decision, Commit):
                    self._roots.append((decision.version, decision.roots))
                self._tell(decision)

    async def _manifest(self, decision: Manifest) -> None:
        error = ""
        try:
            assert self._storing is not None
            await self._storing.uploader.write_manifest(decision.version, dict(decision.records))
            if trouble := await self._storing.tidy():
                self.book.obstacle = trouble
                self._tasks.spawn(self._tidy(TIDY_AGAIN))
        except GeminiError as failure:
            error = str(failure)
        except Exception as failure:  # a fault of ours must not leave the upload unfinished for ever
            error = f"{type(failure).__name__}: {failure}"
        self._apply(self.book.upload_over(decision.version, error))

    async def _tidy(self, pause: float = 0.0) -> None:
        """Deletes old checkpoints; nothing is uploaded until that has succeeded."""
        await asyncio.sleep(pause)
        assert self._storing is not None
        while trouble := await self._storing.tidy():
            self.book.obstacle = trouble
            await asyncio.sleep(TIDY_AGAIN)
        self._apply(self.book.unobstructed(time.monotonic()))

    def _tell(self, message: PeerMessage, member: Connection | None = None) -> None:
        """Tells all hosts, this one last; or one of them alone."""
        if member is not None:
            member.send(message)
            return
        frame, agreed = b"", b""  # packed once, as nearly all hosts hear the same
        for connection, host in list(self._members.items()):
            told = self.book.addressed(message, host) if isinstance(message, Commit) else message
            if isinstance(told, Commit) and not told.agreed:
                connection.send(told)
            elif isinstance(told, Commit):
                agreed = agreed or pack(told)
                connection.send_frame(agreed)
            else:
                frame = frame or pack(told)
                connection.send_frame(frame)
        self._on_decision(message)


class MemberPort:
    """The leader's end of another host's connection."""

    def __init__(self, leader: Leader, connection: Connection, host: str) -> None:
        self._leader, self._connection, self._host = leader, connection, host

    def on_message(self, message: PeerMessage) -> memoryview | None:
        self._leader.hear(self._host)
        if not isinstance(message, Heartbeat):
            self._leader.take(message, self._connection)
        return None

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        raise PeerError("raw bytes on a reporting connection")

    def on_lost(self, reason: str) -> None:
        self._leader.leave(self._connection)


class MemberLink:
    """Another host's end: reports go out, decisions come in.

    Args:
        dial: connects to the leader.
        on_decision: carries decisions out on this host.
        reports: everything undecided, which a leader that is reached anew must hear.
        log: takes lines for the agent's log.
        bundles: gathers what is complete here, so that it is one message per step.
    """

    def __init__(
        self,
        dial: Callable[[Handler], Awaitable[Connection]],
        on_decision: Callable[[PeerMessage], None],
        reports: Callable[[], Sequence[PeerMessage]],
        log: Callable[[str], None],
        bundles: Bundles,
    ) -> None:
        self._dial, self._on_decision, self._reports, self._log, self._bundles = dial, on_decision, reports, log, bundles
        self._late: asyncio.TimerHandle | None = None  # sends what waits, complete or not
        self._spoke = 0.0  # when something was sent
        self.connection: Connection | None = None
        self._finished: set[int] = set()
        self._lost = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._task.cancel()
        self._stop_waiting()
        if self.connection is not None:
            self.connection.abort("the session is over")

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
                self._late = asyncio.get_running_loop().call_later(_GATHER, self._flush)
        else:
            self._flush()  # what was said before comes before
            self._send(message)

    def _flush(self) -> None:
        self._stop_waiting()
        for copies in self._bundles.take():
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
        if isinstance(message, Holders):
            self._bundles.exclude(message.excluded)
        self._on_decision(message)
        return None

    def on_bytes(self, message: PeerMessage, digest: int | None) -> None:
        raise PeerError("raw bytes on a reporting connection")

    def on_lost(self, reason: str) -> None:
        self.connection = None
        self._stop_waiting()
        self._lost.set()

    async def _run(self) -> None:
        delay = 0.05
        while True:
            self._lost.clear()
            try:
                self.connection = await self._dial(self)
            except GeminiError as error:
                if delay == 0.05:
                    self._log(f"leader: {error}")
                await asyncio.sleep(delay)
                delay = min(2 * delay, 2.0)
                continue
            delay = 0.05
            self._bundles.forget()
            for message in [*self._reports(), *(ReportFinished(rank=rank) for rank in self._finished)]:
                self.take(message)
            self._flush()
            while not self._lost.is_set():
                if (quiet := time.monotonic() - self._spoke) >= _HEARTBEAT:
                    self._send(Heartbeat())
                    quiet = 0.0
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), _HEARTBEAT - quiet)
