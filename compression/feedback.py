"""Error feedback: what a step leaves out is added to the next gradient.

The sum of all that was sent, plus the residual, is the sum of all gradients: exactly per step for sparsifiers, up to rounding for
the others. Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .base import Bundle, Compressor, Exchange, FlatLayout, Payload, Reducer, State, Turn
from .cast import Identity
from .memory import Memory, non_finite, put_back
from .parts import Worlds, divide, renamed, unite

WHOLE = Identity()


class ErrorFeedback(Reducer):
    """A residual per tensor around a compressor: ``p = g + beta e``, send ``C(p)``, keep ``e = p - C(p)``.

    A tensor with a NaN or an infinity is sent as it is and leaves its residual alone, so that a skipped step (as under AMP) costs
    nothing that later steps need.

    Args:
        inner: the compressor.
        beta: part of the residual that is kept. Below 1.0 it leaks: the sum of what is sent is not that of the gradients any more.
        follow_lr: EF-signSGD's memory, ``p = lr g + e`` in units of the parameters: when ``turn.lr`` changes, the residual is
            scaled by the old rate over the new one. Otherwise residuals are in units of the gradients.

    Raises:
        ValueError: beta is not in (0, 1].

    Attributes:
        dense: send everything, residual included, by an all-reduce of float32, as long as this is set. An option and not state: alike on
            all ranks, changed between steps.
    """

    def __init__(self, inner: Compressor, beta: float = 1.0, follow_lr: bool = False) -> None:
        if not 0 < beta <= 1:
            raise ValueError(f"beta={beta}: must be above 0 and at most 1; use the compressor alone for no error feedback")
        self.inner, self.beta, self.follow_lr = inner, beta, follow_lr
        self.primitive, self.align = inner.primitive, inner.align
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

    def hold_still(self) -> None:
        self.residuals.fixed = True
        self.inner.hold_still()

    def forget(self, names: Collection[str]) -> None:
        self.residuals.forget(names)
        self.inner.forget(names)

    def state_dict(self) -> State:
        return {"residuals": self.residuals.state_dict(), "lr": dict(sorted(self._lr.items())), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.residuals.load_state_dict(state["residuals"])
        self._lr = dict(state["lr"])
        self.inner.load_state_dict(state["inner"])


def compress_parts(
    compressor: Compressor, memory: Memory | None, bundle: Bundle, worlds: Worlds, turn: Turn, suffix: str = ""
) -> list[Payload | None]:
    """Compresses each part of a bundle as a group of its own, with error feedback.

    Args:
        compressor: makes the payloads.
        memory: has what earlier steps left out, and gets what this one does, by the tensors of the whole bundle; None: no error feedback.
            A tensor with a NaN or an infinity leaves its residual alone, in all parts.
        bundle: what is compressed.
        worlds: how it is divided; (): not at all.
        turn: the step, and the rank by which random numbers are drawn.
        suffix: of names, to tell this compression of a tensor from others: each needs its own residual and random numbers.

    Returns:
        A payload for each part; None: nothing is in it.
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
