"""L2 norms whose squares neither overflow nor vanish, and the range in which float32 squares do neither.

A gradient of 1e-25 has a norm like any other, but not in float32: the sum of its squares is zero. What is divided by such a norm is
lost, or never sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 2.0**-32  # norms below may lack elements that count: those whose squares vanish have to be small beside it
_SAFE = (2.0**-40, 2.0**40)  # magnitudes whose squares, and sums of any number of them, are far from both ends of float32


def norms(vectors: Sequence[Tensor]) -> Tensor:
    """The norm of each vector, computed one by one: float32 (vectors,)."""
    found: Tensor = torch.stack(torch._foreach_norm(list(vectors)))
    for number in _doubtful(found).nonzero().view(-1).tolist():
        found[number] = _scaled(vectors[number].reshape(1, -1))[0]
    return found


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row: float32 (rows,) for (rows, columns)."""
    found: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    doubtful = _doubtful(found)
    if bool(doubtful.any()):
        found[doubtful] = _scaled(matrix[doubtful])
    return found


def _doubtful(found: Tensor) -> Tensor:
    doubtful: Tensor = (found < _LOW) | (found == torch.inf)  # zeros among them, but no NaN
    return doubtful


def _scaled(matrix: Tensor) -> Tensor:
    largest = matrix.abs().amax(1, keepdim=True)
    # A reciprocal would overflow for a subnormal. Two steps by powers of two are exact, but for what is too small to count. Half of an odd
    # exponent is rounded, since two to the power of it would be no power of two: the largest value becomes 1 or 2 at most.
    scale = torch.exp2(-torch.div(torch.frexp(largest).exponent.clamp(-252, 252), 2, rounding_mode="floor").float())
    scaled: Tensor = torch.linalg.vector_norm(matrix * scale * scale, dim=1)
    return scaled / scale.view(-1) / scale.view(-1)


def moderate(values: Tensor) -> tuple[Tensor, float]:
    """Values times a power of two, where their squares could leave float32's range, and that power; else the values as they are, and 1."""
    low, high = torch.aminmax(values)
    largest = max(abs(float(low)), abs(float(high)))
    if _SAFE[0] <= largest <= _SAFE[1] or largest == 0 or not math.isfinite(largest):
        return values, 1.0
    half = 2.0 ** (-math.frexp(largest)[1] // 2)  # in two steps: from a subnormal to 1 is more than one float32 can say
    return values * half * half, half * half
