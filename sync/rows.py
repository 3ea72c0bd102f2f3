"""A sparse gradient as all schemes see it: the units that are present, and their values.

The unit is a row where the gradient has dense dimensions (an embedding: one index per row, not per value), else an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TABLE_LOAD = 64  # a table over the index space is faster than sorting up to about this many units per index


class GradientError(ValueError):
    """The gradients of a group cannot be summed. Every rank raises it, with the same text."""


@dataclass(frozen=True, kw_only=True)
class SparseRows:
    """Part of a matrix of ``rows`` units."""

    rows: int  # units of the index space, those that are absent included
    indices: torch.Tensor  # int64 [n], unique, in [0, rows)
    values: torch.Tensor  # [n, width], one row per index

    @property
    def width(self) -> int:
        """Values per unit."""
        return self.values.shape[1]

    def to(self, device: torch.device) -> SparseRows:
        return SparseRows(rows=self.rows, indices=self.indices.to(device), values=self.values.to(device))

    def of(self, dtype: torch.dtype) -> SparseRows:
        """The same units with values of another dtype."""
        return SparseRows(rows=self.rows, indices=self.indices, values=self.values.to(dtype))

    def dense(self) -> torch.Tensor:
        """The matrix, [rows, width], with zeros where units are absent."""
        matrix = self.values.new_zeros(self.rows, self.width)
        return matrix.index_copy_(0, self.indices, self.values)


def from_dense(matrix: torch.Tensor) -> SparseRows:
    """The rows of a [rows, width] matrix that hold anything but zeros (NaN is no zero)."""
    present = matrix.ne(0).any(1).nonzero().flatten()
    return SparseRows(rows=matrix.shape[0], indices=present, values=matrix[present])


def to_rows(tensor: torch.Tensor) -> SparseRows:
    """A gradient of any accepted layout. Duplicate indices are summed; the values may share the tensor's memory.

    Raises GradientError: a layout or dtype that is not accepted, or indices outside the shape.
    """
    _check(tensor)
    if tensor.layout == torch.strided:
        flat = tensor.detach().reshape(-1)
        present = flat.nonzero().flatten()
        return SparseRows(rows=flat.numel(), indices=present, values=flat[present].unsqueeze(1))
    return _from_coo(tensor.detach())


def to_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient of any accepted layout as a dense [rows, width] matrix, of units as in `to_rows`.

    Raises GradientError: as `to_rows` does.
    """
    _check(tensor)
    if tensor.layout == torch.strided:
        return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1, 1)
    return _from_coo(tensor.detach()).dense()


def from_matrix(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Converts a [rows, width] matrix as `to_tensor` does rows; units that are all zero are left out of a sparse tensor."""
    return matrix.reshape(like.shape).to(like.device) if like.layout == torch.strided else to_tensor(from_dense(matrix), like)


def to_tensor(result: SparseRows, like: torch.Tensor) -> torch.Tensor:
    """Converts rows to the shape, layout, dtype and device of ``like``; sparse ones are coalesced. ``result.indices`` must ascend."""
    result = result.to(like.device)
    if like.layout == torch.strided:
        return result.dense().reshape(like.shape)
    sizes = like.shape[: like.sparse_dim()]
    return torch.sparse_coo_tensor(
        _unravel(result.indices, sizes),
        result.values.reshape(len(result.indices), *like.shape[like.sparse_dim() :]),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def add_up(terms: Sequence[SparseRows]) -> SparseRows:
    """The sum, added in the order given, so that the same terms give the same bits everywhere; indices ascend.

    16-bit values are added in 32 bits and rounded once.
    """
    indices, places = union([term.indices for term in terms], terms[0].rows)
    dtype = terms[0].values.dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(len(indices), terms[0].width, dtype=wide, device=indices.device)
    for place, term in zip(places, terms, strict=True):
        total.index_add_(0, place, term.values.to(wide))
    return SparseRows(rows=terms[0].rows, indices=indices, values=total.to(dtype))


def union(sets: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All indices of ``sets`` in ascending order without duplicates, and where in it those of each set are."""
    if rows > _TABLE_LOAD * sum(map(len, sets)):
        found, inverse = torch.unique(torch.cat(list(sets)), return_inverse=True)
        return found, list(torch.split(inverse, [len(each) for each in sets]))
    present = torch.zeros(rows, dtype=torch.bool, device=sets[0].device)
    for each in sets:
        present[each] = True
    found = present.nonzero().flatten()
    table = torch.empty(rows, dtype=torch.int64, device=present.device)
    table[found] = torch.arange(len(found), device=present.device)
    return found, [table[each] for each in sets]


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise GradientError(f"dtype {tensor.dtype}: must be one of {', '.join(map(str, DTYPES))}; convert the gradient first")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise GradientError(f"layout {tensor.layout}: must be torch.sparse_coo or torch.strided; use .to_sparse_coo() or .to_dense()")


def _from_coo(tensor: torch.Tensor) -> SparseRows:
    sizes, dense = tensor.shape[: tensor.sparse_dim()], tensor.shape[tensor.sparse_dim() :]
    rows, width = math.prod(sizes), math.prod(dense)
    if rows >= 2**63:
        raise GradientError(f"shape {tuple(tensor.shape)}: its {rows} sparse positions cannot be counted in 63 bits")
    indices, values = tensor._indices(), tensor._values()
    _check_bounds(indices, sizes)
    flat = indices.new_zeros(indices.shape[1])
    for size, each in zip(sizes, indices, strict=True):
        flat = flat * size + each
    values = values.reshape(len(flat), width)
    if tensor.is_coalesced():
        return SparseRows(rows=rows, indices=flat, values=values)
    merged = torch.sparse_coo_tensor(flat.unsqueeze(0), values, (rows, width), check_invariants=False).coalesce()
    return SparseRows(rows=rows, indices=merged.indices()[0], values=merged.values())


def _check_bounds(indices: torch.Tensor, sizes: Sequence[int]) -> None:
    if indices.shape[1] == 0:
        return
    for dim, (size, each) in enumerate(zip(sizes, indices, strict=True)):
        low, high = (int(bound) for bound in torch.aminmax(each))
        if low < 0 or high >= size:
            raise GradientError(f"indices {low} to {high} in dimension {dim}: must be from 0 to {size - 1}")


def _unravel(flat: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if not sizes:
        return flat.new_zeros(0, len(flat))
    out = []
    for size in reversed(sizes[1:]):
        out.append(flat % size)
        flat = flat // size
    return torch.stack([flat, *reversed(out)])
