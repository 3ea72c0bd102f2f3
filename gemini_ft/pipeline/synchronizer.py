"""Averages the gradients of a model while the backward pass still runs.

    synchronizer = gemini_ft.GradientSynchronizer(model, [{"params": "*", "compress": "powersgd", "fusion": "cupcake"}])
    for batch in batches:
        loss(model(batch)).backward()
        synchronizer.synchronize()       # now param.grad is the average; clip here
        optimizer.step()

Gradients are handed over by ``register_post_accumulate_grad_hook``. A model in DistributedDataParallel keeps it for buffers,
unused parameters and accumulation: then the synchronizer is its communication hook, and `synchronize` is not needed.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline.averager import own_group
from gemini_ft.pipeline.ddp_buckets import DdpBuckets, communication_hook
from gemini_ft.pipeline.host_groups import host_groups, hosts_of
from gemini_ft.pipeline.measuring import ModelHook
from gemini_ft.pipeline.outer import BodyWithOuter, OuterSteps, refuse_for_ranks_apart
from gemini_ft.pipeline.plan import NO_RULE, Plan, Tensor, assign, check_local, nothing, trained
from gemini_ft.pipeline.qualities import LOCAL
from gemini_ft.pipeline.routes import of_all_ranks
from gemini_ft.pipeline.rules import Rules, check_world, load_rules
from gemini_ft.state.gradients import announce, synchronizers, withdraw
from gemini_ft.state.optimizer_steps import weak_hook
from gemini_ft.state.pending import Mark, is_as_marked, mark_of, zeros_among
from gemini_ft.state.tensors import unwrap_model
from gemini_ft.worker.attempt import close_with

T = TypeVar("T")
_log = logging.getLogger("gemini_ft")


class GradientSynchronizer(BodyWithOuter):
    """Averages a model's gradients over ranks by the rules of a pipeline. Constructing it is collective.

    Args:
        model: the same on all ranks; its parameters and buffers are sent from rank 0. A DDP model has done that itself.
        pipeline: rules, or the YAML or JSON file that has them (``gradient_pipeline``); see `gemini_ft.pipeline.rules`.
        group: of the ranks; None: the DDP model's own, else the default group, or one rank where there is none.
        find_unused_parameters: whether a backward pass may leave parameters out. A small collective per step then finds out which
            ones have no gradient on any rank; those keep None.
        scaler: of mixed precision (``torch.amp.GradScaler``): residuals are kept without its scale.
        profile_steps: steps that are watched before a planned fusion is planned.
        otherwise: of a DDP model: state and communication hook for buckets without any parameter that a rule matches.

    Raises:
        ConfigError: the rules are wrong, do not fit the model, or differ between ranks; or others average its gradients too, a
            DistributedDataParallel inside it or another synchronizer. On all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: str | Path | Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        group: Any = None,
        find_unused_parameters: bool = False,
        scaler: Any = None,
        profile_steps: int = 5,
        otherwise: tuple[Any, Any] | None = None,
    ) -> None:
        ddp = ddp_around(model)
        self.is_ddp = ddp is not None
        self._ddp = None if ddp is None else weakref.ref(ddp)  # whose hook has this object: together they would never be freed
        if ddp is not None:
            model, group = ddp, group if group is not None else ddp.process_group
        ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
        own = own_group(ranks, group) if len(ranks) > 1 else None

        def assigned() -> tuple[Rules, list[Tensor]]:
            rules = load_rules(pipeline)
            check_world(rules, len(ranks))
            _check_alone(model, ddp, ranks)
            devices = {param.device for param in trained(model).values()}
            if len(devices) > 1:
                raise ConfigError(f"parameters lie on {', '.join(sorted(map(str, devices)))}: they must all be on one device")
            tensors = assign(model, rules)
            check_local(rules, tensors, scaler)
            return rules, tensors

        settings = {"find_unused_parameters": find_unused_parameters, "profile_steps": profile_steps}
        rules, tensors = _together(assigned, settings, own)
        if otherwise is not None:
            tensors = [tensor for tensor in tensors if tensor.rule != NO_RULE]
        local = [tensor for tensor in tensors if tensor.rule != NO_RULE and rules[tensor.rule].is_local]
        hosts = hosts_of(rules[local[0].rule], own) if local else []
        if local:
            tensors = [replace(tensor, rule=NO_RULE) for tensor in tensors] if len(set(hosts)) < len(hosts) else []
        self._has_trained = False  # in training mode, which scripts leave to evaluate, and some train without
        self._find_unused, self._paused = find_unused_parameters, False
        self._touched: set[str] = set()  # have got a gradient in this step
        self._had: dict[str, Mark] = {}  # gradients with which an optimizer has stepped
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}  # gradients of this step that are being averaged, and their versions
        self._discarding: set[str] = set()  # gradients that come now are thrown away
        self._discarded: set[str] = set()  # and of those that have come in this step
        parameters = trained(model)
        device = next(iter(parameters.values())).device
        # Before the hooks of `ReadyTimes`.
        self._averaging: list[Any] = []  # hooks of gradients
        self._handles: list[Any] = [
            model.register_forward_pre_hook(ModelHook(self._forward_begins)),
            unwrap_model(model).register_forward_pre_hook(ModelHook(self._check_wrapper)),
        ]
        # The training thread asks in a group of its own: other ranks may be waiting in theirs for gradients that this rank lacks.
        self._of_all = own_group(ranks, group, "gloo") if own is not None else None
        together, control, apart = own, self._of_all, own
        self._tensors, self._together = tensors, own
        if tensors and local:
            groups = host_groups(ranks, hosts, group)
            together, control = groups.host, groups.control
            apart = groups.peers if together.rank() == 0 and groups.peers.size() > 1 else None
        super().__init__(model, parameters, tensors, rules, group=together, control=control, device=device, profile_steps=profile_steps)
        if scaler is not None and scaler.is_enabled():
            self.averager.scale = scaler.get_scale
        if ddp is not None and (ddp.find_unused_parameters or ddp.static_graph) and any(rule.compress is not None for rule in rules):
            self._note_steps = register_optimizer_step_post_hook(weak_hook(self._stepped))
            self._handles.append(self._note_steps)
        if own is not None and self.averager.may_part:
            self._handles.append(register_optimizer_step_pre_hook(weak_hook(self._step_begins)))
        if ddp is not None:
            self._buckets = DdpBuckets(self, otherwise)
            ddp.register_comm_hook(self._buckets, communication_hook)
        else:
            self._model = model
            self._watch_gradients(parameters.values() if tensors else [])
            if own is not None:
                with torch.no_grad():
                    for tensor in (*model.parameters(), *model.buffers()):
                        dist.broadcast(tensor.detach(), group=own, group_src=0)
        if local:
            self._outer = self._outer_steps(local, rules, apart, hosts)
        announce(self, parameters.values())
        close_with(self)

    def _watch_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self._averaging = [param.register_post_accumulate_grad_hook(self._ready) for param in parameters]  # type: ignore[no-untyped-call]

    def _tune(self) -> None:
        super()._tune()
        if self._tuner.apart is not None and self._outer is None:
            self._go_apart()

    def _go_apart(self) -> None:
        """Has ranks train alone, by the rules that ``quality: loss`` has for that. Collective, between two steps."""
        self._drift.check()
        for handle in self._averaging:
            handle.remove()
        rules = self.averager.rules
        self.averager.tensors, self.averager.plan = [], Plan((), dict.fromkeys(range(len(rules)), LOCAL), {})
        self._outer = self._outer_steps(self._tensors, tuple(rule.apart for rule in rules), self._together, [])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; see `Body.load_state_dict`."""
        if self.averager.may_part:
            with self._explaining():
                self._train_as_in(state)
        super().load_state_dict(state)

    def _train_as_in(self, state: Mapping[str, Any]) -> None:
        """Has ranks train alone, or together again, as those of a state of the same rules did, if all have such a one. Collective."""
        is_ours = state["averager"]["rules"] == [rule.pack() for rule in self.averager.rules]
        alone = of_all_ranks("outer" in state if is_ours else None, self._together)
        if alone != [self._outer is None] * len(alone):
            return
        self._settle()
        self._drift.drop()
        self._end_pending()
        if self._outer is None:
            self._go_apart()
            return
        self._outer.close()
        self._outer, self.averager.tensors = None, self._tensors
        if not self.is_ddp:
            self._watch_gradients(self._parameters.values())

    def _outer_steps(self, tensors: Sequence[Tensor], rules: Rules, apart: Any, hosts: Sequence[int]) -> OuterSteps:
        model = self.ddp if self.is_ddp else self._model
        assert model is not None
        if self.is_ddp and self._of_all is not None and model.broadcast_buffers and next(model.buffers(), None) is not None:
            _log.warning(
                "DDP sends buffers from rank 0 before each forward pass, also between two averages: give it broadcast_buffers=False"
            )
        return OuterSteps(
            model,
            {tensor.name: self._parameters[tensor.name] for tensor in tensors},
            tensors,
            rules,
            group=apart,  # which nothing else uses
            control=self._of_all,
            device=next(iter(self._parameters.values())).device,
            host=self.averager.group if self.averager.tensors else None,
            hosts=hosts,
        )

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP model whose gradients are averaged; None: it is none, or is gone."""
        return None if self._ddp is None else self._ddp()

    # -- a step

    def synchronize(self) -> None:
        """Averages every gradient over all ranks. Collective; call it after the last backward of a step.

        Raises:
            StateError: parameters have no gradient, and ``find_unused_parameters`` is not set; the averages are there all the same, with
                zeros for what is missing, so that other ranks need not wait for this one. Or a gradient was changed since the backward
                pass, or has come to a parameter that had none when the synchronizer was made. Or another rank has failed; it is named.
        """
        if self.is_ddp:
            raise StateError("DistributedDataParallel waits for its communication hook by itself: leave synchronize() out")
        if self._outer is not None and not self.discards_all:
            self._outer.catch_up()
            self._outer.stepped()
        if not self.averager.tensors:
            self._check_parameters()
            return
        untouched = [name for name in self.averager.missing() if name not in self._touched | self._discarded]
        self._complete()
        changed = self._changed()
        self.step_over()
        if changed:
            raise StateError(
                f"the gradient of {changed[0]} was changed between the backward pass and synchronize(), while it was being averaged: clip, "
                "unscale, divide and zero it after synchronize(); or run the backward pass in no_sync(), then change it, then synchronize()"
            )
        self._check_parameters()
        if untouched and not self._find_unused:
            raise StateError(
                f"no gradient for {', '.join(untouched[:5])}{' and others' if len(untouched) > 5 else ''} ({len(untouched)} of "
                f"{len(self._parameters)}): the backward pass left them out. Give find_unused_parameters=True, or use them in the loss"
            )

    def _check_parameters(self) -> None:
        if any(param.grad is not None and id(param) not in self._names for param in self._model.parameters() if param.requires_grad):
            name = next(name for name, param in trained(self._model).items() if param.grad is not None and id(param) not in self._names)
            raise StateError(
                f"the gradient of {name} is not averaged: the parameter was frozen, or not there, when GradientSynchronizer was made. "
                "Freeze after that, with find_unused_parameters=True, or close() it and make another one"
            )

    def _changed(self) -> list[str]:
        """Parameters to whose gradient more than the average has been written since it was sent, as far as that can be seen."""
        found = [name for name, (sent, version) in self._sent.items() if _differs(self._parameters[name].grad, sent, version)]
        if not found:
            return []
        dense = [param.grad for param in self._parameters.values() if param.grad is not None and param.grad.layout == torch.strided]
        users = Counter(grad.untyped_storage().data_ptr() for grad in dense)
        return [name for name in found if (grad := self._parameters[name].grad) is not self._sent[name][0] or not _is_shared(grad, users)]

    def _complete(self) -> None:
        """Averages missing gradients too, with zeros, and waits for all. Collective."""
        with self._telling():
            absent = (self._absent() if self._find_unused else set()) | self._discarded
            for name in self.averager.missing():
                param = self._parameters[name]
                if name in absent:
                    self.averager.absent(name)
                    continue
                gradient = param.grad if param.grad is not None else nothing(param, name in self._sparse)
                self.averager.ready(name, gradient, partial(_fill, param))
            self.averager.wait()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulates gradients inside: for all but the last backward of a step.

        Raises:
            StateError: the model is a DDP model, which has a ``no_sync`` of its own.
        """
        if self.is_ddp:
            raise StateError("DistributedDataParallel averages in every backward pass outside its own no_sync(): use that of the model")
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def discarding(self, parameters: Iterable[torch.Tensor | str] | None = None) -> Iterator[None]:
        """Discards the gradients of a backward pass inside: they are not averaged, and memories do not see them.

        For those that the script throws away: of a discriminator in the generator's backward pass, for example. Alike on all ranks.

        Args:
            parameters: of the model, or their names; None: all.

        Raises:
            ConfigError: one of them is not of the pipeline.
        """
        before, self._discarding = self._discarding, self._discarding | self._named(parameters)
        try:
            yield
        finally:
            self._discarding = before

    def is_discarded(self, name: str) -> bool:
        """Whether the gradient that has come is to be thrown away; takes note of it."""
        if name not in self._discarding:
            self._discarded.discard(name)
            return False
        self._discarded.add(name)
        return True

    @property
    def discards_all(self) -> bool:
        return self._discarding.issuperset(self._parameters)

    def _step_begins(self, optimizer: Optimizer) -> None:
        if any(id(param) in self._names for group in optimizer.param_groups for param in group["params"]):
            refuse_for_ranks_apart(optimizer)

    def _stepped(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if (grad := param.grad) is not None and (name := self._names.get(id(param))) is not None:
                    self._had[name] = mark_of(grad)

    def warn_of_left(self, names: Iterable[str]) -> None:
        """Names, once, a gradient that DDP hands on although no backward pass has written to it since its optimizer has stepped."""
        for name in names:
            if (grad := self._parameters[name].grad) is not None and is_as_marked(grad, self._had.get(name)):
                self._had = {}
                self._note_steps.remove()
                _log.warning(
                    "the gradient of %s is what an earlier step has left, and DistributedDataParallel hands it on: it goes into what "
                    "compression keeps back, and no snapshot has it, so that a job that was killed would end with other bits. Make all "
                    "gradients None (model.zero_grad()) before each backward pass",
                    name,
                )
                return

    def _forward_begins(self, model: nn.Module, *_: Any) -> None:
        self._settle()
        trains = self._outer is not None and torch.is_grad_enabled()
        self._has_trained |= trains and unwrap_model(model).training
        if self._outer is not None and trains and (unwrap_model(model).training or not self._has_trained):
            self._outer.catch_up()

    def _settle(self) -> None:
        """Notices between steps that a DDP step is over, which DDP does not announce. The tuner, which is collective, hears later."""
        if self.is_ddp and self.averager.is_complete:
            self.averager.wait()
            self._count()

    def _check_wrapper(self, *_: Any) -> None:
        """Refuses to train in a DDP model that is not this synchronizer's, and averages the same gradients."""
        active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if active is self.ddp or active is None or not active.require_backward_grad_sync or not torch.is_grad_enabled():
            return
        if not self._names.keys().isdisjoint(map(id, trained(active).values())):
            raise StateError(
                "the model is trained in a DistributedDataParallel that the gradient pipeline does not belong to, and which averages its "
                "gradients without it: make GradientSynchronizer(ddp_model, ...) of that one, after close() of this one"
            )

    def _count(self) -> None:
        super()._count()
        self._sent.clear()
        self._touched.clear()
        self._discarded.clear()

    def _end_pending(self) -> None:
        if not self.is_ddp and self._any_pending():
            self._complete()
        super()._end_pending()
        self._sent.clear()
        self._touched.clear()
        self._discarded.clear()

    def _any_pending(self) -> bool:
        """Whether a rank has had a backward pass without `synchronize`. Collective."""
        pending = torch.tensor(len(self.averager.missing()) < len(self.averager.tensors), dtype=torch.uint8)
        if self._control is not None:
            dist.all_reduce(pending, dist.ReduceOp.MAX, group=self._control)
        return bool(pending)

    def backward_over(self) -> None:
        """Ends the step of a DDP model, whose backward pass ends with averages, unless it is known. Collective at some steps.

        Integrations call it after each backward pass that synchronised. Without it the next backward pass does so.
        """
        self._settle()
        self._tune()

    def trained_alone(self, names: Collection[str]) -> None:
        """Records that the gradients of these parameters are final, which a rank or a host steps with alone; all of them are a step."""
        if self._outer is None or self.discards_all:
            return
        self._touched.update(names)
        if self._touched.issuperset(self._parameters):
            self._touched.clear()
            self._outer.stepped()

    def ready(self, name: str) -> None:
        self._ready_times.ready(name)

    def name_of(self, param: torch.Tensor) -> str:
        return self._names[id(param)]

    def _ready(self, param: torch.Tensor) -> None:
        name = self._names[id(param)]
        if self.is_discarded(name):
            return
        self._touched.add(name)
        if self._paused:
            if self.averager.has(name):
                raise StateError(f"a backward pass in no_sync() adds to the gradient of {name} while it is averaged; synchronize() first")
            return
        self._ready_times.ready(name)
        if param.grad is None:
            raise StateError(
                f"a hook has taken the gradient of {name} before it was averaged, as optimizers inside the backward pass do: let the "
                "optimizer step after synchronize()"
            )
        self._sent.pop(name, None)  # one that is refused now, because it comes a second time, is not named again by synchronize()
        gradient, version = param.grad, param.grad._version
        with self._telling():
            self.averager.ready(name, gradient, partial(_fill, param))
        self._sent[name] = gradient, version

    def _absent(self) -> set[str]:
        """Parameters that have no gradient on any rank, or the zeros that ``zero_grad(set_to_none=False)`` has left. Collective."""
        names = list(self._parameters)
        left = {name: param.grad for name, param in self._parameters.items() if name not in self._touched}
        zeros = zeros_among({name: grad for name, grad in left.items() if grad is not None})
        absent = [name in zeros or (name in left and left[name] is None) for name in names]
        if self._control is not None:
            everywhere = torch.tensor(absent, dtype=torch.uint8)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._control)
            absent = everywhere.bool().tolist()
        return {name for name, is_absent in zip(names, absent, strict=True) if is_absent}

    def close(self) -> None:
        """Removes all hooks from the model, and ends the threads."""
        for handle in [*self._handles, *self._averaging]:
            handle.remove()
        super().close()
        withdraw(self)


