"""A job on the device is killed with SIGKILL in the middle and must end with the very bits of an undisturbed one.

    python benchmarks/gpu/drill.py lightning | deepspeed | fsdp2 | courier

This file is the job too, run under `gemini run` twice at the same time; each rank leaves the hash of its state. The job that is killed must
have resumed in its middle: one that began anew would end with the same bits. FSDP2 has two ranks on one device, which NCCL refuses: it goes
over gloo. `courier` has two hosts on one device whose workers carry the replicas, over an NCCL that takes several ranks on one device (2.30
and later, with NCCL_MULTI_RANK_GPU_ENABLE=1); a whole host is lost, and its shard comes back from what workers have carried. With an older
NCCL it says so and does nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, DEATH = 16, 9
FALLS_BACK = "travel from agent to agent from now on"
RANKS = {"lightning": 1, "deepspeed": 1, "fsdp2": 2}


def _device() -> torch.device:
    return (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))


def _tell(out: Path, state: Any) -> None:
    from gemini_ft.testing import digest

    (out / os.environ["RANK"]).write_text(digest(state))


def lightning(out: Path) -> None:
    import lightning as L

    import gemini_ft  # noqa: F401  # makes strategy="gemini" known

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = L.Trainer(
        strategy="gemini",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=out,
    )
    module = Module()
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 256))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    _tell(out, [module.state_dict(), trainer.optimizers[0].state_dict()])


def deepspeed(out: Path) -> None:
    import deepspeed as ds

    import gemini_ft.deepspeed

    if _device().type == "cpu":  # it would compile collectives over shared memory for minutes, which one rank never calls
        ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ds.init_distributed(dist_backend="nccl" if _device().type == "cuda" else "gloo")
    net = _net()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gemini": {"replicas": 1},
    }
    engine, *_ = gemini_ft.deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3), config=config)
    while engine.global_steps < STEPS:
        loss = engine(torch.randn(8, 256, device=engine.device, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
    _tell(out, [engine.module.state_dict(), engine.optimizer.single_partition_of_fp32_groups])


def fsdp2(out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import gemini_ft

    device = _device()
    gemini_ft.init_process_group("gloo")
    net = _net().to(device)
    fully_shard(net, mesh=init_device_mesh(device.type, (2,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with gemini_ft.Checkpointer(net, optimizer, replicas=1) as checkpointer:
        for _ in range(checkpointer.resume(), STEPS):
            optimizer.zero_grad()
            net(torch.randn(8, 256, device=device)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
    _tell(out, [parameter.to_local() for parameter in net.parameters() if isinstance(parameter, DTensor)])


def courier(out: Path) -> None:
    import gemini_ft

    device = _device()
    gemini_ft.init_process_group("nccl" if device.type == "cuda" else "gloo")
    net = nn.parallel.DistributedDataParallel(_net().to(device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with gemini_ft.Checkpointer(net, optimizer, replicas=2, traffic={"transport": "collective"}) as checkpointer:
        for _ in range(checkpointer.resume(), STEPS):
            optimizer.zero_grad()
            net(torch.randn(8, 256, device=device)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
        if "peer" in " ".join(checkpointer.stats.restored):
            (out / "from a peer").touch()
    _tell(out, [net.state_dict(), optimizer.state_dict()])


def _hosts(is_one_lost: bool) -> dict[str, str]:
    """Runs the courier's job to its end; each rank's hash."""
    from gemini_ft.testing import EmulatedHosts

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        out.mkdir()
        environment = {"GEMINI_ON_LATE": "wait", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
        with EmulatedHosts(2, [__file__, "courier", str(out)], Path(folder), env=environment) as hosts:
            if is_one_lost:
                hosts.wait_for(lambda: any(event["iteration"] >= DEATH - 1 for event in hosts.events("step")))
                hosts.replace("host1")
            hosts.finish()
        if carried := [log.name for log in Path(folder).glob("*.log") if FALLS_BACK in log.read_text()]:
            sys.exit(f"the agents had to do without the workers: {carried}")
        return {each.name: each.read_text() for each in out.iterdir()}


def _nccl_version() -> int:
    """The version number of the NCCL that is loaded, which may be another one than torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def _carry() -> None:
    """The drill of the courier."""
    version = _nccl_version() if torch.cuda.is_available() else None
    if version is not None and version < 23000:
        print(f"NCCL {version} takes one rank on a device; 23000 is needed, for example by LD_PRELOAD of the library in nvidia-nccl-cu13")
        return
    undisturbed, killed = _hosts(is_one_lost=False), _hosts(is_one_lost=True)
    print(f"courier on {_device()}: {undisturbed}\nhost1 lost at step {DEATH}: {killed}")
    if killed.pop("from a peer", None) is None:
        sys.exit("nothing was read from a peer")
    if len(undisturbed) != 2 or undisturbed != killed:
        sys.exit("the bits differ")


def _job(kind: str, faults: str) -> tuple[dict[str, str], list[int]]:
    """Runs the job to its end; each rank's hash, and the iterations at which ranks resumed."""
    with tempfile.TemporaryDirectory() as folder:
        events, out = Path(folder, "events"), Path(folder, "out")
        environment = os.environ | {"GEMINI_FAULTS": faults, "GEMINI_LOG_DIR": folder, "GEMINI_REPLICAS": "1"}
        environment |= {"GEMINI_EVENTS": str(events), "GEMINI_ON_LATE": "wait"}  # these steps are shorter than a commit
        if _device().type == "cpu":
            environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        launch = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--standalone", "--nproc-per-node", str(RANKS[kind])]
        out.mkdir()
        subprocess.run([*launch, __file__, kind, out], env=environment, check=True)
        happened = [json.loads(line) for line in events.read_text().splitlines()]
        resumed = [event["iteration"] for event in happened if event["event"] == "resumed"]
        return {each.name: each.read_text() for each in out.iterdir() if each.is_file()}, resumed


def main() -> None:
    kind = sys.argv[1]
    if len(sys.argv) > 2:
        {"lightning": lightning, "deepspeed": deepspeed, "fsdp2": fsdp2, "courier": courier}[kind](Path(sys.argv[2]))
        return
    if kind == "courier":
        _carry()
        return
    with ThreadPoolExecutor() as pool:  # most of a job's time is imports
        (undisturbed, unasked), (killed, resumed) = pool.map(_job, [kind, kind], ["", f"step={DEATH}:rank=0:sigkill"])
    print(f"{kind} on {_device()}: {undisturbed}\nkilled at step {DEATH}, resumed at {resumed}: {killed}")
    if len(undisturbed) != RANKS[kind] or undisturbed != killed:
        sys.exit("the bits differ")
    if unasked or len(resumed) != RANKS[kind] or not all(0 < iteration <= DEATH for iteration in resumed):
        sys.exit(f"the job that was killed should have resumed once, in its middle; resumed were {resumed}, and of the other {unasked}")


if __name__ == "__main__":
    main()
