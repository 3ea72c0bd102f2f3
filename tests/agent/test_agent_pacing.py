"""How many steps a snapshot needs, from what workers, the kernel and the last snapshot say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_kit import CHUNK, Job, eventually

from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.pacing import Outgoing, Pacing
from gemini_ft.config import TrafficConfig
from gemini_ft.core.traffic import Profile
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.lane_thread import Meter
from gemini_ft.wire.messages import Notice
from gemini_ft.wire.peer_messages import PeerMessage, ReportNeed
from gemini_ft.wire.worker_messages import HoldsBack, ToWorker, Travelled

RATE = 100e6  # bytes per second
TRAFFIC = TrafficConfig.model_validate({"gamma": 1.0})


class Host:
    """One host's pacing, and what it says."""

    def __init__(self, fixed: int | None = None) -> None:
        self.gate = Gate(TRAFFIC)
        self.reports: list[ReportNeed] = []
        self.told: list[ToWorker] = []
        context = SimpleNamespace(host=SimpleNamespace(name="here"), report=self._report, tell_workers=self.told.append)
        self.pacing = Pacing(context, SimpleNamespace(traffic=TRAFFIC, interval=fixed), self.gate)  # type: ignore[arg-type]
        self._iteration = 0

    def _report(self, message: PeerMessage) -> None:
        assert isinstance(message, ReportNeed)
        self.reports.append(message)

    def arrives(self, nbytes: int, owner: int = 0, peer: str = "there", rate: float = RATE) -> Travelled:
        """A snapshot gets to a peer at this rate; what the workers are told of it."""
        self._iteration += 1
        memory = SlotMemory.create(
            SlotShape(
                run="run",
                stream="main",
                owner=owner,
                world_size=2,
                layout_hash="0" * 16,
                layout=b"",
                data_bytes=8,
                extras_capacity=8,
                chunk_bytes=8,
            )
        )
        out = Outgoing(
            owner=owner,
            version=Version(Incarnation(1, "a"), self._iteration),
            slot=0,
            memory=memory,
            sent_bytes=nbytes,
            busy_before=Meter(acked=0, busy=0.0, rtt=0.0),
        )
        self.pacing.arrived(out, peer, Meter(acked=nbytes, busy=nbytes / rate, rtt=0.0), 1.0)
        memory.close()
        travelled = self.told[-1]
        assert isinstance(travelled, Travelled)
        return travelled

    def steps_are(self, *gaps: float, rank: int = 0) -> None:
        self.pacing.observed(
            rank, Profile(gaps=gaps, begins=tuple(float(n) for n in range(len(gaps))), spread=gaps, seconds=10.0, steps=20)
        )


def test_the_copies_of_a_device_have_a_say_where_nothing_travels_and_where_it_does() -> None:
    host = Host()
    host.pacing.held_back(0, 47, "the copies take long")
    host.pacing.held_back(1, 3, "shorter ones")
    assert [(report.steps, report.why) for report in host.reports] == [(47, "host here, rank 0: the copies take long")] * 2
    host.arrives(1_000_000_000)
    host.steps_are(0.5)
    host.pacing.held_back(0, 1, "they fit now")
    host.pacing.held_back(1, 1, "")
    assert [report.steps for report in host.reports[-3:]] == [47, 20, 20]


def test_one_device_that_is_slow_paces_all_ranks(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        ranks = job.start("a", "b")

        def is_paced() -> bool:
            ranks[1].client.tell(HoldsBack(steps=47, why="the copies take long"))  # again and again, as a snapshotter does
            return all(rank.heard("paced", interval=47) for rank in ranks)

        eventually(is_paced)
        for rank in ranks:
            assert "host b, rank 1: the copies take long" in rank.wait_for("paced", interval=47).why


@pytest.mark.parametrize(
    ("nbytes", "gaps", "steps"),
    [
        (100_000_000, (1.0,), 1),
        (100_000_000, (0.5, 0.5), 1),
        (300_000_000, (1.0, 0.5), 2),
        (1_000_000_000, (0.5,), 20),
        (1_000_000, (0.0,), 1000),  # no idle network at all
    ],
)
def test_the_need_is_what_the_spans_of_so_many_steps_carry(nbytes: int, gaps: tuple[float, ...], steps: int) -> None:
    host = Host()
    host.arrives(nbytes)
    assert not host.reports  # what a step looks like is not known yet
    host.steps_are(*gaps)
    assert [report.steps for report in host.reports] == [steps]
    assert f"{nbytes:,} bytes per snapshot" in host.reports[0].why


def test_everything_that_leaves_the_host_counts_and_what_nobody_waits_for_does_not() -> None:
    host = Host()
    for owner, peer in ((0, "there"), (0, "yonder"), (1, "there")):
        host.arrives(100_000_000, owner, peer)
    host.steps_are(1.0)
    assert host.reports[-1].steps == 3
    host.pacing.left_out(0, "yonder")
    host.steps_are(1.0)
    assert host.reports[-1].steps == 2


def test_the_link_is_as_fast_as_it_was_while_something_was_sent() -> None:
    host = Host()
    for _ in range(3):
        host.arrives(50_000_000)
    assert host.gate.link is not None
    assert host.gate.link.bandwidth == pytest.approx(RATE)
    for _ in range(8):
        host.arrives(50_000_000, rate=RATE / 10)
    assert host.gate.link.bandwidth == pytest.approx(RATE / 10)


def test_what_the_model_expects_is_told_with_what_happened() -> None:
    host = Host()
    assert host.arrives(100_000_000).expected is None
    host.steps_are(0.5, 0.0, 2.0)  # beginning at 0, 1 and 2 seconds
    told = host.arrives(100_000_000)
    assert (told.nbytes, told.seconds) == (100_000_000, 1.0)
    assert told.expected == pytest.approx(2.5)


def test_a_fixed_interval_is_kept_and_what_it_costs_is_said_once() -> None:
    host = Host(fixed=2)
    host.arrives(300_000_000)
    for _ in range(3):
        host.steps_are(1.0)
    assert not host.reports
    notices = [message.text for message in host.told if isinstance(message, Notice)]
    assert len(notices) == 1
    assert "interval=2" in notices[0]
    assert "interval=3 would not" in notices[0]
    assert host.gate.interval == 2


def test_the_decision_sets_how_long_a_snapshot_may_wait() -> None:
    host = Host()
    host.arrives(100_000_000)
    host.steps_are(1.0)
    assert host.gate.patience == pytest.approx(10.0)
    host.pacing.paced(3)
    assert host.gate.patience == pytest.approx(30.0)
    status: dict[str, Any] = host.pacing.status()
    assert (status["interval"], status["step_seconds"], status["idle_seconds"], status["bytes"]) == (3, 10.0, 1.0, 100_000_000)
    host.pacing.observed(0, None)
    assert host.pacing.status()["idle_seconds"] is None


def test_a_link_is_measured_before_the_first_snapshot_has_arrived(tmp_path: Path) -> None:
    """Until then no more than two least slices travel at a time, whatever the network carries."""
    with Job(tmp_path) as job:
        first, _ = job.start("a", "b")
        first.reserve(24 * 2**20)
        first.request(1)
        first.copy(1, slice(0, 20 * 2**20 // CHUNK))  # without the end
        eventually(lambda: job.stream("a")["traffic"]["bandwidth"] is not None)
        assert not first.heard("commit", iteration=1)
