"""What to resume and what to delete, for any course of events: nothing that was reported as stored is ever out of reach.

The machine has hosts that remember, several jobs at once, of which some never met, and a storage that is away, shows old or
empty listings, reads as damaged, keeps halves, is another mount with an old copy, and loses bytes and objects for good. Jobs do what
the agents do, by the same functions.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.storage.decisions import (
    CanResume,
    Descent,
    Look,
    NothingStored,
    Sighting,
    Unclear,
    continued,
    decide,
    gives_way,
    left_aside,
    left_torn,
    newest_of_each,
    superseded_by,
)


@dataclass
class Stored:
    """One checkpoint as it is, whatever it looks like; ``hidden``: its manifest does not show that its shards are not intact."""

    version: Version
    descent: Descent
    committed: bool = True
    intact: bool = True
    hidden: bool = False

    @property
    def folder(self) -> str:
        return f"{self.version.incarnation}/{self.version.iteration}"

    def seen(self, listed_only: bool = False) -> Sighting:
        if not self.committed:
            return Sighting(self.folder, self.version, "torn")
        if not self.intact and not self.hidden:
            return Sighting(self.folder, self.version, "damaged")
        return Sighting(self.folder, self.version, "listed" if listed_only else "whole", self.descent)


@dataclass
class Job:
    """One incarnation that is alive."""

    incarnation: Incarnation
    descent: Descent
    iteration: int
    sound: set[str] = field(default_factory=set)


which = st.integers(0, 7)
job_number = st.sampled_from([-1, -1, -1, -2, 0])  # mostly the newest
views = st.sampled_from(["true", "true", "true", "away", "old", "empty", "damaged", "flaky", "copy"])
some_hosts = st.sampled_from([(0, 1, 2), (0,), (1, 2), ()])


class Histories(RuleBasedStateMachine):
    """Jobs come, store, and go; storage lies in between."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Stored] = {}
        self.old: dict[str, Stored] = {}  # what a stale listing shows
        self.old_mark: Version | None = None
        self.mark: Version | None = None
        self.hosts: list[Version | None] = [None, None, None]
        self.jobs: list[Job] = []
        self.reported: dict[Version, Descent] = {}
        self.nonces = 0
        self.setting: str | None = None  # the history chosen last, which stays in the command
        self.lines: dict[Incarnation, frozenset[Incarnation]] = {}  # each, and those it really comes from
        self.left: dict[Incarnation, frozenset[Incarnation]] = {}  # those that the user has left aside for it, or for these
        self.knew: dict[Incarnation, frozenset[Incarnation]] = {}  # each, and all that it really knew of; not as the code has it

    # -- looks

    def look(self, view: str, hosts: tuple[int, ...], passed: Set[str] = frozenset()) -> Look:
        """A look; ``passed``: folders whose shards turned out to be damaged when they were read."""
        look = self._look(view, hosts)
        seen = (replace(one, condition="damaged", descent=Descent()) if one.folder in passed else one for one in look.sightings)
        return replace(look, sightings=tuple(seen))

    def _look(self, view: str, hosts: tuple[int, ...]) -> Look:
        in_storage = self.old_mark if view == "copy" else self.mark
        marks = tuple(version for version in (in_storage, *(self.hosts[host] for host in hosts)) if version is not None)
        if view == "away":
            return Look(trouble="storage is away")
        if view == "empty":
            return Look(sightings=(), marks=marks)
        if view == "damaged":
            sightings = (
                replace(one.seen(), condition="damaged", descent=Descent()) if one.committed else one.seen()
                for one in self.objects.values()
            )
            return Look(
                sightings=tuple(sightings), marks=tuple(mark for mark in marks if mark != self.mark), damaged_mark=self.mark is not None
            )
        there = self.old if view == "copy" else self.objects
        listed = dict(there if view != "old" else self.old)
        left_out = ""
        if in_storage is not None:  # read by its name
            folder = f"{in_storage.incarnation}/{in_storage.iteration}"
            left_out = folder if folder in there and folder not in listed else ""
            listed[folder] = there.get(folder, Stored(in_storage, Descent()))
        sightings = (there[folder].seen() if folder in there else Sighting(folder, one.version, "gone") for folder, one in listed.items())
        return Look(sightings=tuple(sightings), marks=marks, left_out=left_out)

    # -- rules

    @initialize(hosts=some_hosts)
    def begin(self, hosts: tuple[int, ...]) -> None:
        """A job that stores twice."""
        self.start("true", hosts, 0, False)
        for keep in (1, 2):
            self.store(0, 1, hosts, late=False, keep=keep, view="true", half=False, reads=True)

    @rule(view=views, hosts=some_hosts, choice=which, stays=st.booleans())
    def start(self, view: str, hosts: tuple[int, ...], choice: int, stays: bool) -> None:
        """A job starts without anything in memory, on some of the hosts; ``stays``: the last choice of a history is in its command."""
        named = self.setting if stays else None
        passed: set[str] = set()
        while True:
            look = self.look("true" if view == "flaky" else view, hosts, passed)
            answer = decide(look, named)
            if not isinstance(answer, CanResume):
                break
            resumed = answer.order[0]
            if (there := self.objects.get(resumed.folder)) is None or there.intact:
                break
            passed.add(resumed.folder)
        contested = named is not None or (isinstance(answer, Unclear) and answer.contested)
        if isinstance(answer, Unclear) and answer.contested:  # the user chooses
            lines = [str(one.version.incarnation) for one in newest_of_each(one for one in look.sightings if one.readable)]
            self.setting = named = lines[choice % len(lines)]
            answer = decide(look, named)
        if isinstance(answer, Unclear):
            return
        known = {one.version.incarnation for one in look.sightings}
        self.nonces += 1
        if isinstance(answer, NothingStored):
            assert view == "copy" or not self.reported
            self._begin(Job(self._next(known), Descent(lineage=(), overtaken=frozenset(known)), 0), known, None)
            return
        resumed = answer.order[0]
        self._check_marks(look)
        for version, descent in self.reported.items():
            there = self.objects.get(Stored(version, descent).folder)
            if view != "copy" and there is not None and there.intact and version != resumed.version:
                assert not there.seen().descends_from(resumed.version), (version, resumed)
        if view in ("true", "flaky") and not contested:
            self._check_order(resumed.version)
        told = [(one.version.incarnation, one.descent) for one in look.sightings]
        descent = continued(resumed.version, told)
        descent = replace(descent, aside=descent.aside | left_aside(look, named) & descent.overtaken)
        lineage = [version.incarnation for version in descent.lineage or ()]
        others = {one.version.incarnation for one in look.sightings if one.readable and named is not None}
        others = {one for one in others if named not in map(str, self.lines[one])}
        number = self._next({*known, *descent.overtaken, *lineage})
        self._begin(Job(number, descent, resumed.version.iteration), known, resumed.version.incarnation, others)

    def _begin(self, job: Job, known: set[Incarnation], before: Incarnation | None, left: Set[Incarnation] = frozenset()) -> None:
        line = self.lines[job.incarnation] = frozenset({job.incarnation}) | (self.lines[before] if before else frozenset())
        self.left[job.incarnation] = (left | (self.left[before] if before else frozenset())) - line
        self.knew[job.incarnation] = frozenset({job.incarnation, *known}).union(*(self.knew[incarnation] for incarnation in known))
        self.jobs.append(job)

    def _check_marks(self, look: Look) -> None:
        """What a mark names is there, or something that knew of it; else nothing is resumed."""
        readable = [one.version for one in look.sightings if one.readable]
        for mark in look.marks:
            newer = (one for one in readable if mark.incarnation in self.knew[one.incarnation])
            assert any(one.version == mark and one.condition != "gone" for one in look.sightings) or any(
                one.incarnation != mark.incarnation or one.iteration > mark.iteration for one in newer
            ), (mark, look)

    def _check_order(self, resumed: Version) -> None:
        """What is resumed without asking the user knew of everything that is left aside, and is the newest of its own."""
        for one in self.objects.values():
            if one.committed and one.intact:
                assert one.version.incarnation in self.knew[resumed.incarnation], (one.version, resumed)
                assert one.version.incarnation != resumed.incarnation or one.version <= resumed, (one.version, resumed)

    def _next(self, known: set[Incarnation]) -> Incarnation:
        return Incarnation(max((incarnation.number for incarnation in known), default=0) + 1, f"{self.nonces:04x}")

    @precondition(lambda self: self.jobs)
    @rule(
        job=job_number,
        steps=st.integers(1, 3),
        hosts=some_hosts,
        late=st.booleans(),
        keep=st.integers(1, 3),
        view=views,
        half=st.sampled_from([False, False, False, True]),
        reads=st.booleans(),
    )
    def store(self, job: int, steps: int, hosts: tuple[int, ...], late: bool, keep: int, view: str, half: bool, reads: bool) -> None:
        """A job stores a checkpoint, marks it, and cleans up.

        Args:
            late: it looked for others before they had written.
            half: storage keeps a half and says 200, which reading back finds out.
            reads: it also reads older ones back.
        """
        this = self.jobs[max(job, -len(self.jobs))]
        this.iteration += steps
        new = Stored(Version(this.incarnation, this.iteration), this.descent)
        seen = self.old if late else self.objects
        if any(one.committed and one.intact and not new.seen().knows(one.version.incarnation) for one in seen.values()):
            return  # another job has taken the run over
        if half:
            self.objects[new.folder] = replace(new, intact=False, hidden=True)
            return
        self.objects[new.folder] = new
        self.mark = new.version
        for host in hosts:
            self.hosts[host] = new.version
        self.reported[new.version] = new.descent
        self.retain(this, new, keep, "true" if view == "flaky" else view, reads)

    def retain(self, this: Job, new: Stored, keep: int, view: str, reads: bool) -> None:
        look = self.look(view, ())
        if look.trouble:
            return
        this.sound.add(new.folder)
        line = [one for one in look.sightings if one.readable and new.seen().descends_from(one.version)]
        if reads:
            this.sound |= {one.folder for one in line if one.folder in self.objects and self.objects[one.folder].intact}
        for one in superseded_by((one for one in look.sightings if one.folder != new.folder), new.seen(), this.sound, keep, None):
            gone = self.objects.get(one.folder)
            if one.condition == "torn" and gone is not None and gone.committed:
                continue
            if gone is not None and gone.intact and gone.committed:
                assert gone.version.incarnation in self.knew[new.version.incarnation]
                assert gone.version.incarnation not in self.left[new.version.incarnation]
                assert new.seen().history == gone.seen().history
                rest = [self.objects[folder] for folder in this.sound if folder in self.objects and folder != one.folder]
                enough = sum(other.intact and other.committed for other in rest) >= keep
                assert enough or not one.readable, one.folder  # what reads as damaged has a younger sound one, and is no reserve
            self.objects.pop(one.folder, None)
        for one in left_torn(look.sightings, new.seen()):
            assert one.version.incarnation in self.knew[new.version.incarnation] - {new.version.incarnation}
            if not self.objects.get(one.folder, new).committed:
                del self.objects[one.folder]

    @precondition(lambda self: self.jobs)
    @rule(job=job_number)
    def half(self, job: int) -> None:
        """An upload is torn."""
        this = self.jobs[max(job, -len(self.jobs))]
        torn = Stored(Version(this.incarnation, this.iteration + 1), this.descent, committed=False)
        self.objects.setdefault(torn.folder, torn)

    @precondition(lambda self: self.jobs)
    @rule(job=job_number)
    def die(self, job: int) -> None:
        del self.jobs[max(job, -len(self.jobs))]

    @precondition(lambda self: self.jobs)
    @rule(job=job_number)
    def restart_from_memory(self, job: int) -> None:
        """The same hosts go on, without a look at storage."""
        this = self.jobs[max(job, -len(self.jobs))]
        self.nonces += 1
        descent = continued(Version(this.incarnation, this.iteration), [(this.incarnation, this.descent)])
        known = {this.incarnation, *descent.overtaken}
        del self.jobs[max(job, -len(self.jobs))]
        self._begin(Job(self._next(known), descent, this.iteration), {this.incarnation}, this.incarnation)

    @precondition(lambda self: self.jobs)
    @rule(job=job_number)
    def part(self, job: int) -> None:
        """Half of the hosts go on and store, and so does the other half: neither knows of the other."""
        this = self.jobs.pop(max(job, -len(self.jobs)))
        for _ in range(2):
            self.jobs.append(this)
            self.restart_from_memory(len(self.jobs) - 1)
        before = self.objects.copy()
        self.jobs[-1].iteration += 1
        self.store(len(self.jobs) - 2, 1, (0,), late=False, keep=1, view="away", half=False, reads=True)
        self.old, settled = before, self.old
        self.store(len(self.jobs) - 1, 1, (1,), late=True, keep=1, view="away", half=False, reads=True)
        self.old = settled

    @precondition(lambda self: self.objects)
    @rule(one=which)
    def vanish(self, one: int) -> None:
        """Somebody deletes a checkpoint."""
        del self.objects[sorted(self.objects)[one % len(self.objects)]]

    @precondition(lambda self: self.objects)
    @rule(one=which)
    def rot(self, one: int) -> None:
        """Bytes are lost for good."""
        folder = sorted(self.objects)[one % len(self.objects)]
        self.objects[folder] = replace(self.objects[folder], intact=False, hidden=False)

    @rule()
    def settle(self) -> None:
        """Listings show all that is there by now."""
        self.old, self.old_mark = dict(self.objects), self.mark

    # -- what holds

    @invariant()
    def nothing_stored_is_out_of_reach(self) -> None:
        look = self.look("true", ())
        lines = [None, *sorted({str(one.version.incarnation) for one in look.sightings if one.readable})]
        answers = [decide(look, line, found=True) for line in lines]
        reach = [one for answer in answers if isinstance(answer, CanResume) for one in answer.order]
        for version in self.reported:
            stored = self.objects.get(f"{version.incarnation}/{version.iteration}")
            if stored is not None and stored.intact:
                assert any(one.version == version or one.descends_from(version) for one in reach), version

    @invariant()
    def a_run_that_has_stored_never_begins_anew(self) -> None:
        if self.reported:
            for view in ("true", "away", "old", "empty", "damaged"):
                assert not isinstance(decide(self.look(view, ())), NothingStored)


