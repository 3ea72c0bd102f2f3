"""A training in a notebook: its id is the kernel's own, and what it records ends with the kernel, unless the user has named it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import WAIT, end_agent, eventually

from gemini_ft.agent import lifecycle

# What ipykernel_launcher is to a cell: a module that is run with a connection file, and sets the prompt.
KERNEL = """
import json, sys
sys.ps1 = "In : "
told = sys.stdout
cells = {"__name__": "__main__"}
for line in sys.stdin:
    exec(json.loads(line), cells)
    print(json.dumps(cells.pop("result", None)), file=told, flush=True)
"""
CELL = """
import torch, gemini_ft
from gemini_ft.launch.launched import default_run_id
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = gemini_ft.Checkpointer(model, optimizer)
begin = checkpointer.resume()
for step in range(begin, begin + 3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.flush()
result = [default_run_id(), begin]
"""


class Kernel:
    def __init__(self, folder: Path) -> None:
        with open(folder / "stderr", "a") as err:
            command = [sys.executable, "-X", "warm", "-m", "ipykernel_launcher", "-f", "connection.json"]
            self._process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True)

    def run(self, cell: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(cell)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """As "Restart kernel" does it."""
        self._process.kill()
        self._process.communicate(timeout=WAIT)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Kernel]]:
    monkeypatch.setenv("GEMINI_HOST_ID", tmp_path.name)
    monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("GEMINI_ON_LATE", "wait")
    monkeypatch.delenv("GEMINI_RUN_ID", raising=False)
    (tmp_path / "ipykernel_launcher.py").write_text(KERNEL)
    with contextlib.ExitStack() as stack:

        def start() -> Kernel:
            kernel = Kernel(tmp_path)
            stack.callback(kernel.end)
            return kernel

        yield start
    for log in tmp_path.glob(f"agent-*-{tmp_path.name}.log"):  # of a kernel that ended in the middle
        end_agent(log.stem.removeprefix("agent-").removesuffix(f"-{tmp_path.name}"), tmp_path.name)


def test_two_kernels_do_not_meet_and_nothing_outlives_them(kernel: Callable[[], Kernel], tmp_path: Path) -> None:
    kernels = [kernel(), kernel()]
    told = [each.run(CELL) for each in kernels]
    runs = {run for run, _ in told}
    assert len(runs) == 2
    assert [begin for _, begin in told] == [0, 0]
    assert all(lifecycle.is_listening(run, tmp_path.name) for run in runs)
    for each in kernels:
        each.end()
    for run in runs:
        eventually(lambda run=run: not lifecycle.is_listening(run, tmp_path.name), "the agent's end")


def test_a_job_that_the_user_has_named_outlives_its_kernel(
    kernel: Callable[[], Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"notebook-{tmp_path.name}"
    monkeypatch.setenv("GEMINI_RUN_ID", run)
    try:
        first = kernel()
        assert first.run(CELL)[1] == 0
        first.end()
        assert kernel().run(CELL)[1] == 3
        assert "what another launch has left is resumed: iteration 3" in (tmp_path / "stderr").read_text()
    finally:
        end_agent(run, tmp_path.name)
