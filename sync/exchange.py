"""How messages of unknown size travel between the ranks of a group: one message per peer, the size in its header.

Gloo's receive takes any message that fits its buffer, in the order sent per tag. So a message is awaited with room for `ROOM`
bytes, and only a longer one, whose header says how much more there is, takes a second receive. Other backends (NCCL) need to
know sizes first; `CollectiveExchange` sends them ahead.
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

ROOM = 2**20  # bytes; what a shorter message leaves untouched takes no memory
SHORT = 2**18  # bytes of all ranks' messages together up to which rounds cost more than bytes
PIECE = 2**22  # bytes that are passed on together, while more is under way
_ALIGNMENT = 16  # bytes: of messages within a message
_DIRECT, _RING = 0x5A454E00, 0x5A454E01  # tags: ours must not be mixed up with the user's
_REFUSED = -1  # the digest of a rank that cannot take part


class Exchange(ABC):
    """Messages among the ranks of a group.

    Every rank describes what it was given. Messages carry a digest of that; `all_to_all` or `share`, with one of which every
    scheme begins, compare all ranks' digests, so that either all ranks go on or all raise the same error.

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
        self.share(wire.new(0, self.device))

    def share(self, message: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' messages, by rank. For short ones: in ceil(log2(n)) rounds of one message each (Bruck's algorithm).

        Raises:
            GradientError: a rank was given something else, or cannot take part.
        """
        wire.stamp(message, self._digest)
        messages = self._share(message)
        if any(wire.digest(each) != self._digest for each in messages) or self._digest == _REFUSED:
            raise GradientError(self._differences())
        return messages

    def all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Send ``messages[rank]`` to each rank; (rank, message) of what has come, in rank order, the own one included.

        Messages are under way when this returns; the iterator must be taken to its end.

        Raises:
            GradientError: a rank was given something else, or cannot take part. From the iterator, when all have come.
        """
        for message in messages:
            wire.stamp(message, self._digest)
        return self._checked(self._all_to_all(messages))

    def _checked(self, coming: Iterator[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
        same = self._digest != _REFUSED
        for source, message in coming:
            same = same and wire.digest(message) == self._digest
            if same:
                yield source, message
        if not same:
            raise GradientError(self._differences())

    def all_gather(self, message: torch.Tensor, lengths: Sequence[int] | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Send one message to all; (rank, message) of what has come, in any order, the own one included.

        Short messages go in few rounds, as with `share`. Of long ones every rank passes on what it receives, so that each link
        carries each message once in each direction. A rank passes on while
        it takes from the iterator, to its end.

        Args:
            message: uint8, with or without header.
            lengths: bytes of each rank's message. None: they are not known yet and are exchanged first.
        """
        lengths = self.lengths(message) if lengths is None else lengths
        if sum(lengths) > SHORT:
            return self._all_gather(message, lengths)
        wrapped = wire.new(len(message), self.device)
        wire.payload(wrapped).copy_(message)
        return enumerate(wire.payload(each) for each in self._share(wrapped))

    def lengths(self, message: torch.Tensor) -> list[int]:
        """Bytes of each rank's message."""
        own = wire.new(8, self.device)
        wire.payload(own).view(torch.int64).fill_(len(message))
        return [int(wire.payload(each).view(torch.int64)) for each in self.share(own)]

    @abstractmethod
    def send(self, message: torch.Tensor, peer: int) -> None:
        """Send a message with a header; returns when it may be written again."""

    @abstractmethod
    def receive(self, peer: int) -> torch.Tensor:
        """The next message of ``peer``."""

    def swap(self, message: torch.Tensor, peer: int) -> torch.Tensor:
        """Send and receive at once."""
        return self.shift(message, peer, peer)

    @abstractmethod
    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        """Send to one rank and receive from another at once."""

    @abstractmethod
    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]: ...

    @abstractmethod
    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]: ...

    def _share(self, message: torch.Tensor) -> list[torch.Tensor]:
        held = [message]  # of this rank and those that follow
        while (distance := len(held)) < self.size:
            bundle = _bundle(held[: self.size - distance])
            held += _unbundle(self.shift(bundle, (self.rank - distance) % self.size, (self.rank + distance) % self.size))
        return [held[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _differences(self) -> str:
        """What each rank was given. Collective, once all know that they differ."""
        text = self._text.encode()
        own = wire.new(len(text), self.device)
        wire.payload(own).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        texts = [bytes(wire.payload(each).tolist()).decode() for each in self._share(own)]
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
    """Over gloo. What every rank must have goes around a ring: one stream per link and direction gets nearly all of its rate,
    which many at once do not."""

    def send(self, message: torch.Tensor, peer: int) -> None:
        _wait(self._send(message, peer))

    def receive(self, peer: int) -> torch.Tensor:
        return _Coming(self.group, peer).end()

    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        coming = _Coming(self.group, source)
        sends = self._send(message, to)
        received = coming.end()
        _wait(sends)
        return received

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]  # nobody is everybody's first
        coming = {peer: _Coming(self.group, peer) for peer in peers}
        sends = [work for peer in peers for work in self._send(messages[peer], peer)]

        def collect() -> Iterator[tuple[int, torch.Tensor]]:
            for source in range(self.size):
                yield source, messages[source] if source == self.rank else coming[source].end()
            _wait(sends)

        return collect()

    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        origins = [(self.rank - step) % self.size for step in range(1, self.size)]
        whole = {origin: torch.empty(lengths[origin], dtype=torch.uint8) for origin in origins}
        coming = {origin: [(piece, self.group.recv([piece], left, _RING)) for piece in _pieces(whole[origin])] for origin in origins}
        sends = [self.group.send([piece], right, _RING) for piece in _pieces(message)] if origins else []

        def collect() -> Iterator[tuple[int, torch.Tensor]]:
            yield self.rank, message
            for origin in origins:
                for piece, work in coming[origin]:
                    work.wait()
                    if origin != right:
                        sends.append(self.group.send([piece], right, _RING))
                yield origin, whole[origin]
            _wait(sends)

        return collect()

    def _send(self, message: torch.Tensor, peer: int) -> list[Work]:
        rest = [message[ROOM:]] if len(message) > ROOM else []
        return [self.group.send([piece], peer, _DIRECT) for piece in (message[:ROOM], *rest)]


class _Coming:
    """A message of unknown length that is awaited."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._first = torch.empty(ROOM, dtype=torch.uint8)
        self._work = self._receive(self._first)

    def end(self) -> torch.Tensor:
        """The message, when it has come."""
        self._work.wait()
        length = wire.length(self._first)
        if length <= ROOM:
            return self._first[:length]
        whole = torch.empty(length, dtype=torch.uint8)
        rest = self._receive(whole[ROOM:])
        whole[:ROOM] = self._first
        rest.wait()
        return whole

    def _receive(self, buffer: torch.Tensor) -> Work:
        return self._group.recv([buffer], self._peer, _DIRECT)


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

    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        length = self._room(1, torch.int64)
        self._batch([(self._length_of(message), to)], [(length, source)])
        received = self._room(int(length))
        self._batch([(message, to)], [(received, source)])
        return received

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        counts = torch.tensor([len(message) for message in messages], device=self.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sizes = theirs.tolist()
        out = self._room(sum(sizes))
        dist.all_to_all_single(out, torch.cat(list(messages)), sizes, counts.tolist(), group=self.group)
        # Each on its own: values need an alignment that their place in the whole does not have.
        return enumerate(piece.clone() for piece in torch.split(out, sizes))

    def _all_gather(self, message: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = {rank: self._room(lengths[rank]) for rank in others}
        self._batch([(message, rank) for rank in others if len(message)], [(coming[rank], rank) for rank in others if lengths[rank]])
        return iter([(self.rank, message), *coming.items()])

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


def _pieces(message: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(message, PIECE)) if len(message) else []


def _bundle(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several messages as one."""
    sizes = [-(-len(message) // _ALIGNMENT) * _ALIGNMENT for message in messages]
    bundle = wire.new(sum(sizes), messages[0].device)
    for message, place in zip(messages, torch.split(wire.payload(bundle), sizes), strict=True):
        place[: len(message)] = message
    return bundle


def _unbundle(bundle: torch.Tensor) -> list[torch.Tensor]:
    rest, messages = wire.payload(bundle), []
    while len(rest):
        length = wire.length(rest)
        messages.append(rest[:length])
        rest = rest[-(-length // _ALIGNMENT) * _ALIGNMENT :]
    return messages


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
