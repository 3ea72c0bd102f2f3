"""The leader's agent beside its ledger: what it tells the hosts when storage takes too long, and what it asks of reports."""

from __future__ import annotations

import asyncio

import pytest

from gemini_ft.agent import leadership
from gemini_ft.agent.leadership import Leader
from gemini_ft.core.effects import Completed
from gemini_ft.core.ledger import Cadence, Commit, Ledger, Thaw
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError, StorageError
from gemini_ft.wire.messages import Notice, pack
from gemini_ft.wire.peer_messages import AllFinished, PeerMessage, Rejoin, ReportFinished, ReportUploaded, peers
from gemini_ft.wire.worker_messages import GetInventory

INCARNATION = Incarnation(1, "a")
HOLDERS = {0: ("a", "b"), 1: ("b", "a")}


class Stream:
    """The storage of a stream, and its ear for decisions."""

    def __init__(self, fault: str = "") -> None:
        self.heard: list[PeerMessage] = []
        self.manifests: list[dict[int, str]] = []
        self.clutter = ""
        self._fault = fault
        self.uploader = self

    def on_decision(self, message: PeerMessage) -> None:
        self.heard.append(message)

    async def write_manifest(self, version: Version, records: dict[int, str]) -> None:
        if self._fault:
            raise StorageError(self._fault)
        self.manifests.append(records)

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
    return Leader(Ledger(HOLDERS, None, 30.0, Cadence(every_steps=2)), 2, stream, stream.on_decision)  # type: ignore[arg-type]


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


def test_a_manifest_that_cannot_be_written_ends_the_upload_with_the_reason() -> None:
    async def work() -> None:
        stream = Stream(fault="the disk is full")
        leader = new_leader(stream)
        complete(leader, 2)
        for owner in (0, 1):
            leader.take(ReportUploaded(owner=owner, version=version(2), record="record"))
        assert await stream.until(Thaw) == Thaw(version=version(2), error="the disk is full")
        leader.close()

    asyncio.run(work())


def test_nothing_is_uploaded_while_what_is_old_cannot_be_deleted_and_what_was_due_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "TIDY_AGAIN", 0.001)

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
    monkeypatch.setattr(leadership, "SLOW_UPLOAD", 0.0)

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


def test_an_agent_that_was_restarted_during_an_upload_ends_it() -> None:
    async def work() -> None:
        stream = Stream()
        leader = new_leader(stream)
        complete(leader, 2)
        leader.take(Rejoin(committed=version(2), uploading=None))
        assert await stream.until(Thaw) == Thaw(version=version(2), error="an agent was restarted during the upload")
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


def test_only_reports_are_taken() -> None:
    async def work() -> None:
        leader = new_leader(Stream())
        with pytest.raises(PeerError, match="'get_inventory' is not a report"):
            leader.take(GetInventory())
        leader.close()

    asyncio.run(work())
