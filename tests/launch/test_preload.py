"""What the fork server imports for a program, and what is left for its workers to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemini_ft.launch.preload import early_environment, modules_to_preload

DEEPSPEED = ["deepspeed", "gemini_ft.deepspeed.engine"]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# -- which modules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", []),
        ("import deepspeed", DEEPSPEED),
        ("from transformers import Trainer", ["transformers.trainer", "accelerate", "gemini_ft.huggingface?"]),
        ("import accelerate  # with deepspeed", DEEPSPEED),
        ("import lightning as L", ["lightning", "gemini_ft.lightning.naming", "gemini_ft.lightning.fabric"]),
        ("from lightning.pytorch import Trainer", ["lightning", "gemini_ft.lightning.naming", "gemini_ft.lightning.fabric"]),
        ("def f():\n    import pytorch_lightning", ["pytorch_lightning", "gemini_ft.pytorch_lightning", "gemini_ft.lightning.naming"]),
        ("import lightning_fabric", ["lightning_fabric", "gemini_ft.lightning.fabric"]),
        ("from . import lightning", []),
        ("import lightning\ndef (", []),
    ],
)
def test_vendors_are_imported_if_the_script_does(source: str, expected: list[str], tmp_path: Path) -> None:
    base = modules_to_preload([str(tmp_path / "missing.py")])
    assert base[:2] == ["torch", "torch._dynamo"]
    found = modules_to_preload([write(tmp_path / "script.py", source)], ["mine"])
    assert found[: len(base)] == base
    assert found[len(base) :][: len(expected)] == expected
    assert found[-1] == "mine"
    assert len(found) == len({name.removesuffix("?") for name in found})
    assert bool(expected) == (len(found) > len(base) + 1)


def test_the_source_of_a_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "pkg" / "train.py", "import lightning")
    write(tmp_path / "pkg" / "__main__.py", "import pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    assert "lightning" in modules_to_preload(["-m", "pkg.train"])
    assert "pytorch_lightning" in modules_to_preload(["-m", "pkg"])
    assert "lightning" not in modules_to_preload(["-m", "pkg"])


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    """As in a script of three lines before a package; a package that imports itself in a circle, a broken file, and no file."""
    script = write(tmp_path / "train.py", "from src.app import main\nimport broken, numpy\nmain()")
    write(tmp_path / "broken.py", "import pytorch_lightning\ndef (")
    write(tmp_path / "src" / "app.py", "from .models import net\nfrom ... import above\nfrom ........... import nothing\ndef main(): ...")
    write(tmp_path.parent / "above.py", "import lightning_fabric")
    write(tmp_path / "src" / "models" / "__init__.py", "from ..data import loader")
    write(
        tmp_path / "src" / "models" / "net.py",
        "import src.app\nfrom lightning.pytorch import LightningModule\nif TYPE_CHECKING:\n    import pytorch_lightning",
    )
    write(
        tmp_path / "src" / "data.py",
        "try:\n    import transformers, deepspeed\nexcept ImportError: ...\ndef f():\n    import lightning_fabric",
    )
    write(tmp_path / "src" / "unused.py", "import pytorch_lightning")
    found = modules_to_preload([script])
    assert {"lightning?", "gemini_ft.lightning.naming?", "transformers.trainer?"} <= set(found)  # it may never come to that
    assert not {"deepspeed", "pytorch_lightning", "lightning_fabric"} & {name.removesuffix("?") for name in found}
    assert set(modules_to_preload([script], follow=False)) == set(modules_to_preload([str(tmp_path / "missing.py")]))


def test_so_many_files_are_not_read(tmp_path: Path) -> None:
    for number in range(200):
        write(tmp_path / f"module{number}.py", f"import module{number + 1}")
    write(tmp_path / "module200.py", "import lightning")
    assert "lightning?" not in modules_to_preload([str(tmp_path / "module0.py")])
    assert "lightning?" in modules_to_preload([str(tmp_path / "module150.py")])
    write(tmp_path / "module199.py", "import lightning\n" + "#" * 2**20)
    assert "lightning?" not in modules_to_preload([str(tmp_path / "module150.py")])


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_variables_that_are_set_before_a_module_beside_the_script_imports(package: str, tmp_path: Path) -> None:
    source = "import os, sys, torch\nos.environ['HF_HOME'] = {}\nimport part"
    write(tmp_path / "part.py", f"import {package}")
    known = [write(tmp_path / "known.py", source.format("'/models'"))]
    assert early_environment(known, modules_to_preload(known)).constants == {"HF_HOME": "/models"}
    late = [write(tmp_path / "late.py", source.format("sys.argv[1]"))]
    assert early_environment(late, modules_to_preload(late)).unknown == "late.py sets HF_HOME in line 2, before its imports"
    assert early_environment(late, modules_to_preload(late, follow=False), follow=False).unknown is None


def test_a_module_that_is_used_by_part_of_the_code_only_changes_nothing(tmp_path: Path) -> None:
    """A script of transformers with a configuration of DeepSpeed, and a function beside it that imports deepspeed."""
    write(tmp_path / "part.py", "def save():\n    from deepspeed import zero")
    source = "import os, sys\nfrom transformers import Trainer\nos.environ['MINE'] = sys.argv[1]\nimport part"
    program = [write(tmp_path / "train.py", source), "--deepspeed", "ds.json"]
    assert "deepspeed" in modules_to_preload(program)
    follow = early_environment(program, modules_to_preload(program)).unknown is None
    assert follow or early_environment(program, modules_to_preload(program, follow=False), follow=False).unknown is None


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_what_cannot_be_read_is_left_to_python(public: Path) -> None:
    """A folder that this user must not look into, a module's name that is a path, and a sum of so many terms that parsing gives up."""
    script = write(public / "train.py", "import closed, deep, lightning")
    write(public / "deep.py", "import pytorch_lightning\nx = " + "+".join(["1"] * 100_000))
    write(public / "closed" / "__init__.py", "")
    become = "os.getuid() or (os.setgid(65534), os.setuid(65534))"
    look = f"import os; from gemini_ft.launch import preload; {become}; found = preload.modules_to_preload([{script!r}])"
    look = f"{look}; print(found, preload.early_environment([{script!r}], found))"
    (public / "closed").chmod(0)
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd="/")
    (public / "closed").chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "'lightning'" in done.stdout
    assert "pytorch_lightning" not in done.stdout
    assert "lightning" not in modules_to_preload(["-m", "scripts/train.py"])


