"""Shards as safetensors objects: what the library reads, what partial reads return, what damage is found."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest
import safetensors
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.layout import ITEMSIZES, Layout, TensorSpec, build_layout
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, StorageError
from gemini_ft.storage import shard
from gemini_ft.storage.base import UNCOUNTED, RangeReader, TransferCount
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.shard import Committed, ShardRecord, StoredShard, write_shard

KEY = "shard.safetensors"
EXTRAS = b"extras of no particular size"
VERSION = Version(Incarnation(1, "x"), 4)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 100)  # not a multiple of anything
    return 100


def layout_of(*shapes: tuple[int, ...], dtype: str = "float32") -> Layout:
    return build_layout([TensorSpec(name=f"t{i}", dtype=dtype, shape=shape, group=(0,)) for i, shape in enumerate(shapes)], 0, 1)


def slot_for(layout: Layout) -> memoryview:
    """Random bytes, and more of them than the layout needs."""
    return memoryview(random.Random(0).randbytes(layout.nbytes + 4096))


def committed_as(layout: Layout, slot: bytes | bytearray | memoryview, chunk: int = 256) -> Committed:
    """The record of a slot as it was committed; ``chunk``: bytes of data per checksum."""
    data = bytes(slot)[: layout.nbytes]
    parts = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    checksums = [checksum(part) for part in [*parts, EXTRAS]]
    root = shard_root(2, VERSION, layout_digest(layout.to_bytes()), (len(data), len(EXTRAS), chunk), checksums)
    return Committed(2, VERSION, root, chunk)


def stored(storage: LocalStorage, layout: Layout) -> tuple[memoryview, ShardRecord]:
    slot = slot_for(layout)
    return slot, write_shard(storage, KEY, layout, slot, memoryview(EXTRAS))


# -- as others see it -----------------------------------------------------------------------------


def test_the_safetensors_library_reads_every_dtype(storage: LocalStorage) -> None:
    specs = [TensorSpec(name=dtype, dtype=dtype, shape=shape, group=(0,)) for dtype in ITEMSIZES for shape in [(3, 5)]]
    specs += [
        TensorSpec(name="none", dtype="float32", shape=(0, 4), group=(0,)),
        TensorSpec(name="scalar", dtype="int64", shape=(), group=(0,)),
    ]
    layout = build_layout(specs, 0, 1)
    slot, _ = stored(storage, layout)
    with safetensors.safe_open(storage.root / KEY, "pt") as file:
        assert {name for name in file.keys() if not name.startswith("__")} == {piece.label for piece in layout.pieces}  # noqa: SIM118
        assert "none@0:0" in file.keys()  # noqa: SIM118
        as_bytes = set()
        for piece in layout.pieces:
            tensor = file.get_tensor(piece.label)
            assert tensor.view(torch.uint8).numpy().tobytes() == slot[piece.offset : piece.offset + piece.nbytes], piece.label
            if tensor.dtype == getattr(torch, piece.dtype):
                assert tensor.numel() == piece.stop - piece.start
            else:
                assert tensor.dtype == torch.uint8
                as_bytes.add(piece.dtype)
        assert as_bytes == {"complex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"}
        assert all(dtype in file.metadata()["gemini_ft.stored_as_bytes"] for dtype in as_bytes)
        assert file.get_tensor("__extras__").numpy().tobytes() == EXTRAS


def test_pieces_are_named_by_their_elements(storage: LocalStorage) -> None:
    """Rank 1 of 3 that hold the same bytes."""
    layout = build_layout([TensorSpec(name="w", dtype="float32", shape=(4, 9), group=(0, 1, 2))], 1, 3)
    slot, _ = stored(storage, layout)
    with safetensors.safe_open(storage.root / KEY, "pt") as file:
        assert torch.equal(file.get_tensor("w@12:24").view(torch.uint8), torch.frombuffer(bytearray(slot[:48]), dtype=torch.uint8))


def test_everything_is_aligned(storage: LocalStorage) -> None:
    _, record = stored(storage, layout_of((3,), (5,), dtype="int8"))
    for span in (record.layout, record.extras, record.digests, record.data):
        assert span.offset % 64 == 0


def test_checksum_and_size_are_those_of_the_file(storage: LocalStorage) -> None:
    _, record = stored(storage, layout_of((1000,), (3,)))
    blob = storage.get(KEY)
    assert record.nbytes == len(blob)
    assert record.xxh3 == xxhash.xxh3_64_hexdigest(blob)


def test_the_slot_is_written_without_being_copied() -> None:
    class Recorder(LocalStorage):
        def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
            self.parts = list(parts)

    recorder = Recorder("/nowhere")
    layout = layout_of((shard.CHUNK_BYTES,), dtype="float16")
    slot = slot_for(layout)
    write_shard(recorder, KEY, layout, slot, EXTRAS)
    views = [part for part in recorder.parts if isinstance(part, memoryview) and part.obj is slot.obj]
    assert sum(view.nbytes for view in views) == layout.nbytes == 2 * shard.CHUNK_BYTES
    assert sum(len(part) for part in recorder.parts) - layout.nbytes < 4096


def test_a_slot_too_short_for_its_layout_is_refused(storage: LocalStorage) -> None:
    with pytest.raises(StorageError, match=f"{KEY} was given 63 bytes for a layout of 64"):
        write_shard(storage, KEY, layout_of((16,)), memoryview(bytes(63)), b"")
    assert storage.list() == []


# -- reading back ---------------------------------------------------------------------------------


def test_layout_and_extras_come_back(storage: LocalStorage) -> None:
    layout = layout_of((7, 3), (), (0,))
    _, record = stored(storage, layout)
    opened = StoredShard(storage, ShardRecord.model_validate_json(record.model_dump_json()))
    assert opened.layout == layout
    assert opened.extras == EXTRAS
    opened.verify()


@pytest.mark.usefixtures("small_chunks")
def test_any_range_comes_back(storage: LocalStorage) -> None:
    layout = layout_of((33,), (50,), (7,))
    slot, record = stored(storage, layout)
    opened = StoredShard(storage, record)

    @given(st.integers(0, layout.nbytes), st.integers(0, layout.nbytes))
    def check(one: int, other: int) -> None:
        start, stop = sorted((one, other))
        out = memoryview(bytearray(stop - start))
        opened.read(start, out)
        assert out == slot[start:stop]

    check()


def test_a_shard_of_nothing_comes_back(storage: LocalStorage) -> None:
    slot = memoryview(b"")
    record = write_shard(storage, KEY, layout_of(), slot, b"")
    opened = StoredShard(storage, record)
    opened.read(0, memoryview(bytearray()))
    opened.verify()
    assert opened.extras == b""
    assert opened.layout.pieces == ()


def test_a_range_beyond_the_shard_is_refused(storage: LocalStorage) -> None:
    layout = layout_of((16,))
    _, record = stored(storage, layout)
    with pytest.raises(StorageError, match="bytes 32 to 72 were asked for, its shard has 64"):
        StoredShard(storage, record).read(32, memoryview(bytearray(40)))


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
def test_a_flipped_bit_anywhere_is_found(storage: LocalStorage) -> None:
    layout = layout_of((40,), (30,))
    _, record = stored(storage, layout)
    whole = storage.get(KEY)

    @given(st.integers(0, 8 * len(whole) - 1))
    def check(bit: int) -> None:
        blob = bytearray(whole)
        blob[bit // 8] ^= 1 << bit % 8
        storage.put(KEY, [bytes(blob)])
        opened = StoredShard(storage, record)
        with pytest.raises(CorruptDataError, match=f"{KEY}: the object is damaged .*use an older checkpoint"):
            opened.verify()
        where = [
            name for name in ("layout", "extras", "data") if 0 <= bit // 8 - getattr(record, name).offset < getattr(record, name).nbytes
        ]
        for name, read in (("layout", lambda: opened.layout), ("extras", lambda: opened.extras), ("data", lambda: read_all(opened))):
            if name in where:
                with pytest.raises(CorruptDataError):
                    read()

    check()


def read_all(opened: StoredShard) -> bytes:
    out = bytearray(opened.record.data.nbytes)
    opened.read(0, memoryview(out))
    return bytes(out)


def test_a_slot_that_is_not_what_was_committed_is_not_stored(storage: LocalStorage) -> None:
    layout = layout_of((100, 7))
    slot = bytearray(slot_for(layout))
    committed = committed_as(layout, slot)
    record = write_shard(storage, KEY, layout, memoryview(slot), EXTRAS, committed=committed)
    StoredShard(storage, record).check_identity(2, VERSION)
    slot[1000] ^= 1
    for wrong in (committed, replace(committed, owner=3), replace(committed, version=Version(Incarnation(1, "y"), 4))):
        with pytest.raises(CorruptDataError, match=rf"other: this is not rank {wrong.owner}'s shard of iteration 4 .* as it was committed"):
            write_shard(storage, "other", layout, memoryview(slot), EXTRAS, committed=wrong)
        slot[1000] = slot_for(layout)[1000]
    assert storage.list("") == [KEY]


class Flipping(LocalStorage):
    """A bit of a slot flips while its shard is being sent: after the first part was taken, or after all of them were."""

    def __init__(self, root: Path, slot: bytearray, at: int, after: int | None) -> None:
        super().__init__(root)
        self._slot, self._at, self._after = slot, at, after

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        taken = iter(parts)
        first = [*islice(taken, self._after)]
        self._slot[self._at] ^= 1
        super().put(key, chain(first, taken), transfer)


@pytest.mark.parametrize("after", [1, None], ids=["the first part", "all parts"])
@pytest.mark.parametrize("place", ["data", "small state"])
def test_a_slot_that_changes_while_it_is_sent_is_not_taken_for_stored(tmp_path: Path, place: str, after: int | None) -> None:
    layout = layout_of((100, 7))
    slot = bytearray(bytes(slot_for(layout))[: layout.nbytes] + EXTRAS)
    committed = committed_as(layout, slot)
    data, extras = memoryview(slot)[: layout.nbytes], memoryview(slot)[layout.nbytes :]
    storage = Flipping(tmp_path, slot, layout.nbytes - 1 if place == "data" else layout.nbytes, after)
    with pytest.raises(CorruptDataError, match=r"this is not rank 2's shard of iteration 4 .* as it was committed"):
        write_shard(storage, KEY, layout, data, extras, committed=committed)


def test_a_shard_that_could_not_be_read_is_not_written(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MOST_EXTRAS", len(EXTRAS) - 1)
    layout = layout_of()
    with pytest.raises(StorageError, match=f"not written, .*: its small state: {len(EXTRAS)} bytes, more than {len(EXTRAS) - 1}"):
        write_shard(storage, KEY, layout, slot_for(layout), EXTRAS)
    assert not storage.list("")


@pytest.mark.parametrize("chunk", [2**31, 2**45])
def test_chunks_that_options_allowed_once_are_read(storage: LocalStorage, chunk: int) -> None:
    layout = layout_of((100, 7))
    slot = slot_for(layout)
    record = write_shard(storage, KEY, layout, slot, EXTRAS, committed=committed_as(layout, slot, chunk))
    opened = StoredShard(storage, ShardRecord.model_validate_json(record.model_dump_json()))
    opened.check_identity(2, VERSION)
    assert read_all(opened) == bytes(slot)[: layout.nbytes]


def test_a_sound_object_that_is_another_shard_is_found(storage: LocalStorage) -> None:
    """Whoever exchanges two objects, or writes a manifest that names the wrong one, changes no bit of either."""
    layout = layout_of((100, 7))
    slot = slot_for(layout)
    record = write_shard(storage, KEY, layout, slot, EXTRAS, committed=committed_as(layout, slot))
    with pytest.raises(CorruptDataError, match="this is not rank 3's shard"):
        StoredShard(storage, record).check_identity(3, VERSION)
    with pytest.raises(CorruptDataError, match="this is not rank 2's shard"):
        StoredShard(storage, record.model_copy(update={"root": "0" * 32})).check_identity(2, VERSION)


@pytest.mark.usefixtures("small_chunks")
def test_damage_elsewhere_does_not_hinder_a_partial_read(storage: LocalStorage) -> None:
    layout = layout_of((100,))
    slot, record = stored(storage, layout)
    blob = bytearray(storage.get(KEY))
    blob[record.data.offset + 250] ^= 1
    storage.put(KEY, [bytes(blob)])
    opened = StoredShard(storage, record)
    out = memoryview(bytearray(150))
    opened.read(20, out)
    assert out == slot[20:170]
    with pytest.raises(CorruptDataError, match="bytes 200 to 300 of its data"):
        opened.read(160, out)


def test_a_shortened_object_is_damaged(storage: LocalStorage) -> None:
    _, record = stored(storage, layout_of((100,)))
    storage.put(KEY, [storage.get(KEY)[:-1]])
    opened = StoredShard(storage, record)
    for read in (lambda: read_all(opened), opened.verify):
        with pytest.raises(CorruptDataError, match="ends at byte"):
            read()


class Watched(LocalStorage):
    """Keeps what it was asked for, and what of it was to come in one request: (offset, bytes)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[int, int]] = []
        self.opened: list[tuple[int, int]] = []

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        self.opened.append((offset, nbytes))
        return super().open_range(key, offset, nbytes)

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self.asked.append((offset, out.nbytes))
        super().get_range(key, offset, out)


