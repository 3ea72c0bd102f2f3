"""Hosts that are judged before they join, put out of use, taken back, and drained when they are slow."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agent_kit import eventually
from test_elastic import HOSTS, SPARE, Scene
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action, _RendezvousState

from gemini_ft.agent import lifecycle
from gemini_ft.cli import main
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.launch import endings, health, spares
from gemini_ft.launch.endings import HostDrain
from gemini_ft.launch.health import HealthOptions, HostHealth, Judgement, UnhealthyError
from gemini_ft.launch.notes import SUSPECTED, Notes, notes_of_workers, say
from gemini_ft.launch.out_of_use import out_of_use, publish, wish_back
from gemini_ft.wire.worker_messages import Draining

RUN = "r/1"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def scene_with(
    command: str | None = None,
    seconds: float = 5.0,
    drains: bool = False,
    slow: Callable[[], list[int]] = list,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Scene, HostHealth, list[float]]:
    """A host that comes to an open round, and the times at which it was drained."""
    scene, drained = Scene(), list[float]()
    options = HealthOptions(command=command, seconds=seconds, drains=drains)

    def account() -> dict[str, Any]:
        return {"streams": {"main": {"stragglers": slow()}}}

    found = HostHealth(RUN, options, scene.host.notes, account, lambda: drained.append(clock()), clock)
    scene.host.health, found.name = found, "spare"
    found.ranks = {3}
    scene.state.redundancy_list.clear()
    scene.open_round(HOSTS[1])
    return scene, found, drained


def test_a_host_that_is_not_well_does_not_join_and_is_listed_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    scene, _, _ = scene_with("echo a DIMM is bad; exit 3")
    scene.action()  # which writes the list
    assert not scene.state.last_heartbeats.keys() & {SPARE}, "nobody waits for it"
    why = "the health command ended with status 3: a DIMM is bad"
    with pytest.raises(UnhealthyError, match=why):
        scene.action()
    assert not scene.state.participants.keys() & {SPARE}
    again, _, _ = scene_with("true")  # another launcher of that host
    again.state = scene.state
    with pytest.raises(UnhealthyError, match="--take-back spare"):
        again.action()
    assert out_of_use(RUN) == {"spare": why}
    assert main.main(["hosts", "--run-id", RUN]) == 0
    assert f"spare  {why}" in capsys.readouterr().out
    _, others, _ = scene_with()
    thread = threading.Thread(target=lambda: [others.tend(scene.state) or time.sleep(0.01) for _ in range(500) if out_of_use(RUN)])
    thread.start()  # as launchers at work do
    assert main.main(["hosts", "--run-id", RUN, "--take-back", "spare"]) == 0
    thread.join()
    assert main.main(["hosts", "--run-id", RUN, "--take-back", "spare"]) == 2
    assert "not out of use" in capsys.readouterr().err
    last, _, _ = scene_with("true")
    last.state = scene.state
    assert last.actions(3)[-1] is _Action.ADD_TO_PARTICIPANTS


def test_a_host_is_judged_again_only_when_it_is_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, found, _ = scene_with(f"echo >> {tmp_path}/judged; test ! -e {tmp_path}/bad")
    monkeypatch.setenv("GEMINI_NOTES_FILE", scene.host.notes.path)

    def judged() -> int:
        return (tmp_path / "judged").read_text().count("\n")

    scene.actions(3)
    assert judged() == 1
    say(SUSPECTED)
    scene.actions(3)
    assert judged() == 2
    (tmp_path / "bad").touch()
    found.suspect("as it kept the job waiting")
    scene.action()
    with pytest.raises(UnhealthyError):
        scene.action()


def reason_for(command: str, seconds: float) -> str:
    """Why a host is put out of use whose command has had that time; empty: it joins."""
    scene, _, _ = scene_with(command, seconds=seconds)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if scene.action() is _Action.ADD_TO_PARTICIPANTS:
                return ""
        except UnhealthyError as error:
            return str(error)
        scene.now += 0.5
    raise TimeoutError(command)


def written(file: Path) -> int:
    """The number in a file that a shell writes."""
    eventually(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_hangs_has_failed(tmp_path: Path) -> None:
    assert "the health command took longer than 2 s" in reason_for(f"sleep 60 & echo $! > {tmp_path}/pid; wait", 2.0)
    pid = written(tmp_path / "pid")
    eventually(lambda: is_gone(pid))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is still at work when its object goes
def test_a_command_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a device."""
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    try:
        assert "took longer than 0.1 s" in reason_for(f"echo $$ > {tmp_path}/pid; exec sleep 9", 0.1)
        assert not is_gone(written(tmp_path / "pid"))
    finally:
        os.kill(written(tmp_path / "pid"), signal.SIGKILL)
        gc.collect()


