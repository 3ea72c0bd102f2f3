"""SparCML's three algorithms (Renggli et al., SC 2019, section 5.3).

SSAR keeps the sum sparse, DSAR makes it dense. A message turns dense by itself where that is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from gemini_ft.validation import check_options

from . import wire
from .base import Dimensions, SparseScheme
from .dithering import quantise, restore, stream_seed
from .exchange import Exchange
from .options import SCHEME_OPTIONS
from .parameter_server import push
from .partition import EvenPartition
from .rows import SparseRows, add_up, from_dense


class SSARRecursiveDoubling(SparseScheme):
    """log2(n) rounds: in round i, partners at distance 2**i swap and add their units. Zen's hierarchical centralization.

    Of a world that is no power of two, the ranks beyond the largest one hand their gradient to a partner and get the sum back.
    16-bit values are rounded after each round.
    """

    name = "ssar-recursive-doubling"
    dimensions = Dimensions("hierarchy", "incremental", "centralization", None)

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        core = 1 << (exchange.size.bit_length() - 1)
        if exchange.rank >= core:
            exchange.send(wire.encode(gradient), exchange.rank - core)
            return wire.decode_like(exchange.receive(exchange.rank - core), gradient)
        helped = exchange.rank + core < exchange.size
        total = add_up([gradient, wire.decode_like(exchange.receive(exchange.rank + core), gradient)] if helped else [gradient])
        distance = 1
        while distance < core:
            peer = exchange.rank ^ distance
            theirs = wire.decode_like(exchange.swap(wire.encode(total), peer), gradient)
            total = add_up([total, theirs] if exchange.rank < peer else [theirs, total])
            distance *= 2
        if helped:
            exchange.send(wire.encode(total), exchange.rank + core)
        return total


class SSARSplitAllgather(SparseScheme):
    """Contiguous parts to their owners, then an all-gather of the sums, indices and values."""

    name = "ssar-split-allgather"
    dimensions = Dimensions("ring", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        gathered = dict(exchange.all_gather(wire.encode(push(gradient, partition, exchange))))
        dtype = gradient.values.dtype
        return partition.join([wire.decode(gathered[part], partition.size(part), gradient.width, dtype) for part in range(partition.parts)])


class DSARSplitAllgather(SparseScheme):
    """The same push, then an all-gather of the sums as dense parts. Units whose sum is zero are left out of the result.

    Args:
        bits: null, or 2, 4 or 8: of each value of the sums in the second phase, which are then rounded as in QSGD, by chance and without
            bias (section 6 of the paper). Every rank has the same values, but they are no longer the exact sum.
        bucket: values that share a norm, a multiple of 8.
        seed: of the chances.
    """

    name = "dsar-split-allgather"
    dimensions = Dimensions("ring", "one-shot", "parallelism", "imbalanced")

    def __init__(self, bits: Literal[2, 4, 8] | None = None, bucket: int = 1024, seed: int = 0) -> None:
        check_options("DSARSplitAllgather", SCHEME_OPTIONS[self.name], {"bits": bits, "bucket": bucket, "seed": seed})
        self._bits, self._bucket, self._seed = bits, bucket, seed
        self._sums = 0

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = push(gradient, partition, exchange)
        if self._bits is not None:
            return self._quantised(own, partition, exchange, self._bits)
        gathered = dict(exchange.all_gather(wire.encode(own, ("dense",))))
        parts = [wire.decode(gathered[part], partition.size(part), own.width, own.values.dtype) for part in range(partition.parts)]
        return from_dense(torch.cat([part.values for part in parts]))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums} if self._bits is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = int(state.get("sums", 0))

    @property
    def _title(self) -> str:
        return self.name if self._bits is None else f"{self.name} in {self._bits} bits, buckets of {self._bucket}, seed {self._seed},"

    def _quantised(self, own: SparseRows, partition: EvenPartition, exchange: Exchange, bits: int) -> SparseRows:
        chances = torch.Generator().manual_seed(stream_seed(self._seed, self._sums, exchange.rank))
        self._sums += 1
        message = quantise(own.dense(), bits, self._bucket, chances)
        gathered = dict(exchange.all_gather(message))
        likes = [own.values.new_empty(partition.size(part), own.width) for part in range(partition.parts)]
        return from_dense(torch.cat([restore(gathered[part], like, bits, self._bucket) for part, like in enumerate(likes)]))
