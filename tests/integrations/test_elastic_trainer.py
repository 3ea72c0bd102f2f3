"""`elastic: batch` under transformers' Trainer: the samples, rates and losses of a single process, whatever the number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agent_kit import end_agent
from elastic_case import samples
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from gemini_ft.loaders.stripes import why_undivided

data_loader = pytest.importorskip("accelerate.data_loader", reason="needs accelerate: pip install accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

CASE = Path(__file__).parents[1] / "kit" / "elastic_trainer_case.py"
SAMPLES = 72

pytestmark = [pytest.mark.timeout(300), pytest.mark.preloaded("transformers")]


class Job:
    """Launches on one host, whose agent keeps what the launch before has left; each has a number of ranks of its own."""

    def __init__(self, folder: Path, **run: Any) -> None:
        self.out, self._run, self._launches = folder / "ours", {"micro_batches": 2, "protected": True, "out": str(folder / "ours")} | run, 0
        self.env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GEMINI_RUN_ID": f"{os.getpid()}-{folder.name}",
            "GEMINI_HOST_ID": "only",
            "GEMINI_LINGER": "300",
            "GEMINI_LOG_DIR": str(folder),
            "GEMINI_FAULTS_DIR": str(folder / "faults"),
            "GEMINI_ELASTIC": "batch",
            "GEMINI_INTERVAL": "1",
            "DS_ACCELERATOR": "cpu",
        }

    def launch(self, ranks: int, killed_at: int = 0) -> str:
        """Trains on so many ranks, until one is killed where ``killed_at`` says so; what was printed."""
        self._launches += 1
        given = json.dumps(self._run | {"started": self._launches})
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", f"--nproc-per-node={ranks}", "--max-restarts=0", str(CASE), given]
        env = self.env | ({"GEMINI_FAULTS": f"step={killed_at}:rank=0:moment=before_update:sigkill"} if killed_at else {})
        done = subprocess.run(command, cwd=self.out.parent, env=env, capture_output=True, text=True, timeout=200)
        return done.stdout + done.stderr

    def end(self) -> None:
        end_agent(self.env["GEMINI_RUN_ID"], "only")


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made = Job(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end()


def alone(folder: Path, **run: Any) -> dict[str, Any]:
    """The result of the Trainer's own training in a single process, without gemini-ft."""
    given = json.dumps({"micro_batches": 6, "out": str(folder / "alone")} | run)
    subprocess.run([sys.executable, "-X", "warm", str(CASE), given], cwd=folder, check=True, capture_output=True, timeout=200)
    found: dict[str, Any] = json.loads((folder / "alone").read_text())
    return found


SHARDED = {"sharded": True, "arguments": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Linear"]}}}


@pytest.mark.parametrize(
    "run",
    [
        {},
        pytest.param(
            {"loss": "divided", "arguments": {"average_tokens_across_devices": False, "max_steps": 12, "dataloader_num_workers": 1}},
            marks=pytest.mark.skipif(
                not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"), reason="needs transformers 5.19: pip install -U transformers"
            ),
        ),
        pytest.param(SHARDED, marks=pytest.mark.soak),
    ],
    ids=["tokens of all ranks", "mean of a micro-batch", "fsdp2"],
)
def test_other_numbers_of_ranks_train_as_a_single_process(tmp_path: Path, run: dict[str, Any]) -> None:
    """Three ranks, two and one, in the middle of both epochs and at the border between them."""
    expected = alone(tmp_path, **({} if run is SHARDED else run))
    job, printed = Job(tmp_path, **run), ""
    try:
        for ranks, killed_at in ((3, 4), (2, 7), (1, 10), (3, 0)):
            printed += job.launch(ranks, killed_at)
    finally:
        job.end()
    assert printed.count("resumed at iteration") == 3, printed[-4000:]
    assert "a step has 6 micro-batches from now on, 2 on each of 3 ranks" in printed
    found = json.loads(job.out.read_text())
    assert (found["steps"], found["micro_batches"]) == ([12, 12], 2)
    np.testing.assert_allclose(found["logged"], expected["logged"], rtol=1e-6)  # losses are added up in float32
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-11)
    ours, theirs = samples(job.out), samples(tmp_path / "alone")
    for epoch in (0, 1):
        assert sorted(chain.from_iterable(ours[epoch].values())) == list(range(SAMPLES))
        assert {step: sorted(ids) for step, ids in ours[epoch].items()} == {step: sorted(ids) for step, ids in theirs[epoch].items()}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"changes": True}, "gradient_accumulation_steps was 2 and has become 3 while training"),
        ({"has_engine": True}, "elastic='batch' is for a Trainer on DDP or FSDP2, and this one has an engine of DeepSpeed"),
        ({"loss": "own"}, "nothing says by how much the script's own loss (compute_loss, compute_loss_func) is divided"),
        ({"streamed": True, "arguments": {"max_steps": 4}}, "train_dataset is no DataLoader of a map-style dataset"),
    ],
)
def test_training_that_other_ranks_could_not_follow_is_refused(tmp_path: Path, run: dict[str, Any], why: str) -> None:
    job = Job(tmp_path, **run)
    try:
        assert why in (printed := job.launch(1)), printed[-4000:]
    finally:
        job.end()


