"""One version on its way to its commit, as the leader's ledger counts it: constant work per report, whatever the size of the job. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

Pair = tuple[int, str]  # (owner, holding host)


class Ack(NamedTuple):
    """A reported copy."""

    layout: str
    digest: str
    root: str


class Round:
    """What has been reported of one version.

    A copy agrees when its root is that of the owner's own copy; a copy with another root is damaged, and does not count.

    Args:
        holders: owner -> hosts, the owner's own first; never changed.
        pairs: all pairs of an owner and a holder.
        excluded: the pairs among them that do not count.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]], pairs: Iterable[Pair], excluded: Collection[Pair]) -> None:
        self._holders = holders
        self.acks: dict[Pair, Ack] = {}  # the newest of each pair
        self.own: dict[int, str] = {}  # owner -> root of its own copy
        self.own_since: float | None = None  # when the last owner's own copy was complete
        self.missing = set(pairs)  # pairs that count and do not agree yet
        self.missing.difference_update(excluded)
        self.back: set[Pair] = set()  # pairs that do not count, and agree
        self._excluded = set(excluded)
        self._layouts: dict[str, int] = {}  # hash -> reports that say so
        self._digests: dict[str, int] = {}
        self._own_digests = 0  # owners' own copies with a digest

    def add(self, owner: int, host: str, ack: Ack, now: float) -> None:
        """Takes in the report of one of the pairs; what it has reported before is forgotten."""
        pair = (owner, host)
        hosts = self._holders[owner]
        is_own = host == hosts[0]
        if (before := self.acks.get(pair)) is not None:
            self._count(before, is_own, -1)
        self.acks[pair] = ack
        self._count(ack, is_own, 1)
        if not is_own:
            self._settle(pair, self.own.get(owner) == ack.root)
            return
        self.own[owner] = ack.root
        for holder in hosts:
            other = self.acks.get((owner, holder))
            self._settle((owner, holder), other is not None and other.root == ack.root)
        if self.own_since is None and len(self.own) == len(self._holders):
            self.own_since = now

    def exclude(self, pairs: Iterable[Pair]) -> None:
        """Stops counting pairs."""
        for pair in pairs:
            self._excluded.add(pair)
            if pair in self.missing:
                self.missing.remove(pair)
            else:
                self.back.add(pair)

    def readmit(self, pairs: Iterable[Pair]) -> None:
        """Counts pairs again."""
        for pair in pairs:
            self._excluded.discard(pair)
            if pair in self.back:
                self.back.remove(pair)
            else:
                self.missing.add(pair)

    @property
    def complete(self) -> bool:
        """Whether every owner's own copy is there, and every pair that counts agrees."""
        return self.own_since is not None and not self.missing

    @property
    def compared(self) -> bool:
        """Whether every owner has given a digest of its replicated state."""
        return self._own_digests == len(self._holders)

    @property
    def disputed(self) -> bool:
        """Whether reports differ in what must be the same on all ranks."""
        return len(self._layouts) > 1 or len(self._digests) > 1

    def by_layout(self) -> dict[str, list[int]]:
        """Hash of the layout -> ranks that report it."""
        return _by_value((ack.layout, owner) for (owner, _), ack in self.acks.items() if ack.layout)

    def by_digest(self) -> dict[str, list[int]]:
        """Digest of replicated state -> ranks that report it."""
        return _by_value((ack.digest, owner) for (owner, _), ack in self.acks.items() if ack.digest)

    def _settle(self, pair: Pair, agrees: bool) -> None:
        if pair in self._excluded:
            (self.back.add if agrees else self.back.discard)(pair)
        else:
            (self.missing.discard if agrees else self.missing.add)(pair)

    def _count(self, ack: Ack, is_own: bool, step: int) -> None:
        _tally(self._layouts, ack.layout, step)
        _tally(self._digests, ack.digest, step)
        self._own_digests += step if is_own and ack.digest else 0


def _tally(counts: dict[str, int], value: str, step: int) -> None:
    if not value:
        return
    counts[value] = counts.get(value, 0) + step
    if not counts[value]:
        del counts[value]


def _by_value(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    out: dict[str, set[int]] = {}
    for value, owner in pairs:
        out.setdefault(value, set()).add(owner)
    return {value: sorted(owners) for value, owners in sorted(out.items())}
