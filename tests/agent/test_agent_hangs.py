"""Agents that hang, whoever notices: they are replaced, with their memory, and commits go on. And workers that hang early."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from agent_kit import WAIT, Job, agent_pid, end_agent, eventually
from rank_kit import World
from session_case import loop, stop_the_agent_for_good

from gemini_ft.agent import hangs, lifecycle, watchdog
from gemini_ft.agent.hangs import HangDetector, HangWatch
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.autopsy import Doing
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.worker_messages import Leave, Left

IMPATIENT = {"agent_timeout": 1.5}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def replaced(job: Job, host: str, old: int) -> int:
    """Who serves the host instead of an agent that hung."""
    return int(eventually(lambda: (pid := agent_pid(job.run, host)) is not None and pid != old and pid, f"another agent of {host}"))


def held(job: Job, host: str) -> dict[int, set[int]]:
    """Owner -> iterations of which there are copies."""
    streams = job.status(host)["streams"]["main"]["shards"]
    return {int(owner): {int(slot.partition(":")[2]) for slot in slots if slot.startswith("complete")} for owner, slots in streams.items()}


def test_agents_that_two_threads_start_at_once_are_all_collected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that was forgotten while it ran was a ResourceWarning, and a zombie until this process started another one."""

    def start(*_: object, **__: object) -> None:
        lifecycle.started.append(subprocess.Popen(["sleep", "600"]))

    class Ended(subprocess.Popen[bytes]):
        def poll(self) -> int | None:
            if not self.returncode:
                self.returncode = 1
                other = threading.Thread(target=lifecycle.spawn, args=("many", "a"))
                other.start()
                other.join()
            return self.returncode

    monkeypatch.setattr(lifecycle, "start_process", start)
    monkeypatch.setattr(lifecycle, "started", [])
    monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path))
    with Ended(["true"]) as ended:
        ended.wait()
    start()
    start()
    alive = list(lifecycle.started)
    lifecycle.started.insert(0, ended)
    try:
        lifecycle.spawn("many", "a")
        assert ended not in lifecycle.started
        assert lifecycle.started[:2] == alive
        assert len(lifecycle.started) == 4
    finally:
        for child in {*alive, *lifecycle.started} - {ended}:
            child.kill()
            child.wait()


