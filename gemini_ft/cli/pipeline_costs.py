"""The tables of ``gemini pipeline``: the rule of each parameter, and the cost of each rule.

Seconds are those that bytes alone take at a given rate, by the textbook formulas of the collectives; compressing takes its own time,
which a machine tells only when it is measured (fusion ``auto`` does that).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gemini_ft.cli.pipeline_advice import shown, verdict, ways
from gemini_ft.compression.base import FlatLayout, Primitive, layout_of
from gemini_ft.compression.sparse import kept
from gemini_ft.core.words import table
from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.plan import NO_RULE, Tensor, assign, first_plan, rule_at, trained
from gemini_ft.pipeline.qualities import ACCURACY, WORDS
from gemini_ft.pipeline.rules import Compression, Rule, Rules, load_rules
from gemini_ft.sync.costs import Link, fpisa, switched, switchml, textbook
from gemini_ft.sync.ring import Ring8
from gemini_ft.sync.schemes import LOSSY_SCHEMES

# scheme through a switch -> bytes of each element (0: as the gradient has them), seconds that so many bytes take
_SWITCHED: dict[str, tuple[int, Callable[[int, Link], float]]] = {
    "switchml": (4, lambda nbytes, link: switchml(nbytes // 4, link)),
    "fpisa": (0, lambda nbytes, link: fpisa(nbytes, link, itemsize=1)),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one rule in one step."""

    rule: str  # as users know it
    dense_bytes: int  # of the gradients
    wire_bytes: int | None  # that one rank hands to collectives; None: only the data tell
    by: str  # how ``wire_bytes`` is known
    seconds: float | None  # that these bytes take at the given rate
    fp32_seconds: float  # that all-reduce of the same gradients takes, in 4 bytes an element
    bf16_seconds: float  # the same in 2 bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter, and how its gradient is synchronised."""

    parameter: str
    shape: tuple[int, ...]
    rule: int | None
    sync: str
    compression: str
    error_feedback: str
    group: int


@dataclass(frozen=True, kw_only=True)
class CostScenario:
    """A pipeline applied to a model: ``ranks`` of them, ``rate`` in bits per second and direction.

    ``dense`` has the seconds of all gradients in float32 by the four patterns of `gemini_ft.sync.costs.textbook`, with ``latency`` seconds
    per message: what there is to gain or lose by another pattern. ``switched`` has them by the schemes that go through a switch
    (`gemini_ft.sync.costs.switched`).
    """

    ranks: int
    rate: float
    latency: float
    parameters: tuple[Row, ...]
    rules: tuple[Cost, ...]
    dense: Mapping[str, float]
    switched: Mapping[str, float]


