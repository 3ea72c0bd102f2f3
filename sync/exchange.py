"""How messages of unknown size travel between the ranks of a group: one message per peer, the size in its header.

Gloo's receive takes any message that fits its buffer, in the order sent. So the first slice of every message is awaited with
room for `SLICE` bytes, and only a longer message, whose header says how much more there is, takes a second receive. Other
backends (NCCL) need to know sizes first; `CollectiveExchange` sends them ahead.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from . import wire
from .rows import GradientError

SLICE = 2**20  # bytes that travel as one piece: what has come is passed on while the rest is under way
_DIRECT, _RING = 0x5A454E00, 0x5A454E01  # tags: ours must not be mixed up with the user's own messages
_REFUSED = -1  # the digest of a rank that cannot take part


class Exchange(ABC):
    """Messages among the ranks of a group.

    Every rank describes what it was given. Messages carry a digest of that; `all_to_all`, with which every scheme begins,
    compares all of them, so that either all ranks go on or all raise the same error.

    Args:
        group: the ranks.
        device: where messages lie.
        text: describes this rank's gradient and scheme.
        refused: why this rank's gradient cannot be summed, if so.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, text: str, refused: str | None = None) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        self._text = text if refused is None else refused
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        self._digest = _REFUSED if refused is not None else int.from_bytes(digest, "little")

    def agree(self) -> None:
        """Begin without data: for schemes in which not every rank hears from every other one.

        Raises:
            GradientError: a rank was given something else, or cannot take part.
        """
        for _ in self.all_to_all([wire.new(0, self.device)] * self.size):
            pass

    def all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Send ``messages[rank]`` to each rank; (rank, message) of what has come, in rank order, the own one included.

        Raises:
            GradientError: a rank was given something else, or cannot take part. Known only when all have come.
        """
        same = self._digest != _REFUSED
        for message in messages:
            wire.stamp(message, self._digest)
        for source, message in self._all_to_all(messages):
            same = same and wire.digest(message) == self._digest
            if same:
                yield source, message
        if not same:
            raise GradientError(self._differences())

    def all_gather(self, message: torch.Tensor, lengths: Sequence[int] | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Send one message to all; (rank, message) of what has come, in any order, the own one included.

        Every rank passes on what it receives, so each link carries each message once in each direction.

        Args:
            message: uint8, with or without header.
            lengths: bytes of each rank's message. None: they are not known yet and are exchanged first.
        """
        return self._all_gather(message, self.lengths(message) if lengths is None else lengths)

    def lengths(self, message: torch.Tensor) -> list[int]:
        """Bytes of each rank's message."""
        own = wire.new(8, self.device)
        wire.payload(own).view(torch.int64).fill_(len(message))
        return [int(wire.payload(each).view(torch.int64)) for _, each in self.all_to_all([own] * self.size)]

    @abstractmethod
    def send(self, message: torch.Tensor, peer: int) -> None:
        """Send a message with a header; returns when it may be written again."""

    @abstractmethod
    def receive(self, peer: int) -> torch.Tensor:
        """The next message of ``peer``."""

    @abstractmethod
    def swap(self, message: torch.Tensor, peer: int) -> torch.Tensor:
        """Send and receive at once."""

    @abstractmethod
    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]: ...

    @abstractmethod
    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]: ...

    def _differences(self) -> str:
        """What each rank was given. Collective, once all know that they differ."""
        text = self._text.encode()
        own = wire.new(len(text), self.device)
        wire.payload(own).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        texts = [bytes(wire.payload(each).tolist()).decode() for _, each in self._all_to_all([own] * self.size)]
        return "gradients that cannot be summed: " + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def open_exchange(group: ProcessGroup, device: torch.device, text: str, refused: str | None = None) -> Exchange:
    """Over the backend that ``group`` has for ``device``, or, where it has none or gloo, over CPU memory."""
    name = _backend(group, device)
    if name in ("gloo", None):
        cpu = torch.device("cpu")
        kind = PointToPoint if _backend(group, cpu) == "gloo" else CollectiveExchange
        return kind(group, cpu, text, refused)
    return CollectiveExchange(group, device, text, refused)


