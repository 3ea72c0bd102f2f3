"""The backend's own all-reduce of the whole tensor: what the others are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .base import Dimensions, Scheme, admit_dense
from .rows import from_dense, to_tensor


class Dense(Scheme):
    """Ring all-reduce. A sparse gradient is made dense for it; of the sum, units that are all zero are left out again.

    The order of addition is the backend's, the same on all ranks.
    """

    name = "dense"
    dimensions = Dimensions("ring", "incremental", "parallelism", "balanced")

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        matrix, _ = admit_dense(tensor, group, self._describe(tensor))
        dist.all_reduce(matrix, group=group)
        if tensor.layout == torch.strided:
            return matrix.reshape(tensor.shape).to(tensor.device)
        return to_tensor(from_dense(matrix), tensor)
