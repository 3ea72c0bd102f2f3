"""One version on its way to its commit, as the leader's ledger counts it: constant work per report, whatever the size of the job. Pure.

A ledger that counts each copy, as `Round` does, spends a second on the hundred thousands of a large job. So while little is out of the
ordinary, reports are kept as they came, and compared once all are there (`FoldedRound`): the copies of a host are one string, and two
holders of the same shards are compared by one comparison of two stretches of text. Copies that are late, differ, or do not count are looked
at one by one, and only these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from gemini_ft.core.effects import Completed, Copies, Gathered
from gemini_ft.core.versions import Version

Pair = tuple[int, str]  # (owner, holding host)
Label = tuple[str, str]  # hash of the layout, digest of replicated state; either may be empty
_Stretch = tuple[str, int, int, str, int, int]  # holder, from and to (copies); home of the same shards, from and to
_Roots = str | Mapping[int, str]  # of all that a host holds, in the order of owners; or of some owners' copies


class Round:
    """The reports of one version.

    A copy agrees when its root is that of the owner's own copy; a copy with another root is damaged, and does not count.

    Args:
        holders: owner -> hosts, the owner's own first; never changed.
        pairs: the number of all pairs of an owner and a holder.
        excluded: the pairs among them that do not count; the ledger changes it before it calls `exclude` or `readmit`.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]], pairs: int, excluded: Set[Pair]) -> None:
        self._holders, self._excluded = holders, excluded
        self.own: dict[int, str] = {}  # owner -> root of its own copy
        self.own_since: float | None = None  # when the last owner's own copy was complete
        self.back: set[Pair] = set()  # pairs that do not count, and agree
        self._lacking = pairs - len(excluded)  # pairs that count and do not agree yet
        self._roots: dict[str, dict[int, str]] = {}  # host -> owner -> root of the copy there, as reported last
        self._labels: dict[str, dict[int, Label]] = {}  # the same for what came with the root
        self._layouts, self._digests = Counter[str](), Counter[str]()  # value -> reports that say so
        self._own_digests = 0  # owners' own copies with a digest

    def add(self, owner: int, host: str, label: Label, root: str, now: float) -> None:
        """Takes in the report of one of the pairs; what it has reported before is forgotten."""
        hosts = self._holders[owner]
        is_own = host == hosts[0]
        affected = hosts if is_own else (host,)
        before = [self._agrees(owner, holder) for holder in affected]
        labels = self._labels.setdefault(host, {})
        if owner in labels:
            self._count(labels[owner], is_own, -1)
        labels[owner] = label
        self._count(label, is_own, 1)
        self._roots.setdefault(host, {})[owner] = root
        if is_own:
            self.own[owner] = root
            if self.own_since is None and len(self.own) == len(self._holders):
                self.own_since = now
        for holder, agreed in zip(affected, before, strict=True):
            if agreed != (agrees := self._agrees(owner, holder)):
                if (pair := (owner, holder)) in self._excluded:
                    (self.back.add if agrees else self.back.discard)(pair)
                else:
                    self._lacking += -1 if agrees else 1

    def exclude(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            if self._agrees(*pair):
                self.back.add(pair)
            else:
                self._lacking -= 1

    def readmit(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
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
        """Whether reports differ in what must be the same on all ranks; digests are judged once all owners' own are there."""
        return self.differs if self.own_since is not None else _varies(self._layouts)

    @property
    def differs(self) -> bool:
        """Whether reports differ in what must be the same on all ranks, as far as they are there."""
        return _varies(self._layouts) or _varies(self._digests)

    def by_label(self, which: int) -> dict[str, list[int]]:
        """Hash of the layout (``which`` 0) or digest of replicated state (1) -> ranks that report it."""
        out: dict[str, set[int]] = {}
        for labels in self._labels.values():
            for owner, label in labels.items():
                if label[which]:
                    out.setdefault(label[which], set()).add(owner)
        return {value: sorted(owners) for value, owners in sorted(out.items())}

    def _agrees(self, owner: int, host: str) -> bool:
        root = self._roots[host].get(owner) if host in self._roots else None
        return root is not None and self.own.get(owner) == root

    def _count(self, label: Label, is_own: bool, sign: int) -> None:
        layout, digest = label
        self._layouts[layout] += sign
        self._digests[digest] += sign
        self._own_digests += sign if is_own and digest else 0


def _varies(said: Counter[str]) -> bool:
    """Whether more than one value is said, not counting the empty one."""
    return sum(count > 0 for value, count in said.items() if value) > 1


class FoldedRound:
    """Reports of one version, with one layout and one digest, that say of no copy two different things.

    ``holders``: owner -> hosts, the owner's own first; never changed. ``excluded``: the pairs that do not count, as of `Round`.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]], excluded: Set[Pair]) -> None:
        self._holders, self._excluded = holders, excluded
        self.held: dict[str, list[int]] = {}  # host -> owners of the shards that it holds, in their order
        self._own: dict[str, list[int]] = {}  # the same of those whose own copy it is
        for owner in sorted(holders):
            for host in holders[owner]:
                self.held.setdefault(host, []).append(owner)
            self._own.setdefault(holders[owner][0], []).append(owner)
        self._excluded_at: dict[str, set[Pair]] = {}  # host -> excluded pairs that it is the holder or the home of
        self._stretches: list[_Stretch] | None = None  # that must be equal; made when they are needed first
        self.forget()

    def forget(self) -> None:
        self.version: Version | None = None  # None: there is nothing
        self.own_since: float | None = None  # when the last owner's own copy was complete
        self._label = ("", "")  # layout, digest
        self._size = 0  # characters of a root
        self._whole: dict[str, str] = {}  # host -> the roots of all that it holds, in the order of owners
        self._partly: dict[str, dict[int, str]] = {}  # the same of hosts that have not said all
        self._came: list[tuple[Completed | Copies | Gathered, float]] = []
        self._awaited: set[str] = set()  # hosts that have not said all that counts: before they have, nothing needs to be compared
        self._homes: set[str] = set()  # hosts that have not said all of their own

    # -- the pairs that count

    def exclude(self, pairs: Collection[Pair]) -> None:
        for owner, host in pairs:
            for concerned in (host, self._holders[owner][0]):
                self._excluded_at.setdefault(concerned, set()).add((owner, host))
        self._awaited -= {host for _, host in pairs if self._has_said_all(host)}

    def readmit(self, pairs: Collection[Pair]) -> None:
        for owner, host in pairs:
            for concerned in (host, self._holders[owner][0]):
                self._excluded_at.get(concerned, set()).discard((owner, host))
        if self.version is not None:
            self._awaited |= {host for _, host in pairs if not self._has_said_all(host)}

    # -- reports

    def take(self, report: Completed | Copies | Gathered, now: float) -> bool:
        """Takes in a report. False: it is not of this kind, and nothing has changed."""
        label = report.layout, report.digest
        if self.version is not None and (report.version, label) != (self.version, self._label):
            return False
        said: Mapping[str, _Roots]
        if isinstance(report, Gathered):
            said = report.roots
        else:
            said = {report.host: {report.owner: report.root} if isinstance(report, Completed) else report.roots}
        size = self._size or self._size_of_root(said)
        if not size or not all(self._fits(host, roots, size) for host, roots in said.items()):
            return False
        if self.version is None:
            self.version, self._label, self._size = report.version, label, size
            self._homes = set(self._own)
            self._awaited = self.held.keys() - {host for host in self._excluded_at if self._has_said_all(host)}
        if all(self._has_said(host, roots) for host, roots in said.items()):
            return True
        self._came.append((report, now))
        for host, roots in said.items():
            self._put(host, roots)
        if self.own_since is None and not self._homes:
            self.own_since = now
        return True

    def _size_of_root(self, said: Mapping[str, _Roots]) -> int:
        """Characters of the first root in a report; 0: it has none."""
        host, roots = next(iter(said.items()), ("", ""))
        if isinstance(roots, str):
            return len(roots) // len(self.held[host]) if host in self.held else 0
        return len(next(iter(roots.values()), ""))

    def _fits(self, host: str, roots: _Roots, size: int) -> bool:
        """Whether a host can say this, and has not said otherwise before."""
        if not isinstance(roots, str):
            holders = self._holders
            return bool(roots) and all(
                len(root) == size and host in holders.get(owner, ()) and self._root(owner, host) in (None, root)
                for owner, root in roots.items()
            )
        if host not in self.held or len(roots) != size * len(self.held[host]):
            return False
        if host in self._whole:
            return self._whole[host] == roots
        return all(self._piece(roots, owner, host, size) == root for owner, root in self._partly.get(host, {}).items())

    def _has_said(self, host: str, roots: _Roots) -> bool:
        """Whether a host says nothing new: it has spoken of all these copies before, with the same roots (`_fits`)."""
        return host in self._whole or (not isinstance(roots, str) and roots.keys() <= self._partly.get(host, {}).keys())

    def _put(self, host: str, roots: _Roots) -> None:
        if host in self._whole:
            return
        held = self.held[host]
        if not isinstance(roots, str):
            said = self._partly.setdefault(host, {})
            said.update(roots)
            if len(said) < len(held):
                if host in self._homes and all(owner in said for owner in self._own[host]):
                    self._homes.remove(host)
                if host in self._excluded_at and self._has_said_all(host):
                    self._awaited.discard(host)
                return
            roots = "".join([said[owner] for owner in held])
        self._whole[host] = roots
        self._partly.pop(host, None)
        self._homes.discard(host)
        self._awaited.discard(host)

    def _has_said_all(self, host: str) -> bool:
        """Whether nothing is missing there that counts."""
        said = self._partly.get(host, {})
        return host in self._whole or all(owner in said or (owner, host) in self._excluded for owner in self.held[host])

    def _root(self, owner: int, host: str) -> str | None:
        text = self._whole.get(host)
        return self._piece(text, owner, host, self._size) if text is not None else self._partly.get(host, {}).get(owner)

    def _piece(self, text: str, owner: int, host: str, size: int) -> str:
        at = bisect_left(self.held[host], owner) * size
        return text[at : at + size]

    # -- what they come to

    @property
    def complete(self) -> bool:
        return self.own_since is not None and not self._awaited and next(self.missing(), None) is None

    def missing(self) -> Iterator[Pair]:
        if self._stretches is None:
            self._stretches = list(_stretches(self._holders, self.held))
        size, whole = self._size, self._whole
        for holder, start, end, home, first, last in self._stretches:
            theirs = whole.get(holder, "")[start * size : end * size]
            if not theirs or theirs != whole.get(home, "")[first * size : last * size]:
                pairs = ((owner, holder) for owner in self.held[holder][start:end])
                yield from (pair for pair in pairs if pair not in self._excluded and not self._agrees(*pair))

    def _agrees(self, owner: int, host: str) -> bool:
        root = self._root(owner, host)
        return root is not None and root == self._root(owner, self._holders[owner][0])

    def is_back(self, hosts: Iterable[str]) -> bool:
        """Whether a pair that does not count agrees, as far as it is for these hosts to say."""
        return any(self._agrees(*pair) for host in hosts for pair in self._excluded_at.get(host, ()))

    def has_own(self, owner: int) -> bool:
        return owner in self._holders and self._root(owner, self._holders[owner][0]) is not None

    @property
    def compared(self) -> bool:
        return self.own_since is not None and self._label[1] != ""

    @property
    def roots(self) -> dict[int, str]:
        size, roots = self._size, dict[int, str]()
        for host, text in self._whole.items():
            for at, owner in enumerate(self.held[host]):
                if self._holders[owner][0] == host:
                    roots[owner] = text[at * size : (at + 1) * size]
        for host, said in self._partly.items():
            roots |= {owner: root for owner, root in said.items() if self._holders[owner][0] == host}
        return roots

    def unfold(self) -> list[tuple[Completed | Copies, float]]:
        """Everything that was taken, in the order in which it came, with the times at which it did; forgets it."""
        out: list[tuple[Completed | Copies, float]] = []
        for report, then in self._came:
            out += [(each, then) for each in (report.each(self.held) if isinstance(report, Gathered) else [report])]
        self.forget()
        return out


def _stretches(holders: Mapping[int, tuple[str, ...]], held: Mapping[str, list[int]]) -> Iterator[_Stretch]:
    """The longest stretches of shards that follow each other in the order of a holder and in that of their home."""
    place = {owner: at for host, owners in held.items() for at, owner in enumerate(owners) if holders[owner][0] == host}
    for holder, owners in held.items():
        stretch: _Stretch | None = None
        for at, owner in enumerate(owners):
            home, there = holders[owner][0], place[owner]
            if stretch is not None and (stretch[3], stretch[5]) == (home, there):
                stretch = (*stretch[:2], at + 1, home, stretch[4], there + 1)
                continue
            if stretch is not None:
                yield stretch
            stretch = (holder, at, at + 1, home, there, there + 1) if home != holder else None
        if stretch is not None:
            yield stretch
