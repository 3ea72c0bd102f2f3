"""The differences between the supported versions of DeepSpeed, and the objects that its checkpoint files hold.

Its optimizers' attributes are relied on. 0.18.6 is the first version that keeps the scale of a loss in fp16 at stage 0 in an object of
its own (``loss_scale_config``); before, it is spread over attributes of the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from packaging.version import Version

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.rng import rng_trackers

_log = logging.getLogger("gemini_ft")
_OLDEST, _FIRST_UNKNOWN = "0.18.6", "0.20"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_unmanaged_backward_count")


def check_version() -> None:
    """Refuses a DeepSpeed whose optimizers are not known. Raises UnsupportedStateError: another version."""
    if not Version(_OLDEST) <= Version(Version(deepspeed.__version__).base_version) < Version(_FIRST_UNKNOWN):
        raise UnsupportedStateError(f"deepspeed {deepspeed.__version__} is not supported; install deepspeed>={_OLDEST},<{_FIRST_UNKNOWN}")


def counters(engine: Any) -> dict[str, Any]:
    """The counters of the engine. Older versions do not count the backward passes that the engine was not told of."""
    return {name: getattr(engine, name) for name in _COUNTERS if hasattr(engine, name)}


def offsets_in_group(optimizer: Any, group: int) -> Sequence[int]:
    """Where each parameter of a group begins in the flat group of ZeRO 1 and 2.

    Older versions do not know ``parameter_alignment``: there parameters lie end to end.
    """
    known: Sequence[Sequence[int]] | None = getattr(optimizer, "round_robin_bit16_offsets", None)
    return end_to_end(optimizer.round_robin_bit16_groups[group]) if known is None else known[group]


def groups_of_sub_groups(optimizer: Any) -> Sequence[Any]:
    """The process group over which ZeRO 3 partitions each sub-group. Older versions have one for all of them."""
    known: Sequence[Any] | None = getattr(optimizer, "sub_group_process_groups", None)
    return [optimizer.dp_process_group] * len(optimizer.fp16_groups) if known is None else known


def manages_accumulation(engine: Any) -> bool:
    """Whether the engine decides by itself which backward pass ends an accumulation; older versions always do."""
    asked = getattr(engine, "managed_gradient_accumulation", None)
    return asked is None or bool(asked())


def older_schedules(engine: Any) -> list[str]:
    """The sections of the configuration by which DeepSpeed before 0.19 changes a training as it goes on."""
    own = vars(engine)  # another name is looked for in the user's module
    methods = getattr(own.get("compression_scheduler"), "different_compression_methods", {})
    used = {
        "progressive_layer_drop": own.get("progressive_layer_drop") is not None,
        "compression_training": own.get("quantizer") is not None or any(method.get("enabled") for method in methods.values()),
    }
    return [name for name, is_used in used.items() if is_used]


def put_back_trackers(saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Gives tracked generators the states of a snapshot. The script adds those that are not there yet, once."""
    trackers = rng_trackers()
    for kind, states in saved.items():
        there = trackers[kind].get_states() if kind in trackers else {}
        if common := {name: state for name, state in states.items() if name in there}:
            trackers[kind].set_states({**there, **common})
        if (late := sorted(map(str, states.keys() - common.keys()))) and dist.get_rank() == 0:
            _log.warning(
                "the generators %s of get_cuda_rng_tracker() are in the snapshot, and not there when the engine is protected: they begin "
                "anew. Add them before",
                ", ".join(late),
            )


def loss_scaler(dynamic: bool, values: Mapping[str, Any]) -> Any:
    """A loss scaler with these attributes, as checkpoint files hold it."""
    scaler = object.__new__(DynamicLossScaler if dynamic else LossScaler)
    vars(scaler).update(values)
    return scaler


def address(start: int, numel: int) -> Any:
    """The address of a parameter's part in a partition, as checkpoint files hold it."""
    return fragment_address(numel=numel, start=start)


def end_to_end(params: Sequence[torch.Tensor]) -> list[int]:
    """Where each parameter begins if nothing lies between them."""
    return list(accumulate((param.numel() for param in params), initial=0))[:-1]
