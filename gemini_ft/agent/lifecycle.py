"""Finding, starting and ending a host's agent. One agent per host and run."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import hashlib
import logging
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gemini_ft.errors import AgentError, AgentTimeoutError, ConfigError, GeminiError
from gemini_ft.hosts import host_id, is_readable
from gemini_ft.wire.frames import frame_length
from gemini_ft.wire.messages import kind_of, pack
from gemini_ft.wire.private import check_listener, credentials, newest_first, open_log, runtime_folder
from gemini_ft.wire.worker_messages import GetStatus, Leave, Left, Status, ToAgent, ToWorker, to_worker

_log = logging.getLogger("gemini_ft")
_LOGS, _LOG_SECONDS = 100, 86400.0  # logs that are kept, and how long any of them is
_DEATH_SECONDS = 5.0  # for the kernel to end a process that is killed
_FAULT_SECONDS = 0.01  # that a page takes to come back from a disk or from swap, at least where one waits for it
PROC = Path("/proc")
_PATIENCE = 30.0  # seconds that a finished launcher waits for one answer of an agent that is storing
ANSWER_SECONDS = 5.0  # seconds that an agent may take for any other answer
QUEUE_SECONDS = 2.0  # that a connection waits in the agent's queue of new ones
STACKS_SIGNAL = signal.SIGRTMIN + 11
LEAVING = "leaving"  # the last line of an agent's log
_END_BYTES = 4096  # of a log
STACKS_FILE = "gemini-stacks"
_stacks: list[int] = []  # the file of `write_stacks_on_request`, which must stay open
started: list[subprocess.Popen[bytes]] = []  # agents this process has started, to collect those that have ended


def socket_name(run: str, host: str) -> bytes:
    """Abstract socket address of the agent of ``run`` on ``host``."""
    digest = hashlib.sha256(f"{run}\0{host}".encode()).hexdigest()[:24]
    return f"\0gemini-ft-{os.getuid()}-{digest}".encode()


def log_path(run: str, host: str) -> Path:
    """Path of the agent's log: in GEMINI_LOG_DIR, or in this user's own folder (`gemini_ft.wire.private.runtime_folder`)."""
    if chosen := os.environ.get("GEMINI_LOG_DIR"):
        folder = Path(chosen)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"GEMINI_LOG_DIR={chosen}: {error.strerror}; name a folder, or one that can be made") from None
    else:
        folder = runtime_folder()
    return folder / as_file_name(f"agent-{run}-{host}.log")


def has_left(run: str, host: str) -> bool:
    """Whether the last agent of ``run`` on ``host`` has said in its log that it leaves; one that was killed has not.

    Raises OSError: there is no log, or it cannot be read.
    """
    with log_path(run, host).open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _END_BYTES))
        return any(line.endswith(f" {LEAVING}".encode()) for line in log.read().splitlines()[-2:])


def as_file_name(text: str) -> str:
    """The text with all letters replaced that a file's name had better not have."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def _remove_old_logs(folder: Path) -> None:
    """Keeps the newest, and those that have been written to in the last day; reports of hangs as well."""
    for written, path in newest_first([*folder.glob("agent-*.log"), *folder.glob("hang-*")])[_LOGS:]:
        if written < time.time() - _LOG_SECONDS:
            path.unlink(missing_ok=True)


def try_connect(run: str, host: str) -> socket.socket | None:
    """Connects to the agent, if there is one.

    Raises AgentTimeoutError: it takes in no connections. AgentError: another user's process has taken its address.
    """
    return _try_connect(socket_name(run, host), f"the agent of run {run!r} on host {host!r}")


def _try_connect(address: bytes, what: str = "an agent") -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(QUEUE_SECONDS))
        sock.connect(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(0.0))
        check_listener(sock, what)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        return None
    except BlockingIOError:  # the listener cannot be known before
        sock.close()
        why = "it hangs, or another user's process has the address; end that one, or give the run another id (GEMINI_RUN_ID)"
        raise AgentTimeoutError(f"{what} has taken in no connection for {QUEUE_SECONDS:g} s; {why}") from None
    except AgentError:
        sock.close()
        raise
    return sock


