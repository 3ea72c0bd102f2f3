"""Schemes that go through a switch, and over the ranks' own connections while there is none.

A call that a switch does not finish is made again without it, by all ranks: they compare notes over their own process group at the
end of every call, so a sum is the switch's on all ranks or on none. The gradient stays untouched until then, so nothing is lost.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft.validation import checked

from . import wire
from .backends import open_exchange
from .base import Scheme
from .exchange import Exchange
from .options import PacketBytes, Patience, SlotCount, Switches
from .rows import GradientError, from_matrix, to_matrix
from .switch_client import Client, SwitchRefusedError, SwitchSilentError, SwitchTerms
from .switch_packets import MOST_RANKS
from .switch_worker import PacketStream, TensorStream

_RETRY = 2.0  # seconds from a failure to the next attempt
_JOB_BYTES = 16
_log = logging.getLogger("gemini_ft")
Key: TypeAlias = bytes | Callable[[], bytes]
Gradient = TypeVar("Gradient")


class SwitchLink:
    """One rank's end of a group's way to its switch, which is up on all ranks or down on all of them.

    While it is down, each call asks whether the switch answers, without waiting, and all ranks take it up again once it answers all.

    Args:
        speaks: whether this rank writes to the log.
        make: makes a client, for one attempt.
        patience: seconds for a switch's answers at the first call, and when a job is joined.
    """

    def __init__(self, speaks: bool, make: Callable[[], Client], name: str, patience: float) -> None:
        self.ready = False  # whether it is up; the same on all ranks
        self._speaks, self._make, self._name, self._patience = speaks, make, name, patience
        self._client: Client | None = None
        self._said: bool | None = None  # what the log has of it: up, or down
        self._not_before = 0.0  # time of the next attempt

    @property
    def client(self) -> Client:
        """This rank's side of the job, while it is up."""
        if self._client is None:
            raise RuntimeError(f"the link to switch {self._name} is down")
        return self._client

    def meet(self, exchange: Exchange) -> bool:
        """Begins a call: compares what the ranks were given, and goes up if all ranks reach the switch; whether it is up. Collective.

        Raises as `Exchange.share`.
        """
        if self.ready and self.client.spent:
            self.close()
            self._said = None  # as at the first call: it waits for the switch
        problem = "" if self.ready else self._look()
        reports = share(exchange, secrets.token_bytes(_JOB_BYTES) + problem.encode())
        if self.ready or self._failed([report[_JOB_BYTES:] for report in reports], drop=False):
            return self.ready
        if self._failed(share(exchange, self._join(reports[0][:_JOB_BYTES].hex()).encode()), drop=True):
            return False
        self.ready = True
        self._say(True, f"gradients go through switch {self._name}")
        return True

    def run(self, stream: TensorStream, exchange: Exchange) -> bool:
        """Takes one tensor through the switch; whether all ranks have its sum, else it is down. Collective."""
        problem = ""
        try:
            self.client.run(stream)
        except SwitchSilentError as error:
            problem = str(error)
        return not self._failed(share(exchange, problem.encode()), drop=True)

    def close(self) -> None:
        self.ready = False
        if self._client is not None:
            self._client.close()
        self._client = None

    def _look(self) -> str:
        """The reason why this rank does not reach the switch, if so. Waits for it at the first time only."""
        if time.monotonic() < self._not_before:
            return f"switch {self._name} is asked again later"
        try:
            self._client = self._client or self._make()
            return self._client.reaches(self._patience if self._said is None else 0.0) or ""
        except SwitchSilentError as error:
            self._not_before = time.monotonic() + _RETRY
            return str(error)

    def _join(self, job: str) -> str:
        try:
            self.client.join(job, self._patience)
        except (SwitchSilentError, SwitchRefusedError) as error:
            return str(error)
        return ""

    def _failed(self, problems: Sequence[bytes], drop: bool) -> bool:
        """Goes down, or stays down, if a rank has a problem. All ranks decide from the same reports."""
        found = next(((rank, problem.decode()) for rank, problem in enumerate(problems) if problem), None)
        if found is None:
            return False
        self.ready = False
        if drop:
            self.close()
            self._not_before = time.monotonic() + _RETRY
        self._say(False, f"rank {found[0]}: {found[1]}: all ranks add gradients up without it until it answers")
        return True

    def _say(self, up: bool, text: str) -> None:
        if self._speaks and self._said is not up:
            _log.log(logging.INFO if up else logging.WARNING, "%s", text)
        self._said = up


def share(exchange: Exchange, text: bytes) -> list[bytes]:
    """The texts of all ranks, by rank; raises as `Exchange.share`."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)
    own = wire.wrap(data.to(exchange.device))
    return [wire.payload(each).cpu().numpy().tobytes() for each in exchange.share(own)]


class SwitchScheme(Scheme, Generic[Gradient]):
    """A scheme that goes through a switch.

    Args:
        switch: host:port of ``gemini switch``, or of several with a part of the slots each, in their order, with commas between.
        key: shared with the switch, or a call that returns it, made when it is first needed.
        slots: packets that are under way at once; the same on all ranks, as all that follows.
        packet: bytes of a packet's values. With 36 of its header and 28 of IP and UDP it must fit the network's frames (48 for IPv6).
        patience: seconds without any progress after which a switch counts as dead.
    """

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

        Raises GradientError: a layout or dtype that is not accepted, or indices outside the shape.
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
            name = ", ".join(self._places)
            links[terms.adder] = link = SwitchLink(rank == 0, lambda: Client(self._places, key, rank, size, terms), name, self._patience)
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

    @abstractmethod
    def _adder(self, dtype: torch.dtype) -> str:
        """The name of the switch's registers for values of a dtype."""

    @abstractmethod
    def _stream(self, packets: torch.Tensor, slots: int, world: int) -> PacketStream:
        """One tensor on its way, as packets in the dtype in which it travels, [k, elements]."""

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of a dtype travel."""
        return torch.float32

    def _look(self, packets: torch.Tensor, sums: torch.Tensor, special: torch.Tensor, exchange: Exchange) -> None:
        """Looks at what came of the packets; ``special``, bool [k], did not go through the switch. Collective."""
        return

    def _terms(self, dtype: torch.dtype) -> SwitchTerms:
        return SwitchTerms(adder=self._adder(dtype), largest=True, slots=self._slots, nbytes=self._packet, patience=self._patience)

    def _admit(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_matrix(tensor).cpu()

    def _through(self, gradient: torch.Tensor, link: SwitchLink, exchange: Exchange) -> torch.Tensor | None:
        if not gradient.numel():
            return gradient
        dtype = self._travels(gradient.dtype)
        elements = self._packet // dtype.itemsize
        flat = gradient.reshape(-1).to(dtype)
        if missing := -flat.numel() % elements:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        packets = flat.view(-1, elements)
        stream = self._stream(packets, link.client.slots, exchange.size)
        if not link.run(stream, exchange):
            return None
        sums, special = torch.from_numpy(stream.sums).view(dtype), torch.from_numpy(stream.special)
        if special.any():  # the same on all ranks: packets that a switch cannot add
            total = packets[special].to(exchange.device)
            dist.all_reduce(total, group=exchange.group)
            sums[special] = total.cpu()
        self._look(packets, sums, special, exchange)
        return sums.reshape(-1)[: gradient.numel()].view(gradient.shape).to(gradient.dtype)

    def _without(self, gradient: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        total = gradient.to(exchange.device, copy=True)
        dist.all_reduce(total, group=exchange.group)
        return total

    def _finish(self, total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return from_matrix(total, like)
