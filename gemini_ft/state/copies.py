"""Copies between live tensors and shards, planned once and repeated without allocation.

A shard holds the elements of a piece in logical (row-major) order. A contiguous tensor gives one flat
view for that; of any other (channels_last, transposed, strided) a range of elements is cut into a few
rectangular views that have the same order, so that no staging copy is needed either way.

    copies = plan_copies(sources, layout)          once per layout; `gemini_ft.state.copy_plan` carries them out
    copy_into(tensor, start, stop, source)         at a restore
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from gemini_ft import accelerator
from gemini_ft.core.layout import Layout
from gemini_ft.errors import LayoutMismatchError
from gemini_ft.state.tensors import Source

Memory = bytes | bytearray | memoryview | mmap.mmap | torch.Tensor  # a tensor must be uint8 and flat

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A part of an owned piece: a live view, and the place of its bytes."""

    name: str  # the tensor's name
    view: torch.Tensor  # elements of the live tensor; flat if the tensor is contiguous
    offset: int  # byte in the shard, a multiple of the element size
    nbytes: int  # bytes of the view, never 0
    mutable: bool  # see `gemini_ft.state.tensors.Source`


def plan_copies(sources: Iterable[Source], layout: Layout, limit: int | None = None) -> list[Copy]:
    """The copies that fill the shard of ``layout``'s owner, by ascending offset.

    Args:
        sources: this rank's tensors, those that ``layout`` was built from.
        layout: what this rank owns.
        limit: most bytes per copy, for a caller that sends parts on before the whole is there (an element is
            never cut); None: as much as possible.

    Raises LayoutMismatchError: the layout was built from other tensors.
    """
    by_name = {source.spec.name: source for source in sources}
    copies: list[Copy] = []
    for piece in layout.pieces:
        source = by_name.get(piece.name)
        if source is None or (source.spec.dtype, source.spec.shape) != (piece.dtype, piece.shape):
            raise LayoutMismatchError(
                f"{piece.label} is in the layout, but the live tensor is {source and source.spec}; build the layout anew"
            )
        offset = piece.offset
        for view in _views(source.tensor, piece.start, piece.stop, limit):
            nbytes = view.numel() * view.itemsize
            copies.append(Copy(name=piece.name, view=view, offset=offset, nbytes=nbytes, mutable=source.mutable))
            offset += nbytes
    return copies


def copy_into(destination: torch.Tensor, start: int, stop: int, source: Memory) -> None:
    """Fills elements ``start:stop`` of a live tensor from ``source``: memory, or a flat uint8 tensor, of that many bytes."""
    memory, at = as_bytes(source), 0
    with torch.no_grad():
        for view in _views(destination, start, stop, None):
            part = memory[at : at + view.numel() * view.itemsize]
            target, value = _once(view, _shaped(part, view))
            target.copy_(value)
            at += part.numel()


def as_bytes(memory: Memory) -> torch.Tensor:
    """``memory`` as a flat uint8 tensor over the same bytes; read-only memory is copied, as torch cannot hold it."""
    if isinstance(memory, torch.Tensor):
        return memory
    view = memoryview(memory)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def memory_of(tensor: torch.Tensor, start: int, stop: int) -> memoryview | None:
    """Elements ``start:stop`` as bytes to write to, in logical order; None where they do not lie like that in the CPU's memory."""
    if accelerator.holds(tensor) or type(tensor) not in _PLAIN or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return None
    return flattened(tensor.detach())[start:stop].view(torch.uint8).numpy().data


def boxes(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views of ``tensor`` that, one after the other, are its elements ``start:stop`` in logical order.

    At most one view if it is contiguous, else at most ``2 * dim - 1``; none if ``start == stop``.
    """
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield flattened(tensor)[start:stop]
    elif tensor.dim() == 1:
        yield tensor[start:stop]
    else:
        row = tensor.numel() // tensor.shape[0]
        first, last = -(-start // row), stop // row  # whole rows
        if first > last:
            yield from boxes(tensor[last], start - last * row, stop - last * row)
            return
        if start % row:
            yield from boxes(tensor[first - 1], start % row, row)
        if first < last:
            yield tensor[first:last]
        if stop % row:
            yield from boxes(tensor[last], 0, stop % row)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension of stride 1; ``view(-1)`` would keep the odd stride that a size of 1 may have."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _views(tensor: torch.Tensor, start: int, stop: int, limit: int | None) -> Iterator[torch.Tensor]:
    step = max(1, limit // tensor.itemsize) if limit else max(1, stop - start)
    for first in range(start, stop, step):
        yield from boxes(tensor, first, min(first + step, stop))


def _shaped(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``memory`` (uint8) as a tensor of the dtype and shape of ``like``."""
    if memory.storage_offset() % like.itemsize:
        memory = memory.clone()  # only for sources that begin in the middle of an element; shards are aligned
    return memory.view(like.dtype).view(like.shape)


def _once(target: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Narrows both so that no element of ``target`` is written twice: torch refuses to write an expanded dimension."""
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    return target, value
