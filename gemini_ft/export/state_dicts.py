"""Models and optimizers of a checkpoint, as state dicts of whole tensors on the CPU, under the names that other tools know.

A snapshot calls a parameter ``<model>.<name>``; where there is one model, its name is left out.

Whole tensors are joined from the shards of all ranks. Under DDP every rank owns a stretch of the one tensor all of them hold; under FSDP2
every rank has a part of its own, whose place in the whole tensor follows from shape, placements and mesh
(`gemini_ft.state.tensors.placement_words`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import torch

from gemini_ft.core.layout import PER_RANK, Layout, Piece, Read
from gemini_ft.errors import CorruptDataError, StateError, StorageError, UnsupportedStateError
from gemini_ft.export.source import Checkpoint
from gemini_ft.recovery.readers import ShardReader
from gemini_ft.recovery.restore import scatter
from gemini_ft.state.gradients import is_gradient
from gemini_ft.state.tensors import HOST, split_state_name

_OPTIMIZER = re.compile(r"optim\d+\.")
_WORDS = re.compile(r"\((?P<shape>[\d, ]*)\) (?P<placements>.+) on \((?P<mesh>[\d, ]*)\)")
_PLACEMENT = re.compile(r"_S\((\d+), (\d+)\)|S\((\d+)\)|R")

Group = tuple[int, ...]
Parts = dict[Group, torch.Tensor]  # group of ranks -> the local tensor all of them hold


def read_whole(shards: Sequence[ShardReader], wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, dtypes kept, for all names that are ``wanted``. Buffers are those of rank 0.

    Args:
        shards: of all ranks, by owner. Every byte is compared with its checksum as it is read.

    Raises:
        CorruptDataError: a checksum does not match, or something is missing from the shards.
        UnsupportedStateError: a tensor differs between ranks, or is placed on a mesh that cannot be known from here.
    """
    layouts = [shard.layout for shard in shards]
    if len({(layout.logical_hash, layout.world_size) for layout in layouts}) != 1 or layouts[0].world_size != len(shards):
        raise CorruptDataError("the shards do not belong together: their layouts differ; use another checkpoint")
    pieces = [piece for layout in layouts for piece in layout.pieces if wanted(piece.name)]
    check_covered(pieces)
    words: dict[str, str] = {}
    parts: dict[str, Parts] = {}
    for piece in pieces:
        words[piece.name] = piece.logical.removesuffix(HOST).strip()
        held = parts.setdefault(piece.name, {})
        if piece.group not in held:
            held[piece.group] = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype))
    flat = {f"{name}@{group[0]}": tensor for name, held in parts.items() for group, tensor in held.items()}
    for owner, shard in enumerate(shards):
        scatter(shard, _reads(owner, layouts[owner], flat), flat)
    return {name: join_parts(name, words[name], parts.pop(name), len(shards)) for name in sorted(words)}


def _key(piece: Piece) -> str:
    return f"{piece.name}@{piece.group[0]}"


def _reads(owner: int, layout: Layout, wanted: Mapping[str, torch.Tensor]) -> list[Read]:
    return [Read.of(owner, piece, _key(piece)) for piece in layout.pieces if piece.nbytes and _key(piece) in wanted]


def check_covered(pieces: Sequence[Piece]) -> None:
    """Checks that each tensor's pieces have as many elements as its shape; a shape that lies would make us allocate too much memory."""
    covered: dict[str, int] = {}
    for piece in pieces:
        covered[_key(piece)] = covered.get(_key(piece), 0) + piece.stop - piece.start
    for piece in pieces:
        if covered[_key(piece)] != math.prod(piece.shape):
            raise CorruptDataError(f"{piece.name} is not whole: {covered[_key(piece)]} of its {math.prod(piece.shape)} elements are there")


def join_parts(name: str, words: str, parts: Parts, world_size: int) -> torch.Tensor:
    """The whole tensor of all its parts."""
    first = parts[min(parts)]
    if words == PER_RANK:
        return first
    if not words:
        for group, other in parts.items():
            if other.shape != first.shape or not torch.equal(_bytes(other), _bytes(first)):
                raise UnsupportedStateError(
                    f"{name} is not the same on ranks {min(parts)[0]} and {group[0]} although nothing says how it is divided; "
                    "only tensors that are replicated or sharded as DTensors can be made whole"
                )
        return first
    found = _WORDS.fullmatch(words)
    if found is None:
        raise CorruptDataError(f"{name}: {words!r} does not say how the tensor is placed")
    shape, mesh = _numbers(found["shape"]), _numbers(found["mesh"])
    if math.prod(mesh) != world_size:
        raise UnsupportedStateError(
            f"{name} is placed on a mesh of {mesh} among {world_size} ranks, and which ranks these are is not in the snapshot; "
            "export what spans all ranks, or save this model with its own tools"
        )
    if (present := sum(part.numel() for part in parts.values())) != math.prod(shape):
        raise CorruptDataError(f"{name} is not whole: {present} of its {math.prod(shape)} elements are there")
    whole = torch.empty(shape, dtype=first.dtype)
    try:
        for group, part in parts.items() if whole.numel() else ():
            _put(name, whole, part, group, found["placements"], mesh)
    except (IndexError, ValueError, RuntimeError) as error:
        raise CorruptDataError(f"{name}: {words!r} contradicts itself or the tensor's parts: {error}") from None
    return whole


