"""``gemini run`` with real torch: restarts, signals, logs, exit status, and hosts that are lost."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_kit import eventually
from torch._C._distributed_c10d import TCPStore

from gemini_ft import config
from gemini_ft.agent import lifecycle
from gemini_ft.cli import main as cli
from gemini_ft.hosts import host_id, lasting_name
from gemini_ft.launch import launcher
from gemini_ft.launch.launched import default_run_id, launch_id, this_launch
from gemini_ft.storage.checkpoints import FORMAT_VERSION, body_checksum
from gemini_ft.wire.messages import PROTOCOL_VERSION
from gemini_ft.wire.worker_messages import GetStatus, Leave, Ping, TellSpares, Visit, to_agent

RUN = f"launcher-{os.getpid()}"  # hosts and agents are found by names that all tests of a machine share
GEMINI_RUN = ("-m", "gemini_ft.cli.main", "run")
TORCHRUN = ("-m", "torch.distributed.run")
RENDEZVOUS = ["c10d", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("static", "standalone"))]

# Every rank says that it is up; then one of them is killed, another one each time, until there were enough restarts.
LOOP = """
import os, signal, sys
import torch, torch.distributed as dist, gemini_ft
gemini_ft.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.stdout.write(f"rank {dist.get_rank()} of {ranks.item():g} is up after {restart} restarts\\n")
dist.barrier()
if restart < int(sys.argv[1]) and dist.get_rank() == restart % dist.get_world_size():
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


class Job:
    """A launcher and all that it has started, found by a mark in the environment."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], arguments: tuple[str, ...], environ: dict[str, str]) -> None:
        self._mark = f"MARK_OF_TEST={uuid.uuid4()}".encode()
        self._out, self._err = (folder / f"{uuid.uuid4()}.{stream}" for stream in ("out", "err"))
        environ = {**os.environ, **environ, "TMPDIR": str(folder), "MARK_OF_TEST": self._mark.decode().partition("=")[2]}
        with self._out.open("w") as out, self._err.open("w") as err:
            command = [sys.executable, *launcher, *arguments]
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        return self.process.wait(100)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"did not happen within 60 s; output: {self.out}{self.err}"
            time.sleep(0.02)

    def processes(self) -> set[int]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
        return found

    def fork_server(self) -> int:
        children = [pid for pid in self.processes() if Path(f"/proc/{pid}/stat").read_text().split()[3] == str(self.process.pid)]
        servers = [pid for pid in children if b"gemini_ft.launch.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return min(servers, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[21]))  # the others are its workers

    def kill(self) -> None:
        """All at once, as a host goes down; or to clean up."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start ``gemini run`` in the test's folder; nothing of it survives the test."""
    with contextlib.ExitStack() as stack:

        def launch(*arguments: str, launcher: tuple[str, ...] = GEMINI_RUN, **environ: str) -> Job:
            job = Job(tmp_path, launcher, arguments, environ)
            stack.callback(job.kill)
            return job

        yield launch


