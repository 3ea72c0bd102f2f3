"""Which gradients travel together, and in which order: every one once, in the order of the backward pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.pipeline.plan import NO_RULE, Group, Plan, Tensor, fallback, first_plan, in_order, rule_at
from gemini_ft.pipeline.rules import PLAIN, Rules, load_rules

RULES = load_rules(
    [
        {"params": "a", "compress": "topk", "fusion": "layer-wise"},
        {"params": "b", "compress": "topk", "fusion": {"groups": 3}},
        {"params": "c", "compress": "topk", "fusion": {"bucket": 100}},
        {"params": "d", "sync": "zen"},
        {"params": "e", "sync": "zen", "compress": "topk", "fusion": "cupcake"},
        {"params": "f", "fusion": "auto"},
        {"params": "g"},
    ]
)


def tensors(sizes: Sequence[int], rule: int = 0, **more: Any) -> list[Tensor]:
    return [Tensor(name=f"t{number}", shape=(size,), itemsize=4, rule=rule, **more) for number, size in enumerate(sizes)]


def names(plan: Plan) -> list[list[str]]:
    return [list(group.names) for group in plan.groups]


def test_bytes_of_a_tensor() -> None:
    assert [Tensor(name="t", shape=shape, itemsize=2, rule=0).nbytes for shape in ((), (3,), (3, 5), (0, 5))] == [2, 6, 30, 0]


@pytest.mark.parametrize(
    ("fusion", "ends"),
    [
        ("layer-wise", (1, 2, 3, 4, 5)),
        ({"groups": 2}, (2, 5)),
        ({"groups": 9}, (1, 2, 3, 4, 5)),
        ({"bucket": 80}, (2, 3, 5)),
        ({"bucket": "1GiB"}, (5,)),
        *((planned, (5,)) for planned in ("cupcake", "espresso", "auto")),  # buckets first
    ],
)
def test_fusions(fusion: Any, ends: tuple[int, ...]) -> None:
    [rule] = load_rules([{"params": "*", "fusion": fusion, **({} if fusion == "auto" else {"compress": "topk"})}])
    assert fallback(tensors([10, 10, 30, 10, 1]), rule.fusion).ends == ends


def test_a_group_waits_for_its_last_gradient() -> None:
    """Rules take turns in the backward pass: the order of groups is that of their last tensors."""
    found = [Tensor(name=f"t{number}", shape=(100,), itemsize=4, rule=number % 2) for number in range(8)]
    [first] = load_rules([{"params": "*", "fusion": {"groups": 2}}])
    [second] = load_rules([{"params": "*"}])
    plan = first_plan(found, (first, second))
    assert names(plan) == [["t0", "t2"], ["t4", "t6"], ["t1", "t3", "t5", "t7"]]
    assert plan.fusion == {0: "2 groups", 1: "1 groups"}
    assert plan.predicted == {}


def test_sparse_gradients_travel_alone() -> None:
    mixed = [
        Tensor(name="dense", shape=(9,), itemsize=4, rule=0),
        Tensor(name="sparse", shape=(9, 9), itemsize=4, rule=0, sparse=True),
        Tensor(name="other", shape=(9,), itemsize=4, rule=0),
    ]
    assert [(group.names, group.way) for group in first_plan(mixed, load_rules([{"params": "*"}])).groups] == [
        (("sparse",), "sparse"),
        (("dense", "other"), "rule"),
    ]
    assert [(group.names, group.way) for group in first_plan(mixed, load_rules([{"params": "*", "sync": "zen"}])).groups] == [
        (("dense",), "rule"),
        (("sparse",), "rule"),
        (("other",), "rule"),
    ]


def test_without_a_rule() -> None:
    assert rule_at(RULES, NO_RULE) is PLAIN
    assert rule_at(RULES, 1) is RULES[1]
    assert names(first_plan(tensors([10, 10], NO_RULE), ())) == [["t0", "t1"]]


@st.composite
def assigned(draw: st.DrawFn) -> list[Tensor]:
    count = draw(st.integers(1, 40))
    rules = st.integers(NO_RULE, len(RULES) - 1)
    without = {number for number, rule in enumerate(RULES) if rule.compress is None} | {NO_RULE}
    found = []
    for number in range(count):
        rule, shape = draw(rules), draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
        found.append(
            Tensor(
                name=f"t{number}",
                shape=shape,
                itemsize=draw(st.sampled_from([2, 4])),
                rule=rule,
                sparse=rule in without and draw(st.booleans()),
            )
        )
    return found


def check(plan: Plan, found: Sequence[Tensor], rules: Rules) -> None:
    by_name = {tensor.name: tensor for tensor in found}
    place = {tensor.name: number for number, tensor in enumerate(found)}
    assert sorted(name for group in plan.groups for name in group.names) == sorted(by_name)
    assert all(by_name[name].rule == group.rule for group in plan.groups for name in group.names)
    assert all(len(group.names) == 1 for group in plan.groups for name in group.names if by_name[name].sparse)
    assert all(list(group.names) == sorted(group.names, key=place.__getitem__) for group in plan.groups)
    ready = [max(place[name] for name in group.names) for group in plan.groups]
    assert ready == sorted(ready)
    assert set(plan.fusion) == {tensor.rule for tensor in found}
    assert all(group.way in ("rule", "sparse", "bf16") for group in plan.groups)
    assert all(rules[group.rule].fusion != "layer-wise" or len(group.names) == 1 for group in plan.groups if group.rule != NO_RULE)


@given(assigned())
def test_every_tensor_is_in_one_group_and_groups_go_in_the_order_of_their_last(found: list[Tensor]) -> None:
    check(first_plan(found, RULES), found, RULES)


@given(assigned())
def test_all_ranks_find_the_same_and_it_survives_packing(found: list[Tensor]) -> None:
    plan = first_plan(found, RULES)
    assert first_plan(list(found), RULES) == plan
    packed = json.loads(json.dumps(plan.pack()))
    assert Plan.unpack(packed) == plan


@given(assigned(), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_how_groups_were_found(found: list[Tensor], random: Any) -> None:
    groups = list(first_plan(found, RULES).groups)
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert in_order(shuffled, found) == tuple(groups)


def test_what_was_planned_survives_packing() -> None:
    plan = Plan((Group(0, ("a", "b"), "bf16"), Group(NO_RULE, ("c",))), {0: "cupcake, 1 groups", NO_RULE: "1 groups"}, {0: 0.25})
    assert Plan.unpack(json.loads(json.dumps(plan.pack()))) == plan
