"""A small job on emulated hosts whose last weights are known: all ranks see the same data, so their number makes no difference."""

from __future__ import annotations

from pathlib import Path

import torch

from gemini_ft.testing import EmulatedHosts

STEPS = 150
SCRIPT = """
import os, sys, time
import torch
import gemini_ft
from torch.nn.parallel import DistributedDataParallel

gemini_ft.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
checkpointer = gemini_ft.Checkpointer(model, optimizer)
for iteration in range(checkpointer.resume(), int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.full((1, 4), iteration / 7)).square().sum().backward()
    optimizer.step()
    checkpointer.step()
    time.sleep(0.03)
if torch.distributed.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[2])
checkpointer.close()
"""


def undisturbed(steps: int) -> dict[str, torch.Tensor]:
    """The weights after ``steps``, computed here."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for iteration in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 4), iteration / 7)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def job(folder: Path, count: int, steps: int, **env: str) -> EmulatedHosts:
    (folder / "train.py").write_text(SCRIPT)
    return EmulatedHosts(count, [str(folder / "train.py"), str(steps), str(folder / "weights")], folder, env=env)


def assert_same_bits(folder: Path, steps: int) -> None:
    weights = torch.load(folder / "weights")
    for name, value in undisturbed(steps).items():
        assert weights[name].numpy().tobytes() == value.numpy().tobytes(), name


def reached(hosts: EmulatedHosts, iteration: int) -> bool:
    return any(event["iteration"] >= iteration for event in hosts.events("committed"))
