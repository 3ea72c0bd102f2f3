"""Names the live tensors of a training job, and tells which ranks hold the same bytes.

    live = survey(models, optimizers).live         every step: the tensors as they are now (`gemini_ft.state.survey`)
    Fingerprint(live)                              equal: the sources and copy plans made then are still right
    sources = describe(live, rank, world, ...)     at a change: the same with dtype, shape and group of ranks

Names: parameters and buffers are ``<model>.<fqn>``; optimizer state is ``optim<i>.<parameter>.<key>``.
A parameter that no model holds is ``optim<i>.group<g>.param<j>``. Prefixes of wrappers (DDP,
torch.compile, Fabric) do not enter names. A tensor reached twice is captured once, under the first name.

Groups: see `describe`. What cannot be captured exactly is refused by name, never skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gemini_ft.core.layout import ITEMSIZES, PER_RANK, TensorSpec
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.state.attributes import held
from gemini_ft.torch_versions import guard_of

HOST = "host"  # ends TensorSpec.logical of optimizer state that stays on the CPU although its parameter does not

_MODULE_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_original_module",
}
_OPTIMIZER_WRAPPERS = {"LightningOptimizer": "_optimizer", "_FabricOptimizer": "optimizer", "AcceleratedOptimizer": "optimizer"}
# Its defaults are the script's; step is there when a scheduler counts calls; the rest is of one call alone.
_TORCH_ATTRIBUTES = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {
    "step",
    "zero_grad",
    "_opt_called",
    "_step_count",
    "grad_scale",
    "found_inf",
}
_open_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # known to keep all their state in sight
_ADDRESS, _STRIDE, _FORM = torch.Tensor.data_ptr, methodcaller("stride"), attrgetter("shape", "dtype", "device")
_FSDP1 = "_fsdp_wrapped_module"
_NO_FSDP1 = "belongs to FSDP1, whose flat parameters hide who owns what; use FSDP2 (fully_shard)"


class Role(Enum):
    """The role of a tensor in the training loop."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"


class Live(NamedTuple):
    """One tensor of the training state, where it lives now."""

    name: str  # as it is called in snapshots
    tensor: torch.Tensor  # as its owner holds it, so possibly a DTensor
    role: Role  # parameter, buffer or optimizer state
    param: torch.Tensor | None = None  # the parameter that optimizer state belongs to
    same_as: str | None = None  # the earlier name under which the very same tensor was found


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor to capture.

    ``tensor``: this rank's part, detached: same memory, same version counter, never a copy. Its bytes are defined as those of its elements
    in logical (row-major) order, whatever its strides.
    """

    spec: TensorSpec  # name, dtype, local shape and group of ranks
    tensor: torch.Tensor
    mutable: bool  # it may be written at any time (buffers), so it must be copied at once


def unwrap_model(module: nn.Module) -> nn.Module:
    """The user's module inside DDP, torch.compile and Fabric wrappers."""
    while inner := next((_MODULE_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _MODULE_WRAPPERS), None):
        module = getattr(module, inner)
    if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
        raise UnsupportedStateError(f"{type(module).__qualname__} {_NO_FSDP1}")
    return module


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's, Fabric's and accelerate's wrappers.

    Raises UnsupportedStateError: it is no torch optimizer, or one that keeps state where it cannot be seen.
    """
    while inner := next(
        (_OPTIMIZER_WRAPPERS[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in _OPTIMIZER_WRAPPERS), None
    ):
        optimizer = getattr(optimizer, inner)
    kind = type(optimizer).__qualname__
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedStateError(f"{kind} is not a torch.optim.Optimizer; give its inner optimizer, and the rest of its state as extras")
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise UnsupportedStateError(f"{kind} shards its state without DTensors; use FSDP2 (fully_shard) or DeepSpeed instead")
    if optimizer not in _open_optimizers:
        hidden = sorted(map(str, _state_keys(optimizer) - {"state", "param_groups"}))
        if hidden and not own_attributes(optimizer):
            raise UnsupportedStateError(
                f"{kind} keeps state outside of optimizer.state ({', '.join(hidden)}), and not in attributes either; "
                "give the optimizer as extra state (an object with state_dict and load_state_dict) instead"
            )
        _open_optimizers.add(optimizer)
    return optimizer


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that an optimizer has beside those of every torch optimizer."""
    attributes = vars(optimizer)
    return {name: value for name, value in attributes.items() if name not in _TORCH_ATTRIBUTES}


