"""Whoever can write to the storage forges manifests and objects, checksums included: clear errors, bounded memory, older ones found."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import xxhash
from forging import places, put_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini_ft.cli.main import main
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, GeminiError, RecoveryError, StorageError
from gemini_ft.export.source import StorageShard
from gemini_ft.export.whole_tensors import WholeTensors, join_parts
from gemini_ft.storage import base
from gemini_ft.storage.checkpoints import (
    MANIFEST,
    Manifest,
    body_checksum,
    examine,
    list_checkpoints,
    mark_key,
    read_manifest,
    read_mark,
    shard_key,
    write_manifest,
)
from gemini_ft.storage.decisions import Descent, Sighting
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.retention import Retention, held_by_readers
from gemini_ft.storage.s3 import S3Storage
from gemini_ft.storage.shard import StoredShard, write_shard

LAYOUT = build_layout([TensorSpec(name="weight", dtype="float32", shape=(64,), group=(0,))], 0, 1)
HUGE = [2**40, 2**62, 2**64, 10**400]


def save(storage: LocalStorage, iteration: int) -> Manifest:
    """A sound checkpoint of one rank."""
    version = Version(Incarnation(1, "nonce"), iteration)
    folder = f"run/main/step-{iteration:08}-inc-1-nonce"
    record = write_shard(storage, shard_key(folder, 0), LAYOUT, memoryview(bytes(LAYOUT.nbytes)), b"extras")
    manifest = Manifest(
        run="run", stream="main", incarnation=version.incarnation, iteration=iteration, world_size=1,
        logical_hash=LAYOUT.logical_hash, shards={0: record},
    )  # fmt: skip
    write_manifest(storage, manifest)
    return manifest


def forge(storage: LocalStorage, manifest: Manifest, body: Any) -> None:
    """Put ``body`` in a manifest's place, with a checksum that fits."""
    if isinstance(body, dict):
        body = {**body, "xxh3": body_checksum(body)}
    storage.put(f"{manifest.folder}/{MANIFEST}", [json.dumps(body).encode()])


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than 2 GiB beyond what this process has mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


nested = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
numbers = [*HUGE, *(-number for number in HUGE), 0, -1, 1.5]
strange = st.sampled_from([*numbers, None, True, "", "../../etc/passwd", "/etc/passwd", "a" * 10_000, [], {}]) | nested


def read_all(storage: LocalStorage, folder: str) -> None:
    """What a resume, an export and `gemini checkpoints --verify` read of a checkpoint."""
    manifest = read_manifest(storage, folder)
    for record in manifest.shards.values():
        shard = StoredShard(storage, record)
        assert isinstance(shard.layout, Layout)
        assert isinstance(shard.extras, bytes)
        shard.sample()
        if record.data.nbytes <= 2**20:
            shard.read(0, memoryview(bytearray(record.data.nbytes)))
        shard.verify()
    WholeTensors([StorageShard(storage, manifest, owner) for owner in range(manifest.world_size)], lambda name: True).read()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_manifest_with_anything_anywhere_is_refused_by_a_clear_error(
    storage: LocalStorage, little_memory: None, data: st.DataObject
) -> None:
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    at = data.draw(st.sampled_from(list(places(body))))
    forge(storage, manifest, put_at(body, at, data.draw(strange)))
    with contextlib.suppress(GeminiError):  # whatever else it raises fails the test; some changes are harmless
        read_all(storage, manifest.folder)


@pytest.mark.parametrize("huge", HUGE[:2])
@pytest.mark.parametrize("part", ["layout", "extras", "digests", "data"])
def test_sizes_that_lie_take_no_memory(storage: LocalStorage, little_memory: None, part: str, huge: int) -> None:
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    body["shards"]["0"][part]["nbytes"] = huge
    body["shards"]["0"]["nbytes"] = 2 * huge  # all of a piece
    body["shards"]["0"]["chunk_bytes"] = huge
    forge(storage, manifest, body)
    with pytest.raises(GeminiError):
        read_all(storage, manifest.folder)


