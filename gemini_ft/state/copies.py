"""Copies between live tensors and shards, planned once and repeated without allocation, and digests of what several ranks hold.

A shard holds the elements of a piece in logical (row-major) order. A contiguous tensor gives one flat
view for that; of any other (channels_last, transposed, strided) a range of elements is cut into a few
rectangular views that have the same order, so that no staging copy is needed either way.

    copies = plan_copies(sources, layout)          once per layout; `gemini_ft.state.copy_plan` carries them out
    copy_into(tensor, start, stop, source)         at a restore

`check_replicas` compares what must be the same on several ranks. If it is not, a snapshot cut from all of them would be a state that no
rank ever had.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from gemini_ft import accelerator
from gemini_ft.core.layout import Layout
from gemini_ft.errors import LayoutMismatchError, ReplicaDivergedError
from gemini_ft.state.tensors import HOST, Source

Memory = bytes | bytearray | memoryview | mmap.mmap | torch.Tensor  # a tensor must be uint8 and flat
Digests = dict[tuple[tuple[int, ...], str], str]  # (ranks that must agree, tensor) -> digest
_STRIDE = 16 * 2**20  # elements hashed at a time, which bounds the memory taken for tensors on an accelerator
_AT_A_TIME = 16 * 2**20  # bytes that a device mixes at a time; it takes three times as much for them
_MIXER = -7046029254386353131  # odd, with bits of both kinds in no order: 2**64 over the golden ratio


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of an owned piece: a live view, and the place of its bytes.

    Attributes:
        name: the tensor's name.
        view: elements of the live tensor; flat if the tensor is contiguous.
        offset: byte in the shard, a multiple of the element size.
        nbytes: bytes of the view, never 0.
        mutable: see `gemini_ft.state.tensors.Source`.
    """

    name: str
    view: torch.Tensor
    offset: int
    nbytes: int
    mutable: bool


def plan_copies(sources: Iterable[Source], layout: Layout, limit: int | None = None) -> list[Copy]:
    """The copies that fill the shard of ``layout``'s owner, by ascending offset.

    Args:
        sources: this rank's tensors, those that ``layout`` was built from.
        layout: what this rank owns.
        limit: most bytes per copy, for a caller that sends parts on before the whole is there (an element is
            never cut); None: as much as possible.

    Raises:
        LayoutMismatchError: the layout was built from other tensors.
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
            copies.append(Copy(piece.name, view, offset, nbytes, source.mutable))
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


def tensor_digests(sources: Iterable[Source]) -> Digests:
    """A digest of every tensor that other ranks hold too: 16 hex digits of XXH3-64 over its bytes."""
    return {(source.spec.group, source.spec.name): _digest(source.tensor) for source in sources if len(source.spec.group) > 1}


def replicated_digest(sources: Iterable[Source]) -> str:
    """One digest of what plain data parallelism replicates, to be the same on all ranks of the job.

    Replicated DTensors are left out: their groups differ from rank to rank, so one number cannot compare them.
    """
    return _combined((name, digest) for (_, name), digest in tensor_digests(_plain(sources)).items())


def begin_digest(sources: Iterable[Source]) -> Callable[[], str]:
    """Begins another digest of the same, of what is there now; a device forms it in its queue, and the host does not wait for it.

    It is a sum over all 64-bit words, each mixed and multiplied by its place: enough to tell states apart that have drifted.

    Returns:
        What gives the digest, once the device has formed it; it reads in the current stream of its caller.
    """
    words, queues = list[str](), dict[torch.device, _Queue]()
    for source in sorted(_plain(sources), key=lambda source: source.spec.name):
        words.append(f"{source.spec.name} {'' if accelerator.holds(source.tensor) else _digest(source.tensor)}")
        if accelerator.holds(source.tensor):
            queue = queues.setdefault(source.tensor.device, _Queue())
            for pieces in _strides(source.tensor, _AT_A_TIME // source.tensor.itemsize):
                queue.add(pieces)
    found = [torch.stack(sums) for queue in queues.values() if (sums := queue.sums())]
    return lambda: xxhash.xxh3_64_hexdigest("\n".join([*words, *(str(one) for sums in found for one in sums.cpu().tolist())]).encode())


class _Queue:
    """Bytes on one device, which are summed up as soon as there are enough: at the same places whatever the tensors' strides are."""

    def __init__(self) -> None:
        self._sums, self._pieces, self._nbytes = list[torch.Tensor](), list[torch.Tensor](), 0

    def add(self, pieces: list[torch.Tensor]) -> None:
        self._pieces += pieces
        self._nbytes += sum(map(len, pieces))
        if self._nbytes >= _AT_A_TIME:
            self.sums()

    def sums(self) -> list[torch.Tensor]:
        if self._pieces:
            self._sums.append(_mixed(self._pieces))
            self._pieces, self._nbytes = [], 0
        return self._sums


