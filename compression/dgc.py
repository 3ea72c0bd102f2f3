"""Deep Gradient Compression (Lin et al., ICLR 2018): momentum before compression, and a threshold from a sample.

    method = MomentumCorrection(SampledThreshold(ratio=0.001, warmup_steps=4 * steps_per_epoch), momentum=0.9)

What comes out holds the momentum already: the optimizer must have none.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from gemini_ft.validation import checked

from .base import Bundle, Exchange, FlatLayout, Payload, Reducer, Turn, join
from .buffers import BUFFERS
from .feedback import WHOLE, Memory, non_finite, put_back
from .kernels import norms
from .options import ClipNorm, Momentum, Nesterov, Ratio, Sample, Warmup
from .sparse import RatioSparsifier, Sparsifier, above, kept, largest, within

_WARMUP_STAGES, _WARMUP_RATIO = 4, 0.25
_ADAPTATIONS = 10


class SampledThreshold(RatioSparsifier):
    """About ``ratio`` of each tensor, above a threshold that is estimated from a sample of it.

    The estimate is corrected until between 0.8 and 1.3 of the target pass; of more, exactly the largest are taken.

    ``warmup_steps``: steps in which the ratio falls to the target, in four stages of one length: 0.25, 0.063, 0.016 and 0.004 for 0.001.
    """

    low, high = 0.8, 1.3

    @checked
    def __init__(self, ratio: Ratio = 0.001, sample: Sample = 0.01, warmup_steps: Warmup = 0) -> None:
        self.ratio, self.sample, self.warmup_steps = ratio, sample, warmup_steps

    def ratio_at(self, step: int) -> float:
        """The target of one step: the sparsity rises exponentially from 75 % (section 3.3, warm-up training)."""
        if step >= self.warmup_steps or self.ratio >= _WARMUP_RATIO:
            return self.ratio
        stage = step * _WARMUP_STAGES // self.warmup_steps
        return _WARMUP_RATIO * math.pow(self.ratio / _WARMUP_RATIO, stage / _WARMUP_STAGES)

    def choose(self, name: str, magnitudes: Tensor, turn: Turn) -> Tensor:
        ratio = self.ratio_at(turn.step if turn.update is None else turn.update)
        target = kept(magnitudes.numel(), ratio)
        threshold = self._estimate(magnitudes, ratio)
        for _ in range(_ADAPTATIONS):
            found = above(magnitudes, threshold)
            if found.numel() >= self.low * target:
                return within(magnitudes, found, target, self.high)
            threshold *= self.low
        return largest(magnitudes, target)

    def _estimate(self, magnitudes: Tensor, ratio: float) -> float:
        size = magnitudes.numel()
        wanted = max(self.sample * size, 2 / ratio)
        stride = max(1, int(size / wanted))
        sample = magnitudes[:: stride - (stride > 2 and stride % 2 == 0)]  # odd: not in step with rows of even length
        return float(sample.topk(kept(sample.numel(), ratio), sorted=True).values[-1])


class MomentumCorrection(Reducer):
    """DGC's memory: momentum accumulates before compression (3.1), and elements that are sent leave both memories (masking, 3.2).

    ``u = m u + g``, ``v = v + u``, send some of ``v``, and zero ``u`` and ``v`` there. Tensors of one dimension are sent whole, with
    ordinary momentum.

    Args:
        nesterov: ``u = m (u + g)``, ``v = v + u + g``.
        clip_norm: each tensor's gradient is scaled to at most this L2 norm divided by sqrt(ranks) first; None: not at all.
    """

    kept = ("velocities", "residuals", "inner")

    @checked
    def __init__(self, inner: Sparsifier, momentum: Momentum = 0.9, nesterov: Nesterov = False, clip_norm: ClipNorm = None) -> None:
        self.inner, self.momentum, self.nesterov, self.clip_norm = inner, momentum, nesterov, clip_norm
        self.primitive, self.align = inner.primitive, inner.align
        # send everything by an all-reduce of float32, with ordinary momentum, as long as this is set; see `ErrorFeedback`
        self.dense = False
        self.velocities, self.residuals = Memory(), Memory()

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout, device = bundle.layout, bundle.flat.device
        velocity, residual = self.velocities.flat(layout, device), self.residuals.flat(layout, device)
        bad = non_finite(bundle)
        before = [memory.clone() if bad else None for memory in (velocity, residual)]
        gradient = self._clipped(bundle, turn)
        velocity.mul_(self.momentum).add_(gradient, alpha=self.momentum if self.nesterov else 1.0)
        residual.add_(velocity)
        if self.nesterov:
            residual.add_(gradient)
        payload = WHOLE.compress(Bundle(layout, residual), turn) if self.dense else self._picked(Bundle(layout, residual), velocity, turn)
        if self.dense:
            residual.zero_()
        for memory, saved in zip((velocity, residual), before, strict=True):
            put_back(layout, memory, saved, bad)
        return (yield from (WHOLE if self.dense else self.inner).share(payload, turn))

    def _picked(self, bundle: Bundle, velocity: Tensor, turn: Turn) -> Payload:
        whole, picked = self._pick(bundle, turn)
        indices = torch.cat([whole, picked])
        payload = Payload(layout=bundle.layout, data=join(bundle.flat.index_select(0, indices), indices))
        bundle.flat.index_fill_(0, indices.long(), 0)
        velocity.index_fill_(0, picked.long(), 0)
        return payload

    def _pick(self, bundle: Bundle, turn: Turn) -> tuple[Tensor, Tensor]:
        """Indices of all elements of vectors, and of what is picked from the other tensors; int32."""
        whole, is_vector = _vectors(bundle.layout, bundle.flat.device)
        picked = self.inner.pick(bundle, turn)
        segments = bundle.layout.segments(bundle.flat.device)
        return whole, picked[~is_vector[segments[(picked // 8).long()].long()]]

    def _clipped(self, bundle: Bundle, turn: Turn) -> Tensor:
        if self.clip_norm is None:
            return bundle.flat
        limit = self.clip_norm / turn.world**0.5
        flat = BUFFERS.copy(bundle.flat)
        for view, norm in zip(bundle.layout.views(flat), norms(bundle.views), strict=True):
            view.mul_((limit / norm).clamp_(max=1.0))
        return flat

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return (WHOLE if self.dense else self.inner).wire_bytes(layout, world=world, selected=selected)


@lru_cache(maxsize=1024)
def _vectors(layout: FlatLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of all elements of tensors of at most one dimension, int32; and which tensors these are, bool (tensors,)."""
    are = [len(shape) < 2 for shape in layout.shapes]
    spans = [torch.arange(at, at + size) for at, size, yes in zip(layout.starts, layout.sizes, are, strict=True) if yes]
    return torch.cat([torch.empty(0, dtype=torch.int64), *spans]).int().to(device), torch.tensor(are, device=device)