@pytest.mark.parametrize("part", ["layout", "extras", "digests", "chunk", "chunk of an earlier release"])
def test_holes_of_a_file_take_no_memory(storage: LocalStorage, little_memory: None, part: str) -> None:
    """The bytes that a record claims are there, and cost whoever has written them nothing."""
    manifest, huge = save(storage, 7), 3 * 2**30 if "earlier" in part else 2**36
    body = manifest.model_dump(mode="json")
    record = body["shards"]["0"]
    os.truncate(storage.root / record["key"], 2 * huge)
    if "chunk" in part:
        layout = build_layout([TensorSpec(name="weight", dtype="uint8", shape=(huge,), group=(0,))], 0, 1).to_bytes()
        digest = bytes(8)
        with open(storage.root / record["key"], "r+b") as file:
            file.write(layout + digest)
        record["layout"] = {"offset": 0, "nbytes": len(layout), "xxh3": xxhash.xxh3_64_hexdigest(layout)}
        record["digests"] = {"offset": len(layout), "nbytes": 8, "xxh3": xxhash.xxh3_64_hexdigest(digest)}
        record["data"], record["chunk_bytes"] = {"offset": huge, "nbytes": huge}, huge
    else:
        record[part] = {"offset": huge, "nbytes": huge, "xxh3": "0" * 16}
    record["nbytes"] = 2 * huge
    forge(storage, manifest, body)
    with pytest.raises(CorruptDataError, match="of its data is damaged" if "earlier" in part else "is no manifest"):
        read_all(storage, manifest.folder)


@pytest.mark.parametrize("field", ["shards", "no owners", "lineage", "versions", "unknown"])
def test_errors_without_number_are_one(storage: LocalStorage, field: str) -> None:
    """Each of a million took a paragraph."""
    manifest = save(storage, 7)
    many: dict[str, Any] = {
        "shards": {"shards": dict.fromkeys(map(str, range(70_000)), "none")},
        "no owners": {"shards": {f"rank {number}": manifest.shards[0].model_dump() for number in range(5_000)}},
        "lineage": {"lineage": [None] * 70_000},
        "versions": {"versions": dict.fromkeys(map(str, range(70_000)), 1)},
        "unknown": dict.fromkeys(map(str, range(70_000)), 1),
    }
    forge(storage, manifest, manifest.model_dump(mode="json") | many[field])
    with pytest.raises(CorruptDataError, match="is no manifest: 1 validation error for Manifest"):
        read_manifest(storage, manifest.folder)


@pytest.mark.parametrize(
    "made", [lambda: b"[]," * 2**25, lambda: b'{"' + b"a" * 2**27 + '":"😀"}'.encode()], ids=["values", "text"]
)  # made by the test: every process of the tests has their modules
def test_a_document_that_unfolds_is_refused_in_little_time_and_memory(
    storage: LocalStorage, little_memory: None, made: Callable[[], bytes]
) -> None:
    """A hundred megabytes would become gigabytes: an empty list takes 64 bytes, and beside an emoji each letter takes four."""
    manifest, note, body = save(storage, 7), "run/main.reading-abc", made()
    storage.put(f"{manifest.folder}/{MANIFEST}", [b'{"lineage":[', body, b"0]}"] if body[:1] == b"[" else [body])
    with pytest.raises(CorruptDataError, match="is damaged: it has more than"):
        read_manifest(storage, manifest.folder)
    storage.put(note, [b'{"folder":[', body, b"0]}"] if body[:1] == b"[" else [body])
    assert held_by_readers(storage, "run", "main", {}) == set()
    assert note not in storage.list()


@pytest.mark.parametrize(
    ("row", "others"),
    [
        (("weight", "uint8", [2**62] * 300_000, 0, 1, 0, 0, ""), 0),
        (("weight", "uint8", [1], 0, 1, 0, 0, {}), 10**7),
        (("weight", "uint8", [1], 0, 1, 0, 0, msgpack.ExtType(1, b"1")), 0),
    ],
    ids=["dimensions", "maps", "types"],
)
def test_a_layout_that_unfolds_is_refused_in_little_time_and_memory(little_memory: None, row: tuple[Any, ...], others: int) -> None:
    blob = msgpack.packb((1, 1, "0" * 16, 64, [(0,)], [row, *[{}] * others]))
    begin, before = time.process_time(), peak()
    with pytest.raises(CorruptDataError, match="not a layout"):
        Layout.from_bytes(blob)
    assert peak() < before + 300
    assert time.process_time() - begin < 5  # of minutes


