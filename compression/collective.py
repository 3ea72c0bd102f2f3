"""Runs exchanges on a process group.

    means = reduce(method, {"weight": gradient, "bias": other}, step, group)

An exchange that goes within machines and between them (`CollectiveRequest.scope`) runs on `ScopedGroups` in place of a group.

Sums whose order of addition makes no difference, those of integers and those of two ranks, are the backend's all-reduce. Others are not
left to it, since its order depends on where in a buffer an element lies: every rank owns a part of the elements, is sent that part by all
(all-to-all), adds in rank order, and the sums are gathered. As many bytes as a ring, two rounds in place of 2 (p - 1), the same bits on all
ranks and however tensors are grouped; measured, 1.3 times the all-reduce's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_ft.torch_versions import all_gather_single

from .base import Bundle, CollectiveRequest, Exchange, Reducer, Turn
from .buffers import BUFFERS
from .topology import Scope, Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LARGEST = 8  # bytes of an element that payloads are made of
_SMALL = 16 * 1024  # bytes; below, a sum gathers everything: one round in place of two


@dataclass(frozen=True, kw_only=True)
class ScopedGroups:
    """The process groups of one rank, by scope."""

    topology: Topology
    flat: ProcessGroup | None
    intra: ProcessGroup
    inter: ProcessGroup

    @classmethod
    def of(cls, ranks_per_machine: int, group: ProcessGroup | None = None, timeout: timedelta | None = None) -> ScopedGroups:
        """Makes the process groups of machines with ``ranks_per_machine`` ranks each, neighbours in ``group``. Collective.

        ``timeout``: of collectives; None: torch's default.

        Raises:
            ValueError: the ranks do not fill machines.
        """
        ranks = dist.get_process_group_ranks(group)
        topology, rank = Topology.of(len(ranks), ranks_per_machine), dist.get_rank(group)
        intra, inter = (
            dist.new_group([ranks[member] for member in topology.group(rank, scope)], timeout, use_local_synchronization=True)
            for scope in (Scope.INTRA, Scope.INTER)
        )
        return cls(topology=topology, flat=group, intra=intra, inter=inter)

    def at(self, scope: Scope) -> ProcessGroup | None:
        return {Scope.FLAT: self.flat, Scope.INTRA: self.intra, Scope.INTER: self.inter}[scope]


Among: TypeAlias = "ProcessGroup | ScopedGroups | None"  # None: the default group, or one rank where there is none


def reduce(method: Reducer, gradients: Mapping[str, Tensor], step: int, group: Among = None, lr: float | None = None) -> dict[str, Tensor]:
    """The average of named gradients over ``group`` (None: the default group, or one rank where there is none). Collective.

    Args:
        method: this rank's; it keeps what the next step needs.
        gradients: float32, float16 or bfloat16; the same names, in the same order, on all ranks. They are only read.
        step: the same on all ranks, another one each time.
        lr: the step's learning rate, for error feedback that follows it.

    Returns:
        The averages in the gradients' shapes and dtypes, the same bits on all ranks.
    """
    return run(method.exchange(Bundle.of(gradients, method.align), turn(step, group, lr)), group).tensors()


def turn(step: int, group: Among = None, lr: float | None = None) -> Turn:
    """The turn of this rank in ``group`` at ``step``."""
    if not dist.is_initialized():
        return Turn(step=step, lr=lr)
    flat = _group_of(Scope.FLAT, group)
    return Turn(step=step, rank=dist.get_rank(flat), world=dist.get_world_size(flat), lr=lr)


def slowest(seconds: float, group: ProcessGroup | None = None) -> float:
    """The longest of all ranks' times, so that decisions on it agree. Collective."""
    (longest,) = answer(CollectiveRequest("max", torch.tensor([seconds], dtype=torch.float64)), group)
    return float(longest)


def run(exchange: Exchange, group: Among = None) -> Bundle:
    """Runs an exchange over ``group`` (None: the default group, or one rank where there is none) and returns its result. Collective."""
    try:
        request = next(exchange)
        while True:
            request = exchange.send(answer(request, group))
    except StopIteration as done:
        bundle: Bundle = done.value
        return bundle


def answer(request: CollectiveRequest, group: Among) -> list[Tensor]:
    """Carries out one collective, as `CollectiveRequest` describes it."""
    members = _group_of(request.scope, group)
    world = dist.get_world_size(members) if dist.is_initialized() else 1
    check_members(request, world)
    if world == 1:
        return [request.tensor]
    match request.kind:
        case "gather":
            return _gather(request.tensor, members)
        case "gather_v":
            return _gather_v(request.tensor, members)
        case "max":
            return [_largest(request.tensor, members)]
        case "sum":
            return [_sum(request.tensor, members)]
        case "reduce":
            return _reduce(request.tensor, members)
        case "broadcast":
            return [_broadcast(request.tensor, request.received, members)]
        case "all_to_all":
            return _all_to_all(request.tensor, request.lengths, request.received, members)


