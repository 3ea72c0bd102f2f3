"""The exchange of INCEPTIONN (Li et al., MICRO 2018, section IV): a ring without aggregators, of which both legs carry truncated values."""

from __future__ import annotations

import torch

from gemini_ft import truncation
from gemini_ft.validation import checked

from . import wire
from .ring import EncodedRing


class InceptionnRing(EncodedRing):
    """A ring all-reduce in which every message is a gradient, or a sum of gradients, truncated as in `gemini_ft.truncation`.

    With n ranks a value is truncated n times on its way, so it is off by less than n 2^-bound beside the roundings of float32, in which
    values are added. Infinities and NaN travel as they are. For error feedback there is `gemini_ft.compression.cast`.

    Args:
        bound: b of the error bound 2^-b, from 1 to 14, in units of the gradients that are added up; the paper's are 6, 8 and 10.
    """

    name = "inceptionn-ring"

    @checked
    def __init__(self, bound: truncation.Bound = 10) -> None:
        self._bound = bound

    @property
    def _title(self) -> str:
        return f"{self.name} within 2^-{self._bound}"

    def _encoded(self, part: torch.Tensor) -> torch.Tensor:
        words = [each.view(torch.uint8) for each in truncation.encode(part, self._bound)]
        message = wire.new(sum(map(len, words)), part.device)
        torch.cat(words, out=wire.payload(message))
        return message

    def _decoded(self, payload: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return truncation.decode(payload, into, self._bound)
