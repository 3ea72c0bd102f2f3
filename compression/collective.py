"""Runs exchanges: on a process group, or all ranks of one beside each other in this process.

    means = reduce(method, {"weight": gradient, "bias": other}, step, group)
    bundles = simulate([method.exchange(bundle, Turn(step, rank, 4)) for rank, (method, bundle) in enumerate(ranks)])

Sums are not left to the backend's all-reduce, whose order of addition depends on where in a buffer an element lies: every rank
owns a part of the elements, is sent that part by all (all-to-all), adds in rank order, and the sums are gathered. As many bytes as
a ring, two rounds in place of 2 (p - 1), the same bits on all ranks and however tensors are grouped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Bundle, Exchange, Reducer, Request, Turn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LARGEST = 8  # bytes of an element that payloads are made of
_SMALL = 16 * 1024  # bytes; below, a sum gathers everything: one round in place of two


def reduce(
    method: Reducer, gradients: Mapping[str, Tensor], step: int, group: ProcessGroup | None = None, lr: float | None = None
) -> dict[str, Tensor]:
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


def turn(step: int, group: ProcessGroup | None = None, lr: float | None = None) -> Turn:
    """This rank's turn in ``group``."""
    if not dist.is_initialized():
        return Turn(step, lr=lr)
    return Turn(step, dist.get_rank(group), dist.get_world_size(group), lr)


def slowest(seconds: float, group: ProcessGroup | None = None) -> float:
    """The longest of all ranks' times, so that decisions on it agree. Collective."""
    (longest,) = answer(Request("max", torch.tensor([seconds], dtype=torch.float64)), group)
    return float(longest)


def run(exchange: Exchange, group: ProcessGroup | None = None) -> Bundle:
    """What the exchange comes to over ``group`` (None: the default group, or one rank where there is none). Collective."""
    try:
        request = next(exchange)
        while True:
            request = exchange.send(answer(request, group))
    except StopIteration as done:
        bundle: Bundle = done.value
        return bundle


def simulate(exchanges: Sequence[Exchange]) -> list[Bundle]:
    """What the exchanges of all ranks come to, in rank order; the same values that `run` gives."""
    results: list[Bundle] = []
    requests = [next(exchange, None) for exchange in exchanges]
    if any(request is None for request in requests):
        raise ValueError("an exchange asks for no collective at all: run() it")
    pending = [request for request in requests if request is not None]
    while pending:
        answers = _answers(pending)
        pending = []
        for exchange, given in zip(exchanges, answers, strict=True):
            try:
                pending.append(exchange.send(given))
            except StopIteration as done:
                results.append(done.value)
    return results


def answer(request: Request, group: ProcessGroup | None) -> list[Tensor]:
    """Carry out one collective; see `Request`."""
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    if request.kind == "all_to_all" and len(request.lengths) != world:
        raise ValueError(f"an exchange among {len(request.lengths)} ranks on a group of {world}; make its Turn with turn(step, group)")
    if world == 1:
        return [request.tensor]
    if request.kind == "gather":
        return _gather(request.tensor, group)
    if request.kind == "gather_v":
        return _gather_v(request.tensor, group)
    if request.kind == "max":
        return [_max(_gather(request.tensor, group))]
    if request.kind == "sum":
        return [_sum(request.tensor, group)]
    return _all_to_all(request.tensor, request.lengths, request.received, group)


def _answers(requests: Sequence[Request]) -> list[list[Tensor]]:
    """What each rank is answered when all have asked."""
    tensors = [request.tensor for request in requests]
    if requests[0].kind == "all_to_all":
        parts = [request.tensor.split_with_sizes(list(request.lengths)) for request in requests]
        return [[part[rank].clone() for part in parts] for rank in range(len(requests))]
    if requests[0].kind == "sum":
        return [[added(tensors)] for _ in requests]
    if requests[0].kind == "max":
        return [[_max(tensors)] for _ in requests]
    return [tensors for _ in requests]


def added(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, in the tensors' dtype; 16-bit floats are added in float32."""
    narrow = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = tensors[0].float() if narrow else tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(tensors[0].dtype)


def _max(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).amax(0)  # NaN wins


def _gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    gathered = tensor.new_empty(dist.get_world_size(group), tensor.numel())
    dist.all_gather_single(_bytes(gathered.view(-1)), _bytes(tensor), group=group)
    return _rows(gathered)


def _gather_v(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    lengths = [int(length) for length in _gather(torch.tensor([tensor.numel()], device=tensor.device), group)]
    padded = tensor.new_empty(max(lengths))
    padded[: tensor.numel()] = tensor
    return [row[:length] for row, length in zip(_gather(padded, group), lengths, strict=True)]


def _sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    if tensor.nbytes <= _SMALL:
        return added(_gather(tensor, group))
    world = dist.get_world_size(group)
    part = -(-tensor.numel() // world)
    padded = tensor
    if part * world != tensor.numel():
        padded = tensor.new_zeros(part * world)
        padded[: tensor.numel()] = tensor
    mine = added(_all_to_all(padded, [part] * world, part, group))
    return torch.cat(_gather(mine, group))[: tensor.numel()]


def _all_to_all(tensor: Tensor, lengths: Sequence[int], received: int, group: ProcessGroup | None) -> list[Tensor]:
    answers = tensor.new_empty(len(lengths), received)
    size = tensor.element_size()
    incoming, outgoing = [received * size] * len(lengths), [length * size for length in lengths]
    dist.all_to_all_single(_bytes(answers.view(-1)), _bytes(tensor), incoming, outgoing, group=group)
    return _rows(answers)


def _rows(table: Tensor) -> list[Tensor]:
    """Each rank's; what cannot be read as larger elements where it lies is copied."""
    aligned = table.shape[1] > 0 and table.shape[1] * table.element_size() % _LARGEST == 0
    return [row if aligned else row.clone() for row in table]


def _bytes(tensor: Tensor) -> Tensor:
    """What only travels need not be a dtype that the backend knows."""
    return tensor.contiguous().view(torch.uint8)
