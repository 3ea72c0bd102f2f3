"""Checks, after every step, that all ranks are at the same step, with the same plan and the same choices.

Ranks that are not would send each other what does not belong together, often without an error: indices that are drawn by a counter,
for example, differ where counters do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from gemini_ft.errors import AveragingError, RecoveryError


class Drift:
    """Compares hashes over ranks; a few bytes per rank travel beside the update and the next forward pass.

    Args:
        group: on CPUs, used by the training thread alone; None: one rank.
        common: gives what must be the same on all ranks, as plain data by its name, always the same names.
        told: gives figures of this rank that the others are to know, always as many.
        heard: is given the largest of all ranks' figures with the answer, at the same point of all ranks' steps.
    """

    def __init__(
        self,
        group: Any,
        common: Callable[[], Mapping[str, Any]],
        told: Callable[[], Sequence[int]] = tuple,
        heard: Callable[[Sequence[int]], None] = lambda most: None,
    ) -> None:
        self._group, self._common, self._told, self._heard = group, common, told, heard
        self._names: list[str] = []
        self._asked: tuple[Any, list[torch.Tensor]] | None = None

    def begin(self) -> None:
        """Asks all ranks. Every rank does so after every step, wherever its program is then; an earlier answer is looked at first."""
        if self._group is None:
            return
        self.check()
        common = self._common()
        self._names = list(common)
        own = torch.tensor([*(_number(value) for value in common.values()), *self._told()])
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        self._asked = dist.all_gather(everybody, own, group=self._group, async_op=True), everybody

    def check(self) -> None:
        """Looks at the answer, if there is one that has not been looked at.

        Raises:
            AveragingError: ranks have drifted apart. On all ranks.
        """
        if (difference := self._difference()) is not None:
            raise AveragingError(
                f"the ranks of the gradient pipeline have drifted apart, {difference}; their averages cannot be trusted any more: resume "
                "from a snapshot, and call load_state_dict(), forget() and no_sync() alike on all ranks"
            )

    def begin_anew(self) -> None:
        """Checks, after all ranks have loaded another state, whether they are together in it. Collective.

        Raises:
            RecoveryError: it was made by ranks that had drifted apart. On all ranks.
        """
        self.begin()
        if (difference := self._difference()) is not None:
            raise RecoveryError(
                f"the gradient pipeline's state is of ranks that had drifted apart, {difference}; resume from an older snapshot"
            )

    def _difference(self) -> str | None:
        """The answer, if there is one that has not been looked at."""
        if self._asked is None:
            return None
        (work, everybody), self._asked = self._asked, None
        work.wait()
        for rank, theirs in enumerate(everybody):
            for name, first, other in zip(self._names, everybody[0].tolist(), theirs.tolist(), strict=False):
                if first != other:
                    said = f": rank 0 has {first}, rank {rank} has {other}" if min(first, other) >= 0 else f" on ranks 0 and {rank}"
                    return f"their {name} differ{said}"
        self._heard(torch.stack(everybody).amax(0)[len(self._names) :].tolist())
        return None

    def drop(self) -> None:
        """Waits for the answer without looking at it: all ranks load another state."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None


def _number(value: Any) -> int:
    """A counter as it is, anything else as a negative hash of 62 bits."""
    if isinstance(value, int):
        return value
    text = json.dumps(value, sort_keys=True)
    return -1 - (int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2)
