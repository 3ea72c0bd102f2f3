"""Hosts come together again: the job's own first, spares when somebody is missing."""

from __future__ import annotations

import inspect
import pickle
import weakref
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout, _Action, _NodeDesc, _RendezvousState

import gemini_ft
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError
from gemini_ft.launch import spares
from gemini_ft.launch.launcher import check_range
from gemini_ft.launch.notes import Notes, hosts_of_commits, notes_of_workers, say_committed
from gemini_ft.launch.spares import LaunchingHost, PatientJoin, better_rendezvous, pause
from gemini_ft.testing import EmulatedHosts

HOSTS = [_NodeDesc(f"host{number}", 1, 0) for number in range(3)]
SPARE = _NodeDesc("spare", 1, 0)
PLAIN_LOOP = str(Path(__file__).parents[2] / "examples" / "plain_loop.py")


class Scene:
    """A host's view of a job of three hosts, on a clock of the test's own. By default it is a spare, and all is well."""

    def __init__(self) -> None:
        self.now, self.least, self.timeout = 0.0, 3, RendezvousTimeout()
        self.state = _RendezvousState()
        self.state.complete, self.state.round = True, 1
        self.state.participants = dict(zip(HOSTS, range(3), strict=True))
        self.state.redundancy_list = {SPARE}
        self.heard: timedelta = timedelta(0)  # since the last sign of life
        notes = Notes()
        weakref.finalize(self, notes.close)
        self.host = LaunchingHost(patience=1.5, notes=notes)
        self.join = PatientJoin(torch_rendezvous._RendezvousJoinOp(), self.host, lambda: self.now)

    def action(self, node: _NodeDesc = SPARE) -> _Action:
        self.state.last_heartbeats[node] = datetime.now(UTC) - self.heard
        settings = SimpleNamespace(
            run_id="r", min_nodes=self.least, max_nodes=3, keep_alive_interval=timedelta(seconds=5), timeout=self.timeout
        )
        found: _Action = self.join(SimpleNamespace(node=node, state=self.state, settings=settings), 1e18)
        return found

    def heeds(self, workers: Notes) -> None:
        """The host's launcher knows what its workers say."""
        self.host.notes = workers

    def open_round(self, *participants: _NodeDesc) -> None:
        self.state.participants = dict.fromkeys(participants, 0)
        self.state.complete = False
        self.state.round += 1

    def made_by(self, *hosts: _NodeDesc) -> None:
        """These have taken part in the job and give signs of life."""
        setattr(self.state, "gemini_names", {host: host.addr for host in hosts})  # noqa: B010  # as spares.py does
        setattr(self.state, "gemini_members", frozenset(host.addr for host in hosts))  # noqa: B010
        self.state.last_heartbeats |= dict.fromkeys(hosts, datetime.now(UTC))

    def actions(self, seconds: int, node: _NodeDesc = SPARE) -> list[_Action]:
        """What it does at every half second from now on."""
        begin, found = self.now, []
        for halves in range(2 * seconds):
            self.now = begin + halves / 2
            found.append(self.action(node))
        return found


def test_a_spare_waits_while_the_job_is_complete() -> None:
    assert set(Scene().actions(100)) == {_Action.SYNC}


def test_a_waiting_spare_shows_that_it_lives() -> None:
    scene = Scene()
    scene.heard = timedelta(seconds=6)
    assert scene.action() is _Action.KEEP_ALIVE
    scene.open_round()
    assert scene.action() is _Action.KEEP_ALIVE


def test_a_spare_leaves_an_open_round_to_the_others_first() -> None:
    scene = Scene()
    scene.open_round(HOSTS[1])
    assert scene.actions(3) == [_Action.SYNC] * 3 + [_Action.REMOVE_FROM_REDUNDANCY_LIST] * 3


def test_a_spare_waits_for_hosts_that_give_signs_of_life() -> None:
    """However long they take: they have the copies."""
    scene = Scene()
    scene.made_by(*HOSTS)
    scene.open_round(HOSTS[1])
    scene.state.wait_list = {HOSTS[0]}  # and the third has left its place, and is about to come back
    assert set(scene.actions(60)) == {_Action.SYNC}
    del scene.state.last_heartbeats[HOSTS[2]]
    assert scene.action() is _Action.REMOVE_FROM_REDUNDANCY_LIST
    scene.state.redundancy_list.clear()
    assert scene.action() is _Action.ADD_TO_PARTICIPANTS


