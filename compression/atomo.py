"""ATOMO (Wang et al., NeurIPS 2018): some of the atoms of a singular value decomposition, so drawn that the mean is exact.

An atom of weight w that is drawn with probability p is sent as w / p. For a budget of s atoms, the probabilities that give the least
variance are in closed form (theorem 2): p = min(1, w / t) with t such that they add up to s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Bundle, Compressor, FlatLayout, Payload, Primitive, Turn
from .norms import row_norms
from .powersgd import split
from .randomness import generator


class Atomo(Compressor):
    """Sends ``atoms`` rank-one matrices per matrix; vectors, and matrices that would not get smaller, travel whole.

    Exactly that many are drawn (systematic sampling keeps the probabilities), so that payloads have one length. The decomposition
    costs O(m n min(m, n)) per step. Payload: of each matrix the left vectors divided by p, then the right ones (float32).

    Args:
        atoms: s.
        seed: of the draws.
    """

    primitive = Primitive.ALL_GATHER
    unbiased = True
    in_parts = False

    def __init__(self, atoms: int = 3, seed: int = 0) -> None:
        if atoms < 1:
            raise ValueError(f"atoms={atoms}: must be at least 1")
        self.atoms, self.seed = atoms, seed

    def compress(self, bundle: Bundle, turn: Turn) -> Payload:
        runs, whole = split(bundle.layout, self.atoms, 1.0)
        parts: list[Tensor] = []
        for run in runs:
            for number, matrix in zip(run.numbers, run.matrices(bundle.flat).unbind(), strict=True):
                stream = generator(bundle.layout.names[number], self.seed, turn, turn.rank)
                parts += self._drawn(matrix, float(stream.random()))
        return Payload(
            bundle.layout, torch.cat([*(part.reshape(-1) for part in parts), *(bundle.views[n] for n in whole)]).view(torch.uint8)
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
        result = Bundle(layout, torch.zeros(layout.total, device=data.device))
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
