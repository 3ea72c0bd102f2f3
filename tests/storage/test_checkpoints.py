"""Checkpoints in storage: what exists, what is torn, which is the newest, and what retention may delete."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.goodput import FailureCost, Phase, RunTime
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import ConfigError, CorruptDataError, FormatError, ObjectGoneError, StorageError, StorageUnclearError, SupersededError
from gemini_ft.export.source import from_storage
from gemini_ft.storage.base import UNCOUNTED, RangeReader, Steps, Storage, TransferCount
from gemini_ft.storage.checkpoints import (
    FORMAT_VERSION,
    Manifest,
    body_checksum,
    checked,
    checkpoint_folder,
    examine,
    list_checkpoints,
    read_manifest,
    shard_key,
    write_manifest,
    write_mark,
)
from gemini_ft.storage.decisions import CanResume, Unclear, decide
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.lookout import Lookout, check_not_superseded, newest_whole, other_by_mark
from gemini_ft.storage.retention import READER_SECONDS, Retention, reading
from gemini_ft.storage.shard import StoredShard, write_shard

WORLD = 2
WAIT = 60  # seconds until a process that must answer is given up


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


class InMemory:
    """A storage without a disk, for tests that make hundreds of checkpoints."""

    url = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        self.objects[key] = b"".join(parts)

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectGoneError(key)
        return self.objects[key]

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        part = self.get(key)[offset : offset + out.nbytes]
        if len(part) < out.nbytes:
            raise CorruptDataError(f"{key} ends early")
        out[:] = part

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        return Steps(self, key, offset)

    def list(self, prefix: str = "") -> Sequence[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def check(self) -> None: ...


def version(iteration: int, incarnation: int = 1) -> Version:
    return Version(Incarnation(incarnation, f"{incarnation:08x}"), iteration)


def manifest_for(storage: Storage, at: Version, run: str = "run", stream: str = "main") -> Manifest:
    """Write all shards of a checkpoint, but not its manifest."""
    folder = checkpoint_folder(run, stream, at)
    shards = {}
    for owner in range(WORLD):
        layout = build_layout([TensorSpec(name="w", dtype="int64", shape=(64,), group=(0, 1))], owner, WORLD)
        data = memoryview(at.iteration.to_bytes(8, "little") * 32)
        shards[owner] = write_shard(storage, shard_key(folder, owner), layout, data, f"extras {owner}".encode())
    return Manifest(
        run=run,
        stream=stream,
        incarnation=at.incarnation,
        iteration=at.iteration,
        world_size=WORLD,
        logical_hash=layout.logical_hash,
        shards=shards,
        versions={"torch": "2.13.0"},
        time=RunTime(seconds={Phase.TRAINING: 1.5}, failures=(FailureCost(at=0.5, cause="hang", host="a", step=3),), is_lost=True),
    )


def save(storage: Storage, at: Version, run: str = "run", stream: str = "main") -> Manifest:
    manifest = manifest_for(storage, at, run, stream)
    write_manifest(storage, manifest)
    return manifest


def tear(storage: Storage, at: Version) -> str:
    """What an upload leaves that never came to its manifest."""
    folder = checkpoint_folder("run", "main", at)
    storage.put(shard_key(folder, 0), [b"half of it"])
    return folder


def edit_manifest(storage: Storage, folder: str, sealed: bool = False, **changes: Any) -> None:
    """Change a manifest; ``sealed``: with a checksum that fits, as another version of the package would write it."""
    key = f"{folder}/manifest.json"
    body = {**json.loads(storage.get(key)), **changes}
    if sealed:
        del body["xxh3"]
        body["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    storage.put(key, [json.dumps(body).encode()])


def retain(storage: Storage, keep_last: int, keep_every: int | None = None, reopen: Callable[[], Storage] | None = None) -> list[str]:
    """Retention as it comes after the upload of the newest whole checkpoint."""
    newest = newest_whole(storage, "run", "main")
    assert newest is not None
    retention = Retention(reopen or (lambda: storage), "run", "main", keep_last, keep_every)
    return retention.tidy(retention.stored(newest))


def folders(storage: Storage) -> set[str]:
    return {key.rpartition("/")[0] for key in storage.list()}


# -- what a checkpoint is -------------------------------------------------------------------------


def test_keys_say_run_stream_step_and_incarnation(storage: LocalStorage) -> None:
    save(storage, Version(Incarnation(7, "0a1b2c3d"), 1234), "my-run", "fit-0")
    assert storage.list() == [
        "my-run/fit-0/step-00001234-inc-7-0a1b2c3d/manifest.json",
        "my-run/fit-0/step-00001234-inc-7-0a1b2c3d/shard-00000.safetensors",
        "my-run/fit-0/step-00001234-inc-7-0a1b2c3d/shard-00001.safetensors",
    ]


@pytest.mark.parametrize(
    ("run", "stream", "option"), [("a/b", "main", "run_id='a/b'"), ("run", "../x", "name='../x'"), (".a", "main", "run_id='.a'")]
)
def test_names_that_cannot_be_keys_are_refused(run: str, stream: str, option: str) -> None:
    with pytest.raises(ConfigError) as error:
        checkpoint_folder(run, stream, version(1))
    assert option in str(error.value)


def test_a_manifest_comes_back_whole(storage: LocalStorage) -> None:
    manifest = save(storage, version(10))
    assert read_manifest(storage, manifest.folder) == manifest
    assert manifest.version == version(10)
    assert manifest.created.tzinfo is not None


def test_what_was_stored_before_the_time_of_a_run_was_kept_is_read(storage: LocalStorage) -> None:
    manifest = save(storage, version(10))
    body = checked(storage.get(key := f"{manifest.folder}/manifest.json"))
    del body["time"]
    storage.put(key, [json.dumps({**body, "xxh3": body_checksum(body)}).encode()])
    assert read_manifest(storage, manifest.folder) == manifest.model_copy(update={"time": None})


@pytest.mark.parametrize(
    "time",
    [
        1,
        {"seconds": {"training": 1e308}},
        {"seconds": {}, "failures": [{"at": math.nan, "cause": "", "host": "", "step": 0}]},
        {"seconds": {}, "failures": [{"at": 0.0, "cause": "", "host": "", "step": 2**64}]},
        {"seconds": {}, "failures": [{}] * 200_000},
        {"seconds": dict.fromkeys(map(str, range(200_000)), 1)},
        {"seconds": {}, "incarnation": 10**12},
    ],
    ids=["no ledger", "seconds", "at", "step", "failures", "phases", "an attempt to come"],
)
def test_a_faulty_time_costs_no_checkpoint(storage: LocalStorage, time: Any) -> None:
    manifest = save(storage, version(10))
    assert manifest.time is not None
    edit_manifest(storage, manifest.folder, sealed=True, time=time)
    assert read_manifest(storage, manifest.folder) == manifest.model_copy(update={"time": None})


def test_shards_come_back_by_their_manifest(storage: LocalStorage) -> None:
    save(storage, version(10))
    manifest = newest_whole(storage, "run", "main")
    assert manifest is not None
    for owner, record in manifest.shards.items():
        opened = StoredShard(storage, record)
        assert opened.extras == f"extras {owner}".encode()
        out = memoryview(bytearray(8))
        opened.read(8, out)
        assert bytes(out) == (10).to_bytes(8, "little")
        assert opened.layout.logical_hash == manifest.logical_hash


def test_shards_without_a_manifest_are_no_checkpoint(storage: LocalStorage) -> None:
    save(storage, version(10))
    manifest = manifest_for(storage, version(20))
    assert [info.version for info in list_checkpoints(storage)] == [version(10)]
    write_manifest(storage, manifest)
    assert [info.version for info in list_checkpoints(storage)] == [version(20), version(10)]


def test_a_manifest_is_not_written_over_a_missing_shard(storage: LocalStorage) -> None:
    manifest = manifest_for(storage, version(10))
    storage.delete(manifest.shards[1].key)
    with pytest.raises(StorageError, match=r"shard-00001.safetensors is missing \(1 in all\)"):
        write_manifest(storage, manifest)
    assert list_checkpoints(storage) == []


def test_a_manifest_needs_every_owner_under_its_own_key(storage: LocalStorage) -> None:
    body = manifest_for(storage, version(10)).model_dump()
    with pytest.raises(ValueError, match=r"shards of owners \[0\], expected 0 to 1"):
        Manifest.model_validate({**body, "shards": {0: body["shards"][0]}})
    with pytest.raises(ValueError, match="does not belong to run/main/step-00000011"):
        Manifest.model_validate({**body, "iteration": 11})


DYING_UPLOAD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_checkpoints import LocalStorage, save, version

class Slow(LocalStorage):
    def put(self, key, parts, *sent):
        if key.endswith(sys.argv[3]):
            print("reached", flush=True)
            time.sleep(600)
        super().put(key, parts, *sent)

save(Slow(sys.argv[1]), version(20))
"""