def _put(name: str, whole: torch.Tensor, part: torch.Tensor, group: Group, placements: str, mesh: Group) -> None:
    """Copies the part that ``group``'s ranks hold to its place, if ranks fill the mesh in order (as with init_device_mesh)."""
    indices = [torch.arange(size) for size in whole.shape]
    coordinate = [int(i) for i in torch.unravel_index(torch.tensor(group[0]), mesh)]
    holders = torch.arange(math.prod(mesh)).reshape(mesh)
    for axis, (match, at) in enumerate(zip(_PLACEMENT.finditer(placements), coordinate, strict=True)):
        strided, factor, plain = match.groups()
        if int(factor or 1) > math.prod(mesh):
            raise ValueError(f"{factor} parts on {math.prod(mesh)} ranks")
        if dim := strided or plain:
            indices[int(dim)] = _share(indices[int(dim)], mesh[axis], at, int(factor or 1))
            holders = holders.index_select(axis, torch.tensor([at]))
    if tuple(holders.flatten().tolist()) != group or tuple(map(len, indices)) != tuple(part.shape):
        raise UnsupportedStateError(
            f"{name}: ranks {list(group)} hold a part of shape {tuple(part.shape)}, which does not fit ranks in their own order on a mesh "
            f"of {mesh}; export models whose mesh is in the order of ranks, or save this one with its own tools"
        )
    for box in product(*map(_runs, indices)):
        there, here = whole, part
        for dim, (start, begin, length) in enumerate(box):
            there, here = there.narrow(dim, start, length), here.narrow(dim, begin, length)
        there.copy_(here)


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Ascending indices as runs: first index, its position, length."""
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    ends = [0, *breaks, len(indices)]
    return [(int(indices[begin]), begin, end - begin) for begin, end in pairwise(ends) if begin < end]


def _share(indices: torch.Tensor, parts: int, at: int, factor: int) -> torch.Tensor:
    """The indices of part ``at``; the dimension may have been cut before, into ``factor`` runs, on an axis further right."""
    cuts = [_chunks(run, parts)[at] for run in _chunks(indices, factor)]
    return torch.cat(cuts)


def _chunks(indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cuts as torch.chunk does, which DTensor follows, with empty chunks for parts that get nothing."""
    chunks = list(torch.chunk(indices, parts)) if len(indices) else []
    return chunks + [indices[:0]] * (parts - len(chunks))


def _numbers(text: str) -> Group:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """The state of one optimizer.

    Attributes:
        names: its parameters, in its own order, as in the model's state dict.
        sizes: parameters in each group.
        groups: hyperparameters of each group.
        state: name -> key -> tensor or value.
        other: state that belongs to no parameter.
    """

    names: list[str]
    sizes: list[int]
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    other: dict[Any, Any] = field(default_factory=dict)