def test_a_command_that_says_too_much_costs_no_memory_and_moves_no_cursor() -> None:
    judgement = Judgement("head -c 300000000 /dev/zero; printf '\\033[2Jbroken'; exit 3", 60.0)
    said = eventually(lambda: judgement.outcome(0.2), "the end of the command")
    assert "status 3" in said
    assert said.endswith("[2Jbroken")
    assert said.isprintable()
    files = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert sum(file.stat().st_size for file in files if file.exists()) < 10**8


@pytest.mark.parametrize("seals", ["SHRINK", "SEAL"])
def test_a_command_that_seals_its_output_is_judged_like_any_other(seals: str) -> None:
    sealing = f"import fcntl; print('broken', flush=True); fcntl.fcntl(1, fcntl.F_ADD_SEALS, fcntl.F_SEAL_{seals})"
    assert "the health command ended with status 3: broken." in reason_for(f'{sys.executable} -c "{sealing}"; exit 3', 30.0)


def test_a_command_that_leaves_something_in_the_background_has_ended(tmp_path: Path) -> None:
    try:
        assert reason_for(f"sleep 30 & echo $! > {tmp_path}/pid", 5.0) == ""
    finally:
        os.kill(written(tmp_path / "pid"), signal.SIGKILL)


def test_what_a_command_leaves_in_the_background_lives_when_the_launcher_ends(tmp_path: Path) -> None:
    """It writes to the command's output, which takes no more memory. The launcher keeps neither a thread nor a descriptor for it."""
    (tmp_path / "left").write_text("while ! test -e ended; do sleep 0.05; done; head -c 3000000 /dev/zero; touch alive; exec sleep 60")
    code = f"""
import os, threading, time
from gemini_ft.launch.health import Judgement
before = os.listdir("/proc/self/fd")
judgement = Judgement("cd {tmp_path}; sh left & echo $! > pid", 60.0)
while judgement.outcome(0.2) is None:
    pass
del judgement
assert threading.active_count() == 1, threading.enumerate()
assert os.listdir("/proc/self/fd") == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    (tmp_path / "ended").touch()
    try:
        eventually(lambda: (tmp_path / "alive").exists(), "a sign of life")
        assert os.stat(f"/proc/{written(tmp_path / 'pid')}/fd/1").st_size == 0
    finally:
        os.kill(written(tmp_path / "pid"), signal.SIGKILL)


def test_a_launcher_that_is_stopped_ends_its_health_command(tmp_path: Path) -> None:
    # What gets the signal while it is still starting the command leaves that to itself.
    scene, found, _ = scene_with(f"sleep 0.5; echo $$ > {tmp_path}/pid; exec sleep 60", seconds=60.0)

    def stop(*_: object) -> None:
        raise SignalException("stopped", signal.SIGTERM)  # as torch's launcher does

    def stop_when_judged() -> None:
        written(tmp_path / "pid")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    stopping = threading.Thread(target=stop_when_judged)
    stopping.start()
    try:
        with pytest.raises(SignalException):
            eventually(lambda: scene.action() is _Action.ADD_TO_PARTICIPANTS)
        found.end()
    finally:
        stopping.join()
        signal.signal(signal.SIGTERM, before)
    assert is_gone(written(tmp_path / "pid"))


def test_a_host_of_the_job_lives_while_it_is_judged(tmp_path: Path) -> None:
    scene, _, _ = scene_with(f"while ! test -e {tmp_path}/done; do sleep 0.05; done")
    scene.heard = timedelta(seconds=6)
    assert [scene.action() for _ in range(3)] == [_Action.KEEP_ALIVE] * 3
    (tmp_path / "done").touch()
    eventually(lambda: scene.actions(3)[-1] is _Action.ADD_TO_PARTICIPANTS)


def test_a_health_command_has_less_time_than_the_hosts_to_meet(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--health=true", "--rdzv-conf=join_timeout=30", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "health_timeout=60: must be less than the 30 s" in done.stderr) == (2, True), done.stderr


class JobStore:
    """The state of a rendezvous of three hosts at work, which changes only for those that have read it last."""

    def __init__(self, spares: int = 1) -> None:
        state = _RendezvousState()
        state.complete, state.round = True, 1
        state.participants = dict(zip(HOSTS, range(3), strict=True))
        state.redundancy_list = {torch_rendezvous._NodeDesc(f"spare{number}", 1, 0) for number in range(spares)}
        state.last_heartbeats = dict.fromkeys([*HOSTS, *state.redundancy_list], datetime.now(UTC))
        vars(state).update(gemini_names={host: host.addr for host in HOSTS}, gemini_world="w", gemini_members={host.addr for host in HOSTS})
        self.name, self.token = "store", 0
        self.bits = pickle.dumps(state)
        self.before_write: Callable[[], object] = int

    @property
    def state(self) -> Any:
        return pickle.loads(self.bits)

    def change(self, **values: object) -> None:
        state = self.state
        vars(state).update(values)
        self.bits, self.token = pickle.dumps(state), self.token + 1

    def get_state(self) -> tuple[bytes, int]:
        return self.bits, self.token

    def set_state(self, bits: bytes, token: int) -> tuple[bytes, int, bool]:
        self.before_write()
        wins = token == self.token
        if wins:
            self.bits, self.token = bits, self.token + 1
        return self.bits, self.token, wins


class AtWork:
    """A host of such a job. It looks at the state as torch's launcher does."""

    def __init__(
        self, store: JobStore, number: int, command: str | None = None, drains: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slow, self.drained = [number], list[int]()
        self.notes = Notes()
        weakref.finalize(self, self.notes.close)
        options = HealthOptions(command=command, seconds=5.0, drains=drains)
        self.health = HostHealth(RUN, options, self.notes, self.account, self.drain, clock)
        self.health.name, self.health.ranks = HOSTS[number].addr, {number}
        settings = SimpleNamespace(run_id="r", keep_alive_interval=timedelta(seconds=60), keep_alive_max_attempt=3, min_nodes=3)
        self.holder = spares.by_own_clock(torch_rendezvous._BackendRendezvousStateHolder)(store, settings, 0)
        self.host = spares.LaunchingHost(patience=1.0, notes=self.notes, name=HOSTS[number].addr, world="w", size=3, health=self.health)
        self.handler = SimpleNamespace(_state_holder=self.holder, _this_node=HOSTS[number], _heartbeat_lock=nullcontext())
        self.read()

    def account(self) -> dict[str, Any]:
        return {"streams": {"main": {"stragglers": self.slow}}}

    def drain(self) -> None:
        self.drained.append(1)

    def drains(self) -> int:
        """Counts how often it was drained."""
        return len(self.drained)

    def read(self) -> None:
        self.holder.sync()

    def look(self) -> None:
        spares.nodes_waiting(lambda handler: 0, self.host, self.handler)


def quick_host(store: JobStore) -> AtWork:
    host = AtWork(store, 1, "true")
    host.slow = []
    return host


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(health, "LOOK", 0.0)


def test_a_slow_host_is_drained_where_a_spare_waits_and_not_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]

    def looks(host: AtWork, seconds: int) -> int:
        for _ in range(seconds):
            now[0] += 1.0
            host.read()
            host.look()
        return host.drains()

    def host_in(store: JobStore, number: int) -> AtWork:
        return AtWork(store, number, clock=lambda: now[0])

    first = host_in(JobStore(spares=0), 1)
    assert not looks(first, 30)
    store = JobStore(spares=3)
    first = host_in(store, 1)
    first.slow = [2]  # of another host
    assert not looks(first, 30)
    first.slow = [1]
    assert not looks(first, 9)
    assert looks(first, 5) == 1
    assert looks(first, 30) == 1
    second = host_in(store, 2)
    second.health.ranks, second.slow = {1}, [1]
    assert not looks(second, 30), "the host in its place is slow, too"
    now[0] += 600.0
    assert not looks(second, 30), "the rank is slow wherever it is"
    second.slow, second.health.ranks = [4], {4}
    assert looks(second, 30) == 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("command", [None, "exit 1"])
