"""Messages of unknown size between the ranks of a group."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from . import wire
from .rows import GradientError

SHORT = 2**18  # bytes of all ranks' messages together up to which rounds cost more than bytes
_REFUSED = -1  # the digest of a rank that cannot take part

Passed: TypeAlias = tuple[int, torch.Tensor, torch.Tensor | None]
"""(rank, head, data) of what is passed on; None: the data will follow."""


class Exchange(ABC):
    """Messages among the ranks of a group.

    Every rank describes what it was given. Messages carry a digest of that; `all_to_all` or `share`, with one of which every
    scheme begins, compare all ranks' digests, so that either all ranks go on or all raise the same error.

    Args:
        device: where messages lie.
        text: describes this rank's gradient and scheme.
        refused: why this rank's gradient cannot be summed, if so.
    """

    exchanged: int = 0  # bytes of all ranks' messages in the latest `all_to_all` that has ended; the same on all ranks

    def __init__(self, group: ProcessGroup, device: torch.device, text: str, refused: str | None = None) -> None:
        self.group, self.device = group, device
        self.rank, self.size = group.rank(), group.size()
        self._text = text if refused is None else refused
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        self._digest = _REFUSED if refused is not None else int.from_bytes(digest, "little")

    def agree(self) -> None:
        """Begins without data, for schemes in which not every rank hears from every other one; raises as `share`."""
        self.share(wire.new(0, self.device))

    def share(self, message: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' messages, by rank. For short ones: in ceil(log2(n)) rounds of one message each (Bruck's algorithm).

        Raises GradientError: a rank was given something else, or cannot take part.
        """
        wire.stamp(message, self._digest, len(message))
        messages = self._share(message)
        if any(wire.read_stamp(each)[0] != self._digest for each in messages) or self._digest == _REFUSED:
            raise GradientError(self._differences())
        return messages

    def all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Sends ``messages[rank]`` to each rank; returns the messages of all ranks, in rank order, the own one included.

        Messages are under way when this returns; the iterator must be taken to its end.

        Raises GradientError: a rank was given something else, or cannot take part. From the iterator, when all have come.
        """
        total = sum(map(len, messages))
        for message in messages:
            wire.stamp(message, self._digest, total)
        return self._checked(self._all_to_all(messages))

    def _checked(self, coming: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        same, everything = self._digest != _REFUSED, 0
        for message in coming:
            digest, total = wire.read_stamp(message)
            same, everything = same and digest == self._digest, everything + total
            if same:
                yield message
        if not same:
            raise GradientError(self._differences())
        self.exchanged = everything

    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' messages, by rank. Short ones go in few rounds, as with `share`."""
        if sum(self._lengths(message)) <= SHORT:
            return self._share(message)
        passed = {
            rank: data for rank, _, data in self._relay(message[: wire.HEADER], message, wire.HEADER, wire.length) if data is not None
        }
        return [passed[rank] for rank in range(self.size)]

    def relay(self, head: torch.Tensor, data: torch.Tensor, limit: int, length: Callable[[torch.Tensor], int]) -> Iterator[Passed]:
        """Sends data to all whose head goes ahead, without a look at all lengths first; after an `all_to_all`.

        Every rank has all heads before the last data, and time meanwhile to prepare a place for them. The iterator must be taken to its
        end, without long delays, because a rank may pass on meanwhile what others wait for.

        Args:
            head: a message of at most ``limit`` bytes, which is the same on all ranks.
            data: uint8, about as long on all ranks, and all together no longer than what the `all_to_all` exchanged.
            length: of the data, by their head.

        Returns:
            (rank, head, None) when a head has come, later (rank, head, data); the own ones included.
        """
        if self.exchanged > SHORT:
            return self._relay(head, data, limit, length)
        pairs = [_unbundle(each) for each in self._share(_bundle([head, wire.wrap(data)]))]
        heads = [(rank, head, None) for rank, (head, _) in enumerate(pairs)]
        return iter([*heads, *((rank, head, wire.payload(data)) for rank, (head, data) in enumerate(pairs))])

    def _lengths(self, message: torch.Tensor) -> list[int]:
        own = wire.wrap(wire.as_bytes(torch.tensor([len(message)], device=self.device)))
        return [int(wire.payload(each).view(torch.int64)) for each in self.share(own)]

    @abstractmethod
    def send(self, message: torch.Tensor, peer: int) -> None:
        """Sends a message with a header; returns when it may be written again."""

    @abstractmethod
    def receive(self, peer: int) -> torch.Tensor:
        """The next message of ``peer``."""

    @abstractmethod
    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        """Sends to one rank and receives from another at once."""

    @abstractmethod
    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]: ...

    @abstractmethod
    def _relay(self, head: torch.Tensor, data: torch.Tensor, limit: int, length: Callable[[torch.Tensor], int]) -> Iterator[Passed]: ...

    def _share(self, message: torch.Tensor) -> list[torch.Tensor]:
        held = [message]  # of this rank and those that follow
        while (distance := len(held)) < self.size:
            bundle = _bundle(held[: self.size - distance])
            held += _unbundle(self.shift(bundle, (self.rank - distance) % self.size, (self.rank + distance) % self.size))
        return [held[(rank - self.rank) % self.size] for rank in range(self.size)]

    def _differences(self) -> str:
        """A text with the gradients that each rank was given. Collective, once all know that they differ."""
        own = wire.wrap(torch.frombuffer(bytearray(self._text.encode()), dtype=torch.uint8).to(self.device))
        texts = [bytes(wire.payload(each).tolist()).decode() for each in self._share(own)]
        return "gradients that cannot be summed: " + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _bundle(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Several messages as one."""
    sizes = [-(-len(message) // wire.ALIGNMENT) * wire.ALIGNMENT for message in messages]
    bundle = wire.new(sum(sizes), messages[0].device)
    for message, place in zip(messages, torch.split(wire.payload(bundle), sizes), strict=True):
        place[: len(message)] = message
    return bundle


def _unbundle(bundle: torch.Tensor) -> list[torch.Tensor]:
    rest, messages = wire.payload(bundle), []
    while len(rest):
        length = wire.length(rest)
        messages.append(rest[:length])
        rest = rest[-(-length // wire.ALIGNMENT) * wire.ALIGNMENT :]
    return messages
