"""The agent's uploader against a storage that lies or fails: what it stores, what it clears away, and what it says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from agent_kit import shape_of, stream_context

from gemini_ft.agent.figures import Measures
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.uploads import HOSTS_PER_SECOND, UnclearUploadError, Uploader, turn
from gemini_ft.core.goodput import PastTime, Phase, RunTime, TimeLedger
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import StorageError
from gemini_ft.storage.base import UNCOUNTED, TransferCount
from gemini_ft.storage.checkpoints import list_checkpoints, mark_key, read_manifest
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.retention import read_back
from gemini_ft.wire.worker_messages import SessionSpec

THIS = Incarnation(2, "0000000b")
EARLIER = Version(Incarnation(1, "0000000a"), 1)


class Naughty(LocalStorage):
    """Keeps half of what matches ``halves``, and refuses to put or delete what matches ``refuses``."""

    halves = refuses = "$^"
    before_put: Callable[[str], None] = staticmethod(lambda key: None)  # of each key

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        self.before_put(key)
        if re.search(self.refuses, f"put {key}"):
            raise StorageError(f"put {key} is refused")
        content = b"".join(parts)
        super().put(key, [content[: len(content) // 2] if re.search(self.halves, key) else content], transfer)

    def delete(self, key: str) -> None:
        if re.search(self.refuses, f"delete {key}"):
            raise StorageError(f"delete {key} is refused")
        super().delete(key)


class Host:
    """One host that owns the only shard, and leads in an epoch."""

    leads_in: int | None = 0
    is_obeyed = True

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, begun_as: Incarnation | None = None, **settings: Any) -> None:
        monkeypatch.setattr("gemini_ft.agent.uploads.BACKOFF", 0.0)
        monkeypatch.setattr("gemini_ft.agent.uploads.open_storage", lambda *_: self.storage)
        self.storage, self.log = Naughty(folder), list[str]()
        layout = build_layout([TensorSpec(name="w", dtype="int64", shape=(64,), group=(0,))], 0, 1)
        self.memory = SlotMemory.create(shape_of(layout))
        self.spec = SessionSpec(
            stream="main",
            incarnation=begun_as or THIS,
            world_size=1,
            hosts=["h"],
            addresses={"h": ("127.0.0.1", 1)},
            holders={0: ["h"]},
            leader="h",
            resumed=None if begun_as else EARLIER,
            lineage=[] if begun_as else [EARLIER],
            storage={"url": folder.as_uri(), "every_steps": 1, **settings},
        )
        self.context = stream_context(self.log.append)
        self.uploader = Uploader(self.spec, self.context, self)  # type: ignore[arg-type]

    async def upload(self, what: int | Version, ends: str = "told") -> str:
        """From the copy in the slot to the thawing; what the user is told.

        Args:
            what: the version that is uploaded, or an iteration of this attempt.
            ends: "told": all hosts hear the end; "lost": the leader is lost when it has written the manifest; "early": before.
        """
        version = Version(self.spec.incarnation, what) if isinstance(what, int) else what
        for index, cut in enumerate(self.memory.cuts(0)):
            self.memory.put_chunk(index, *cut, checksum(self.memory.data(*cut)))
        assert self.memory.finish(version, 0, None)
        record, error = await self.uploader.start(0, self.memory, version)
        told, unclear = "", ends != "told"
        if not error and ends != "early":
            try:
                await self.uploader.write_manifest(version, {0: record})
                told, _ = await self.uploader.tidy()
            except StorageError as failure:
                error, unclear = str(failure), unclear or isinstance(failure, UnclearUploadError)
        told += self.uploader.over(version, error if ends == "told" else "the leader was lost", unclear)
        while self.uploader.background.busy:
            await asyncio.sleep(0.01)
        return told

    def steps(self) -> list[int]:
        return [info.iteration for info in list_checkpoints(self.storage)]

    def read_back(self) -> None:
        """All that is stored is whole."""
        for info in list_checkpoints(self.storage):
            read_back(self.storage, read_manifest(self.storage, info.folder))

    def folders(self) -> int:
        return len({key.rpartition("/")[0] for key in self.storage.list("run/main/")})


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path / "store", monkeypatch)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.mark.parametrize("what", ["shard", "manifest"])
def test_a_store_that_keeps_half_of_what_it_is_given_has_stored_nothing(host: Host, what: str) -> None:
    async def scenario() -> None:
        for iteration in (1, 2):
            assert await host.upload(iteration) == ""
        host.storage.halves = what
        for iteration in (3, 4, 5):
            told = await host.upload(iteration)
            assert ("could not be read back" in told and "the newest stored step is 2" in told) == (iteration == 3)
        assert host.steps() == [2, 1]
        assert host.folders() == 2
        assert json.loads(json.dumps(host.uploader.status()))["failing_since"]
        host.storage.halves = "$^"
        assert "storage is well again after" in await host.upload(6)
        assert host.steps() == [6, 2]

    run(scenario())


def test_a_reason_that_comes_to_another_is_told_as_well_and_each_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one, that another job has taken the run id: its clearing away may have made an upload of this job fail before."""
    one, other = (Host(tmp_path / "store", monkeypatch, begun_as=Incarnation(1, nonce)) for nonce in ("0000000c", "0000000b"))

    async def scenario() -> None:
        other.storage.refuses = "put .*manifest"
        told = [await other.upload(iteration) for iteration in (1, 12)]
        await one.upload(1)
        other.storage.refuses = "$^"
        told += [await other.upload(iteration) for iteration in (123, 1234)]
        assert ["is refused" in text for text in told] == [True, False, False, False]
        assert ["another job has taken run id" in text for text in told] == [False, False, True, False]

    run(scenario())


