"""Cuts, plans and errors of gemini_ft.core.layout, for any number of ranks and any mixture of groups."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.layout import (
    ALIGNMENT,
    ITEMSIZES,
    Layout,
    TensorSpec,
    build_layout,
    logical_hash,
    owners_needed,
    plan_reads,
    stored_specs,
)
from gemini_ft.errors import CorruptDataError, LayoutMismatchError, StateError, UnsupportedStateError, WorldSizeError

Job = list[list[TensorSpec]]  # rank -> its tensors
Contents = dict[tuple[tuple[int, ...], str], bytes]  # (group, tensor) -> bytes that all its ranks hold


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any world; tensors held by all ranks, by rows of a mesh (HSDP), or by each rank with a shape of its own."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    world = rows * columns
    job: Job = [[] for _ in range(world)]
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    for index in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        kind = draw(st.sampled_from(["replicated", "mesh row", "per rank"]))
        frozen = draw(st.booleans())
        every: dict[str, list[tuple[int, ...]]] = {
            "replicated": [tuple(range(world))],
            "mesh row": [tuple(range(row, world, rows)) for row in range(rows)],
            "per rank": [(rank,) for rank in range(world)],
        }
        for group in every[kind]:
            shape = draw(shapes)
            for rank in group:
                job[rank].append(
                    TensorSpec(
                        name=f"t{index}", dtype=dtype, shape=shape, group=group, logical="" if kind == "replicated" else kind, frozen=frozen
                    )
                )
    return job


def layouts_of(job: Job) -> dict[int, Layout]:
    return {rank: build_layout(specs, rank, len(job)) for rank, specs in enumerate(job)}


def contents_of(job: Job) -> Contents:
    source = random.Random(0)
    return {(spec.group, spec.name): source.randbytes(spec.nbytes) for specs in job for spec in specs}


def shard(layout: Layout, contents: Contents) -> bytes:
    """What the owner's copier would write."""
    memory = bytearray(layout.nbytes)
    for piece in layout.pieces:
        first = piece.start * ITEMSIZES[piece.dtype]
        memory[piece.offset : piece.offset + piece.nbytes] = contents[piece.group, piece.name][first : first + piece.nbytes]
    return bytes(memory)


@given(jobs())
def test_every_byte_of_every_group_is_owned_exactly_once(job: Job) -> None:
    owned = {(spec.group, spec.name): [0] * spec.numel for specs in job for spec in specs}
    for rank, layout in layouts_of(job).items():
        for piece in layout.pieces:
            assert rank in piece.group
            for element in range(piece.start, piece.stop):
                owned[piece.group, piece.name][element] += 1
    assert all(count == 1 for counts in owned.values() for count in counts)


@given(jobs())
def test_an_empty_tensor_is_listed_once_so_that_its_absence_is_noticed(job: Job) -> None:
    listed = sorted((p.group, p.name) for layout in layouts_of(job).values() for p in layout.pieces if not math.prod(p.shape))
    assert listed == sorted({(spec.group, spec.name) for specs in job for spec in specs if not spec.numel})


@given(jobs())
def test_pieces_are_aligned_ordered_and_apart(job: Job) -> None:
    for layout in layouts_of(job).values():
        end = 0
        for piece in layout.pieces:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            assert piece.nbytes == (piece.stop - piece.start) * ITEMSIZES[piece.dtype]
            end = piece.offset + piece.nbytes
        assert end <= layout.nbytes
        assert layout.nbytes % ALIGNMENT == 0
        assert layout.nbytes - sum(piece.nbytes for piece in layout.pieces) <= ALIGNMENT * len(layout.pieces)


@given(jobs())
def test_every_rank_of_a_group_owns_an_equal_part_within_one_element(job: Job) -> None:
    layouts = layouts_of(job)
    frozen = {(spec.group, spec.name): spec.frozen for specs in job for spec in specs}
    totals: dict[tuple[tuple[int, ...], bool], int] = {}
    for group, name in contents_of(job):
        line = group, frozen[group, name]
        totals[line] = totals.get(line, 0) + next(s.nbytes for s in job[group[0]] if s.name == name)
    largest = max(ITEMSIZES.values())
    for (group, kind), total in totals.items():
        for rank in group:
            mine = sum(p.nbytes for p in layouts[rank].pieces if p.group == group and frozen[group, p.name] == kind)
            assert abs(mine - total / len(group)) < largest


@given(jobs())
def test_what_is_frozen_lies_before_what_changes(job: Job) -> None:
    for rank, layout in layouts_of(job).items():
        frozen = {spec.name for spec in job[rank] if spec.frozen}
        kinds = [piece.name in frozen for piece in layout.pieces]
        assert kinds == sorted(kinds, reverse=True)


