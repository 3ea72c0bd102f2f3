"""Captures what DistributedDataParallel remembers beside parameters and buffers: else a restart would change the bits.

After its first backward DDP sorts the gradients into other buckets, by the order in which they became ready. The sum
over three or more ranks depends, in its last bits, on where in a bucket a value lies: a restarted DDP, whose first
step still uses the buckets of a first step, would end a little elsewhere. It also remembers whether buffers are to be
broadcast at the next forward, which under manual gradient synchronisation is not the same as at the start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.attributes import AttributeReturn, AttributeWalk
from gemini_ft.state.tensors import every_optimizer

_HOOK = declare(
    "state of DDP's communication hooks (PowerSGD)", Fate.CAPTURED, "copied at once: with error feedback as large as the gradients"
)
_PIPELINE_HOOK = declare("communication hooks of gradient pipelines", Fate.DERIVED, "from what the pipeline remembers, which is captured")
declare("hooks that let ranks' parameters differ (post_localSGD_hook)", Fate.REFUSED, "give `Checkpointer(replicated=False)`")
declare("order of DDP's gradient buckets", Fate.CAPTURED, "restored before the first step")
_UNREDUCED = declare(
    "parameters that are trained, and that DDP does not reduce, since they were frozen when it wrapped the model",
    Fate.REFUSED,
    "the ranks drift apart. Wrap the model while they require gradients, with find_unused_parameters=True, and freeze them after that (in "
    "Lightning's on_fit_start; BackboneFinetuning and other BaseFinetuning callbacks freeze in setup, which is too early); or have the "
    "script reduce their gradients",
)
functions: Any = dist  # with private ones that type checkers do not see


def ddp_state(model: DistributedDataParallel, replicated: bool = True) -> dict[str, Any]:
    """The state between two steps, as plain data. Collective the first time after a backward.

    ``replicated``: whether all ranks are to hold the same parameters after each step.

    Returns:
        ``buckets``: for each bucket the indices of its parameters, in order; empty as long as they are those DDP
        starts with. ``sync``: whether the next forward broadcasts the buffers, if the model does that at all.
        ``hooks``: what each communication hook remembers, in its state and its own attributes.

    Raises UnsupportedStateError: a communication hook's state cannot be captured, or the hook lets ranks differ; named.
    """
    refuse_hooks(model, replicated)
    return {"buckets": _buckets(model), "sync": model.require_forward_param_sync, "hooks": _hooks(model)}


def refuse_hooks(model: DistributedDataParallel, replicated: bool = True) -> None:
    """Raises UnsupportedStateError, by name, for a communication hook after which ranks hold different parameters."""
    for hook, state in _own_hooks(model):
        if replicated and "PostLocalSGDState" in [kind.__name__ for kind in type(state).__mro__]:
            raise UnsupportedStateError(
                f"{_name(hook)} lets the ranks' parameters differ between averages, and they are captured as replicated ones; give "
                "Checkpointer(replicated=False), and every rank's own are, or use another communication hook"
            )


def first_tensors(models: Mapping[str, nn.Module], buffers: bool) -> dict[str, torch.Tensor]:
    """Everything that all ranks are to begin alike with: name -> parameter or buffer.

    A model beside the wrapped one is part of it: it may be a copy of weights that no rank had been sent yet.

    ``models``: name -> module, wrapped by DDP or not. ``buffers``: whether buffers are to be alike, too.
    """
    found: dict[str, torch.Tensor] = {}
    for name, model in models.items():
        inner, ignored = (model.module, model.parameters_to_ignore) if isinstance(model, DistributedDataParallel) else (model, ())
        tensors = [*inner.named_parameters(), *(inner.named_buffers() if buffers else ())]
        found |= {f"{name}.{key}": tensor for key, tensor in tensors if key not in ignored}
    return found


def send_first(tensors: Mapping[str, torch.Tensor], exchange: Callable[[Any], list[Any]]) -> None:
    """Sends the first rank's tensors to all ranks, as a new DDP does unless it was given ``init_sync=False``. Collective.

    ``tensors``: of this rank, by name. ``exchange``: gives back every rank's object in rank order (`gemini_ft.worker.rendezvous.exchange`).

    Raises LayoutMismatchError: ranks have other tensors; the same text on all.
    """
    every = exchange([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()])
    for rank, said in enumerate(every):
        for first, other in itertools.zip_longest(every[0], said):
            if first != other:
                raise LayoutMismatchError(f"rank {rank} has {other} where rank 0 has {first}; all ranks must build the same models")
    if dist.is_initialized():
        with torch.no_grad():
            for tensor in tensors.values():
                value = tensor.contiguous()
                dist.broadcast(value, 0)
                tensor.copy_(value)


def restore_buckets(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Sorts the gradients as they were. A built-in communication hook must be registered after this, or it is lost."""
    if state["buckets"]:
        _rebuild(model, state["buckets"])


