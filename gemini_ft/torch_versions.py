"""The differences between the supported versions of torch, in one place."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.12 and older have these under names that 2.13 deprecates.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
