"""Zen's hashing: nothing is lost, parts are balanced as theorem 2 says, the kernel does what the vectorised code does."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.sync import wire
from gemini_ft.sync.partition import (
    EvenPartition,
    HashedPartition,
    HashPartition,
    RotatedPartition,
    group_by_part,
    hierarchical_hash,
    murmur,
)
from gemini_ft.sync.rows import SparseRows

CASE = Path(__file__).parents[1] / "kit" / "triton_case.py"
HASHES = [RotatedPartition, HashedPartition]


def units(rows: int, indices: torch.Tensor) -> SparseRows:
    return SparseRows(rows=rows, indices=indices, values=indices.double().unsqueeze(1))


def loads(partition: HashPartition, indices: torch.Tensor) -> torch.Tensor:
    return torch.tensor([len(part.indices) for part in partition.split(units(partition.rows, indices))])


def touched(kind: str, rows: int) -> torch.Tensor:
    every = torch.arange(rows)
    random = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if kind == "zipf":
        return every[random < 1 - torch.exp(-2000.0 / (every + 1.0) ** 1.2)]
    return {"uniform": every[random < 0.02], "consecutive": every[: rows // 20], "strided": every[::16], "strided by 128": every[5::128]}[
        kind
    ]


# -- partitions


@pytest.mark.parametrize("kind", HASHES)
@given(rows=st.integers(0, 300), parts=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_unit_has_a_place_of_its_own(kind: type[HashPartition], rows: int, parts: int, seed: int) -> None:
    partition = kind(rows, parts, seed)
    pieces = partition.split(units(rows, torch.arange(rows)))
    for part, piece in enumerate(pieces):
        assert len(piece.indices.unique()) == len(piece.indices)
        assert bool(((piece.indices >= 0) & (piece.indices < partition.size(part))).all())
        found = partition.indices(torch.full_like(piece.indices, part), piece.indices)
        assert torch.equal(found.double(), piece.values[:, 0])
    assert sum(len(piece.indices) for piece in pieces) == rows


@given(rows=st.integers(0, 300), parts=st.integers(1, 9))
def test_even_parts_are_contiguous_and_cover_all(rows: int, parts: int) -> None:
    partition = EvenPartition(rows, parts)
    whole = units(rows, torch.arange(rows))
    pieces = partition.split(whole)
    assert max(piece.rows for piece in pieces) - min(piece.rows for piece in pieces) <= 1
    assert torch.equal(partition.join(map(wire.encode, pieces), whole).values[:, 0], torch.arange(rows).double())


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("parts", [8, 16, 128])
@pytest.mark.parametrize("which", ["zipf", "uniform", "consecutive", "strided", "strided by 128"])
def test_theorem_2(kind: type[HashPartition], parts: int, which: str) -> None:
    """Imbalance is at most 1 + Theta(sqrt(n log n / units)); 6 is the constant that Chernoff's bound gives for 1 - 1/n."""
    indices = touched(which, 400_000)
    load = loads(kind(400_000, parts), indices)
    assert load.sum() == len(indices)
    assert load.max() * parts / len(indices) <= 1 + math.sqrt(6 * parts * math.log(parts) / len(indices))


def test_even_parts_are_not_balanced() -> None:
    """What hashing is for: over 60 % of the units in the first of 8 parts (finding C3)."""
    indices = touched("zipf", 400_000)
    parts = EvenPartition(400_000, 8).split(units(400_000, indices))
    assert len(parts[0].indices) > 0.6 * len(indices)


def test_no_table_beyond_32_bits() -> None:
    with pytest.raises(ValueError, match="a RotatedPartition needs no table"):
        HashedPartition(2**31 + 1, 2)


# -- algorithm 1


@given(
    keys=st.lists(st.integers(0, 2**40), unique=True, max_size=300),
    parts=st.integers(1, 8),
    slots=st.one_of(st.none(), st.integers(1, 40)),
    spread=st.booleans(),
)
def test_hierarchical_hashing_loses_nothing(keys: list[int], parts: int, slots: int | None, spread: bool) -> None:
    """However small its memory is at first, and if all belong to one part."""
    indices = torch.tensor(keys, dtype=torch.int64)
    part = murmur(indices, 0) * parts >> 32 if spread else torch.zeros_like(indices)
    grouping = hierarchical_hash(indices, part, parts, slots=slots)
    assert torch.equal(grouping.order.sort()[0], torch.arange(len(keys)))
    expected, counts = group_by_part(part, parts)
    assert grouping.counts == counts
    assert torch.equal(part[grouping.order], part[expected])


def test_collisions_and_memory_of_the_paper() -> None:
    """Twice as many slots as indices, k = 3: about 4.2 % go to the serial memory, which holds a tenth of the slots (20 % of them)."""
    indices = torch.randperm(50_000_000, generator=torch.Generator().manual_seed(0))[:500_000]
    grouping = hierarchical_hash(indices, murmur(indices, 0) * 16 >> 32, 16)
    assert grouping.attempts == 1
    assert grouping.slots == pytest.approx(2 * 1.1 * len(indices), rel=0.01)
    assert 0.035 < grouping.serial / len(indices) < 0.05


def test_counting_keeps_the_order_within_a_part() -> None:
    for parts in (5, 300):
        part = murmur(torch.arange(10_000), 3) * parts >> 32
        order, counts = group_by_part(part, parts)
        assert counts == [int((part == each).sum()) for each in range(parts)]
        assert torch.equal(order, torch.cat([(part == each).nonzero().flatten() for each in range(parts)]))


def test_the_finalizer_is_murmurs() -> None:
    """fmix32 of MurmurHash3; 0xDEADBEEF and 1 by the reference implementation."""
    assert murmur(torch.tensor([0, 1, 0xDEADBEEF]), 0).tolist() == [0, 0x514E28B7, 0x0DE5C6A9]
    assert murmur(torch.arange(1000), 1).tolist() != murmur(torch.arange(1000), 2).tolist()


# -- the kernel


def run_case(device: str, **env: str) -> str:
    done = subprocess.run([sys.executable, CASE, device], capture_output=True, text=True, timeout=250, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
def test_the_kernel_in_the_interpreter() -> None:
    assert run_case("cpu", TRITON_INTERPRET="1") == "as it should be\n"


@pytest.mark.gpu
def test_the_kernel() -> None:
    assert run_case("cuda") == "as it should be\n"
