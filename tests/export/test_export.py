"""What is exported holds every bit of the live state, and tools without gemini-ft open it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import s3_server
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from agent_kit import agent_pid, eventually
from export_case import STEPS, Net, load_again, train
from export_lightning_case import from_files, until_crash
from rank_kit import World
from safetensors.torch import load_file, load_model
from session_case import loop
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gemini_ft.agent import lifecycle
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.cli import main as cli
from gemini_ft.core.layout import PER_RANK, TensorSpec, build_layout
from gemini_ft.core.versions import Version
from gemini_ft.dcp import GeminiReader
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.export import whole_tensors
from gemini_ft.export.source import StorageShard
from gemini_ft.export.whole_tensors import WholeTensors, join_parts
from gemini_ft.state.survey import survey
from gemini_ft.storage.checkpoints import FORMAT_VERSION, body_checksum, checked, list_checkpoints
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.shard import StoredShard
from gemini_ft.testing import assert_identical


class Job(World):
    """A plain loop that has done its steps and died; its agents linger, and its last step is in storage too."""

    def __init__(self, folder: Path, ranks: int, **options: Any) -> None:
        super().__init__(folder, ranks)
        self.store = (folder / "store").as_uri()
        self._options = {"storage": {"url": self.store, "every_steps": STEPS}} | options

    def train(self) -> Job:
        results = self.outcome(_train, str(self.folder), self._options, GEMINI_SECRET="theirs")
        assert not any(results), results
        eventually(lambda: (self.folder / "store").exists() and list_checkpoints(open_storage(self.store)), "the upload")
        return self

    @property
    def live(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / "live.pt", weights_only=False)
        return found


def _train(out: str, options: dict[str, Any]) -> None:
    train(out, **options)


KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"ranks": 2},
    "fsdp2": {"ranks": 2, "sharded": True, "replicas": 1},
    "odd": {"ranks": 1, "odd": True},
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """All at once: what they do takes less time than their start."""
    found = {name: Job(tmp_path_factory.mktemp(name), **options) for name, options in KINDS.items()}
    try:
        yield {name: job.train() for name, job in found.items()}
    finally:
        for job in found.values():
            job.__exit__(None, None, None)


@pytest.fixture
def ddp(jobs: dict[str, Job]) -> Job:
    return jobs["ddp"]


def export(job: World, form: str, to: Path | str, *more: str, step: str = "latest") -> int:
    return cli.main(["export", step, "--format", form, "--to", str(to), "--run-id", job.run, *more])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    return {key: emptied(item) for key, item in value.items()} if isinstance(value, dict) else value


def load_dcp(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    return load(dcp.FileSystemReader(folder), like)


def load(reader: dcp.StorageReader, like: dict[str, Any]) -> dict[str, Any]:
    """As ``torch.distributed.checkpoint.load`` does it in one process, into tensors of the same shapes."""
    found: dict[str, Any] = emptied(like)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def damaged_copy(ddp: Job, stored: Path) -> Path:
    """A copy of the job's storage at ``stored``, with one bit of rank 1's shard flipped."""
    subprocess.run(["cp", "-r", ddp.folder / "store", stored], check=True)
    (shard,) = stored.glob("*/*/*/shard-00001.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    return stored


class TestBits:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("place", ["memory", "storage"])
    def test_dcp_under_the_names_of_get_state_dict(self, jobs: dict[str, Job], kind: str, place: str, tmp_path: Path) -> None:
        job = jobs[kind]
        source = ["--from", job.store, "--trust-pickle"] if place == "storage" else []
        assert export(job, "dcp", tmp_path / "out", *source) == 0
        assert_identical(load_dcp(tmp_path / "out", job.live), job.live)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_safetensors_with_tied_tensors_once(self, jobs: dict[str, Job], kind: str, tmp_path: Path) -> None:
        job = jobs[kind]
        assert export(job, "safetensors", tmp_path, step=str(STEPS)) == 0
        file, live = tmp_path / "model.safetensors", job.live["model"]
        assert_identical(load_file(file), {name: tensor for name, tensor in live.items() if name != "twin.weight"})
        assert load_file(file)["frozen"].dtype == torch.bfloat16
        net = Net()
        assert load_model(net, file) == (set(), [])
        assert_identical(dict(net.state_dict()), live)
        assert export(job, "safetensors", tmp_path / "stored", "--from", job.store) == 0  # no pickle is looked at
        assert (tmp_path / "stored" / "model.safetensors").read_bytes() == file.read_bytes()

    def test_come_from_other_hosts_too(self, jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = jobs["fsdp2"]
        monkeypatch.setattr(lifecycle, "addresses", lambda: [lifecycle.socket_name(job.run, "host1")])
        assert export(job, "dcp", tmp_path / "out") == 0
        assert_identical(load_dcp(tmp_path / "out", job.live), job.live)

    def test_of_a_running_job_are_of_one_step(self, tmp_path: Path) -> None:
        with World(tmp_path, 2) as world:
            attempt = world.start(_loop, 10**6, {"pause": 0.005, "during": partial(_is_over, tmp_path / "over")})
            eventually(lambda: export(world, "dcp", tmp_path / "first") == 0, "the first commit")
            for number in range(3):
                assert export(world, "dcp", tmp_path / str(number)) == 0
            first = GeminiReader(world.run)
            names = [name for name in first.read_metadata().state_dict_metadata if name.endswith(".step")]
            eventually(lambda: Another(first, world.run).find() != first.version, "a later commit")
            found = load(Another(first, world.run), {name: torch.zeros(()) for name in names})
            assert {float(step) for step in found.values()} == {first.version.iteration if first.version is not None else 0}
            first.reset()
            before = Another(first, world.run).find()
            eventually(lambda: Another(first, world.run).find() != before, "a commit after the exports")
            (tmp_path / "over").touch()
            attempt.results()
        for number in range(3):
            names = dcp.FileSystemReader(tmp_path / str(number)).read_metadata().state_dict_metadata
            steps = {name: torch.zeros(()) for name in names if name.endswith(".step")}
            found = load_dcp(tmp_path / str(number), steps)
            assert len(found) == 4
            assert len({float(step) for step in found.values()}) == 1


class Another(GeminiReader):
    """The reader of another rank than the first, which has found its step at another time."""

    def __init__(self, first: GeminiReader, run: str) -> None:
        super().__init__(run)
        self.first = first

    def find(self) -> Version | None:
        self.read_metadata()
        try:
            return self.version
        finally:
            self.reset()

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = self.first.prepare_local_plan(plans[0])
        assert found.storage_data != plans[0].storage_data
        return super().prepare_global_plan([found, *plans])[1:]


def _is_over(path: Path, *_: Any) -> bool:
    """Whether a loop is to end, as any of its ranks finds."""
    found = torch.tensor(float(path.exists()))
    dist.all_reduce(found)
    return bool(found)


def _loop(steps: int, options: dict[str, Any]) -> Any:
    return loop(steps, **options)


@contextlib.contextmanager
def damaged(job: Job, *hosts: str) -> Iterator[None]:
    """A bit of rank 1's newest shard is flipped in the memory of these hosts' agents."""
    flipped: dict[int, SlotMemory] = {}  # by inode: a mapping has a descriptor of its own beside the agent's
    for host in hosts:
        folder = Path(f"/proc/{agent_pid(job.run, host)}/fd")
        for entry in folder.iterdir():
            link = ""
            with contextlib.suppress(FileNotFoundError):  # a connection that has just ended
                link = os.readlink(entry)
            if "memfd:gemini:main:1" not in link:
                continue
            slot = SlotMemory.adopt(os.open(entry, os.O_RDWR))
            if slot.version is not None and slot.version.iteration == STEPS and slot.inode not in flipped:
                slot.data(0, 1)[0] ^= 1
                flipped[slot.inode] = slot
            else:
                slot.close()
    assert len(flipped) == len(hosts)
    try:
        yield
    finally:
        for slot in flipped.values():
            slot.data(0, 1)[0] ^= 1
            slot.close()


class TestReader:
    """``torch.distributed.checkpoint.load`` out of memory and storage, without an export."""

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_fills_any_number_of_ranks_and_any_sharding(self, jobs: dict[str, Job], ranks: int, tmp_path: Path) -> None:
        places = {"memory": lambda job: {"source": job.run}, "storage": lambda job: {"source": job.store, "step": STEPS}}
        sources = {f"{kind}, {place}": (jobs[kind], source(jobs[kind])) for kind in ("ddp", "fsdp2") for place, source in places.items()}
        with World(tmp_path, ranks) as world:
            live = {name: str(job.folder / "live.pt") for name, (job, _) in sources.items()}
            results = world.outcome(load_again, {name: arguments for name, (_, arguments) in sources.items()}, live)
        for result in results:
            assert isinstance(result, dict), result
            assert len(result) == 8
            assert not any(result.values()), result

    def test_reads_what_is_asked_for(self, ddp: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []

        def chunks(shard: StorageShard, live: Any, start: int, stop: int) -> Any:
            read.append(stop - start)
            return whole(shard, live, start, stop)

        whole = StorageShard.chunks
        monkeypatch.setattr(StorageShard, "chunks", chunks)
        some = {"model": {"last.bias": ddp.live["model"]["last.bias"]}}
        assert_identical(load(GeminiReader(ddp.store, optim=None), some), some)
        assert sum(read) == 3 * 4

    def test_other_values_come_too(self, jobs: dict[str, Job]) -> None:
        job = jobs["odd"]
        like = {"optim": {"param_groups": copy.deepcopy(job.live["optim"]["param_groups"])}}
        like["optim"]["param_groups"][1] |= {"odd": None, "lr": 0.0}
        found = load(GeminiReader(job.store, trust_pickle=True), like)
        assert found["optim"]["param_groups"] == job.live["optim"]["param_groups"]
        with pytest.raises(CheckpointException, match="is a pickled object"):
            load(GeminiReader(job.store), like)

    def test_torch_checkpointing_loads_what_the_page_says_how_to_write(
        self, ddp: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch_checkpointing", reason="needs torch_checkpointing: pip install torch_checkpointing")
        page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
        [block] = re.findall(r"^```python\n([^`]*torch_checkpointing[^`]*)^```", page, re.MULTILINE)
        monkeypatch.chdir(tmp_path)
        found = {"model": SimpleNamespace(state_dict=lambda: emptied(ddp.live["model"]))}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            exec(block.replace('"run-7"', repr(ddp.store)), found)
        manager = found["CheckpointManager"](
            found["CheckpointManager"].Config(items=found["items"], save=found["SyncCheckpointSaverConfig"]())
        )
        loaded = manager.load("exported/step-7", into={"model": emptied(ddp.live["model"])})
        manager.close()
        assert_identical(dict(loaded["model"]), ddp.live["model"])

    @pytest.mark.parametrize(("rank", "step", "warns"), [("0", None, False), ("1", None, True), ("1", STEPS, False)])
    def test_a_rank_that_looks_for_the_newest_step_by_itself_says_so(
        self, ddp: Job, rank: str, step: int | None, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Other ranks of a script that loads before it makes its process group may find another one, as the job goes on."""
        monkeypatch.setenv("RANK", rank)
        load(GeminiReader(ddp.store, step=step), ddp.live)
        assert (f"rank 1 reads iteration {STEPS}" in caplog.text) == warns

    def test_damage_in_memory_leads_to_the_next_copy(self, ddp: Job) -> None:
        with damaged(ddp, "host0"):
            assert_identical(load(GeminiReader(ddp.run), ddp.live), ddp.live)
        with damaged(ddp, "host0", "host1"), pytest.raises(CheckpointException, match=r"rank 1's shard of iteration 3 .* cannot be read"):
            load(GeminiReader(ddp.run), ddp.live)
        assert_identical(load(GeminiReader(ddp.run), ddp.live), ddp.live)

    def test_what_cannot_be_read_is_said(self, ddp: Job, tmp_path: Path) -> None:
        stored = damaged_copy(ddp, tmp_path / "store")
        older = tmp_path / "older"
        subprocess.run(["cp", "-r", stored, older], check=True)
        (manifest,) = older.glob("*/*/*/manifest.json")
        body = checked(manifest.read_bytes()) | {"format": 4}
        manifest.write_text(json.dumps(body | {"xxh3": body_checksum(body)}))
        for reader, said in {
            GeminiReader(stored.as_uri()): r"shard-00001.safetensors: bytes 0 to \d+ of its data is damaged",
            GeminiReader(
                older.as_uri()
            ): f"manifest.json has format 4, this gemini_ft reads format {FORMAT_VERSION}; use the gemini_ft that",
            GeminiReader("nobody"): "no agent on this machine holds anything of run 'nobody'",
            GeminiReader(ddp.store, step=77): f"no step 77 in .*; there are: {STEPS}",
            GeminiReader(f"{ddp.store}/none"): "there is no such folder on this machine",
        }.items():
            with pytest.raises(CheckpointException, match=said):
                load(reader, ddp.live)
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.another"):
            load(reader := GeminiReader(ddp.run), {"model": {"another": torch.zeros(2)}})
        reader.reset()


