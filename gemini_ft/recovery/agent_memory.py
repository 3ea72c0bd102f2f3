"""Reads the memory of this machine's agents from outside of a job.

A visitor is no worker: nothing changes at the agent, except that a shard which is being read stays until it has been
read. A job that runs meanwhile may leave out the snapshots for which it then lacks a free slot.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gemini_ft.agent import lifecycle
from gemini_ft.core.layout import Layout
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, GeminiError, PeerError, RecoveryError
from gemini_ft.recovery.plan import by_version, genuine
from gemini_ft.recovery.readers import Live, PeerShard, committed_roots, nowhere
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.worker_messages import SlotInfo, StreamInfo, Visit, Visited

_TIMEOUT = 60.0  # seconds an agent may take for an answer while it is read
_RENEWAL = 1.0  # seconds
_STILL = 1.0  # seconds without a new version after which none is expected
_LOOK = 0.05  # seconds between two looks
_PATIENCE = 30.0  # seconds for which a job is followed that replaces its slots faster than they can be pinned


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A stream of one run, as the agents of this machine have it. ``hosts``: host id -> what its agent said; at least one."""

    run: str
    stream: str
    hosts: Mapping[str, Visited]

    @property
    def parts(self) -> dict[str, StreamInfo]:
        """Host id -> what its agent has of this stream."""
        return {host: visited.streams[self.stream] for host, visited in self.hosts.items()}

    @property
    def committed(self) -> Version | None:
        """The newest version that some agent knows to be complete everywhere."""
        return max((part.committed for part in self.parts.values() if part.committed is not None), default=None)

    @property
    def copies(self) -> dict[Version, dict[str, list[SlotInfo]]]:
        """Version -> host -> complete copies there, newest version first; without those that are known to be damaged."""
        held = by_version({host: part.slots for host, part in self.parts.items()})
        found: dict[Version, dict[str, list[SlotInfo]]] = {}
        for version in sorted(held, reverse=True):
            for host, slot in genuine(held[version]):
                found.setdefault(version, {}).setdefault(host, []).append(slot)
        return found

    def roots(self, version: Version) -> dict[int, str]:
        """Owner -> root of its shard, where this machine has a copy."""
        return {slot.owner: slot.root for held in self.copies.get(version, {}).values() for slot in held}

    def roots_of_leader(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard, as the leader has committed it.

        Empty where its host is gone, or has committed another version since: then a host that has a copy must do, which has compared it.
        """
        for part in self.parts.values():
            leader = part.leader or (part.spec.leader if part.spec is not None else None)
            if part.spec is not None and leader is not None and (address := part.spec.addresses.get(leader)) is not None:
                with contextlib.suppress(GeminiError, OSError):
                    return committed_roots(leader, address, self.claims, self.secret, version, _TIMEOUT)
        return {}

    @property
    def claims(self) -> Claims:
        """A reader's introduction to the agents of other hosts."""
        return Claims(run=self.run, stream=self.stream, host="visitor", to="", role="fetch", incarnation=None)

    @property
    def secret(self) -> bytes:
        return next(iter(self.hosts.values())).secret

    def missing(self, version: Version) -> list[int]:
        """Ranks of whose shard no agent of this machine has a copy; empty: the version is whole here."""
        slots = [slot for held in self.copies.get(version, {}).values() for slot in held]
        world_size = max((slot.world_size for slot in slots), default=0)
        return sorted(set(range(world_size)) - {slot.owner for slot in slots})

    @property
    def versions(self) -> list[Version]:
        """The versions that can be asked for, newest first: committed, and whole here or perhaps with other hosts' help."""
        known = filter(self.is_committed, self.copies)
        return [version for version in known if version == self.committed or not self.missing(version)]

    def is_committed(self, version: Version) -> bool:
        """Whether some agent knows it, or a copy bears the mark of it. A version that is whole may still be taken back."""
        slots = (slot for part in self.parts.values() for slot in part.slots)
        return version == self.committed or any(slot.committed for slot in slots if slot.version == version)


def remembered(run: str | None = None) -> list[Remembered]:
    """Every stream that agents of this user hold on this machine, of one run or of all. Agents that do not answer are left out."""
    streams: dict[tuple[str, str], dict[str, Visited]] = {}
    for answer in lifecycle.ask_all(Visit()):
        if isinstance(answer, Visited) and run in (None, answer.run):
            for name in answer.streams:
                streams.setdefault((answer.run, name), {})[answer.host] = answer
    return [Remembered(run=run, stream=stream, hosts=hosts) for (run, stream), hosts in sorted(streams.items())]


class RememberedShard:
    """One rank's shard, a `ShardReader` of the first copy that can be read; it stays pinned there until this is closed.

    Agents of this machine are asked first, then the other hosts of the job. A copy that fails in the middle, or has another root
    than the one that was committed, is left for the next one.

    Raises RecoveryError: no copy can be had; the text says why. So do ``extras`` and ``chunks``.
    """

    def __init__(self, memory: Remembered, owner: int, version: Version, root: str | None) -> None:
        self._memory, self._owner, self._version, self.root = memory, owner, version, root
        self._places = _places(memory, owner, version)
        self._failures: list[str] = []
        self._shard = self._next()
        self.root = root or self._shard.root  # all that is read is of one copy, or of equal ones
        _keep(self)

    @property
    def layout(self) -> Layout:
        return self._shard.layout

    @property
    def where(self) -> str:
        """The memory that is read, in words."""
        return self._shard.where

    def expect(self, root: str) -> None:
        """Makes copies with another root than this count as damaged; call it before anything is read."""
        self.root = root
        if self._shard.root != root:
            self._give_up(CorruptDataError(f"{self.where}: its root is {self._shard.root}, should be {root}"))

    def extras(self) -> bytes:
        while True:
            try:
                return self._shard.extras()
            except (PeerError, CorruptDataError, OSError) as error:
                self._give_up(error)

    def chunks(self, live: Live = nowhere, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        done = 0
        while True:
            try:
                for offset, view in self._shard.chunks(start=start, stop=stop):
                    if (end := offset + len(view)) > done:
                        yield max(offset, done), view[max(0, done - offset) :]
                        done = end
                return
            except (PeerError, CorruptDataError, OSError) as error:
                self._give_up(error)

    def renew(self) -> None:
        """Keeps the copy while others are read, by a thread: an export that is stopped must not keep slots from the job."""
        with contextlib.suppress(PeerError):  # the next read will raise it
            self._shard.renew()

    def close(self) -> None:
        with _keeping:
            _kept.discard(self)
        self._shard.close()

    def _give_up(self, error: Exception) -> None:
        self._failures.append(str(error))
        self._shard.close()
        self._shard = self._next()

    def _next(self) -> PeerShard:
        memory = self._memory
        while self._places:
            host, address = self._places.pop(0)
            try:
                return PeerShard(host, address, memory.claims, memory.secret, self._owner, self._version, timeout=_TIMEOUT, root=self.root)
            except (GeminiError, OSError) as error:
                self._failures.append(str(error))
        why = "; ".join(self._failures) or "no host that is known from here has a copy"
        raise RecoveryError(f"rank {self._owner}'s shard of {self._version} cannot be read from memory: {why}")


_kept: weakref.WeakSet[RememberedShard] = weakref.WeakSet()
_keeping = threading.Lock()
_keeper: threading.Thread | None = None


def _keep(shard: RememberedShard) -> None:
    global _keeper
    with _keeping:
        _kept.add(shard)
        if _keeper is None:
            _keeper = threading.Thread(target=_renew_all, name="gemini-leases", daemon=True)
            _keeper.start()


def _renew_all() -> None:
    global _keeper
    while True:
        time.sleep(_RENEWAL)
        with _keeping:
            shards = list(_kept)
            if not shards:
                _keeper = None
                return
        for shard in shards:
            shard.renew()


def open_newest(memory: Remembered, iteration: int | None) -> tuple[Version, list[RememberedShard]]:
    """The newest version with ``iteration`` (None: the newest of all), and its shards by owner.

    Raises RecoveryError: there is none, or a shard cannot be had; the text says why.
    """
    failure = RecoveryError(f"the agents of run {memory.run!r} hold no committed step yet")
    begin = changed = time.monotonic()
    seen: list[Version] = []
    while True:
        for version in memory.versions:
            if iteration in (None, version.iteration):
                try:
                    return version, _open_all(memory, version)
                except RecoveryError as error:
                    failure = error
        now = time.monotonic()
        if memory.versions != seen:
            seen, changed = memory.versions, now
        if now - changed > _STILL or now - begin > _PATIENCE:
            raise failure
        time.sleep(_LOOK)
        memory = next((other for other in remembered(memory.run) if other.stream == memory.stream), memory)


def _open_all(memory: Remembered, version: Version) -> list[RememberedShard]:
    world_size = max(slot.world_size for held in memory.copies[version].values() for slot in held)
    roots = memory.roots(version)
    with contextlib.ExitStack() as opened:
        shards = [
            opened.enter_context(contextlib.closing(RememberedShard(memory, owner, version, roots.get(owner))))
            for owner in range(world_size)
        ]
        if len(roots) < world_size:  # only now: a running job moves on
            committed = memory.roots_of_leader(version)
            for owner, shard in enumerate(shards):
                if owner in committed:
                    shard.expect(committed[owner])
        opened.pop_all()
    return shards


def _places(memory: Remembered, owner: int, version: Version) -> list[tuple[str, tuple[str, int]]]:
    """Host id and address of the agents that have, or may have, a copy of the shard."""
    here = [host for host, slots in memory.copies[version].items() if any(slot.owner == owner for slot in slots)]
    places = {host: address for host in here if (address := memory.hosts[host].address) is not None}
    for part in memory.parts.values():
        if part.spec is not None:
            for host in (*part.spec.holders.get(owner, ()), *part.spec.sources.get(owner, ())):
                if host not in memory.hosts and host in part.spec.addresses:
                    places.setdefault(host, part.spec.addresses[host])
    return list(places.items())
