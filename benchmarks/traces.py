"""Sparse gradients that behave like the published ones: rows drawn from a Zipf law, calibrated to Zen's figures.

A rank touches the rows of the tokens in its batch. Tokens follow a Zipf law over rows in order of frequency; their number is
such that the expected density is the published one. Densification and skew of the published models then come out by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_ROWS = 10_000  # that are drawn at once where units are elements


@dataclass(frozen=True)
class Trace:
    """One profile: ``density`` of a rank's gradient, Zipf ``exponent``, ``rows`` of the model that was published."""

    name: str
    density: float
    exponent: float
    rows: int
    published: str  # what the figures below can be compared with
    elements: bool = False  # whether a unit is an element: every element of a row is drawn for itself, by the row's chance

    def tokens(self, rows: int) -> np.ndarray:
        """Expected number of tokens of each row, float64 [rows]."""
        shares = np.arange(1, rows + 1, dtype=np.float64) ** -self.exponent
        shares /= shares.sum()
        low, high = 0.0, 1.0
        while _density(shares * high) < self.density:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _density(shares * middle) < self.density else (low, middle)
        return shares * high

    def gradient(self, rank: int, rows: int, width: int, step: int = 0) -> torch.Tensor:
        """A coalesced sparse float32 gradient of one rank at one step: [rows, width], of elements [rows * width, 1]."""
        touched, random = self._touched(rank, rows, width, step)
        units, each = (rows * width, 1) if self.elements else (rows, width)
        values = torch.from_numpy(random.standard_normal((len(touched), each), dtype=np.float32))
        indices = torch.from_numpy(touched).unsqueeze(0)
        return torch.sparse_coo_tensor(indices, values, (units, each), is_coalesced=True, check_invariants=False)

    def indices(self, rank: int, rows: int, width: int) -> torch.Tensor:
        """The indices alone, int64 [n]."""
        return torch.from_numpy(self._touched(rank, rows, width, 0)[0])

    def _touched(self, rank: int, rows: int, width: int, step: int) -> tuple[np.ndarray, np.random.Generator]:
        """Numbers of the units, and the generator that draws their values next: rows do not depend on the width."""
        random = np.random.default_rng([rank, step])
        chances = -np.expm1(-self.tokens(rows))
        if not self.elements:
            return np.flatnonzero(random.random(rows) < chances), random
        found = []
        for begin in range(0, rows, _ROWS):  # in portions, for the memory
            some = chances[begin : begin + _ROWS, None]
            found.append(begin * width + np.flatnonzero(random.random((len(some), width), dtype=np.float32) < some))
        return np.concatenate(found), random


TRACES = {
    trace.name: trace
    for trace in (
        Trace("LSTM", 0.0113, 1.2, 793_470, "1.13 %; over 60 % of it in the first of 8 parts; skew over 70 at 128"),
        Trace("DeepFM", 0.0280, 1.0, 1_000_000, "2.80 %; over 60 % of it in the first of 8 parts"),
        Trace("NMT", 0.0247, 1.13, 109_000, "2.47 %; .615 at 128 ranks"),
        Trace("DGC", 0.05, 1.0, 1_000_000, "top 5 %"),
        Trace("DGC, elements", 0.05, 1.0, 1_000_000, "top 5 % of the elements", elements=True),
    )
}


def _density(expected: np.ndarray) -> float:
    return float(-np.expm1(-expected).mean())
