"""A rank's training state as one flat byte range: the place of every tensor, and its owner.

Every tensor is declared with the *group* of ranks that hold the very same bytes. The tensors of one
group are laid end to end, in the order of their names, and each rank of the group owns one equal
stretch of that line (plain DDP: 1/N of everything; FSDP: all of its own parts; HSDP: 1/R of them).
Frozen parameters form lines of their own, so that what never changes fills whole chunks. The stretches
of one owner, from all groups it belongs to, form its *shard*, and the `Layout` says where each `Piece`
lies in it.

Pure: no torch, no clock, no I/O; dtypes are strings such as ``"float32"``. The agent uses it too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import xxhash

from gemini_ft.errors import CorruptDataError, LayoutMismatchError, StateError, UnsupportedStateError, WorldSizeError

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size
FORMAT_VERSION = 1
PER_RANK = "per rank"  # begins TensorSpec.logical of per-rank state: other ranks may have another shape, or none
ITEMSIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}  # bytes per element
_MOST_DIMENSIONS = 1024  # of a tensor; the product of a million sizes takes minutes
_NAMED = 5  # differences spelled out in an error


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor as one rank sees it."""

    name: str  # unique on this rank, the same on all ranks of the group
    dtype: str  # a key of `ITEMSIZES`
    shape: tuple[int, ...]  # this rank's local shape
    group: tuple[int, ...]  # sorted ranks that hold the very same bytes; ``(rank,)`` when the tensor is per rank
    # the whole tensor in words that are equal on all ranks (global shape and placements); empty when the local shape is the whole
    logical: str = ""
    # it probably stays as it is (a parameter without gradient), so it is laid apart from what changes. Part of `logical_hash`, for all
    # ranks must cut alike, and not of the tensor's identity.
    frozen: bool = field(default=False, compare=False)

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements ``start:stop`` of one flattened tensor, at byte ``offset`` of its owner's shard.

    An empty tensor has one piece of no bytes, at the first rank of its group, so that its absence is noticed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    nbytes: int
    group: tuple[int, ...] = ()
    logical: str = ""

    @property
    def label(self) -> str:
        """The name of the piece in files and messages."""
        return f"{self.name}@{self.start}:{self.stop}"


@dataclass(frozen=True)
class Layout:
    """The place of each piece of one owner's shard."""

    pieces: tuple[Piece, ...]  # by ascending offset; offsets are multiples of `ALIGNMENT`, nothing overlaps
    nbytes: int  # size of the shard, a multiple of `ALIGNMENT`
    # 16 hex digits of XXH3-64; equal on two ranks if and only if names, dtypes, logical shapes and frozenness of all their tensors are,
    # except those that are `PER_RANK`
    logical_hash: str
    world_size: int  # ranks of the job that made the cuts
    # all groups that the owner belongs to, also those whose tensors are too small for it to own a byte
    groups: tuple[tuple[int, ...], ...] = ()
    _by_name: Mapping[str, Piece] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The more ranks a group has, the longer hashing it takes, so an object that many pieces share is hashed once.
        groups = {id(group): group for group in (*self.groups, *(piece.group for piece in self.pieces))}
        object.__setattr__(self, "groups", tuple(sorted(set(groups.values()))))
        object.__setattr__(self, "_by_name", {piece.name: piece for piece in self.pieces})

    def piece(self, name: str) -> Piece | None:
        """The piece of tensor ``name`` that this owner holds; an owner never holds two of one tensor."""
        return self._by_name.get(name)

    @property
    def owners(self) -> set[int]:
        """Ranks whose shards together hold all that this owner held; itself among them, unless it held nothing."""
        return set().union(*self.groups)

    def to_bytes(self) -> bytes:
        """Encodes as msgpack; groups are stored once each."""
        groups = {group: index for index, group in enumerate(self.groups)}
        rows = [(p.name, p.dtype, p.shape, p.start, p.stop, p.offset, groups[p.group], p.logical) for p in self.pieces]
        return bytes(msgpack.packb((FORMAT_VERSION, self.world_size, self.logical_hash, self.nbytes, self.groups, rows)))

    @staticmethod
    def from_bytes(blob: bytes) -> Layout:
        """Decodes and checks the bytes that `to_bytes` made; safe on bytes from an untrusted source.

        Raises:
            CorruptDataError: the bytes are not a layout, or contradict themselves.
            StateError: they are of a format version that this release does not know.
        """
        try:
            version, *fields = msgpack.unpackb(blob, use_list=False, object_hook=_no_map, max_ext_len=0)
            if version != FORMAT_VERSION:
                raise StateError(f"layout of format version {version!r}; this release reads version {FORMAT_VERSION}")
            world_size, logical_hash, nbytes, groups, rows = fields
            layout = Layout(tuple(_piece(groups, row) for row in rows), nbytes, logical_hash, world_size, groups)
            _check_layout(layout)
        except StateError:
            raise
        except Exception as error:  # msgpack, unpacking and arithmetic fail in many ways on garbage
            raise CorruptDataError(f"not a layout: {type(error).__name__}: {error}") from None
        return layout


