"""Decides which checkpoint to resume and which to delete: pure, from the result of a look at storage.

A look has three answers and never two: `CanResume`, `NothingStored`, `Unclear`. Only `NothingStored`, which takes an empty listing and the
absence of every mark that something was stored, lets a run start from the beginning.

Order follows descent. An incarnation knows the versions that it descends from (its lineage), and the incarnations that
it has overtaken: it saw them and went on from an older state. Of two incarnations that know nothing of each other
neither is the newer one, whatever their numbers; that is for the user to decide.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from gemini_ft.core.versions import Incarnation, Version

# listed: it has a manifest, which was not read; whole: the manifest is sound and the shards are there; lacking: a shard is
# not; damaged: the manifest is; gone: it was listed and could not be found; torn: there is no manifest.
Condition = Literal["listed", "whole", "lacking", "damaged", "gone", "torn"]


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The origin of an incarnation."""

    # versions that it descends from, oldest first; None: its manifests do not say (they are of before there was one)
    lineage: tuple[Version, ...] | None = ()
    overtaken: frozenset[Incarnation] = frozenset()  # incarnations that it knows of beside its ancestors
    # of these, those that the user has left aside by the choice of a history: they stay as they are
    aside: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True)
class Sighting:
    """One checkpoint in storage, as far as it could be seen."""

    folder: str
    version: Version
    condition: Condition
    descent: Descent = Descent()
    created: datetime | None = None

    @property
    def iteration(self) -> int:
        return self.version.iteration

    @property
    def history(self) -> Incarnation | None:
        """The incarnation that began from nothing, of which all others of this history descend; None: not known."""
        lineage = self.descent.lineage
        return None if lineage is None else (*lineage, self.version)[0].incarnation

    @property
    def readable(self) -> bool:
        """Whether the checkpoint may be resumed, as far as is known."""
        return self.condition in ("whole", "listed")

    def knows(self, incarnation: Incarnation) -> bool:
        """Whether the sighting's incarnation is this one, descends from it, or has overtaken it."""
        own, lineage = self.version.incarnation, self.descent.lineage
        if incarnation == own or incarnation in self.descent.overtaken:
            return True
        if lineage is None:
            return incarnation.number < own.number
        return any(version.incarnation == incarnation for version in lineage)

    def descends_from(self, version: Version) -> bool:
        """Whether this state was computed from that one; a state descends from itself."""
        if version.incarnation == self.version.incarnation:
            return version.iteration <= self.version.iteration
        lineage = self.descent.lineage
        if lineage is None:
            return self.knows(version.incarnation)
        return any(v.incarnation == version.incarnation and version.iteration <= v.iteration for v in lineage)

    def supersedes(self, version: Version) -> bool:
        """Whether the sighting is newer than ``version``, in the order of descent."""
        if version.incarnation == self.version.incarnation:
            return version.iteration < self.version.iteration
        return self.knows(version.incarnation)


@dataclass(frozen=True, kw_only=True)
class Look:
    """Findings of a look at one run and stream in storage."""

    sightings: tuple[Sighting, ...] = ()  # every checkpoint, whole or not
    marks: tuple[Version, ...] = ()  # versions that were reported as stored, by a mark in storage or on a host
    damaged_mark: bool = False  # the mark in storage cannot be read
    left_out: str = ""  # folder of the checkpoint that the mark names, if the listing leaves it out although it is there
    trouble: str = ""  # why the look is not complete; empty: it is


@dataclass(frozen=True, kw_only=True)
class CanResume:
    """An answer: there is something to resume. Every checkpoint that may be, the one to take first, then the nearest ancestors.

    ``aside``: the newest of each line that the choice of a history leaves as it is.
    """

    order: tuple[Sighting, ...]
    aside: tuple[Sighting, ...] = ()


@dataclass(frozen=True)
class NothingStored:
    """An answer: storage proves that nothing was ever stored."""


@dataclass(frozen=True)
class Unclear:
    """An answer: it cannot be told now. ``contested``: looking again will not help; the user has to choose between histories."""

    why: str
    contested: bool = False


