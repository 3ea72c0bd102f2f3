"""A communication hook for DistributedDataParallel.

ddp.register_comm_hook(HookState(sparse=Zen()), hook)
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup

from .base import Scheme
from .builtin import Dense
from .zen import Zen


@dataclass(kw_only=True)
class HookState:
    """The schemes that the hook applies to the two kinds of buckets."""

    sparse: Scheme = field(default_factory=Zen)  # for the gradients of modules with ``sparse=True``, each of which is a bucket of its own
    # for all others. A sparse scheme makes sense where most of a bucket is zero. DDP sees to it that all ranks have the same buckets, so
    # that need not be checked again.
    dense: Scheme = field(default_factory=lambda: Dense(check=False))
    group: ProcessGroup | None = None  # DDP's; None: the default group


def hook(state: HookState | ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over all ranks, in the background of the backward pass.

    ``state``: the schemes; a process group, or None for the default group, as torch's own hooks take it: the default schemes in that group.

    Raises:
        TypeError: another state.
    """
    if state is None or isinstance(state, ProcessGroup):
        state = HookState(group=state)
    elif not isinstance(state, HookState):
        raise TypeError(f"state={state!r}: must be a HookState, a process group, or None; for a scheme, give HookState(sparse=scheme)")
    gradient = bucket.buffer()
    gradient.div_(dist.get_world_size(state.group))  # before the sum, as DDP does: in 16 bits the sum may be too large
    scheme = state.sparse if gradient.layout == torch.sparse_coo else state.dense
    return scheme.all_reduce(gradient, state.group, async_op=True)
