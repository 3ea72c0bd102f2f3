"""What is exported holds every bit of the live state, and tools without gemini-ft open it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_case import STEPS, Net, build, train
from export_lightning_case import from_files, until_crash
from rank_kit import World
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gemini_ft import cli
from gemini_ft.testing import assert_identical


class Job(World):
    """A plain loop that has done its steps and died; its agents linger."""

    def __init__(self, folder: Path, ranks: int, **options: Any) -> None:
        super().__init__(folder, ranks)
        self.store = (folder / "store").as_uri()
        self._options = {"storage": {"url": self.store, "every_steps": 2}} | options

    def train(self) -> Job:
        results = self.outcome(_train, str(self.folder), self._options, GEMINI_SECRET="theirs")
        assert not any(results), results
        return self

    @property
    def live(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / "live.pt", weights_only=False)
        return found


def _train(out: str, options: dict[str, Any]) -> None:
    train(out, **options)


@pytest.fixture(scope="module", params=["ddp", "fsdp2", "one rank"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("job"), 1 if request.param == "one rank" else 2, sharded=request.param == "fsdp2") as job:
        yield job.train()


def export(job: Job, form: str, to: Path | str, *more: str, step: str = "latest") -> int:
    return cli.main(["export", step, "--format", form, "--to", str(to), "--run-id", job.run, *more])


def load_dcp(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """As ``torch.distributed.checkpoint.load`` does it in one process, into empty tensors of the same shapes."""

    def empty(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, 77)
        return {key: empty(item) for key, item in value.items()} if isinstance(value, dict) else value

    found = empty(like)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


class TestDcp:
    def test_has_every_bit_under_the_names_of_get_state_dict(self, job: Job, tmp_path: Path) -> None:
        assert export(job, "dcp", tmp_path / "out") == 0
        assert_identical(load_dcp(tmp_path / "out", job.live), job.live)


class TestLightning:
    CRASHES = {"in an epoch": 9, "after validation": 3, "between epochs": 12}  # noqa: RUF012

    def test_a_plain_trainer_goes_on_to_the_same_bits(self, tmp_path: Path) -> None:
        with World(tmp_path, hosts=["host0", "host0"], TORCHELASTIC_RUN_ID="1", GROUP_RANK="0", LOCAL_WORLD_SIZE="2") as world:
            local = [{"LOCAL_RANK": str(rank)} for rank in range(2)]
            expected = world.start(until_crash, str(tmp_path), self.CRASHES, per_rank=local).results()
            assert isinstance(expected[0], dict), expected
            files = {}
            for number, name in enumerate(self.CRASHES):
                out = tmp_path / f"export-{number}"
                assert (
                    cli.main(
                        ["export", "latest", "--format", "lightning", "--to", str(out), "--run-id", world.run, "--stream", f"fit-{number}"]
                    )
                    == 0
                )
                files[name] = str(out / f"step-{self.CRASHES[name]}.ckpt")
            results = world.start(from_files, str(tmp_path), files, per_rank=local).results()
        for rank in range(2):
            assert isinstance(results[rank], dict), results
            for name, step in self.CRASHES.items():
                again, whole = results[rank][name], expected[rank]
                assert (name, again["state"], again["steps"]) == (name, whole["state"], whole["steps"])
                assert again["validated"] == [at for at in whole["validated"] if at > step]
