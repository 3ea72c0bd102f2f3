"""The error of FPISA's sums while training: packets that are picked now and then are added up a second time, in float64."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .exchange import Exchange

_SPREAD = 2654435761  # makes successive samples come from all over a gradient
_log = logging.getLogger("gemini_ft")


@dataclass
class Accuracy:
    """Errors of the values that were compared with their exact sums, as parts of the sum of the ranks' magnitudes.

    All of it is the same on all ranks.

    Attributes:
        sums: calls that went through the switch.
        values: compared.
        mean: error of those that are numbers.
        worst: largest error; infinite where a sum is no number.
        beyond: values whose error is above FPISA's bound: a unit in the last place of the magnitudes' sum per rank.
        lost: of these, sums that came out as a NaN or an infinity and should not have.
    """

    sums: int = 0
    values: int = 0
    mean: float = 0.0
    worst: float = 0.0
    beyond: int = 0
    lost: int = 0

    def __str__(self) -> str:
        off = f"off by {self.mean:.1e} of the sum of magnitudes on average, {self.worst:.1e} at most"
        lost = f", {self.lost} of them no numbers" if self.lost else ""
        return f"{self.values} values compared with their exact sums: {off}; {self.beyond} beyond the bound{lost}"

    def note(self, errors: torch.Tensor, allowed: torch.Tensor) -> None:
        """Takes in relative errors, float64 [n], and the most that each may be."""
        finite = errors[errors.isfinite()]
        self.values += len(errors)
        self.lost += len(errors) - len(finite)
        if len(finite):
            self.mean += float((finite - self.mean).sum()) / (self.values - self.lost)
        self.worst = math.inf if self.lost else max(self.worst, float(errors.max()))
        self.beyond += int((~(errors <= allowed)).sum())  # a NaN is above nothing

    def look(self, packets: torch.Tensor, sums: torch.Tensor, special: torch.Tensor, every: int, exchange: Exchange) -> None:
        """Counts a call; compares one packet that went through the switch of the first and of each ``every``-th (0: none). Collective.

        Args:
            packets: of this rank, as they travel, [k, elements].
            sums: of the switch.
            special: bool [k], the packets that did not go through it.
        """
        number, self.sums = self.sums, self.sums + 1
        if not every or number % every or special.all():
            return
        there = special.logical_not().nonzero().flatten()
        place = int(there[number * _SPREAD % len(there)])
        own = packets[place].to(torch.float64)
        exact = torch.stack([own, own.abs()]).to(exchange.device)
        dist.all_reduce(exact, group=exchange.group)
        total, magnitudes = exact.cpu()
        fits = torch.finfo(packets.dtype)
        found = sums[place].to(torch.float64)
        compared = (magnitudes > 0) & (magnitudes <= fits.max)  # a sum that the dtype cannot hold is infinite in any way of adding
        if not compared.any():
            return
        said, beyond = self.values > 0, self.beyond
        smallest = fits.tiny * fits.eps / magnitudes[compared]
        self.note(((found - total).abs() / magnitudes)[compared], exchange.size * (fits.eps + smallest))
        if exchange.rank == 0 and (not said or (self.beyond and not beyond)):
            _log.log(logging.WARNING if self.beyond else logging.INFO, "fpisa in %s: %s", str(packets.dtype).removeprefix("torch."), self)
