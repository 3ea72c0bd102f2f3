"""A forked worker is what ``python -u script.py`` would have been, and a server that must not fork says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import api as torch_api

from gemini_ft.hosts import is_readable
from gemini_ft.launch import forkserver
from gemini_ft.launch.grace import Process, Workers
from gemini_ft.launch.worker_start import ForkServer, ForkServerError, forked_workers

pytestmark = pytest.mark.started_anew

# What a script can see of the process it runs in. Printed by a forked worker and by a real `python -u script.py`.
REPORT = """
import atexit, json, multiprocessing, os, signal, sys, threading
def described():
    main = sys.modules["__main__"]
    return {
        "globals": sorted(globals()),
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path[0]": sys.path[0], "path": sys.path[1:], "cwd": os.getcwd(),
        "name": __name__, "file": __file__, "package": __package__, "spec": __spec__ and __spec__.name,
        "loader": type(__loader__).__name__, "cached": __cached__, "doc": __doc__, "main": main.__dict__ is globals(),
        "future": __import__("__future__").annotations.compiler_flag & compile("0", "", "eval").co_flags,
        "environ": dict(os.environ), "session": os.getsid(0) == os.getpid(), "start method": multiprocessing.get_start_method(True),
        "parent": multiprocessing.parent_process() is None, "process": multiprocessing.current_process().name,
        "threads": [t.name for t in threading.enumerate()], "main thread": threading.main_thread() is threading.current_thread(),
        "signals": [str(signal.getsignal(s)).partition(" at ")[0] for s in range(1, 32)],
        "wakeup": signal.set_wakeup_fd(-1), "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "flags": sys.flags.safe_path, "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    }
class Local:
    pass
import pickle
assert pickle.loads(pickle.dumps(Local())).__class__ is Local
print(json.dumps(described()))
atexit.register(print, "exit handler")
threading.Thread(target=lambda: print("thread")).start()
"""

# Every generator that a script may draw from without a seed, and two that a library has seeded.
DRAWS = """
import hashlib, multiprocessing, os, random, secrets, ssl, sys, tempfile, uuid
import numpy, torch
own, seeded = random.Random(), random.Random(3)
numpy_own, numpy_seeded = numpy.random.default_rng(), numpy.random.default_rng(3)
def draw():
    return {
        "torch": torch.rand(1).item(), "torch's seed": torch.initial_seed(), "permutation": torch.randperm(1000).tolist(),
        "DataLoader": [batch.item() for batch in torch.utils.data.DataLoader(range(50), shuffle=True)],
        "random": random.random(), "SystemRandom": random.SystemRandom().random(), "secrets": secrets.token_hex(),
        "os": os.urandom(9).hex(),
        "random of a library": own.random(), "random of a library, seeded": seeded.random(),
        "sympy": (sympy := sys.modules["sympy.core.random"]).rng.random(), "sympy's other": sympy._assumptions_rng.random(),
        "numpy": numpy.random.random(), "numpy normal": numpy.random.randn(),
        "numpy's seeds": numpy.random.get_bit_generator().seed_seq.entropy,
        "numpy of a library": numpy_own.random(), "numpy of a library, seeded": numpy_seeded.random(),
        "new numpy": numpy.random.default_rng().random(), "numpy generator": numpy.random.RandomState().rand(),
        "uuid1": str(uuid.uuid1()), "uuid4": str(uuid.uuid4()), "tempfile": tempfile.mktemp(),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "OpenSSL": ssl.RAND_bytes(9).hex(), "salt": hashlib.scrypt(b"", salt=ssl.RAND_bytes(9), n=2, r=1, p=1).hex(),
    }
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ForkServer]]:
    """Start a fork server; it is closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def serve(*modules: str, program: tuple[str, ...] = ("none.py",)) -> ForkServer:
            server = ForkServer(program, modules, Workers())
            stack.callback(server.close)
            return server

        yield serve


class Output:
    """Files for the standard streams of a worker."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out", folder / "err"

    def start(self, server: ForkServer, *program: str, **environ: str) -> Process:
        assert server.wait_ready() is None
        with open(os.devnull) as stdin, self.out.open("w") as out, self.err.open("w") as err:
            return server.fork(program, {**os.environ, **environ}, [stdin.fileno(), out.fileno(), err.fileno()])

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 30
        while text not in self.out.read_text():
            assert time.monotonic() < end, f"{text!r} did not appear in: {self.out.read_text()}{self.err.read_text()}"
            time.sleep(0.01)


