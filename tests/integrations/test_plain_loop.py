"""A plain torch loop around the Checkpointer: killed in every way, it ends with the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plain_case import Case, history, train
from rank_kit import World


def undisturbed(folder: Path, case: Case, world: int) -> list[Any]:
    with World(folder, world) as ranks:
        return ranks.outcome(train, case, str(folder / "undisturbed"))


def check(folder: Path, case: Case, world: int, faults: str, restarts: int) -> list[Any]:
    """Run a case with faults and without, compare every bit, and return what the ranks of the last attempt said."""
    expected = undisturbed(folder, case, world)
    with World(folder, world) as ranks:
        results = ranks.finish(train, case, str(folder / "disturbed"), GEMINI_FAULTS=faults)
        assert ranks.restarts == restarts
    for rank in range(world):
        assert history(folder / "disturbed", rank) == history(folder / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]
    return results


KILLED = "step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy; step=12:rank=0:sigkill:moment=before_update"
WAIT_FOR_COMMIT = {"on_late": "wait"}  # a loop this fast would otherwise leave most steps out


class TestSameBits:
    def test_five_kills_in_one_run(self, tmp_path: Path) -> None:
        faults = f"{KILLED}; step=2:rank=1:sigkill; step=15:rank=1:exit"
        results = check(tmp_path, Case(options=WAIT_FOR_COMMIT), 2, faults, 5)
        assert results[0]["start"] >= 13  # the snapshot of 14 had a slot, so that of 13 was committed
        assert set(results[0]["restored"]) == {"own memory"}  # where the replica of the other shard is too

    @pytest.mark.parametrize(
        "case",
        [
            Case(accumulate=2),
            Case(accumulate=2, options={"interval": 3}),
            Case(overflow_every=4),
            Case(optimizers=2),
            Case(options={"interval": 3}),
            Case(options={"verify": True, "on_late": "wait", "chunk_bytes": 512}),
        ],
        ids=["accumulation", "interval in an accumulation", "overflows", "two optimizers", "interval", "verify, small chunks"],
    )
    def test_whatever_a_step_is(self, tmp_path: Path, case: Case) -> None:
        check(tmp_path, case, 2, KILLED, 3)
