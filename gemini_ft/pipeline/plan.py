"""The plan that all ranks have agreed on: which gradients travel together, and in which order. Pure.

The order is that of the backward pass: a group travels when the last of its gradients is there, and not before the group before
it, so that all ranks issue the same collectives in the same order whatever their timing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemini_ft.compression.timeline import Grouping, buckets, even, layer_wise
from gemini_ft.pipeline.rules import DEFAULT_FUSION, PLAIN, Buckets, Fusion, Groups, Rule, Rules

NO_RULE = -1


@dataclass(frozen=True)
class Tensor:
    """A parameter whose gradient travels.

    Attributes:
        name: as in ``model.named_parameters()``.
        shape: its shape.
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


@dataclass(frozen=True)
class Group:
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
        return {
            "groups": [[group.rule, list(group.names), group.way] for group in self.groups],
            "fusion": {str(rule): label for rule, label in self.fusion.items()},
            "predicted": {str(rule): seconds for rule, seconds in self.predicted.items()},
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Plan:
        """Makes a plan of the plain data that `pack` gave."""
        groups = tuple(Group(rule, tuple(names), way) for rule, names, way in packed["groups"])
        fusion = {int(rule): label for rule, label in packed["fusion"].items()}
        return cls(groups, fusion, {int(rule): seconds for rule, seconds in packed["predicted"].items()})


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
    return alone + grouped(number, dense, fallback(dense, rule.fusion)) if dense else alone


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
