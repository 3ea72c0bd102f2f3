"""Shards that all ranks need, each read once for all of them: every rank reads its own, and takes the others' from collectives.

Without that, each of the ranks of a host would read every shard from another host, and a host would send the whole state as often as
others have ranks. `gemini_ft.worker.spreading` has the collectives; here is what goes into them and what becomes of what comes out:

    SharedShard    the part of one shard that is spread: whole chunks, so that every rank can check them against the committed root
    Outflow        reads this rank's shard, from wherever it is, and cuts it into blocks
    Landing        checks the bytes of another rank's shard as they come, and puts them where they belong
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from gemini_ft.core.layout import Layout, Read
from gemini_ft.core.roots import running_checksum
from gemini_ft.errors import CorruptDataError
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import LocalShard, PeerShard, ShardReaders, check_description
from gemini_ft.recovery.restore import Scatter
from gemini_ft.wire.peer_messages import Description

_DIALS = 8  # shards that each rank fetches from other hosts by itself before that is too many connections for the hosts that send
_SIGN = 1.0  # seconds between signs of life of a reader that waits
_PIECE = 2**20  # bytes that are hashed and copied in turn, so that the copy finds them in the cache


def owners_to_spread(plan: RecoveryPlan, hosts: Sequence[str]) -> frozenset[int]:
    """Owners whose shards are better spread than fetched by every rank, if all ranks need them; the same on all ranks. Pure.

    These are the shards that some host lacks, unless the busiest host would send and receive less without: in small jobs most
    copies are where they are needed.

    ``plan``: the version that is resumed, by as many ranks as made it. ``hosts``: rank -> its host.
    """
    world_size, held = len(hosts), Counter(host for sources in plan.sources.values() for host in sources)
    lacking = {host: world_size - held[host] for host in hosts}
    if not any(lacking.values()):
        return frozenset()
    if max(lacking.values()) <= _DIALS and _fetching(plan, hosts) <= _spreading(plan, hosts):
        return frozenset()
    everywhere = len(lacking)
    return frozenset(owner for owner, sources in plan.sources.items() if len(set(sources) & lacking.keys()) < everywhere)


def _fetching(plan: RecoveryPlan, hosts: Sequence[str]) -> int:
    """Shards that the busiest host sends or receives if every rank fetches what its host lacks."""
    sent, received = Counter[str](), Counter[str]()
    for reader, host in enumerate(hosts):
        for sources in plan.sources.values():
            if host not in sources:
                sent[sources[reader % len(sources)]] += 1
                received[host] += 1
    return max(*sent.values(), *received.values(), 0)


def _spreading(plan: RecoveryPlan, hosts: Sequence[str]) -> int:
    """The same, if every rank fetches its own shard, and they go round from rank to rank."""
    world_size, sent = len(hosts), Counter[str]()
    for rank, host in enumerate(hosts):
        if host not in plan.sources[rank]:
            sent[plan.sources[rank][rank % len(plan.sources[rank])]] += 1
        if hosts[(rank + 1) % world_size] != host:
            sent[host] += world_size - 1
    return max(sent.values(), default=0)


class SharedShard:
    """The chunks of one shard that hold something of all ranks' state; one after the other they are its *stream*.

    Args:
        about: the owner's account of the shard.
        root: the committed root; None: unknown.
        world_size: ranks of the job.

    Raises CorruptDataError: the account is not of what was committed.
    """

    def __init__(self, about: Description, root: str | None, world_size: int) -> None:
        check_description(about, root, f"rank {about.owner}'s shard of {about.version} as that rank describes it")
        self.owner, self.layout = about.owner, Layout.from_bytes(about.layout)
        self._everyone, self._step = tuple(range(world_size)), about.chunk_bytes
        common = [piece for piece in self.layout.pieces if piece.group == self._everyone and piece.nbytes]
        indices = {i for piece in common for i in self._indices(piece.offset, piece.nbytes)}
        # (offset, bytes, checksum) of each chunk of the stream
        self.cuts = [(i * self._step, min(self._step, about.data_bytes - i * self._step), about.digests[i]) for i in sorted(indices)]
        self.offsets = frozenset(offset for offset, _, _ in self.cuts)
        self.nbytes = sum(nbytes for _, nbytes, _ in self.cuts)

    def _indices(self, offset: int, nbytes: int) -> range:
        return range(offset // self._step, -(-(offset + nbytes) // self._step))

    def covers(self, reads: Sequence[Read]) -> bool:
        """Whether the stream has all the bytes of these reads."""
        return all(i * self._step in self.offsets for read in reads for i in self._indices(read.offset, read.nbytes))


class Landing:
    """Takes the stream of one shard piece by piece; a chunk is checked while it is still in the cache.

    A chunk that turns out to be damaged has been copied by then: the shard has to be read again before the state is used.
    """

    def __init__(self, shard: SharedShard, reads: Sequence[Read], tensors: Mapping[str, torch.Tensor]) -> None:
        self._owner, self._left, self._cuts = shard.owner, shard.nbytes, iter(shard.cuts)
        self._scatter = Scatter(reads, tensors)
        self._at = self._end = self._digest = 0
        self._found = running_checksum()

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state that have come."""
        return self._scatter.nbytes

    def take(self, block: memoryview) -> None:
        """Takes the next block; bytes behind the end of the stream are ignored.

        Raises CorruptDataError: a chunk is not what was committed.
        """
        block = block[: self._left]
        self._left -= len(block)
        while block:
            if self._at == self._end:
                self._at, nbytes, self._digest = next(self._cuts)
                self._end, self._found = self._at + nbytes, running_checksum()
            piece = block[: min(_PIECE, self._end - self._at)]
            self._found.update(piece)
            self._scatter.put(self._at, piece)
            self._at += len(piece)
            block = block[len(piece) :]
            if self._at == self._end and self._found.intdigest() != self._digest:
                raise CorruptDataError(f"rank {self._owner}'s shard was damaged on its way through the ranks' collectives")


