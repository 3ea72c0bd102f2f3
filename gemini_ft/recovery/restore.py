"""Fills a live training state from the shards of a snapshot, wherever they are."""

from __future__ import annotations

import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from gemini_ft import __version__
from gemini_ft.core.layout import ALIGNMENT, Layout, Read, plan_reads, stored_specs
from gemini_ft.errors import StateError
from gemini_ft.recovery.readers import ShardReader, ShardReaders
from gemini_ft.state import codec
from gemini_ft.state.base import TrainingState
from gemini_ft.state.copies import copy_into, memory_of

_READERS = 4  # shards read at a time
PART = 64 << 20  # bytes of a shard for which a further peer is dialled
GAP = 16 << 20  # bytes of a shard between two reads that are left out: two chunks, as `chunk_bytes` is by default
_PARTS = 256  # of a chunk that is received in place: each takes a system call, and small ones together cost more than a copy
_OF_ANOTHER_FORM = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@contextmanager
def putting_back(step: int) -> Iterator[None]:
    """Refuses by name what a snapshot holds in another form than the one in which it is put back inside.

    Its format has a number, and checksums; that says nothing of what a development version, another script or an attacker has written.

    Raises StateError: in place of whatever Python raises for a key, a type or a value that was not expected.
    """
    try:
        yield
    except _OF_ANOTHER_FORM as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise StateError(
            f"the snapshot of step {step} does not have the form that this script and gemini-ft {__version__} put back "
            f"({type(error).__name__}: {error}; {Path(last.filename).name}, line {last.lineno}). Resume it with the "
            "script and version that wrote it, or begin anew with GEMINI_RESUME=never or another run id"
        ) from error


def read_extras(sources: ShardReaders, rank: int, world_size: int, secret: bytes, trust_pickle: bool) -> dict[int, Any]:
    """The small state of this rank, by rank; in a job of another size that of all ranks that made the snapshot.

    The shards stay open in ``sources``: their tensors are read next.
    """
    then, extras = sources.plan.world_size, {}
    for owner in [rank] if then == world_size else _turn(range(then), rank % then):
        blob = sources.read(owner, rank, lambda shard: shard.extras(), keep=True)
        extras[owner] = codec.decode(blob, secret, trust_pickle=trust_pickle)
    return dict(sorted(extras.items()))


class StateRestore:
    """The live state of one rank while it is filled: what it reads of which shard, and where that goes.

    A sharded rank needs its own shard alone; under DDP every rank owns a part and needs all of them. In a job of another
    size every rank needs parts of several. `TrainingState.apply_extras` is due when all ranks have read everything.

    Attributes:
        tensors: ``Read.name`` -> what to fill.
        own: what to give to ``apply_extras``.
        restored: place (``own memory``, ``peer <host>``, ``other ranks``, ``storage``) -> bytes read from there so far.

    Raises:
        LayoutMismatchError: the snapshot is of another model; the first differences are named.
        RecoveryError: a shard could not be read from anywhere. So does `read`.
    """

    def __init__(
        self,
        sources: ShardReaders,
        state: TrainingState,
        extras: Mapping[int, Any],  # rank of the job that made the snapshot -> what it gave as extras; at least those this rank needs
        rank: int,
        world_size: int,
        layouts: Mapping[int, Layout] | None = None,  # owner -> layout of its shard, as far as it is known already
    ) -> None:
        self._sources, self._rank = sources, rank
        with putting_back(sources.plan.version.iteration if sources.plan.version is not None else 0):
            reads, self.tensors, self.own = _prepare(sources, state, extras, rank, world_size, layouts or {})
        self.reads: dict[int, list[Read]] = {}  # owner -> what to read of its shard, by ascending offset
        for read in reads:
            self.reads.setdefault(read.owner, []).append(read)
        self.restored: dict[str, int] = {}

    def note(self, where: str, nbytes: int) -> None:
        self.restored[where] = self.restored.get(where, 0) + nbytes

    def read(self, without: Iterable[int] = ()) -> None:
        """Reads what this rank needs of all shards, but for those of the owners ``without``; parts of a large one from several peers."""
        owners = _turn(self.reads.keys() - set(without), self._rank)
        parts = [(owner, *part) for owner in owners for part in enumerate(in_parts(self.reads[owner], self._sources.copies(owner)))]
        with ThreadPoolExecutor(_READERS) as pool:
            for where, nbytes in pool.map(lambda part: self._read_part(*part), parts):
                self.note(where, nbytes)

    def _read_part(self, owner: int, number: int, reads: Sequence[Read]) -> tuple[str, int]:
        return self._sources.read(owner, self._rank, lambda shard: scatter(shard, reads, self.tensors), part=number)


