"""The autopsy of a job that hangs: each host looks at its own workers, the leader gathers what they find, and a report says why.

The first host on which a worker hangs reports its findings; the leader then asks all hosts for theirs, judges them
(`gemini_ft.core.autopsy`), and tells every host the verdict, before any worker is killed. A host that does not answer in time is named; if
no word comes from the leader, each host judges by what it knows itself. No step waits for another process for longer than stated here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gemini_ft.agent import lifecycle
from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.autopsy import REPORT, STACK, Doing, RankFound, judge, printable_line, report
from gemini_ft.errors import GeminiError
from gemini_ft.hosts import is_readable
from gemini_ft.ordered import on_thread
from gemini_ft.wire.peer_messages import Autopsied, Examine, Examined
from gemini_ft.wire.private import open_log
from gemini_ft.wire.worker_messages import SessionSpec, WriteRecord

if TYPE_CHECKING:
    from gemini_ft.agent.commit.leader import Leader
    from gemini_ft.agent.replication.gate import Gate

STACKS_SECONDS = 1.0  # for workers to write down where their threads are
_STOPPED_SECONDS = 0.3  # a stopped worker stays stopped for this time, in which the other hosts look at theirs
_SAMPLED_SECONDS = 1.0  # for py-spy, after that
HOSTS_SECONDS = STACKS_SECONDS + _SAMPLED_SECONDS + 2.0  # for all hosts to answer the leader
WORD_SECONDS = STACKS_SECONDS + _SAMPLED_SECONDS + HOSTS_SECONDS + 2.0  # for the leader's verdict
_SAMPLED_BYTES = 2**20  # what says more than that is no py-spy
_LOOK_SECONDS = 0.02  # between two looks whether it has ended
_THREAD = re.compile(rb"^Thread \w+ \(", re.MULTILINE)  # where the stacks begin; before that py-spy says the command, with its arguments
_RAS = "localhost:28028"  # where NCCL answers questions, unless NCCL_RAS_ADDR names another place
_RAS_BYTES = 8192
_LISTENS = "0A"  # the state of a socket, in /proc/net/tcp
_SAY_SECONDS = 0.5  # for workers to say it, and to write torch's record
_STATES = {"R": Doing.AT_WORK, "D": Doing.KERNEL, "T": Doing.STOPPED, "t": Doing.STOPPED, "Z": Doing.ENDED, "X": Doing.ENDED}


def doing_of(pid: int) -> Doing:
    """The state of a process's main thread."""
    try:
        return _STATES.get((lifecycle.PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0], Doing.ASLEEP)
    except OSError:
        return Doing.ENDED


async def stacks(workers: Mapping[WorkerConnection, Doing]) -> dict[WorkerConnection, str]:
    """The stacks of all threads, of those workers that can write them in time, or that py-spy can read; afterwards none is stopped."""
    files = {worker: file for worker in workers if (file := stacks_file(worker.pid)) is not None}
    begins = {file: os.fstat(file).st_size for file in files.values()}
    for is_stopped, seconds in ((False, _STOPPED_SECONDS), (True, STACKS_SECONDS - _STOPPED_SECONDS)):
        for worker, doing in workers.items():
            if (doing is Doing.STOPPED) == is_stopped:
                worker.go_on(writes_stacks=worker in files)
        await asyncio.sleep(seconds)
    texts = {worker: _stacks_in(file, begins[file]) for worker, file in files.items()}
    silent = [worker for worker in workers if not texts.get(worker)]
    sampled = await asyncio.gather(*(_sampled(worker.pid) for worker in silent))
    return texts | dict(zip(silent, sampled, strict=True))


async def _sampled(pid: int) -> str:
    """The stacks of a process as py-spy reads them from its memory; empty: it is not installed, may not, or does not in time.

    The thread is given up after that: to search PATH, or to begin py-spy, may take for ever where a file system is away.
    """
    with contextlib.suppress(TimeoutError, RuntimeError):  # no thread may be left
        async with asyncio.timeout(_SAMPLED_SECONDS):
            found = on_thread(partial(_read_by_pyspy, pid, time.monotonic() + _SAMPLED_SECONDS), "gemini-pyspy")
            while not found.done():
                await asyncio.sleep(_LOOK_SECONDS)
            return found.result()
    return ""


