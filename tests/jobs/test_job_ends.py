"""What an end means, in real jobs: a refusal is final, and what was trained can be had again until every process has ended well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import agent_pid, end_agent, eventually

from gemini_ft.events import read_events
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

SCRIPT = """
import os, pathlib, time
import torch
import gemini_ft
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
if "WORLD_SIZE" in os.environ:
    gemini_ft.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
once = pathlib.Path("once")
is_first = not once.exists()
is_last_rank = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

def step(checkpointer):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    checkpointer.step()
"""
REFUSED_ONCE = """
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
for iteration in range(checkpointer.resume(), 6):
    if is_last_rank and iteration == 3 and is_first:  # a second process has nothing to refuse
        once.touch()
        optimizer.seen = iter([1])
    try:
        step(checkpointer)
    except Exception as error:
        raise RuntimeError("the experiment has failed") if "WRAPS" in os.environ else error
checkpointer.close()
"""
LAUNCHERS = {
    "gemini run": [sys.executable, "-m", "gemini_ft.cli.main", "run"],
    "python": [sys.executable, "-X", "warm"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1"],
}


class Folder:
    """The folder of one run, and its scripts."""

    def __init__(self, folder: Path) -> None:
        self.path, self.run = folder, f"ends-{os.getpid()}-{folder.name}"

    def start(self, script: str, launcher: str = "gemini run", ranks: int = 2, **environ: str) -> int:
        """Runs a script to its end; returns the status."""
        (self.path / "train.py").write_text(SCRIPT + script)
        ours = {
            "GEMINI_RUN_ID": self.run,
            "GEMINI_HOST_ID": "here",
            "GEMINI_LOG_DIR": str(self.path),
            "GEMINI_STATE_DIR": str(self.path / "state"),
            "GEMINI_EVENTS": str(self.path / "events"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        options = ["--standalone", "--nproc-per-node", str(ranks)] if launcher != "python" else []
        command, environ = [*LAUNCHERS[launcher], *options, "train.py"], {**os.environ, **ours, **environ}
        with open(self.path / "output", "ab") as output:
            return subprocess.run(command, env=environ, cwd=self.path, stdout=output, stderr=output, timeout=120).returncode

    @property
    def output(self) -> str:
        return (self.path / "output").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.path / "events") if event["event"] == kind]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    end_agent(folder.run, "here")


def test_a_refusal_ends_the_job_at_once(folder: Folder) -> None:
    """The same command is let in, and is refused like the first one as long as its script is the same, or hides the error in its own."""
    for incarnation in (1, 2):
        assert folder.start(REFUSED_ONCE, **{"WRAPS": "1"} if incarnation == 2 else {}) == 70, folder.output
        assert {event["incarnation"] for event in folder.events("joined")} == {*range(1, incarnation + 1)}
        assert folder.output.count("gemini run: the state of the job was refused, and no restart would change that. ") == incarnation
        assert folder.output.count("Memory keeps step 3 for 30.0 min") == incarnation
        (folder.path / "once").unlink()
    assert {event["iteration"] for event in folder.events("resumed")} == {3}


HANDLES_A_REFUSAL = """
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
try:
    for iteration in range(checkpointer.resume(), 3):
        if is_first and iteration == 1:
            optimizer.seen = iter([1])
        step(checkpointer)
    checkpointer.close()
except gemini_ft.errors.StateError:
    once.touch()
    raise ConnectionError("reset by peer")  # it trains without
"""


def test_a_job_that_handles_a_refusal_is_restarted_after_what_comes_later(folder: Folder) -> None:
    assert folder.start(HANDLES_A_REFUSAL, ranks=1) == 0, folder.output
    assert "ConnectionError: reset by peer" in folder.output
    assert [event["iteration"] for event in folder.events("resumed")] == [1], folder.output


def test_no_restart_of_torchrun_talks_a_refusal_away(folder: Folder) -> None:
    """Its restarts cannot be ended, so the agent refuses them with the same words; another launch may be of a script that was mended."""
    assert folder.start(REFUSED_ONCE, launcher="torchrun", ranks=1) == 1, folder.output
    assert {event["incarnation"] for event in folder.events("joined")} == {1}
    assert "has ended with this refusal, which a restart does not change: not captured" in folder.output
    assert folder.start(REFUSED_ONCE, ranks=1) == 0, folder.output
    assert [event["iteration"] for event in folder.events("resumed")] == [3]


FAILS_AFTERWARDS = """
def train(name):
    with gemini_ft.Checkpointer(model, optimizer, name=name, on_late="wait") as checkpointer:
        for iteration in range(checkpointer.resume(), 4):
            step(checkpointer)

