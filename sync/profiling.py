"""Measures the figures that `costs` needs, on all ranks together; every rank gets the same ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from . import wire
from .costs import Link, Traffic
from .exchange import Exchange
from .omnireduce import BLOCK
from .partition import EvenPartition
from .rows import SparseRows, union

_PROBES = 2**18, 3 * 2**18  # bytes: more than a link lets through at once after a pause
_TRIES = 5


def traffic(gradient: SparseRows, exchange: Exchange) -> Traffic:
    """Measures density, densification and skew by an all-gather of all ranks' indices, without values."""
    bare = wire.encode(SparseRows(rows=gradient.rows, indices=gradient.indices, values=gradient.values[:, :0]), ("coo", "bitmap"))
    dtype = gradient.values.dtype
    sets = [wire.decode(each, gradient.rows, 0, dtype).indices for each in exchange.all_gather(bare)]
    return describe(sets, gradient.rows, gradient.width, dtype.itemsize)


def describe(sets: Sequence[torch.Tensor], rows: int, width: int, itemsize: int) -> Traffic:
    """The traffic of ranks' indices, each [n] ascending, in an index space of ``rows`` units of ``width`` values."""
    ranks, unit = len(sets), max(1, width * itemsize)
    densities, groups = {}, list(sets)
    for size in (*(1 << power for power in range((ranks - 1).bit_length())), ranks):
        groups = [union(sets[first : first + size], rows)[0] for first in range(0, ranks, size)]
        densities[size] = max(len(each) for each in groups) / max(1, rows)
    parts = EvenPartition(rows, ranks)
    pushed = torch.tensor([[len(part.indices) for part in parts.split(_bare(each, rows))] for each in sets])
    pulled = torch.tensor([len(part.indices) for part in parts.split(_bare(groups[0], rows))])
    block = BLOCK * itemsize
    blocks = -(-rows * width // BLOCK)
    return Traffic(
        ranks=ranks,
        nbytes=rows * unit,
        unit=unit,
        densities=densities,
        push_skew=_ratio(int(pushed.sum(0).max()), max(map(len, sets))),
        pull_skew=_ratio(ranks * int(pulled.max()), len(groups[0])),
        push_blocks=max(_fullest(_blocks(each, width, blocks), blocks, ranks) for each in sets),
        pull_blocks=_fullest(_blocks(groups[0], width, blocks), blocks, ranks),
        index=wire.index_bytes(rows),
        block=block,
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of the smaller of two index sets that the other one has, too (section 2.1)."""
    return _ratio(int(torch.isin(one, other).sum()), min(len(one), len(other)))


def link(exchange: Exchange) -> Link:
    """Measures the slowest rank's latency, and time per byte of a single stream while all ranks send at once.

    The time per byte is the difference between two long messages: what a pause has saved up for either (a token bucket, empty
    buffers) passes at any speed.
    """
    if exchange.size == 1:
        return Link(alpha=0.0, beta=1.0)  # nothing will travel
    neighbours = (exchange.rank + 1) % exchange.size, (exchange.rank - 1) % exchange.size

    def shift(message: torch.Tensor) -> Callable[[], object]:
        return lambda: exchange.shift(message, *neighbours)

    latency, short, long = (_seconds(shift(wire.new(size, exchange.device)), exchange) for size in (0, *_PROBES))
    return Link(alpha=latency, beta=max(long - short, 1e-12) / (_PROBES[1] - _PROBES[0]))


def slowest(seconds: Sequence[float], exchange: Exchange) -> list[float]:
    """The longest time of any rank, for each of ``seconds``. Collective."""
    own = wire.wrap(wire.as_bytes(torch.tensor(seconds, dtype=torch.float64, device=exchange.device)))
    everybody = torch.stack([wire.payload(each).view(torch.float64) for each in exchange.share(own)])
    return [float(each) for each in everybody.amax(0)]


def _seconds(call: Callable[[], object], exchange: Exchange) -> float:
    """The shortest time of some calls, as every disturbance makes them longer."""
    times = []
    for _ in range(_TRIES):
        exchange.agree()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(slowest(times, exchange))


def _bare(indices: torch.Tensor, rows: int) -> SparseRows:
    return SparseRows(rows=rows, indices=indices, values=indices.new_zeros(len(indices), 0))


def _blocks(indices: torch.Tensor, width: int, rows: int) -> torch.Tensor:
    """Numbers of the blocks, of ``rows``, that units reach into, ascending."""
    first, last = indices * width // BLOCK, (indices * width + max(0, width - 1)) // BLOCK
    reach = torch.arange(width // BLOCK + 2, device=indices.device)
    return union([torch.minimum(first.unsqueeze(1) + reach, last.unsqueeze(1)).flatten()], rows)[0]


def _fullest(blocks: torch.Tensor, count: int, parts: int) -> float:
    pieces = EvenPartition(count, parts).split(_bare(blocks, count))
    return max(_ratio(len(piece.indices), piece.rows) for piece in pieces)


def _ratio(top: int, bottom: int) -> float:
    return top / bottom if bottom else 0.0