def free_port() -> str:
    """A port below those that connections are given: another test's could have it before it is listened on."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(15_000, 30_000)))
            return str(probe.getsockname()[1])


def rendezvous_arguments(kind: str) -> list[str]:
    return {
        "static": ["--master-port", free_port()],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"],
    }[kind]


def all_up(workers: int, restarts: int) -> list[str]:
    return sorted(f"rank {rank} of {workers} is up after {count} restarts" for rank in range(workers) for count in range(restarts + 1))


class TestRestarts:
    @pytest.fixture(autouse=True)
    def _loop(self, tmp_path: Path) -> None:
        (tmp_path / "loop.py").write_text(LOOP)

    @pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.soak), 4])
    @pytest.mark.parametrize("kind", RENDEZVOUS)
    def test_ten_in_a_row_come_up(self, kind: str, workers: int, launch: Callable[..., Job]) -> None:
        job = launch(*rendezvous_arguments(kind), "--nproc-per-node", str(workers), "loop.py", "10")
        assert job.wait() == 0, job.err
        assert sorted(job.out.splitlines()) == all_up(workers, 10)
        assert job.processes() == set()
        assert "cold" not in job.err

    @pytest.mark.soak
    @pytest.mark.parametrize("kind", RENDEZVOUS)
    def test_under_plain_torchrun_too(self, kind: str, launch: Callable[..., Job]) -> None:
        self._torchrun(kind, 2, 2, launch)

    @pytest.mark.soak
    @pytest.mark.parametrize("workers", [2, 4])
    @pytest.mark.parametrize("kind", RENDEZVOUS)
    def test_ten_in_a_row_under_plain_torchrun(self, kind: str, workers: int, launch: Callable[..., Job]) -> None:
        self._torchrun(kind, workers, 10, launch)

    def _torchrun(self, kind: str, workers: int, restarts: int, launch: Callable[..., Job]) -> None:
        limits = ["--nproc-per-node", str(workers), "--max-restarts", str(restarts)]
        job = launch(*rendezvous_arguments(kind), *limits, "loop.py", str(restarts), launcher=TORCHRUN)
        assert job.wait() == 0, job.err
        assert sorted(job.out.splitlines()) == all_up(workers, restarts)

    def test_a_lost_fork_server_is_no_failure(self, tmp_path: Path, launch: Callable[..., Job]) -> None:
        """The next restart has a new one."""
        signalled = "while not os.path.exists('go'):\n        pass\n    os.kill(os.getpid(), signal.SIGKILL)"
        (tmp_path / "wait.py").write_text(LOOP.replace("os.kill(os.getpid(), signal.SIGKILL)", signalled))
        job = launch("--nproc-per-node", "2", "wait.py", "1")
        job.wait_for(lambda: job.out.count("0 restarts") == 2)
        server = job.fork_server()
        os.kill(server, signal.SIGKILL)
        job.wait_for(lambda: Path(f"/proc/{server}/stat").read_text().split()[2] == "Z")
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.err
        assert sorted(job.out.splitlines()) == all_up(2, 1)
        assert "no longer serves: it has died with status -9" in job.err
        assert job.processes() == set()

    def test_what_must_not_be_forked_is_started_cold(self, tmp_path: Path, launch: Callable[..., Job]) -> None:
        # The flag that torch sets when CUDA is initialised: the machine may have no GPU.
        (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.cuda._initialized = True\n")
        job = launch("--preload", "uses_cuda", "--nproc-per-node", "1", "loop.py", "1")
        assert job.wait() == 0, job.err
        assert sorted(job.out.splitlines()) == all_up(1, 1)
        refusal = "gemini run: starting workers cold: the imports have initialised CUDA, which cannot be used after a fork\n"
        assert job.err.count(refusal) == 1  # said once, not at every restart


ENDINGS = """
import os, signal, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    raise ValueError("the reason")
if attempt == 1:
    sys.exit(3)
if attempt == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
if attempt == 3:
    (sys.exit if os.environ["RANK"] == "0" else os._exit)(0)
"""


@pytest.fixture
def asked() -> Iterator[list[object]]:
    """The messages to this host's agent, in whose place a listener stands; visits of other tests' recoveries are left out."""
    asked: list[object] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(lifecycle.socket_name(RUN, "this-host"))
        listener.listen()

        def listen() -> None:
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        if frame := connection.recv(65536):  # of a launcher that asks nothing but how the agent is: perhaps none
                            asked.extend(
                                message
                                for message in [to_agent.unpack(frame[4:])]
                                if not isinstance(message, Ping | GetStatus | TellSpares | Visit)
                            )

        thread = threading.Thread(target=listen)
        thread.start()
        yield asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


IGNORES = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from gemini_ft.cli import main
sys.exit(main.main(["run", *sys.argv[1:]]))
"""