def _differs(gradient: torch.Tensor | None, sent: torch.Tensor, version: int) -> bool:
    """Whether anything but the average has been written to a gradient since it was sent."""
    return not sent.is_sparse and (gradient is not sent or sent._version != version + 1)


def _is_shared(gradient: torch.Tensor, users: Mapping[int, int]) -> bool:
    """Whether its memory may be that of other gradients too, whose writes it counts: a part of a fused product's, or of a buffer."""
    memory = gradient.untyped_storage()
    return memory.nbytes() != gradient.nbytes or users[memory.data_ptr()] > 1


def ddp_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP model that ``model`` is, or that torch.compile and Fabric have wrapped."""
    found = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
    return found if found is not None and unwrap_model(found) is unwrap_model(model) else None


def _check_alone(model: nn.Module, ddp: DistributedDataParallel | None, ranks: list[int]) -> None:
    """Checks that nothing else averages the gradients of a model.

    Raises ConfigError: another synchronizer or a DistributedDataParallel does, or the latter does so among other ranks.
    """
    if ddp is not None:
        if (others := dist.get_process_group_ranks(ddp.process_group)) != ranks:
            raise ConfigError(f"group has the ranks {ranks}, and that of the DistributedDataParallel {others}: leave group out")
        return
    if name := next((name for name, part in model.named_modules() if isinstance(part, DistributedDataParallel)), None):
        raise ConfigError(
            f"{name} inside the model is a DistributedDataParallel, which averages its gradients itself: wrap the whole model in one and "
            "give GradientSynchronizer that, or wrap nothing"
        )
    for other in synchronizers(trained(model).values()):
        if not getattr(other, "is_ddp", True):
            raise ConfigError(
                "the model's gradients are averaged by another GradientSynchronizer already: close() that one, or make one for all models "
                "that share parameters"
            )


def _fill(param: torch.Tensor, mean: torch.Tensor) -> None:
    if mean.is_sparse:
        param.grad = mean
    elif param.grad is None:
        param.grad = mean.to(param.dtype, copy=True)  # a route may use the memory of its averages again
    else:
        param.grad.copy_(mean)


def _together(make: Callable[[], T], settings: Mapping[str, Any], group: Any) -> T:
    """Calls ``make`` on all ranks; a ConfigError of one rank is raised by all. Collective.

    Raises ConfigError: also where settings differ between ranks.
    """
    made, problem = None, None
    try:
        made = make()
    except ConfigError as error:
        problem = str(error)
    everybody = of_all_ranks((problem, settings), group)
    problems = [found for found, _ in everybody]
    for rank, found in enumerate(problems):
        if found is not None:
            raise ConfigError(found if set(problems) == {found} else f"rank {rank}: {found}")
    for rank, (_, others) in enumerate(everybody):
        for name, value in others.items():
            if value != everybody[0][1][name]:
                raise ConfigError(f"{name} differs between ranks: rank 0 has {everybody[0][1][name]}, rank {rank} has {value}")
    assert made is not None
    return made
