"""FPISA (Yuan et al., NSDI 2022): whole gradients, added up as floating-point numbers by integer operations of a switch."""

from __future__ import annotations

import weakref
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .exchange import Exchange
from .fpisa_accuracy import Accuracy
from .switch_client import SwitchTerms
from .switch_link import SwitchLink
from .switch_packets import Array, span
from .switch_scheme import DenseSwitchScheme, Key, add_up_without
from .switch_worker import PacketStream


class FPISA(DenseSwitchScheme):
    """Sums floating-point numbers in registers of an exponent and a mantissa (`fpisa_registers`).

    Unlike SwitchML's, values need no scaling, and those of 16 bits travel as such. A sum depends on the order of arrival, and is the
    same on all ranks. float64 is rounded to float32 first. Packets with a NaN or an infinity go by the backend's all-reduce.

    Args:
        mode: fpisa, whose error is one unit in the last place of the largest value per addition at most; or fpisa-a, for switches
            of today, which loses a sum where a value is more than 128 times as large: for ranks whose values are alike.
        compare_every: sums from one of which a packet is compared with its exact sum to the next, see `accuracy`; 0: never. That takes
            a short all-reduce.
    """

    name = "fpisa"

    def __init__(
        self,
        switch: str,
        key: Key,
        mode: Literal["fpisa", "fpisa-a"] = "fpisa",
        *,
        slots: int = 256,
        packet: int = 1408,
        patience: float = 3.0,
        compare_every: int = 100,
    ) -> None:
        super().__init__(switch, key, slots, packet, patience, mode=mode, compare_every=compare_every)
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

    def _terms(self, dtype: torch.dtype) -> SwitchTerms:
        adder = f"{self._mode}-{str(_travels(dtype)).removeprefix('torch.')}"
        return SwitchTerms(adder, True, self._slots, self._packet, self._patience)

    def _through(self, gradient: torch.Tensor, link: SwitchLink, exchange: Exchange) -> torch.Tensor | None:
        if not gradient.numel():
            return gradient
        dtype = _travels(gradient.dtype)
        elements = self._packet // dtype.itemsize
        flat = gradient.reshape(-1).to(dtype)
        packets = torch.cat([flat, flat.new_zeros(-flat.numel() % elements)]).view(-1, elements)
        stream = FpisaStream(packets.view(torch.uint8).numpy(), (~packets.isfinite()).any(1).numpy(), link.slots)
        if not link.run(stream, exchange):
            return None
        sums = torch.from_numpy(stream.sums).view(dtype)
        add_up_without(packets, stream.special, sums, exchange)
        self.accuracy(dtype, exchange.group).look(packets, sums, torch.from_numpy(stream.special), self._compare_every, exchange)
        return sums.reshape(-1)[: gradient.numel()].view(gradient.shape).to(gradient.dtype)


class FpisaStream(PacketStream):
    """One tensor.

    Args:
        packets: uint8 [k, bytes].
        odd: bool [k], packets that hold NaN or infinities on this rank.
        slots: of the pool.
    """

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


def _travels(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype
