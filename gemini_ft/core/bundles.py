"""The reports of one host on their way to the leader, bundled: one message per version, where each rank and copy had one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gemini_ft.core.effects import Completed, Copies
from gemini_ft.core.rounds import Pair
from gemini_ft.core.versions import Version

_REMEMBERED = 8  # versions; more are never under way at once


class Bundles:
    """Gathers what a host has to report until it is all there.

    Waiting costs nothing but time: nothing is committed before the last copy is reported, and whatever is lost on the way is repeated
    from the slots (`gemini_ft.core.protocol.Host.reports`). How long to wait for copies that are late is for the caller to say.

    Args:
        host: whose reports.
        holders: owner -> hosts, the owner's own first.
    """

    def __init__(self, host: str, holders: Mapping[int, tuple[str, ...]]) -> None:
        self._host = host
        self._held = {owner for owner, hosts in holders.items() if host in hosts}
        self._excluded: set[int] = set()  # owners whose copies here are not waited for
        self._said: dict[Version, set[int]] = {}
        self._waiting: dict[Version, list[Completed]] = {}

    def exclude(self, pairs: Iterable[Pair]) -> None:
        """Takes note of all holders that do not count now."""
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
        return [Copies(self._host, version, layout, digest, roots) for (version, layout, digest), roots in out.items()]

    @property
    def waiting(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Begins anew, as the leader is reached anew and everything undecided is said again."""
        self._said.clear()
        self._waiting.clear()