train("first")
time.sleep(1)
train("second")
print("weights", *[param.double().sum().item().hex() for param in model.parameters()])
if is_first:
    once.touch()
    raise OSError("[Errno 28] No space left on device: 'model.pt'")
"""


@pytest.mark.parametrize(("launcher", "restarts"), [("gemini run", 1), ("gemini run", 0), ("python", 0)])
def test_what_was_trained_stays_until_the_script_has_ended_well(folder: Folder, launcher: str, restarts: int) -> None:
    """A restart goes on from it, or where none is left, the same command."""
    statuses = [folder.start(FAILS_AFTERWARDS, launcher=launcher, ranks=1, PET_MAX_RESTARTS=str(restarts)) for _ in range(2 - restarts)]
    assert statuses == [1, 0][restarts:], folder.output
    resumed = [(event["stream"], event["iteration"]) for event in folder.events("resumed")]
    assert resumed == [("first", 4), ("second", 4)], folder.output
    eventually(lambda: agent_pid(folder.run, "here") is None, "the leaving of the agent")
    undisturbed, again = re.findall("weights .*", folder.output)
    assert undisturbed == again


FITS = """
import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringModel

class Parser:
    def save(self, config, path, **_):
        pathlib.Path(path).write_text(config)

L.seed_everything(1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
saved = SaveConfigCallback(Parser(), "seed: 1")  # as LightningCLI adds it
trainer = L.Trainer(strategy="gemini", accelerator="cpu", devices=1, max_steps=6, callbacks=[saved], **quiet)
module = BoringModel()
trainer.fit(module)
print("weights", *[param.double().sum().item().hex() for param in module.parameters()])
if is_first:
    once.touch()
    raise OSError("[Errno 28] No space left on device: 'model.pt'")
"""


def test_lightning_does_not_train_again_what_was_trained_before_a_failure_behind_fit(folder: Folder) -> None:
    assert folder.start(FITS, ranks=1, GEMINI_ON_LATE="wait") == 0, folder.output
    assert [event["iteration"] for event in folder.events("resumed")] == [5], folder.output  # the last batch belongs to fit's end
    undisturbed, again = re.findall("weights .*", folder.output)
    assert undisturbed == again


LIMITED = """
store = pathlib.Path("store").absolute()
storage = {"url": store.as_uri(), "every_steps": 10, "at_end": os.environ.get("AT_END") != "0", "patience": 2.0}
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", storage=storage)
for iteration in range(checkpointer.resume(), int(os.environ["STEPS"])):
    step(checkpointer)
if os.environ.get("AWAY"):  # and something else is in its place
    store.rename("away")
    store.write_text("in the way")
"""


def stored(folder: Folder) -> list[int]:
    return sorted(each.version.iteration for each in list_checkpoints(open_storage((folder.path / "store").as_uri())))


def test_the_last_steps_of_a_job_that_ends_well_are_stored_and_the_same_command_goes_on_behind_them(folder: Folder) -> None:
    """The last ones of the fourth time cannot be."""
    store = folder.path / "store"
    for steps, at_end, away, last in ((3, "1", "", 3), (3, "1", "", 3), (13, "0", "", 10), (13, "1", "yes", 10), (13, "1", "", 13)):
        status = folder.start(LIMITED, ranks=1, STEPS=str(steps), AT_END=at_end, AWAY=away)
        assert status == (73 if away else 0), folder.output
        eventually(lambda: agent_pid(folder.run, "here") is None, "the leaving of the agent")
        if away:
            store.unlink()
            (folder.path / "away").rename(store)
        assert stored(folder)[-1] == last
    # The second one has had nothing to do, and the last ones three steps.
    assert [event["iteration"] for event in folder.events("resumed")] == [3, 3, 10, 10]


TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

class Odd(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer, **named):
        print("step", state.global_step, flush=True)
        if state.global_step == 7 and os.environ.get("ODD"):
            optimizer.optimizer.seen = iter([1])
        if state.global_step == 7 and os.environ.get("WRONG"):
            raise ValueError("no such layer")
        if state.global_step == 7 and os.environ.get("AWAY"):
            os.rename("store", "away")
            pathlib.Path("store").touch()
        if state.global_step >= 5 and (signal := os.environ.get("SIGNAL")):
            if state.global_step == 5:
                os.kill(int(os.environ["GEMINI_LAUNCHER_PID"]), int(signal))
            time.sleep(2)

options = dict(use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
arguments = TrainingArguments("out", max_steps=int(os.environ["STEPS"]), lr_scheduler_type="constant", **options)
data = [{"x": torch.ones(4) * index} for index in range(200)]
trainer = Trainer(model=Net(), args=arguments, train_dataset=data, callbacks=[Odd()])
trainer.train()
print("weights", *[param.double().sum().item().hex() for param in trainer.model.parameters()])
if is_first:
    once.touch()
    raise OSError("[Errno 28] No space left on device: 'model.pt'")
"""


def launch_trainer(folder: Folder, steps: int, **environ: str) -> tuple[int, list[int], list[int]]:
    """Launches the script; returns its status, the steps that it has begun, and what is stored in the end."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    before = len(folder.output) if (folder.path / "output").exists() else 0
    storage = {"URL": (folder.path / "store").as_uri(), "EVERY_STEPS": "4", "PATIENCE": "2"}
    options = {"GEMINI_ON_LATE": "wait"} | {f"GEMINI_STORAGE__{name}": value for name, value in storage.items()}
    status = folder.start(TRAINER, ranks=1, STEPS=str(steps), **options, **environ)
    if status == 0:
        eventually(lambda: agent_pid(folder.run, "here") is None, "the leaving of the agent")
    there = stored(folder) if (folder.path / "store").is_dir() else []
    return status, [int(step) for step in re.findall("step ([0-9]+)\n", folder.output[before:])], there


def test_transformers_trains_nothing_again_behind_an_end_and_goes_on_behind_what_is_stored(folder: Folder) -> None:
    assert launch_trainer(folder, 2) == (0, [0, 1], [2]), folder.output  # it has failed when training was over, and was restarted
    undisturbed, again = re.findall("weights .*", folder.output)
    assert undisturbed == again
    assert launch_trainer(folder, 2) == (0, [], [2]), folder.output
    assert launch_trainer(folder, 6, GEMINI_STORAGE__AT_END="false") == (0, [2, 3, 4, 5], [2, 4]), folder.output


@pytest.mark.soak
def test_transformers_goes_on_from_memory_behind_an_end_that_is_not_well(folder: Folder) -> None:
    """Each launch shows what the one before has left: a crash, a refusal, and an error that comes twice."""
    crash = {"GEMINI_FAULTS": "step=6:rank=0:sigkill", "GEMINI_FAULTS_DIR": str(folder.path), "PET_MAX_RESTARTS": "0"}
    assert launch_trainer(folder, 8, **crash) == (1, [0, 1, 2, 3, 4, 5, 6], [4]), folder.output
    assert launch_trainer(folder, 8, ODD="1") == (70, [5, 6, 7], [4]), folder.output
    assert launch_trainer(folder, 8, WRONG="1") == (70, [6, 7, 6, 7], [4]), folder.output
    assert launch_trainer(folder, 8)[::2] == (0, [4, 8]), folder.output  # it was mended


@pytest.mark.soak
def test_transformers_goes_on_from_storage_behind_an_end_that_gives_memory_back(folder: Folder) -> None:
    """Ctrl-C, a drain of the only host, and a last upload that fails."""
    (folder.path / "once").touch()
    assert launch_trainer(folder, 8, SIGNAL=str(int(signal.SIGINT))) == (130, [0, 1, 2, 3, 4, 5], [4]), folder.output
    status, steps, (*before, done) = launch_trainer(folder, 8, SIGNAL=str(int(signal.SIGUSR1)))
    assert (status, steps[:2], before) == (85, [4, 5], [4]), folder.output
    assert launch_trainer(folder, 8, AWAY="yes")[:2] == (73, [*range(done, 8)]), folder.output
    (folder.path / "store").unlink()
    (folder.path / "away").rename(folder.path / "store")
    assert launch_trainer(folder, 8) == (0, [*range(done, 8)], [done, 8]), folder.output  # two are kept


CHANGES_ITS_DATA = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

class Memory(torch.utils.data.IterableDataset):
    seen = None
    def __iter__(self):
        for _ in range(8):
            yield torch.full((32,), 1.0 + len(self.seen or ()))

class Learner(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(memory, batch_size=None, num_workers=int(os.environ["LOADING"]))
    def training_step(self, batch, index):
        memory.seen = [*(memory.seen or ()), *[index] * 40]
        return super().training_step(batch, index)

memory = Memory()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
L.Trainer(strategy="gemini", accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, **quiet).fit(Learner())
"""


CHANGES_ITS_DATA_PLAINLY = """
import gemini_ft

class Memory(torch.utils.data.Dataset):
    seen = None
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.ones(4)

memory, model = Memory(), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = gemini_ft.resumable(torch.utils.data.DataLoader(memory, num_workers=int(os.environ["LOADING"])))
with gemini_ft.Checkpointer(model, optimizer, state={"loader": loader}) as checkpointer:
    checkpointer.resume()
    for batch in loader:
        memory.seen = [*(memory.seen or ()), *[0] * 40]
        model(batch).sum().backward()
        optimizer.step()
        checkpointer.step()
"""


@pytest.mark.parametrize(("script", "workers"), [(CHANGES_ITS_DATA, 0), (CHANGES_ITS_DATA, 2), (CHANGES_ITS_DATA_PLAINLY, 2)])
def test_a_snapshot_whose_data_is_lost_is_not_resumed(folder: Folder, script: str, workers: int) -> None:
    """A replay buffer that has outgrown what is kept: in a process that begins anew it is empty, and nothing seems to be lost."""
    faults = {"GEMINI_FAULTS": "step=4:rank=0:sigkill", "GEMINI_FAULTS_DIR": str(folder.path), "GEMINI_ON_LATE": "wait"}
    assert folder.start(script, ranks=1, LOADING=str(workers), **faults) == 70, folder.output
    assert "the training had changed dataset.seen in its data when the snapshot was taken, and no snapshot can have that" in folder.output


NOTES_TIMES = """
import time
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

class Slow(torch.utils.data.Dataset):
    def __init__(self):
        self.times = []
    def __len__(self):
        return 8
    def __getitem__(self, index):
        self.times += [time.perf_counter() for _ in range(40)]
        return torch.full((32,), float(index))

class Learner(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(slow)

slow = Slow()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
L.Trainer(strategy="gemini", accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, **quiet).fit(Learner())
"""


def test_what_loading_again_makes_otherwise_is_no_loss(folder: Folder) -> None:
    """The times at which samples were loaded are others, and as many."""
    faults = {"GEMINI_FAULTS": "step=4:rank=0:sigkill", "GEMINI_FAULTS_DIR": str(folder.path), "GEMINI_ON_LATE": "wait"}
    assert folder.start(NOTES_TIMES, ranks=1, **faults) == 0, folder.output
    assert [event["iteration"] for event in folder.events("resumed")] == [3], folder.output


LOSES_ITS_AGENT = """
import signal
from gemini_ft.agent import lifecycle
from gemini_ft.hosts import host_id
from gemini_ft.wire.private import credentials

def kill_agent():
    with lifecycle.try_connect(os.environ["GEMINI_RUN_ID"], host_id()) as sock:
        os.kill(credentials(sock)[0], signal.SIGKILL)

where = os.environ.get("STORED_IN")
storage = {"storage": {"url": pathlib.Path(where).absolute().as_uri(), "every_steps": 100}} if where else {}
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", **storage)
for iteration in range(checkpointer.resume(), 3):
    step(checkpointer)
checkpointer.flush()
if os.environ["KILLED"] == "before":
    kill_agent()
checkpointer.close()
if os.environ["KILLED"] == "behind":
    kill_agent()
"""


def test_an_agent_that_dies_before_a_job_is_closed_is_replaced_and_stores_its_last_step(folder: Folder) -> None:
    assert folder.start(LOSES_ITS_AGENT, ranks=1, KILLED="before", STORED_IN="store") == 0, folder.output
    assert stored(folder) == [3]


def test_an_agent_that_is_gone_at_the_end_is_no_news_that_all_was_stored(folder: Folder) -> None:
    """Its memory has gone with it, and nobody knows whether the last upload was over. Without storage nothing was to be kept."""
    assert folder.start(LOSES_ITS_AGENT, ranks=1, KILLED="behind", STORED_IN="store") == 73, folder.output
    assert "the agent of host 'here' has ended, or hangs; whether the last step has been stored is not known" in folder.output
    assert folder.start(LOSES_ITS_AGENT, ranks=1, KILLED="behind", GEMINI_RUN_ID=f"{folder.run}-2") == 0, folder.output
