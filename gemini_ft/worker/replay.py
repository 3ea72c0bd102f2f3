"""Computes a micro-batch, and the update that follows it, a second time, and compares the bits (``verify: replay``).

The iteration after a comparison of the ranks is checked. Calls of the model are recorded with their inputs, random states and the
gradients of their outputs; just before the update they are made again on the same weights, and each parameter's gradient, as this rank
alone has formed it, must have the same bits. The optimizer's step is made again on copies. Nothing is reduced again. The training goes
on from its own results: what a second computation leaves in modules is put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils._pytree import tree_leaves, tree_map

from gemini_ft.core.words import named
from gemini_ft.errors import ReplayError
from gemini_ft.state.replicas import tensor_digest
from gemini_ft.state.rng import EveryGenerator, is_generator
from gemini_ft.state.tensors import version_of

_log = logging.getLogger("gemini_ft")
Bits = dict[str, str]  # name of a result -> digest of its bytes
# Those whose step reads and writes what copies of parameters, gradients and state can stand in for, and nothing else. Any other may hold
# further optimizers, count somewhere, or write through references of its own.
_REPEATABLE = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
_OF_MODULES = vars(nn.Module()).keys() - {"training"}  # attributes by which torch keeps parameters, modules and hooks


class _Held:
    """The values of a module's attributes and buffers, and what these contain; parameters and other modules are not among them."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes, self._places = vars(module), module._buffers
        self._values = {key: value for key, value in self._attributes.items() if key not in _OF_MODULES}
        self._buffers = dict(module._buffers.items())
        self._contents = [(value, _copy_of(value)) for value in (*self._values.values(), *self._buffers.values()) if _is_written(value)]

    def put_back(self) -> None:
        for key in self._attributes.keys() - self._values.keys() - _OF_MODULES:
            del self._attributes[key]
        self._attributes.update(self._values)
        for name, buffer in self._buffers.items():
            if name not in self._places or self._places[name] is not buffer:
                self._places[name] = buffer
        for value, before in self._contents:
            if isinstance(value, list):
                value[:] = before
            elif not isinstance(value, torch.Tensor):
                value.clear()
                value.update(before)
            elif not _are_same(value, before):  # a needless write would be counted, and could spoil a graph
                with torch.no_grad():
                    value.copy_(before)


@dataclass(kw_only=True)
class _Call:
    """An outermost call of a module under training, as it is made again.

    ``grads``: place among the tensors of the output -> the gradient that the loss gave it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: list[Any]  # those that modules have as attributes, and those among the arguments
    rng: EveryGenerator
    held: list[_Held]
    autocasts: list[dict[str, Any]]
    grads: dict[int, torch.Tensor] = field(default_factory=dict)

    def again(self) -> list[torch.Tensor]:
        """The output's tensors, computed from what was there at the first time."""
        self.rng.put_back()
        for held in self.held:
            held.put_back()
        with contextlib.ExitStack() as stack:
            for options in self.autocasts:
                stack.enter_context(torch.autocast(**options))
            args, kwargs = tree_map(_detached, (self.args, self.kwargs))  # which a call may write to
            return _outputs(self.module(*args, **kwargs))


