"""``sync: ring8``: a ring whose hops quantise anew, by chance and without bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import sync_case
from agent_kit import preload
from rank_kit import on_ranks

preload("sync_case")

WORDS = {"int8": 1 / 127, "e4m3": 2.0**-3, "e5m2": 2.0**-2, "bf16": 2.0**-7}  # distance of two words, of the largest value of a bucket


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, sync_case.Rounding]]:
    """By rank: words -> how sums of three ranks are rounded."""
    return on_ranks(tmp_path_factory.mktemp("ring8"), 3, sync_case.roundings, list(WORDS))


@pytest.mark.parametrize("words", WORDS)
def test_every_sum_is_within_the_bound_and_their_mean_is_unbiased(words: str, found: list[dict[str, sync_case.Rounding]]) -> None:
    rounding = found[0][words]
    assert 0 < rounding.largest < 3 * 3 * WORDS[words]  # three roundings, of partial sums up to three times the largest value
    assert rounding.deviations < 5  # of the mean of 400 sums, in standard errors: all of 128 values
    assert {rank[words].bits for rank in found} == {rounding.bits}


@pytest.mark.parametrize("words", WORDS)
def test_the_chances_go_on_after_a_resume(words: str, found: list[dict[str, sync_case.Rounding]]) -> None:
    assert found[0][words].resumed
    assert found[0][words].varies


def test_many_more_bytes_would_be_needed_in_float32(tmp_path: Path) -> None:
    [(quantised, whole)] = {tuple(each) for each in on_ranks(tmp_path, 2, sync_case.ring_bytes)}
    assert quantised < 0.27 * whole
