"""Positions in data that a DistributedSampler deals out, carried over to another number of ranks (`gemini_ft.state.worlds`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from gemini_ft.errors import UnsupportedStateError, WorldSizeError
from gemini_ft.loaders.parts import Way, facts
from gemini_ft.loaders.workers import State
from gemini_ft.state.rng import branch_randomness, randomness, set_randomness, unchanged_randomness
from gemini_ft.state.worlds import Resize

BATCHES = "the number of batches"
_BATCH_SIZE = "batch_size"
_BETWEEN = ("gemini", "iterations", "named", "lost_here", "left", "stepped", "ended")  # of a position between two iterations
_OWN = ("dataset", "collate")  # parts whose generators belong to a rank; samplers draw the same order on all


def why_undivided(loader: Any, way: Way, rank: int, world_size: int, *, in_turn: bool = False) -> str:
    """The reason why the samples of a loader cannot be dealt out to another number of ranks; empty: they can.

    ``in_turn``: whether accelerate deals whole batches out, as for transformers' Trainer.
    """
    if not isinstance(loader, DataLoader) or way != "skip":
        return "is no DataLoader of a map-style dataset without a state of its own"
    if loader.persistent_workers:
        return "has persistent workers (give persistent_workers=False)"
    if in_turn:
        return _why_not_in_turn(loader.batch_sampler, rank, world_size)
    if type(loader.batch_sampler) is not BatchSampler:
        return f"has a {type(loader.batch_sampler).__qualname__} as its batch sampler"
    sampler = loader.sampler
    # One that deals otherwise, or deals out what another sampler draws on each rank, as Lightning's wrapper does, has another order.
    if next((kind for kind in type(sampler).__mro__ if "__iter__" in vars(kind)), None) is not DistributedSampler:
        return f"has a {type(sampler).__qualname__} as its sampler"
    assert isinstance(sampler, DistributedSampler)
    if (sampler.rank, sampler.num_replicas) != (rank, world_size):
        return f"has a sampler for rank {sampler.rank} of {sampler.num_replicas}, and this is rank {rank} of {world_size}"
    return ""


def _why_not_in_turn(batches: Any, rank: int, world_size: int) -> str:
    """The reason why a batch sampler is not one of which each rank has every n-th batch, in an order of seed and epoch; empty: it is."""
    if world_size > 1:  # a single rank has all of them
        if type(batches).__name__ != "BatchSamplerShard":
            return f"has a {type(batches).__qualname__} as its batch sampler"
        if batches.split_batches or not batches.even_batches:
            return "has split_batches=True or even_batches=False (accelerator_config)"
        if (batches.process_index, batches.num_processes) != (rank, world_size):
            return f"has batches for rank {batches.process_index} of {batches.num_processes}, and this is rank {rank} of {world_size}"
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return f"has a {type(batches).__qualname__} as its batch sampler"
    kind = type(batches.sampler)
    return "" if kind is SequentialSampler or kind.__name__ == "SeedableRandomSampler" else f"has a {kind.__qualname__} as its sampler"


def restriped(position: dict[str, Any], loader: Any, way: Way, resize: Resize, *, in_turn: bool = False) -> dict[str, Any]:
    """A position of another number of ranks as one of this rank; between two iterations it is the same for all.

    The first batch to ``start`` with is left to whoever takes it.

    Generators of the dataset are those of the former rank; a new rank keeps those that the script gives it. What workers draw is new.

    Raises:
        UnsupportedStateError: the data cannot be dealt out anew.
        WorldSizeError: the position is not between two steps, or of batches of another size.
    """
    if "left" in position:
        position = position | {"left": _own(position["left"], resize)}
    if "batches" in position and not position.get("stepped", True):  # beside the steps, as by a validation: the next one begins anew
        position = {name: value for name, value in position.items() if name in _BETWEEN}
    if "batches" not in position:
        return position
    why = why_undivided(loader, way, resize.rank, resize.now, in_turn=in_turn)
    if not why and position["ahead"]:
        why = "is fetched ahead of the steps"
    if not why and (position["lost"] or position["lost_here"]):
        why = f"keeps what no snapshot can have ({', '.join([*position['lost'], *position['lost_here']][:5])})"
    if why:
        raise UnsupportedStateError(
            f"the snapshot is of {resize.then} ranks, this job has {resize.now}, and the loader of the training {why}; start "
            f"{resize.then} ranks"
        )
    then, now = position["facts"], facts(loader)
    if then[_BATCH_SIZE] != now[_BATCH_SIZE]:
        raise WorldSizeError(
            f"elastic='batch': the loader of the training had batches of {then[_BATCH_SIZE]} on each of {resize.then} ranks, and has "
            f"batches of {now[_BATCH_SIZE]} on {resize.now}. Micro-batches keep the global batch; give the same batch size to "
            "any number of ranks"
        )
    is_over = position["batches"] == then[BATCHES]
    batches = now[BATCHES] if is_over else resize.carried(position["batches"], "batches of this epoch")
    begin = _own(position["begin"], resize)
    with unchanged_randomness():
        set_randomness(begin["random"])
        branch_randomness(_stream(resize.rank, batches))
        begin["random"] = randomness()
    workers: dict[int, State] = {}
    changes = {"facts": then | {BATCHES: now[BATCHES]}, "begin": begin, "batches": batches, "workers": workers}
    changes |= dict.fromkeys(("drawn", "drawn_ahead"))
    moments = {name: _own(position[name], resize) for name in ("now", "first", "sampler") if position[name] is not None}
    return position | changes | moments


def _stream(rank: int, batches: int) -> int:
    """A number of 32 bits, as many as numpy takes of a seed, that differs between ranks and places in an epoch."""
    return int.from_bytes(hashlib.blake2b(f"{rank} {batches}".encode(), digest_size=4).digest(), "little")


def _own(moment: Mapping[str, Any], resize: Resize) -> dict[str, Any]:
    """A moment without the generators that belong to another rank."""
    generators = moment["generators"]
    if resize.rank >= resize.then:
        generators = {path: state for path, state in generators.items() if not path.startswith(_OWN)}
    return {**moment, "generators": generators}