def _plain(sources: Iterable[Source]) -> list[Source]:
    return [source for source in sources if source.spec.logical in ("", HOST) and len(source.spec.group) > 1]


def _mixed(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the words of all bytes, on their device."""
    rest = -sum(map(len, pieces)) % 8
    words = torch.cat([*pieces, pieces[0].new_zeros(rest)]).view(torch.int64)
    words.mul_(_MIXER)
    words.bitwise_xor_(words >> 32)
    places = torch.ones_like(words).mul_(2)
    places.narrow(0, 0, 1).fill_(1)
    return words.mul_(places.cumsum_(0)).sum()  # by the odd numbers


def first_difference(every: Sequence[Digests]) -> str | None:
    """Given every rank's digests: the first tensor on which a group disagrees, with its ranks, in words; else None."""
    for group, name in sorted({key for digests in every for key in digests}):
        ranks: dict[str, list[int]] = {}
        for rank in group:
            ranks.setdefault(every[rank].get((group, name), "absent"), []).append(rank)
        if len(ranks) > 1:
            return f"{name} is " + ", ".join(f"{digest} on ranks {held}" for digest, held in ranks.items())
    return None


def check_replicas(sources: Iterable[Source], exchange: Callable[[Any], list[Any]]) -> None:
    """Compares replicated tensors across ranks; collective.

    Args:
        sources: this rank's tensors.
        exchange: gives back every rank's object in rank order (`gemini_ft.worker.rendezvous.exchange`).

    Raises:
        ReplicaDivergedError: on every rank with the same text, naming the first tensor and the ranks.
    """
    digests = tensor_digests(sources)
    groups = {group for group, _ in digests}
    whole = {(group, "all"): _combined((name, digest) for (of, name), digest in digests.items() if of == group) for group in groups}
    if first_difference(exchange(whole)):  # a few bytes per rank where all is well, the names only where not
        raise ReplicaDivergedError(
            f"{first_difference(exchange(digests))}. Ranks that must hold the same parameters and optimizer state have drifted apart; "
            "look for updates that only some ranks make, or declare the job's parameters as not replicated"
        )


def _digest(tensor: torch.Tensor) -> str:
    hasher = xxhash.xxh3_64()
    for pieces in _strides(tensor, _STRIDE):
        for piece in pieces:
            hasher.update(piece.cpu().numpy().data)
    return hasher.hexdigest()


def _strides(tensor: torch.Tensor, stride: int) -> Iterator[list[torch.Tensor]]:
    """The bytes of a tensor in logical order, of ``stride`` elements at a time; each in as many pieces as its memory wants."""
    for start in range(0, tensor.numel(), stride):
        views = boxes(tensor, start, min(start + stride, tensor.numel()))
        yield [flattened(view.resolve_conj().resolve_neg().contiguous()).view(torch.uint8) for view in views]


def _combined(digests: Iterable[tuple[str, str]]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode())