def _read_by_pyspy(pid: int, until: float) -> str:
    """Has py-spy say where a process's threads are; kills it at a time of `time.monotonic`, and if it says too much."""
    program = shutil.which(os.path.join(os.path.dirname(sys.executable), "py-spy")) or shutil.which("py-spy")
    if program is None:
        return ""
    command, said = [program, "dump", "--nonblocking", "--pid", str(pid)], b""
    nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        subprocess.Popen(command, stdin=nowhere, stdout=pipe, stderr=nowhere) as process,
    ):
        try:
            assert process.stdout is not None
            output = process.stdout.fileno()
            while len(said) < _SAMPLED_BYTES and is_readable(output, max(0.0, until - time.monotonic())):
                if not (more := os.read(output, 2**16)):
                    break
                said += more
            if process.wait(max(0.0, until - time.monotonic())) == 0 and (threads := _THREAD.search(said)) is not None:
                return said[threads.start() :][:STACK].decode(errors="replace").strip()
        finally:
            process.kill()
    return ""


async def said_by_nccl(pids: Collection[int]) -> str:
    """The account that NCCL's RAS in one of these processes gives of the job, as far as it comes in time; empty: there is none."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _RAS).rpartition(":")
    found = b""
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        if not _listen_at(int(port), pids):
            return ""  # of another job, perhaps: the first process of a host has the port
        async with asyncio.timeout(STACKS_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with contextlib.closing(writer):
                writer.write(b"timeout 1\nverbose status\n")
                while len(found) < _RAS_BYTES and (more := await reader.read(_RAS_BYTES - len(found))):
                    found += more
    return found.decode(errors="replace").strip()


def _listen_at(port: int, pids: Collection[int]) -> bool:
    """Whether these processes, and no others on this host, listen at a port."""
    sockets = set[str]()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(lifecycle.PROC / "net" / name) as lines:
            next(lines, "")
            for _, local, _, state, *rest in map(str.split, lines):
                if state != _LISTENS:  # those that listen come first
                    break
                if int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{rest[5]}]")
    is_used = bool(sockets)
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in (lifecycle.PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):  # it has been closed meanwhile
                    sockets.discard(os.readlink(entry))
    return is_used and not sockets


def stacks_file(pid: int) -> int | None:
    """The file of a process that is prepared to write stacks (`lifecycle.write_stacks_on_request`); None: the signal might end it."""
    folder = lifecycle.PROC / str(pid)
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", (folder / "status").read_text(), re.MULTILINE)
        if caught is not None and int(caught[1], 16) >> (lifecycle.STACKS_SIGNAL - 1) & 1:
            for entry in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):  # it has been closed meanwhile
                    if os.readlink(entry).startswith(f"/memfd:{lifecycle.STACKS_FILE}"):
                        return os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _stacks_in(file: int, begin: int) -> str:
    """Reads what was written from ``begin`` on, first the thread that was interrupted, mostly the one that trains; closes the file."""
    threads = map(str.strip, os.pread(file, 8 * STACK, begin).decode(errors="replace").split("\n\n"))
    os.close(file)
    return "\n\n".join(sorted(threads, key=lambda each: not each.startswith("Current thread")))[:STACK]


async def log_stacks(worker: WorkerConnection, context: StreamContext) -> None:
    for text in (await stacks({worker: doing_of(worker.pid)})).values():
        lines = "\n".join(map(printable_line, text.split("\n")))  # names of threads and files may be anything
        context.log(f"rank {worker.rank} (pid {worker.pid}):\n{lines}")


class Autopsy:
    """This host's part in the autopsies of one session's job; another one begins ``WORD_SECONDS`` after a verdict at the earliest."""

    def __init__(self, context: StreamContext, spec: SessionSpec, gate: Gate) -> None:
        self._context, self._spec, self._gate = context, spec, gate
        self._found: list[RankFound] = []
        self._has_begun = False
        self._is_over = asyncio.Event()
        self._quiet_until = math.inf  # a hang that is seen until then is the one of the last verdict; inf: there is no verdict yet
        self._tasks = Tasks()

    def close(self) -> None:
        self._is_over.set()
        self._tasks.cancel()

    async def hold(self) -> None:
        """Looks at the workers, and waits for the leader's verdict; judges without the other hosts if it does not come in time."""
        self.begin()
        try:
            async with asyncio.timeout(WORD_SECONDS):
                await self._is_over.wait()
        except TimeoutError:
            self.conclude(verdict_of(self._spec, self._context.run.run_id, self._found))
        await asyncio.sleep(_SAY_SECONDS)

    def begin(self) -> None:
        """Looks at the workers of this host, and reports what is found; once in each autopsy."""
        if time.monotonic() > self._quiet_until:
            self._has_begun, self._found, self._is_over, self._quiet_until = False, [], asyncio.Event(), math.inf
        if not self._has_begun:
            self._has_begun = True
            self._tasks.spawn(self._examine())

    async def _examine(self) -> None:
        context = self._context
        present = {worker.rank: worker for worker in context.workers.values() if context.is_present(worker)}
        alive: dict[WorkerConnection, Doing] = {}
        for rank in [rank for rank, host in enumerate(self._spec.hosts) if host == context.host.name]:
            worker, pid, doing = present.get(rank), 0, Doing.ENDED
            if worker is not None:
                pid, doing = worker.pid, Doing.LEFT if worker.parting == "goodbye" else doing_of(worker.pid)
                if worker.alive:
                    alive[worker] = doing
            self._found.append(RankFound(rank=rank, host=context.host.name, pid=pid, doing=doing, trails=self._gate.trails(rank)))
        is_asked = self._spec.hosts[:1] == [context.host.name]  # NCCL's account is about all ranks
        found, nccl = await asyncio.gather(
            stacks(alive), said_by_nccl([worker.pid for worker in alive]) if is_asked else asyncio.sleep(0, "")
        )
        texts = {worker.rank: text for worker, text in found.items()}
        if nccl:
            texts[0] = f"{texts.get(0, '')[: STACK - len(nccl) - 64]}\n\nWhat NCCL says of the job (RAS):\n{nccl}".lstrip()
        for at, each in enumerate(self._found):
            is_passing = each.doing is Doing.KERNEL and doing_of(each.pid) is not Doing.KERNEL  # it was at a disk just then
            doing = Doing.ASLEEP if is_passing else each.doing
            self._found[at] = replace(each, doing=doing, stack=texts.get(each.rank, ""))
        self._context.report(Examined(host=context.host.name, ranks=self._found))

    def conclude(self, told: Autopsied) -> None:
        """Takes the first verdict: into a report beside the agent's log, the log, the events, the status, and to the workers."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._quiet_until = time.monotonic() + WORD_SECONDS
        context, log = self._context, lifecycle.log_path(self._context.run.run_id, self._context.host.name)
        path = log.with_name(f"{lifecycle.as_file_name(f'hang-{log.stem[6:]}-{context.name}-{self._spec.incarnation.number}')}.txt")
        try:
            with open(open_log(path), "w") as file:
                file.writelines(f"{printable_line(line)}\n" for line in told.report[:REPORT].split("\n"))
        except (OSError, GeminiError) as error:
            context.log(f"the report of a hang could not be written: {error}\n{told.report[:REPORT]}")
        context.tell_workers(WriteRecord(path=str(path.with_suffix(""))))
        context.note_hang(cause=told.cause, ranks=sorted(told.ranks), text=told.text, report=str(path))


class Inquest:
    """The leader's part: it gathers what all hosts have found, and tells them the verdict; once in each autopsy."""

    def __init__(self, spec: SessionSpec, run: str) -> None:
        self._spec, self._run = spec, run
        self._found: dict[str, list[RankFound]] = {}  # by host
        self._all = asyncio.Event()
        self._quiet_until = math.inf  # as in `Autopsy`
        self._tasks = Tasks()

    def hear(self, found: Examined, leader: Leader) -> None:
        """Takes the findings of a host, about its own ranks, and has the leader tell all hosts."""
        if time.monotonic() > self._quiet_until:
            self._found, self._all, self._quiet_until = {}, asyncio.Event(), math.inf
        hosts, has_begun = self._spec.hosts, bool(self._found)
        own = {each.rank: each.cut() for each in found.ranks if hosts[each.rank : each.rank + 1] == [found.host] == [each.host]}
        self._found.setdefault(found.host, list(own.values()))
        if not has_begun:
            leader.tell(Examine())
            self._tasks.spawn(self._conclude(leader))
        if self._found.keys() >= {*hosts}:
            self._all.set()

    async def _conclude(self, leader: Leader) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOSTS_SECONDS):
                await self._all.wait()
        self._quiet_until = time.monotonic() + WORD_SECONDS
        leader.tell(verdict_of(self._spec, self._run, [each for found in self._found.values() for each in found]))

    def close(self) -> None:
        self._tasks.cancel()


def verdict_of(spec: SessionSpec, run: str, found: Sequence[RankFound]) -> Autopsied:
    """The verdict on what was found; ranks of which nothing was are on hosts that did not answer."""
    by_rank = {each.rank: each for each in found}
    ranks = [by_rank.get(rank, RankFound(rank=rank, host=host)) for rank, host in enumerate(spec.hosts)]
    verdict = judge(ranks)
    head = f"hang of run {run}, stream {spec.stream}, incarnation {spec.incarnation.number}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    return Autopsied(cause=verdict.cause, ranks=list(verdict.ranks), text=verdict.text, report=report(head, ranks, verdict))