@dataclass(frozen=True, kw_only=True)
class Read:
    """Bytes ``offset:offset + nbytes`` of ``owner``'s shard are elements ``start:stop`` of the local tensor ``name``."""

    owner: int
    offset: int
    nbytes: int
    name: str
    start: int
    stop: int

    @classmethod
    def of(cls, owner: int, piece: Piece, name: str) -> Read:
        """All of a piece of ``owner``'s shard."""
        return cls(owner=owner, offset=piece.offset, nbytes=piece.nbytes, name=name, start=piece.start, stop=piece.stop)

    @classmethod
    def between(cls, first: int, end: int, owner: int, piece: Piece, name: str, moved: int = 0) -> Iterator[Read]:
        """The part of a piece from element ``first`` to ``end`` of its tensor, which lies ``moved`` elements further on in ``name``."""
        start, stop, size = max(first, piece.start), min(end, piece.stop), ITEMSIZES[piece.dtype]
        if start < stop:
            offset, nbytes = piece.offset + (start - piece.start) * size, (stop - start) * size
            yield cls(owner=owner, offset=offset, nbytes=nbytes, name=name, start=start + moved, stop=stop + moved)


def build_layout(specs: Sequence[TensorSpec], rank: int, world_size: int) -> Layout:
    """Cuts every group's bytes into equal stretches and lays out those that ``rank`` owns; frozen tensors first, cut apart.

    Two ranks of a group differ by less than one element per group in what they own of each kind; cuts fall on
    element boundaries. The order of ``specs`` does not matter.

    Raises:
        UnsupportedStateError: a dtype is unknown.
        StateError: a name is used twice, or a group is not a sorted tuple of ranks that includes ``rank``.
    """
    _check_specs(specs, rank, world_size)
    lines: dict[tuple[bool, tuple[int, ...]], list[TensorSpec]] = {}
    for spec in sorted(specs, key=lambda spec: spec.name):
        lines.setdefault((not spec.frozen, spec.group), []).append(spec)
    pieces: list[Piece] = []
    offset = 0
    for changing, group in sorted(lines):
        for spec, start, stop in _share(lines[changing, group], group.index(rank), len(group)):
            nbytes = (stop - start) * ITEMSIZES[spec.dtype]
            pieces.append(
                Piece(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    start=start,
                    stop=stop,
                    offset=offset,
                    nbytes=nbytes,
                    group=group,
                    logical=spec.logical,
                )
            )
            offset += nbytes + -nbytes % ALIGNMENT
    return Layout(tuple(pieces), offset, logical_hash(specs), world_size, tuple(group for _, group in lines))