Answer = CanResume | NothingStored | Unclear


def decide(look: Look, history: str | None = None, found: bool = False) -> Answer:
    """Decides which checkpoint to resume.

    Args:
        look: what storage and hosts have.
        history: an incarnation, by name; resume the line that went through it, as far as it has come by now.
        found: accept the newest that is there, although something newer was reported as stored. The choice of a history does not
            imply that: it may have been made long ago, and the line have come further than can be seen now.
    """
    if look.trouble:
        return Unclear(look.trouble)
    seen = [sighting for sighting in look.sightings if sighting.condition != "torn"]
    if not seen and not look.marks and not look.damaged_mark:
        return NothingStored()
    whole = [sighting for sighting in seen if sighting.readable]
    line = whole if history is None else [sighting for sighting in whole if _went_through(sighting, history)]
    if not line:
        return Unclear(_nothing_whole(look, seen, history))
    tips = newest_of_each(line)
    if len(tips) > 1:
        return Unclear(
            f"there are {len(tips)} histories that do not descend from each other: {'; '.join(map(describe, tips))}. "
            "Choose one by storage.history (GEMINI_STORAGE__HISTORY=NUMBER-NONCE), the other stays as it is",
            contested=True,
        )
    if not found and (lost := [mark for mark in look.marks if not _accounted_for(mark, seen, whole)]):
        newest = max(lost, key=lambda version: version.iteration)
        return Unclear(f"{newest} was reported as stored, but neither it nor any checkpoint that descends from it is there")
    unlisted = next((one for one in seen if one.folder == look.left_out), tips[0])
    if not found and unlisted is not tips[0] and not tips[0].supersedes(unlisted.version):
        condition = "whole" if unlisted.readable else unlisted.condition
        return Unclear(
            f"{unlisted.folder} is {condition}, and the listing leaves it out; others newer than {describe(tips[0])} may be left out too"
        )
    aside = tuple(one for one in newest_of_each(whole) if one is not tips[0])
    return CanResume(order=tuple(_in_order(tips[0], _behind(tips[0], whole))), aside=aside)


def gives_way(memory: Version, told: Iterable[tuple[Incarnation, Descent]], found: Sighting, history: str | None) -> bool | Unclear:
    """Whether memory is left aside for ``found``, be it newer or not; Unclear: the user has to choose.

    It is where the user has named a line that ``found`` is of, and memory is known not to be. A choice that was made long ago
    leaves nothing aside that went through the named incarnation itself, nor memory of unknown descent.

    Args:
        memory: the newest version that is whole in memory.
        told: sessions of the hosts, and their descent.
        found: the checkpoint that storage would resume.
    """
    told = _told_of(memory, told)
    this = Sighting("", memory, "whole", continued(memory, told))
    if found.knows(memory.incarnation):
        return False
    if history is not None and not is_of(memory, told, history):
        return True
    if this.knows(found.version.incarnation):
        return False
    return Unclear(
        f"memory has step {memory.iteration} of history {memory.incarnation}, storage has {describe(found)}, and neither "
        f"{'descends from the other' if told else 'is known to descend from the other'}",
        contested=True,
    )


def is_of(memory: Version, told: Iterable[tuple[Incarnation, Descent]], history: str) -> bool:
    """Whether memory went through the incarnation that the user has named, or is of unknown descent."""
    told = _told_of(memory, told)
    return not told or _went_through(Sighting("", memory, "whole", continued(memory, told)), history)