class Replay:
    """The checks of one rank. While none is due there is no hook. ``exchange``: gives back every rank's object in rank order."""

    def __init__(
        self,
        exchange: Callable[[tuple[list[str], list[str]]], list[tuple[list[str], list[str]]]],
        at_rest: Callable[[], list[str]],  # what was found to have changed in memory since the last snapshot
        raises: Callable[[list[list[str]]], None],  # called on all ranks with what each has found, where any has
    ) -> None:
        self._exchange, self._at_rest, self._raises = exchange, at_rest, raises
        self._hooks: list[Any] = []
        self._armings = 0
        self._left_out: set[str] = set()  # results that could not be repeated: the same on all ranks
        self._is_repeating = False
        self._forget()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], set[int]()
        self._names: dict[int, str] = {}
        self._params: dict[str, torch.Tensor] = {}
        self._calls: list[_Call] = []
        self._open: _Call | None = None
        self._depth = 0
        self._gradients: Bits = {}
        self._resting: dict[str, tuple[torch.Tensor, int, str]] = {}  # state: when it was written, digest
        self._shards: dict[str, tuple[nn.Parameter, int, str]] = {}  # reduced gradients: whose, when it was written, digest
        self.is_over = False  # the gradients have been compared, so that an update has been made

    def arm(self, models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Prepares for a check of the iteration that begins."""
        self.disarm()
        for label, model in models.items():
            for prefix, module in _callable_modules(model, label):
                enter = partial(self._enter, self._armings)
                self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))  # the script's own come again
                self._hooks.append(module.register_forward_pre_hook(partial(self._follow_parts, prefix)))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
            for name, param in model.named_parameters(prefix=label):
                self._names[id(param)] = name
                if isinstance(param, DTensor) and param.requires_grad:
                    self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._note_shard, name)))  # type: ignore[no-untyped-call]
                elif param.requires_grad:
                    self._follow(name, param)
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):  # DeepSpeed steps with one group at a time in their place
                for index, param in enumerate(group["params"]):
                    self._names.setdefault(id(param), f"parameter {index} of group {number}")
            self._resting |= {
                name: (tensor, version_of(tensor), tensor_digest(tensor)) for name, tensor in _tensors(optimizer, self._names)
            }
            update = _Update(self, optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(update.begin))
            self._hooks.append(optimizer.register_step_post_hook(update.end))
            after = optimizer._optimizer_step_post_hooks
            others = {key: after.pop(key) for key in [*after][:-1]}  # they may write the weights, too, and so come later
            after.update(others)

    def disarm(self) -> None:
        """Ends the check, as the iteration has ended."""
        self._armings += 1
        self._forget()

    # -- the first time

    def _follow(self, name: str, param: torch.Tensor) -> None:
        if param.requires_grad and id(param) not in self._hooked:
            self._hooked.add(id(param))
            self._params[name] = param
            self._hooks.append(param.register_hook(partial(self._note, name)))  # type: ignore[no-untyped-call]

    def _note(self, name: str, grad: torch.Tensor) -> None:
        if grad.layout is torch.strided:
            self._gradients[name] = tensor_digest(grad)

    def _note_shard(self, name: str, param: nn.Parameter) -> None:
        if param.grad is not None and not self._is_repeating:
            self._shards[name] = param, version_of(param.grad), tensor_digest(param.grad)

    def _follow_parts(self, prefix: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Follows parameters that FSDP2 has put together just now."""
        if self._depth and not self._is_passive:
            for name, param in module.named_parameters(prefix=prefix):
                if not isinstance(param, DTensor):
                    self._follow(name, param)

    def _enter(self, arming: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._is_passive or kwargs is None or arming != self._armings:  # it was removed by another hook of this very call
            return
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        if self._gradients:  # of the micro-batch before
            self._calls, self._gradients = [], {}
        held = [_Held(part) for part in module.modules()]
        args, kwargs = tree_map(_detached, args), tree_map(_detached, kwargs)
        values = [*tree_leaves((args, kwargs)), *(value for part in module.modules() for value in vars(part).values())]
        generators = [value for value in values if is_generator(value)]
        rng = EveryGenerator(generators)
        self._open = _Call(module=module, args=args, kwargs=kwargs, generators=generators, rng=rng, held=held, autocasts=_autocasts())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_passive or not self._depth:  # it was armed inside this call
            return
        self._depth -= 1
        call = self._open
        if self._depth or call is None:
            return
        self._open = None
        for index, tensor in enumerate(_outputs(output)):
            if (node := tensor.grad_fn) is None:
                tensor.register_hook(partial(call.grads.__setitem__, index))  # type: ignore[no-untyped-call]
            else:  # behind all hooks of the tensor: DeepSpeed's, which come later, divide by the number of micro-batches
                node.register_prehook(partial(_note_gradient, call.grads, index, tensor.output_nr))
        self._calls.append(call)

    @property
    def _is_passive(self) -> bool:
        """Whether a call belongs to no first pass: it is made again here, or by activation checkpointing inside a backward pass."""
        return self._is_repeating or torch._C._current_graph_task_id() != -1

    # -- the second time

    def compare_gradients(self) -> None:
        """Forms the gradients of the last micro-batch again, once, before the first update. Collective. Raises ReplayError."""
        if self.is_over:
            return
        self.is_over = True
        first, params = self._gradients, dict(self._params)
        modules = {part for call in self._calls for part in call.module.modules()}
        meets = any(map(_meets_others, modules))
        after = [_Held(module) for module in modules]

        def again() -> Bits:
            self._gradients = {}
            try:
                self._repeat_calls(list(params.values()))
            except Exception as error:  # the training itself did nothing wrong
                if meets:  # others wait for this rank
                    raise
                _log.warning("verify: replay: gradients cannot be computed again: %s: %s", type(error).__name__, error)
                self._gradients = first
            return {f"the gradient of {name}": digest for name, digest in self._gradients.items()}

        try:
            self.judge({f"the gradient of {name}": digest for name, digest in first.items()}, again if first and self._calls else dict)
        finally:
            for held in after:
                held.put_back()
            self._calls = []

    def _repeat_calls(self, params: list[torch.Tensor]) -> None:
        outputs, grads = list[torch.Tensor](), list[torch.Tensor]()
        with torch.enable_grad():
            for call in self._calls:
                tensors = call.again()
                for index, grad in call.grads.items():
                    outputs.append(tensors[index])
                    grads.append(grad)
                    if (node := tensors[index].grad_fn) is not None:  # other outputs that were computed from it are in its gradient
                        node.register_prehook(partial(_given_gradient, grad, tensors[index].output_nr))
            torch.autograd.grad(outputs, params, grads, allow_unused=True)

    def judge(self, first: Bits, again: Callable[[], Bits], changed: Collection[str] = ()) -> None:
        """Compares results with those of a second computation, and gradients with those of a third one where a rank's differ. Collective.

        A rank is named only if its second and third results are the same, and most ranks repeat theirs.

        ``again``: makes the computation again, without a trace. ``changed``: what has changed that nobody has written.

        Raises ReplayError: a few ranks did not get the same bits.
        """
        second = self._repeated(again)
        differing = [name for name, digest in first.items() if second.get(name) != digest and name not in self._left_out]
        everyone, rest = zip(*self._exchange((differing, [*self._at_rest(), *changed])), strict=True)
        if any(everyone):
            third = self._repeated(again)
            unsettled = [name for name in differing if name not in second or third.get(name) != second[name]]
            all_unsettled, _ = zip(*self._exchange((unsettled, [])), strict=True)
            common = {name for names in everyone for name in names if 2 * sum(name in other for other in everyone) > len(everyone)}
            self._leave_out(common.union(*all_unsettled))
        found = [[*(name for name in names if name not in self._left_out), *others] for names, others in zip(everyone, rest, strict=True)]
        if any(found):
            self._raises(found)

    def _repeated(self, again: Callable[[], Bits]) -> Bits:
        after = EveryGenerator(generator for call in self._calls for generator in call.generators)
        self._is_repeating = True
        try:
            return again()
        finally:
            self._is_repeating = False
            after.put_back()

    def _leave_out(self, names: set[str]) -> None:
        """Compares no longer what cannot be repeated; told the same on all ranks, as one that left out less would name others."""
        if names:
            self._left_out |= names
            _log.warning(
                "verify: replay: %s cannot be computed again with the same bits on most ranks, or not twice with the same bits on one, and "
                "so is no longer compared. Its computation is not deterministic (torch.use_deterministic_algorithms), reads what hooks or "
                "other objects keep outside of the model, or is no part of a call of the model",
                named(sorted(names)),
            )

    def changed_at_rest(self) -> list[str]:
        """Names, once, the weights and moments with other bits than at the end of the last iteration that torch has not written."""
        resting, self._resting = self._resting, {}
        return [
            name for name, (tensor, written, digest) in resting.items() if version_of(tensor) == written and tensor_digest(tensor) != digest
        ]

    def changed_shards(self) -> list[str]:
        """Names reduced gradients that have other bits than when they were written last."""
        return [
            f"the gradient of {name} (in memory)"
            for name, (param, written, digest) in self._shards.items()
            if param.grad is not None and version_of(param.grad) == written and tensor_digest(param.grad) != digest
        ]


class _Update:
    """One optimizer's step, made again on copies of what it reads and writes, where that can be."""

    def __init__(self, replay: Replay, optimizer: Optimizer) -> None:
        self._replay = replay
        self._twin: Optimizer | None = None
        self._calls = 0  # of the closure

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Copies what the step will read; with a closure the gradients come only when that has been called."""
        self._calls, self._twin = 0, None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._ready(optimizer)
            return args, kwargs

        def first() -> Any:
            loss = closure()
            self._calls += 1
            if self._calls == 1:
                self._ready(optimizer)
            return loss

        return (args[0], first, *args[2:]) if len(args) > 1 else args, kwargs | ({"closure": first} if "closure" in kwargs else {})

    def _ready(self, optimizer: Optimizer) -> None:
        self._replay.compare_gradients()
        if _is_repeatable(optimizer):
            with _excused():
                self._twin = _twin_of(optimizer)

    def end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the step again from where it began. Collective. Raises ReplayError."""
        twin, self._twin = self._twin, None
        names = self._replay._names
        first = second = _bits(optimizer, names) if twin is not None else {}
        if twin is not None:
            with _excused():
                step: Any = type(twin).step
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)
                second = dict(zip(first, _bits(twin, {}).values(), strict=True))
        self._replay.judge(first, lambda: second, self._replay.changed_shards())


def refusal(iteration: int, found: list[list[str]], hosts: list[str]) -> ReplayError:
    """The error of all ranks: what each has found."""
    said = [f"rank {rank} (host {hosts[rank]}): {named(names)}" for rank, names in enumerate(found) if names]
    return ReplayError(
        f"the iteration after {iteration} was computed again, and other bits came out at {'; '.join(said)}. Something there computes "
        "or keeps numbers wrongly, or writes state past torch; what was committed before is resumed"
    )


def _callable_modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose outermost calls make up the forward pass: not DDP, which would reduce, nor a LightningModule, which would log."""
    if isinstance(model, DistributedDataParallel):
        yield from _callable_modules(model.module, f"{prefix}.module")
        return
    for name, module in model.named_modules(prefix=prefix):
        if not hasattr(module, "training_step"):
            yield name, module


def _meets_others(module: nn.Module) -> bool:
    """Whether calls of a module need other ranks, which would wait for one that has given up."""
    return isinstance(module, nn.SyncBatchNorm) or any(isinstance(param, DTensor) for param in module._parameters.values())


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is torch.strided and (one.is_meta or tensor_digest(one) == tensor_digest(other))


def _outputs(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _note_gradient(grads: dict[int, torch.Tensor], index: int, number: int, incoming: tuple[torch.Tensor | None, ...]) -> None:
    """A hook of what has computed an output: notes the gradient of its result ``number``, where there is one."""
    if (grad := incoming[number]) is not None:
        grads[index] = grad


def _given_gradient(grad: torch.Tensor, number: int, incoming: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """A hook of what has computed an output: replaces the gradient of its result ``number``."""
    return *incoming[:number], grad, *incoming[number + 1 :]


def _detached(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _autocasts() -> list[dict[str, Any]]:
    kinds = {"cpu", accelerator.type} if (accelerator := torch.accelerator.current_accelerator()) is not None else {"cpu"}
    return [
        {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "cache_enabled": torch.is_autocast_cache_enabled()}
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    ]


def _is_repeatable(optimizer: Optimizer) -> bool:
    return type(optimizer) in _REPEATABLE and not any(group.get("differentiable") for group in optimizer.param_groups)


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of copies alone, as this one is now: its step writes nothing of the training."""
    twins = {param: _copy_of(param) for group in optimizer.param_groups for param in group["params"]}
    for param, twin in twins.items():
        twin.grad = _copy_of(param.grad)
    other: Optimizer = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))  # GradScaler's scale among them, which it takes away after the step
    other.param_groups = [{**group, "params": [twins[param] for param in group["params"]]} for group in optimizer.param_groups]
    other.state = defaultdict(
        dict,
        {
            twin: {key: _copy_of(value) for key, value in optimizer.state[param].items()}
            for param, twin in twins.items()
            if param in optimizer.state
        },
    )
    return other


def _is_written(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value) in (list, dict, set)


def _copy_of(value: Any) -> Any:
    """A copy of a tensor, or of a list, dict or set with the same items; anything else itself."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy() if _is_written(value) else value


@contextlib.contextmanager
def _excused() -> Iterator[None]:
    """Names an error of the second computation, and goes on: the training itself did nothing wrong."""
    try:
        yield
    except Exception as error:
        _log.warning("verify: replay: an update cannot be computed again: %s: %s", type(error).__name__, error)


def _bits(optimizer: Optimizer, names: Mapping[int, str]) -> Bits:
    return {name: tensor_digest(tensor) for name, tensor in _tensors(optimizer, names)}


def _tensors(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and the state of an optimizer, by name."""
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            name = names.get(id(param), f"parameter {index} of group {number}")
            yield name, param
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value
