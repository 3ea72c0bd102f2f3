"""Whatever happens, in whatever order: the job ends, and with the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_kit import agent_pid
from plain_case import Case, history, train
from rank_kit import Attempt, World

from gemini_ft.testing import EmulatedHosts

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


class Monkey:
    """Kills and stops workers and agents at random moments, so many times."""

    def __init__(self, seed: int, world: World, deeds: int) -> None:
        self._random = random.Random(seed)
        self._world, self._left = world, deeds
        self._attempt: Attempt | None = None
        self._over = threading.Event()
        self._stopped: list[int] = []
        self.done: list[str] = []

    def watch(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def run(self) -> None:
        while self._left and not self._over.wait(self._random.uniform(0.05, 1.0)):
            self._wake()
            deed: Callable[[], str] = self._random.choice([self._kill_worker, self._kill_agent, self._stop_agent, self._kill_host])
            self.done.append(deed())
            self._left -= 1
        self._over.wait(1)
        self._wake()

    def end(self) -> None:
        self._over.set()
        self._wake()

    def _wake(self) -> None:
        while self._stopped:
            _signal(self._stopped.pop(), signal.SIGCONT)

    def _kill_worker(self, rank: int | None = None) -> str:
        rank = self._random.randrange(len(self._world.hosts)) if rank is None else rank
        if self._attempt is not None:
            self._attempt.processes[rank].kill()
        return f"worker {rank}"

    def _kill_agent(self, host: str | None = None) -> str:
        host = self._random.choice(self._world.hosts) if host is None else host
        _signal(agent_pid(self._world.run, host), signal.SIGKILL)
        return f"agent of {host}"

    def _stop_agent(self) -> str:
        host = self._random.choice(self._world.hosts)
        if (pid := agent_pid(self._world.run, host)) is not None:
            _signal(pid, signal.SIGSTOP)
            self._stopped.append(pid)
        return f"pause for {host}"

    def _kill_host(self) -> str:
        host = self._random.choice(self._world.hosts)
        self._kill_agent(host)
        for rank, name in enumerate(self._world.hosts):
            if name == host:
                self._kill_worker(rank)
        return f"host {host}"


def _signal(pid: int | None, number: signal.Signals) -> None:
    try:
        if pid is not None:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def chaos(folder: Path, seed: int, deeds: int, steps: int) -> None:
    chance = random.Random(seed)
    hosts = chance.choice([["a", "b"], ["a", "b", "c"], ["a", "a", "b"]])
    on_late = chance.choice(["skip", "wait"])
    options = {"on_late": on_late, "timeout": 5.0, "replica_timeout": 1.0, "chunk_bytes": 1024, "max_retries": 100}
    if chance.random() < 0.5:
        options["storage"] = {"url": f"file://{folder}/store", "every_steps": 7}
    case = Case(steps=steps, pause=0.02, options=options)
    with World(folder, hosts=hosts) as world:
        expected = world.outcome(
            train, case, str(folder / "undisturbed"), GEMINI_RESUME="never", GEMINI_RUN_ID=f"{world.run}-calm", GEMINI_LINGER="10"
        )
        monkey = Monkey(seed, world, deeds)
        thread = threading.Thread(target=monkey.run)
        thread.start()
        try:
            while True:
                attempt = world.start(train, case, str(folder / "disturbed"))
                monkey.watch(attempt)
                if attempt.wait(120):
                    break
                attempt.kill()
                assert len(monkey.done) <= deeds
                world.restarts += 1
                assert world.restarts < 5 * deeds, f"{monkey.done}: {attempt.results()}"
        finally:
            monkey.end()
            thread.join()
        for rank, result in enumerate(attempt.results()):
            assert history(folder / "disturbed", rank) == history(folder / "undisturbed", rank), monkey.done
            assert result["state"] == expected[rank]["state"], monkey.done


@pytest.mark.soak
def test_ends_with_the_same_bits(tmp_path: Path) -> None:
    chaos(tmp_path, seed=1, deeds=6, steps=40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 42))
def test_ends_with_the_same_bits_whatever_the_seed(tmp_path: Path, seed: int) -> None:
    chaos(tmp_path, seed, deeds=12, steps=80)


@pytest.mark.soak
def test_a_campaign_on_real_launchers_ends_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ratios"]["rounds_equal"] == 1.0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_grows_with_the_number_of_steps(tmp_path: Path) -> None:
    """Memory, descriptors and threads of workers, agents and launchers are the same after a tenth of the steps and at their end."""
    steps = int(os.environ.get("SOAK_STEPS", "100000"))
    (tmp_path / "out").mkdir()
    program = [str(CHAOS.with_name("chaos_worker.py")), "--steps", str(steps), "--pause", "0", "--out", str(tmp_path / "out")]
    with EmulatedHosts(2, program, tmp_path) as job:
        events = tmp_path / "events"
        job.wait_for(lambda: _last_step(events) >= steps // 5, timeout=7200)
        before = _usage(job.run)
        job.wait_for(lambda: _last_step(events) >= steps - steps // 10, timeout=7200)
        after = _usage(job.run)
        job.finish(7200)
    assert len(before) >= 6, before  # launcher, fork server's worker and agent of each host
    assert before.keys() == after.keys()
    for pid, then in before.items():
        now = after[pid]
        assert now["fds"] <= then["fds"] + 2, (then, now)
        assert now["threads"] <= then["threads"] + 1, (then, now)
        assert now["bytes"] <= then["bytes"] + max(4 * 2**20, then["bytes"] // 50), (then, now)


def _last_step(events: Path) -> int:
    """Iteration of the newest line, read from the end: the file grows with every step."""
    if not events.exists():
        return 0
    with open(events, "rb") as file:
        file.seek(max(0, events.stat().st_size - 4096))
        steps = [line for line in file.read().split(b"\n")[1:-1] if b'"event": "step"' in line]
    time.sleep(0.5)
    return int(json.loads(steps[-1])["iteration"]) if steps else 0


def _usage(run: str) -> dict[int, dict[str, Any]]:
    """By pid: what every process of the run has."""
    found: dict[int, dict[str, Any]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("GEMINI_RUN_ID") == run:
                memory = process.memory_info()
                used = {"bytes": memory.rss - memory.shared, "fds": process.num_fds(), "threads": process.num_threads()}
                found[process.pid] = used | {"command": " ".join(process.cmdline())[:80]}
    return found
