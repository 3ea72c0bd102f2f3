"""What every gradient compressor answers to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

Payload = TypeVar("Payload")


class Compressor(Protocol[Payload]):
    """Turns one gradient into fewer bytes and back.

    Error feedback is not the compressor's affair: whoever calls it keeps
    ``residual = input - decompress(compress(input))`` where that is wanted.
    """

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of ``decompress(compress(x))`` is ``x``."""
        ...

    def wire_bytes(self, elements: int) -> int:
        """Bytes that travel for a gradient of ``elements`` elements, by the method's formula."""
        ...

    def compress(self, gradient: torch.Tensor) -> Payload:
        """What travels in place of ``gradient`` (any shape, floating dtype); ``gradient`` stays unchanged."""
        ...

    def decompress(self, payload: Payload) -> torch.Tensor:
        """The gradient that ``payload`` stands for, in the shape, dtype and device of the original."""
        ...
