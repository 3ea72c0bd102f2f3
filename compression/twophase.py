"""Two-phase aggregation: every rank owns a part of each tensor, averages what all send it of that part, and sends the mean compressed.

Bytes do not grow with the number of ranks as those of an all-gather do; the price is a second compression, which has a residual of its
own at the owner. This is 1-bit Adam's ``server_error`` (Tang et al., ICML 2021) and Espresso's "divisible" scheme, for every
compressor whose payloads have a length known beforehand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, State, Turn
from .feedback import compress_parts
from .memory import Memory
from .parts import layouts, renamed, unite

_MEAN = "/mean"  # in names, so that the two compressions of a tensor draw different random numbers


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
            None if part is None else self.inner.decompress(Payload(renamed(part, _MEAN), data[:length]))
            for part, data, length in zip(parts, gathered, lengths, strict=True)
        ]
        result = unite(bundle.layout, means, (turn.world,))
        assert result is not None
        return result

    def _mean(self, part: FlatLayout, received: Sequence[Tensor], turn: Turn) -> Tensor:
        """The payload of the owner's mean, with the owner's own residual."""
        mean = self.inner.aggregate([Payload(part, data) for data in received])
        owner = self.owner if self.error_feedback else None
        (payload,) = compress_parts(self.inner, owner, Bundle(part, mean.flat, own=True), (), turn, _MEAN)
        assert payload is not None
        return payload.data

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        lengths = [0 if part is None else self.inner.wire_bytes(part) for part in layouts(layout, (world,))]
        return sum(lengths) + max(lengths)

    def hold_still(self) -> None:
        self.sender.fixed = self.owner.fixed = True
        self.inner.hold_still()

    def forget(self, names: Collection[str]) -> None:
        self.sender.forget(names)
        self.owner.forget(names)
        self.inner.forget(names)

    def state_dict(self) -> State:
        return {"sender": self.sender.state_dict(), "owner": self.owner.state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sender.load_state_dict(state["sender"])
        self.owner.load_state_dict(state["owner"])
        self.inner.load_state_dict(state["inner"])
