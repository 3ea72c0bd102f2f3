"""A whole step in a graph: what Python does not see when it is replayed must be announced, and then the snapshots are those of the loop."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from agent_kit import preload
from lagging_device import install
from rank_kit import World
from torch import nn

import gemini_ft
from gemini_ft import accelerator
from gemini_ft.errors import StateError

preload("gemini_ft.worker.recorder")
STEPS = 6


class Graph:
    """As `torch.cuda.graph` around a step of SGD: hooks run when it is captured, and a replay writes without counting versions."""

    def __init__(self, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        self._weight = model.weight
        module = accelerator.module_of(torch.device("cpu"))
        module.is_current_stream_capturing = lambda: True
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        module.is_current_stream_capturing = lambda: False
        for param, value in zip(model.parameters(), before, strict=True):  # what is captured is not done
            param.data.copy_(value)

    def replay(self) -> None:
        self._weight.data.numpy()[:] += 1.0


def _train(until: int) -> tuple[list[Any], str]:
    """Where it went on with which weights, those at the end, the number of snapshots; and what a replay leads to that is not announced."""
    gemini_ft.init_process_group("gloo")
    install(accelerator, 0.02)
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.zeros(64, 64)
    graph = Graph(model, optimizer)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, replicated=False, on_late="wait")
    start = checkpointer.resume()
    resumed = model.weight.unique().tolist()
    for _ in range(start, until):
        checkpointer.wait_before_update()
        graph.replay()
        checkpointer.step()
    checkpointer.flush()
    found = [start, resumed, model.weight.unique().tolist(), checkpointer.stats.snapshots]
    Graph(model, optimizer).replay()
    return found, _refusal(checkpointer)


def _other_steps() -> tuple[list[list[int]], str]:
    """Snapshots before and after a step that only waits, or fails; and what a replay leads to beside another optimizer's step."""
    gemini_ft.init_process_group("gloo")
    install(accelerator, 0.02)
    models = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    graphed, eager = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.weight.grad = torch.zeros(8, 8)
    checkpointer = gemini_ft.Checkpointer(dict(zip("dg", models, strict=True)), [graphed, eager], replicated=False, on_late="wait")
    checkpointer.resume()
    counts = []
    for update in (checkpointer.wait_before_update, lambda: _fail(eager), eager.step):
        before = checkpointer.stats.snapshots
        update()
        checkpointer.step()
        counts.append(checkpointer.stats.snapshots - before)
    graph = Graph(models[0], graphed)
    graph.replay()
    eager.step()
    return counts, _refusal(checkpointer)


def _never() -> tuple[int, list[str]]:
    """Warnings of a loop in which nothing steps, and how many snapshots it has."""
    gemini_ft.init_process_group("gloo")
    model = nn.Linear(2, 2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemini_ft").addHandler(handler)
    with gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as checkpointer:
        checkpointer.resume()
        for _ in range(250):
            checkpointer.step()
    return checkpointer.stats.snapshots, [text for text in said if "no optimizer" in text]


def _refusal(checkpointer: gemini_ft.Checkpointer) -> str:
    """Why the step that ends now is refused; empty: it is not. The last call."""
    try:
        checkpointer.step()
    except StateError as error:
        return str(error)
    finally:
        checkpointer.close(finished=False)
    return ""


def _fail(optimizer: torch.optim.Optimizer) -> None:
    """A step that raises in its closure, which the loop survives."""

    def closure() -> float:
        raise ArithmeticError

    with contextlib.suppress(ArithmeticError):
        optimizer.step(closure)


def test_only_what_has_stepped_is_a_step_and_no_other_optimizer_announces_a_replay(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        ((counts, said),) = ranks.outcome(_other_steps)
    assert counts == [0, 0, 1]
    assert "captured into a graph" in said


def test_an_optimizer_of_tensors_on_no_device_steps_as_without_this_package() -> None:
    param = nn.Parameter(torch.zeros(2, device="meta"))
    param.grad = torch.zeros_like(param)
    torch.optim.SGD([param], lr=0.1).step()


def test_a_loop_whose_steps_nobody_sees_is_told_so_once(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        ((snapshots, said),) = ranks.outcome(_never)
    assert snapshots == 0
    assert len(said) == 1
    assert "100 iterations have ended" in said[0]


def test_replays_are_steps_that_are_announced(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        ((first, said),) = ranks.outcome(_train, 4)
        ((second, _),) = ranks.outcome(_train, STEPS)
    assert first == [0, [0.0], [4.0], 4]
    assert second == [4, [4.0], [6.0], 2]
    assert "captured into a graph" in said
    assert "wait_before_update() before each replay" in said