def test_a_spare_has_patience_for_a_host_that_agents_have_lost_too(caplog: pytest.LogCaptureFixture) -> None:
    """It may live: connections close for many reasons. A spare that cannot begin yet lets others come first, though not for ever."""
    scene, is_warm = Scene(), [False]
    scene.host.is_warm = lambda: is_warm[0]
    assert scene.action() is _Action.SYNC
    scene.made_by(*HOSTS)
    scene.open_round(HOSTS[0], HOSTS[1])
    setattr(scene.state, "gemini_lost", {HOSTS[2]: scene.state.last_heartbeats[HOSTS[2]]})  # noqa: B010
    assert scene.action() is _Action.SYNC
    del scene.state.last_heartbeats[HOSTS[2]]
    assert scene.actions(5) == [_Action.SYNC] * 9 + [_Action.REMOVE_FROM_REDUNDANCY_LIST]
    assert "ready for its turn" not in caplog.text
    is_warm[0] = True
    scene.open_round(HOSTS[0], HOSTS[1])
    assert scene.actions(3) == [_Action.SYNC] * 3 + [_Action.REMOVE_FROM_REDUNDANCY_LIST] * 3
    assert "waits as a spare, and is ready for its turn" in caplog.text
    scene.state.redundancy_list.clear()
    assert scene.action() is _Action.ADD_TO_PARTICIPANTS
    assert getattr(scene.state, "gemini_lost") == {}  # noqa: B009  # of that round; a later one must not be misled by it
    scene.state.redundancy_list.add(SPARE)
    scene.open_round(HOSTS[0], HOSTS[1])
    assert scene.action() is _Action.SYNC


def test_spares_begin_nothing_without_a_host_that_took_part() -> None:
    """Whether those are dead or cut off cannot be seen."""
    scene = Scene()
    scene.made_by(*HOSTS)
    scene.state.last_heartbeats.clear()
    scene.open_round()
    assert set(scene.actions(60)) == {_Action.SYNC}
    scene.open_round(HOSTS[1])
    assert scene.actions(3)[-1] is _Action.REMOVE_FROM_REDUNDANCY_LIST
    scene.open_round()
    scene.host.name = HOSTS[0].addr  # the same host, whose launcher was started again
    assert scene.actions(3)[-1] is _Action.REMOVE_FROM_REDUNDANCY_LIST


def test_a_place_beside_a_host_that_is_lost_before_anything_was_read_from_it_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, workers = Scene(), Notes()
    monkeypatch.setenv("GEMINI_NOTES_FILE", workers.path)
    scene.heeds(workers)
    scene.made_by(*HOSTS)
    scene.state.redundancy_list.clear()
    setattr(scene.state, "gemini_kept", {"r%2Fs": "host0,host1"})  # noqa: B010  # as spares.py does
    scene.state.participants = {HOSTS[1]: 0, HOSTS[2]: 1, SPARE: 2}
    assert scene.action() is _Action.FINISH
    assert not spares.take_part(scene.state, SPARE, scene.host)
    assert hosts_of_commits("r", "s") == {"host0", "host1"}, "its workers miss them if they are absent"
    scene.open_round()
    assert scene.action() is _Action.SYNC
    scene.state.complete, scene.state.participants = True, {HOSTS[1]: 0, HOSTS[2]: 1, SPARE: 2}
    assert scene.action() is _Action.FINISH
    say_committed("r", "s", ["host1", "spare"])
    assert spares.take_part(scene.state, SPARE, scene.host)
    assert scene.state.gemini_kept == {"r%2Fs": "host1,spare"}  # type: ignore[attr-defined]
    scene.open_round()
    assert scene.action() is _Action.ADD_TO_PARTICIPANTS


