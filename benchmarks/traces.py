"""Sparse gradients that behave like the published ones: rows drawn from a Zipf law, calibrated to Zen's figures.

A rank touches the rows of the tokens in its batch. Tokens follow a Zipf law over rows in order of frequency; their number is
such that the expected density is the published one. Densification and skew of the published models then come out by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Trace:
    """One profile: ``density`` of a rank's gradient, Zipf ``exponent``, ``rows`` of the model that was published."""

    name: str
    density: float
    exponent: float
    rows: int
    published: str  # what the figures below can be compared with

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
        """A coalesced sparse [rows, width] float32 gradient of one rank at one step."""
        random = np.random.default_rng([rank, step])  # the rows come first: they do not depend on the width
        touched = np.flatnonzero(random.random(rows) < -np.expm1(-self.tokens(rows)))
        values = torch.from_numpy(random.standard_normal((len(touched), width), dtype=np.float32))
        indices = torch.from_numpy(touched).unsqueeze(0)
        return torch.sparse_coo_tensor(indices, values, (rows, width), is_coalesced=True, check_invariants=False)


TRACES = {
    trace.name: trace
    for trace in (
        Trace("LSTM", 0.0113, 1.2, 793_470, "1.13 %; over 60 % of it in the first of 8 parts; skew over 70 at 128"),
        Trace("DeepFM", 0.0280, 1.0, 1_000_000, "2.80 %; over 60 % of it in the first of 8 parts"),
        Trace("NMT", 0.0247, 1.13, 109_000, "2.47 %; .615 at 128 ranks"),
        Trace("DGC", 0.05, 1.0, 1_000_000, "top 5 %"),
    )
}


def _density(expected: np.ndarray) -> float:
    return float(-np.expm1(-expected).mean())
