"""The copies of one version while nothing is out of the ordinary: kept as they came, and compared once all are there. Pure.

A ledger that counts each copy spends a second on the hundred thousands of a large job. Here the copies of a host are one string, and two
holders of the same shards are compared by one comparison of two stretches of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gemini_ft.core.effects import Completed, Copies, Gathered
from gemini_ft.core.versions import Version

_Stretch = tuple[str, int, int, str, int, int]  # holder, from and to (copies); home of the same shards, from and to


class Folded:
    """Reports of which each is the first about its copies, all of one version, with one layout and one digest.

    Args:
        holders: owner -> hosts, the owner's own first; never changed.
    """

    def __init__(self, holders: Mapping[int, tuple[str, ...]]) -> None:
        self._holders = holders
        self.held: dict[str, list[int]] = {}  # host -> owners of the shards that it holds, in their order
        for owner in sorted(holders):
            for host in holders[owner]:
                self.held.setdefault(host, []).append(owner)
        self._stretches: list[_Stretch] | None = None  # that must be equal; made when they are needed first
        self._forget()

    def _forget(self) -> None:
        self.version: Version | None = None  # None: there is nothing
        self.since = 0.0  # when the first report came
        self.label = ("", "")  # layout, digest
        self._size = 0  # characters of a root
        self._whole: dict[str, str] = {}  # host -> the roots of all that it holds, in the order of owners
        self._partly: dict[str, dict[int, str]] = {}  # the same of hosts that have not said all
        self._came: list[tuple[Completed | Copies | Gathered, float]] = []

    def take(self, report: Completed | Copies | Gathered, now: float) -> bool:
        """Takes in a report. False: it is not of this kind, and nothing has changed."""
        version, label = (self.version, self.label) if self._came else (report.version, (report.layout, report.digest))
        if report.version != version or (report.layout, report.digest) != label:
            return False
        size = self._size or _size_of_root(report, self.held)
        if not size or not (self._fits_whole(report, size) if isinstance(report, Gathered) else self._fits(report, size)):
            return False
        if not self._came:
            self.version, self.label, self.since, self._size = version, label, now, size
        self._came.append((report, now))
        if isinstance(report, Gathered):
            self._whole.update(report.roots)
            return True
        said = self._partly.setdefault(report.host, {})
        said.update({report.owner: report.root} if isinstance(report, Completed) else report.roots)
        if len(said) == len(held := self.held[report.host]):
            del self._partly[report.host]
            self._whole[report.host] = "".join([said[owner] for owner in held])
        return True

    def _fits_whole(self, report: Gathered, size: int) -> bool:
        whole, partly, held = self._whole, self._partly, self.held
        return all(
            host in held and host not in whole and host not in partly and len(text) == size * len(held[host])
            for host, text in report.roots.items()
        )

    def _fits(self, report: Completed | Copies, size: int) -> bool:
        roots = {report.owner: report.root} if isinstance(report, Completed) else report.roots
        said = self._partly.get(report.host, {})
        return report.host not in self._whole and all(
            len(root) == size and owner not in said and report.host in self._holders.get(owner, ()) for owner, root in roots.items()
        )

    @property
    def complete(self) -> bool:
        """Whether every host has reported all that it holds."""
        return len(self._whole) == len(self.held)

    @property
    def agrees(self) -> bool:
        """Whether every copy has the root of the owner's own, if they are ``complete``."""
        if self._stretches is None:
            self._stretches = list(_stretches(self._holders, self.held))
        size, texts = self._size, self._whole
        return all(
            texts[holder][start * size : end * size] == texts[home][first * size : last * size]
            for holder, start, end, home, first, last in self._stretches
        )

    def close(self) -> dict[int, str]:
        """Owner -> root of its own copy, of all; forgets everything."""
        size, roots = self._size, dict[int, str]()
        for host, text in self._whole.items():
            for at, owner in enumerate(self.held[host]):
                if self._holders[owner][0] == host:
                    roots[owner] = text[at * size : (at + 1) * size]
        self._forget()
        return roots

    def unfold(self) -> list[tuple[Completed | Copies, float]]:
        """Everything that was taken, in the order in which it came, with the times at which it did; forgets it."""
        out: list[tuple[Completed | Copies, float]] = []
        for report, then in self._came:
            out += [(each, then) for each in (report.each(self.held) if isinstance(report, Gathered) else [report])]
        self._forget()
        return out


def _size_of_root(report: Completed | Copies | Gathered, held: Mapping[str, list[int]]) -> int:
    """Characters of the first root in a report; 0: it has none."""
    if isinstance(report, Completed):
        return len(report.root)
    if isinstance(report, Copies):
        return len(next(iter(report.roots.values()), ""))
    host, text = next(iter(report.roots.items()), ("", ""))
    return len(text) // len(held[host]) if host in held else 0


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