@given(jobs())
def test_reads_put_back_exactly_what_every_rank_held(job: Job) -> None:
    contents, layouts = contents_of(job), layouts_of(job)
    shards = {owner: shard(layout, contents) for owner, layout in layouts.items()}
    for rank, specs in enumerate(job):
        needed = owners_needed(specs, rank)
        reads = plan_reads(specs, rank, {owner: layouts[owner] for owner in needed})
        memory = {spec.name: bytearray(b"\xaa" * spec.nbytes) for spec in specs}
        sizes = {spec.name: ITEMSIZES[spec.dtype] for spec in specs}
        for read in reads:
            assert read.nbytes > 0
            first = read.start * sizes[read.name]
            memory[read.name][first : first + read.nbytes] = shards[read.owner][read.offset : read.offset + read.nbytes]
        assert memory == {spec.name: contents[spec.group, spec.name] for spec in specs}
        assert sum(read.nbytes for read in reads) == sum(spec.nbytes for spec in specs)
        assert {read.owner for read in reads} <= needed
        assert reads == sorted(reads, key=lambda read: (read.owner, read.offset))


@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_in_which_tensors_are_found_does_not_matter(job: Job, order: random.Random) -> None:
    shuffled = [order.sample(specs, len(specs)) for specs in job]
    assert layouts_of(shuffled) == layouts_of(job)


@given(jobs())
def test_the_tensors_of_a_rank_can_be_told_from_the_layouts_alone(job: Job) -> None:
    layouts = layouts_of(job)
    for rank, specs in enumerate(job):
        needed = layouts[rank].owners
        assert needed | {rank} == owners_needed(specs, rank)
        assert stored_specs(rank, {owner: layouts[owner] for owner in needed}) == sorted(specs, key=lambda spec: spec.name)


@given(jobs())
def test_bytes_round_trip(job: Job) -> None:
    for layout in layouts_of(job).values():
        assert Layout.from_bytes(layout.to_bytes()) == layout


@given(jobs(), st.data())
def test_damaged_bytes_never_pass_as_another_sound_layout_silently(job: Job, data: st.DataObject) -> None:
    """Anything may be read from damaged bytes, but only as one of our errors or as a layout that is sound in itself."""
    blob = bytearray(build_layout(job[0], 0, len(job)).to_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(blob)))
    for damaged in (bytes(blob), bytes(blob[:cut])):
        try:
            layout = Layout.from_bytes(damaged)
        except (CorruptDataError, StateError):
            continue
        assert all(0 <= piece.offset <= piece.offset + piece.nbytes <= layout.nbytes for piece in layout.pieces)
        assert all(0 <= piece.start <= piece.stop <= math.prod(piece.shape) for piece in layout.pieces)


def sample(world: int = 2) -> Job:
    everyone = tuple(range(world))
    return [
        [
            TensorSpec(name="model.w", dtype="float32", shape=(5, 3), group=everyone),
            TensorSpec(name="model.b", dtype="bfloat16", shape=(3,), group=everyone),
            TensorSpec(name="model.part", dtype="float32", shape=(2 + rank, 3), group=(rank,), logical="(5, 3) S(0)"),
            TensorSpec(name="model.buffer", dtype="int64", shape=(), group=(rank,), logical="per rank"),
        ]
        for rank in range(world)
    ]


def test_the_logical_hash_is_equal_on_all_ranks_although_their_shapes_differ() -> None:
    hashes = {layout.logical_hash for layout in layouts_of(sample(3)).values()}
    assert len(hashes) == 1
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in hashes)


@pytest.mark.parametrize("changed", [{"name": "model.v"}, {"dtype": "float64"}, {"shape": (3, 5)}, {"logical": "elsewhere"}], ids=str)
def test_the_logical_hash_changes_with(changed: Mapping[str, object]) -> None:
    specs = sample()[0]
    other = [dataclasses.replace(specs[0], **changed), *specs[1:]]  # type: ignore[arg-type]
    assert logical_hash(other) != logical_hash(specs)


def replaced(specs: list[TensorSpec], **changed: object) -> list[TensorSpec]:
    return [dataclasses.replace(specs[0], **changed), *specs[1:]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (sample()[0][1:], r"model\.w \(float32 \(5, 3\)\) is in the snapshot and not in this model or its optimizers"),
        (
            [*sample()[0], TensorSpec(name="model.new", dtype="int8", shape=(2,), group=(0, 1))],
            r"model\.new \(int8 \(2,\)\) is missing from the snapshot",
        ),
        (replaced(sample()[0], dtype="float64"), r"model\.w has dtype float64 now and float32 in the snapshot"),
        (replaced(sample()[0], shape=(3, 5)), r"model\.w has shape \(3, 5\) now and \(5, 3\) in the snapshot"),
        (replaced(sample()[0], group=(0,)), r"model\.w has group of ranks \(0,\) now and \(0, 1\) in the snapshot"),
        (replaced(sample()[0], logical="(9, 3) S(0)"), r"model\.w has whole tensor \(9, 3\) S\(0\) now and "),
    ],
    ids=["extra in snapshot", "missing from snapshot", "dtype", "shape", "group", "logical"],
)
def test_a_mismatch_names_the_tensor_and_what_differs(specs: list[TensorSpec], says: str) -> None:
    with pytest.raises(LayoutMismatchError, match=says) as caught:
        plan_reads(specs, 0, layouts_of(sample()))
    assert "1 tensors differ" in str(caught.value)
    assert "resume='never'" in str(caught.value)


