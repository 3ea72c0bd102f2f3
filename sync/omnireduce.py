"""OmniReduce's block format (Fei et al., SIGCOMM 2021) with colocated aggregators."""

from __future__ import annotations

import math

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
    return regrouped(gradient, -(-gradient.rows * gradient.width // BLOCK), BLOCK)


def from_blocks(blocks: SparseRows, rows: int, width: int) -> SparseRows:
    """The inverse of `to_blocks`, but for units that are all zero."""
    if width == 0:
        return SparseRows(rows, blocks.indices.new_zeros(0), blocks.values.new_zeros(0, 0))
    return regrouped(blocks, rows, width)


def regrouped(units: SparseRows, rows: int, width: int) -> SparseRows:
    """The same flattened matrix in ``rows`` units of another width, those that are all zero left out.

    Values move in the longest pieces that lie in one unit both before and after; where units keep their width, none moves.
    """
    piece = math.gcd(units.width, width)
    before, after = units.width // piece, width // piece
    values = units.values.reshape(-1, piece)
    present = (values.view(-1) if piece == 1 else values.ne(0).any(1)).nonzero().flatten()
    numbers = units.indices[present // before] * before + present % before if before > 1 else units.indices[present]
    if len(present) < len(values):
        values = values[present]
    if after == 1:
        return SparseRows(rows, numbers, values)
    indices, (places,) = union([numbers // after], rows)
    matrix = values.new_zeros(len(indices), after, piece)
    matrix[places, numbers % after] = values
    return SparseRows(rows, indices, matrix.view(-1, width))
