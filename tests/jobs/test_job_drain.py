"""A host that is told to leave loses nothing: its last step is committed, stored where storage is configured, and goes on elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_kit import assert_same_bits, finish, job, reached

from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_existing
from gemini_ft.testing import EmulatedHosts


def drain(hosts: EmulatedHosts, by: str, host: str, number: int = signal.SIGUSR1) -> None:
    """Tells a host to leave: by a signal to its launcher, to its worker, or by a command on another host."""
    if by == "launcher":
        os.kill(hosts.launcher_pid(host), number)
    elif by == "worker":
        os.kill([event["pid"] for event in hosts.events("joined") if event["host"] == host][-1], number)
    else:
        other = next(name for name in hosts.alive if name != host)
        command = [sys.executable, "-m", "gemini_ft.cli.main", "drain", host, "--run-id", hosts.run, "--host", other]
        assert "is drained" in subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def assert_nothing_is_lost(hosts: EmulatedHosts, host: str, before: int) -> int:
    """A host has been told to leave: it has left, and the others go on exactly where it ended. Returns the number of resumptions."""
    hosts.wait_for(lambda: host in hosts.drained)
    ended = max(event["iteration"] for event in hosts.events("drained") if event["host"] == host)
    hosts.wait_for(lambda: len(hosts.events("resumed")) >= before + 2)  # both ranks
    resumed = hosts.events("resumed")
    assert {event["iteration"] for event in resumed[before:]} == {ended}
    assert "storage" not in {source for event in resumed[before:] for source in event["sources"]}
    return len(hosts.events("resumed"))


@pytest.fixture(scope="module")
def at_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedHosts]:
    """A job on two hosts that has made a few steps; its tests do not depend on each other."""
    with job(tmp_path_factory.mktemp("job"), 2) as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        yield hosts


@pytest.mark.parametrize("by", ["launcher", "command"])
def test_a_host_that_is_told_to_leave_finishes_its_step_and_a_spare_goes_on_there(at_work: EmulatedHosts, by: str) -> None:
    before = len(at_work.events("resumed"))
    leaving = max(event["host"] for event in at_work.events("joined")[-2:])  # at first host1, then the spare that came for it
    at_work.add()  # earlier, it could be the spare or not
    drain(at_work, by, leaving)
    assert_nothing_is_lost(at_work, leaving, before)


def test_weights_are_the_same_bits_whoever_has_left(at_work: EmulatedHosts) -> None:
    finish(at_work)
    assert_same_bits(at_work.folder)


def test_a_job_that_is_preempted_as_a_whole_stores_its_last_step_and_goes_on_there(tmp_path: Path) -> None:
    """On other hosts, so that nothing but storage has it; no upload was due by itself."""
    url = f"file://{tmp_path}/store"
    settings = {"GEMINI_STORAGE__URL": url, "GEMINI_STORAGE__EVERY_STEPS": "1000000", "GEMINI_DRAIN_SIGNAL": "SIGTERM"}
    with job(tmp_path, 2, **settings) as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        for host in ("host0", "host1"):
            os.kill(hosts.launcher_pid(host), signal.SIGTERM)
        until = time.monotonic() + 60
        while len(hosts.drained) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert hosts.drained == ["host0", "host1"], (tmp_path / "host0.log").read_text() + (tmp_path / "host1.log").read_text()
        (ended,) = {event["iteration"] for event in hosts.events("drained")}
        assert [found.version.iteration for found in list_checkpoints(open_existing(url), hosts.run)] == [ended]
        hosts.add()
        hosts.add()
        finish(hosts)
        assert {(event["iteration"], "storage" in event["sources"]) for event in hosts.events("resumed")} == {(ended, True)}
    assert_same_bits(tmp_path)


LOAD = [sys.executable, "-c", "while True: pass"]


@pytest.mark.soak
@pytest.mark.parametrize("signal_name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize("stores", [False, True], ids=["in memory", "and stored"])
def test_twenty_times_under_load_nothing_is_lost(tmp_path: Path, signal_name: str, stores: bool) -> None:
    """A spare takes over each time. With storage a host has stored the step after which it leaves, which was not due by itself."""
    settings = {"GEMINI_DRAIN_SIGNAL": signal_name, "GEMINI_DRAIN_SECONDS": "120"}
    if stores:
        settings |= {"GEMINI_STORAGE__URL": f"file://{tmp_path}/store", "GEMINI_STORAGE__EVERY_STEPS": "1000000"}
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            load = subprocess.Popen(LOAD)
            stack.callback(load.wait)
            stack.callback(load.kill)
        hosts = stack.enter_context(job(tmp_path, 2, **settings))
        hosts.wait_for(lambda: reached(hosts, 5))
        hosts.add()
        count = 0
        for number in range(20):
            leaving = sorted({event["host"] for event in hosts.events("joined")[-2:]})[number % 2]
            drain(hosts, ("launcher", "worker", "command")[number % 3], leaving, signal.Signals[signal_name])
            count = assert_nothing_is_lost(hosts, leaving, count)
            if stores:
                resumed = hosts.events("resumed")[-1]["iteration"]
                stored = list_checkpoints(open_existing(settings["GEMINI_STORAGE__URL"]), hosts.run)
                assert resumed in [found.version.iteration for found in stored]
            hosts.add()
            hosts.wait_for(lambda: reached(hosts, max(event["iteration"] for event in hosts.events("resumed")) + 3))


TRAINER = """
import os, signal, sys, time
import lightning as L
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset
import gemini_ft

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        time.sleep(0.02)
        if [str(self.global_step), "0"] == [os.environ.get("TOLD_AT"), os.environ["TORCHELASTIC_RESTART_COUNT"]]:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

