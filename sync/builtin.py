"""PyTorch's own ways to sum gradients, with which the other schemes are compared.

`Dense` is the backend's all-reduce of the whole tensor. `AGsparse` gathers the indices and values of all ranks, and every rank sums for
itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.validation import checked

from . import wire
from .base import Dimensions, SparseScheme, admit_dense
from .exchange import Exchange
from .options import Check
from .rows import SparseRows, add_up, from_dense, from_matrix, to_matrix


class Dense(SparseScheme):
    """The ring all-reduce. A sparse gradient is made dense for it; units of the sum that are all zero are left out again.

    The order of addition is the backend's, the same on all ranks.

    ``check``: of strided tensors, compare first what the ranks were given, which takes log2(n) rounds of short messages. False: the caller
    knows that shapes and dtypes are the same, as DDP does of its buckets.
    """

    name = "dense"
    dimensions = Dimensions("ring", "incremental", "parallelism", "balanced")

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
    dimensions = Dimensions("ring", "one-shot", "centralization", None)

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        return add_up([wire.decode_like(message, gradient) for message in exchange.all_gather(wire.encode(gradient))])