def timeval(seconds: float) -> bytes:
    """A time in seconds as socket options take it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


@dataclass(kw_only=True)
class AgentProcess:
    """The process at the other end of a connection to the agent's socket."""

    pid: int  # 0: of another pid namespace, out of reach
    pidfd: int = -1
    _waited: dict[str, float] = field(default_factory=dict)  # seconds that threads have waited for a processor, also those that have ended

    @classmethod
    def of(cls, sock: socket.socket) -> AgentProcess:
        pid, _ = credentials(sock)
        with contextlib.suppress(OSError):  # it has just died, or its namespace hides it
            return cls(pid=pid, pidfd=os.pidfd_open(pid))
        return cls(pid=pid)

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the process is dead, or dies within that time."""
        return self.pidfd < 0 or is_readable(self.pidfd, seconds)

    def kill(self) -> bool:
        """Sends SIGKILL; returns whether the process is dead then."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return self.ended(_DEATH_SECONDS)

    def work(self) -> float | None:
        """Seconds in which it has run, or waited for a processor or for memory; never less than before; None: unknown."""
        folder, runs = PROC / str(self.pid), 0
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from the third field on
            threads = [path.name for path in (folder / "task").iterdir()]
        except OSError:  # it has ended, or is out of reach
            return None
        for thread in threads:
            with contextlib.suppress(OSError, ValueError):  # this thread has ended, or the kernel does not say
                _, waited, turns = map(int, (folder / "task" / thread / "schedstat").read_text().split())
                self._waited[thread] = max(waited / 1e9, self._waited.get(thread, 0.0))
                runs += turns
        if not runs:  # without the time in queues, an agent whose host is busy looks like an idle one
            return None
        ran = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")  # threads that have ended included
        return ran + sum(list(self._waited.values())) + _waited_for_memory(faults=int(stat[9]))

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _waited_for_memory(*, faults: int) -> float:
    """Seconds in which some process of this machine has waited for memory; where the kernel does not say, by the faults of one process."""
    try:
        return int((PROC / "pressure/memory").read_text().split()[4].removeprefix("total=")) / 1e6
    except (OSError, ValueError, IndexError):
        return faults * _FAULT_SECONDS


def is_listening(run: str, host: str) -> bool:
    """Whether there is an agent, even one that hangs."""
    if (sock := try_connect(run, host)) is not None:
        sock.close()
    return sock is not None


def spawn(run: str, host: str, fds: Sequence[int] = (), arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Starts an agent, whose output goes to its log. It inherits only ``fds``.

    A worker of Ray kills its children when it ends, so there the agent is a child of the process that is returned.
    """
    apart = ["--apart"] if "RAY_RAYLET_PID" in os.environ else []
    for child in list(started):  # the listening threads of several clients may do this at once
        if child.poll() is not None:
            with contextlib.suppress(ValueError):
                started.remove(child)
    with agent_log(run, host) as log:
        return start_process(run, host, [*apart, *arguments], log, fds=fds)


def start_process(
    run: str, host: str, arguments: Sequence[str], output: int | IO[bytes], stdin: int = subprocess.DEVNULL, fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts an agent's process in its own session: signals to the worker's group do not reach it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gemini_ft.agent.main", "--run", run, "--host", host, *arguments],
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        close_fds=True,
        pass_fds=fds,
        cwd="/",
        env=agent_environment(),
    )
    started.append(process)
    return process


def agent_log(run: str, host: str) -> IO[bytes]:
    """The open log of an agent; a null file if the disk is full, as without an agent there would be no snapshots either."""
    try:
        path = log_path(run, host)
        # A folder that the user has chosen is the user's to clear. Where the log is there already, a worker joins and must not wait.
        if not (os.environ.get("GEMINI_LOG_DIR") or path.exists()):
            _remove_old_logs(path.parent)
        return open(open_log(path), "ab")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _log.warning("the agent of host %s has no log: %s", host, error)
        return open(os.devnull, "ab")


def shares_fate(pid: int) -> bool:
    """Whether ending this process's cgroup (a job step, a container) would end the other process, too."""
    mine, theirs = Path("/proc/self/cgroup").read_text(), Path(f"/proc/{pid}/cgroup").read_text()
    return mine == theirs and any(word in mine for word in ("slurm", "step_", "kubepods", "docker", ".service"))


def write_stacks_on_request() -> None:
    """Lets this process write its threads' stacks to a file in memory, for the agent to read before it kills a worker that hangs."""
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL and not _stacks:  # else it is the script's own
        with contextlib.suppress(OSError):
            _stacks.append(os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC))
            faulthandler.register(STACKS_SIGNAL, _stacks[0])


def set_oom_score(score: int) -> None:
    """Makes the kernel, when memory runs out, end a worker (500) and not the agent that keeps its state (0)."""
    with contextlib.suppress(OSError):  # lowering below what root has set is not allowed
        Path("/proc/self/oom_score_adj").write_text(str(score))


def raise_descriptor_limit() -> None:
    """Raises the limit of open descriptors as far as allowed: every slot, worker and peer takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # infinity, where the kernel has a lower bound of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave_no_core() -> None:
    """Keeps the secret and the slots of this process out of core files.

    A limit of 1 byte lets no file be written, and alone keeps the kernel from piping a core to a program, which it does at 0 (core(5)).
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (min(1, most) if most >= 0 else 1, most))