class _Stopped(Exception):
    """The blocks are not wanted any more."""


class Outflow:
    """Reads this rank's shard on a thread: fills the rank's own state with it, and blocks of memory with its stream.

    A copy that fails in the middle is left for the next one, which goes on where the first has ended: equal roots are equal bytes.
    """

    def __init__(
        self,
        sources: ShardReaders,
        shard: SharedShard,
        reads: Sequence[Read],  # what this rank needs of it
        tensors: Mapping[str, torch.Tensor],  # ``Read.name`` -> what to fill
        blocks: Sequence[memoryview],  # memory of equal size, to be filled again and again
    ) -> None:
        self._sources, self._shard, self._reads, self._tensors = sources, shard, reads, tensors
        self.read: tuple[str, int] | None = None  # place and bytes, once all has been read
        self.failure: Exception | None = None
        self._free, self._full = queue.SimpleQueue[memoryview | None](), queue.SimpleQueue[memoryview | None]()
        for block in blocks:
            self._free.put(block)
        self._block: memoryview | None = None
        self._filled = self._poured = 0  # bytes of the present block, and of the stream
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="gemini-outflow", daemon=True)
        self._thread.start()

    def next_block(self) -> memoryview | None:
        """The next block of the stream, to be given back; None: it is over, or ``failure`` says why there is no more."""
        if self._is_over:
            return None
        block = self._full.get()
        self._is_over = block is None
        return block

    def give_back(self, block: memoryview) -> None:
        """Lets a block be filled again."""
        self._free.put(block)

    def close(self) -> None:
        self._free.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self.read = self._sources.read(self._shard.owner, self._shard.owner, self._pour)
        except _Stopped:
            pass
        except Exception as error:
            self.failure = error
        self._full.put(None)

    def _pour(self, copy: LocalShard | PeerShard) -> tuple[str, int]:
        scatter, passed = Scatter(self._reads, self._tensors), 0
        for offset, view in copy.chunks():
            scatter.put(offset, view)
            if offset in self._shard.offsets:
                self._add(view[max(0, self._poured - passed) :], copy)
                passed += len(view)
        return copy.where, scatter.nbytes

    def _free_block(self, copy: LocalShard | PeerShard) -> memoryview | None:
        while True:
            try:
                return self._free.get(timeout=_SIGN)
            except queue.Empty:
                copy.stay()  # another rank holds all of them up, perhaps for longer than the lease of this copy

    def _add(self, view: memoryview, copy: LocalShard | PeerShard) -> None:
        while view:
            if self._block is None:
                self._block, self._filled = self._free_block(copy), 0
                if self._block is None:
                    raise _Stopped
            part = view[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._poured += len(part)
            view = view[len(part) :]
            if self._filled == len(self._block) or self._poured == self._shard.nbytes:
                self._full.put(self._block)
                self._block = None
        if self._poured == self._shard.nbytes:
            self._full.put(None)  # the others must not wait for what only this rank needs
