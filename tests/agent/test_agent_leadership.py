"""The leader's agent beside its ledger: what it tells the hosts when storage takes too long, and what it asks of reports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gemini_ft.agent.commit import leader, member
from gemini_ft.agent.commit.collector import Collector, CollectorPort
from gemini_ft.agent.commit.leader import Audience, Leader, MemberPort
from gemini_ft.agent.commit.member import MemberLink
from gemini_ft.agent.session import Callers
from gemini_ft.agent.uploads import UnclearUploadError
from gemini_ft.core.decisions import Abort, Cadence, Commit, Holders, Thaw
from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.gathering import Bundles, Gathering
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.stragglers import WorkTime
from gemini_ft.core.tree import Succession, candidates, collectors, ways_up
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import AgentError, PeerError, StorageError
from gemini_ft.wire import handshake
from gemini_ft.wire.handshake import Listener, dial, listen
from gemini_ft.wire.messages import Notice, Paced, kind_of, pack
from gemini_ft.wire.peer_messages import (
    AllFinished,
    Claims,
    DrainHost,
    Heartbeat,
    PeerMessage,
    Rejoin,
    Relayed,
    ReportAccount,
    ReportFinished,
    ReportNeed,
    ReportUploaded,
    ReportWork,
    peers,
)
from gemini_ft.wire.tcp import Connection, Handler
from gemini_ft.wire.worker_messages import GetInventory

INCARNATION = Incarnation(1, "a")
HOLDERS = {0: ("a", "b"), 1: ("b", "a")}
ALONE = "rank 1 has ended without it"
NOBODY_IS_LEFT_OUT = Holders(epoch=0, excluded=frozenset(), newly=frozenset())


class Stream:
    """The storage of a stream, and its ear for decisions."""

    def __init__(self, fault: StorageError | None = None) -> None:
        self.heard: list[PeerMessage] = []
        self.manifests: list[dict[int, str]] = []
        self.clutter = ""
        self._fault = fault
        self.uploader = self
        self.may_write = asyncio.Event()
        self.may_write.set()

    def decide(self, message: PeerMessage) -> None:
        self.heard.append(message)

    async def write_manifest(self, version: Version, records: dict[int, str]) -> None:
        await self.may_write.wait()
        if self._fault is not None:
            raise self._fault
        self.manifests.append(records)

    async def holds(self, version: Version) -> bool:
        return False

    async def tidy(self) -> str:
        return self.clutter

    async def until(self, kind: type[PeerMessage]) -> PeerMessage:
        async with asyncio.timeout(30):
            while not (found := [message for message in self.heard if isinstance(message, kind)]):
                await asyncio.sleep(0.01)
        return found[-1]


def version(iteration: int) -> Version:
    return Version(INCARNATION, iteration)


def complete(leader: Leader, iteration: int) -> None:
    """All hosts report all copies."""
    for owner, hosts in HOLDERS.items():
        for host in hosts:
            leader.take(Completed(owner=owner, host=host, version=version(iteration), layout="l", digest="d", root="r"))


def new_leader(stream: Stream) -> Leader:
    return Leader("a", Ledger(HOLDERS, None, 30.0, Cadence(every_steps=2)), 2, stream, stream)  # type: ignore[arg-type]


def test_accounts_of_all_hosts_are_bounded_and_each_host_has_its_part() -> None:
    hosts, long, fair = [f"h{number}" for number in range(1000)], "x" * 2**18, "y" * 60_000

    async def work() -> None:
        book = Ledger({number: (host,) for number, host in enumerate(hosts)}, None, 30.0)
        leader = Leader("h0", book, 1000, None, Mock())
        for host in hosts:
            leader.take(ReportAccount(host=host, document=long + "x"))
        assert not leader.accounts
        for document in (long, "short", long, fair, "short", long):  # of hosts that say more and less of themselves
            for host in hosts:
                leader.take(ReportAccount(host=host, document=document))
            assert sum(len(text) for _, text in leader.accounts.values()) <= 2**27
            if document != long:
                assert {text for _, text in leader.accounts.values()} == {document}
                assert leader.accounts.keys() == {*hosts}
        leader.close()

    asyncio.run(work())


def test_a_commit_that_is_due_is_uploaded_and_its_manifest_written() -> None:
    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        complete(leader, 1)
        complete(leader, 2)
        commits = [message for message in stream.heard if isinstance(message, Commit)]
        assert [(commit.version.iteration, commit.freeze) for commit in commits] == [(1, False), (2, True)]
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record=f"record {owner}"))
        assert await stream.until(Thaw) == Thaw(version=version(2))
        assert stream.manifests == [{0: "record 0", 1: "record 1"}]
        leader.close()

    asyncio.run(work())


@pytest.mark.parametrize("kind", [StorageError, UnclearUploadError])
def test_a_manifest_that_cannot_be_written_ends_the_upload_with_the_reason(kind: type[StorageError]) -> None:
    async def work() -> None:
        stream = Stream(fault=kind("the disk is full"))
        leader = new_leader(stream)
        complete(leader, 2)
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record="record"))
        assert await stream.until(Thaw) == Thaw(version(2), "the disk is full", unclear=kind is UnclearUploadError)
        leader.close()

    asyncio.run(work())


def test_nothing_is_uploaded_while_what_is_old_cannot_be_deleted_and_what_was_due_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader, "TIDY_AGAIN", 0.001)

    async def work() -> None:
        stream = Stream()
        stream.clutter = "the store does not delete"
        leader = new_leader(stream)
        complete(leader, 2)
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record="record"))
        await stream.until(Thaw)
        for iteration in (3, 4, 5, 6):
            complete(leader, iteration)
        assert [message.version.iteration for message in stream.heard if isinstance(message, Commit) and message.freeze] == [2]
        stream.clutter = ""
        async with asyncio.timeout(30):
            while leader.book.uploading is None:
                await asyncio.sleep(0.001)
        assert [message.version.iteration for message in stream.heard if isinstance(message, Commit) and message.freeze] == [2, 6]
        leader.close()

    asyncio.run(work())


def test_a_job_that_ends_while_what_is_old_cannot_be_deleted_says_that_its_last_steps_are_not_stored() -> None:
    async def work() -> None:
        stream = Stream()
        stream.clutter = "the store does not delete"
        leader = new_leader(stream)
        leader.book.obstacle = stream.clutter
        complete(leader, 2)
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        assert await stream.until(AllFinished) == AllFinished(unstored="the store does not delete")
        leader.close()

    asyncio.run(work())


def test_an_upload_that_does_not_end_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SLOW_UPLOAD", 0.0)

    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        complete(leader, 2)
        notice = await stream.until(Notice)
        assert isinstance(notice, Notice)
        assert notice.text.startswith(
            "storage: the upload of iteration 2 of incarnation 1 is not over after 0 s more; does the storage hang?"
        )
        leader.close()

    asyncio.run(work())


def test_a_host_whose_own_shard_has_no_root_keeps_nothing_back() -> None:
    book = Ledger({0: ("a", "b"), 1: ("b", "a"), 2: ("c",)}, None, 30.0)
    for owner, host, root in ((0, "a", ""), (0, "b", ""), (1, "b", "r")):
        book.report(Completed(owner=owner, host=host, version=version(1), layout="l", digest="d", root=root), 0.0)
    assert book.withholding == ["c"]
    book.report(Completed(owner=2, host="c", version=version(1), layout="l", digest="d"), 0.0)
    assert book.is_under_way
    assert book.withholding == []


def test_a_host_that_keeps_its_own_shards_back_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "WITHHELD", 0.0)

    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        for iteration in (1, 2):
            for host in ("a", "b"):  # the second one has a copy of the other's shard, and says nothing of its own
                leader.take(Completed(owner=0, host=host, version=version(iteration), layout="l", digest="d", root="r"))
            notice = await stream.until(Notice)
            assert notice == Notice(
                text="nothing has been committed for 0 s, as hosts have not reported their own shards: b. If that goes on, start the job "
                "again without them"
            )
            await asyncio.sleep(0.6)  # two looks
            assert stream.heard.count(notice) == 1
            complete(leader, iteration)
            stream.heard.clear()
            await asyncio.sleep(0.3)
            assert not [message for message in stream.heard if isinstance(message, Notice) and "own shards" in message.text]
        leader.close()

    asyncio.run(work())


def test_an_agent_that_was_restarted_during_an_upload_ends_it() -> None:
    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        complete(leader, 2)
        leader.take(Rejoin(committed=version(2), uploading=None))
        assert await stream.until(Thaw) == Thaw(version=version(2), error="an agent was restarted during the upload")
        leader.close()

    asyncio.run(work())


def test_an_agent_that_is_restarted_while_the_manifest_is_written_does_not_end_the_upload() -> None:
    """Its shards are stored. Were they deleted, as those of a failed upload are, the manifest would name what is not there."""

    async def work() -> None:
        stream = Stream()
        stream.may_write.clear()
        leader = new_leader(stream)
        complete(leader, 2)
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record="record"))
        await asyncio.sleep(0)
        leader.take(Rejoin(committed=version(2), uploading=None))
        stream.may_write.set()
        assert await stream.until(Thaw) == Thaw(version=version(2))
        assert [message for message in stream.heard if isinstance(message, Thaw)] == [Thaw(version=version(2))]
        leader.close()

    asyncio.run(work())


def test_the_last_upload_waits_for_a_version_that_is_under_way() -> None:
    """Begun before, it would not be of the job's last steps; and the hosts that come back may have the later ones only."""

    async def work() -> None:
        stream = Stream()
        book = Ledger(HOLDERS, version(2), 1.0, Cadence(every_steps=10, at_end=True))
        leader = Leader("a", book, 2, stream, stream)  # type: ignore[arg-type]
        for owner in (0, 1):
            leader.take(Completed(owner=owner, host=HOLDERS[owner][0], version=version(3), layout="l", digest="d", root="r"))
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        async with asyncio.timeout(30):
            while book.uploading is None:
                await asyncio.sleep(0.01)
        commits = [message for message in stream.heard if isinstance(message, Commit)]
        assert [(commit.version.iteration, commit.freeze) for commit in commits] == [(3, False), (3, True)]
        leader.close()

    asyncio.run(work())