class State:
    """Models and optimizers of one checkpoint, whole, on the CPU.

    Args:
        checkpoint: where to read; it is closed then.

    Raises:
        StateError: it was made by a gemini-ft that did not keep the names, or holds a pickle that is not trusted.
        CorruptDataError: a checksum does not match.
        UnsupportedStateError: parts of a tensor cannot be put in their places.
    """

    def __init__(self, checkpoint: Checkpoint, optimizers: bool) -> None:
        try:
            self._naming: dict[str, dict[str, Any]] = checkpoint.extras("tensors", "naming")
        except KeyError:
            raise StateError(
                f"step {checkpoint.step} was written by a gemini-ft that kept no state dict keys; resume the job with this one, and export "
                "what it writes then"
            ) from None
        for model, naming in self._naming.items():
            if strange := naming["out of order"]:
                raise UnsupportedStateError(
                    f"{model}.{strange[0]} ({len(strange)} in all) is sharded over a mesh whose ranks are not in their order, so its parts "
                    "cannot be put together from here; save this model with its own tools"
                )
        self._extras: dict[str, Any] = on_cpu(checkpoint.extras("tensors")) if optimizers else {}
        self._tensors = read_whole(checkpoint.shards, lambda name: not is_gradient(name) and (optimizers or not _OPTIMIZER.match(name)))
        checkpoint.close()

    def model(self, raw: bool = False) -> dict[str, torch.Tensor]:
        """Name -> tensor; tied tensors under each of their names, buffers that are not persistent left out.

        Args:
            raw: the keys of ``state_dict()`` itself, in which torch.compile leaves its marks.
        """
        return {key if raw else key.replace("_orig_mod.", ""): self._tensors[name] for key, name in self._keys.items()}

    @property
    def tied(self) -> dict[str, str]:
        """Further name -> first name, of parameters and buffers that are one."""
        return tied_keys(self._keys)

    def extra_state(self) -> dict[str, Any]:
        """Extra state of modules, by its key in the model's state dict."""
        return {f"{self._short(name)}._extra_state".lstrip("."): value for name, value in self._extras["modules"].items()}

    def optimizers(self) -> list[OptimizerState]:
        """All optimizers, in their order; not those that another one holds, whose own state dict lacks them as well."""
        given = enumerate(self._extras["optimizers"])
        return [self._optimizer(index, saved) for index, saved in given if "." not in saved["name"]]

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """Key in the model's state dict -> name in the snapshot; of tied tensors the first name first."""
        own: dict[str, str] = {}
        further: dict[str, str] = {}
        for model, naming in self._naming.items():
            names = [name for name in self._tensors if name.startswith(f"{model}.") and not _OPTIMIZER.match(name)]
            own |= {self._short(name): name for name in names if name not in naming["absent"]}
            further |= {self._short(f"{model}.{key}"): name for key, name in naming["keys"].items()}
        return checked_aliases(own | further)

    def _short(self, name: str) -> str:
        only = next(iter(self._naming)) if len(self._naming) == 1 else None
        return name.removeprefix(f"{only}.") if only is not None else name

    def _optimizer(self, index: int, saved: Mapping[str, Any]) -> OptimizerState:
        labels: list[str] = saved["parameters"].split("\n") if saved["parameters"] else []
        state: dict[str, dict[str, Any]] = {label: {} for label in labels}
        for name, tensor in self._tensors.items():
            label, key = split_state_name(name)
            if label in state:
                state[label][key] = tensor
        for label, values in saved["state"].items():
            state[label] |= values
        for label, shared in saved["shared"].items():
            state[label] |= {key: self._tensors[name] for key, name in shared.items()}
        names = {label: self._parameter(index, label) for label in labels}
        filled = {names[label]: values for label, values in state.items() if values}
        return OptimizerState(
            names=[names[label] for label in labels],
            sizes=saved["parameters per group"],
            groups=saved["groups"],
            state=filled,
            other=saved["other"],
        )

    def _parameter(self, index: int, label: str) -> str:
        """The parameter that a label stands for, as the model's state dict has it; one of no model keeps the label."""
        name = label.removeprefix(f"optim{index}.")
        return self._short(name) if name in self._tensors else label


_MOST_ALIASES = 2**14  # of all tensors; a format may write a tensor under each of them


def checked_aliases(names: Mapping[str, str]) -> Mapping[str, str]:
    """Key -> name of its tensor, as given. Raises CorruptDataError: there are far more keys than tensors."""
    if (more := len(names) - len(set(names.values()))) > _MOST_ALIASES:
        raise CorruptDataError(f"{more:,} further names of tensors, more than the {_MOST_ALIASES:,} of any model; use another checkpoint")
    return names


def tied_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Further key -> first key, of those that have the same name in ``names``."""
    firsts: dict[str, str] = {}
    return {key: first for key, name in names.items() if (first := firsts.setdefault(name, key)) != key}


_MOST_EMPTY = 1000  # groups without a parameter


def numbered_groups(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Parameter groups with ``sizes`` parameters each, which are numbered as ``torch.optim.Optimizer.state_dict`` does it.

    Raises:
        CorruptDataError: these are not ``count`` parameters, or there are too many groups for them.
    """
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != count or len(sizes) > count + _MOST_EMPTY:
        raise CorruptDataError(f"{len(sizes)} groups of an optimizer do not hold its {count} parameters; use another checkpoint")
    spans = pairwise(accumulate(sizes, initial=0))
    return [{**group, "params": list(range(*span))} for group, span in zip(groups, spans, strict=True)]


def on_cpu(value: Any) -> Any:
    """``value`` with all tensors in dicts, lists and tuples on the CPU; types of containers are kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = on_cpu(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return value


def save_file(path: Path, content: object) -> None:
    """Writes a file of ``torch.save``. Raises StorageError: torch cannot write it."""
    try:
        torch.save(content, path)
    except RuntimeError as error:  # its writer's error for a full disk
        raise StorageError(f"{path}: torch cannot write it: {str(error).partition(chr(10))[0]}; is there room?") from None
