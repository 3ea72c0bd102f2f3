"""FPISA (Yuan et al., NSDI 2022): whole gradients, added up as floating-point numbers by integer operations of a switch.

`Accuracy` is the error of these sums while training: now and then a packet is picked and added up a second time, in float64.
"""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.validation import checked

from .exchange import Exchange
from .options import CompareEvery, Mode, PacketBytes, Patience, SlotCount, Switches
from .switch_packets import Array, span
from .switch_scheme import DenseSwitchScheme, Key
from .switch_worker import PacketStream

_SPREAD = 2654435761  # makes successive samples come from all over a gradient
_log = logging.getLogger("gemini_ft")


@dataclass(kw_only=True)
class Accuracy:
    """Errors of the values that were compared with their exact sums, as parts of the sum of the ranks' magnitudes.

    All of it is the same on all ranks.
    """

    sums: int = 0  # calls that went through the switch
    values: int = 0  # compared
    mean: float = 0.0  # error of those that are numbers
    bias: float = 0.0  # the same with signs: below zero where sums come out too small
    worst: float = 0.0  # largest error; infinite where a sum is no number
    beyond: int = 0  # values whose error is above FPISA's bound: half a unit in the last place of the magnitudes' sum per rank
    lost: int = 0  # of these, sums that came out as a NaN or an infinity and should not have

    def __str__(self) -> str:
        off = f"off by {self.mean:.1e} of the sum of magnitudes on average, {self.worst:.1e} at most, {self.bias:+.1e} with signs"
        lost = f", {self.lost} of them no numbers" if self.lost else ""
        return f"{self.values} values compared with their exact sums: {off}; {self.beyond} beyond the bound{lost}"

    def note(self, errors: torch.Tensor, allowed: torch.Tensor) -> None:
        """Takes in relative errors with their signs, float64 [n], and the magnitude that each may have."""
        finite = errors[errors.isfinite()]
        self.values += len(errors)
        self.lost += len(errors) - len(finite)
        if len(finite):
            self.mean += float((finite.abs() - self.mean).sum()) / (self.values - self.lost)
            self.bias += float((finite - self.bias).sum()) / (self.values - self.lost)
        self.worst = math.inf if self.lost else max(self.worst, float(errors.abs().max()))
        self.beyond += int((~(errors.abs() <= allowed)).sum())  # a NaN is above nothing

    def look(self, packets: torch.Tensor, sums: torch.Tensor, special: torch.Tensor, every: int, exchange: Exchange) -> None:
        """Counts a call; compares one packet that went through the switch of the first and of each ``every``-th (0: none). Collective.

        ``packets``: of this rank, as they travel, [k, elements]. ``special``: bool [k], the packets that did not go through it.
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
        self.note(((found - total) / magnitudes)[compared], exchange.size / 2 * (fits.eps + smallest))
        if exchange.rank == 0 and (not said or (self.beyond and not beyond)):
            _log.log(logging.WARNING if self.beyond else logging.INFO, "fpisa in %s: %s", str(packets.dtype).removeprefix("torch."), self)


class FPISA(DenseSwitchScheme):
    """Sums floating-point numbers in registers of an exponent and a mantissa (`switch_adders.FpisaAdder`).

    Unlike SwitchML's, values need no scaling, and those of 16 bits travel as such. A sum depends on the order of arrival, and is the
    same on all ranks. float64 is rounded to float32 first. Packets with a NaN or an infinity go by the backend's all-reduce.

    Args:
        mode: fpisa, whose error is half a unit in the last place of the sum, and per addition a quarter of one of the largest value (in
            16 bits a 2^15th or less), at most; or fpisa-a, for switches of today, which loses a sum where a value is more than 128 times
            as large: for ranks whose values are alike.
        compare_every: sums from one of which a packet is compared with its exact sum to the next, see `accuracy`; 0: never. That takes
            a short all-reduce.
    """

    name = "fpisa"

    @checked
    def __init__(
        self,
        switch: Switches,
        key: Key,
        mode: Mode = "fpisa",
        *,
        slots: SlotCount = 256,
        packet: PacketBytes = 1408,
        patience: Patience = 3.0,
        compare_every: CompareEvery = 100,
    ) -> None:
        super().__init__(switch, key, slots, packet, patience)
        self._mode, self._compare_every = mode, compare_every
        self._accuracies: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.dtype, Accuracy]] = weakref.WeakKeyDictionary()

    def accuracy(self, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> Accuracy:
        """The errors found so far in the sums of a group (None: the default one) of values that travel in a dtype."""
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None, "call torch.distributed.init_process_group first"
        return self._accuracies.setdefault(chosen, {}).setdefault(dtype, Accuracy())

    @property
    def _title(self) -> str:
        return f"{super()._title} in mode {self._mode}, compared every {self._compare_every} sums,"

    def _adder(self, dtype: torch.dtype) -> str:
        return f"{self._mode}-{str(self._travels(dtype)).removeprefix('torch.')}"

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.float64 else dtype

    def _stream(self, packets: torch.Tensor, slots: int, world: int) -> FpisaStream:
        return FpisaStream(packets.view(torch.uint8).numpy(), (~packets.isfinite()).any(1).numpy(), slots)

    def _look(self, packets: torch.Tensor, sums: torch.Tensor, special: torch.Tensor, exchange: Exchange) -> None:
        self.accuracy(packets.dtype, exchange.group).look(packets, sums, special, self._compare_every, exchange)


class FpisaStream(PacketStream):
    """One tensor. ``packets``: uint8 [k, bytes]. ``odd``: bool [k], packets that hold NaN or infinities on this rank."""

    def __init__(self, packets: Array, odd: Array, slots: int) -> None:
        super().__init__(packets, slots)
        self._odd = odd.astype(np.int64)

    def first(self) -> Array:
        return self._odd[: self.columns]

    def _take(self, columns: Array, packets: Array, values: Array) -> None:
        self.sums[span(packets)] = values

    def _give(self, columns: Array, packets: Array, sides: Array) -> tuple[Array, Array]:
        self.special[packets] = sides != 0
        ahead = np.minimum(packets + self.columns, self._count - 1)
        return self._odd[ahead], self._packets[span(packets)]
