"""The plan that all ranks have agreed on: which rule each parameter has, which gradients travel together, and in which order. Pure.

The order is that of the backward pass: a group travels when the last of its gradients is there, and not before the group before
it, so that all ranks issue the same collectives in the same order whatever their timing. `assign` gives each parameter its rule, and
checks that the rule can be applied to it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.tensor import DTensor

from gemini_ft.compression.timeline import Grouping, buckets, even, layer_wise
from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.rules import DEFAULT_FUSION, PLAIN, Buckets, Fusion, Groups, Rule, Rules, payload_of_one_length
from gemini_ft.state.tensors import clean, unwrap_model

NO_RULE = -1
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ADDED = (*_FLOATS, torch.float64, torch.complex32, torch.complex64, torch.complex128)  # dtypes that backends can add up


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter whose gradient travels.

    Attributes:
        name: as in ``model.named_parameters()``.
        itemsize: bytes of one element of the gradient.
        rule: number of its rule; `NO_RULE`: none matches.
        sparse: whether its module makes gradients that are sparse tensors.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    rule: int
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.itemsize * math.prod(self.shape)

    def moved(self) -> Tensor:
        """The pseudo-gradient of a parameter that ranks train alone: dense, and in float32 at least."""
        return replace(self, itemsize=max(4, self.itemsize), sparse=False)


class Group(NamedTuple):
    """Gradients that travel together.

    Attributes:
        rule: number of the rule of all of them.
        names: in the order in which the backward pass makes them.
        way: "rule": as the rule says; else another way, see `gemini_ft.pipeline.route_table.Routes`.
    """

    rule: int
    names: tuple[str, ...]
    way: str = "rule"


@dataclass(frozen=True)
class Plan:
    """All groups, in the order in which they travel.

    Attributes:
        groups: every tensor is in exactly one.
        fusion: by number of the rule, how its groups were found.
        predicted: by number of the rule, seconds of one iteration that the timeline predicts; only where it was planned.
    """

    groups: tuple[Group, ...]
    fusion: Mapping[int, str]
    predicted: Mapping[int, float]

    def pack(self) -> dict[str, Any]:
        """The plan as plain data."""
        packed: dict[str, Any] = _PLAN.dump_python(self, mode="json")
        return packed

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Plan:
        return _PLAN.validate_python(packed)


_PLAN = TypeAdapter(Plan)


def rule_at(rules: Rules, number: int) -> Rule:
    """The rule with that number; for `NO_RULE`, the default."""
    return PLAIN if number == NO_RULE else rules[number]


def first_plan(tensors: Sequence[Tensor], rules: Rules) -> Plan:
    """The plan before anything is known about the training: planned fusions begin as buckets."""
    groups: list[Group] = []
    fusion = {}
    for number in sorted({tensor.rule for tensor in tensors}):
        rule, own = rule_at(rules, number), [tensor for tensor in tensors if tensor.rule == number]
        found = _groups(number, rule, own)
        groups += found
        fusion[number] = str(rule.fusion) if isinstance(rule.fusion, str) else f"{len(found)} groups"
    return Plan(in_order(groups, tensors), fusion, {})


def _groups(number: int, rule: Rule, tensors: Sequence[Tensor]) -> list[Group]:
    sparse, dense = [t for t in tensors if t.sparse], [t for t in tensors if not t.sparse]
    alone = [Group(number, (tensor.name,), "rule" if rule.is_sparse else "sparse") for tensor in sparse]
    if rule.is_sparse and rule.compress is None:
        return alone + [Group(number, (tensor.name,)) for tensor in dense]
    begins_rounded = rule.fusion == "auto" and rule.is_plain and rule.compress is None and not are_exact(dense)
    way = "bf16" if begins_rounded else "rule"  # until it is known which one is best
    return alone + grouped(number, dense, fallback(dense, rule.fusion), way) if dense else alone


def are_exact(tensors: Iterable[Tensor]) -> bool:
    """Whether any element has more than 32 bits, as of float64 and of complex numbers: `auto` rounds none of these tensors then."""
    return any(tensor.itemsize > 4 for tensor in tensors)


def grouped(number: int, tensors: Sequence[Tensor], grouping: Grouping, way: str = "rule") -> list[Group]:
    """The groups of consecutive tensors that a grouping describes."""
    return [Group(number, tuple(tensors[index].name for index in indices), way) for indices in grouping.groups]


def fallback(tensors: Sequence[Tensor], fusion: Fusion) -> Grouping:
    """The grouping of a fusion that needs no measuring; planned ones begin with buckets."""
    match fusion:
        case "layer-wise":
            return layer_wise(len(tensors))
        case Groups(groups=count):
            return even(len(tensors), min(count, len(tensors)))
        case Buckets(bucket=capacity):
            return buckets([tensor.nbytes for tensor in tensors], capacity)
        case _:
            return buckets([tensor.nbytes for tensor in tensors], DEFAULT_FUSION.bucket)


def in_order(groups: Iterable[Group], tensors: Sequence[Tensor]) -> tuple[Group, ...]:
    """The groups in the order in which the last gradient of each is ready."""
    place = {tensor.name: number for number, tensor in enumerate(tensors)}
    return tuple(sorted(groups, key=lambda group: max(place[name] for name in group.names)))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name, without what DDP, torch.compile and Fabric put before a name."""
    ignored = getattr(model, "parameters_to_ignore", ())  # by DistributedDataParallel
    found = unwrap_model(model).named_parameters()
    return {clean(name): param for name, param in found if param.requires_grad and name not in ignored}


