"""The script of test_job_in_place.py: a small DDP loop inside `gemini_ft.run`, or plain; it fails on purpose as its arguments say.

``in_place_case.py FOLDER KEEPER [ATTEMPT:RANK:MOMENT:DEED]...``; KEEPER is "gemini", "nothing", "generator" or "dataset": gemini, with
a generator of the process's own in its state, and never closed, or with a dataset of its own that counts; "sharded" and
"sharded-alone": by FSDP2, with gemini and without; "pipeline", "pipeline-local" and those with "-alone": gradients are compressed, with
residuals, or ranks train alone between averages; "compiled": with gemini, and the model is compiled. A MOMENT is "start", "group", "model",
"loading", "resumed", a number of steps, or "leaving". Each rank writes what every step has computed to a file of its own, in hex, with
its process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.hosts import host_id
from gemini_ft.launch.reserve import RESERVE
from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.testing import digest
from gemini_ft.testing.hosts import environment
from gemini_ft.wire.private import credentials

STEPS = int(os.environ.get("CASE_STEPS", "12"))
FOLDER, KEEPER, *DEEDS = sys.argv[1:]
generator = torch.Generator().manual_seed(3)


class Counting(TensorDataset):
    """Its samples depend on how many it has given."""

    given = 0

    def __getitem__(self, index: Any) -> Any:
        self.given += 1
        return tuple(tensor[index] + 0.01 * self.given for tensor in self.tensors)


counting = Counting(torch.ones(48, 8))
if RESERVE in os.environ:
    (Path(FOLDER) / f"reserve-{os.getpid()}").touch()
opened: IO[str] | None = None
ends: Any = ()
kept: list[Any] = []  # what survives an attempt, as a script's mistake


def reached(moment: object, model: Any = None) -> None:
    here = [f"{attempt}:{os.environ['RANK']}:{moment}" for attempt in (os.environ["TORCHELASTIC_RESTART_COUNT"], "*")]
    for when, _, deed in (each.rpartition(":") for each in DEEDS):
        match deed if when in here else "":
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fall" if os.path.exists(f"{FOLDER}/reserve-{os.getpid()}"):
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(1000)
            case "raise":
                raise ValueError(f"bad luck: {moment}")
            case "freeze" if not os.path.exists(f"{FOLDER}/frozen"):  # a host that has just come counts its attempts anew
                while len([*Path(FOLDER).glob("reserve-*")]) < int(os.environ.get("CASE_RESERVE", "0")):
                    time.sleep(0.05)
                freeze()
            case "interrupt":
                raise KeyboardInterrupt
            case "leave":
                sys.exit(3)
            case "finish":
                sys.exit(0)
            case "exit":
                os._exit(7)
            case "abort":
                os.abort()
            case "held":  # in a call that keeps the interpreter's lock
                ctypes.PyDLL(None).sleep(1000)
            case "late":  # it is stopped, and goes on after a second
                subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            case "catch":
                with contextlib.suppress(Exception):
                    while True:
                        dist.all_reduce(torch.ones(()))
            case "keep":
                kept.append(model)
            case "blind":
                torch.set_grad_enabled(False)
            case "thread":
                threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="forgotten").start()
            case "hold":  # what the attempt has made, by a thread for which the process waits at its end
                threading.Thread(target=lambda *_: time.sleep(1000), args=(dist.group.WORLD, model), name="holding").start()
            case "ahead":  # a thread of the process group is in Python while the attempt ends
                future = dist.all_reduce(torch.ones(()), async_op=True).get_future()
                future.add_done_callback(lambda _: time.sleep(2))
                future.wait()
            case "destroy":
                dist.destroy_process_group()
            case "behind":
                time.sleep(0.5)
                dist.all_reduce(torch.ones(()))
            case "swallow":
                while True:
                    with contextlib.suppress(BaseException):
                        dist.all_reduce(torch.ones(()))
            case "count":
                count()
            case "child":
                multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True, name="left alone").start()
            case "hook":
                register_module_forward_pre_hook(doubled)
            case "settings":
                torch.set_default_dtype(torch.float64)
                torch.set_num_threads(2)
                torch.use_deterministic_algorithms(True)
                os.chdir("/")


def freeze() -> None:
    """Stops all processes of this host: nothing is heard of it, and no connection closes."""
    Path(f"{FOLDER}/frozen").touch()
    mark = {f"{name}={os.environ[name]}".encode() for name in ("GEMINI_RUN_ID", "GEMINI_HOST_ID")}
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), key=os.getpid().__eq__):
        with contextlib.suppress(OSError):
            if mark <= environment(pid):
                os.kill(pid, signal.SIGSTOP)


def count() -> None:
    """Writes down how much this process, its launcher and its agent have."""
    gc.collect()
    pids, agent = {"own": os.getpid(), "launcher": os.getppid()}, lifecycle.try_connect(os.environ["GEMINI_RUN_ID"], host_id())
    if agent is not None:
        with agent:
            pids["agent"] = credentials(agent)[0]
    found = {f"descriptors, {name}": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
    found |= {"threads": len(os.listdir("/proc/self/task")), "children": len(multiprocessing.active_children())}
    found |= {"objects": len(gc.get_objects())}
    found |= {"tensors": sum(isinstance(each, torch.Tensor) for each in gc.get_objects())}
    found |= {"KiB": int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")))}
    with open(f"{FOLDER}/counts", "a") as file:
        print(json.dumps(found), file=file)


class Telling:
    """A part of the state that is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        reached("loading")


