"""The mean of the gradients of logical ranks, summed from the first to the last, whichever workers they are on.

Each worker owns a stripe of every gradient. The logical ranks' gradients of that stripe come to the owner, who adds them up one after the
other and hands the mean to all: the bits follow from the order of the logical ranks alone. Bytes travel, so that every dtype does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash

from gemini_ft.errors import StateError
from gemini_ft.torch_versions import all_gather_single

_ALIGNMENT = 16  # bytes of the largest element
_MARK = 8  # bytes


def carried_by(worker: int, workers: int, count: int) -> range:
    """The logical ranks, of ``count``, that a worker carries: a stretch, so that their order is that of the workers."""
    return range(count * worker // workers, count * (worker + 1) // workers)


@dataclass(frozen=True)
class _Stripes:
    """The parameters of one dtype, one after the other, in as many stripes as there are workers."""

    members: Sequence[int]
    dtype: torch.dtype
    stripe: int  # elements; whole units of `_ALIGNMENT` bytes

    @property
    def nbytes(self) -> int:
        return self.stripe * self.dtype.itemsize


def reduce_in_order(
    params: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor | None]], count: int, common: Mapping[str, bytes]
) -> list[torch.Tensor | None]:
    """The mean of the gradients of all logical ranks, by parameter; None where no logical rank has one. Collective.

    Args:
        params: the same on all workers, on one device.
        grads: of each logical rank on this worker in its order, by parameter. A missing one counts as zeros.
        count: of all logical ranks.
        common: what must be the same on all workers, by name.

    Raises:
        StateError: workers differ in ``common``; the names are in the text, which is the same on all.
    """
    workers, worker = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    groups = _groups(params, workers)
    device = params[0].device
    has_any = torch.tensor([any(own[index] is not None for own in grads) for index in range(len(params))], dtype=torch.uint8)
    sums = [torch.zeros(group.stripe * workers, dtype=group.dtype, device=device) for group in groups]
    if workers == 1:
        for own in grads:
            for group, total in zip(groups, sums, strict=True):
                total += _flat(group, params, own, workers)
    else:
        via = torch.device("cpu") if dist.get_backend() == "gloo" else device
        marks = b"".join(xxhash.xxh3_64_digest(blob) for blob in common.values())
        tail = torch.cat([torch.frombuffer(bytearray(marks), dtype=torch.uint8), has_any])
        stripes, tails = _exchanged(groups, params, grads, tail.to(via), workers, count)
        _compare(tails.cpu()[:, : len(marks)], list(common))
        has_any = tails[:, len(marks) :].amax(0).cpu()
        mine = [total[worker * group.stripe : (worker + 1) * group.stripe] for group, total in zip(groups, sums, strict=True)]
        for stripe in stripes:
            at = 0
            for group, total in zip(groups, mine, strict=True):
                total += stripe[at : at + group.nbytes].view(group.dtype).to(device)
                at += group.nbytes
        for group, total, part in zip(groups, sums, mine, strict=True):
            whole = torch.empty(workers * group.nbytes, dtype=torch.uint8, device=via)
            all_gather_single(whole, part.view(torch.uint8).to(via))
            total.copy_(whole.view(group.dtype))
    means: list[torch.Tensor | None] = [None] * len(params)
    for group, total in zip(groups, sums, strict=True):
        total /= count
        sizes = [params[index].numel() for index in group.members]
        for index, part in zip(group.members, torch.split(total[: sum(sizes)], sizes), strict=True):
            means[index] = part.view(params[index].shape) if has_any[index] else None
    return means


def _groups(params: Sequence[torch.Tensor], workers: int) -> list[_Stripes]:
    members: dict[torch.dtype, list[int]] = {}
    for index, param in enumerate(params):
        members.setdefault(param.dtype, []).append(index)
    groups = []
    for dtype, own in members.items():
        unit = _ALIGNMENT // dtype.itemsize
        length = sum(params[index].numel() for index in own)
        groups.append(_Stripes(own, dtype, -(-length // (workers * unit)) * unit))
    return groups


def _flat(group: _Stripes, params: Sequence[torch.Tensor], own: Sequence[torch.Tensor | None], workers: int) -> torch.Tensor:
    """The gradients of one logical rank, one after the other."""
    flat = torch.zeros(group.stripe * workers, dtype=group.dtype, device=params[0].device)
    at = 0
    for index in group.members:
        grad, numel = own[index], params[index].numel()
        if grad is not None:
            flat[at : at + numel].view(params[index].shape).copy_(grad)
        at += numel
    return flat


def _exchanged(
    groups: Sequence[_Stripes],
    params: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor | None]],
    tail: torch.Tensor,
    workers: int,
    count: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All logical ranks' gradients of this worker's stripes as bytes, from the first to the last; and the tails of all workers."""
    room = -(-len(tail) // _ALIGNMENT) * _ALIGNMENT
    row = sum(group.nbytes for group in groups)
    send = torch.zeros(workers, len(grads) * row + room, dtype=torch.uint8, device=tail.device)
    for number, own in enumerate(grads):
        at = number * row
        for group in groups:
            send[:, at : at + group.nbytes] = _flat(group, params, own, workers).view(torch.uint8).view(workers, group.nbytes)
            at += group.nbytes
    send[:, len(grads) * row : len(grads) * row + len(tail)] = tail
    sizes = [len(carried_by(other, workers, count)) * row + room for other in range(workers)]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=tail.device)
    dist.all_to_all_single(received, send.flatten(), sizes, [send.shape[1]] * workers)
    stripes, tails = [], []
    for part in torch.split(received, sizes):
        stripes += list(part[: len(part) - room].view(-1, row)) if row else []
        tails.append(part[len(part) - room :][: len(tail)])
    return stripes, torch.stack(tails)


def _compare(marks: torch.Tensor, names: Sequence[str]) -> None:
    columns = [marks[:, index * _MARK : (index + 1) * _MARK].tolist() for index in range(len(names))]
    if differing := [name for name, column in zip(names, columns, strict=True) if any(mark != column[0] for mark in column)]:
        raise StateError(
            f"elastic='exact': the workers differ in {', '.join(differing)}, which is the job's and not a logical rank's, so that the bits "
            "would follow from the number of workers; set the same seed on all of them, give step() values that all of them have, and "
            "draw, load and compute inside `with rank:`"
        )
