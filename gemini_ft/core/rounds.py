"""One version on its way to its commit, as the leader's ledger counts it: constant work per report, whatever the size of the job. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

Pair = tuple[int, str]  # (owner, holding host)
Label = tuple[str, str]  # hash of the layout, digest of replicated state; either may be empty


class Round:
    """The reports of one version.

    A copy agrees when its root is that of the owner's own copy; a copy with another root is damaged, and does not count.

    Args:
        holders: owner -> hosts, the owner's own first; never changed.
        pairs: the number of all pairs of an owner and a holder.
        excluded: the pairs among them that do not count.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]], pairs: int, excluded: Collection[Pair]) -> None:
        self._holders = holders
        self.own: dict[int, str] = {}  # owner -> root of its own copy
        self.own_since: float | None = None  # when the last owner's own copy was complete
        self.back: set[Pair] = set()  # pairs that do not count, and agree
        self._lacking = pairs - len(excluded)  # pairs that count and do not agree yet
        self._excluded = set(excluded)
        self._roots: dict[str, dict[int, str]] = {}  # host -> owner -> root of the copy there, as reported last
        self._labels: dict[str, dict[int, Label]] = {}  # the same for what came with the root
        self._layouts: dict[str, int] = {}  # hash -> reports that say so
        self._digests: dict[str, int] = {}
        self._own_digests = 0  # owners' own copies with a digest

    def add(self, owner: int, host: str, label: Label, root: str, now: float) -> None:
        """Takes in the report of one of the pairs; what it has reported before is forgotten."""
        hosts = self._holders[owner]
        is_own = host == hosts[0]
        affected = hosts if is_own else (host,)
        before = [self._agrees(owner, holder) for holder in affected]
        labels = self._labels.setdefault(host, {})
        if owner in labels:
            self._count(labels[owner], 1, is_own, -1)
        labels[owner] = label
        self._count(label, 1, is_own, 1)
        self._roots.setdefault(host, {})[owner] = root
        if is_own:
            self.own[owner] = root
            self._note_own(now)
        for holder, agreed in zip(affected, before, strict=True):
            if agreed != (agrees := self._agrees(owner, holder)):
                self._settle((owner, holder), agrees)

    def exclude(self, pairs: Iterable[Pair]) -> None:
        """Stops counting pairs."""
        for pair in pairs:
            self._excluded.add(pair)
            if self._agrees(*pair):
                self.back.add(pair)
            else:
                self._lacking -= 1

    def readmit(self, pairs: Iterable[Pair]) -> None:
        """Counts pairs again."""
        for pair in pairs:
            self._excluded.discard(pair)
            if pair in self.back:
                self.back.remove(pair)
            else:
                self._lacking += 1

    @property
    def complete(self) -> bool:
        """Whether every owner's own copy is there, and every pair that counts agrees."""
        return self.own_since is not None and not self._lacking

    @property
    def roots(self) -> dict[int, str]:
        """Owner -> root of its own copy, where that is there and has one."""
        return {owner: root for owner, root in self.own.items() if root}

    def missing(self) -> Iterator[Pair]:
        """The pairs that count and do not agree; walks over all of them."""
        if self._lacking:
            pairs = ((owner, host) for owner, hosts in self._holders.items() for host in hosts if not self._agrees(owner, host))
            yield from (pair for pair in pairs if pair not in self._excluded)

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
        return self._by_label(0)

    def by_digest(self) -> dict[str, list[int]]:
        """Digest of replicated state -> ranks that report it."""
        return self._by_label(1)

    def _by_label(self, which: int) -> dict[str, list[int]]:
        out: dict[str, set[int]] = {}
        for labels in self._labels.values():
            for owner, label in labels.items():
                if label[which]:
                    out.setdefault(label[which], set()).add(owner)
        return {value: sorted(owners) for value, owners in sorted(out.items())}

    def _agrees(self, owner: int, host: str) -> bool:
        root = self._roots[host].get(owner) if host in self._roots else None
        return root is not None and self.own.get(owner) == root

    def _settle(self, pair: Pair, agrees: bool) -> None:
        if pair in self._excluded:
            (self.back.add if agrees else self.back.discard)(pair)
        else:
            self._lacking += -1 if agrees else 1

    def _note_own(self, now: float) -> None:
        if self.own_since is None and len(self.own) == len(self._holders):
            self.own_since = now

    def _count(self, label: Label, reports: int, is_own: bool, sign: int) -> None:
        layout, digest = label
        _tally(self._layouts, layout, sign * reports)
        _tally(self._digests, digest, sign * reports)
        self._own_digests += sign if is_own and digest else 0


def _tally(counts: dict[str, int], value: str, step: int) -> None:
    if not value:
        return
    counts[value] = counts.get(value, 0) + step
    if not counts[value]:
        del counts[value]