@pytest.mark.parametrize("at", ["shard-00001.safetensors", "manifest.json"])
def test_an_upload_killed_before_its_manifest_is_invisible(storage: LocalStorage, at: str) -> None:
    older = save(storage, version(10))
    arguments = [sys.executable, "-c", DYING_UPLOAD, str(storage.root), str(Path(__file__).parent), at]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as upload:
        try:
            assert upload.stdout is not None
            assert upload.stdout.readline() == b"reached\n"
        finally:
            upload.kill()
            assert upload.wait(WAIT) == -signal.SIGKILL
    assert len(folders(storage)) == 2
    assert newest_whole(storage, "run", "main") == older
    newer = save(storage, version(30))
    assert retain(storage, keep_last=2) == [checkpoint_folder("run", "main", version(20))]
    assert folders(storage) == {older.folder, newer.folder}


# -- which is the newest --------------------------------------------------------------------------


def test_a_later_incarnation_is_newer_whatever_its_iteration(storage: LocalStorage) -> None:
    for at in (version(30, 1), version(10, 2), version(20, 2), version(9, 10)):
        save(storage, at)
    assert [info.version for info in list_checkpoints(storage, "run", "main")] == [
        version(9, 10),
        version(20, 2),
        version(10, 2),
        version(30, 1),
    ]


