"""DeepSpeed engines, killed in the middle of an iteration, end with the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from agent_kit import end_agent
from deepspeed_case import Case, train
from plain_case import history
from rank_kit import World

pytestmark = pytest.mark.timeout(300)

KILLED = "step=3:rank=0:sigkill; step=6:rank=1:sigkill:moment=in_copy"


def check(folder: Path, case: Case, world: int = 2, faults: str = KILLED, restarts: int = 2) -> list[Any]:
    """Run a case with faults and without, compare every bit, and return what the ranks of the last attempt said."""
    with World(folder, world) as ranks:
        expected = ranks.outcome(train, case, str(folder / "undisturbed"), GEMINI_RESUME="never")
    with World(folder, world) as ranks:
        results = ranks.finish(train, case, str(folder / "disturbed"), GEMINI_FAULTS=faults)
        assert ranks.restarts == restarts
    for rank in range(world):
        assert history(folder / "disturbed", rank) == history(folder / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]
    return results


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage(tmp_path: Path, stage: int, bf16: bool) -> None:
    check(tmp_path, Case(stage, bf16, accumulate=2))