@pytest.mark.parametrize("job", [{"samples": 22, "micro_batches": 1, "arguments": {"dataloader_drop_last": True}}], indirect=True)
def test_an_epoch_of_other_steps_is_refused(job: Job) -> None:
    """With 11 micro-batches an epoch, 6 to a step and drop_last, three ranks use 9 of them and two ranks 10."""
    job.launch(3, 2)
    assert "an epoch has 3 steps on 3 ranks and 4 on 1, as dataloader_drop_last=True leaves out other batches" in job.launch(1)


@pytest.mark.parametrize("job", [{"samples": 22, "micro_batches": 3, "arguments": {"dataloader_drop_last": True}}], indirect=True)
def test_an_epoch_that_would_be_over_for_other_ranks_is_refused(job: Job) -> None:
    """After three steps of its four, of which the third alone has a snapshot."""
    job.env |= {"GEMINI_INTERVAL": "3", "GEMINI_FAULTS": "step=4:rank=0:sigkill"}
    job.launch(1)
    del job.env["GEMINI_FAULTS"]
    printed = job.launch(3)
    assert "resumed at iteration 3" in printed, printed[-4000:]
    assert "an epoch has 4 steps on 1 ranks and 3 on 3, as dataloader_drop_last=True leaves out other batches" in printed


def test_micro_batches_that_ranks_cannot_share_are_refused_with_the_numbers_that_can(job: Job) -> None:
    job.launch(3, 2)
    assert "give a number of hosts with 1, 2, 3 or 6 ranks" in job.launch(4)


def loader_of(sampler: Any, **options: Any) -> Any:
    """The DataLoader that accelerate makes for rank 1 of 3."""
    made = DataLoader(list(range(12)), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    return data_loader.prepare_data_loader(made, num_processes=3, process_index=1, put_on_device=False, **options).base_dataloader


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: loader_of(RandomSampler(range(12)), use_seedable_sampler=True), ""),
        (lambda: loader_of(SequentialSampler(range(12))), ""),
        (lambda: loader_of(RandomSampler(range(12))), "has a RandomSampler as its sampler"),
        (lambda: loader_of(WeightedRandomSampler([1.0] * 12, 12)), "has a WeightedRandomSampler as its sampler"),
        (lambda: loader_of(SequentialSampler(range(12)), even_batches=False), "has split_batches=True or even_batches=False"),
        (lambda: DataLoader(list(range(12)), 2), "has a BatchSampler as its batch sampler"),
    ],
    ids=["shuffled", "in order", "without a seed", "weighted", "uneven", "whole"],
)
def test_batches_that_accelerate_deals_out_in_turn(make: Callable[[], Any], why: str) -> None:
    assert why_undivided(make(), "skip", 1, 3, in_turn=True).startswith(why)
    assert bool(why_undivided(make(), "skip", 1, 3, in_turn=True)) == bool(why)


@pytest.mark.parametrize(
    ("takes_tokens", "averages", "scaled", "is_own", "is_weighed"),
    [
        (True, True, None, False, False),  # the sum over all tokens of all ranks
        (False, True, None, True, False),  # the mean of the means
        (True, False, False, True, False),
        (True, False, None, False, True),  # the mean over ranks of the means over their tokens
        (True, True, False, False, True),
        (True, True, None, True, True),
        (False, True, True, True, True),
    ],
)
def test_losses_whose_weight_follows_from_the_number_of_ranks(
    takes_tokens: bool, averages: bool, scaled: bool | None, is_own: bool, is_weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemini_ft.transformers_state import why_weighed_by_ranks

    monkeypatch.setattr(transformers.Trainer, "loss_is_scaled_for_ga", None, raising=False)

    class Own(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *_: Any, **__: Any) -> None:
            pass

    trainer = object.__new__(Own if is_own else transformers.Trainer)
    trainer.args, trainer.compute_loss_func = SimpleNamespace(average_tokens_across_devices=averages), None
    trainer.model_accepts_loss_kwargs, trainer.loss_is_scaled_for_ga = takes_tokens, scaled
    assert bool(why_weighed_by_ranks(trainer)) == is_weighed


def test_what_a_trainer_before_519_does_not_ask_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides no loss of a model that takes the number of tokens."""
    from gemini_ft.transformers_state import why_weighed_by_ranks

    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga", raising=False)
    trainer = object.__new__(transformers.Trainer)
    trainer.args, trainer.compute_loss_func = SimpleNamespace(average_tokens_across_devices=False), None
    trainer.model_accepts_loss_kwargs, trainer.loss_is_scaled_for_ga = True, False
    assert "weighs samples by the number of ranks" in why_weighed_by_ranks(trainer)
