"""Averages named gradients over ranks, group by group, as they become ready.

The heart of every integration: `GradientSynchronizer` hands it the gradients of a backward pass one by one, DeepSpeed's reduction
hands it buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_ft.compression.base import Turn
from gemini_ft.errors import ConfigError, RecoveryError, StateError
from gemini_ft.pipeline.control import Controls
from gemini_ft.pipeline.failures import Failures
from gemini_ft.pipeline.lanes import GroupInFlight, Lanes
from gemini_ft.pipeline.plan import NO_RULE, Group, Plan, first_plan
from gemini_ft.pipeline.plan import Tensor as Described
from gemini_ft.pipeline.route_table import Routes, time_limit
from gemini_ft.pipeline.routes import Compressed, Gradients, of_all_ranks
from gemini_ft.pipeline.rules import Rules
from gemini_ft.pipeline.telemetry import Telemetry

Take: TypeAlias = Callable[[Tensor], None]
"""A callback that takes an average as soon as it has been computed, on another thread."""


@dataclass
class _Arrival:
    gradient: Tensor
    take: Take


class Averager:
    """Averages the gradients of one model.

    Args:
        tensors: what there is, in an order in which gradients may become ready; the same on all ranks.
        group: of the ranks; None: there is one rank only. Nobody else may use it.
        control: of the same ranks and on CPUs, by which ranks are found that have been killed.

    Attributes:
        step: steps that are over, the same on all ranks.
        computing: seconds of the last one without averages that were waited for; 0: not known.
        is_apart: whether averages begin after the last gradient of a step, so that they take nothing from what is computed until then.
    """

    def __init__(self, tensors: Sequence[Described], rules: Rules, group: Any, control: Any, device: torch.device) -> None:
        self.tensors, self.rules, self.group = tensors, rules, group
        self.world, self.rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
        self._agree()
        self.routes = Routes(rules, group)
        self._device = device
        self.plan = first_plan(tensors, rules)
        self.telemetry = Telemetry(rules)
        self.controls = Controls(rules, tensors, self.world)
        self.step, self.computing, self.is_apart = 0, 0.0, False
        self.rounds = 0  # of averaging; more than one per step where buckets come one by one
        self._lanes = Lanes(device, self._broken)
        self._failures = Failures(group, control, dist.get_process_group_ranks(control) if control is not None else ())
        self._completed = 0  # steps since the beginning of this object, whatever has been loaded since
        self._begun_at: int | None = None  # their number when what `begin_average` has set on its way was begun; None: nothing is
        self._arrived: dict[str, _Arrival | None] = {}  # None: no rank has it in this step
        self._launched = 0  # groups of the plan
        self._awaited: set[str] | None = None  # of the next one; None: nothing of the step has come
        self._jobs: list[tuple[Group, GroupInFlight]] = []
        self._ready_at = 0.0  # the last gradient of the step that came by itself
        self._ended_at: float | None = None  # the step before
        self._blocked = 0.0  # seconds of this step that `average` took
        self._scale = 1.0
        self.scale: Callable[[], float] = lambda: 1.0  # of the loss, as a scaler has it at the moment
        self.on_begin: Callable[[], None] = lambda: None  # before the first gradient of a step is taken

    @property
    def may_part(self) -> bool:
        """Whether ranks may come to train alone, by ``quality: loss``."""
        return any(rule.quality == "loss" for rule in self.rules)

    @property
    def plan(self) -> Plan:
        """The groups in the order in which they travel. Another plan may be set between steps."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._plan_digest = blake2b(repr(plan.groups).encode(), digest_size=8).hexdigest()
        self._directly = self._device.type == "cpu" and self.world > 1 and self.routes.all_plain(plan.groups)

    # -- gradients one by one

    def ready(self, name: str, gradient: Tensor, take: Take) -> None:
        """Takes a gradient that is final; ``take`` is called with its average.

        Raises StateError: it came before, and the step is not over yet.
        """
        self._lanes.check()
        if name in self._arrived:
            raise StateError(
                f"the gradient of {name} is ready a second time in one step: run all but the last backward of a step inside no_sync(), "
                "and call synchronize() before the next step. If there is only one backward, the module is used more than once under "
                "torch.utils.checkpoint: give it use_reentrant=False"
            )
        if not any(self._arrived.values()):
            self.on_begin()
            self._scale = self.scale()
        self._arrive(name, _Arrival(gradient, take))

    def absent(self, name: str) -> None:
        """Records that no rank has this gradient in this step: nothing travels for it, and its memory stays as it is."""
        self._arrive(name, None)

    def _arrive(self, name: str, arrival: _Arrival | None) -> None:
        self._arrived[name], self._ready_at = arrival, time.perf_counter()
        if self._awaited is None:
            self._awaited = self._next_awaited()
        self._awaited.discard(name)
        is_held = self.is_apart and len(self._arrived) < len(self.tensors)
        while not self._awaited and self._launched < len(self._plan.groups) and not is_held:
            self._launch(self._plan.groups[self._launched])
            self._launched += 1
            self._awaited = self._next_awaited()

    def _next_awaited(self) -> set[str]:
        groups = self._plan.groups[self._launched : self._launched + 1]
        return {name for group in groups for name in group.names if name not in self._arrived}

    def has(self, name: str) -> bool:
        return name in self._arrived

    def missing(self) -> list[str]:
        return [tensor.name for tensor in self.tensors if tensor.name not in self._arrived]

    def wait(self) -> None:
        """Returns when everything that is under way has been averaged; raises any error, of this rank or of another one."""
        for _, job in self._jobs:
            self._lanes.wait(job, self._anxious)

    def failed(self, error: BaseException) -> BaseException:
        """Tells the other ranks of an error of the training thread, after which they would wait for this one's gradients.

        Returns what is to be raised: another rank's error, where this one only follows from it.
        """
        return self._failures.resolved(error, self._number)

    @property
    def _number(self) -> int:
        """The number, alike on all ranks, of the step whose averages may be under way."""
        return self._completed if self._begun_at is None else self._begun_at

    def _anxious(self) -> BaseException | None:
        return self._failures.heard(self._number)

    def broken(self, error: BaseException) -> BaseException:
        """Ends averaging for good after a collective of the training thread, in which others may wait, has failed; returns as `failed`."""
        return self._lanes.fail(error)

    def _broken(self, error: BaseException, is_computing: bool) -> BaseException:
        found = self._failures.resolved(error, self._number, is_computing)
        self._failures.abort()
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the step have come; `wait` returns when they have been averaged."""
        return bool(self._arrived) and self._launched == len(self.plan.groups)

    def step_over(self, begun: float | None = None) -> None:
        """Ends a step, all gradients of which have been averaged; its forward pass began at ``begun`` (``time.perf_counter()``)."""
        last = max((job.ended for _, job in self._jobs), default=0.0)
        blocked = self._blocked + (max(0.0, last - self._ready_at) if self._arrived else 0.0)
        seconds = last - begun if begun is not None and self._jobs else 0.0
        self.telemetry.add(self.step, seconds, blocked, [(group, job.figures) for group, job in self._jobs])
        now = time.perf_counter()
        self.computing = max(0.0, now - self._ended_at - blocked) if self._ended_at is not None else 0.0
        self.controls.note([(group, job.figures) for group, job in self._jobs], self.computing)
        self._ended_at = now
        self._forget_step()
        self.step += 1
        self.rounds += 1

    def drop(self) -> None:
        """Waits for averages under way, and begins the step anew, as if none of its gradients had come."""
        self.wait()
        self._forget_step()

    def _forget_step(self) -> None:
        self._arrived, self._launched, self._awaited, self._jobs, self._blocked = {}, 0, None, [], 0.0
        self._completed += 1

    def beside(self, gradients: Gradients, take: Callable[[dict[str, Tensor]], None]) -> None:
        """Averages gradients that are not part of the plan, by all-reduce; the same ones, at the same point, on all ranks."""
        self._jobs.append(self._submitted(Group(NO_RULE, tuple(gradients), "plain"), gradients, take))

    # -- gradients that an engine has gathered

    def average(self, gradients: Gradients) -> dict[str, Tensor]:
        """The averages of gradients of the same names on all ranks, in the groups of the plan as far as they are there. Collective."""
        return self.begin_average(gradients)()

    def begin_average(self, gradients: Gradients) -> Callable[[], dict[str, Tensor]]:
        """Sets gradients on their way as `average` does; what is returned waits for the averages, and may only be called once."""
        self.on_begin()
        begin, means = time.perf_counter(), dict[str, Tensor]()
        groups = [group._replace(names=tuple(name for name in group.names if name in gradients)) for group in self.plan.groups]
        self._scale = self.scale()
        jobs = [self._submitted(group, {name: gradients[name] for name in group.names}, means.update) for group in groups if group.names]
        self._blocked += time.perf_counter() - begin
        self.rounds += 1

        def finish(held: Gradients = gradients) -> dict[str, Tensor]:  # until then a stream of the lanes may have to read them
            begin = time.perf_counter()
            for _, job in jobs:
                self._lanes.wait(job, self._anxious)
            self._begun_at = None
            self._jobs += jobs
            self._blocked += time.perf_counter() - begin
            return means

        self._begun_at = self._completed
        return finish

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Memories of all rules, plan and counters; tensors are not copied, and stay where they are from the first call on."""
        self.routes.hold_still()
        order = [tensor.name for tensor in self.tensors]
        rules = [rule.pack() for rule in self.rules]
        return {
            "step": self.step,
            "rounds": self.rounds,
            "rules": rules,
            "order": order,
            "plan": self.plan.pack(),
            "routes": self.routes.state_dict(),
            "controls": self.controls.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. Collective.

        Raises StateError: it is of other parameters or rules. Raises RecoveryError: it is of other steps or plans on other ranks.
        """
        common = [state[key] for key in ("step", "rounds", "order", "plan")]
        everybody = of_all_ranks((self._problem(state), common), self.group)
        problems = [problem for problem, _ in everybody]
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise StateError(problem if set(problems) == {problem} else f"rank {self._global(rank)}: {problem}")
        if odd := [rank for rank, (_, other) in enumerate(everybody) if other != everybody[0][1]]:
            steps = [other[0] for _, other in everybody]
            raise RecoveryError(
                f"the gradient pipeline's state is of different steps or plans on ranks {self._global(0)} and {self._global(odd[0])} "
                f"(steps {steps[0]} and {steps[odd[0]]}); load on all ranks what was saved at one step, or resume from an older snapshot"
            )
        known = {tensor.name: tensor for tensor in self.tensors}
        self.tensors = [known[name] for name in state["order"]]
        self.step, self.rounds, self.plan = state["step"], state["rounds"], Plan.unpack(state["plan"])
        self.routes.load_state_dict(state["routes"])
        self.controls.load_state_dict(state.get("controls", {}))
        self._ended_at = None

    def _global(self, rank: int) -> int:
        """The number of a rank of the group among all ranks."""
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank

    def _problem(self, state: Mapping[str, Any]) -> str | None:
        """The reason why a state cannot be loaded, or None."""
        if (rules := [rule.pack() for rule in self.rules]) != state["rules"]:
            return (
                f"the gradient pipeline's state is of other rules: it has {state['rules']}, this job {rules}; go on with those, or leave "
                "the state out and lose its residuals"
            )
        if odd := sorted({tensor.name for tensor in self.tensors} ^ set(state["order"])):
            return f"the gradient pipeline's state is of other parameters: {', '.join(odd[:5])} are on one side only"
        return self.controls.problem(state.get("controls", {}), self.world)

    def common(self) -> dict[str, Any]:
        """State that is the same on all ranks as long as nothing is wrong, as plain data."""
        choices = [self.routes.choices(), self.controls.common()]
        return {"steps": self.step, "rounds": self.rounds, "plan": self._plan_digest, "choices": choices}

    def close(self) -> None:
        """Ends the threads, and forgets the step."""
        self._lanes.close()
        self._failures.forget()
        self._forget_step()

    # -- inside

    def _launch(self, group: Group) -> None:
        arrivals = {name: arrival for name in group.names if (arrival := self._arrived[name]) is not None}
        if not arrivals:
            return

        def take(means: Mapping[str, Tensor]) -> None:
            for name, mean in means.items():
                arrivals[name].take(mean)

        gradients = {name: arrival.gradient for name, arrival in arrivals.items()}
        self._jobs.append(self._submitted(group._replace(names=tuple(arrivals)), gradients, take))

    def _submitted(self, group: Group, gradients: Gradients, take: Callable[[dict[str, Tensor]], None]) -> tuple[Group, GroupInFlight]:
        route = self.routes.of(group)
        if (control := self.controls.of(group.rule)) is not None and isinstance(route, Compressed):
            route.steer(control)
        turn = Turn(step=self.rounds, rank=self.rank, world=self.world, update=self.step)
        job = GroupInFlight(route.average(gradients, turn, self.group, self._scale), route.single and self.world > 1, take)
        job.figures.dense = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())
        if self._directly:
            self._lanes.submit_directly(job)
        else:
            self._lanes.submit(job)
        return group, job

    def _agree(self) -> None:
        """Compares the options of all ranks. Raises ConfigError: they differ; the first difference is named. On all ranks."""
        own = [repr(rule) for rule in self.rules], [(t.name, t.shape, t.itemsize, t.sparse) for t in self.tensors]
        everybody = of_all_ranks(own, self.group)
        for rank, (rules, tensors) in enumerate(everybody):
            if rules != everybody[0][0]:
                raise ConfigError(f"gradient_pipeline differs between ranks: rank 0 has {everybody[0][0]}, rank {rank} has {rules}")
            if tensors != everybody[0][1]:
                raise ConfigError(f"parameters differ between ranks: {_first_difference(rank, everybody[0][1], tensors)}")


def own_group(ranks: list[int], group: Any, backend: str | None = None) -> Any:
    """A process group of these ranks for an averager, beside the collectives of the training thread. Collective.

    ``group``: as long as this one waits, so does the new one; None: the default group.
    """
    whole: Any = group if group is not None else dist.group.WORLD
    # Where not all ranks take part torch names groups by how many there are: it must be as many on all that do, and it must not shrink.
    return dist.new_group(ranks, time_limit(whole), backend, use_local_synchronization=len(ranks) < dist.get_world_size())


def _first_difference(rank: int, first: Sequence[Any], other: Sequence[Any]) -> str:
    for one, two in zip(first, other, strict=False):
        if one != two:
            return f"rank 0 has {one[0]} of shape {one[1]} where rank {rank} has {two[0]} of shape {two[1]}"
    return f"rank 0 has {len(first)} of them, rank {rank} {len(other)}"
