"""Compressors that send a part of a factorisation: PowerSGD and ATOMO.

PowerSGD (Vogels et al., NeurIPS 2019) makes one step of power iteration per training step, warm-started from the last. A gradient M of
m x n becomes P of m x r and Q of n x r; both are averaged, so both travel in an all-reduce.

ATOMO (Wang et al., NeurIPS 2018) sends some of the atoms of a singular value decomposition, so drawn that the mean is exact. An atom of
weight w that is drawn with probability p is sent as w / p. For a budget of s atoms, the probabilities that give the least variance are in
closed form (theorem 2): p = min(1, w / t) with t such that they add up to s.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from gemini_ft.validation import Seed, checked

from .base import Bundle, CollectiveRequest, Compressor, Exchange, FlatLayout, Payload, Primitive, Reducer, Turn
from .buffers import BUFFERS
from .feedback import Memory, put_back
from .kernels import SHARED, generator, norms, row_norms
from .options import Atoms, Feedback, LeastRate, Rank

_ALIGN = 16  # elements, 64 bytes: how a product is rounded depends on where its operands lie
_DEPENDENT = 1e-5  # of a row's length: a rest below this is rounding alone, so that the row depends on those before it


class PowerSGD(Reducer):
    """Low-rank averages with error feedback (algorithms 1 and 2).

    ``M += E; P = M Q, averaged, orthonormal; Q = M' P, averaged; E = M - P Q'``

    A tensor is the matrix of its first dimension by all others. One that would not get smaller by ``least_rate`` travels whole,
    in the first all-reduce. Momentum belongs after this, in the optimizer.

    Args:
        rank: r; the paper's best are 2 for convolutional networks and 4 for LSTMs.
        seed: of the first Q; must be equal on all ranks.
    """

    primitive = Primitive.TWO_ALL_REDUCES
    align = _ALIGN
    kept = ("errors",)
    tables = MappingProxyType({"factors": "factors"})

    @checked
    def __init__(self, rank: Rank = 1, least_rate: LeastRate = 2.0, error_feedback: Feedback = True, seed: Seed = 0) -> None:
        self.rank, self.least_rate, self.error_feedback, self.seed = rank, least_rate, error_feedback, seed
        self.errors = Memory()
        self.factors: dict[str, Tensor] = {}  # name -> Q', (rank, n)

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout, device = bundle.layout, bundle.flat.device
        runs, whole = split(layout, self.rank, self.least_rate)
        before = self.errors.flat(layout, device) if self.error_feedback else None
        left = bundle if before is None else bundle.plus(before)
        matrices = [run.matrices(left.flat) for run in runs]
        qs = [self._warm(run, layout.names, device, turn) for run in runs]

        dense = [left.views[number] for number in whole]
        products = _Stacks(runs, "rows", device, sum(view.numel() for view in dense))
        for run_of, q, p in zip(matrices, qs, products.parts, strict=True):
            _multiply(run_of, q, p)
        if dense:
            torch.cat(dense, out=products.rest)
        yield from products.average(turn)
        orthonormalise(products.parts)

        projections = _Stacks(runs, "columns", device)
        for run_of, p, q in zip(matrices, products.parts, projections.parts, strict=True):
            _multiply(run_of.transpose(1, 2), p, q)
        if runs:
            yield from projections.average(turn)

        result = Bundle(layout, layout.clear_padding(BUFFERS.empty(layout.total, device=device)))
        for run, p, q in zip(runs, products.parts, projections.parts, strict=True):
            _expand(p, q, run.matrices(result.flat))
        for number, mean in zip(whole, products.rest.split_with_sizes([view.numel() for view in dense]), strict=True):
            result.views[number].copy_(mean)
        bad = self._keep_factors(layout.names, runs, projections)
        if before is not None:
            self._keep_errors(left, result, before, whole, bad)
        return result

    def _warm(self, run: Run, names: Sequence[str], device: torch.device, turn: Turn) -> Tensor:
        """Q' of the last step of each matrix, (count, rank, columns), rows of length 1. One that has come to zero is drawn anew."""
        kept = [self._kept(names[number], run.rank, run.columns, device) for number in run.numbers]
        rows = [row for q in kept for row in q.unbind()]
        lengths = norms(rows)
        if not bool(lengths.all()):
            for number, q in zip(run.numbers, kept, strict=True):
                fresh = generator(names[number], self.seed, turn, SHARED).standard_normal(tuple(q.shape), dtype="float32")
                zero = (q == 0).all(1, keepdim=True)
                q.copy_(torch.where(zero, torch.from_numpy(fresh).to(q.device), q))
            lengths = norms(rows)
        return _aligned((len(kept), run.rank, run.columns), device).copy_(torch.stack(kept)).div_(lengths.view(-1, run.rank, 1))

    def _kept(self, name: str, rank: int, columns: int, device: torch.device) -> Tensor:
        factor = self.factors.get(name)
        if factor is None:
            factor = self.factors[name] = torch.zeros(rank, columns, dtype=torch.float32, device=device)
        if factor.shape != (rank, columns):
            raise ValueError(f"{name!r} had a factor of {tuple(factor.shape)}, now {(rank, columns)}: start with a fresh method")
        return factor

    def _keep_factors(self, names: Sequence[str], runs: Sequence[Run], projections: _Stacks) -> list[int]:
        """Keeps Q' for the next step, where it is finite; returns numbers of the tensors where not, alike on all ranks."""
        finite = all(bool(torch.isfinite(part.sum())) for part in projections.parts)
        kept, fresh, bad = [], [], []
        for run, stack in zip(runs, projections.parts, strict=True):
            for number, q in zip(run.numbers, stack.unbind(), strict=True):
                if finite or bool(torch.isfinite(q).all()):
                    kept.append(self.factors[names[number]])
                    fresh.append(q)
                else:
                    bad.append(number)
        if kept:
            torch._foreach_copy_(kept, fresh)
        return bad

    def _keep_errors(self, left: Bundle, result: Bundle, before: Tensor, whole: Sequence[int], bad: Sequence[int]) -> None:
        """Keeps E for the next step: nothing of tensors that travelled whole, and the old E where a result is not finite."""
        left.flat.sub_(result.flat)
        for number in whole:
            left.views[number].zero_()
        put_back(left.layout, left.flat, before, bad)
        self.errors.replace(left.layout, left.flat)

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        runs, whole = split(layout, self.rank, self.least_rate)
        factors = sum(len(run.numbers) * run.rank * (run.rows + run.columns) for run in runs)
        return 4 * (factors + sum(layout.sizes[number] for number in whole))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Tensors that follow each other in a layout and are matrices of one shape, so that they can be handled together.

    Products are not: how a batch of products is rounded depends on its size, and a group must give what its tensors give.
    """

    numbers: tuple[int, ...]
    rows: int  # of each matrix
    columns: int  # of each matrix
    rank: int  # of its factors
    start: int  # elements from the layout's begin to the first
    span: int  # elements from each to the next

    def matrices(self, flat: Tensor) -> Tensor:
        """The tensors as parts of a flat buffer, (count, rows, columns)."""
        return flat.as_strided(
            (len(self.numbers), self.rows, self.columns), (self.span, self.columns, 1), flat.storage_offset() + self.start
        )


@lru_cache(maxsize=1024)
def split(layout: FlatLayout, rank: int, least_rate: float) -> tuple[tuple[Run, ...], tuple[int, ...]]:
    """Runs of the tensors that are worth factoring, and the numbers of the others."""
    runs: list[Run] = []
    whole = []
    for number, (shape, size) in enumerate(zip(layout.shapes, layout.sizes, strict=True)):
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows
        low = min(rank, rows, columns)
        if low * (rows + columns) * least_rate >= size:
            whole.append(number)
            continue
        run = Run(numbers=(number,), rows=rows, columns=columns, rank=low, start=layout.starts[number], span=layout.spans[number])
        if runs and runs[-1].numbers[-1] == number - 1 and (runs[-1].rows, runs[-1].columns) == (rows, columns):
            last = runs.pop()
            run = replace(last, numbers=(*last.numbers, number))
        runs.append(run)
    return tuple(runs), tuple(whole)


class _Stacks:
    """The factors of all runs, and the tensors that travel with them in one collective."""

    def __init__(self, runs: Sequence[Run], side: Literal["rows", "columns"], device: torch.device, rest: int = 0) -> None:
        self.parts = [_aligned((len(run.numbers), run.rank, getattr(run, side)), device) for run in runs]
        self.rest = torch.empty(rest, dtype=torch.float32, device=device)

    def average(self, turn: Turn) -> Generator[CollectiveRequest, list[Tensor], None]:
        (total,) = yield CollectiveRequest("sum", torch.cat([part.reshape(-1) for part in (*self.parts, self.rest)]))
        total = total.div_(turn.world) if turn.world > 1 else total
        *means, self.rest = total.split_with_sizes([part.numel() for part in (*self.parts, self.rest)])
        for part, mean in zip(self.parts, means, strict=True):
            part.copy_(mean.view(part.shape))


def _aligned(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Memory for (count, rows, columns), each matrix from a multiple of 64 bytes on."""
    count, rows, columns = shape
    span = -(-rows * columns // _ALIGN) * _ALIGN
    return torch.empty(count * span, dtype=torch.float32, device=device).as_strided(shape, (span, columns, 1))


def _multiply(matrices: Tensor, factors: Tensor, out: Tensor) -> None:
    """(M Q)' of each matrix: (count, m, n) and (count, rank, n) to (count, rank, m). Rows are what has to be orthonormal later."""
    for matrix, factor, result in zip(matrices.unbind(), factors.unbind(), out.unbind(), strict=True):
        if factor.shape[0] == 1:
            torch.mv(matrix, factor.view(-1), out=result.view(-1))
        else:
            torch.mm(factor, matrix.t(), out=result)


def _expand(lefts: Tensor, rights: Tensor, out: Tensor) -> None:
    """The product P Q' for each matrix."""
    if lefts.shape[1] == 1:  # one rounding an element, however many at once
        torch.mul(lefts.transpose(1, 2), rights, out=out)
        return
    for left, right, result in zip(lefts.unbind(), rights.unbind(), out.unbind(), strict=True):
        torch.mm(left.t(), right, out=result)


def orthonormalise(stacks: Sequence[Tensor]) -> None:
    """Rows of each matrix of each (count, rank, m) stack in place, by Gram and Schmidt; one that depends on others becomes zero."""
    for stack in stacks:
        first = _norms(stack) if stack.shape[1] > 1 else None
        for place in range(stack.shape[1]):
            rows = stack[:, place]
            lengths = _norms(rows)
            least = 0.0 if place == 0 or first is None else _DEPENDENT * first.view(stack.shape[:2])[:, place]
            rows.div_(lengths.masked_fill(lengths <= least, torch.inf).unsqueeze(1))
            for matrix in stack.unbind() if place + 1 < stack.shape[1] else ():
                rest = matrix[place + 1 :]
                rest.addr_(torch.mv(rest, matrix[place]), matrix[place], alpha=-1)


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row, computed one by one: (rows,) for (..., m)."""
    return norms(rows.reshape(-1, rows.shape[-1]).unbind())


class Atomo(Compressor):
    """Sends ``atoms`` rank-one matrices per matrix; vectors, and matrices that would not get smaller, travel whole.

    Exactly that many are drawn (systematic sampling keeps the probabilities), so that payloads have one length. The decomposition
    costs O(m n min(m, n)) per step. Payload: of each matrix the left vectors divided by p, then the right ones (float32).
    """

    primitive = Primitive.ALL_GATHER
    unbiased = True
    in_parts = False

    @checked
    def __init__(self, atoms: Atoms = 3, seed: Seed = 0) -> None:
        self.atoms, self.seed = atoms, seed

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        runs, whole = split(bundle.layout, self.atoms, 1.0)
        parts: list[Tensor] = []
        for run in runs:
            for number, matrix in zip(run.numbers, run.matrices(bundle.flat).unbind(), strict=True):
                stream = generator(bundle.layout.names[number], self.seed, turn, turn.rank)
                parts += self._drawn(matrix, float(stream.random()))
        return Payload(
            layout=bundle.layout,
            data=torch.cat([*(part.reshape(-1) for part in parts), *(bundle.views[n] for n in whole)]).view(torch.uint8),
        )

    def _drawn(self, matrix: Tensor, offset: float) -> tuple[Tensor, Tensor]:
        """Left (s, m) and right (s, n) vectors of the atoms that were drawn."""
        count = min(self.atoms, *matrix.shape)
        if not bool(torch.isfinite(matrix).all()):
            return matrix.new_full((count, matrix.shape[0]), torch.nan), matrix.new_full((count, matrix.shape[1]), torch.nan)
        lefts, rights = atoms(matrix)
        weights = row_norms(lefts).double() * row_norms(rights).double()
        chances = probabilities(weights, count)
        drawn = systematic(chances, count, offset)
        scale = torch.where(chances > 0, 1 / chances, 0.0)[drawn].to(matrix.dtype)
        scale[int((weights > 0).sum()) :] = 0  # there are fewer atoms than the budget
        return lefts[drawn] * scale.unsqueeze(1), rights[drawn]

    def decompress(self, payload: Payload) -> Bundle:
        layout, data = payload.layout, payload.data.view(torch.float32)
        runs, whole = split(layout, self.atoms, 1.0)
        result = Bundle(layout, data.new_zeros(layout.total))
        at = 0
        for run in runs:
            sides = [run.rank * run.rows, run.rank * run.columns]
            for matrix in run.matrices(result.flat).unbind():
                lefts, rights = data[at : at + sum(sides)].split_with_sizes(sides)
                torch.mm(lefts.view(run.rank, run.rows).t(), rights.view(run.rank, run.columns), out=matrix)
                at += sum(sides)
        for number in whole:
            result.views[number].copy_(data[at : at + layout.sizes[number]])
            at += layout.sizes[number]
        return result

    def wire_bytes(self, layout: FlatLayout, *, world: int = 1, selected: int | None = None) -> int:
        runs, whole = split(layout, self.atoms, 1.0)
        drawn = sum(len(run.numbers) * run.rank * (run.rows + run.columns) for run in runs)
        return 4 * (drawn + sum(layout.sizes[number] for number in whole))


def atoms(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left (k, m) and right (k, n) vectors whose outer products add up to a matrix, k = min(m, n): singular vectors, weights included.

    One side is orthonormal up to rounding; the other is what is left of the matrix in its directions, so that the sum is exact however
    well the decomposition has converged.
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    scaled = matrix / matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)  # squares neither overflow nor vanish
    scaled = scaled if wide else scaled.t()
    basis = torch.linalg.eigh(scaled @ scaled.t()).eigenvectors.t().contiguous()
    return (basis, basis @ matrix) if wide else (basis @ matrix.t(), basis)


def probabilities(weights: Tensor, budget: int) -> Tensor:
    """min(1, w / t) with t such that they add up to ``budget``, or to the number of weights above zero if that is less."""
    ordered, order = weights.sort(descending=True)
    chances = torch.zeros_like(weights)
    budget = min(budget, int((weights > 0).sum()))
    if budget == 0:
        return chances
    tails = ordered.flip(0).cumsum(0).flip(0)
    certain = 0  # this many of the largest have a probability of 1
    while certain < budget and (budget - certain) * ordered[certain] >= tails[certain]:
        certain += 1
    chances[order[:certain]] = 1.0
    if certain < budget:
        chances[order[certain:]] = (budget - certain) * ordered[certain:] / tails[certain]
    return chances


def systematic(chances: Tensor, count: int, offset: float) -> Tensor:
    """``count`` different indices, i with probability ``chances[i]``, by one number in [0, 1).

    Where chances add up to less than ``count``, the last indices mean nothing.
    """
    ends = chances.cumsum(0)
    points = torch.arange(count, dtype=ends.dtype, device=ends.device) + offset
    return torch.searchsorted(ends, points, right=True).clamp_(max=chances.numel() - 1)
