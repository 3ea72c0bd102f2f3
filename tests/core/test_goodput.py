"""The ledger of time: every second has one phase, and a failure is charged with what it has cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gemini_ft.agent.lifecycle import agent_environment
from gemini_ft.cli import main as cli
from gemini_ft.cli.goodput import document, ledgers
from gemini_ft.core.goodput import LATEST, Phase, RunTime, TimeLedger, by_cause, longer
from gemini_ft.events import EventLog, read_events


def kept_by(ledger: TimeLedger, now: float = 0.0) -> RunTime:
    """The account that a ledger keeps at ``now``, in seconds of the system's clock."""
    kept = ledger.kept(now)
    assert kept is not None
    return kept


def test_a_run_that_fails_once() -> None:
    ledger = TimeLedger(100.0)
    ledger.joined(103.0, 1, 0)
    ledger.joined(104.0, 1, 0)  # the last rank
    ledger.stepped(106.0, 1, 0.0)
    ledger.stepped(106.5, 1, 0.0)  # the other rank, of the same step
    ledger.stepped(108.0, 2, 0.5)
    ledger.failed(111.0, "hang", "b")
    ledger.failed(111.5, "died", "a")  # ended by its launcher
    ledger.stepped(111.7, 3, 0.0)  # of a rank that is about to be ended
    ledger.waited(115.0, 1.0)
    ledger.joined(116.0, 2, 1)
    ledger.restored(118.0)
    ledger.stepped(120.0, 2, 0.0)
    ledger.stepped(123.0, 3, 0.0)
    ledger.ended(124.0)
    assert ledger.seconds == {
        Phase.TRAINING: 2 + 1.5 + 3 + 1,
        Phase.VALIDATION: 0,
        Phase.STALL: 0.5,
        Phase.DETECTION: 3,
        Phase.RENDEZVOUS: 4 + 3 + 1,
        Phase.STORAGE: 1,
        Phase.RESTORE: 2,
        Phase.REPLAY: 2,
    }
    assert ledger.total == 24
    (failure,) = ledger.failures
    assert (failure.cause, failure.host, failure.step, failure.resumed, failure.at) == ("hang", "b", 2, 1, 111.0)
    assert failure.seconds == {
        **dict.fromkeys((Phase.DETECTION,), 3),
        Phase.RENDEZVOUS: 4,
        Phase.STORAGE: 1,
        Phase.RESTORE: 2,
        Phase.REPLAY: 2,
        Phase.STALL: 0,
    }


def test_a_rank_that_was_stopped_and_is_woken_for_the_autopsy_makes_no_training_of_its_hang() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(0.0, 1, 0)
    ledger.stepped(1.0, 1, 0.0)
    ledger.stepped(12.0, 2, 0.0)  # stopped for ten seconds
    ledger.stepped(13.0, 3, 0.0)
    ledger.failed(13.5, "hang", "b", 1, stood=10.0)
    assert (ledger.seconds[Phase.TRAINING], ledger.seconds[Phase.DETECTION]) == (3.5, 10)
    assert ledger.failures[0].seconds == {Phase.DETECTION: 10}
    ledger.joined(14.0, 2, 3)
    ledger.stepped(15.0, 4, 0.0)
    ledger.failed(27.0, "hang", "b", 2, stood=10.0)  # the hang is in it
    assert (ledger.seconds[Phase.TRAINING], ledger.seconds[Phase.DETECTION], ledger.total) == (4.5, 22, 27)
    ledger.joined(28.0, 3, 3)
    ledger.stepped(40.0, 4, 0.0)  # again, and stopped in it
    ledger.failed(40.5, "hang", "b", 3, stood=10.0)
    assert (ledger.seconds[Phase.REPLAY], ledger.failures[1].seconds[Phase.REPLAY]) == (2.5, 2.5)
    assert ledger.failures[2].seconds == {Phase.DETECTION: 10}


