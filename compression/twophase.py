"""Two-phase aggregation: every rank owns a part of each tensor, averages what all send it of that part, and sends the mean compressed.

Bytes do not grow with the number of ranks as those of an all-gather do; the price is a second compression, which has a residual of its
own at the owner. This is 1-bit Adam's ``server_error`` (Tang et al., ICML 2021) and Espresso's "divisible" scheme, for every
compressor whose payloads have a length known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .base import Bundle, Compressor, Exchange, Layout, Payload, Primitive, Reducer, Request, State, Turn, layout_of
from .memory import Memory, non_finite, put_back


class TwoPhase(Reducer):
    """Averages by an all-to-all of compressed parts and an all-gather of compressed means.

    Part r of a tensor is the r-th of as many equal runs as there are ranks, and is compressed as a tensor of its own.

    Args:
        inner: a compressor with payloads of one length (`Primitive.ALL_GATHER`).
        error_feedback: keep what either compression leaves out: at the sender, and at the owner of a part.
    """

    primitive = Primitive.ALL_TO_ALL

    def __init__(self, inner: Compressor, error_feedback: bool = True) -> None:
        if inner.primitive is not Primitive.ALL_GATHER:
            raise ValueError(f"TwoPhase({type(inner).__name__}): needs payloads of one length, such as those of ScaledSign, QSGD or TopK")
        self.inner, self.error_feedback = inner, error_feedback
        self.unbiased = inner.unbiased and not error_feedback
        self.align = inner.align
        self.sender, self.owner = Memory(), Memory()

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        parts = [_part(bundle.layout, rank, turn.world, self.align) for rank in range(turn.world)]
        sent = self._send(bundle, parts, turn)
        lengths = [data.numel() for data in sent]
        mine = parts[turn.rank]
        received = yield Request("all_to_all", torch.cat(sent), lengths, lengths[turn.rank])
        mean = self._mean(mine, received, turn)
        padded = mean.new_zeros(max(lengths))
        padded[: mean.numel()] = mean
        gathered = yield Request("gather", padded)
        result = torch.zeros_like(bundle.flat)
        for part, data, length in zip(parts, gathered, lengths, strict=True):
            if part is not None:
                part.put(self.inner.decompress(Payload(part.means, data[:length])), bundle.layout, result)
        return Bundle(bundle.layout, result)

    def _send(self, bundle: Bundle, parts: Sequence[_Part | None], turn: Turn) -> list[Tensor]:
        """The payload for each owner; what they leave out stays here."""
        layout = bundle.layout
        kept = self.sender.flat(layout, bundle.flat.device) if self.error_feedback else None
        compensated = bundle if kept is None else bundle.plus(kept)
        left = torch.zeros_like(bundle.flat)
        sent = []
        for part in parts:
            if part is None:
                sent.append(torch.empty(0, dtype=torch.uint8, device=bundle.flat.device))
                continue
            piece = part.take(compensated)
            payload = self.inner.compress(piece, turn)
            sent.append(payload.data)
            if kept is not None:
                part.put(Bundle(part.layout, self.inner.residual(piece, payload)), layout, left)
        if kept is not None:
            self._keep(self.sender, layout, left, kept, non_finite(compensated))
        return sent

    def _mean(self, part: _Part | None, received: Sequence[Tensor], turn: Turn) -> Tensor:
        """The payload of the owner's mean, with the owner's own residual."""
        if part is None:
            return received[0]
        mean = self.inner.aggregate([Payload(part.layout, data) for data in received])
        mean = Bundle(part.means, mean.flat)
        if not self.error_feedback:
            return self.inner.compress(mean, turn).data
        kept = self.owner.flat(part.means, mean.flat.device)
        compensated = Bundle(part.means, mean.flat.add_(kept))
        bad = non_finite(compensated)
        payload = self.inner.compress(compensated, turn)
        self._keep(self.owner, part.means, self.inner.residual(compensated, payload), kept, bad)
        return payload.data

    def _keep(self, memory: Memory, layout: Layout, left: Tensor, before: Tensor, bad: Sequence[int]) -> None:
        put_back(layout, left, before, bad)
        memory.replace(layout, left)

    def wire_bytes(self, layout: Layout, *, world: int = 1, selected: int | None = None) -> int:
        parts = [_part(layout, rank, world, self.align) for rank in range(world)]
        lengths = [0 if part is None else self.inner.wire_bytes(part.layout) for part in parts]
        return sum(lengths) + max(lengths)

    def hold_still(self) -> None:
        self.sender.fixed = self.owner.fixed = True
        self.inner.hold_still()

    def state_dict(self) -> State:
        return {"sender": self.sender.state_dict(), "owner": self.owner.state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sender.load_state_dict(state["sender"])
        self.owner.load_state_dict(state["owner"])
        self.inner.load_state_dict(state["inner"])


@dataclass(frozen=True)
class _Part:
    """One rank's runs of the tensors of a layout; tensors too short to have one are left out.

    ``layout`` and ``means`` differ in names only: the two compressions must not draw the same random numbers.
    """

    layout: Layout
    means: Layout
    runs: tuple[tuple[int, int, int], ...]  # number of the tensor, begin and end in it

    def take(self, bundle: Bundle) -> Bundle:
        flat = torch.zeros(self.layout.total, device=bundle.flat.device)
        torch._foreach_copy_(self.layout.views(flat), [bundle.views[number][begin:end] for number, begin, end in self.runs])
        return Bundle(self.layout, flat)

    def put(self, piece: Bundle, layout: Layout, flat: Tensor) -> None:
        views = layout.views(flat)
        torch._foreach_copy_([views[number][begin:end] for number, begin, end in self.runs], piece.views)


@lru_cache(maxsize=4096)
def _part(layout: Layout, rank: int, world: int, align: int) -> _Part | None:
    """Rank ``rank``'s part; None where no tensor has a run for it."""
    runs = []
    for number, size in enumerate(layout.sizes):
        length = -(-size // world)
        begin, end = min(size, rank * length), min(size, (rank + 1) * length)
        if begin < end:
            runs.append((number, begin, end))
    if not runs:
        return None
    names = [f"{layout.names[number]}/{rank}" for number, _, _ in runs]
    shapes, dtypes = tuple((end - begin,) for _, begin, end in runs), (torch.float32,) * len(runs)
    piece = layout_of(tuple(names), shapes, dtypes, align)
    return _Part(piece, layout_of(tuple(f"{name}/mean" for name in names), shapes, dtypes, align), tuple(runs))
