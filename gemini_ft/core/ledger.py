"""The leader's book: which version is complete everywhere, and what is uploaded. Pure; time is an argument.

The agent of the host that leads keeps it. Reports may be repeated or come late; a decision, once made, stands.
If that agent restarts, or another host leads, the others repeat their reports and the book is whole again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gemini_ft.core.decisions import Abort, Cadence, Commit, Decision, Fatal, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Report, Skipped
from gemini_ft.core.protocol import NO_ROOTS, note_aborted
from gemini_ft.core.rounds import Holdings, Label, Pair, Roots, Round
from gemini_ft.core.versions import MOST, Incarnation, Version
from gemini_ft.core.words import named
from gemini_ft.errors import printable

_MOST_ROUNDS = 32  # versions under way at a time; an owner has two or three slots, so that an honest job has far fewer
_END = Version(Incarnation(MOST + 1, ""), 0)  # after all versions: an owner that has ended has gone past them
ENDED = "has ended without it"  # of a rank: why a version is aborted


class Ledger:
    """Collects reports, decides commits. ``holders``: owner -> hosts, the owner's own first.

    Hundreds of thousands of copies may be reported per step, so that no report may cost a walk over all ranks (`gemini_ft.core.rounds`).
    """

    def __init__(
        self, holders: Mapping[int, tuple[str, ...]], committed: Version | None, replica_timeout: float, cadence: Cadence | None = None
    ) -> None:
        self.holders = dict(holders)
        self.committed = committed
        self.roots: dict[int, str] = {}  # of the committed version, where this ledger has seen it come about
        self._judged: Version | None = None  # the newest version that was committed by reports made to this ledger
        self._doubtful: set[str] = set()  # hosts with a copy that did not count then
        self.agreed: Version | None = None  # the newest committed version in which all ranks were found to agree, or with which all began
        self.has_diverged = False  # whether they were found to differ: then nothing is committed any more
        self.epoch = 0
        self._holdings = Holdings(self.holders)
        self.excluded = self._holdings.excluded  # one set, which the rounds have as well
        self.uploading: Version | None = None
        self.stored: Version | None = None  # the newest version of which this ledger knows that it is stored
        self.upload_error = ""  # of the last upload that is over, or could not begin
        self.obstacle = ""  # why no upload may begin now
        self._has_uploaded = False  # whether this ledger has begun an upload
        self._held_back: Version | None = None  # was due meanwhile
        self.replica_timeout = replica_timeout
        self._cadence = cadence
        self._joined: set[str] = set()
        self._joined_at: dict[str, Version] = {}  # host -> newest version reported when it joined for the last time, if it matters
        self._newest: Version | None = None  # that was reported
        self._rounds: dict[Version, Round] = {}  # never one that an owner has gone past without its own copy: that is aborted
        self.aborted: dict[Version, str] = {}  # above the committed one -> reason
        self._passed: dict[int, Version] = {}  # owner -> newest version it has spoken of
        self._newest_passed: Version | None = None  # the newest of them
        self._records: dict[int, str] = {}

    @property
    def hosts(self) -> Collection[str]:
        return self._holdings.held.keys()

    def owns(self, host: str, rank: int) -> bool:
        return self.holders.get(rank, ("",))[0] == host

    @property
    def is_under_way(self) -> bool:
        """Whether a version is, of which it is not decided whether it is committed."""
        return bool(self._rounds)

    @property
    def withholding(self) -> list[str]:
        """The hosts that have not reported their own shards of the version under way, without which nothing can be committed."""
        current = next(iter(self._rounds.values()), None)
        lacking = [owner for owner in self.holders if current is not None and not current.has_own(owner)]
        return sorted({self.holders[owner][0] for owner in lacking})

    # -- reports

    def report(self, report: Report | Copies | Gathered | GatheredSkips, now: float) -> list[Decision]:
        """Takes in a host's reports, in the order in which they were made. Old news changes nothing.

        Raises PeerError: roots are not of the copies that a host holds.
        """
        if isinstance(report, Skipped):
            return self._skip(report.version, report.reason, [report.owner])
        if isinstance(report, GatheredSkips):
            return self._skip(report.version, report.reason, [owner for owners in report.owners.values() for owner in owners])
        label, is_over = (report.layout, report.digest), self.committed is not None and report.version <= self.committed
        said: Mapping[str, Roots]
        if isinstance(report, Gathered):
            report.check(self._holdings.held)
            said = report.roots
        else:
            roots = self._holdings.by_owner(report.host, {report.owner: report.root} if isinstance(report, Completed) else report.roots)
            said = {report.host: roots} if roots else {}
        if not isinstance(report, Completed) and not self._is_plain(report.version, label, said, is_over):
            several = report.each(self._holdings.held) if isinstance(report, Gathered) else [report]
            return [decision for copies in several for each in copies.each() for decision in self.report(each, now)]
        if not is_over:
            return self._take(report.version, label, said, now) if said else []
        if (
            not isinstance(report, Completed)
            or report.version != self.committed
            or self.roots.get(report.owner, report.root) != report.root
        ):
            return []  # an older or a damaged copy is not enough to have caught up
        return self._readmit([(report.owner, report.host)])

    def _is_plain(self, version: Version, label: Label, said: Mapping[str, Roots], is_over: bool) -> bool:
        """Whether copies can be taken in together, and nothing is decided otherwise than if they came one by one."""
        if is_over:
            return not self.excluded
        current, newest = self._rounds.get(version), self._newest_passed
        is_plain = current.only_adds(label, said) if current is not None else newest is None or newest <= version
        return is_plain and not any(map(self._holdings.excluded_at.get, said))

    def _take(self, version: Version, label: Label, said: Mapping[str, Roots], now: float) -> list[Decision]:
        """Takes in copies of a version that is not committed."""
        own = [rank for host, roots in said.items() for rank in self._holdings.own.get(host, ()) if isinstance(roots, str) or rank in roots]
        gone: int | None = None
        if version not in self._rounds:
            if version in self.aborted:  # its host was away when that was decided; replicas go with the owner's next version
                return [Abort(version, self.aborted[version])] if own else []
            self._rounds[version] = Round(self._holdings)
            self._newest = max(version, self._newest or version)
            gone = self._gone_past(version, own)
        current = self._rounds[version]
        for host, roots in said.items():
            current.take(host, label, roots, now)
        decisions = [*self._readmit(current.back), *(self._overtaken(own, version) if own else [])]
        if gone is not None:
            return decisions + self._abandon(version, gone)
        if len(self._rounds) > _MOST_ROUNDS:
            return decisions + self._abort(max(self._rounds), f"more than {_MOST_ROUNDS} versions are under way")
        if current.disputed:
            return decisions + self._abort(version, "the ranks disagree")
        return decisions + self._try_commit(version, current, now)

    def _skip(self, version: Version, reason: str, owners: Sequence[int]) -> list[Decision]:
        """Records that owners have no snapshot of a version."""
        if not owners or (self.committed is not None and version <= self.committed):
            return []
        return [*self._abort(version, f"rank {owners[0]}: {printable(reason)}"), *self._overtaken(owners, version)]

    def finish(self, owner: int) -> list[Decision]:
        """Records that an owner has finished or is gone: what it has not completed it never will. Others may go on for a while."""
        return self._overtaken([owner], _END)

    def tick(self, now: float, absent: Collection[str] = ()) -> list[Decision]:
        """Leaves out holders that keep the others waiting; the owner's own copy always counts.

        ``absent``: hosts of which nothing is heard. An owner's own copy there may be lost: then its replicas are still waited for, and what
        was committed before stays where it is.
        """
        silent = frozenset(absent)
        for version, current in sorted(self._rounds.items()):
            if current.own_since is None or now - current.own_since < self.replica_timeout:
                continue
            missing = list(current.missing())
            late = frozenset((owner, host) for owner, host in missing if self.holders[owner][0] not in silent)
            if not late and missing:
                continue
            self._holdings.exclude(late)
            for each in self._rounds.values():
                each.exclude(late)
            return [*([self._epoch(late)] if late else []), *self._try_commit(version, current, now)]
        return []

    def rejoin(
        self, committed: Version | None, now: float = 0.0, roots: Mapping[int, str] = NO_ROOTS, host: str = ""
    ) -> list[Commit | Abort]:
        """Takes in a host that connects for the first time, or again: either side may have missed the newest decisions.

        Comes before that host's repeated reports. ``roots``: of the copies of ``committed`` there (`protocol.Host.heard_roots`).
        The decisions are for that host; a commit that is new to this ledger is for all.
        """
        self._joined.add(host)
        if self._newest is not None:
            self._joined_at[host] = self._newest
        before, commits = self.committed, list[Commit]()
        newest = max((version for version in (committed, before) if version is not None), default=None)
        if newest is not None and newest != before:
            self._close(newest)  # our own host may not know it either, after a restart of its agent
        lacks = committed == newest and any(not root and owner in self.roots for owner, root in roots.items())
        if committed == newest:
            for owner, root in roots.items():
                if root:
                    self.roots.setdefault(owner, root)
        if newest is not None and (lacks or not committed == before == newest):
            commits.append(Commit(version=newest, freeze=False, digest_at=self._digest_at(newest, now), roots=self.roots))
        return [*commits, *(Abort(version, reason) for version, reason in sorted(self.aborted.items()))]

    def addressed(self, commit: Commit, host: str) -> Commit:
        """A commit as one host must hear it, so that its size does not grow with the job.

        A host whose copies all agreed, as it has reported them itself since it joined, does not hear their roots again. One that
        joined later may be an agent that has lost its memory, and one that was left out may have a damaged copy.
        """
        if host in self._joined and host not in self.apart(commit):
            return replace(commit, roots={}, agreed=True)
        return replace(commit, roots={owner: commit.roots[owner] for owner in self._holdings.held.get(host, ()) if owner in commit.roots})

    def apart(self, commit: Commit) -> Collection[str]:
        """The hosts that must hear the roots of a commit, among those that have joined."""
        return self._doubtful | self._joined_at.keys() if commit.version == self._judged else self._holdings.held.keys()

    # -- uploads

    def uploaded(self, owner: int, version: Version, record: str) -> list[Decision]:
        """Records that ``owner``'s shard is in storage; ``record`` is the manifest's record of it."""
        if version != self.uploading or self._records.keys() == self.holders.keys():  # a host that connects again repeats what it said
            return []
        self._records[owner] = record
        if self._records.keys() != self.holders.keys():
            return []
        return [WriteManifest(version, dict(self._records))]

    def upload_over(self, version: Version, error: str = "", unclear: bool = False) -> list[Decision]:
        """Records that the manifest is written, or a shard's upload has failed for good; ``unclear``: see `Thaw`."""
        if version != self.uploading:
            return []
        self.uploading = None
        self.upload_error = error
        self.stored = self.stored if error else version
        return [Thaw(version, error, unclear)]

    def miss(self, hosts: Collection[str]) -> list[Decision]:
        """Ends an upload that waits for a shard of one of ``hosts``, which are lost."""
        lost = set(hosts)
        for owner, (host, *_) in self.holders.items() if lost and self.uploading is not None else ():
            if host in lost and owner not in self._records:
                assert self.uploading is not None
                return self.upload_over(self.uploading, f"host {host}, which has rank {owner}'s shard, was lost during the upload")
        return []

    def unobstructed(self, now: float) -> list[Decision]:
        """Allows uploads again: with the version that was due meanwhile, where nothing newer is committed."""
        self.obstacle = ""
        version, self._held_back = self._held_back, None
        if version is None or version != self.committed or self.uploading is not None:
            return []
        self._begin(version, now)
        return [Commit(version=version, freeze=True, digest_at=self._digest_at(version, now), roots=self.roots)]

    def upload_soon(self, now: float) -> list[Decision]:
        """Makes the next version due for storage; the ranks hear that from now on they must add digests."""
        if self._cadence is None:
            return []
        self._cadence.hurried = True
        return (
            [Commit(version=self.committed, freeze=False, digest_at=self._digest_at(self.committed, now), roots=self.roots)]
            if self.committed is not None
            else []
        )

    @property
    def unstored(self) -> str:
        """Why storage lacks what it must have when the job has finished; empty: it has that."""
        if self.committed is None or self.committed == self.stored:
            return ""
        is_due = self._cadence is not None and self._cadence.at_end
        if is_due and self.has_diverged:
            return f"ranks differ in what they must hold alike, perhaps in {self.committed} already"
        return self.upload_error or (is_due and (self.obstacle or f"the upload of {self.committed} has not ended")) or ""

    def upload_last(self) -> list[Decision]:
        """Uploads the committed version, as the job has finished, unless it is stored. Its ranks were not compared by digests.

        Not if ranks were found to differ later: it may hold what one rank alone computed.
        """
        if self.committed is None or self.uploading is not None or not self.unstored or self.obstacle or self.has_diverged:
            return []
        self.uploading, self._records, self._has_uploaded = self.committed, {}, True
        return [Commit(version=self.committed, freeze=True)]

    def note_unstored(self, error: str) -> None:
        """Records that the last upload under the ledger before this one has failed."""
        if not self._has_uploaded:
            self.upload_error = error

    def is_overdue(self, now: float) -> bool:
        """Whether the committed version should have been uploaded by now, or one before it."""
        return self._cadence is not None and self.committed is not None and self._cadence.due(self.committed.iteration, now)

    # -- inside

    def _readmit(self, holders: Collection[Pair]) -> list[Decision]:
        """Readmits holders that were left out, once they have the committed version, or will have it."""
        if not (back := self.excluded.intersection(holders)):
            return []
        self._holdings.readmit(back)
        for each in self._rounds.values():
            each.readmit(back)
        return [self._epoch(frozenset())]

    def _epoch(self, newly: frozenset[Pair]) -> Holders:
        self.epoch += 1
        return Holders(epoch=self.epoch, excluded=frozenset(self.excluded), newly=newly)

    def _conflict(self, current: Round) -> Fatal:
        if len(by_layout := current.by_label(0)) > 1:
            text = "; ".join(f"ranks {ranks} have layout {layout}" for layout, ranks in by_layout.items())
            problem = f"ranks disagree on names, dtypes, shapes or frozenness of the state: {text}; build the same model on every rank"
            return Fatal(error="LayoutMismatchError", text=problem)
        sides = sorted(current.by_label(1).items(), key=lambda side: (-len(side[1]), side[1]))
        is_clear = len(sides[0][1]) > len(sides[1][1])
        odd = sorted(rank for _, ranks in sides[is_clear:] for rank in ranks)
        names = named([f"rank {rank} (host {self.holders[rank][0]})" for rank in odd])
        others = f"the largest group of ranks holds something else than {names}"
        verdict = others if is_clear else f"it cannot be told which of {names} is wrong"
        self.has_diverged = True
        return Fatal(
            error="ReplicaDivergedError",
            text="state that must be the same on all ranks differs: "
            + "; ".join(f"ranks {ranks} have {digest}" for digest, ranks in sides)
            + f"; {verdict}. What was committed after {self.agreed or 'the beginning'}, when they agreed, is resumed only if there is "
            "nothing else. Look for updates that depend on the rank, for gradients that were not reduced, and for faulty memory.",
            ranks=tuple(odd),
            agreed=self.agreed,
        )

    def _try_commit(self, version: Version, current: Round, now: float) -> list[Decision]:
        if not current.complete or self.has_diverged:
            return []
        roots, compared = current.roots, current.compared
        self._close(version)
        self._judged, self._doubtful = version, {host for _, host in self.excluded}
        self._joined_at = {host: newest for host, newest in self._joined_at.items() if newest >= version}
        self.roots = roots
        self.agreed = version if compared else self.agreed
        freeze, digest_at = self._freeze(version, compared, now), self._digest_at(version, now)
        return [Commit(version=version, freeze=freeze, digest_at=digest_at, roots=roots, compared=compared)]

    def _digest_at(self, version: Version, now: float) -> int | None:
        return self._cadence.next_iteration(version.iteration, now) if self._cadence else None

    def _freeze(self, version: Version, compared: bool, now: float) -> bool:
        cadence = self._cadence
        # Where they are not compared, the ranks did not know yet that this one may be uploaded; they do after this commit.
        if cadence is None or self.uploading is not None or not cadence.due(version.iteration, now) or not compared:
            return False
        if self.obstacle:
            self._held_back, self.upload_error = version, self.obstacle
            return False
        self._begin(version, now)
        return True

    def _begin(self, version: Version, now: float) -> None:
        if self._cadence is not None:
            self._cadence.last_iteration, self._cadence.last_time, self._cadence.hurried = version.iteration, now, False
        self.uploading, self._records, self._has_uploaded = version, {}, True

    def _abort(self, version: Version, reason: str) -> list[Decision]:
        """Aborts a version; what its reports have shown to differ by then is told, as no further ones will count."""
        current = self._rounds.pop(version, None)
        if version in self.aborted:
            return []
        note_aborted(self.aborted, version, reason)
        is_news = current is not None and current.differs and not self.has_diverged
        return [Abort(version, reason), *([self._conflict(current)] if current is not None and is_news else [])]

    def _overtaken(self, owners: Sequence[int], version: Version) -> list[Decision]:
        """Aborts the versions that owners have gone past: what they have not completed by now, they never will."""
        if self._newest_passed is None or version >= self._newest_passed:
            self._newest_passed = version
            self._passed.update(dict.fromkeys(owners, version))
        else:
            self._passed.update({owner: max(version, self._passed.get(owner, version)) for owner in owners})
        older = sorted(each for each in self._rounds if each < version) if self._rounds.keys() != {version} else ()
        left = [(each, owner) for owner in owners for each in older if not self._rounds[each].has_own(owner)]
        return [decision for each, owner in left for decision in self._abandon(each, owner)]

    def _gone_past(self, version: Version, but: Collection[int]) -> int | None:
        """An owner that had gone past a version before anybody reported it; not those whose own copy is there."""
        if self._newest_passed is None or self._newest_passed <= version:
            return None
        return min((owner for owner, at in self._passed.items() if at > version and owner not in but), default=None)

    def _abandon(self, version: Version, owner: int) -> list[Decision]:
        at = self._passed[owner]
        return self._abort(version, f"rank {owner} {ENDED if at == _END else f'has gone on to {at} without it'}")

    def _close(self, version: Version) -> None:
        self.committed, self.roots = version, {}
        self._rounds = {v: r for v, r in self._rounds.items() if v > version}
        self.aborted = {v: reason for v, reason in self.aborted.items() if v > version}
