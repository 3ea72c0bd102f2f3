"""What the ranks of test_session_errors.py run: jobs that must be refused, or go on in a defined way."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from agent_kit import agent_pid, pause
from plain_case import start_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.agent.memory.slot_memory import EXTRAS_ROOM
from gemini_ft.config import load_config
from gemini_ft.errors import GeminiError
from gemini_ft.hosts import host_id
from gemini_ft.wire.worker_messages import GetStatus, Status
from gemini_ft.worker import recorder, rendezvous
from gemini_ft.worker.outcomes import Stats
from gemini_ft.worker.recorder import Recorder
from gemini_ft.worker.snapshot import PendingSnapshot, Snapshotter


class Recorded(logging.Handler):
    """What the user is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("gemini_ft").addHandler(self)
        logging.getLogger("gemini_ft").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def loop(
    steps: int,
    width: int = 8,
    state: tuple[str, ...] = (),
    during: Hook | None = None,
    drifted: bool = False,
    pause: float = 0.0,
    crash_at: int | None = None,
    odd: bool = False,
    close: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """``steps`` iterations from wherever the run is; what the ranks were told, and where they began."""
    told = Recorded()
    rank, world = start_ranks()
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    model = DistributedDataParallel(net) if world > 1 else net
    if drifted and rank == 1:
        next(net.parameters()).data.add_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedulers: dict[str, Any] = {name: torch.optim.lr_scheduler.StepLR(optimizer, 5) for name in state}
    schedulers |= {"odd": Odd()} if odd else {}
    given: dict[str, Any] = {"on_late": "wait", "timeout": 10.0} | options
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state=schedulers, **given)
    start = checkpointer.resume()
    if crash_at is not None and start >= crash_at:
        raise RuntimeError("the script crashes")
    for iteration in range(start, start + steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration=iteration)
        if during is not None and during(iteration, net, optimizer, checkpointer):
            break
        time.sleep(pause)
    settle(checkpointer)
    if close:
        checkpointer.close()
    stats = checkpointer.stats
    return {
        "start": start,
        "told": told.texts,
        "committed": stats.committed,
        "scalars": dict(checkpointer.scalars),
        "restored": stats.restored,
        "memfds": memfds(),
        "longest": max(list(stats.blocked)[1:], default=0.0),  # the first one makes the slots
    }


