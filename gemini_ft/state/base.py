"""The state that a checkpointer captures and puts back: torch modules and optimizers, or an engine around them.

Gradients are part of it where they wait for an update when a snapshot is taken: one optimizer accumulates while another one steps.

An optimizer's step uses its gradients up. The next update needs all that has been written to a gradient since then, so it is kept
with the snapshot, each rank's own. Gradients that were used up, or are zero, are given back as zeros, because an optimizer treats a
parameter without gradient otherwise. A loop that uses a gradient again after the step (scales it down in place of zeroing it)
finds zeros after a restart. A parameter of no optimizer keeps its gradient too, since it may get one; freeze what is not trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gemini_ft.core.census import Fate, Finding, declare
from gemini_ft.core.layout import Layout, Read, TensorSpec
from gemini_ft.errors import LayoutMismatchError, UnsupportedStateError, WorldSizeError
from gemini_ft.state.hyperparameters import Given, of_groups
from gemini_ft.state.modes import Modes
from gemini_ft.state.modules import Extras, apply_extras, collect_extras, destinations, findings, structure
from gemini_ft.state.rebuilding import Changes, Structure, build, difference, local_shape, refuse
from gemini_ft.state.rebuilding import describe as describe_all
from gemini_ft.state.survey import Models, Survey, Surveyor
from gemini_ft.state.tensors import Live, Source, describe, every_optimizer, local

WAITING = declare(
    "gradients that wait: an optimizer accumulates while another one steps", Fate.CAPTURED, "copied at once, as large as the parameters"
)
declare(
    "gradients that an optimizer's step has used up",
    Fate.DERIVED,
    "given back as zeros: a loop must not use them again (scale them down in place of zeroing them)",
)

_Mark = tuple[weakref.ref[torch.Tensor], int]  # a gradient and its version counter


class PendingGradients:
    """The gradients that have been written since the optimizers of their parameters stepped."""

    def __init__(self) -> None:
        self._used: dict[int, _Mark] = {}  # by the id of its parameter; a mark of one that is gone matches no gradient

    def watch(self, optimizers: Iterable[Optimizer]) -> list[Any]:
        """Looks at every step from now on; returns the handles of the hooks."""
        return [optimizer.register_step_post_hook(self._stepped) for optimizer in optimizers]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if (grad := param.grad) is not None:
                    self._used[id(param)] = (weakref.ref(grad), _version(grad))

    def collect(self, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The gradients that wait, by the names of their parameters; and which parameters have a gradient beside these.

        Args:
            params: name -> parameter.

        Raises:
            UnsupportedStateError: a gradient that waits is sparse.
        """
        waiting, present, sparse = dict[str, torch.Tensor](), list[str](), list[str]()
        for name, param in params.items():
            if (grad := param.grad) is not None:
                mark = self._used.get(id(param))
                if (mark is not None and mark[0]() is grad and mark[1] == _version(grad)) or _is_zero(grad):
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
        return {"waiting": waiting, "present": True if len(present) == len(params) else present, "sparse": sparse}

    def restore(self, saved: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> None:
        """Gives every parameter the gradient that it had, and none to the others.

        Raises:
            LayoutMismatchError: there is no such parameter.
        """
        if absent := saved["waiting"].keys() - params.keys():
            raise LayoutMismatchError(f"the snapshot has a gradient of {min(absent)}, which is not there now")
        present = set(params if saved["present"] is True else saved["present"])
        sparse = set(saved.get("sparse", ()))  # an optimizer for sparse gradients refuses dense ones; older snapshots do not say
        for name, param in params.items():
            if (value := saved["waiting"].get(name)) is not None:
                param.grad = _like(param, value)
            else:
                param.grad = None if name not in present else _no_rows(param) if name in sparse else torch.zeros_like(param)

    def findings(self, params: Mapping[str, torch.Tensor]) -> Iterable[Finding]:
        """The gradients that wait now, for the census."""
        for name, grad in self.collect(params)["waiting"].items():
            yield WAITING.found(f"{name}.grad", grad.nbytes)


def _version(grad: torch.Tensor) -> int:
    return local(grad)._version


def _is_zero(grad: torch.Tensor) -> bool:
    """Whether it can be given back as zeros: every bit is. A negative zero is none.

    Looking at bytes is one pass, which takes 10 ms for 85 MB and is the price of `set_to_none=False`. Marking them in ``zero_grad()``
    would spare it, and lose what is then written past the version counter: by a hook of DDP into its bucket, by ``grad.data``.
    """
    part = local(grad).detach()
    if part.is_sparse:
        return part._nnz() == 0  # rows that are named get an update, whatever their values are
    if part.layout != torch.strided or part.is_conj() or part.is_neg():
        return False
    return not bool(part.contiguous().view(-1).view(torch.uint8).any())


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


class TrainingState(Protocol):
    """The state of one rank; all calls come from the training thread."""

    def survey(self) -> list[Live]:
        """Finds each tensor where it is now; cheap enough for every step."""
        ...

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        """Describes what to capture; raises UnsupportedStateError for state that cannot be captured exactly."""
        ...

    def extras(self) -> Extras:
        """The state that is no tensor, at the moment of the survey just made; it may hold live objects."""
        ...

    def check(self, extras: Extras) -> None:
        """Raises LayoutMismatchError, before anything is changed, if ``extras`` belong to another kind of state."""
        ...

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        """The tensors to fill from a snapshot; those that do not exist yet are made."""
        ...

    def apply_extras(self, extras: Extras) -> None:
        """Puts back `extras`, after the tensors have been filled on all ranks: it may be collective."""
        ...

    def findings(self) -> Iterable[Finding]:
        """Everything in it, for the census."""
        ...

    def hyperparameters(self) -> Given:
        """The hyperparameters of optimizers and engines, as the script has given them."""
        ...

    def structure(self) -> object:
        """A value that changes when the census has to be taken again; cheap enough for every step."""
        ...

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        """Does the work of ``destinations`` for a snapshot that another number of ranks has made.

        Args:
            layouts: rank of that job -> layout of its shard.
            extras: rank of that job -> its extras.
            rank: this rank.
            world_size: ranks of this job.

        Returns:
            What to read, by owner and ascending offset; name -> tensor to fill; what to give to ``apply_extras``.
        """
        ...


class PlainState:
    """Modules and optimizers as their owner sees them; see `gemini_ft.state.modules`.

    Args:
        models: name -> module.
        optimizers: torch optimizers, wrapped by Lightning or Fabric or not.
        replicated: whether plain parameters hold the same bytes on all ranks; None: whether a model is a DDP one.
        ignored: whether the user sees to what has this name in the census.
        modes: whether flags and attributes of modules are part of it (`gemini_ft.state.modes`); no: the caller keeps them.
        can_rebuild: whether the user's script can build what has been added while training.
        before: what was bound to the same Checkpointer until now.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[Any],
        replicated: bool | None = None,
        *,
        ignored: Callable[[str], bool] = lambda _: False,
        modes: bool = True,
        can_rebuild: bool = False,
        before: PlainState | None = None,
    ) -> None:
        self.models, self.optimizers, self.replicated = models, optimizers, replicated
        self._ignored, self._has_modes, self._can_rebuild = ignored, modes, can_rebuild
        self._surveyor = Surveyor(models, optimizers)
        self._found: Survey | None = None  # by the last survey
        self._modes: Modes | None = None
        self._pending: PendingGradients | None = None
        self._strides: Mapping[str, Sequence[int]] = {}  # of the snapshot that is being restored
        self._outline: object = None  # by which a change of the layout is seen
        self._changes = Changes()
        self._born = Structure()
        self.remember()
        if before is not None:
            self.inherit(before)

    def remember(self) -> None:
        """Takes the present state as the one that the script builds, before any training."""
        self._born, self._outline = describe_all(self.models, self.optimizers), None
        self._modes = Modes(self._surveyor.tree.modules()) if self._has_modes else None

    def inherit(self, before: PlainState) -> None:
        """Takes over what the script had made for ``before``."""
        self._born, self._modes = before._born, before._modes

    def watch(self) -> list[Any]:
        """Looks at the optimizers' steps, so that gradients which wait for one are captured; returns the handles of the hooks."""
        self._pending = PendingGradients()
        return self._pending.watch(every_optimizer(self.optimizers).values())

    def survey(self) -> list[Live]:
        self._found = self._surveyor()
        return self._found.live

    def describe(self, live: Sequence[Live], rank: int, world_size: int) -> list[Source]:
        return describe(live, rank, world_size, self.is_replicated)

    def extras(self) -> Extras:
        found = self._found
        assert found is not None
        saved = collect_extras(found, self._ignored)
        if self._modes is not None:
            saved["modes"] = self._modes.collect(found.modules)
        if self._pending is not None:
            saved["pending"] = self._pending.collect(found.parameters)
        if changes := self._present_changes(found):
            saved["changes"] = asdict(changes)
        return saved

    def _present_changes(self, found: Survey) -> Changes:
        """Changes since the script built it; computed again when names, shapes, dtypes, modules or groups differ."""
        outline = found.structure, [(local_shape(tensor), tensor.dtype) for tensor in found.own.values()]
        if outline != self._outline:
            now = describe_all(self.models, self.optimizers)
            if self._outline is None:
                self._born = self._born.with_newcomers(now)
            changes = difference(self._born, now)
            if not self._can_rebuild:
                refuse(changes, found.modules)
            self._changes, self._outline = changes, outline
        return self._changes

    def check(self, extras: Extras) -> None:
        """Follows changes of the layout; any other difference is found when the state is put back."""
        self._strides = extras["strides"]
        if "changes" in extras:
            build(self.models, self.optimizers, Changes(**extras["changes"]))

    def destinations(self, stored: Iterable[TensorSpec], rank: int, world_size: int) -> list[Source]:
        return destinations(self.models, self.optimizers, stored, rank, world_size, replicated=self.is_replicated, strides=self._strides)

    def apply_extras(self, extras: Extras) -> None:
        apply_extras(self.models, self.optimizers, extras)
        if self._modes is not None and "modes" in extras:
            self._modes.restore(extras["modes"], self._surveyor.tree.modules())
        if "pending" in extras and self._pending is not None:
            self._pending.restore(extras["pending"], self._surveyor().parameters)

    def resized(
        self, layouts: Mapping[int, Layout], extras: Mapping[int, Extras], rank: int, world_size: int
    ) -> tuple[Sequence[Read], Mapping[str, torch.Tensor], Extras]:
        raise WorldSizeError(f"plain modules and optimizers of {len(layouts)} ranks cannot be loaded by {world_size}")

    def findings(self) -> Iterable[Finding]:
        found = self._surveyor()
        yield from findings(found)
        if self._modes is not None:
            yield from self._modes.findings(found.modules)
        if self._pending is not None:
            yield from self._pending.findings(found.parameters)

    def hyperparameters(self) -> Given:
        found: Given = {}
        for name, optimizer in every_optimizer(self.optimizers).items():
            found |= of_groups(f"{name} ({type(optimizer).__name__})", optimizer.param_groups)
        return found

    def structure(self) -> object:
        modules = self._surveyor.tree.modules().values()
        flags = [(id(module), module.training, len(module._buffers)) for module in modules]
        return structure(self.optimizers), flags

    @property
    def is_replicated(self) -> bool:
        """Whether plain parameters hold the same bytes on all ranks."""
        if self.replicated is not None:
            return self.replicated
        return any(isinstance(model, DistributedDataParallel) for model in self.models.values())

    @classmethod
    def of(cls, models: nn.Module | Models, optimizers: Any, replicated: bool | None, **options: Any) -> PlainState:
        """State of one module or several, one optimizer or several; options are those of the class."""
        named = {"model": models} if isinstance(models, nn.Module) else dict(models)
        return cls(named, list(optimizers) if isinstance(optimizers, Sequence) else [optimizers], replicated, **options)
