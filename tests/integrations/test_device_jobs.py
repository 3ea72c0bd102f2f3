"""Whole jobs on a device whose copies lag behind: killed, they end with the bits of undisturbed ones on a CPU.

A unit that is right by itself is of no use to a job that builds it in another way: these call what a script calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lagging_device import on_device
from plain_case import Case, history, train
from rank_kit import World

KILLED = "step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy; step=12:rank=0:sigkill:moment=before_update"


WAIT = {"on_late": "wait"}


@pytest.mark.parametrize(
    "case",
    [Case(options=WAIT), Case(options=WAIT | {"verify": True, "chunk_bytes": 512}), Case(accumulate=2, pause=0.05)],
    ids=["every step", "verified", "late ones are skipped"],
)
def test_a_plain_loop(tmp_path: Path, case: Case) -> None:
    with World(tmp_path, 2) as ranks:
        expected = ranks.outcome(train, case, str(tmp_path / "undisturbed"))
    with World(tmp_path, 2) as ranks:
        results = ranks.finish(on_device, train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS=KILLED)
        assert ranks.restarts == 3
    for rank in range(2):
        assert history(tmp_path / "disturbed", rank) == history(tmp_path / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]
        assert results[rank]["start"] > 0