def test_two_slow_hosts_do_not_leave_for_one_spare(command: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Both have read the same state, and only one can change it."""
    store = JobStore()
    hosts = [AtWork(store, number, command) for number in (1, 2)]
    if command is not None:  # there is nobody to leave for while they are judged
        spare = store.state.redundancy_list
        store.change(redundancy_list=set())
        for host in hosts:
            host.read()
            until_judged(host, caplog)
        store.change(redundancy_list=spare)
        for host in hosts:
            host.read()
    for _ in range(5):
        for host in hosts:
            host.look()
    assert [host.drains() for host in hosts] == [1, 0]
    state = store.state
    del state.participants[HOSTS[1]]  # it has left, and the spare is about to come
    store.change(participants=state.participants, gemini_slow=None)
    hosts[1].read()
    hosts[1].look()
    assert hosts[1].drains() == 0


def until_judged(host: AtWork, log: pytest.LogCaptureFixture) -> None:
    """Looks until the health command has said that a slow host is not well."""

    def is_judged() -> bool:
        host.look()
        return "this host is slow, and the health command" in log.text

    log.clear()
    eventually(is_judged)


@pytest.mark.usefixtures("hasty")
def test_a_slow_host_leaves_only_when_the_others_can_see_it() -> None:
    """In a large job somebody else has always written just before."""
    store = JobStore()
    host = AtWork(store, 1)
    store.before_write = lambda: store.change(deadline=None)
    host.look()
    assert not host.drains()
    assert not hasattr(store.state, "gemini_slow")

    def write_once() -> None:
        store.before_write = int
        store.change(deadline=None)

    store.before_write = write_once
    host.look()
    assert host.drains() == 1
    assert store.state.gemini_slow[1] == [1]


@pytest.mark.usefixtures("hasty")
def test_a_slow_host_that_is_not_well_is_put_out_of_use_when_a_spare_waits(caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore(spares=0)
    host = AtWork(store, 1, "exit 1", drains=False)
    until_judged(host, caplog)
    assert not host.drains()
    store.change(redundancy_list=JobStore().state.redundancy_list, last_heartbeats=JobStore().state.last_heartbeats)
    host.read()
    host.look()
    assert host.drains()
    assert store.state.gemini_out == {"host1": "the health command ended with status 1"}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_host_that_was_not_well_at_work_is_judged_again_before_it_joins(
    is_slow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(spares=0)
    host = AtWork(store, 1, f"test -e {tmp_path}/well", drains=False)
    until_judged(host, caplog)
    host.slow = [1] if is_slow else []
    host.look()
    (tmp_path / "well").touch()
    scene = Scene()
    scene.host.health, scene.host.name = host.health, "host1"
    scene.state.redundancy_list.clear()
    scene.open_round()
    assert scene.actions(5)[-1] is _Action.ADD_TO_PARTICIPANTS


def test_a_wish_is_kept_until_the_host_is_taken_back_for_all_to_see() -> None:
    store = JobStore()
    store.change(gemini_out={"host9": "bad"})
    host = quick_host(store)
    host.look()
    wish_back(RUN, "host9")
    store.before_write = lambda: store.change(deadline=None)
    host.look()
    assert out_of_use(RUN) == store.state.gemini_out == {"host9": "bad"}
    store.before_write = int
    host.look()
    assert store.state.gemini_out == {}
    host.read()
    host.look()
    assert out_of_use(RUN) == {}
    store.change(gemini_out={"host9": "bad again"})
    host.read()
    host.look()
    assert store.state.gemini_out == {"host9": "bad again"}, "the wish is over"


def test_a_host_out_of_use_takes_others_back_before_it_ends() -> None:
    scene, _, _ = scene_with("true")
    scene.state.gemini_out = {"spare": "bad", "host9": "bad"}
    wish_back(RUN, "host9")
    scene.action()
    assert scene.state.gemini_out == {"spare": "bad"}
    with pytest.raises(UnhealthyError):
        scene.action()


def test_a_list_that_cannot_be_kept_in_a_file_ends_no_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = JobStore()
    store.change(gemini_out={"host9": "bad"})
    host = quick_host(store)

    def publish_nowhere(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(health, "publish", publish_nowhere)
    host.look()
    store.change(gemini_out={"host9": "bad", "host8": "bad"})
    host.read()
    host.look()
    assert caplog.text.count("cannot be kept in a file") == 1


def test_hosts_stay_out_of_use_in_a_new_store() -> None:
    publish(RUN, {"host9": "bad"})
    store = JobStore()
    quick_host(store).look()
    assert store.state.gemini_out == out_of_use(RUN) == {"host9": "bad"}


def test_without_options_nothing_is_written() -> None:
    publish(RUN, {"host9": "bad"})
    store = JobStore()
    before = store.token
    AtWork(store, 1, drains=False).look()
    assert store.token == before


def test_a_signal_that_comes_to_a_host_that_is_drained_already_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow host is drained, and then the scheduler wishes to have it."""
    monkeypatch.setattr(lifecycle, "ask", lambda *_: Draining(workers=1, relayed=False))
    sent = list[int]()
    host = HostDrain("run", 60.0, signal.SIGUSR1)
    with host.heeded():
        monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append(signum))
        host.heard_once()
        assert host.heard()
        assert host.begun
        assert host.heard()
        begun: bool = host.begun
        assert not begun
    assert sent == [signal.SIGUSR1]


def test_ranks_that_kept_the_job_waiting_once_are_not_suspected_of_later_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = {"ranks": [1], "text": "rank 1 is stopped", "report": "/logs/hang.txt"}
    monkeypatch.setattr(endings, "account_of", lambda *_: {"streams": {"main": {"hang": hang}}})
    with notes_of_workers() as notes:
        found = endings.Endings(notes, RUN)
        for status, ranks in ((-signal.SIGKILL, {1}), (1, set()), (-signal.SIGKILL, set())):
            found.judge([ProcessFailure(0, 1, status, "")])
            assert found.hung == ranks


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verify": "replays"}, "verify='replays'.*true, false or replay"),
        ({"straggler": "kill"}, "straggler='kill'.*'warn' or 'drain'"),
        ({"straggler": "drain", "straggler_factor": 0}, "straggler_factor=0"),
        ({"spare": "warm"}, "restart='in_place'"),
        ({"health": ""}, "health=''.*at least 1"),
        ({"health_timeout": 0}, "health_timeout=0.*greater than 0"),
    ],
)
def test_bad_values_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(options, {})