def test_large_groups_of_many_pieces_are_looked_at_once(little_memory: None) -> None:
    rows = [(f"weight {number}", "uint8", [1], 0, 1, 64 * number, 0, "") for number in range(20_000)]
    begin = time.process_time()
    assert len(Layout.from_bytes(msgpack.packb((1, 100_000, "0" * 16, 64 * len(rows), [list(range(100_000))], rows))).pieces) == len(rows)
    assert time.process_time() - begin < 5  # of the processor; each piece took a millisecond for each thousand ranks


def peak() -> int:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def test_a_pipe_in_a_files_place_is_not_waited_for(storage: LocalStorage) -> None:
    manifest = save(storage, 7)
    for key in (manifest.shards[0].key, f"{manifest.folder}/{MANIFEST}"):
        (storage.root / key).unlink()
        os.mkfifo(storage.root / key)
        with pytest.raises(StorageError):
            storage.get_range(key, 0, memoryview(bytearray(1)))
    with pytest.raises(CorruptDataError, match="is not JSON"):
        read_manifest(storage, manifest.folder)


def test_folders_in_folders_without_end_hide_nothing(storage: LocalStorage) -> None:
    manifest = save(storage, 7)
    place = storage.root / "run"
    for _ in range(1200):
        place /= "a"
        place.mkdir()
    assert [info.folder for info in list_checkpoints(storage)] == [manifest.folder]
    while place != storage.root / "run":  # which rmtree does not, by recursion
        place.rmdir()
        place = place.parent


def test_chunks_without_a_checksum_are_not_read(storage: LocalStorage) -> None:
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    record = body["shards"]["0"]
    blob = xxhash.xxh3_64(bytes(64)).intdigest().to_bytes(8, "little")  # of the first chunk alone
    object_ = storage.get(record["key"])
    storage.put(record["key"], [object_, blob])
    record["digests"] = {"offset": len(object_), "nbytes": len(blob), "xxh3": xxhash.xxh3_64_hexdigest(blob)}
    record["chunk_bytes"] = 64
    forge(storage, manifest, body)
    with pytest.raises(CorruptDataError, match="1 checksums of 4 chunks"):
        read_all(storage, manifest.folder)


@pytest.mark.parametrize("claimed", [256, 2**42], ids=["its own", "those of the manifest too"])
def test_a_layout_whose_sizes_lie_takes_no_memory(storage: LocalStorage, little_memory: None, claimed: int) -> None:
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    record = body["shards"]["0"]
    blob = build_layout([TensorSpec(name="weight", dtype="float32", shape=(2**40,), group=(0,))], 0, 1).to_bytes()
    object_ = storage.get(record["key"])
    storage.put(record["key"], [object_, blob])
    record["layout"] = {"offset": len(object_), "nbytes": len(blob), "xxh3": xxhash.xxh3_64_hexdigest(blob)}
    record["data"]["nbytes"] = claimed
    forge(storage, manifest, body)
    with pytest.raises(CorruptDataError):
        read_all(storage, manifest.folder)


def test_a_number_of_ranks_that_lies_takes_no_memory(storage: LocalStorage, little_memory: None) -> None:
    manifest = save(storage, 7)
    forge(storage, manifest, manifest.model_dump(mode="json") | {"world_size": 10**12})
    with pytest.raises(GeminiError, match="is no manifest"):
        read_manifest(storage, manifest.folder)


def test_a_manifest_that_is_nested_without_end_is_refused(storage: LocalStorage) -> None:
    manifest = save(storage, 7)
    storage.put(f"{manifest.folder}/{MANIFEST}", [b"[" * 1_000_000])
    with pytest.raises(GeminiError, match="is not JSON"):
        read_manifest(storage, manifest.folder)


