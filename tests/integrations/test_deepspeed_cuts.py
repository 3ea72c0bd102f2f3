"""Re-cutting flat partitions, without any process: every element of every parameter is found again in the old shards."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.deepspeed.reshard import Cut, Fragment, OldShards
from gemini_ft.errors import LayoutMismatchError

Sizes = list[int]


def value_of(param: int, start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.float32) + 1000 * param


def end_to_end(sizes: Sizes, rank: int, world: int) -> tuple[Cut, np.ndarray]:
    """ZeRO 1 and 2: one line of all parameters, padded, cut into equal partitions."""
    part = -(-sum(sizes) // (2 * world)) * 2
    low, fragments, master = rank * part, [], np.zeros(part, np.float32)
    for index, (offset, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
        start, stop = max(low - offset, 0), min(low + part - offset, size)
        if start < stop:
            fragments.append(Fragment("zero.0", offset + start - low, f"p{index}", start, stop))
            master[offset + start - low : offset + stop - low] = value_of(index, start, stop)
    return Cut({"zero.0": (part,)}, fragments), master


def one_by_one(sizes: Sizes, rank: int, world: int) -> tuple[Cut, np.ndarray]:
    """ZeRO 3: every parameter is padded and cut by itself."""
    parts = [-(-size // world) for size in sizes]
    fragments, master = [], np.zeros(sum(parts), np.float32)
    for index, (offset, part, size) in enumerate(zip(accumulate(parts, initial=0), parts, sizes, strict=False)):
        start = min(rank * part, size)
        stop = min(start + part, size)
        if start < stop:
            fragments.append(Fragment("zero.0", offset, f"p{index}", start, stop))
            master[offset : offset + stop - start] = value_of(index, start, stop)
    return Cut({"zero.0": (len(master),)}, fragments), master


def shard(rank: int, world: int, master: np.ndarray) -> tuple[Layout, bytes]:
    """A shard with a master, a moment of its shape, and a step count that all of it shares."""
    tensors = {"zero.0": master, "zero.0.exp_avg": -master, "zero.0.step": np.full((), 7, np.float32)}
    layout = build_layout(
        [TensorSpec(name=name, dtype="float32", shape=value.shape, group=(rank,)) for name, value in tensors.items()], rank, world
    )
    blob = bytearray(layout.nbytes)
    for piece in layout.pieces:
        blob[piece.offset : piece.offset + piece.nbytes] = tensors[piece.name].tobytes()
    return layout, bytes(blob)


@pytest.mark.parametrize("cut", [end_to_end, one_by_one])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 6))
def test_every_element_is_found_again(cut: object, sizes: Sizes, before: int, after: int) -> None:
    assert callable(cut)
    old = [cut(sizes, rank, before) for rank in range(before)]
    shards = [shard(rank, before, master) for rank, (_, master) in enumerate(old)]
    places = OldShards({rank: layout for rank, (layout, _) in enumerate(shards)}, {rank: c for rank, (c, _) in enumerate(old)})
    for rank in range(after):
        new, expected = cut(sizes, rank, after)
        for key, sign in (("", 1), ("exp_avg", -1)):
            got = np.zeros_like(expected)
            for fragment in new.of("zero.0"):
                for read in places.reads(fragment, key, "x"):
                    got[read.start : read.stop] = np.frombuffer(shards[read.owner][1][read.offset : read.offset + read.nbytes], np.float32)
            np.testing.assert_array_equal(got, sign * expected)
        for fragment in new.fragments:
            of_shape, shared = places.state_of(fragment.param)
            assert (set(of_shape), set(shared)) == ({"exp_avg"}, {"step"})
            (read,) = places.shared(fragment.param, "step", "x")
            assert np.frombuffer(shards[read.owner][1][read.offset : read.offset + read.nbytes], np.float32) == [7]


def test_a_parameter_that_nobody_had_is_named() -> None:
    cut, master = end_to_end([5], 0, 1)
    places = OldShards({0: shard(0, 1, master)[0]}, {0: cut})
    with pytest.raises(LayoutMismatchError, match="no elements 5 to 6 of p0"):
        places.reads(Fragment("zero.0", 0, "p0", 0, 6), "", "zero.0")
    with pytest.raises(LayoutMismatchError, match="no elements 0 to 2 of exp_avg of p9"):
        places.reads(Fragment("zero.0", 0, "p9", 0, 2), "exp_avg", "zero.0.exp_avg")


def test_a_cut_survives_being_packed() -> None:
    cut, _ = end_to_end([3, 4], 0, 2)
    assert Cut.unpack(cut.pack()) == cut
