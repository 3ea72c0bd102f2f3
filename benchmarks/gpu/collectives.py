"""Gradients of the device through pipelines and sparse schemes: alone over NCCL, and with two ranks on one device over gloo.

    python benchmarks/gpu/collectives.py

Two ranks must have the averages that the same gradients have on CPUs; one rank alone must get its own back.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from gemini_ft import GradientSynchronizer
from gemini_ft.sync.zen import Zen

RULES: list[dict[str, object]] = [{"params": "0.*", "sync": "zen"}, {"params": "*", "compress": {"method": "efsignsgd"}}]


def _device() -> torch.device:
    return (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")


def _gradients(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sparse = torch.zeros(4096, 8)
    sparse[torch.randperm(4096, generator=generator)[:200]] = torch.randn(200, 8, generator=generator)
    return sparse, torch.randn(8, 64, generator=generator)


def _averages(device: torch.device) -> list[torch.Tensor]:
    """The averages that a pipeline with both kinds of rules makes of the ranks' gradients."""
    model = nn.Sequential(nn.Embedding(4096, 8), nn.Linear(64, 8, bias=False)).to(device)
    synchronizer = GradientSynchronizer(model, RULES)
    for parameter, gradient in zip(model.parameters(), _gradients(dist.get_rank()), strict=True):
        parameter.register_hook(lambda _, gradient=gradient: gradient.to(device))
    for _ in range(3):
        model.zero_grad()
        torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()
        synchronizer.synchronize()
    synchronizer.close()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def _rank(rank: int, world: int, backend: str, store: str, device: torch.device) -> None:
    shared = dist.FileStore(store, world)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=shared, rank=rank, world_size=world)
    given = _gradients(rank)[0].to(device)
    whole = Zen().all_reduce(given.clone())
    own = sum(_gradients(each)[0] for each in range(world))
    torch.testing.assert_close(whole.cpu(), own)
    on_device = _averages(device)
    if backend != "nccl":
        for found, expected in zip(on_device, _averages(torch.device("cpu")), strict=True):
            torch.testing.assert_close(found, expected)
    dist.destroy_process_group()


def main() -> None:
    device = _device()
    for backend, world in (("nccl" if device.type == "cuda" else "gloo", 1), ("gloo", 2)):
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (world, backend, str(Path(folder, "store")), device), nprocs=world)
        print(f"{backend}, {world} ranks, {device}: as it should be", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
