"""What the ranks of test_dcp_writer.py run: a loop that saves every second step by torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from export_case import build
from plain_case import start_ranks
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from gemini_ft.dcp import GeminiWriter

STEPS = 6
KINDS = ("ddp", "fsdp2")


def write_all(out: str, ways: tuple[str, ...], options: dict[str, Any]) -> None:
    """Trains a model of each kind in one run, one after the other, each way."""
    warnings.simplefilter("ignore")
    start_ranks()
    for way in ways:
        for kind in KINDS:
            write(out, kind, way, options)


def write(out: str, kind: str, way: str, options: dict[str, Any]) -> None:
    """Trains, and writes torch's view of the last state to ``<out>/<kind>-<way>.pt``. A killed job loses rank 1 once, in step 5."""
    rank, sharded = dist.get_rank(), kind == "fsdp2"
    model, optimizer = build(sharded)
    writer = GeminiWriter(name=kind, **options) if way != "plain" else None
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
            state = {"model": weights, "optim": optim, "step": step, f"of rank {rank}": torch.tensor(rank), f"note {rank}": "kept"}
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


def go_on() -> tuple[int | None, int | None]:
    """Saves one step more with another number of ranks; the step that was there, and the one that is read back."""
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
    return before, state["step"]


def refusals() -> dict[str, str]:
    """The texts of errors, by what was wrong; between two saves there is more time than a hang may take."""
    warnings.simplefilter("ignore")
    start_ranks()
    writer = GeminiWriter()
    state = {"w": torch.ones(3), "step": 2}
    time.sleep(1)
    save(state, storage_writer=writer, checkpoint_id="2")
    time.sleep(1)
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
    return said


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
