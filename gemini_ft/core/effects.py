"""The vocabulary of the protocol: reports of hosts to the leader's book, and effects, which an agent carries out."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace

from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A report: ``host`` holds every byte of ``owner``'s shard of ``version``, verified."""

    owner: int
    host: str
    version: Version
    layout: str = ""
    digest: str = ""
    root: str = ""  # of the copy, formed by its host (gemini_ft.core.roots)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Several `Completed` of one host in one message, alike in all but owner and root."""

    host: str
    version: Version
    layout: str
    digest: str
    roots: dict[int, str]  # owner -> root of the copy

    def each(self) -> list[Completed]:
        return [
            Completed(owner=owner, host=self.host, version=self.version, layout=self.layout, digest=self.digest, root=root)
            for owner, root in self.roots.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """`Copies` of several hosts that have all they are to hold, alike in version, layout, digest and the length of their roots."""

    version: Version
    layout: str
    digest: str
    roots: dict[str, str]  # host -> the roots of its copies, one after the other in the order of their owners

    def only(self, hosts: Container[str]) -> Gathered:
        """The same without other hosts than these."""
        return replace(self, roots={host: text for host, text in self.roots.items() if host in hosts})

    @property
    def hosts(self) -> Collection[str]:
        return self.roots.keys()

    def check(self, held: Mapping[str, Collection[int]]) -> None:
        """Raises PeerError: a host holds nothing, or another number of shards than these can be the roots of.

        ``held``: host -> owners of the shards that it holds, in their order.
        """
        for host, text in self.roots.items():
            if not text or not held.get(host) or len(text) % len(held[host]):
                raise PeerError(f"{len(text)} characters are not the roots of the {len(held.get(host, ()))} copies on host {host!r}")

    def each(self, held: Mapping[str, Collection[int]]) -> list[Copies]:
        """The reports host by host, after `check`."""
        out = []
        for host, text in self.roots.items():
            size = len(text) // len(held[host])
            roots = {owner: text[at * size : (at + 1) * size] for at, owner in enumerate(held[host])}
            out.append(Copies(host=host, version=self.version, layout=self.layout, digest=self.digest, roots=roots))
        return out


@dataclass(frozen=True)
class Skipped:
    """A report: ``owner`` has no snapshot of ``version``, so it can never be committed."""

    owner: int
    version: Version
    reason: str


@dataclass(frozen=True)
class GatheredSkips:
    """`Skipped` of owners on several hosts, alike in version and reason."""

    version: Version
    reason: str
    owners: dict[str, list[int]]  # host -> owners that are there

    def only(self, hosts: Container[str]) -> GatheredSkips:
        return replace(self, owners={host: owners for host, owners in self.owners.items() if host in hosts})

    @property
    def hosts(self) -> Collection[str]:
        return self.owners.keys()


Report = Completed | Skipped


@dataclass(frozen=True)
class _OfVersion:
    owner: int
    version: Version


@dataclass(frozen=True, kw_only=True)
class _OfSlot:
    owner: int
    slot: int
    version: Version


class Grant(_OfSlot):
    """An effect: the worker that owns the shard may write ``version`` into the slot."""


class Withdraw(_OfVersion):
    """An effect: the version was aborted; its worker need not finish copying it."""


@dataclass(frozen=True)
class Send(_OfSlot):
    """An effect: send the slot's bytes to a peer, chunk by chunk as they are copied. ``sent`` ends it."""

    peer: str


@dataclass(frozen=True)
class CancelSend(_OfVersion):
    """An effect: stop sending; ``sent`` is still due, once no byte of the slot is referenced any more."""

    peer: str


@dataclass(frozen=True)
class Tell:
    """An effect: pass a report to the leader's ledger."""

    report: Report


class Upload(_OfSlot):
    """An effect: write the frozen slot to storage. ``thawed`` ends it, perhaps before the last read: ``hold`` the slot meanwhile."""


class Lacking(_OfVersion):
    """An effect: the version is to be uploaded, and its owner's host has no copy; the upload cannot become whole."""


@dataclass(frozen=True, kw_only=True)
class Free:
    """An effect: the slot's memory is not needed any more."""

    owner: int
    slot: int


class Damaged(_OfVersion):
    """An effect: this host's copy had another root than the committed one, and has been discarded."""


Effect = Damaged | Grant | Lacking | Withdraw | Send | CancelSend | Tell | Upload | Free
