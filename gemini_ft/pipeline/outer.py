"""Parameters that every rank trains alone and that all ranks average every few steps: local SGD, and DiLoCo with an outer optimizer.

    gradient_pipeline:
      - {params: "*", every: 30, outer: {lr: 0.7, momentum: 0.9, nesterov: true}}

Between two averages nothing of these parameters travels. Then a rank's pseudo-gradient is the way from where all ranks were together last,
the anchor, to where it is now; its average over ranks, which a rule's ``compress`` makes smaller as it does gradients, is what the outer
optimizer steps with from the anchor, and all ranks go on from there (McMahan et al., "Communication-Efficient Learning of Deep Networks
from Decentralized Data", algorithm 1; Douillard et al., "DiLoCo", algorithm 1). Anchors, momenta and residuals are part of every
snapshot, and so are each rank's own parameters and optimizer state, which differ between two averages. With ``within: host`` the ranks
of a host average their gradients in each step, and the first of them averages for its host.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_stack
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from xxhash import xxh3_64_hexdigest

from gemini_ft.errors import StateError
from gemini_ft.pipeline.body import Body
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.rules import Outer, Rules
from gemini_ft.pipeline.telemetry import Step
from gemini_ft.state.optimizer_steps import weak_hook
from gemini_ft.state.replicas import tensor_digest

_PLAIN = Outer(lr=1.0, momentum=0.0, nesterov=False)
_HOOKED = "wrapper", Optimizer.profile_hook_step.__code__.co_filename  # the function around each step(), by which torch calls hooks


_NEVER_ALONE = {  # kind of optimizer -> why no rank can train alone with it
    "LBFGS": "has the loss evaluated several times in a step, and each would count as a step of a rule with every",
    "ZeroRedundancyOptimizer": "sends each parameter from the one rank that updates it to all others in every step",
}


def refuse_for_ranks_apart(optimizer: Optimizer) -> None:
    """Refuses an optimizer with which no rank can train alone.

    Raises:
        StateError: it is one.
    """
    for name in (kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _NEVER_ALONE):
        options = optimizer.param_groups[0]
        if name == "LBFGS" and options.get("max_iter") == 1 and options.get("line_search_fn") is None:
            continue  # it evaluates the loss once
        raise StateError(
            f"an optimizer of the kind {name} {_NEVER_ALONE[name]}: leave every, or quality: loss, out of the gradient pipeline, or take "
            "another optimizer"
        )


@dataclass
class _Delayed:
    """An average that is taken some steps after it was begun.

    Attributes:
        step: after whose update it is taken.
        sent: where this rank's parameters were when it was begun.
        finish: waits for it; None: it is there.
        means: it, once it is there.
    """

    step: int
    sent: dict[str, torch.Tensor]
    finish: Callable[[], dict[str, torch.Tensor]] | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)

    def settle(self) -> None:
        if self.finish is not None:
            self.means, self.finish = self.finish(), None


class OuterSteps(Body):
    """The outer steps of one model, whose rules all say ``every``. Constructing it is collective.

    An outer step follows the last update of the step in which it is due, within ``optimizer.step()``, so that whatever comes after that
    sees its result; where parameters that have a gradient are not updated, it comes with the next forward pass.

    Args:
        model: whose forward passes are watched.
        parameters: by name; of floats.
        tensors: the same, as rules see them.
        group: of the ranks that train apart, or of the first of each host, for the averages alone; None: one such rank, or not this one.
        control: of all ranks that have the same parameters, and on CPUs, for what the training thread asks; None: one rank.
        host: of the ranks of this host, which train together; None: each rank trains alone.
        hosts: of each rank, the number of its host; (): each rank trains alone.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        tensors: Sequence[Tensor],
        rules: Rules,
        *,
        group: Any,
        control: Any,
        device: torch.device,
        host: Any = None,
        hosts: Sequence[int] = (),
    ) -> None:
        self._host, self._hosts = host, list(hosts)
        tensors = [tensor.moved() for tensor in tensors]
        super().__init__(model, parameters, tensors, rules, group=group, control=control, device=device, profile_steps=0)
        self._rules = {tensor.name: rules[tensor.rule] for tensor in tensors}
        self._turns = _turns(tensors, rules)
        self._anchors: dict[str, torch.Tensor] = {}  # from the first step on: weights may be loaded until then
        self._momenta: dict[str, torch.Tensor] = {}
        self._first = ""  # a digest of the anchors when they were set
        self._steps = self._updates = self._updates_before = 0  # the last: when the present step was counted
        self._due: set[str] = set()
        self._awaited: set[str] | None = None  # of those that are due, the ones whose update is still to come; None: none has come
        self._owned: set[str] = set()  # by any optimizer that has stepped
        self._trained: set[str] = set()  # have been updated since they were averaged
        self._stepping: weakref.ref[Optimizer] | None = None  # the one whose step() is under way, of those that have any of the parameters
        self._has_counted = False  # a step within it
        self._freezes = any(param.requires_grad for param in self._parameters.values())  # no: parts of masters, which none can freeze
        self._delayed: list[_Delayed] = []  # the last one may be under way
        self._before: dict[str, Any] = {}  # the averager's state when that one was begun
        self._handles = [
            register_optimizer_step_pre_hook(weak_hook(self._step_begins)),
            register_optimizer_step_post_hook(weak_hook(self._updated)),
        ]

    @property
    def names(self) -> set[str]:
        """Parameters of which this rank has any part."""
        return set(self._parameters)

    def stepped(self) -> None:
        """Counts a step, whose update comes now. Raises StateError: it is the second one within one call of an optimizer."""
        if self._under_way is not None and self._has_counted:
            raise StateError(f"an optimizer {_NEVER_ALONE['LBFGS']}: take another optimizer, or leave every, or quality: loss, out")
        self._has_counted = self._under_way is not None
        if not self._anchors:
            self._begin({name: _wide(param).clone() for name, param in self._parameters.items()})
        self._steps += 1
        self._updates_before = self._updates
        self._due |= {name for name, turn in self._turns.items() if self._steps % (self._rules[name].every or 1) == turn}
        self._awaited = None

    def _begin(self, anchors: dict[str, torch.Tensor]) -> None:
        self._anchors = anchors
        self._momenta = {name: torch.zeros_like(anchor) for name, anchor in anchors.items() if self._outer(name).momentum}
        self._first = xxh3_64_hexdigest(" ".join(map(tensor_digest, anchors.values())).encode())
        with self._explaining():
            self._drift.begin()

    @property
    def _under_way(self) -> Optimizer | None:
        """The optimizer whose step() is under way, if it still exists."""
        return self._stepping() if self._stepping is not None else None

    def _outer(self, name: str) -> Outer:
        return self._rules[name].outer or _PLAIN

    def _own(self, optimizer: Optimizer) -> set[str]:
        return {name for group in optimizer.param_groups for param in group["params"] if (name := self._names.get(id(param)))}

    def _is_nested(self) -> bool:
        """Whether the step() under way was called by another one with any of the parameters: another optimizer's, or a derived class's."""
        return any(map(self._own, _steps_under_way()[1:]))

    def _note_trained(self, own: set[str]) -> None:
        self._trained |= {name for name in own if self._parameters[name].grad is not None}

    def _step_begins(self, optimizer: Optimizer) -> None:
        if not (own := self._own(optimizer)):
            return
        refuse_for_ranks_apart(optimizer)
        self._note_trained(own)  # it may make gradients None
        if not self._is_nested():
            self._stepping, self._has_counted = weakref.ref(optimizer), False
            self._owned |= own

    def _updated(self, optimizer: Optimizer) -> None:
        if not (own := self._own(optimizer)):
            return
        self._note_trained(own)  # gradients may have come from a closure
        if self._is_nested():  # what has called it may change parameters after it
            return
        self._stepping = None
        self._updates += 1
        if not (due := self._due.union(*(each.sent for each in self._ripe))):
            return
        if self._awaited is None:  # in the first step it is not known which parameters no optimizer has
            known = due if self._steps == 1 else due & self._owned
            self._awaited = {name for name in known if self._parameters[name].grad is not None}
        self._awaited -= own
        if not self._awaited:
            self.catch_up()

    def updated(self) -> bool:
        """Records an update of all parameters, where torch's hooks see none: an engine has other tensors updated. Returns as `catch_up`."""
        self._updates += 1
        self._trained.update(self._parameters)
        return self.catch_up()

    @property
    def _ripe(self) -> list[_Delayed]:
        return [each for each in self._delayed if each.step <= self._steps]

    @torch.no_grad()
    def catch_up(self) -> bool:
        """Makes the outer steps that are due, and begins those that are delayed; returns whether there were any. Collective then."""
        if self._stepping is not None and not _steps_under_way():  # it has raised an exception
            self._stepping = None
        if not (self._due or self._ripe):
            return False
        with self._telling():
            self.settle_delayed()
            for each in self._ripe:
                self._delayed.remove(each)
                self._step_with(self._of_host(each.means, each.sent), each.sent)
            names = self._due - self._frozen()
            self._due, self._awaited, self._trained = set(), None, self._trained - names
            if at_once := {name for name in names if not self._rules[name].delay}:
                self._step_with(self._of_host(self._begun(at_once)(), at_once), {})
            for delay in sorted({self._rules[name].delay for name in names - at_once}):
                self._begin_late(
                    _Delayed(self._steps + delay, {name: self._where(name) for name in names if self._rules[name].delay == delay})
                )
        self.step_over()
        return True

    def settle_delayed(self) -> None:
        """Waits for an average that is under way: the averager's state is that of a moment only where none is."""
        for each in self._delayed:
            each.settle()
        self._before = {}

    def _where(self, name: str) -> torch.Tensor:
        return _wide(self._parameters[name]).clone()

    def _begin_late(self, average: _Delayed) -> None:
        """Begins an average; no other one is under way."""
        self.settle_delayed()
        self._before = _copied(self.averager.state_dict())
        average.finish = self._begun(average.sent, average.sent)
        self._delayed.append(average)

    def _begun(
        self, names: Collection[str], sent: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Callable[[], dict[str, torch.Tensor]]:
        """Sets on its way what this rank has moved; of a host, its first rank does so."""
        leads = self._host is None or self._host.rank() == 0
        return self.averager.begin_average({name: self._moved(name, sent.get(name)) for name in names} if leads else {})

    def _of_host(self, means: dict[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
        """The averages that the first rank of the host has got. Collective within the host."""
        if self._host is None:
            return means
        found = {}
        for name, anchor in self._anchors.items():
            if name in names:
                mean = means.get(name)  # in 16 bits where it has travelled so
                found[name] = torch.empty(anchor.shape, dtype=anchor.dtype, device=anchor.device) if mean is None else mean.to(anchor.dtype)
                dist.broadcast(found[name], group=self._host, group_src=0)
        return found

    def _step_with(self, means: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
        """Steps from the anchors; what a rank has moved since it sent what is averaged is left to the next period."""
        for name, mean in means.items():
            anchor, outer, param = self._anchors[name], self._outer(name), self._parameters[name]
            if outer.momentum:
                momentum = self._momenta[name].mul_(outer.momentum).add_(mean)
                mean = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
            anchor.sub_(mean, alpha=outer.lr)
            param.copy_(_wide(param) + (anchor - sent[name]) if name in sent else anchor)

    def _frozen(self) -> set[str]:
        """Parameters due that are frozen, on all ranks, and that none has trained since the last average. Collective if any is frozen."""
        frozen = sorted(name for name in self._due if self._freezes and not self._parameters[name].requires_grad)
        trained = torch.tensor([name in self._trained for name in frozen], dtype=torch.uint8)
        if frozen and self._control is not None:
            dist.all_reduce(trained, dist.ReduceOp.MAX, group=self._control)
        return {name for name, is_trained in zip(frozen, trained.tolist(), strict=True) if not is_trained}

    def _moved(self, name: str, sent: torch.Tensor | None) -> torch.Tensor:
        """The pseudo-gradient: where all ranks began this period, in the values that the parameter's dtype has, less where this one is.

        ``sent``: where it was instead.
        """
        param = self._parameters[name].detach()
        return _wide(self._anchors[name].to(param.dtype)) - (_wide(param) if sent is None else sent)

    def _common(self) -> dict[str, Any]:
        return {**super()._common(), "first weights": self._first, "local steps": self._steps, "updates": self._updates_before}

    def state_dict(self) -> dict[str, Any]:
        """As `Body.state_dict`, with the anchors, the momenta and the number of local steps."""
        own = {
            "anchors": self._anchors,
            "momenta": self._momenta,
            "due": sorted(self._due),
            "trained": sorted(self._trained),
            "owned": sorted(self._owned),
        }
        counts = {"steps": self._steps, "updates": self._updates, "before": self._updates_before}
        counters = [self.averager.step, self.averager.rounds]
        delayed = {
            str(at): {"step": each.step, "sent": each.sent, "means": each.means, "is there": each.finish is None, "counters": counters}
            for at, each in enumerate(self._delayed)
        }
        return {**super().state_dict(), **own, **counts, "first": self._first, "hosts": self._hosts, "delayed": delayed}

    def _averager_state(self) -> dict[str, Any]:
        """The state when an average under way was begun, as threads are changing it now: resumed, that is begun anew from where it was."""
        is_under_way = bool(self._delayed) and self._delayed[-1].finish is not None
        return self._before if is_under_way else super()._averager_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; see `Body.load_state_dict`."""
        if (hosts := state.get("hosts", [])) != self._hosts:
            raise StateError(
                f"ranks of a host train together (within: host), and they were divided among hosts as {hosts}, now as {self._hosts}: start "
                "them in the same order, with as many on each host"
            )
        then = self._steps, self._updates, self._updates_before, self._first
        # They are compared between ranks while the rest is loaded.
        self._steps, self._updates, self._updates_before, self._first = state["steps"], state["updates"], state["before"], state["first"]
        try:
            super().load_state_dict(state)
        except BaseException:
            self._steps, self._updates, self._updates_before, self._first = then
            raise
        self._due, self._trained, self._owned = {*state["due"]}, {*state["trained"]}, {*state["owned"]}
        self._awaited = self._stepping = None
        self._delayed = []
        self._anchors, self._momenta = self._placed(state["anchors"]), self._placed(state["momenta"])
        for each in state.get("delayed", {}).values():
            average = _Delayed(each["step"], self._placed(each["sent"]), means=self._placed(each["means"]))
            if each["is there"]:
                self._delayed.append(average)
            else:
                self._begin_late(average)
                self.averager.step, self.averager.rounds = each["counters"]

    def _placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors where the parameters of their names are."""
        return {name: tensor.to(self._parameters[name].device, copy=True) for name, tensor in tensors.items()}

    def _end_pending(self) -> None:
        self.settle_delayed()
        super()._end_pending()

    def forget(self, parameters: Iterable[torch.Tensor | str] | None = None) -> None:
        """Forgets residuals; see `Body.forget`."""
        self.settle_delayed()
        super().forget(parameters)

    def close(self) -> None:
        """Ends the threads, and looks at optimizers no more."""
        for handle in self._handles:
            handle.remove()
        super().close()


def _steps_under_way() -> list[Optimizer]:
    """The optimizers whose step() this thread is in, from the innermost on; one whose step() calls that of its base class comes twice."""
    frames = [frame for frame, _ in walk_stack(sys._getframe()) if (frame.f_code.co_name, frame.f_code.co_filename) == _HOOKED]
    return [args[0] for frame in frames if (args := frame.f_locals.get("args"))]


def _wide(param: torch.Tensor) -> torch.Tensor:
    """The values, at least in float32, in which small outer steps are not rounded away."""
    return param.detach().to(torch.promote_types(param.dtype, torch.float32))


class BodyWithOuter(Body):
    """A body of which outer steps may be part: averages gradients, or has parameters trained alone, or within hosts."""

    _outer: OuterSteps | None = None  # of parameters that are trained apart: of all, or there is none

    @property
    def lets_ranks_differ(self) -> bool:
        """Whether parameters and optimizer state are each rank's own between two averages."""
        return self._outer is not None or self.averager.may_part

    @property
    def is_elastic(self) -> bool:
        """Whether another number of ranks can go on: what each keeps depends neither on their number nor on the ranks of its host.

        Where an average that is compressed may be under way, a new rank would begin it anew with the residuals of its twin.
        """
        rules = self.averager.rules
        return self._outer is not None and not any(
            rule.within or rule.quality == "loss" or (rule.compress and (rule.compress.two_phase or rule.delay)) for rule in rules
        )

    def state_dict(self) -> dict[str, Any]:
        """As `Body.state_dict`; with local steps, what these remember under "outer"."""
        return super().state_dict() | ({} if self._outer is None else {"outer": self._outer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; see `Body.load_state_dict`."""
        if self._outer is not None:
            self._outer.settle_delayed()  # its threads use the group in which ranks are asked now
        super().load_state_dict(state)
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])

    def summary(self) -> dict[str, dict[str, float]]:
        """The costs of the last step as plain data; of local steps, those of their last average."""
        return super().summary() if self._outer is None else self._outer.summary()

    @property
    def last_step(self) -> Step | None:
        """Costs of the last step, by rule; of local steps, those of their last average."""
        return super().last_step if self._outer is None else self._outer.last_step

    def forget(self, parameters: Iterable[torch.Tensor | str] | None = None) -> None:
        """Forgets residuals; see `Body.forget`."""
        super().forget(parameters)
        if self._outer is not None:
            self._outer.forget(self._named(parameters) & self._outer.names)

    def close(self) -> None:
        """Ends the threads."""
        if self._outer is not None:
            self._outer.close()
        super().close()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts with copies of their tensors."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else _copied(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
    }


def _turns(tensors: Sequence[Tensor], rules: Rules) -> dict[str, int]:
    """Name -> the step of a period in which it is averaged, 0 for the last: fragments of about as many bytes take turns."""
    found = {}
    for number, rule in enumerate(rules):
        own = [tensor for tensor in tensors if tensor.rule == number]
        every, total, before = rule.every or 1, sum(tensor.nbytes for tensor in own), 0
        for tensor in own:
            fragment = before * rule.fragments // max(1, total)
            found[tensor.name] = (fragment + 1) * every // rule.fragments % every
            before += tensor.nbytes
    return found
