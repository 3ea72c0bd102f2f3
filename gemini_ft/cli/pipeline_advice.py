"""The advice of ``gemini pipeline``: what other rules would cost for the same model, in seconds and in quality.

Seconds on the network are by formula; those of compressing are measured on this machine with random gradients, those of ring8's rounding
left out. Quality is the accuracy that a configuration has reached in our own benchmark, relative to DDP's (`SOURCE`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini_ft.compression.base import Bundle, Turn
from gemini_ft.core.words import table
from gemini_ft.pipeline.rules import Rule

SOURCE = "benchmarks/results/2026-11-28-pipelines-convergence.md"
ALIKE = 0.995  # of DDP's accuracy, from which on a way counts as training alike: DDP's own spread between seeds
WORTH = 0.9  # of bfloat16's time, above which nothing is worth its configuration
BACKWARD = 2 / 3  # of a step's computing, beside which gradients travel
_SAMPLE = 2**20  # elements of which compressing is timed
_FEW = 8  # ranks, the payloads of which are read then

# name -> the rule for all parameters, and the accuracy relative to DDP's; None: not measured
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "all-reduce in float32": ({}, 1.0),
    "all-reduce in bfloat16": ({"compress": "bf16"}, 0.999),
    "ring8": ({"sync": "ring8"}, None),
    "int8": ({"compress": "int8"}, 1.0),
    "powersgd": ({"compress": {"method": "powersgd", "rank": 2}}, 0.998),
    "top-k 1 %": ({"compress": {"method": "topk", "ratio": 0.01}}, 0.993),
    "DiLoCo": ({"every": 25, "outer": {}, "compress": "bf16"}, 0.984),
    "SparseLoCo": ({"every": 25, "outer": {"lr": 1, "momentum": 0}, "compress": {"method": "chunked_topk", "feedback": 0.95}}, 0.962),
}
PLAIN = "all-reduce in bfloat16"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to exchange all gradients: bytes and seconds of a step, the mean over a period of local steps."""

    name: str
    wire_bytes: int | None
    network: float
    compressing: float
    step: float | None  # seconds of a whole step, if those of its computing are known
    quality: float | None  # accuracy relative to DDP's, see `SOURCE`; None: not measured

    @property
    def compared(self) -> float:
        return self.step if self.step is not None else self.network + self.compressing


Costs = Callable[[Rule], tuple[int | None, float | None]]
"""Bytes of a rank and seconds on the network in a step, of a rule for all parameters."""


def ways(model: nn.Module, costs: Costs, computing: float | None, ranks: int) -> list[Way]:
    """Every way in `WAYS` that the model can be trained by, the fastest first.

    Args:
        computing: seconds of a step without any exchange; None: not known, and only the exchanges are compared.
        ranks: whose payloads each of them reads.
    """
    elements = sum(param.numel() for param in model.parameters() if param.requires_grad)
    found = []
    for name, (options, quality) in WAYS.items():
        rule = Rule.model_validate({"params": "*", **options})
        wire, network = costs(rule)
        if network is None:
            continue
        compressing = _compressing(rule, elements, ranks) / (rule.every or 1)
        exchange, step = network + compressing, None
        if computing is not None:
            step = computing + exchange if rule.is_local else computing * (1 - BACKWARD) + max(computing * BACKWARD, exchange)
        found.append(Way(name=name, wire_bytes=wire, network=network, compressing=compressing, step=step, quality=quality))
    return sorted(found, key=lambda way: way.compared)


def _compressing(rule: Rule, elements: int, ranks: int) -> float:
    """Seconds that one rank takes to compress so many elements and to read what all ranks send, measured on a part of both."""
    if rule.compress is None or rule.cast is not None:
        return 0.0
    one, few = _measured(rule, elements, 1), min(ranks, _FEW)
    return one if few == 1 else one + max(0.0, _measured(rule, elements, few) - one) / (few - 1) * (ranks - 1)


def _measured(rule: Rule, elements: int, ranks: int) -> float:
    assert rule.compress is not None
    reducer, count, taken = rule.compress.make(), min(elements, _SAMPLE), []
    side = max(1, int(count**0.5))
    gradient = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    for number in range(3):  # the first one warms up
        begin = time.perf_counter()
        exchange = reducer.exchange(Bundle.of({"w": gradient}, reducer.align), Turn(step=number))
        try:
            request = next(exchange)
            while True:
                answers = [request.tensor] * (ranks if request.kind in ("gather", "gather_v") else 1)
                request = exchange.send(answers)
        except StopIteration:
            taken.append(time.perf_counter() - begin)
    return min(taken[1:]) * elements / side**2


def verdict(found: Sequence[Way], computing: float | None) -> str:
    """The advice in a sentence or two."""
    alike = next(way for way in found if way.quality is not None and way.quality >= ALIKE)
    plain = next((way for way in found if way.name == PLAIN), alike)  # gradients that are sparse tensors cannot be cast
    what = "a step" if computing is not None else "an exchange"
    said = (
        f"Of what trains about as DDP does, {alike.name} is the fastest: {alike.compared:.3f} s for {what}, {PLAIN} {plain.compared:.3f}."
    )
    if alike.compared > WORTH * plain.compared:
        said = f"Plain DDP ({plain.name}) is the best of what trains as DDP does: {plain.compared:.3f} s for {what}."
    fastest = found[0]
    if fastest.compared > WORTH * min(plain.compared, alike.compared):
        said += " Nothing else saves a tenth of that."
    elif fastest is not alike:
        quality = "its quality was not measured" if fastest.quality is None else f"it reached {fastest.quality:.3f} of DDP's accuracy"
        said += f" {fastest.name} takes {fastest.compared:.3f} s, but {quality} in as many steps ({SOURCE}): compare losses of your own."
    if computing is None:
        said += " Exchanges travel beside the backward pass: give --step, the seconds that a step computes, to compare whole steps."
    return said


def shown(found: Sequence[Way], computing: float | None) -> str:
    """The ways as a table, with the verdict."""
    rows = [("other rules for all", "bytes per step and rank", "network", "compressing", "step", "accuracy / DDP's")]
    for way in found:
        wire = "?" if way.wire_bytes is None else f"{way.wire_bytes:,}"
        step, quality = ("?" if value is None else f"{value:{form}}" for value, form in ((way.step, ".4f"), (way.quality, ".3f")))
        rows.append((way.name, wire, f"{way.network:.4f}", f"{way.compressing:.4f}", step, quality))
    return f"{table(rows)}\n\n{verdict(found, computing)}"
