"""What the training sends, and what fits in between: examples in prose, and what must hold of every step and every span."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.traffic import (
    Collective,
    LinkCost,
    Moment,
    ObservedStep,
    Pace,
    Profile,
    Profiler,
    Transfer,
    common,
    room,
    schedule,
    summary,
)

WINDOW = 5
LINK = LinkCost(alpha=0.01, bandwidth=1000.0)  # 10 ms, 1000 bytes/s
MOST = 10**9
Gaps = tuple[tuple[float, ...] | None, ...]  # of each rank; None: not profiled


def step(*spans: tuple[float, float], seconds: float = 10.0, name: str = "allreduce_", carried: float = 0.0) -> ObservedStep:
    """A step with a collective in each span (begin, end)."""
    return ObservedStep(
        collectives=tuple(Collective(name=name, nbytes=4, begin=begin, end=end) for begin, end in spans), seconds=seconds, carried=carried
    )


def profile(*gaps: float, seconds: float = 10.0) -> Profile:
    return Profile(gaps=gaps, begins=tuple(0.0 for _ in gaps), spread=tuple(0.0 for _ in gaps), seconds=seconds, steps=WINDOW)


class TestStep:
    def test_is_idle_before_between_and_after_its_collectives(self) -> None:
        assert step((1, 2), (5, 9)).idle() == [(0, 1), (2, 3), (9, 1)]

    def test_without_collectives_is_idle_throughout(self) -> None:
        assert step().idle() == [(0, 10)]

    def test_is_not_idle_while_collectives_overlap(self) -> None:
        """A long one that began earlier goes on when the next has ended already."""
        assert step((1, 8), (2, 3), (9, 10)).idle() == [(0, 1), (8, 0), (8, 1), (10, 0)]

    def test_is_not_idle_while_those_of_the_step_before_go_on(self) -> None:
        assert step((1, 2), carried=1.5).idle() == [(1.5, 0), (2, 8)]

    def test_is_not_idle_at_its_end_if_one_goes_on_into_the_next(self) -> None:
        assert step((8, 12)).idle() == [(0, 8), (12, 0)]

    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=8), st.floats(0, 5))
    def test_never_lasts_longer_idle_than_the_network_was(self, begun: list[tuple[float, float]], carried: float) -> None:
        """Section 5: spans are disjoint, lie within the step, and no collective is in flight inside one."""
        busy = sorted((begin, begin + length) for begin, length in begun)
        spans = step(*busy, carried=carried).idle()
        assert len(spans) == len(busy) + 1
        for begin, seconds in spans:
            assert seconds >= 0
            middle = begin + seconds / 2
            if seconds > 1e-9:
                assert carried <= middle <= 10
                assert not any(first < middle < last for first, last in busy)
        for (begin, seconds), (after, _) in itertools.pairwise(spans):
            assert begin + seconds <= after + 1e-9


class TestProfiler:
    def feed(self, *steps: ObservedStep) -> tuple[Profiler, list[bool]]:
        profiler = Profiler(WINDOW)
        return profiler, [profiler.add(each) for each in steps]

    def test_has_a_profile_once_the_order_has_been_seen_long_enough(self) -> None:
        """Not of the first step: what is warmed up in it takes longer."""
        profiler, changed = self.feed(step((9, 10)), *[step((1, 2))] * WINDOW)
        assert changed == [False] * WINDOW + [True]
        assert profiler.profile == summary([step((1, 2))] * WINDOW)

    def test_has_a_new_one_after_each_window(self) -> None:
        later = step((4, 5))
        profiler, changed = self.feed(*[step((1, 2))] * (WINDOW + 1), *[later] * WINDOW)
        assert [at for at, each in enumerate(changed) if each] == [WINDOW, 2 * WINDOW]
        assert profiler.profile == summary([later] * WINDOW)

    @pytest.mark.parametrize("strangers", [1, 2])
    def test_passes_over_single_steps_of_another_order(self, strangers: int) -> None:
        other = step((1, 2), (3, 4))
        profiler, changed = self.feed(*[step((1, 2))] * (WINDOW + 1), *[*[other] * strangers, step((1, 2))] * WINDOW)
        assert sum(changed) == 2
        assert profiler.profile == summary([step((1, 2))] * WINDOW)

    def test_is_void_once_the_order_has_changed_and_until_the_new_one_is_known(self) -> None:
        old, new = step((1, 2)), step((1, 2), (3, 4))
        profiler, changed = self.feed(*[old] * (WINDOW + 1), *[new] * 3)
        assert changed[-3:] == [False, False, True]
        assert profiler.profile is None
        assert [profiler.add(new) for _ in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
        assert profiler.profile == summary([new] * WINDOW)

    def test_says_nothing_of_an_order_that_changes_before_it_is_known(self) -> None:
        profiler, changed = self.feed(*[step((1, 2))] * (WINDOW - 1), *[step((1, 2), (3, 4))] * WINDOW)
        assert not any(changed)
        assert profiler.profile is None

    def test_distinguishes_sizes_and_names_but_not_times(self) -> None:
        one = step((1, 2))
        assert one.order == step((3, 7), seconds=20).order
        assert one.order != step((1, 2), name="barrier").order
        assert one.order == replace(one, collectives=(replace(one.collectives[0], nbytes=8),)).order

    @given(st.lists(st.integers(0, 2), max_size=60))
    def test_never_mixes_orders(self, kinds: list[int]) -> None:
        """Whatever comes: a profile is one of as many spans as its steps have, and a change of it is always told."""
        orders = [step(), step((1, 2)), step((1, 2), (3, 4))]
        profiler, known = Profiler(2), None
        for kind in kinds:
            told = profiler.add(orders[kind])
            assert told or profiler.profile is known
            known = profiler.profile
            assert known is None or known.gaps in [tuple(seconds for _, seconds in each.idle()) for each in orders]


class TestSummary:
    @given(st.lists(st.tuples(st.floats(0, 4), st.floats(5, 9)), min_size=1, max_size=30))
    def test_relies_on_what_nearly_all_steps_had(self, spans: list[tuple[float, float]]) -> None:
        steps = [step(each) for each in spans]
        found = summary(steps)
        for index, gap in enumerate(found.gaps):
            lengths = [each.idle()[index][1] for each in steps]
            assert gap in lengths
            assert sum(length < gap for length in lengths) <= len(steps) / 10
            assert found.spread[index] == statistics.pstdev(lengths)
        assert found.steps == len(steps)
        assert found.idle == sum(found.gaps)
        assert found.begins[0] == 0.0

    def test_has_the_median_of_begins_and_of_seconds(self) -> None:
        found = summary([step((1, 2), seconds=10), step((1, 3), seconds=20), step((1, 9), seconds=12)])
        assert (found.begins, found.seconds) == ((0.0, 3.0), 12.0)


class TestCommon:
    def test_is_the_shortest_of_each_span_where_ranks_do_the_same(self) -> None:
        found = common([profile(1, 5, seconds=11), profile(3, 2, seconds=12)])
        assert (found.gaps, found.seconds) == ((1, 2), 12)

    def test_is_the_busiest_rank_where_they_do_not(self) -> None:
        tight = profile(1, 1, 1)
        assert common([profile(4), tight, profile(2, 3)]) == tight


class TestRoom:
    def ask(
        self, *moments: Moment, gaps: object = ((1.0, 2.0),), now: float = 100.0, outstanding: int = 0, link: LinkCost | None = LINK
    ) -> int:
        spans = {rank: each for rank, each in enumerate(gaps) if each is not None}  # type: ignore[arg-type, var-annotated]
        return room(dict(enumerate(moments)), spans, now, outstanding, link=link, gamma=0.5, most=MOST)

    def test_is_none_while_anybody_communicates(self) -> None:
        assert self.ask(Moment(since=100.0), Moment(in_flight=1, waiting=True), gaps=((1.0,), None)) == 0

    def test_is_what_is_left_of_the_span(self) -> None:
        assert self.ask(Moment(since=100.0)) == 490  # half of the second, less 10 ms
        assert self.ask(Moment(since=99.75)) == 240
        assert self.ask(Moment(since=99.75), outstanding=200) == 40
        assert self.ask(Moment(since=99.75), outstanding=300) == 0
        assert self.ask(Moment(since=99.5)) == 0

    def test_is_that_of_the_span_that_began_last(self) -> None:
        assert self.ask(Moment(begun=1, since=100.0)) == 990

    def test_is_the_least_of_all_ranks(self) -> None:
        assert self.ask(Moment(since=100.0), Moment(begun=1, since=100.0), gaps=((1.0,), (9.0, 0.5))) == 240

    @pytest.mark.parametrize(
        ("moment", "gaps", "link"),
        [
            (Moment(since=100.0), (None,), LINK),  # not profiled
            (Moment(since=100.0), ((1.0,),), None),  # the speed is not known
            (Moment(begun=2, since=100.0), ((1.0, 2.0),), LINK),  # more collectives than there ever were
            (Moment(since=100.0, waiting=True), ((0.0,),), LINK),  # the training stands still
            (Moment(since=97.9), ((1.0,),), LINK),  # what should have begun long ago did not
        ],
    )
    def test_is_as_much_as_may_leave_at_a_time_where_nothing_is_known_of_the_span(
        self, moment: Moment, gaps: Gaps, link: LinkCost | None
    ) -> None:
        assert self.ask(moment, gaps=gaps, link=link) == MOST

    def test_of_a_rank_of_which_nothing_is_known_does_not_lift_what_another_says(self) -> None:
        assert self.ask(Moment(since=100.0), Moment(since=100.0, waiting=True), gaps=((1.0,), (5.0,))) == 490

    @pytest.mark.parametrize(("outstanding", "free"), [(MOST // 2, MOST), (MOST + 5, MOST - 5), (3 * MOST, 0)])
    def test_is_less_where_much_is_under_way_already(self, outstanding: int, free: int) -> None:
        """A collective that comes unforeseen waits for that too."""
        assert self.ask(Moment(since=100.0), gaps=(None,), outstanding=outstanding) == free

    def test_is_everything_where_there_is_nobody_to_wait_for(self) -> None:
        assert room({}, {}, 0.0, 0, link=LINK, gamma=0.5, most=77) == 77

    @given(st.floats(0, 5), st.floats(0, 5), st.integers(0, 2000), st.floats(0.1, 1.0))
    def test_never_lets_out_what_would_not_arrive_within_the_part_of_the_span_that_is_used(
        self, span: float, elapsed: float, outstanding: int, gamma: float
    ) -> None:
        free = room({0: Moment(since=0.0)}, {0: (span,)}, elapsed, outstanding, link=LINK, gamma=gamma, most=MOST)
        if free and elapsed <= 2 * span + 0.05:  # else it is overdue
            assert elapsed + LINK.seconds(outstanding + free) <= gamma * span + 1e-6


@given(
    st.lists(st.floats(0.0, 0.5), min_size=1, max_size=6),
    st.integers(1, 20_000),
    st.integers(16, 400),
    st.floats(0.3, 1.0),
    st.floats(0, 0.01),
    st.floats(1_000, 50_000),
)
def test_sending_by_room_is_algorithm_2_carried_out_online(
    spans: list[float], nbytes: int, slice_bytes: int, gamma: float, alpha: float, bandwidth: float
) -> None:
    """Slices that each leave when the one before has arrived travel in the spans where the schedule puts chunks of that size."""
    link = LinkCost(alpha=alpha, bandwidth=bandwidth)
    plan = schedule(spans, Transfer(nbytes=nbytes, copies=1, buffer_bytes=slice_bytes, parts=1, gamma=gamma), link)
    left, since = nbytes, 0.0
    for begun, span in enumerate(spans):
        now, carried = since, 0
        while free := room({0: Moment(begun=begun, since=since)}, {0: spans}, now, 0, link=link, gamma=gamma, most=min(left, slice_bytes)):
            left, carried, now = left - free, carried + free, now + link.seconds(free)
        assert now - since <= gamma * span + 1e-9  # over before the next collective begins
        assert abs(carried - sum(chunk.nbytes for chunk in plan.chunks if chunk.span == begun)) <= slice_bytes
        since += span + 1.0  # the collective
    assert abs(left - plan.overflow_bytes) <= slice_bytes


class TestPace:
    def test_rises_at_once_to_what_the_slowest_host_needs(self) -> None:
        pace = Pace()
        assert not pace.report("a", 1)
        assert pace.report("b", 4)
        assert not pace.report("a", 3)
        assert pace.interval == 4

    def test_falls_when_all_have_needed_less_for_some_time(self) -> None:
        pace = Pace()
        pace.report("a", 4)
        pace.report("b", 5)
        assert not pace.report("a", 2)  # b still needs 5
        assert [pace.report(host, 2) for host in ("b", "a", "b", "a")] == [False, False, False, True]
        assert pace.interval == 2

    def test_does_not_fall_for_a_single_good_report(self) -> None:
        pace = Pace()
        pace.report("a", 4)
        for _ in range(10):
            assert not pace.report("a", 3)
            assert not pace.report("a", 4)
        assert pace.interval == 4

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
    def test_is_never_shorter_than_anybody_needs(self, reports: list[tuple[str, int]]) -> None:
        pace, needs = Pace(), {}
        for host, steps in reports:
            before = pace.interval
            changed = pace.report(host, steps)
            needs[host] = steps
            assert pace.interval >= max(needs.values())
            assert changed == (pace.interval != before)
            if changed:
                assert pace.interval == max(needs.values())
