"""The usual ways to sum gradients, with which the other schemes are compared.

`Dense` is the backend's all-reduce of the whole tensor. `AGsparse` gathers the indices and values of all ranks, and every rank sums for
itself. Beside them parameter servers: a single one; and parallel ones, in which every rank is the server of one part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.validation import checked

from . import wire
from .base import SparseScheme, admit_dense
from .exchange import Exchange
from .options import Check
from .partition import EvenPartition, Partition
from .rows import SparseRows, add_up, from_dense, from_matrix, to_matrix


class Dense(SparseScheme):
    """The ring all-reduce. A sparse gradient is made dense for it; units of the sum that are all zero are left out again.

    The order of addition is the backend's, the same on all ranks.

    ``check``: of strided tensors, compare first what the ranks were given, which takes log2(n) rounds of short messages. False: the caller
    knows that shapes and dtypes are the same, as DDP does of its buckets.
    """

    name = "dense"

    @checked
    def __init__(self, check: Check = True) -> None:
        self._check = check

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        matrix = gradient.dense()
        dist.all_reduce(matrix, group=exchange.group)
        return from_dense(matrix)

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return super()._sum(tensor, group)
        matrix = admit_dense(tensor, group, self._describe(tensor))[0] if self._check else to_matrix(tensor)
        dist.all_reduce(matrix, group=group)
        return from_matrix(matrix, tensor)


class AGsparse(SparseScheme):
    """Torch's own way with sparse gradients: simple, but its bytes grow with the number of ranks."""

    name = "agsparse"

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        return add_up([wire.decode_like(message, gradient) for message in exchange.all_gather(wire.encode(gradient))])


def push(gradient: SparseRows, partition: Partition, exchange: Exchange) -> SparseRows:
    """Sends each part to its server; returns the sum of the own part, added in rank order."""
    messages = [wire.encode(part, partition.formats) for part in partition.split(gradient)]
    size, width, dtype = partition.size(exchange.rank), gradient.width, gradient.values.dtype
    return add_up([wire.decode(message, size, width, dtype) for message in exchange.all_to_all(messages)])


class SparsePS(SparseScheme):
    """A sparse parameter server, colocated: contiguous parts; each worker pushes to and pulls from every server.

    The holder of the part with most units sends and receives most of the bytes.
    """

    name = "sparse-ps"

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        partition = EvenPartition(gradient.rows, exchange.size)
        own = wire.encode(push(gradient, partition, exchange))
        return partition.join(exchange.all_to_all([own] * exchange.size), gradient)


class SinglePS(SparseScheme):
    """One parameter server, rank 0: it receives all ranks' gradients and sends the sum back to each of them.

    All bytes go through its link, so that time grows with the number of ranks: the pattern with which the others are compared.
    """

    name = "single-ps"

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        exchange.agree()
        if exchange.rank:
            exchange.send(wire.encode(gradient), 0)
            return wire.decode_like(exchange.receive(0), gradient)
        dtype = gradient.values.dtype
        total = add_up([gradient.of(torch.promote_types(dtype, torch.float32))])  # wide, so that 16-bit values are rounded once
        for worker in range(1, exchange.size):
            total = add_up([total, wire.decode_like(exchange.receive(worker), gradient)])
        message = wire.encode(total.of(dtype))
        for worker in range(1, exchange.size):
            exchange.send(message, worker)
        return wire.decode_like(message, gradient)  # as the others have it: where a message is dense, units whose sum is zero are present
