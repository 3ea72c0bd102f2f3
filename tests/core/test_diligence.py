"""A worker's judgement of its host's agent: slow, busy, or waiting for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.diligence import LATE, Diligence

PATIENCE = 10.0


class Watched:
    """A training loop that asks at every step, and an agent that answers when it gets to it.

    Args:
        step: seconds between requests; at the end of each the snapshot is given up.
        awake: seconds of each period in which the agent runs.
        period: seconds.
        work: the share of its time that the agent is at work, or waits for a processor.
    """

    def __init__(self, *, step: float, awake: float, period: float = 1.0, work: float = 0.0) -> None:
        self.diligence = Diligence(PATIENCE)
        self._step, self._awake, self._period, self._work = step, awake, period, work
        self.now = 0.0

    def found_slow(self, until: float, commits: Callable[[float], bool] = lambda now: False) -> float | None:
        """When the agent was found to be slow; None: it was not."""
        while self.now < until:
            self.diligence.asked(self.now)
            last = self.now + self._step
            phase = self.now % self._period
            answer = self.now if phase < self._awake else self.now - phase + self._period
            while self.now < last:
                self.now = min(last, self.now + 0.25)
                if answer <= self.now:
                    self.diligence.answered()
                if self.diligence.look(self.now, lambda: self._work * self.now):
                    return self.now
            if commits(self.now):
                self.diligence.committed()
        return None


@pytest.mark.parametrize(
    ("step", "awake", "period"),
    [(0.13, 0.02, 1.0), (0.013, 0.02, 1.0), (0.13, 0.01, 1.0), (0.13, 0.1, 1.0), (2.0, 0.1, 8.0), (0.13, 0.1, 8.0)],
)
def test_an_agent_that_owes_answers_most_of_the_time_is_slow(step: float, awake: float, period: float) -> None:
    found = Watched(step=step, awake=awake, period=period).found_slow(60.0)
    assert found is not None
    assert PATIENCE <= found <= 1.5 * PATIENCE + period


@pytest.mark.parametrize("step", [0.013, 0.13, 2.0])
def test_one_that_waits_for_others_answers_and_is_not(step: float) -> None:
    """A slow peer, a slow network, a big state: the agent says at once that no slot is free."""
    assert Watched(step=step, awake=1.0).found_slow(1000.0) is None


@pytest.mark.parametrize("work", [0.6, 1.0])
def test_one_that_is_at_work_is_not(work: float) -> None:
    """Neither where training leaves it no processor, nor where it hashes many bytes."""
    assert Watched(step=0.13, awake=0.02, work=work).found_slow(1000.0) is None


def test_one_under_which_commits_go_on_is_not() -> None:
    assert Watched(step=0.13, awake=0.02).found_slow(1000.0, lambda now: int(now) % 8 == 0) is None


def test_a_worker_that_was_stopped_itself_blames_nobody() -> None:
    diligence = Diligence(PATIENCE)
    for stop in range(1, 10):
        diligence.asked(100.0 * stop)
        assert not diligence.look(100.0 * stop + 90.0, lambda: 0.0)  # the first thing that it does when it runs again
        diligence.answered()
        for look in range(5):
            assert not diligence.look(100.0 * stop + 90.0 + look, lambda: 0.0)


@pytest.mark.parametrize(("first", "last", "is_slow"), [(None, 0.0, False), (0.0, None, False), (None, None, False), (0.0, 0.0, True)])
def test_one_whose_work_is_unknown_is_not(first: float | None, last: float | None, is_slow: bool) -> None:
    """Where the kernel does not say, or hides the process: an agent that is at work must not be replaced again and again."""
    diligence = Diligence(PATIENCE)
    diligence.asked(0.0)
    for look in range(40):
        assert not diligence.look(1.0 + look / 4, lambda: first)
    assert diligence.look(1.0 + PATIENCE, lambda: last) == is_slow


def test_patience_doubles_where_it_does_not_help_and_comes_back() -> None:
    watched, found = Watched(step=0.13, awake=0.02), list[float]()
    for _ in range(6):
        before = watched.now
        assert watched.found_slow(1e9) is not None
        watched.diligence.replaced(watched.now)
        found.append(watched.now - before)
    for took, factor in zip(found, (1, 1, 2, 4, 8, 8), strict=True):  # one slow agent in an hour is no reason for patience
        assert factor * PATIENCE <= took < factor * PATIENCE + 5
    watched.now += 60 * PATIENCE
    watched.found_slow(1e9)
    watched.diligence.replaced(watched.now)
    assert watched.diligence.patience == PATIENCE


def test_patience_doubles_for_all_workers_of_a_host() -> None:
    """Whichever of them has found the agent slow."""
    workers, found, now = [Diligence(PATIENCE) for _ in range(8)], list[float](), 0.0
    for turn in range(6):
        before, slow = now, False
        while not slow:
            now += 0.25
            for number in range(8):  # another one is the first each time
                worker = workers[(turn + number) % 8]
                worker.asked(now)
                if slow := worker.look(now, lambda: 0.0):
                    break
        for worker in workers:
            worker.replaced(now)
        found.append(now - before)
    for took, factor in zip(found, (1, 1, 2, 4, 8, 8), strict=True):
        assert factor * PATIENCE <= took < factor * PATIENCE + 5


def test_an_agent_that_ends_and_owed_nothing_changes_no_patience() -> None:
    """It was ended, by a failure or a drill, and the next one is watched like the first."""
    watched = Watched(step=0.13, awake=1.0)
    for _ in range(10):
        assert watched.found_slow(watched.now + 3 * PATIENCE) is None
        watched.diligence.replaced(watched.now)
    assert watched.diligence.patience == PATIENCE


def test_it_can_be_switched_off() -> None:
    diligence = Diligence(0.0)
    diligence.asked(0.0)
    assert not any(diligence.look(float(now), lambda: 0.0) for now in range(1000))


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from(["ask", "answer", "look", "commit", "begin"])), max_size=200))
def test_whatever_happens_none_is_slow_that_owes_nothing_or_before_its_time(events: list[tuple[float, str]]) -> None:
    diligence, now, last, asked = Diligence(PATIENCE), 0.0, 0.0, None
    for pause, event in events:
        now += pause
        if event == "look":
            if diligence.look(now, lambda: 0.0):
                assert asked is not None
                assert now - asked >= LATE
                assert now - last >= PATIENCE
                last = now
        elif event == "ask":
            diligence.asked(now)
            asked = now if asked is None else asked
        else:
            {"answer": diligence.answered, "commit": diligence.committed, "begin": diligence.begin}[event]()
            asked = asked if event == "commit" else None
            last = last if event == "answer" else now