def doubled(module: nn.Module, inputs: Any) -> Any:
    return tuple(2 * each for each in inputs) if isinstance(module, nn.Sequential) else None


def whole(state: Any) -> Any:
    """The state with what this rank holds of sharded tensors in their places."""
    return tree_map_only(DTensor, DTensor.to_local, state)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


def train() -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    assert os.environ.setdefault("SET_BY_AN_ATTEMPT", str(os.getpid()) + os.environ["TORCHELASTIC_RESTART_COUNT"]).endswith(
        os.environ["TORCHELASTIC_RESTART_COUNT"]
    )  # what libraries set in the environment, the next attempt does not find
    with open(f"{FOLDER}/rank-{rank}", "a", buffering=1) as trace:
        print("attempt", os.getpid(), float(torch.rand(())).hex(), file=trace)  # random numbers begin anew as well
        reached("start")
        if world > 1:
            dist.init_process_group("gloo")
        reached("group")
        torch.manual_seed(0)
        net = network()
        if KEEPER.startswith("pipeline"):
            net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        model: Any = net if world == 1 else fully_shard(net) if KEEPER.startswith("sharded") else DistributedDataParallel(net)
        if KEEPER == "compiled":
            model.compile(backend="eager")
            print("attempt", os.getpid(), file=opened, flush=True)
            ends[0].send(b"a")
        if KEEPER.startswith("pipeline"):
            topk = {"compress": {"method": "topk", "ratio": 0.1}}
            GradientSynchronizer(
                model, [{"params": "*", **topk, **({"every": 3, "outer": {}} if KEEPER.startswith("pipeline-local") else {})}]
            )
        reached("model")
        torch.manual_seed(int(rank))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        loader: Any = DataLoader(TensorDataset(torch.randn(48, 8)), 8, shuffle=True, num_workers=1, persistent_workers=True)
        if KEEPER == "dataset":
            loader = DataLoader(counting, 8, shuffle=True)
        start, checkpointer = 0, None
        if KEEPER != "nothing" and not KEEPER.endswith("-alone"):
            loader = gemini_ft.resumable(loader)
            state: dict[str, Any] = {"scheduler": scheduler, "loader": loader, "telling": Telling()}
            state |= {"generator": generator} if KEEPER == "generator" else {}
            checkpointer = gemini_ft.Checkpointer(model, optimizer, state=state, on_late="wait")
            start = checkpointer.resume()
        reached("resumed")
        batches = (batch for _ in iter(int, 1) for batch in loader)  # epoch after epoch
        for step in range(start, STEPS):
            noise = torch.rand((), generator=generator) if KEEPER == "generator" else 1
            loss = model(noise * next(batches)[0]).square().mean()
            loss.backward()
            reached(step, model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print("step", step, loss.item().hex(), file=trace)
            if checkpointer is not None:
                checkpointer.step()
                checkpointer.flush()
        final = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        print("end", digest(whole(final)), file=trace)
        if checkpointer is not None and KEEPER != "generator":
            checkpointer.close()


def main(function: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    Path(FOLDER).mkdir(exist_ok=True)

    global opened, ends
    if KEEPER == "compiled":  # what a script has opened before it trains
        opened, ends = open(f"{FOLDER}/opened", "a"), socket.socketpair()  # noqa: SIM115

    def left() -> None:
        try:
            function()
        finally:
            reached("leaving")

    gemini_ft.run(left)
    if KEEPER == "compiled":
        print("received", ends[1].recv(10).decode(), file=opened, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(train)
