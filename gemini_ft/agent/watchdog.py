"""A host's agent that hangs: noticed by its silence, killed, and started again with the memory it had.

Every process that waits for it notices: its workers, the launcher, a worker that wants to join. Its memory is not lost with
it: the kernel shows the descriptors of every process of the same user under /proc, so they are taken over first. Of all that
notice at the same time one acts, and none starts another agent until that one listens: an agent is never seen without its memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import psutil

from gemini_ft.agent import ahead, lifecycle
from gemini_ft.agent.memory import slot_files
from gemini_ft.errors import AgentTimeoutError, GeminiError
from gemini_ft.wire.frames import FrameBuffer
from gemini_ft.wire.messages import pack
from gemini_ft.wire.private import credentials
from gemini_ft.wire.worker_messages import Adopt, Ping, Pong, to_worker

_log = logging.getLogger("gemini_ft")
START_TIMEOUT = 20.0  # seconds
_LOOKS = 6  # an agent is asked at least so often within its timeout
_POLL = 0.01  # seconds
_BATCH = 100  # descriptors beside one message; the kernel takes 253
# The names of an agent's memory in /proc: without a file, and with one.
_SLOT, _IDENTITY = re.compile(f"/memfd:gemini:|{slot_files.SLOT}"), re.compile(f"/memfd:gemini-agent|{slot_files.IDENTITY}")


@dataclass(kw_only=True)
class LeftMemory:
    """The memory that an agent leaves behind: descriptors of this process, to be closed."""

    slots: list[int] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)  # of each slot: another process maps it, and may still write to it
    identity: int = -1  # the knowledge that only agents have: the secret, the newest incarnation

    @classmethod
    def of(cls, pid: int) -> LeftMemory:
        """Takes over the memory of a process of this user; logs memory that cannot be taken over."""
        estate, seen, failed = cls(), set[int](), 0
        mapped = mapped_by_others(pid)
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError as error:
            _log.warning("the memory of agent %d cannot be taken over (%s); what its workers hold will be", pid, error.strerror)
            return estate
        for entry in (f"/proc/{pid}/fd/{name}" for name in sorted(names, key=int)):
            try:
                target = os.readlink(entry)
                if not (_SLOT.search(target) or _IDENTITY.search(target)):
                    continue
                fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError:
                failed += 1
                continue
            inode = os.fstat(fd).st_ino
            if inode in seen:
                os.close(fd)
            elif _SLOT.search(target):
                estate.slots.append(fd)
                estate.shared.append(inode in mapped)
            else:
                estate.identity = fd
            seen.add(inode)
        if failed:
            _log.warning("%d slots of agent %d cannot be taken over: out of descriptors, or not allowed", failed, pid)
        return estate

    @property
    def fds(self) -> list[int]:
        return [*self.slots, *([self.identity] if self.identity >= 0 else [])]

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that tell an agent what it inherits."""
        slots = ",".join(f"{fd}{'!' * shared}" for fd, shared in zip(self.slots, self.shared, strict=True))
        return ["--inherit", slots, "--identity", str(self.identity)] if self.fds else []

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.slots, self.shared, self.identity = [], [], -1


def mapped_by_others(pid: int) -> set[int]:
    """Inodes of slots that any process but this agent maps."""
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == pid:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry.name}/maps", errors="replace") as maps:  # not one that has ended
            found.update(int(line.split(maxsplit=5)[4]) for line in maps if _SLOT.search(line))
    return found


# -- starting