class Odd:
    """State that only pickle can encode."""

    def state_dict(self) -> dict[str, Any]:
        return {"how": {"deep": Odd()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["how"]["deep"], Odd)


def memfds() -> int:
    """Distinct slots that this process keeps alive."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:gemini:" in os.readlink(entry.path):
                found.add(os.stat(entry.path).st_ino)
    return len(found)


def settle(checkpointer: gemini_ft.Checkpointer) -> None:
    """Until the last snapshot is committed, or given up."""
    stats, end = checkpointer.stats, time.monotonic() + 20
    while len(stats.commit_seconds) + stats.skipped < stats.snapshots and time.monotonic() < end:
        time.sleep(0.01)


Hook = Callable[[int, nn.Module, torch.optim.Optimizer, gemini_ft.Checkpointer], bool | None]  # True: training is over


def agent_of() -> int:
    pid = agent_pid(os.environ["GEMINI_RUN_ID"], host_id())
    assert pid is not None
    return pid


def grow_small_state(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """From iteration 2 on small state is more than slots have had room for."""
    checkpointer.scalars["grown"] = "g" * 2 * EXTRAS_ROOM


def write_during_the_copy(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Hold the agent back, so that the snapshot of iteration 2 cannot begin; then write a parameter."""
    _write_during_the_copy(iteration, next(net.parameters()).detach(), checkpointer)


def write_data_during_the_copy(iteration: int, net: nn.Module, optimizer: Any, checkpointer: gemini_ft.Checkpointer) -> None:
    """As `write_during_the_copy`, through ``.data``, as averages are put in the weights' place before a validation."""
    _write_during_the_copy(iteration, next(net.parameters()).data, checkpointer)


def _write_during_the_copy(iteration: int, weight: torch.Tensor, checkpointer: gemini_ft.Checkpointer) -> None:
    if iteration == 1:
        settle(checkpointer)
        os.kill(agent_of(), signal.SIGSTOP)
    elif iteration == 2:
        weight.add_(1)
        os.kill(agent_of(), signal.SIGCONT)


def write_unseen(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Write a parameter after the copy, in a way that its version counter does not show."""
    if iteration == 2:
        wait_for_copy()
        next(net.parameters()).data.add_(1)


def write_with_permission(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    with checkpointer.mutate(), torch.no_grad():
        next(net.parameters()).mul_(0.5)


def drift(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Rank 1 goes its own way after iteration 2."""
    if iteration == 2 and os.environ["RANK"] == "1":
        with checkpointer.mutate(), torch.no_grad():
            next(net.parameters()).add_(1)


def compare_with_a_gap(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Ranks are compared every 10 iterations; rank 1 has no snapshot of the 10th. What each digests is among its scalars."""
    if iteration > 0:
        return
    submit, record, digested = Snapshotter.submit, recorder.Recorder.record, checkpointer.scalars.setdefault("digested", [])

    def noted(self: Snapshotter, job: PendingSnapshot) -> None:
        if job.digest:
            digested.append(job.iteration)
        submit(self, job)

    def left_out(self: recorder.Recorder, iteration: int, *rest: Any, **named: Any) -> None:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with self.slots_lock:
                held.set()
                over.wait()

        holder = threading.Thread(target=hold)
        if os.environ["RANK"] == "1" and iteration == 10:
            holder.start()
            held.wait()
        record(self, iteration, *rest, **named)
        over.set()

    Snapshotter.submit = noted  # type: ignore[method-assign]
    recorder.Recorder.record = left_out  # type: ignore[method-assign]


def add_buffer(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """A buffer that the script had not built, after iteration 2."""
    if iteration == 2:
        net.register_buffer("extra", torch.ones(1000))


def add_parameters(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """A new group of parameters after iteration 2."""
    if iteration == 2:
        extra = nn.Parameter(torch.ones(1000))
        extra.grad = torch.ones(1000)
        optimizer.add_param_group({"params": [extra], "lr": 0.1})


def kill_the_agent(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """That of one host, after iteration 2."""
    if iteration == 2 and os.environ["RANK"] == os.environ["VICTIM"]:
        settle(checkpointer)
        os.kill(agent_of(), signal.SIGKILL)


def stop_the_agent(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """That of one host hangs for 20 iterations."""
    if os.environ["RANK"] == os.environ["VICTIM"]:
        if iteration == 2:
            settle(checkpointer)
            os.kill(agent_of(), signal.SIGSTOP)
        elif iteration == 22:
            os.kill(agent_of(), signal.SIGCONT)


def stop_the_agent_for_good(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> bool:
    """That of one host hangs, and nobody wakes it up."""
    if os.environ["RANK"] == os.environ["VICTIM"] and iteration == 2:
        settle(checkpointer)
        os.kill(agent_of(), signal.SIGSTOP)
    return until_another_agent_commits(iteration, net, optimizer, checkpointer)


_first: dict[str, int | None] = {}  # agent: the victim's at the first step; committed: with the one after it


def until_another_agent_commits(
    iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer
) -> bool:
    """Training is over once twenty further steps are committed after the victim's host has another agent."""
    is_over = torch.tensor(1)
    if os.environ["RANK"] == os.environ["VICTIM"]:
        committed, agent = checkpointer.stats.committed or 0, agent_pid(os.environ["GEMINI_RUN_ID"], host_id())
        is_another = agent not in (None, _first.setdefault("agent", agent))
        is_over = torch.tensor(int(is_another and committed >= (_first.setdefault("committed", committed) or 0) + 20))
    dist.all_reduce(is_over, dist.ReduceOp.MIN)
    return bool(is_over)


def stop_the_next_agent(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """The agent dies after iteration 2, and the next one stands still for some seconds as soon as it listens."""
    if iteration == 2:
        settle(checkpointer)
        old = agent_of()

        def wait_for_it() -> None:
            while (pid := agent_pid(os.environ["GEMINI_RUN_ID"], host_id())) in (None, old):
                pass
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            time.sleep(4.0)
            os.kill(pid, signal.SIGCONT)

        threading.Thread(target=wait_for_it).start()
        os.kill(old, signal.SIGKILL)


def wait_for_copy() -> None:
    """Until the snapshot thread has nothing to do."""
    (snapshotter,) = (each for each in gc.get_objects() if isinstance(each, Snapshotter))
    end = time.monotonic() + 20
    while snapshotter.is_copying and time.monotonic() < end:
        time.sleep(0.01)


def wait_for_upload(iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, checkpointer: gemini_ft.Checkpointer) -> None:
    """Every upload is over before the next step, so that none is left out."""
    settle(checkpointer)
    begin = time.monotonic()
    while _uploads_are_due(os.environ["GEMINI_RUN_ID"]) and time.monotonic() < begin + 20:
        pause(begin)


@functools.cache
def _hosts(run: str) -> set[str]:
    """The hosts of a run, each with an agent; every agent of the machine is asked, and so only once in each rank."""
    documents = [json.loads(answer.document) for answer in lifecycle.ask_all(GetStatus()) if isinstance(answer, Status)]
    return {document["host"] for document in documents if document["run"] == run}


def _uploads_are_due(run: str) -> bool:
    """Whether an agent of the run uploads, or the leader's has not yet looked through the storage."""
    streams: dict[str, Any] = {}
    for host in _hosts(run):
        with contextlib.suppress(GeminiError, OSError):
            if (text := lifecycle.status(run, host)) is not None:
                streams[host] = json.loads(text)["streams"]["main"]
    leaders = [streams[stream["leader"]]["storage"] for stream in streams.values() if stream["leader"] in streams]
    return any(storage is not None and not storage["looked_through"] for storage in leaders) or any(
        (stream["storage"] or {}).get("uploading") for stream in streams.values()
    )


def growth(numel: int, steps: int) -> dict[str, int]:
    """By how many bytes, slots apart, the highest of a few steps with snapshots is above that of steps without; the agent's too."""
    start_ranks()
    net = nn.Linear(numel // 1000, 1000, bias=False)  # every rank for itself: gloo has temporaries of its own
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(1, numel // 1000)

    def train(after: Callable[[], None]) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net(inputs).sum().backward()
            optimizer.step()
            after()

    def highest(pid: int, after: Callable[[], None]) -> int:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the highest so far
        train(after)
        return memory_of(pid, "VmHWM")

    train(lambda: None)
    without = highest(os.getpid(), lambda: None)
    checkpointer = gemini_ft.Checkpointer(net, optimizer, on_late="wait", chunk_bytes=2**20)
    checkpointer.resume()
    train(checkpointer.step)
    checkpointer.flush()  # the replicas' slots, too, have all their pages, which are the agent's as well
    agent = agent_of()
    settled = memory_of(agent, "VmRSS")
    with_snapshots = highest(os.getpid(), checkpointer.step) - memory_of(os.getpid(), "RssShmem")
    return {
        "worker": with_snapshots - without,
        "agent": highest(agent, checkpointer.step) - settled,
        "shard": checkpointer.stats.shard_bytes,
    }


def memory_of(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


@contextlib.contextmanager
def listening() -> Iterator[list[bytes]]:
    """All that this rank says to the others meanwhile."""
    said: list[bytes] = []
    tell = rendezvous.exchange_bytes

    def listen(blob: bytes, timeout: float) -> list[bytes]:
        said.append(blob)
        return tell(blob, timeout)

    rendezvous.exchange_bytes = listen
    try:
        yield said
    finally:
        rendezvous.exchange_bytes = tell


def overheard() -> dict[str, Any]:
    """Whether the run's secret was in anything that this rank told the others through the network."""
    with listening() as said:
        start_ranks()
        secret = Recorder(load_config(), "main", Stats(), resizable=False).session.secret
    return {"said": len(said), "length": len(secret), "overheard": any(secret in blob for blob in said), "secret": secret}


def flip(tensor: torch.Tensor) -> None:
    """Flips a bit, as faulty memory does: no counter of torch shows it."""
    tensor.detach().view(-1).view(torch.int32).numpy()[0] ^= 1 << 20


def flip_in(place: str, at: int, iteration: int, net: nn.Module, optimizer: torch.optim.Optimizer, _: gemini_ft.Checkpointer) -> None:
    """On rank 1, once in the run, a bit flips after iteration ``at``: in a weight, a moment, or a gradient that has been reduced."""
    done, weight = Path(os.environ["GEMINI_LOG_DIR"]) / "flipped", next(net.parameters())
    if os.environ["RANK"] != "1" or iteration != at or done.exists():
        return
    done.touch()
    if place == "gradient":
        hook = optimizer.register_step_pre_hook(lambda *_: (flip(weight.grad), hook.remove())[0])  # type: ignore[arg-type, func-returns-value]
    else:
        flip(weight if place == "weight" else optimizer.state[weight]["exp_avg"])


def drag(how: str, culprit: int, since: int, seconds: float, iteration: int, *_: Any) -> None:
    """Lets the rank ``culprit`` take ``seconds`` longer for each step from ``since`` on; it "computes" meanwhile, or "sleeps" (``how``)."""
    if int(os.environ["RANK"]) == culprit and iteration >= since:
        end = time.monotonic() + seconds
        while how == "computes" and time.monotonic() < end:
            sum(range(1000))
        time.sleep(max(0.0, end - time.monotonic()))
