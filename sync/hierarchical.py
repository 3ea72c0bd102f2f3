"""Dense sums inside a host, sparse ones between hosts: Zen's way on machines with several GPUs (section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.torch_versions import all_gather_single, reduce_scatter_single
from gemini_ft.validation import checked

from .backends import open_exchange
from .base import Scheme, SparseScheme, admit_dense
from .options import LocalSize
from .rows import from_dense, from_matrix


class Hierarchical(Scheme):
    """Reduce-scatter in the host, ``inter`` among ranks of the same place in their hosts, all-gather in the host.

    Inside a host all units travel, dense, over links that are fast; of what travels between hosts each rank carries its share.
    Units whose sum is zero are left out of the result.

    ``local_size``: ranks per host; neighbours in rank share a host.

    The groups of hosts and places are made at the first call; all later ones take the same group.
    """

    name = "hierarchical"

    @checked
    def __init__(self, inter: SparseScheme, local_size: LocalSize) -> None:
        self.inter, self.local_size = inter, local_size
        self._groups: tuple[ProcessGroup, ProcessGroup, ProcessGroup] | None = None  # whole, host, place

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        matrix, exchange = admit_dense(tensor, group, self._describe(tensor))
        host, place = self._groups_of(group)
        rows, width = matrix.shape
        share = -(-rows // host.size())
        padded = matrix.new_zeros(share * host.size(), width)
        padded[:rows] = matrix
        own = padded.new_empty(share, width)
        reduce_scatter_single(own, padded, group=host)
        between = open_exchange(place, exchange.device, self._describe(tensor))
        all_gather_single(padded, self.inter.reduce(from_dense(own), between).dense(), group=host)
        return from_matrix(padded[:rows], tensor)

    def state_dict(self) -> dict[str, Any]:
        return self.inter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inter.load_state_dict(state)

    @property
    def _title(self) -> str:
        return f"{self.name} with hosts of {self.local_size}, {self.inter._title} between them,"

    def _groups_of(self, whole: ProcessGroup) -> tuple[ProcessGroup, ProcessGroup]:
        if self._groups is None:
            ranks, at = dist.get_process_group_ranks(whole), whole.rank()
            if len(ranks) % self.local_size:
                raise ValueError(f"local_size={self.local_size}: {len(ranks)} ranks are no multiple of it")
            first = at - at % self.local_size
            members = ranks[first : first + self.local_size], ranks[at % self.local_size :: self.local_size]
            host, place = (dist.new_group(each, use_local_synchronization=True) for each in members)
            self._groups = whole, host, place
        known, host, place = self._groups
        if known is not whole:
            raise ValueError("a hierarchical scheme serves one group, that of its first call; make another one for another group")
        return host, place
