"""The built wheel, installed with pip into an environment that has nothing, runs the README's examples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
FIT = """
from lightning.pytorch.demos.boring_classes import BoringModel
trainer.fit(BoringModel())
print(f"done {trainer.global_step}\\n", end="", flush=True)
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the commands of an environment into which only the wheel was installed, and what it asks for."""
    folder = tmp_path_factory.mktemp("empty")
    sources = folder / "sources"
    sources.mkdir()
    for name in ("gemini_ft", "sync", "compression"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run(folder, sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(sources))
    shutil.rmtree(sources)
    [wheel] = folder.glob("*.whl")
    run(folder, sys.executable, "-m", "venv", "environment")
    commands = folder / "environment" / "bin"
    run(folder, str(commands / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[lightning]")
    return commands


def run(folder: Path, *command: str) -> str:
    """Runs a command of which nothing but its own environment can be seen, and returns what it says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "GEMINI_"))}
    found = kept | {"PATH": f"{Path(command[0]).parent}:{os.defpath}", "OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_first_example_trains(empty: Path, tmp_path: Path) -> None:
    """Lightning's, on two CPUs instead of its 128 GPUs, and with a model to train."""
    [trainer] = [block for block in BLOCKS if 'strategy="gemini", devices=8, num_nodes=16' in block and "fit" not in block]
    small = trainer.replace(
        "devices=8, num_nodes=16", 'devices=2, accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False'
    )
    (tmp_path / "train.py").write_text(small + FIT)
    said = run(tmp_path, str(empty / "gemini"), "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert said.count("done 5") == 2


def test_the_plain_loop_trains(empty: Path, tmp_path: Path) -> None:
    [loop] = [block for block in BLOCKS if "Checkpointer(" in block]
    (tmp_path / "train.py").write_text(loop + 'print(f"done {step}\\n", end="", flush=True)\n')
    said = run(tmp_path, str(empty / "gemini"), "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert said.count("done 99") == 2