def test_an_upload_is_over_when_a_host_whose_shard_it_waits_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SILENCE", 0.1)
    monkeypatch.setattr(leader, "LOST_SECONDS", 0.1)

    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        complete(leader, 2)
        assert await stream.until(Thaw) == Thaw(version(2), "host b, which has rank 1's shard, was lost during the upload")
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        end = await stream.until(AllFinished)
        assert end == AllFinished(unstored="host b, which has rank 1's shard, was lost during the upload")
        leader.close()

    asyncio.run(work())


def next_leader(stream: Stream, patience: float = 30.0) -> Leader:
    """One that leads in place of another that is lost."""
    book = Ledger(HOLDERS, version(2), 30.0, Cadence(every_steps=2, last_iteration=2))
    return Leader("a", book, 2, stream, stream, patience=patience, epoch=1)  # type: ignore[arg-type]


def test_an_upload_of_the_leader_before_is_over_and_what_was_uploaded_stays_and_it_is_made_again_at_the_end() -> None:
    async def work() -> None:
        stream = Stream()
        leader = next_leader(stream)
        leader.take(Rejoin(epoch=1, committed=version(2), uploading=version(2)))
        assert stream.heard == [Thaw(version(2), "the leader's agent was lost during the upload", unclear=True), NOBODY_IS_LEFT_OUT]
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        await stream.until(Commit)
        assert stream.heard[2:] == [Commit(version=version(2), freeze=True)]
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record="record"))
        await stream.until(AllFinished)
        assert stream.heard[3:] == [Thaw(version(2)), AllFinished()]
        leader.close()

    asyncio.run(work())


