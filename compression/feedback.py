"""Error feedback: what a step leaves out is added to the next gradient.

The sum of all that was sent, plus the residual, is the sum of all gradients: exactly per step for sparsifiers, up to rounding for
the others. Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.

`TwoPhase` has a second residual. Every rank owns a part of each tensor, averages what all send it of that part, and sends the mean
compressed. Bytes do not grow with the number of ranks as those of an all-gather do; the price is that second compression, whose residual
stays with the owner. This is 1-bit Adam's ``server_error`` (Tang et al., ICML 2021) and Espresso's "divisible" scheme, for every
compressor whose payloads have a length known beforehand.

Residuals lie in a `Memory`: one tensor per name, flat per group, so that a step touches each group once. Groups of tensors can be divided
into a part for each rank, and a part again (`layouts`, `divide`, `unite`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, Shape, State, Turn, layout_of
from .cast import Identity


class Memory:
    """One float32 tensor per name, zero at first. Tensors of a group lie in one flat buffer; groups may change at any time."""

    def __init__(self) -> None:
        self._fixed = False
        self._flat: dict[tuple[str, ...], tuple[FlatLayout, Tensor]] = {}
        self._waiting: dict[str, Tensor] = {}  # loaded, or of a group that is no more: not in any group yet

    def flat(self, layout: FlatLayout, device: torch.device) -> Tensor:
        """The group's buffer, (layout.total,); it may be written in place, padding stays zero.

        Raises ValueError: a tensor of that name has had another number of elements.
        """
        found = self._flat.get(layout.names)
        if found is not None and (found[0] is layout or (found[0].spans == layout.spans and found[0].sizes == layout.sizes)):
            return found[1]
        return self._regroup(layout, device)

    def replace(self, layout: FlatLayout, flat: Tensor) -> None:
        """Makes ``flat`` the group's buffer; one that holds still takes over its values."""
        if self._fixed and layout.names in self._flat:
            self.flat(layout, flat.device).copy_(flat)
        else:
            self._flat[layout.names] = (layout, flat)

    def _regroup(self, layout: FlatLayout, device: torch.device) -> Tensor:
        ours = set(layout.names)
        for names in [names for names in self._flat if not ours.isdisjoint(names)]:
            old, flat = self._flat.pop(names)
            self._waiting.update(zip(old.names, old.views(flat), strict=True))
        fresh = torch.zeros(layout.total, dtype=torch.float32, device=device)
        for name, view in zip(layout.names, layout.views(fresh), strict=True):
            if (kept := self._waiting.pop(name, None)) is not None:
                if kept.numel() != view.numel():
                    raise ValueError(f"{name!r} has {view.numel()} elements, its memory {kept.numel()}: start with a fresh method")
                view.copy_(kept)
        self.replace(layout, fresh)
        return fresh

    def state_dict(self) -> State:
        """The tensors by name, float32 (elements,); not copied."""
        state: State = dict(self._waiting)
        for layout, flat in self._flat.values():
            state.update(zip(layout.names, layout.views(flat), strict=True))
        return dict(sorted(state.items()))

    def hold_still(self) -> None:
        """Keeps a group's buffer where it is while the groups are the same, for `Reducer.hold_still`."""
        self._fixed = True

    def forget(self, names: Collection[str]) -> None:
        """Sets to zero all that is kept for these names, and for names made of them (``name/mean``, ``name#1``)."""
        for name, kept in self.state_dict().items():
            if name in names or re.split("[/#]", name)[0] in names:
                kept.zero_()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._flat.clear()
        self._waiting = {name: value.clone() for name, value in state.items()}


def put_back(layout: FlatLayout, flat: Tensor, before: Tensor | None, numbers: Sequence[int]) -> None:
    """Gives the tensors of these numbers the values they had in ``before``, which may be None for no numbers."""
    for number in numbers:
        assert before is not None
        layout.views(flat)[number].copy_(layout.views(before)[number])


def non_finite(bundle: Bundle) -> list[int]:
    """Numbers of the tensors that have a NaN or an infinity."""
    if bool(torch.isfinite(bundle.flat.sum())):  # a sum of finite values may overflow, one with a NaN or infinity is never finite
        return []
    return [number for number, view in enumerate(bundle.views) if not bool(torch.isfinite(view).all())]


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


WHOLE = Identity()
_MEAN = "/mean"  # in names, so that the two compressions of a tensor draw different random numbers


class ErrorFeedback(Reducer):
    """A residual per tensor around a compressor: ``p = g + beta e``, send ``C(p)``, keep ``e = p - C(p)``.

    A tensor with a NaN or an infinity is sent as it is and leaves its residual alone, so that a skipped step (as under AMP) costs
    nothing that later steps need.

    Args:
        beta: part of the residual that is kept. Below 1.0 it leaks: the sum of what is sent is not that of the gradients any more.
        follow_lr: EF-signSGD's memory, ``p = lr g + e`` in units of the parameters: when ``turn.lr`` changes, the residual is
            scaled by the old rate over the new one. Otherwise residuals are in units of the gradients.

    Raises:
        ValueError: beta is not in (0, 1].
    """

    kept = ("residuals", "inner")
    tables = MappingProxyType({"lr": "_lr"})

    def __init__(self, inner: Compressor, beta: float = 1.0, follow_lr: bool = False) -> None:
        if not 0 < beta <= 1:
            raise ValueError(f"beta={beta}: must be above 0 and at most 1; use the compressor alone for no error feedback")
        self.inner, self.beta, self.follow_lr = inner, beta, follow_lr
        self.primitive, self.align = inner.primitive, inner.align
        # send everything, residual included, by an all-reduce of float32, as long as this is set. An option and not state: alike on all
        # ranks, changed between steps.
        self.dense = False
        self.residuals = Memory()
        self._lr: dict[str, float] = {}  # of the step that each residual is from

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout = bundle.layout
        kept = self.residuals.flat(layout, bundle.flat.device)
        scale = self._rescaled(layout, turn)
        compensated = bundle.plus(kept, self.beta * scale)
        bad = non_finite(compensated)
        inner = WHOLE if self.dense else self.inner
        payload = inner.compress(compensated, turn)
        left = inner.residual(compensated, payload)
        put_back(layout, left, kept if scale == 1 else kept * scale, bad)
        self.residuals.replace(layout, left)
        return (yield from inner.share(payload, turn))

    def _rescaled(self, layout: FlatLayout, turn: Turn) -> float:
        if not self.follow_lr:
            return 1.0
        if turn.lr is None or turn.lr <= 0:
            raise ValueError(f"lr={turn.lr}: error feedback that follows the learning rate needs it in Turn, above 0")
        before = {self._lr.get(name, turn.lr) for name in layout.names}
        if len(before) > 1:
            raise ValueError(
                f"residuals of one group are from steps of different learning rates {sorted(before)}; keep groups as they were"
            )
        self._lr.update(dict.fromkeys(layout.names, turn.lr))
        return before.pop() / turn.lr

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return (WHOLE if self.dense else self.inner).wire_bytes(layout, world=world, selected=selected)


