"""How messages of unknown size travel between the ranks of a group."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from . import wire
from .rows import GradientError

SHORT = 2**18  # bytes of all ranks' messages together up to which rounds cost more than bytes
_ALIGNMENT = 16  # bytes: of messages within a message
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

        Short messages go in few rounds, as with `share`. Long ones are under way when this returns; the iterator must be taken
        to its end, without long delays, because a rank may pass on meanwhile what others wait for.

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