class TestEnding:
    """Reports and exit status are torchrun's; the host's agent is told when the job is over for good."""

    def test_a_job_that_ends_well_after_all_sorts_of_failures(
        self, asked: list[object], tmp_path: Path, launch: Callable[..., Job]
    ) -> None:
        (tmp_path / "endings.py").write_text(ENDINGS)
        job = launch("--run-id", RUN, "--nproc-per-node", "2", "endings.py", GEMINI_HOST_ID="this-host")
        assert job.wait() == 0, job.err
        for status in (1, 3, -signal.SIGSEGV):
            assert f"failed (exitcode: {status})" in job.err
        assert 'endings.py", line 5, in <module>\n    raise ValueError("the reason")\nValueError: the reason' in job.err
        assert "forkserver.py" not in job.err
        assert asked == [Leave(run=RUN, finished=True)]

    @pytest.mark.parametrize(
        ("end", "status", "attempts", "repeated"),
        [
            ("sys.exit(1)", 1, 3, ""),
            ("import gemini_ft; gemini_ft.Checkpointer(replicas=0)", 70, 2, f"ConfigError for the second time, at {config.__file__}:"),
            ("sys.exit(f'no data at {time.time()}')", 70, 2, "SystemExit for the second time, at FILE:3: "),
            ("argparse.ArgumentParser().parse_args(['--lrr'])", 70, 2, f"SystemExit for the second time, at {argparse.__file__}:"),
        ],
        ids=["status", "configuration", "text", "option"],
    )
    def test_a_job_fails_when_its_restarts_are_used_up_or_another_would_only_repeat_the_error(
        self, end: str, status: int, attempts: int, repeated: str, asked: list[object], tmp_path: Path, launch: Callable[..., Job]
    ) -> None:
        (tmp_path / "fails.py").write_text(f"import argparse, sys, time\nsys.stdout.write('try\\n')\n{end}\n")
        job = launch("--run-id", RUN, "--max-restarts", "2", "fails.py", GEMINI_HOST_ID="this-host")
        assert job.wait() == status
        assert job.out == "try\n" * attempts
        report = job.err[job.err.index("Root Cause") :]
        assert f"exitcode  : {2 if 'argparse' in end else 1}" in report
        assert job.err.count(f"gemini run: the same {repeated.replace('FILE', str(tmp_path / 'fails.py'))}") == (status == 70)
        told = "gemini run: nothing in this job is protected: no worker has joined a run, so a restart begins at the beginning. Unless the "
        assert job.err.count(f"{told}script has failed before it came that far: a loop needs a gemini_ft.Checkpointer") == 1
        job.wait_for(lambda: job.processes() == set())
        assert asked == []  # the same command may come again and resume

    @pytest.mark.parametrize(("stop", "expected"), [(signal.SIGINT, [Leave(run=RUN)]), (signal.SIGTERM, [])])
    def test_signals_are_passed_on(
        self, stop: signal.Signals, expected: list[object], asked: list[object], tmp_path: Path, launch: Callable[..., Job]
    ) -> None:
        say = f"signal.signal({int(stop)}, lambda *_: sys.exit(sys.stdout.write('told\\n')))"
        (tmp_path / "waits.py").write_text(f"import signal, sys\n{say}\nsys.stdout.write('up\\n')\nsignal.pause()\n")
        job = launch("--run-id", RUN, "--nproc-per-node", "2", "waits.py", GEMINI_HOST_ID="this-host")
        job.wait_for(lambda: job.out == "up\n" * 2)
        job.process.send_signal(stop)
        assert job.wait() == 128 + stop
        assert job.out == "up\n" * 2 + "told\n" * 2
        assert f"gemini run: stopped by {stop.name}\n" in job.err
        assert "Traceback" not in job.err
        assert job.processes() == set()
        assert asked == expected

    def test_a_failure_is_seen_where_the_supervisor_ignores_ended_children(self, tmp_path: Path, launch: Callable[..., Job]) -> None:
        """The kernel then keeps no exit status for the launcher."""
        (tmp_path / "fails.py").write_text("import sys\nsys.exit(3)\n")
        (tmp_path / "ignores.py").write_text(IGNORES)
        job = launch("--max-restarts", "0", "fails.py", launcher=("-X", "warm", "-m", "ignores"))
        assert job.wait() == 1
        assert "exitcode  : 3" in job.err

    def test_nothing_outlives_a_killed_launcher(self, tmp_path: Path, launch: Callable[..., Job]) -> None:
        (tmp_path / "waits.py").write_text("import signal, sys\nsys.stdout.write('up\\n')\nsignal.pause()\n")
        job = launch("--nproc-per-node", "2", "waits.py")
        job.wait_for(lambda: job.out == "up\n" * 2)
        job.process.kill()
        job.wait_for(lambda: job.processes() == set())

    def test_a_missing_script_is_said_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["run", "missing.py"]) == 2
        assert capsys.readouterr().err == (
            f"gemini run: there is no script 'missing.py' in {tmp_path}; give its path, or -m and the name of a module\n"
        )


SHOW = """
import json, os, sys
from gemini_ft.launch.launched import default_run_id
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GEMINI_RUN_ID", "GEMINI_LAUNCHER_PID"]
sys.stdout.write(json.dumps([sys.argv, default_run_id(), *map(os.environ.get, names)]) + "\\n")
sys.stderr.write("to stderr\\n")
"""