def test_an_agent_is_watched_and_killed_from_a_process_with_thousands_of_open_files() -> None:
    hung = subprocess.Popen(["sleep", "600"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    low = os.pidfd_open(hung.pid)
    listener = lifecycle.AgentProcess(pid=hung.pid, pidfd=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2000))
    os.close(low)
    try:
        assert not listener.ended()
        assert listener.kill()
    finally:
        listener.close()
        hung.kill()
        hung.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestReplacement:
    @pytest.mark.parametrize("victim", [0, 1], ids=["leader", "member"])
    def test_a_hung_agent_is_replaced_by_its_worker_and_loses_nothing(self, job: Job, victim: int) -> None:
        ranks = [job.rank(host, number, **(IMPATIENT if number == victim else {})) for number, host in enumerate("ab")]
        job.open(ranks)
        job.commit(ranks, 1, 2, 3)
        host = ranks[victim].host
        os.kill(old := job.pid(host), signal.SIGSTOP)
        replaced(job, host, old)
        ranks[victim].reconnect(job.version(3), agent_timeout=WAIT)  # one that has just started may be slow to answer
        assert held(job, host) == {0: {2, 3}, 1: {2, 3}}
        job.commit(ranks, 4, 5, 6)

    def test_what_no_worker_holds_is_not_lost_either(self, job: Job) -> None:
        """Between two attempts nobody but the agent has the memory; whoever joins next notices."""
        ranks = [job.process(host, number, **IMPATIENT) for number, host in enumerate("ab")]
        origin = {"lineage": [Version(Incarnation(1, "0a"), 7)], "overtaken": [Incarnation(1, "0b")], "aside": [Incarnation(1, "0b")]}
        job.open(ranks, **origin)
        job.commit(ranks, 1, 2)
        for rank in ranks:
            rank.kill()
        for host in "ab":
            os.kill(job.pid(host), signal.SIGSTOP)
        again = job.join(["a", "b"], **IMPATIENT)
        for rank in again:
            assert {(slot.owner, slot.version.iteration) for slot in rank.inventory()} == {(o, i) for o in (0, 1) for i in (1, 2)}
        assert again[0].client.welcome.secret == ranks[0].hello.secret
        assert again[0].client.welcome.info.known == job.version(0).incarnation
        told = again[0].client.welcome.model_dump(include={"incarnation", *origin})
        assert told == {"incarnation": job.version(0).incarnation, **origin}  # else what is in memory would look like another history
        resumed = job.version(2)
        job.open(again, resumed=resumed, sources={0: ["a"], 1: ["b"]})
        assert again[0].verify(resumed) == [0, 1]
        job.commit(again, 3, 4)

    def test_a_launcher_that_asks_it_hears_that_the_last_upload_is_not_known(self, job: Job, tmp_path: Path) -> None:
        """It knows of the job what the agent before it has left, and no more."""
        rank = job.process("a", 0, **IMPATIENT)
        job.open([rank], storage={"url": (tmp_path / "storage").as_uri(), "every_steps": 1000})
        job.commit([rank], 1)
        rank.kill()
        os.kill(job.pid("a"), signal.SIGSTOP)
        job.process("a", 0, **IMPATIENT).kill()  # which has it replaced, and opens no session
        answer = lifecycle.ask(job.run, "a", Leave(run=job.run, finished=True), 20.0)
        assert isinstance(answer, Left)
        assert "whether it has been stored is not known" in answer.unstored

    def test_an_agent_that_was_started_elsewhere_and_was_quicker_gets_the_memory(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ours finds the address taken and ends; what it was to inherit must not end with it."""
        ranks = job.start(hello=IMPATIENT)
        job.commit(ranks, 1, 2)
        for rank in ranks:
            rank.close()
        os.kill(job.pid("b"), signal.SIGSTOP)
        spawn = lifecycle.spawn

        def spawn_second(run: str, host: str, fds: Sequence[int] = (), arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
            if fds:
                spawn(run, host)
                eventually(lambda: lifecycle.is_listening(run, host), "the quicker agent")
            return spawn(run, host, fds, arguments)

        monkeypatch.setattr(lifecycle, "spawn", spawn_second)
        _, again = job.join(["a", "b"], **IMPATIENT)
        assert {(slot.owner, slot.version.iteration) for slot in again.inventory()} == {(o, i) for o in (0, 1) for i in (1, 2)}

    def test_an_agent_that_a_worker_of_ray_has_started_outlives_its_children(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such a worker kills its children, and not theirs, when it ends. A successor with an estate is started in the same way."""
        monkeypatch.setenv("RAY_RAYLET_PID", "1")
        before = len(lifecycle.started)
        (rank,) = job.start("a", hello=IMPATIENT)
        job.commit([rank], 1, 2)
        os.kill(old := job.pid("a"), signal.SIGSTOP)
        new = replaced(job, "a", old)
        rank.reconnect(job.version(2))
        children = lifecycle.started[before:]
        assert new not in [child.pid for child in children]
        for child in children:
            child.kill()
            child.wait()
        job.commit([rank], 3, 4)
        assert job.pid("a") == new

    def test_the_launcher_notices_too(self, job: Job) -> None:
        (rank,) = [job.process("a", 0, agent_timeout=0.6)]
        job.open([rank])
        job.commit([rank], 1)
        watchman = watchdog.AgentWatch(job.run, "a", 600.0)  # it learns from the agent how long to wait
        watchman.start()
        try:
            eventually(lambda: watchman.pulse.timeout == 0.6)
            os.kill(rank.pid, signal.SIGSTOP)  # a host whose workers cannot notice anything
            os.kill(old := job.pid("a"), signal.SIGSTOP)
            replaced(job, "a", old)
            assert held(job, "a") == {0: {1}}
        finally:
            watchman.stop()

    def test_memory_that_a_stopped_worker_still_maps_is_not_granted_to_another(self, job: Job) -> None:
        late = job.process("a", 0, **IMPATIENT)
        job.open([late])
        job.commit([late], 1, 2)
        os.kill(late.pid, signal.SIGSTOP)
        os.kill(job.pid("a"), signal.SIGSTOP)
        (rank,) = job.join(["a"], **IMPATIENT)
        job.open([rank], resumed=job.version(2), sources={0: ["a"]})
        os.kill(late.pid, signal.SIGCONT)
        assert not rank.inodes() & late.inodes()
        late.scribble()
        job.commit([rank], 3, 4)
        assert rank.verify(job.version(4)) == [0]

    def test_of_many_who_notice_one_acts(self, job: Job) -> None:
        ranks = job.join(["a"] * 4, **IMPATIENT)
        job.open(ranks)
        job.commit(ranks, 1)
        os.kill(old := job.pid("a"), signal.SIGSTOP)
        new = replaced(job, "a", old)
        eventually(lambda: all(rank.client.lost for rank in ranks))
        for rank in ranks:
            rank.reconnect(job.version(1))
        assert job.pid("a") == new
        assert job.log("a").count("of an agent that hung") == 1
        assert held(job, "a") == {owner: {1} for owner in range(4)}
        job.commit(ranks, 2)

    def test_nobody_is_replaced_for_being_slow_within_the_timeout(self, job: Job) -> None:
        (rank,) = job.start("a", hello={"agent_timeout": 3.0})
        old = job.pid("a")
        for _ in range(3):
            os.kill(old, signal.SIGSTOP)
            time.sleep(0.8)
            os.kill(old, signal.SIGCONT)
            job.commit([rank], (job.stream("a")["committed"] or 0) + 1)
        assert job.pid("a") == old

    def test_a_worker_that_was_stopped_itself_blames_nobody(self, job: Job) -> None:
        rank = job.process("a", 0, **IMPATIENT)
        job.open([rank])
        old = job.pid("a")
        for _ in range(3):
            os.kill(rank.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(rank.pid, signal.SIGCONT)
            job.commit([rank], (job.stream("a")["committed"] or 0) + 1)
        assert job.pid("a") == old

    def test_a_starter_that_dies_leaves_nothing_locked(self, job: Job) -> None:
        with watchdog.sole_starter(job.run, "a") as mine, watchdog.sole_starter(job.run, "a") as other:
            assert (mine, other) == (True, False)
        job.rank("a", 0)

    def test_one_that_has_left_its_place_to_one_that_is_gone_is_started_again(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where another's agent is killed when ours has just found the address taken."""
        spawn, spawned = lifecycle.spawn, list[subprocess.Popen[bytes]]()

        def first_ends(*given: Any) -> subprocess.Popen[bytes]:
            spawned.append(spawn(*given) if spawned else subprocess.Popen(["true"]))
            return spawned[-1]

        monkeypatch.setattr(lifecycle, "spawn", first_ends)
        watchdog.start(job.run, "a", watchdog.LeftMemory(), time.monotonic() + 60)
        assert job.pid("a") == spawned[1].pid
        assert len(spawned) == 2
        job.rank("a", 0)


class TestStart:
    """A worker that hangs before its third step is found, and shows where."""

    @pytest.mark.parametrize("phase", ["joining", "restoring", "first steps"])
    def test_a_worker_that_hangs_is_killed_after_its_stacks_were_written(self, job: Job, tmp_path: Path, phase: str) -> None:
        rank = job.process("a", 0, start_timeout=1.0)
        rank.write_stacks()
        if phase != "joining":
            job.open([rank], hang_timeout=None)
        if phase == "first steps":
            job.commit([rank], 1, 2)
        os.kill(rank.pid, signal.SIGSTOP)
        eventually(lambda: "is gone" in job.log("a"))
        assert "made no progress for" in job.log("a")
        assert "(start_timeout 1.0 s): killing it" in job.log("a")
        assert "most recent call first" in "".join(path.read_text() for path in tmp_path.iterdir())  # the log, or the report that it names

    def test_whatever_a_worker_says_while_it_joins_is_progress(self) -> None:
        detector = HangDetector(start_limit=10.0, last=0.0)
        assert [detector.hangs(10.0), detector.hangs(10.5)] == [None, 10.5]
        detector.heard(10.0)
        assert detector.hangs(19.0) is None
        detector.progress(20.0)
        detector.heard(29.0)  # from now on only steps are
        assert detector.hangs(30.5) == 10.5
        for now in (25.0, 26.0, 27.0):
            detector.progress(now)
        assert detector.hangs(200.0) is None  # the patience of hang_timeout begins

    def test_it_can_be_switched_off(self) -> None:
        assert HangDetector(start_limit=0.0, last=0.0).hangs(1e9) is None

    def test_a_process_that_trains_another_stream_is_not_hanging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, said = SimpleNamespace(now=0.0), list[str]()
        monkeypatch.setattr(hangs, "time", SimpleNamespace(monotonic=lambda: clock.now))
        trains, waits, alone = (Mock(WorkerConnection, rank=rank, pid=pid, alive=True, parting="") for rank, pid in enumerate((10, 10, 20)))

        async def look() -> None:
            watch = HangWatch(Mock(log=said.append, examine=AsyncMock()))
            for worker in (trains, waits, alone):
                watch.begin(worker, start_timeout=1.0)
            watch.open(trains, hang_timeout=10.0, readopt=False)
            for clock.now in (0.1, 0.2, 0.3, 0.4, 3.0):
                watch.progress(trains)
            watch.kill_hanging()

        asyncio.run(look())
        assert said == ["rank 2 (pid 20) made no progress for 3.0 s (start_timeout 1.0 s): killing it"]

    def test_one_whose_script_has_ended_without_closing_is_killed_if_its_exit_hangs(self) -> None:
        """It has said that its script has ended; a thread that is waited for may keep the process, and with it the job, from ending."""
        worker = Mock(WorkerConnection, rank=0, pid=1, alive=True, parting="goodbye")

        async def look() -> None:
            watch = HangWatch(Mock(examine=AsyncMock()))
            watch.begin(worker, start_timeout=1e-9)
            await asyncio.sleep(0.01)
            watch.kill_hanging()
            watch.kill_hanging()
            await asyncio.sleep(0.01)
            assert watch.killed == 1

        asyncio.run(look())
        assert worker.kill.call_count == 1

    @pytest.mark.parametrize("how", ["", "goodbye", "failed"])
    def test_one_that_has_left_while_it_was_examined_is_not_killed(self, how: str) -> None:
        worker = Mock(WorkerConnection, rank=0, pid=1, alive=True, parting="")

        async def examine(_: WorkerConnection) -> None:
            worker.parting = how or worker.parting

        async def look() -> HangWatch:
            watch = HangWatch(Mock(examine=examine))
            watch.begin(worker, start_timeout=1e-9)
            await asyncio.sleep(0.01)
            watch.kill_hanging()
            await asyncio.sleep(0.01)
            return watch

        watch = asyncio.run(look())
        assert worker.kill.called == (not how)
        assert watch.killed == (not how)

    @pytest.mark.parametrize("is_stopped", [False, True])
    def test_one_that_makes_progress_while_it_is_examined_goes_on(self, is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless it was stopped: the examination itself has woken it. It may hang, and be examined, again."""
        monkeypatch.setattr(hangs, "doing_of", lambda pid: Doing.STOPPED if is_stopped else Doing.ASLEEP)
        worker, said = Mock(WorkerConnection, rank=0, pid=1, alive=True, parting=""), list[str]()
        goes_on = True

        async def examine(_: WorkerConnection) -> None:
            if goes_on:
                watch.progress(worker)

        watch = HangWatch(Mock(log=said.append, examine=examine))

        async def look() -> None:
            watch.begin(worker, start_timeout=1e-9)
            await asyncio.sleep(0.01)
            watch.kill_hanging()
            await asyncio.sleep(0.01)

        asyncio.run(look())
        assert worker.kill.called == is_stopped
        assert any("makes progress again" in text for text in said) == (not is_stopped)
        if not is_stopped:
            goes_on = False
            asyncio.run(look())
            assert worker.kill.called


@pytest.mark.parametrize(("victim", "options"), [(0, {}), (1, {"interval": 1})], ids=["leader-auto", "member-every-step"])
def test_training_commits_again_soon_after_an_agent_has_hung(tmp_path: Path, victim: int, options: dict[str, Any]) -> None:
    """No update waits for `timeout`, and no agent for its host to be lost."""
    options = {"agent_timeout": 1.0, "replica_timeout": 1.0, "timeout": 60.0, "on_late": None, "pause": 0.02, **options}
    with World(tmp_path, size=2) as world:
        results = world.outcome(partial(loop, 2000, during=stop_the_agent_for_good, **options), VICTIM=str(victim))
        for result in results:
            assert not isinstance(result, Exception), result
            assert result["committed"] > 20
            assert result["longest"] < 30, "an update waited for the whole timeout"
        assert "of an agent that hung" in world.log(world.hosts[victim])


def test_an_agent_that_dies_while_its_last_upload_is_waited_for_has_not_stored_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has is not known, and that is no success."""
    ask = lifecycle.ask
    monkeypatch.setattr(lifecycle, "ask", lambda run, host, message, timeout=5.0: ask(run, host, message, 0.5))
    monkeypatch.setattr(lifecycle, "host_id", lambda: "a")
    ranks = [job.process("a", 0), job.rank("b", 1)]
    job.open(ranks)
    job.commit(ranks, 1)
    ranks[0].goodbye()  # and the other rank has not finished
    ranks[0].kill()
    said: list[str] = []
    launcher = threading.Thread(target=lambda: said.append(lifecycle.job_finished(job.run, stores=True)))
    launcher.start()
    time.sleep(1.5)
    assert launcher.is_alive()
    end_agent(job.run, "a")
    launcher.join(30)
    assert said == ["the agent of host 'a' has ended, or hangs; whether the last step has been stored is not known"]