def test_nothing_is_imported_from_the_working_directory(
    serve: Callable[..., ForkServer], output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a folder like /tmp, where others put a ctypes.py; ``python script.py`` looks in the script's folder alone."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("ctypes", "json", "socket", "gemini_ft"):
        write(shared / f"{name}.py", "import os; os._exit(7)")
    monkeypatch.chdir(shared)
    script = write(tmp_path / "script.py", "import sys, ctypes, json, socket; print(sys.path[0])")
    process = output.start(serve(program=(script,)), script)
    output.wait_for(f"{tmp_path}\n")
    assert process.wait(30) == 0


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def real(*program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The same program in a Python started for it."""
    command = [sys.executable, "-u", *program]
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


class TestLikePython:
    @pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
    @pytest.mark.parametrize("safe_path", ["", "1"], ids=["", "safe_path"])
    def test_all_a_script_can_see(
        self,
        as_module: bool,
        safe_path: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        serve: Callable[..., ForkServer],
        output: Output,
    ) -> None:
        (tmp_path / "pkg").mkdir()
        write(tmp_path / "pkg" / "report.py", REPORT)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
        if safe_path:
            monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        program = (*(["-m", "pkg.report"] if as_module else ["pkg/report.py"]), "--lr", "a b", "")
        worker = output.start(serve(program=program), *program, RANK="3")
        assert worker.wait(30) == 0, output.err.read_text()
        reference = real(*program, RANK="3")
        assert reference.returncode == 0, reference.stderr
        seen, *rest = output.out.read_text().splitlines()
        expected, *expected_rest = reference.stdout.splitlines()
        assert json.loads(seen) == json.loads(expected)
        assert rest == expected_rest == ["thread", "exit handler"]

    @pytest.mark.parametrize(
        "ending",
        [
            "pass",
            "sys.exit()",
            "sys.exit(3)",
            "sys.exit('said at the end')",
            "os._exit(0)",
            "os._exit(5)",
            "os.kill(os.getpid(), signal.SIGKILL)",
            "os.kill(os.getpid(), signal.SIGTERM)",
            "raise ValueError('the reason')",
            "raise ValueError('the reason') from KeyError('the cause')",
            "def deep(): 1 / 0\ndeep()",
            "this is not Python",
            "import no_such_module",
            "signal.raise_signal(signal.SIGINT)",
            "sys.excepthook = lambda kind, error, frames: print('hooked', kind, error, frames.tb_lineno, file=sys.stderr)\n1 / 0",
        ],
    )
    def test_it_ends_and_complains_as_python_does(
        self, ending: str, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        script = write(tmp_path / "script.py", f"import os, signal, sys\n{ending}\n")
        worker = output.start(serve(), script)
        reference = real(script)
        assert worker.wait(30) == reference.returncode
        assert output.err.read_text() == reference.stderr

    def test_an_exception_in_a_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        write(tmp_path / "module.py", "def deep():\n    raise ValueError('the reason')\ndeep()\n")
        monkeypatch.chdir(tmp_path)
        worker = output.start(serve(program=("-m", "module")), "-m", "module")
        assert worker.wait(30) == 1
        reference = real("-m", "module")
        # Python shows runpy's frames here, which say nothing of the module.
        assert [line for line in reference.stderr.splitlines() if "runpy" not in line] == output.err.read_text().splitlines()

    def test_torchs_launcher_finds_the_exception_in_the_error_file(
        self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        script = write(tmp_path / "script.py", "raise ValueError('the reason')")
        error_file = tmp_path / "error.json"
        assert output.start(serve(), script, TORCHELASTIC_ERROR_FILE=str(error_file)).wait(60) == 1
        message = json.loads(error_file.read_text())["message"]
        assert message["message"] == "ValueError: the reason"
        assert "forkserver" not in message["extraInfo"]["py_callstack"]

    def test_workers_share_no_random_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        """Whatever the server's imports have drawn from before: else all ranks train on the same data."""
        write(tmp_path / "draws.py", DRAWS)
        write(tmp_path / "drawn.py", "import draws, sympy.core.random, uuid\ndraws.draw()\nuuid._node = uuid.getnode()")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        script = write(tmp_path / "script.py", "import json, draws\nprint(json.dumps(draws.draw()))")
        server = serve("torch", "numpy", "drawn")
        first, second = [self._drawn(server, script, output) for _ in range(2)]
        assert {name for name in first if first[name] == second[name]} == {"random of a library, seeded", "numpy of a library, seeded"}

    def _drawn(self, server: ForkServer, script: str, output: Output) -> dict[str, object]:
        assert output.start(server, script).wait(30) == 0, output.err.read_text()
        drawn: dict[str, object] = json.loads(output.out.read_text())
        return drawn

    def test_a_worker_makes_random_numbers_as_a_fresh_process_can(
        self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        script = write(tmp_path / "script.py", "import numpy\nprint(numpy.random.get_bit_generator().seed_seq.spawn(1)[0].spawn_key)")
        assert output.start(serve("torch", "numpy"), script).wait(30) == 0, output.err.read_text()
        assert output.out.read_text() == "(0,)\n"

    def test_what_the_scripts_imports_do_to_the_environment_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        write(tmp_path / "sets_variable.py", "import os\nos.environ['SET_BY_IMPORT'] = os.environ['RANK'] = 'yes'")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        script = write(
            tmp_path / "script.py", "import os\nprint(os.environ['SET_BY_IMPORT'], os.environ['RANK'], 'ONLY_HERE' in os.environ)"
        )
        server = serve("sets_variable")
        assert server.wait_ready() is None
        monkeypatch.setenv("ONLY_HERE", "1")  # after the server was started
        assert output.start(server, script, RANK="5").wait(30) == 0
        assert output.out.read_text() == "yes 5 True\n"

    def test_what_torch_does_to_the_environment_while_it_is_imported_ahead_is_taken_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        """A script that gives torch's compiler a private cache would else silently use the one that all users share."""
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        lines = [
            "import os, torch",
            "os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', '.')",
            "from torch._inductor.runtime import cache_dir_utils",
        ]
        script = write(tmp_path / "script.py", "\n".join([*lines, "print(cache_dir_utils.cache_dir())"]))
        assert output.start(serve("torch", "torch._dynamo"), script).wait(60) == 0, output.err.read_text()
        assert os.path.abspath(output.out.read_text().rstrip()) == os.getcwd()

    def test_libraries_that_read_the_rank_when_imported_know_the_workers_rank(
        self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        lines = [
            "from lightning_fabric.utilities.rank_zero import rank_zero_only as a",
            "from torchmetrics.utilities.prints import rank_zero_only as b",
        ]
        script = write(tmp_path / "script.py", "\n".join([*lines, "print(a.rank, b.rank)"]))
        assert output.start(serve("torch", "lightning_fabric"), script, RANK="5", LOCAL_RANK="1").wait(60) == 0
        assert output.out.read_text() == "5 1\n"


SLEEP = "import signal, sys, time\n{}\nprint('asleep', flush=True)\ntime.sleep(600)\n"
TELL = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told to go')))"


def gone(pid: int) -> bool:
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    return not os.path.exists(f"/proc/{pid}")


# A launcher that starts one worker, the script that it is given, and waits to be killed.
LAUNCHER = """
import os, signal, subprocess, sys
from gemini_ft.launch.script import cold_command
from gemini_ft.launch.grace import Workers
from gemini_ft.launch.worker_start import ForkServer
script, way = sys.argv[1:]
if way == "cold":
    print(0, subprocess.Popen(cold_command([sys.executable, "-u", script]), start_new_session=True).pid, file=sys.stderr)
else:
    server = ForkServer(["none.py"], [], Workers())
    server.wait_ready()
    print(server.pid, server.fork([script], dict(os.environ), [0, 1, 2]).pid, file=sys.stderr)
signal.pause()
"""


class TestLifetime:
    def test_a_worker_outlives_its_server(self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output) -> None:
        server = serve()
        worker = output.start(server, write(tmp_path / "script.py", SLEEP.format(TELL)))
        output.wait_for("asleep")
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ForkServerError, match="no longer serves: it has died with status -9"):
            server.fork(["none.py"], {}, [])
        assert server.lost
        assert worker.poll() is None
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(30) == 0
        assert output.out.read_text() == "asleep\ntold to go\n"

    def test_a_signal_to_all_processes_of_a_job_does_not_end_the_server(
        self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        """As service managers and schedulers send it; the workers' own handlers and default actions are as ever."""
        server = serve()
        assert server.wait_ready() is None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(server.pid, signum)
        worker = output.start(server, write(tmp_path / "script.py", SLEEP.format("")))
        output.wait_for("asleep")
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(30) == -signal.SIGTERM

    @pytest.mark.parametrize("way", ["forked", "forked by a server that has died", "cold"])
    def test_when_its_launcher_is_dead_a_worker_is_dead_and_told_nothing(self, way: str, tmp_path: Path) -> None:
        """So is what it has started, if its server lives. Told to go, Lightning's rank 0 would take all other hosts along."""
        child = "import subprocess; subprocess.Popen(['sleep', '600'])\n" if way == "forked" else ""
        script = write(tmp_path / "script.py", child + SLEEP.format(TELL))
        command = [sys.executable, "-c", LAUNCHER, script, way]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as launcher:  # type: ignore[call-overload]
            server, worker = [int(pid) for pid in launcher.stderr.readline().split()]
            assert launcher.stdout.readline() == "asleep\n"
            if way.endswith("died"):
                os.kill(server, signal.SIGKILL)
            launcher.kill()
            assert launcher.stdout.read() == ""  # to the end: nobody has it open any more
        assert gone(worker)
        assert not server or gone(server)

    @pytest.mark.parametrize("flag", [forkserver.SIGNAL_GROUP, 1 << 9], ids=["this kernel", "one that does not know the flag"])
    def test_of_a_session_everybody_is_killed_and_nobody_who_has_its_number_by_now(
        self, flag: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(forkserver, "SIGNAL_GROUP", flag)
        command = ["sh", "-c", "sleep 60 & echo $!"]
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as leader:
            worker = os.pidfd_open(leader.pid)
            orphan = int(leader.stdout.readline())  # type: ignore[union-attr]
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
            forkserver.see_off({stranger.pid: worker})
            assert stranger.poll() is None
            stranger.kill()
        forkserver.see_off({leader.pid: worker})
        os.close(worker)
        assert gone(orphan)

    def test_a_slow_server_is_waited_for_and_not_given_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        server = serve()
        worker = output.start(server, write(tmp_path / "script.py", SLEEP.format(TELL)))
        output.wait_for("asleep")
        monkeypatch.setattr("gemini_ft.launch.worker_start.ANSWER_SECONDS", 0.1)
        os.kill(server.pid, signal.SIGSTOP)
        never = write(tmp_path / "never.py", f"open({str(tmp_path / 'begun')!r}, 'w')")
        for reason in ("within 0.1 s", "yet"):
            with pytest.raises(ForkServerError, match=f"is slow: it has not answered {reason}"):
                server.fork([never], os.environ, [0, 1, 2])
        assert worker.poll() is None
        os.kill(server.pid, signal.SIGCONT)
        monkeypatch.setattr("gemini_ft.launch.worker_start.ANSWER_SECONDS", 30.0)
        assert is_readable(server.channel.fileno(), 30)  # the late answer
        again = server.fork([write(tmp_path / "again.py", "")], os.environ, [0, 1, 2])
        assert again.wait(30) == 0
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(30) == 0
        server.close()
        assert not (tmp_path / "begun").exists()  # it would run in a job that has gone on without it

    def test_a_server_that_cannot_fork_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        write(tmp_path / "culprit.py", "import os, errno\ndef fork(): raise BlockingIOError(errno.EAGAIN, 'too many')\nos.fork = fork")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        server = serve("culprit")
        with pytest.raises(ForkServerError, match=r"cannot fork: .*too many"):
            output.start(server, "none.py")
        assert not server.lost

    def test_a_worker_is_the_launchers_child(self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output) -> None:
        worker = output.start(serve(), write(tmp_path / "script.py", "import os\nprint(os.getppid())"))
        assert worker.wait(30) == 0
        assert output.out.read_text() == f"{os.getpid()}\n"

    def test_its_pid_stays_the_workers_until_the_end_has_been_seen(
        self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output
    ) -> None:
        worker = output.start(serve(), write(tmp_path / "script.py", "print('done')"))
        output.wait_for("done")
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(0)
        end = time.monotonic() + 30
        # once its end has been seen the pid is free: look at it only before that
        while worker.returncode is None and Path(f"/proc/{worker.pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < end
        if worker.returncode is None:
            os.killpg(worker.pid, signal.SIGTERM)  # torch's launcher does, and would fail with ProcessLookupError
        assert worker.wait(30) == 0

    def test_waiting_has_an_end(self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output) -> None:
        worker = output.start(serve(), write(tmp_path / "script.py", SLEEP.format("")))
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.1)


class TestRefusal:
    """Each fault is made by a module that is imported: as CUDA would be used, a thread started, and so on, by a library."""

    @pytest.fixture
    def refusal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., ForkServer]) -> Callable[..., str | None]:
        def refusal(source: str, *before: str) -> str | None:
            write(tmp_path / "culprit.py", source)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
            return serve(*before, "culprit").wait_ready()

        return refusal

    def test_a_failing_import(self, refusal: Callable[..., str | None]) -> None:
        assert refusal("raise OSError('no licence')") == "import culprit failed: OSError: no licence"

    def test_a_module_that_is_not_installed_is_left_to_the_script(
        self, serve: Callable[..., ForkServer], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert serve("no_such_module").wait_ready() is None
        assert capfd.readouterr().err == "gemini run: no_such_module is not imported ahead: No module named 'no_such_module'\n"

    def test_a_module_that_may_be_missing_or_fail(
        self, serve: Callable[..., ForkServer], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "fails.py", "raise OSError('no licence')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        assert serve("no_such_module?", "fails?").wait_ready() is None
        assert capfd.readouterr().err == ""

    def test_a_thread(self, refusal: Callable[..., str | None]) -> None:
        source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='poller', daemon=True).start()"
        assert refusal(source) == "the imports have started threads, which a fork does not take along: poller"

    def test_cuda_in_use(self, refusal: Callable[..., str | None]) -> None:
        # Without a GPU CUDA cannot really be initialised: this sets the flag that torch sets then.
        assert refusal("import torch\ntorch.cuda._initialized = True", "torch") == (
            "the imports have initialised CUDA, which cannot be used after a fork"
        )

    def test_cuda_asked_for_its_devices(self, refusal: Callable[..., str | None]) -> None:
        # The same for the mark that torch leaves on a child whose parent has only counted the devices.
        assert refusal("import torch\ntorch.cuda._is_in_bad_fork = lambda: True", "torch") == (
            "the imports have asked CUDA for its devices, so that it cannot be used after a fork"
        )

    @pytest.mark.gpu
    def test_cuda_really_in_use(self, refusal: Callable[..., str | None]) -> None:
        assert "initialised CUDA" in str(refusal("import torch\ntorch.ones(1, device='cuda')", "torch"))

    @pytest.mark.gpu
    def test_torch_and_lightning_leave_cuda_alone(self, tmp_path: Path, serve: Callable[..., ForkServer], output: Output) -> None:
        server = serve("torch", "torch._dynamo", "lightning")
        script = write(tmp_path / "script.py", "import torch\nprint(torch.ones(2, device='cuda').sum().item())")
        assert output.start(server, script).wait(60) == 0, output.err.read_text()
        assert output.out.read_text() == "2.0\n"

    def test_a_pool_of_openmp_threads(self, refusal: Callable[..., str | None]) -> None:
        patience = "import gemini_ft.launch.forkserver, torch\ngemini_ft.launch.forkserver._TRIAL_SECONDS = 3.0\n"
        refused = refusal(patience + "torch.set_num_threads(4)\ntorch.ones(1 << 22).exp().sum()", "torch")
        assert refused == "a child forked after the imports hung for 3 s in a tensor operation"

    def test_a_server_that_dies_while_importing(
        self, serve: Callable[..., ForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "culprit.py", "import os\nos._exit(7)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(ForkServerError, match="it has died with status 7"):
            serve("culprit").wait_ready()


class TestSeam:
    """Where torch's launcher is given forked workers."""

    STARTER = "get_subprocess_handler"

    def test_afterwards_torch_is_as_before(self) -> None:
        before = getattr(torch_api, self.STARTER)
        with contextlib.suppress(ZeroDivisionError), forked_workers(["none.py"], []):
            assert getattr(torch_api, self.STARTER) is not before
            raise ZeroDivisionError
        assert getattr(torch_api, self.STARTER) is before

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_only_a_plain_python_command_is_forked(self, wrapped: bool, tmp_path: Path) -> None:
        script = write(tmp_path / "script.py", "print(open('/proc/self/cmdline').read())")
        with forked_workers([script], []):
            handler = getattr(torch_api, self.STARTER)(
                entrypoint="/usr/bin/env" if wrapped else sys.executable,
                args=(*([sys.executable] if wrapped else []), "-u", script),
                env={},
                stdout=str(tmp_path / "out"),
                stderr="",
                local_rank_id=0,
                numa_options=None,
            )
            assert handler.proc.wait(30) == 0
            handler._stdout.close()  # torch leaves it to the collector
        assert ("gemini_ft.launch.forkserver" in (tmp_path / "out").read_text()) is not wrapped
