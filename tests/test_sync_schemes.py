"""Every scheme computes the same sum, on every rank, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sync_case
from agent_kit import preload
from rank_kit import World

from gemini_ft.sync.schemes import SCHEMES

preload("sync_case")


def on_ranks(folder: Path, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank returned; an exception of one is raised."""
    with World(folder, size) as world:
        results = world.outcome(function, *arguments)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_sum_is_right_and_the_same_everywhere(world: int, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, world, sync_case.sums) == [[]] * world


def test_also_over_backends_that_need_to_know_sizes(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, sync_case.collectives) == [[]] * 3


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_summed_is_refused_by_all_with_the_same_words(world: int, tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, world, sync_case.refusals)
    assert others == [first] * (world - 1)
    said = {(scheme, case): text for scheme, case, text in first}
    for scheme in {scheme for scheme, _ in said}:
        assert f"rank {world - 1}: " in said[scheme, "shape"]
        assert "(4,)" in said[scheme, "shape"]
        assert "(2, 6)" in said[scheme, "same size, other shape"]
        assert "torch.float64" in said[scheme, "dtype"]
        assert "torch.sparse_coo" in said[scheme, "layout"]
        assert f"rank {world - 1}: dtype torch.int64: must be one of torch.float32" in said[scheme, "integers"]
        assert f"rank {world - 1}: indices 9 to 9 in dimension 0: must be from 0 to 8" in said[scheme, "index"]
        assert said[scheme, "afterwards"] == str([float(world)] * 3)


def test_ranks_with_different_schemes_are_told(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path, 2, sync_case.other_schemes)
    assert first == second
    assert "rank 0: sparse-ps of (3,)" in first
    assert "rank 1: zen of (3,)" in first


def test_nan_and_infinity_stay(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, sync_case.special_values) == [[]] * 3


def test_in_the_background_they_take_turns(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 4, sync_case.in_the_background) == [[]] * 4


def test_groups_do_not_disturb_each_other(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 5, sync_case.subgroups) == [[]] * 5


def test_without_a_group_it_is_said_what_to_do() -> None:
    import torch

    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        SCHEMES["zen"]().all_reduce(torch.zeros(3))