def test_an_older_word_does_not_displace_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have gone on without this host, and have what was committed since."""
    scene, workers = Scene(), Notes()
    monkeypatch.setenv("GEMINI_NOTES_FILE", workers.path)
    scene.heeds(workers)
    scene.made_by(*HOSTS, SPARE)
    scene.state.redundancy_list.clear()
    scene.host.has_taken_part, scene.host.world = True, "the world before"
    say_committed("r", "s", ["host0", "spare"])
    say_committed("r", "of old", ["host0", "spare"])
    for name, value in (("gemini_world", "a later one"), ("gemini_kept", {"r%2Fs": "host0,host1"})):
        setattr(scene.state, name, value)
    scene.open_round(*HOSTS[:2])
    assert scene.action() is _Action.ADD_TO_PARTICIPANTS
    known = {"r%2Fs": "host0,host1", "r%2Fof%20old": "host0,spare"}
    assert scene.state.gemini_kept == known  # type: ignore[attr-defined]
    scene.state.complete, scene.state.participants = True, {HOSTS[1]: 0, HOSTS[2]: 1, SPARE: 2}
    assert scene.action() is _Action.FINISH
    assert hosts_of_commits("r", "s") == {"host0", "host1"}
    scene.state.gemini_kept = known | {"r%2Fs": "host1,host2,spare"}  # type: ignore[attr-defined]  # as another host's workers say
    spares.take_part(scene.state, SPARE, scene.host)
    assert scene.state.gemini_kept["r%2Fs"] == "host1,host2,spare"  # type: ignore[attr-defined]


def test_so_does_a_host_that_comes_while_the_job_restarts() -> None:
    scene = Scene()
    scene.state.redundancy_list.clear()
    scene.open_round(HOSTS[1])
    assert scene.actions(3) == [_Action.SYNC] * 3 + [_Action.ADD_TO_PARTICIPANTS] * 3


def test_a_host_that_a_job_grows_by_comes_before_the_last_call_is_over() -> None:
    """The job has stopped for it, and would begin without it, and stop again, for ever. It also comes when its workers can begin."""
    scene, is_warm = Scene(), [False]
    scene.host.is_warm = lambda: is_warm[0]
    scene.least, scene.timeout = 2, RendezvousTimeout(last_call=timedelta(seconds=1))
    scene.state.redundancy_list.clear()
    scene.made_by(*HOSTS[:2])
    scene.state.participants = dict(zip(HOSTS[:2], range(2), strict=True))
    assert set(scene.actions(9)) == {_Action.SYNC}
    is_warm[0] = True
    assert scene.action() is _Action.ADD_TO_WAIT_LIST
    scene.open_round(*HOSTS[:2])
    assert scene.actions(1) == [_Action.SYNC, _Action.ADD_TO_PARTICIPANTS]


def test_its_patience_starts_anew_with_every_round() -> None:
    scene = Scene()
    for _ in range(3):
        scene.open_round()
        assert scene.actions(1) == [_Action.SYNC] * 2


def test_hosts_of_the_job_take_their_places_at_once() -> None:
    scene = Scene()
    assert scene.action(HOSTS[0]) is _Action.FINISH
    assert spares.take_part(scene.state, HOSTS[0], scene.host)  # when all have met, as its launcher does
    scene.open_round()
    assert scene.action(HOSTS[0]) is _Action.ADD_TO_PARTICIPANTS


def test_at_a_first_start_nobody_waits() -> None:
    scene = Scene()
    scene.state.redundancy_list.clear()
    scene.open_round()
    scene.state.round = 0
    assert scene.action() is _Action.ADD_TO_PARTICIPANTS


def test_hosts_may_take_their_time_to_leave_a_round() -> None:
    scene = Scene()
    del scene.state.participants[HOSTS[0]]
    assert set(scene.actions(9)) == {_Action.SYNC}


def test_hosts_that_go_on_without_a_lost_one_are_called_together_in_the_end() -> None:
    scene = Scene()
    del scene.state.participants[HOSTS[0]]
    assert scene.actions(11)[-1] is _Action.REMOVE_FROM_REDUNDANCY_LIST
    scene.state.redundancy_list.clear()  # as torch does then
    assert scene.action() is _Action.ADD_TO_WAIT_LIST


def test_a_host_that_is_left_over_steps_back() -> None:
    """Torch would take it for a new one and restart the job for it."""
    scene = Scene()
    scene.state.redundancy_list.clear()
    scene.state.wait_list = {SPARE}
    assert scene.action() is _Action.REMOVE_FROM_WAIT_LIST
    scene.state.wait_list.clear()
    assert scene.action() is _Action.ADD_TO_REDUNDANCY_LIST


class TestFixedSize:
    """A job of one to three hosts whose state is made for two."""

    @pytest.fixture
    def scene(self) -> Scene:
        scene = Scene()
        scene.least = 1
        scene.state.redundancy_list.clear()
        scene.state.participants = dict(zip(HOSTS[:2], range(2), strict=True))
        scene.state.gemini_hosts = 2  # type: ignore[attr-defined]
        return scene

    def test_one_more_host_waits_as_a_spare(self, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
        assert scene.action() is _Action.ADD_TO_REDUNDANCY_LIST
        assert caplog.messages == ["the job's state is made for 2 hosts: this one waits as a spare"]

    def test_one_more_host_that_was_quicker_than_the_state_steps_back(self, scene: Scene) -> None:
        scene.state.wait_list = {SPARE}
        assert scene.action() is _Action.REMOVE_FROM_WAIT_LIST
        scene.open_round(*HOSTS[:2], SPARE)
        assert scene.action() is _Action.REMOVE_FROM_PARTICIPANTS

    def test_its_own_hosts_wait_for_nobody_else(self, scene: Scene) -> None:
        """Torch's wait half a minute at every restart: somebody might come."""
        scene.open_round(*HOSTS[:2])
        assert scene.action(HOSTS[0]) is _Action.MARK_RENDEZVOUS_COMPLETE

    def test_fewer_hosts_do_not_begin(self, scene: Scene) -> None:
        scene.open_round(HOSTS[0])
        assert set(scene.actions(60, HOSTS[0])) == {_Action.SYNC}

    def test_a_spare_takes_the_place_of_a_lost_host(self, scene: Scene) -> None:
        scene.state.redundancy_list = {SPARE}
        scene.open_round(HOSTS[0])
        assert scene.actions(3)[-1] is _Action.REMOVE_FROM_REDUNDANCY_LIST

    def test_without_such_state_a_job_grows_as_ever(self, scene: Scene) -> None:
        del scene.state.gemini_hosts  # type: ignore[attr-defined]
        assert scene.action() is _Action.ADD_TO_WAIT_LIST