def test_runs_and_streams_are_listed_apart(storage: LocalStorage) -> None:
    save(storage, version(1), "run", "main")
    save(storage, version(2), "run", "fit-0")
    save(storage, version(3), "run-2", "main")
    storage.put("run/main/notes.txt", [b"somebody else's"])
    assert [(info.run, info.stream, info.iteration) for info in list_checkpoints(storage)] == [
        ("run", "fit-0", 2),
        ("run", "main", 1),
        ("run-2", "main", 3),
    ]
    assert [info.iteration for info in list_checkpoints(storage, "run")] == [2, 1]
    assert [info.iteration for info in list_checkpoints(storage, stream="main")] == [1, 3]
    assert newest_whole(storage, "run-3", "main") is None


def test_a_damaged_shard_leads_to_the_next_older_checkpoint(storage: LocalStorage) -> None:
    """As recovery does it: what turns out damaged on reading is refused from then on."""
    older, newer = save(storage, version(10)), save(storage, version(20))
    blob = bytearray(storage.get(newer.shards[1].key))
    blob[-1] ^= 1
    storage.put(newer.shards[1].key, [bytes(blob)])

    found = newest_whole(storage, "run", "main")
    assert found == newer
    with pytest.raises(CorruptDataError, match=f"{newer.folder}/shard-00001.safetensors"):
        StoredShard(storage, found.shards[1]).read(0, memoryview(bytearray(256)))
    lookout = Lookout(lambda: storage, "run", "main")
    answer, neither = decide(lookout.look([newer.folder])), decide(lookout.look([newer.folder, older.folder]))
    assert isinstance(answer, CanResume)
    assert lookout.manifests[answer.order[0].folder] == older
    assert isinstance(neither, Unclear)
    assert "2 checkpoints are there, but none is sound" in neither.why


