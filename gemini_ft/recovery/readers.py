"""Which state to resume, and from where: inventories -> plan, pure; then reading what the plan says.

The newest version of which every shard has a complete copy wins; versions are never mixed. Where none is left
in memory, the newest whole checkpoint in storage.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeVar

from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.core.layout import Layout
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, CorruptDataError, GeminiError, PeerError, RecoveryError, WorldSizeError
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.messages import (
    Claims,
    Data,
    Describe,
    Description,
    Failed,
    Fetch,
    GetRoots,
    Heartbeat,
    Map,
    Mapped,
    Message,
    Roots,
    SlotInfo,
    check_answer,
)

T = TypeVar("T")
_KEPT = 16  # shards that a reader keeps open: each is a connection, and in a large job all ranks read

# -- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """What one host's agent says it has."""

    host: str
    slots: Sequence[SlotInfo]


@dataclass(frozen=True)
class Plan:
    """What to resume.

    Attributes:
        kind: where from.
        version: which state; None: nothing.
        sources: owner -> hosts with a complete copy (from storage: once it has been laid down there).
        age: seconds since the copy was made (from storage: once it has been laid down).
        lost: steps that copies existed of, but not of all shards (kind: storage).
        incomplete: iteration -> owners without any copy.
        world_size: ranks of the job that made it, which is the number of its owners.
        roots: owner -> root of its shard (`gemini_ft.core.roots`); none where a checkpoint in storage does not say it.
    """

    kind: Literal["nothing", "memory", "storage"]
    version: Version | None = None
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    age: float = 0.0
    lost: int | None = None
    incomplete: Mapping[int, Sequence[int]] = field(default_factory=dict)
    world_size: int = 0
    roots: Mapping[int, str] = field(default_factory=dict)


def plan_recovery(
    holdings: Sequence[Holding],
    world_size: int,
    stored: Version | None = None,
    stored_world_size: int | None = None,
    refused: Sequence[Version] = (),
    resizable: bool = False,
) -> Plan:
    """Choose the newest version that is whole: in memory, else in storage.

    Args:
        holdings: what every host's agent has, each host once.
        world_size: ranks of the job now.
        stored: the newest whole checkpoint in storage.
        stored_world_size: ranks of the job that wrote it.
        refused: versions that led to failure after failure, or whose copies are damaged.
        resizable: whether this job can load what another number of ranks has made.

    Raises:
        WorldSizeError: all there is was made by another number of ranks, and that cannot be loaded.
    """
    copies = _copies(holdings, refused)
    sizes = {info.world_size for held in copies.values() for _, info in held}
    whole = [v for v, held in copies.items() if _is_whole(held) and (resizable or held[0][1].world_size == world_size)]
    best = max(whole, default=None)
    if best is not None and (stored is None or best >= stored):
        sources: dict[int, list[str]] = {}
        for host, info in copies[best]:
            sources.setdefault(info.owner, []).append(host)
        age = min(info.age for _, info in copies[best])
        by_owner = {owner: tuple(sorted(hosts)) for owner, hosts in sorted(sources.items())}
        roots = {info.owner: info.root for _, info in copies[best]}
        return Plan("memory", best, by_owner, age, world_size=len(by_owner), roots=roots)
    if stored is not None:
        assert stored_world_size is not None
        if stored_world_size != world_size and not resizable:
            raise _wrong_size(stored_world_size, world_size, "the checkpoint in storage")
        newest = max((v.iteration for v in copies), default=None)
        lost = max(0, newest - stored.iteration) if newest is not None else None
        return Plan("storage", stored, lost=lost, incomplete=_incomplete(copies), world_size=stored_world_size)
    if sizes and world_size not in sizes and not resizable:
        raise _wrong_size(max(sizes), world_size, "the snapshot in memory")
    return Plan("nothing", incomplete=_incomplete(copies))


