"""Combinations of traits that a seed draws end with the bits of plain DDP, whether undisturbed or killed, or are refused by name.

`COMBINATIONS=100:500 make soak PART=combinations` runs the seeds from 100 to 499. A combination that differs is shrunk to the
traits that it needs, which the failure names. One that plain DDP cannot run shows nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from combinations import FOUND, draw, killed, legal, plainest, run, shown, shrunk

SUITE = [5]
FIRST, END = map(int, os.environ.get("COMBINATIONS", "0:400").split(":"))
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("seed", [*SUITE, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(FIRST, END) if seed not in SUITE)])
def test_a_drawn_combination_ends_as_plain_ddp_does(seed: int, tmp_path: Path) -> None:
    traits = draw(seed)
    verdict, found = run(traits, tmp_path / "drawn")
    if verdict in ("different", "failed"):
        traits = shrunk(traits, tmp_path, verdict)
    assert verdict in ("same", "refused", "impossible"), f"seed {seed}: {shown(traits)}: {found}"
    assert seed not in SUITE or killed(tmp_path / "drawn")


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str, tmp_path: Path) -> None:
    assert run(legal(plainest() | FOUND[name]), tmp_path) == ("same", [])
    assert killed(tmp_path)