def test_torchruns_arguments_and_the_scripts(tmp_path: Path, launch: Callable[..., Job]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "show.py").write_text(SHOW)
    script = ["-m", "pkg.show", "--run-id", "for the script", "--cold", "--nnodes"]
    job = launch("--nproc_per_node=2", "--log-dir", "logs", "--redirects=3", "--tee", "0:1", *script)
    assert job.wait() == 0, job.err
    run_id = default_run_id_in(tmp_path, script)
    for rank in ("0", "1"):
        [out] = tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        argv = [str(tmp_path / "pkg" / "show.py"), *script[2:]]
        assert json.loads(out.read_text()) == [argv, run_id, rank, rank, "2", "1", run_id, str(job.process.pid)]
        assert out.with_name("stderr.log").read_text() == "to stderr\n"
    assert job.out.startswith("[default0]:[[")  # the one that is teed
    assert job.out.count("\n") == 1
    assert "to stderr" not in job.err


def default_run_id_in(folder: Path, command: list[str]) -> str:
    here = Path.cwd()
    os.chdir(folder)
    try:
        return default_run_id(command)
    finally:
        os.chdir(here)


class TestSettings:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", os.environ.copy())
        monkeypatch.delenv("OMP_NUM_THREADS")
        (tmp_path / "train.py").touch()
        monkeypatch.chdir(tmp_path)

    def options(self, *argv: str) -> Any:
        return launcher.make_parser().parse_args([*argv, "train.py", "--max-restarts", "for the script"])

    def test_defaults_restart_reliably(self) -> None:
        options = self.options("--nproc-per-node", "2")
        launcher.prepare(options, ["train.py"])
        assert options.max_restarts == 10
        assert options.rdzv_conf == "keep_alive_interval=1,keep_alive_max_attempt=3"
        assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ["GEMINI_LAUNCHER_PID"] == str(os.getpid())
        assert this_launch(launch_id()).is_of_run

    def test_what_the_user_says_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_MAX_RESTARTS", "7")
        assert int(self.options().max_restarts) == 7
        options = self.options("--max-restarts", "2", "--rdzv-conf", "join_timeout=9,keep_alive_interval=4")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
        launcher.prepare(options, ["train.py"])
        assert options.max_restarts == 2
        assert options.rdzv_conf == "join_timeout=9,keep_alive_interval=4,keep_alive_max_attempt=3"
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"

    @pytest.mark.parametrize(
        ("arguments", "standalone"),
        [([], True), (["--nnodes", "1"], True), (["--nnodes", "2"], False), (["--master-port", "1234"], False), (["--standalone"], True)],
    )
    def test_one_host_comes_together_so_that_any_script_can_restart(self, arguments: list[str], standalone: bool) -> None:
        options = self.options(*arguments)
        launcher.prepare(options, ["train.py"])
        assert bool(options.standalone) is standalone

    def test_a_host_that_is_renamed_meanwhile_keeps_its_name_until_the_job_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers that are restarted would not find the memory of the agent that has the former name."""
        for name in ("GEMINI_HOST_ID", "SLURMD_NODENAME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GEMINI_HOSTNAME", "of-another-launch")
        launcher.prepare(self.options(), ["train.py"])
        before = host_id(), lasting_name()
        monkeypatch.setattr("socket.gethostname", lambda: "renamed")
        assert (host_id(), lasting_name()) == before
        launcher.prepare(self.options(), ["train.py"])
        assert lasting_name() == "renamed"

    def test_one_worker_may_use_all_cores(self) -> None:
        launcher.prepare(self.options(), ["train.py"])
        assert "OMP_NUM_THREADS" not in os.environ

    def test_the_runs_name_is_the_argument_else_the_environments_else_the_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = launcher.program_of(self.options())
        assert launcher.prepare(self.options(), program) == default_run_id(program) == os.environ["GEMINI_RUN_ID"]
        monkeypatch.setenv("GEMINI_RUN_ID", "from the environment")
        assert launcher.prepare(self.options(), program) == "from the environment"
        assert launcher.prepare(self.options("--run-id", "mine"), program) == "mine" == os.environ["GEMINI_RUN_ID"]

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ([], ""),
            (["-m"], ""),
            (["--no-python"], "only what 'python SCRIPT' and 'python -m MODULE' run can be forked"),
        ],
    )
    def test_when_python_itself_runs_the_program(self, arguments: list[str], reason: str) -> None:
        assert launcher.not_forkable(self.options(*arguments), None) == reason

    def test_a_script_that_computes_a_variable_before_its_imports_is_started_cold(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "train.py").write_text("import os\nos.environ['HF_HOME'] = os.getcwd()\nimport torch")
        launcher.workers_of(self.options(), ["train.py"], None)
        assert caplog.messages == [
            "starting workers cold: train.py sets HF_HOME in line 2, before its imports; a constant could be set for the fork server too"
        ]

    def test_another_python_or_no_file_is_started_cold(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = self.options()
        options.training_script = str(tmp_path)
        assert launcher.not_forkable(options, None) == "the script is a folder or an archive"
        monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
        assert launcher.not_forkable(options, None) == "PYTHON_EXEC names another Python"


WORK = """
import os, sys
import torch, torch.distributed as dist, gemini_ft
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

