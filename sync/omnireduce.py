"""OmniReduce (Fei et al., SIGCOMM 2021): of a gradient only blocks that hold a value other than zero travel.

`OmniReduce` has its block format, with colocated aggregators that get each part as one message. `OmniReduceStreaming` is the paper's way:
blocks go through aggregators in small messages, each with the number of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from gemini_ft.validation import checked

from .base import SparseScheme
from .builtin import SparsePS
from .exchange import Exchange
from .options import Patience, SlotCount, Switches
from .rows import SparseRows, to_rows, to_tensor, union
from .switch_client import SwitchTerms
from .switch_packets import Array
from .switch_scheme import Key, SwitchLink, SwitchScheme
from .switch_worker import TensorStream

BLOCK = 256  # values, OmniReduce's default


class OmniReduce(SparseScheme):
    """Blocks of 256 values that hold anything but zeros go to the aggregator of their even part, and come back summed.

    The paper's aggregators run column by column in small messages, to keep their memory small; here a part travels as one
    message, which saves it the latency of rounds. Units whose sum is zero are left out of the result.
    """

    name = "omnireduce"

    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        total = SparsePS().reduce(to_blocks(gradient), exchange)
        return from_blocks(total, gradient.rows, gradient.width)


def to_blocks(gradient: SparseRows) -> SparseRows:
    """Blocks of the flattened matrix as units, those without a value other than zero left out; the last one is filled up."""
    return regrouped(gradient, -(-gradient.rows * gradient.width // BLOCK), BLOCK)


def from_blocks(blocks: SparseRows, rows: int, width: int) -> SparseRows:
    """The inverse of `to_blocks`, but for units that are all zero."""
    if width == 0:
        return SparseRows(rows=rows, indices=blocks.indices.new_zeros(0), values=blocks.values.new_zeros(0, 0))
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
        return SparseRows(rows=rows, indices=numbers, values=values)
    indices, (places,) = union([numbers // after], rows)
    matrix = values.new_zeros(len(indices), after, piece)
    matrix[places, numbers % after] = values
    return SparseRows(rows=rows, indices=indices, values=matrix.view(-1, width))


class OmniReduceStreaming(SwitchScheme[SparseRows]):
    """Blocks of 256 values that hold anything but zeros go to a switch, or to several, which may be on the ranks' own hosts.

    A block goes through the column of its number; with every block a rank says which one it has next in that column, and the switch
    goes on to the first that any rank has. A rank without it answers without values. Values are added in the order in which they come,
    the same on all ranks; those of 16 bits in 32 bits, rounded once. Units whose sum is zero are left out of the result.
    """

    name = "omnireduce-streaming"
    whole = False

    @checked
    def __init__(self, switch: Switches, key: Key, slots: SlotCount = 256, patience: Patience = 3.0) -> None:
        super().__init__(switch, key, slots, 4 * BLOCK, patience)

    def _terms(self, dtype: torch.dtype) -> SwitchTerms:
        return SwitchTerms(
            adder=str(dtype).removeprefix("torch."),
            largest=False,
            slots=self._slots,
            nbytes=BLOCK * dtype.itemsize,
            patience=self._patience,
        )

    def _admit(self, tensor: torch.Tensor) -> SparseRows:
        return to_rows(tensor).to(torch.device("cpu"))

    def _through(self, gradient: SparseRows, link: SwitchLink, exchange: Exchange) -> SparseRows | None:
        blocks = to_blocks(gradient)
        if not blocks.rows:
            return gradient
        values = blocks.values.contiguous().view(torch.uint8).numpy()
        stream = OmniReduceStream(blocks.rows, blocks.indices.numpy(), values, link.client.slots)
        if not link.run(stream, exchange):
            return None
        indices, sums = stream.sums()
        if not len(indices):
            return SparseRows(rows=gradient.rows, indices=gradient.indices[:0], values=gradient.values[:0])
        total = SparseRows(
            rows=blocks.rows, indices=torch.from_numpy(indices), values=torch.from_numpy(sums).view(gradient.values.dtype).view(-1, BLOCK)
        )
        return from_blocks(total, gradient.rows, gradient.width)

    def _without(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        return OmniReduce().reduce(gradient.to(exchange.device), exchange)

    def _finish(self, total: SparseRows, like: torch.Tensor) -> torch.Tensor:
        return to_tensor(total, like)


class OmniReduceStream(TensorStream):
    """One tensor. The side word of a round is the next row of the column that is not zero: the least of the ranks' wins.

    Args:
        blocks: of the tensor, those that are zero included.
        indices: int64 [k], ascending, of those that are not.
        values: uint8 [k, bytes].
    """

    def __init__(self, blocks: int, indices: Array, values: Array, slots: int) -> None:
        self.columns = min(slots, blocks)
        self._end = -(-blocks // self.columns)  # the row that says there is no more
        keys = indices % self.columns * (self._end + 1) + indices // self.columns
        order = np.argsort(keys)
        self._keys, self._values = keys[order], values[order]
        self._row = np.full(self.columns, -1)  # of each column, that is being added up
        self._found: list[tuple[Array, Array]] = []
        self._nbytes = values.shape[1]

    def first(self) -> Array:
        return self._after(np.arange(self.columns), self._row)

    def follow(self, columns: Array, sides: Array, values: Array | None) -> Iterable[tuple[Array, Array, Array | None]]:
        if values is not None:
            self._found.append((self._row[columns] * self.columns + columns, values.copy()))
        self._row[columns] = sides
        columns, rows = columns[sides < self._end], sides[sides < self._end]
        wanted = self._key(columns, rows)
        places = np.minimum(np.searchsorted(self._keys, wanted), max(0, len(self._keys) - 1))
        has = self._keys[places] == wanted if len(self._keys) else np.zeros(len(columns), np.bool_)
        after = self._after(columns, rows)
        return [(columns[has], after[has], self._values[places[has]]), (columns[~has], after[~has], None)]

    def sums(self) -> tuple[Array, Array]:
        """Blocks that any rank has, int64 ascending, and their sums, uint8 [n, bytes]."""
        if not self._found:
            return np.zeros(0, np.int64), np.zeros((0, self._nbytes), np.uint8)
        indices = np.concatenate([blocks for blocks, _ in self._found])
        order = np.argsort(indices)
        return indices[order], np.concatenate([values for _, values in self._found])[order]

    def _key(self, columns: Array, rows: Array) -> Array:
        return columns * (self._end + 1) + rows

    def _after(self, columns: Array, rows: Array) -> Array:
        """The first row beyond ``rows`` that this rank has in each column."""
        places = np.searchsorted(self._keys, self._key(columns, rows), side="right")
        padded = np.append(self._keys, (self.columns + 1) * (self._end + 1))[places]
        return np.where(padded // (self._end + 1) == columns, padded % (self._end + 1), self._end)
