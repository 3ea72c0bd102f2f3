"""Finding, starting and ending a host's agent. One agent per host and run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gemini_ft.errors import AgentError, AgentTimeoutError
from gemini_ft.messages import GetStatus, Leave, Message, Status, pack, unpack
from gemini_ft.transport.wire import frame_length

_START_TIMEOUT = 20.0  # seconds
_children: list[subprocess.Popen[bytes]] = []  # agents this process has started, to collect those that have ended


def host_id() -> str:
    """Name of this host: GEMINI_HOST_ID, or its hostname with the machine's boot id (two containers may share a name)."""
    return os.environ.get("GEMINI_HOST_ID") or f"{socket.gethostname()}-{machine_id()[:8]}"


def machine_id() -> str:
    """What two hosts have in common exactly when they are one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-machine"


def socket_name(run: str, host: str) -> bytes:
    """Abstract socket address of the agent of ``run`` on ``host``."""
    digest = hashlib.sha256(f"{run}\0{host}".encode()).hexdigest()[:24]
    return f"\0gemini-ft-{os.getuid()}-{digest}".encode()


def log_path(run: str, host: str) -> Path:
    """Where the agent writes: GEMINI_LOG_DIR, or a folder of this user's own under the temporary directory."""
    folder = Path(os.environ.get("GEMINI_LOG_DIR") or Path(tempfile.gettempdir()) / f"gemini-ft-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{run}-{host}")
    return folder / f"agent-{safe}.log"


def try_connect(run: str, host: str) -> socket.socket | None:
    """Connect to the agent, if there is one."""
    return _try_connect(socket_name(run, host))


def _try_connect(address: bytes) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(address)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        return None
    return sock


def connect(run: str, host: str) -> socket.socket:
    """Connect to the agent of ``run`` on this host; start it if there is none.

    Raises:
        AgentTimeoutError: it did not come up; the message names its log.
    """
    deadline = time.monotonic() + _START_TIMEOUT
    process: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline:
        if (sock := try_connect(run, host)) is not None:
            return sock
        if process is None or (process.poll() is not None and process.returncode != 0):
            process = spawn(run, host)
        time.sleep(0.01)
    raise AgentTimeoutError(
        f"the agent of run {run!r} on host {host!r} did not start within {_START_TIMEOUT:g} s; see {log_path(run, host)}"
    )


def spawn(run: str, host: str) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own: signals to the worker's group do not reach it."""
    _children[:] = [child for child in _children if child.poll() is None]
    with open(log_path(run, host), "ab") as log:
        command = [sys.executable, "-m", "gemini_ft.agent.main", "--run", run, "--host", host]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
            env=_agent_environment(),
        )
    _children.append(process)
    return process


def shares_fate(pid: int) -> bool:
    """Whether a process is in this one's cgroup, although that is one of its own (a job step, a container):
    whoever ends the cgroup ends both."""
    mine, theirs = Path("/proc/self/cgroup").read_text(), Path(f"/proc/{pid}/cgroup").read_text()
    return mine == theirs and any(word in mine for word in ("slurm", "step_", "kubepods", "docker", ".service"))


def set_oom_score(score: int) -> None:
    """When memory runs out, the kernel shall end a worker (500) and not the agent that keeps its state (0)."""
    with contextlib.suppress(OSError):  # lowering below what root has set is not allowed
        Path("/proc/self/oom_score_adj").write_text(str(score))


def yield_to_training() -> None:
    """This thread, and those it starts, shall not interrupt who computes when they wake up; their share of the processor stays."""
    with contextlib.suppress(AttributeError, OSError):  # a kernel, or a sandbox, without scheduling classes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _agent_environment() -> dict[str, str]:
    """The agent imports this very gemini_ft, wherever its working directory is."""
    import gemini_ft

    paths = [str(Path(entry).resolve().parent) for entry in gemini_ft.__path__[:1]]
    existing = [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *existing])}


def ask(run: str, host: str, message: Message, timeout: float = 5.0) -> Message | None:
    """Send one message to the agent and return its answer; None when there is no agent, or it just hung up."""
    try:
        return ask_at(socket_name(run, host), message, timeout)
    except TimeoutError:
        raise AgentTimeoutError(f"the agent of run {run!r} on host {host!r} did not answer within {timeout:g} s") from None


def ask_at(address: bytes, message: Message, timeout: float = 5.0) -> Message | None:
    """As `ask`, for the agent at ``address``. Raises TimeoutError."""
    if (sock := _try_connect(address)) is None:
        return None
    with sock:
        sock.settimeout(timeout)
        sock.sendall(pack(message))
        try:
            return unpack(_exactly(sock, frame_length(_exactly(sock, 4))))
        except EOFError:
            return None


def addresses() -> list[bytes]:
    """Where the agents of this user on this machine listen, whatever their runs."""
    mark = f"@gemini-ft-{os.getuid()}-"
    paths = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    return sorted({b"\0" + path[1:].encode() for path in paths if path.startswith(mark)})


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def status(run: str, host: str | None = None) -> str | None:
    """The agent's own account of itself, as JSON; None when there is none."""
    answer = ask(run, host or host_id(), GetStatus())
    if answer is not None and not isinstance(answer, Status):
        raise AgentError(f"the agent answered {answer.kind!r} to a question for its status")
    return answer.document if answer is not None else None


def leave(run: str, host: str | None = None) -> None:
    """Tell the agent of ``run`` on this host to go, if there is one. Uploads under way are finished first."""
    with contextlib.suppress(AgentError, ConnectionError):
        ask(run, host or host_id(), Leave(run=run))


def job_finished(run: str) -> None:
    """The launcher's word that the whole job has ended well."""
    leave(run)


def job_interrupted(run: str) -> None:
    """The launcher's word that the user stopped the job."""
    leave(run)
