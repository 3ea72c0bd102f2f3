"""One host of benchmarks/switch.py: all rows in turns, in another order in each round; rank 0 writes what was measured as JSON.

Argument: a JSON object with rows and bits (per second, of the link), densities, losses, budget (seconds), least and most (rounds), seed,
key (hexadecimal), folder, switches (addresses of the switch for each loss, and of those on the hosts), pids (of the same processes).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini_ft.sync import auto, costs
from gemini_ft.sync.backends import open_exchange
from gemini_ft.sync.omnireduce import BLOCK
from gemini_ft.sync.rows import to_rows
from gemini_ft.sync.schemes import SCHEMES, SWITCH_SCHEMES
from gemini_ft.sync.switch_scheme import SwitchLink, SwitchScheme
from gemini_ft.sync.switchml import SwitchMLStream
from lossy_switch import Lossy
from traces import Trace

EXPONENT = 1.0  # of the Zipf law of sparse gradients, as DeepFM's in traces.py
PATIENCE = 20.0  # seconds: a switch that lacks processors must not count as dead
SHORT = 0.25  # seconds, by the formula: such a call is measured after one of its own kind, as it is in training
SLOTS, PACKET = 256, 1408  # the schemes' defaults
ALONE_PACKETS, ALONE_TRIES = 200, 5
COLOCATED = "omnireduce-streaming, on the hosts"


@dataclass
class Point:
    """One row on one network; lists have a figure per round. Seconds are those of the slowest host, None without the switch."""

    scheme: str
    density: float
    loss: float
    formula: float = 0.0  # seconds
    seconds: list[float | None] = field(default_factory=list)
    cpu: float = 0.0  # processor seconds of a rank per call, mean over ranks, median over rounds
    switch_cpu: float | None = None  # of all processes of the switch
    busy: float = 0.0  # share of the machine's processors
    again: float | None = None  # packets that a rank sent again per call
    slot: float | None = None  # seconds from a packet to its sum while all slots are in use
    alone: float | None = None  # seconds, while no other slot is


@dataclass
class Row:
    """A row and its parts on this rank."""

    point: Point
    call: Callable[[], torch.Tensor]
    gradient: torch.Tensor
    scheme: SwitchScheme[Any] | None = None
    pids: Sequence[int] = ()
    seed: int = 0
    samples: list[list[float]] = field(default_factory=list)

    def run(self) -> torch.Tensor:
        """One call, with losses."""
        for link in self.links():
            for part in link.client.parts if link.ready else ():
                if self.point.loss and not isinstance(part.socket, Lossy):
                    part.socket = Lossy(part.socket.socket, self.point.loss, self.seed)
        return self.call()

    def links(self) -> list[SwitchLink]:
        group = dist.group.WORLD
        assert group is not None
        return list(self.scheme._links.get(group, {}).values()) if self.scheme is not None else []


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rows = list(_rows(job))
    for row in rows:
        _check(row)
    rounds, until = 0, time.monotonic() + job["budget"]
    while rounds < job["most"] and (rounds < job["least"] or _agreed(time.monotonic() < until)):
        for row in random.Random(job["seed"] + rounds).sample(rows, len(rows)):
            if row.point.formula < SHORT:
                row.run()
            row.samples.append(_one(row))
        rounds += 1
    for row in rows:
        _summarise(row)
    if dist.get_rank() == 0:
        Path(job["folder"], "result.json").write_text(json.dumps([asdict(row.point) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _agreed(more: bool) -> bool:
    """Rank 0's word."""
    word = torch.tensor([more])
    dist.broadcast(word, 0)
    return bool(word)


# -- the rows


def _rows(job: dict[str, Any]) -> Iterator[Row]:
    link = costs.Link(alpha=0.0, beta=8 / job["bits"])
    for density in job["densities"]:
        gradient = _gradient(density, job["rows"])
        traffic = _traffic(gradient)
        everywhere = traffic.densities[traffic.ranks]  # rows are as long as blocks, so this is the share of blocks too
        elements = gradient.numel()
        switched = {
            "switchml": costs.switchml(elements, link),
            "fpisa": costs.fpisa(elements, link),
            "omnireduce-streaming": costs.omnireduce_streaming(traffic.nbytes, everywhere, link),
        }
        for name in ("ring",) if density == 1 else ("omnireduce", "zen"):
            formula = costs.seconds("dense" if name == "ring" else name, traffic, link)
            yield Row(Point(name, density, 0.0, formula), _without_switch(name, gradient), gradient)
        names = ("switchml", "fpisa") if density == 1 else ("omnireduce-streaming",)
        for name in names:
            for loss in job["losses"]:
                yield _through_switch(name, Point(name, density, loss, switched[name]), gradient, str(loss), job)
        if density < 1:
            formula = costs.omnireduce_streaming(traffic.nbytes, everywhere, link, colocated=traffic.ranks)
            yield _through_switch("omnireduce-streaming", Point(COLOCATED, density, 0.0, formula), gradient, "hosts", job)


