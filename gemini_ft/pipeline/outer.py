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
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemini_ft.errors import StateError
from gemini_ft.pipeline.body import Body
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.rules import Outer, Rules


class OuterSteps(Body):
    """The outer steps of one model, for the parameters whose rules say ``every``. Constructing it is collective.

    An outer step follows the update of the step in which it is due, within ``optimizer.step()``, so that whatever is done after that sees
    its result. Where no optimizer of torch steps by then, as for a step that a loss scaler skips, it comes with the next `stepped`.

    Args:
        model: whose forward passes are watched.
        parameters: by name; of floats, and the same on all ranks now.
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
        tensors = [replace(tensor, itemsize=_wide(parameters[tensor.name]).itemsize, sparse=False) for tensor in tensors]
        super().__init__(model, parameters, tensors, rules, group=group, control=control, device=device, profile_steps=0)
        self._rules = {tensor.name: rules[tensor.rule] for tensor in tensors}
        self._turns = _turns(tensors, rules)
        self._anchors = {name: _wide(param).clone() for name, param in self._parameters.items()}
        self._momenta = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items() if self._outer(name).momentum}
        self._steps = 0
        self._is_due = False
        following = weakref.WeakMethod(self._updated)  # of all optimizers of the process: it must not keep this object alive
        self._handle = register_optimizer_step_post_hook(
            lambda optimizer, *_: updated(optimizer) if (updated := following()) is not None else None
        )

    def _outer(self, name: str) -> Outer:
        return self._rules[name].outer or Outer(lr=1.0, momentum=0.0, nesterov=False)

    def stepped(self) -> None:
        """Counts a step, whose update comes now. Collective where an outer step is due that no update has been seen for."""
        self.catch_up()
        self._steps += 1
        self._is_due = bool(self._names_due())

    def catch_up(self) -> None:
        """Makes the outer step that is due, if one is. Collective then."""
        if self._is_due:
            self._is_due = False
            self._step()

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        if "ZeroRedundancyOptimizer" in [kind.__name__ for kind in type(optimizer).__mro__]:
            raise StateError(
                "a ZeroRedundancyOptimizer sends each parameter from the one rank that updates it to all others in every step, so no rank "
                "trains alone: leave every out of the gradient pipeline, or give each rank the optimizer that it wraps"
            )
        if self._is_due and any(id(param) in self._names for group in optimizer.param_groups for param in group["params"]):
            self.catch_up()

    def _names_due(self) -> list[str]:
        return [name for name, turn in self._turns.items() if self._steps % (self._rules[name].every or 1) == turn]

    @torch.no_grad()
    def _step(self) -> None:
        with self._telling():
            gradients = {name: self._anchors[name] - _wide(self._parameters[name]) for name in self._names_due()}
            means = self.averager.average(gradients)
        for name, mean in means.items():
            anchor, outer = self._anchors[name], self._outer(name)
            if outer.momentum:
                momentum = self._momenta[name].mul_(outer.momentum).add_(mean)
                mean = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
            anchor.sub_(mean, alpha=outer.lr)
            self._parameters[name].copy_(anchor)
        self.step_over()

    def _common(self) -> dict[str, Any]:
        return {**super()._common(), "local steps": self._steps}

    def state_dict(self) -> dict[str, Any]:
        """As `Body.state_dict`, with the anchors, the momenta and the number of local steps."""
        own = {"anchors": self._anchors, "momenta": self._momenta, "steps": self._steps, "is_due": self._is_due}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; see `Body.load_state_dict`."""
        for own, saved in ((self._anchors, state["anchors"]), (self._momenta, state["momenta"])):
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._steps, self._is_due = state["steps"], state["is_due"]
        super().load_state_dict(state)

    def close(self) -> None:
        """Ends the threads, and looks at optimizers no more."""
        self._handle.remove()
        self._ready_times.close()
        self.averager.close()


def _wide(param: torch.Tensor) -> torch.Tensor:
    """The parameter's values, at least in float32, in which small outer steps are not rounded away."""
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
