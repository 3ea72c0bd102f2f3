"""The exchange over gloo, and over backends that must know every size.

Gloo's receive takes any message that fits its buffer, in the order sent per tag. So a message is awaited with room for `ROOM`
bytes; of a longer one the header comes first and says for how much more there must be room. Other backends (NCCL) need to
know sizes first; `CollectiveExchange` sends them ahead.

Over gloo long messages for all ranks go around a `Ring`: one stream per link and direction gets nearly all of its rate, which many at once
do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from . import wire
from .exchange import Exchange, Passed

PIECE = 2**18  # bytes that are passed on together, while more is under way
ROOM = 2**20  # bytes; pages that a shorter message leaves untouched take no memory
_DIRECT, _AHEAD, _DATA = 0x5A454E00, 0x5A454E01, 0x5A454E02  # tags: our messages must not be mixed up with the user's


class Ring:
    """One message of each rank on its way to all others, its head ahead.

    A head is passed on before the data of the rank before it, so that a rank knows for how much there must be room before it
    comes, and asks for it in time.

    ``limit``: bytes that no head exceeds. ``length``: of the data, by their head.
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


def open_exchange(group: ProcessGroup, device: torch.device, text: str, refused: str | None = None) -> Exchange:
    """Opens an exchange over the backend that ``group`` has for ``device``, or over CPU memory where that is gloo or missing."""
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
    """An exchange over gloo."""

    def send(self, message: torch.Tensor, peer: int) -> None:
        _wait([self._send(part, peer) for part in _parts(message)])

    def receive(self, peer: int) -> torch.Tensor:
        coming = _Coming(self.group, peer)
        coming.ask()
        return coming.end()

    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        first, *rest = _parts(message)
        coming = _Coming(self.group, source)
        sends = [self._send(first, to)]
        coming.ask()
        sends += [self._send(part, to) for part in rest]
        received = coming.end()
        _wait(sends)
        return received

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]  # spreads the load: no rank is the first peer of all
        coming = {peer: _Coming(self.group, peer) for peer in peers}
        parts = {peer: _parts(messages[peer]) for peer in peers}
        sends = [self._send(parts[peer][0], peer) for peer in peers]

        def collect() -> Iterator[torch.Tensor]:
            for peer in peers:
                coming[peer].ask()
                sends.extend(self._send(part, peer) for part in parts[peer][1:])
            for source in range(self.size):
                yield messages[source] if source == self.rank else coming[source].end()
            _wait(sends)

        return collect()

    def _relay(self, head: torch.Tensor, data: torch.Tensor, limit: int, length: Callable[[torch.Tensor], int]) -> Iterator[Passed]:
        return Ring(self.group, limit, length).start(head, data)

    def _send(self, part: torch.Tensor, peer: int) -> Work:
        return self.group.send([part], peer, _DIRECT)


class _Coming:
    """A message of unknown length that is awaited, in the parts that `_parts` makes.

    Gloo asks the sender for a part over the connection on which this rank sends too: that question would wait behind a long
    message that has begun to flow the other way. So before a rank sends the rest of a long message, it asks that peer for the
    message that it awaits itself; else the two directions take turns.
    """

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._message = torch.empty(ROOM, dtype=torch.uint8)
        self._rest: Work | None = None
        self._work = self._receive(self._message)

    def ask(self) -> None:
        """Waits for the header, and asks for the rest of a long message."""
        self._work.wait()
        length = wire.length(self._message)
        if length <= ROOM:
            self._message = self._message[:length]
            return
        header, self._message = self._message[: wire.HEADER], torch.empty(length, dtype=torch.uint8)
        self._message[: wire.HEADER] = header
        self._rest = self._receive(self._message[wire.HEADER :])

    def end(self) -> torch.Tensor:
        """The message, when it has come."""
        if self._rest is not None:
            self._rest.wait()
        return self._message

    def _receive(self, buffer: torch.Tensor) -> Work:
        return self._group.recv([buffer], self._peer, _DIRECT)


def _parts(message: torch.Tensor) -> list[torch.Tensor]:
    """A message, or, of a long one, its header and the rest."""
    return [message] if len(message) <= ROOM else [message[: wire.HEADER], message[wire.HEADER :]]


class CollectiveExchange(Exchange):
    """An exchange over backends that must know every size beforehand, such as NCCL."""

    def send(self, message: torch.Tensor, peer: int) -> None:
        self._swap([(message, peer)], [])

    def receive(self, peer: int) -> torch.Tensor:
        return self._swap([], [peer])[0]

    def shift(self, message: torch.Tensor, to: int, source: int) -> torch.Tensor:
        return self._swap([(message, to)], [source])[0]

    def _swap(self, sends: Sequence[tuple[torch.Tensor, int]], sources: Sequence[int]) -> list[torch.Tensor]:
        """Sends messages, each to its peer, and receives one from each source; lengths go ahead."""
        lengths = [self._room(1, torch.int64) for _ in sources]
        counts = [(torch.tensor([len(message)], device=self.device), peer) for message, peer in sends]
        self._batch(counts, list(zip(lengths, sources, strict=True)))
        messages = [self._room(int(length)) for length in lengths]
        self._batch(sends, list(zip(messages, sources, strict=True)))
        return messages

    def _all_to_all(self, messages: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        counts = torch.tensor([len(message) for message in messages], device=self.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sizes = theirs.tolist()
        out = self._room(sum(sizes))
        dist.all_to_all_single(out, torch.cat(list(messages)), sizes, counts.tolist(), group=self.group)
        # Each on its own: values need an alignment that their place in the whole does not have.
        return (piece.clone() for piece in torch.split(out, sizes))

    def _relay(self, head: torch.Tensor, data: torch.Tensor, limit: int, length: Callable[[torch.Tensor], int]) -> Iterator[Passed]:
        heads = self._share(head)
        for rank, each in enumerate(heads):
            yield rank, each, None
        others = [rank for rank in range(self.size) if rank != self.rank]
        coming = {rank: self._room(length(heads[rank])) for rank in others}
        self._batch([(data, rank) for rank in others if len(data)], [(coming[rank], rank) for rank in others if len(coming[rank])])
        for rank, each in enumerate(heads):
            yield rank, each, data if rank == self.rank else coming[rank]

    def _room(self, size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def _batch(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor, peer in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
