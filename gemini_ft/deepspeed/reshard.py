"""Cuts the masters of a rank, which are made of parameters, anew for another number of ranks.

ZeRO lays the parameters of a group end to end and cuts that line into one partition per rank (stages 1 and 2), or cuts every
parameter by itself (stage 3). Either way a master is a row of *fragments*, and optimizer state of the master's shape is the
same row. Re-cutting for another world size is then a matter of reading: each new fragment from the old ones that overlap it.

Pure: neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemini_ft.core.layout import ITEMSIZES, Layout, Piece, Read, TensorSpec
from gemini_ft.errors import LayoutMismatchError
from gemini_ft.state.tensors import split_state_name


class Fragment(NamedTuple):
    """Elements ``start:stop`` of a flattened parameter, at element ``offset`` of the tensor ``master``."""

    master: str
    offset: int
    param: str
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """The way in which one rank's part of the training state is made of parameters."""

    shapes: Mapping[str, tuple[int, ...]]  # tensor of masters or of a frozen parameter -> its shape
    fragments: Sequence[Fragment]  # what they consist of; what is missing is padding

    def of(self, master: str) -> list[Fragment]:
        """The fragments of one tensor."""
        return [fragment for fragment in self.fragments if fragment.master == master]

    def pack(self) -> tuple[Any, ...]:
        """The cut as plain data."""
        return dict(self.shapes), [tuple(fragment) for fragment in self.fragments]

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> Cut:
        """Makes a cut of the plain data that `pack` gave."""
        shapes, fragments = packed
        return cls(shapes, [Fragment(*fragment) for fragment in fragments])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Elements ``start:stop`` of a parameter, or of state of its shape, at byte ``offset`` of an old rank's shard."""

    start: int
    stop: int
    owner: int
    offset: int
    piece: Piece


class OldShards:
    """The shards of a job of another size, as places where the elements of each parameter can be read.

    ``layouts``: rank of that job -> layout of its shard. ``cuts``: rank of that job -> how it was made of parameters.
    """

    def __init__(self, layouts: Mapping[int, Layout], cuts: Mapping[int, Cut]) -> None:
        self._found: dict[str, dict[str, list[Found]]] = {}  # parameter -> key of its state (empty: itself) -> where
        self._scalars: dict[str, dict[str, list[Found]]] = {}  # the same for state that every fragment of a master shares
        self.masters: dict[str, tuple[int, str]] = {}  # parameter -> an old rank that had some of it, and in which master
        for owner, layout in layouts.items():
            state = _by_master(layout, cuts[owner])
            for fragment in cuts[owner].fragments:
                self.masters.setdefault(fragment.param, (owner, fragment.master))
                for key, piece in state.get(fragment.master, {}).items():
                    self._add(owner, fragment, key, piece, shared=piece.shape != cuts[owner].shapes[fragment.master])
        for of_param in self._found.values():
            for places in of_param.values():
                places.sort(key=lambda found: (found.start, found.stop, found.owner, found.offset))

    def _add(self, owner: int, fragment: Fragment, key: str, piece: Piece, shared: bool) -> None:
        if shared:
            place = Found(start=piece.start, stop=piece.stop, owner=owner, offset=piece.offset, piece=piece)
            places = self._scalars.setdefault(fragment.param, {}).setdefault(key, [])
            if not places or (
                (places[0].piece.name, places[0].piece.group) == (piece.name, piece.group) and owner not in {p.owner for p in places}
            ):
                places.append(place)  # more than one where ranks share state that is the same on all of them
            return
        low = max(fragment.offset, piece.start)
        high = min(fragment.offset + fragment.stop - fragment.start, piece.stop)
        if low < high:
            start, offset = fragment.start + low - fragment.offset, piece.offset + (low - piece.start) * ITEMSIZES[piece.dtype]
            places = self._found.setdefault(fragment.param, {}).setdefault(key, [])
            places.append(Found(start=start, stop=start + high - low, owner=owner, offset=offset, piece=piece))

    def state_of(self, param: str) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
        """Key -> kind of its tensor: state of the master's shape, or state that every fragment of a master shares."""
        of_shape = {key: _spec(found[0].piece) for key, found in self._found.get(param, {}).items() if key}
        return of_shape, {key: _spec(found[0].piece) for key, found in self._scalars.get(param, {}).items()}

    def dtype(self, param: str, key: str) -> str:
        """The dtype of a parameter (empty key) or of state of its shape. Raises LayoutMismatchError: no rank had it."""
        found = self._found.get(param, {}).get(key)
        if not found:
            raise LayoutMismatchError(f"no rank has {key or 'any part'} of {param}")
        return found[0].piece.dtype

    def shared(self, param: str, key: str, name: str) -> list[Read]:
        """The reads that fill the tensor ``name`` with state that every fragment of a master shares."""
        return [
            Read(owner=f.owner, offset=f.offset, nbytes=f.piece.nbytes, name=name, start=f.start, stop=f.stop)
            for f in self._scalars[param][key]
        ]

    def reads(self, fragment: Fragment, key: str, name: str) -> list[Read]:
        """The reads that fill a new fragment.

        ``key``: of the optimizer's state; empty: the parameter itself. ``name``: of the tensor that the fragment lies in.

        Raises LayoutMismatchError: the old ranks did not have all of it.
        """
        at, reads = fragment.start, list[Read]()
        for found in self._found.get(fragment.param, {}).get(key, ()):
            high = min(fragment.stop, found.stop)
            if found.start <= at < high:
                size, start = ITEMSIZES[found.piece.dtype], fragment.offset + at - fragment.start
                reads.append(
                    Read(
                        owner=found.owner,
                        offset=found.offset + (at - found.start) * size,
                        nbytes=(high - at) * size,
                        name=name,
                        start=start,
                        stop=start + high - at,
                    )
                )
                at = high
        if at < fragment.stop:
            what = f"{key} of {fragment.param}" if key else fragment.param
            raise LayoutMismatchError(
                f"the snapshot has no elements {at} to {fragment.stop} of {what}. Resume with the model that made it, or start afresh "
                "with another run_id or resume='never'."
            )
        return reads


def _spec(piece: Piece) -> TensorSpec:
    return TensorSpec(name=piece.name, dtype=piece.dtype, shape=piece.shape, group=piece.group, logical=piece.logical)


def _by_master(layout: Layout, cut: Cut) -> dict[str, dict[str, Piece]]:
    """Master -> key of its state (empty: itself) -> piece."""
    found: dict[str, dict[str, Piece]] = {}
    for piece in layout.pieces:
        label, key = (piece.name, "") if piece.name in cut.shapes else split_state_name(piece.name)
        found.setdefault(label, {})[key] = piece
    return found