def test_validations_are_no_training_and_those_of_a_replay_are_lost() -> None:
    """Also where a step is told after the validation that follows it, and where ranks pause at different times."""
    ledger = TimeLedger(0.0)
    ledger.joined(0.0, 1, 0)
    ledger.stepped(2.0, 1, 0.0)
    ledger.validated(12.0, 9.0)  # behind step 2, which is told of when the next one begins
    ledger.validated(12.5, 9.0)  # another rank, of the same validation
    ledger.stepped(13.0, 2, 0.0)
    assert (ledger.seconds[Phase.TRAINING], ledger.seconds[Phase.VALIDATION], ledger.goodput) == (3.5, 9.5, 1.0)
    ledger.failed(20.0, "died", "a")
    ledger.validated(20.5, 3.0)  # of a rank that is about to be ended
    ledger.joined(21.0, 2, 1)
    ledger.validated(30.0, 8.0)  # of step 2, once more
    ledger.stepped(31.0, 2, 0.0)
    ledger.validated(33.0, 1.0)
    ledger.ended(33.0)
    assert ledger.seconds == dict.fromkeys(Phase, 0) | {
        Phase.TRAINING: 3.5 + 1,
        Phase.VALIDATION: 9.5 + 1,
        Phase.DETECTION: 7,
        Phase.RENDEZVOUS: 1,
        Phase.REPLAY: 10,
    }
    assert ledger.failures[0].seconds == {Phase.DETECTION: 7, Phase.RENDEZVOUS: 1, Phase.REPLAY: 10, Phase.STALL: 0}
    assert kept_by(ledger).goodput == 15 / 33


def test_a_counter_does_not_go_back_where_training_turns_out_to_have_been_a_hang() -> None:
    """Prometheus would take it for one that began anew at 0, and add all of it once more."""
    ledger = TimeLedger(0.0)
    ledger.joined(0.0, 1, 0)
    ledger.stepped(1000.0, 1, 0.0)
    ledger.stepped(1012.0, 2, 0.0)  # stopped for ten seconds
    ledger.failed(1013.0, "hang", "b", 1, stood=10.0)
    assert (ledger.seconds[Phase.TRAINING], ledger.own[Phase.TRAINING]) == (1003, 1012)
    assert ledger.seconds[Phase.DETECTION] == ledger.own[Phase.DETECTION] == 10
    ledger.joined(1014.0, 2, 2)
    ledger.stepped(1020.0, 3, 0.0)
    assert ledger.own[Phase.TRAINING] == 1012, "what comes later makes up for it"
    ledger.stepped(1030.0, 4, 0.0)
    assert ledger.own == ledger.seconds


def test_a_hang_that_began_before_the_last_rank_had_its_state_takes_nothing_from_a_replay_of_the_past() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(0.0, 1, 0)
    ledger.stepped(5.0, 5, 0.0)
    ledger.failed(6.0, "died", "a", 1)
    ledger.joined(7.0, 2, 0)
    ledger.stepped(9.0, 2, 0.0)
    ledger.failed(12.0, "died", "a", 2)  # in its replay
    ledger.joined(15.0, 3, 0)
    ledger.restored(19.0)  # by the last rank; another one has made no progress since 16.5
    ledger.failed(28.0, "hang", "b", 3, stood=10.0)
    assert (ledger.seconds[Phase.REPLAY], ledger.seconds[Phase.DETECTION]) == (2, 1 + 3 + 9)
    assert ledger.failures[2].seconds == {Phase.DETECTION: 9}


def test_a_hang_before_the_first_step_takes_nothing_from_the_training_of_the_past() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(0.0, 1, 0)
    ledger.stepped(100.0, 100, 0.0)
    ledger.failed(101.0, "died", "a", 1)
    ledger.joined(110.0, 2, 100)
    ledger.restored(120.0)
    ledger.failed(600.0, "hang", "b", 2, stood=590.0)
    assert (ledger.seconds[Phase.TRAINING], ledger.seconds[Phase.DETECTION]) == (100, 481)


