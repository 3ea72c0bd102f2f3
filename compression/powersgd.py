"""PowerSGD (Vogels et al., NeurIPS 2019): one step of power iteration per training step, warm-started from the last.

A gradient M of m x n becomes P of m x r and Q of n x r; both are averaged, so both travel in an all-reduce.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .base import Bundle, Exchange, Layout, Primitive, Reducer, Request, Shape, State, Turn
from .memory import Memory
from .randomness import SHARED, generator

_DEPENDENT = 1e-5  # of a row's length: what is left of it beside rounding, if it depends on the rows before it


class PowerSGD(Reducer):
    """Low-rank averages with error feedback (algorithms 1 and 2).

    ``M += E; P = M Q, averaged, orthonormal; Q = M' P, averaged; E = M - P Q'``

    A tensor is the matrix of its first dimension by all others. One that would not get smaller by ``least_rate`` travels whole,
    in the first all-reduce. Momentum belongs after this, in the optimizer.

    Args:
        rank: r; the paper's best are 2 for convolutional networks and 4 for LSTMs.
        least_rate: how many times fewer elements than a matrix its factors must have.
        error_feedback: keep E; without it accuracy suffers.
        seed: of the first Q; must be equal on all ranks.
    """

    primitive = Primitive.TWO_ALL_REDUCES

    def __init__(self, rank: int = 1, least_rate: float = 2.0, error_feedback: bool = True, seed: int = 0) -> None:
        if rank < 1 or least_rate < 1:
            raise ValueError(f"rank={rank}, least_rate={least_rate}: both must be at least 1")
        self.rank, self.least_rate, self.error_feedback, self.seed = rank, least_rate, error_feedback, seed
        self.errors = Memory()
        self.factors: dict[str, Tensor] = {}  # name -> Q', (rank, n)

    def exchange(self, bundle: Bundle, turn: Turn) -> Exchange:
        layout, device = bundle.layout, bundle.flat.device
        matrices, whole = split(layout, self.rank, self.least_rate)
        before = self.errors.flat(layout, device) if self.error_feedback else None
        left = bundle if before is None else bundle.plus(before)
        targets = [left.views[number].view(shape) for number, shape in matrices]
        qs = self._warm([(layout.names[number], shape) for number, shape in matrices], device, turn)

        products = [_product(target, q) for target, q in zip(targets, qs, strict=True)]
        means = yield from _averaged([*products, *(left.views[number] for number in whole)], turn)
        ps = [mean.view(q.shape[0], -1) for mean, q in zip(means, qs, strict=False)]
        orthonormalise(ps)
        projections = yield from _averaged([_projection(target, p) for target, p in zip(targets, ps, strict=True)], turn)
        qs = [mean.view(q.shape) for mean, q in zip(projections, qs, strict=True)]

        result = Bundle(layout, layout.clear_padding(torch.empty_like(left.flat)))
        for (number, shape), p, q in zip(matrices, ps, qs, strict=True):
            (torch.mul if p.shape[0] == 1 else torch.mm)(p.t(), q, out=result.views[number].view(shape))
        for number, mean in zip(whole, means[len(matrices) :], strict=True):
            result.views[number].copy_(mean)
        bad = self._keep_factors([layout.names[number] for number, _ in matrices], qs)
        if before is not None:
            self._keep_errors(left, result, before, whole, [matrices[place][0] for place in bad])
        return result

    def _warm(self, matrices: Sequence[tuple[str, Shape]], device: torch.device, turn: Turn) -> list[Tensor]:
        """Each matrix's Q' of the last step with rows of length 1. A row that has come to zero would stay so: it is drawn anew."""
        qs = [self._kept(name, min(self.rank, *shape), shape[1], device) for name, shape in matrices]
        rows = [row for q in qs for row in q.unbind()]
        norms = torch._foreach_norm(rows) if rows else ()
        if rows and not bool(torch.stack(norms).all()):
            for (name, _), q in zip(matrices, qs, strict=True):
                self._draw(name, q, turn)
            norms = torch._foreach_norm(rows)
        if rows:
            torch._foreach_div_(rows, list(norms))
        return qs

    def _kept(self, name: str, rank: int, columns: int, device: torch.device) -> Tensor:
        factor = self.factors.get(name)
        if factor is None:
            factor = self.factors[name] = torch.zeros(rank, columns, device=device)
        if factor.shape != (rank, columns):
            raise ValueError(f"{name!r} had a factor of {tuple(factor.shape)}, now {(rank, columns)}: start with a fresh method")
        return factor

    def _draw(self, name: str, factor: Tensor, turn: Turn) -> None:
        fresh = generator(name, self.seed, turn, SHARED).standard_normal(tuple(factor.shape), dtype="float32")
        zero = torch.linalg.vector_norm(factor, dim=1, keepdim=True) == 0
        factor.copy_(torch.where(zero, torch.from_numpy(fresh).to(factor.device), factor))

    def _keep_factors(self, names: Sequence[str], qs: Sequence[Tensor]) -> list[int]:
        """Q' for the next step; which ones are not finite, on all ranks alike. Those are not kept."""
        bad = []
        if qs and not bool(torch.isfinite(torch.cat([q.view(-1) for q in qs]).sum())):
            bad = [place for place, q in enumerate(qs) if not bool(torch.isfinite(q).all())]
        self.factors.update((name, q) for place, (name, q) in enumerate(zip(names, qs, strict=True)) if place not in bad)
        return bad

    def _keep_errors(self, left: Bundle, result: Bundle, before: Tensor, whole: Sequence[int], bad: Sequence[int]) -> None:
        """E for the next step: nothing of what travelled whole, and what it was before where a result is not finite."""
        left.flat.sub_(result.flat)
        for number in whole:
            left.views[number].zero_()
        for number in bad:
            left.views[number].copy_(left.layout.views(before)[number])
        self.errors.replace(left.layout, left.flat)

    def wire_bytes(self, layout: Layout, *, world: int = 1, selected: int | None = None) -> int:
        matrices, whole = split(layout, self.rank, self.least_rate)
        factors = sum(min(self.rank, m, n) * (m + n) for _, (m, n) in matrices)
        return 4 * (factors + sum(layout.sizes[number] for number in whole))

    def state_dict(self) -> State:
        return {"errors": self.errors.state_dict(), "factors": dict(sorted(self.factors.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.errors.load_state_dict(state["errors"])
        self.factors = {name: factor.clone() for name, factor in state["factors"].items()}


@lru_cache(maxsize=1024)
def split(layout: Layout, rank: int, least_rate: float) -> tuple[list[tuple[int, tuple[int, int]]], list[int]]:
    """Numbers and matrix shapes of the tensors that are worth factoring, and the numbers of the others."""
    matrices, whole = [], []
    for number, (shape, size) in enumerate(zip(layout.shapes, layout.sizes, strict=True)):
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows
        if min(rank, rows, columns) * (rows + columns) * least_rate < size:
            matrices.append((number, (rows, columns)))
        else:
            whole.append(number)
    return matrices, whole


def _averaged(tensors: Sequence[Tensor], turn: Turn) -> Generator[Request, list[Tensor], list[Tensor]]:
    """The means over ranks, flat, by one collective; by none for no tensors."""
    if not tensors:
        return []
    (total,) = yield Request("sum", torch.cat([tensor.view(-1) for tensor in tensors]))
    if turn.world > 1:
        total.div_(turn.world)
    return list(total.split_with_sizes([tensor.numel() for tensor in tensors]))


def _product(target: Tensor, q: Tensor) -> Tensor:
    """(M Q)', (rank, m): rows are what has to be orthonormal, and rows lie together in memory."""
    return torch.mm(target, q.t()).t().contiguous() if q.shape[0] > 1 else torch.mv(target, q.view(-1))


def _projection(target: Tensor, p: Tensor) -> Tensor:
    """(M' P)', (rank, n)."""
    return torch.mm(p, target) if p.shape[0] > 1 else torch.mv(target.t(), p.view(-1))


def orthonormalise(factors: Sequence[Tensor]) -> None:
    """Rows of each (rank, m) matrix in place, by Gram and Schmidt; a row that depends on those before it becomes zero."""
    first = [torch.linalg.vector_norm(factor, dim=1) if factor.shape[0] > 1 else None for factor in factors]
    for place in range(max((factor.shape[0] for factor in factors), default=0)):
        taken = [(factor, norms) for factor, norms in zip(factors, first, strict=True) if factor.shape[0] > place]
        rows = [factor[place] for factor, _ in taken]
        norms = torch.stack(torch._foreach_norm(rows))
        least = torch.stack([before[place] for _, before in taken if before is not None]) * _DEPENDENT if place else 0.0
        torch._foreach_mul_(rows, list(torch.where(norms <= least, 0.0, 1 / norms).unbind()))
        for factor, _ in taken:
            if factor.shape[0] > place + 1:
                rest = factor[place + 1 :]
                rest.addr_(torch.mv(rest, factor[place]), factor[place], alpha=-1)
