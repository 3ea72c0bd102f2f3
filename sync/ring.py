"""A ring for gloo: one stream per link and direction gets nearly all of its rate, which many at once do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.distributed import ProcessGroup, Work

from . import wire
from .exchange import Passed

PIECE = 2**18  # bytes that are passed on together, while more is under way
_AHEAD, _DATA = 0x5A454E01, 0x5A454E02  # tags


class Ring:
    """One message of each rank on its way to all others, its head ahead.

    A head is passed on before the data of the rank before it, so that a rank knows for how much there must be room before it
    comes, and asks for it in time.

    Args:
        limit: bytes that no head exceeds.
        length: of the data, by their head.
    """

    def __init__(self, group: ProcessGroup, limit: int, length: Callable[[torch.Tensor], int]) -> None:
        rank, size = group.rank(), group.size()
        self._group, self._length = group, length
        self._left, self._right = (rank - 1) % size, (rank + 1) % size
        self._origins = [(rank - step) % size for step in range(1, size)]
        self._rooms = {origin: torch.empty(limit, dtype=torch.uint8) for origin in self._origins}
        self._heads = {origin: self._receive(room, _AHEAD) for origin, room in self._rooms.items()}
        self._sends: list[Work] = []

    def start(self, head: torch.Tensor, data: torch.Tensor) -> Iterator[Passed]:
        """Starts the ring and returns an iterator like `Exchange.relay`'s. All that this rank adds is under way at once."""
        rank = self._group.rank()
        self._send(rank, head, _AHEAD)
        # Where there are only two ranks, each asks over the connection on which its own data flow, so it asks before it sends.
        waits = self._left == self._right
        if not waits:
            self._send_data(rank, data)

        def collect() -> Iterator[Passed]:
            yield rank, head, None
            done: Iterator[Passed] = iter([(rank, head, data)])
            for origin in self._origins:
                coming = self._announced(origin)
                if waits:
                    self._send_data(rank, data)
                before = list(done)
                # Handling these here delays no other rank: all that others wait for is on its way.
                yield origin, self._rooms[origin], None
                yield from before
                done = coming
            yield from done
            for work in self._sends:
                work.wait()

        return collect()

    def _announced(self, origin: int) -> Iterator[Passed]:
        """Takes a head that has come: passes it on, and asks for the data, which the iterator awaits and passes on."""
        self._heads[origin].wait()
        head = self._rooms[origin] = self._rooms[origin][: wire.length(self._rooms[origin])]
        self._send(origin, head, _AHEAD)
        data = torch.empty(self._length(head), dtype=torch.uint8)
        parts = [(part, self._receive(part, _DATA)) for part in _pieces(data)]

        def arrive() -> Iterator[Passed]:
            for part, work in parts:
                work.wait()
                self._send(origin, part, _DATA)
            yield origin, head, data

        return arrive()

    def _send_data(self, origin: int, data: torch.Tensor) -> None:
        for part in _pieces(data):
            self._send(origin, part, _DATA)

    def _send(self, origin: int, part: torch.Tensor, tag: int) -> None:
        if origin != self._right:
            self._sends.append(self._group.send([part], self._right, tag))

    def _receive(self, room: torch.Tensor, tag: int) -> Work:
        return self._group.recv([room], self._left, tag)


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(data, PIECE)) if len(data) else []
