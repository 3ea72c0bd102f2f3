"""A launcher in miniature for tests: forked ranks with real gloo, restarted together when one dies, as torchrun does it.

Forking from a process that has imported torch makes a rank cost milliseconds. So does an agent: as with ``gemini run``, it is imported
ahead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil
from agent_kit import WAIT, context, end_agent, forked

from gemini_ft.agent import ahead, lifecycle
from gemini_ft.cli.store import open_store
from gemini_ft.errors import GeminiError

if TYPE_CHECKING:
    import pytest


class Failed(Exception):
    """Ranks that died without a word; by rank, their exit codes."""


class Attempt:
    """The processes of one attempt."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], environments: Sequence[Mapping[str, str]]) -> None:
        self.processes = []
        self._pipes = []
        self.said: dict[int, Any] = {}
        for environ in environments:
            ours, theirs = context.Pipe()
            process = forked(_run, theirs, dict(environ), function, arguments)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait(self, timeout: float = 2 * WAIT) -> bool:
        """Until all have ended well (True), or one has not. Ranks that compute do not hang, however long they take on a busy machine."""
        end, computed = time.monotonic() + timeout, self._computed()
        while self._pipes_open():
            if time.monotonic() > end:
                before, computed = computed, self._computed()
                slow = [rank for rank in self._pipes_open() if computed[rank] > before[rank] + timeout / 100]
                assert slow, f"ranks {self._pipes_open()} did not end within {timeout:g} s, nor compute for a hundredth of it"
                end = time.monotonic() + timeout
            pipes = {rank: self._pipes[rank] for rank in self._pipes_open()}
            ends = {rank: self.processes[rank].sentinel for rank in pipes}  # processes of its loaders keep the pipe of a killed rank open
            ready = wait([*pipes.values(), *ends.values()], 0.1)
            for rank in [rank for rank in pipes if pipes[rank] in ready or ends[rank] in ready]:
                try:
                    if not pipes[rank].poll():
                        raise EOFError
                    self.said[rank] = pipes[rank].recv()
                except EOFError:
                    self.processes[rank].join(WAIT)
                    self.said[rank] = Failed(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
                if isinstance(self.said[rank], Exception):
                    return False
        return True

    def _computed(self) -> list[float]:
        """Processor seconds of each rank so far; 0 where it has ended."""
        seconds = []
        for process in self.processes:
            try:
                times = psutil.Process(process.pid).cpu_times()
                seconds.append(times.user + times.system)
            except psutil.NoSuchProcess:
                seconds.append(0.0)
        return seconds

    def _pipes_open(self) -> list[int]:
        return [rank for rank in range(len(self._pipes)) if rank not in self.said]

    def results(self) -> list[Any]:
        """What each rank returned, or the exception it raised; waits for all of them."""
        while not self.wait() and self._pipes_open():
            pass
        return [self.said[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(WAIT)
        for pipe in self._pipes:
            pipe.close()


def _run(pipe: Any, environ: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except Exception as error:
        result = error
    pipe.send(result)


class World:
    """A run of so many ranks, each on an emulated host of its own unless ``hosts`` says otherwise. Ends everything at the end.

    ``has_agents``: whether an agent is imported ahead on each host.
    """

    has_agents = True

    def __init__(self, folder: Path, size: int = 1, hosts: Sequence[str] | None = None, **environ: str) -> None:
        self.folder = folder
        self.hosts = list(hosts or [f"host{rank}" for rank in range(size)])
        self.run = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.environ = {"GEMINI_RUN_ID": self.run, "GEMINI_LOG_DIR": str(folder), "GEMINI_FAULTS_DIR": str(folder / "faults"), **environ}
        self.restarts = 0
        self._known = set(self.hosts)
        self._attempts: list[Attempt] = []
        self._ahead = contextlib.ExitStack()
        self._store = open_store("127.0.0.1", 0)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for attempt in self._attempts:
            attempt.kill()
        self._ahead.close()
        for host in self._known:
            account = self._account(host) if kind is not None else None
            end_agent(self.run, host)
            if kind is not None and (log := self._log(host)).exists():
                print(f"--- agent of {host}\n{log.read_text()}\n{account}")

    def _account(self, host: str) -> str | None:
        with contextlib.suppress(GeminiError, OSError):
            return lifecycle.status(self.run, host)
        return "it does not answer"

    def _log(self, host: str) -> Path:
        return self.folder / lifecycle.log_path(self.run, host).name

    def log(self, host: str) -> str:
        """What the host's agent wrote."""
        return self._log(host).read_text()

    def start(self, function: Callable[..., Any], *arguments: Any, per_rank: Sequence[Mapping[str, str]] = (), **environ: Any) -> Attempt:
        """One attempt of ``function(*arguments)`` on every rank."""
        self._known |= set(self.hosts)
        for host in set(self.hosts) if self.has_agents else ():
            self._ahead.enter_context(ahead.started_ahead(self.run, host))
        size = len(self.hosts)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environments = [
            {
                **common,
                **self.environ,
                **environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GEMINI_HOST_ID": host,
                **(per_rank[rank] if per_rank else {}),
            }
            for rank, host in enumerate(self.hosts)
        ]
        self._attempts.append(Attempt(function, arguments, environments))
        return self._attempts[-1]

    def finish(self, function: Callable[..., Any], *arguments: Any, restarts: int = 10, **environ: Any) -> list[Any]:
        """Restart all ranks until all have ended well; what each returned then."""
        while True:
            attempt = self.start(function, *arguments, **environ)
            if attempt.wait():
                return attempt.results()
            attempt.kill()
            self.restarts += 1
            assert self.restarts <= restarts, attempt.said

    def outcome(self, function: Callable[..., Any], *arguments: Any, **environ: Any) -> list[Any]:
        """What each rank returned, or the exception it raised, in one attempt; all are dead afterwards."""
        attempt = self.start(function, *arguments, **environ)
        try:
            return attempt.results()
        finally:
            attempt.kill()


class Batches(dict[str, Any]):
    """The results of all cases on one rank; a test that asks for a case first has the cases of its batch run, in one world."""

    def __init__(self, run: Callable[[str], None]) -> None:
        self._run = run

    def __missing__(self, name: str) -> Any:
        self._run(name)
        return self[name]


def in_batches(folders: pytest.TempPathFactory, size: int, function: Callable[..., Any], cases: Mapping[str, Any]) -> list[Batches]:
    """By rank, of two: the results of ``function(cases)``, called for ``size`` cases at a time, as one test would wait long for all."""
    names = iter(cases)
    batches = list(iter(lambda: list(islice(names, size)), []))

    def run(name: str) -> None:
        batch = next(batch for batch in batches if name in batch)
        with World(folders.mktemp("batch"), 2) as ranks:
            results = ranks.outcome(function, {name: cases[name] for name in batch})
        assert not any(isinstance(found, Exception) for found in results), results
        for found, new in zip(everything, results, strict=True):
            found.update(new)

    everything = [Batches(run), Batches(run)]
    return everything


def on_ranks(folder: Path, size: int, function: Callable[..., Any], *arguments: Any, **environ: Any) -> list[Any]:
    """What each rank returned; an exception of one is raised."""
    with World(folder, size, **environ) as world:
        results = world.outcome(function, *arguments)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