def restore_sync(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Lets the next forward broadcast buffers, or not, as it would have; lets communication hooks remember what they did.

    Raises LayoutMismatchError: there are other communication hooks now.
    """
    model.require_forward_param_sync = state["sync"]
    hooks = list(_own_hooks(model))
    now, then = ["gradient pipeline" if hook is None else _name(hook) for hook, _ in hooks], [name for name, _ in state["hooks"]]
    if now != then:
        raise LayoutMismatchError(f"communication hooks: {now} now and {then} in the snapshot; resume with the script that made it")
    for (hook, hook_state), (name, saved) in zip(hooks, state["hooks"], strict=True):
        if saved is not None:
            back = AttributeReturn({})
            for key, value in (("state", hook_state), ("hook", hook)):
                back.give(value, saved[key], f"{name}.{key}")


def frozen_at_first(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that DDP does not reduce, because they required no gradients when it wrapped the model; keeps what it finds.

    DDP remembers only how many it reduces. Where that is the number neither of all parameters nor of those that require gradients at the
    first call, nobody knows which, and none is named.
    """
    if "_gemini_frozen" not in vars(model):
        named = {name: param for name, param in model.module.named_parameters() if name not in model.parameters_to_ignore}
        frozen = {name: param for name, param in named.items() if not param.requires_grad}
        reduced = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        is_known = model.process_group.size() > 1 and reduced == len(named) - len(frozen)
        model._gemini_frozen = frozen if is_known else {}
    found: dict[str, nn.Parameter] = model._gemini_frozen
    return found


def unreduced(models: Mapping[str, DistributedDataParallel], optimizers: Sequence[Any]) -> Iterator[Finding]:
    """The parameters of wrapped models that optimizers train on every rank for itself, in the census."""
    frozen = {f"{name}.{key}": param for name, model in models.items() for key, param in frozen_at_first(model).items()}
    if found := {name: param for name, param in frozen.items() if param.requires_grad}:
        groups = [group for optimizer in every_optimizer(optimizers).values() for group in optimizer.param_groups]
        trained = {id(param) for group in groups for param in group["params"]}
        yield from (_UNREDUCED.found(name) for name, param in found.items() if id(param) in trained)


def flags(models: Iterable[DistributedDataParallel]) -> list[bool]:
    """A value that changes when `unreduced` has to be asked again; cheap enough for every step."""
    return [param.requires_grad for model in models for param in frozen_at_first(model).values()]


def has_left_join(models: Iterable[Any]) -> bool:
    """Whether a `join()` has ended since this was asked last: the same on all ranks, even on one that had no inputs in it."""
    # DDP sets it at the end of a join(), when it makes the ranks alike; it is taken from each model, so no any() here.
    left = [model for model in models if vars(model).pop("_authoritative_rank", None) is not None]
    return bool(left)


def refuse_absence(models: Iterable[DistributedDataParallel]) -> None:
    """Refuses to wait, inside `join()`, for ranks that have come to the end of their inputs. Collective.

    Those ranks ask in a collective, before each further step of the others, how many have inputs; this answers in place of a step.

    Raises UnsupportedStateError: there are some; or the `join()` has another first member, which alone may answer.
    """
    joined = [model for model in models if model._join_config.enable]
    if joined and not any(model._join_config.is_first_joinable for model in joined):
        raise UnsupportedStateError(
            "this join() has something else before the model that was given to the Checkpointer, so that ranks without inputs cannot be "
            "told from others; give the model first, Join([model, ...])"
        )
    for model in joined:
        if model._join_config.is_first_joinable:
            present, ranks = torch.ones(1, device=model.join_device), dist.get_world_size(model.join_process_group)
            dist.all_reduce(present, group=model.join_process_group)
            if int(present) < ranks:
                raise UnsupportedStateError(
                    f"only {int(present)} of {ranks} ranks have inputs inside this join() at a step that all of them must make: the first "
                    "with a snapshot, or the first after another join(). Give every rank inputs for it, or the same number to all "
                    "(drop_last=True, DistributedSampler)"
                )


def findings(name: str, model: DistributedDataParallel) -> Iterator[Finding]:
    """The communication hooks of a model in the census."""
    for hook, saved in _hooks(model):
        yield (_HOOK if saved is not None else _PIPELINE_HOOK).found(f"{name}.{hook}")


def _hooks(model: DistributedDataParallel) -> list[tuple[str, dict[str, Any] | None]]:
    """Name and state of each communication hook; None: it belongs to a gradient pipeline, which is captured by itself."""
    found: list[tuple[str, dict[str, Any] | None]] = []
    for hook, state in _own_hooks(model):
        if hook is None:
            found.append(("gradient pipeline", None))
            continue
        walk = AttributeWalk({f"module.{name}": param for name, param in model.module.named_parameters()}, [id(model), id(model.module)])
        found.append((_name(hook), {"state": walk.take(state, f"{_name(hook)}.state"), "hook": walk.take(hook, f"{_name(hook)}.hook")}))
    return found


def _own_hooks(model: DistributedDataParallel) -> Iterator[tuple[Any, Any]]:
    """The user's communication hooks and their states; in a gradient pipeline those for what the pipeline leaves alone."""
    hooks: list[tuple[Any, Any]] = model._comm_hooks
    for hook, state in hooks:
        if type(state).__module__.startswith("gemini_ft.pipeline"):
            yield None, None
            if state.otherwise is not None:
                inner_state, inner = state.otherwise
                yield inner, inner_state
        else:
            yield hook, state


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _buckets(model: Any) -> list[list[int]]:
    if model.find_unused_parameters and not model.static_graph:
        return []  # never sorted again
    if "_gemini_buckets" not in vars(model):
        # The next forward would sort them. Doing it now makes the result visible; the forward then has nothing to do. A rank that has come
        # to the end of its inputs, which it can have done only before the failure, does it before the next forward of the others.
        if not ("_gemini_first_buckets" in vars(model) and model._join_config.enable):
            model.reducer._rebuild_buckets()
        model.logger.set_runtime_stats_and_log()
        text = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
        if not text:
            return list(vars(model).get("_gemini_first_buckets", []))
        model._gemini_buckets = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
    return list(model._gemini_buckets)


def _rebuild(model: Any, buckets: list[list[int]]) -> None:
    """Replaces the reducer, as unpickling does. At its second step it will sort the gradients by itself again."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    with _assigning(buckets, model.bucket_bytes_cap):
        model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, hook_state in model._comm_hooks:
        functions._register_comm_hook(model.reducer, hook_state, hook)
    model._gemini_first_buckets = buckets


@contextmanager
def _assigning(buckets: Sequence[Sequence[int]], limit: int) -> Iterator[None]:
    """Makes DDP's own assignment of parameters to buckets give ``buckets`` inside; the caller of that reverses it."""
    assign = functions._compute_bucket_assignment_by_size

    def assigned(*args: Any, **kwargs: Any) -> tuple[list[list[int]], list[int]]:
        return [list(bucket) for bucket in reversed(buckets)], [limit] * len(buckets)

    functions._compute_bucket_assignment_by_size = assigned
    try:
        yield
    finally:
        functions._compute_bucket_assignment_by_size = assign