def test_the_end_of_a_job_says_that_its_last_upload_failed_under_the_leader_before() -> None:
    async def work() -> None:
        stream = Stream()
        leader = next_leader(stream, patience=0.0)
        leader.book.obstacle = "storage has not been looked through yet"
        leader.take(Rejoin(epoch=1, committed=version(2), uploading=None, unstored="the disk is full"))
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        await stream.until(AllFinished)
        assert stream.heard == [NOBODY_IS_LEFT_OUT, AllFinished(unstored="the disk is full")]
        leader.close()

    asyncio.run(work())


def test_a_job_that_ends_after_a_change_of_leaders_stores_what_was_due() -> None:
    """The former leader may have waited with it, for storage to be tidied; nobody else knows that."""

    async def work() -> None:
        stream = Stream()
        leader = next_leader(stream)
        leader.take(Rejoin(epoch=1, committed=version(5), uploading=None))
        stream.heard.clear()
        for rank in (0, 1):
            leader.take(ReportFinished(rank=rank))
        await stream.until(Commit)
        assert stream.heard == [Commit(version=version(5), freeze=True)]
        leader.close()

    asyncio.run(work())


def test_a_host_that_has_not_heard_of_a_change_of_pace_does_from_the_next_leader() -> None:
    async def work() -> None:
        stream = Stream()
        leader = next_leader(stream)
        leader.take(ReportNeed(host="a", steps=4, interval=4, why="a"))
        assert not stream.heard
        leader.take(ReportNeed(host="b", steps=1, interval=1, why="b"))
        assert stream.heard == [Paced(start=8, interval=4, why="b")]
        leader.close()

    asyncio.run(work())


def test_a_commit_of_the_incarnation_before_is_repeated_as_one_of_that() -> None:
    """A leader that lost its memory hears of the resumed version from a member. Taken for one of the present incarnation it would be
    newer than the resumed one, whose copies could then be overwritten."""

    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        before = Version(Incarnation(INCARNATION.number - 1, "z"), 3)
        leader.take(Rejoin(committed=before, uploading=None, roots={0: "r", 1: "r"}))
        [commit] = stream.heard
        arrived = peers.unpack(pack(commit)[4:])
        assert isinstance(arrived, Commit)
        assert (arrived.version, arrived.roots) == (before, {0: "r", 1: "r"})
        leader.close()

    asyncio.run(work())


def test_all_are_told_when_every_rank_has_finished() -> None:
    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        leader.take(ReportFinished(rank=0))
        leader.take(ReportFinished(rank=0))
        assert not stream.heard
        leader.take(ReportFinished(rank=1))
        assert stream.heard == [AllFinished()]
        leader.close()

    asyncio.run(work())


def test_steps_of_some_ranks_after_the_end_of_another_are_given_up_and_named_once() -> None:
    """A lost rank has not finished: the job does not end with the others, and its restart says what has happened."""

    async def work() -> None:
        first, second = Version(INCARNATION, 1), Version(INCARNATION, 2)
        for lost in (False, True):
            stream = Stream()
            leader = new_leader(stream)
            leader.take(ReportFinished(rank=1, lost=lost))
            for version in (first, second):
                leader.take(Completed(owner=0, host="a", version=version))
            aborts = [message for message in stream.heard if isinstance(message, Abort)]
            assert [(message.version, message.reason) for message in aborts] == [(first, ALONE), (second, ALONE)]
            notices = [message.text for message in stream.heard if isinstance(message, Notice)]
            assert [text.partition(".")[0] for text in notices] == ([] if lost else [f"iteration 1 has no snapshot: {ALONE}"])
            leader.take(ReportFinished(rank=0))
            assert (AllFinished() in stream.heard) == (not lost)
            leader.close()

    asyncio.run(work())