def _wrong_size(then: int, now: int, what: str) -> WorldSizeError:
    return WorldSizeError(
        f"{what} was made by {then} ranks, this job has {now}. Start {then} ranks to resume it, or set resume='never' "
        "(GEMINI_RESUME=never) or another run id (GEMINI_RUN_ID) to start from the beginning."
    )


def _copies(holdings: Sequence[Holding], refused: Sequence[Version]) -> dict[Version, list[tuple[str, SlotInfo]]]:
    copies: dict[Version, list[tuple[str, SlotInfo]]] = {}
    for holding in holdings:
        for info in holding.slots:
            if info.version not in refused:
                copies.setdefault(info.version, []).append((holding.host, info))
    return {version: kept for version, held in copies.items() if (kept := genuine(held))}


def genuine(held: Sequence[tuple[str, SlotInfo]]) -> list[tuple[str, SlotInfo]]:
    """The copies of one version, by host, that are what was committed.

    Where no host has heard of the commit, all copies of a shard must have one root: which of two is damaged cannot be told then.
    """
    copies: dict[int, list[SlotInfo]] = {}
    for _, info in held:
        copies.setdefault(info.owner, []).append(info)
    roots = {owner: {each.root for each in of if each.committed} or {each.root for each in of} for owner, of in copies.items()}
    return [(host, info) for host, info in held if roots[info.owner] == {info.root}]


def _is_whole(held: Sequence[tuple[str, SlotInfo]]) -> bool:
    agreed = len({(info.layout_hash, info.world_size) for _, info in held}) == 1
    return agreed and {info.owner for _, info in held} == set(range(held[0][1].world_size))


def _incomplete(copies: Mapping[Version, Sequence[tuple[str, SlotInfo]]]) -> dict[int, list[int]]:
    def missing(held: Sequence[tuple[str, SlotInfo]]) -> list[int]:
        everyone = set(range(max(info.world_size for _, info in held)))
        return sorted(everyone - {info.owner for _, info in held})

    return {version.iteration: missing(held) for version, held in sorted(copies.items())}


def describe(plan: Plan) -> str:
    """The outcome in one line, unmistakably different for each kind."""
    if plan.version is None:
        if not plan.incomplete:
            return "nothing to resume yet: starting from the beginning"
        newest = max(plan.incomplete)
        return (
            f"copies of iteration {newest} exist, but none of the shards of ranks {list(plan.incomplete[newest])}, "
            "and no checkpoint in storage: starting from the beginning"
        )
    if plan.kind == "memory":
        return f"resuming at iteration {plan.version.iteration} from memory ({plan.age:.1f} s old)"
    lost = f", {plan.lost} steps lost" if plan.lost else ""
    why = "copies in memory exist but no common iteration" if plan.incomplete else "no copies in memory"
    return f"{why}: falling back to storage, iteration {plan.version.iteration}{lost}"


def require(plan: Plan) -> None:
    """For ``resume="require"``.

    Raises:
        RecoveryError: there is nothing to resume.
    """
    if plan.version is None:
        raise RecoveryError(f"resume='require', but {describe(plan)}. Set resume='auto' to allow that, or check run_id and storage.url.")


# -- reading -------------------------------------------------------------------------------------


class ShardReader(Protocol):
    """One owner's shard of the resumed version, wherever it is."""

    @property
    def where(self) -> str:
        """``own memory``, ``peer HOST`` or ``storage``."""

    @property
    def layout(self) -> Layout: ...

    def extras(self) -> bytes: ...

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, verified bytes) of the tensors' data, in order; a view is valid until the next one is asked for."""


