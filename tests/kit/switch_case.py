"""What ranks do in the tests of switches."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import sync_case
import torch
import torch.distributed as dist
from agent_kit import WAIT, eventually
from switch_kit import KEY, PATIENCE

from gemini_ft.config import load_config
from gemini_ft.sync import switch_client
from gemini_ft.sync.ddp_hook import HookState, hook
from gemini_ft.sync.fpisa import FPISA, Accuracy
from gemini_ft.sync.omnireduce import OmniReduceStreaming
from gemini_ft.sync.rows import GradientError
from gemini_ft.sync.switchml import SwitchML
from gemini_ft.wire.trust import switch_key

SIZE = 5000
_MOST_STEPS = 2000


@dataclass
class Lived:
    """Attributes: ``before`` and ``after`` the death, whether sums went through the switch; ``wrong`` steps; the log."""

    before: bool = False
    after: bool = False
    wrong: list[int] = field(default_factory=list)
    ranks_differ: bool = False
    log: list[str] = field(default_factory=list)


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * step + rank))


def through_a_death(place: str, folder: str) -> Lived:
    """Steps until the switch was used, has died in the middle of it all, and is used again."""
    group, lived = sync_case.join(), Lived()
    handler = logging.Handler()
    handler.emit = lambda record: lived.log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemini_ft").addHandler(handler)
    logging.getLogger("gemini_ft").setLevel(logging.INFO)
    scheme = SwitchML(place, KEY, slots=8, patience=PATIENCE)
    died = False
    for step in range(_MOST_STEPS):
        own = gradient(group.rank(), step)
        total = scheme.all_reduce(own)
        right = sum((gradient(rank, step).double() for rank in range(group.size())), torch.zeros(SIZE, dtype=torch.float64))
        if float((total - right).abs().max()) > 1e-5:
            lived.wrong.append(step)
        lived.ranks_differ = lived.ranks_differ or not sync_case.alike(total, group)
        if step == 3:
            lived.before = scheme.in_use()
            mark(folder, "killed please")
        if step > 3 and not died and not scheme.in_use():
            died = True
            mark(folder, "another please")
        if died and scheme.in_use():
            lived.after = True
            break
        if died:
            time.sleep(0.05)  # a step
    dist.destroy_process_group()
    return lived


def without_descriptors(place: str) -> tuple[bool, bool]:
    """Whether the sum is right where one rank cannot open a socket, and whether the switch was used."""
    group = sync_case.join()
    scheme, parts = SwitchML(place, KEY), [gradient(rank, 0) for rank in range(2)]
    socket.getaddrinfo("127.0.0.1", 1)  # loads modules
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank() == 1:
        with open(os.devnull) as first_free:
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free.fileno(), hard))
    total = scheme.all_reduce(parts[group.rank()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    is_right, in_use = torch.equal(total, parts[0] + parts[1]), scheme.in_use()
    dist.destroy_process_group()
    return is_right, in_use


def fpisa_errors(place: str) -> list[tuple[Accuracy, Accuracy, bool]]:
    """By dtype: errors of FPISA and of FPISA-A where one rank has a large value at each place, and whether FPISA's are all small."""
    group, found = sync_case.join(), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        full, reduced = (FPISA(place, KEY, mode, patience=PATIENCE, compare_every=3) for mode in ("fpisa", "fpisa-a"))
        worst = 0.0
        for step in range(7):
            parts = [gradient(rank, step) for rank in range(group.size())]
            for rank, part in enumerate(parts):
                part[rank :: group.size()] *= 1000
            if step == 0:
                parts[0][0] = math.nan  # the packet that would be compared goes by the backend: another one is
            parts = [part.to(dtype) for part in parts]
            total = full.all_reduce(parts[group.rank()])
            reduced.all_reduce(parts[group.rank()])
            wide = torch.stack(parts).double()
            worst = max(worst, float(((total - wide.sum(0)).abs() / wide.abs().sum(0)).nan_to_num(0.0).max()))
        own, other = full.accuracy(dtype), reduced.accuracy(dtype)
        found.append((own, other, own.worst <= worst <= group.size() * torch.finfo(dtype).eps))
    dist.destroy_process_group()
    return found


