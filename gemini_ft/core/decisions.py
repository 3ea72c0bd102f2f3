"""The decisions of the leader's book, which all hosts carry out, and the rhythm of uploads among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemini_ft.core.rounds import Pair
from gemini_ft.core.versions import Version


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A decision: ``version`` is complete at every holder that counts. ``freeze``: upload it."""

    version: Version
    freeze: bool
    digest_at: int | None = None  # iteration from which ranks must add digests of their replicated state
    roots: dict[int, str] = field(default_factory=dict)  # owner -> root of its shard: of its own copy, and of every other that counts
    agreed: bool = False  # to one host: the roots of what it holds are those that it reported, and are not repeated
    compared: bool = field(default=False, compare=False)  # all ranks were found to hold alike what they must; no part of the decision


@dataclass(frozen=True)
class Abort:
    """A decision: ``version`` will never be complete everywhere."""

    version: Version
    reason: str


@dataclass(frozen=True, kw_only=True)
class Holders:
    """A decision: the holder set has changed; these pairs do not count until they have caught up."""

    epoch: int
    excluded: frozenset[Pair]
    newly: frozenset[Pair]


@dataclass(frozen=True)
class WriteManifest:
    """A decision: all shards of ``version`` are in storage, so write the manifest, which makes it a checkpoint."""

    version: Version
    records: Mapping[int, str]


@dataclass(frozen=True)
class Thaw:
    """A decision: the upload of ``version`` is over.

    ``unclear``: the manifest may exist, or be written even now by a host that led and has been lost: what was uploaded must stay.
    """

    version: Version
    error: str = ""
    unclear: bool = False


@dataclass(frozen=True, kw_only=True)
class Fatal:
    """A decision: the job must not go on; ``text`` is the error that every rank raises."""

    error: str
    text: str
    ranks: tuple[int, ...] = ()  # where ranks have diverged, those that differ from most others, or all of them if no side is the largest
    # then, the newest committed version in which they were found to agree, or with which all began; None: there is none
    agreed: Version | None = None


Decision = Commit | Abort | Holders | WriteManifest | Thaw | Fatal


@dataclass(kw_only=True)
class Cadence:
    """The rhythm of uploads: every few iterations, or every few seconds. Never two at once."""

    every_steps: int | None = None
    every_seconds: float | None = None
    last_iteration: int = 0
    last_time: float = 0.0
    at_end: bool = False  # the last committed version of the job is due at its end
    hurried: bool = False  # the next one that can be is due, because a host is leaving

    def due(self, iteration: int, now: float) -> bool:
        by_steps = self.every_steps is not None and iteration // self.every_steps > self.last_iteration // self.every_steps
        by_time = self.every_seconds is not None and now - self.last_time >= self.every_seconds
        return by_steps or by_time or self.hurried

    def next_iteration(self, iteration: int, now: float) -> int | None:
        """The first iteration after ``iteration`` that may be uploaded, as far as can be said now."""
        if self.hurried or (self.every_seconds is not None and now - self.last_time >= self.every_seconds):
            return iteration + 1
        if self.every_steps is not None:
            return (self.last_iteration // self.every_steps + 1) * self.every_steps
        return None
