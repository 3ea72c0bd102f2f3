"""One version on its way to its commit, as the leader's ledger counts it: constant work per report, whatever the size of the job. Pure.

A ledger that counts each copy spends a second on the hundred thousands of a large job. So the copies that a host has reported together are
one string, and two holders of the same shards are compared by one comparison of two stretches of text, once all hosts have said all that
counts. Copies that are late, reported anew, differ, or do not count are looked at one by one, and only these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

Pair = tuple[int, str]  # (owner, holding host)
Label = tuple[str, str]  # hash of the layout, digest of replicated state; either may be empty
Roots = str | Mapping[int, str]  # of all that a host holds, in the order of owners; or of some owners' copies
_Stretch = tuple[str, int, int, str, int, int]  # holder, from and to (copies); home of the same shards, from and to


class Holdings:
    """The hosts that hold the copies of a session, and the pairs of an owner and a holder that do not count, ``excluded``.

    ``holders``: owner -> hosts, the owner's own first; never changed.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]]) -> None:
        self.holders = holders
        self.held: dict[str, dict[int, int]] = {}  # host -> owners of the shards that it holds, in their order -> place in it
        self.own: dict[str, list[int]] = {}  # host -> owners whose own copy it has
        for owner in sorted(holders):
            for host in holders[owner]:
                held = self.held.setdefault(host, {})
                held[owner] = len(held)
            self.own.setdefault(holders[owner][0], []).append(owner)
        self.excluded: set[Pair] = set()
        self.excluded_at: dict[str, set[Pair]] = {}  # host -> those that it is the holder or the home of
        self._stretches: list[_Stretch] | None = None  # made when they are needed first

    def exclude(self, pairs: Collection[Pair]) -> None:
        self.excluded |= {*pairs}
        for pair in pairs:
            for concerned in {pair[1], self.holders[pair[0]][0]}:
                self.excluded_at.setdefault(concerned, set()).add(pair)

    def readmit(self, pairs: Collection[Pair]) -> None:
        self.excluded -= {*pairs}
        for pair in pairs:
            for concerned in {pair[1], self.holders[pair[0]][0]}:
                self.excluded_at.get(concerned, set()).discard(pair)

    def by_owner(self, host: str, roots: Roots) -> Mapping[int, str]:
        """The roots of a host's copies by owner; of the shards that it does not hold there are none."""
        held = self.held.get(host, {})
        if isinstance(roots, str):
            size = len(roots) // len(held)
            return {owner: roots[at * size : (at + 1) * size] for owner, at in held.items()}
        return roots if roots.keys() <= held.keys() else {owner: root for owner, root in roots.items() if owner in held}

    @property
    def stretches(self) -> list[_Stretch]:
        """The longest stretches of shards that follow each other in the order of a holder and in that of their home."""
        if self._stretches is None:
            self._stretches = list(self._find_stretches())
        return self._stretches

    def _find_stretches(self) -> Iterator[_Stretch]:
        for holder, owners in self.held.items():
            stretch: _Stretch | None = None
            for owner, at in owners.items():
                home = self.holders[owner][0]
                there = self.held[home][owner]
                if stretch is not None and (stretch[3], stretch[5]) == (home, there):
                    stretch = (*stretch[:2], at + 1, home, stretch[4], there + 1)
                    continue
                if stretch is not None:
                    yield stretch
                stretch = (holder, at, at + 1, home, there, there + 1) if home != holder else None
            if stretch is not None:
                yield stretch