class TestDamagedMemory:
    @pytest.mark.parametrize("host", ["host0", "host1"])
    def test_leads_to_the_next_copy(self, ddp: Job, host: str, tmp_path: Path) -> None:
        with damaged(ddp, host):
            assert export(ddp, "dcp", tmp_path / "out") == 0
        assert_identical(load_dcp(tmp_path / "out", ddp.live), ddp.live)

    def test_is_an_error_where_there_is_no_other(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with damaged(ddp, "host0", "host1"):
            assert export(ddp, "dcp", tmp_path / "out") == 1
        assert re.search(r"rank 1's shard of iteration 3 .* cannot be read from memory: .*peer host0 does not match", refused(capsys))
        assert not list(tmp_path.iterdir())


class TestMeshes:
    """Parts cut by torch's own placements are put together again."""

    @pytest.mark.parametrize("shape", [(16, 6), (13, 5), (3, 2), (1, 9), (0, 4)], ids=str)
    @pytest.mark.parametrize("mesh", [(8,), (2, 4), (4, 2)], ids=str)
    @pytest.mark.parametrize(
        "placements",
        [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0)), "strided"],
        ids=str,
    )
    def test_of_every_kind(self, shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> None:
        if placements == "strided":  # FSDP2 over tensor parallelism of the same dimension
            placements = (_StridedShard(0, split_factor=mesh[-1]), Shard(0))
        placements = placements[: len(mesh)]
        whole = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
        parts: dict[tuple[int, ...], torch.Tensor] = {}
        for rank in range(8):
            at, part, group = torch.unravel_index(torch.tensor(rank), mesh), whole, torch.arange(8).view(mesh)
            for axis, (placement, coordinate) in enumerate(zip(placements, at, strict=True)):
                if not placement.is_replicate():
                    part = placement._split_tensor(part, mesh[axis], with_padding=False)[0][coordinate]
                    group = group.index_select(axis, coordinate)
            parts[tuple(group.flatten().tolist())] = part
        words = f"{shape} {' '.join(map(str, placements))} on {mesh}"
        assert_identical(join_parts("w", words, parts, 8), whole)

    def test_what_cannot_be_known_is_refused_by_name(self) -> None:
        half = {(0,): torch.zeros(2), (1,): torch.ones(2)}
        with pytest.raises(UnsupportedStateError, match=r"w is placed on a mesh of \(2,\) among 4 ranks"):
            join_parts("w", "(4,) S(0) on (2,)", half, 4)
        with pytest.raises(UnsupportedStateError, match=r"w: ranks \[0\] hold a part of shape \(2,\), which does not fit"):
            join_parts("w", "(4,) R on (2,)", half, 2)
        with pytest.raises(UnsupportedStateError, match="w is not the same on ranks 0 and 1 although nothing says how it is divided"):
            join_parts("w", "", half, 2)
        assert_identical(join_parts("w", PER_RANK, half, 2), torch.zeros(2))


class Zeros(SimpleNamespace):
    """A shard whose bytes are all 0."""

    def chunks(self, live: Any, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        yield start, memoryview(bytes(stop - start))


def test_parts_are_let_go_of_as_soon_as_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sharded model needs twice its size in memory."""
    held: dict[str, list[weakref.ref[torch.Tensor]]] = {}

    def join(name: str, words: str, parts: dict[tuple[int, ...], torch.Tensor], world_size: int) -> torch.Tensor:
        assert all(part() is None for before in held.values() for part in before), name
        held[name] = [weakref.ref(part) for part in parts.values()]
        return join_parts(name, words, parts, world_size)

    words = "(4, 2) S(0) on (2,)"
    specs = [
        [TensorSpec(name=name, dtype="float32", shape=(2, 2), group=(rank,), logical=words) for name in ("main.a", "main.b")]
        for rank in range(2)
    ]
    shards: list[Any] = [Zeros(layout=build_layout(specs[rank], rank, 2), where="here") for rank in range(2)]
    tensors = WholeTensors(shards, lambda name: True)
    monkeypatch.setattr(whole_tensors, "join_parts", join)
    assert_identical(tensors.read(), {"main.a": torch.zeros(4, 2), "main.b": torch.zeros(4, 2)})
    assert {name: len(parts) for name, parts in held.items()} == {"main.a": 2, "main.b": 2}


class TestS3:
    @pytest.fixture(autouse=True)
    def _credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def test_takes_files_and_folders(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with s3_server.serve(tmp_path / "s3", "bucket") as server:
            there = ("--endpoint-url", server.endpoint)
            assert export(ddp, "safetensors", "s3://bucket/weights", *there) == 0
            assert export(ddp, "dcp", "s3://bucket/whole", *there) == 0
            assert export(ddp, "dcp", "s3://bucket/whole", *there) == 2
            assert "s3://bucket/whole exists already; choose another --to, or give --overwrite" in refused(capsys)
            assert export(ddp, "dcp", "s3://bucket/whole", *there, "--overwrite") == 0
            storage = open_storage("s3://bucket/whole", server.endpoint)
            (tmp_path / "out").mkdir()
            for key in storage.list():
                (tmp_path / "out" / key).write_bytes(storage.get(key))
            weights = open_storage("s3://bucket/weights", server.endpoint).get("model.safetensors")
        assert_identical(load_dcp(tmp_path / "out", ddp.live), ddp.live)
        (tmp_path / "w").write_bytes(weights)
        assert_identical(load_file(tmp_path / "w")["last.bias"], ddp.live["model"]["last.bias"])


class TestRefusals:
    def test_an_unknown_step_lists_those_that_exist(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export(ddp, "dcp", tmp_path / "out", step="77") == 2
        assert re.search(rf"no step 77 in the memory of run '{ddp.run}', .*; there are: {STEPS}(, \d)*\. Take", refused(capsys))
        assert export(ddp, "dcp", tmp_path / "out", "--from", ddp.store, step="77") == 2
        assert f"no step 77 in {ddp.store}; there are: {STEPS}\n" in refused(capsys)
        assert export(ddp, "dcp", tmp_path / "out", step="last") == 2
        assert "STEP='last': must be the number of a step, or latest" in refused(capsys)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("form", "text"),
        [
            ("lightning", "needs a stream of a Lightning Trainer (fit-0, ...); 'main' of run"),
            ("deepspeed", "needs a stream of a DeepSpeed engine (deepspeed-0, ...); 'main' of run"),
        ],
    )
    def test_a_format_of_another_loop(self, ddp: Job, form: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export(ddp, form, tmp_path) == 2
        assert text in (said := refused(capsys))
        assert "Use --format" in said
        assert not list(tmp_path.iterdir())

    def test_what_exists_unless_it_is_to_be_replaced(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "model.safetensors").write_text("precious")
        (tmp_path / "notes.txt").write_text("precious")
        assert export(ddp, "safetensors", tmp_path) == 2
        assert f"{tmp_path}/model.safetensors exists already" in refused(capsys)
        assert export(ddp, "dcp", tmp_path, "--overwrite") == 2
        assert "files that are of no export" in refused(capsys)
        assert (tmp_path / "model.safetensors").read_text() == "precious"
        assert export(ddp, "safetensors", tmp_path, "--overwrite") == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
        assert export(ddp, "dcp", tmp_path / "out") == export(ddp, "dcp", tmp_path / "out", "--overwrite") == 0
        assert_identical(load_dcp(tmp_path / "out", ddp.live), ddp.live)

    def test_pickles_without_trust(self, jobs: dict[str, Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export(jobs["odd"], "dcp", tmp_path / "out", "--from", jobs["odd"].store) == 1
        assert "is a pickled object" in (said := refused(capsys))
        assert "--trust-pickle" in said
        assert not list(tmp_path.iterdir())

    def test_pickles_that_the_run_has_signed_need_none(self, jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GEMINI_SECRET", "theirs")
        assert export(jobs["odd"], "dcp", tmp_path / "out", "--from", jobs["odd"].store) == 0

    def test_without_a_copy_in_memory_the_configured_storage_is_read(
        self, ddp: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("GEMINI_STORAGE", ddp.store)
        assert export(ddp, "safetensors", tmp_path) == 0
        assert "from memory of run" in capsys.readouterr().out
        assert export(ddp, "dcp", tmp_path / "out", step="77") == 2
        assert f"no step 77 in {ddp.store}; there are: {STEPS}" in refused(capsys)
        monkeypatch.setattr(lifecycle, "addresses", list)
        assert export(ddp, "safetensors", tmp_path, "--overwrite") == 0
        assert f"from {ddp.store} to" in capsys.readouterr().out

    def test_nothing_to_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["export", "latest", "--run-id", "nobody", "--format", "dcp", "--to", str(tmp_path / "out")]) == 2
        assert "no agent on this machine holds anything of run 'nobody'; give --from URL" in refused(capsys)

    def test_damaged_bytes(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stored = damaged_copy(ddp, tmp_path / "store")
        assert export(ddp, "dcp", tmp_path / "out", "--from", stored.as_uri()) == 1
        assert "shard-00001.safetensors: bytes 0 to" in refused(capsys)
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


class TestCheckpoints:
    def test_lists_memory_and_storage_and_what_is_wrong(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stored = tmp_path / "store"
        for number in range(3):
            subprocess.run(["cp", "-r", ddp.folder / "store", stored / str(number)] if number else ["mkdir", stored], check=True)
        (torn,) = stored.glob("1/*/*/*/manifest.json")
        torn.unlink()
        (lost,) = stored.glob("2/*/*/*/shard-00000.safetensors")
        lost.unlink()
        assert cli.main(["checkpoints", ddp.store, "--run-id", ddp.run, "--verify"]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.split() == ["run", "stream", "step", "age", "bytes", "ranks", "state", "where"]
        assert any(re.search(rf"main +{STEPS} .* 2 +whole, newest +memory of host0, host1$", row) for row in rows)
        assert any(re.search(rf"main +{STEPS} .* (s|min) +[\d,]+ +2 +whole, newest +{ddp.store}$", row) for row in rows)
        assert cli.main(["checkpoints", f"{stored.as_uri()}/1", "--run-id", ddp.run]) == 0
        assert "incomplete: no manifest, 2 shards" in capsys.readouterr().out
        assert cli.main(["checkpoints", f"{stored.as_uri()}/2", "--run-id", ddp.run]) == 0
        assert "damaged: shard-00000.safetensors is missing (1 in all)" in capsys.readouterr().out

    def test_damage_that_is_found_is_the_exit_status(self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stored = damaged_copy(ddp, tmp_path / "store")
        assert cli.main(["checkpoints", stored.as_uri()]) == 0
        assert cli.main(["checkpoints", stored.as_uri(), "--verify"]) == 1
        assert "damaged: shard-00001.safetensors does not match its checksum" in capsys.readouterr().out

    def test_what_is_deleted_while_it_is_read_is_no_damage(
        self, ddp: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = tmp_path / "store"
        subprocess.run(["cp", "-r", ddp.folder / "store", stored], check=True)

        def verify(shard: StoredShard) -> None:
            shutil.rmtree(next(stored.glob("*/*/step-*")))  # as retention does between a listing and a reading
            monkeypatch.undo()
            shard.verify()

        monkeypatch.setattr(StoredShard, "verify", verify)
        assert cli.main(["checkpoints", stored.as_uri(), "--verify"]) == 0
        assert "deleted meanwhile" in capsys.readouterr().out

    def test_a_folder_that_is_not_there_is_an_error(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in (["checkpoints"], ["export", "latest", "--format", "dcp", "--to", str(tmp_path / "out"), "--from"]):
            assert cli.main([*command, f"{tmp_path.as_uri()}/no/such"]) == 2
            assert f"{tmp_path.as_uri()}/no/such: there is no such folder on this machine; check the URL" in refused(capsys)

    def test_looks_where_the_configuration_says(
        self, ddp: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("GEMINI_STORAGE", ddp.store)
        assert cli.main(["checkpoints"]) == 0
        assert ddp.store in capsys.readouterr().out

    def test_says_where_it_found_nothing(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "gemini_ft.cli.main", "checkpoints", tmp_path.as_uri(), "--run-id", "nobody"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"no checkpoints in {tmp_path.as_uri()}\n"


CRASHES = {"in an epoch": 9, "after validation": 3, "between epochs": 12}  # at which step
LOCAL = ({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"})


class TestLightning:
    def world(self, folder: Path) -> World:
        return World(folder, hosts=["host0", "host0"], TORCHELASTIC_RUN_ID="1", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")

    def crash(self, folder: Path) -> tuple[list[Any], dict[str, str]]:
        """What an undisturbed run of plain Lightning comes to, and the files exported after crashes under gemini-ft."""
        with self.world(folder) as world:
            expected = world.start(until_crash, str(folder), CRASHES, per_rank=LOCAL).results()
            assert isinstance(expected[0], dict), expected
            for number in range(len(CRASHES)):
                assert export(world, "lightning", folder / "out", "--stream", f"fit-{number}") == 0
        return expected, {name: str(folder / "out" / f"step-{step}.ckpt") for name, step in CRASHES.items()}

    def test_a_plain_trainer_goes_on_to_the_same_bits(self, tmp_path: Path) -> None:
        expected, files = self.crash(tmp_path)
        with self.world(tmp_path) as world:  # of its own: plain Lightning would find dead peers in the other one's store
            results = world.start(from_files, str(tmp_path), files, per_rank=LOCAL).results()
        for rank in range(2):
            assert isinstance(results[rank], dict), results
            for name, step in CRASHES.items():
                again, whole = results[rank][name], expected[rank]
                assert (name, again["state"], again["steps"]) == (name, whole["state"], whole["steps"])
                assert again["validated"] == [at for at in whole["validated"] if at > step]


def test_names_inside_compiled_modules_are_those_of_the_state_dict() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2))
    naming = survey({"model": model}, []).naming
    assert naming == {"model": {"keys": {"0._orig_mod.weight": "model.0.weight"}, "absent": ["model.0.weight"], "out of order": []}}
