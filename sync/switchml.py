"""SwitchML (Sapio et al., NSDI 2021): whole gradients, added up as integers by a switch."""

from __future__ import annotations

import torch

from .exchange import Exchange
from .switch_client import SwitchTerms
from .switch_link import SwitchLink
from .switch_scheme import DenseSwitchScheme, Key, add_up_without, to_packets
from .switchml_stream import SwitchMLStream


class SwitchML(DenseSwitchScheme):
    """Sums integers in a switch: each rank sends a gradient once and receives it once, however many ranks there are.

    Values are scaled per packet, to 32 bits less what the number of ranks takes, so a sum is off by n / (2 f) at most
    (`switchml_stream`). It does not depend on the order of arrival. Packets with a NaN, an infinity or a magnitude from 2^126 on go by
    the backend's all-reduce. 16-bit values are added in 32 bits and rounded once; float64 is rounded to float32 first.
    """

    name = "switchml"

    def __init__(self, switch: str, key: Key, slots: int = 256, packet: int = 1408, patience: float = 3.0) -> None:
        super().__init__(switch, key, slots, packet, patience)

    def _terms(self, dtype: torch.dtype) -> SwitchTerms:
        return SwitchTerms("int32", True, self._slots, self._packet, self._patience)

    def _through(self, gradient: torch.Tensor, link: SwitchLink, exchange: Exchange) -> torch.Tensor | None:
        if not gradient.numel():
            return gradient
        packets = to_packets(gradient, self._packet // 4)
        stream = SwitchMLStream(packets, link.slots, exchange.size)
        if not link.run(stream, exchange):
            return None
        sums = torch.from_numpy(stream.sums)
        add_up_without(torch.from_numpy(packets), stream.special, sums, exchange)
        return sums.reshape(-1)[: gradient.numel()].view(gradient.shape).to(gradient.dtype)
