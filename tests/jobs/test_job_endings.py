"""How a job ends and comes back, as its user starts it: the same command again, Ctrl-C, and the end of the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit import agent_pid, end_agent, eventually

from gemini_ft.errors import RunAliveError
from gemini_ft.events import read_events
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

SCRIPT = """
import sys, time
import torch
import gemini_ft
from torch.nn.parallel import DistributedDataParallel

gemini_ft.init_process_group("gloo") if "WORLD_SIZE" in __import__("os").environ else None
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
if torch.distributed.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
for iteration in range(checkpointer.resume(), int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpointer.step()
    time.sleep(0.02)
checkpointer.close()
"""


WORLD = ["--standalone", "--nproc-per-node", "2"]
COMMANDS = {
    "python": [sys.executable, "-X", "warm"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", *WORLD],
    "gemini run": [sys.executable, "-m", "gemini_ft.cli.main", "run", *WORLD],
}
# The status after Ctrl-C; torch's launcher shows an error of its own.
INTERRUPTED = {"python": -signal.SIGINT, "torchrun": 1, "gemini run": 130}
# What is left at the end: registered before all else, it runs after all other handlers.
NAMES_THREADS = "import atexit, threading\natexit.register(lambda: print([each.name for each in threading.enumerate()]))\n"
CALLS_TORCH = """
import time, torch
def call_torch(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.zeros(2, 3).view(3, 2)
        time.sleep(0.0005)
"""


class Command:
    """One command, started as often as a test likes; what is left of it is killed at the end."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.run = name, f"ending-{os.getpid()}-{folder.name}"
        self._folder, self._command = folder, COMMANDS[name]
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(SCRIPT)

    def start(self, steps: int, **environ: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            **environ,
            "GEMINI_RUN_ID": self.run,
            "GEMINI_HOST_ID": "here",
            "GEMINI_LOG_DIR": str(self._folder),
            "GEMINI_EVENTS": str(self._folder / "events"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        with open(self._folder / "output", "ab") as output:
            command = [*self._command, str(self._folder / "train.py"), str(steps)]
            process = subprocess.Popen(
                command,
                env=environ,
                cwd=self._folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def status(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status; of a process that does not end, its stacks are shown."""
        try:
            return process.wait(120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(30)
            pytest.fail(f"{process.args} did not end:\n{self.output[-8000:]}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self._folder / "events") if event["event"] == kind]

    def wait_for_commit(self, iteration: int) -> None:
        eventually(lambda: any(event["iteration"] >= iteration for event in self.events("committed")), f"the commit of {iteration}")

    @property
    def output(self) -> str:
        return (self._folder / "output").read_text()

    def edit(self) -> None:
        """The script is another, and does the same."""
        (self._folder / "train.py").write_text(f"{SCRIPT}# edited\n")

    def agent(self) -> int | None:
        return agent_pid(self.run, "here")

    def workers(self) -> set[int]:
        return {event["pid"] for event in self.events("joined")}

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Launcher and workers, and nothing else."""
        for pid in {process.pid, *self.workers()}:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(30)
        for pid in self.workers():
            eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}/exe") or os.kill(pid, signal.SIGKILL), f"the end of {pid}")
        end_agent(self.run, "here")


@pytest.fixture(params=["python", pytest.param("torchrun", marks=pytest.mark.soak), "gemini run"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path, request.param)
    yield command
    command.end()


def test_a_job_that_was_killed_as_a_whole_goes_on_and_its_end_is_the_agents(command: Command) -> None:
    """While it lives, the same command is refused; what another launch has left is resumed, and that is said."""
    first = command.start(100_000, LR="0.1")
    command.wait_for_commit(3)
    agent = command.agent()
    again = command.start(100_000)
    assert command.status(again) == (RunAliveError.exit_status if command.name == "gemini run" else 1)
    assert f"is alive on host here: process {first.pid} has run it since" in command.output
    assert "GEMINI_RUN_ID=NAME" in command.output
    assert first.poll() is None
    assert len({event["at"] for event in command.events("joined")}) == len(command.workers())
    command.kill(first)
    assert command.agent() == agent
    command.edit()
    second = command.start(100_000, LR="0.5")
    eventually(lambda: command.events("resumed"), "the resumption")
    assert command.events("resumed")[0]["iteration"] >= 3
    assert command.agent() == agent
    assert "what another launch has left is resumed" in command.output
    assert "LR was '0.1' and is '0.5'" in command.output
    assert "train.py is another than it was" in command.output
    second.send_signal(signal.SIGINT)
    assert command.status(second) == INTERRUPTED[command.name]
    eventually(lambda: command.agent() is None, "the leaving of the agent after Ctrl-C")


@pytest.mark.taken_apart("plain loop")
def test_a_finished_job_leaves_nothing_behind(command: Command) -> None:
    assert command.status(command.start(5)) == 0
    eventually(lambda: command.agent() is None, "the leaving of the agent")
    assert [event["finished"] for event in command.events("left")] == [True] * len(command.workers())
    if command.name == "gemini run":
        assert command.status(command.start(5)) == 0
        assert not command.events("resumed")


def test_a_child_that_fails_is_lost(tmp_path: Path) -> None:
    """Torch ends it by `sys.exit(1)`, of which Python leaves nothing to what runs at the exit: it was taken for a good end."""
    command = Command(tmp_path, "python")
    try:
        (tmp_path / "train.py").write_text(
            "import torch\n"
            f"SCRIPT = {SCRIPT.replace('checkpointer.close()', '1 / 0')!r}\n"
            "def train(_):\n"
            "    exec(SCRIPT, {'__name__': 'child'})\n"
            "if __name__ == '__main__':\n"
            "    torch.multiprocessing.spawn(train)\n"
        )
        assert command.status(command.start(3)) == 1
        assert "ZeroDivisionError" in command.output
        eventually(lambda: command.events("lost"), "the loss")
        assert [event["cause"] for event in command.events("lost")] == ["died"]
    finally:
        command.end()


def test_memory_stays_after_a_crash_and_a_signal_and_after_ctrl_c_what_is_stored(tmp_path: Path) -> None:
    options = {"STORAGE__URL": (tmp_path / "store").as_uri(), "STORAGE__EVERY_STEPS": "4", "STATE_DIR": str(tmp_path / "state")}
    environ = {f"GEMINI_{name}": value for name, value in options.items()} | {"PET_MAX_RESTARTS": "0"}
    command = Command(tmp_path, "gemini run")
    try:
        crashing = command.start(100_000, GEMINI_FAULTS="step=7:rank=1:sigkill", GEMINI_FAULTS_DIR=str(tmp_path), **environ)
        assert command.status(crashing) == 1, command.output
        agent = command.agent()
        for sent, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            committed = max(event["iteration"] for event in command.events("committed"))
            process = command.start(100_000, **environ)
            command.wait_for_commit(committed + 8)
            assert command.agent() == agent
            assert command.events("resumed")[-1]["iteration"] >= committed
            process.send_signal(sent)
            assert command.status(process) == status, command.output
        eventually(lambda: command.agent() is None, "the leaving of the agent after Ctrl-C")
        stored = max(each.version.iteration for each in list_checkpoints(open_storage(environ["GEMINI_STORAGE__URL"])))
        assert command.status(command.start(stored + 1, **environ)) == 0, command.output
        assert command.events("resumed")[-1]["iteration"] == stored > committed
    finally:
        command.end()


@pytest.mark.parametrize(("width", "seconds"), [(4, 1.0), (2_000_000, 0.8)], ids=["soon over", "longer than it is waited for"])
def test_a_script_that_ends_during_a_copy_ends_well(tmp_path: Path, width: int, seconds: float) -> None:
    """Left alone, a thread in the middle of torch would abort the process now and then, so each must have ended: the one that copies, and
    the one that touches the slots' pages, which frees their tensors when it ends."""
    (tmp_path / "train.py").write_text(
        NAMES_THREADS + CALLS_TORCH + "from gemini_ft.state.copy_plan import MappedSlot\n"
        "from gemini_ft.worker import snapshot\n"
        "snapshot._END_SECONDS = 2.0\n"
        "write = MappedSlot.write\n"
        "begun = threading.Event()\n"
        "def write_slowly(*arguments):\n"
        "    begun.set()\n"
        f"    call_torch({seconds})\n"
        "    write(*arguments)\n"
        "MappedSlot.write = write_slowly\n"
        + SCRIPT.replace("checkpointer.close()", "begun.wait(60)").replace("time.sleep(0.02)", "").replace("4, 4)", f"4, {width})")
    )
    environ = {**os.environ, "GEMINI_RUN_ID": f"ending-{os.getpid()}", "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_LINGER": "1"}
    done = subprocess.run([sys.executable, "train.py", "1"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['MainThread', 'gemini-agent-client']\n"


def test_threads_that_carry_out_calls_end_before_the_interpreter(tmp_path: Path) -> None:
    calls = "from gemini_ft.ordered import Ordered\nordered = Ordered('calls')\nordered.put(lambda: call_torch(0.3))\n"
    (tmp_path / "train.py").write_text(NAMES_THREADS + CALLS_TORCH + calls)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr
