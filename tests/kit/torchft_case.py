"""What the ranks of test_local_steps.py run beside torchft: its LocalSGD and DiLoCo, between replicas on gloo, and the same by rules."""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from local_steps_case import DILOCO, loss_of
from sync_case import join
from torch import nn
from torch._C._distributed_c10d import TCPStore

import gemini_ft
from gemini_ft.testing import first_difference

STEPS = 9
CASES: dict[str, dict[str, Any]] = {
    "LocalSGD": {"every": 3},
    "DiLoCo": {"every": 3, "outer": DILOCO},
    "DiLoCo, each step": {"every": 1, "outer": DILOCO},
    "streaming": {"every": 4, "outer": DILOCO, "fragments": 2},
}


def differences() -> dict[str, str | None]:
    """Case -> where the weights of a step differ between torchft and the pipeline; None: nowhere, in bits.

    Its LocalSGD averages weights, and the pipeline what they have moved: these are the same but for rounding.
    """
    from torchft.coordination import LighthouseServer

    rank = join().rank()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if rank == 0 else None
    address = [lighthouse.address() if lighthouse is not None else ""]
    dist.broadcast_object_list(address, src=0)
    found = {}
    for name, rule in CASES.items():
        ours, theirs = _ours(rule, rank), _theirs(name, rule, rank, address[0])
        if name == "LocalSGD":
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        found[name] = first_difference(ours, theirs if name != "LocalSGD" else ours)
        dist.barrier()
    if lighthouse is not None:
        lighthouse.shutdown()
    return found


def _network() -> nn.Sequential:
    """Two layers of about as many bytes, so that fragments are layers, the last one first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, synchronize: Any) -> dict[str, Any]:
    states = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, 0, rank, torch.float32).backward()
        synchronize()
        optimizer.step()
        states[str(step)] = {name: value.clone() for name, value in model.state_dict().items()}
    return states


def _ours(rule: dict[str, Any], rank: int) -> dict[str, Any]:
    model = _network()
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", **rule}])) as synchronizer:
        return _train(model, torch.optim.AdamW(model.parameters(), 1e-2), rank, synchronizer.synchronize)


def _theirs(name: str, rule: dict[str, Any], rank: int, lighthouse: str) -> dict[str, Any]:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"{name}{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
    )
    with ExitStack() as stack:
        stack.callback(manager.shutdown, wait=False)
        if name == "LocalSGD":
            stack.enter_context(LocalSGD(manager, model, optimizer, rule["every"]))
        else:
            parts: list[nn.Module] = [model] if "fragments" not in rule else [model[2], model[0]]
            outer = [torch.optim.SGD(part.parameters(), **rule["outer"]) for part in parts]
            stack.enter_context(DiLoCo(manager, parts, optimizer, outer, rule["every"]))
        return _train(model, optimizer, rank, lambda: None)