class TestWhatBelongsToOthers:
    """A member is not believed about the ranks of other hosts."""

    HOLDERS = {0: ("a", "b"), 1: ("b", "c"), 2: ("c", "a")}  # noqa: RUF012

    def joined(self, stream: Stream, **rejoin: Any) -> tuple[Leader, MemberPort]:
        leader = Leader("a", Ledger(self.HOLDERS, None, 30.0, Cadence(every_steps=2)), 3, stream, stream)  # type: ignore[arg-type]
        port = leader.join(Mock(Connection), "b")
        port.on_message(Rejoin(**{"committed": None, "uploading": None, "attempt": 1} | rejoin))
        return leader, port

    def complete(self, leader: Leader, iteration: int) -> None:
        for owner, hosts in self.HOLDERS.items():
            for host in hosts:
                leader.take(Completed(owner=owner, host=host, version=version(iteration), layout="l", digest="d", root="r"))

    def test_skips_needs_and_the_end_of_their_work(self) -> None:
        async def work() -> None:
            stream = Stream()
            leader, port = self.joined(stream)
            for lie in (
                Skipped(2, version(1), "late"),
                GatheredSkips(version(1), "late", {"b": [2, 0, 7]}),
                ReportNeed(host="c", steps=10**6, interval=1, why="slow"),
                *(ReportFinished(rank=rank) for rank in (0, 2, 7, 8, 9)),
            ):
                port.on_message(lie)
            self.complete(leader, 1)
            assert [kind_of(message) for message in stream.heard] == ["commit"]
            port.on_message(ReportFinished(rank=1))
            assert not [message for message in stream.heard if isinstance(message, AllFinished)]
            leader.take(ReportFinished(rank=0))  # the leader's own, without which no other's word ends the job
            assert stream.heard[-1] == AllFinished()
            leader.close()

        asyncio.run(work())

    def test_long_texts_and_hosts_that_are_none(self) -> None:
        """The leader keeps them, and passes reasons and names on to all hosts: of a few megabytes each, these would be hung up on."""
        long = "x" * 2**20

        async def work() -> None:
            stream = Stream()
            leader, port = self.joined(stream)
            for number in range(50):
                port.on_message(DrainHost(host=f"{number}{long}"))
                port.on_message(Skipped(1, Version(Incarnation(1, long), number), "late"))
            for fields in ({"layout": long}, {"digest": long}, {"root": long}):
                port.on_message(Completed(owner=1, host="b", version=version(1), **fields))  # type: ignore[arg-type]
            port.on_message(Copies(host="b", version=version(1), layout="l", digest="d", roots={1: long}))
            assert stream.heard == []
            self.complete(leader, 1)
            assert [kind_of(message) for message in stream.heard] == ["commit"]
            port.on_message(Skipped(1, version(2), long))
            assert isinstance(aborted := stream.heard[-1], Abort)
            assert len(aborted.reason) < 2**14
            leader.close()

        asyncio.run(work())

    def test_shards_in_storage(self) -> None:
        async def work() -> None:
            stream = Stream()
            leader, port = self.joined(stream)
            self.complete(leader, 1)
            self.complete(leader, 2)
            for owner in (0, 2, 7):
                port.on_message(ReportUploaded(owner=owner, version=version(2), record="forged"))
                port.on_message(ReportUploaded(owner=owner, version=version(2), error="forged"))
            port.on_message(ReportUploaded(owner=1, version=version(2), record="record 1"))
            for owner in (0, 2):
                leader.take(ReportUploaded(owner=owner, version=version(2), record=f"record {owner}"))
            assert await stream.until(Thaw) == Thaw(version=version(2))
            assert stream.manifests == [{owner: f"record {owner}" for owner in (0, 1, 2)}]
            leader.close()

        asyncio.run(work())

    def test_roots_of_copies_that_it_does_not_hold(self) -> None:
        """A leader that has just taken over learns the roots from its members, and hosts discard copies that have others."""

        async def work() -> None:
            leader, _ = self.joined(Stream(), committed=version(1), roots={0: "r", 1: "r", 2: "forged", 7: "forged"})
            assert leader.book.roots == {0: "r", 1: "r"}
            leader.close()

        asyncio.run(work())


class Crowd:
    """A leader with other hosts on real connections. Host "m<i>" owns one shard and holds that of the next one."""

    def __init__(self, hosts: int, fan_in: int = 64, patience: float = 30.0) -> None:
        self.names = [f"m{i}" for i in range(hosts)]
        self.holders = {i: (name, self.names[i - 1]) for i, name in enumerate(self.names)}
        self.ways = ways_up(["leader", *self.names], "leader", fan_in)
        book = Ledger(self.holders, None, patience)
        self.leader = Leader("leader", book, hosts, None, Mock(), ways=self.ways)
        self.taken: list[PeerMessage] = []
        self.dialled: list[tuple[str, str]] = []  # by whom, and who
        self.beats = 0  # signs of life that the leader and collectors have heard
        self.ports: dict[str, MemberPort] = {}
        self.below: dict[str, CollectorPort] = {}
        self.heard: dict[str, list[PeerMessage]] = {name: [] for name in self.names}
        self.links: dict[str, MemberLink] = {}
        self.rejoin = Rejoin(committed=None, uploading=None)

        self._listeners: dict[str, Listener] = {}
        self.dials: dict[str, tuple[str, int]] = {}  # host -> where it is dialled, if that is not where it listens

    async def __aenter__(self) -> Crowd:
        await self._listen("leader")
        for name in sorted(collectors(self.ways)):
            await self._listen(name)
        for name in self.names:
            collector = Collector(name, Gathering(name, self.holders)) if name in collectors(self.ways) else None
            order = candidates(["leader", *self.names], "leader", self.ways)
            succession = Succession(name, order, len(self.names) + 1, time.monotonic(), timeout=0.0)
            party: Any = SimpleNamespace(dial=partial(self.dial, name), decide=self.heard[name].append, undecided=self._greeting, log=print)
            self.links[name] = MemberLink(self.ways[name][:-1], succession, Bundles(name, self.holders), party, collector)
        await self.until(lambda: self.reached == set(self.names))
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self.links.values():
            link.close()
        self.leader.close()
        for listener in self._listeners.values():
            listener.close()
        await asyncio.sleep(0)

    def _greeting(self) -> list[PeerMessage]:
        return [self.rejoin.model_copy(update={"attempt": time.monotonic_ns()})]

    async def _listen(self, name: str) -> None:
        def accept(connection: Connection, claims: Claims) -> Handler:
            if name != "leader":
                collector = self.links[name].collector
                assert collector is not None
                self.below[claims.host] = below = collector.join(connection, claims.host)
                hear = below.on_message
                below.on_message = lambda message: (self._count(message), hear(message))[1]  # type: ignore[method-assign]
                return below
            port = self.leader.join(connection, claims.host)
            take = port.on_message
            port.on_message = lambda message: (self._count(message), self.taken.append(message), take(message))[2]  # type: ignore[method-assign]
            self.ports[claims.host] = port
            return port

        self._listeners[name] = await listen("127.0.0.1", None, lambda: b"secret", accept, print, lambda stream: True)

    def _count(self, message: PeerMessage) -> None:
        self.beats += isinstance(message, Heartbeat)

    async def dial(self, name: str, up: str, epoch: int, handler: Handler) -> Connection:
        self.dialled.append((name, up))
        claims = Claims(run="r", stream="s", host=name, to=up, role="report", incarnation=None)
        return await dial(self.dials.get(up) or self._listeners[up].address, claims, b"secret", handler)

    def end(self, name: str) -> None:
        """A collector is gone."""
        self._listeners[name].close()
        self.links[name].close()

    async def restart_listener(self, name: str, while_gone: Callable[[], bool]) -> None:
        """A leader that cannot be reached for a while."""
        self._listeners[name].close()
        for port in self.ports.values():
            port.connection.abort("cut")
        await self.until(while_gone)
        await self._listen(name)

    @property
    def reached(self) -> set[str]:
        """The hosts that the leader reaches."""
        return {host for port in self.ports.values() for host in self.leader.through(port)}

    def watch_absent(self) -> list[set[str]]:
        """The hosts that the ledger takes for absent, at each look at who is late."""
        absent, tick = [set[str]()], self.leader.book.tick
        self.leader.book.tick = lambda now, silent=(): (absent.append(set(silent)), tick(now, silent))[1]  # type: ignore[method-assign]
        return absent

    def complete_all(self, iteration: int, *without: str) -> None:
        for owner, hosts in self.holders.items():
            for host in hosts:
                if host not in without:
                    self.complete(host, owner, iteration)

    async def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.001)

    def complete(self, name: str, owner: int, iteration: int) -> None:
        self.links[name].take(Completed(owner=owner, host=name, version=version(iteration), layout="l", digest="d", root=f"root {owner}"))


