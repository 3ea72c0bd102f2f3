"""What a script saves by torch.distributed.checkpoint is kept in memory, goes on after a kill, and is read back bit for bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from agent_kit import eventually
from export_case import load_again
from rank_kit import World
from writer_case import KINDS, STEPS, go_on, refusals, run_page, write_all

from gemini_ft.cli import main as cli
from gemini_ft.dcp import GeminiReader
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing import assert_identical


class Job(World):
    """A job of two ranks that saves every second step; its agents linger."""

    def __init__(self, folder: Path, *ways: str, **options: Any) -> None:
        super().__init__(folder, 2, GEMINI_SECRET="theirs")
        self.store = (folder / "store").as_uri()
        self.finish(write_all, str(folder), ways, options)

    def file(self, kind: str, way: str) -> str:
        return str(self.folder / f"{kind}-{way}.pt")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("killed")
    storage = {"url": (folder / "store").as_uri(), "every_steps": 3}
    with Job(folder, "killed", storage=storage) as job:
        store = open_storage(job.store)
        eventually(lambda: [info.iteration for info in list_checkpoints(store)].count(STEPS) == len(KINDS), "the uploads")
        yield job


def test_a_killed_job_comes_to_the_same_bits_and_more_ranks_go_on(killed: Job, tmp_path: Path) -> None:
    assert killed.restarts == 2  # one for each kind
    with Job(tmp_path, "plain", "undisturbed") as job:
        assert job.restarts == 0
        job.hosts.append("host2")
        assert job.outcome(go_on) == 3 * [(STEPS, STEPS + 1)]
    for kind in KINDS:
        plain = torch.load(job.file(kind, "plain"), weights_only=False)
        assert_identical(torch.load(job.file(kind, "undisturbed"), weights_only=False), plain)
        assert_identical(torch.load(killed.file(kind, "killed"), weights_only=False), plain)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_saved_fills_any_number_of_ranks_and_any_sharding(killed: Job, ranks: int, tmp_path: Path) -> None:
    sources, live = {}, {}
    for kind in KINDS:
        for place, source in {"memory": {"source": killed.run}, "storage": {"source": killed.store, "step": STEPS}}.items():
            sources[f"written {kind}, {place}"] = source | {"stream": kind}
            live[f"written {kind}, {place}"] = killed.file(kind, "killed")
    with World(tmp_path, ranks) as world:
        results = world.outcome(load_again, sources, live)
    for result in results:
        assert isinstance(result, dict), result
        assert len(result) == 8
        assert not any(result.values()), result


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_was_saved_is_there_under_its_keys(killed: Job, kind: str, tmp_path: Path) -> None:
    """Also what only one rank had, as positions of loaders are; and by `gemini export`, which needs no gemini-ft to read."""
    which = ["--run-id", killed.run, "--stream", kind]
    assert cli.main(["export", "latest", "--format", "dcp", "--to", str(tmp_path / "out"), *which]) == 0
    beside = {"step": STEPS, "of rank 0": torch.tensor(0), "of rank 1": torch.tensor(1), "note 0": "kept", "note 1": "kept"}
    for reader in (GeminiReader(killed.run, stream=kind), GeminiReader(killed.store, stream=kind), dcp.FileSystemReader(tmp_path / "out")):
        found = {key: torch.tensor(7) if isinstance(value, torch.Tensor) else None for key, value in beside.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(found, storage_reader=reader, no_dist=True)
        assert_identical(found, beside)


def test_what_cannot_be_saved_is_refused_by_name_and_pauses_are_no_hangs(tmp_path: Path) -> None:
    patience = {"GEMINI_HANG_TIMEOUT": "0.2", "GEMINI_START_TIMEOUT": "0.2"}
    with World(tmp_path) as world:
        [said] = world.outcome(refusals, **patience)
    assert isinstance(said, dict), said
    expected = {
        "no step": "which step is it? async_save(..., storage_writer=writer.at(step))",
        "not greater": f"step 2 cannot be saved: run {world.run!r} has step 2 already",
        "zero": "steps count from 1",
        "two steps": "step 3 was staged by writer.at(3), and checkpoint_id=4 was given",
        "a path": "checkpoint_id='checkpoints/step-5': must be the number of a step",
        "stager": "leave out async_stager",
        "another process": "GeminiWriter cannot go to another process",
        "an option": "GeminiWriter sets hang_timeout itself",
        "sparse": "state dict.w has the layout torch.sparse_coo; only dense tensors can be captured",
    }
    assert said.keys() == expected.keys()
    for what, text in expected.items():
        assert text in said[what], (what, said[what])


def test_the_example_of_the_page_goes_on_from_its_last_save(tmp_path: Path) -> None:
    """From memory after a failure, and from storage when it is run once more, to go further."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    [block] = re.findall(r"^```python\n([^`]*GeminiWriter\(\)[^`]*)^```", page, re.MULTILINE)
    with World(tmp_path, GEMINI_STORAGE=(tmp_path / "store").as_uri()) as world:
        assert world.outcome(run_page, block, 300, 250) == [list(range(1, 251))]
        assert world.outcome(run_page, block, 300, 300) == [list(range(201, 301))]
        assert world.outcome(run_page, block, 400, 400) == [list(range(301, 401))]
