"""Predicts when the gradients of one backward pass have been exchanged, if they travel in groups. Pure: no torch, no clock.

Cupcake (Wang et al., MLSys 2023), section 3: tensors become ready one after the other, consecutive ones form a group, and a
group is encoded, communicated and decoded as one. Four queues, each serving the groups in their order:

- the compute stream: the backward pass, and the encoders, which delay what is left of it (equation 2 of the paper);
- the encode stream: only with ``encode="beside"``, where encoders run next to the backward pass and do not delay it;
- the network: the collectives of one group after those of the one before;
- the decode stream: the paper leaves decoding out, but with all-gather it is as many payloads as there are workers.

    seconds = simulate(backward, costs, even(len(backward), 4))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from .costs import FREE, Cost


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The tensors of a model, in the order in which the backward pass makes their gradients.

    Raises ValueError: no tensor, other numbers of sizes than of times, or anything negative or not finite.
    """

    nbytes: tuple[int, ...]  # of each gradient, dense
    seconds: tuple[float, ...]  # of each, from when the one before was ready until it is ready itself
    forward: float = 0.0  # seconds of the forward pass; nothing overlaps with it

    def __post_init__(self) -> None:
        if len(self.nbytes) != len(self.seconds) or not self.nbytes:
            raise ValueError(f"{len(self.nbytes)} sizes and {len(self.seconds)} times: there must be as many of both, at least 1")
        for what, numbers in (("bytes", self.nbytes), ("seconds", (*self.seconds, self.forward))):
            if not all(0 <= number < math.inf for number in numbers):
                raise ValueError(f"{what} {numbers}: must be finite and at least 0")

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, kw_only=True)
class GroupCosts:
    """The costs of one group, each as a function of its dense bytes."""

    encode: Cost  # compressing it
    communicate: Cost  # all of its collectives. A cost per byte sent becomes one per dense byte by ``scaled(size=ratio)``.
    decode: Cost = FREE  # decompressing and adding up whatever has arrived
    # the stream that encodes: ``compute`` delays the backward pass, ``beside`` does not
    encode_on: Literal["compute", "beside"] = "compute"

    def __post_init__(self) -> None:
        if self.encode_on not in ("compute", "beside"):
            raise ValueError(f"encode_on={self.encode_on!r}: must be 'compute' or 'beside'")


@dataclass(frozen=True)
class Grouping:
    """Consecutive tensors that travel together: group g is ``ends[g - 1]:ends[g]``, the first one ``0:ends[0]``."""

    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ends or any(low >= high for low, high in pairwise((0, *self.ends))):
            raise ValueError(f"ends {self.ends}: must ascend from at least 1, and there must be one")

    @property
    def groups(self) -> tuple[range, ...]:
        return tuple(range(*bounds) for bounds in pairwise((0, *self.ends)))


def layer_wise(tensors: int) -> Grouping:
    """The grouping in which every tensor is a group."""
    return Grouping(tuple(range(1, tensors + 1)))


def even(tensors: int, groups: int) -> Grouping:
    """Groups whose numbers of tensors differ by at most one. Raises ValueError: ``groups`` is below 1 or above the number of tensors."""
    if not 1 <= groups <= tensors:
        raise ValueError(f"{groups} groups of {tensors} tensors: must be between 1 and the number of tensors")
    return Grouping(tuple(tensors * group // groups for group in range(1, groups + 1)))


def buckets(nbytes: Sequence[int], capacity: int) -> Grouping:
    """Groups closed by the tensor with which they hold at least ``capacity`` bytes, as the buckets of torch's DDP are.

    Raises ValueError: ``capacity`` is below 1, or there is no tensor.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity} bytes: must be at least 1")
    ends, held = [], 0
    for index, size in enumerate(nbytes, 1):
        held += size
        if held >= capacity or index == len(nbytes):
            ends.append(index)
            held = 0
    return Grouping(tuple(ends))


def simulate(backward: Backward, costs: GroupCosts, grouping: Grouping) -> float:
    """Predicts the seconds from the beginning of the forward pass until the last gradient is decoded and the backward pass has ended.

    Raises ValueError: ``grouping`` is one of another number of tensors.
    """
    if grouping.ends[-1] != len(backward):
        raise ValueError(f"groups that end at {grouping.ends} for {len(backward)} tensors: the last must end with the last tensor")
    ready = [0.0, *accumulate(backward.seconds)]
    filled = [0, *accumulate(backward.nbytes)]
    delay = encoded = communicated = decoded = 0.0
    for begin, end in pairwise((0, *grouping.ends)):
        nbytes = filled[end] - filled[begin]
        encode = costs.encode(nbytes)
        encoded = max(ready[end] + delay, encoded) + encode
        delay += encode if costs.encode_on == "compute" else 0.0
        communicated = max(encoded, communicated) + costs.communicate(nbytes)
        decoded = max(communicated, decoded) + costs.decode(nbytes)
    return backward.forward + decoded
