"""Gradients that wait for an update when a snapshot is taken: one optimizer accumulates while another one steps.

An optimizer's step uses its gradients up. The next update needs all that has been written to a gradient since then, so it is kept
with the snapshot, each rank's own. Gradients that were used up, or are zero, are given back as zeros, because an optimizer treats a
parameter without gradient otherwise. A loop that never zeroes its gradients is noticed by its second backward pass: from then on all are
kept, after a resume too. A parameter of no optimizer keeps its gradient too, since it may get one; freeze what is not trained.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError
from gemini_ft.state.tensors import local, version_of

WAITING = declare(
    "gradients that wait: an optimizer accumulates while another one steps", Fate.CAPTURED, "copied at once, as large as the parameters"
)


Mark = tuple[weakref.ref[torch.Tensor], int]  # a gradient and its version counter


def mark_of(grad: torch.Tensor) -> Mark:
    """A mark of a gradient as it is now."""
    return weakref.ref(grad), version_of(grad)


def is_as_marked(grad: torch.Tensor, mark: Mark | None) -> bool:
    """Whether a gradient is the marked one, and was not written to since; writes past its counter (``grad.data``) are not seen."""
    return mark is not None and mark[0]() is grad and mark[1] == version_of(grad)


def _complete(optimizer: Optimizer) -> None:
    """Gives an optimizer that has not called torch's ``__init__``, as some that wrap others, whatever that would have made.

    Torch has the steps of all objects of its class call hooks then, also of those that have none.
    """
    for name in ("defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not hasattr(type(optimizer), name):
            setattr(type(optimizer), name, OrderedDict())
    Optimizer.__setstate__(optimizer, {})


class PendingGradients:
    """The gradients that have been written since the optimizers of their parameters stepped."""

    def __init__(self) -> None:
        self._used: dict[int, Mark] = {}  # by the id of its parameter; a mark of one that is gone matches no gradient
        self._added_to = set[int]()  # ids of the parameters whose gradients a loop adds to without zeroing them
        self._sentries: dict[int, Any] = {}  # id of an optimizer -> the hook for the first backward pass after its first step

    def watch(self, optimizers: Collection[Optimizer]) -> list[Any]:
        """Looks at every step from now on; returns the handles of the hooks."""
        for optimizer in optimizers:
            if "_optimizer_step_post_hooks" not in vars(optimizer):
                _complete(optimizer)
        return [optimizer.register_step_post_hook(self._stepped) for optimizer in optimizers]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if (grad := param.grad) is not None:
                    self._used[id(param)] = mark_of(grad)
                    if id(optimizer) not in self._sentries and param.requires_grad and param.is_leaf:
                        self._look_out(optimizer, param)

    def _look_out(self, optimizer: Optimizer, param: torch.Tensor) -> None:
        number, owner, seen = id(optimizer), weakref.ref(optimizer), weakref.ref(param)  # a hook that holds its tensor is never freed

        def look(_: torch.Tensor) -> None:
            self._sentries[number].remove()
            optimizer, param = owner(), seen()
            if optimizer is not None and param is not None and param.grad is not None and self._is_used(param, param.grad):
                self._added_to.update(id(param) for group in optimizer.param_groups for param in group["params"])

        self._sentries[number] = param.register_hook(look)  # type: ignore[no-untyped-call]

    def _is_used(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether nothing was written to a gradient since the optimizer of its parameter stepped."""
        return is_as_marked(grad, self._used.get(id(param)))

    def collect(self, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The gradients that wait, by the names of their parameters; which parameters have a gradient beside these, and which ones
        a loop adds to without zeroing them.

        Raises UnsupportedStateError: a gradient that waits is sparse.
        """
        waiting, present, sparse = dict[str, torch.Tensor](), list[str](), list[str]()
        found = {name: (param, param.grad) for name, param in params.items() if param.grad is not None}
        used = {name for name, (param, grad) in found.items() if self._is_used(param, grad) and id(param) not in self._added_to}
        zero = zeros_among({name: grad for name, (_, grad) in found.items() if name not in used})
        for name, (_, grad) in found.items():
            if name in used or name in zero:
                present.append(name)
                if grad.is_sparse:
                    sparse.append(name)
            elif grad.layout != torch.strided:
                raise UnsupportedStateError(
                    f"the gradient of {name} waits for its optimizer, and is sparse, which cannot be captured; let this optimizer step "
                    "in every iteration that ends with checkpointer.step()"
                )
            else:
                waiting[name] = local(grad).detach()
        added_to = [name for name, param in params.items() if id(param) in self._added_to] if self._added_to else []
        return {"waiting": waiting, "present": True if len(present) == len(params) else present, "sparse": sparse, "added_to": added_to}

    def restore(self, saved: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> None:
        """Gives every parameter the gradient that it had, and none to the others.

        Raises LayoutMismatchError: there is no such parameter.
        """
        if absent := saved["waiting"].keys() - params.keys():
            raise LayoutMismatchError(f"the snapshot has a gradient of {min(absent)}, which is not there now")
        present = set(params if saved["present"] is True else saved["present"])
        sparse = set(saved.get("sparse", ()))  # an optimizer for sparse gradients refuses dense ones; older snapshots do not say
        self._added_to.update(id(params[name]) for name in saved.get("added_to", ()) if name in params)  # nor do these
        for name, param in params.items():
            if (value := saved["waiting"].get(name)) is not None:
                param.grad = _like(param, value)
            else:
                param.grad = None if name not in present else _no_rows(param) if name in sparse else torch.zeros_like(param)

    def findings(self, params: Mapping[str, torch.Tensor]) -> Iterable[Finding]:
        """The gradients that wait now, for the census."""
        for name, grad in self.collect(params)["waiting"].items():
            yield WAITING.found(f"{name}.grad", grad.nbytes)


def zeros_among(grads: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of those that can be given back as zeros: every bit is. A negative zero is none.

    Looking at bytes is one pass, which takes 10 ms for 85 MB and is the price of `set_to_none=False`; a device is waited for once, and not
    for each. Marking them in ``zero_grad()`` would spare it, and lose what is then written past the version counter: by a hook of DDP into
    its bucket, by ``grad.data``.
    """
    parts = {name: local(grad).detach() for name, grad in grads.items()}
    empty = {name for name, part in parts.items() if part.is_sparse and part._nnz() == 0}  # rows that are named get an update
    has_bits: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        if part.layout == torch.strided and not (part.is_conj() or part.is_neg()):
            has_bits.setdefault(part.device, {})[name] = part.contiguous().view(-1).view(torch.uint8).any()
    told = {name: bits for each in has_bits.values() for name, bits in zip(each, torch.stack([*each.values()]).cpu().tolist(), strict=True)}
    return empty | {name for name, bits in told.items() if not bits}


def _no_rows(param: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)


def _like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, with its strides."""
    if isinstance(param, DTensor):
        part = torch.empty_like(param._local_tensor, dtype=value.dtype).copy_(value)
        return DTensor.from_local(part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
    return torch.empty_like(param, dtype=value.dtype).copy_(value)
