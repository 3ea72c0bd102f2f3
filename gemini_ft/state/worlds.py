"""Another number of ranks, the same global batch (``elastic: batch``): what is carried over, and what is refused by name.

A step takes a fixed number of micro-batches of all ranks together. A `DistributedSampler` deals the samples of an epoch out in turn, so
that after whole steps those that were used are the first ones of the epoch's order, whatever the number of ranks: it is the same position
as if the present ranks had been at work since the epoch began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from gemini_ft.errors import StateError, UnsupportedStateError, WorldSizeError
from gemini_ft.state.fields import fields_of
from gemini_ft.state.survey import Survey
from gemini_ft.state.tensors import own_attributes

Name = TypeVar("Name")
_OUT = "or leave elastic out"
_DEEPSPEEDS = "last_batch_iteration"  # counts the steps of DeepSpeed's schedulers, which are none of torch's


@dataclass(frozen=True, kw_only=True)
class Resize:
    """A snapshot of ``then`` ranks that rank ``rank`` of ``now`` ranks resumes."""

    then: int
    now: int
    rank: int

    def carried(self, count: int, what: str) -> int:
        """The number that each of the present ranks has where each of the former ones had ``count``.

        Raises WorldSizeError: the present ranks cannot share these out evenly.
        """
        if count * self.then % self.now:
            fitting = [str(ranks) for ranks in range(1, count * self.then + 1) if count * self.then % ranks == 0]
            raise WorldSizeError(
                f"elastic='batch': {count} {what} on each of {self.then} ranks cannot be shared out evenly among {self.now}; give a number "
                f"of hosts with {', '.join(fitting[:-1])}{' or ' * (len(fitting) > 1)}{fitting[-1]} ranks"
            )
        return count * self.then // self.now


def carried_accumulation(extras: Mapping[str, Any], given: int, resize: Resize) -> int:
    """The micro-batches of each rank in a step, from what a snapshot says.

    Args:
        extras: of the snapshot.
        given: the script's own number, for a snapshot that was made without ``elastic`` by the same number of ranks.

    Raises WorldSizeError: the present ranks cannot have the same global batch, or the snapshot does not say which it is.
    """
    found = extras.get("accumulation")
    if found is None and resize.then == resize.now:
        return given
    if found is None:
        raise WorldSizeError(
            f"the snapshot was made by {resize.then} ranks without elastic='batch', this job has {resize.now}; start {resize.then} ranks"
        )
    return resize.carried(int(found), "micro-batches of a step")


def why_fixed(found: Survey, is_replicated: bool, world_size: int, has_local_steps: bool = False) -> str:
    """The reason why another number of ranks could not load this state; empty: it can.

    Args:
        is_replicated: whether plain parameters hold the same on all ranks.
        has_local_steps: whether a gradient pipeline trains parameters on each rank alone, and averages them.
    """
    everyone = list(range(world_size))
    for name, param in found.parameters.items():
        if not isinstance(param, DTensor):
            if not (is_replicated or has_local_steps):
                return f"a parameter that neither DistributedDataParallel nor fully_shard holds ({name})"
        elif has_local_steps:
            return f"a sharded parameter beside local steps ({name})"
        elif param.device_mesh.mesh.flatten().tolist() != everyone:
            return f"a parameter on a mesh without all ranks in their order ({name})"
        elif any(type(item).__name__ == "_StridedShard" for item in param.placements):
            return f"a parameter that two dimensions of a mesh cut along the same one (_StridedShard), as tensor parallelism does ({name})"
    for label, optimizer, param in found.labelled:
        if not isinstance(param, DTensor):
            continue
        state, has_numbers = optimizer.state.get(param, {}), has_common_numbers(optimizer)
        if odd := [key for key, value in state.items() if not (isinstance(value, DTensor) or (has_numbers and is_number(value)))]:
            return f"state of {type(optimizer).__qualname__} that is not sharded as its parameter is ({label}.{odd[0]})"
        if not has_numbers and own_attributes(optimizer):
            return f"a {type(optimizer).__qualname__} that keeps state of sharded parameters in attributes"
    return ""


def has_common_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the numbers that it keeps for a sharded parameter are the same on all ranks, as those of torch's optimizers.

    Those of others may follow from the part of the parameter that a rank has.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def refuse_data(loaders: Mapping[str, Any], strangers: Sequence[str], rank: int, world_size: int) -> None:
    """Refuses loaders whose samples cannot be dealt out anew to another number of ranks.

    ``loaders``: those that snapshots have, by name. ``strangers``: the datasets of those that are iterated as well, by their types.

    Raises UnsupportedStateError: there are some, or there is no loader at all.
    """
    marks = _marks(loaders)
    said = {name: mark.why_undivided(loaders[name], rank, world_size) for name, mark in marks.items() if mark.is_under_way}
    why = {name: reason for name, reason in said.items() if reason}
    if not any(mark.place[0] for mark in marks.values()):
        why["the data"] = "come from no loader that the snapshots have (state={'loader': gemini_ft.resumable(loader)})"
    elif strangers:
        why[f"a DataLoader of a {', '.join(strangers)}"] = "is not in state="
    if why:
        told = "; ".join(f"{name} {reason}" for name, reason in why.items())
        raise UnsupportedStateError(
            f"elastic='batch' deals out anew the samples of a map-style dataset in a DataLoader with a DistributedSampler alone: {told}. "
            f"Give such a loader, a fixed number of hosts, {_OUT}"
        )


def iterations(loaders: Mapping[str, Any]) -> dict[str, int]:
    """How many iterations of each resumable loader have begun."""
    return {name: mark.place[0] for name, mark in _marks(loaders).items()}


def check_step(loaders: Iterable[Any], accumulation: int) -> None:
    """Compares the batches that a loop has taken since the last call with those that each rank is to take for a step.

    At the end of an epoch they may be fewer.

    Raises StateError: it has taken others.
    """
    for mark in _marks(dict(enumerate(loaders))).values():
        if not mark.is_under_way:
            continue
        if not (mark.of_step == accumulation or (mark.is_at_end and 0 < mark.of_step < accumulation)):
            raise StateError(
                f"elastic='batch': step() was called after {mark.of_step} more batches, at batch {mark.place[1]} of the epoch, where each "
                f"step is to take {accumulation} (checkpointer.accumulation); call it once after each step of the optimizer "
                "(docs/elastic.md)"
            )
        mark.step_over()


def check_schedulers(given: Mapping[str, Any], before: Mapping[str, int]) -> dict[str, int]:
    """Compares the steps that schedulers have counted with those of the call before.

    Returns the counts, by name. Raises StateError: one was stepped more than once, as by a loop that does so after each micro-batch.
    """
    found = {name: _steps_of(value) for name, value in given.items() if isinstance(value, LRScheduler) or _DEEPSPEEDS in fields_of(value)}
    counts = {name: count for name, count in found.items() if count is not None}
    for name, count in counts.items():
        if (steps := count - before.get(name, count)) > 1:
            raise StateError(
                f"elastic='batch': state[{name!r}] was stepped {steps} times for one step of the optimizer, and as often as there are "
                "micro-batches, which another number of ranks changes; step it once after each step of the optimizer, or each epoch"
            )
    return counts


def _steps_of(scheduler: Any) -> int | None:
    """How often a scheduler was stepped: a ChainedScheduler as often as its parts. None: it does not count."""
    if (count := getattr(scheduler, "last_epoch", getattr(scheduler, _DEEPSPEEDS, None))) is not None:
        return int(count)
    counts = [count for part in getattr(scheduler, "_schedulers", ()) if (count := _steps_of(part)) is not None]
    return max(counts, default=None)


def _marks(loaders: Mapping[Name, Any]) -> dict[Name, Any]:
    """The bookmarks of those that were made resumable."""
    return {name: mark for name, loader in loaders.items() if (mark := getattr(loader, "_gemini", None)) is not None}
