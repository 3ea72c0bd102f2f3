"""A collector's part between its hosts and the leader: their copies go up in one message, and decisions down to those that are meant. Pure.

The reports of one host are bundled before that (`Bundles`): one message per version, where each rank and copy had one.

Nothing of a host goes up before its greeting has, on the present connection to the leader. Nothing goes down to a host before the leader
has admitted that greeting: what was sent earlier is for the host as it was before, perhaps another agent, with other copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.rounds import Pair
from gemini_ft.core.versions import Version

_REMEMBERED = 8  # versions; more are never under way at once


class Bundles:
    """Gathers what one host has to report until it is all there.

    Waiting costs nothing but time: nothing is committed before the last copy is reported, and whatever is lost on the way is repeated
    from the slots (`gemini_ft.core.protocol.Host.reports`). How long to wait for copies that are late is for the caller to say.

    ``holders``: owner -> hosts, the owner's own first.
    """

    def __init__(self, host: str, holders: Mapping[int, tuple[str, ...]]) -> None:
        self._host = host
        self._held = {owner for owner, hosts in holders.items() if host in hosts}
        self._excluded: set[int] = set()  # owners whose copies here are not waited for
        self._said: dict[Version, set[int]] = {}
        self._waiting: dict[Version, list[Completed]] = {}

    def exclude(self, pairs: Iterable[Pair]) -> None:
        """Replaces the set of holders that are left out."""
        self._excluded = {owner for owner, host in pairs if host == self._host}

    def add(self, report: Completed) -> bool:
        """Takes in a report. Returns whether this host has nothing more to say of its version, so that it is time to send."""
        said = self._said.setdefault(report.version, set())
        said.add(report.owner)
        self._waiting.setdefault(report.version, []).append(report)
        while len(self._said) > _REMEMBERED:
            del self._said[min(self._said)]
        return said >= self._held - self._excluded

    def take(self) -> list[Copies]:
        """Everything that waits, the older versions first: a ledger takes a later one as the end of the earlier ones."""
        out: dict[tuple[Version, str, str], dict[int, str]] = {}
        for version in sorted(self._waiting):
            for report in self._waiting[version]:
                out.setdefault((version, report.layout, report.digest), {})[report.owner] = report.root
        self._waiting.clear()
        return [
            Copies(host=self._host, version=version, layout=layout, digest=digest, roots=roots)
            for (version, layout, digest), roots in out.items()
        ]

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def forget(self) -> None:
        """Begins anew, as the leader is reached anew and everything undecided is said again."""
        self._said.clear()
        self._waiting.clear()


class Gathering:
    """Gathers what a collector's hosts, its own among them, have to report until it is all there; the caller says how long to wait.

    ``holders``: owner -> hosts, the owner's own first.
    """

    def __init__(self, name: str, holders: Mapping[int, tuple[str, ...]]) -> None:
        self._name = name
        self._held: dict[str, set[int]] = {}
        for owner, hosts in holders.items():
            for host in hosts:
                self._held.setdefault(host, set()).add(owner)
        self._excluded: dict[str, set[int]] = {}  # host -> owners whose copies there are not waited for
        self.begin()

    def begin(self) -> None:
        """Begins anew, as the connection to the leader is lost: all hosts must greet again."""
        self.greeted: dict[str, int] = {}  # host -> attempt, of greetings that went up
        self.admitted: set[str] = set()  # of these, those that the leader has admitted
        self._awaited = {self._name}  # hosts whose copies are waited for
        self._said: dict[Version, dict[str, set[int]]] = {}
        self._done: dict[Version, set[str]] = {}  # hosts that have nothing more to say of it
        self._waiting: list[Copies] = []
        self._skips: dict[Version, dict[str, dict[str, list[int]]]] = {}  # reason -> host -> owners; empty: only the first has gone up

    # -- the hosts

    def greet(self, host: str, attempt: int) -> None:
        """Records a host's greeting, which goes up now; all waiting reports must have gone up before."""
        self.greeted[host] = attempt
        self.admitted.discard(host)
        self._awaited.add(host)

    def admit(self, host: str, attempt: int) -> bool:
        """Records the leader's answer; returns whether it answers the host's newest greeting."""
        if self.greeted.get(host) != attempt:
            return False
        self.admitted.add(host)
        return True

    def leave(self, host: str) -> None:
        self.admitted.discard(host)
        self._awaited.discard(host)
        self.greeted.pop(host, None)

    def exclude(self, pairs: Iterable[Pair]) -> None:
        self._excluded = {}
        for owner, host in pairs:
            self._excluded.setdefault(host, set()).add(owner)

    # -- their copies

    def add(self, copies: Copies) -> bool:
        """Takes in what one host reports. Returns whether no host has anything more to say of its version, so that it is time to send."""
        host, version = copies.host, copies.version
        said = self._said.setdefault(version, {}).setdefault(host, set())
        said.update(copies.roots)
        self._waiting.append(copies)
        done = self._done.setdefault(version, set())
        if said >= self._held.get(host, set()) - self._excluded.get(host, set()):
            done.add(host)
        while len(self._said) > _REMEMBERED:
            oldest = min(self._said)
            del self._said[oldest], self._done[oldest]
        return len(done) >= len(self._awaited) and done >= self._awaited

    def skip(self, host: str, skipped: Skipped) -> bool:
        """Takes in that an owner on a host has no snapshot of a version. False: it is the first to say so, and must go up at once.

        That one aborts the version. All others may wait: at such a step nearly every rank says it.
        """
        if skipped.version not in self._skips:
            self._skips[skipped.version] = {}
            while len(self._skips) > _REMEMBERED:
                del self._skips[min(self._skips)]
            return False
        self._skips[skipped.version].setdefault(skipped.reason, {}).setdefault(host, []).append(skipped.owner)
        return True

    @property
    def waiting(self) -> bool:
        return bool(self._waiting) or any(self._skips.values())

    def take(self) -> list[Gathered | Copies | GatheredSkips]:
        """Everything that waits, the older versions first; hosts that have said all they are to hold at once are gathered, others apart."""
        waiting, self._skips = self._skips, {version: {} for version in self._skips}
        skips = [GatheredSkips(version, reason, owners) for version in sorted(waiting) for reason, owners in waiting[version].items()]
        return [*self._take_copies(), *skips]

    def _take_copies(self) -> list[Gathered | Copies]:
        out: list[Gathered | Copies] = []
        times = Counter((copies.host, copies.version) for copies in self._waiting)  # what is said in parts must keep its order
        together: dict[tuple[Version, str, str, int], dict[str, str]] = {}
        for copies in sorted(self._waiting, key=lambda each: each.version):
            sizes = {len(root) for root in copies.roots.values()}
            is_all = copies.roots.keys() == self._held.get(copies.host) and times[copies.host, copies.version] == 1
            if not is_all or len(sizes) != 1 or 0 in sizes:
                out.append(copies)
                continue
            key = (copies.version, copies.layout, copies.digest, sizes.pop())
            if key not in together:
                out.append(Gathered(version=copies.version, layout=copies.layout, digest=copies.digest, roots=together.setdefault(key, {})))
            together[key][copies.host] = "".join([copies.roots[owner] for owner in sorted(copies.roots)])
        self._waiting.clear()
        return out
