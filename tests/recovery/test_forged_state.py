"""Snapshots of the right format, in which the small state has another form than the one that is put back: refused by name."""

from __future__ import annotations

from pathlib import Path

from forged_case import resume_forged, train
from rank_kit import World


def test_every_part_that_is_missing_or_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        assert world.start(train, 3).results() == [None]
        assert world.start(resume_forged).results() == [[]]
