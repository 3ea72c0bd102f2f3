"""Large shards that are read in parts, each from another peer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.layout import Read
from gemini_ft.recovery.restore import PART, in_parts


def reads_of(sizes: list[int]) -> list[Read]:
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        Read(owner=0, offset=offset, nbytes=size, name="weights", start=offset, stop=offset + size)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1, 2 * PART - 1], [2]),
        ([2 * PART - 1, 1], [2]),
        ([PART, PART], [1, 1]),
        ([PART // 2, 2 * PART, PART // 2], [1, 1, 1]),
        ([PART, PART, PART, PART], [1, 2, 1]),
        ([PART - 1, PART], [2]),
        ([8 * PART], [1]),
        ([0], [1]),
    ],
)
def test_a_shard_is_cut_where_its_parts_are_about_alike(sizes: list[int], parts: list[int]) -> None:
    assert [len(part) for part in in_parts(reads_of(sizes), 3)] == parts


@given(st.lists(st.integers(0, 3 * PART), min_size=1, max_size=12), st.integers(1, 5))
def test_parts_have_all_reads_and_none_is_small(sizes: list[int], most: int) -> None:
    reads = reads_of(sizes)
    found = in_parts(reads, most)
    assert [read for part in found for read in part] == reads
    assert len(found) <= most
    assert len(found) == 1 or min(sum(read.nbytes for read in part) for part in found) >= PART / 2
    assert all(before[-1].offset <= after[0].offset for before, after in pairwise(found))