def test_a_failure_of_which_nobody_has_told() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.stepped(2.0, 1, 0.0)
    ledger.joined(9.0, 2, 1)
    ledger.stepped(10.0, 2, 0.0)
    assert [(failure.cause, failure.step, failure.resumed) for failure in ledger.failures] == [("", 1, 1)]
    assert ledger.failures[0].seconds == {Phase.RENDEZVOUS: 7}
    assert ledger.seconds[Phase.TRAINING] == 2


def test_what_was_kept_of_a_run_goes_on_where_nobody_has_seen_it() -> None:
    first = TimeLedger(0.0)
    first.joined(2.0, 1, 0)
    first.stepped(5.0, 1, 0.0)
    kept = kept_by(first, 1000.0)
    alone = TimeLedger(50.0)  # after the loss of everything, from what was stored at step 1
    assert alone.kept(1000.0) is None
    alone.go_on(kept, 1000.0, 51.0)
    alone.waited(52.0, 1.0)
    alone.joined(53.0, 2, 1)
    alone.restored(54.0)
    alone.stepped(56.0, 2, 0.0)
    expected = {Phase.TRAINING: 3 + 2, Phase.RENDEZVOUS: 2 + 1 + 1, Phase.STORAGE: 1, Phase.RESTORE: 1}
    assert {phase: seconds for phase, seconds in alone.seconds.items() if seconds} == expected
    assert [(failure.cause, failure.step, failure.resumed, sum(failure.seconds.values())) for failure in alone.failures] == [("", 1, 1, 4)]
    alone.go_on(kept, 1000.0, 57.0)  # it has seen the run by now
    assert alone.total == 11
    alone.failed(57.0, "died", "a")
    beside = TimeLedger(70.0)  # the agent of a host that takes the place of a lost one
    told = kept_by(alone, 1000.0)
    assert told.failures[1].at == 1057.0
    beside.go_on(told, 990.0, 71.0)
    beside.joined(71.0, 3, 1)
    beside.restored(72.0)
    beside.stepped(74.0, 2, 0.0)
    assert [(failure.cause, failure.at) for failure in beside.failures] == [("", 60.0), ("died", 67.0)]
    assert beside.failures[1].seconds == {Phase.DETECTION: 1, Phase.RENDEZVOUS: 1, Phase.RESTORE: 1, Phase.REPLAY: 2, Phase.STALL: 0}
    assert sum(beside.own.values()) == 4
    assert len(alone.failures[1].seconds) == 1, "the ledgers share nothing"


def test_an_agent_that_begins_in_the_middle_of_an_attempt_books_all_of_it() -> None:
    before = TimeLedger(0.0)
    before.joined(1.0, 1, 0)
    kept = kept_by(before)
    ledger = TimeLedger(20.0)
    ledger.go_on(kept, 0.0, 2.0)
    ledger.joined(2.0, 2, 0)
    ledger.stepped(21.0, 9, 0.5)
    assert (ledger.seconds[Phase.TRAINING], ledger.seconds[Phase.STALL], ledger.total) == (18.5, 0.5, 20)
    assert [(failure.cause, failure.at, failure.resumed, sum(failure.seconds.values())) for failure in ledger.failures] == [("", 2.0, 0, 0)]
    assert {phase: seconds for phase, seconds in ledger.own.items() if seconds} == {Phase.TRAINING: 0.5, Phase.STALL: 0.5}


@pytest.mark.parametrize("is_told", [False, True])
def test_an_agent_that_is_replaced_in_an_attempt_knows_of_the_same_failure(is_told: bool) -> None:
    before = TimeLedger(0.0)
    before.joined(1.0, 1, 0)
    before.stepped(5.0, 5, 0.0)
    if is_told:
        before.failed(6.0, "hang", "b", 1)
    kept = kept_by(before)
    found = []
    for began in (10.0, 25.0):  # the second replaces the first
        ledger = TimeLedger(began)
        ledger.go_on(kept, 0.0, 10.0)
        ledger.waited(12.0, 2.0)
        ledger.joined(12.0, 2, 3)
        for step in range(4, 8):
            ledger.stepped(22.0 + step, step, 0.0)
        found.append((ledger.seconds, ledger.failures))
        assert sum(ledger.own.values()) == 29.0 - began
    assert found[0] == found[1]
    (failure,) = found[1][1]
    assert (failure.cause, failure.step, failure.resumed, failure.seconds[Phase.STORAGE]) == ("hang" if is_told else "", 5, 3, 2)


