"""Fills a live training state from the shards of a snapshot, wherever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gemini_ft.core.layout import Layout, Read, plan_reads, stored_specs
from gemini_ft.recovery.readers import ShardReader, ShardReaders
from gemini_ft.state import codec
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copies import copy_into

_READERS = 4  # shards read at a time


def read_extras(sources: ShardReaders, rank: int, world_size: int, secret: bytes, trust_pickle: bool) -> dict[int, Any]:
    """The small state of this rank, by rank; in a job of another size that of all ranks that made the snapshot."""
    then, extras = sources.plan.world_size, {}
    for owner in [rank] if then == world_size else range(then):
        blob = sources.read(owner, rank, lambda shard: shard.extras())
        extras[owner] = codec.decode(blob, secret, trust_pickle=trust_pickle)
    return extras


def fill(sources: ShardReaders, state: TrainingState, extras: Mapping[int, Any], rank: int, world_size: int) -> tuple[dict[str, int], Any]:
    """Reads everything this rank needs into the tensors of ``state``. `TrainingState.apply_extras` is due when all ranks have done so.

    A sharded rank needs its own shard alone; under DDP every rank owns a part and needs all of them. In a job of another
    size every rank needs parts of several.

    Args:
        sources: where the shards are.
        state: what to fill.
        extras: rank of the job that made the snapshot -> what it gave as extras; at least those this rank needs.
        rank: this rank.
        world_size: ranks of this job.

    Returns:
        Bytes read from each place: ``own memory``, ``peer <host>``, ``storage``; and what to give to ``apply_extras``.

    Raises:
        LayoutMismatchError: the snapshot is of another model; the first differences are named.
        RecoveryError: a shard could not be read from anywhere.
    """
    with contextlib.closing(sources):
        reads, tensors, own = _prepare(sources, state, extras, rank, world_size)
        by_owner: dict[int, list[Read]] = {}
        for read in reads:
            by_owner.setdefault(read.owner, []).append(read)

        def read_shard(owner: int) -> tuple[str, int]:
            return sources.read(owner, rank, lambda shard: scatter(shard, by_owner[owner], tensors))

        restored: dict[str, int] = {}
        with ThreadPoolExecutor(_READERS) as pool:
            for where, nbytes in pool.map(read_shard, _turn(by_owner, rank)):
                restored[where] = restored.get(where, 0) + nbytes
    return restored, own


def _turn(owners: Iterable[int], rank: int) -> list[int]:
    """The owners from ``rank`` on: if all ranks began with the first one, its host would have to serve them all at once."""
    return sorted(owners, key=lambda owner: (owner < rank, owner))


def _prepare(
    sources: ShardReaders, state: TrainingState, extras: Mapping[int, Any], rank: int, world_size: int
) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Any]:
    """The reads, by owner and ascending offset; the tensors to fill, by name; this rank's extras."""
    then = sources.plan.world_size
    state.check(extras[rank % then])
    if then == world_size:
        layouts = _layouts(sources, rank)
        live = state.destinations(stored_specs(rank, layouts), rank, world_size)
        reads = plan_reads([source.spec for source in live], rank, layouts)
        return reads, {source.spec.name: source.tensor for source in live}, extras[rank]
    layouts = _layouts_of(range(then), sources, rank)
    return state.resized(layouts, extras, rank, world_size)


def _layouts(sources: ShardReaders, rank: int) -> dict[int, Layout]:
    """Layouts of all owners that hold something of ``rank``'s state."""
    own = _layouts_of([rank], sources, rank)
    return own | _layouts_of(own[rank].owners - {rank}, sources, rank)


def _layouts_of(owners: Iterable[int], sources: ShardReaders, rank: int) -> dict[int, Layout]:
    found = {owner: sources.read(owner, rank, lambda shard: shard.layout, keep=True) for owner in _turn(owners, rank)}
    return dict(sorted(found.items()))


def scatter(shard: ShardReader, reads: Sequence[Read], tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Copies the bytes of one shard to where they belong, as they arrive.

    Args:
        shard: where to read; its bytes are checked on the way.
        reads: of this shard, by ascending offset.
        tensors: ``Read.name`` -> what to fill.

    Returns:
        Where the shard was, and the bytes copied.
    """
    pending = list(reversed(reads))
    total = 0
    for offset, view in shard.chunks():
        end = offset + len(view)
        while pending and pending[-1].offset < end:
            read = pending[-1]
            low, high = max(offset, read.offset), min(end, read.offset + read.nbytes)
            size = read.nbytes // (read.stop - read.start)
            start = read.start + (low - read.offset) // size
            copy_into(tensors[read.name], start, start + (high - low) // size, view[low - offset : high - offset])
            total += high - low
            if high < read.offset + read.nbytes:
                break
            pending.pop()
    return shard.where, total
