"""What a user does first with the wheel that pip has installed, each from an empty folder; `make wheel-test` runs it, and .ci/run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemini_ft

pytestmark = [
    pytest.mark.skipif("site-packages" not in gemini_ft.__file__, reason="needs the wheel, installed: make wheel-test"),
    pytest.mark.timeout(600),
]
LIGHTNING = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

L.seed_everything(1)
trainer = L.Trainer(
    strategy="gemini", devices=2, accelerator="cpu", max_steps=12, limit_val_batches=0, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
model = BoringModel()
trainer.fit(model)
"""
DEEPSPEED = """
import deepspeed
import torch

torch.manual_seed(1)
model = torch.nn.Linear(32, 2)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
while engine.global_steps < 12:
    loss = engine(torch.randn(4, 32)).square().mean()
    engine.backward(loss)
    engine.step()
"""
DS_JSON = """{
  "train_micro_batch_size_per_gpu": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": true}},
  "zero_optimization": {"stage": 1},
  "gemini": {"on_late": "wait"}
}"""
TELL = """
weights = " ".join(param.detach().flatten().view(-1)[0].item().hex() for param in model.parameters())
print(f"weights: {weights}\\n", end="", flush=True)
"""
LOAD = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.demos.boring_classes import BoringModel
from gemini_ft.dcp import GeminiReader

model = BoringModel()
state = {"model": model.state_dict()}
dcp.load(state, storage_reader=GeminiReader(sys.argv[1], optim=None), no_dist=True)
model.load_state_dict(state["model"])
exported = torch.load(sys.argv[2], weights_only=False)["state_dict"]
assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
print("read: 2 tensors" if len(exported) == 2 else exported.keys())
"""


def run(folder: Path, *command: str, **env: str) -> str:
    """Runs a command of the wheel's environment; what it says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GEMINI_", "PYTHON"))}
    found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=kept | found | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def weights(said: str) -> set[str]:
    return set(re.findall("^weights: (.*)", said, re.MULTILINE))


def trained(folder: Path, **env: str) -> None:
    """Trains twice, each time in a folder of its own: a job that is killed ends with the weights of one that is not."""
    ends = []
    for name, faults in (("undisturbed", ""), ("killed", "step=6:rank=1:sigkill")):
        (folder / name).mkdir()
        for file in folder.glob("*.*"):
            (folder / name / file.name).write_text(file.read_text())
        job = ["gemini", "run", "--nproc-per-node", "2", "train.py"]
        env |= {"GEMINI_FAULTS": faults, "GEMINI_STORAGE__URL": f"file://{folder}/{name}/stored", "GEMINI_STORAGE__EVERY_STEPS": "12"}
        said = run(folder / name, *job, GEMINI_ON_LATE="wait", **env)
        assert ("resuming at iteration" in said) == bool(faults), said
        ends.append(weights(said))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


def test_the_command_is_the_wheels_own() -> None:
    assert Path(sys.executable).with_name("gemini").exists()


def test_lightning_and_what_is_read_out_of_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING + TELL)
    trained(tmp_path)
    url = f"file://{tmp_path}/killed/stored"
    run(tmp_path, "gemini", "checkpoints", url, "--verify")
    run(tmp_path, "gemini", "export", "latest", "--from", url, "--format", "lightning", "--to", "exported")
    [exported] = (tmp_path / "exported").iterdir()
    (tmp_path / "load.py").write_text(LOAD)
    assert "read: 2 tensors" in run(tmp_path, sys.executable, "load.py", url, str(exported))
    assert "gemini" in run(tmp_path, "gemini", "completion", "bash")


def test_an_unchanged_script_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED + TELL)
    (tmp_path / "ds.json").write_text(DS_JSON)
    trained(tmp_path, DS_ACCELERATOR="cpu")


def test_a_host_is_looked_at(tmp_path: Path) -> None:
    assert run(tmp_path, "gemini", "doctor", "--hosts", "1")
