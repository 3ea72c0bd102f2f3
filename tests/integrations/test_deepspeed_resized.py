"""A run goes on with another number of ranks, as if DeepSpeed's own universal checkpoint had been used in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from deepspeed_case import Case, train_resized
from plain_case import history
from rank_kit import World

pytestmark = pytest.mark.timeout(300)

SIZES = [(4, 4), (2, 8), (3, 12)]  # ranks, until which step
HOSTS = {4: ["a", "a", "b", "b"], 2: ["a", "b"], 3: ["a", "b", "c"]}


def through_universal_checkpoints(folder: Path, case: Case) -> dict[int, str]:
    """What the losses are with DeepSpeed's own means."""
    saved, out = folder / "universal", folder / "expected"
    for world, until in SIZES:
        with World(folder, world) as ranks:
            said = ranks.outcome(train_resized, case, str(out), until, str(saved))
            assert not any(isinstance(result, Exception) for result in said), said
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1", "--num_merge_workers=1"]
        command += [f"--input_folder={saved}/step{until}", f"--output_folder={saved}/step{until}_universal"]
        if case.stage < 3:
            command += ["--inject_missing_state"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
        assert done.returncode == 0, done.stderr
        (saved / "latest_universal").write_text(f"step{until}_universal")
    return history(out, 0)


def resized(folder: Path, case: Case) -> tuple[dict[int, str], list[list[Any]]]:
    """What they are with ours, and what the ranks of each size said."""
    said = []
    with World(folder, hosts=HOSTS[4]) as ranks:
        for world, until in SIZES:
            ranks.hosts = HOSTS[world]
            said.append(ranks.outcome(train_resized, case, str(folder / "ours"), until))
            assert not any(isinstance(result, Exception) for result in said[-1]), said[-1]
    return history(folder / "ours", 0), said


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [
        *(pytest.param(stage, bf16, marks=pytest.mark.soak) for stage, bf16 in [(1, False), (1, True), (2, False), (2, True), (3, False)]),
        (3, True),
    ],
)
def test_four_two_three_ranks(tmp_path: Path, stage: int, bf16: bool) -> None:
    case = Case(stage, bf16)
    expected = through_universal_checkpoints(tmp_path, case)
    ours, said = resized(tmp_path, case)
    assert ours == expected
    assert sorted(ours) == list(range(12))
    assert [results[0]["start"] for results in said] == [0, 4, 8]