def logical_hash(specs: Iterable[TensorSpec]) -> str:
    """16 hex digits of XXH3-64 over names, dtypes, logical shapes and what is frozen; independent of order, rank and groups.

    Tensors that are `PER_RANK` do not count.
    """
    common = [spec for spec in specs if not spec.logical.startswith(PER_RANK)]
    rows = sorted((spec.name, spec.dtype, spec.logical or list(spec.shape), *[True] * spec.frozen) for spec in common)
    return xxhash.xxh3_64_hexdigest(msgpack.packb(rows))


def owners_needed(specs: Iterable[TensorSpec], rank: int) -> set[int]:
    """Ranks whose shards hold something that ``rank`` must read to restore itself; itself included."""
    return {rank}.union(*(spec.group for spec in specs))


def stored_specs(rank: int, layouts: Mapping[int, Layout]) -> list[TensorSpec]:
    """The tensors that ``rank`` held when the snapshot was taken, in the order of their names.

    ``layouts`` must have those of all the `Layout.owners` of the rank's own layout.
    """
    firsts = (held[0][1] for _, held in sorted(_stored(rank, layouts).items()))
    return [TensorSpec(name=piece.name, dtype=piece.dtype, shape=piece.shape, group=piece.group, logical=piece.logical) for piece in firsts]


def plan_reads(specs: Sequence[TensorSpec], rank: int, layouts: Mapping[int, Layout]) -> list[Read]:
    """Plans the reads that fill all tensors of ``rank``, ordered by owner and offset.

    Args:
        rank: this rank; it must have had the same rank when the snapshot was taken.
        layouts: owner -> layout of its shard in the snapshot, at least for `owners_needed`.

    Raises:
        LayoutMismatchError: the snapshot holds other tensors; the message names the first few.
        WorldSizeError: the layouts come from jobs of different sizes.
    """
    if len(sizes := {layout.world_size for layout in layouts.values()}) > 1:
        raise WorldSizeError(f"the shards were made by jobs of {sorted(sizes)} ranks; one snapshot has one size")
    if absent := sorted(owners_needed(specs, rank) - layouts.keys()):
        raise LayoutMismatchError(f"rank {rank} needs the layouts of owners {absent}, got those of {sorted(layouts)}")
    stored = _stored(rank, layouts)
    if differing := list(_differences(specs, stored)):
        more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise LayoutMismatchError(
            f"the snapshot belongs to another model or optimizer, {len(differing)} tensors differ: {'; '.join(differing[:_NAMED])}{more}. "
            "Resume with the model that made it, or start afresh with another run_id or resume='never'."
        )
    reads = [Read.of(owner, piece, piece.name) for held in stored.values() for owner, piece in held if piece.nbytes]
    return sorted(reads, key=lambda read: (read.owner, read.offset))


