"""What a newcomer copies out of the README runs, and ends with the same bits when it was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
END = 'end = " ".join(param.sum().item().hex() for param in model.parameters())\nprint(f"done {step} {end}\\n", end="", flush=True)\n'


@pytest.mark.parametrize("launcher", ["gemini_ft.cli.main run", pytest.param("torch.distributed.run", marks=pytest.mark.soak)])
def test_the_plain_loop_runs(launcher: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    [loop] = [block for block in blocks if "Checkpointer(" in block]
    script = tmp_path / "train.py"
    script.write_text(loop + END)  # one write: both ranks share the pipe
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