def test_a_leader_that_has_nothing_to_say_gives_signs_of_life() -> None:
    async def work() -> None:
        async with Crowd(2) as crowd:
            link, heard = crowd.links["m0"], list[PeerMessage]()
            hear = link.hear
            link.hear = lambda message, way: (heard.append(message), hear(message, way))[1]  # type: ignore[method-assign]
            await crowd.until(lambda: heard.count(Heartbeat()) > 4)

    asyncio.run(work())


def test_a_step_is_one_message_of_each_host_and_one_to_it() -> None:
    """And a commit does not repeat what the host has reported."""

    async def work() -> None:
        async with Crowd(4) as crowd:
            crowd.taken.clear()
            for owner, hosts in crowd.holders.items():
                for host in hosts:
                    crowd.complete(host, owner, 1)
            await crowd.until(lambda: all(crowd.heard.values()))
            assert sorted(message.host for message in crowd.taken if isinstance(message, Copies)) == crowd.names
            assert [kind_of(message) for message in crowd.taken if not isinstance(message, Heartbeat)] == ["copies"] * 4
            assert all(heard == [Commit(version=version(1), freeze=False, agreed=True)] for heard in crowd.heard.values())
            assert crowd.leader.book.roots == {owner: f"root {owner}" for owner in crowd.holders}

    asyncio.run(work())


def test_a_copy_that_is_late_does_not_keep_the_others_from_being_reported() -> None:
    """The leader must hear of them, or it would not know whom to leave out."""

    async def work() -> None:
        async with Crowd(2) as crowd:
            crowd.complete("m0", 0, 1)
            await crowd.until(lambda: any(isinstance(message, Copies) for message in crowd.taken))

    asyncio.run(work())


def test_a_host_that_joins_is_answered_alone() -> None:
    """If all heard what one has missed, joining would take the square of the number of hosts."""

    async def work() -> None:
        async with Crowd(3) as crowd:
            for owner, hosts in crowd.holders.items():
                for host in hosts:
                    crowd.complete(host, owner, 1)
            await crowd.until(lambda: all(crowd.heard.values()))
            connection = next(link.connection for name, link in crowd.links.items() if name == "m1")
            assert connection is not None
            connection.abort("cut")
            await crowd.until(lambda: len(crowd.heard["m1"]) == 2)
            assert crowd.heard["m1"][1] == Commit(version=version(1), freeze=False, roots={1: "root 1", 2: "root 2"})
            assert len(crowd.heard["m0"]) == len(crowd.heard["m2"]) == 1

    asyncio.run(work())


def test_a_host_whose_copies_come_after_the_abort_is_answered_alone() -> None:
    """One rank skips a step at once, and all others have finished their copies of it before they hear of that."""

    async def work() -> None:
        async with Crowd(4) as crowd:
            crowd.links["m0"].take(Skipped(0, version(1), "late"))
            await crowd.until(lambda: bool(crowd.leader.book.aborted))
            for owner in (1, 2, 3):
                for host in crowd.holders[owner]:
                    crowd.complete(host, owner, 1)
            for owner, hosts in crowd.holders.items():
                for host in hosts:
                    crowd.complete(host, owner, 2)
            await crowd.until(lambda: all(heard and isinstance(heard[-1], Commit) for heard in crowd.heard.values()))
            aborts = {name: sum(isinstance(message, Abort) for message in heard) for name, heard in crowd.heard.items()}
            assert aborts == {"m0": 1, "m1": 2, "m2": 2, "m3": 2}

    asyncio.run(work())


def test_a_host_that_could_not_be_told_to_leave_is_when_it_joins_again() -> None:
    async def work() -> None:
        async with Crowd(3) as crowd:
            connection = crowd.links["m1"].connection
            assert connection is not None
            connection.abort("cut")  # which the leader does not know yet
            crowd.leader.take(DrainHost(host="m1"))
            await crowd.until(lambda: bool(crowd.heard["m1"]))
            assert crowd.heard["m1"] == [DrainHost(host="m1")]

    asyncio.run(work())


