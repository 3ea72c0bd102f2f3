"""Digests of what several ranks hold, which must be the same on all of them.

If it is not, a snapshot cut from all of them would be a state that no rank ever had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from gemini_ft import accelerator
from gemini_ft.errors import ReplicaDivergedError
from gemini_ft.state.copies import boxes, flattened
from gemini_ft.state.tensors import HOST, Source

Digests = dict[tuple[tuple[int, ...], str], str]  # (ranks that must agree, tensor) -> digest

_STRIDE = 16 * 2**20  # elements hashed at a time, which bounds the memory taken for tensors on an accelerator

_AT_A_TIME = 16 * 2**20  # bytes that a device mixes at a time; it takes three times as much for them
_MIXER = -7046029254386353131  # odd, with bits of both kinds in no order: 2**64 over the golden ratio


def tensor_digests(sources: Iterable[Source]) -> Digests:
    """A digest of every tensor that other ranks hold too: 16 hex digits of XXH3-64 over its bytes."""
    return {(source.spec.group, source.spec.name): tensor_digest(source.tensor) for source in sources if len(source.spec.group) > 1}


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
        words.append(f"{source.spec.name} {'' if accelerator.holds(source.tensor) else tensor_digest(source.tensor)}")
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

    ``exchange``: gives back every rank's object in rank order (`gemini_ft.worker.rendezvous.exchange`).

    Raises ReplicaDivergedError: on every rank with the same text, naming the first tensor and the ranks.
    """
    digests = tensor_digests(sources)
    groups = {group for group, _ in digests}
    whole = {(group, "all"): _combined((name, digest) for (of, name), digest in digests.items() if of == group) for group in groups}
    if first_difference(exchange(whole)):  # a few bytes per rank where all is well, the names only where not
        found = first_difference(exchange(digests)) or ""
        if re.match(r"optim\d+\.group\d+\.param", found):
            why = (
                "It is a parameter that an optimizer has and no model (of a loss, for example), whose gradients DDP does not average. "
                "Make it part of the model that DDP wraps, or average its gradients before each step"
            )
        else:
            why = (
                "Look for updates that only some ranks make; where they are to train apart (accelerate's LocalSGD), give "
                "Checkpointer(replicated=False)"
            )
        raise ReplicaDivergedError(f"{found}. Ranks that must hold the same parameters and optimizer state have drifted apart. {why}")


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hex digits of XXH3-64 over the bytes of a tensor, or of its part here, whatever its strides."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
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
