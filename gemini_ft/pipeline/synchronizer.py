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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline.averager import own_group
from gemini_ft.pipeline.body import Body
from gemini_ft.pipeline.ddp_buckets import DdpBuckets, communication_hook
from gemini_ft.pipeline.measuring import ModelHook
from gemini_ft.pipeline.plan import NO_RULE, Tensor, assign, nothing, trained
from gemini_ft.pipeline.routes import of_all_ranks
from gemini_ft.pipeline.rules import Rules, check_world, load_rules
from gemini_ft.state.gradients import announce, withdraw
from gemini_ft.worker.attempt import close_with

T = TypeVar("T")


class GradientSynchronizer(Body):
    """Averages a model's gradients over ranks by the rules of a pipeline. Constructing it is collective.

    Args:
        model: the same on all ranks; its parameters and buffers are sent from rank 0. A DDP model has done that itself.
        pipeline: rules, or the YAML or JSON file that has them (``gradient_pipeline``); see `gemini_ft.pipeline.rules`.
        group: of the ranks; None: the default group, or one rank where there is none.
        find_unused_parameters: whether a backward pass may leave parameters out. A small collective per step then finds out which
            ones have no gradient on any rank; those keep None.
        scaler: of mixed precision (``torch.amp.GradScaler``): residuals are kept without its scale.
        profile_steps: steps that are watched before a planned fusion is planned.
        otherwise: of a DDP model: state and communication hook for buckets without any parameter that a rule matches.

    Raises:
        ConfigError: the rules are wrong, do not fit the model, or differ between ranks; on all ranks.
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
        ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
        own = own_group(ranks, group) if len(ranks) > 1 else None

        def assigned() -> tuple[Rules, list[Tensor]]:
            rules = load_rules(pipeline)
            check_world(rules, len(ranks))
            devices = {param.device for param in trained(model).values()}
            if len(devices) > 1:
                raise ConfigError(f"parameters lie on {', '.join(sorted(map(str, devices)))}: they must all be on one device")
            return rules, assign(model, rules)

        settings = {"find_unused_parameters": find_unused_parameters, "profile_steps": profile_steps}
        rules, tensors = _together(assigned, settings, own)
        if otherwise is not None:
            tensors = [tensor for tensor in tensors if tensor.rule != NO_RULE]
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._find_unused, self._paused = find_unused_parameters, False
        self._touched: set[str] = set()  # have got a gradient in this step
        self._discarding: set[str] = set()  # gradients that come now are thrown away
        self._discarded: set[str] = set()  # and of those that have come in this step
        parameters = trained(model)
        device = next(iter(parameters.values())).device
        # Before the hooks of `ReadyTimes`.
        self._handles: list[Any] = [model.register_forward_pre_hook(ModelHook(self._settle))]
        # The training thread asks in a group of its own: other ranks may be waiting in theirs for gradients that this rank lacks.
        control = own_group(ranks, group, "gloo") if own is not None else None
        super().__init__(model, parameters, tensors, rules, group=own, control=control, device=device, profile_steps=profile_steps)
        if scaler is not None and scaler.is_enabled():
            self.averager.scale = scaler.get_scale
        if isinstance(model, DistributedDataParallel):
            self._buckets = DdpBuckets(self, otherwise)
            model.register_comm_hook(self._buckets, communication_hook)
        else:
            self._handles += [param.register_post_accumulate_grad_hook(self._ready) for param in parameters.values()]  # type: ignore[no-untyped-call]
            if own is not None:
                _broadcast(model, own)
        announce(self, parameters.values())
        close_with(self)

    # -- a step

    def synchronize(self) -> None:
        """Averages every gradient over all ranks. Collective; call it after the last backward of a step.

        Raises:
            StateError: parameters have no gradient, and ``find_unused_parameters`` is not set; the averages are there all the same, with
                zeros for what is missing, so that other ranks need not wait for this one. Or another rank has failed; it is named.
        """
        if self._is_ddp:
            raise StateError("DistributedDataParallel waits for its communication hook by itself: leave synchronize() out")
        untouched = [name for name in self.averager.missing() if name not in self._touched | self._discarded]
        self._complete()
        self.step_over()
        if untouched and not self._find_unused:
            raise StateError(
                f"no gradient for {', '.join(untouched[:5])}{' and others' if len(untouched) > 5 else ''} ({len(untouched)} of "
                f"{len(self._parameters)}): the backward pass left them out. Give find_unused_parameters=True, or use them in the loss"
            )

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
        """Only accumulates gradients inside: for all but the last backward of a step."""
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
        """Whether nothing is averaged at present."""
        return self._discarding.issuperset(self._parameters)

    def _settle(self, *_: Any) -> None:
        """Notices between steps that a DDP step is over, which DDP does not announce. The tuner, which is collective, hears later."""
        if self._is_ddp and self.averager.is_complete:
            self.averager.wait()
            self._count()

    def _count(self) -> None:
        super()._count()
        self._touched.clear()
        self._discarded.clear()

    def _end_pending(self) -> None:
        if not self._is_ddp and self._any_pending():
            self._complete()
        super()._end_pending()
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

    def ready(self, name: str) -> None:
        """Records that a gradient is final."""
        self._ready_times.ready(name)

    def name_of(self, param: torch.Tensor) -> str:
        """The name that rules know a parameter by."""
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
        assert param.grad is not None
        with self._telling():
            self.averager.ready(name, param.grad, partial(_fill, param))

    def _absent(self) -> set[str]:
        """Parameters that have no gradient on any rank. Collective."""
        names = list(self._parameters)
        absent = [self._parameters[name].grad is None for name in names]
        if self._control is not None:
            everywhere = torch.tensor(absent, dtype=torch.uint8)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._control)
            absent = everywhere.bool().tolist()
        return {name for name, is_absent in zip(names, absent, strict=True) if is_absent}

    def close(self) -> None:
        """Removes all hooks from the model, and ends the threads."""
        for handle in self._handles:
            handle.remove()
        self._ready_times.close()
        self.averager.close()
        withdraw(self)


def _fill(param: torch.Tensor, mean: torch.Tensor) -> None:
    if mean.is_sparse:
        param.grad = mean
    elif param.grad is None:
        param.grad = mean.to(param.dtype, copy=True)  # a route may use the memory of its averages again
    else:
        param.grad.copy_(mean)


def _together(make: Callable[[], T], settings: Mapping[str, Any], group: Any) -> T:
    """Calls ``make`` on all ranks; a ConfigError of one rank is raised by all. Collective.

    Raises:
        ConfigError: also where settings differ between ranks.
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


def _broadcast(model: nn.Module, group: Any) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
