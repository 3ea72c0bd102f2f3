"""The leader's ledger in its plainest form, which walks over all ranks at every report: by it the one that counts is judged.

It says in a few lines of set arithmetic what commits, when holders are left out, and when they are back. Decisions are those of the
real one, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gemini_ft.core.decisions import Abort, Cadence, Commit, Decision, Fatal, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import Completed, Report, Skipped
from gemini_ft.core.protocol import NO_ROOTS
from gemini_ft.core.versions import Version

Pair = tuple[int, str]  # (owner, holding host)


@dataclass
class _Round:
    acks: dict[Pair, Completed] = field(default_factory=dict)
    own_copies_since: float | None = None  # when the last owner's own copy was complete


class ReferenceLedger:
    """Collects reports, decides commits. ``holders``: owner -> hosts, the owner's own first."""

    def __init__(
        self,
        holders: Mapping[int, tuple[str, ...]],
        committed: Version | None,
        replica_timeout: float,
        cadence: Cadence | None = None,
    ) -> None:
        self.holders = dict(holders)
        self.committed = committed
        self.roots: dict[int, str] = {}  # of the committed version, where this ledger has seen it come about
        self.epoch = 0
        self.excluded: set[Pair] = set()
        self.uploading: Version | None = None
        self.upload_error = ""  # of the last upload that is over, or could not begin
        self.obstacle = ""  # why no upload may begin now
        self._held_back: Version | None = None  # was due meanwhile
        self._timeout = replica_timeout
        self._cadence = cadence
        self._rounds: dict[Version, _Round] = {}
        self.aborted: dict[Version, str] = {}  # above the committed one -> reason
        self._passed: dict[int, Version] = {}  # owner -> newest version it has spoken of
        self._finished: set[int] = set()
        self.agreed: Version | None = None
        self._has_diverged = False
        self._records: dict[int, str] = {}

    # -- reports

    def report(self, report: Report, now: float) -> list[Decision]:
        """Takes in a host's reports, in the order in which they were made. Old news changes nothing."""
        if self.committed is not None and report.version <= self.committed:
            return self._readmit(self._caught_up(report))
        if isinstance(report, Skipped):
            decisions = self._abort(report.version, f"rank {report.owner}: {report.reason}")
            return decisions + self._overtaken(report.owner, report.version)
        if report.host not in self.holders.get(report.owner, ()):
            return []
        if report.version in self.aborted:  # its host was away when that was decided; replicas go with the owner's next version
            return [Abort(report.version, self.aborted[report.version])] if self._is_own(report) else []
        current = self._rounds.setdefault(report.version, _Round())
        current.acks[report.owner, report.host] = report
        decisions = self._readmit(_agreeing(self.holders, current.acks))
        if self._is_own(report):
            decisions += self._overtaken(report.owner, report.version)
        return decisions + self._judge(report.version, current, now)

    def finish(self, owner: int) -> list[Decision]:
        """Takes note that an owner has finished: it has no snapshot but those that it has completed."""
        self._finished.add(owner)
        return [decision for version in sorted(self._rounds) for decision in self._judge_passed(version)]

    def tick(self, now: float, absent: Collection[str] = ()) -> list[Decision]:
        """Leaves out holders that keep the others waiting; the owner's own copy always counts.

        Args:
            now: seconds of a monotonic clock.
            absent: hosts of which nothing is heard. An owner's own copy there may be lost: then its replicas are still waited for, and
                what was committed before stays where it is.
        """
        for version, current in sorted(self._rounds.items()):
            if current.own_copies_since is None or now - current.own_copies_since < self._timeout:
                continue
            missing = self._expected() - _agreeing(self.holders, current.acks)
            late = frozenset((owner, host) for owner, host in missing if self.holders[owner][0] not in absent)
            if not late and missing:
                continue
            self.excluded |= late
            return [*([self._epoch(late)] if late else []), *self._try_commit(version, now)]
        return []

    def rejoin(self, committed: Version | None, now: float = 0.0, roots: Mapping[int, str] = NO_ROOTS) -> list[Decision]:
        """Takes in a host that connects for the first time, or again: either side may have missed the newest decisions.

        Comes before that host's repeated reports. ``roots``: of what is held there of ``committed`` (`protocol.Host.heard_roots`).
        """
        before, commits = self.committed, list[Decision]()
        newest = max((version for version in (committed, before) if version is not None), default=None)
        if newest is not None and newest != before:
            self._close(newest)  # our own host may not know it either, after a restart of its agent
        lacks = committed == newest and any(not root and owner in self.roots for owner, root in roots.items())
        if committed == newest:
            self.roots = {owner: root for owner, root in roots.items() if root} | self.roots
        if newest is not None and (lacks or not committed == before == newest):
            commits.append(Commit(version=newest, freeze=False, digest_at=self._digest_at(newest, now), roots=self.roots))
        return commits + [Abort(version, reason) for version, reason in sorted(self.aborted.items())]

    # -- uploads

    def uploaded(self, owner: int, version: Version, record: str) -> list[Decision]:
        """Takes note that ``owner``'s shard is in storage; ``record`` is the manifest's record of it."""
        if version != self.uploading or self._records.keys() == self.holders.keys():  # a host that connects again repeats what it said
            return []
        self._records[owner] = record
        if self._records.keys() != self.holders.keys():
            return []
        return [WriteManifest(version, dict(self._records))]

    def upload_over(self, version: Version, error: str = "") -> list[Decision]:
        """Takes note that the manifest is written, or a shard's upload has failed for good."""
        if version != self.uploading:
            return []
        self.uploading = None
        self.upload_error = error
        return [Thaw(version, error)]

    def unobstructed(self, now: float) -> list[Decision]:
        """Allows uploads again: with the version that was due meanwhile, where nothing newer is committed."""
        self.obstacle = ""
        version, self._held_back = self._held_back, None
        if version is None or version != self.committed or self.uploading is not None:
            return []
        self._begin(version, now)
        return [Commit(version=version, freeze=True, digest_at=self._digest_at(version, now), roots=self.roots)]

    def upload_last(self) -> list[Decision]:
        """Uploads the committed version once more, as the job has finished and its last upload has failed."""
        if self.committed is None or self.uploading is not None or not self.upload_error or self.obstacle or self._has_diverged:
            return []
        self.uploading, self._records = self.committed, {}
        return [Commit(version=self.committed, freeze=True)]

    # -- inside

    def _expected(self) -> set[Pair]:
        return {(owner, host) for owner, hosts in self.holders.items() for host in hosts} - self.excluded

    def _caught_up(self, report: Report) -> set[Pair]:
        """The holder whose copy of the committed version is reported; an older or a damaged copy is not enough."""
        if isinstance(report, Skipped) or report.version != self.committed:
            return set()
        return {(report.owner, report.host)} if self.roots.get(report.owner, report.root) == report.root else set()

    def _readmit(self, holders: Collection[Pair]) -> list[Decision]:
        """Readmits holders that were left out, once they have the committed version, or will have it."""
        if not (back := self.excluded.intersection(holders)):
            return []
        self.excluded -= back
        return [self._epoch(frozenset())]

    def _epoch(self, newly: frozenset[Pair]) -> Holders:
        self.epoch += 1
        return Holders(epoch=self.epoch, excluded=frozenset(self.excluded), newly=newly)

    def _conflict(self, current: _Round, is_over: bool = False) -> Fatal | None:
        """The ranks that differ by the reports of a round, as a decision. ``is_over``: no further reports count."""
        by_layout = _by_value((ack.layout, ack.owner) for ack in current.acks.values() if ack.layout)
        if len(by_layout) > 1:
            text = "; ".join(f"ranks {ranks} have layout {layout}" for layout, ranks in by_layout.items())
            problem = f"ranks disagree on names, dtypes, shapes or frozenness of the state: {text}; build the same model on every rank"
            return Fatal(error="LayoutMismatchError", text=problem)
        by_digest = _by_value((ack.digest, ack.owner) for ack in current.acks.values() if ack.digest)
        if len(by_digest) > 1 and (is_over or current.own_copies_since is not None):
            most = max(map(len, by_digest.values()))
            usual = [ranks for ranks in by_digest.values() if len(ranks) == most]
            odd = sorted(rank for ranks in by_digest.values() for rank in ranks if ranks not in usual or len(usual) > 1)
            return Fatal(error="ReplicaDivergedError", text="", ranks=tuple(odd), agreed=self.agreed)
        return None

    def _try_commit(self, version: Version, now: float) -> list[Decision]:
        current = self._rounds.get(version)
        if (
            self._has_diverged
            or current is None
            or current.own_copies_since is None
            or not self._expected() <= _agreeing(self.holders, current.acks)
        ):
            return []
        self._close(version)
        self.roots = {owner: root for owner, hosts in self.holders.items() if (root := current.acks[owner, hosts[0]].root)}
        if all(current.acks[owner, hosts[0]].digest for owner, hosts in self.holders.items()):
            self.agreed = version
        freeze = self._freeze(version, current, now)
        return [Commit(version=version, freeze=freeze, digest_at=self._digest_at(version, now), roots=self.roots)]

    def _digest_at(self, version: Version, now: float) -> int | None:
        return self._cadence.next_iteration(version.iteration, now) if self._cadence else None

    def _freeze(self, version: Version, current: _Round, now: float) -> bool:
        cadence = self._cadence
        if cadence is None or self.uploading is not None or not cadence.due(version.iteration, now):
            return False
        if not all(current.acks[owner, hosts[0]].digest for owner, hosts in self.holders.items()):
            return False  # the ranks did not know yet that this one may be uploaded; they do after this commit
        if self.obstacle:
            self._held_back, self.upload_error = version, self.obstacle
            return False
        self._begin(version, now)
        return True

    def _begin(self, version: Version, now: float) -> None:
        if self._cadence is not None:
            self._cadence.last_iteration, self._cadence.last_time = version.iteration, now
        self.uploading, self._records = version, {}

    def _abort(self, version: Version, reason: str) -> list[Decision]:
        current = self._rounds.pop(version, None)
        if version in self.aborted:
            return []
        self.aborted[version] = reason
        conflict = self._conflict(current, is_over=True) if current is not None and not self._has_diverged else None
        self._has_diverged = self._has_diverged or (conflict is not None and conflict.error == "ReplicaDivergedError")
        return [Abort(version, reason), *([conflict] if conflict is not None else [])]

    def _is_own(self, report: Completed) -> bool:
        return report.host == self.holders[report.owner][0]

    def _overtaken(self, owner: int, version: Version) -> list[Decision]:
        """Aborts the versions that an owner has gone past: what it has not completed by now, it never will."""
        self._passed[owner] = max(version, self._passed.get(owner, version))
        return [d for older in sorted(self._rounds) if older < version for d in self._judge_passed(older)]

    def _judge_passed(self, version: Version) -> list[Decision]:
        acks = self._rounds[version].acks
        for owner in sorted(self._passed.keys() | self._finished):
            at, has_finished = self._passed.get(owner), owner in self._finished
            if (has_finished or (at is not None and at > version)) and (owner, self.holders[owner][0]) not in acks:
                return self._abort(version, f"rank {owner} {'has ended' if has_finished else f'has gone on to {at}'} without it")
        return []

    def _judge(self, version: Version, current: _Round, now: float) -> list[Decision]:
        """Aborts, waits or commits."""
        if gone := self._judge_passed(version):
            return gone
        if current.own_copies_since is None and all((o, hosts[0]) in current.acks for o, hosts in self.holders.items()):
            current.own_copies_since = now
        if self._conflict(current):
            return self._abort(version, "the ranks disagree")
        return self._try_commit(version, now)

    def _close(self, version: Version) -> None:
        self.committed, self.roots = version, {}
        self._rounds = {v: r for v, r in self._rounds.items() if v > version}
        self.aborted = {v: reason for v, reason in self.aborted.items() if v > version}


def _agreeing(holders: Mapping[int, tuple[str, ...]], acks: Mapping[Pair, Completed]) -> set[Pair]:
    """The holders whose copies have the root of the owner's own; a copy with another one is damaged, and does not count."""
    own = {owner: acks[owner, hosts[0]].root for owner, hosts in holders.items() if (owner, hosts[0]) in acks}
    return {pair for pair, ack in acks.items() if ack.root == own.get(pair[0])}


def _by_value(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    out: dict[str, set[int]] = {}
    for value, owner in pairs:
        out.setdefault(value, set()).add(owner)
    return {value: sorted(owners) for value, owners in sorted(out.items())}