@dataclass
class Colocated:
    """Attributes: ``wrong`` sums; whether the switches were ``used`` and, one being dead, were not; packets that this rank's one added."""

    wrong: list[str] = field(default_factory=list)
    used: tuple[bool, bool] = False, False
    added: int = 0


def beside_an_aggregator() -> Colocated:
    """Sums with an aggregator on each rank's host, which has a part of the slots; in the end that of the last rank dies."""
    group, lived = sync_case.join(), Colocated()
    rank, size = group.rank(), group.size()
    command = [sys.executable, "-m", "gemini_ft.cli.main", "switch", "--host", "127.0.0.1", "--port", "0", "--part", f"{rank + 1}/{size}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as aggregator:
        assert aggregator.stdout is not None
        address = aggregator.stdout.readline().split()[3].rstrip(",")
        places = [""] * size
        dist.all_gather_object(places, address)
        scheme = OmniReduceStreaming(",".join(places), switch_key(load_config()), slots=6, patience=PATIENCE)

        def add_up() -> None:
            for dtype in (torch.float32, torch.bfloat16):
                parts = [sync_case.rows((300, 256), sync_case.draw(40, 300, each), dtype, each) for each in range(size)]
                total = scheme.all_reduce(parts[rank]).to_dense().double()
                exact = torch.stack([part.to_dense().double() for part in parts])
                if bool(((total - exact.sum(0)).abs() > size * torch.finfo(dtype).eps * exact.abs().sum(0)).any()):
                    lived.wrong.append(f"{dtype}, off")
                if not sync_case.alike(total, group):
                    lived.wrong.append(f"{dtype}, ranks differ")

        add_up()
        before = scheme.in_use()
        dist.barrier()
        aggregator.send_signal(signal.SIGKILL if rank == size - 1 else signal.SIGCONT)
        dist.barrier()
        add_up()
        lived.used = before, scheme.in_use()
        aggregator.send_signal(signal.SIGTERM)
        report, _ = aggregator.communicate(timeout=WAIT)
        lived.added = json.loads(report)["added"] if report else 0
    dist.destroy_process_group()
    return lived


def with_few_rounds(place: str) -> list[str]:
    """Sums that are wrong or did not go through the switch, where a job has few rounds."""
    switch_client.MOST_ROUNDS = 50
    group, wrong = sync_case.join(), []
    scheme = SwitchML(place, KEY, slots=8, patience=PATIENCE)
    for step in range(20):
        total = scheme.all_reduce(gradient(group.rank(), step))
        if not torch.allclose(total, gradient(0, step) + gradient(1, step), atol=1e-5):
            wrong.append(f"step {step}: off")
        if not scheme.in_use():
            wrong.append(f"step {step}: not by the switch")
    dist.destroy_process_group()
    return wrong


def without_a_key() -> list[str]:
    """The errors where the second rank's key cannot be read, and where it is empty."""
    group, found = sync_case.join(), []

    def missing() -> bytes:
        if group.rank() == 1:
            raise OSError("it is not here")
        return KEY

    for key in (missing, lambda: b"" if group.rank() == 1 else KEY):
        try:
            SwitchML("127.0.0.1:1", key).all_reduce(torch.ones(3))
        except GradientError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


def mark(folder: str, text: str) -> None:
    Path(folder, text).touch()


def await_mark(folder: Path, text: str) -> None:
    eventually((folder / text).exists, text)


def ddp(place: str) -> tuple[list[float], list[float]]:
    """All weights after some steps: through the switch, and by DDP itself."""
    group = sync_case.join()

    def train(switched: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        if switched:
            ddp.register_comm_hook(HookState(dense=SwitchML(place, KEY, patience=PATIENCE), group=group), hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + group.rank()))
            (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        return [float(weight) for parameter in model.parameters() for weight in parameter.detach().flatten()]

    return train(True), train(False)
