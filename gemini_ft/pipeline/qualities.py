"""The quality that other ways to exchange gradients had in our own benchmarks: `auto` and ``gemini pipeline`` go by this table.

Accuracy is that after as many steps as DDP, relative to DDP's (`ACCURACY`: two ranks, ten seeds, SGD with momentum). Words are those that
a GPT was trained on until it had a loss of DDP's, relative to DDP's (`WORDS`: four hosts, three seeds, AdamW).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

ACCURACY = "benchmarks/results/2026-11-28-pipelines-convergence.md"
WORDS = "benchmarks/results/2026-11-29-pipelines-gpt.md"
_LEAST_ACCURACY = 0.995  # of DDP's, from which on a way counts as training alike: DDP's own spread between seeds
_MOST_WORDS = 1.01


@dataclass(frozen=True, kw_only=True)
class Known:
    """A way to exchange all gradients, and what is known of it.

    Attributes:
        rule: options of a rule for all parameters.
        accuracy: relative to DDP's; None: not measured.
        words: relative to DDP's; None: not measured; infinite: it did not reach the loss in half as many steps again.
    """

    rule: Mapping[str, Any]
    accuracy: float | None = None
    words: float | None = None

    @property
    def is_alike(self) -> bool:
        """Whether it trains as DDP does in all that was measured."""
        return (self.accuracy or self.words or 0.0) >= _LEAST_ACCURACY and (self.words or 1.0) <= _MOST_WORDS

    def __str__(self) -> str:
        said = f"it reached {self.accuracy:.3f} of DDP's accuracy in as many steps ({ACCURACY})" if self.accuracy is not None else ""
        if self.words is None:
            return said or "its quality was not measured"
        words = "did not reach" if self.words == inf else f"took {self.words:.2f} times the words to reach"
        return f"{said}{', and' if said else 'it'} {words} a loss of DDP's ({WORDS})"


BF16, RING, LOCAL = "all-reduce in bfloat16", "ring8", "DiLoCo"
WAYS: dict[str, Known] = {
    "all-reduce in float32": Known(rule={}, accuracy=1.0, words=1.0),
    BF16: Known(rule={"compress": "bf16"}, accuracy=0.999, words=1.0),
    RING: Known(rule={"sync": "ring8"}, accuracy=1.002, words=1.0),
    "int8": Known(rule={"compress": "int8"}, accuracy=1.0),
    "powersgd": Known(rule={"compress": {"method": "powersgd", "rank": 2}}, accuracy=0.998, words=1.316),
    "top-k 1 %": Known(rule={"compress": {"method": "topk", "ratio": 0.01}}, accuracy=0.993, words=1.441),
    LOCAL: Known(rule={"every": 25, "outer": {}, "compress": "bf16"}, accuracy=0.984, words=1.375),
    "SparseLoCo": Known(
        rule={"every": 25, "outer": {"lr": 1, "momentum": 0}, "compress": {"method": "chunked_topk", "feedback": 0.95}},
        accuracy=0.962,
        words=inf,
    ),
}
