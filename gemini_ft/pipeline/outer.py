"""Parameters that every rank trains alone and that all ranks average every few steps: local SGD, and DiLoCo with an outer optimizer.

    gradient_pipeline:
      - {params: "*", every: 30, outer: {lr: 0.7, momentum: 0.9, nesterov: true}}

Between two averages nothing of these parameters travels. Then a rank's pseudo-gradient is the way from where all ranks were together last,
the anchor, to where it is now; its average over ranks, which a rule's ``compress`` makes smaller as it does gradients, is what the outer
optimizer steps with from the anchor, and all ranks go on from there (McMahan et al., "Communication-Efficient Learning of Deep Networks
from Decentralized Data", algorithm 1; Douillard et al., "DiLoCo", algorithm 1). Anchors, momenta and residuals are part of every
snapshot, and so are each rank's own parameters and optimizer state, which differ between two averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
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
from gemini_ft.state.replicas import tensor_digest

_PLAIN = Outer(lr=1.0, momentum=0.0, nesterov=False)


class OuterSteps(Body):
    """The outer steps of one model, whose rules all say ``every``. Constructing it is collective.

    An outer step follows the last update of the step in which it is due, within ``optimizer.step()``, so that whatever comes after that
    sees its result; where parameters that have a gradient are not updated, it comes with the next forward pass.

    Args:
        model: whose forward passes are watched.
        parameters: by name; of floats.
        tensors: the same, as rules see them.
        group: of the ranks, for the averages alone; None: one rank.
        control: of the same ranks and on CPUs, for what the training thread asks; None: one rank.
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
    ) -> None:
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
        begun, ended = weakref.WeakMethod(self._step_begins), weakref.WeakMethod(self._updated)  # hooks of all optimizers of the process:
        self._handles = [  # they must not keep this object alive
            register_optimizer_step_pre_hook(lambda optimizer, *_: call(optimizer) if (call := begun()) is not None else None),
            register_optimizer_step_post_hook(lambda optimizer, *_: call(optimizer) if (call := ended()) is not None else None),
        ]

    def stepped(self) -> None:
        """Counts a step, whose update comes now.

        Raises:
            StateError: it is the second one within one call of an optimizer.
        """
        if self._under_way is not None and self._has_counted:
            raise StateError(
                "an optimizer has the loss evaluated several times in a step, as LBFGS does, and each would count as a step of a rule with "
                "every: take another optimizer, or leave every out"
            )
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

    def _step_begins(self, optimizer: Optimizer) -> None:
        if self._under_way in (None, optimizer) and (own := self._own(optimizer)):
            self._stepping, self._has_counted = weakref.ref(optimizer), False
            self._owned |= own

    def _updated(self, optimizer: Optimizer) -> None:
        if not (own := self._own(optimizer)):
            return
        if self._under_way is optimizer:
            self._stepping = None
        if "ZeroRedundancyOptimizer" in [kind.__name__ for kind in type(optimizer).__mro__]:
            raise StateError(
                "a ZeroRedundancyOptimizer sends each parameter from the one rank that updates it to all others in every step, so no rank "
                "trains alone: leave every out of the gradient pipeline, or give each rank the optimizer that it wraps"
            )
        self._updates += 1
        self._trained |= {name for name in own if self._parameters[name].grad is not None}
        if not self._due:
            return
        if self._awaited is None:  # in the first step it is not known which parameters no optimizer has
            known = self._due if self._steps == 1 else self._due & self._owned
            self._awaited = {name for name in known if self._parameters[name].grad is not None}
        self._awaited -= own
        if not self._awaited:
            self.catch_up()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Makes the outer step that is due, if one is. Collective then."""
        if not self._due:
            return
        with self._telling():
            names = self._due - self._frozen()
            self._due, self._awaited, self._trained = set(), None, self._trained - names
            means = self.averager.average({name: self._moved(name) for name in names})
        for name, mean in means.items():
            anchor, outer = self._anchors[name], self._outer(name)
            if outer.momentum:
                momentum = self._momenta[name].mul_(outer.momentum).add_(mean)
                mean = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
            anchor.sub_(mean, alpha=outer.lr)
            self._parameters[name].copy_(anchor)
        self.step_over()

    def _frozen(self) -> set[str]:
        """Parameters due that are frozen, on all ranks, and that none has trained since the last average. Collective if any is frozen."""
        frozen = sorted(name for name in self._due if not self._parameters[name].requires_grad)
        trained = torch.tensor([name in self._trained for name in frozen], dtype=torch.uint8)
        if frozen and self._control is not None:
            dist.all_reduce(trained, dist.ReduceOp.MAX, group=self._control)
        return {name for name, is_trained in zip(frozen, trained.tolist(), strict=True) if not is_trained}

    def _moved(self, name: str) -> torch.Tensor:
        """The pseudo-gradient: where all ranks began this period, in the values that the parameter's dtype has, less where this one is."""
        param = self._parameters[name].detach()
        return _wide(self._anchors[name].to(param.dtype)) - _wide(param)

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
        return {**super().state_dict(), **own, **counts, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; see `Body.load_state_dict`."""
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
        self._anchors = {name: tensor.to(self._parameters[name].device, copy=True) for name, tensor in state["anchors"].items()}
        self._momenta = {name: tensor.to(self._parameters[name].device, copy=True) for name, tensor in state["momenta"].items()}

    def close(self) -> None:
        """Ends the threads, and looks at optimizers no more."""
        for handle in self._handles:
            handle.remove()
        self._ready_times.close()
        self.averager.close()


def _wide(param: torch.Tensor) -> torch.Tensor:
    """The values, at least in float32, in which small outer steps are not rounded away."""
    return param.detach().to(torch.promote_types(param.dtype, torch.float32))


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