def waiting_in(scene: Scene, node: _NodeDesc, waiting: int = 0) -> int:
    holder = SimpleNamespace(state=scene.state, mark_dirty=lambda: None, sync=lambda: None)
    handler = SimpleNamespace(_state_holder=holder, _this_node=node, _heartbeat_lock=nullcontext())
    return spares.nodes_waiting(lambda handler: waiting, scene.host, handler)


@pytest.mark.parametrize("is_spare_there", [True, False])
def test_a_host_that_is_lost_without_a_word_of_the_network_is_replaced_where_there_is_a_spare(is_spare_there: bool) -> None:
    scene = Scene()
    setattr(scene.state, "gemini_world", "one")  # noqa: B010  # as spares.py does
    assert scene.action(HOSTS[0]) is _Action.FINISH
    assert waiting_in(scene, HOSTS[0]) == 0
    del scene.state.participants[HOSTS[1]]
    if not is_spare_there:
        scene.state.redundancy_list.clear()
    assert waiting_in(scene, HOSTS[0]) == is_spare_there
    scene.open_round(HOSTS[0])
    assert waiting_in(scene, HOSTS[0]) == 0


def test_at_the_end_of_a_good_job_a_host_that_is_not_done_loses_no_workers_to_those_that_are() -> None:
    """The others have closed the rendezvous: workers that begin anew find nobody."""
    scene = Scene()
    setattr(scene.state, "gemini_world", "one")  # noqa: B010  # as spares.py does
    assert scene.action(HOSTS[0]) is _Action.FINISH
    scene.state.closed = True
    del scene.state.participants[HOSTS[1]]
    assert waiting_in(scene, HOSTS[0]) == 0