def test_a_host_that_comes_back_takes_the_time_of_those_that_went_on() -> None:
    away, others = TimeLedger(0.0), TimeLedger(0.0)
    for ledger in (away, others):
        ledger.joined(1.0, 1, 0)
        ledger.stepped(5.0, 5, 0.0)
    away.failed(6.0, "drain", "a", 1)
    others.failed(6.0, "died", "b", 1)
    others.joined(8.0, 2, 5)
    others.stepped(100.0, 50, 0.0)
    others.failed(110.0, "hang", "b", 2)
    kept, stale = kept_by(others), kept_by(away)
    assert longer(stale, kept) is kept
    assert longer(replace(stale, seconds={Phase.TRAINING: 1e6}), kept) is kept
    own = dict(away.own)
    away.go_on(kept, 0.0, 118.0)
    assert away.own == own
    away.waited(120.0, 2.0)
    away.joined(121.0, 3, 40)
    away.stepped(122.0, 41, 0.0)
    assert [(failure.cause, failure.step, failure.resumed) for failure in away.failures] == [("died", 5, 5), ("hang", 50, 40)]
    gained = {phase: seconds - kept.seconds[phase] for phase, seconds in away.seconds.items() if seconds != kept.seconds[phase]}
    assert gained == {Phase.STORAGE: 2, Phase.RENDEZVOUS: 1, Phase.REPLAY: 1}
    assert sum(away.own.values()) == sum(own.values()) + 4


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_that_had_finished_and_begins_anew_with_another_agent_trains_nothing_again(is_interrupted: bool) -> None:
    before = TimeLedger(0.0)
    before.joined(1.0, 1, 0)
    before.stepped(5.0, 5, 0.0)
    before.ended(6.0, is_interrupted)
    kept = kept_by(before)
    ledger = TimeLedger(50.0)
    ledger.go_on(kept, 0.0, 50.0)
    ledger.joined(51.0, 2, 0)
    ledger.stepped(53.0, 1, 0.0)
    assert (ledger.seconds[Phase.REPLAY], ledger.seconds[Phase.TRAINING]) == ((2, 5) if is_interrupted else (0, 7))


def test_of_many_failures_the_older_ones_are_added_up_by_cause() -> None:
    ledger = TimeLedger(0.0)
    for number in range(100):
        ledger.joined(4.0 * number + 1, number + 1, number)
        ledger.stepped(4.0 * number + 2, number + 1, 0.0)
        ledger.failed(4.0 * number + 4, "hang" if number % 4 else "died", "a")
    assert len(ledger.failures) < 40
    assert {failure.cause: failure.count for failure in by_cause(ledger.failures)} == {"died": 25, "hang": 75}
    assert sum(failure.seconds[Phase.DETECTION] for failure in ledger.failures) == ledger.seconds[Phase.DETECTION] == 200
    kept = kept_by(ledger)
    assert TypeAdapter(RunTime).validate_json(TypeAdapter(RunTime).dump_json(kept)) == kept