def test_any_course_of_events() -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=400, stateful_step_count=25))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more_histories() -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=20_000, stateful_step_count=40))


def _whole(name: str, *lineage: str, beside: tuple[str, ...] = ()) -> Sighting:
    """A checkpoint NUMBER-NONCE/ITERATION, of those before it."""

    def version(text: str) -> Version:
        incarnation, iteration = text.split("/")
        number, nonce = incarnation.split("-")
        return Version(Incarnation(int(number), nonce), int(iteration))

    overtaken = frozenset(version(one).incarnation for one in beside)
    return Sighting(name, version(name), "whole", Descent(lineage=tuple(map(version, lineage)), overtaken=overtaken))


class TestTheChoiceOfAHistory:
    """`storage.history` stays in the command that starts the job, also when the job starts again."""

    FIRST = _whole("1-a/3")
    LEFT, RIGHT = _whole("2-b/4", "1-a/2"), _whole("2-c/5", "1-a/1")

    def _order(self, *seen: Sighting, history: str) -> list[str]:
        answer = decide(Look(sightings=seen), history)
        assert isinstance(answer, CanResume), answer
        return [one.folder for one in answer.order]

    def test_takes_one_line_and_what_it_has_overtaken_after_it(self) -> None:
        contested = decide(Look(sightings=(self.FIRST, self.LEFT, self.RIGHT)))
        assert isinstance(contested, Unclear)
        assert contested.contested
        assert self._order(self.FIRST, self.LEFT, self.RIGHT, history="2-b") == ["2-b/4", "1-a/3"]
        assert self._order(self.FIRST, self.LEFT, self.RIGHT, history="2-c") == ["2-c/5", "1-a/3"]

    def test_made_once_does_not_take_the_job_back_later(self) -> None:
        after = _whole("3-d/9", "1-a/2", "2-b/4", beside=("2-c/5",))
        assert self._order(self.FIRST, self.LEFT, self.RIGHT, after, history="2-b")[0] == "3-d/9"

    def test_can_be_taken_back(self) -> None:
        after = _whole("3-d/9", "1-a/2", "2-b/4", beside=("2-c/5",))
        assert self._order(self.FIRST, self.LEFT, self.RIGHT, after, history="2-c")[0] == "2-c/5"

    def test_of_what_both_went_through_is_no_choice(self) -> None:
        answer = decide(Look(sightings=(self.FIRST, self.LEFT, self.RIGHT)), "1-a")
        assert isinstance(answer, Unclear)
        assert answer.contested

    def test_says_what_it_leaves_aside(self) -> None:
        after = _whole("3-d/9", "1-a/2", "2-b/4", beside=("2-c/5",))
        answer = decide(Look(sightings=(self.FIRST, self.LEFT, self.RIGHT, after)), "2-c")
        assert isinstance(answer, CanResume)
        assert [one.folder for one in answer.aside] == ["3-d/9"]

    def test_does_not_hide_that_its_line_has_come_further_than_can_be_seen(self) -> None:
        after = _whole("3-d/9", "1-a/2", "2-b/4").version
        look = Look(sightings=(self.FIRST, self.LEFT), marks=(after,))
        answer = decide(look, "2-b")
        assert isinstance(answer, Unclear)
        assert "iteration 9 of incarnation 3 was reported as stored, but neither it" in answer.why
        assert isinstance(decide(look, "2-b", found=True), CanResume)

    def test_waits_for_a_listing_that_does_not_show_the_newest_of_another_line(self) -> None:
        """It may not show the newest of this line, either."""
        look = Look(sightings=(self.FIRST, self.LEFT, self.RIGHT), marks=(self.RIGHT.version,), left_out=self.RIGHT.folder)
        answer = decide(look, "2-b")
        assert isinstance(answer, Unclear)
        assert not answer.contested
        assert "2-c/5 is whole, and the listing leaves it out" in answer.why
        assert isinstance(decide(look, "2-b", found=True), CanResume)
        assert isinstance(decide(look, "2-c"), CanResume)

    def test_leaves_aside_what_cannot_be_read_just_now(self) -> None:
        hidden = replace(self.RIGHT, condition="damaged", descent=Descent())
        assert left_aside(Look(sightings=(self.FIRST, self.LEFT, hidden)), "2-b") == {self.RIGHT.version.incarnation}

    def test_leaves_what_is_aside_as_it_is_for_ever(self) -> None:
        """Nothing that goes on from the chosen line deletes it, although it has the same beginning."""
        look = Look(sightings=(self.FIRST, self.LEFT, self.RIGHT))
        told = [(one.version.incarnation, one.descent) for one in look.sightings]
        descent = replace(continued(self.LEFT.version, told), aside=left_aside(look, "2-b") - {self.FIRST.version.incarnation})
        newest = Sighting("3-d/9", Version(Incarnation(3, "d"), 9), "whole", descent)
        inherited = continued(newest.version, [(newest.version.incarnation, descent)])
        later = Sighting("4-e/20", Version(Incarnation(4, "e"), 20), "whole", inherited)
        for one in (newest, later):
            assert one.supersedes(self.RIGHT.version)
            assert [gone.folder for gone in superseded_by(look.sightings, one, {one.folder}, 1, None)] == ["1-a/3", "2-b/4"]
        back = continued(self.RIGHT.version, [*told, (later.version.incarnation, later.descent)])
        assert not back.aside


