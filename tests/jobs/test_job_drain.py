"""A host that is told to leave loses nothing: its last step is committed, stored where storage is configured, and goes on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weights_kit import STEPS, assert_same_bits, job, reached

from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_existing
from gemini_ft.testing import EmulatedHosts


def drain(hosts: EmulatedHosts, by: str, host: str) -> None:
    """Tells a host to leave: by a signal to its launcher, to its worker, or by a command on another host."""
    if by == "launcher":
        os.kill(hosts.launcher_pid(host), signal.SIGUSR1)
    elif by == "worker":
        os.kill([event["pid"] for event in hosts.events("joined") if event["host"] == host][-1], signal.SIGUSR1)
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


def test_a_host_that_is_told_to_leave_finishes_its_step_and_a_spare_goes_on_there(tmp_path: Path) -> None:
    with job(tmp_path, 2, STEPS) as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        hosts.add()  # earlier, it could be the spare or not
        drain(hosts, "launcher", "host1")
        count = assert_nothing_is_lost(hosts, "host1", 0)
        hosts.add()
        drain(hosts, "command", "host2")
        hosts.wait_for(lambda: "host2" in hosts.drained)
        assert_nothing_is_lost(hosts, "host2", count)
        hosts.finish()
    assert_same_bits(tmp_path, STEPS)


def test_a_job_that_is_preempted_as_a_whole_stores_its_last_step_and_goes_on_there(tmp_path: Path) -> None:
    """On other hosts, so that nothing but storage has it; no upload was due by itself."""
    url = f"file://{tmp_path}/store"
    settings = {"GEMINI_STORAGE__URL": url, "GEMINI_STORAGE__EVERY_STEPS": "1000000", "GEMINI_DRAIN_SIGNAL": "SIGTERM"}
    with job(tmp_path, 2, STEPS, **settings) as hosts:
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
        hosts.finish()
        assert {(event["iteration"], "storage" in event["sources"]) for event in hosts.events("resumed")} == {(ended, True)}
    assert_same_bits(tmp_path, STEPS)


@pytest.mark.soak
def test_twenty_times_under_load_nothing_is_lost(tmp_path: Path) -> None:
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with job(tmp_path, 2, 100_000) as hosts:
            hosts.wait_for(lambda: reached(hosts, 5))
            hosts.add()
            count = 0
            for number in range(20):
                leaving = sorted({event["host"] for event in hosts.events("joined")[-2:]})[number % 2]
                drain(hosts, ("launcher", "worker", "command")[number % 3], leaving)
                count = assert_nothing_is_lost(hosts, leaving, count)
                hosts.add()
                hosts.wait_for(lambda: reached(hosts, max(event["iteration"] for event in hosts.events("resumed")) + 3))
    finally:
        for process in load:
            process.kill()
            process.wait()


TRAINER = """
import sys, time
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import gemini_ft

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

L.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=2)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(strategy="gemini", accelerator="cpu", devices=2, max_epochs=3, **options)
module = Module()
trainer.fit(module, data)
if trainer.is_global_zero:
    open(sys.argv[1], "w").write(b"".join(value.detach().numpy().tobytes() for value in module.parameters()).hex())
"""


@pytest.mark.soak
@pytest.mark.parametrize("by", ["launcher", "worker"])
def test_a_trainer_lets_the_drain_through(tmp_path: Path, by: str) -> None:
    """Lightning has handlers of its own, for SIGTERM: they are not asked."""
    (tmp_path / "train.py").write_text(TRAINER)
    weights = []
    for name in ("drained", "undisturbed"):
        folder = tmp_path / name
        folder.mkdir()
        with EmulatedHosts(1, [str(tmp_path / "train.py"), str(folder / "weights")], folder, workers=2) as hosts:
            if name == "drained":
                hosts.wait_for(lambda hosts=hosts: reached(hosts, 10))
                drain(hosts, by, "host0")
                until = time.monotonic() + 60
                while not hosts.drained and time.monotonic() < until:
                    time.sleep(0.02)
                assert hosts.drained == ["host0"], (folder / "host0.log").read_text()
                ended = max(event["iteration"] for event in hosts.events("drained"))
                hosts.restart("host0")
            hosts.finish()
            assert {event["iteration"] for event in hosts.events("resumed")} == ({ended} if name == "drained" else set())
        weights.append((folder / "weights").read_text())
    assert weights[0] == weights[1]