def test_what_differs_each_time_is_not_told_each_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(range(10**6))

    def put(key: str, *_: Any) -> None:
        raise StorageError(f"SlowDown: {'x' * next(words)}")

    monkeypatch.setattr(host.storage, "put", put)

    async def scenario() -> None:
        told = [await host.upload(iteration) for iteration in range(1, 30)]
        assert 2 < sum(map(bool, told)) < 10
        assert sum("it is tried again" in line for line in host.log) < 10

    run(scenario())


@pytest.mark.parametrize("refused", ["put .*manifest", "put .*stored"])
def test_a_failed_upload_leaves_nothing(host: Host, refused: str) -> None:
    async def scenario() -> None:
        await host.upload(1)
        host.storage.refuses = refused
        for iteration in range(2, 6):
            await host.upload(iteration)
            assert host.folders() == 1
        assert host.steps() == [1]

    run(scenario())


def test_a_slot_in_which_a_bit_flips_while_it_is_sent_is_not_sent_again_and_leaves_nothing(host: Host) -> None:
    def flip(_: str) -> None:
        host.memory.data(0, 1)[0] ^= 1

    async def scenario() -> None:
        await host.upload(1)
        host.storage.before_put = flip
        assert "as it was committed" in await host.upload(2)
        assert not [line for line in host.log if "tried again" in line]
        assert host.folders() == 1
        host.storage.before_put = lambda _: None
        assert "storage is well again after" in await host.upload(3)
        assert host.steps() == [3, 1]
        host.read_back()

    run(scenario())


def test_a_checkpoint_stays_whose_leader_was_lost_before_it_could_say_that_it_is_stored(host: Host) -> None:
    """What was older may have been deleted for it."""

    async def scenario() -> None:
        await host.upload(1)
        await host.upload(2, ends="lost")
        assert host.steps() == [2, 1]
        read_back(host.storage, read_manifest(host.storage, list_checkpoints(host.storage)[0].folder))
        await host.upload(3)
        assert host.steps() == [3, 2]

    run(scenario())


