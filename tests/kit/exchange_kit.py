"""All ranks' exchanges of compressed gradients beside each other in one process, in place of a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gemini_ft.compression.base import Bundle, CollectiveRequest, Exchange
from gemini_ft.compression.collective import added, check_members
from gemini_ft.compression.topology import Topology


def simulate(exchanges: Sequence[Exchange], topology: Topology | None = None) -> list[Bundle]:
    """Runs the exchanges of all ranks and returns their results in rank order, equal to those of `gemini_ft.compression.collective.run`.

    Args:
        exchanges: of all ranks, in their order.
        topology: which of them share a machine; None: all.

    Raises:
        ValueError: ranks wait for each other in different collectives.
    """
    topology = topology or Topology(machines=1, ranks=len(exchanges))
    waiting: dict[int, CollectiveRequest] = {}
    results: dict[int, Bundle] = {}

    def go_on(rank: int, given: list[Tensor] | None) -> None:
        try:
            waiting[rank] = next(exchanges[rank]) if given is None else exchanges[rank].send(given)
        except StopIteration as done:
            results[rank] = done.value

    for rank in range(len(exchanges)):
        go_on(rank, None)
    while waiting:
        ready = _ready(waiting, topology)
        answers = _answers([waiting.pop(rank) for rank in ready])
        for rank, given in zip(ready, answers, strict=True):
            go_on(rank, given)
    return [results[rank] for rank in range(len(exchanges))]


def _ready(waiting: Mapping[int, CollectiveRequest], topology: Topology) -> range:
    """Ranks that have all asked for the same collective."""
    for rank, request in waiting.items():
        group = topology.group(rank, request.scope)
        asked = [waiting.get(member) for member in group]
        if all(other is not None and (other.kind, other.scope) == (request.kind, request.scope) for other in asked):
            check_members(request, len(group))
            return group
    asked_for = ", ".join(f"{rank}: {request.kind} ({request.scope.value})" for rank, request in sorted(waiting.items()))
    raise ValueError(f"no collective has all its ranks; {asked_for}: all of them must run the same method and options")


def _answers(requests: Sequence[CollectiveRequest]) -> list[list[Tensor]]:
    """The answer for each rank, once all ranks have asked."""
    tensors = [request.tensor for request in requests]
    match requests[0].kind:
        case "all_to_all":
            parts = [request.tensor.split_with_sizes(list(request.lengths)) for request in requests]
            return [[part[rank].clone() for part in parts] for rank in range(len(requests))]
        case "sum":
            return [[added(tensors)] for _ in requests]
        case "reduce":
            return [[added(tensors)], *([] for _ in requests[1:])]
        case "broadcast":
            return [[tensors[0]] for _ in requests]
        case "max":
            return [[torch.stack(tensors).amax(0)] for _ in requests]
    return [tensors for _ in requests]
