"""INCEPTIONN (Li et al., MICRO 2018): floats truncated to words of 0 to 32 bits under an error bound, as its network cards do it."""

from __future__ import annotations

from gemini_ft import truncation
from gemini_ft.validation import checked

from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn, join
from .buffers import BUFFERS


class Inceptionn(Compressor):
    """Sends each element as a word of 0, 8, 16 or 32 bits, by its magnitude, and a tag of 2 bits. No element is off by 2^-bound.

    Elements from 1 on, infinities and NaN travel as they are; below 2^-bound they wait in the residual. The paper keeps none
    (``feedback=0``). `gemini_ft.truncation` has the format. The exchange of the paper, in which sums travel truncated too, is
    `gemini_ft.sync.inceptionn`.

    Args:
        bound: b of the error bound 2^-b, from 1 to 14; the paper's are 6, 8 and 10.
    """

    primitive = Primitive.ALL_GATHER_V

    @checked
    def __init__(self, bound: truncation.Bound = 10) -> None:
        self.bound = bound

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        return Payload(bundle.layout, join(*truncation.encode(bundle.flat, self.bound)))

    def decompress(self, payload: Payload) -> Bundle:
        flat = BUFFERS.empty(payload.layout.total, device=payload.data.device)
        return Bundle(payload.layout, truncation.decode(payload.data, flat, self.bound))

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        """Bytes of the payload, where ``selected`` is the number of bytes of all words."""
        if selected is None:
            raise ValueError("INCEPTIONN: how long words are depends on the data; give selected=")
        return truncation.packed(layout.total) + selected
