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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from gemini_ft.checkpoint_io import GeminiCheckpointIO

L.seed_everything(1)
files = ModelCheckpoint("files", "{step}", every_n_train_steps=4, save_top_k=-1)
trainer = L.Trainer(
    strategy="gemini", devices=2, accelerator="cpu", max_steps=12, limit_val_batches=0, logger=False, callbacks=[files],
    plugins=[GeminiCheckpointIO()], enable_progress_bar=False, enable_model_summary=False,
)
model = BoringModel()
trainer.fit(model)
"""
FABRIC = """
import lightning as L
import torch

fabric = L.Fabric(strategy="gemini", devices=2, accelerator="cpu")
fabric.launch()
fabric.seed_everything(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
state = {"model": model, "optimizer": optimizer, "step": 0}
fabric.load("gemini://latest", state)
while state["step"] < 12:
    fabric.backward(model(torch.randn(5, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    fabric.save("gemini://latest", state)
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
PLAIN = """
import torch
import gemini_ft
from torch.utils.data import DataLoader, TensorDataset

gemini_ft.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = gemini_ft.resumable(DataLoader(TensorDataset(torch.randn(60, 4)), 5, shuffle=True))
with gemini_ft.Checkpointer(model, optimizer, state={"scheduler": scheduler, "loader": loader}) as checkpointer:
    step = checkpointer.resume()
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
"""
WRITER = """
import torch
import torch.distributed.checkpoint as dcp
import gemini_ft
from gemini_ft.dcp import GeminiWriter

gemini_ft.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
writer = GeminiWriter(replicated=True)
state = {"model": model.state_dict()}
if writer.newest:
    dcp.load(state, storage_reader=writer.reader())
    print("resuming at iteration", writer.newest)
for step in range((writer.newest or 0) + 1, 13):
    model(torch.full((2, 4), float(step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        dcp.async_save(state, storage_writer=writer.at(step), no_dist=True).result()
writer.close()
"""
TRANSFORMERS = """
import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


torch.manual_seed(1)
data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(40)]
arguments = TrainingArguments("out", report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, max_steps=12, ddp_backend="gloo")
model = Model()
Trainer(model, arguments, train_dataset=data).train()
"""
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
for name in ("step=4", "step=8", "step=12"):
    one, other = (torch.load(f"{way}/files/{name}.ckpt", weights_only=False)["state_dict"] for way in ("undisturbed", "killed"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
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
        said = run(folder / name, *job, GEMINI_ON_LATE="wait", GEMINI_EVENTS="events", **env)
        table = run(folder / name, "gemini", "goodput", "events")
        assert ("died" in table) == bool(faults), table
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
    files = [sorted(path.name for path in (tmp_path / name / "files").iterdir()) for name in ("undisturbed", "killed")]
    assert files == 2 * [["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]]
    (tmp_path / "load.py").write_text(LOAD)
    assert "read: 2 tensors" in run(tmp_path, sys.executable, "load.py", url, str(exported))
    assert "gemini" in run(tmp_path, "gemini", "completion", "bash")


@pytest.mark.parametrize("script", [PLAIN, FABRIC, WRITER, TRANSFORMERS], ids=["plain", "fabric", "dcp", "transformers"])
def test_a_script_ends_with_the_same_weights_undisturbed_and_killed(script: str, tmp_path: Path) -> None:
    if script is TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    (tmp_path / "train.py").write_text(script + TELL)
    trained(tmp_path)


def test_an_unchanged_script_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED + TELL)
    (tmp_path / "ds.json").write_text(DS_JSON)
    trained(tmp_path, DS_ACCELERATOR="cpu")


def test_a_host_is_looked_at(tmp_path: Path) -> None:
    assert run(tmp_path, "gemini", "doctor", "--hosts", "1")