@pytest.mark.parametrize("damage", ["cut", "edited", "foreign", "not a map", "no shard"])
def test_what_is_visibly_damaged_is_passed_over_with_a_warning(
    storage: LocalStorage, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = save(storage, version(10)), save(storage, version(20))
    key = f"{newer.folder}/manifest.json"
    if damage == "cut":
        storage.put(key, [storage.get(key)[:-20]])
    elif damage == "edited":
        edit_manifest(storage, newer.folder, logical_hash="0123456789abcdef")
    elif damage == "foreign":
        storage.put(key, [storage.get(f"{older.folder}/manifest.json")])
    elif damage == "not a map":
        storage.put(key, [b"[]"])
    else:
        storage.delete(newer.shards[0].key)
    assert newest_whole(storage, "run", "main") == older
    assert newer.folder in caplog.text


def test_an_unknown_format_is_refused_by_number(storage: LocalStorage) -> None:
    """Going back to an older checkpoint without a word would lose work; the older one stays readable."""
    older, newer = save(storage, version(10)), save(storage, version(20))
    edit_manifest(storage, newer.folder, sealed=True, format=FORMAT_VERSION + 1)
    for look in (lambda: newest_whole(storage, "run", "main"), lambda: read_manifest(storage, newer.folder)):
        said = f"manifest.json has format {FORMAT_VERSION + 1}, this gemini_ft reads format {FORMAT_VERSION}; .*'torch': '2.13.0'"
        with pytest.raises(FormatError, match=said):
            look()
    assert read_manifest(storage, older.folder) == older
    (reason, none) = (reason for _, _, reason in examine(storage))
    assert (none, reason.partition(": ")[0]) == ("", "unreadable")


# -- retention ------------------------------------------------------------------------------------


def test_the_last_and_every_so_many_are_kept(storage: LocalStorage) -> None:
    for iteration in range(1, 11):
        save(storage, version(iteration))
    deleted = retain(storage, keep_last=2, keep_every=4)
    assert [info.iteration for info in list_checkpoints(storage)] == [10, 9, 8, 4]
    assert deleted == [checkpoint_folder("run", "main", version(iteration)) for iteration in (1, 2, 3, 5, 6, 7)]
    assert len(folders(storage)) == 4


def test_of_an_iteration_that_was_run_again_the_newest_is_kept(storage: LocalStorage) -> None:
    for at in (version(4, 1), version(4, 2), version(5, 2)):
        save(storage, at)
    retain(storage, keep_last=1, keep_every=4)
    assert [info.version for info in list_checkpoints(storage)] == [version(5, 2), version(4, 2)]


def test_other_runs_and_streams_are_left_alone(storage: LocalStorage) -> None:
    for iteration in (1, 2):
        for run, stream in (("run", "main"), ("run", "fit-0"), ("run-2", "main")):
            save(storage, version(iteration), run, stream)
    old = checkpoint_folder("run", "main", version(1))
    notes = ["run/main/notes.txt", f"{old}/notes.txt"]
    for key in notes:
        storage.put(key, [b"somebody else's"])
    assert retain(storage, keep_last=1) == [old]
    assert len(list_checkpoints(storage)) == 5
    assert [key for key in storage.list() if key.startswith(old) or "notes" in key] == notes
    assert retain(storage, keep_last=1) == []


def test_an_upload_under_way_is_left_alone(storage: LocalStorage) -> None:
    torn, newest, running = tear(storage, version(5)), save(storage, version(10)), tear(storage, version(20))
    assert retain(storage, keep_last=1) == [torn]
    assert folders(storage) == {newest.folder, running}


def test_the_newest_whole_one_stays_when_newer_ones_are_damaged(storage: LocalStorage) -> None:
    old, whole, newest = (save(storage, version(iteration)) for iteration in (1, 2, 3))
    storage.delete(newest.shards[0].key)
    assert retain(storage, keep_last=1) == [old.folder]
    assert newest_whole(storage, "run", "main") == whole


def test_a_torn_upload_alone_is_no_checkpoint(storage: LocalStorage) -> None:
    torn = tear(storage, version(1))
    assert newest_whole(storage, "run", "main") is None
    assert folders(storage) == {torn}


def test_what_is_half_deleted_is_no_checkpoint(storage: LocalStorage) -> None:
    class Dying(LocalStorage):
        def delete(self, key: str) -> None:
            if key.endswith("shard-00000.safetensors"):
                raise StorageError("gone for now")
            super().delete(key)

    save(storage, version(1))
    newest = save(storage, version(2))
    with pytest.raises(StorageError, match="gone for now"):
        retain(storage, keep_last=1, reopen=lambda: Dying(storage.root))
    assert [info.iteration for info in list_checkpoints(storage)] == [2]
    assert retain(storage, keep_last=1) == [checkpoint_folder("run", "main", version(1))]
    assert folders(storage) == {newest.folder}


def test_a_job_whose_run_id_another_one_has_taken_over_is_refused() -> None:
    storage = InMemory()
    first, second = save(storage, version(3, incarnation=1)), save(storage, version(2, incarnation=2))
    check_not_superseded(storage, second)
    with pytest.raises(SupersededError, match="another job has taken run id 'run' over"):
        check_not_superseded(storage, first)


def test_a_job_hears_of_another_that_no_listing_shows_by_the_mark_and_leaves_it_as_it_is() -> None:
    now = InMemory()
    save(now, version(1, incarnation=1))
    storage = Lagging(now)
    other = save(now, version(2, incarnation=2))
    write_mark(now, "run", "main", other.version)
    storage.listings = 100
    late = manifest_for(now, version(3, incarnation=1))
    with pytest.raises(SupersededError, match="another job has taken run id 'run' over"):
        check_not_superseded(storage, late)
    assert other_by_mark(storage, late) == other
    assert other_by_mark(storage, other) is None


@given(
    st.dictionaries(st.tuples(st.integers(1, 3), st.integers(1, 12)), st.sampled_from(["whole", "torn", "lacking"]), max_size=8),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_retention_keeps_what_it_must_and_no_more(states: dict[tuple[int, int], str], keep_last: int, keep_every: int | None) -> None:
    storage = InMemory()
    for (incarnation, iteration), state in states.items():
        at = version(iteration, incarnation)
        if state == "torn":
            tear(storage, at)
        elif state == "lacking":
            storage.delete(save(storage, at).shards[1].key)
        else:
            save(storage, at)
    try:
        newest = newest_whole(storage, "run", "main")
    except StorageUnclearError:
        assert "lacking" in states.values()
        assert "whole" not in states.values()
        return
    if newest is None:
        assert set(states.values()) <= {"torn"}
        return
    before = folders(storage)
    whole = sorted((version(iteration, number) for (number, iteration), state in states.items() if state == "whole"), reverse=True)
    deleted = retain(storage, keep_last, keep_every)

    assert newest_whole(storage, "run", "main") == newest
    assert newest.version == whole[0]
    assert folders(storage) == before - set(deleted)
    assert not {checkpoint_folder("run", "main", at) for at in whole[:keep_last]} & set(deleted)
    if len(whole) >= keep_last:
        for info in list_checkpoints(storage)[keep_last:]:
            kept = info.version in whole[:keep_last] or (keep_every and info.iteration % keep_every == 0)
            assert kept or info.version > newest.version
    lacking = {checkpoint_folder("run", "main", version(at, number)) for (number, at), state in states.items() if state == "lacking"}
    assert set(retain(storage, keep_last, keep_every)) <= lacking  # read only now that nothing newer of its incarnation is left


# -- storage that lies or lags --------------------------------------------------------------------


class Lagging(InMemory):
    """Listings are old: they do not name what came since, and name what has gone since."""

    def __init__(self, now: InMemory) -> None:
        super().__init__()
        self.objects, self._then = now.objects, sorted(now.objects)
        self.listings = 0  # still old

    def list(self, prefix: str = "") -> Sequence[str]:
        self.listings -= 1
        return [key for key in self._then if key.startswith(prefix)] if self.listings >= 0 else super().list(prefix)


def test_what_retention_deletes_between_the_listing_and_the_reading_is_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = InMemory()
    older = save(now, version(10))
    storage = Lagging(now)
    newer = save(now, version(20))
    for key in [key for key in now.objects if key.startswith(older.folder)]:
        now.delete(key)
    storage.listings = 1
    assert newest_whole(storage, "run", "main") == newer


def test_a_manifest_that_a_listing_leaves_out_goes_before_its_shards() -> None:
    now, deleted = InMemory(), list[str]()
    older, newest = save(now, version(10)), save(now, version(20))

    class Lagged(Lagging):
        def list(self, prefix: str = "") -> Sequence[str]:
            return [key for key in super().list(prefix) if prefix != f"{older.folder}/" or not key.endswith("manifest.json")]

        def delete(self, key: str) -> None:
            deleted.append(key)
            super().delete(key)

    assert retain(now, keep_last=1, reopen=lambda: Lagged(now)) == [older.folder]
    assert deleted[0] == f"{older.folder}/manifest.json"
    assert folders(now) == {newest.folder}


def test_a_listing_that_stays_old_is_told_by_the_mark() -> None:
    now = InMemory()
    save(now, version(10))
    storage = Lagging(now)
    newer = save(now, version(20))
    write_mark(now, "run", "main", newer.version)
    storage.listings = 100
    assert newest_whole(storage, "run", "main") == newer


def test_a_mark_of_what_is_deleted_keeps_nothing_from_being_deleted_or_stored() -> None:
    """A leader that is lost after the manifest has not written the mark, and the next one deletes what the mark names."""
    now = InMemory()
    oldest, marked = save(now, version(10)), save(now, version(20))
    write_mark(now, "run", "main", marked.version)
    newest = save(now, version(30))
    assert retain(now, keep_last=1) == [oldest.folder, marked.folder]
    retain(now, keep_last=1)  # raised an error, after which nothing more was stored
    assert newest_whole(now, "run", "main") == newest


@pytest.mark.parametrize("how", ["manifest", "shards"])
def test_a_listing_that_stays_old_does_not_tell_which_comes_before_a_damaged_one(how: str) -> None:
    now = InMemory()
    save(now, version(10))
    storage = Lagging(now)
    between, newest = save(now, version(20)), save(now, version(30))
    write_mark(now, "run", "main", newest.version)
    passed = {newest.folder} if how == "shards" else set()  # found when they were read
    if how == "manifest":
        now.objects[f"{newest.folder}/manifest.json"] = b"{}"
    storage.listings = 100
    answer = decide(Lookout(lambda: storage, "run", "main").look(passed))
    assert isinstance(answer, Unclear)
    assert f"{newest.folder} is damaged, and the listing leaves it out" in answer.why
    storage.listings = 0
    found = decide(Lookout(lambda: storage, "run", "main").look(passed))
    assert isinstance(found, CanResume)
    assert found.order[0].folder == between.folder


def test_an_empty_listing_is_no_proof_that_there_is_nothing() -> None:
    now = InMemory()
    storage = Lagging(now)
    newest = save(now, version(10))
    write_mark(now, "run", "main", newest.version)
    storage.listings = 100
    assert newest_whole(storage, "run", "main") == newest  # by the mark and a reading of its own
    for key in newest.shards.values():
        now.delete(key.key)
    with pytest.raises(StorageUnclearError, match="1 checkpoints are there, but none is sound"):
        newest_whole(storage, "run", "main")
    now.delete(f"{newest.folder}/manifest.json")
    with pytest.raises(StorageUnclearError, match="none is sound"):
        newest_whole(storage, "run", "main")


def test_what_was_reported_as_stored_and_is_gone_is_no_reason_to_take_the_one_before() -> None:
    storage = InMemory()
    save(storage, version(10))
    newest = save(storage, version(20))
    write_mark(storage, "run", "main", newest.version)
    for key in [key for key in storage.objects if key.startswith(newest.folder)]:
        storage.delete(key)
    with pytest.raises(StorageUnclearError, match="iteration 20 of incarnation 1 was reported as stored, but neither it"):
        newest_whole(storage, "run", "main")


@pytest.mark.parametrize("what", ["manifest.json", "main.stored.json"])
def test_damage_is_believed_after_a_second_reading(what: str) -> None:
    class Flipping(InMemory):
        flips = 1

        def get(self, key: str) -> bytes:
            content = bytearray(super().get(key))
            if key.endswith(what) and self.flips:
                self.flips -= 1
                content[len(content) // 2] ^= 1
            return bytes(content)

    storage = Flipping()
    save(storage, version(10))
    newest = save(storage, version(20))
    write_mark(storage, "run", "main", newest.version)
    assert newest_whole(storage, "run", "main") == newest


def test_a_flipped_digit_of_the_format_is_damage_and_no_other_format(storage: LocalStorage) -> None:
    older, newer = save(storage, version(10)), save(storage, version(20))
    edit_manifest(storage, newer.folder, format=9)
    assert newest_whole(storage, "run", "main") == older


def test_what_is_known_to_be_damaged_does_not_count(storage: LocalStorage) -> None:
    """Else the last sound one would go; that the newest is sound does not make it the only one that is wanted."""
    sound, damaged, newest = (save(storage, version(iteration)) for iteration in (1, 2, 3))
    blob = bytearray(storage.get(damaged.shards[1].key))
    blob[-1] ^= 1
    storage.put(damaged.shards[1].key, [bytes(blob)])
    assert retain(storage, keep_last=2) == [damaged.folder]
    assert folders(storage) == {sound.folder, newest.folder}


def test_another_history_is_not_touched(storage: LocalStorage) -> None:
    foreign = {save(storage, version(iteration, 1)).folder for iteration in (1, 2, 3)}
    for iteration in (1, 2, 3):
        begun = manifest_for(storage, version(iteration, 2)).model_copy(update={"lineage": (), "overtaken": (version(1, 1).incarnation,)})
        write_manifest(storage, begun)
    for folder in foreign:
        edit_manifest(storage, folder, sealed=True, lineage=[])
    assert len(retain(storage, keep_last=1)) == 2
    assert folders(storage) == foreign | {begun.folder}


def test_what_another_part_of_the_job_may_go_on_from_is_not_deleted(storage: LocalStorage) -> None:
    """Incarnation 2 goes on from step 2 of incarnation 1, which was believed to be dead and stores on; a third has never been heard of."""
    first = [save(storage, version(iteration, 1)).folder for iteration in (1, 2, 3)]
    torn = tear(storage, version(4, 1))
    begun = manifest_for(storage, version(5, 2)).model_copy(update={"lineage": (version(2, 1),)})
    write_manifest(storage, begun)
    retention = Retention(lambda: storage, "run", "main", 1, present={first[2], torn})
    late = save(storage, version(6, 1)).folder
    late_torn = tear(storage, version(7, 1))
    unknown = manifest_for(storage, version(8, 3)).model_copy(update={"lineage": (version(1, 1),)})
    write_manifest(storage, unknown)
    assert set(retention.tidy(retention.stored(begun))) == {torn, first[1]}
    assert folders(storage) == {first[0], first[2], late, late_torn, begun.folder, unknown.folder}


def test_two_jobs_that_store_at_once_lose_nothing_and_neither_is_taken_for_the_other(storage: LocalStorage) -> None:
    """Both have looked before either has written: no store that is meant by its keys alone can keep that from happening."""
    versions = [Version(Incarnation(1, nonce), 20) for nonce in ("0000000a", "0000000b")]
    manifests = [manifest_for(storage, each) for each in versions]
    for manifest in manifests:
        check_not_superseded(storage, manifest)
    for manifest in manifests:
        write_manifest(storage, manifest)
    before = folders(storage)
    for manifest in manifests:
        retention = Retention(lambda: storage, "run", "main", 1)
        assert retention.tidy(retention.stored(manifest)) == []
        with pytest.raises(SupersededError, match="another job has taken run id 'run' over"):
            check_not_superseded(storage, manifest)
    assert folders(storage) == before
    answer = decide(Lookout(lambda: storage, "run", "main").look())
    assert isinstance(answer, Unclear)
    assert answer.contested
    assert all(each.incarnation.nonce in answer.why for each in versions)


def test_what_a_reader_holds_stays(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gemini_ft.storage.retention.time", SimpleNamespace(monotonic=lambda: now[0]))
    older, newer = save(storage, version(1)), save(storage, version(2))
    with reading(storage, "run", "main", older.version):
        assert retain(storage, keep_last=1) == []
    with closing(from_storage(storage, 1, "run", "main", None, False)):  # an export
        assert retain(storage, keep_last=1) == []
    assert retain(storage, keep_last=1) == [older.folder]
    note = "run/main.reading-0123.json"
    storage.put(note, [json.dumps({"folder": newer.folder, "since": 1.0}).encode()])  # by a clock that is years off
    third, retention = save(storage, version(3)), Retention(lambda: storage, "run", "main", 1)
    assert retention.tidy(retention.stored(third)) == []
    now[0] += READER_SECONDS + 1
    storage.put("run/main.reading-4567.json", [json.dumps({"folder": "another"}).encode()])
    assert retention.tidy(retention.stored(third)) == [newer.folder]  # its reader is dead
    assert note not in storage.list()
    assert "run/main.reading-4567.json" in storage.list()
