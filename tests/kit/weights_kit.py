"""A small job on emulated hosts whose last weights are known: all ranks see the same data, and differ in nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from gemini_ft.testing import EmulatedHosts, Network

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
iteration = checkpointer.resume()
enough = torch.zeros(())
while iteration < int(sys.argv[1]) and not enough:
    optimizer.zero_grad()
    model(torch.full((1, 4), iteration / 7)).square().sum().backward()
    optimizer.step()
    iteration += 1
    checkpointer.step()
    time.sleep(0.03)
    enough.fill_(os.path.exists(sys.argv[2] + ".enough"))
    torch.distributed.all_reduce(enough)
if torch.distributed.get_rank() == 0:
    torch.save({"steps": iteration, "weights": model.module.state_dict()}, sys.argv[2])
checkpointer.close()
"""
ENDLESS = 1_000_000  # steps: the job ends when it is told to, however slow the machine is


def undisturbed(steps: int, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The weights after ``steps``, computed here; DDP divides gradients by ``ranks``, and adds them up."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for iteration in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 4), iteration / 7)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            part = parameter.grad * (1 / ranks)
            parameter.grad = part.clone()
            for _ in range(ranks - 1):
                parameter.grad += part
        optimizer.step()
    return model.state_dict()


def job(
    folder: Path, count: int, stores: int | Sequence[str] = 1, network: Network | None = None, options: Sequence[str] = (), **env: str
) -> EmulatedHosts:
    """A job on emulated hosts that goes on until `finish`; ``options``: further ones of the launcher."""
    (folder / "train.py").write_text(SCRIPT)
    program = [*options, str(folder / "train.py"), str(ENDLESS), str(folder / "weights")]
    return EmulatedHosts(count, program, folder, env=env, stores=stores, network=network)


def finish(hosts: EmulatedHosts) -> None:
    """Has the job end after the present step."""
    (hosts.folder / "weights.enough").touch()
    hosts.finish()


def assert_same_bits(folder: Path, ranks: int = 2) -> None:
    """Up to two ranks have the bits of one."""
    ended = torch.load(folder / "weights")
    for name, value in undisturbed(ended["steps"], ranks).items():
        assert ended["weights"][name].numpy().tobytes() == value.numpy().tobytes(), name


def reached(hosts: EmulatedHosts, iteration: int) -> bool:
    return any(event["iteration"] >= iteration for event in hosts.events("committed"))
