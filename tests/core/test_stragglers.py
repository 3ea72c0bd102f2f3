"""Ranks that are slow are named within thirty steps, and nobody else ever is."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.core.stragglers import StragglerWatch, WorkTime, WorkWindow

FACTOR = 1.5
Work = Callable[[int, int], float]  # (rank, step) -> seconds that the rank works alone in it


def named(size: int, steps: int, work: Work, start: int = 0) -> list[tuple[int, frozenset[int]]]:
    """Trains, with each rank on a host of its own; (step, the ranks that are slow from then on)."""
    watch = StragglerWatch([f"h{rank}" for rank in range(size)], FACTOR)
    windows, told = [WorkWindow() for _ in range(size)], list[tuple[int, frozenset[int]]]()
    for step in range(start + 1, start + steps + 1):
        alone = [work(rank, step) for rank in range(size)]
        for rank, window in enumerate(windows):  # all of them wait for the slowest
            if (times := window.add(step, max(alone) + 0.02, alone[rank])) is not None and watch.add(f"h{rank}", step, {rank: times}):
                told.append((step, watch.slow))
    return told


seeds, sizes = st.integers(0, 2**32), st.integers(2, 12)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(3, 12), st.integers(0, 100), st.floats(1.8, 10.0), st.integers(0, 40))
def test_slow_ranks_are_named_within_thirty_steps_and_are_forgotten_when_they_are_well(
    seed: int, size: int, since: int, times: float, start: int
) -> None:
    """Fewer than half of the ranks are slow."""
    luck = random.Random(seed)
    slow = frozenset(luck.sample(range(size), luck.randint(1, (size - 1) // 2)))
    begin, end = start + since + 8, start + since + 100

    def work(rank: int, step: int) -> float:
        return 0.1 * luck.uniform(0.95, 1.05) * (times if rank in slow and begin < step <= end else 1)

    first, second = named(size, since + 160, work, start)
    assert first[1] == slow
    assert begin < first[0] <= begin + 30
    assert second[1] == frozenset()
    assert end < second[0] <= end + 30


@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_nobody_is_named_in_two_thousand_quiet_steps(seed: int, size: int) -> None:
    """Noise of a fifth, drift of all, first steps that compile, validations of one rank, and long batches that go round."""
    luck = random.Random(seed)

    def work(rank: int, step: int) -> float:
        seconds = 0.1 * luck.uniform(0.8, 1.2) * (1 + step / 1000)
        seconds += 5.0 * (step <= 3) * luck.random()
        seconds += 2.0 * (step % 50 == 0 and rank == 0)  # it alone validates
        return seconds * (3 if (step + rank) % size == 0 and size > 2 else 1)

    assert named(size, 2000, work) == []


@pytest.mark.parametrize(
    "work",
    [
        lambda rank, step: 0.1 if step < 50 else 1.0,  # all are slow
        lambda rank, step: 0.3 if step // 5 % 2 == rank else 0.1,  # now one, now the other
        lambda rank, step: 0.3 if rank == 1 and step // 12 % 2 else 0.1,  # never for long
        lambda rank, step: 0.002 if rank else 0.001,  # nothing that anybody would notice
    ],
    ids=["all", "in turn", "for short", "a little"],
)
def test_what_is_no_straggler(work: Work) -> None:
    assert named(2, 400, work) == []


def test_as_many_as_half_of_the_ranks_are_named() -> None:
    slow = named(4, 100, lambda rank, step: 0.3 if rank % 2 else 0.1)
    assert [ranks for _, ranks in slow] == [frozenset({1, 3})]


def one_window(watch: StragglerWatch, end: int, host: str, alone: Mapping[int, float]) -> str | None:
    return watch.add(host, end, {rank: WorkTime(step=1.0, alone=seconds) for rank, seconds in alone.items()})


def test_the_text_has_the_evidence_and_no_host_speaks_for_another() -> None:
    watch = StragglerWatch(["a", "a", "b"], FACTOR)
    for end in (8, 16, 24):
        assert one_window(watch, end, "b", {0: 0.9, 1: 0.9, 2: 0.4, 7: 0.9, -1: 0.9, -2: 0.9}) is None
        said = one_window(watch, end, "a", {0: 0.1, 1: 0.11})
    assert said == (
        "stragglers: since step 1 all ranks wait for rank 2 (host b), which works 0.4 s of each step outside of collectives; "
        "0.11 s is usual"
    )
    assert watch.slow == {2}


@pytest.mark.parametrize(("slowest", "span"), [(0.4, "0.4 s"), (0.55, "0.4 to 0.55 s")])
def test_several_are_named_in_one_sentence(slowest: float, span: str) -> None:
    watch = StragglerWatch(["a", "a", "a", "b", "b"], FACTOR)
    for end in (8, 16, 24):
        one_window(watch, end, "a", {0: 0.1, 1: 0.1, 2: 0.1})
        said = one_window(watch, end, "b", {3: 0.4, 4: slowest})
    assert said == (
        "stragglers: since step 1 all ranks wait for rank 3 (host b), rank 4 (host b), "
        f"which work {span} of each step outside of collectives; 0.1 s is usual"
    )


def test_a_watch_that_goes_on_for_another_one_says_it_when_a_rank_is_no_straggler_any_more() -> None:
    watch = StragglerWatch(["a", "b"], FACTOR, [1, 7, -1])
    assert (watch.slow, watch.text) == ({1}, "stragglers: rank 1 (host b)")
    for end in (8, 16, 24):
        assert one_window(watch, end, "a", {0: 0.1}) is None
        said = one_window(watch, end, "b", {1: 0.1})
    assert said == "no straggler any more: rank 1 (host b)"
    assert (watch.slow, watch.text) == (set(), "no rank is a straggler")


def test_a_window_that_a_host_never_reports_is_given_up() -> None:
    watch = StragglerWatch(["a", "b"], FACTOR)
    for end in range(8, 800, 8):
        assert one_window(watch, end, "a", {0: 0.1}) is None
    assert not any(one_window(watch, end, "b", {1: 0.9}) for end in (8, 16, 24, 32))
    assert any(one_window(watch, end, "b", {1: 0.9}) for end in (776, 784, 792))


def test_it_can_be_switched_off() -> None:
    watch = StragglerWatch(["a", "b"], 0)
    assert not any(one_window(watch, end, host, {"ab".index(host): 0.1 + (host == "b")}) for end in (8, 16, 24, 32) for host in "ab")