FAILURE = {"at": 1.0, "cause": "died", "host": "a", "step": 1}
WRONG: list[dict[str, Any]] = [
    {"seconds": {"training": math.nan}},
    {"seconds": {"training": -1}},
    {"seconds": {"training": 1e308}},
    {"seconds": {"training": 10**400}},
    {"seconds": {"sleep": 1.0}},
    {"seconds": {}, "is_lost": True},
    {"seconds": {}, "incarnation": 2**64},
    {"seconds": {}, "furthest": -1},
    {"seconds": {}, "failures": [FAILURE] * 1025},
    *(
        {"seconds": {}, "failures": [FAILURE | wrong]}
        for wrong in (
            *({"at": at} for at in (math.nan, math.inf, 1e18, -1e11)),
            *({"step": 2**64}, {"resumed": 2**64}, {"incarnation": -1}, {"count": 0}, {"count": 2**53}),
            *({"cause": "x" * 1025}, {"host": "x" * 1025}, {"seconds": {"replay": 1e308}}),
        )
    ),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_ledger_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(RunTime).validate_python(wrong)


def test_the_largest_ledger_that_is_accepted_can_be_gone_on_from() -> None:
    most = 2**53 - 1
    seconds = dict.fromkeys(Phase, 1e12)
    about: dict[str, Any] = {"at": 4e10, "host": "x" * 1024, "step": most, "resumed": most, "count": most, "seconds": seconds}
    failures = [FAILURE | about | {"cause": f"{number:01024}"} for number in range(1024)]
    given = {"seconds": seconds, "furthest": most, "incarnation": most - 1, "failures": failures}
    for is_lost in (False, True):
        ledger = TimeLedger(0.0)
        ledger.go_on(TypeAdapter(RunTime).validate_python(given | {"is_lost": is_lost}), -4e10, 1.0)
        ledger.joined(2.0, most, most)
        ledger.failed(3.0, "died", "a", most)
        kept = kept_by(ledger, 4e10)
        assert len(kept.failures) <= 65 + 8
        assert kept.failures[0].cause != kept.failures[64].cause == "other"
        assert len(by_cause(kept.failures)) == 65
        assert TypeAdapter(RunTime).validate_json(TypeAdapter(RunTime).dump_json(kept)) == kept
        json.dumps(document(kept))
        assert datetime.fromtimestamp(-LATEST)
        assert datetime.fromtimestamp(LATEST)


def test_a_rank_of_the_past_changes_nothing() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 2, 5)
    ledger.joined(3.0, 1, 0)
    ledger.stepped(4.0, 5, 0.0)
    assert ledger.total == 1
    assert TimeLedger(0.0).shares() == dict.fromkeys(Phase, 0.0)


def test_a_failure_of_which_nobody_has_told_before_a_wait_for_storage() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.stepped(10.0, 1, 0.0)
    ledger.waited(100.0, 80.0)
    ledger.joined(101.0, 2, 1)
    (failure,) = ledger.failures
    assert (failure.at, failure.step, failure.resumed) == (10.0, 1, 1)
    assert failure.seconds == {Phase.RENDEZVOUS: 11, Phase.STORAGE: 80}


def test_a_wait_of_a_host_whose_clock_is_ahead_is_no_failure() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(10.0, 1, 0)
    ledger.waited(10.1, 5.0)
    ledger.joined(10.2, 1, 0)
    ledger.stepped(11.0, 1, 0.0)
    assert not ledger.failures
    assert ledger.seconds[Phase.TRAINING] == pytest.approx(0.8)


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_start_after_an_orderly_end_is_no_failure(is_interrupted: bool, waits: bool) -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.stepped(10.0, 1, 0.0)
    ledger.ended(11.0, is_interrupted)
    ledger.ended(12.0, is_interrupted)  # the other rank
    if waits:
        ledger.waited(86_400.0, 20.0)
    ledger.joined(86_400.0, 2, 1)
    ledger.joined(86_402.0, 2, 1)
    ledger.stepped(86_405.0, 2, 0.0)
    assert not ledger.failures
    assert ledger.seconds[Phase.STORAGE] == (20 if waits else 0)
    assert ledger.seconds[Phase.RENDEZVOUS] == 3
    assert ledger.seconds[Phase.TRAINING] == 14
    assert ledger.total == (37 if waits else 17)
    ledger.failed(86_406.0, "died", "a")  # the attempt after it can fail again
    assert [failure.step for failure in ledger.failures] == [2]


def test_an_end_after_an_interrupt_is_no_failure() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.ended(2.0, is_interrupted=True)
    ledger.failed(3.0, "died", "a")  # its launcher did not wait
    ledger.joined(1000.0, 2, 0)
    assert not ledger.failures
    assert ledger.total == 2