def main():
    torch.set_num_threads(2)
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    data = DataLoader(TensorDataset(torch.randn(512, 256)), batch_size=256, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for (batch,) in data:
            optimizer.zero_grad()
            loss = (model(batch + dist.get_rank()) - batch).square().mean()
            loss.backward()
            optimizer.step()
    forked = b"gemini_ft.launch.forkserver" in open("/proc/self/cmdline", "rb").read()
    sys.stdout.write(f"{forked} {sum(p.double().sum() for p in model.parameters()).item().hex()}\\n")

if __name__ == "__main__":  # from Python 3.14 on, processes of a DataLoader import the script
    main()
"""


# Two ranks by hand, in a process that nobody has forked: DDP adds up halves.
BY_HAND = """
import torch

torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
data = torch.randn(512, 256)
for _ in range(2):
    for batch in data.split(256):
        halves = []
        for rank in range(2):
            optimizer.zero_grad()
            (model(batch + rank) - batch).square().mean().backward()
            halves.append([p.grad / 2 for p in model.parameters()])
        for p, *half in zip(model.parameters(), *halves):
            p.grad = sum(half)
        optimizer.step()
print(sum(p.double().sum() for p in model.parameters()).item().hex())
"""


def test_forked_workers_train_as_others_do(tmp_path: Path, launch: Callable[..., Job]) -> None:
    """OpenMP threads, autograd, gloo and a DataLoader's processes work after the fork, with the same bits."""
    (tmp_path / "work.py").write_text(WORK)
    job = launch("--run-id", f"{os.getpid()}-{tmp_path.name}", "--nproc-per-node", "2", "work.py")
    with subprocess.Popen([sys.executable, "-c", BY_HAND], stdout=subprocess.PIPE, text=True) as by_hand:
        assert job.wait() == 0, job.err
        expected, _ = by_hand.communicate(timeout=120)
    assert {tuple(line.split()) for line in job.out.splitlines()} == {("True", expected.strip())}  # both ranks say the same


LEAVES = """
import multiprocessing, os, signal, sys, time
if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
        process.start()
        sys.stdout.write(f"{process.pid}\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("seen"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("mode", [(), ("--cold",)])
def test_a_killed_worker_leaves_no_processes_behind_that_a_server_has_started(
    mode: tuple[str, ...], tmp_path: Path, launch: Callable[..., Job]
) -> None:
    """A DataLoader's are of that kind from Python 3.14 on; they do not see their worker's end."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    job = launch(*mode, "leaves.py")
    job.wait_for(lambda: bool(job.out) and int(job.out) not in job.processes())
    (tmp_path / "seen").touch()
    assert job.wait() == 0, job.err


UNGUARDED = """
import torch, gemini_ft
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
{begin}
for _ in DataLoader(torch.zeros(2), num_workers=1, multiprocessing_context="forkserver"):
    pass
"""


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param("gemini_ft.init_process_group('gloo')", marks=pytest.mark.soak),
        "gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1)).resume()",
    ],
    ids=["group", "resume"],
)
def test_a_script_that_trains_while_multiprocessing_imports_it_is_refused(begin: str, tmp_path: Path, launch: Callable[..., Job]) -> None:
    """Several ranks would wait for each other and for themselves, without an end."""
    (tmp_path / "unguarded.py").write_text(UNGUARDED.format(begin=begin))
    job = launch("--max-restarts", "0", "unguarded.py")
    assert job.wait() == 1, job.err
    assert "ConfigError: the script trains while it is imported by a process that multiprocessing has started" in job.err


REPEATS = """
import torch, gemini_ft
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = gemini_ft.Checkpointer(model, optimizer)
for iteration in range(checkpointer.resume(), 9):
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    if iteration == 3:
        raise MemoryError(f"{id(model)} bytes are not to be had")
    checkpointer.step()
    checkpointer.flush()
"""


