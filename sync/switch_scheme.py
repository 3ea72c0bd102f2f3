"""Schemes that go through a switch, and over the ranks' own connections while there is none.

A call that a switch does not finish is made again without it, by all ranks: they compare notes over their own process group at the
end of every call, so a sum is the switch's on all ranks or on none. The gradient stays untouched until then, so nothing is lost.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.validation import checked

from .backends import open_exchange
from .base import Dimensions, Scheme
from .exchange import Exchange
from .options import PacketBytes, Patience, SlotCount, Switches
from .rows import GradientError, from_dense, to_matrix, to_tensor
from .switch_client import Client, SwitchTerms
from .switch_link import SwitchLink
from .switch_packets import MOST_RANKS, Array

Key: TypeAlias = bytes | Callable[[], bytes]
Gradient = TypeVar("Gradient")


class SwitchScheme(Scheme, Generic[Gradient]):
    """A scheme that goes through a switch.

    Args:
        switch: host:port of ``gemini switch``, or of several with a part of the slots each, in their order, with commas between.
        key: shared with the switch, or a call that returns it, made when it is first needed.
        slots: packets that are under way at once; the same on all ranks, as all that follows.
        packet: bytes of a packet's values. With 36 of its header and 28 of IP and UDP it must fit the network's frames (48 for IPv6).
        patience: seconds without any progress after which a switch counts as dead.
    """

    dimensions = Dimensions("point-to-point", "incremental", "centralization", None)

    @checked
    def __init__(self, switch: Switches, key: Key, slots: SlotCount = 256, packet: PacketBytes = 1408, patience: Patience = 3.0) -> None:
        self._places = [place.strip() for place in switch.split(",")]
        self._key, self._slots, self._packet, self._patience = key, slots, packet, patience
        self._links: weakref.WeakKeyDictionary[ProcessGroup, dict[str, SwitchLink]] = weakref.WeakKeyDictionary()

    def in_use(self, group: ProcessGroup | None = None) -> bool:
        """Whether the latest sums of a group (None: the default one) went through the switch; the same on all its ranks."""
        chosen = group if group is not None else dist.group.WORLD
        links = self._links.get(chosen, {}) if chosen is not None else {}
        return bool(links) and all(link.ready for link in links.values())

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        gradient: Gradient | None = None
        refused, link = None, None
        try:
            gradient = self._admit(tensor)
            link = self._link(group, tensor.dtype)
        except ValueError as error:  # the others must hear of it: this rank takes part until all raise
            refused = str(error)
        exchange = open_exchange(group, tensor.device, self._describe(tensor), refused)
        if link is None or gradient is None:
            exchange.agree()
            raise AssertionError("ranks agree although this one has refused")
        if group.size() > 1 and link.meet(exchange) and (total := self._through(gradient, link, exchange)) is not None:
            return self._finish(total, tensor)
        return self._finish(self._without(gradient, exchange), tensor)

    @abstractmethod
    def _terms(self, dtype: torch.dtype) -> SwitchTerms:
        """The demands on the switch of a job for values of a dtype."""

    @abstractmethod
    def _admit(self, tensor: torch.Tensor) -> Gradient:
        """A gradient as the scheme needs it, on the CPU.

        Raises:
            GradientError: a layout or dtype that is not accepted, or indices outside the shape.
        """

    @abstractmethod
    def _through(self, gradient: Gradient, link: SwitchLink, exchange: Exchange) -> Gradient | None:
        """The sum by the switch; None on all ranks if one of them did not get it. ``gradient`` stays as it is."""

    @abstractmethod
    def _without(self, gradient: Gradient, exchange: Exchange) -> Gradient:
        """The sum without the switch."""

    @abstractmethod
    def _finish(self, total: Gradient, like: torch.Tensor) -> torch.Tensor:
        """A sum in the shape, layout, dtype and device of the gradient."""

    @property
    def _title(self) -> str:
        return f"{self.name} by {self._slots} slots of {self._packet} bytes of {len(self._places)} switches"

    def _link(self, group: ProcessGroup, dtype: torch.dtype) -> SwitchLink:
        terms = self._terms(dtype)
        links = self._links.setdefault(group, {})
        if terms.adder not in links:
            if group.size() > MOST_RANKS:
                raise GradientError(f"{self.name} takes up to {MOST_RANKS} ranks, and there are {group.size()}; take another scheme")
            key = self._read_key()
            rank, size = group.rank(), group.size()
            links[terms.adder] = link = SwitchLink(rank == 0, lambda: Client(self._places, key, rank, size, terms), ", ".join(self._places))
            weakref.finalize(group, link.close)
        return links[terms.adder]

    def _read_key(self) -> bytes:
        try:
            key = self._key if isinstance(self._key, bytes) else self._key()
        except Exception as error:  # whatever it is: the other ranks wait for this one
            raise GradientError(f"{self.name} has no key: {type(error).__name__}: {error}") from error
        if not key:
            raise GradientError(f"{self.name} has no key: it is empty; give all ranks that of the switch")
        return key


class DenseSwitchScheme(SwitchScheme[torch.Tensor]):
    """A switch scheme for whole tensors; a sparse gradient is made dense. Without the switch it is the backend's all-reduce."""

    whole = True

    def _admit(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_matrix(tensor).cpu()

    def _without(self, gradient: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        total = gradient.to(exchange.device, copy=True)
        dist.all_reduce(total, group=exchange.group)
        return total

    def _finish(self, total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if like.layout == torch.strided:
            return total.reshape(like.shape).to(like.device)
        return to_tensor(from_dense(total), like)


def to_packets(matrix: torch.Tensor, elements: int) -> Array:
    """A CPU matrix as float32 [k, elements], the last packet filled up with zeros; may share its memory."""
    flat = matrix.reshape(-1).float()
    if missing := -flat.numel() % elements:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    packets: Array = flat.numpy().reshape(-1, elements)
    return packets


def add_up_without(packets: torch.Tensor, chosen: Array, sums: torch.Tensor, exchange: Exchange) -> None:
    """Sums of the packets that a switch cannot add, by the backend. Collective: ``chosen`` is the same on all ranks."""
    if chosen.any():
        places = torch.from_numpy(np.flatnonzero(chosen))
        total = packets[places].to(exchange.device)
        dist.all_reduce(total, group=exchange.group)
        sums[places] = total.cpu()