def test_a_manifest_that_is_larger_than_any_is_not_taken_in(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = save(storage, 7)
    monkeypatch.setattr(base, "SMALL", 100)
    with pytest.raises(GeminiError, match=r"has [0-9,]+ bytes, more than the 100 that"):
        read_manifest(storage, manifest.folder)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "run/main/step-00000008-inc-1-nonce/shard-00000.safetensors"])
def test_a_shard_elsewhere_is_not_read(storage: LocalStorage, name: str) -> None:
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    body["shards"]["0"]["key"] = name
    forge(storage, manifest, body)
    with pytest.raises(GeminiError, match="does not belong to"):
        read_manifest(storage, manifest.folder)


RUBBISH = [b"[" * 1_000_000, b'{"folder": "x", "since": ' + b"9" * 400 + b"}", b'{"folder": "x", "since": NaN}', b"[]", b"\xff"]


@pytest.mark.parametrize("created", ["2026-11-28T00:00:00", "1e30", -1e18])
def test_a_time_that_cannot_be_compared_hides_no_older_checkpoint(storage: LocalStorage, created: object) -> None:
    """The age of what is resumed is said, and the difference of a time with a zone and one without is an error."""
    older, newer = save(storage, 3), save(storage, 4)
    forge(storage, newer, newer.model_dump(mode="json", exclude={"xxh3"}) | {"created": created})
    assert [reason for _, _, reason in examine(storage, "run")] == ["damaged: its manifest", ""]
    found = newest_whole(storage, "run", "main")
    assert found is not None
    assert found.folder == older.folder


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_notes_beside_the_checkpoints_that_are_none(storage: LocalStorage, rubbish: bytes) -> None:
    """The mark of what was stored, and what readers say of themselves."""
    manifest = save(storage, 7)
    storage.put(mark_key("run", "main"), [rubbish])
    storage.put("run/main.reading-0.json", [rubbish])
    with pytest.raises(GeminiError, match=r"main\.stored\.json is damaged"):
        read_mark(storage, "run", "main")
    assert newest_whole(storage, "run", "main") == manifest
    assert held_by_readers(storage, "run", "main", {}) <= {"x"}


def test_a_link_in_the_place_of_the_unfinished_is_not_followed(storage: LocalStorage, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    storage.root = tmp_path / "store"
    storage.root.mkdir()
    (storage.root / ".partial").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="links are not followed"):
        save(storage, 7)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_what_is_no_manifest_hides_no_older_checkpoint(storage: LocalStorage, rubbish: bytes) -> None:
    sound, broken = save(storage, 6), save(storage, 7)
    storage.put(f"{broken.folder}/{MANIFEST}", [rubbish])
    verdicts = {info.iteration: problem for info, _, problem in examine(storage, "run")}
    assert verdicts[6] == ""
    assert verdicts[7]
    assert read_manifest(storage, sound.folder) == sound
    assert [info.iteration for info in list_checkpoints(storage, "run")] == [7, 6]


WORDS = ["(4,) S(9) on (2,)", "(4,) S(0) S(0) on (2,)", "(4,) S(0) on (2, 1)", "(4,) _S(0, 1000000000000) on (2,)", "(4,) _S(0, 0) on (2,)"]


@pytest.mark.parametrize("words", [*WORDS, "(4,) S(0) on (-2, -1)", "(2, 2) S(0) on (2,)", "(4" + "0" * 300 + ",) S(0) on (2,)"])
def test_placements_that_lie_are_refused(words: str, little_memory: None) -> None:
    with pytest.raises(GeminiError):
        join_parts("weight", words, {(0,): torch.zeros(2), (1,): torch.zeros(2)}, 2)


def test_placements_of_nothing_take_no_memory(little_memory: None) -> None:
    assert join_parts("weight", f"(0, {2**40}) S(0) on (1,)", {(0,): torch.empty(0, 2**40)}, 1).shape == (0, 2**40)


@given(st.binary(max_size=2000))
def test_a_layout_of_any_bytes_is_refused_or_read(rubbish: bytes) -> None:
    with contextlib.suppress(GeminiError):
        Layout.from_bytes(rubbish)