def test_an_error_that_comes_again_at_its_step_ends_the_job_and_says_what_is_kept(tmp_path: Path, launch: Callable[..., Job]) -> None:
    (tmp_path / "repeats.py").write_text(REPEATS)
    run = f"repeats-{os.getpid()}-{tmp_path.name}"
    job = launch("--run-id", run, "repeats.py", GEMINI_HOST_ID="this-host", GEMINI_LINGER="600")
    try:
        assert job.wait() == 70
        assert job.err.count("MemoryError: ") == 3  # of both attempts, and in the report
        place = f"for the second time, after step 3, at {tmp_path / 'repeats.py'}:10: "
        assert f"{place}another restart would only repeat it. Memory keeps step 3 " in job.err
        assert f"for 10.0 min: the same command goes on from there, and `gemini leave --run-id {run}` forgets it" in job.err
        assert "is protected" not in job.err
    finally:
        lifecycle.leave(run, "this-host")


SOON = """
import sys
from gemini_ft.cli import main
from gemini_ft.launch import endings
endings.UNPROTECTED_SECONDS = 0.5
sys.exit(main.main(["run", *sys.argv[1:]]))
"""


def test_a_job_that_does_not_fail_is_told_once_after_a_while_that_nothing_is_protected(tmp_path: Path, launch: Callable[..., Job]) -> None:
    (tmp_path / "soon.py").write_text(SOON)
    (tmp_path / "trains.py").write_text("import os, time\nwhile not os.path.exists('told'):\n    time.sleep(0.1)\n")
    job = launch("trains.py", launcher=("-X", "warm", "-m", "soon"))
    job.wait_for(lambda: "gemini run: nothing in this job is protected after 0.5 s: no worker has joined a run" in job.err)
    (tmp_path / "told").touch()
    assert job.wait() == 0
    assert job.err.count("is protected") == 1


def test_a_script_without_a_name_leaves_nothing_behind_when_it_fails(tmp_path: Path, launch: Callable[..., Job]) -> None:
    os.mkfifo(tmp_path / "repeats")
    job = launch("repeats", GEMINI_HOST_ID=tmp_path.name, GEMINI_LOG_DIR=str(tmp_path))
    (tmp_path / "repeats").write_text(REPEATS)
    assert job.wait() == 70
    (log,) = tmp_path.glob("agent-*.log")
    run = log.stem.removeprefix("agent-").removesuffix(f"-{tmp_path.name}")
    eventually(lambda: not lifecycle.is_listening(run, tmp_path.name), "the agent's end")


HOST = """
import os, sys, time
import torch, torch.distributed as dist, gemini_ft
gemini_ft.init_process_group("gloo")
total = torch.tensor([float(2 ** int(os.environ["HOST"]))])
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} among hosts {int(total.item()):04b}\\n")
while True:
    time.sleep(0.05)
    finished = torch.tensor([float(os.path.exists("finished"))])
    dist.all_reduce(finished)
    if finished.item():
        break
"""


def rendezvous_state(endpoint: str) -> Any:
    """What torch's launchers keep in the store they share."""
    address, _, port = endpoint.partition(":")
    client = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=30))
    return pickle.loads(base64.b64decode(client.get("torch.rendezvous.none")))


@pytest.fixture
def endpoint(launch: Callable[..., Job]) -> Iterator[str]:
    """Where ``gemini store`` listens."""
    store = launch("--host", "127.0.0.1", "--port", "0", launcher=("-m", "gemini_ft.cli.main", "store"))
    store.wait_for(lambda: "\n" in store.out)
    yield store.out.removeprefix("store ready on ").strip()
    store.process.terminate()
    assert store.wait() == 0


def host_arguments(hosts: int, endpoint: str) -> list[str]:
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=is_host=0"]
    return [f"--nnodes={hosts}:{hosts}", *rendezvous, "--local-addr=127.0.0.1"]


