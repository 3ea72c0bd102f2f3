"""Parts of sharded tensors of one number of ranks, read from the shards of another; no processes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from gemini_ft.core.layout import ITEMSIZES, Layout, Piece, Read, TensorSpec, build_layout
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.recovery.restore import GAP, Scatter, apart
from gemini_ft.state import placements
from gemini_ft.state.placements import reads_of_part

Shape = tuple[int, ...]


class World:
    """One tensor on a mesh of ranks in their order. ``dims``: the dimension that each axis of the mesh cuts; None: it repeats parts."""

    def __init__(self, whole: torch.Tensor, mesh: Shape, dims: Sequence[int | None]) -> None:
        self.whole, self.mesh, self.dims, self.size = whole, mesh, dims, math.prod(mesh)
        placements = " ".join("R" if dim is None else f"S({dim})" for dim in dims)
        self.words = f"{tuple(whole.shape)} {placements} on {mesh}"
        self.places = list(product(*map(range, mesh)))

    def part(self, rank: int) -> torch.Tensor:
        """Cuts as torch.chunk does, axis after axis; parts that get nothing are empty."""
        found = self.whole
        for dim, parts, at in zip(self.dims, self.mesh, self.places[rank], strict=True):
            if dim is not None:
                chunks = torch.chunk(found, parts, dim) if found.shape[dim] else ()
                found = chunks[at] if at < len(chunks) else found.narrow(dim, 0, 0)
        return found.contiguous()

    def group(self, rank: int) -> Shape:
        kept = [at for at, dim in zip(self.places[rank], self.dims, strict=True) if dim is not None]
        return tuple(
            other
            for other, place in enumerate(self.places)
            if [at for at, dim in zip(place, self.dims, strict=True) if dim is not None] == kept
        )

    def shards(self) -> tuple[dict[int, Layout], dict[int, bytearray]]:
        layouts, memory = dict[int, Layout](), dict[int, bytearray]()
        for rank in range(self.size):
            part = self.part(rank)
            spec = TensorSpec(name="w", dtype="int32", shape=tuple(part.shape), group=self.group(rank), logical=self.words)
            layouts[rank] = build_layout([spec], rank, self.size)
            memory[rank] = bytearray(layouts[rank].nbytes)
            for piece in layouts[rank].pieces:
                content = part.flatten()[piece.start : piece.stop].numpy().tobytes()
                memory[rank][piece.offset : piece.offset + piece.nbytes] = content
        return layouts, memory


def read_all(then: World, now: World) -> int:
    """Fills the parts of all ranks of one world from the shards of another; the bytes that were read."""
    layouts, memory = then.shards()
    count = 0
    for rank in range(now.size):
        expected = now.part(rank)
        part = torch.full_like(expected, -1)
        reads = reads_of_part("w", layouts, now.words, expected.shape, now.group(rank), now.size)
        for owner, content in memory.items():
            ours = sorted((read for read in reads if read.owner == owner), key=lambda read: read.offset)
            Scatter(ours, {"w": part}).put(0, memoryview(content))
        assert torch.equal(part, expected), (then.words, now.words, rank)
        count += sum(read.nbytes for read in reads)
    return count


@pytest.mark.parametrize("seed", range(4))
def test_every_part_is_read_from_any_other_parts(seed: int) -> None:
    """Rows, columns, meshes of two axes, parts that are repeated, and parts that are empty."""
    draw = random.Random(seed)
    for _ in range(40):
        shape = tuple(draw.randrange(0, 8) for _ in range(draw.randrange(1, 4)))
        whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        worlds = []
        for _ in range(2):
            mesh = tuple(draw.randrange(1, 5) for _ in range(draw.choice([1, 1, 2])))
            worlds.append(World(whole, mesh, [draw.choice([None, *range(len(shape))]) for _ in mesh]))
        read_all(*worlds)


def test_no_byte_is_read_twice() -> None:
    whole = torch.arange(7 * 5, dtype=torch.int32).reshape(7, 5)
    assert read_all(World(whole, (4,), [0]), World(whole, (3,), [0])) == whole.nbytes
    assert read_all(World(whole, (3,), [0]), World(whole, (4,), [1])) == whole.nbytes
    assert read_all(World(whole, (2, 2), [None, 0]), World(whole, (3,), [0])) == whole.nbytes


def test_tensors_that_are_placed_alike_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers of one shape and their moments are: a model has thousands of them, and a large job hundreds of parts of each."""
    layouts, _ = World(torch.zeros(6, 2, dtype=torch.int32), (3,), [0]).shards()
    named = {owner: replace(layout, pieces=(*layout.pieces, *renamed(layout.pieces))) for owner, layout in layouts.items()}
    places, count = placements.part_places, Counter[str]()

    def counted(name: str, *arguments: Any) -> Any:
        count[name] += 1
        return places(name, *arguments)

    monkeypatch.setattr(placements, "part_places", counted)
    known: placements.KnownRuns = {}
    first, second = (reads_of_part(name, named, "(6, 2) S(0) on (2,)", (3, 2), (0,), 2, known=known) for name in ("w", "moment"))
    assert [(read.owner, read.offset, read.start, read.stop) for read in first] == [
        (read.owner, read.offset, read.start, read.stop) for read in second
    ]
    assert count == {"w": 4}


def renamed(pieces: Sequence[Piece]) -> list[Piece]:
    return [replace(piece, name="moment") for piece in pieces]


def test_another_model_and_parts_that_are_not_there_are_refused() -> None:
    then = World(torch.zeros(6, 2, dtype=torch.int32), (3,), [0])
    layouts, _ = then.shards()
    with pytest.raises(LayoutMismatchError, match=r"w has shape \(8, 2\) now and \(6, 2\) in the snapshot"):
        reads_of_part("w", layouts, "(8, 2) S(0) on (2,)", (4, 2), (0,), 2)
    pieces = (Piece(name="w", dtype="int32", shape=(2, 2), start=2, stop=4, offset=0, nbytes=8, group=(1,), logical=then.words),)
    torn = layouts | {1: Layout(pieces, 64, layouts[1].logical_hash, 3)}
    with pytest.raises(LayoutMismatchError, match="w is not whole in the snapshot: 4 of 6 elements of this rank are there"):
        reads_of_part("w", torn, "(6, 2) S(0) on (2,)", (3, 2), (0,), 2)
    with pytest.raises(UnsupportedStateError, match="does not fit ranks in their own order"):
        reads_of_part("w", layouts, "(6, 2) S(0) on (2,)", (4, 2), (0,), 2)


def test_chunks_between_reads_that_are_far_apart_are_left_out() -> None:
    size = ITEMSIZES["int32"]
    offsets = [0, 64, GAP + 64, 2 * GAP + 68]
    reads = [Read(owner=0, offset=offset, nbytes=size, name="w", start=0, stop=1) for offset in offsets]
    assert [[read.offset for read in part] for part in apart(reads)] == [[0, 64, GAP + 64], [2 * GAP + 68]]
    assert not [*apart([])]
