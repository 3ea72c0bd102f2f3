"""The memory that outlives workers: sealed, self-describing, checked, and never more than the budget."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini_ft.agent.hangs import HangDetector
from gemini_ft.agent.memory import budget as budgets
from gemini_ft.agent.memory import slot_memory as module
from gemini_ft.agent.memory.budget import Budget, available_memory
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, FormatError, MemoryBudgetError
from gemini_ft.state.copy_plan import MappedSlot

V = Version(Incarnation(3, "abcd"), 41)


def shape(data: int = 300, extras: int = 50, chunk: int = 64, layout: bytes = b"layout") -> SlotShape:
    return SlotShape(
        run="run",
        stream="main",
        owner=2,
        world_size=4,
        layout_hash="0" * 16,
        layout=layout,
        data_bytes=data,
        extras_capacity=extras,
        chunk_bytes=chunk,
    )


@pytest.fixture
def slot() -> Iterator[SlotMemory]:
    slot = SlotMemory.create(shape())
    yield slot
    slot.close()


def fill(slot: SlotMemory, extras_bytes: int = 10, seed: int = 0) -> None:
    content = np.random.default_rng(seed)
    for index, (offset, nbytes) in enumerate(slot.cuts(extras_bytes)):
        view = slot.data(offset, nbytes)
        view[:] = content.bytes(nbytes)
        slot.put_chunk(index, offset, nbytes, xxhash.xxh3_64_intdigest(view))


def advised(memory: mmap.mmap) -> list[tuple[int, int]]:
    """(offset, bytes) of the parts of a mapping for which huge pages are asked for."""
    start, found = module.address_of(memory), []
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        low, high = (int(end, 16) for end in area.split(" ", 1)[0].split("-"))
        if start <= low < start + len(memory) and re.search(r"VmFlags:.* hg( |$)", area, re.MULTILINE):
            found.append((low - start, high - low))
    return found


def test_huge_pages_are_asked_for_where_whole_ones_fit() -> None:
    """So they take no more memory than others: neither the header, which is mostly empty, nor the end has one of its own."""
    huge = 2 * 2**20
    slot = SlotMemory.create(shape(data=3 * huge + 5))
    mapped = MappedSlot(os.dup(slot.fd), slot.shape.data_offset, slot.shape.capacity)
    try:
        assert advised(slot.memory) == advised(mapped.memory) == [(huge, 3 * huge)]
    finally:
        mapped.close()
        slot.close()


class TestSlot:
    def test_is_whole_only_with_every_chunk(self, slot: SlotMemory) -> None:
        fill(slot)
        del slot.chunks[3]
        assert not slot.finish(V, 10, None)
        assert slot.version is None
        fill(slot)
        assert slot.finish(V, 10, None)
        assert (slot.version, slot.damaged()) == (V, [])

    def test_is_not_whole_with_a_chunk_at_another_place(self, slot: SlotMemory) -> None:
        fill(slot)
        slot.put_chunk(1, 0, 64, 0)
        assert not slot.finish(V, 10, None)

    def test_finds_every_bit_that_flips(self, slot: SlotMemory) -> None:
        fill(slot)
        slot.finish(V, 10, None)
        for place in (0, 63, 64, 299, 300, 309):
            slot.data(place, 1)[0] ^= 4
            assert len(slot.damaged()) == 1
            slot.data(place, 1)[0] ^= 4
        assert slot.damaged() == []

    @given(st.integers(0, 500), st.integers(0, 100), st.integers(1, 200))
    def test_is_cut_without_a_gap_and_the_tensors_apart_from_the_rest(self, data: int, extras: int, chunk: int) -> None:
        slot = SlotMemory.create(shape(data, 100, chunk))
        cuts = slot.cuts(extras)
        assert len(cuts) <= slot.shape.max_chunks
        assert [at for at, _ in cuts] == [sum(n for _, n in cuts[:i]) for i in range(len(cuts))]
        assert sum(n for _, n in cuts) == data + extras
        assert all(0 < n <= chunk for _, n in cuts)
        assert not any(at < data < at + n for at, n in cuts)
        slot.close()

    @given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 70))
    def test_admits_the_chunks_of_its_cut_and_none_at_another_place(self, data: int, extras: int, chunk: int) -> None:
        slot = SlotMemory.create(shape(data, 60, chunk))
        cuts = slot.cuts(extras)
        for index, (offset, nbytes) in enumerate(cuts):
            assert slot.admits(index, offset, nbytes)
            assert not slot.admits(index, offset + 1, nbytes)
            assert not slot.admits(index, offset, nbytes + chunk)
            assert not slot.admits(index + 1, offset, nbytes)
        assert not slot.admits(len(cuts), data + extras, 0)
        assert not slot.admits(-1, 0, chunk)
        slot.close()

    def test_keeps_a_chunk_of_the_version_before_only_if_nobody_has_written_to_it(self, slot: SlotMemory) -> None:
        fill(slot)
        before = dict(slot.chunks)
        slot.clear()
        slot.forget(2)
        assert [slot.keep(index, *cut) for index, cut in before.items()] == [index != 2 for index in before]
        assert not slot.keep(0, *before[0][:2], digest=before[0][2] ^ 1)
        assert slot.unchanged == before.keys() - {2}
        slot.clear()
        slot.forget()
        assert not any(slot.keep(index, *cut) for index, cut in before.items())

    def test_is_sealed(self, slot: SlotMemory) -> None:
        for size in (0, slot.shape.total - 1, slot.shape.total + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(slot.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(slot.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    def test_starts_its_data_on_a_huge_page(self, slot: SlotMemory) -> None:
        assert slot.shape.data_offset % 2**21 == 0
        assert slot.shape.total == slot.shape.data_offset + slot.shape.capacity


class TestAdoption:
    @pytest.mark.parametrize("extras_bytes", [10, 50], ids=["with room", "full"])
    def test_of_a_whole_slot_finds_everything(self, slot: SlotMemory, extras_bytes: int) -> None:
        fill(slot, extras_bytes)
        slot.finish(V, extras_bytes, None)
        other = SlotMemory.adopt(os.dup(slot.fd))
        assert (other.shape, other.version, other.extras_bytes, other.chunks) == (slot.shape, V, extras_bytes, slot.chunks)
        assert other.damaged() == []
        other.close()

    def test_of_a_slot_that_was_being_written_finds_nothing_in_it(self, slot: SlotMemory) -> None:
        fill(slot)
        slot.finish(V, 10, None)
        slot.clear()
        fill(slot, seed=1)
        other = SlotMemory.adopt(os.dup(slot.fd))
        assert (other.shape, other.version, other.chunks) == (slot.shape, None, {})
        other.close()

    @pytest.mark.parametrize("place", [0, 8, 20, 40])
    def test_of_a_damaged_header_is_refused(self, slot: SlotMemory, place: int) -> None:
        slot.memory[place] ^= 1
        with pytest.raises(CorruptDataError, match=r"magic number|does not match its checksum"):
            SlotMemory.adopt(slot.fd)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_of_a_header_with_anything_anywhere_is_refused_and_takes_no_memory(self, slot: SlotMemory, data: st.DataObject) -> None:
        """Its checksum fits: what another release, or another program of this user, has written."""
        fill(slot)
        slot.finish(V, 10, None)
        (length,) = struct.unpack_from("<I", slot.memory, 8)
        fields = msgpack.unpackb(slot.memory[12 : 12 + length])
        name = data.draw(st.sampled_from(list(fields)))
        huge = st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64 - 1, -1, 0, 1.5, None, True, "", b"", [], {}, [[1], 2], [["", 1], ""]])
        body = msgpack.packb(data.draw(st.sampled_from([fields | {name: data.draw(huge)}, {**fields, "more": 1}, [], 5, None])))
        head = struct.pack("<I", len(body)) + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        slot.memory[8 : 8 + len(head)] = head
        tracemalloc.start()
        try:
            fd = os.dup(slot.fd)
            try:
                SlotMemory.adopt(fd).close()
            except (CorruptDataError, FormatError):  # whatever else it raises fails the test
                os.close(fd)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()

    def test_of_another_format_is_refused_by_number(self, slot: SlotMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "FORMAT", 99)
        slot.clear()
        monkeypatch.undo()
        with pytest.raises(
            FormatError, match=f"a slot has format 99, this gemini-ft reads format {module.FORMAT}; use the version that wrote it"
        ):
            SlotMemory.adopt(slot.fd)

    def test_of_memory_that_could_be_truncated_is_refused(self, slot: SlotMemory) -> None:
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, slot.shape.total)
        with mmap.mmap(fd, 4096) as head:
            head[:] = slot.memory[:4096]
        with pytest.raises(CorruptDataError, match="is not sealed"):
            SlotMemory.adopt(fd)
        os.close(fd)

    def test_of_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(8192))
        with open(tmp_path / "file") as file, pytest.raises(OSError, match="Invalid argument"):
            SlotMemory.adopt(file.fileno())


class TestBudget:
    def test_counts_what_is_taken_and_given_back(self) -> None:
        budget = Budget(1000)
        budget.take(600, "one")
        with pytest.raises(MemoryBudgetError) as error:
            budget.take(401, "rank 7's shard")
        assert str(error.value) == (
            "rank 7's shard needs 401 bytes; this host's agent may hold 1,000 (memory_limit) and holds 600. "
            "Raise memory_limit (GEMINI_MEMORY_LIMIT), lower replicas, or use more hosts."
        )
        budget.give_back(1)
        budget.take(401, "rank 7's shard")
        assert budget.used == 1000

    def test_is_a_part_of_what_is_available_by_default(self) -> None:
        budget = Budget(None)
        assert 0 < budget.limit < available_memory()
        with pytest.raises(MemoryBudgetError, match="60 % of the memory available when the agent started"):
            budget.take(budget.limit + 1, "it")

    def test_a_limit_of_any_control_group_around_this_process_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        around = tmp_path / "cgroups" / "around"
        (around / "own").mkdir(parents=True)
        monkeypatch.setattr(budgets, "CGROUPS", tmp_path / "cgroups")
        monkeypatch.setattr(budgets, "cgroup_folders", lambda: [(around / "own", "memory.max", "memory.current")])
        for folder, limit, used in ((tmp_path, "1", "0"), (around, "50", "20"), (around / "own", "max", "10")):
            (folder / "memory.max").write_text(limit)
            (folder / "memory.current").write_text(used)
        assert available_memory() == 30  # what lies above all of them is no control group

    def test_never_promises_what_the_host_does_not_have(self) -> None:
        beyond = psutil.virtual_memory().total
        with pytest.raises(MemoryBudgetError, match=r"it needs [0-9,]+ bytes; only [0-9,]+ are available on this host"):
            Budget(10 * beyond).take(beyond, "it")


class TestHangDetector:
    def steps(self, detector: HangDetector, count: int, seconds: float = 1.0) -> float:
        for number in range(count + 1):
            detector.progress(number * seconds, False)
        return count * seconds

    def test_waits_for_the_first_steps(self) -> None:
        detector = HangDetector(limit=5.0)
        now = self.steps(detector, 2)
        assert detector.hangs(now + 1000) is None
        now = self.steps(HangDetector(limit=5.0), 3)

    def test_finds_a_worker_that_makes_no_progress(self) -> None:
        detector = HangDetector(limit=5.0)
        now = self.steps(detector, 3)
        assert detector.hangs(now + 5.0) is None
        assert detector.hangs(now + 5.5) == 5.5

    def test_is_off_while_no_progress_is_expected(self) -> None:
        detector = HangDetector(limit=5.0)
        now = self.steps(detector, 3)
        detector.progress(now, True)
        assert detector.hangs(now + 1000) is None
        detector.progress(now + 1000, False)
        assert detector.hangs(now + 1004) is None
        assert detector.hangs(now + 1006) == 6

    def test_can_be_off_altogether(self) -> None:
        detector = HangDetector(limit=0)
        assert detector.hangs(self.steps(detector, 10) + 1e9) is None

    def test_is_patient_by_default(self) -> None:
        quick, slow = HangDetector(limit=None), HangDetector(limit=None)
        now = self.steps(quick, 10)
        assert (quick.hangs(now + 300), quick.hangs(now + 301)) == (None, 301)
        now = self.steps(slow, 10, 60.0)
        assert (slow.hangs(now + 600), slow.hangs(now + 601)) == (None, 601)

    def test_does_not_take_validation_for_a_slow_step(self) -> None:
        detector = HangDetector(limit=None)
        now = self.steps(detector, 10)
        detector.progress(now, True)
        detector.progress(now + 5000, False)
        assert detector.patience == 300