class TestMemoryBesideStorage:
    """Whether what is whole in memory, and newer or beside, gives way to storage."""

    STORED = _whole("3-d/9", "1-a/2", "2-b/4")

    def _answer(self, memory: str, *lineage: str, beside: tuple[str, ...] = (), history: str | None = None) -> bool | str:
        this = _whole(memory, *lineage, beside=beside)
        answer = gives_way(this.version, [(this.version.incarnation, this.descent)], self.STORED, history)
        return answer.why if isinstance(answer, Unclear) else answer

    @pytest.mark.parametrize("history", [None, "1-a", "2-b", "3-d"])
    def test_not_if_it_goes_on_from_it(self, history: str | None) -> None:
        assert self._answer("4-e/10", "1-a/2", "2-b/4", "3-d/9", history=history) is False
        assert self._answer("3-d/12", "1-a/2", "2-b/4", history=history) is False

    @pytest.mark.parametrize("history", [None, "1-a", "2-b"])
    def test_of_two_that_part_behind_the_choice_it_says_both(self, history: str | None) -> None:
        """A choice that was made long ago says nothing of them: neither may be left aside for it."""
        said = self._answer("3-x/12", "1-a/2", "2-b/4", history=history)
        assert isinstance(said, str)
        assert said.startswith("memory has step 12 of history 3-x, storage has step 9 (history 3-d")

    def test_if_the_user_has_chosen_the_other(self) -> None:
        assert self._answer("3-x/12", "1-a/2", "2-b/4", history="3-d") is True
        assert self._answer("4-y/50", beside=("3-d/9",), history="2-b") is True  # begun anew once, and that is taken back

    def test_not_if_it_has_overtaken_it_and_nothing_is_chosen(self) -> None:
        assert self._answer("4-y/50", beside=("3-d/9",)) is False

    @pytest.mark.parametrize("history", [None, "2-b", "3-d"])
    def test_not_without_knowing_where_it_comes_from(self, history: str | None) -> None:
        memory = Version(Incarnation(4, "e"), 10)
        for told in (
            [],
            [(Incarnation(5, "f"), Descent(lineage=(), overtaken=frozenset({memory.incarnation, self.STORED.version.incarnation})))],
        ):
            answer = gives_way(memory, told, self.STORED, history)
            assert isinstance(answer, Unclear)
            assert "neither is known to descend from the other" in answer.why