def yield_to_training() -> None:
    """Keeps this thread, and those it starts, from interrupting computation when they wake up; their share of the CPU stays."""
    with contextlib.suppress(AttributeError, OSError):  # a kernel, or a sandbox, without scheduling classes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_to(processors: Sequence[int]) -> None:
    """Keeps this thread, and those it starts, to some processors. Raises ConfigError: this process may not use all of them."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # none of them: what follows says so
        os.sched_setaffinity(0, processors)
    if (found := os.sched_getaffinity(0)) != set(processors):
        most = sorted(before | found)
        os.sched_setaffinity(0, before)
        raise ConfigError(
            f"agent_cpus={','.join(map(str, processors))}: this host, or this process's control group, lacks some of these processors; "
            f"those in use are {','.join(map(str, most))}"
        )


def agent_environment() -> dict[str, str]:
    """The environment in which the agent imports this very gemini_ft and finds the same options, wherever its working directory is."""
    import gemini_ft

    paths = [str(Path(entry).resolve().parent) for entry in gemini_ft.__path__[:1]]
    existing = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    options = {name: os.path.abspath(path) for name in ("GEMINI_CONFIG", "GEMINI_EVENTS") if (path := os.environ.get(name))}
    return {**os.environ, **options, "PYTHONPATH": os.pathsep.join([*paths, *existing])}


def ask(run: str, host: str, message: ToAgent, timeout: float = ANSWER_SECONDS) -> ToWorker | None:
    """Sends one message to the agent and returns its answer; None when there is no agent, or it just hung up.

    Raises AgentTimeoutError: it does not answer. AgentError: another user's process has taken its address.
    """
    return _ask_at(socket_name(run, host), message, timeout, f"the agent of run {run!r} on host {host!r}")


def _ask_at(address: bytes, message: ToAgent, timeout: float, what: str) -> ToWorker | None:
    if (sock := _try_connect(address, what)) is None:
        return None
    with sock:
        sock.settimeout(timeout)
        try:
            sock.sendall(pack(message))
            with sock.makefile("rb") as answer:
                head = answer.read(4)
                body = answer.read(frame_length(head)) if len(head) == 4 else b""
            return to_worker.unpack(body) if body and len(body) == frame_length(head) else None
        except TimeoutError:
            raise AgentTimeoutError(f"{what} (pid {credentials(sock)[0]}) did not answer within {timeout:g} s") from None
        except ConnectionError:
            return None


def addresses() -> list[bytes]:
    """The addresses at which agents of this user listen on this machine, whatever their runs."""
    mark = rb" @(gemini-ft-%d-[0-9a-f]{24})$" % os.getuid()  # other users choose other names, of any bytes
    return sorted({b"\0" + name for name in re.findall(mark, Path("/proc/net/unix").read_bytes(), re.MULTILINE)})


def ask_all(message: ToAgent) -> list[ToWorker]:
    """Asks every agent of this user on this machine; those that do not answer are left out, with a warning."""
    answers = []
    for address in addresses():
        try:
            if (answer := _ask_at(address, message, ANSWER_SECONDS, f"the agent of this machine at @{address[1:].decode()}")) is not None:
                answers.append(answer)
        except (GeminiError, OSError) as error:
            _log.warning("%s; what it holds is left out", error)
    return answers


def status(run: str, host: str | None = None) -> str | None:
    """The agent's own account of itself, as JSON; None when there is none."""
    answer = ask(run, host or host_id(), GetStatus())
    if answer is not None and not isinstance(answer, Status):
        raise AgentError(f"the agent answered {kind_of(answer)!r} to a question for its status")
    return answer.document if answer is not None else None


def leave(run: str, host: str | None = None) -> bool:
    """Tells the agent of ``run`` on this host to go; uploads under way are finished first. Returns whether there is none any more."""
    try:
        return ask(run, host or host_id(), Leave(run=run)) is None
    except AgentError:
        return False


def job_finished(run: str, *, stores: bool) -> str:
    """Tells the agent, for the launcher, that the job has ended well; waits for the last upload, as long as the agent answers.

    ``stores``: whether the job has a storage. Its agent stays until it was asked, so its absence means that the last step may be lost.

    Returns the reason why storage lacks the last step, or may lack it; empty if it does not.
    """
    host, patience = host_id(), ANSWER_SECONDS
    why = f"the agent of host {host!r} has ended, or hangs"
    try:
        while True:
            try:
                answer = ask(run, host, Leave(run=run, finished=True), patience)
                if isinstance(answer, Left):
                    return answer.unstored
                break
            except AgentTimeoutError:
                if patience < _PATIENCE:
                    _log.warning("the job has finished; waiting for its last upload (storage.patience)")
                patience = _PATIENCE  # for one answer: an agent that ends well gives it to who is connected then
                if ask(run, host, GetStatus(), _PATIENCE) is None:
                    break
    except AgentError as error:
        why = str(error)
    return f"{why}; whether the last step has been stored is not known" if stores else ""
