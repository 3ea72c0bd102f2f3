"""Whole tensors, joined from the shards of all ranks, or the parts of them that are asked for.

Under DDP every rank owns a stretch of the one tensor all of them hold; under FSDP2 every rank has a part of its own, whose place in the
whole tensor follows from shape, placements and mesh (`gemini_ft.state.tensors.placement_words`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch

from gemini_ft.core.layout import PER_RANK, Piece, Read
from gemini_ft.errors import CorruptDataError, UnsupportedStateError
from gemini_ft.recovery.readers import ShardReader
from gemini_ft.recovery.restore import scatter
from gemini_ft.state.placements import Group, contradiction, part_places, placement_of, runs
from gemini_ft.state.tensors import HOST

Parts = dict[Group, torch.Tensor]  # group of ranks -> the local tensor all of them hold
Box = tuple[Sequence[int], Sequence[int]]  # of a whole tensor: the first index and the size in each dimension


class WholeTensors:
    """The tensors of a checkpoint whose names are ``wanted``, to be put together from all ranks' shards. Buffers are those of rank 0, and
    what only some ranks have is that of the first of them.

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
        for name, held in self._parts.items():
            if self._words[name] == PER_RANK:
                self._parts[name] = {min(held): held[min(held)]}  # the others are not read

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
                places = None if boxes is None else part_places(name, self._words[name], part.shape, group, len(self._shards))
                span = (0, part.numel()) if boxes is None or places is None else _span(places, boxes[name])
                if span is not None:
                    spans[f"{name}@{group[0]}"] = span
                    found[name][group] = torch.zeros_like(part, device="cpu")
        flat = {f"{name}@{group[0]}": part for name, parts in found.items() for group, part in parts.items()}
        for owner, shard in enumerate(self._shards):
            pieces = [piece for piece in shard.layout.pieces if piece.nbytes and _key(piece) in spans]
            scatter(shard, [read for piece in pieces for read in Read.between(*spans[_key(piece)], owner, piece, _key(piece))], flat)
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
    shape, _, _ = placement_of(name, words, world_size)
    if (present := sum(part.numel() for part in parts.values())) != math.prod(shape):
        raise CorruptDataError(f"{name} is not whole: {present} of its {math.prod(shape)} elements are there")
    known = {group: part for group, part in parts.items() if not part.is_meta}
    whole = torch.empty(shape, dtype=first.dtype, device="cpu" if known else "meta")
    for group, part in known.items() if whole.numel() else ():
        places = part_places(name, words, part.shape, group, world_size)
        try:
            _put(whole, part, places)
        except (IndexError, RuntimeError) as error:
            raise contradiction(name, words, error) from None
    return whole


def _put(whole: torch.Tensor, part: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    for box in product(*map(runs, places)):
        there, here = whole, part
        for dim, (start, begin, length) in enumerate(box):
            there, here = there.narrow(dim, start, length), here.narrow(dim, begin, length)
        there.copy_(here)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
