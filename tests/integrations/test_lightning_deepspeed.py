"""A Trainer over DeepSpeed, killed anywhere, ends with the bits of an undisturbed run of Lightning's own strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from agent_kit import end_agent, eventually, preload
from lightning_deepspeed_case import Case, train, writes_weights
from rank_kit import World
from test_lightning_recovery import read

from gemini_ft.errors import StateError, WorldSizeError
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

# The last is imported by the first engine, and takes longest.
preload("lightning.pytorch", "pytorch_lightning", "torchmetrics", "deepspeed.runtime.zero.muon.original_muon")
pytestmark = [pytest.mark.timeout(300), pytest.mark.preloaded("lightning", "deepspeed")]


class Undisturbed:
    """Folders with the diaries of plain runs, each made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[Case, Path] = {}

    def __call__(self, case: Case) -> Path:
        if case not in self._folders:
            folder = self._factory.mktemp("undisturbed")
            with World(folder, 2) as ranks:
                for result in ranks.outcome(train, case, str(folder), True):
                    assert isinstance(result, dict), result
            self._folders[case] = folder
        return self._folders[case]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory)


def compare(folder: Path, expected: Path, lives: int) -> None:
    for rank in range(2):
        got = read(folder, rank)
        assert got.values == read(expected, rank).values
        assert len(got.lives) == lives


def survive(folder: Path, case: Case, faults: str, expected: Path) -> list[Any]:
    """What the ranks of the last life said."""
    with World(folder, 2) as ranks:
        results = ranks.finish(train, case, str(folder), GEMINI_FAULTS=faults)
        compare(folder, expected, 1 + faults.count(";") + 1)
    return results


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, 3])  # 1 and 2 are one class of DeepSpeed
def test_killed_in_a_step_and_in_validation(stage: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    case = Case(stage)
    results = survive(tmp_path, case, "step=2:rank=1:sigkill; step=5:rank=0:sigkill:moment=validation_start", undisturbed(case))
    assert [set(result["restored"]) for result in results] == [{"own memory"}] * 2
    assert [result["start"] for result in results] == [(results[0]["loaded"] + 1) // 2] * 2


def test_gradients_that_wait_for_the_next_epoch_are_not_lost(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Six batches in an epoch, four in an update: Lightning and the engine count differently."""
    case = Case(2, accumulate=4, precision="bf16-true", package="pytorch_lightning", schedule=False, validate_every=1.0)
    survive(tmp_path, case, "step=1:rank=1:sigkill:moment=epoch_start; step=3:rank=0:sigkill", undisturbed(case))


@pytest.mark.soak
def test_offloaded_to_cpu_memory(tmp_path: Path, undisturbed: Undisturbed) -> None:
    case = Case(3, offload=True)
    survive(tmp_path, case, "step=4:rank=1:sigkill", undisturbed(case))


def live(ranks: World, case: Case, **environ: str) -> list[Any]:
    """One life: what the ranks said, or nothing if one of them was killed."""
    attempt = ranks.start(train, case, str(ranks.folder), **environ)
    try:
        return attempt.results() if attempt.wait() else []
    finally:
        attempt.kill()


def test_lost_hosts(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """First both, and what is left is in storage; then one, and the other has its copies."""
    case, url = Case(3), f"file://{tmp_path}/store"
    environ = {"GEMINI_STORAGE__URL": url, "GEMINI_STORAGE__EVERY_STEPS": "2"}
    environ["GEMINI_FAULTS"] = "step=3:rank=1:sigkill; step=6:rank=0:sigkill"
    with World(tmp_path, 2) as ranks:
        assert not live(ranks, case, **environ)
        eventually(lambda: list_checkpoints(open_storage(url)), "the upload of step 2")
        for host in ranks.hosts:
            end_agent(ranks.run, host)
        assert not live(ranks, case, **environ)
        end_agent(ranks.run, "host1")
        results = live(ranks, case, **environ)
    assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
    compare(tmp_path, undisturbed(case), 3)
    assert read(tmp_path, 0).lives[1][0] == 2 * case.accumulate


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        assert not live(ranks, Case(2), GEMINI_FAULTS="step=3:rank=1:sigkill")
        ranks.hosts = ["host0"]
        (result,) = ranks.outcome(train, Case(2), str(tmp_path))
        assert isinstance(result, WorldSizeError), result


def test_another_accumulation_of_the_script_waits_for_another_run(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The engine goes on with the snapshot's number of micro-batches, as the Trainer does: one alone would step at other times."""
    with World(tmp_path, 2) as ranks:
        assert not live(ranks, Case(3), GEMINI_FAULTS="step=3:rank=1:sigkill")
        assert live(ranks, Case(3, accumulate=3))
    compare(tmp_path, undisturbed(Case(3)), 2)


@pytest.mark.parametrize("at", [3, 0], ids=["once", "after each step"])
def test_weights_that_are_written_between_two_steps_are_named_and_at_each_step_refused(at: int, tmp_path: Path) -> None:
    """A resumed engine makes them of the masters."""
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(writes_weights, str(tmp_path), at)
    if at:
        assert sum("are not what their masters give" in text for text in said) == 1, said
    else:
        assert isinstance(said, StateError)
        assert "are not what their masters give" in str(said)


def test_weights_that_are_written_uncounted_are_looked_for_at_the_first_snapshots_however_rare_they_are(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(writes_weights, str(tmp_path), 0, False, GEMINI_INTERVAL="3")
    assert "are not what their masters give" in str(said)


def saved(folder: Path) -> str:
    """The first checkpoint file that a run has kept."""
    return str(min((folder / "root").rglob("step=*")))


def test_ckpt_path_is_where_a_first_start_begins(tmp_path: Path, undisturbed: Undisturbed) -> None:
    case = Case(3, ckpt_path=saved(undisturbed(Case(3))))
    survive(tmp_path, case, "step=8:rank=1:sigkill", undisturbed(case))


def test_ckpt_path_is_not_where_a_later_start_goes_back_to(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with World(tmp_path, 2) as ranks:
        assert not live(ranks, Case(3), GEMINI_FAULTS="step=6:rank=1:sigkill")
        results = live(ranks, Case(3, ckpt_path=saved(tmp_path)), GEMINI_FAULTS="step=6:rank=1:sigkill")
    assert [result["start"] for result in results] == [(results[0]["loaded"] + 1) // 2] * 2
    compare(tmp_path, undisturbed(Case(3)), 2)
    assert read(tmp_path, 0).lives[1][0] >= 10


SCRIPT = """
import sys
import lightning
import torch
import gemini_ft

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.net(batch + torch.rand_like(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_train_end(self):
        print(f"finished at step {self.trainer.global_step}\\n", end="", flush=True)  # one write: both ranks share the pipe

lightning.seed_everything(1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="gemini_deepspeed_stage_3", max_epochs=2, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(24, 8), 2))
"""


@pytest.mark.taken_apart("Lightning with DeepSpeed")
def test_by_name_from_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_ON_LATE": "wait"}
    environ |= {"GEMINI_RUN_ID": f"{tmp_path.name}-{os.getpid()}", "GEMINI_FAULTS": "step=3:rank=1:sigkill"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr.count("resumed at iteration") == 1
    assert done.stdout.count("finished at step 12") == 2
