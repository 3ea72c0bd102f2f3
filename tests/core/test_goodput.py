"""The ledger of time: every second has one phase, and a failure is charged with what it has cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.cli import main as cli
from gemini_ft.cli.goodput import ledgers
from gemini_ft.core.goodput import Phase, TimeLedger


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


def test_a_failure_of_which_nobody_has_told() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 1, 0)
    ledger.stepped(2.0, 1, 0.0)
    ledger.joined(9.0, 2, 1)
    ledger.stepped(10.0, 2, 0.0)
    assert [(failure.cause, failure.step, failure.resumed) for failure in ledger.failures] == [("", 1, 1)]
    assert ledger.failures[0].seconds == {Phase.RENDEZVOUS: 7}
    assert ledger.seconds[Phase.TRAINING] == 2


def test_a_rank_of_the_past_changes_nothing() -> None:
    ledger = TimeLedger(0.0)
    ledger.joined(1.0, 2, 5)
    ledger.joined(3.0, 1, 0)
    ledger.stepped(4.0, 5, 0.0)
    assert ledger.total == 1
    assert TimeLedger(0.0).shares() == dict.fromkeys(Phase, 0.0)


calls = st.one_of(
    st.tuples(st.just("joined"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("waited"), st.floats(0, 9)),
    st.tuples(st.just("restored")),
    st.tuples(st.just("stepped"), st.integers(0, 20), st.floats(0, 3)),
    st.tuples(st.just("failed"), st.just("died"), st.just("a")),
    st.tuples(st.just("ended")),
)


@given(st.lists(st.tuples(st.floats(-1, 5), calls)))
def test_whatever_happens_each_second_is_booked_once(course: list[tuple[float, tuple[str, ...]]]) -> None:
    """Also where clocks of hosts differ, so that time seems to go back."""
    ledger, now, latest = TimeLedger(0.0), 0.0, 0.0
    for pause, (call, *arguments) in course:
        now += pause
        latest = max(latest, now)
        getattr(ledger, call)(now, *arguments)
        assert min(ledger.seconds.values()) >= 0
        assert ledger.total <= latest + 1e-6
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
    assert found["failures"][0] | {"at": 0} == {
        "at": 0,
        "cause": "died",
        "host": "a",
        "step": 1,
        "resumed": 1,
        "lost_seconds": 5.0,
        "seconds": {"detection": 1.0, "rendezvous": 3.0, "restore": 1.0},
    }


def test_where_there_are_no_events_the_way_to_get_them_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMINI_EVENTS", raising=False)
    assert cli.main(["goodput"]) == 2
    assert "give the file that the run had in GEMINI_EVENTS" in capsys.readouterr().err
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
