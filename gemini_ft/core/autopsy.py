"""Judges a job that hangs, from what its ranks have left in shared memory and from the states of their processes. Pure.

Each rank numbers the collectives of each of its process groups, from 1 on. All ranks of a group enter the same ones in the same order, so
that one number is one collective: a rank that has not begun the one in which others wait is why they wait, and where two ranks have begun
different ones under the same number, each waits for something that the other will never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gemini_ft.core.words import NAMED, named, table
from gemini_ft.errors import printable

GROUPS, ENTRIES, TEXT = 11, 12, 64  # groups of a rank, collectives of a group, and bytes of a text that are kept
STACK = 16 * 2**10  # characters of one rank
REPORT = 256 * 2**10  # characters


class Doing(StrEnum):
    """The state of a rank's process; it is the cause of a hang where that rank keeps the others waiting."""

    STOPPED = "stopped"
    LEFT = "left"
    ENDED = "ended"
    SILENT = "silent"
    KERNEL = "kernel"
    ASLEEP = "asleep"
    AT_WORK = "at work"


MISMATCH, NETWORK, UNKNOWN = "mismatch", "network", "unknown"  # further causes
_WHY = {
    Doing.STOPPED: "stopped, by SIGSTOP or a debugger",
    Doing.LEFT: "done: it has left the loop",
    Doing.ENDED: "gone: its process has ended",
    Doing.SILENT: "on a host that does not answer",
    Doing.KERNEL: "stuck in the kernel (state D), in a disk, a file system or a driver",
    Doing.ASLEEP: "asleep outside of all collectives (a lock, a queue, a file: see its stack)",
    Doing.AT_WORK: "at work outside of all collectives (see its stack)",
}


@dataclass(frozen=True, kw_only=True)
class Entered:
    """A collective that a rank has begun."""

    number: int  # in its group, from 1 on
    is_over: bool  # whether it is over on this rank
    mark: int  # a checksum of all that must be the same on all ranks
    text: str  # operation, dtype and shape


@dataclass(frozen=True, kw_only=True)
class GroupTrail:
    """The newest collectives of a process group that a rank has begun."""

    group: str  # name, the same on all ranks
    size: int  # number of ranks; 0: these are transfers between two ranks, whose numbers say nothing about other ranks
    entered: tuple[Entered, ...]  # oldest first, at least one

    @property
    def newest(self) -> Entered:
        return self.entered[-1]

    @property
    def waits_in(self) -> Entered | None:
        """The oldest one that is not over."""
        return next((each for each in self.entered if not each.is_over), None)


