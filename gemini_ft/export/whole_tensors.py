"""Whole tensors, joined from the shards of all ranks, or the parts of them that are asked for.

Under DDP every rank owns a stretch of the one tensor all of them hold; under FSDP2 every rank has a part of its own, whose place in the
whole tensor follows from shape, placements and mesh (`gemini_ft.state.tensors.placement_words`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import torch

from gemini_ft.core.layout import PER_RANK, Piece, Read
from gemini_ft.errors import CorruptDataError, UnsupportedStateError
from gemini_ft.recovery.readers import ShardReader
from gemini_ft.recovery.restore import scatter
from gemini_ft.state.tensors import HOST

_WORDS = re.compile(r"\((?P<shape>[\d, ]*)\) (?P<placements>.+) on \((?P<mesh>[\d, ]*)\)")
_PLACEMENT = re.compile(r"_S\((\d+), (\d+)\)|S\((\d+)\)|R")

Group = tuple[int, ...]
Parts = dict[Group, torch.Tensor]  # group of ranks -> the local tensor all of them hold
Box = tuple[Sequence[int], Sequence[int]]  # of a whole tensor: the first index and the size in each dimension


class WholeTensors:
    """The tensors of a checkpoint whose names are ``wanted``, to be put together from all ranks' shards. Buffers are those of rank 0.

    ``shards``: of all ranks, by owner. Every byte is compared with its checksum as it is read.

    Raises:
        CorruptDataError: a checksum does not match, or something is missing from the shards.
        UnsupportedStateError: a tensor differs between ranks, or is placed on a mesh that cannot be known from here.
    """

    def __init__(self, shards: Sequence[ShardReader], wanted: Callable[[str], bool]) -> None:
        self._shards = shards
        layouts = [shard.layout for shard in shards]
        if len({(layout.logical_hash, layout.world_size) for layout in layouts}) != 1 or layouts[0].world_size != len(shards):
            raise CorruptDataError("the shards do not belong together: their layouts differ; use another checkpoint")
        pieces = [piece for layout in layouts for piece in layout.pieces if wanted(piece.name)]
        check_covered(pieces)
        self._words: dict[str, str] = {}
        self._parts: dict[str, Parts] = {}
        for piece in sorted(pieces, key=lambda piece: piece.name):
            self._words[piece.name] = piece.logical.removesuffix(HOST).strip()
            held = self._parts.setdefault(piece.name, {})
            if piece.group not in held:
                held[piece.group] = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device="meta")

    def declared(self) -> dict[str, torch.Tensor]:
        """Name -> a tensor on the device ``meta``, with shape and dtype of the whole one."""
        return {name: join_parts(name, self._words[name], parts, len(self._shards)) for name, parts in self._parts.items()}

    def read(self, boxes: Mapping[str, Sequence[Box]] | None = None) -> dict[str, torch.Tensor]:
        """Name -> whole tensor, on the CPU. ``boxes``: the tensors to read, and what of each; their other elements may be anything."""
        found: dict[str, Parts] = {}
        spans: dict[str, tuple[int, int]] = {}
        for name in self._parts if boxes is None else boxes:
            found[name] = dict(self._parts[name])
            for group, part in self._parts[name].items():
                places = None if boxes is None else part_places(name, self._words[name], part, group, len(self._shards))
                span = (0, part.numel()) if boxes is None or places is None else _span(places, boxes[name])
                if span is not None:
                    spans[f"{name}@{group[0]}"] = span
                    found[name][group] = torch.zeros_like(part, device="cpu")
        flat = {f"{name}@{group[0]}": part for name, parts in found.items() for group, part in parts.items()}
        for owner, shard in enumerate(self._shards):
            pieces = [piece for piece in shard.layout.pieces if piece.nbytes and _key(piece) in spans]
            scatter(shard, [read for piece in pieces for read in _reads(owner, piece, *spans[_key(piece)])], flat)
        del flat  # each tensor's parts are let go of as soon as they are joined
        return {name: join_parts(name, self._words[name], found.pop(name), len(self._shards)) for name in list(found)}


def _span(places: Sequence[torch.Tensor], boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The first element of a flattened part that is in one of the boxes, and the one after the last; None: there is none."""
    spans: list[tuple[int, int]] = []
    for offsets, sizes in boxes:
        first = last = 0
        for indices, offset, size in zip(places, offsets, sizes, strict=True):
            inside = torch.nonzero((indices >= offset) & (indices < offset + size)).flatten()
            if not len(inside):
                break
            first, last = first * len(indices) + int(inside[0]), last * len(indices) + int(inside[-1])
        else:
            spans.append((first, last + 1))
    return (min(start for start, _ in spans), max(stop for _, stop in spans)) if spans else None


