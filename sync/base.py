"""What every gradient synchronisation scheme answers to.

All schemes compute the same sum; they differ in how the bytes travel. The four dimensions in which they
differ are those of Zen (Wang et al., OSDI 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Dimensions:
    """Where a scheme stands in the design space; ``balance`` is None for centralised ones, which have no parts."""

    communication: Literal["ring", "hierarchy", "point-to-point"]
    aggregation: Literal["incremental", "one-shot"]
    partition: Literal["centralization", "parallelism"]
    balance: Literal["balanced", "imbalanced"] | None


class Scheme(Protocol):
    """Sums one gradient over all ranks of a group."""

    @property
    def dimensions(self) -> Dimensions: ...

    def reduce(self, gradient: torch.Tensor, group: ProcessGroup | None = None) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of ``gradient`` over ``group`` (None: the default group); collective.

        The future's tensor has the gradient's shape, dtype and device. ``gradient`` must not be
        written until the future is done.
        """
        ...