def _share(specs: Sequence[TensorSpec], index: int, parts: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """Tensor, first and last element of what part ``index`` of ``parts`` owns of the tensors laid end to end."""
    ends = list(accumulate(spec.nbytes for spec in specs))
    low, high = (_cut(specs, ends, i, parts) for i in (index, index + 1))
    for spec, end in zip(specs, ends, strict=True):
        begin, size = end - spec.nbytes, ITEMSIZES[spec.dtype]
        start, stop = max(low, begin) - begin, min(high, end) - begin
        if start < stop:
            yield spec, start // size, stop // size
        elif not spec.numel and index == 0:
            yield spec, 0, 0


def _cut(specs: Sequence[TensorSpec], ends: Sequence[int], index: int, parts: int) -> int:
    """Byte at which part ``index`` begins: ``total * index / parts``, moved back to an element boundary."""
    total = ends[-1]
    byte = total * index // parts
    if byte == total:
        return total
    spec = specs[at := bisect_right(ends, byte)]
    begin = ends[at] - spec.nbytes
    return byte - (byte - begin) % ITEMSIZES[spec.dtype]


def _check_specs(specs: Sequence[TensorSpec], rank: int, world_size: int) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.dtype not in ITEMSIZES:
            raise UnsupportedStateError(f"{spec.name}: dtype {spec.dtype!r} is unknown; supported: {', '.join(sorted(ITEMSIZES))}")
        if spec.name in seen:
            raise StateError(f"two tensors are named {spec.name!r}; names must be unique on a rank")
        if tuple(sorted(set(spec.group))) != spec.group or rank not in spec.group or not 0 <= spec.group[0] <= spec.group[-1] < world_size:
            raise StateError(f"{spec.name}: group {spec.group} must be sorted ranks of 0..{world_size - 1} that include {rank}")
        seen.add(spec.name)


def _piece(groups: Sequence[tuple[int, ...]], row: tuple[Any, ...]) -> Piece:
    name, dtype, shape, start, stop, offset, group, logical = row
    _require(_whole((group,)), "groups")
    return Piece(
        name=name,
        dtype=dtype,
        shape=shape,
        start=start,
        stop=stop,
        offset=offset,
        nbytes=(stop - start) * ITEMSIZES[dtype],
        group=groups[group],
        logical=logical,
    )


def _check_layout(layout: Layout) -> None:
    _require(_whole((layout.world_size, layout.nbytes)) and layout.nbytes % ALIGNMENT == 0, "sizes")
    _require(isinstance(layout.logical_hash, str) and len(layout.logical_hash) == 16, "hash")
    _require(all(_whole(group) and group for group in layout.groups), "groups")
    _require(len(layout._by_name) == len(layout.pieces), "two pieces of one tensor")
    end = 0
    for piece in layout.pieces:
        _require(isinstance(piece.name, str) and isinstance(piece.logical, str), "names")
        _require(_whole(piece.shape) and _whole((piece.start, piece.offset)), f"piece {piece.name}")
        _require(len(piece.shape) <= _MOST_DIMENSIONS, f"dimensions of piece {piece.name}")
        _require(piece.start <= piece.stop <= math.prod(piece.shape), f"elements of {piece.label}")
        _require(piece.offset % ALIGNMENT == 0 and piece.offset >= end, f"offset of {piece.label}")
        end = piece.offset + piece.nbytes
    _require(end <= layout.nbytes, "pieces beyond the end")


def _whole(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def _no_map(found: object) -> None:
    raise ValueError("a map, of which millions fit into a few megabytes")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"contradiction in {what}")


def _stored(rank: int, layouts: Mapping[int, Layout]) -> dict[str, list[tuple[int, Piece]]]:
    """Tensor name -> (owner, piece) for everything that ``rank`` held when the snapshot was taken."""
    stored: dict[str, list[tuple[int, Piece]]] = {}
    for owner, layout in sorted(layouts.items()):
        for piece in layout.pieces:
            if rank in piece.group:
                stored.setdefault(piece.name, []).append((owner, piece))
    return stored


def _differences(specs: Sequence[TensorSpec], stored: Mapping[str, list[tuple[int, Piece]]]) -> Iterator[str]:
    """Describes each tensor that differs between now and the snapshot, one sentence each."""
    names = {spec.name for spec in specs}
    for spec in specs:
        if spec.name not in stored:
            yield f"{spec.name} ({spec.dtype} {spec.shape}) is missing from the snapshot"
        else:
            yield from _difference(spec, [piece for _, piece in stored[spec.name]])
    for name in stored.keys() - names:
        piece = stored[name][0][1]
        yield f"{name} ({piece.dtype} {piece.shape}) is in the snapshot and not in this model or its optimizers"


def _difference(spec: TensorSpec, pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        for what in ("dtype", "shape", "logical", "group"):
            now, then = getattr(spec, what), getattr(piece, what)
            if now != then:
                label = {"logical": "whole tensor", "group": "group of ranks"}.get(what, what)
                yield f"{spec.name} has {label} {now} now and {then} in the snapshot"
                return
    bounds = sorted((piece.start, piece.stop) for piece in pieces)
    gaps = [left for (_, left), (right, _) in pairwise([(0, 0), *bounds, (spec.numel, spec.numel)]) if left != right]
    if gaps:
        yield f"{spec.name} is not whole in the snapshot: its pieces do not meet at element {gaps[0]} of {spec.numel}"