@pytest.mark.soak  # in short: test_elastic.py
def test_a_spare_host_takes_the_place_of_a_lost_one(endpoint: str, tmp_path: Path, launch: Callable[..., Job]) -> None:
    """The lost one is rank 0's, which is where torch's own shared store would have been."""
    (tmp_path / "host.py").write_text(HOST)
    arguments = host_arguments(3, endpoint)
    hosts = [launch(*arguments, "host.py", HOST=str(host)) for host in range(3)]
    for host in hosts:
        host.wait_for(lambda: "among hosts 0111" in host.out)  # noqa: B023
    spare = launch(*arguments, "host.py", HOST="3")
    spare.wait_for(lambda: len(rendezvous_state(endpoint).redundancy_list) == 1)
    lost = next(index for index, host in enumerate(hosts) if host.out.startswith("rank 0 "))
    hosts.pop(lost).kill()
    for host in (*hosts, spare):
        host.wait_for(lambda: f"among hosts {0b1111 - 2**lost:04b}" in host.out)  # noqa: B023
    (tmp_path / "finished").touch()
    assert [host.wait() for host in (*hosts, spare)] == [0, 0, 0]
    ranks = sorted(host.out.splitlines()[-1].split()[1] for host in (*hosts, spare))
    assert ranks == ["0", "1", "2"]


def test_a_spare_host_that_is_not_needed_ends_with_the_job(endpoint: str, tmp_path: Path, launch: Callable[..., Job]) -> None:
    (tmp_path / "host.py").write_text(HOST)
    host = launch(*host_arguments(1, endpoint), "host.py", HOST="0")
    host.wait_for(lambda: "among hosts 0001" in host.out)
    spare = launch(*host_arguments(1, endpoint), "host.py", HOST="1")
    spare.wait_for(lambda: len(rendezvous_state(endpoint).redundancy_list) == 1)
    (tmp_path / "finished").touch()
    assert [host.wait(), spare.wait()] == [0, 0], spare.err
    assert spare.err.endswith("gemini run: the job is over, the others' output says how; this spare host was not needed\n")
    late = launch(*host_arguments(1, endpoint), "host.py", HOST="2")  # as one that was cut off while the others finished
    assert late.wait() == 69
    assert late.err.endswith(
        "gemini run: the rendezvous is closed: the job has ended without this host; the output of the others says how\n"
    )
    assert "Traceback" not in late.err
    assert spare.out == late.out == ""


NOTHING_TO_RESUME_FROM = """
import torch, gemini_ft
print("attempt", flush=True)
model = torch.nn.Linear(1, 1)
storage = {"url": "file://STORE", "every_steps": 1, "patience": 0.0}
gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1), storage=storage).resume()
"""


@pytest.mark.parametrize("cold", [(), pytest.param(("--cold",), marks=pytest.mark.soak)], ids=["forked", "cold"])
def test_storage_that_cannot_say_what_there_is_ends_the_job_with_a_status_of_its_own(
    launch: Callable[..., Job], tmp_path: Path, cold: tuple[str, ...]
) -> None:
    (tmp_path / "store").symlink_to("store")  # it leads nowhere but in a circle
    script = tmp_path / "script.py"
    script.write_text(NOTHING_TO_RESUME_FROM.replace("STORE", str(tmp_path / "store")))
    job = launch("--nproc-per-node", "1", *cold, str(script))
    assert job.wait() == 74
    assert job.out.count("attempt") == 1
    assert "Nothing has been begun; start the same command again when storage is well" in job.err
    assert "StorageUnclearError" in job.err


OTHER_AGENT = """
import sys
from gemini_ft.wire import messages
messages.PROTOCOL_VERSION = 1
from gemini_ft.agent import main
main.main(["--run", sys.argv[1], "--host", "here"])
"""


@pytest.mark.parametrize("keeper", ["storage", "agent"])
def test_what_another_version_has_kept_is_refused_once(
    launch: Callable[..., Job], tmp_path: Path, keeper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    (tmp_path / "script.py").write_text(NOTHING_TO_RESUME_FROM.replace("STORE", str(store)))
    with contextlib.ExitStack() as stack:
        if keeper == "storage":
            body = {"format": 1, "versions": {"gemini_ft": "0.0.1"}}
            folder = store / RUN / "main" / "step-00000003-inc-1-nonce"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps({**body, "xxh3": body_checksum(body)}))
            said = f"this gemini_ft reads format {FORMAT_VERSION}; use the gemini_ft that wrote it ({{'gemini_ft': '0.0.1'}})"
        else:
            agent = stack.enter_context(subprocess.Popen([sys.executable, "-c", OTHER_AGENT, RUN]))
            stack.callback(agent.kill)
            eventually(lambda: lifecycle.status(RUN, "here"), "the agent")
            assert cli.main(["ps", "--all"]) == 0
            assert re.search(f"^{RUN} +here", capsys.readouterr().out, re.MULTILINE)
            said = f"the worker {PROTOCOL_VERSION}: another gemini-ft started it, and only that one can go on from its memory"
        job = launch("--nproc-per-node", "1", "--max-restarts", "3", "script.py", GEMINI_RUN_ID=RUN, GEMINI_HOST_ID="here")
        assert job.wait() == 70, job.err
    assert job.out.count("attempt") == 1
    assert said in job.err


