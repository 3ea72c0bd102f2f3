"""Looking at the agents of this machine from outside of a job: what they hold, and reading it.

A visitor is no worker: nothing changes at the agent, except that a shard which is being read stays until it has been
read. A job that runs meanwhile may leave out the snapshots for which it then lacks a free slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini_ft.agent import lifecycle
from gemini_ft.errors import GeminiError, PeerError, RecoveryError
from gemini_ft.messages import Proof, SlotInfo, StreamInfo, Visit, Visited
from gemini_ft.recovery import PeerShard
from gemini_ft.versions import Version

_TIMEOUT = 60.0  # seconds an agent may take for an answer while it is read
_ATTEMPTS = 5  # a running job moves on between the look at what there is and the reading


@dataclass(frozen=True)
class Remembered:
    """One stream of one run, as the agents of this machine have it.

    Attributes:
        run: run id.
        stream: name of the stream.
        hosts: host id -> what its agent said; at least one.
    """

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
        """Version -> host -> complete copies there, newest version first."""
        found: dict[Version, dict[str, list[SlotInfo]]] = {}
        for host, part in self.parts.items():
            for slot in part.slots:
                found.setdefault(slot.version, {}).setdefault(host, []).append(slot)
        return dict(sorted(found.items(), reverse=True))

    def missing(self, version: Version) -> list[int]:
        """Ranks of whose shard no agent of this machine has a copy; empty: the version is whole here."""
        slots = [slot for held in self.copies.get(version, {}).values() for slot in held]
        world_size = max((slot.world_size for slot in slots), default=0)
        return sorted(set(range(world_size)) - {slot.owner for slot in slots})

    @property
    def versions(self) -> list[Version]:
        """What can be asked for, newest first: committed, and whole here or perhaps with the help of other hosts."""
        committed = self.committed
        known = [version for version in self.copies if committed is None or version <= committed]
        return [version for version in known if version == committed or not self.missing(version)]


def remembered(run: str | None = None) -> list[Remembered]:
    """Every stream that agents of this user hold on this machine, of one run or of all. Agents that do not answer are left out."""
    streams: dict[tuple[str, str], dict[str, Visited]] = {}
    for address in lifecycle.addresses():
        with contextlib.suppress(GeminiError, OSError):
            answer = lifecycle.ask_at(address, Visit())
            if isinstance(answer, Visited) and run in (None, answer.run):
                for name in answer.streams:
                    streams.setdefault((answer.run, name), {})[answer.host] = answer
    return [Remembered(*key, hosts) for key, hosts in sorted(streams.items())]


def open_shards(memory: Remembered, version: Version) -> list[PeerShard]:
    """All shards of ``version`` by owner, each pinned where it is until it is closed.

    Agents of this machine come first, then the other hosts of the job.

    Raises:
        RecoveryError: a shard cannot be had from anywhere; the text says why.
    """
    slots = [slot for held in memory.copies.get(version, {}).values() for slot in held]
    with contextlib.ExitStack() as opened:
        shards = []
        for owner in range(max((slot.world_size for slot in slots), default=0)):
            shards.append(_open(memory, owner, version))
            opened.callback(shards[-1].close)
        opened.pop_all()
    if not shards:
        raise RecoveryError(f"no agent of this machine has {version} of run {memory.run!r} any more")
    return shards


def open_newest(memory: Remembered, iteration: int | None) -> tuple[Version, list[PeerShard]]:
    """The newest version with ``iteration`` (None: the newest of all), and its shards as `open_shards` gives them.

    Raises:
        RecoveryError: there is none, or a shard cannot be had; the text says why.
    """
    failure = RecoveryError(f"the agents of run {memory.run!r} hold no committed step yet")
    for _ in range(_ATTEMPTS):
        for version in memory.versions:
            if iteration in (None, version.iteration):
                try:
                    return version, open_shards(memory, version)
                except RecoveryError as error:
                    failure = error
        again = [other for other in remembered(memory.run) if other.stream == memory.stream]
        memory = again[0] if again else memory
    raise failure


def _open(memory: Remembered, owner: int, version: Version) -> PeerShard:
    failures = []
    guide = next(iter(memory.hosts.values()))
    claims = Proof(run=memory.run, stream=memory.stream, host="visitor", role="fetch", incarnation=None, nonce=b"", mac=b"")
    for host, address in _places(memory, owner, version):
        try:
            return PeerShard(host, address, claims, guide.secret, owner, version, _TIMEOUT, guide.tls)
        except (PeerError, OSError) as error:
            failures.append(str(error))
    why = "; ".join(failures) or "no host that is known from here has a copy"
    raise RecoveryError(f"rank {owner}'s shard of {version} cannot be read: {why}")


def _places(memory: Remembered, owner: int, version: Version) -> Sequence[tuple[str, tuple[str, int]]]:
    """Host id and address of the agents that have, or may have, a copy of the shard."""
    here = [host for host, slots in memory.copies[version].items() if any(slot.owner == owner for slot in slots)]
    places = {host: address for host in here if (address := memory.hosts[host].address) is not None}
    for part in memory.parts.values():
        if part.spec is not None:
            for host in (*part.spec.holders.get(owner, ()), *part.spec.sources.get(owner, ())):
                if host not in memory.hosts and host in part.spec.addresses:
                    places.setdefault(host, part.spec.addresses[host])
    return list(places.items())
