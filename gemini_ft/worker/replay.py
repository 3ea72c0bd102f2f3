"""Computes a micro-batch, and the update that follows it, a second time, and compares the bits (``verify: replay``).

The iteration after a comparison of the ranks is checked. Calls of the model are recorded with their inputs, random states and the
gradients of their outputs; just before the update they are made again on the same weights, and each parameter's gradient, as this rank
alone has formed it, must have the same bits. The optimizer's step is made twice from the same state. Nothing is reduced again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from gemini_ft.core.words import named
from gemini_ft.errors import ReplayError
from gemini_ft.state.replicas import tensor_digest
from gemini_ft.state.rng import rng_state, set_rng_state
from gemini_ft.state.tensors import version_of

_log = logging.getLogger("gemini_ft")
Bits = dict[str, str]  # name of a result -> digest of its bytes


@dataclass(kw_only=True)
class _Call:
    """An outermost call of a module under training, as it is made again.

    Attributes:
        grads: place among the tensors of the output -> the gradient that the loss gave it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    autocasts: list[dict[str, Any]]
    grads: dict[int, torch.Tensor] = field(default_factory=dict)

    def again(self) -> list[torch.Tensor]:
        """The output's tensors, computed from what was there at the first time."""
        set_rng_state(self.rng)
        for buffer, before in self.buffers:
            put_back(buffer, before)
        with contextlib.ExitStack() as stack:
            for options in self.autocasts:
                stack.enter_context(torch.autocast(**options))
            return _outputs(self.module(*self.args, **self.kwargs))