class TestCollectors:
    """Six hosts that report by way of two: m0 for itself, m1 and m2, m3 for itself, m4 and m5."""

    def test_a_step_is_one_message_of_each_collector_and_one_to_it(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                assert {host: crowd.leader.through(port) for host, port in crowd.ports.items()} == {
                    "m0": {"m0", "m1", "m2"},
                    "m3": {"m3", "m4", "m5"},
                }
                crowd.taken.clear()
                crowd.complete_all(1)
                await crowd.until(lambda: all(crowd.heard.values()))
                assert [kind_of(message) for message in crowd.taken if not isinstance(message, Heartbeat)] == ["gathered"] * 2
                assert all(heard == [Commit(version=version(1), freeze=False, agreed=True)] for heard in crowd.heard.values())
                assert crowd.leader.book.roots == {owner: f"root {owner}" for owner in crowd.holders}

        asyncio.run(work())

    def test_a_host_without_its_copy_holds_back_the_commit_and_hears_the_roots_that_it_lacks(self) -> None:
        """The copies of the other hosts go up after a moment. Its own is left out then, and the commit reads differently for it."""

        async def work() -> None:
            async with Crowd(6, fan_in=2, patience=0.0) as crowd:
                crowd.complete_all(1, "m1")
                crowd.complete("m1", 1, 1)
                await crowd.until(lambda: all(isinstance(heard[-1] if heard else None, Commit) for heard in crowd.heard.values()))
                late = frozenset({(2, "m1")})
                alike = Commit(version=version(1), freeze=False, agreed=True)
                apart = Commit(version=version(1), freeze=False, roots={1: "root 1", 2: "root 2"})
                for name, heard in crowd.heard.items():
                    assert heard == [Holders(epoch=1, excluded=late, newly=late), apart if name == "m1" else alike], name

        asyncio.run(work())

    def test_when_a_collector_is_gone_its_hosts_go_to_the_next_and_when_that_is_too_to_the_leader(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(member, "TRIES", 2)

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.end("m0")
                await crowd.until(lambda: crowd.leader.through(crowd.ports["m3"]) == {"m1", "m2", "m3", "m4", "m5"})
                crowd.links["m1"].take(Skipped(1, version(1), "late"))
                await crowd.until(lambda: all(crowd.heard[name] for name in ("m1", "m2", "m3", "m4", "m5")))
                crowd.end("m3")
                await crowd.until(lambda: crowd.reached == {"m1", "m2", "m4", "m5"} == set(crowd.ports) - {"m0", "m3"})

        asyncio.run(work())

    def test_a_collector_that_was_lost_is_dialled_a_few_times_and_no_longer(self) -> None:
        """No commit goes on meanwhile. At the beginning of a session there is more patience: agents begin one after the other."""

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.dialled.clear()
                crowd.end("m0")
                await crowd.until(lambda: ("m1", "m3") in crowd.dialled)
                assert [up for name, up in crowd.dialled if name == "m1"] == ["m0"] * 3 + ["m3"]

        asyncio.run(work())

    def test_signs_of_life_ride_on_what_travels_anyway(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(member, "HEARTBEAT", 0.4)

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.beats, slowest = 0, 0.0
                begin = time.monotonic()
                for step in range(1, 60):
                    at = time.monotonic()
                    crowd.complete_all(step)
                    await crowd.until(lambda step=step: all(heard and heard[-1].version == version(step) for heard in crowd.heard.values()))
                    await asyncio.sleep(0.02)
                    slowest = max(slowest, time.monotonic() - at)
                assert time.monotonic() - begin > 2 * member.HEARTBEAT
                assert not crowd.beats or slowest > member.HEARTBEAT / 2  # a machine that stood still
                await crowd.until(lambda: crowd.beats > len(crowd.links))

        asyncio.run(work())

    def test_a_collector_that_does_not_answer_a_host_that_dials_it_is_dialled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An agent that is stopped: its kernel takes the connection, and each further one would take as long to fail."""
        monkeypatch.setattr(handshake, "TIMEOUT", 0.3)
        monkeypatch.setattr(member, "SILENCE", 0.2)

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                with socket.create_server(("127.0.0.1", 0)) as stopped:
                    stopped.setblocking(False)
                    crowd.dials["m0"] = stopped.getsockname()
                    link, dialled = crowd.links["m1"], 0
                    while not dialled:  # on a busy machine the time for it may be over before the kernel hears of it
                        connection = link.connection
                        assert connection is not None
                        connection.abort("cut")
                        await crowd.until(lambda: link.connection not in (None, connection) and link.reaches_leader)  # noqa: B023
                        with contextlib.suppress(BlockingIOError):
                            while True:
                                stopped.accept()[0].close()
                                dialled += 1
                    assert dialled == 1

        asyncio.run(work())

    def test_while_a_collector_has_lost_the_leader_its_hosts_stay_and_then_say_everything_again(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.complete_all(1)
                await crowd.until(lambda: all(crowd.heard.values()))
                crowd.taken.clear()
                crowd.rejoin = Rejoin(committed=version(1), uploading=None)
                connection = crowd.links["m1"].connection
                await crowd.restart_listener("leader", while_gone=lambda: not crowd.links["m1"].reaches_leader)
                assert crowd.links["m1"].connection is connection
                await crowd.until(lambda: crowd.reached == set(crowd.names))
                greeted = [host for message in crowd.taken if isinstance(message, Relayed) for host in message.hosts]
                assert sorted(greeted) == ["m1", "m2", "m4", "m5"]
                crowd.complete_all(2)
                await crowd.until(
                    lambda: all(heard[-1] == Commit(version=version(2), freeze=False, agreed=True) for heard in crowd.heard.values())
                )

        asyncio.run(work())

    def test_hosts_whose_copies_come_after_the_abort_are_answered_by_one_message(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.links["m0"].take(Skipped(0, version(1), "late"))
                await crowd.until(lambda: all(crowd.heard.values()))
                answered = list[PeerMessage]()
                send = crowd.ports["m3"].connection.send
                crowd.ports["m3"].connection.send = lambda message: (answered.append(message), send(message))[1]  # type: ignore[method-assign, assignment]
                crowd.complete_all(1, "m0", "m1", "m2")
                await crowd.until(lambda: all(len(crowd.heard[name]) == 2 for name in ("m3", "m4", "m5")))
                assert [message.hosts for message in answered if isinstance(message, Relayed)] == [["m3", "m4", "m5"]]

        asyncio.run(work())

    def test_a_host_below_a_collector_in_whose_name_another_process_has_dialled_still_counts(self) -> None:
        """The other process is put out when the host dials the leader for its shards; the host's reports go another way all the time."""

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                doors = SimpleNamespace(certificate_of=AsyncMock(return_value=b"the host's"), log=print, disown=crowd.leader.disown)
                callers = Callers(doors)  # type: ignore[arg-type]
                await crowd.dial("m1", "leader", 0, Mock(Handler))
                callers.let_in(impostor := crowd.ports["m1"].connection, "m1")
                with pytest.raises(AgentError, match="another process is known here as host 'm1'"):
                    callers.let_in(Mock(Connection, certificate=b"the host's", closed=asyncio.Event()), "m1")
                await asyncio.wait_for(impostor.closed.wait(), 5.0)
                await asyncio.sleep(0.01)  # for what follows from that
                crowd.complete_all(1)
                await crowd.until(lambda: all(crowd.heard.values()), 5.0)
                callers.close()

        asyncio.run(work())

    def test_who_speaks_for_another_host_is_put_out_and_the_others_stay(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                liar, others = crowd.links["m1"].connection, crowd.links["m2"].connection
                assert liar is not None
                crowd.taken.clear()
                for message in (
                    Copies(host="m2", version=version(1), layout="l", digest="d", roots={2: "root 2", 3: "root 3"}),
                    Gathered(version=version(1), layout="l", digest="d", roots={"m2": "root 2root 3"}),
                    Relayed(hosts=["m2"], body=pack(ReportFinished(rank=2))[4:]),
                ):
                    liar.send(message)
                    await crowd.until(liar.closed.is_set)
                    await crowd.until(lambda: crowd.links["m1"].reaches_leader)
                    liar = crowd.links["m1"].connection
                    assert liar is not None
                assert not [message for message in crowd.taken if not isinstance(message, Heartbeat | Relayed)]
                assert crowd.links["m2"].connection is others

        asyncio.run(work())

    @pytest.mark.parametrize(
        "lie",
        [
            Relayed(
                hosts=["m0"], body=pack(Copies(host="m4", version=version(1), layout="l", digest="d", roots={4: "root 4", 5: "root 5"}))[4:]
            ),
            Relayed(hosts=["m0"], body=pack(Gathered(version=version(1), layout="l", digest="d", roots={"m4": "root 4root 5"}))[4:]),
            Relayed(hosts=["m0"], body=pack(Relayed(hosts=["m0"], body=b""))[4:]),
            Relayed(hosts=["m3"], body=pack(Rejoin(attempt=2**62, committed=None, uploading=None))[4:]),
            Relayed(hosts=["leader"], body=pack(Rejoin(attempt=1, committed=None, uploading=None))[4:]),
            Relayed(hosts=["m0"], body=b"\x80"),
            Relayed(hosts=["m0"] * 1000, body=pack(DrainHost(host=""))[4:]),
        ],
        ids=[
            "another's copies",
            "others' copies",
            "relayed twice",
            "a greeting of a collector",
            "a greeting of the leader",
            "no message",
            "a thousand messages in one",
        ],
    )
    def test_a_collector_that_says_what_it_may_not_is_put_out(self, lie: Relayed) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                liar = crowd.links["m0"].connection
                assert liar is not None
                liar.send(lie)
                await crowd.until(liar.closed.is_set)
                await crowd.until(lambda: crowd.reached == set(crowd.names))
                crowd.complete_all(1)
                await crowd.until(lambda: all(crowd.heard.values()))

        asyncio.run(work())

    def test_a_collector_is_not_believed_about_hosts_that_do_not_report_to_it(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.complete_all(1, "m4")
                gathered = {"m0", "m1", "m2"}, {"m3", "m5"}
                await crowd.until(lambda: [set(told.roots) for told in crowd.taken if isinstance(told, Gathered)] == [*gathered])
                liar = crowd.links["m0"].connection
                assert liar is not None
                liar.send(Gathered(version=version(1), layout="l", digest="d", roots={"m4": "root 4root 5"}))
                liar.send(
                    Relayed(
                        hosts=["m4"],
                        body=pack(Copies(host="m4", version=version(1), layout="l", digest="d", roots={4: "root 4", 5: "root 5"}))[4:],
                    )
                )
                liar.send(Relayed(hosts=["m0"], body=pack(Skipped(0, version(3), "last"))[4:]))
                await crowd.until(lambda: version(3) in crowd.leader.book.aborted)
                assert crowd.leader.book.committed is None

        asyncio.run(work())

    def test_the_leader_knows_of_which_hosts_nothing_is_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One has hung up, one says nothing, and a collector is gone, whose hosts have gone elsewhere."""
        monkeypatch.setattr(member, "TRIES", 2)

        class Quiet:
            on_message = on_bytes = on_lost = staticmethod(lambda *_: None)

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                absent = crowd.watch_absent()
                crowd.links["m1"].close()
                crowd.links["m2"].close()
                (await crowd.dial("m1", "m0", 0, Quiet())).send(Rejoin(attempt=time.monotonic_ns(), committed=None, uploading=None))
                crowd.end("m3")
                await crowd.until(lambda: absent[-1] == {"m1", "m2", "m3"})

        asyncio.run(work())

    def test_a_host_of_which_nothing_is_heard_stays_absent_when_its_collector_is_gone(self) -> None:
        """Else its replicas could be left out of a commit of which it had the only copy."""

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                absent = crowd.watch_absent()
                crowd.links["m1"].close()
                await crowd.until(lambda: absent[-1] == {"m1"})
                since = len(absent)
                crowd.end("m0")
                await crowd.until(lambda: "m0" not in crowd.reached and len(absent) > since + 1)
                assert all("m1" in each for each in absent[since:])

        asyncio.run(work())

    @pytest.mark.parametrize("host", ["m0", "m1"])
    def test_what_a_host_has_said_before_comes_before(self, host: str) -> None:
        """Its copies wait at the collector for those of others, and would count as said by the agent that greets after them."""

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                crowd.taken.clear()
                for owner in (owner for owner, hosts in crowd.holders.items() if host in hosts):
                    crowd.complete(host, owner, 1)
                crowd.links[host].take(Skipped(int(host[1:]), version(2), "late"))
                await crowd.until(lambda: version(2) in crowd.leader.book.aborted)
                assert next(kind_of(told) for told in crowd.taken if not isinstance(told, Heartbeat)) == "gathered"

        asyncio.run(work())

    def test_a_collector_does_not_hear_a_host_on_a_connection_that_it_has_replaced(self) -> None:
        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                former = crowd.below["m1"]
                former.connection.abort("cut")
                await crowd.until(lambda: crowd.below["m1"] is not former and crowd.links["m1"].reaches_leader)
                former.on_message(Skipped(1, version(1), "said by an agent that is gone"))
                crowd.links["m1"].take(Skipped(1, version(2), "late"))
                await crowd.until(lambda: version(2) in crowd.leader.book.aborted)
                assert version(1) not in crowd.leader.book.aborted

        asyncio.run(work())

    def test_what_comes_for_a_host_that_has_greeted_anew_is_not_passed_down_before_the_leader_has_heard_that(self) -> None:
        """It was for the host as it was before."""

        async def work() -> None:
            async with Crowd(6, fan_in=2) as crowd:
                port, withheld = crowd.ports["m0"], list[PeerMessage]()
                take = port.on_message
                port.on_message = lambda message: withheld.append(message)  # type: ignore[method-assign, func-returns-value]
                connection = crowd.links["m1"].connection
                assert connection is not None
                connection.abort("cut")
                await crowd.until(lambda: any(isinstance(message, Relayed) for message in withheld))
                Audience({"m1"}, port).send(Notice(text="for one"))
                crowd.leader.take(DrainHost(host="m4"))
                port.on_message = take  # type: ignore[method-assign]
                for message in withheld:
                    take(message)
                await crowd.until(lambda: crowd.links["m1"].reaches_leader)
                crowd.leader.take(DrainHost(host="m5"))
                await crowd.until(lambda: all(heard and heard[-1] == DrainHost(host="m5") for heard in crowd.heard.values()))
                assert crowd.heard["m1"] == [DrainHost(host="m5")]
                assert crowd.heard["m2"] == [DrainHost(host="m4"), DrainHost(host="m5")]

        asyncio.run(work())


def test_times_of_steps_go_up_at_once_and_copies_wait_for_those_of_other_hosts_nevertheless() -> None:
    """Else the leader would hear each host's copies in a message of their own at every few steps."""

    async def work() -> None:
        holders, sent = {1: ("m1",), 2: ("m2",)}, list[PeerMessage]()
        collector = Collector("m0", Gathering("m0", holders))
        collector.open(Mock(send=sent.append))
        collector.gather(Copies(host="m0", version=version(1), layout="l", digest="d", roots={}))
        ports = {host: collector.join(Mock(Connection), host) for host in ("m1", "m2")}
        for port in ports.values():
            collector.hear(Rejoin(committed=None, uploading=None), port)
        sent.clear()
        for owner, (host, port) in enumerate(ports.items(), 1):
            collector.hear(Copies(host=host, version=version(1), layout="l", digest="d", roots={owner: "root"}), port)
            times = ReportWork(host=host, window=8, ranks={owner: WorkTime(step=1.0, alone=0.5)})
            collector.hear(times, port)
            assert sent.count(Relayed.of([host], times)) == 1
        assert [message for message in sent if not isinstance(message, Relayed)] == [
            Gathered(version=version(1), layout="l", digest="d", roots={"m1": "root", "m2": "root"})
        ]
        collector.close()

    asyncio.run(work())


def test_a_link_that_is_closed_at_the_moment_at_which_its_connection_is_lost_does_not_dial_again() -> None:
    async def work() -> None:
        async with Crowd(1) as crowd:
            link = crowd.links["m0"]
            link.on_lost("cut")
            link.close()
            await crowd.until(lambda: "MemberLink._run" not in {task.get_coro().__qualname__ for task in asyncio.all_tasks()})

    asyncio.run(work())


def test_a_host_that_speaks_for_another_is_put_out() -> None:
    async def work() -> None:
        async with Crowd(3) as crowd:
            liar = crowd.links["m1"].connection
            assert liar is not None
            liar.send(Copies(host="m2", version=version(1), layout="l", digest="d", roots={2: "root 2", 0: "root 0"}))
            await crowd.until(liar.closed.is_set)

    asyncio.run(work())


def test_a_host_that_joins_when_all_have_finished_hears_that() -> None:
    async def work() -> None:
        async with Crowd(3) as crowd:
            for rank in range(3):
                crowd.leader.take(ReportFinished(rank=rank))
            await crowd.until(lambda: all(crowd.heard.values()))
            connection = crowd.links["m1"].connection
            assert connection is not None
            connection.abort("cut")
            await crowd.until(lambda: crowd.heard["m1"] == [AllFinished(), AllFinished()])

    asyncio.run(work())


def test_only_reports_are_taken() -> None:
    async def work() -> None:
        leader = new_leader(Stream())
        with pytest.raises(PeerError, match="'get_inventory' is not a report"):
            leader.take(GetInventory())
        leader.close()

    asyncio.run(work())
