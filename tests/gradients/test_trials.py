"""Trials: each way has its turns, the slower ones drop out, and the first step of a visit tells nothing."""

from __future__ import annotations

from gemini_ft.trials import Trial, TrialRules

TERMS = TrialRules(visit=5, rounds=3, slower={1: 1.2, 2: 1.2})


def race(seconds: list[float], first: float = 9.0) -> tuple[int, list[int]]:
    """Who wins if every step but the first of a visit takes the same time, and how many steps each has had."""
    trial, steps = Trial.of(len(seconds)), [0] * len(seconds)
    while True:
        way = trial.current
        steps[way] += 1
        if trial.note(TERMS, first if trial.steps == 0 else seconds[way]) and (best := trial.judge(TERMS, trial.medians())) is not None:
            return best, steps


def test_the_fastest_wins_and_what_comes_near_is_tried_more() -> None:
    assert race([0.3]) == (0, [5])
    assert race([0.9, 0.3, 0.4]) == (1, [5, 5, 5])
    assert race([0.9, 0.35, 0.34]) == (2, [5, 15, 15])


def test_a_choice_may_change_with_more_rounds() -> None:
    trial = Trial.of(2)
    for seconds in ([1.1] * 5 + [1.0] * 5, [1.1] * 5 + [1.2] * 5):
        for each in seconds:
            over = trial.note(TERMS, each)
        assert over
        assert trial.judge(TERMS, trial.medians()) is None
    for each in [1.1] * 5 + [1.2] * 5:
        over = trial.note(TERMS, each)
    assert trial.judge(TERMS, trial.medians()) == 0


def test_single_long_steps_count_and_are_soon_enough() -> None:
    terms = TrialRules(visit=1, rounds=9, slower={1: 1.2}, enough=20.0)
    trial = Trial.of(3)
    assert not trial.note(terms, None)  # an interrupted step is tried again
    for seconds in (4.0, 3.9):
        assert not trial.note(terms, seconds)
    assert trial.note(terms, 6.0)
    assert trial.judge(terms, trial.medians(), trial.spent) is None
    assert trial.left == [0, 1]
    assert not trial.note(terms, 4.0)
    assert trial.note(terms, 3.9)
    assert trial.spent > terms.enough
    assert trial.judge(terms, trial.medians(), trial.spent) == 1


def test_a_way_whose_steps_were_all_interrupted_does_not_win() -> None:
    trial = Trial.of(2)
    for seconds in [None] * 5 + [1.0] * 5:
        over = trial.note(TERMS, seconds)
    assert over
    assert trial.judge(TERMS, trial.medians()) == 1
