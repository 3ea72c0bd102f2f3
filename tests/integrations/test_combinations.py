"""Combinations of traits that a seed draws end with the bits of plain DDP, whether undisturbed or killed, or are refused by name.

`COMBINATIONS=100:500 make soak PART=combinations` runs the seeds from 100 to 499. A combination that differs is shrunk to the
traits that it needs, which the failure names. One that plain DDP cannot run, or that ends without a kill, shows nothing: it is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from combinations import FOUND, draw, judged, killed, legal, plainest, run, shown, shrunk
from rank_kit import Failed

SUITE = [5]
FIRST, END = map(int, os.environ.get("COMBINATIONS", "0:400").split(":"))
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("seed", [*SUITE, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(FIRST, END) if seed not in SUITE)])
def test_a_drawn_combination_ends_as_plain_ddp_does(seed: int, tmp_path: Path) -> None:
    traits = draw(seed)
    verdict, found = run(traits, tmp_path / "drawn")
    kills = killed(tmp_path / "drawn")
    if verdict in ("different", "failed"):
        traits = shrunk(traits, tmp_path, verdict)
    assert verdict in (("same",) if seed in SUITE else ("same", "refused", "impossible")), f"seed {seed}: {shown(traits)}: {found}"
    assert kills or seed not in SUITE
    if verdict == "impossible":
        pytest.skip(f"needs a combination that plain DDP can run: take another seed than {seed}, with which it ends in {found}")
    if verdict == "same" and not kills:
        pytest.skip(f"needs a kill: take another seed than {seed}, which draws moments that are not reached: {traits['kills']}")


def test_of_a_refusal_at_least_one_rank_of_a_way_says_the_reason() -> None:
    silent, refused = Failed("rank 0 died with exit code -11"), "refused: UnsupportedStateError: a generator of its own"
    lost = "refused: PeerError: the agent did not answer"
    for undisturbed, killed_ones, verdict in (
        (["done", "done"], ["done", "done"], "done"),
        (["done", "done"], [refused, silent], "refused"),
        ([refused, refused], [refused, refused], "refused"),
        ([silent, silent], [silent, silent], "failed"),
        ([refused, refused], [silent, silent], "failed"),
        ([refused, ValueError("odd")], ["done", "done"], "failed"),
        (["done", "done"], [lost, silent], "failed"),
    ):
        assert judged({"ddp": ["done", "done"], "undisturbed": undisturbed, "killed": killed_ones})[0] == verdict
    assert judged({"ddp": ["done", silent], "undisturbed": [refused, refused], "killed": ["done", "done"]})[0] == "impossible"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str, tmp_path: Path) -> None:
    assert run(legal(plainest() | FOUND[name]), tmp_path) == ("same", [])
    assert killed(tmp_path)