@pytest.mark.parametrize("is_back", [False, True])
def test_a_host_that_leaves_its_place_to_come_back_is_not_said_to_be_lost(is_back: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As every launcher does after a failure of one of its workers."""
    scene = Scene()
    setattr(scene.state, "gemini_world", "one")  # noqa: B010  # as spares.py does
    scene.made_by(*HOSTS)
    assert scene.action(HOSTS[0]) is _Action.FINISH
    del scene.state.participants[HOSTS[1]]
    if is_back:
        scene.state.wait_list.add(HOSTS[1])
    assert waiting_in(scene, HOSTS[0], waiting=is_back) == is_back
    assert caplog.messages == []
    del scene.state.last_heartbeats[HOSTS[1]]  # and then it is lost
    scene.state.wait_list.clear()
    assert waiting_in(scene, HOSTS[0]) == 1
    assert caplog.messages == ["a host of this job gives no sign of life: all begin anew with a spare in its place"]


def test_a_host_that_the_job_has_left_out_stops_its_workers_and_comes_back_as_a_spare() -> None:
    """Its side had no store, and went on; the others have formed a world of their own."""
    scene = Scene()
    waiting = partial(waiting_in, scene)
    setattr(scene.state, "gemini_world", "one")  # noqa: B010  # as spares.py does
    assert scene.action(HOSTS[0]) is _Action.FINISH
    assert waiting(HOSTS[0]) == 0
    del scene.state.participants[HOSTS[0]]  # it was silent for a while
    assert waiting(HOSTS[0]) == 0
    setattr(scene.state, "gemini_world", "another")  # noqa: B010
    assert (waiting(HOSTS[0]), waiting(HOSTS[1])) == (1, 0)


def test_large_jobs_keep_torchs_pace() -> None:
    assert pause(2) < 0.2
    assert pause(1000) == 1.0


@pytest.mark.parametrize("hosts", [2, 30, 45, 70, 94, 1000])
def test_a_host_that_waits_gives_its_sign_of_life_at_the_last_look_before_it_is_late(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = now = datetime.now(UTC)
    monkeypatch.setattr(spares, "datetime", SimpleNamespace(now=lambda zone: now))
    settings = SimpleNamespace(keep_alive_interval=timedelta(seconds=1))
    found = []
    with notes_of_workers() as notes, better_rendezvous(hosts, notes):
        for _ in range(100):
            now += timedelta(seconds=pause(hosts))
            state = SimpleNamespace(last_heartbeats={SPARE: said})
            if torch_rendezvous._should_keep_alive(SimpleNamespace(node=SPARE, state=state, settings=settings)):
                found.append((now - said).total_seconds())
                said = now
    assert max(found) <= 1.0
    assert min(found) >= 1.0 - pause(hosts)


NAMES = ("_RendezvousJoinOp", "_delay", "_BackendRendezvousStateHolder", "_should_keep_alive", "get_method_name")


def test_torch_names_its_looks_without_the_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(inspect, "stack")

    def record() -> str:
        return str(torch_rendezvous.get_method_name())

    def look() -> str:
        return record()

    with notes_of_workers() as notes, better_rendezvous(3, notes):
        assert look() == "look"


def test_torch_waits_and_remembers_for_less_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[object] = []
    monkeypatch.setattr(torch_rendezvous, "_delay", slept.append)
    with notes_of_workers() as notes, better_rendezvous(3, notes):
        torch_rendezvous._delay(seconds=1)
        torch_rendezvous._delay(seconds=(0, 0.3))
        holder = torch_rendezvous._BackendRendezvousStateHolder(SimpleNamespace(name="none"), SimpleNamespace())
    assert slept == [pause(3), (0, 0.3)]
    assert holder._cache_duration < pause(3)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_host_with_another_clock_lives_as_long_as_it_gives_signs_of_life(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = HOSTS[:2]
    state = _RendezvousState()
    state.participants = {own: 0, other: 1}
    now = [100.0]
    monkeypatch.setattr("gemini_ft.launch.spares.time", SimpleNamespace(monotonic=lambda: now[0]))
    interval = timedelta(seconds=1)
    settings = SimpleNamespace(run_id="r", keep_alive_interval=interval, keep_alive_max_attempt=3, min_nodes=2)
    backend = SimpleNamespace(name="none", get_state=lambda: (pickle.dumps(state), None))
    with notes_of_workers() as notes, better_rendezvous(3, notes):
        holder = torch_rendezvous._BackendRendezvousStateHolder(backend, settings)
        holder._cache_duration = 0
        begin = datetime.now(UTC) + timedelta(hours=hours)
        for seconds in range(10):
            now[0] = 100.0 + seconds
            said = begin + timedelta(seconds=min(seconds, 5))  # then it dies
            state.last_heartbeats = {own: datetime.now(UTC), other: said}
            holder.sync()
            assert (other in holder.state.participants) == (seconds < 8)
            assert holder.state.last_heartbeats.get(other, said) == said  # as the others must read it
        state.last_heartbeats[own] = datetime.now(UTC) + timedelta(hours=hours)  # and this host's own clock was set
        assert torch_rendezvous._should_keep_alive(SimpleNamespace(node=own, state=state, settings=settings))


@pytest.mark.parametrize(
    ("is_lost", "is_complete", "has_left", "dead_after"),
    [(True, False, False, 1.5), (False, False, False, 3.0), (True, True, False, 3.0), (True, True, True, 1.5)],
)
def test_a_host_that_agents_have_lost_is_missed_after_half_the_time(
    is_lost: bool, is_complete: bool, has_left: bool, dead_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While hosts come together, or the one that asks has left the round in which it was at work: torch calls that complete until all have.

    A spare, whose own agent knows nothing, hears of it; with its next sign of life the host lives again.
    """
    other, began = HOSTS[1], datetime.now(UTC)
    state = _RendezvousState()
    state.complete, state.participants = is_complete, {other: 1} if has_left else {HOSTS[0]: 0, other: 1}
    state.last_heartbeats = dict.fromkeys(HOSTS[:2], began)
    vars(state).update(gemini_names={HOSTS[0]: "host0", other: "host1"}, gemini_members=frozenset({"host1"}), gemini_world="w")
    stored, now, asked = [pickle.dumps(state)], [100.0], list[float]()
    monkeypatch.setattr("gemini_ft.launch.spares.time", SimpleNamespace(monotonic=lambda: now[0]))

    def unheard() -> set[str]:
        asked.append(now[0])
        return {"host1"} if is_lost else set()

    def write(new: bytes, token: object) -> tuple[bytes, object, bool]:
        stored[:] = [new]
        return new, None, True

    settings = SimpleNamespace(run_id="r", keep_alive_interval=timedelta(seconds=1), keep_alive_max_attempt=3, min_nodes=2)
    backend = SimpleNamespace(name="none", get_state=lambda: (stored[0], None), set_state=write)
    seen = []
    with notes_of_workers() as notes:
        with better_rendezvous(3, notes, unheard) as this:
            this.name, this.world = "host0", "w"
            agents = torch_rendezvous._BackendRendezvousStateHolder(backend, settings)
        with better_rendezvous(3, notes) as of_spare:
            of_spare.name = "spare"
            spare = torch_rendezvous._BackendRendezvousStateHolder(backend, settings)
    agents._cache_duration = spare._cache_duration = 0
    for _ in range(40):
        agents.sync()
        spare.sync()
        seen += [now[0] - 100.0] if other in spare.state.last_heartbeats else []
        now[0] += 0.1
    assert dead_after <= round(seen[-1] + 0.1, 6) <= dead_after + 0.3
    assert (asked == []) == (is_complete and not has_left)
    assert len(asked) <= 9
    assert not (has_left and spare.state.complete)  # so that the others and the spare can come together
    state.last_heartbeats[other] = began + timedelta(seconds=1)
    stored[:] = [pickle.dumps(state)]
    spare.sync()
    assert other in spare.state.last_heartbeats


class TestQuestions:
    """Three members are silent in an open round, and this host's agent is asked about them."""

    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr("gemini_ft.launch.spares.time", SimpleNamespace(monotonic=lambda: now[0]))
        return now

    def looks(self, unheard: Callable[[], set[str]], now: list[float], count: int) -> _RendezvousState:
        """Looks at the state at intervals of 0.3 s, the first one when the hosts have been silent for 16 s; returns what was seen last."""
        state = _RendezvousState()
        state.participants = {SPARE: 0}
        state.last_heartbeats = dict.fromkeys((*HOSTS, SPARE), datetime.now(UTC))
        vars(state).update(gemini_names={host: host.addr for host in HOSTS}, gemini_members=frozenset(host.addr for host in HOSTS))
        settings = SimpleNamespace(run_id="r", keep_alive_interval=timedelta(seconds=10), keep_alive_max_attempt=3, min_nodes=2)
        backend = SimpleNamespace(
            name="none", get_state=lambda: (pickle.dumps(state), None), set_state=lambda new, token: (new, None, True)
        )
        holder = spares.by_own_clock(torch_rendezvous._BackendRendezvousStateHolder, unheard)(backend, settings, 0)
        holder.sync()
        now[0] += 16.0
        for _ in range(count):
            holder.sync()
            now[0] += 0.3
        found: _RendezvousState = holder.state
        return found

    def test_one_look_asks_once_about_all_silent_hosts(self, now: list[float]) -> None:
        asked: list[float] = []

        def unheard() -> set[str]:
            asked.append(now[0])
            return {"host0", "host2"}

        assert {*self.looks(unheard, now, 1).last_heartbeats} == {HOSTS[1], SPARE}
        assert asked == [116.0]

    def test_an_agent_that_is_slow_is_not_asked_again_soon(self, now: list[float]) -> None:
        """The launcher that waits for it gives no sign of life."""
        asked: list[float] = []

        def unheard() -> set[str]:
            asked.append(now[0])
            now[0] += 0.5
            return set()

        self.looks(unheard, now, 10)
        assert asked == [116.0]

    def test_a_question_that_fails_ends_no_launcher(self, now: list[float]) -> None:
        def unheard() -> set[str]:
            raise KeyError("unheard")

        assert {*self.looks(unheard, now, 1).last_heartbeats} == {*HOSTS, SPARE}


def test_a_host_that_leaves_its_place_to_come_back_lives_until_its_sign_of_life_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _RendezvousState()
    state.complete, state.participants = True, dict(zip(HOSTS[:2], range(2), strict=True))
    state.last_heartbeats = dict.fromkeys(HOSTS[:2], datetime.now(UTC))
    stored = [pickle.dumps(state)]
    now = [100.0]
    monkeypatch.setattr("gemini_ft.launch.spares.time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(state: bytes, token: object) -> tuple[bytes, object, bool]:
        stored[:] = [state]
        return state, None, True

    settings = SimpleNamespace(run_id="r", keep_alive_interval=timedelta(seconds=1), keep_alive_max_attempt=3, min_nodes=2)
    backend = SimpleNamespace(name="none", get_state=lambda: (stored[0], None), set_state=write)
    with notes_of_workers() as notes, better_rendezvous(3, notes):
        holder = torch_rendezvous._BackendRendezvousStateHolder(backend, settings)
        holder._cache_duration = 0
        executor = torch_rendezvous._DistributedRendezvousOpExecutor(HOSTS[0], holder, settings)
        executor.run(torch_rendezvous._RendezvousExitOp(), 1e18)
        for seconds in range(6):
            now[0] = 100.0 + seconds
            holder.sync()
            assert [*holder.state.participants] == [HOSTS[1]] * (seconds < 3)  # neither says anything any more
            assert (HOSTS[0] in holder.state.last_heartbeats) == (seconds < 3)


@pytest.mark.parametrize(("nnodes", "stores", "elastic"), [("1:2", "a,b", None), ("2:3", "a,b", "batch"), ("1:2", "a", "batch")])
def test_two_sides_of_a_network_never_have_hosts_and_a_store_each(nnodes: str, stores: str, elastic: Literal["batch"] | None) -> None:
    config = GeminiConfig(elastic=elastic)
    check_range(Namespace(nnodes=nnodes, rdzv_endpoint=stores), config, {})
    with pytest.raises(ConfigError, match="give a MIN of 3 or more, or one store"):
        check_range(Namespace(nnodes="2:4", rdzv_endpoint="a,b"), GeminiConfig(elastic="batch"), {})


def test_an_option_that_the_script_gives_is_refused_where_two_sides_could_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gemini run` does not see it."""
    environ = {"GEMINI_NOT_ELASTIC": "of the job whose worker has started this one"}
    check_range(Namespace(nnodes="3:4", rdzv_endpoint="a,b"), GeminiConfig(), environ)
    assert environ == {}
    check_range(Namespace(nnodes="2:4", rdzv_endpoint="a,b"), GeminiConfig(), environ)
    for name, reason in environ.items():
        monkeypatch.setenv(name, reason)
    model = torch.nn.Linear(1, 1)
    checkpointer = gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters()), elastic="batch")
    with pytest.raises(ConfigError, match=r"^--nnodes=2:4 with several stores .* give a MIN of 3 or more, or one store$"):
        checkpointer.resume()


def test_torch_is_left_as_it_was() -> None:
    before = [getattr(torch_rendezvous, name) for name in NAMES]
    with notes_of_workers() as notes, better_rendezvous(3, notes):
        assert isinstance(torch_rendezvous._RendezvousJoinOp(), PatientJoin)
    assert [getattr(torch_rendezvous, name) for name in NAMES] == before


@pytest.mark.timeout(300)
def test_a_spare_replaces_a_lost_host_and_never_a_living_one(tmp_path: Path) -> None:
    faults = "step=20:rank=0:sigkill; step=40:host=1:kill; step=60:rank=1:sigkill"
    env = {"GEMINI_FAULTS": faults, "GEMINI_ON_LATE": "wait"}
    with EmulatedHosts(3, [PLAIN_LOOP, "--steps=70"], tmp_path, env=env) as hosts:
        hosts.wait_for(lambda: hosts.events("joined"))
        hosts.add()
        hosts.finish(250)
        worlds = [sorted(event["hosts"]) for event in hosts.events("joined") if event["rank"] == 0]  # ranks go by who came first
        iterations = [event["iteration"] for event in hosts.events("joined") if event["rank"] == 0]
    assert worlds == [["host0", "host1", "host2"]] * 2 + [["host0", "host2", "host3"]] * 2
    assert iterations in ([0, 19, 39, 59], [0, 19, 38, 59])  # the host may have died before its last commit


def test_an_agent_is_told_of_spares_when_they_change_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, is_heard = [100.0], list[tuple[int, int]](), [True]

    def tell(waiting: int, lacking: int) -> bool:
        told.append((waiting, lacking))
        return is_heard[0]

    monkeypatch.setattr(spares.time, "monotonic", lambda: now[0])
    with notes_of_workers() as notes:
        host = LaunchingHost(patience=1.0, notes=notes, tell=tell, needs=2)
        state = SimpleNamespace(
            participants={"a": 0, "b": 1}, redundancy_list={"c", "dead"}, wait_list={"b"}, last_heartbeats=dict.fromkeys("abc")
        )
        host.report(state)
        host.report(state)
        assert told == [(1, 0)], "hosts of the job that wait for the next round are no spares, nor are the dead"
        state.participants = {"a": 0}
        state.gemini_hosts = 3  # the job's state is made for more than it needs to begin
        host.report(state)
        now[0] += 29
        host.report(state)
        assert told[1:] == [(1, 2)]
        now[0] += 2
        is_heard[0] = False  # the agent may have been started since, or is away
        host.report(state)
        now[0] += 6
        host.report(state)
        assert told[2:] == [(1, 2)] * 2


def test_an_agent_that_does_not_answer_is_not_told_of_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that waits for it gives no sign of life."""
    now, told = [100.0], list[tuple[int, int]]()

    def tell(waiting: int, lacking: int) -> bool:
        told.append((waiting, lacking))
        return len(told) > 1

    monkeypatch.setattr(spares.time, "monotonic", lambda: now[0])
    with notes_of_workers() as notes:
        host = LaunchingHost(patience=1.0, notes=notes, tell=tell, needs=3)
        for number in range(4):  # hosts come one after the other
            participants = dict.fromkeys(HOSTS[:number], 0)
            host.report(SimpleNamespace(participants=participants, redundancy_list=set(), wait_list=set(), last_heartbeats={}))
            now[0] += 0.1
        assert told == [(0, 3)]
        now[0] += 5.0
        for number in (3, 2):
            participants = dict.fromkeys(HOSTS[:number], 0)
            host.report(SimpleNamespace(participants=participants, redundancy_list=set(), wait_list=set(), last_heartbeats={}))
        assert told == [(0, 3), (0, 0), (0, 1)], "it answers once more"


def test_the_agent_of_a_job_of_one_host_is_told_of_spares_alone() -> None:
    told = list[tuple[int, int]]()

    def tell(waiting: int, lacking: int) -> bool:
        told.append((waiting, lacking))
        return True

    with notes_of_workers() as notes:
        host = LaunchingHost(patience=1.0, notes=notes, tell=tell, needs=1, hosts=1)
        for participants, waiting in (([], set()), (HOSTS[:1], set()), (HOSTS[:1], {SPARE}), (HOSTS[:1], set())):
            lives = dict.fromkeys(waiting)
            state = SimpleNamespace(participants=dict.fromkeys(participants, 0), redundancy_list=waiting, last_heartbeats=lives)
            host.report(state)
    assert told == [(1, 0), (0, 0)]
