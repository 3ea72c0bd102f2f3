"""What a newcomer copies out of the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("launcher", ["gemini_ft.cli.main run", pytest.param("torch.distributed.run", marks=pytest.mark.soak)])
def test_the_plain_loop_runs(launcher: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    [loop] = [block for block in blocks if "Checkpointer(" in block]
    script = tmp_path / "train.py"
    script.write_text(loop + 'print(f"done {step}\\n", end="", flush=True)\n')  # one write: both ranks share the pipe
    done = subprocess.run(
        [sys.executable, "-m", *launcher.split(), "--standalone", "--nproc-per-node", "2", script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done 99") == 2
