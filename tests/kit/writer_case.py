"""What the ranks of test_dcp_writer.py run: a loop that saves every second step by torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from agent_kit import eventually
from export_case import build
from plain_case import start_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from gemini_ft.agent import lifecycle
from gemini_ft.dcp import GeminiWriter
from gemini_ft.errors import StateError
from gemini_ft.launch.failures import own_failure
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

STEPS = 6
KINDS = ("ddp", "fsdp2")


def write_all(out: str, ways: tuple[str, ...], options: dict[str, Any], kinds: Sequence[str] = KINDS) -> None:
    """Trains a model of each kind in one run, one after the other, each way."""
    warnings.simplefilter("ignore")
    start_ranks()
    for way in ways:
        for kind in kinds:
            write(out, kind, way, options)


def write(out: str, kind: str, way: str, options: dict[str, Any]) -> None:
    """Trains, and writes torch's view of the last state to ``<out>/<kind>-<way>.pt``. A killed job loses rank 1 once, in step 5.

    Under ``own`` it is DDP whose ranks have statistics of their own batches.
    """
    rank, sharded = dist.get_rank(), kind == "fsdp2"
    model, optimizer = build(sharded)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d) and kind != "own":
            module.eval()  # else its buffers would differ between ranks
    writer = GeminiWriter(name=kind, replicated=kind == "ddp", **options) if way != "plain" else None
    saving = dist.new_group(backend="gloo")
    first = 1
    if writer is not None and writer.newest is not None:
        weights, optim = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": optim, "step": 0}
        load(state, storage_reader=writer.reader())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
        assert state["step"] == writer.newest
        assert writer.newest in (4, STEPS)
        first = writer.newest + 1
    for step in range(first, STEPS + 1):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and way == "killed" and rank == 1 and first == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0 and writer is not None:
            weights, optim = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": optim, "step": step, f"note {rank}": "kept"}
            if sharded:
                state[f"of rank {rank}"] = torch.tensor(rank)
            if step == STEPS:
                save(state, storage_writer=writer, checkpoint_id=str(step))
            elif sharded:
                finish(async_save(state, storage_writer=writer.at(step), no_dist=True))
            else:
                finish(async_save(state, storage_writer=writer.at(step), checkpoint_id=str(step), process_group=saving))
    live = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=sharded))
    if rank == 0:
        torch.save({"model": live[0], "optim": live[1]}, Path(out) / f"{kind}-{way}.pt")


def finish(saved: Future[Any] | AsyncSaveResponse) -> None:
    assert isinstance(saved, Future)
    saved.result()


def go_on() -> tuple[Any, ...]:
    """Saves one step more with another number of ranks.

    Returns the step that was there, and the one that is read back; what `alone` returns on rank 0; and a refusal.
    """
    warnings.simplefilter("ignore")
    start_ranks()
    model, optimizer = build(sharded=True)
    writer = GeminiWriter(name="fsdp2")
    before = writer.newest
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim, "step": 0}
    load(state, storage_reader=writer.reader())
    assert state["step"] == before
    save(state | {"step": STEPS + 1}, storage_writer=writer.at(STEPS + 1))
    load(state, storage_reader=writer.reader())
    uneven, alike = GeminiWriter(name="uneven"), GeminiWriter(name="alike", replicated=True)
    save({"step": 1, "w": torch.ones(3)}, storage_writer=uneven.at(1))
    found, said = alone(uneven) if dist.get_rank() == 0 else (), ""
    try:
        save({"w": torch.ones(3)} | ({"more": torch.ones(1)} if dist.get_rank() == 2 else {}), storage_writer=alike.at(1))
    except CheckpointException as error:
        said = str(own_failure(error))
    return before, state["step"], found, said


def odd_keys() -> dict[str, Any]:
    """Saves what ranks have alone: a step, DTensors of meshes of one rank or of ranks out of order, and a part of a DTensor of both.

    Returns what was said of each, the newest step, and what is read back of it.
    """
    warnings.simplefilter("ignore")
    start_ranks()
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    writer = GeminiWriter(name="skips")
    save({"w": torch.ones(3)}, storage_writer=writer.at(1))
    said = {}
    if rank == 1:  # it goes past step 2, and rank 0's copy of that can never be of a whole version
        saved = async_save({"w": torch.full((3,), 3.0)}, storage_writer=writer.at(3), no_dist=True)
    else:
        saved = async_save({"w": torch.full((3,), 2.0)}, storage_writer=writer.at(2), no_dist=True)
        try:
            finish(saved)
        except CheckpointException as error:
            said["step"] = str(own_failure(error))
        saved = async_save({"w": torch.full((3,), 3.0)}, storage_writer=writer.at(3), no_dist=True)
    finish(saved)
    state: dict[str, Any] = {"w": torch.zeros(3)}
    load(state, storage_reader=writer.reader(), process_group=group)
    found = {"newest": writer.newest, "w": state["w"].tolist()}
    alone_each = [DeviceMesh("cpu", [each]) for each in range(2)]
    meshes = {"one": alone_each[rank], "turned": DeviceMesh("cpu", [1, 0]), "both": DeviceMesh("cpu", [0, 1])}
    for name, mesh in meshes.items():
        part = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        parts = GeminiWriter(name=name)
        try:
            save({"whole": torch.ones(1)} | ({"part": part} if name != "both" or rank == 0 else {}), storage_writer=parts.at(1))
        except CheckpointException as error:
            said[name] = str(own_failure(error))
    return {"said": said, **found}


def alone(writer: GeminiWriter) -> tuple[Any, ...]:
    """Saves step 2, which the other ranks never do; the newest step then, the one that is read, and why 2 cannot be saved again."""
    async_save({"step": 2, "w": torch.ones(3)}, storage_writer=writer.at(2), no_dist=True)
    state = {"step": 0}
    load(state, storage_reader=writer.reader(), no_dist=True)
    try:
        async_save(state, storage_writer=writer.at(2), no_dist=True)
    except StateError as error:
        return writer.newest, state["step"], str(error)
    return writer.newest, state["step"], ""


def refusals(url: str) -> tuple[dict[str, str], list[int]]:
    """The texts of errors, by what was wrong, and what `upload` returns; between two saves there is more time than a hang may take."""
    warnings.simplefilter("ignore")
    start_ranks()
    writer = GeminiWriter()
    state = {"w": torch.ones(3), "step": 2}
    time.sleep(0.6)
    save(state, storage_writer=writer, checkpoint_id="2")
    time.sleep(0.6)
    said: dict[str, str] = {}

    def refused(what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:  # torch's CheckpointException is no Exception
            said[what] = str(error)

    refused("no step", lambda: async_save(state, storage_writer=writer))
    refused("not greater", lambda: async_save(state, storage_writer=writer.at(2)))
    refused("zero", lambda: async_save(state, storage_writer=writer.at(0)))
    refused("two steps", lambda: finish(async_save(state, storage_writer=writer.at(3), checkpoint_id="4")))
    refused("a path", lambda: save(state, storage_writer=writer, checkpoint_id="checkpoints/step-5"))
    stager = DefaultStager(StagingOptions(False, False, False, False))
    refused("stager", lambda: finish(async_save(state, storage_writer=writer, checkpoint_id="5", async_stager=stager)))
    refused("another process", lambda: pickle.dumps(writer))
    refused("an option", lambda: GeminiWriter(hang_timeout=3))
    refused("sparse", lambda: save({"w": torch.ones(2, 2).to_sparse()}, storage_writer=writer, checkpoint_id="5"))
    save(state | {"step": 6}, storage_writer=writer, checkpoint_id="6")
    writer.close()
    return said, upload(url)


def upload(url: str) -> list[int]:
    """The steps that are stored of those that are saved: each second one up to 12, where every fifth step is due. Never two at once."""
    writer = GeminiWriter(name="stored", storage={"url": url, "every_steps": 5, "keep_last": "all", "at_end": False})
    store = open_storage(url)

    def stored() -> list[int]:
        return [info.iteration for info in list_checkpoints(store)]

    def is_stored(step: int) -> bool:
        run, host = os.environ["GEMINI_RUN_ID"], os.environ["GEMINI_HOST_ID"]
        state = json.loads(lifecycle.status(run, host) or "")["streams"]["stored"]["storage"]
        return step in stored() and not state["uploading"]

    for step in range(2, 13, 2):
        save({"w": torch.ones(3)}, storage_writer=writer.at(step))
        if step in (6, 10):  # 5 itself is not saved
            eventually(partial(is_stored, step), f"the upload of step {step}")
    writer.close()
    return stored()


def run_page(code: str, steps: int, last: int) -> list[int]:
    """Runs the example of the page, which loses its process's script after step ``last``; the steps that it has trained."""
    warnings.simplefilter("ignore")
    start_ranks()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    trained: list[int] = []

    def train(step: int) -> None:
        assert step <= last
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(step)
        assert optimizer.state[model.weight]["step"] == step

    with contextlib.suppress(AssertionError):
        exec(code, {"model": model, "optimizer": optimizer, "steps": steps, "train": train})
    return trained