def _backend(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # none for this type of device
        return None


class PointToPoint(Exchange):
    """Over gloo."""

    def send(self, message: torch.Tensor, peer: int) -> None:
        _wait(self._send(message, peer, _DIRECT))

    def receive(self, peer: int) -> torch.Tensor:
        return self._rest(*self._first(peer), peer)

    def swap(self, message: torch.Tensor, peer: int) -> torch.Tensor:
        first = self._first(peer)
        sends = self._send(message, peer, _DIRECT)
        theirs = self._rest(*first, peer)
        _wait(sends)
        return theirs

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]  # nobody is everybody's first
        firsts = {peer: self._first(peer) for peer in peers}
        sends = [work for peer in peers for work in self._send(messages[peer], peer, _DIRECT)]
        for source in range(self.size):
            yield source, messages[source] if source == self.rank else self._rest(*firsts[source], source)
        _wait(sends)

    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """A ring: one stream per link and direction, which TCP carries at nearly the full rate; many at once it does not."""
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        origins = [(self.rank - step) % self.size for step in range(1, self.size)]
        coming = {origin: torch.empty(lengths[origin], dtype=torch.uint8) for origin in origins}
        works = {origin: [self.group.recv([piece], left, _RING) for piece in _slices(coming[origin])] for origin in origins}
        sends = self._send(message, right, _RING) if origins else []
        yield self.rank, message
        for origin in origins:
            for piece, work in zip(_slices(coming[origin]), works[origin], strict=True):
                work.wait()
                if origin != right:
                    sends.append(self.group.send([piece], right, _RING))
            yield origin, coming[origin]
        _wait(sends)

    def _first(self, peer: int) -> tuple[torch.Tensor, Work]:
        buffer = torch.empty(SLICE, dtype=torch.uint8)  # of a short message, the rest stays untouched: no memory is behind it
        return buffer, self.group.recv([buffer], peer, _DIRECT)

    def _rest(self, first: torch.Tensor, work: Work, peer: int) -> torch.Tensor:
        work.wait()
        length = wire.length(first)
        if length <= SLICE:
            return first[:length]
        whole = torch.empty(length, dtype=torch.uint8)
        works = [self.group.recv([piece], peer, _DIRECT) for piece in _slices(whole[SLICE:])]
        whole[:SLICE] = first
        _wait(works)
        return whole

    def _send(self, message: torch.Tensor, peer: int, tag: int) -> list[Work]:
        return [self.group.send([piece], peer, tag) for piece in _slices(message)]


class CollectiveExchange(Exchange):
    """Over backends that need to know every size beforehand, such as NCCL."""

    def send(self, message: torch.Tensor, peer: int) -> None:
        self._batch([(self._length_of(message), peer)], [])
        self._batch([(message, peer)], [])

    def receive(self, peer: int) -> torch.Tensor:
        length = self._room(1, torch.int64)
        self._batch([], [(length, peer)])
        message = self._room(int(length))
        self._batch([], [(message, peer)])
        return message

    def swap(self, message: torch.Tensor, peer: int) -> torch.Tensor:
        length = self._room(1, torch.int64)
        self._batch([(self._length_of(message), peer)], [(length, peer)])
        theirs = self._room(int(length))
        self._batch([(message, peer)], [(theirs, peer)])
        return theirs

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        counts = torch.tensor([len(message) for message in messages], device=self.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sizes = theirs.tolist()
        out = self._room(sum(sizes))
        dist.all_to_all_single(out, torch.cat(list(messages)), sizes, counts.tolist(), group=self.group)
        # Each on its own: values need an alignment that their place in the whole does not have.
        yield from enumerate(piece.clone() for piece in out.split(sizes))

    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = {rank: self._room(lengths[rank]) for rank in others}
        self._batch([(message, rank) for rank in others if len(message)], [(coming[rank], rank) for rank in others if lengths[rank]])
        yield from sorted({**coming, self.rank: message}.items())

    def _length_of(self, message: torch.Tensor) -> torch.Tensor:
        return torch.tensor([len(message)], device=self.device)

    def _room(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def _batch(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def _slices(message: torch.Tensor) -> list[torch.Tensor]:
    return list(message.split(SLICE)) if len(message) else []


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
