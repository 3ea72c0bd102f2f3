"""Killed anywhere, a Lightning training ends with every bit of an undisturbed run of plain Lightning.

Not only the weights: each loss, each batch, learning rate, validation loss and logged value is compared, those of
repeated steps too. See lightning_case.py for what the training does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CASE = Path(__file__).with_name("lightning_case.py")
WORLD_SIZE = 2
pytestmark = pytest.mark.timeout(300)


@dataclass
class Scenario:
    """What is trained, and where which rank dies ("rank:event:number", see lightning_case.Diary)."""

    kills: list[str]
    baseline: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)


PLAIN = {
    "plain": {},
    "accumulate": {"trainer": {"accumulate_grad_batches": 2}},
    "own-buffers": {"strategy_options": {"broadcast_buffers": False}},
    "stream": {"stream": True},
    "workers": {"num_workers": 2},
    "max-steps": {"trainer": {"max_steps": 14, "max_epochs": -1}},
    "plateau": {"plateau": True, "sync": True},
    "manual": {"manual": True},
    "from-file": {"ckpt_path": "CHECKPOINT"},
    "sharded": {"strategy": "model_parallel", "sharded": True},
    "fabric": {"fabric": True},
    "fabric-workers": {"fabric": True, "num_workers": 2},
}

SCENARIOS = {
    "step": Scenario(["1:step:8"]),
    "update-rank-0": Scenario(["0:update:9"]),
    "validation": Scenario(["0:validation:8"]),
    "epoch-start": Scenario(["1:epoch_start:1"]),
    "epoch-end": Scenario(["0:epoch_end:1"]),
    "first-step-of-an-epoch": Scenario(["1:step:12"]),
    "five-kills": Scenario(["0:step:3", "1:update:7", "0:validation:11", "1:step:13", "1:epoch_end:2"]),
    "pytorch-lightning": Scenario(["1:step:8"], options={"package": "pytorch_lightning"}),
    "accumulate": Scenario(["1:step:9", "0:update:13"], "accumulate"),
    "own-buffers": Scenario(["1:step:8"], "own-buffers"),
    "stream": Scenario(["1:step:4", "0:step:14"], "stream"),
    "workers": Scenario(["1:step:3", "0:step:10"], "workers"),
    "max-steps": Scenario(["0:step:10"], "max-steps"),
    "plateau": Scenario(["1:step:8"], "plateau"),
    "manual": Scenario(["0:update:9"], "manual"),
    "from-file": Scenario(["1:step:8"], "from-file"),
    "sharded": Scenario(["1:step:8"], "sharded", {"strategy": "gemini_fsdp2"}),
    "fabric": Scenario(["1:step:8", "0:update:13"], "fabric"),
    "fabric-workers": Scenario(["1:step:9"], "fabric-workers"),
}


def launch(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Train under ``gemini run``; its output is in ``folder``/output if it fails."""
    job = json.dumps({"out": str(folder), "runs": runs})
    restarts = sum(len(run.get("kills", [])) for run in runs)
    options = ["--standalone", f"--nproc-per-node={WORLD_SIZE}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "gemini_ft.cli", "run", *options, str(CASE), job]
    # "wait": steps take milliseconds here, less than a commit does.
    environment = os.environ | {"GEMINI_RUN_ID": folder.name, "GEMINI_LINGER": "20", "GEMINI_ON_LATE": "wait"}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            status = process.wait(240)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            status = -1
    assert status == 0, (folder / "output").read_text()[-6000:]


@dataclass
class Diary:
    """What one rank wrote down."""

    values: dict[str, Any] = field(default_factory=dict)
    first: list[int] = field(default_factory=list)  # by life: its first step, and its last
    last: list[int] = field(default_factory=list)


def read(folder: Path, rank: int) -> Diary:
    """All that a rank has noted; what it noted more than once must have been the same each time."""
    diary = Diary()
    for line in (folder / f"rank-{rank}").read_text().splitlines():
        life, key, value = json.loads(line)
        assert diary.values.setdefault(key, value) == value, f"{key} came out differently when it was repeated in life {life}"
        if key.startswith("step "):
            step = int(key.removeprefix("step "))
            if len(diary.first) <= life:
                diary.first.append(step)
                diary.last.append(step)
            diary.last[life] = step
    return diary


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Diaries of all baselines, by plain Lightning."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runs = [{"name": name, "strategy": "ddp"} | options for name, options in PLAIN.items()]
    for run in runs:
        if run.get("ckpt_path"):
            run["ckpt_path"] = str(checkpoint_of(folder))
    launch(folder, runs)
    return folder


def checkpoint_of(folder: Path) -> Path:
    """A file that the baseline "plain" leaves behind."""
    return folder / "plain" / "root" / "diary" / "diary" / "checkpoints" / "step=3.ckpt"


@pytest.mark.parametrize("name", SCENARIOS)
def test_ends_with_the_bits_of_an_undisturbed_run(name: str, undisturbed: Path, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    run = PLAIN[scenario.baseline] | {"strategy": "gemini"} | scenario.options | {"name": name, "kills": scenario.kills}
    if run.get("ckpt_path"):
        run["ckpt_path"] = str(checkpoint_of(undisturbed))
    launch(tmp_path, [run])

    happened = {path.name.removeprefix("killed-") for path in (tmp_path / name).glob("killed-*")}
    assert happened == set(scenario.kills)
    for rank in range(WORLD_SIZE):
        expected, got = read(undisturbed / scenario.baseline, rank), read(tmp_path / name, rank)
        assert got.values == expected.values
        assert len(got.first) == 1 + len(scenario.kills)
        for before, after in zip(got.last, got.first[1:], strict=False):
            lost = 2 * run.get("trainer", {}).get("accumulate_grad_batches", 1)
            assert after >= before + 1 - lost, f"step {before} was reached, but the next life began with step {after}"
