"""Checks that ranks that must hold the same bytes do so.

If they do not, a snapshot cut from all of them would be a state that no rank ever had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash

from gemini_ft.errors import ReplicaDivergedError
from gemini_ft.state.copies import boxes, flattened
from gemini_ft.state.tensors import HOST, Source

Digests = dict[tuple[tuple[int, ...], str], str]  # (ranks that must agree, tensor) -> digest
_STRIDE = 16 * 2**20  # elements hashed at a time, which bounds the memory taken for tensors on an accelerator


def tensor_digests(sources: Iterable[Source]) -> Digests:
    """A digest of every tensor that other ranks hold too: 16 hex digits of XXH3-64 over its bytes."""
    return {(source.spec.group, source.spec.name): _digest(source.tensor) for source in sources if len(source.spec.group) > 1}


def replicated_digest(sources: Iterable[Source]) -> str:
    """One digest of what plain data parallelism replicates, to be the same on all ranks of the job.

    Replicated DTensors are left out: their groups differ from rank to rank, so one number cannot compare them.
    """
    plain = [source for source in sources if source.spec.logical in ("", HOST)]
    return _combined((name, digest) for (_, name), digest in tensor_digests(plain).items())


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
    for start in range(0, tensor.numel(), _STRIDE):
        for view in boxes(tensor, start, min(start + _STRIDE, tensor.numel())):
            hasher.update(flattened(view.resolve_conj().contiguous()).view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()


def _combined(digests: Iterable[tuple[str, str]]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name} {digest}" for name, digest in sorted(digests)).encode())