L.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=2)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
if "SLURM_JOB_ID" in os.environ:
    options |= dict(plugins=[SLURMEnvironment(auto_requeue=True)], default_root_dir=os.path.dirname(sys.argv[1]))
trainer = L.Trainer(strategy="gemini", accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=3, **options)
module = Module()
trainer.fit(module, data)
if trainer.is_global_zero:
    open(sys.argv[1], "w").write(b"".join(value.detach().numpy().tobytes() for value in module.parameters()).hex())
"""


def one_host(script: str, folder: Path, workers: int, **env: str) -> EmulatedHosts:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    return EmulatedHosts(1, [str(folder / "train.py"), str(folder / "weights")], folder, workers=workers, env=env)


def goes_on(hosts: EmulatedHosts) -> None:
    """The host has drained, and comes back; its training goes on after the step that it finished, and to the end."""
    until = time.monotonic() + 60
    while hosts.alive and time.monotonic() < until:
        time.sleep(0.02)
    assert hosts.drained == ["host0"], (hosts.folder / "host0.log").read_text()
    ended = max(event["iteration"] for event in hosts.events("drained"))
    hosts.restart("host0")
    hosts.finish()
    assert {event["iteration"] for event in hosts.events("resumed")} == {ended}


def undisturbed_weights(script: str, folder: Path, workers: int) -> str:
    with one_host(script, folder, workers) as hosts:
        hosts.finish()
        assert not hosts.events("resumed")
    return (folder / "weights").read_text()


@pytest.mark.soak
@pytest.mark.parametrize(("by", "signal_name"), [("launcher", "SIGUSR1"), ("worker", "SIGUSR1"), ("launcher", "SIGTERM")])
def test_a_trainer_lets_the_drain_through(tmp_path: Path, by: str, signal_name: str) -> None:
    """Lightning has handlers of its own, for SIGTERM: they are not asked."""
    with one_host(TRAINER, tmp_path / "drained", 2, GEMINI_DRAIN_SIGNAL=signal_name) as hosts:
        hosts.wait_for(lambda: reached(hosts, 10))
        drain(hosts, by, "host0", signal.Signals[signal_name])
        goes_on(hosts)
        assert "Received SIGTERM" not in (hosts.folder / "host0.log").read_text()
    assert (tmp_path / "drained" / "weights").read_text() == undisturbed_weights(TRAINER, tmp_path / "undisturbed", 2)


@pytest.mark.soak
def test_lightnings_own_requeueing_acts_at_the_workers_signal_and_the_drain_at_the_launchers(tmp_path: Path) -> None:
    folder = tmp_path / "requeued"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked.part && mv {tmp_path}/asked.part {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", **{f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}}
    with one_host(TRAINER, folder, 1, **slurm, PATH=f"{tmp_path}:{os.environ['PATH']}") as hosts:
        hosts.wait_for(lambda: reached(hosts, 10))
        drain(hosts, "worker", "host0")
        hosts.wait_for((tmp_path / "asked").exists)
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
        assert (folder / "hpc_ckpt_1.ckpt").exists()
        later = max(event["iteration"] for event in hosts.events("committed")) + 5  # Lightning leaves the end to SLURM
        hosts.wait_for(lambda: reached(hosts, later))
        assert not hosts.events("drained")
        drain(hosts, "launcher", "host0")
        goes_on(hosts)  # from what is newer than Lightning's checkpoint
    assert (folder / "weights").read_text() == undisturbed_weights(TRAINER, tmp_path / "undisturbed", 1)


@pytest.mark.soak
def test_at_a_workers_sigterm_lightning_acts_even_where_that_is_the_drains_signal(tmp_path: Path) -> None:
    """It stops the training after the batch in which the signal comes, and the launcher begins anew; no host is drained."""
    folder = tmp_path / "stopped"
    with one_host(TRAINER, folder, 1, GEMINI_DRAIN_SIGNAL="SIGTERM", TOLD_AT="10") as hosts:
        hosts.finish()
        assert hosts.events("resumed")
        assert not hosts.events("drained")
        assert "Received SIGTERM" in (folder / "host0.log").read_text()
    assert (folder / "weights").read_text() == undisturbed_weights(TRAINER, tmp_path / "undisturbed", 1)


TRANSFORMER = """
import os, sys, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