@dataclass(frozen=True, kw_only=True)
class RankFound:
    """A rank as its host's agent has found it."""

    rank: int
    host: str
    pid: int = 0
    doing: Doing = Doing.SILENT
    trails: tuple[GroupTrail, ...] | None = None  # by group; None: its collectives are not observed
    stack: str = ""  # of all threads, if they could be had

    def cut(self) -> RankFound:
        """The same within the bounds of what an honest agent sends."""
        trails = {each.group[:TEXT]: each for each in self.trails or () if each.entered}
        cut = [
            replace(each, group=name, entered=tuple(replace(entry, text=entry.text[:TEXT]) for entry in each.entered[-ENTRIES:]))
            for name, each in [*trails.items()][:GROUPS]
        ]
        return replace(self, trails=None if self.trails is None else tuple(cut), stack=self.stack[:STACK])

    def trail(self, group: str) -> GroupTrail | None:
        return next((each for each in self.trails or () if each.group == group), None)

    @property
    def waits(self) -> GroupTrail | None:
        """The first group in which a collective, or a transfer, is not over."""
        return next((each for each in self.trails or () if each.waits_in is not None), None)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The reason, the ranks that are to blame, and a sentence."""

    cause: str  # a `Doing`, or one of the further causes
    ranks: tuple[int, ...]
    text: str


def judge(found: Sequence[RankFound]) -> Verdict:
    """Names the ranks that keep the others waiting; ``found`` has each rank of the job once."""
    absent, is_open = set[int](), any(each.waits is not None and not each.waits.size for each in found)
    groups = _waited_in(found)
    for members in groups.values():
        first = min(trail.waits_in.number for _, trail in members if trail is not None and trail.waits_in is not None)
        absent |= {each.rank for each, trail in members if trail is None or trail.newest.number < first}
        is_open |= len(members) < max(trail.size for _, trail in members if trail is not None)
    lacking = [each for each in found if each.rank in absent]
    for doing in (Doing.STOPPED, Doing.LEFT, Doing.ENDED):
        if guilty := [each for each in (found if doing is Doing.STOPPED else lacking) if each.doing is doing]:
            return _blame(doing, guilty, found)
    if (mismatch := _mismatch(groups, found)) is not None:
        return mismatch
    outside = [each for each in lacking if each.waits is None]
    if not outside and (is_open or not groups):  # it is not known who else is waited for
        outside = [each for each in found if each.waits is None and each.doing not in (Doing.LEFT, Doing.ENDED)]
    for doing in (Doing.SILENT, Doing.KERNEL, Doing.ASLEEP, Doing.AT_WORK):
        is_clear = doing in (Doing.SILENT, Doing.KERNEL)
        if guilty := [each for each in outside if each.doing is doing and (is_clear or each.trails is not None)]:
            return _blame(doing, guilty, found)
    if outside:
        return _verdict(UNKNOWN, outside, f"the collectives of {_names(outside)} are not observed", found)
    if lacking:
        text = "; ".join(f"{_name(each)} waits in {_place(each)}" for each in lacking[:NAMED])
        return _verdict(MISMATCH, lacking, f"ranks wait for each other in different process groups: {text}", found)
    if waiting := [each for each in found if each.waits is not None]:
        text = f"all ranks have entered {_place(waiting[0])}, and the network, or a device, does not carry it out"
        return _verdict(NETWORK, waiting, text, found)
    return _verdict(UNKNOWN, [], "all ranks have left", found)


Members = list[tuple[RankFound, GroupTrail | None]]


def _waited_in(found: Sequence[RankFound]) -> dict[str, Members]:
    """Returns the ranks of each group in a collective of which a rank waits, and their trails there.

    A rank without a trail in a group is known to belong to it only if all ranks do; one that runs and is not observed is left out.
    """
    groups = {}
    for name in dict.fromkeys(trail.group for each in found for trail in each.trails or () if trail.size and trail.waits_in is not None):
        trails = [(each, each.trail(name)) for each in found]
        is_for_all = any(trail is not None and trail.size == len(found) for _, trail in trails)
        groups[name] = [
            (each, trail)
            for each, trail in trails
            if trail is not None or (is_for_all and (each.trails is not None or each.doing not in (Doing.AT_WORK, Doing.ASLEEP)))
        ]
    return groups


def _mismatch(groups: Mapping[str, Members], found: Sequence[RankFound]) -> Verdict | None:
    """The first collective of a group, not over on all ranks, that they have entered with different operations, dtypes or shapes."""
    for group, members in groups.items():
        by_number: dict[int, list[tuple[RankFound, Entered]]] = {}
        for each, trail in members:
            for entry in trail.entered if trail is not None else ():
                by_number.setdefault(entry.number, []).append((each, entry))
        for number, entered in sorted(by_number.items()):
            counts = Counter(entry.mark for _, entry in entered).most_common(2)
            if len(counts) > 1 and not all(entry.is_over for _, entry in entered):
                usual = counts[0][0] if counts[0][1] > counts[1][1] else None  # None: no side is more numerous than another
                odd = [each for each, entry in entered if entry.mark != usual]
                sides = {entry.mark: (each, entry) for each, entry in reversed(entered)}
                text = ", ".join(f"{_name(each)} {entry.text}" for each, entry in sorted(sides.values(), key=lambda side: side[0].rank))
                return _verdict(MISMATCH, odd, f"collective {number} of group {group!r} is not the same on all ranks: {text}", found)
    return None


def _blame(doing: Doing, guilty: Sequence[RankFound], found: Sequence[RankFound]) -> Verdict:
    return _verdict(doing, guilty, f"{_names(guilty)} {'is' if len(guilty) == 1 else 'are'} {_WHY[doing]}", found)


def _verdict(cause: str, guilty: Sequence[RankFound], text: str, found: Sequence[RankFound]) -> Verdict:
    ranks = tuple(sorted(each.rank for each in guilty))
    others = [each for each in found if each.waits is not None and each.rank not in ranks]
    if others:
        names = named([str(each.rank) for each in others])
        text += f"; rank{'s' * (len(others) > 1)} {names} wait{'s' * (len(others) == 1)} in {_place(others[0])}"
    return Verdict(cause=cause, ranks=ranks, text=printable(text))


def _name(each: RankFound) -> str:
    return f"rank {each.rank} (host {each.host}, pid {each.pid})" if each.pid else f"rank {each.rank} (host {each.host})"


def _names(ranks: Sequence[RankFound]) -> str:
    return named([_name(each) for each in ranks])


def _place(each: RankFound) -> str:
    trail = each.waits
    entry = trail.waits_in if trail is not None else None
    return f"{entry.text}, number {entry.number} of group {trail.group!r}" if trail is not None and entry is not None else "no collective"


def report(head: str, found: Sequence[RankFound], verdict: Verdict) -> str:
    """The whole report as lines of text; where it would grow too long, stacks are left out, last those of the ranks to blame."""
    blamed = set(verdict.ranks)
    rows = [("rank", "host", "pid", "process", "group", "begun", "waits in", "begun last", "over last"), *_rows(found)]
    parts = [head, f"verdict: {verdict.cause}: {verdict.text}", *table(rows).split("\n")]
    length = sum(map(len, parts))
    for each in sorted(found, key=lambda each: (each.rank not in blamed, each.rank)):
        stack = [f"threads of {_name(each)}:", *(each.stack.splitlines() or ["  could not be had"])]
        if (length := length + sum(map(len, stack)) + len(stack)) < REPORT:
            parts += ["", *stack]
    return "\n".join(map(printable_line, parts))[:REPORT] + "\n"


def printable_line(text: str) -> str:
    """One line that moves no cursor; its blanks stay."""
    return " " * (len(text) - len(text.lstrip(" "))) + printable(text.strip())


def _rows(found: Sequence[RankFound]) -> Iterator[tuple[str, ...]]:
    for each in found:
        who = (str(each.rank), each.host, str(each.pid or "?"), each.doing)
        if not each.trails:
            yield (*who, "-" if each.trails is None else "none entered", "", "", "", "")
        for trail in each.trails or ():
            waits, over = trail.waits_in, next((entry for entry in reversed(trail.entered) if entry.is_over), None)
            number = str(trail.newest.number)
            waiting = f"{waits.number}: {waits.text}" if waits is not None else "-"
            done = f"{over.number}: {over.text}" if over is not None else "-"
            yield (*who, trail.group, number, waiting, trail.newest.text, done)
