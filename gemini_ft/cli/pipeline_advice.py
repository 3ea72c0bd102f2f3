"""The advice of ``gemini pipeline``: what other rules would cost for the same model, in seconds and in quality.

Seconds on the network are by formula; those of compressing are measured on this machine with random gradients. Quality is that of our own
benchmarks (`gemini_ft.pipeline.qualities`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

import torch
from torch import nn

from gemini_ft.compression.base import Bundle, Turn
from gemini_ft.core.words import table
from gemini_ft.pipeline.qualities import BF16, WAYS
from gemini_ft.pipeline.rules import Rule
from gemini_ft.sync.ring import Ring8

WORTH = 0.9  # of bfloat16's time, above which nothing is worth its configuration
BACKWARD = 2 / 3  # of a step's computing, beside which gradients travel
_SAMPLE = 2**20  # elements of which compressing is timed
_FEW = 8  # ranks, the payloads of which are read then


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to exchange all gradients: bytes and seconds of a step, the mean over a period of local steps."""

    name: str
    wire_bytes: int | None
    network: float
    compressing: float
    step: float | None  # seconds of a whole step, if those of its computing are known
    accuracy: float | None  # relative to DDP's; None: not measured
    words: float | None  # to a loss of DDP's, relative to DDP's; None: not measured, or not reached

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
    for name, known in WAYS.items():
        rule = Rule.model_validate({"params": "*", **known.rule})
        wire, network = costs(rule)
        if network is None:
            continue
        compressing = _compressing(rule, elements, ranks) / (rule.every or 1)
        exchange, step = network + compressing, None
        if computing is not None:
            step = computing + exchange if rule.is_local else computing * (1 - BACKWARD) + max(computing * BACKWARD, exchange)
        words = known.words if known.words != inf else None
        way = Way(name=name, wire_bytes=wire, network=network, compressing=compressing, step=step, accuracy=known.accuracy, words=words)
        found.append(way)
    return sorted(found, key=lambda way: way.compared)


def _compressing(rule: Rule, elements: int, ranks: int) -> float:
    """Seconds that one rank takes to compress so many elements and to read what all ranks send, measured on a part of both."""
    if isinstance(scheme := rule.sync.make(), Ring8):
        return _least(partial(scheme.recoded, torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0)))) * elements / _SAMPLE
    if rule.compress is None or rule.cast is not None:
        return 0.0
    one, few = _measured(rule, elements, 1), min(ranks, _FEW)
    return one if few == 1 else one + max(0.0, _measured(rule, elements, few) - one) / (few - 1) * (ranks - 1)


def _measured(rule: Rule, elements: int, ranks: int) -> float:
    assert rule.compress is not None
    reducer, side, steps = rule.compress.make(), max(1, int(min(elements, _SAMPLE) ** 0.5)), count()
    gradient = torch.randn(side, side, generator=torch.Generator().manual_seed(0))

    def exchanged() -> None:
        exchange = reducer.exchange(Bundle.of({"w": gradient}, reducer.align), Turn(step=next(steps)))
        with suppress(StopIteration):
            request = next(exchange)
            while True:
                answers = [request.tensor] * (ranks if request.kind in ("gather", "gather_v") else 1)
                request = exchange.send(answers)

    return _least(exchanged) * elements / side**2


def _least(call: Callable[[], object]) -> float:
    """The seconds of the quicker of two calls, after one that warms up."""
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def verdict(found: Sequence[Way], computing: float | None) -> str:
    """The advice in a sentence or two."""
    alike = next(way for way in found if WAYS[way.name].is_alike)
    plain = next((way for way in found if way.name == BF16), alike)  # gradients that are sparse tensors cannot be cast
    what = "a step" if computing is not None else "an exchange"
    said = f"Of what trains about as DDP does, {alike.name} is the fastest: {alike.compared:.3f} s for {what}, {BF16} {plain.compared:.3f}."
    if alike.compared > WORTH * plain.compared:
        said = f"Plain DDP ({plain.name}) is the best of what trains as DDP does: {plain.compared:.3f} s for {what}."
    fastest = found[0]
    if fastest.compared > WORTH * min(plain.compared, alike.compared):
        said += " Nothing else saves a tenth of that."
    elif fastest is not alike:
        said += f" {fastest.name} takes {fastest.compared:.3f} s, but {WAYS[fastest.name]}: compare losses of your own."
    if computing is None:
        said += " Exchanges travel beside the backward pass: give --step, the seconds that a step computes, to compare whole steps."
    return said


def shown(found: Sequence[Way], computing: float | None) -> str:
    """The ways as a table, with the verdict."""
    rows: list[tuple[str, ...]] = [
        ("other rules for all", "bytes per step and rank", "network", "compressing", "step", "accuracy / DDP's", "words / DDP's")
    ]
    for way in found:
        wire = "?" if way.wire_bytes is None else f"{way.wire_bytes:,}"
        figures = (way.step, ".4f"), (way.accuracy, ".3f"), (WAYS[way.name].words, ".3f")
        known = ["?" if value is None else "not reached" if value == inf else f"{value:{form}}" for value, form in figures]
        rows.append((way.name, wire, f"{way.network:.4f}", f"{way.compressing:.4f}", *known))
    return f"{table(rows)}\n\n{verdict(found, computing)}"
