"""What the thread that copies snapshots tells the agent."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Self

import pytest
from agent_kit import connection, eventually

from gemini_ft.core.diligence import Diligence
from gemini_ft.errors import AgentError
from gemini_ft.wire.worker_messages import ENDING, LATE, GiveUp, Request, ToAgent
from gemini_ft.worker.copy_window import CopyWindow
from gemini_ft.worker.outcomes import Outcomes, Stats
from gemini_ft.worker.snapshot import PendingSnapshot, Snapshotter


def _job(iteration: int) -> PendingSnapshot:
    return PendingSnapshot(iteration=iteration, extras=b"", digest=None, marks=[], ready=None)


def test_the_agent_hears_of_a_snapshot_that_is_given_up_before_the_thread_has_seen_it() -> None:
    """Training steps may be shorter than it takes until a thread runs on a busy host; who closes then waits for the snapshot's fate."""
    told: list[ToAgent] = []
    discarded: list[int] = []
    held, busy = threading.Event(), threading.Event()

    def tell(message: ToAgent) -> None:
        told.append(message)
        busy.set()
        held.wait(60)

    snapshotter = Snapshotter(
        0,
        root=lambda job: "",
        client=connection(tell),
        recover=lambda: None,
        on_discard=lambda iteration, _: discarded.append(iteration),
        raises=False,
        waits=False,
        timeout=60.0,
        diligence=Diligence(0.0),
    )
    for iteration in (1, 2, 3):
        snapshotter.submit(_job(iteration))
        assert busy.wait(60)  # with the first one: it sees the others only afterwards
        snapshotter.before_update()
    held.set()
    eventually(lambda: len(told) == 6)
    assert [(type(message), message.iteration) for message in told if isinstance(message, Request | GiveUp)] == [
        (kind, iteration) for iteration in (1, 2, 3) for kind in (Request, GiveUp)
    ]
    assert discarded == [1, 2, 3]
    snapshotter.stop()


def test_of_the_snapshots_that_are_given_up_while_an_agent_is_replaced_a_few_are_remembered() -> None:
    told: list[ToAgent] = []
    replacing, replaced = threading.Event(), threading.Event()

    def tell(message: ToAgent) -> None:
        if not replaced.is_set():
            raise AgentError("the agent is gone")
        told.append(message)

    def replace() -> None:
        replacing.set()
        replaced.wait(60)

    snapshotter = Snapshotter(
        0,
        root=lambda job: "",
        client=connection(tell, lambda: not replaced.is_set()),
        recover=replace,
        on_discard=lambda *_: None,
        raises=False,
        waits=False,
        timeout=60.0,
        diligence=Diligence(0.0),
    )
    snapshotter.submit(_job(1))
    assert replacing.wait(60)
    for iteration in range(2, 100):
        snapshotter.submit(_job(iteration))
        snapshotter.before_update()
    replaced.set()
    eventually(lambda: bool(told) and isinstance(told[-1], GiveUp) and told[-1].iteration == 99)
    assert len([message for message in told if isinstance(message, GiveUp)]) < 20
    snapshotter.stop()


def test_to_be_late_is_no_reason_to_warn_in_the_first_minute_and_the_end_is_none_at_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = Outcomes(Stats(), lambda *_, **__: None)
    now = time.monotonic()
    with caplog.at_level(logging.INFO):
        for reason in (LATE, LATE, ENDING, "a reason to warn"):
            outcomes.discarded(3, reason)
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        outcomes.discarded(4, LATE)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert caplog.messages[0].startswith(f"iteration 3 has no snapshot: {LATE}. Training goes on unharmed")


@dataclass
class _Mark:
    """An event of a device that has come to it."""

    when: float  # milliseconds
    is_over: bool = True

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Self) -> float:
        return end_event.when - self.when


def _copied(copy: float, window: float, iteration: int = 0, at: float = 0.0) -> PendingSnapshot:
    job = _job(iteration)
    job.ready, job.begun, job.copied, job.reached = _Mark(at), _Mark(at + 1), _Mark(at + 1 + copy), _Mark(at + window)
    return job


def test_no_copy_begins_that_would_make_the_update_wait_but_one_in_many_to_learn_anew() -> None:
    window = CopyWindow()
    assert not window.is_too_late(1e9)  # nothing is known
    for _ in range(3):
        window.follow(_copied(copy=60, window=100))
    assert window.latest_begin == 40
    assert not window.is_too_late(39)
    refused = [window.is_too_late(41) for _ in range(20)]
    assert refused == [True] * 16 + [False] * 4
    window.begin()
    assert window.is_too_late(41)


def test_the_window_is_learned_when_the_device_has_come_to_the_update_however_late() -> None:
    window, job = CopyWindow(), _copied(copy=60, window=100)
    reached = job.reached
    assert isinstance(reached, _Mark)
    reached.is_over = False
    for each in (job, _job(1), _job(2)):
        window.follow(each)
    assert window.latest_begin == math.inf
    reached.is_over = True
    window.follow(_job(3))
    assert window.latest_begin == 40


def test_where_copies_take_all_of_the_window_one_that_begins_at_once_is_made() -> None:
    window = CopyWindow()
    for _ in range(2):
        window.follow(_copied(copy=200, window=100))
    assert window.latest_begin == 10
    for _ in range(5):
        window.follow(_copied(copy=20, window=5))
    assert window.latest_begin == 3


@pytest.mark.parametrize(
    ("copy", "window", "step", "steps"),
    [
        (60, 100, 110, 1),
        (101, 100, 110, 1),
        (200, 100, 110, 56),  # 46 at least
        (280, 145, 155, 45),  # 44
        (74, 0, 300, 15),  # 13: a graph of the whole step leaves nothing
    ],
)
def test_copies_that_take_longer_than_a_step_leaves_cost_two_hundredths_of_the_time(
    copy: float, window: float, step: float, steps: int
) -> None:
    known = CopyWindow()
    known.follow(_copied(5 * copy, window))  # the first ones take longer
    known.follow(_copied(copy, window + 5, 1, 9 * step))
    assert known.need[0] == 1
    for number in range(2, 6):
        known.follow(_copied(copy, window, number, (8 + number) * step))
    assert known.need[0] == steps
    assert steps == 1 or f"{copy} ms" in known.need[1]


def test_copies_that_end_after_the_next_snapshot_was_begun_count_too() -> None:
    known, last = CopyWindow(), None
    for number in range(8):
        job = _copied(200, 100, number, 110 * number)
        copied = job.copied
        assert isinstance(copied, _Mark)
        copied.is_over = False
        known.follow(job)
        if last is not None:
            last.is_over = True
        last = copied
    assert known.need[0] == 56


def test_what_copies_need_does_not_change_by_a_few_hundredths_and_falls_when_they_fit() -> None:
    known, found = CopyWindow(), list[int]()
    for number in range(200):
        known.follow(_copied(20 + 0.2 * (number % 3), 10, number, 12 * number))
        found.append(known.need[0])
    assert sorted(set(found)) == [1, 45]  # of 42 to 44
    for number in range(200, 205):
        known.follow(_copied(8, 10, number, 12 * number))
    assert known.need[0] == 1