class Round:
    """The reports of one version.

    A copy agrees when its root is that of the owner's own copy; a copy with another root is damaged, and does not count.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._of = holdings
        self.own_since: float | None = None  # when the last owner's own copy was complete
        self.back: set[Pair] = set()  # pairs that do not count, and agree
        self._whole: dict[str, tuple[Label, str]] = {}  # host -> the roots of all that it holds, of one length, in the order of owners
        self._partly: dict[str, dict[int, tuple[Label, str]]] = {}  # the same of hosts of which that cannot be said
        self._labels = Counter[Label]()  # of all copies
        self._homes = set(holdings.own)  # hosts that have not said all of their own
        # Hosts that have not said all that counts: before they have, nothing needs to be compared.
        self._awaited = {host for host in holdings.held if not (host in holdings.excluded_at and self._has_said_all(host))}

    def only_adds(self, label: Label, said: Mapping[str, Roots]) -> bool:
        """Whether copies by host are news, of which nothing else has been reported, with the label of all others."""
        if not self._labels.keys() <= {label} or not self._whole.keys().isdisjoint(said):
            return False
        again = ((roots, self._partly[host].keys()) for host, roots in said.items() if host in self._partly)
        return all(not isinstance(roots, str) and known.isdisjoint(roots) for roots, known in again)

    def take(self, host: str, label: Label, roots: Roots, now: float) -> None:
        """Takes in a report of one host, of shards that it holds; what it has reported of them before is forgotten."""
        held, is_first = self._of.held[host], host not in self._partly and host not in self._whole
        if is_first and not isinstance(roots, str) and len(roots) == len(held):
            roots = _joined(held, roots)
        if is_first and isinstance(roots, str):
            self._whole[host] = label, roots
            self._labels[label] += len(held)
        else:
            self._take_apart(host, label, self._of.by_owner(host, roots))
        if self._has_said_all(host):
            self._awaited.discard(host)
        if host in self._homes and (host in self._whole or self._partly[host].keys() >= {*self._of.own[host]}):
            self._homes.remove(host)
        if self.own_since is None and not self._homes:
            self.own_since = now
        self._note_back(self._of.excluded_at.get(host, ()))

    def _take_apart(self, host: str, label: Label, roots: Mapping[int, str]) -> None:
        """Takes in copies one by one; they are one string again when all are there."""
        news = {owner: (label, root) for owner, root in roots.items() if self._copy(owner, host) != (label, root)}
        if news and host in self._whole:
            before, text = self._whole.pop(host)
            self._partly[host] = {owner: (before, root) for owner, root in self._of.by_owner(host, text).items()}
        said, held = self._partly.get(host, {}), self._of.held[host]
        self._labels.subtract(said[owner][0] for owner in news if owner in said)
        self._labels[label] += len(news)
        if news:
            self._partly[host] = said | news
        if news and len(said | news) == len(held) and {each for each, _ in self._partly[host].values()} == {label}:
            whole = _joined(held, {owner: root for owner, (_, root) in self._partly[host].items()})
            if isinstance(whole, str):
                self._whole[host] = label, whole
                del self._partly[host]

    def exclude(self, pairs: Collection[Pair]) -> None:
        """Leaves pairs out, after `Holdings.exclude`."""
        self._awaited -= {host for _, host in pairs if self._has_said_all(host)}
        self._note_back(pairs)

    def readmit(self, pairs: Collection[Pair]) -> None:
        """Counts pairs again, after `Holdings.readmit`."""
        self._awaited |= {host for _, host in pairs if not self._has_said_all(host)}
        self.back -= {*pairs}

    def _note_back(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            (self.back.add if self._agrees(*pair) else self.back.discard)(pair)

    def _has_said_all(self, host: str) -> bool:
        """Whether nothing is missing there that counts."""
        said, excluded = self._partly.get(host, {}), self._of.excluded
        return host in self._whole or all(owner in said or (owner, host) in excluded for owner in self._of.held[host])

    # -- what they come to

    @property
    def complete(self) -> bool:
        """Whether every owner's own copy is there, and every pair that counts agrees."""
        return self.own_since is not None and not self._awaited and next(self.missing(), None) is None

    def missing(self) -> Iterator[Pair]:
        """The pairs that count and do not agree."""
        for holder, start, end, home, first, last in self._of.stretches:
            theirs = self._stretch(holder, start, end)
            if not theirs or theirs != self._stretch(home, first, last):
                pairs = ((owner, holder) for owner in islice(self._of.held[holder], start, end))
                yield from (pair for pair in pairs if pair not in self._of.excluded and not self._agrees(*pair))

    def has_own(self, owner: int) -> bool:
        """Whether an owner's own copy is there."""
        return self._copy(owner, self._of.holders[owner][0]) is not None

    @property
    def roots(self) -> dict[int, str]:
        """Owner -> root of its own copy, where that is there and has one."""
        found: dict[int, str] = {}
        for host, owners in self._of.own.items():
            if host in self._whole:
                text, places = self._whole[host][1], self._of.held[host]
                size = len(text) // len(places)
                found.update({owner: text[places[owner] * size : (places[owner] + 1) * size] for owner in owners if size})
            else:
                said = self._partly.get(host, {})
                found.update({owner: said[owner][1] for owner in owners if owner in said and said[owner][1]})
        return found

    @property
    def compared(self) -> bool:
        """Whether every owner has given a digest of its replicated state."""
        if self.own_since is None or all(digest for (_, digest), count in self._labels.items() if count):
            return self.own_since is not None
        own = (self._copy(owner, hosts[0]) for owner, hosts in self._of.holders.items())
        return all(copy is not None and copy[0][1] for copy in own)

    @property
    def disputed(self) -> bool:
        """Whether reports differ in what must be the same on all ranks; digests are judged once all owners' own are there."""
        return len(self._labels) > 1 and (self._varies(0) or (self.own_since is not None and self._varies(1)))

    @property
    def differs(self) -> bool:
        """Whether reports differ in what must be the same on all ranks, as far as they are there."""
        return self._varies(0) or self._varies(1)

    def by_label(self, which: int) -> dict[str, list[int]]:
        """Hash of the layout (``which`` 0) or digest of replicated state (1) -> ranks that report it."""
        out: dict[str, set[int]] = {}
        for host, (label, _) in self._whole.items():
            out.setdefault(label[which], set()).update(self._of.held[host])
        for said in self._partly.values():
            for owner, (label, _) in said.items():
                out.setdefault(label[which], set()).add(owner)
        return {value: sorted(owners) for value, owners in sorted(out.items()) if value}

    def _varies(self, which: int) -> bool:
        """Whether more than one value is said, not counting the empty one."""
        return len({label[which] for label, count in self._labels.items() if count and label[which]}) > 1

    def _stretch(self, host: str, start: int, end: int) -> str:
        """The roots of copies that follow each other on a host that has said all; else nothing."""
        text = self._whole[host][1] if host in self._whole else ""
        size = len(text) // len(self._of.held[host])
        return text[start * size : end * size]

    def _copy(self, owner: int, host: str) -> tuple[Label, str] | None:
        """Label and root of a copy."""
        if host not in self._whole:
            return self._partly.get(host, {}).get(owner)
        at = self._of.held[host][owner]
        return self._whole[host][0], self._stretch(host, at, at + 1)

    def _agrees(self, owner: int, host: str) -> bool:
        copy, own = self._copy(owner, host), self._copy(owner, self._of.holders[owner][0])
        return copy is not None and own is not None and copy[1] == own[1]


def _joined(held: Collection[int], roots: Mapping[int, str]) -> Roots:
    """The roots of all that a host holds as one string, if they are of one length."""
    return "".join([roots[owner] for owner in held]) if len({*map(len, roots.values())}) == 1 else roots
