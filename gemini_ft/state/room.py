"""Room for the optimizer state of a snapshot: tensors of the shape, place and strides that it had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from gemini_ft.core.layout import TensorSpec
from gemini_ft.errors import LayoutMismatchError
from gemini_ft.state.tensors import HOST, Live, local, overlaps, placement_words


def odd_strides(live: Iterable[Live]) -> Iterator[tuple[str, list[int]]]:
    """Strides of state that is laid out neither like its parameter nor row by row: products of matrices depend on them, bit for bit."""
    for item in live:
        if item.param is not None and item.same_as is None:
            part, param = local(item.tensor), local(item.param)
            if not (part.is_contiguous() and param.is_contiguous()) and part.stride() != _usual_strides(part.shape, param):
                yield item.name, list(part.stride())


def _usual_strides(shape: Sequence[int], param: torch.Tensor) -> tuple[int, ...]:
    """The strides that `room_for` would choose: the parameter's, as optimizers make their state."""
    if tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, device="meta").stride()
    return torch.empty(tuple(shape), device="meta").stride()


def room_for(spec: TensorSpec, param: torch.Tensor, current: object, used: set[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """A state tensor as in the snapshot: ``current`` if it is just like that, else a new one."""
    whole = spec.logical.removesuffix(HOST).strip()
    if whole and not (isinstance(param, DTensor) and placement_words(spec.name, param) == whole):
        raise LayoutMismatchError(
            f"{spec.name} was {whole} in the snapshot; its parameter is now placed otherwise, and resharding is not supported"
        )
    part = local(param)
    device = torch.device("cpu") if spec.logical.endswith(HOST) else part.device
    steps = tuple(strides) if strides is not None else _usual_strides(spec.shape, part)
    if isinstance(current, torch.Tensor) and id(current) not in used and _fits(current, spec, whole, device, steps):
        used.add(id(current))
        return current
    fresh = torch.empty_strided(spec.shape, steps, dtype=getattr(torch, spec.dtype), device=device)
    if isinstance(param, DTensor) and whole:
        return DTensor.from_local(fresh, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
    return fresh


def _fits(current: torch.Tensor, spec: TensorSpec, whole: str, device: torch.device, strides: tuple[int, ...]) -> bool:
    words = placement_words(spec.name, current) if isinstance(current, DTensor) else ""
    part = local(current)
    facts = (words, str(part.dtype).removeprefix("torch."), tuple(part.shape), part.device)
    return facts == (whole, spec.dtype, spec.shape, device) and (part.stride() == strides or part.numel() < 2) and not overlaps(part)