ELASTIC = """
import os, sys, time
import torch, gemini_ft
gemini_ft.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters())).resume()
sys.stdout.write(f"up with {os.environ['WORLD_SIZE']}\\n")
while not os.path.exists("finished"):
    time.sleep(0.05)
"""


@pytest.mark.soak  # in short: test_elastic.py
def test_a_job_whose_state_is_made_for_one_host_is_not_restarted_for_another(
    endpoint: str, tmp_path: Path, launch: Callable[..., Job]
) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    conf = "--rdzv-conf=is_host=0,last_call_timeout=1"
    arguments = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", conf, "--local-addr=127.0.0.1", "elastic.py"]
    host = launch(*arguments, GEMINI_HOST_ID="one")
    host.wait_for(lambda: host.out == "up with 1\n")
    host.wait_for(lambda: hasattr(rendezvous_state(endpoint), "gemini_hosts"))
    other = launch(*arguments, GEMINI_HOST_ID="two")
    other.wait_for(lambda: len(rendezvous_state(endpoint).redundancy_list) == 1)
    (tmp_path / "finished").touch()
    assert [host.wait(), other.wait()] == [0, 0], host.err + other.err
    assert host.out == "up with 1\n"
    assert "gemini run: the job's state is made for 1 hosts: this one waits as a spare\n" in other.err


@pytest.mark.soak  # in short: test_elastic.py
def test_a_script_that_changes_the_number_of_hosts_is_refused_where_two_sides_could_go_on(
    tmp_path: Path, launch: Callable[..., Job]
) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC.replace("parameters())", "parameters()), elastic='batch'"))
    stores = [launch("--host", "127.0.0.1", "--port", "0", launcher=("-m", "gemini_ft.cli.main", "store")) for _ in range(2)]
    for store in stores:
        store.wait_for(lambda: "\n" in store.out)  # noqa: B023
    endpoints = ",".join(store.out.removeprefix("store ready on ").strip() for store in stores)
    conf = "--rdzv-conf=is_host=0,last_call_timeout=1"
    host = launch("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}", conf, "--local-addr=127.0.0.1", "elastic.py")
    host.wait_for(lambda: "up with" in host.out or host.process.poll() is not None)
    assert host.out == ""
    assert host.wait() == 70
    assert "ConfigError: --nnodes=1:2 with several stores and the option elastic: both sides of a network" in host.err


WRONG = """
import sys
from gemini_ft.cli import main
for option in sys.argv[1:]:
    print(main.main(["run", *option.split(), "hi.py"]), flush=True)
"""


def test_a_wrong_value_of_an_option_is_status_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "hi.py").write_text("print('hi')")
    options = [
        "--nnodes=a",
        f"--nnodes={'9' * 400}",
        "--nproc-per-node=foo",
        "--rdzv-conf=abc",
        "--rdzv-backend=foo",
        "--tee=9",
        "--logs-specs=X",
        "--event-log-handler=X",
        "--run-path",
        "--no-python",
        "--signals-to-handle=SIGX,SIGTERM",
        "--nproc-per-node=0",
    ]
    done = subprocess.run([sys.executable, "-X", "warm", "-c", WRONG, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2"] * len(options), done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("gemini run: ") and "starting workers cold" not in line]
    assert len(told) == len(options), done.stderr


BROKEN = """
from gemini_ft.cli import main
from gemini_ft.launch import launcher

def refused(*arguments):
    raise {error}

{place} = refused
main.main(["run", "--standalone", "hi.py"])
"""


@pytest.mark.parametrize(
    ("place", "error"),
    [("launcher.notes_of_workers", "PermissionError('no notes')"), ("launcher.torchrun.run", "KeyError('of the code')")],
    ids=["before the job", "before its workers"],
)
def test_an_error_that_no_option_causes_is_not_said_to_be_one_of_options(place: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "hi.py").write_text("print('hi')")
    program = BROKEN.format(place=place, error=error)
    done = subprocess.run([sys.executable, "-X", "warm", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(error.partition("(")[0]), done.stderr
    assert "--help" not in done.stderr
