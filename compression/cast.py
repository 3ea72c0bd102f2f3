"""Casts to 16 bits, added up under way: the baseline that every other method has to beat."""

from __future__ import annotations

import torch

from .base import Bundle, FlatLayout, Payload, Summed, Turn
from .buffers import BUFFERS


class Identity(Summed):
    """Sends float32 as it is: nothing is left out."""

    dtype = torch.float32
    unbiased = True

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        return Payload(bundle.layout, BUFFERS.empty(bundle.layout.total, self.dtype, bundle.flat.device).copy_(bundle.flat))

    def decompress(self, payload: Payload) -> Bundle:
        return Bundle(payload.layout, BUFFERS.empty(payload.layout.total, device=payload.data.device).copy_(payload.data))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        return self.dtype.itemsize * layout.total


class Fp16(Identity):
    """Rounds to the nearest float16. Values above 65504 become infinite, as under AMP."""

    dtype = torch.float16
    unbiased = False


class Bf16(Identity):
    """Rounds to the nearest bfloat16, which has float32's range and 8 bits of precision."""

    dtype = torch.bfloat16
    unbiased = False