def compress_parts(
    compressor: Compressor, memory: Memory | None, bundle: Bundle, worlds: Worlds, turn: Turn, suffix: str = ""
) -> list[Payload | None]:
    """Compresses each part of a bundle as a group of its own, with error feedback.

    Args:
        memory: has what earlier steps left out, and gets what this one does, by the tensors of the whole bundle; None: no error feedback.
            A tensor with a NaN or an infinity leaves its residual alone, in all parts.
        worlds: how it is divided; (): not at all.
        suffix: of names, to tell this compression of a tensor from others: each needs its own residual and random numbers.

    Returns a payload for each part; None: nothing is in it.
    """
    layout = renamed(bundle.layout, suffix)
    if memory is not None:
        kept = memory.flat(layout, bundle.flat.device).to(bundle.flat.device)
        bundle = bundle.plus(kept)
        bad = non_finite(bundle)
    payloads: list[Payload | None] = []
    missed: list[Bundle | None] = []
    for piece in divide(bundle, worlds):
        if piece is None:
            payloads.append(None)
            missed.append(None)
            continue
        named = Bundle(renamed(piece.layout, suffix), piece.flat)
        payload = compressor.compress(named, turn)
        payloads.append(payload)
        if memory is not None:
            missed.append(Bundle(named.layout, compressor.residual(named, payload)))
    if memory is not None:
        left = unite(bundle.layout, missed, worlds)
        assert left is not None
        put_back(layout, left.flat, kept, bad)
        memory.replace(layout, left.flat)
    return payloads


class TwoPhase(Reducer):
    """Averages by an all-to-all of compressed parts and an all-gather of compressed means.

    Part r of a tensor is the r-th of as many equal runs as there are ranks, and is compressed as a tensor of its own.

    Args:
        inner: a compressor with payloads of one length (`Primitive.ALL_GATHER`).
        error_feedback: keep what either compression leaves out: at the sender, and at the owner of a part.
    """

    primitive = Primitive.ALL_TO_ALL
    kept = ("sender", "owner", "inner")

    def __init__(self, inner: Compressor, error_feedback: bool = True) -> None:
        if inner.primitive is not Primitive.ALL_GATHER:
            raise ValueError(f"TwoPhase({type(inner).__name__}): needs payloads of one length, such as those of ScaledSign, QSGD or TopK")
        if not inner.in_parts:
            raise ValueError(
                f"TwoPhase({type(inner).__name__}): a rank owns a run of a tensor's elements, which is no matrix and would travel "
                "whole, twice: leave two_phase out, or take powersgd, whose bytes do not grow with the number of ranks"
            )
        self.inner, self.error_feedback = inner, error_feedback
        self.unbiased = inner.unbiased and not error_feedback
        self.align = inner.align
        self.sender, self.owner = Memory(), Memory()

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        parts = layouts(bundle.layout, (turn.world,))
        sender = self.sender if self.error_feedback else None
        payloads = compress_parts(self.inner, sender, bundle, (turn.world,), turn)
        empty = torch.empty(0, dtype=torch.uint8, device=bundle.flat.device)
        sent = [empty if payload is None else payload.data for payload in payloads]
        lengths = [data.numel() for data in sent]
        received = yield CollectiveRequest("all_to_all", torch.cat(sent), lengths, lengths[turn.rank])
        padded = empty.new_zeros(max(lengths))
        if (mine := parts[turn.rank]) is not None:
            padded[: lengths[turn.rank]] = self._mean(mine, received, turn)
        gathered = yield CollectiveRequest("gather", padded)
        means = [
            None if part is None else self.inner.decompress(Payload(layout=renamed(part, _MEAN), data=data[:length]))
            for part, data, length in zip(parts, gathered, lengths, strict=True)
        ]
        result = unite(bundle.layout, means, (turn.world,))
        assert result is not None
        return result

    def _mean(self, part: FlatLayout, received: Sequence[Tensor], turn: Turn) -> Tensor:
        """The payload of the owner's mean, with the owner's own residual."""
        mean = self.inner.aggregate([Payload(layout=part, data=data) for data in received])
        owner = self.owner if self.error_feedback else None
        (payload,) = compress_parts(self.inner, owner, Bundle(part, mean.flat, own=True), (), turn, _MEAN)
        assert payload is not None
        return payload.data

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        lengths = [0 if part is None else self.inner.wire_bytes(part) for part in layouts(layout, (world,))]
        return sum(lengths) + max(lengths)
