"""A launcher that is forked from a loaded interpreter is, to who starts it and to others, the process that was asked for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import agent_pid, end_agent, eventually
from warm_python import launchers

from gemini_ft.agent import lifecycle

STORE = [sys.executable, "-u", "-m", "gemini_ft.cli.main", "store", "--host", "127.0.0.1", "--port", "0"]


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with launchers(forked=True):
        yield


def seen(process: subprocess.Popen[Any], file: str) -> list[str]:
    return Path(f"/proc/{process.pid}/{file}").read_text().split("\0")


def is_forked(process: subprocess.Popen[Any]) -> bool:
    return len(seen(process, "cmdline")) > 1000  # where there was room for more


@pytest.mark.parametrize("threads", ["1", "3"])
def test_it_is_the_process_that_was_asked_for(tmp_path: Path, threads: str) -> None:
    """One whose number of threads torch has read already is started anew."""
    environ = os.environ | {"OMP_NUM_THREADS": threads, "MARK": "of this test"}
    pipe = subprocess.PIPE
    with subprocess.Popen(STORE, env=environ, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("store ready on 127.0.0.1:")
            assert is_forked(process) is (threads == "1")
            assert seen(process, "cmdline")[: len(STORE)] == STORE
            assert "MARK=of this test" in seen(process, "environ")
            assert os.readlink(f"/proc/{process.pid}/cwd") == str(tmp_path)
            assert os.getsid(process.pid) == process.pid
            assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        finally:
            process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_its_status_and_words_are_those_of_one_that_is_not() -> None:
    """An argument that is refused."""
    said = []
    for more in ({}, {"OMP_NUM_THREADS": "3"}):
        command = [*STORE[:5], "--port", "none"]
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=120, check=False)
        said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]
    assert said[0][0] == 2


def test_a_worker_of_torchrun_sees_what_one_that_is_not_forked_sees(tmp_path: Path) -> None:
    """But for the modules that are loaded."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nloaded = 'torch' in sys.modules\n"
        "print(loaded, __name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ['RANK'], os.getsid(0) == os.getpid())\n"
        "sys.exit(3)\n"
    )
    said = []
    for threads in ("1", "3"):
        command = [*STORE[:1], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "script.py", "--option"]
        environ = os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert "exitcode  : 3" in done.stderr
        loaded, _, rest = done.stdout.partition(" ")
        assert loaded == str(threads == "1"), done.stderr
        said.append((done.returncode, rest))
    assert said[0] == said[1]


SCRIPT = """
import sys
import torch
import gemini_ft
model = torch.nn.Linear(1, 1)
with gemini_ft.Checkpointer(model, torch.optim.SGD(model.parameters())) as checkpointer:
    checkpointer.resume()
    print("up", flush=True)
    sys.stdin.read()
"""


def test_the_agent_of_a_job_is_forked_from_its_launcher_without_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*STORE[:1], "-m", "gemini_ft.cli.main", "run", "script.py"]
    run = f"warm-{os.getpid()}"
    environ = os.environ | {"GEMINI_RUN_ID": run, "GEMINI_HOST_ID": "here", "GEMINI_LOG_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        agent = Path(f"/proc/{agent_pid(run, 'here')}")
        assert len((agent / "cmdline").read_bytes()) > 1000  # where there was room for more
        assert (agent / "stat").read_text().rpartition(")")[2].split()[1] == str(launcher.pid)
        launcher.communicate()
    assert launcher.returncode == 0


APART = """
import os
import torch
class Late:
    def __del__(self):
        os.write(1, b"taken apart\\n")
late = Late()
"""


@pytest.mark.parametrize("taken_apart", [True, False])
def test_the_interpreter_of_rank_0_is_taken_apart_where_a_test_asks_for_it(tmp_path: Path, taken_apart: bool) -> None:
    (tmp_path / "script.py").write_text(APART)
    command = [*STORE[:1], "-m", "gemini_ft.cli.main", "run", "--nproc-per-node=2", "script.py"]
    environ = os.environ | {"GEMINI_RUN_ID": f"apart-{os.getpid()}"}
    with launchers(forked=True, taken_apart=taken_apart):
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "taken apart\n" * taken_apart), done.stderr


KINDS = ["Fabric", "FSDP2", "Lightning", "Lightning with DeepSpeed", "accelerate", "gradient pipeline", "in place"]
KINDS += ["loaders with workers", "plain loop", "transformers"]


def test_one_test_of_each_kind_of_job_asks_for_it() -> None:
    marks = [re.findall(r'mark\.taken_apart\("([^"]+)"\)', path.read_text()) for path in Path(__file__).parents[1].glob("*/test_*.py")]
    assert sorted(kind for kinds in marks for kind in kinds) == sorted(KINDS)


def settled_descriptors(pid: int) -> dict[str, str]:
    """The open descriptors of a process, by number, once they stay the same for half a second."""
    seen = list[dict[str, str]]()
    while len(seen) < 2 or seen[-1] != seen[-2]:
        time.sleep(0.5)
        seen.append({path.name: os.readlink(path).split(":")[0] for path in Path(f"/proc/{pid}/fd").iterdir()})
    return seen[-1]


def test_an_agent_is_forked_without_torch_and_has_the_descriptors_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path))
    run, memory, found = f"warm-{os.getpid()}", os.memfd_create("of this test"), []
    for forked in (False, True):
        with launchers(forked=forked):
            process = lifecycle.spawn(run, "here", [memory])
        try:
            eventually(lambda: lifecycle.status(run, "here"))
            assert is_forked(process) is forked
            assert seen(process, "cmdline")[1:5] == ["-m", "gemini_ft.agent.main", "--run", run]
            assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
            assert os.getsid(process.pid) == process.pid
            assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
            found.append(settled_descriptors(process.pid))
        finally:
            end_agent(run, "here")
        assert process.wait(30) == -signal.SIGKILL
    os.close(memory)
    assert found[0] == found[1]