def test_a_checkpoint_stays_that_the_mark_names_although_the_store_denies_that_it_was_written(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = host.storage.put

    def denies(key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        put(key, parts, transfer)
        if key == mark_key("run", "main"):
            raise StorageError("the answer was lost")

    async def scenario() -> None:
        await host.upload(1)
        monkeypatch.setattr(host.storage, "put", denies)
        assert "the answer was lost" in await host.upload(2)
        newest = newest_whole(host.storage, "run", "main")  # deleted, it was reported as stored and not there
        assert newest is not None
        assert newest.iteration == 2
        monkeypatch.setattr(host.storage, "put", put)
        await host.upload(3)
        host.read_back()

    run(scenario())


def test_what_was_uploaded_when_the_leader_was_lost_goes_with_the_next_checkpoint(host: Host) -> None:
    async def scenario() -> None:
        await host.upload(1)
        await host.upload(2, ends="early")
        assert (host.steps(), host.folders()) == ([1], 2)
        await host.upload(3)
        assert (host.steps(), host.folders()) == ([3, 1], 2)

    run(scenario())


def test_a_host_that_does_not_lead_any_more_writes_no_manifest_and_deletes_nothing(host: Host) -> None:
    async def scenario() -> None:
        for iteration in (1, 2, 3):
            await host.upload(iteration)
        host.leads_in = None
        assert "another host leads the commits by now" in await host.upload(4)
        assert host.steps() == [3, 2]

    run(scenario())


def test_what_cannot_be_cleared_away_does_not_pile_up(host: Host) -> None:
    async def scenario() -> None:
        await host.upload(1)
        host.storage.refuses = "put .*manifest|delete"
        for iteration in range(2, 9):
            await host.upload(iteration)
            assert host.folders() <= 3
        host.storage.refuses = "$^"
        assert "well again" in await host.upload(9)
        assert host.folders() == 2

    run(scenario())


def test_old_checkpoints_that_cannot_be_deleted_are_said_once_and_shown(host: Host) -> None:
    async def scenario() -> None:
        host.storage.refuses = "delete"
        told = [await host.upload(iteration) for iteration in range(1, 6)]
        assert [bool(text) for text in told] == [False, False, True, False, False]
        assert "nothing more is stored until that works: the newest stored step is 3, 0 s old" in told[2]
        assert "could not be deleted" in str(host.uploader.status()["error"])
        assert (await host.uploader.tidy())[1]
        host.storage.refuses = "$^"
        assert "old checkpoints can be deleted again" in await host.upload(6)
        assert host.steps() == [6, 5]
        assert await host.uploader.tidy() == ("", "")
        assert not host.uploader.status()["error"]

    run(scenario())


def test_what_an_earlier_incarnation_left_is_cleared_before_anything_is_written(host: Host) -> None:
    for nonce in ("1-0000000a", "7-0000000f"):  # the second one is of a job that this one does not know
        host.storage.put(f"run/main/step-00000009-inc-{nonce}/shard-00000.safetensors", [b"torn"])
    asyncio.run(host.uploader.tidy())
    assert [key.split("/")[2] for key in host.storage.list("run/main/")] == ["step-00000009-inc-7-0000000f"]


def test_a_version_of_an_earlier_attempt_is_stored_with_a_ledger_of_time_that_the_next_job_goes_on_from(host: Host) -> None:
    host.context.measures = measures = Measures("h")
    past = PastTime(time=RunTime(seconds={Phase.TRAINING: 50.0}, incarnation=1, furthest=5))
    measures.opened(THIS.number, EARLIER, is_restart=True, past=past)
    measures.reached(9, [])
    asyncio.run(host.upload(EARLIER))
    manifest = read_manifest(host.storage, list_checkpoints(host.storage)[0].folder)
    assert (manifest.incarnation, measures.time.failures[0].incarnation) == (EARLIER.incarnation, 1)
    assert manifest.time is not None
    assert len(manifest.time.failures) == 1
    ledger = TimeLedger(0.0)
    ledger.go_on(manifest.time, 0.0, 1.0)
    ledger.joined(2.0, THIS.number, 1)  # as nobody is left who knows of that number
    ledger.stepped(1000.0, 10, 0.0)
    assert ledger.seconds[Phase.TRAINING] > 1000


def test_a_place_that_shows_nothing_of_what_was_stored_before_is_given_nothing(host: Host) -> None:
    async def scenario() -> None:
        await host.upload(1)
        away = host.storage.root.rename(host.storage.root.with_name("away"))
        told = await host.upload(2)
        assert "this run has stored iteration 1 of incarnation 2 here, and nothing of it is there any more: is a mount missing?" in told
        assert not host.storage.list()
        shutil.rmtree(host.storage.root, ignore_errors=True)
        away.rename(host.storage.root)
        assert "well again" in await host.upload(3)
        host.storage.delete("run/main.stored.json")  # as a store does that kept half of it
        await host.upload(4)
        assert host.steps() == [4, 3]

    run(scenario())


def test_of_two_jobs_begun_together_with_one_id_the_first_to_store_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Host(tmp_path / "store", monkeypatch, begun_as=Incarnation(1, nonce)) for nonce in ("0000000c", "0000000b"))

    async def scenario() -> None:
        assert await one.upload(1) == ""
        said = await other.upload(5)
        assert "another job has taken run id 'run' over. End one of the two" in said
        assert "storage.history=1-0000000b goes on from what this part has stored, storage.history=1-0000000c from the other's" in said
        assert await one.upload(2) == ""
        assert one.steps() == [2, 1]

    run(scenario())


def test_hosts_begin_to_upload_one_after_the_other() -> None:
    """All ranks of one host together, the first host at once, and no more hosts in a second than a store takes well."""
    hosts = [f"h{number}" for number in range(1000) for _ in range(8)]
    begins = [turn(hosts, owner) for owner in range(len(hosts))]
    assert begins[:8] == [0.0] * 8
    assert all(len(set(begins[first : first + 8])) == 1 for first in range(0, len(hosts), 8))
    for second in range(int(max(begins)) + 1):
        assert len({hosts[owner] for owner, begin in enumerate(begins) if second <= begin < second + 1}) <= HOSTS_PER_SECOND


def test_a_host_that_waits_for_its_turn_to_upload_gives_up_with_its_session(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini_ft.agent.uploads.HOSTS_PER_SECOND", 1e-3)
    host.spec = host.spec.model_copy(update={"hosts": ["h", "later"], "world_size": 2, "holders": {0: ["h"], 1: ["later"]}})
    host.uploader = Uploader(host.spec, stream_context(host.log.append), host)  # type: ignore[arg-type]

    for index, cut in enumerate(host.memory.cuts(0)):
        host.memory.put_chunk(index, *cut, checksum(host.memory.data(*cut)))
    version = Version(THIS, 1)
    assert host.memory.finish(version, 0, None)

    async def scenario() -> None:
        later = host.uploader.start(1, host.memory, version)
        record, error = await host.uploader.start(0, host.memory, version)
        assert record
        assert not error
        host.uploader.close()
        assert await later == ("", "the session was over before this host's turn to upload had come")

    run(scenario())


class TestSeveralLeaders:
    """The host that writes a manifest is lost, or another one leads, and each knows of the other late or never."""

    def test_a_manifest_because_of_which_another_leader_may_delete_older_ones_stays(self, host: Host) -> None:
        """That one has found it whole. This one cannot write its mark, and gives up."""
        host.is_obeyed = False

        async def scenario() -> None:
            host.storage.refuses = "put .*stored"
            await host.upload(1)
            assert host.steps() == [1]
            host.read_back()

        run(scenario())

    def test_shards_stay_where_their_manifest_cannot_be_deleted(self, host: Host) -> None:
        async def scenario() -> None:
            host.storage.refuses = "put .*stored|delete .*manifest"
            await host.upload(1)
            assert host.steps() == [1]
            host.read_back()

        run(scenario())

    def test_shards_of_a_lost_leaders_upload_go_also_when_the_next_one_fails(self, host: Host) -> None:
        """Perhaps for want of the room that they take."""

        async def scenario() -> None:
            await host.upload(1)
            await host.upload(2, ends="early")
            host.storage.refuses = "put .*shard"
            await host.upload(3)
            assert (host.steps(), host.folders()) == ([1], 1)

        run(scenario())

    def test_a_manifest_that_arrives_too_late_goes_where_its_shards_have_gone(self, host: Host) -> None:
        """Its writer hears only then that another host leads, or has led."""
        host.is_obeyed = False

        def put(key: str) -> None:
            if key.endswith("manifest.json"):
                host.leads_in = 3
                host.storage.delete(key.replace("manifest.json", "shard-00000.safetensors"))

        host.storage.before_put = put
        run(host.upload(1))  # type: ignore[arg-type]
        assert host.steps() == []

    def test_what_is_uploaded_again_is_no_leftover_of_the_first_attempt(self, host: Host) -> None:
        async def scenario() -> None:
            host.storage.refuses = "put .*manifest|delete .*shard"
            await host.upload(1)
            host.storage.refuses = "delete .*shard"
            await host.upload(1)
            host.storage.refuses = "$^"
            await host.upload(2)
            assert host.steps() == [2, 1]
            host.read_back()

        run(scenario())