def newest_of_each(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Checkpoints that no other one supersedes: one of each line that knows nothing of the others."""
    every = sorted(sightings, key=lambda sighting: sighting.version, reverse=True)
    return [one for one in every if not any(other.supersedes(one.version) for other in every if other is not one)]


def superseded_by(
    look: Iterable[Sighting], newest: Sighting, sound: Collection[str], keep_last: int, keep_every: int | None
) -> list[Sighting]:
    """Decides what may be deleted once ``newest`` has been stored and read back.

    Never anything of another history, of one that the user has left aside, or of an incarnation that ``newest`` does not know;
    nothing whole before ``keep_last`` checkpoints of its own line are known to be sound. What is damaged, torn or lacks a shard
    is kept by no number.

    Args:
        look: everything that is there.
        sound: folders of checkpoints that were read back as sound.
        keep_last: how many of them to keep.
        keep_every: also keep those whose iteration divides by this; of one iteration, the newest.

    Returns:
        What may go, oldest first.
    """
    behind = [one for one in look if newest.supersedes(one.version) and _same_history(one, newest)]
    line = sorted(
        (one for one in [*behind, newest] if one.readable and newest.descends_from(one.version)), key=lambda one: one.version, reverse=True
    )
    kept = [one for one in line if one.folder in sound][:keep_last]
    keep = {one.folder for one in kept}
    if keep_every:
        by_iteration = {one.iteration: one for one in reversed([one for one in line if not one.iteration % keep_every])}
        keep |= {one.folder for one in by_iteration.values()}
    enough = len(kept) >= keep_last
    doomed = [one for one in behind if one.folder not in keep and (enough or not one.readable)]
    return sorted(doomed, key=lambda one: one.version)


def left_torn(look: Iterable[Sighting], this: Sighting) -> list[Sighting]:
    """Torn uploads of incarnations that ``this`` one comes after: they will never be finished."""
    own = this.version.incarnation
    return [one for one in look if one.condition == "torn" and one.version.incarnation != own and this.knows(one.version.incarnation)]


def about_to_begin(descent: Descent) -> Sighting:
    """The incarnation of this descent that is being chosen: it has stored nothing, has no number yet, and is above every other."""
    return Sighting("", Version(Incarnation(sys.maxsize, ""), 0), "torn", descent)


def fenced(look: Iterable[Sighting], this: Sighting, present: Collection[str] | None) -> set[str]:
    """Folders that another part of the job may have written, or go on from: these stay, however much newer ``this`` one is.

    A network that falls apart may leave two incarnations of one run at work. What a known one has stored beyond the state that was
    resumed, after that was chosen, is of a part that lives; what an unknown one has stored is so too. Either stays, and with it the
    nearest checkpoint that it descends from.

    Args:
        look: everything that is there.
        this: newest state of the present incarnation.
        present: folders that were there when it chose what to resume, beside its own ancestors; None: all that are known to it.
    """
    seen = list(look)
    late = {one.folder for one in seen if present is not None and not this.descends_from(one.version) and one.folder not in present}
    others = [one for one in seen if one.folder in late or not this.knows(one.version.incarnation)]
    theirs = {one.folder for one in others}
    fence = set(theirs)
    for one in others:
        before = [old for old in seen if old.readable and old.folder not in theirs and one.descends_from(old.version)]
        fence |= {max(before, key=lambda old: old.version).folder} if before else set()
    return fence


def continued(version: Version, told: Iterable[tuple[Incarnation, Descent]]) -> Descent:
    """The descent of an incarnation that resumes ``version``.

    ``version``: that it resumes. ``told``: incarnations and their descent, as hosts and manifests have it.
    """
    known: set[Incarnation] = set()
    aside: frozenset[Incarnation] = frozenset()
    lineage: tuple[Version, ...] | None = None
    for incarnation, descent in told:
        before = descent.lineage or ()
        known |= {incarnation, *descent.overtaken, *(ancestor.incarnation for ancestor in before)}
        if incarnation == version.incarnation:
            found: tuple[Version, ...] | None = (*before, version)
        else:
            at = next((index for index, ancestor in enumerate(before) if ancestor.incarnation == version.incarnation), None)
            found = (*before[:at], version) if at is not None else None
        if found is not None:
            aside |= descent.aside
        if found is not None and len(found) > len(lineage or ()):
            lineage = found
    lineage = lineage or (version,)
    ancestors = {ancestor.incarnation for ancestor in lineage}
    return Descent(lineage=lineage, overtaken=frozenset(known - ancestors), aside=aside - ancestors)


def left_aside(look: Look, history: str | None) -> frozenset[Incarnation]:
    """Incarnations that are not of the line that the user has chosen, also where they cannot be read just now."""
    if history is None:
        return frozenset()

    def line(sightings: Iterable[Sighting]) -> set[Incarnation]:
        return {i for one in sightings for i in (one.version.incarnation, *(v.incarnation for v in one.descent.lineage or ()))}

    chosen = [one for one in look.sightings if one.readable and _went_through(one, history)]
    return frozenset(line(look.sightings) - line(chosen))


def describe(sighting: Sighting) -> str:
    """Describes a checkpoint in words, for a user who has to choose."""
    when = f" of {sighting.created:%Y-%m-%d %H:%M:%S} UTC" if sighting.created is not None else ""
    return f"step {sighting.version.iteration}{when} (history {sighting.version.incarnation}, {sighting.folder})"


# -- inside


def _same_history(one: Sighting, other: Sighting) -> bool:
    """Whether a checkpoint may be of the other's history: one without a readable manifest, if that knows it as an ancestor."""
    if one.condition == "torn":
        return True
    if one.version.incarnation in other.descent.aside:
        return False
    if one.condition in ("damaged", "gone"):
        lineage = other.descent.lineage
        return lineage is None or one.version.incarnation in {other.version.incarnation, *(version.incarnation for version in lineage)}
    return None in (one.history, other.history) or one.history == other.history


def _told_of(memory: Version, told: Iterable[tuple[Incarnation, Descent]]) -> list[tuple[Incarnation, Descent]]:
    """The entries of ``told`` about the incarnation of the state in memory, and about its descendants."""
    return [(one, descent) for one, descent in told if memory.incarnation in (one, *(v.incarnation for v in descent.lineage or ()))]


def _went_through(sighting: Sighting, incarnation: str) -> bool:
    """Whether a sighting is of that incarnation, or descends from a checkpoint of it."""
    return incarnation in map(str, (sighting.version.incarnation, *(version.incarnation for version in sighting.descent.lineage or ())))


def _behind(tip: Sighting, whole: Sequence[Sighting]) -> list[Sighting]:
    """``tip``, what it supersedes, and what that supersedes: it need not have seen all of this itself."""
    behind, rest = [tip], [one for one in whole if one is not tip]
    for after in behind:
        behind += [one for one in rest if after.supersedes(one.version)]
        rest = [one for one in rest if not after.supersedes(one.version)]
    return behind


def _accounted_for(mark: Version, seen: Sequence[Sighting], whole: Sequence[Sighting]) -> bool:
    """Whether the marked version is there, damaged or not, or something newer is whole."""
    if any(one.version == mark and one.condition != "gone" for one in seen):
        return True
    return any(one.supersedes(mark) for one in whole)


def _in_order(tip: Sighting, whole: Sequence[Sighting]) -> list[Sighting]:
    """The line of ``tip``, newest first; then what it has overtaken, of its own history."""
    line = [one for one in whole if tip.descends_from(one.version)]
    places = {ancestor.incarnation: place for place, ancestor in enumerate(tip.descent.lineage or (), 1)}
    places[tip.version.incarnation] = len(places) + 1

    def place(one: Sighting) -> tuple[int, Version]:
        return places.get(one.version.incarnation, 0), one.version

    beside = [one for one in whole if one not in line and _same_history(one, tip)]
    return [*sorted(line, key=place, reverse=True), *sorted(beside, key=lambda one: one.version, reverse=True)]


def _nothing_whole(look: Look, seen: Sequence[Sighting], history: str | None) -> str:
    if not seen:
        what = f"up to {max(look.marks, key=lambda version: version.iteration)}" if look.marks else "something"
        return f"this run has stored {what}, but no checkpoint of it is listed"
    if history is not None and any(one.readable for one in seen):
        others = "; ".join(describe(one) for one in newest_of_each(seen))
        return f"no checkpoint of history {history!r} can be read; there are: {others}"
    newest = max(seen, key=lambda one: one.version)
    found = f"the newest, step {newest.iteration}, is {newest.condition}"
    return f"{len(seen)} checkpoints are there, but none is sound ({found})"