class Slow(TrainerCallback):
    def on_step_begin(self, *_, **__):
        time.sleep(0.02)

torch.manual_seed(0)
data = [{"x": torch.randn(4)} for _ in range(160)]
options = dict(use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
arguments = TrainingArguments(os.path.dirname(sys.argv[1]), enable_jit_checkpoint=True, max_steps=600, **options)
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Slow()])
trainer.train()
if trainer.state.global_step == 600:
    open(sys.argv[1], "w").write(b"".join(value.detach().numpy().tobytes() for value in trainer.model.parameters()).hex())
"""


@pytest.mark.soak
def test_the_checkpoint_that_transformers_makes_at_sigterm_and_the_drain_have_a_signal_each(tmp_path: Path) -> None:
    """At SIGTERM its own handler stops the training, and the launcher does not take that for the end of the job."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    folder = tmp_path / "disturbed"
    with one_host(TRANSFORMER, folder, 1) as hosts:
        hosts.wait_for(lambda: reached(hosts, 10))
        drain(hosts, "launcher", "host0")
        hosts.wait_for(lambda: hosts.drained or None)
        assert not list(folder.glob("checkpoint-*"))
        (ended,) = {event["iteration"] for event in hosts.events("drained")}
        hosts.restart("host0")
        hosts.wait_for(lambda: reached(hosts, ended + 10))
        drain(hosts, "launcher", "host0", signal.SIGTERM)
        hosts.wait_for(lambda: not hosts.alive)
        (saved,) = (int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
        hosts.restart("host0")
        hosts.finish()
        first, second = [event["iteration"] for event in hosts.events("resumed")]
        assert first == ended
        assert second >= saved
    assert (folder / "weights").read_text() == undisturbed_weights(TRANSFORMER, tmp_path / "undisturbed", 1)
