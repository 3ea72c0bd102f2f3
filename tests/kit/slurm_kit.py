"""A SLURM cluster on this machine: a real slurmctld and one real slurmd per node, with ports, spool and secret of their own.

Numbers of jobs begin at a port's, so that two clusters on one machine have no job in common. Nodes share the machine's name and have no
control groups, in place of which an epilog ends what a job leaves; all else is SLURM's own. Nothing outside of the cluster's folder is
written.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
_POLL = 0.1  # seconds
_NODE = "SLURM_KIT_NODE"  # in the environment of a node's daemons
_CONF = """
ClusterName=gemini{port}
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
Epilog={folder}/epilog
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
ReturnToService=2
SlurmdTimeout=10
MinJobAge=600
KillWait=10
BatchStartTimeout=60
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
# Ends all that a job has left on a node, as SLURM does by itself where it has control groups.
_EPILOG = """#!{python}
import os, pathlib
marks = {{f"{{name}}={{os.environ[name]}}".encode() for name in ("SLURM_JOB_ID", "SLURMD_NODENAME")}}
marks.add(b"SLURM_CONF={folder}/slurm.conf")
for entry in pathlib.Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and int(entry.name) != os.getpid() and marks <= set((entry / "environ").read_bytes().split(b"\\0")):
            os.kill(int(entry.name), 9)
    except OSError:
        pass
"""


def unavailable() -> str:
    """The reason why there can be no cluster here; empty: there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"apt-get install slurmctld slurmd slurm-client munge (there is no {', no '.join(missing)})" if missing else ""


class Cluster:
    """A cluster whose nodes are n1, n2, ...; the first half of them hangs on switch s0, the rest on s1. A context manager.

    Args:
        folder: exists; for all files of the cluster.
        count: nodes.
        env: for all jobs.
    """

    def __init__(self, folder: Path, count: int, env: Mapping[str, str]) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, count + 1)]
        self._env = {**os.environ, "PATH": PATH, **env, "SLURM_CONF": str(folder / "slurm.conf"), **_libraries()}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.push(self)
            self._begin()
            stack.pop_all()
        return self

    def _begin(self) -> None:
        self._configure()
        munge = self.folder / "munge"
        files = [f"--{file}-file={munge}/{file}" for file in ("pid", "log", "seed")]
        self._start("munged", "--force", "--foreground", f"--socket={munge}/socket", f"--key-file={munge}/key", *files)
        self.wait_for(lambda: (munge / "socket").exists(), "munged")
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.say("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(self.nodes)), "the nodes")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait(30)
        self._end([])

    # -- nodes

    def start_node(self, node: str) -> None:
        """Starts a node, for the first time or again."""
        stepd = shutil.which("slurmstepd", path=PATH)
        self._env[_NODE] = node
        self._start(node, "-D", "-N", node, "-d", str(stepd), program="slurmd")
        del self._env[_NODE]

    def kill_node(self, node: str) -> None:
        """Ends a node as a loss of power does: its slurmd, and every process that it has started. SLURM is left to notice."""
        self._daemons[node].kill()
        self._daemons[node].wait(30)
        self._end([f"{_NODE}={node}"])  # slurmstepd, which would tell how the processes have ended
        self._end([f"SLURMD_NODENAME={node}"])

    # -- jobs

    def submit(self, script: Path, *options: str, arguments: Sequence[str]) -> str:
        """Submits a batch script; returns the job's number. Its output is in ``folder/<number>.out``."""
        return self.say(
            "sbatch", "--parsable", f"--output={self.folder}/%j.out", f"--chdir={script.parent}", *options, str(script), *arguments
        ).strip()

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> str:
        """SLURM's word for the state of a job, such as RUNNING."""
        return self.fact(job, "JobState")

    def fact(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        found = re.search(rf"\b{name}=(\S+)", self.say("scontrol", "show", "job", job))
        assert found is not None, name
        return found[1]

    def finished(self, job: str, seconds: float = 240.0) -> None:
        """Waits until a job has ended well."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
        released: set[str] = set()

        def end() -> str:
            restarts = self.fact(job, "Restarts")
            if (now := self.state(job)) == "PENDING" and self.fact(job, "Reason") == "BeginTime" and restarts not in released:
                released.add(restarts)  # SLURM has a requeued job wait for two minutes; what is revoked in the same second does not start
                self.say("scontrol", "update", f"JobId={job}", "StartTime=now+5")
            return now if now in ended else ""

        state = self.wait_for(end, f"the end of job {job}", seconds, job)
        assert state == "COMPLETED", f"job {job} is {state}:\n{self.output(job)}"

    def say(self, *command: str) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    def wait_for(self, reached: Callable[[], T], what: str, seconds: float = 120.0, job: str = "") -> T:
        """Polls until ``reached`` returns something true, and returns that."""
        end = time.monotonic() + seconds
        while not (found := reached()):
            logs = "".join(f"\n--- {path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{self.output(job) if job else ''}{logs}"
            time.sleep(_POLL)
        return found

    # -- inside

    def _configure(self) -> None:
        port, *ports = _free_ports(len(self.nodes) + 1)
        name = socket.gethostname()
        text = _CONF.format(port=port, name=name, user=getpass.getuser(), folder=self.folder)
        if plugins := _plugins():
            text += f"PluginDir={plugins}\n"
        for node, own in zip(self.nodes, ports, strict=True):
            text += f"NodeName={node} NodeHostname={name} NodeAddr=127.0.0.1 Port={own} CPUs=16\n"
        (self.folder / "slurm.conf").write_text(text)
        half = (len(self.nodes) + 1) // 2
        leaves = f"SwitchName=s0 Nodes={','.join(self.nodes[:half])}\nSwitchName=s1 Nodes={','.join(self.nodes[half:])}\n"
        (self.folder / "topology.conf").write_text(f"{leaves}SwitchName=top Switches=s[0-1]\n")
        epilog = self.folder / "epilog"
        epilog.write_text(_EPILOG.format(python=sys.executable, folder=self.folder))
        epilog.chmod(0o755)
        (self.folder / "state").mkdir()
        (self.folder / "munge").mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _start(self, name: str, *arguments: str, program: str = "") -> None:
        path = shutil.which(program or name, path=PATH)
        assert path is not None
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *arguments], env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _end(self, marks: list[str]) -> None:
        """Kills all processes of this cluster's jobs that have ``marks`` in their environment, until none is left."""
        wanted = {mark.encode() for mark in [f"SLURM_CONF={self.folder / 'slurm.conf'}", *marks]}
        end = time.monotonic() + 30
        while pids := [pid for pid, environ in _environments() if wanted <= environ and pid != os.getpid()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < end, pids
            time.sleep(_POLL)


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if environ := Path(entry.path, "environ").read_bytes():  # a zombie has none
                    yield int(entry.name), set(environ.split(b"\0"))


def _plugins() -> str:
    """The folder of SLURM's plugins, where it is not installed under /usr; empty: it is."""
    daemon = Path(shutil.which("slurmctld", path=PATH) or "/usr/sbin/slurmctld")
    prefix = daemon.resolve().parents[1]
    return "" if prefix == Path("/usr") else str(next(prefix.glob("lib/*/slurm-wlm"), ""))


def _libraries() -> dict[str, str]:
    plugins = _plugins()
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(Path(plugins).parent), plugins])} if plugins else {}


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens to now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