class Replay:
    """The checks of one rank. While none is due there is no hook.

    Args:
        exchange: gives back every rank's object in rank order.
        at_rest: what was found to have changed in memory since the last snapshot.
        raises: called on all ranks with what each has found, where any has.
    """

    def __init__(
        self,
        exchange: Callable[[tuple[list[str], list[str]]], list[tuple[list[str], list[str]]]],
        at_rest: Callable[[], list[str]],
        raises: Callable[[list[list[str]]], None],
    ) -> None:
        self._exchange, self._at_rest, self._raises = exchange, at_rest, raises
        self._hooks: list[Any] = []
        self._left_out: set[str] = set()  # results that most ranks could not repeat when they were last compared
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
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, prefix), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
            for name, param in model.named_parameters(prefix=label):
                self._names[id(param)] = name
                if isinstance(param, DTensor) and param.requires_grad:
                    self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._note_shard, name)))  # type: ignore[no-untyped-call]
                elif param.requires_grad:
                    self._follow(name, param)
        for optimizer in optimizers:
            self._resting |= {
                name: (tensor, version_of(tensor), tensor_digest(tensor)) for name, tensor in _tensors(optimizer, self._names)
            }
            update = _Update(self, optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(update.begin))
            self._hooks.append(optimizer.register_step_post_hook(update.end))

    def disarm(self) -> None:
        """Ends the check, as the iteration has ended."""
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

    def _enter(self, prefix: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_passive:
            return
        self._depth += 1
        for name, param in module.named_parameters(prefix=prefix):  # FSDP2 has put them together just now
            if not isinstance(param, DTensor):
                self._follow(name, param)
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        if self._gradients:  # of the micro-batch before
            self._calls, self._gradients = [], {}
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        args, kwargs = tree_map(_detached, args), tree_map(_detached, kwargs)
        self._open = _Call(module=module, args=args, kwargs=kwargs, rng=rng_state(), buffers=buffers, autocasts=_autocasts())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_passive:
            return
        self._depth -= 1
        call = self._open
        if self._depth or call is None:
            return
        self._open = None
        for index, tensor in enumerate(_outputs(output)):
            tensor.register_hook(partial(call.grads.__setitem__, index))  # type: ignore[no-untyped-call]
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
        buffers = {id(buffer): (buffer, buffer.detach().clone()) for call in self._calls for buffer, _ in call.buffers}

        def again() -> Bits:
            self._gradients = {}
            try:
                self._repeat_calls(list(params.values()))
            except Exception as error:  # the training itself did nothing wrong
                _log.warning("verify: replay: gradients cannot be computed again: %s: %s", type(error).__name__, error)
                self._gradients = first
            return {f"the gradient of {name}": digest for name, digest in self._gradients.items()}

        try:
            self.judge({f"the gradient of {name}": digest for name, digest in first.items()}, again if first and self._calls else dict)
        finally:
            for buffer, after in buffers.values():
                put_back(buffer, after)
            self._calls = []

    def _repeat_calls(self, params: list[torch.Tensor]) -> None:
        outputs, grads = list[torch.Tensor](), list[torch.Tensor]()
        with torch.enable_grad():
            for call in self._calls:
                tensors = call.again()
                outputs += [tensors[index] for index in call.grads]
                grads += call.grads.values()
            torch.autograd.grad(outputs, params, grads, allow_unused=True)

    def judge(self, first: Bits, again: Callable[[], Bits], changed: Collection[str] = ()) -> None:
        """Compares results with those of a second computation. Collective.

        Args:
            changed: what has changed that nobody has written.

        Raises:
            ReplayError: a few ranks did not get the same bits.
        """
        after, self._is_repeating = rng_state(), True
        try:
            second = again()
        finally:
            self._is_repeating = False
            set_rng_state(after)
        differing = [name for name, digest in first.items() if second.get(name) != digest]
        self._left_out -= {name for name in first if name not in differing}
        mine = [name for name in differing if name not in self._left_out], [*self._at_rest(), *changed]
        everyone, rest = zip(*self._exchange(mine), strict=True)
        common = {name for found in everyone for name in found if 2 * sum(name in other for other in everyone) > len(everyone)}
        if common and not self._left_out >= common:
            self._left_out |= common
            _log.warning(
                "verify: replay: most ranks do not get the same bits again for %s; they are no longer compared. Their computation is not "
                "deterministic (torch.use_deterministic_algorithms), or no part of a call of the model",
                named(sorted(common)),
            )
        found = [[*(name for name in names if name not in common), *others] for names, others in zip(everyone, rest, strict=True)]
        if any(found):
            self._raises(found)

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
    """One optimizer's step, made twice."""

    def __init__(self, replay: Replay, optimizer: Optimizer) -> None:
        self._replay = replay
        self._before: list[Callable[[], None]] = []
        self._rng: dict[str, Any] = {}
        self._losses: list[Any] = []
        self._has_closure = False

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Keeps what the step will change; with a closure the gradients come only when that has been called."""
        self._losses, self._before = [], [*_kept(optimizer)]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._has_closure = closure is not None
        if closure is None:
            self._ready()
            return args, kwargs

        def first() -> Any:
            loss = closure()
            self._losses.append(loss)
            if len(self._losses) == 1:
                self._ready()
            return loss

        return (args[0], first, *args[2:]) if len(args) > 1 else args, kwargs | ({"closure": first} if "closure" in kwargs else {})

    def _ready(self) -> None:
        self._replay.compare_gradients()
        self._rng = rng_state()

    def end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the step again from where it began. Collective. Raises ReplayError."""
        if self._has_closure:  # its gradients are there
            args, kwargs = args[:1], {name: value for name, value in kwargs.items() if name != "closure"}
            loss = self._losses[0] if self._losses else None
            kwargs["closure"] = lambda: loss
        label = self._replay._names

        def again() -> Bits:
            for restore in self._before:
                restore()
            set_rng_state(self._rng)
            step = type(optimizer).step
            getattr(step, "__wrapped__", step)(*args, **kwargs) if getattr(step, "hooked", False) else step(*args, **kwargs)
            return _bits(optimizer, label)

        once = len(self._losses) == self._has_closure  # LBFGS asks for several
        first = _bits(optimizer, label) if once else {}
        self._replay.judge(first, again if once else dict, self._replay.changed_shards())
        self._before = []


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


def _outputs(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _detached(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _autocasts() -> list[dict[str, Any]]:
    kinds = {"cpu", accelerator.type} if (accelerator := torch.accelerator.current_accelerator()) is not None else {"cpu"}
    return [
        {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "cache_enabled": torch.is_autocast_cache_enabled()}
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    ]


def _kept(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Calls that put parameters, groups and state of an optimizer back as they are now."""
    for group in optimizer.param_groups:
        yield partial(group.update, {key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
        for param in group["params"]:
            yield partial(put_back, param, param.detach().clone())
            if param in optimizer.state:
                state = optimizer.state[param]
                kept = {
                    key: (value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value))
                    for key, value in state.items()
                }
                yield partial(_restore_state, state, kept)
            else:
                yield partial(optimizer.state.pop, param, None)


def put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def _restore_state(state: dict[Any, Any], kept: Mapping[Any, tuple[Any, Any]]) -> None:
    for key in [key for key in state if key not in kept]:
        del state[key]
    for key, (value, before) in kept.items():
        if isinstance(value, torch.Tensor):
            put_back(value, before)
        state[key] = value if isinstance(value, torch.Tensor) else before


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
