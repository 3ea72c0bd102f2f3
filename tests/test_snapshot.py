"""What the thread that copies snapshots tells the agent."""

from __future__ import annotations

from agent_kit import eventually

from gemini_ft.wire.worker_messages import GiveUp, Request, ToAgent
from gemini_ft.worker.snapshot import Job, Snapshotter


def test_the_agent_hears_of_a_snapshot_that_is_given_up_before_the_thread_has_seen_it() -> None:
    """Training steps may be shorter than it takes until a thread runs on a busy host; who closes then waits for the snapshot's fate."""
    told: list[ToAgent] = []
    discarded: list[int] = []
    snapshotter = Snapshotter(
        0, lambda job: "", told.append, lambda: False, lambda: None, lambda iteration, _: discarded.append(iteration), False, False, 60.0
    )
    with snapshotter._condition:
        for iteration in (1, 2):
            snapshotter.submit(Job(iteration, b"", None, []))
            snapshotter.before_update()
    eventually(lambda: len(told) == 4)
    assert [(type(message), message.iteration) for message in told if isinstance(message, Request | GiveUp)] == [
        (Request, 1),
        (GiveUp, 1),
        (Request, 2),
        (GiveUp, 2),
    ]
    assert discarded == [1, 2]
    snapshotter.stop()