# -- what is left


BEGIN = "import json, sys\nbefore = set(sys.modules)\nimport torch\nfrom torch import nn\n"
END = """
if int(__import__("os").environ["RANK"]) == 0:
    print("LATE", json.dumps(sorted(set(sys.modules) - before)), flush=True)
"""
LIGHTNING = """
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
    def training_step(self, batch, _):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(strategy="gemini", accelerator="cpu", devices=2, max_steps=3, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
"""
SCRIPTS = {
    "plain": """
import gemini_ft
gemini_ft.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters())
checkpointer = gemini_ft.Checkpointer(model, optimizer)
for _ in range(checkpointer.resume(), 3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.step()
torch.distributed.destroy_process_group()
""",
    "lightning": f"import gemini_ft, part\nimport lightning.pytorch as pl\n{LIGHTNING}",
    "pytorch_lightning": f"import gemini_ft\nimport pytorch_lightning as pl\n{LIGHTNING}",
    "fabric": """
import gemini_ft
from lightning.fabric import Fabric
fabric = Fabric(strategy="gemini", accelerator="cpu", devices=2)
fabric.launch()
net = nn.Linear(4, 4)
model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
state = {"model": model, "optimizer": optimizer, "step": 0}
fabric.load("gemini://latest", state)
while state["step"] < 3:
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    state["step"] += 1
    fabric.save("gemini://latest", state)
""",
    "deepspeed": """
import deepspeed
net = nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gemini": {}}
config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def forward(self, x=None, labels=None):
        return {"loss": (self.net(x).squeeze() - labels).square().mean()}
data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 32
options = TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, ddp_backend="gloo")
Trainer(Net(), options, train_dataset=data).train()
""",
}
FEW = 25  # of libraries, which load one or the other when they use it; without looking ahead it was over a hundred


# The launcher of the first and its fork server have torch already, and look ahead themselves for the rest; all others start from nothing.
ANEW = [pytest.param(kind, marks=[pytest.mark.soak, pytest.mark.started_anew], id=f"{kind}-anew") for kind in SCRIPTS]


@pytest.mark.taken_apart("Lightning")
@pytest.mark.parametrize("kind", ["lightning", *ANEW])
def test_a_worker_has_next_to_nothing_left_to_import(kind: str, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", BEGIN + SCRIPTS[kind] + END)
    write(tmp_path / "part.py", "import json")
    environ = {**os.environ, "GEMINI_RUN_ID": f"preload-{uuid.uuid4().hex[:8]}", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LATE "))
    late = set(json.loads(line.removeprefix("LATE ")))
    assert ("part" in late) == (kind == "lightning")  # the script's own modules are its own to import
    assert [name for name in late if name.startswith("gemini_ft")] == []
    if kind == "transformers":  # accelerate looks for DeepSpeed's engine where that is installed, which is not imported ahead for it alone
        assert [name for name in late if name.partition(".")[0] in ("transformers", "accelerate")] == []
    else:
        assert len(late) <= FEW, sorted(late)
    assert "imported ahead" not in done.stderr