def in_parts(reads: Sequence[Read], most: int) -> list[Sequence[Read]]:
    """The reads of a shard in at most ``most`` parts of about equal size, of at least `PART` / 2 bytes each unless that is all there is."""
    edges = [0, *accumulate(read.nbytes for read in reads)]  # bytes before each read, and all
    count = max(1, min(most, edges[-1] // PART))
    cuts = [0]
    for target in (edges[-1] * index // count for index in range(1, count)):
        above = bisect_left(edges, target)
        cut = min(above - 1, above, key=lambda at: abs(edges[at] - target))
        if min(edges[cut] - edges[cuts[-1]], edges[-1] - edges[cut]) >= PART / 2:
            cuts.append(cut)
    return [reads[low:high] for low, high in pairwise([*cuts, len(reads)])]


def _turn(owners: Iterable[int], rank: int) -> list[int]:
    """The owners from ``rank`` on: if all ranks began with the first one, its host would have to serve them all at once."""
    return sorted(owners, key=lambda owner: (owner < rank, owner))


def _prepare(
    sources: ShardReaders, state: TrainingState, extras: Mapping[int, Any], rank: int, world_size: int, known: Mapping[int, Layout]
) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Any]:
    """The reads, by owner and ascending offset; the tensors to fill, by name; this rank's extras."""
    then = sources.plan.world_size
    state.check(extras[rank % then])
    if then == world_size:
        layouts = _layouts(sources, rank, known)
        live = state.destinations(stored_specs(rank, layouts), rank, world_size)
        reads = plan_reads([source.spec for source in live], rank, layouts)
        return reads, {source.spec.name: source.tensor for source in live}, extras[rank]
    layouts = _layouts_of(range(then), sources, rank)
    return state.resized(layouts, extras, rank, world_size)


def _layouts(sources: ShardReaders, rank: int, known: Mapping[int, Layout]) -> dict[int, Layout]:
    """Layouts of all owners that hold something of ``rank``'s state."""
    own = {rank: known[rank]} if rank in known else _layouts_of([rank], sources, rank)
    others = own[rank].owners - {rank}
    there = {owner: known[owner] for owner in others & known.keys()}
    return dict(sorted((own | there | _layouts_of(others - known.keys(), sources, rank)).items()))


def _layouts_of(owners: Iterable[int], sources: ShardReaders, rank: int) -> dict[int, Layout]:
    found = {owner: sources.read(owner, rank, lambda shard: shard.layout, keep=True) for owner in _turn(owners, rank)}
    return dict(sorted(found.items()))


def scatter(shard: ShardReader, reads: Sequence[Read], tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Copies the bytes of one shard to where they belong, as they arrive. Those of a peer are received there, where tensors allow it.

    Args:
        shard: where to read; its bytes are checked on the way. When this raises an error, the tensors hold bytes that may be wrong.
        reads: of this shard, by ascending offset.

    Returns:
        Where the shard was, and the bytes copied.
    """
    nbytes = 0
    for part in apart(reads):
        to = Scatter(part, tensors)
        for offset, view in shard.chunks(to.live, to.start, to.stop):
            to.put(offset, view)
        nbytes += to.nbytes
    return shard.where, nbytes


def apart(reads: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """The reads of a shard, cut where so many bytes lie between two of them that whole chunks need not be read."""
    low = end = 0
    for index, read in enumerate(reads):
        if index and read.offset - end >= GAP:
            yield reads[low:index]
            low = index
        end = max(end, read.offset + read.nbytes)
    if reads:
        yield reads[low:]


class Scatter:
    """Copies bytes of one shard to the tensors that they belong to; arguments as those of `scatter`."""

    def __init__(self, reads: Sequence[Read], tensors: Mapping[str, torch.Tensor]) -> None:
        self._reads, self._tensors = reads, tensors
        self._offsets = [read.offset for read in reads]
        self._ends = list(accumulate((read.offset + read.nbytes for read in reads), max))  # of each read and all before it
        self.start, self.stop = (self._offsets[0], self._ends[-1]) if reads else (0, 0)  # of all that is read
        self.nbytes = 0  # that have been copied, or received in place

    def put(self, offset: int, view: memoryview) -> None:
        """Copies the bytes of ``view``, which begin at ``offset`` of the shard; no element may be cut."""
        for low, high, tensor, start, stop in self._parts(offset, offset + len(view)):
            copy_into(tensor, start, stop, view[low - offset : high - offset])
            self.nbytes += high - low

    def live(self, offset: int, nbytes: int) -> Sequence[memoryview]:
        """The memory of the tensors to which these bytes belong, in order, to be filled now; none if the bytes have to be put."""
        found = list(self._parts(offset, offset + nbytes))
        edges = [offset, *(edge for low, high, *_ in found for edge in (low, high)), offset + nbytes]
        padding = [low - high for high, low in zip(edges[::2], edges[1::2], strict=True)]  # negative: several tensors read the same bytes
        if len(found) > _PARTS or not all(0 <= gap < ALIGNMENT for gap in padding):
            return ()
        memory = [memoryview(bytearray(padding[0]))]
        for (_, _, tensor, start, stop), gap in zip(found, padding[1:], strict=True):
            if (room := memory_of(tensor, start, stop)) is None:
                return ()
            memory += [room, memoryview(bytearray(gap))]
        torch.autograd.graph.increment_version([tensor for _, _, tensor, _, _ in found])
        self.nbytes += sum(high - low for low, high, *_ in found)
        return [piece for piece in memory if piece]

    def _parts(self, offset: int, end: int) -> Iterator[tuple[int, int, torch.Tensor, int, int]]:
        """Parts of reads between two offsets: where each begins and ends, its tensor, and where it begins and ends in its elements."""
        for index in range(bisect_right(self._ends, offset), bisect_left(self._offsets, end)):
            read = self._reads[index]
            low, high = max(offset, read.offset), min(end, read.offset + read.nbytes)
            if low < high:
                size = read.nbytes // (read.stop - read.start)
                start = read.start + (low - read.offset) // size
                yield low, high, self._tensors[read.name], start, start + (high - low) // size
