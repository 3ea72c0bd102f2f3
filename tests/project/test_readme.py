"""What a newcomer copies out of the README and docs/usage.md runs, and ends with the same bits when it was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
END = 'end = " ".join(param.sum().item().hex() for param in model.parameters())\nprint(f"done {step} {end}\\n", end="", flush=True)\n'


def _loop(page: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [loop] = [block for block in blocks if "Checkpointer(" in block]
    return loop


def test_the_short_loop_is_a_part_of_the_whole_one() -> None:
    whole = [line.strip() for line in _loop("docs/usage.md").splitlines()]
    short = [line.strip() for line in _loop("README.md").splitlines()]
    assert [line for line in whole if line in short] == short


@pytest.mark.parametrize("launcher", ["gemini_ft.cli.main run", pytest.param("torch.distributed.run", marks=pytest.mark.soak)])
def test_the_plain_loop_runs(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_loop("docs/usage.md") + END)  # one write: both ranks share the pipe
    ends = []
    for faults in ["", "step=70:rank=0:sigkill"] if launcher.startswith("gemini") else [""]:
        environ = {"OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_FAULTS": faults, "GEMINI_FAULTS_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", *launcher.split(), "--standalone", "--nproc-per-node", "2", script],
            cwd=tmp_path,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
        assert ("resuming at iteration" in done.stderr) == bool(faults)
        ends += re.findall("^done 100 .*", done.stdout, re.MULTILINE)
    assert len(ends) == (4 if launcher.startswith("gemini") else 2)
    assert len({*ends}) == 1
