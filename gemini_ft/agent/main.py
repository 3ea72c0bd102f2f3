"""The host agent: owns the memory that outlives the workers. ``python -m gemini_ft.agent.main --run R --host H``.

It never imports torch. It ends when the job has finished, when it is told to leave, or when no worker has been
connected for ``linger`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

from gemini_ft import failpoints
from gemini_ft.agent import ahead, lifecycle
from gemini_ft.agent.context import RunContext
from gemini_ft.agent.memory.slot_files import SlotFiles, lock
from gemini_ft.agent.metrics_page import MetricsPage
from gemini_ft.agent.requests import Requests
from gemini_ft.agent.streams import Streams
from gemini_ft.agent.watchdog import mapped_by_others
from gemini_ft.agent.workers import WorkerListener
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError

_TICK = 0.2  # seconds between looks at hangs and at whether to leave
_PARTING = 5.0  # seconds for an agent that leaves to clear the folder


async def _serve(run: RunContext, streams: Streams, listener: socket.socket) -> None:
    requests, leaving = Requests(run, streams), asyncio.Event()
    worker_listener = WorkerListener(requests, listener)
    drains_by_sigterm = load_config().drain_signal == "SIGTERM"  # a file of options that has gone since must not keep the agent from ending
    page = MetricsPage(run, requests.status, requests.job) if run.metrics is not None else None
    run.log(f"agent {os.getpid()} of run {run.run_id!r} on host {run.host!r}; may hold {run.budget.limit:,} bytes")

    def told_to_end() -> None:
        """A scheduler that drains by SIGTERM sends it to all processes of a host: workers may need this one for their last commit."""
        if drains_by_sigterm and requests.drain():
            requests.departure.follows = True  # once they have ended after their step
        else:
            leaving.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end)
    while not leaving.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK):
                await leaving.wait()
        requests.hangs.kill_hanging()
        if requests.departure.is_due():
            break
    requests.departure.tell_askers()
    makes_way = leaving.is_set() or requests.departure.follows or requests.departure.is_followed  # for another agent
    worker_listener.close()
    if page is not None:
        page.close()
    await asyncio.sleep(_TICK)  # the last messages, such as that all have finished, must get out before connections close
    for stream in streams.by_name.values():
        stream.close_session()
    if run.files is not None and not makes_way:
        run.files.clear()
    run.log(lifecycle.LEAVING)


def _bind(run: str, host: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(lifecycle.socket_name(run, host))
    listener.listen(256)
    return listener


def _claim(files: SlotFiles, run: str, host: str) -> int | None:
    """The folder's identity file, once no other agent is at work there; None: one is, and can be reached.

    Raises ConfigError: there is one that cannot be reached from here.
    """
    end = time.monotonic() + _PARTING
    while (identity := files.claim()) is None:
        if lifecycle.is_listening(run, host):
            return None
        if time.monotonic() > end:
            raise ConfigError(
                f"another agent of run {run!r} and host {host!r} is at work in {files.folder}, and does not listen here: in another "
                "container, perhaps. End it, or give this host another id (GEMINI_HOST_ID)"
            )
        time.sleep(_TICK / 4)
    return identity


def main(argv: list[str] | None = None) -> int:
    """Runs the agent; returns 0 also when another agent of this run is already there."""
    parser = argparse.ArgumentParser(prog="gemini agent", description="Own the snapshot memory of one host and run.")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--host", required=True, help="host id")
    parser.add_argument("--inherit", default="", help=argparse.SUPPRESS)
    parser.add_argument("--identity", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.apart and (agent := os.fork()):  # this process only stands between the agent and its starter, and ends as the agent does
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # memory that the agent inherits and gives back must not stay for this process's sake
        os._exit(os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]))
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # Ctrl-C, or a scheduler's notice to all processes, is for the workers
        signal.signal(number, signal.SIG_IGN)
    if options.ahead and not ahead.wait(options.run, options.host):
        return 0
    failpoints.arm(options.run, options.host)
    lifecycle.raise_descriptor_limit()
    lifecycle.leave_no_core()
    lifecycle.yield_to_training()
    if (processors := load_config().agent_cpus) is not None:
        lifecycle.keep_to(processors)
    lifecycle.set_oom_score(0)  # a worker that restarted us has raised its own

    async def run() -> None:
        folder = load_config().memory.folder
        files = SlotFiles(folder, options.run, options.host) if folder is not None else None
        host_run = RunContext(options.run, options.host, files)
        if load_config().metrics is not None:
            host_run.metrics = ""
        streams = Streams(host_run)
        if options.inherit or options.identity >= 0:
            streams.inherit(options.inherit, options.identity)
            if files is not None and options.identity >= 0:
                lock(options.identity)
        elif files is not None:
            if (identity := _claim(files, options.run, options.host)) is None:
                return
            mapped, fds = mapped_by_others(os.getpid()), files.left()
            slots = ",".join(f"{fd}{'!' * (os.fstat(fd).st_ino in mapped)}" for fd in fds)
            streams.inherit(slots, identity, f"the folder {files.folder}")
        with contextlib.suppress(OSError):  # another agent is there already
            await _serve(host_run, streams, _bind(options.run, options.host))
        os._exit(0)  # asyncio would wait for a thread that hangs in storage, and the memory stay as long

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