def _key(piece: Piece) -> str:
    return f"{piece.name}@{piece.group[0]}"


def _reads(owner: int, piece: Piece, first: int, end: int) -> Iterator[Read]:
    """The part of a piece that lies between two elements of its tensor."""
    start, stop = max(first, piece.start), min(end, piece.stop)
    if start < stop:
        size = piece.nbytes // (piece.stop - piece.start)
        offset = piece.offset + (start - piece.start) * size
        yield Read(owner=owner, offset=offset, nbytes=(stop - start) * size, name=_key(piece), start=start, stop=stop)


def check_covered(pieces: Sequence[Piece]) -> None:
    """Checks that each tensor's pieces have as many elements as its shape; a shape that lies would make us allocate too much memory."""
    covered: dict[str, int] = {}
    for piece in pieces:
        covered[_key(piece)] = covered.get(_key(piece), 0) + piece.stop - piece.start
    for piece in pieces:
        if covered[_key(piece)] != math.prod(piece.shape):
            raise CorruptDataError(f"{piece.name} is not whole: {covered[_key(piece)]} of its {math.prod(piece.shape)} elements are there")


def join_parts(name: str, words: str, parts: Parts, world_size: int) -> torch.Tensor:
    """The whole tensor of all its parts, but for the contents of those on the device ``meta``, which have not been read."""
    first = parts[min(parts)]
    if words == PER_RANK:
        return first
    if not words:
        for group, other in parts.items():
            if other.shape != first.shape or not (first.is_meta or torch.equal(_bytes(other), _bytes(first))):
                raise UnsupportedStateError(
                    f"{name} is not the same on ranks {min(parts)[0]} and {group[0]} although nothing says how it is divided; "
                    "only tensors that are replicated or sharded as DTensors can be made whole"
                )
        return first
    shape, _, _ = _placement(name, words, world_size)
    if (present := sum(part.numel() for part in parts.values())) != math.prod(shape):
        raise CorruptDataError(f"{name} is not whole: {present} of its {math.prod(shape)} elements are there")
    known = {group: part for group, part in parts.items() if not part.is_meta}
    whole = torch.empty(shape, dtype=first.dtype, device="cpu" if known else "meta")
    for group, part in known.items() if whole.numel() else ():
        places = part_places(name, words, part, group, world_size)
        try:
            _put(whole, part, places)
        except (IndexError, RuntimeError) as error:
            raise _contradiction(name, words, error) from None
    return whole


def _placement(name: str, words: str, world_size: int) -> tuple[Group, str, Group]:
    """Shape of the whole tensor, placements, and mesh, as the words say them. Raises for a mesh that does not have all ranks."""
    found = _WORDS.fullmatch(words)
    if found is None:
        raise CorruptDataError(f"{name}: {words!r} does not say how the tensor is placed")
    mesh = _numbers(found["mesh"])
    if math.prod(mesh) != world_size:
        raise UnsupportedStateError(
            f"{name} is placed on a mesh of {mesh} among {world_size} ranks, and which ranks these are is not in the snapshot; "
            "export what spans all ranks, or save this model with its own tools"
        )
    return _numbers(found["shape"]), found["placements"], mesh


def _contradiction(name: str, words: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(f"{name}: {words!r} contradicts itself or the tensor's parts: {error}")


def part_places(name: str, words: str, part: torch.Tensor, group: Group, world_size: int) -> list[torch.Tensor]:
    """The indices of the whole tensor that a part has, in each dimension, if ranks fill the mesh in order (as with init_device_mesh)."""
    if not words or words == PER_RANK:
        return [torch.arange(size) for size in part.shape]
    shape, placements, mesh = _placement(name, words, world_size)
    try:
        indices, holders = _held(shape, placements, mesh, group)
    except (IndexError, ValueError, RuntimeError) as error:
        raise _contradiction(name, words, error) from None
    if holders != group or tuple(map(len, indices)) != tuple(part.shape):
        raise UnsupportedStateError(
            f"{name}: ranks {list(group)} hold a part of shape {tuple(part.shape)}, which does not fit ranks in their own order on a mesh "
            f"of {mesh}; export models whose mesh is in the order of ranks, or save this one with its own tools"
        )
    return indices


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


def _put(whole: torch.Tensor, part: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    for box in product(*map(_runs, places)):
        there, here = whole, part
        for dim, (start, begin, length) in enumerate(box):
            there, here = there.narrow(dim, start, length), here.narrow(dim, begin, length)
        there.copy_(here)


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Ascending indices as runs: first index, its position, length."""
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    ends = [0, *breaks, len(indices)]
    return [(int(indices[begin]), begin, end - begin) for begin, end in pairwise(ends) if begin < end]


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