def test_a_mismatch_names_only_the_first_few() -> None:
    specs = [TensorSpec(name=f"layer{index}", dtype="int8", shape=(1,), group=(0,)) for index in range(40)]
    with pytest.raises(LayoutMismatchError, match=r"40 tensors differ: .*; and 35 more\.") as caught:
        plan_reads(specs, 0, {0: build_layout([], 0, 1)})
    assert len(str(caught.value)) < 700


def test_a_snapshot_with_a_hole_is_refused() -> None:
    layouts = layouts_of(sample())
    layouts[1] = dataclasses.replace(layouts[1], pieces=tuple(p for p in layouts[1].pieces if p.name != "model.w"))
    with pytest.raises(LayoutMismatchError, match=r"model\.w is not whole in the snapshot: .* at element \d+ of 15"):
        plan_reads(sample()[0], 0, layouts)


def test_a_missing_owner_is_named() -> None:
    with pytest.raises(LayoutMismatchError, match=r"rank 0 needs the layouts of owners \[1\], got those of \[0\]"):
        plan_reads(sample()[0], 0, {0: layouts_of(sample())[0]})


def test_layouts_of_jobs_of_different_size_are_not_mixed() -> None:
    with pytest.raises(WorldSizeError, match=r"jobs of \[2, 3\] ranks"):
        plan_reads(sample()[0], 0, {0: layouts_of(sample())[0], 1: layouts_of(sample(3))[1]})


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        (
            TensorSpec(name="a", dtype="quint8", shape=(1,), group=(0,)),
            UnsupportedStateError,
            "a: dtype 'quint8' is unknown; supported: bfloat16, bool,",
        ),
        (
            TensorSpec(name="a", dtype="int8", shape=(1,), group=(1,)),
            StateError,
            r"a: group \(1,\) must be sorted ranks of 0\.\.1 that include 0",
        ),
        (TensorSpec(name="a", dtype="int8", shape=(1,), group=(1, 0)), StateError, "must be sorted"),
        (TensorSpec(name="a", dtype="int8", shape=(1,), group=(0, 2)), StateError, "must be sorted"),
        (TensorSpec(name="a", dtype="int8", shape=(1,), group=()), StateError, "must be sorted"),
    ],
)
def test_a_wrong_declaration_is_refused(spec: TensorSpec, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build_layout([spec], 0, 2)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(StateError, match="two tensors are named 'a'"):
        build_layout(
            [TensorSpec(name="a", dtype="int8", shape=(1,), group=(0,)), TensorSpec(name="a", dtype="int8", shape=(1,), group=(0, 1))], 0, 2
        )


def test_an_unknown_format_version_is_refused_by_number() -> None:
    with pytest.raises(StateError, match="format version 7; this release reads version 1"):
        Layout.from_bytes(msgpack.packb((7, "whatever")))


@pytest.mark.parametrize(
    "fields",
    [
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 9, 60, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 10, 0, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 9, 64, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 9, 0, 0, ""), ("b", "int8", (9,), 0, 9, 0, 0, "")]),
        (1, 1, "0" * 16, 128, [(0,)], [("a", "int8", (9,), 0, 4, 0, 0, ""), ("a", "int8", (9,), 4, 9, 64, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (-9,), 0, 0, 0, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "nothing", (9,), 0, 9, 0, 0, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 9, 0, 1, "")]),
        (1, 1, "0" * 16, 64, [(0,)], [("a", "int8", (9,), 0, 9, 0, -1, "")]),
        (1, 1, "0" * 16, 0, [(-1,)], []),
        (1, 1, "0" * 16, 0, [()], []),
        (1, 1, "short", 0, [], []),
        (1, "1", "0" * 16, 0, [], []),
        (1, 1, "0" * 16, 1, [], []),
    ],
    ids=[
        "unaligned",
        "too long",
        "past the end",
        "overlap",
        "twice",
        "negative",
        "dtype",
        "group",
        "group from the end",
        "negative rank",
        "empty group",
        "hash",
        "world",
        "size",
    ],
)
def test_bytes_that_contradict_themselves_are_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(CorruptDataError, match="not a layout"):
        Layout.from_bytes(msgpack.packb(fields))


def test_labels_say_tensor_and_elements() -> None:
    layouts = layouts_of(sample())
    assert [piece.label for piece in layouts[1].pieces if piece.name == "model.w"] == ["model.w@6:15"]


def test_the_module_needs_no_torch() -> None:
    script = "import sys, gemini_ft.core.layout; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
