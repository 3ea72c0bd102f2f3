"""The parts of whole tensors that ranks have as DTensors, by the words of a snapshot (`gemini_ft.state.tensors.placement_words`).

Which indices a rank has, and where a rank of another number of ranks finds its own part in the shards of former ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import torch

from gemini_ft.core.layout import PER_RANK, Layout, Piece, Read
from gemini_ft.errors import CorruptDataError, LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.tensors import HOST

_WORDS = re.compile(r"\((?P<shape>[\d, ]*)\) (?P<placements>.+) on \((?P<mesh>[\d, ]*)\)(?: of ranks (?P<ranks>[\d ]+))?")
_PLACEMENT = re.compile(r"_S\((\d+), (\d+)\)|S\((\d+)\)|R")

Group = tuple[int, ...]
Run = tuple[int, int, int]  # of elements: where it begins in one part and in another, and its length
Placed = tuple[str, tuple[int, ...], Group]  # a part: words, its shape, the ranks that hold it
KnownRuns = dict[tuple[Placed, int, Placed], list[Run]]  # in common, of a former part (of one of so many ranks) and a present one


def words_of(logical: str) -> str:
    """How a tensor is placed, from ``logical`` of its spec; empty: it is no DTensor."""
    return "" if logical.startswith(PER_RANK) else logical.removesuffix(HOST).strip()


def placement_of(name: str, words: str, world_size: int) -> tuple[Group, str, Group]:
    """Shape of the whole tensor, placements, and mesh, as the words say them. Raises for a mesh without all ranks, or with others first."""
    found = _WORDS.fullmatch(words)
    if found is None:
        raise CorruptDataError(f"{name}: {words!r} does not say how the tensor is placed")
    if found["ranks"] is not None:
        raise UnsupportedStateError(
            f"{name} is placed on a mesh whose ranks are not in their own order ({found['ranks']}); export models whose mesh is in the "
            "order of ranks, or save this one with its own tools"
        )
    mesh = _numbers(found["mesh"])
    if math.prod(mesh) != world_size:
        raise UnsupportedStateError(
            f"{name} is placed on a mesh of {mesh} among {world_size} ranks, and which ranks these are is not in the snapshot; "
            "export what spans all ranks, or save this model with its own tools"
        )
    return _numbers(found["shape"]), found["placements"], mesh


def contradiction(name: str, words: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(f"{name}: {words!r} contradicts itself or the tensor's parts: {error}")


def part_places(name: str, words: str, shape: Sequence[int], group: Group, world_size: int) -> list[torch.Tensor]:
    """The indices of the whole tensor that a part has, in each dimension, if ranks fill the mesh in order (as with init_device_mesh).

    ``shape``: of the part. ``group``: the ranks that hold it.
    """
    if not words or words == PER_RANK:
        return [torch.arange(size) for size in shape]
    whole, placements, mesh = placement_of(name, words, world_size)
    try:
        indices, holders = _held(whole, placements, mesh, group)
    except (IndexError, ValueError, RuntimeError) as error:
        raise contradiction(name, words, error) from None
    if holders != group or tuple(map(len, indices)) != tuple(shape):
        raise UnsupportedStateError(
            f"{name}: ranks {list(group)} hold a part of shape {tuple(shape)}, which does not fit ranks in their own order on a mesh "
            f"of {mesh}; export models whose mesh is in the order of ranks, or save this one with its own tools"
        )
    return indices


def reads_of_part(
    name: str,
    then: Mapping[int, Layout],  # owner -> layout of its shard, of all former ranks
    words: str,  # how the tensor is placed now
    shape: Sequence[int],  # of the part now
    group: Group,  # the ranks that hold it now, ``world_size`` of all
    world_size: int,
    *,
    known: KnownRuns | None = None,
) -> list[Read]:
    """The reads that fill a part with what former ranks, of any number, had of its tensor.

    Args:
        known: what has been worked out for tensors placed alike, which a model's layers and their moments are; it is added to.

    Raises LayoutMismatchError: they did not have all of it, or had a tensor of another shape.
    """
    known = {} if known is None else known
    now, here = (words, tuple(shape), group), list[torch.Tensor]()
    whole, _, _ = placement_of(name, words, world_size)
    pieces: dict[Group, list[tuple[int, Piece]]] = {}
    for owner, layout in then.items():
        if (piece := layout.piece(name)) is not None and piece.nbytes:
            pieces.setdefault(piece.group, []).append((owner, piece))
    reads: list[Read] = []
    for holders, held in pieces.items():
        said, former = words_of(held[0][1].logical), held[0][1].shape
        place = ((said, former, holders), len(then), now)
        if place not in known:
            before, _, _ = placement_of(name, said, len(then))
            if before != whole:
                raise LayoutMismatchError(
                    f"{name} has shape {whole} now and {before} in the snapshot. Resume with the model that made it, or start afresh with "
                    "another run_id or resume='never'."
                )
            here = here or part_places(name, *now, world_size)
            known[place] = list(_common(part_places(name, said, former, holders, len(then)), here))
        for there, at, length in known[place]:
            for owner, piece in held:
                reads += Read.between(there, there + length, owner, piece, name, at - there)
    if (found := sum(read.stop - read.start for read in reads)) != math.prod(shape):
        raise LayoutMismatchError(f"{name} is not whole in the snapshot: {found} of {math.prod(shape)} elements of this rank are there")
    return reads


def _common(there: Sequence[torch.Tensor], here: Sequence[torch.Tensor]) -> Iterator[Run]:
    """The elements that two parts of one tensor have in common, as runs in both, flattened."""
    both = [one[torch.isin(one, other)] for one, other in zip(there, here, strict=True)]
    if not all(map(len, both)):
        return
    inner = len(both)  # dimensions from here on are whole in both
    while inner and len(both[inner - 1]) == len(there[inner - 1]) == len(here[inner - 1]):
        inner -= 1
    size = math.prod(len(each) for each in both[inner:])
    if not inner:
        yield 0, 0, size
        return
    spots = [
        torch.stack([torch.searchsorted(one, each), torch.searchsorted(other, each)])
        for one, other, each in zip(there, here, both, strict=True)
    ]
    *outer, last = spots[:inner]
    breaks = (torch.nonzero((last.diff() != 1).any(0)).flatten() + 1).tolist()
    stretches = [(*last[:, low].tolist(), high - low) for low, high in pairwise([0, *breaks, last.shape[1]])]
    widths = [(len(one), len(other)) for one, other in zip(there, here, strict=True)]
    for place in product(*(each.T.tolist() for each in outer)):
        before = after = 0
        for (one, other), (ours, theirs) in zip([*place, (0, 0)], widths[:inner], strict=True):
            before, after = before * ours + one, after * theirs + other
        for one, other, length in stretches:
            yield (before + one) * size, (after + other) * size, length * size


def runs(indices: torch.Tensor) -> list[Run]:
    """Ascending indices as runs: first index, its position, length."""
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    ends = [0, *breaks, len(indices)]
    return [(int(indices[begin]), begin, end - begin) for begin, end in pairwise(ends) if begin < end]


def _held(shape: Group, placements: str, mesh: Group, group: Group) -> tuple[list[torch.Tensor], Group]:
    """Finds what the first rank of a group holds of a tensor, as indices in each dimension, and all ranks that hold the same."""
    indices = [torch.arange(size) for size in shape]
    coordinate = [int(i) for i in torch.unravel_index(torch.tensor(group[0]), mesh)]
    holders = torch.arange(math.prod(mesh)).reshape(mesh)
    for axis, (match, at) in enumerate(zip(_PLACEMENT.finditer(placements), coordinate, strict=True)):
        strided, factor, plain = match.groups()
        if int(factor or 1) > math.prod(mesh):
            raise ValueError(f"{factor} parts on {math.prod(mesh)} ranks")
        if dim := strided or plain:
            indices[int(dim)] = _share(indices[int(dim)], mesh[axis], at, int(factor or 1))
            holders = holders.index_select(axis, torch.tensor([at]))
    return indices, tuple(holders.flatten().tolist())


def _share(indices: torch.Tensor, parts: int, at: int, factor: int) -> torch.Tensor:
    """The indices of part ``at``; the dimension may have been cut before, into ``factor`` runs, on an axis further right."""
    cuts = [_chunks(run, parts)[at] for run in _chunks(indices, factor)]
    return torch.cat(cuts)


def _chunks(indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cuts as torch.chunk does, which DTensor follows, with empty chunks for parts that get nothing."""
    chunks = list(torch.chunk(indices, parts)) if len(indices) else []
    return chunks + [indices[:0]] * (parts - len(chunks))


def _numbers(text: str) -> Group:
    return tuple(int(number) for number in text.split(",") if number.strip())
