"""What the protocol says: reports of hosts to the leader's book, and effects, which an agent carries out."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_ft.core.versions import Version


@dataclass(frozen=True)
class Completed:
    """``host`` holds every byte of ``owner``'s shard of ``version``, verified."""

    owner: int
    host: str
    version: Version
    layout: str = ""
    digest: str = ""
    root: str = ""  # of the copy, formed by its host (gemini_ft.core.roots)


@dataclass(frozen=True)
class Skipped:
    """``owner`` has no snapshot of ``version``: it can never be committed."""

    owner: int
    version: Version
    reason: str


Report = Completed | Skipped


@dataclass(frozen=True)
class Grant:
    """The worker that owns the shard may write ``version`` into the slot."""

    owner: int
    slot: int
    version: Version


@dataclass(frozen=True)
class Withdraw:
    """The version was aborted; its worker need not finish copying it."""

    owner: int
    version: Version


@dataclass(frozen=True)
class Send:
    """Send the slot's bytes to a peer, chunk by chunk as they are copied. ``sent`` ends it."""

    owner: int
    slot: int
    version: Version
    peer: str


@dataclass(frozen=True)
class CancelSend:
    """Stop sending; ``sent`` is still due, once no byte of the slot is referenced any more."""

    owner: int
    version: Version
    peer: str


@dataclass(frozen=True)
class Tell:
    """Pass a report to the leader's ledger."""

    report: Report


@dataclass(frozen=True)
class Upload:
    """Write the frozen slot to storage. ``thawed`` ends it, perhaps before the last byte is read: ``hold`` the slot meanwhile."""

    owner: int
    slot: int
    version: Version


@dataclass(frozen=True)
class Free:
    """Nobody needs the slot's memory any more."""

    owner: int
    slot: int


@dataclass(frozen=True)
class Damaged:
    """This host's copy has another root than the one that was committed, and has been discarded."""

    owner: int
    version: Version


Effect = Damaged | Grant | Withdraw | Send | CancelSend | Tell | Upload | Free