def _gradient(density: float, rows: int) -> torch.Tensor:
    """Float32 [rows, BLOCK]: dense, or with the rows of tokens that follow a Zipf law."""
    rank = dist.get_rank()
    if density == 1:
        return torch.randn(rows, BLOCK, generator=torch.Generator().manual_seed(rank))
    return Trace("", density, EXPONENT, rows, "").gradient(rank, rows, BLOCK)


def _traffic(gradient: torch.Tensor) -> costs.Traffic:
    group = dist.group.WORLD
    assert group is not None
    return auto.traffic(to_rows(gradient), open_exchange(group, torch.device("cpu"), "a gradient"))


def _without_switch(name: str, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
    if name != "ring":
        scheme = SCHEMES[name]()
        return lambda: scheme.all_reduce(gradient)
    total = gradient.clone()

    def ring() -> torch.Tensor:
        """In place. The copy is in its time, because a scheme leaves its input as it is."""
        total.copy_(gradient)
        dist.all_reduce(total)
        return total

    return ring


def _through_switch(name: str, point: Point, gradient: torch.Tensor, switch: str, job: dict[str, Any]) -> Row:
    scheme = SWITCH_SCHEMES[name](job["switches"][switch], bytes.fromhex(job["key"]), patience=PATIENCE)
    return Row(point, lambda: scheme.all_reduce(gradient), gradient, scheme, job["pids"][switch], job["seed"] + 100 + dist.get_rank())


def _check(row: Row) -> None:
    """The first call: its sum must be right, and the switch's."""
    total = row.run().to_dense()
    right = row.gradient.to_dense().clone()
    dist.all_reduce(right)
    point = row.point
    if not torch.allclose(total, right, rtol=1e-4, atol=1e-4):
        raise RuntimeError(f"{point.scheme}, density {point.density}, loss {point.loss}: the sum is off by {(total - right).abs().max()}")
    if row.scheme is not None and not row.scheme.in_use():
        raise RuntimeError(f"{point.scheme}, density {point.density}, loss {point.loss}: the sum did not go through the switch")


# -- measuring


def _one(row: Row) -> list[float]:
    """Seconds, processor seconds of this rank, of the switch and of the machine, of how many, packets sent again, whether by the switch."""
    dist.barrier()
    again, switch, busy, own, begin = _again(row), _on_processor(row.pids), _busy(), time.process_time(), time.perf_counter()
    row.run()
    seconds, own = time.perf_counter() - begin, time.process_time() - own
    dist.barrier()  # the switch has served all
    busy, offered = _busy() - busy, (time.perf_counter() - begin) * len(os.sched_getaffinity(0))
    used = row.scheme is None or row.scheme.in_use()
    return [seconds, own, _on_processor(row.pids) - switch, busy, offered, _again(row) - again, float(used)]


def _again(row: Row) -> int:
    return sum(link.client.sent_again for link in row.links() if link.ready)


def _on_processor(pids: Sequence[int]) -> float:
    """Seconds that processes of one thread have run; /proc/PID/stat has ticks of 10 ms, which is too coarse."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _busy() -> float:
    """Processor seconds of the whole machine, all but idle and waiting ones."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _summarise(row: Row) -> None:
    point = row.point
    table = torch.tensor(row.samples, dtype=torch.float64)
    slowest, total = table.clone(), table.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    point.seconds = [seconds if used else None for seconds, *_, used in slowest.tolist()]
    mean = total / dist.get_world_size()
    point.cpu = float(mean[:, 1].median())
    point.busy = float(table[:, 3].sum() / table[:, 4].sum())
    if row.scheme is None:
        return
    point.switch_cpu = float(table[:, 2].median())
    point.again = float(mean[:, 5].mean())
    kept = [seconds for seconds in point.seconds if seconds is not None]
    if point.density == 1 and kept:
        packets = -(-row.gradient.numel() * 4 // PACKET)
        slots = min(SLOTS, packets)
        point.slot = statistics.median(kept) * slots / (packets + slots)  # a round more, which says the exponents
    if point.scheme == "switchml" and not point.loss and row.scheme.in_use():
        point.alone = _alone(row.links()[0])


def _alone(link: SwitchLink) -> float:
    """Seconds from a packet to its sum with one slot in use."""
    packets = torch.randn(ALONE_PACKETS, PACKET // 4).numpy()
    times = []
    for _ in range(ALONE_TRIES):
        stream = SwitchMLStream(packets, 1, dist.get_world_size())
        dist.barrier()
        begin = time.perf_counter()
        link.client.run(stream)
        times.append((time.perf_counter() - begin) / (ALONE_PACKETS + 1))
    return statistics.median(times)


if __name__ == "__main__":
    main()
