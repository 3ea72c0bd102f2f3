"""Killed anywhere, a Lightning training ends with every bit of an undisturbed run of plain Lightning.

Not only the weights: each loss, each batch, learning rate, validation loss and logged value is compared, those of
repeated steps too. See lightning_case.py for what the training does. Several trainings share a job: one script that
fits several times, and comes back to the fit that was killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch

from gemini_ft.testing import EmulatedHosts

CASE = Path(__file__).parents[1] / "kit" / "lightning_case.py"
pytestmark = [pytest.mark.timeout(400), pytest.mark.preloaded("lightning")]

# By number of ranks: what plain Lightning does undisturbed.
BASELINES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "plain": {},
        "accumulate": {"trainer": {"accumulate_grad_batches": 2}},
        "own-buffers": {"strategy_options": {"broadcast_buffers": False}},
        "stream": {"stream": True},
        "workers": {"loader": {"num_workers": 2}},
        "persistent-workers": {"loader": {"num_workers": 2, "persistent_workers": True}},
        "two-loaders": {"two_loaders": True},
        "iterating": {"module": "iterating"},
        "reloading": {"module": "reloading", "trainer": {"reload_dataloaders_every_n_epochs": 2}},
        "averaging": {"callbacks": ["averaging"]},
        "accumulation-schedule": {"callbacks": ["accumulation"]},
        "max-steps": {"trainer": {"max_steps": 14, "max_epochs": -1}},
        "plateau": {"plateau": True, "sync": True},
        "manual": {"manual": True},
        "from-file": {"ckpt_path": "plain/root/diary/diary/checkpoints/step=3.ckpt"},
        "sharded": {"strategy": "model_parallel", "sharded": True},
        "fabric": {"fabric": True},
        "fabric-workers": {"fabric": True, "asked": True, "loader": {"num_workers": 2}},
    },
    # From three ranks on it matters in which bucket DDP adds up a gradient.
    4: {
        "plain": {},
        "sharded": {"strategy": "model_parallel", "sharded": True},
        "fabric": {"fabric": True},
    },
}

if not hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging"):  # Lightning 2.5
    del BASELINES[2]["averaging"]


@dataclass
class Scenario:
    """What is trained, and where which rank dies ("rank:event:number", see lightning_case.Diary)."""

    kills: list[str]
    baseline: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """Scenarios that share a script."""

    scenarios: dict[str, Scenario]
    ranks: int = 2
    launcher: tuple[str, ...] = ("gemini_ft.cli.main", "run")
    lag: float = 0.0  # seconds; more than none: on a device whose copies lag behind (lagging_device.py), more than a step takes


JOBS = {
    "anywhere": Job(
        {
            "step": Scenario(["1:step:8"]),
            "rank-0-after-an-update": Scenario(["0:update:9"]),
            "epoch-end": Scenario(["0:epoch_end:1"]),
        }
    ),
    "anywhere-else": Job(
        {
            "validation": Scenario(["0:validation:8"]),
            "epoch-start": Scenario(["1:epoch_start:1"]),
            "first-step-of-an-epoch": Scenario(["1:step:12"]),
            "pytorch-lightning": Scenario(["1:step:8"], options={"package": "pytorch_lightning"}),
        }
    ),
    "torchrun": Job({"plain-torchrun": Scenario(["1:step:8"])}, launcher=("torch.distributed.run",)),
    "often": Job({"five-kills": Scenario(["0:step:3", "1:update:7", "0:validation:11", "1:step:13", "1:epoch_end:2"])}),
    "anyhow": Job(
        {
            "accumulate": Scenario(["1:step:9", "0:update:13"], "accumulate"),
            "own-buffers": Scenario(["1:step:8"], "own-buffers"),
        }
    ),
    "anyhow-else": Job(
        {
            "plateau": Scenario(["1:step:8"], "plateau"),
            "manual": Scenario(["0:update:9"], "manual"),
        }
    ),
    "however": Job(
        {
            "max-steps": Scenario(["0:step:10"], "max-steps"),
            "from-file": Scenario(["1:step:8"], "from-file"),
            "averaging": Scenario(["1:step:8"], "averaging"),
            "accumulation-schedule": Scenario(["0:step:10"], "accumulation-schedule"),
        }
    ),
    "any-data": Job({"stream": Scenario(["1:step:4", "0:step:14"], "stream")}),
    "workers": Job({"workers": Scenario(["1:step:3", "0:step:10"], "workers")}),
    "any-way": Job(
        {
            "fabric": Scenario(["1:step:8", "0:update:13"], "fabric"),
            "sharded": Scenario(["1:step:8"], "sharded", {"strategy": "gemini_fsdp2"}),
        }
    ),
    "more-data": Job(
        {
            "persistent-workers": Scenario(["1:step:9"], "persistent-workers"),
            "two-loaders": Scenario(["0:step:10"], "two-loaders"),
            "iterating": Scenario(["1:step:8"], "iterating"),
            "reloading": Scenario(["1:step:9"], "reloading"),
            "fabric-workers": Scenario(["1:step:9"], "fabric-workers"),
        }
    ),
    "on-a-device": Job(
        {
            "device": Scenario(["1:step:8", "0:update:13"]),
        },
        lag=0.05,
    ),
    "otherwise-on-a-device": Job(
        {
            "device-fabric": Scenario(["0:update:9"], "fabric"),
            "device-sharded": Scenario(["1:step:8"], "sharded", {"strategy": "gemini_fsdp2"}),
        },
        lag=0.05,
    ),
    "four-ranks": Job(
        {
            "four-ranks": Scenario(["2:step:4", "0:update:7"]),
            "four-ranks-sharded": Scenario(["3:step:5"], "sharded", {"strategy": "gemini_fsdp2"}),
            "four-ranks-fabric": Scenario(["1:step:5"], "fabric"),
        },
        ranks=4,
    ),
}


def launch(folder: Path, job: Job, runs: list[dict[str, Any]]) -> None:
    """Train; what the launcher and the ranks say is in ``folder``/output."""
    restarts = sum(len(run.get("kills", [])) for run in runs)
    command = [sys.executable, "-m", *job.launcher, "--standalone", f"--nproc-per-node={job.ranks}", f"--max-restarts={restarts}"]
    command += [str(CASE), json.dumps({"out": str(folder), "runs": runs, "lag": job.lag})]
    # Steps take milliseconds here, less than a commit does: wait for it. The fits that are over are resumed, and over,
    # again after every kill of a later one; that is no crash loop.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GEMINI_RUN_ID": f"{os.getpid()}-{folder.name}", "GEMINI_LINGER": "120"}
    environment |= {"GEMINI_ON_LATE": "wait", "GEMINI_MAX_RETRIES": "20"}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            status = process.wait(300)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            raise
    assert status == 0, (folder / "output").read_text()[-6000:]


class Runs:
    """Folders with the diaries of all runs of a job; each job runs once, also if it fails.

    Args:
        factory: of the folders.
        wanted: the baselines, by number of ranks, with which something is to be compared.
    """

    def __init__(self, factory: pytest.TempPathFactory, wanted: set[tuple[int, str]]) -> None:
        self._factory, self._wanted = factory, wanted
        self._folders: dict[str, Path | None] = {}

    def baseline(self, ranks: int) -> Path:
        return self._once(f"undisturbed-{ranks}", functools.partial(self._baseline, ranks))

    def job(self, name: str) -> Path:
        return self._once(name, functools.partial(self._job, name))

    def _once(self, name: str, run: Callable[[], Path]) -> Path:
        if name not in self._folders:
            self._folders[name] = None
            self._folders[name] = run()
        folder = self._folders[name]
        assert folder is not None, f"job {name} has failed already; see the test that started it"
        return folder

    def _baseline(self, ranks: int) -> Path:
        folder = self._factory.mktemp(f"undisturbed-{ranks}")
        runs = [{"strategy": "ddp"} | run | {"name": name} for name, run in BASELINES[ranks].items() if (ranks, name) in self._wanted]
        launch(folder, Job({}, ranks), [self._located(run, folder) for run in runs])
        return folder

    def _job(self, name: str) -> Path:
        job, folder = JOBS[name], self._factory.mktemp(name)
        undisturbed = self.baseline(job.ranks)
        runs = []
        for scenario_name, scenario in job.scenarios.items():
            run = BASELINES[job.ranks][scenario.baseline] | {"strategy": "gemini"} | scenario.options
            runs.append(self._located(run | {"name": scenario_name, "kills": scenario.kills}, undisturbed))
        launch(folder, job, runs)
        return folder

    @staticmethod
    def _located(run: dict[str, Any], undisturbed: Path) -> dict[str, Any]:
        return run | {"ckpt_path": str(undisturbed / run["ckpt_path"])} if "ckpt_path" in run else run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """For the tests that have been selected."""
    wanted = {(2, "plain")}  # which also writes the file that another one begins with
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == test_ends_with_the_bits_of_an_undisturbed_run.__name__:
            job = JOBS[item.callspec.params["job"]]
            wanted |= {(job.ranks, scenario.baseline) for scenario in job.scenarios.values()}
    return Runs(tmp_path_factory, wanted)


@dataclass
class Diary:
    """What one rank wrote down."""

    values: dict[str, Any] = field(default_factory=dict)
    lives: list[tuple[int, int]] = field(default_factory=list)  # first and last step


def read(folder: Path, rank: int) -> Diary:
    """All that a rank has noted; what it noted more than once must have been the same each time."""
    diary, steps = Diary(), dict[int, list[int]]()
    for line in (folder / f"rank-{rank}").read_text().splitlines():
        life, key, value = json.loads(line)
        assert diary.values.setdefault(key, value) == value, f"{key} came out differently when it was repeated in life {life}"
        if key.startswith("step "):
            steps.setdefault(life, []).append(int(key.removeprefix("step ")))
    diary.lives = [(min(seen), max(seen)) for _, seen in sorted(steps.items())]
    return diary


# Two ranks under `gemini run` do the same as those; of kinds of training and data the suite has the ones that differ most.
SOAK = {"anywhere-else", "torchrun", "often", "four-ranks", "however", "more-data", "otherwise-on-a-device"}


def test_plain_lightning_trains_undisturbed(runs: Runs) -> None:
    assert {path.name for path in runs.baseline(2).iterdir() if (path / "rank-0").exists()} >= {"plain"}


@pytest.mark.parametrize(
    ("job", "name"),
    [pytest.param(job, name, marks=[pytest.mark.soak] * (job in SOAK)) for job in JOBS for name in JOBS[job].scenarios],
)
def test_ends_with_the_bits_of_an_undisturbed_run(job: str, name: str, runs: Runs) -> None:
    scenario, ranks = JOBS[job].scenarios[name], JOBS[job].ranks
    folder, undisturbed = runs.job(job) / name, runs.baseline(ranks) / scenario.baseline

    assert {path.name.removeprefix("killed-") for path in folder.glob("killed-*")} == set(scenario.kills)
    trainer: dict[str, int] = BASELINES[ranks][scenario.baseline].get("trainer", {})
    in_flight = 3 if JOBS[job].lag else 2  # on a device the host is ahead of the copies, by a step
    most_lost = in_flight * trainer.get("accumulate_grad_batches", 1)
    for rank in range(ranks):
        expected, got = read(undisturbed, rank), read(folder, rank)
        assert got.values == expected.values
        assert len(got.lives) > len(scenario.kills)
        for (_, reached), (again, _) in zip(got.lives, got.lives[1:], strict=False):
            assert again >= reached + 1 - most_lost, f"step {reached} was reached, but the next life began with step {again}"


GPT = str(CASE.parents[2] / "examples" / "train_gpt.py")


@pytest.mark.soak
def test_the_end_of_rank_0_alone_is_not_the_end_of_the_job(tmp_path: Path) -> None:
    """Its worker is told to end, as by a scheduler that takes one host back; then its launcher is killed, and nothing else."""
    steps = 60
    program = [GPT, "--quiet", f"--steps={steps}", "--width=16", "--layers=1", "--batch=1", f"--out={tmp_path / 'final.ckpt'}"]
    env = {"GEMINI_ON_LATE": "wait", "GEMINI_HANG_TIMEOUT": "5"}  # rank 0 tells the others in the middle of their own collectives
    with EmulatedHosts(2, program, tmp_path, env=env) as job:

        def rank_0(step: int, not_in: int = 0) -> dict[str, Any] | None:
            """Its last arrival, if that was in another process, and the job has come to this step."""
            reached = max((event["iteration"] for event in job.events("step")), default=0)
            arrivals = [event for event in job.events("joined") if event["rank"] == 0]
            return arrivals[-1] if reached >= step and arrivals[-1]["pid"] != not_in else None

        told = job.wait_for(lambda: rank_0(10))["pid"]
        os.kill(told, signal.SIGTERM)
        os.kill(job.launcher_pid(job.wait_for(lambda: rank_0(30, not_in=told))["host"]), signal.SIGKILL)
        job.add()
        job.finish(120)
        resumed = [event["iteration"] for event in job.events("resumed")]
    assert torch.load(tmp_path / "final.ckpt", weights_only=False)["global_step"] == steps
    assert min(resumed) >= 9
    assert min(resumed[-2:]) >= 29