def assign(model: nn.Module, rules: Rules) -> list[Tensor]:
    """The parameters of a model with their rules, the last one first: about the order in which gradients become ready.

    Raises ConfigError: a rule matches no parameter, or cannot be applied to one that it matches; named, with the way out.
    """
    sparse, found = _sparse(model), []
    for name, param in trained(model).items():
        if isinstance(param, DTensor):
            raise ConfigError(
                f"{name} is sharded (a DTensor), and its gradient is reduced by fully_shard itself: use DDP, or no gradient pipeline"
            )
        if param.dtype not in _ADDED:
            raise ConfigError(
                f"{name} is {param.dtype}, which no backend adds up; a gradient pipeline averages {', '.join(map(str, _ADDED))}: freeze "
                "the parameter, keep it in one of these, or leave the gradient pipeline out"
            )
        number = next((number for number, rule in enumerate(rules) if rule.matches(name)), NO_RULE)
        shape = tuple(getattr(param, "ds_shape", param.shape))  # ZeRO 3 has taken the whole away
        found.append(Tensor(name=name, shape=shape, itemsize=param.element_size(), rule=number, sparse=name in sparse))
        if number != NO_RULE:
            _check_parameter(number, rules[number], name, param, name in sparse)
    if not found:
        raise ConfigError(
            "the model has no parameter that requires a gradient; build the pipeline after the model, and before freezing all"
        )
    for number, rule in enumerate(rules):
        _check_rule(number, rule, found, rules)
    return found[::-1]


def check_local(rules: Rules, tensors: Sequence[Tensor], scaler: Any) -> None:
    """Checks that all parameters are trained alone, or none.

    Raises ConfigError: some are, or not from the same step on; or a loss scaler would have ranks skip updates apart.
    """
    local = [tensor for tensor in tensors if tensor.rule != NO_RULE and rules[tensor.rule].apart.is_local]
    begin = {rules[tensor.rule].quality == "loss": tensor.name for tensor in local}
    if len(begin) > 1:
        raise ConfigError(
            f"{begin[True]} has a rule with quality: loss, and {begin[False]} one with every: ranks would begin to train them alone at "
            "different steps. Give all rules the same of these"
        )
    rules = tuple(rule.apart for rule in rules)
    alone = {tensor.name for tensor in tensors if tensor.rule != NO_RULE and rules[tensor.rule].is_local}
    if len({rule.within for rule in rules if rule.is_local}) > 1:
        raise ConfigError("a rule has within: host, and another one has every without it: give it to all of them, or to none")
    if alone and (others := [tensor.name for tensor in tensors if tensor.name not in alone]):
        raise ConfigError(
            f"a rule has every, or quality: loss, and {others[0]} is trained by none such: ranks would clip, scale and skip what they "
            "average in each step by gradients of their own. Give all rules the same of these, and the last one params: '*'"
        )
    if alone and scaler is not None and scaler.is_enabled():
        raise ConfigError(
            "a loss scaler skips updates on single ranks, which a rule with every, or quality: loss, has train alone: take bfloat16, or "
            "none of these"
        )


