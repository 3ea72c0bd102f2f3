"""OmniReduce's block format (Fei et al., SIGCOMM 2021) with colocated aggregators."""

from __future__ import annotations

import torch

from .base import Dimensions, SparseScheme
from .exchange import Exchange
from .parameter_server import SparsePS
from .rows import SparseRows, union

BLOCK = 256  # values, OmniReduce's default


class OmniReduce(SparseScheme):
    """Blocks of 256 values that hold anything but zeros go to the aggregator of their even part, and come back summed.

    The paper's aggregators run column by column in small messages, to keep their memory small; here a part travels as one
    message, which saves it the latency of rounds. Units whose sum is zero are left out of the result.
    """

    name = "omnireduce"
    dimensions = Dimensions("point-to-point", "one-shot", "parallelism", "imbalanced")

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        total = SparsePS().reduce(to_blocks(gradient), exchange)
        return from_blocks(total, gradient.rows, gradient.width)


def to_blocks(gradient: SparseRows) -> SparseRows:
    """Blocks of the flattened matrix as units, those without a value other than zero left out; the last one is filled up."""
    blocks = -(-gradient.rows * gradient.width // BLOCK)
    if gradient.width % BLOCK == 0:
        per_row = gradient.width // BLOCK
        indices = _spread(gradient.indices * per_row, per_row)
        values = gradient.values.reshape(len(indices), BLOCK)
    else:
        elements = _spread(gradient.indices * gradient.width, gradient.width)
        indices, (places,) = union([elements // BLOCK], blocks)
        values = gradient.values.new_zeros(len(indices), BLOCK)
        values[places, elements % BLOCK] = gradient.values.flatten()
    kept = values.ne(0).any(1)
    return SparseRows(blocks, indices[kept], values[kept])


def from_blocks(blocks: SparseRows, rows: int, width: int) -> SparseRows:
    """The inverse of `to_blocks`, but for units that are all zero."""
    if width == 0:
        return SparseRows(rows, blocks.indices.new_zeros(0), blocks.values.new_zeros(0, 0))
    elements = _spread(blocks.indices * BLOCK, BLOCK).view(-1, BLOCK)
    block, column = blocks.values.nonzero(as_tuple=True)
    elements = elements[block, column]
    indices, (places,) = union([elements // width], rows)
    values = blocks.values.new_zeros(len(indices), width)
    values[places, elements % width] = blocks.values[block, column]
    return SparseRows(rows, indices, values)


def _spread(starts: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` consecutive numbers from each start, flat."""
    return (starts.unsqueeze(1) + torch.arange(count, device=starts.device)).flatten()
