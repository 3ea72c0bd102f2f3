"""What a script saves by torch.distributed.checkpoint is kept in memory, goes on after a kill, and is read back bit for bit."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from agent_kit import end_agent, eventually
from export_case import load_again
from rank_kit import World
from torch.distributed.checkpoint.api import CheckpointException
from writer_case import KINDS, STEPS, go_on, odd_keys, refusals, run_page, write_all

from gemini_ft.cli import main as cli
from gemini_ft.config import GeminiConfig, load_config
from gemini_ft.dcp import GeminiReader, GeminiWriter
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.events import read_events
from gemini_ft.launch.failures import own_failure
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing import assert_identical
from gemini_ft.worker.attempt import OverError, OwnAttempt
from gemini_ft.worker.drain import DrainedError
from gemini_ft.worker.in_place import once


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
        found = job.outcome(go_on)
    assert [each[:2] for each in found] == 3 * [(STEPS, STEPS + 1)]
    newest, read, refusal = found[0][2]  # where a step was begun that was not committed
    assert (newest, read) == (1, 1)
    assert "step 2 cannot be saved: step 2 was begun before it" in refusal
    for each in found:  # a tensor that only one rank has, where ranks are said to have the same
        assert "state dict.more is absent on ranks [0, 1]" in each[3], each
    for kind in KINDS:
        plain = torch.load(job.file(kind, "plain"), weights_only=False)
        assert_identical(torch.load(job.file(kind, "undisturbed"), weights_only=False), plain)
        assert_identical(torch.load(killed.file(kind, "killed"), weights_only=False), plain)


@pytest.mark.parametrize("ranks", [1, 3])
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
    beside = {"step": STEPS, "note 0": "kept", "note 1": "kept"}
    if kind == "fsdp2":
        beside |= {"of rank 0": torch.tensor(0), "of rank 1": torch.tensor(1)}
    for reader in (GeminiReader(killed.run, stream=kind), GeminiReader(killed.store, stream=kind), dcp.FileSystemReader(tmp_path / "out")):
        found = {key: torch.tensor(7) if isinstance(value, torch.Tensor) else None for key, value in beside.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(found, storage_reader=reader, no_dist=True)
        assert_identical(found, beside)


def test_ddp_whose_ranks_are_not_said_to_be_alike_goes_on_with_the_statistics_of_rank_0(tmp_path: Path) -> None:
    """As an undisturbed job does, in which DDP spreads them before each step."""
    with World(tmp_path, 2, GEMINI_SECRET="theirs") as job:
        job.finish(write_all, str(tmp_path), ("plain", "killed"), {}, ["own"])
        assert job.restarts == 1
    plain, killed = (torch.load(tmp_path / f"own-{way}.pt", weights_only=False) for way in ("plain", "killed"))
    assert_identical(killed, plain)


def test_what_only_some_ranks_have_is_given_up_or_refused_and_what_was_saved_stays(tmp_path: Path) -> None:
    with World(tmp_path, 2) as world:
        first, other = world.outcome(odd_keys)
    assert first["said"].pop("step").startswith("step 2 was given up: ")
    for found in (first, other):
        assert (found["newest"], found["w"]) == (3, [3.0, 3.0, 3.0])
        assert found["said"].keys() == {"one", "turned", "both"}
        assert "state dict.part is placed on a mesh of (1,) among 2 ranks" in found["said"]["one"]
        assert "state dict.part is placed on a mesh whose ranks are not in their own order (1 0)" in found["said"]["turned"]
        assert "key:part invalid fill" in found["said"]["both"]


def test_what_cannot_be_saved_is_refused_by_name_and_pauses_are_no_hangs(tmp_path: Path) -> None:
    """Uploads follow the script's steps, not the number of saves: the first one at or after each multiple is uploaded."""
    patience = {"GEMINI_HANG_TIMEOUT": "0.2", "GEMINI_START_TIMEOUT": "0.2"}
    with World(tmp_path) as world:
        [found] = world.outcome(refusals, (tmp_path / "store").as_uri(), **patience)
    assert isinstance(found, tuple), found
    said, stored = found
    assert sorted(stored) == [6, 10]
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


def test_an_option_of_the_traffic_leaves_the_others_as_the_writer_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int | None, str] = {}
    cases: list[dict[str, Any]] = [{}, {"traffic": {"lanes": 2}}, {"traffic": {"lanes": 3, "when": "idle"}}]

    def load(given: dict[str, Any]) -> GeminiConfig:
        config = load_config(given, {})
        found[config.traffic.lanes] = config.traffic.when
        raise ConfigError("enough")

    monkeypatch.setattr("gemini_ft.dcp.load_config", load)
    for options in cases:
        with pytest.raises(ConfigError, match="enough"):
            GeminiWriter(**options)
    assert found == {None: "ready", 2: "ready", 3: "idle"}


SAVES = """
import os, signal, sys
import torch
import torch.distributed.checkpoint as dcp
import gemini_ft
from gemini_ft.dcp import GeminiWriter

torch.set_num_threads(1)
gemini_ft.init_process_group("gloo")
writer = GeminiWriter()
for step in map(int, sys.argv[2:]):
    if step == 3 and os.environ["RANK"] == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGUSR1)  # it is told to leave
    dcp.save({"w": torch.ones(3)}, storage_writer=writer.at(step))
"""


@pytest.mark.parametrize(("steps", "status", "said"), [((1, 2, 2), 70, "step 2 cannot be saved"), ((1, 2, 3, 4), 85, "drained")])
def test_a_refused_save_is_final_and_a_drained_rank_leaves_by_its_save(
    tmp_path: Path, steps: tuple[int, ...], status: int, said: str
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    run = f"saves-{os.getpid()}-{status}"
    own = {"GEMINI_RUN_ID": run, "GEMINI_HOST_ID": "here", "GEMINI_EVENTS": str(tmp_path / "events"), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["saves.py", "1", *map(str, steps)]
    try:
        done = subprocess.run(command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        end_agent(run, "here")
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    assert said in output
    assert {event["incarnation"] for event in read_events(tmp_path / "events") if event["event"] == "joined"} == {1}


class Wrapped(dcp.FileSystemWriter):
    """Fails in the middle of a save."""

    def __init__(self, folder: Path, error: BaseException) -> None:
        super().__init__(folder)
        self.error = error

    def write_data(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(("error", "ends"), [(OverError(), False), (DrainedError(), True), (StateError("no"), True), (OSError("x"), False)])
def test_an_attempt_in_place_ends_by_what_a_save_has_wrapped(tmp_path: Path, error: BaseException, ends: bool) -> None:
    def train() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"w": torch.ones(1)}, storage_writer=Wrapped(tmp_path, error), no_dist=True)

    launcher, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: object
    with launcher, worker:
        try:
            found = once(train, OwnAttempt(worker))
        except BaseException as raised:
            found = raised
    assert found is error if ends else found == []


def test_what_each_rank_is_told_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``dcp.save`` on many ranks, which sends the failures to all of them."""
    sent = pickle.loads(pickle.dumps(DrainedError()))
    assert (type(sent), sent.code) == (DrainedError, 85)
    wrapped = CheckpointException("write", {1: (sent, StackSummary())})
    monkeypatch.setenv("RANK", "1")
    assert own_failure(wrapped) is sent
    monkeypatch.setenv("RANK", "0")
    assert "another rank has failed: rank 1: DrainedError: 85" in str(own_failure(wrapped))