def nothing(param: torch.Tensor, sparse: bool) -> torch.Tensor:
    """The gradient that a parameter adds that has none on this rank.

    ``sparse``: whether its gradients are sparse tensors: then it is one without entries, as all ranks must bring the same kind.
    """
    if not sparse:
        return torch.zeros_like(param)
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), param.new_empty(0, *param.shape[1:]), param.shape, check_invariants=False
    ).to(param.device)


def _sparse(model: nn.Module) -> set[str]:
    inner = unwrap_model(model)
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {
        clean(f"{name}.weight" if name else "weight") for name, part in inner.named_modules() if isinstance(part, kinds) and part.sparse
    }


def _check_parameter(number: int, rule: Rule, name: str, param: nn.Parameter, sparse: bool) -> None:
    what, way_out = f"gradient_pipeline: rule {number + 1} ({rule})", "put a rule for it without compress before this one"
    if rule.apart.is_local and param.dtype.is_complex:
        raise ConfigError(
            f"{what} would have ranks move {name} alone, which is {param.dtype}: put a rule for it without every before this one"
        )
    if rule.compress is None:
        return
    if sparse and not rule.is_local:
        raise ConfigError(
            f"{what} would compress {name}, whose gradient is a sparse tensor (its module has sparse=True); put a rule with "
            f"params: {name!r} and sync: zen before it"
        )
    if not getattr(param, "ds_numel", param.numel()):
        raise ConfigError(f"{what} would compress {name}, which has no elements (its shape is {tuple(param.shape)}); {way_out}")
    if param.dtype not in _FLOATS:
        raise ConfigError(f"{what} would compress {name}, which is {param.dtype}: only float32, float16 and bfloat16 can be; {way_out}")


def _check_rule(number: int, rule: Rule, tensors: Sequence[Tensor], rules: Rules) -> None:
    what = f"gradient_pipeline: rule {number + 1} ({rule})"
    own = [tensor for tensor in tensors if tensor.rule == number]
    if not own:
        matched = [tensor for tensor in tensors if rule.matches(tensor.name)]
        if matched and "*" not in rule.params:
            first = rules[matched[0].rule]
            raise ConfigError(
                f"{what} never applies: the rules before it take all it matches, {matched[0].name} for example by ({first}); move it up"
            )
        if not matched:
            names = [tensor.name for tensor in tensors]
            near = difflib.get_close_matches(rule.params[0].strip("*"), names, 3, 0.3) or names[:3]
            raise ConfigError(f"{what} matches no parameter; there are {len(names)}, for example {', '.join(near)}")
        return
    if rule.compress is not None and rule.compress.method == "powersgd" and all(len(tensor.shape) < 2 for tensor in own):
        raise ConfigError(
            f"{what}: powersgd factors matrices, and {own[0].name} is a vector like all that the rule matches; they would travel "
            "whole: leave compress out for them, or take another method"
        )
    if rule.fusion == "espresso" and rule.compress is not None and payload_of_one_length(rule.compress.make()) is None:
        raise ConfigError(
            f"{what}: fusion espresso needs payloads of one length that anybody can add up, as topk, randomk and qsgd "
            f"make; {rule.compress.method} makes none: take one of these, or fusion cupcake"
        )