def describe(model: nn.Module, rules: Rules, ranks: int, rate: float, latency: float = 0.0) -> CostScenario:
    """Predicts how training would exchange gradients under these rules.

    Args:
        model: its parameters may be on the meta device.
        rules: as `load_rules` gives them.
        ranks: at least 1.
        rate: of each rank's link, bits per second.
        latency: seconds of a message without bytes; only the dense patterns count it.

    Raises ConfigError: as in training, where the rules do not fit the model.
    """
    tensors = [_as_it_travels(tensor, rules) for tensor in assign(model, rules)]
    wide = {tensor.name: tensor.rule != NO_RULE and rules[tensor.rule].is_local for tensor in tensors}
    dtypes = {
        name: torch.promote_types(param.dtype, torch.float32) if wide[name] else param.dtype for name, param in trained(model).items()
    }
    plan = first_plan(tensors, rules)
    group_of = {name: number for number, group in enumerate(plan.groups, 1) for name in group.names}
    costs = []
    for number in sorted({tensor.rule for tensor in tensors}, key=lambda number: (number == NO_RULE, number)):
        by_name = {tensor.name: tensor for tensor in tensors if tensor.rule == number}
        groups = [[by_name[name] for name in group.names] for group in plan.groups if group.rule == number]
        costs.append(_cost(number, rule_at(rules, number), groups, dtypes, ranks, rate))
    rows = [_row(tensor, rule_at(rules, tensor.rule), group_of[tensor.name]) for tensor in tensors]
    elements, link = sum(tensor.nbytes // tensor.itemsize for tensor in tensors), Link(alpha=latency, beta=8 / rate)
    return CostScenario(
        ranks=ranks,
        rate=rate,
        latency=latency,
        parameters=tuple(rows),
        rules=tuple(costs),
        dense=textbook(ranks, 4 * elements, link),
        switched=switched(ranks, elements, link),
    )


def _as_it_travels(tensor: Tensor, rules: Rules) -> Tensor:
    """The tensor with the bytes of an element under way: pseudo-gradients are in float32 at least."""
    return tensor.moved() if tensor.rule != NO_RULE and rules[tensor.rule].is_local else tensor


def _row(tensor: Tensor, rule: Rule, group: int) -> Row:
    number = None if tensor.rule == NO_RULE else tensor.rule + 1
    return Row(
        parameter=tensor.name,
        shape=tensor.shape,
        rule=number,
        sync=rule.sync.scheme,
        compression=_method(rule.compress),
        error_feedback=_feedback(rule.compress),
        group=group,
    )


def _method(compress: Compression | None) -> str:
    if compress is None:
        return "-"
    options = [f"{name}={value}" for name, value in (compress.model_extra or {}).items()]
    options += ["two_phase=True"] if compress.two_phase else []
    return f"{compress.method}({', '.join(options)})" if options else compress.method


def _feedback(compress: Compression | None) -> str:
    """The factor of the residual; "own": the method has a memory that is part of it."""
    if compress is None:
        return "-"
    reducer = compress.make()
    if (beta := getattr(reducer, "beta", None)) is not None:
        return f"{beta:g}"
    return "own" if reducer.state_dict() else "-"


def _cost(number: int, rule: Rule, groups: Sequence[Sequence[Tensor]], dtypes: Mapping[str, torch.dtype], ranks: int, rate: float) -> Cost:
    tensors = [tensor for group in groups for tensor in group]
    dense, elements = sum(tensor.nbytes for tensor in tensors), sum(tensor.nbytes // tensor.itemsize for tensor in tensors)
    wire, by, primitive = _wire(rule, groups, dtypes, ranks)
    by += f"; control {rule.control.method} moves the ratio" if rule.control is not None else ""
    name = "no rule" if number == NO_RULE else f"{number + 1}: {rule}"
    through = _SWITCHED.get(rule.sync.scheme) if ranks > 1 and rule.compress is None else None
    if through is not None:  # each rank sends once and receives once, at the same time
        wire = through[0] * elements or dense
        seconds: float | None = through[1](wire, Link(alpha=0.0, beta=8 / rate))
    else:
        seconds = None if wire is None else _seconds(primitive, wire, ranks, rate)
    if rule.every is not None:
        by += f"; once in {rule.every} steps"
        wire, seconds = None if wire is None else wire // rule.every, None if seconds is None else seconds / rule.every
    fp32, bf16 = (_seconds(Primitive.ALL_REDUCE, size * elements, ranks, rate) for size in (4, 2))
    return Cost(rule=name, dense_bytes=dense, wire_bytes=wire, by=by, seconds=seconds, fp32_seconds=fp32, bf16_seconds=bf16)


def _wire(
    rule: Rule, groups: Sequence[Sequence[Tensor]], dtypes: Mapping[str, torch.dtype], ranks: int
) -> tuple[int | None, str, Primitive]:
    """Bytes of one rank, how they are known, and how they travel."""
    if rule.compress is None:
        if isinstance(scheme := rule.sync.make(), Ring8):
            elements = [sum(tensor.nbytes // tensor.itemsize for tensor in group) for group in groups]
            return sum(map(scheme.wire_bytes, elements)), "formula", Primitive.ALL_REDUCE
        if rule.is_sparse or rule.sync.scheme in LOSSY_SCHEMES:
            what = "rows that are not zero" if rule.is_sparse else "words of 0 to 32 bits"
            return None, f"depends on the data: {what}", Primitive.ALL_REDUCE
        return sum(tensor.nbytes for group in groups for tensor in group), "formula", Primitive.ALL_REDUCE
    reducer = rule.compress.make()
    layouts = [_layout(group, dtypes, reducer.align) for group in groups]
    try:
        return sum(reducer.wire_bytes(layout, world=ranks) for layout in layouts), "formula", reducer.primitive
    except ValueError:  # how many elements travel depends on the data
        ratio: float | None = getattr(getattr(reducer, "inner", reducer), "ratio", None)
    if ratio is None:
        return None, f"depends on the data: {rule.compress.method} has no ratio", reducer.primitive
    picked = [sum(kept(size, ratio) for size in layout.sizes) for layout in layouts]
    total = sum(reducer.wire_bytes(layout, world=ranks, selected=count) for layout, count in zip(layouts, picked, strict=True))
    return total, f"ratio {ratio:g}; depends on the data", reducer.primitive


def _layout(group: Sequence[Tensor], dtypes: Mapping[str, torch.dtype], align: int) -> FlatLayout:
    return layout_of(tuple(t.name for t in group), tuple(t.shape for t in group), tuple(dtypes[t.name] for t in group), align)


def _seconds(primitive: Primitive, nbytes: int, ranks: int, rate: float) -> float:
    """Seconds until a link of ``rate`` bits per second has carried all that one rank receives, if each hands over ``nbytes``."""
    match primitive:
        case Primitive.ALL_GATHER | Primitive.ALL_GATHER_V:
            received = (ranks - 1) * float(nbytes)
        case Primitive.ALL_TO_ALL:  # n parts to their owners, and an n-th of that from each of them
            received = 2 * (ranks - 1) / (ranks + 1) * nbytes
        case _:
            received = 2 * (ranks - 1) / ranks * nbytes
    return 8 * received / rate


def show(options: argparse.Namespace) -> None:
    """Prints what the options of ``gemini pipeline`` ask for."""
    if not 1 <= options.ranks <= 10**6:
        raise ConfigError(f"--ranks {options.ranks}: must be at least 1, and at most a million")
    if not 0 <= options.latency < 1e9:
        raise ConfigError(f"--latency {options.latency:g}: must be microseconds, at least 0; for example 50")
    if not options.rate > 0:
        raise ConfigError(f"--rate {options.rate:g}: must be above 0")
    if options.step is not None and not 0 <= options.step < math.inf:
        raise ConfigError(f"--step {options.step:g}: must be seconds, at least 0")
    rules, model = load_rules(options.config), _model(options.model)
    description = describe(model, rules, options.ranks, options.rate, 1e-6 * options.latency)

    def costs(rule: Rule) -> tuple[int | None, float | None]:
        try:
            (cost,) = describe(model, (rule,), options.ranks, options.rate).rules
        except ConfigError:  # vectors alone, for example, have no factors
            return None, None
        return cost.wire_bytes, cost.seconds

    others = ways(model, costs, options.step, options.ranks)
    if options.json:
        advice = {"ways": [asdict(way) for way in others], "verdict": verdict(others, options.step), "sources": [ACCURACY, WORDS]}
        print(json.dumps({**asdict(description), "advice": advice}, indent=2))
    else:
        print(f"{_shown(description)}\n\n{shown(others, options.step)}")


def _model(path: str) -> nn.Module:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"--model {path!r}: must be module:function, for example train:make_model")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does
    try:
        make = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"--model {path!r}: {error}; run it where {module} can be imported") from None
    except AttributeError:
        raise ConfigError(f"--model {path!r}: {module} has no {name}; name a function that returns the model") from None
    model = _made(make)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {path!r}: returned {type(model).__name__}; it must return an nn.Module")
    return model


def _made(make: Callable[[], Any]) -> Any:
    """Builds the model on the meta device, which takes no memory, or for real if that does not work."""
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError):  # it looks at values
        return make()


def _shown(description: CostScenario) -> str:
    parameters = [("parameter", "shape", "rule", "sync", "compression", "error feedback", "group")]
    for row in description.parameters:
        shape = "x".join(map(str, row.shape)) or "scalar"
        parameters.append((row.parameter, shape, str(row.rule or "-"), row.sync, row.compression, row.error_feedback, str(row.group)))
    rules = [("rule", "dense bytes", "bytes per step and rank", "seconds", "all-reduce fp32", "all-reduce bf16", "known by")]
    for cost in description.rules:
        seconds = _or(cost.seconds, ".4f"), f"{cost.fp32_seconds:.4f}", f"{cost.bf16_seconds:.4f}"
        rules.append((cost.rule, f"{cost.dense_bytes:,}", _or(cost.wire_bytes, ","), *seconds, cost.by))
    text = f"{description.ranks} ranks at {description.rate / 1e6:,g} Mbit/s; seconds on the network alone"
    dense = f"all gradients in float32, by pattern, with {1e6 * description.latency:g} us per message"
    switch = "the same through a switch, by scheme; at these shares of blocks that any rank has"
    return "\n".join(
        [table(parameters), "", text, table(rules), "", dense, _pattern(description.dense), "", switch, _pattern(description.switched)]
    )


def _pattern(seconds: Mapping[str, float]) -> str:
    return table([tuple(seconds), tuple(f"{each:.4f}" for each in seconds.values())])


def _or(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