def test_an_interrupt_after_a_failure_ends_the_run() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.failed(3.0, "died", "a")
    ledger.ended(4.0, is_interrupted=True)
    ledger.joined(1000.0, 2, 0)
    ledger.stepped(1001.0, 1, 0.0)
    assert [failure.seconds for failure in ledger.failures] == [{Phase.DETECTION: 2}]
    assert ledger.total == 4


def test_a_worker_that_fails_when_others_have_finished_is_a_failure() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.ended(2.0)
    ledger.failed(3.0, "died", "a")
    ledger.joined(5.0, 2, 0)
    assert [failure.seconds for failure in ledger.failures] == [{Phase.DETECTION: 1, Phase.RENDEZVOUS: 2}]


def test_an_end_of_the_past_that_is_told_late_is_no_failure() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.failed(2.0, "died", "a", 1)
    ledger.joined(3.0, 2, 0)
    ledger.failed(3.1, "died", "b", 1)
    ledger.stepped(5.0, 1, 0.0)
    assert len(ledger.failures) == 1
    assert ledger.seconds[Phase.TRAINING] == pytest.approx(2)
    ledger.failed(6.0, "died", "b", 2)
    assert len(ledger.failures) == 2


calls = st.one_of(
    st.tuples(st.just("joined"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("waited"), st.floats(0, 9)),
    st.tuples(st.just("restored")),
    st.tuples(st.just("stepped"), st.integers(0, 20), st.floats(0, 3)),
    st.tuples(st.just("validated"), st.floats(0, 9)),
    st.tuples(st.just("failed"), st.just("died"), st.just("a"), st.none() | st.integers(0, 5), st.floats(0, 9)),
    st.tuples(st.just("ended"), st.booleans()),
)


@given(st.lists(st.tuples(st.floats(-1, 5), calls)))
def test_whatever_happens_each_second_is_booked_once(course: list[tuple[float, tuple[str, ...]]]) -> None:
    """Also where clocks of hosts differ, so that time seems to go back."""
    ledger, now, latest, counted = TimeLedger(0.0), 0.0, 0.0, dict[Phase, float]()
    for pause, (call, *arguments) in course:
        now += pause
        latest = max(latest, now)
        getattr(ledger, call)(now, *arguments)
        assert min(ledger.seconds.values()) >= 0
        assert all(ledger.own[phase] >= seconds for phase, seconds in counted.items()), "a counter goes back"
        counted = dict(ledger.own)
        assert ledger.total <= latest + 1e-6
        assert len(kept.failures if (kept := ledger.kept(0.0)) is not None else ledger.failures) == len(ledger.failures)
    assert sum(ledger.shares().values()) == pytest.approx(1.0 if ledger.total else 0.0)
    assert sum(sum(failure.seconds.values()) for failure in ledger.failures) <= ledger.total + 1e-6


# -- the command


def test_events_of_several_files_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    who = {"stream": "main", "host": "a", "rank": 0}
    course = [
        {"event": "joined", "at": 10.0, "incarnation": 1, "iteration": 0, **who},
        {"event": "step", "at": 12.0, "iteration": 1, **who},  # of a version that did not write down what was blocked
        {"event": "lost", "at": 13.0, "cause": "died", **who},
        {"event": "joined", "at": 16.0, "incarnation": 2, "iteration": 1, **who},
        {"event": "resumed", "at": 17.0, "iteration": 1, "sources": {}, "seconds": 0.5, **who},
        {"event": "step", "at": 20.0, "iteration": 2, "blocked": 0.0, **who},
        {"event": "left", "at": 20.0, "finished": True, "interrupted": False, **who},
    ]
    files = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(files):
        path.write_text("".join(f"{json.dumps(event)}\n" for event in course[number::2]))
    assert cli.main(["goodput", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("main: 10 s, goodput 50.00%\n")
    assert "detection            1 s   10.00%" in out
    assert "died" in out
    assert cli.main(["goodput", "--json", *map(str, files)]) == 0
    found = json.loads(capsys.readouterr().out)["main"]
    assert found["total_seconds"] == 10
    assert found["causes"] == {"died": {"failures": 1, "lost_seconds": 5.0, "seconds": found["failures"][0]["seconds"]}}
    assert found["failures"][0] | {"at": 0} == {
        "at": 0,
        "cause": "died",
        "failures": 1,
        "host": "a",
        "step": 1,
        "resumed": 1,
        "lost_seconds": 5.0,
        "seconds": {"detection": 1.0, "rendezvous": 3.0, "restore": 1.0},
    }


@pytest.mark.parametrize(
    "told", [{}, None, {"measures": None}, {"measures": {}}, *({"measures": {"run": wrong}} for wrong in (7, WRONG[4]))]
)
def test_a_ledger_of_an_agent_that_cannot_be_is_left_out(
    told: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"measures": {"run": {"seconds": {"training": 5.0}, "incarnation": 1}}}
    accounts = [{"run": "r", "host": host, "streams": {"main": stream}} for host, stream in {"a": told, "b": good}.items()]
    monkeypatch.setattr("gemini_ft.cli.goodput.documents_of", lambda _: accounts)
    assert cli.main(["goodput", "r"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("main: 5 s, goodput 100.00%\n")
    assert said.err.startswith("the ledger of main that host a has cannot be read, and is left out (")
    del accounts[1]
    assert cli.main(["goodput", "r"]) == 1


def test_where_there_are_no_events_the_way_to_get_them_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMINI_EVENTS", raising=False)
    assert cli.main(["goodput"]) == 2
    assert "give its id, or the file that it had in GEMINI_EVENTS" in capsys.readouterr().err
    assert cli.main(["goodput", str(tmp_path / "none")]) == 2
    assert f"there is no file {tmp_path / 'none'}" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "empty"))
    assert cli.main(["goodput"]) == 1
    assert "no rank has joined a run yet" in capsys.readouterr().out


def test_streams_have_ledgers_of_their_own() -> None:
    events = [
        {"event": "joined", "at": at, "incarnation": 1, "iteration": 0, "stream": stream} for at, stream in ((1.0, "one"), (2.0, "two"))
    ]
    assert {*ledgers(events)} == {"one", "two"}


def _attempt(run: str | None, begins: float, steps: int, incarnation: int = 1, resumed: int = 0) -> list[dict[str, Any]]:
    """An attempt of two ranks with a step each second."""
    whose = {"stream": "main", "host": "a"} | ({"run": run} if run else {})
    found: list[dict[str, Any]] = []
    for rank in range(2):
        found.append({"event": "joined", "at": begins, "incarnation": incarnation, "iteration": resumed, "rank": rank, **whose})
        for step in range(1, steps + 1):
            found.append({"event": "step", "at": begins + step, "iteration": resumed + step, "blocked": 0.0, "rank": rank, **whose})
    return found


def _end(run: str, at: float, **facts: Any) -> dict[str, Any]:
    return {"at": at, "run": run, "stream": "main", "host": "a", "rank": 0, **facts}


def test_runs_have_ledgers_of_their_own() -> None:
    first = [*_attempt("one", 0.0, 100), _end("one", 100.0, event="left", finished=True, interrupted=False)]
    second = [*_attempt("two", 200.0, 50), _end("two", 252.0, event="lost", cause="died", incarnation=1)]
    found = ledgers([*first, *second, *_attempt("two", 260.0, 10, 2, 50)])
    assert {*found} == {"one/main", "two/main"}
    assert found["one/main"].total == 100
    assert not found["one/main"].failures
    (failure,) = found["two/main"].failures
    assert (failure.step, failure.resumed) == (50, 50)
    assert failure.seconds == {Phase.DETECTION: 2, Phase.RENDEZVOUS: 8}
    assert found["two/main"].seconds[Phase.REPLAY] == 0


def test_a_command_that_is_started_again_after_its_end_counts_anew() -> None:
    """Its name is the same, and its attempts count from 1 again, as its agents have left."""
    first = [*_attempt("one", 0.0, 100), _end("one", 100.0, event="left", finished=True, interrupted=False)]
    second = [*_attempt("one", 200.0, 50), _end("one", 252.0, event="lost", cause="died", incarnation=1)]
    ledger = ledgers([*first, *second, *_attempt("one", 260.0, 10, 2, 50)])["main"]
    (failure,) = ledger.failures
    assert (failure.step, failure.resumed) == (50, 50)
    assert failure.seconds == {Phase.DETECTION: 2, Phase.RENDEZVOUS: 8}
    assert ledger.seconds[Phase.REPLAY] == 0
    assert ledger.total == 170


def test_an_end_that_is_told_late_is_of_its_attempt() -> None:
    """The agent's clock is behind, or the agent is: the next attempt has begun."""
    ends = [_end("one", at, event="lost", cause="died", incarnation=1) for at in (12.0, 20.5)]
    ledger = ledgers([*_attempt("one", 0.0, 10), *_attempt("one", 20.0, 10, 2, 10), *ends])["main"]
    assert len(ledger.failures) == 1
    assert ledger.seconds[Phase.TRAINING] == 20


def test_a_restart_without_memory_counts_from_1_again() -> None:
    course = _attempt("one", 0.0, 10) + _attempt("one", 20.0, 10, 2, 10) + _attempt("one", 40.0, 30)
    ledger = ledgers(course)["main"]
    assert [(failure.step, failure.resumed) for failure in ledger.failures] == [(10, 10), (20, 0)]
    assert ledger.seconds == {**dict.fromkeys(Phase, 0.0), Phase.TRAINING: 30, Phase.RENDEZVOUS: 20, Phase.REPLAY: 20}


def test_events_that_name_no_run_are_of_the_one_that_is_named() -> None:
    course = [*_attempt(None, 0.0, 10), _end("one", 12.0, event="lost", cause="died", incarnation=1)]
    assert [failure.cause for failure in ledgers(course)["main"].failures] == ["died"]
    assert {*ledgers(course + _attempt("two", 20.0, 3))} == {"?/main", "two/main"}


def test_lines_that_are_no_events_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other: list[object] = [
        1,
        None,
        [],
        {"event": "step"},
        {"event": "step", "at": "soon", "stream": "main"},
        {"event": "step", "at": float("nan"), "stream": "main"},
        {"event": "step", "at": 10**400, "stream": "main"},
        {"event": ["step"], "at": 1.0, "stream": "main"},
        {"event": "step", "at": 1.0, "stream": []},
        {"event": "step", "at": 1.0, "stream": "main", "iteration": "two"},
        {"event": "waited", "at": 3.0, "stream": "main", "seconds": None},
        {"event": "joined", "at": 3.0, "stream": "main", "incarnation": None, "iteration": 1},
    ]
    path = tmp_path / "events"
    lines = [json.dumps(line) for line in [*_attempt("one", 0.0, 10), *other]]
    path.write_bytes(b"\xff\xfe\n" + "".join(f"{line}\n" for line in lines).encode())
    assert cli.main(["goodput", str(path), str(path)]) == 0  # a file that is given twice counts once
    assert capsys.readouterr().out.startswith("main: 10 s, goodput 100.00%\n")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["goodput", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder; give the files in it" in capsys.readouterr().err


# -- how events are written


def test_each_line_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("GEMINI_RUN_ID", "one")
    for log in (EventLog(stream="main"), EventLog("two", stream="main")):
        log.write("step")
        log.close()
    assert [event["run"] for event in read_events(tmp_path / "events")] == ["one", "two"]


def test_the_agent_writes_to_the_file_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMINI_EVENTS", "events")
    assert agent_environment()["GEMINI_EVENTS"] == str(tmp_path / "events")
    monkeypatch.setenv("GEMINI_EVENTS", "")
    assert agent_environment()["GEMINI_EVENTS"] == ""