def _group_of(scope: Scope, group: Among) -> ProcessGroup | None:
    if isinstance(group, ScopedGroups):
        return group.at(scope)
    if scope is not Scope.FLAT and dist.is_initialized() and dist.get_world_size(group) > 1:
        raise ValueError(
            f"a collective of scope {scope.value!r} on a single group: give ScopedGroups.of(ranks_per_machine, group) in its place"
        )
    return group


def check_members(request: CollectiveRequest, world: int) -> None:
    """Refuses a request for another number of members. Raises ValueError: there are more or fewer than ``world``."""
    asked = request.members or (len(request.lengths) if request.kind == "all_to_all" else world)
    if asked != world:
        flat, scoped = "make its Turn with turn(step, group)", "make ScopedGroups of as many ranks per machine as its topology has"
        way_out = flat if request.scope is Scope.FLAT else scoped
        raise ValueError(f"an exchange among {asked} ranks on a group of {world}; {way_out}")


def added(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, in the tensors' dtype; 16-bit floats are added in float32."""
    narrow = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = BUFFERS.empty(tensors[0].numel(), torch.float32 if narrow else tensors[0].dtype, tensors[0].device).copy_(tensors[0])
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(tensors[0].dtype)


def _gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    world = dist.get_world_size(group)
    gathered = BUFFERS.empty(world * tensor.numel(), tensor.dtype, tensor.device).view(world, -1)
    all_gather_single(_bytes(gathered.view(-1)), _bytes(tensor), group=group)
    return _rows(gathered)


def _gather_v(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    lengths = [int(length) for length in _gather(torch.tensor([tensor.numel()], device=tensor.device), group)]
    padded = tensor.new_empty(max(lengths))
    padded[: tensor.numel()] = tensor
    return [row[:length] for row, length in zip(_gather(padded, group), lengths, strict=True)]


def _sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if tensor.nbytes <= _SMALL:
        return added(_gather(tensor, group))
    if dist.get_world_size(group) == 2 or not tensor.is_floating_point():
        dist.all_reduce(tensor, group=group)
        return tensor
    return torch.cat(_gather(_share_of_sum(tensor, group), group))[: tensor.numel()]


def _largest(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if tensor.is_floating_point():  # backends do not agree on what is above a NaN
        return torch.stack(_gather(tensor, group)).amax(0)  # NaN wins
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def _reduce(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The sum with the bits of `_sum`, on the first rank only: each rank sends as many bytes as ``tensor`` has."""
    if tensor.nbytes <= _SMALL:
        return [added(rows)] if (rows := _to_first(tensor, group)) else []
    rows = _to_first(_share_of_sum(tensor, group), group)
    return [torch.cat(rows)[: tensor.numel()]] if rows else []


def _share_of_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over ranks of this rank's share: one of as many equal runs as there are ranks."""
    world = dist.get_world_size(group)
    part = -(-tensor.numel() // world)
    padded = tensor
    if part * world != tensor.numel():
        padded = tensor.new_zeros(part * world)
        padded[: tensor.numel()] = tensor
    return added(_all_to_all(padded, [part] * world, part, group))


def _to_first(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """The tensors of all ranks, on the first rank; nothing on the others."""
    first, rest = dist.get_rank(group) == 0, dist.get_world_size(group) - 1
    rows = _all_to_all(tensor, [tensor.numel()] + [0] * rest, tensor.numel() if first else 0, group)
    return rows if first else []


def _broadcast(tensor: Tensor, length: int, group: ProcessGroup | None) -> Tensor:
    data = tensor.contiguous() if dist.get_rank(group) == 0 else tensor.new_empty(length)
    dist.broadcast(_bytes(data), group=group, group_src=0)
    return data


def _all_to_all(tensor: Tensor, lengths: Sequence[int], received: int, group: ProcessGroup | None) -> list[Tensor]:
    answers = BUFFERS.empty(len(lengths) * received, tensor.dtype, tensor.device).view(len(lengths), received)
    size = tensor.element_size()
    incoming, outgoing = [received * size] * len(lengths), [length * size for length in lengths]
    dist.all_to_all_single(_bytes(answers.view(-1)), _bytes(tensor), incoming, outgoing, group=group)
    return _rows(answers)


def _rows(table: Tensor) -> list[Tensor]:
    """The rows of a tensor, one per rank; a row whose address does not suit larger elements is copied."""
    aligned = table.shape[1] > 0 and table.shape[1] * table.element_size() % _LARGEST == 0
    return [row if aligned else row.clone() for row in table]


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor as bytes: what is only sent need not have a dtype that the backend knows."""
    return tensor.contiguous().view(torch.uint8)
