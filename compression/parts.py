"""Parts of a group of tensors: its ranks have one run each of every tensor, and a part can be divided again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch

from .base import Bundle, FlatLayout, Shape, layout_of

Worlds = tuple[int, ...]  # among how many ranks a group is divided, each part among how many, and so on


@dataclass(frozen=True)
class Part:
    """Runs of tensors of a layout; a tensor of which the part has nothing is left out."""

    layout: FlatLayout
    runs: tuple[tuple[int, int, int], ...]  # number of the tensor, begin and end in it

    def take(self, bundle: Bundle) -> Bundle:
        """The part of a bundle, in memory of its own."""
        flat = bundle.flat.new_zeros(self.layout.total)
        torch._foreach_copy_(self.layout.views(flat), [bundle.views[number][begin:end] for number, begin, end in self.runs])
        return Bundle(self.layout, flat, own=True)

    def put(self, piece: Bundle, whole: Bundle) -> None:
        torch._foreach_copy_([whole.views[number][begin:end] for number, begin, end in self.runs], piece.views)


@lru_cache(maxsize=4096)
def part(layout: FlatLayout, rank: int, world: int) -> Part | None:
    """The rank-th of ``world`` equal runs of each tensor; None where no tensor has a run for it."""
    runs = []
    for number, size in enumerate(layout.sizes):
        length = -(-size // world)
        begin, end = min(size, rank * length), min(size, (rank + 1) * length)
        if begin < end:
            runs.append((number, begin, end))
    if not runs:
        return None
    names = tuple(f"{layout.names[number]}/{rank}" for number, _, _ in runs)
    return _part(names, tuple((end - begin,) for _, begin, end in runs), runs, layout.align)


@lru_cache(maxsize=4096)
def selection(layout: FlatLayout, numbers: tuple[int, ...]) -> Part:
    """Whole tensors, by their numbers."""
    names, shapes = tuple(layout.names[number] for number in numbers), tuple(layout.shapes[number] for number in numbers)
    return _part(names, shapes, [(number, 0, layout.sizes[number]) for number in numbers], layout.align)


def _part(names: tuple[str, ...], shapes: tuple[Shape, ...], runs: Sequence[tuple[int, int, int]], align: int) -> Part:
    return Part(layout_of(names, shapes, (torch.float32,) * len(names), align), tuple(runs))


@lru_cache(maxsize=4096)
def renamed(layout: FlatLayout, suffix: str) -> FlatLayout:
    """The same layout of other names: memories and random numbers go by names."""
    return layout_of(tuple(name + suffix for name in layout.names), layout.shapes, layout.dtypes, layout.align)


@lru_cache(maxsize=4096)
def layouts(layout: FlatLayout | None, worlds: Worlds) -> tuple[FlatLayout | None, ...]:
    """The layouts of all parts, beginning with those of part 0; None for a part that holds nothing."""
    if not worlds:
        return (layout,)
    found = [None if layout is None else part(layout, rank, worlds[0]) for rank in range(worlds[0])]
    return tuple(chain.from_iterable(layouts(None if each is None else each.layout, worlds[1:]) for each in found))


def divide(bundle: Bundle | None, worlds: Worlds) -> list[Bundle | None]:
    """Divides a bundle into the parts that `layouts` describes."""
    if not worlds:
        return [bundle]
    found: list[Bundle | None] = []
    for rank in range(worlds[0]):
        mine = None if bundle is None else part(bundle.layout, rank, worlds[0])
        found += divide(None if bundle is None or mine is None else mine.take(bundle), worlds[1:])
    return found


def unite(layout: FlatLayout | None, pieces: Sequence[Bundle | None], worlds: Worlds) -> Bundle | None:
    """The bundle of which ``pieces`` are all the parts; undoes `divide`."""
    if not worlds:
        return pieces[0]
    if layout is None:
        return None
    each = len(pieces) // worlds[0]
    whole: Bundle | None = None
    for rank in range(worlds[0]):
        mine = part(layout, rank, worlds[0])
        if mine is None:
            continue
        piece = unite(mine.layout, pieces[rank * each : (rank + 1) * each], worlds[1:])
        assert piece is not None
        whole = whole or Bundle(layout, piece.flat.new_zeros(layout.total), own=True)
        mine.put(piece, whole)
    return whole