class LocalShard:
    """From this host's agent, by mapping its memory.

    Args:
        client: connection to the agent.
        owner: whose shard.
        version: which state.
        where: where its bytes came from.
        root: which copy it must be; None: nobody knows.

    Raises:
        CorruptDataError: it is another one.
        GeminiError: the agent has none, or does not answer.
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

    def extras(self) -> bytes:
        return b"".join(bytes(view) for _, view in self._verified(extras=True))

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        return self._verified(extras=False)

    def _verified(self, extras: bool) -> Iterator[tuple[int, memoryview]]:
        first = self._memory.shape.data_bytes
        for index, (offset, nbytes) in [each for each in self._cuts if (each[1][0] >= first) == extras]:
            view = self._memory.data(offset, nbytes)
            _compare(view, self._memory.chunks[index][2], f"chunk {index} of rank {self._memory.shape.owner}'s shard in this host's memory")
            yield offset, view

    def close(self) -> None:
        self._memory.close()


class PeerShard:
    """From another host's agent, over the network. ``root``: which copy it must be; None: nobody knows.

    Raises:
        CorruptDataError: it is another one.
        GeminiError: the agent has none, or does not answer.
    """

    def __init__(
        self,
        host: str,
        address: tuple[str, int],
        claims: Claims,
        secret: bytes,
        owner: int,
        version: Version,
        timeout: float,
        root: str | None = None,
    ) -> None:
        self.where = f"peer {host}"
        self._owner, self._version = owner, version
        self._calls = itertools.count(1)
        self._sending, self._reading = threading.Lock(), 0  # how many answers are under way
        self._wire = BlockingWire(address, claims.model_copy(update={"to": host}), secret, timeout)
        try:
            self._about = self._describe(host)
            self._check_root(root)
            self.layout = Layout.from_bytes(self._about.layout)
        except GeminiError:
            self.close()
            raise

    def _describe(self, host: str) -> Description:
        asked = Describe(call=next(self._calls), owner=self._owner, version=self._version)
        self._wire.send(asked)
        about = self._answer(asked)
        if not isinstance(about, Description):
            raise PeerError(f"host {host}: {about.text if isinstance(about, Failed) else about.kind}")
        return about

    def _check_root(self, root: str | None) -> None:
        """Form the root of what was described: layout and checksums can be wrong as well as the bytes."""
        about = self._about
        sizes = about.data_bytes, about.extras_bytes, about.chunk_bytes
        found = shard_root(self._owner, self._version, layout_digest(about.layout), sizes, about.digests)
        if found != (root or about.root):
            raise _wrong_root(f"rank {self._owner}'s shard of {self._version} from {self.where}", found, root or about.root)

    def _answer(self, asked: Describe | Fetch) -> Message:
        """The next message that answers this call; whatever is left of the answer to an earlier one is dropped."""
        while True:
            message = self._wire.receive()
            if not isinstance(message, Description | Data | Failed) or message.call >= asked.call:
                check_answer(asked, message)
                return message
            if isinstance(message, Data):
                self._wire.receive_payload(memoryview(bytearray(message.nbytes)))

    @property
    def root(self) -> str:
        """Of the copy, as described and checked."""
        return self._about.root

    def renew(self) -> None:
        """Keep the slot although nothing is read just now; from any thread."""
        with self._sending:
            if not self._reading:
                self._wire.send(Heartbeat())

    def extras(self) -> bytes:
        about = self._about
        return b"".join(bytes(v) for _, v in self._fetch(about.data_bytes, about.data_bytes + about.extras_bytes))

    def chunks(self) -> Iterator[tuple[int, memoryview]]:
        return self._fetch(0, self._about.data_bytes)

    def _fetch(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        if start == stop:
            return
        with self._sending:
            self._reading += 1
        try:
            yield from self._fetched(start, stop)
        finally:
            with self._sending:
                self._reading -= 1

    def _fetched(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        asked = Fetch(call=next(self._calls), owner=self._owner, version=self._version, offset=start, nbytes=stop - start)
        self._wire.send(asked)
        first = 0 if start == 0 else len(self._about.digests) - self._extras_chunks(stop - start)
        at, index, buffer = start, first, bytearray(0)
        while at < stop:
            head = self._answer(asked)
            if not isinstance(head, Data) or head.offset != at or not 0 < head.nbytes <= stop - at:
                raise PeerError(f"{self.where} sent {head.kind!r} where bytes from {at} were due")
            if len(buffer) != head.nbytes:
                buffer = bytearray(head.nbytes)
            self._wire.receive_payload(memoryview(buffer))
            _compare(buffer, self._about.digests[index], f"chunk {index} of rank {self._owner}'s shard from {self.where}")
            yield at, memoryview(buffer)
            at, index = at + head.nbytes, index + 1

    def _extras_chunks(self, nbytes: int) -> int:
        return -(-nbytes // self._about.chunk_bytes)

    def close(self) -> None:
        self._wire.close()


def committed_roots(
    host: str, address: tuple[str, int], claims: Claims, secret: bytes, version: Version, timeout: float
) -> Mapping[int, str]:
    """Owner -> root of its shard, as another host's agent knows what was committed; the leader's knows all of them.

    Raises:
        GeminiError: it does not answer, or is another one.
    """
    with contextlib.closing(BlockingWire(address, claims.model_copy(update={"to": host}), secret, timeout)) as wire:
        asked = GetRoots(version=version)
        wire.send(asked)
        answer = wire.receive()
        check_answer(asked, answer)
        if not isinstance(answer, Roots):
            raise PeerError(f"host {host} sent {answer.kind!r} where roots were due")
        return answer.roots


def _wrong_root(what: str, found: str, committed: str | None) -> CorruptDataError:
    return CorruptDataError(f"{what} is not what was committed: its root is {found}, should be {committed}")


def _compare(view: memoryview | bytearray, digest: int, what: str) -> None:
    if checksum(view) != digest:
        raise CorruptDataError(f"{what} does not match its checksum")


@dataclass
class Sources:
    """Opens shards of the planned version, own host first, then peers in turn."""

    client: AgentClient
    host: str
    plan: Plan
    addresses: Mapping[str, tuple[str, int]]
    claims: Claims
    secret: bytes
    timeout: float
    _kept: dict[int, LocalShard | PeerShard] = field(default_factory=dict, init=False)

    def candidates(self, owner: int, reader: int) -> list[str]:
        """Hosts to ask for ``owner``'s shard; readers are spread over them."""
        hosts = list(self.plan.sources.get(owner, ()))
        turn = reader % len(hosts) if hosts else 0
        return sorted(hosts[turn:] + hosts[:turn], key=lambda host: host != self.host)

    def open(self, owner: int, host: str) -> LocalShard | PeerShard:
        """Open one copy. Raises GeminiError when it cannot be had."""
        assert self.plan.version is not None
        version, root = self.plan.version, self.plan.roots.get(owner)
        if host == self.host:
            return LocalShard(self.client, owner, version, "storage" if self.plan.kind == "storage" else "own memory", root)
        return PeerShard(host, self.addresses[host], self.claims, self.secret, owner, version, self.timeout, root)

    def read(self, owner: int, reader: int, use: Callable[[LocalShard | PeerShard], T], keep: bool = False) -> T:
        """Let ``use`` read one shard; when that fails, let it start over with the next copy.

        ``keep``: the next reading follows at once. It finds the shard open, if not too many are, so that a peer is dialled and says the
        layout only once.

        Raises:
            RecoveryError: no copy could be read; the text says why each failed.
        """
        failures: list[str] = []
        ways: list[Callable[[], LocalShard | PeerShard]] = [partial(self.open, owner, host) for host in self.candidates(owner, reader)]
        if owner in self._kept:
            ways.insert(0, partial(self._kept.pop, owner))
        for way in ways:
            try:
                with contextlib.ExitStack() as opened:
                    shard = opened.enter_context(contextlib.closing(way()))
                    result = use(shard)
                    if keep and len(self._kept) < _KEPT:
                        opened.pop_all()
                        self._kept[owner] = shard
                    return result
            except (PeerError, CorruptDataError, AgentError, OSError) as error:
                failures.append(str(error))
        raise RecoveryError(f"no copy of rank {owner}'s shard of {self.plan.version} could be read: {'; '.join(failures)}")

    def close(self) -> None:
        """Let go of what is kept open."""
        while self._kept:
            self._kept.popitem()[1].close()