def test_a_small_shard_comes_in_one_request_that_begins_with_its_first_byte(tmp_path: Path) -> None:
    """A store that has files behind it may wait before it seeks, in case that the bytes before are wanted too."""
    storage, layout = Watched(tmp_path), layout_of((100,), (7,))
    slot, record = stored(storage, layout)
    shard, out = StoredShard(storage, record, whole=True), bytearray(layout.nbytes)
    assert (shard.layout, shard.extras) == (layout, EXTRAS)
    start, nbytes = record.data.offset, record.data.nbytes
    shard.read(0, memoryview(out))
    assert bytes(out) == bytes(slot[: layout.nbytes])
    assert storage.opened == [(0, start + nbytes)]
    assert storage.asked == [(0, start), (start, nbytes)]  # the data straight to its place
    out = bytearray(layout.nbytes)
    shard.read(0, memoryview(out))  # once more, though it came only once
    assert bytes(out) == bytes(slot[: layout.nbytes])


def test_a_part_of_a_small_shard_can_be_read_and_then_all_of_it(tmp_path: Path, small_chunks: int) -> None:
    storage, layout = Watched(tmp_path), layout_of((100,), (7,))
    slot, record = stored(storage, layout)
    shard, out = StoredShard(storage, record, whole=True), bytearray(layout.nbytes)
    shard.read(150, memoryview(out)[150:270])
    assert bytes(out[150:270]) == bytes(slot[150:270])
    shard.read(0, memoryview(out))
    assert bytes(out) == bytes(slot[: layout.nbytes])
    assert storage.opened == [(0, record.data.offset + record.data.nbytes)]
