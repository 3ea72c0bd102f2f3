"""SparCML's three algorithms (Renggli et al., SC 2019, section 5.3), and the quantisation of the last one's dense phase (section 6).

SSAR keeps the sum sparse, DSAR makes it dense. A message turns dense by itself where that is smaller. DSAR can send its sums in a few bits
each beside one norm per bucket, without bias, as QSGD does (Alistarh et al., NeurIPS 2017).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from gemini_ft.validation import Seed, checked

from . import wire
from .base import SparseScheme
from .builtin import push
from .exchange import Exchange
from .options import Bits, Bucket
from .partition import EvenPartition
from .rows import SparseRows, add_up, from_dense

_FLAG = 8  # bytes: whether what follows is quantised


def stream_seed(seed: int, number: int | str, rank: int) -> int:
    """The seed of a rank's chances for one sum: one that no other sum and no other rank has."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number} {rank}".encode(), digest_size=7).digest(), "little")


def quantise(values: torch.Tensor, bits: int, bucket: int, generator: torch.Generator) -> torch.Tensor:
    """A message with the values of a tensor, in ``bits`` bits each: the sign, and a level of the L2 norm of their bucket.

    A value v of a bucket with norm w becomes w / s times one of the two whole numbers beside s |v| / w, by chance, so that v is what is
    expected, with s = 2^(bits - 1) - 1 levels. Values of a part with a NaN, an infinity, or a norm that is no
    number of their dtype travel as they are: one of them may become the norm.
    """
    levels = 2 ** (bits - 1) - 1
    flat = values.flatten()
    buckets = torch.cat([flat, flat.new_zeros(-len(flat) % bucket)]).view(-1, bucket).to(torch.float64)
    largest = buckets.abs().amax(1, keepdim=True)  # what is divided by it can be squared, however small or large it was
    norms = largest * (buckets / largest.where(largest > 0, 1.0)).norm(dim=1, keepdim=True)
    if not bool((norms <= torch.finfo(values.dtype).max).all()):
        return _message(0, wire.as_bytes(values))
    scaled = levels * buckets.abs() / norms.where(norms > 0, 1.0)
    codes = (scaled + torch.rand(scaled.shape, generator=generator, dtype=torch.float64).to(scaled.device)).floor_().clamp_(max=levels)
    signed = codes.copysign(buckets).to(torch.int16) + levels
    return _message(1, wire.as_bytes(norms), _pack(signed.to(torch.uint8).flatten(), bits))


def restore(message: torch.Tensor, like: torch.Tensor, bits: int, bucket: int) -> torch.Tensor:
    """The values of a message, in the shape and dtype of ``like``."""
    payload = wire.payload(message)
    rest = payload[_FLAG:]
    if not int(payload[0]):
        return rest.view(like.dtype).view(like.shape)
    levels, buckets = 2 ** (bits - 1) - 1, -(-like.numel() // bucket)
    norms = rest[: 8 * buckets].view(torch.float64).unsqueeze(1)
    signed = _unpack(rest[8 * buckets :], bits).view(buckets, bucket).to(torch.float64) - levels
    values: torch.Tensor = (signed * (norms / levels)).flatten()[: like.numel()]
    return values.to(like.dtype).view(like.shape)


def _message(flag: int, *parts: torch.Tensor) -> torch.Tensor:
    return wire.wrap(torch.cat([parts[0].new_full((_FLAG,), flag), *parts]))


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits in bytes, the first in the lowest bits; uint8, as many as a whole number of bytes takes."""
    columns = codes.view(-1, 8 // bits)
    packed = columns[:, 0].clone()
    for place in range(1, columns.shape[1]):
        packed |= columns[:, place] << (bits * place)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    places = range(0, 8, bits)
    return torch.stack([packed >> place & (2**bits - 1) for place in places], 1).flatten()


class SSARRecursiveDoubling(SparseScheme):
    """log2(n) rounds: in round i, partners at distance 2**i swap and add their units. Zen's hierarchical centralization.

    Of a world that is no power of two, the ranks beyond the largest one hand their gradient to a partner and get the sum back.
    16-bit values are rounded after each round.
    """

    name = "ssar-recursive-doubling"

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
            theirs = wire.decode_like(exchange.shift(wire.encode(total), peer, peer), gradient)
            total = add_up([total, theirs] if exchange.rank < peer else [theirs, total])
            distance *= 2
        if helped:
            exchange.send(wire.encode(total), exchange.rank + core)
        return total


class SSARSplitAllgather(SparseScheme):
    """Contiguous parts to their owners, then an all-gather of the sums, indices and values."""

    name = "ssar-split-allgather"

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        return partition.join(exchange.all_gather(wire.encode(push(gradient, partition, exchange))), gradient)


class DSARSplitAllgather(SparseScheme):
    """The same push, then an all-gather of the sums as dense parts. Units whose sum is zero are left out of the result.

    ``bits``: null, or 2, 4 or 8: of each value of the sums in the second phase, which are then rounded as in QSGD, by chance and without
    bias (section 6 of the paper). Every rank has the same values, but they are no longer the exact sum.
    """

    name = "dsar-split-allgather"

    @checked
    def __init__(self, bits: Bits = None, bucket: Bucket = 1024, seed: Seed = 0) -> None:
        self._bits, self._bucket, self._seed = bits, bucket, seed
        self._sums = 0

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = push(gradient, partition, exchange)
        if self._bits is not None:
            return self._quantised(own, partition, exchange, self._bits)
        gathered = enumerate(exchange.all_gather(wire.encode(own, ("dense",))))
        parts = [wire.decode(each, partition.size(part), own.width, own.values.dtype) for part, each in gathered]
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
        likes = [own.values.new_empty(partition.size(part), own.width) for part in range(partition.parts)]
        gathered = zip(exchange.all_gather(message), likes, strict=True)
        return from_dense(torch.cat([restore(each, like, bits, self._bucket) for each, like in gathered]))