def every_optimizer(optimizers: Sequence[Any]) -> dict[str, Optimizer]:
    """Name -> torch optimizer, of those that are given (``optim0``, ...), and then of those that they hold (``optim0.base_optimizer``)."""
    found = {f"optim{index}": unwrap_optimizer(optimizer) for index, optimizer in enumerate(optimizers)}
    seen, queue = set(map(id, found.values())), list(found.items())
    while queue:
        path, outer = queue.pop(0)
        for name, value in own_attributes(outer).items():
            for where, inner in held(value, f"{path}.{name}"):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    found[where] = unwrap_optimizer(inner)
                    queue.append((where, inner))
    return found


def _state_keys(optimizer: Optimizer) -> set[str]:
    """The keys of an optimizer's state_dict, or none for torch's own, which is not worth the call."""
    return set() if type(optimizer).state_dict is Optimizer.state_dict else set(optimizer.state_dict())


class Fingerprint:
    """Tensors as they are when this is made; equal to an earlier one if and only if the sources described then are still right.

    Compare only while those sources are alive: their memory cannot then be given to another tensor.

    Raises UnsupportedStateError: a tensor has no memory (it is sparse, or lazy); named.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, live: Sequence[Live]) -> None:
        self._names = [(item.name, id(item.tensor)) for item in live]
        self._tensors = list({id(item.tensor): item.tensor for item in live}.values())
        self._sharded = [tensor for tensor in self._tensors if isinstance(tensor, DTensor)]
        try:
            self._looks = self._look()
        except (RuntimeError, ValueError):
            describe(live, 0, 1, replicated=False)
            raise
        self._guard: Callable[..., bool] | None = None  # torch's own check, which is faster; its yes is enough

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and (self._names, self._looks) == (other._names, other._looks)

    def holds(self) -> bool:
        """Whether the tensors are still like this."""
        try:
            parts = self._parts()
            if self._guard is not None and list(map(_ADDRESS, parts)) == self._looks[0] and self._guard(*parts, *self._sharded):
                return True
            if self._look() != self._looks:
                return False
        except (RuntimeError, ValueError):  # one has no memory any more
            return False
        self._guard = guard_of([*parts, *self._sharded])  # there was none, or it was made inside autocast and asked outside
        return True

    def _parts(self) -> list[torch.Tensor]:
        return list(map(local, self._tensors)) if self._sharded else self._tensors

    def _look(self) -> tuple[list[Any], ...]:
        parts = self._parts()
        flags = [tensor.requires_grad for tensor in self._tensors]
        return list(map(_ADDRESS, parts)), list(map(_FORM, parts)), list(map(_STRIDE, parts)), flags


def describe(live: Iterable[Live], rank: int, world_size: int, replicated: bool) -> list[Source]:
    """Sources for what `survey` found, without repetitions.

    The ranks that hold the same bytes as this one are: for a DTensor, those along the mesh dimensions on which it
    is replicated; for plain parameters and their state, all ranks if ``replicated`` (plain DDP), else none;
    for buffers, none. Plain state of a DTensor (such as Adam's step) is per rank too.

    Raises UnsupportedStateError: a tensor cannot be captured exactly; named.
    """
    everyone = tuple(range(world_size)) if replicated else (rank,)
    return [_source(item, rank, everyone) for item in live if item.same_as is None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has counted a write to a tensor, or to its part here; one that was made in inference mode has no count: 0."""
    here = 0 if tensor.is_inference() else tensor._version
    return here + version_of(tensor._local_tensor) if isinstance(tensor, DTensor) else here


def captured(key: object, value: object) -> bool:
    """Whether an entry of an optimizer's state is a tensor of its own in snapshots; the rest belongs to the extras."""
    return type(key) is str and isinstance(value, torch.Tensor)


def state_label(index: int, parameter: str) -> str:
    """The beginning of the names of all state of one parameter in optimizer ``index``."""
    return f"optim{index}.{parameter.removeprefix(f'optim{index}.')}"


def state_name(label: str, key: str) -> str:
    """Name of the state tensor ``key``; dots in the key are escaped, so that `split_state_name` is its inverse."""
    return f"{label}.{key}" if "." not in key and "%" not in key else f"{label}.{key.replace('%', '%25').replace('.', '%2E')}"


def split_state_name(name: str) -> tuple[str, str]:
    """Label and key of a state tensor's name."""
    label, _, key = name.rpartition(".")
    return label, key.replace("%2E", ".").replace("%25", "%")


def clean(name: str) -> str:
    """A module's or parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod") if "_orig_mod" in name else name


def placement_words(name: str, tensor: DTensor) -> str:
    """The whole tensor in words: shape, placements, shape of the mesh; the same on all ranks.

    Raises UnsupportedStateError: it is a partial sum, or its placement does not tell which rank holds which bytes.
    """
    for item in tensor.placements:
        if type(item).__name__ not in ("Shard", "_StridedShard", "Replicate"):
            raise _refused(name, f"has the placement {item}; only Shard and Replicate say who holds which bytes")
    mesh = tensor.device_mesh.mesh
    ranks = mesh.flatten().tolist()
    is_turned = dist.is_initialized() and len(ranks) == dist.get_world_size() and ranks != sorted(ranks)
    order = f" of ranks {' '.join(map(str, ranks))}" if is_turned else ""
    return f"{tuple(tensor.shape)} {' '.join(map(str, tensor.placements))} on {tuple(mesh.shape)}{order}"


def holders(tensor: DTensor, rank: int) -> tuple[int, ...]:
    """Sorted ranks that hold the same part of ``tensor`` as ``rank``: those along its replicated mesh dimensions."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh holds an empty part
        return (rank,)
    index = tuple(slice(None) if item.is_replicate() else at for item, at in zip(tensor.placements, coordinate, strict=True))
    return tuple(sorted(tensor.device_mesh.mesh[index].flatten().tolist()))


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether different elements share memory; expanded dimensions (stride 0) do not count, they hold equal values."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and stride):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _source(item: Live, rank: int, everyone: tuple[int, ...]) -> Source:
    tensor = item.tensor
    part = local(tensor)
    if _FSDP1 in item.name:
        raise _refused(item.name, _NO_FSDP1)
    if why := _unsupported(tensor, part):
        raise _refused(item.name, why)
    group: tuple[int, ...] = (rank,)
    words = ""
    if isinstance(tensor, DTensor):
        group, words = holders(tensor, rank), placement_words(item.name, tensor)
    elif not isinstance(item.param, DTensor):
        group = everyone
    if item.role is Role.BUFFER:
        group, words = (rank,), PER_RANK
    elif item.param is not None:
        words = _state_words(item, words)
    frozen = item.role is Role.PARAMETER and not tensor.requires_grad
    spec = TensorSpec(
        name=item.name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(part.shape), group=group, logical=words, frozen=frozen
    )
    return Source(spec, part.detach(), item.role is Role.BUFFER)


def _state_words(item: Live, words: str) -> str:
    """Words for optimizer state, from which `gemini_ft.state.modules.destinations` can allocate it again."""
    assert item.param is not None
    if words and (not isinstance(item.param, DTensor) or placement_words(item.name, item.param) != words):
        raise _refused(item.name, f"is a DTensor placed otherwise ({words}) than its parameter")
    on_host = item.tensor.device.type == "cpu" != item.param.device.type
    return f"{words} {HOST}".strip() if on_host else words


def _unsupported(tensor: torch.Tensor, part: torch.Tensor) -> str | None:
    """The reason why a tensor cannot be captured exactly, or None."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, DTensor) or type(part) not in (torch.Tensor, nn.Parameter):
        kind = type(tensor if type(part) is torch.Tensor else part)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, a tensor type whose memory is not known here; use a module or an optimizer that "
            "keeps plain tensors or DTensors, such as the uint8 codes of bitsandbytes' 8-bit optimizers, or protect the job without it"
        )
    if part.is_nested or part.layout != torch.strided:
        return f"has the layout {'nested' if part.is_nested else part.layout}; only dense tensors can be captured"
    if part.is_quantized or str(part.dtype).removeprefix("torch.") not in ITEMSIZES:
        return f"has the dtype {part.dtype}; supported: {', '.join(sorted(ITEMSIZES))}"
    if part.is_meta:
        return "is on the meta device and has no values yet; materialise the model first"
    if overlaps(part):
        return "has elements that share memory, which cannot be written back; make it contiguous"
    if getattr(tensor, "_in_backward_optimizers", None):
        return "is updated during backward (optimizer-in-backward), so there is no moment at which the state is whole; step after backward"
    return None


def _refused(name: str, why: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{name} {why}")
