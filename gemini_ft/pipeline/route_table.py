"""The routes of all rules of a pipeline, made when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from gemini_ft.compression.collective import ScopedGroups
from gemini_ft.compression.espresso_executor import OptionExecutor
from gemini_ft.compression.espresso_options import Option, Processor, options
from gemini_ft.compression.topology import Topology
from gemini_ft.hosts import host_id
from gemini_ft.pipeline.plan import Group, rule_at
from gemini_ft.pipeline.routes import Compressed, Plain, Route, Sparse, of_all_ranks
from gemini_ft.pipeline.rules import Rule, Rules, payload_of_one_length
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.builtin import Dense
from gemini_ft.sync.ring import Ring8


class Routes:
    """The routes of all rules, made when they are needed.

    Besides a rule's own there are other ways: "plain" (all-reduce), "bf16" (all-reduce in bfloat16, as torch does it), "ring8" (that ring,
    with no option given), "sparse" (all-reduce of gradients that are sparse tensors), and the options of Espresso (`option_way`).
    """

    def __init__(self, rules: Rules, group: Any) -> None:
        self._rules, self._group = rules, group
        self._routes: dict[tuple[int, str], Route] = {}
        self._schemes: dict[int, Callable[[], Scheme]] = {}
        self._still = False

    def of(self, group: Group) -> Route:
        key = group.rule, group.way
        if key not in self._routes:
            self._routes[key] = self.fresh(*key)
            if self._still:
                self._routes[key].hold_still()
        return self._routes[key]

    def fresh(self, rule: int, way: str) -> Route:
        match way:
            case "rule":
                return self._by_rule(rule)
            case "plain":
                return Plain()
            case "bf16":
                return Plain(torch.bfloat16)
            case "ring8":
                return Plain(scheme=Ring8())
            case "sparse":
                return Sparse(Dense)
            case _:
                return self._by_option(rule_at(self._rules, rule), way)

    def _by_rule(self, number: int) -> Route:
        rule = rule_at(self._rules, number)
        if rule.is_plain:
            return Plain(rule.cast, takes_sparse=rule.cast is None)
        if number not in self._schemes:
            scheme = rule.sync.make()  # only one that adapts itself is made anew each time: a hierarchical one has process groups
            self._schemes[number] = rule.sync.make if isinstance(scheme, Auto) else lambda: scheme
        make = self._schemes[number]
        if rule.compress is not None:
            return Compressed(rule.compress.make(), make() if rule.is_sparse else None)
        return Plain(scheme=make()) if rule.is_whole else Sparse(make)

    def _by_option(self, rule: Rule, way: str) -> Route:
        """A route for one option of a rule's compression; see `option_way`."""
        kind, _, number = way.partition(" ")
        known = _all_options()
        if kind != "option" or not number.isdigit() or int(number) >= len(known) or rule.compress is None:
            raise ValueError(
                f"way {way!r} of a rule with {rule}: must be rule, plain, bf16, ring8, sparse, or an option up to {len(known) - 1}"
            )
        reducer = rule.compress.make()
        inner = payload_of_one_length(reducer)
        assert inner is not None
        executor = OptionExecutor(inner, known[int(number)], self.topology, error_feedback=inner is not reducer)
        return Compressed(executor, scoped=self.scoped)

    def all_plain(self, groups: Sequence[Group]) -> bool:
        """Whether one all-reduce each is all that these groups need."""
        return all(
            group.way in ("plain", "bf16") or (group.way == "rule" and rule_at(self._rules, group.rule).is_plain) for group in groups
        )

    @cached_property
    def topology(self) -> Topology:
        """The machines, as hosts name themselves (``GEMINI_HOST_ID``, or the machine's own name). Collective.

        Ranks are taken to be one machine each where those of a machine are no neighbours, or machines have different numbers of them.
        """
        hosts = of_all_ranks(host_id(), self._group)
        runs = [len(list(run)) for _, run in groupby(hosts)]
        if len(set(runs)) == 1 and len(runs) == len(set(hosts)):
            return Topology(machines=len(runs), ranks=runs[0])
        return Topology(machines=len(hosts), ranks=1)

    @cached_property
    def scoped(self) -> ScopedGroups | None:
        """Process groups within machines and between them, where there are both. Collective."""
        return None if self.topology.flat_only else ScopedGroups.of(self.topology.ranks, self._group, time_limit(self._group))

    def keep(self, groups: Sequence[Group]) -> None:
        """Forgets the ways that none of these groups takes, with all that they remember."""
        used = {(group.rule, group.way) for group in groups}
        self._routes = {key: route for key, route in self._routes.items() if key in used}

    def forget(self, names: Collection[str]) -> None:
        for route in self._routes.values():
            route.forget(names)

    def choices(self) -> dict[str, Any]:
        """Findings and decisions of the routes, alike on all ranks, as plain data."""
        found = {f"{rule}/{way}": route.choices() for (rule, way), route in sorted(self._routes.items())}
        return {key: choices for key, choices in found.items() if choices}

    def hold_still(self) -> None:
        """Keeps tensors of the state where they are from now on, for the sake of copies."""
        if not self._still:
            self._still = True
            for route in self._routes.values():
                route.hold_still()

    def state_dict(self) -> dict[str, Any]:
        """The state by "rule/way"; rules without state are left out."""
        states = {f"{rule}/{way}": route.state_dict() for (rule, way), route in sorted(self._routes.items())}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._routes.clear()
        self._schemes = {rule: make for rule, make in self._schemes.items() if not make().state_dict()}  # others begin anew
        for key, saved in state.items():
            rule, _, way = key.partition("/")
            self.of(Group(int(rule), (), way)).load_state_dict(saved)


def time_limit(group: Any) -> timedelta:
    """The time for which collectives of a group wait for a peer."""
    limit: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return limit


def option_way(option: Option) -> str:
    """The name of an option of Espresso's decision tree, as the way of a group."""
    return f"option {_all_options().index(option)}"


def _all_options() -> tuple[Option, ...]:
    return options((Processor.GPU, Processor.CPU))
