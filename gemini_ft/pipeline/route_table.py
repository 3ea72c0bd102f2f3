"""The routes of all rules of a pipeline, made when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from gemini_ft.compression.collective import ScopedGroups
from gemini_ft.compression.topology import Topology
from gemini_ft.pipeline.plan import Group, rule_at
from gemini_ft.pipeline.routes import Plain, Route, Sparse, by_option, route_of, scheme_maker, topology_of
from gemini_ft.pipeline.rules import Rules
from gemini_ft.sync.base import Scheme
from gemini_ft.sync.builtin import Dense


class Routes:
    """The routes of all rules, made when they are needed.

    Besides a rule's own there are other ways: "plain" (all-reduce), "bf16" (all-reduce in bfloat16, as torch does it), "sparse"
    (all-reduce of gradients that are sparse tensors), and the options of Espresso (`gemini_ft.pipeline.routes.option_way`).

    Args:
        rules: of the pipeline.
        group: of the ranks; None: one rank.
    """

    def __init__(self, rules: Rules, group: Any) -> None:
        self._rules, self._group = rules, group
        self._routes: dict[tuple[int, str], Route] = {}
        self._schemes: dict[int, Callable[[], Scheme]] = {}
        self._still = False

    def of(self, group: Group) -> Route:
        """The route that a group takes."""
        key = group.rule, group.way
        if key not in self._routes:
            self._routes[key] = self.fresh(*key)
            if self._still:
                self._routes[key].hold_still()
        return self._routes[key]

    def fresh(self, rule: int, way: str) -> Route:
        """A route without any memory."""
        match way:
            case "rule":
                return route_of(rule_at(self._rules, rule), self._scheme_maker(rule))
            case "plain":
                return Plain()
            case "bf16":
                return Plain(torch.bfloat16)
            case "sparse":
                return Sparse(Dense)
            case _:
                return by_option(rule_at(self._rules, rule), way, self.topology, self.scoped)

    def _scheme_maker(self, rule: int) -> Callable[[], Scheme]:
        if rule not in self._schemes:
            self._schemes[rule] = scheme_maker(rule_at(self._rules, rule))
        return self._schemes[rule]

    def all_plain(self, groups: Sequence[Group]) -> bool:
        """Whether one all-reduce each is all that these groups need."""
        return all(
            group.way in ("plain", "bf16") or (group.way == "rule" and rule_at(self._rules, group.rule).is_plain) for group in groups
        )

    @cached_property
    def topology(self) -> Topology:
        """The machines and the ranks of each. Collective."""
        return topology_of(self._group)

    @cached_property
    def scoped(self) -> ScopedGroups | None:
        """Process groups within machines and between them, where there are both. Collective."""
        return None if self.topology.flat_only else ScopedGroups.of(self.topology.ranks, self._group, time_limit(self._group))

    def keep(self, groups: Sequence[Group]) -> None:
        """Forgets the ways that none of these groups takes, with all that they remember."""
        used = {(group.rule, group.way) for group in groups}
        self._routes = {key: route for key, route in self._routes.items() if key in used}

    def forget(self, names: Collection[str]) -> None:
        """Forgets all that is kept of these parameters' gradients."""
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
        for key, saved in state.items():
            rule, _, way = key.partition("/")
            self.of(Group(int(rule), (), way)).load_state_dict(saved)


def time_limit(group: Any) -> timedelta:
    """The time for which collectives of a group wait for a peer."""
    limit: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return limit