@contextlib.contextmanager
def sole_starter(run: str, host: str) -> Iterator[bool]:
    """Whether this process may start the agent now; the kernel releases that right if this process dies."""
    name = lifecycle.socket_name(run, host).replace(b"gemini-ft-", b"gemini-start-", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as lock:
        try:
            lock.bind(name)
            lock.listen()
        except OSError:
            yield _is_foreign(name)
            return
        yield True


def _is_foreign(name: bytes) -> bool:
    """Whether another user's process has taken the address; that stops nothing."""
    kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as holder, contextlib.suppress(OSError):  # let go of just now, or many ask
        holder.connect(name)
        return credentials(holder)[1] != os.getuid()
    return False


def connect(run: str, host: str, patience: float = 0.0) -> socket.socket:
    """Connects to the agent of ``run`` on this host; starts it if there is none, and anew if it hangs.

    ``patience``: seconds without an answer after which an agent hangs; 0: it is not asked.

    Raises AgentTimeoutError: it did not come up; the message names its log.
    """
    deadline = time.monotonic() + START_TIMEOUT + patience
    while time.monotonic() < deadline:
        if (sock := lifecycle.try_connect(run, host)) is not None:
            answer = _asked(sock, Pulse(timeout=patience)) if patience else True
            if answer:
                return sock
            if answer is None:
                with contextlib.closing(lifecycle.AgentProcess.of(sock)) as listener:
                    replace(run, host, listener, f"it did not answer for {patience:g} s")
            sock.close()
            patience = 0.0 if answer is False else patience
            continue
        with sole_starter(run, host) as mine:
            if mine and not lifecycle.is_listening(run, host):
                start(run, host, LeftMemory(), deadline)
        time.sleep(_POLL)
    raise AgentTimeoutError(
        f"the agent of run {run!r} on host {host!r} did not start within {START_TIMEOUT:g} s; see {lifecycle.log_path(run, host)}"
    )


def _asked(sock: socket.socket, pulse: Pulse) -> bool | None:
    """Whether the agent answers on this connection; False: it hung up, as one of another version does; None: it is silent."""
    sock.settimeout(pulse.tick)
    frames = FrameBuffer()
    try:
        sock.sendall(pack(Ping()))
        while not pulse.over:
            try:
                data = sock.recv(4096)
            except TimeoutError:
                pulse.nothing()
                continue
            if not data or any(frames.bodies(data)):
                sock.settimeout(None)
                return bool(data)
    except OSError:
        return False
    return None


def start(run: str, host: str, estate: LeftMemory, deadline: float) -> None:
    """Starts an agent with a former one's estate, and returns when it listens, or when it has left its place to another's agent.

    Not when any agent listens: one that was started elsewhere (as a service, for example) would be without the estate, and ours, which
    finds the address taken and ends, would take it along.
    """
    if not estate.fds and ahead.use(run, host, deadline):
        return
    process = lifecycle.spawn(run, host, estate.fds, estate.arguments)
    while time.monotonic() < deadline:
        if process.poll() is None:
            if process.pid in _listening_pids(run, host):
                return
        elif process.returncode == 0 and (sock := lifecycle.try_connect(run, host)) is not None:
            with sock:
                _hand_over(sock, estate)
            return
        else:  # it has failed, or it has left its place to one that has gone since
            process = lifecycle.spawn(run, host, estate.fds, estate.arguments)
        time.sleep(_POLL)


def _listening_pids(run: str, host: str) -> Collection[int]:
    """The agent that listens, and its parent; none if none does."""
    if (sock := lifecycle.try_connect(run, host)) is None:
        return ()
    with sock, contextlib.suppress(psutil.Error):
        pid = credentials(sock)[0]
        return (pid, psutil.Process(pid).ppid())
    return ()


def _hand_over(sock: socket.socket, estate: LeftMemory) -> None:
    """Gives slots to an agent that runs already; returns when it has them."""
    for at in range(0, len(estate.slots), _BATCH):
        fds, shared = estate.slots[at : at + _BATCH], estate.shared[at : at + _BATCH]
        socket.send_fds(sock, [pack(Adopt(count=len(fds), shared=shared))], fds)
    if estate.slots:
        _asked(sock, Pulse(timeout=START_TIMEOUT))


def replace(run: str, host: str, listener: lifecycle.AgentProcess, why: str) -> bool:
    """Kills an agent that hangs and starts another with its memory, or lets another process do so; returns whether the old one is dead.

    Returns when an agent listens again, or when it is clear that none will.
    """
    if listener.pid == 0:
        _log.error("the agent of host %s hangs: %s; its process is out of reach (another pid namespace), so kill it by hand", host, why)
        return False
    deadline = time.monotonic() + START_TIMEOUT
    while not listener.ended() and time.monotonic() < deadline:
        with sole_starter(run, host) as mine:
            if mine and not listener.ended():
                _log.warning("the agent of host %s (pid %d) hangs: %s; starting another with its memory", host, listener.pid, why)
                with contextlib.closing(LeftMemory.of(listener.pid)) as estate:
                    if not listener.kill():
                        _log.error("the agent of host %s (pid %d) cannot be killed", host, listener.pid)
                        return False
                    start(run, host, estate, deadline)
        time.sleep(_POLL)
    return listener.ended()


# -- noticing


@dataclass(kw_only=True)
class Pulse:
    """Counts looks without a sign of life from an agent, rather than time: the process that looks may have been stopped itself."""

    timeout: float  # seconds of silence after which the agent hangs; 0: never
    silent: int = 0

    @property
    def tick(self) -> float | None:
        """Seconds between looks; None: hangs are not looked for."""
        return min(1.0, self.timeout / _LOOKS) if self.timeout else None

    @property
    def over(self) -> bool:
        return self.tick is not None and self.silent * self.tick >= self.timeout

    def nothing(self) -> None:
        self.silent += 1

    def heard(self) -> None:
        self.silent = 0


class AgentWatch(threading.Thread):
    """The launcher's look at its host's agent: the workers, which look too, may all be dead or hang themselves.

    ``timeout``: seconds of silence after which the agent hangs, as far as is known; it says itself what the job has configured.
    """

    def __init__(self, run: str, host: str, timeout: float) -> None:
        super().__init__(name="gemini-agent-watch", daemon=True)
        self._run_id, self._host, self.pulse = run, host, Pulse(timeout=timeout)
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()
        self.join(timeout=5)

    def run(self) -> None:
        said = ""
        while not self._over.wait(self.pulse.tick or 1.0):
            try:
                if (sock := lifecycle.try_connect(self._run_id, self._host)) is not None:
                    with sock, contextlib.closing(lifecycle.AgentProcess.of(sock)) as listener:
                        self._look(sock, listener)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it has left in this moment
            except (OSError, GeminiError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("the agent of host %s could not be watched: %s", self._host, said)

    def _look(self, sock: socket.socket, listener: lifecycle.AgentProcess) -> None:
        """Watches until the agent ends, is replaced, or the watch is over."""
        self.pulse.heard()
        frames = FrameBuffer()
        while not self._over.wait(self.pulse.tick or 1.0):
            if self.pulse.over:
                replace(self._run_id, self._host, listener, f"it did not answer for {self.pulse.timeout:g} s")
                return
            try:
                data = sock.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self.pulse.nothing()
            else:
                if not data:
                    return
                self._take(frames.bodies(data))
            with contextlib.suppress(BlockingIOError):
                sock.send(pack(Ping()), socket.MSG_DONTWAIT)

    def _take(self, bodies: Iterator[bytes]) -> None:
        self.pulse.heard()
        for body in bodies:
            answer = to_worker.unpack(body)
            if isinstance(answer, Pong):
                self.pulse.timeout = answer.agent_timeout
