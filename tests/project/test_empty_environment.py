"""The built wheel, installed with pip into an environment that has nothing, runs the examples of README.md and docs/usage.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINED = """
from lightning.pytorch.demos.boring_classes import BoringModel
model, data = BoringModel(), None  # it has data of its own
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


def block(page: str, mark: str) -> str:
    """The one example of a page that has the mark in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [found] = [block for block in blocks if mark in block]
    return found


def run(folder: Path, *command: str) -> str:
    """Runs a command of which nothing but its own environment can be seen, and returns what it says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "GEMINI_"))}
    found = kept | {"PATH": f"{Path(command[0]).parent}:{os.defpath}", "OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_the_first_example_trains(empty: Path, tmp_path: Path) -> None:
    """Lightning's, on two CPUs instead of its 128 GPUs, and with a model to train."""
    many, few = "devices=8, num_nodes=16", 'devices=2, accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False'
    small = block("README.md", many).replace(many, few)
    (tmp_path / "train.py").write_text(TRAINED + small + 'print(f"done {trainer.global_step}\\n", end="", flush=True)\n')
    said = run(tmp_path, str(empty / "gemini"), "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert said.count("done 5") == 2


def test_the_plain_loop_trains(empty: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("docs/usage.md", "Checkpointer(") + 'print(f"done {step}\\n", end="", flush=True)\n')
    said = run(tmp_path, str(empty / "gemini"), "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert said.count("done 100") == 2
