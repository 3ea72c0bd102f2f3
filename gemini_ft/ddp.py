"""What DistributedDataParallel remembers beside parameters and buffers, without which a restart changes the bits.

After its first backward DDP sorts the gradients into other buckets, by the order in which they became ready. The sum
over three or more ranks depends, in its last bits, on where in a bucket a value lies: a restarted DDP, whose first
step still uses the buckets of a first step, would end a little elsewhere. It also remembers whether buffers are to be
broadcast at the next forward, which under manual gradient synchronisation is not the same as at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

functions: Any = dist  # with private ones that type checkers do not see


def ddp_state(model: DistributedDataParallel) -> dict[str, Any]:
    """The state between two steps, as plain data. Collective the first time after a backward.

    Returns:
        ``buckets``: for each bucket the indices of its parameters, in order; empty as long as they are those DDP
        starts with. ``sync``: whether the next forward broadcasts the buffers, if the model does that at all.
    """
    return {"buckets": _buckets(model), "sync": model.require_forward_param_sync}


def restore_buckets(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Sort the gradients as they were. A built-in communication hook must be registered after this, or it is lost."""
    if state["buckets"]:
        _rebuild(model, state["buckets"])


def restore_sync(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Let the next forward broadcast buffers, or not, as it would have."""
    model.require_forward_param_sync = state["sync"]


def _buckets(model: Any) -> list[list[int]]:
    if model.find_unused_parameters and not model.static_graph:
        return []  # never sorted again
    if "_gemini_buckets" not in vars(model):
        # The next forward would sort them. Doing it now makes the result visible; the forward then has nothing to do.
        model.reducer._rebuild_buckets()
        model.logger.set_runtime_stats_and_log()
        text = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
        if not text:
            return list(vars(model).get("_gemini_first_buckets", []))
        model._gemini_buckets = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
    return list(model._gemini_buckets)


def _rebuild(model: Any, buckets: list[list[int]]) -> None:
    """Replace the reducer, as unpickling does. At its second step it will sort the gradients by itself again."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    with _assigning(buckets, model.bucket_bytes_cap):
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, hook_state in model._comm_hooks:
        functions._register_comm_hook(model.reducer, hook_state, hook)
    model._gemini_first_buckets = buckets


@contextmanager
def _assigning(buckets: Sequence[Sequence[int]], limit: int) -> Iterator[None]:
    """Inside, DDP's own assignment of parameters to buckets gives ``buckets``. It is reversed by whoever asks."""
    assign = functions._compute_bucket_assignment_by_size

    def assigned(*args: Any, **kwargs: Any) -> tuple[list[list[int]], list[int]]:
        return [list(bucket) for bucket in reversed(buckets)], [limit] * len(buckets)

    functions._compute_bucket_assignment_by_size = assigned
    try:
        yield
    finally:
        functions._compute_bucket_assignment_by_size = assign