@given(st.data())
def test_a_layout_with_one_byte_changed_is_refused_or_read(data: st.DataObject) -> None:
    blob = bytearray(LAYOUT.to_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(GeminiError):
        Layout.from_bytes(bytes(blob))


class Endless(http.server.BaseHTTPRequestHandler):
    """Says no length of what it keeps: GET is answered in pieces without an end, HEAD with nothing at all."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"10000\r\n" + bytes(2**16) + b"\r\n")

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_store_that_says_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        storage = open_storage("s3://bucket/run", f"http://127.0.0.1:{server.server_port}")
        assert isinstance(storage, S3Storage)
        with pytest.raises(CorruptDataError, match="that are read in one piece"):
            storage.get("step/manifest.json")
        with pytest.raises(StorageError, match="the answer says no length"):
            storage.put("step/manifest.json", [b"{}"])
        server.shutdown()


def test_an_incarnation_that_leaves_no_number_is_followed_by_none(storage: LocalStorage) -> None:
    """The number after it could not be read again, so that nothing would ever be found that was stored under it."""
    known = Incarnation(10**15 - 1, "nonce")
    with pytest.raises(RecoveryError, match="leaves no higher number"):
        Incarnation.after([known])
    manifest = save(storage, 3)
    body = manifest.model_dump(mode="json") | {"overtaken": [[10**15, "nonce"]]}
    forge(storage, manifest, body)
    with pytest.raises(CorruptDataError, match="no job comes that far"):
        read_manifest(storage, manifest.folder)


FORGED = "x\x1b[2J\u202e\r\n12:00:00 [main] resumed from iteration 9\u2028\x9b1A" + "y" * 20_000


@pytest.mark.parametrize("part", ["fields of the manifest", "its format", "the mark", "the name of a run", "a shard's key"])
def test_texts_of_a_hostile_bucket_reach_no_terminal_as_they_are(
    storage: LocalStorage, part: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by an error, nor by a warning, nor by `gemini checkpoints`: no escape, no second line, no text without an end."""
    manifest = save(storage, 7)
    body = manifest.model_dump(mode="json")
    if part == "fields of the manifest":
        forge(storage, manifest, body | {FORGED: FORGED} | {f"{FORGED}{number}": 1 for number in range(9)})
    elif part == "its format":
        forge(storage, manifest, body | {"format": FORGED, "versions": {FORGED: FORGED}})
    elif part == "the mark":
        mark = {"run": FORGED, "stream": FORGED, "version": [[1, "nonce"], 7], "url": "", "at": 1.0}
        storage.put(mark_key("run", "main"), [json.dumps(mark | {"xxh3": body_checksum(mark)}).encode()])
    elif part == "the name of a run":
        named = Path(storage.root) / FORGED[:60] / "main" / manifest.folder.rpartition("/")[2]
        named.mkdir(parents=True)
        (named / MANIFEST).write_text("{}")
    else:
        body["shards"]["0"]["key"] = FORGED
        forge(storage, manifest, body)
    texts = []
    for read in (lambda: read_all(storage, manifest.folder), lambda: newest_whole(storage, "run", "main")):
        try:
            read()
        except GeminiError as error:
            texts += [str(error), "".join(traceback.format_exception_only(error)).strip()]
    main(["checkpoints", storage.url, "--verify"])
    texts += [record.getMessage() for record in caplog.records] + capsys.readouterr().out.splitlines()
    assert [text for text in texts if not text.isprintable() or len(text) > 10_000] == []


def test_what_is_wrong_is_said_once_however_often_the_storage_is_looked_at(storage: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """A job looks before and after each upload: what another job has left there stays as it is."""
    lacking, damaged = save(storage, 3), save(storage, 5)
    storage.delete(lacking.shards[0].key)
    storage.put(f"{damaged.folder}/{MANIFEST}", [b"{}"])
    retention = Retention(lambda: storage, "run", "main", 2)
    this = Sighting("", Version(Incarnation(2, "this"), 9), "torn", Descent(lineage=(), overtaken=frozenset({lacking.incarnation})))
    for _ in range(3):
        retention.tidy(this)
    assert len(caplog.messages) == len(set(caplog.messages))
    assert [text for text in caplog.messages if lacking.shards[0].key in text]
