"""An agent that is imported ahead: a launcher starts its process with the job, and the first worker that needs an agent makes it one.

Half of what an agent takes to start is Python importing it, and the workers of a host that takes a lost one's place wait for that. Until
it is asked, the process holds no memory of the run, listens at no agent's address and knows no options: it is told those of the worker,
as an agent is that the worker itself starts. It ends with its launcher if no worker has asked for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemini_ft.agent import lifecycle
from gemini_ft.errors import AgentError
from gemini_ft.hosts import is_readable, own_status
from gemini_ft.wire import channel as messages
from gemini_ft.wire.private import credentials

_log = logging.getLogger("gemini_ft")
ANSWER_SECONDS = 2.0  # for a process that has nothing else to do
_QUESTION_SECONDS = 0.2  # for a worker that has called
_POLL = 0.01  # seconds
_KIND = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


def address(run: str, host: str) -> bytes:
    """Abstract socket address at which the process waits."""
    return lifecycle.socket_name(run, host).replace(b"gemini-ft-", b"gemini-ahead-", 1)


# -- the launcher's side


@contextmanager
def started_ahead(run: str, host: str) -> Iterator[None]:
    """Inside, a process waits to become this host's agent, if there is none yet; where it cannot be started, agents start as ever."""
    with contextlib.ExitStack() as stack:
        try:
            if not lifecycle.is_listening(run, host):
                stack.enter_context(_waiting_process(run, host))
        except (AgentError, OSError) as error:
            _log.debug("no agent is imported ahead: %s", error)
        yield


@contextmanager
def _waiting_process(run: str, host: str) -> Iterator[None]:
    lifeline, theirs = socket.socketpair()  # the process ends when the launcher's end is closed, and closes its own when it is an agent
    with lifeline:
        with theirs:
            process = lifecycle.start_process(run, host, ["--ahead"], subprocess.DEVNULL, stdin=theirs.fileno())
        try:
            yield
        finally:
            if not is_readable(lifeline.fileno(), 0.0):
                process.kill()
                process.wait()


# -- a worker's side


def use(run: str, host: str, deadline: float) -> bool:
    """Makes the process that waits this host's agent, with this process's environment.

    ``deadline``: time of the monotonic clock until which it is waited for.

    Returns whether an agent listens now. False: no process waits, it is of no use, or has failed.
    """
    with contextlib.suppress(OSError), lifecycle.agent_log(run, host) as log, socket.socket(socket.AF_UNIX, _KIND) as sock:
        sock.settimeout(ANSWER_SECONDS)
        sock.connect(address(run, host))
        pid, uid = credentials(sock)
        if uid != os.getuid() or surroundings(pid) != surroundings():
            return False
        with contextlib.closing(lifecycle.AgentProcess.of(sock)) as process:
            try:
                messages.send(sock, question(), [log.fileno()])
                if messages.receive(sock) is None:
                    return False  # it has hung up
            except TimeoutError:  # stopped, perhaps: it must not become an agent later
                process.kill()
                return False
            while not process.ended(_POLL) and time.monotonic() < deadline:
                if lifecycle.is_listening(run, host):
                    return True
    return False


def surroundings(pid: int | str = "self") -> tuple[str, str]:
    """The file systems that a process sees, and the control group with which it ends."""
    return os.readlink(f"/proc/{pid}/ns/mnt"), Path(f"/proc/{pid}/cgroup").read_text()


def question() -> dict[str, Any]:
    """A worker's request for an agent: the environment and umask that it shall have, and the program that the worker would start itself."""
    return {"program": program(), "environ": lifecycle.agent_environment(), "umask": own_status("Umask")}


def program() -> list[str]:
    """The interpreter and the file of the package that an agent of this process runs; a process that runs others is not made its agent."""
    return [sys.executable, str(Path(__file__).resolve())]


# -- the process itself


def wait(run: str, host: str) -> bool:
    """Waits until this process is asked to become an agent; then it has the asker's environment and log. False: it shall end."""
    with socket.socket(socket.AF_UNIX, _KIND) as listener, selectors.DefaultSelector() as selector:
        try:
            listener.bind(address(run, host))
        except OSError:
            return False  # another one waits there
        listener.listen()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                return False
            with contextlib.suppress(OSError):  # the asking process has died, or is silent
                asker, _ = listener.accept()
                with asker:
                    asker.settimeout(_QUESTION_SECONDS)
                    if credentials(asker)[1] == os.getuid() and (answer := _asked(asker)) is not None:
                        return answer


def _asked(asker: socket.socket) -> bool | None:
    """Takes the asker's environment and log; False: it has another program than this one; None: it has hung up."""
    if (received := messages.receive(asker)) is None:
        return None
    asked, (log,) = received
    try:
        if asked["program"] != program():
            return False
        os.environ.clear()
        os.environ.update(asked["environ"])
        os.umask(int(asked["umask"], 8))
        with open(os.devnull, "rb") as nothing:
            messages.send(asker, {})  # from here on this process is an agent: until then it keeps the lifeline, its standard input
            for fd, source in enumerate((nothing.fileno(), log, log)):
                os.dup2(source, fd)
    finally:
        os.close(log)
    return True
