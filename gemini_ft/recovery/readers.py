"""Reads the shards that a `RecoveryPlan` names, from this host's memory or a peer's."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication.serve import describe
from gemini_ft.core.layout import Layout
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, CorruptDataError, GeminiError, PeerError, RecoveryError
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.messages import Failed, check_answer, kind_of
from gemini_ft.wire.peer_messages import READER_LANES, Claims, Data, Describe, Description, Fetch, GetRoots, Heartbeat, PeerMessage, Roots
from gemini_ft.wire.worker_messages import Map, Mapped

T = TypeVar("T")
_KEPT = 16  # shards that a reader keeps open: each is a connection, and in a large job all ranks read


def threads_of_a_reader() -> int:
    """Threads of one reader: every rank of a host may read at the same time."""
    return max(1, min(READER_LANES, len(os.sched_getaffinity(0)) // 4))


def _in_order(deeds: Iterator[Callable[[], T]], threads: int) -> Iterator[T]:
    """Runs ``deeds`` and yields their results in order; ``threads`` of them run at a time, one fewer while the caller uses a result."""
    if threads == 1:
        yield from (deed() for deed in deeds)
        return
    with ThreadPoolExecutor(threads, "gemini-read") as pool:
        under_way = deque(pool.submit(deed) for deed in itertools.islice(deeds, threads))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(deed) for deed in itertools.islice(deeds, 1))


Live = Callable[[int, int], Sequence[memoryview]]  # offset and bytes of a chunk -> memory that takes them, in parts; none: a copy is due


def nowhere(offset: int, nbytes: int) -> Sequence[memoryview]:
    """Has no memory for any chunk, so that each is received in a buffer."""
    return ()


class ShardReader(Protocol):
    """A reader of one owner's shard of the resumed version, wherever it is."""

    @property
    def where(self) -> str:
        """``own memory``, ``peer HOST`` or ``storage``."""

    @property
    def layout(self) -> Layout: ...

    def extras(self) -> bytes: ...

    def chunks(self, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        """(offset, verified bytes) of the tensors' data, in order; a view is valid until the next one is asked for.

        Args:
            start: the first byte that is wanted, and ``stop`` the one after the last; whole chunks come.
            live: asked for the memory in which a chunk is to end up. If there is some, the chunk is received there and comes without bytes.
                It is verified there: when this fails, the memory counts for nothing until another copy has filled all of it. No thread
                writes to it any more when the iterator has ended, in any way.
        """
        ...


class LocalShard:
    """A shard in this host's agent. ``root``: the root that it must have; None: unknown.

    Bytes that have a place are read into it by system calls: through the mapping, each process would pay for the faults of all pages.

    Raises CorruptDataError: it is another one. GeminiError: the agent has none, or does not answer.
    """

    def __init__(self, client: AgentClient, owner: int, version: Version, where: str = "own memory", root: str | None = None) -> None:
        self.where = where
        _, (fd,) = client.call(Map(owner=owner, version=version), Mapped)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, fd)
            memory = self._memory = SlotMemory.adopt(fd)
            on_error.pop_all()
            on_error.callback(memory.close)
            if (memory.shape.owner, memory.version) != (owner, version):
                text = f"the memory that came has rank {memory.shape.owner}'s of {memory.version}"
                raise CorruptDataError(f"rank {owner}'s shard of {version} was asked for, {text}")
            if root not in (None, memory.root):
                raise _wrong_root(f"rank {owner}'s shard of {version} in this host's memory", memory.root, root)
            self.layout = Layout.from_bytes(memory.shape.layout)
            on_error.pop_all()
        self._cuts = list(enumerate(memory.cuts(memory.extras_bytes)))

    @property
    def about(self) -> Description:
        """The account by which others can check every byte."""
        assert self._memory.version is not None
        return describe(self._memory, Describe(owner=self._memory.shape.owner, version=self._memory.version))

    def extras(self) -> bytes:
        first = self._memory.shape.data_bytes
        return b"".join(bytes(view) for _, view in self._verified(first, first + self._memory.extras_bytes))

    def chunks(self, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        return self._verified(start, min(self.layout.nbytes, stop if stop is not None else self.layout.nbytes), live)

    def _verified(self, start: int, stop: int, live: Live = nowhere) -> Iterator[tuple[int, memoryview]]:
        cuts = [(index, (at, nbytes)) for index, (at, nbytes) in self._cuts if at < stop and start < at + nbytes]
        return _in_order((partial(self._sound, index, *cut, live(*cut)) for index, cut in cuts), threads_of_a_reader())

    def _sound(self, index: int, offset: int, nbytes: int, places: Sequence[memoryview]) -> tuple[int, memoryview]:
        view = memoryview(b"") if places else self._memory.data(offset, nbytes)
        what = f"chunk {index} of rank {self._memory.shape.owner}'s shard in this host's memory"
        _compare(self._memory.read(offset, places) if places else checksum(view), self._memory.chunks[index][2], what)
        return offset, view

    def stay(self) -> None:
        """Does nothing: the mapping stays."""

    def close(self) -> None:
        self._memory.close()


class PeerShard:
    """A shard in another host's agent, read over the network. ``root``: the root that it must have; None: unknown.

    Raises CorruptDataError: it is another one. GeminiError: the agent has none, or does not answer.
    """

    def __init__(
        self,
        host: str,
        address: tuple[str, int],
        claims: Claims,
        secret: bytes,
        owner: int,
        version: Version,
        *,
        timeout: float,
        root: str | None = None,
        further: Sequence[str] = (),
    ) -> None:
        self.where = f"peer {host}"
        self._owner, self._version = owner, version
        self._calls = itertools.count(1)
        self._sending, self._reading = threading.Lock(), 0  # how many answers are under way
        self._lanes = threads_of_a_reader()
        self._wire = BlockingWire(address, claims.model_copy(update={"to": host, "lanes": self._lanes}), secret, timeout, further=further)
        try:
            self.about = self._describe(host)
            check_description(self.about, root, f"rank {owner}'s shard of {version} from {self.where}")
            self.layout = Layout.from_bytes(self.about.layout)
        except GeminiError:
            self.close()
            raise

    def _describe(self, host: str) -> Description:
        asked = Describe(call=next(self._calls), owner=self._owner, version=self._version)
        self._wire.send(asked)
        about = self._answer(asked)
        if not isinstance(about, Description):
            raise PeerError(f"host {host}: {about.text if isinstance(about, Failed) else kind_of(about)}")
        return about

    def _answer(self, asked: Describe | Fetch) -> PeerMessage:
        """The next message that answers this call; leftovers of the answer to an earlier one are dropped."""
        while True:
            message = self._wire.receive()
            if not isinstance(message, Description | Data | Failed) or message.call >= asked.call:
                check_answer(asked, message)
                return message
            if isinstance(message, Data):
                self._wire.payload()([memoryview(bytearray(message.nbytes))])

    @property
    def root(self) -> str:
        """The root of the copy, as described and checked."""
        return self.about.root

    def renew(self) -> None:
        """Keeps the slot although nothing is read just now; from any thread."""
        with self._sending:
            if not self._reading:
                self._wire.send(Heartbeat())

    def stay(self) -> None:
        """Keeps the slot while the reader of `chunks` has to wait before it can take the next one; from the reader's thread."""
        with self._sending:
            self._wire.send(Heartbeat())

    def extras(self) -> bytes:
        about = self.about
        return b"".join(bytes(v) for _, v in self._fetch(about.data_bytes, about.data_bytes + about.extras_bytes))

    def chunks(self, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        step, nbytes = self.about.chunk_bytes, self.about.data_bytes
        return self._fetch(start // step * step, nbytes if stop is None else min(nbytes, -(-stop // step) * step), live)

    def _fetch(self, start: int, stop: int, live: Live = nowhere) -> Iterator[tuple[int, memoryview]]:
        if start >= stop:
            return
        with self._sending:
            self._reading += 1
        try:
            asked = Fetch(call=next(self._calls), owner=self._owner, version=self._version, offset=start, nbytes=stop - start)
            self._wire.send(asked)
            yield from _in_order(self._announced(asked, stop, -(-start // self.about.chunk_bytes), live), self._lanes)
        finally:
            with self._sending:
                self._reading -= 1

    def _announced(self, asked: Fetch, stop: int, first: int, live: Live) -> Iterator[Callable[[], tuple[int, memoryview]]]:
        """Each chunk as its peer announces it, still to be received: at its place, or in memory that one before it on its lane has had."""
        at, buffers = asked.offset, [bytearray(0) for _ in range(self._lanes)]
        for index in itertools.count(first):
            if at == stop:
                return
            head = self._answer(asked)
            if not isinstance(head, Data) or head.offset != at or not 0 < head.nbytes <= stop - at:
                raise PeerError(f"{self.where} sent {kind_of(head)!r} where bytes from {at} were due")
            turn, receive = index % self._lanes, partial(self._receive, self._wire.payload(), index)
            if places := live(at, head.nbytes):
                yield partial(receive, places, (at, memoryview(b"")))
            else:
                if len(buffers[turn]) != head.nbytes:
                    buffers[turn] = bytearray(head.nbytes)
                view = memoryview(buffers[turn])
                yield partial(receive, [view], (at, view))
            at += head.nbytes

    def _receive(
        self, payload: Callable[[Sequence[memoryview]], int], index: int, places: Sequence[memoryview], chunk: tuple[int, memoryview]
    ) -> tuple[int, memoryview]:
        what = f"chunk {index} of rank {self._owner}'s shard from {self.where}"
        _compare(payload(places), self.about.digests[index], what)
        return chunk

    def close(self) -> None:
        self._wire.close()


def committed_roots(
    host: str, address: tuple[str, int], claims: Claims, secret: bytes, version: Version, timeout: float
) -> Mapping[int, str]:
    """Owner -> root of its committed shard, as another host's agent knows it; the leader's knows all of them.

    Raises GeminiError: it does not answer, or is another one.
    """
    with contextlib.closing(BlockingWire(address, claims.model_copy(update={"to": host}), secret, timeout)) as wire:
        asked = GetRoots(version=version)
        wire.send(asked)
        answer = wire.receive()
        check_answer(asked, answer)
        if not isinstance(answer, Roots):
            raise PeerError(f"host {host} sent {kind_of(answer)!r} where roots were due")
        return answer.roots


def check_description(about: Description, root: str | None, what: str) -> None:
    """Forms the root of a description, because layout and checksums can be wrong as well as the bytes; None: the committed one is unknown.

    Raises CorruptDataError: it is not that of the commit.
    """
    sizes = about.data_bytes, about.extras_bytes, about.chunk_bytes
    found = shard_root(about.owner, about.version, layout_digest(about.layout), sizes, about.digests)
    if found != (root or about.root):
        raise _wrong_root(what, found, root or about.root)


def _wrong_root(what: str, found: str, committed: str | None) -> CorruptDataError:
    return CorruptDataError(f"{what} is not what was committed: its root is {found}, should be {committed}")


def _compare(found: int, digest: int, what: str) -> None:
    if found != digest:
        raise CorruptDataError(f"{what} does not match its checksum")


@dataclass
class ShardReaders:
    """Opens shards of the planned version, own host first, then peers in turn."""

    client: AgentClient
    host: str
    plan: RecoveryPlan
    addresses: Mapping[str, tuple[str, int]]
    claims: Claims
    secret: bytes
    timeout: float
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)  # host -> its addresses in other networks
    _kept: dict[int, tuple[str, LocalShard | PeerShard]] = field(default_factory=dict, init=False)
    _silent: set[str] = field(default_factory=set, init=False)  # hosts that did not answer; they are asked after all others

    def copies(self, owner: int) -> int:
        """How many hosts ``owner``'s shard may be read from at once: one, where this host has it."""
        hosts = self.plan.sources.get(owner, ())
        return 1 if self.host in hosts else len(hosts)

    def candidates(self, owner: int, reader: int) -> list[str]:
        """Hosts to ask for ``owner``'s shard; readers are spread over them."""
        hosts = list(self.plan.sources.get(owner, ()))
        turn = reader % len(hosts) if hosts else 0
        return sorted(hosts[turn:] + hosts[:turn], key=lambda host: (host in self._silent, host != self.host))

    def open(self, owner: int, host: str) -> LocalShard | PeerShard:
        """Opens one copy. Raises GeminiError when it cannot be had."""
        assert self.plan.version is not None
        version, root = self.plan.version, self.plan.roots.get(owner)
        if host == self.host:
            return LocalShard(self.client, owner, version, "storage" if self.plan.kind == "storage" else "own memory", root)
        claims, secret, further = self.claims, self.secret, self.further.get(host, ())
        return PeerShard(host, self.addresses[host], claims, secret, owner, version, timeout=self.timeout, root=root, further=further)

    def read(self, owner: int, reader: int, use: Callable[[LocalShard | PeerShard], T], keep: bool = False, part: int = 0) -> T:
        """Lets ``use`` read one shard; when that fails, lets it start over with the next copy.

        ``keep``: another reading of it follows. It finds the shard open, if not too many are, so that a peer is dialled and says the
        layout only once; unless it follows so late that the peer has taken its slot back.
        ``part``: number of the part that is read, where others are read at the same time; each begins with another copy.

        Raises RecoveryError: no copy could be read; the text says why each failed.
        """
        failures: list[str] = []
        hosts = self.candidates(owner, reader + part)
        host, shard = self._kept.pop(owner, ("", None)) if not part else ("", None)
        if shard is not None:  # its host is dialled anew only after all others: it may be that host which is gone
            hosts = [host, *sorted(hosts, key=lambda each: each == host)]
        for host in hosts:
            was_kept = shard is not None
            try:
                with contextlib.ExitStack() as opened:
                    shard = opened.enter_context(contextlib.closing(shard or self.open(owner, host)))
                    result = use(shard)
                    if keep and len(self._kept) < _KEPT:
                        opened.pop_all()
                        self._kept[owner] = host, shard
                    return result
            except (PeerError, CorruptDataError, AgentError, OSError) as error:
                failures.append(str(error))
                if not isinstance(error, CorruptDataError) and not was_kept:
                    self._silent.add(host)
            shard = None
        raise RecoveryError(f"no copy of rank {owner}'s shard of {self.plan.version} could be read: {'; '.join(failures)}")

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1][1].close()
