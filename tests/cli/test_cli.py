"""The ``gemini`` command without its long-running parts, and the names of runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from agent_kit import WAIT, eventually
from torch._C._distributed_c10d import TCPStore

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.cli import commands
from gemini_ft.cli import main as cli
from gemini_ft.cli.store import open_store
from gemini_ft.errors import AgentError, ConfigError
from gemini_ft.launch.launched import default_run_id, is_passing
from gemini_ft.wire.messages import pack
from gemini_ft.wire.private import credentials
from gemini_ft.wire.worker_messages import Leave, Status


class TestCommand:
    @pytest.mark.parametrize("arguments", [[], ["--help"], ["-h", "run"]])
    def test_help_names_every_command(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown and command.summary in shown for name, command in cli.COMMANDS.items())

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out == f"{gemini_ft.__version__}\n"

    def test_an_unknown_command_is_named_with_the_known_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["rnu", "train.py"]) == 2
        assert f"gemini: unknown command 'rnu'; there are: {', '.join(cli.COMMANDS)}" in capsys.readouterr().err

    @pytest.mark.parametrize(("error", "status"), [(ConfigError("port=0: no"), 2), (AgentError("it is gone"), 1)])
    def test_an_error_is_one_line(
        self, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(argv: Sequence[str]) -> int:
            assert argv == ["--all"]
            raise error

        monkeypatch.setattr("gemini_ft.cli.store.command", fail)
        assert cli.main(["store", "--all"]) == status
        assert capsys.readouterr().err == f"gemini store: {error}\n"

    @pytest.mark.parametrize("arguments", [["status", "--run-id"], ["leave", "--run-id"], ["drain", "--run-id", "r", "--host"]])
    def test_a_name_that_is_no_text_is_a_wrong_argument(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """As Python gives bytes of the command line that are no UTF-8."""
        assert cli.main([*arguments, "r\udcff"]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith(f"gemini {arguments[0]}: ")
        assert "\\udcff" in told

    @pytest.mark.parametrize("name", cli.COMMANDS)
    def test_every_command_exists_and_explains_itself(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])
        assert f"usage: gemini {name} " in capsys.readouterr().out

    def test_bash_completes_commands_and_options(self, tmp_path: Path) -> None:
        script = f"""
            gemini() {{ {sys.executable} -m gemini_ft.cli.main "$@"; }}
            eval "$(gemini completion bash)"
            complete() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gemini; echo "${{COMPREPLY[@]}}"; }}
            complete gemini ex
            complete gemini export --over
            complete gemini export fol
        """
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
        assert done.stdout == "export\n--overwrite\n\n", done.stderr

    def test_help_of_no_command_imports_torch(self) -> None:
        """But that of ``gemini run``, which shows torch's own options."""
        code = """
            import contextlib, sys
            from gemini_ft.cli import main as cli
            for name in cli.COMMANDS.keys() - {"run"}:
                with contextlib.suppress(SystemExit):
                    cli.main([name, "--help"])
                assert "torch" not in sys.modules, name
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.DEVNULL, timeout=60, check=True)

    @pytest.mark.parametrize("arguments", [["--help"], ["ps"]])
    def test_a_reader_that_has_gone_is_no_failure_of_ours(self, arguments: list[str]) -> None:
        """As `gemini ... | head` does it: the status is that of a program which SIGPIPE ends, and nothing is said."""
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "gemini_ft.cli.main", *arguments]
        with open(writing, "wb") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")

    def test_nothing_is_imported_before_the_command_is_known(self) -> None:
        code = "import sys, gemini_ft.cli.main; gemini_ft.cli.main.main([]); print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.endswith("set()\n")


class TestStore:
    def test_it_listens_where_it_was_told_and_nowhere_else(self) -> None:
        store = open_store("127.0.0.1", 0)
        store.set("key", "value")
        client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
        assert client.get("key") == b"value"
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", store.port)) != 0

    @pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
    def test_where_it_cannot_listen_it_says_so(self, host: str) -> None:
        store = open_store("127.0.0.1", 0)
        with pytest.raises(ConfigError, match=rf"cannot listen on {host}:{store.port} \(.*\); give an address of this machine and a free"):
            open_store(host, store.port)

    def test_a_port_that_is_none_is_not_another_one(self) -> None:
        command = [sys.executable, "-m", "gemini_ft.cli.main", "store", "--port", "99999"]  # this process would keep the signals blocked
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        refusal = "cannot listen on 0.0.0.0:99999 (the largest port is 65535); give an address of this machine and a free port"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gemini store: {refusal}\n")


def document(run: str, *, workers: bool = True, finished: bool = False) -> dict[str, Any]:
    """As an agent tells of itself."""
    storage = {
        "url": "file:///store",
        "uploading": None,
        "stored": 40,
        "stored_at": time.time() - 120.4,
        "failing_since": None,
        "error": "",
    }
    stream = {
        "incarnation": "1-x",
        "world_size": 1,
        "committed": 42,
        "committed_age": 90.4,
        "command": ["train.py", "a"],
        "finished": finished,
    }
    stream |= {"shards": {"0": ["free:-"]}, "excluded": [], "gradients": {}, "storage": storage}
    about = {
        "run": run,
        "host": "here",
        "pid": 7,
        "memory": {"limit": 10**6, "used": 1000},
        "linger": 1800.0,
        "idle": 0.0 if workers else 600.0,
    }
    return {**about, "launches": [], "workers": {"0": 8} if workers else {}, "streams": {"main": stream}}


class TestRuns:
    def shown(self, documents: list[dict[str, Any]], *command: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("GEMINI_RUN_ID", raising=False)
            patch.setattr(commands, "documents_of", lambda host: documents)
            return cli.main([*command])

    def test_ps_has_a_line_for_each(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.shown([document("one"), document("two", workers=False), document("three", workers=False, finished=True)], "ps") == 0
        assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
            ["run", "host", "command", "state", "step", "age", "memory", "linger", "left"],
            ["one", "here", "train.py", "a", "training", "42", "1.5", "min", "1,000", "-"],
            ["two", "here", "train.py", "a", "ended", "42", "1.5", "min", "1,000", "20.0", "min"],
            ["three", "here", "train.py", "a", "finished", "42", "1.5", "min", "1,000", "20.0", "min"],
        ]

    def test_status_has_the_verdict_on_the_last_hang(self, capsys: pytest.CaptureFixture[str]) -> None:
        hung = document("one")
        hung["streams"]["main"]["hang"] = {"cause": "left", "ranks": [1], "text": "rank 1 is done", "report": "/logs/hang.txt"}
        assert self.shown([hung], "status") == 0
        assert "last hang: rank 1 is done; /logs/hang.txt has the report" in capsys.readouterr().out

    def test_status_names_the_stragglers(self, capsys: pytest.CaptureFixture[str]) -> None:
        for slow, lines in (([1, 3], ["stragglers: ranks [1, 3]"]), ([], [])):
            limping = document("one")
            limping["streams"]["main"]["stragglers"] = slow
            assert self.shown([limping], "status") == 0
            assert [line.strip() for line in capsys.readouterr().out.splitlines() if "straggler" in line] == lines

    def test_status_finds_the_only_run_and_says_ages_in_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.shown([document("one")], "status") == 0
        shown = capsys.readouterr().out
        assert "committed iteration 42, 1.5 min ago" in shown
        assert "stored: iteration 40, 2.0 min ago, 2 steps behind memory" in shown

    def test_of_several_runs_one_must_be_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.shown([document("one"), document("two")], "status") == 2
        assert "which run? give --run-id or set GEMINI_RUN_ID; here are one, two (gemini ps)" in capsys.readouterr().err

    def test_where_there_is_none_that_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert [self.shown([], "ps"), self.shown([], "status", "--host", "here")] == [0, 1]
        assert capsys.readouterr().out == "no run has an agent here\nno agent on host 'here'\n"

    def test_leave_says_what_is_forgotten_and_where_there_is_nothing(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path))
        run = f"leave-{os.getpid()}"
        agent = lifecycle.spawn(run, "here")
        eventually(lambda: lifecycle.is_listening(run, "here"), "the agent")
        leave = ["leave", "--run-id", run, "--host", "here"]
        assert cli.main(leave) == 0
        assert agent.wait(WAIT) == 0
        assert cli.main(leave) == 1
        assert capsys.readouterr().out.splitlines() == [
            f"run {run} is forgotten on host here: 0 bytes of memory; what is in storage stays",
            f"no agent of run {run!r} on host 'here': there is nothing to forget here (gemini ps lists the runs of this host)",
        ]

    def test_leave_says_that_a_run_at_work_keeps_its_memory(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        monkeypatch.setattr(lifecycle, "status", lambda *_: json.dumps(document("one")))
        monkeypatch.setattr(lifecycle, "leave", lambda run, host: told.append(run))
        assert cli.main(["leave", "--run-id", "one"]) == 0
        assert told == ["one"]
        shown = "run one is at work: its workers [8] start another agent and give it the memory back. To forget the run, end it first\n"
        assert capsys.readouterr().out == shown


@contextlib.contextmanager
def hanging_agent(run: str, answers: Sequence[bytes]) -> Iterator[None]:
    """An agent that gives these answers, one to each question of this process, and hangs at the next one.

    Other tests at work on this machine ask every agent of it (``gemini ps``, recovery): it hangs up on their processes, since an answer
    that one of them took would be missing here.
    """
    over, left = threading.Event(), list(answers)

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                asker = listener.accept()[0]
                if credentials(asker)[0] != os.getpid():
                    asker.close()
                    continue
                stack.callback(asker.close)  # called when this thread has ended
                if left:
                    asker.recv(65536)
                    asker.sendall(left.pop(0))

    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(lifecycle.socket_name(run, "here"))
        listener.listen()
        listener.settimeout(0.05)  # so that it sees that the test is over
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


ANSWER = pack(Status(document=json.dumps(document("one", workers=False))))


class TestAgentsThatHang:
    """Nothing is said of what such an agent holds as if it were known."""

    @pytest.fixture(autouse=True)
    def _impatience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lifecycle, "ask", partial(lifecycle.ask, timeout=0.5))
        monkeypatch.setattr(lifecycle, "ANSWER_SECONDS", 0.5)

    @pytest.mark.parametrize("answers", [[], [ANSWER[:50]]], ids=["at once", "within the answer"])
    @pytest.mark.parametrize("command", ["status", "leave", "drain"])
    def test_are_an_error_with_their_process(self, command: str, answers: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
        run = f"hangs-{os.getpid()}"
        with hanging_agent(run, answers):
            assert cli.main([command, "--run-id", run, "--host", "here"]) == 1
        said = capsys.readouterr()
        why = f"the agent of run {run!r} on host 'here' (pid {os.getpid()}) did not answer within 0.5 s"
        assert (said.out, said.err) == ("", f"gemini {command}: {why}\n")

    def test_are_not_said_to_have_left_if_they_hang_when_they_are_told_to(self, capsys: pytest.CaptureFixture[str]) -> None:
        run = f"hangs-{os.getpid()}"
        with hanging_agent(run, [ANSWER]):
            assert cli.main(["leave", "--run-id", run, "--host", "here"]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert f"(pid {os.getpid()}) did not answer within 0.5 s" in said.err

    def test_are_named_where_all_agents_are_asked(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GEMINI_RUN_ID", raising=False)
        run = f"hangs-{os.getpid()}"
        export = ["export", "latest", "--to", str(tmp_path / "out"), "--format", "safetensors", "--run-id", run]
        for command, status in ((["ps"], 0), (["status", "--host", "here"], 1), (["checkpoints", "--run-id", run], 0), (export, 2)):
            caplog.clear()
            with hanging_agent(run, []):
                assert cli.main(command) == status
            assert f" (pid {os.getpid()}) did not answer within 0.5 s; what it holds is left out" in caplog.text

    def test_that_only_wait_for_storage_have_heard_that_they_leave(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ask = lifecycle.ask.func  # all answers but one come
        monkeypatch.setattr(lifecycle, "ask", lambda *question: ask(*question, timeout=0.5 if isinstance(question[-1], Leave) else WAIT))
        run = f"stores-{os.getpid()}"
        ask_first = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(bytes.fromhex(sys.argv[1])); s.send(b'?'); s.recv(1)"
        with hanging_agent(run, [ANSWER, b"", ANSWER]):
            subprocess.run(
                [sys.executable, "-c", ask_first, lifecycle.socket_name(run, "here").hex()], stderr=subprocess.DEVNULL, timeout=WAIT
            )
            assert cli.main(["leave", "--run-id", run, "--host", "here"]) == 0
        shown = f"run {run} has been told to leave host here: its memory goes when the uploads under way are over\n"
        assert capsys.readouterr().out == shown


TELL = "import json, sys\nfrom gemini_ft.launch.launched import default_run_id\nprint(default_run_id())\n"


class TestRunId:
    @pytest.fixture(autouse=True)
    def _scripts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for path in ("train.py", "pkg/train.py", "pkg/__main__.py", "elsewhere/train.py"):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(TELL)
        self.folder = tmp_path
        monkeypatch.chdir(tmp_path)

    def told(self, *program: str, cwd: str = ".") -> str:
        """What a worker works out for itself."""
        done = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=60, check=True, cwd=cwd)
        return done.stdout.strip()

    @pytest.mark.parametrize(
        "program", [["train.py", "--lr", "1"], ["./pkg/../train.py", "--lr", "1"], ["-m", "pkg.train", "a b"], ["-m", "pkg"]]
    )
    def test_launcher_and_worker_agree(self, program: list[str]) -> None:
        run_id = default_run_id(program)
        assert len(run_id) == 16
        assert run_id == self.told(*program)

    def test_the_same_command_is_the_same_run_and_any_other_is_not(self) -> None:
        same = {
            self.told("train.py", "x"),
            self.told("train.py", "x"),
            self.told("./train.py", "x"),
            self.told(os.path.abspath("train.py"), "x"),
        }
        others = {
            default_run_id(["train.py"]),
            default_run_id(["train.py", "y"]),
            default_run_id(["train.py", "x", ""]),
            default_run_id(["pkg/train.py", "x"]),
            default_run_id(["-m", "train", "x"]),
            self.told("../train.py", "x", cwd="elsewhere"),
        }
        assert len(same) == 1
        assert len(same | others) == 7

    def test_workers_of_ray_train_go_by_the_name_of_their_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their command and folder are Ray's, and others on each node and after each restart."""
        plain, found = default_run_id(), {}
        for name, folder in (("one", "pkg"), ("one", "elsewhere"), ("other", "pkg")):
            context = SimpleNamespace(get_experiment_name=lambda name=name: name)
            monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda context=context: context))
            monkeypatch.chdir(self.folder / folder)
            monkeypatch.setattr(sys, "argv", ["default_worker.py", f"--runtime-env-hash={folder}"])
            found[name, folder] = default_run_id()
        assert found["one", "pkg"] == found["one", "elsewhere"]
        assert len({plain, *found.values()}) == 3

        for elsewhere in (RuntimeError("a driver's"), DeprecationWarning("a trial's of Ray Tune")):
            monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=Mock(side_effect=elsewhere)))
            assert default_run_id() not in found.values()

    def test_another_user_has_another_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = default_run_id(["train.py"])
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert default_run_id(["train.py"]) != before

    def test_variables_that_are_named_and_tasks_of_an_array_tell_jobs_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = default_run_id(["train.py"])
        monkeypatch.setenv("LR", "0.1")
        assert default_run_id(["train.py"]) == plain  # what a script reads cannot be known
        monkeypatch.setenv("GEMINI_RUN_ID_VARIABLES", "LR, SEED")
        found = [plain, default_run_id(["train.py"])]
        for name, value in (("LR", "0.5"), ("SEED", "1"), ("SLURM_ARRAY_TASK_ID", "7")):
            monkeypatch.setenv(name, value)
            found.append(default_run_id(["train.py"]))
        assert len(set(found)) == 5

    @pytest.mark.parametrize("program", [["-"], ["-c", "X"], ["fifo"]])
    def test_what_has_no_name_has_no_id_that_outlives_it(self, program: list[str]) -> None:
        os.mkfifo("fifo")
        ids = {
            subprocess.run(
                [sys.executable, *[part.replace("X", TELL) for part in program]],
                input=TELL if program[0] == "-" else None,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for _ in range(2)
            if program[0] != "fifo"
        }
        assert len(ids) == 2 * (program[0] != "fifo")
        assert is_passing(program)
        assert not is_passing(["train.py"])

    def test_a_shell_has_none_either_and_a_script_that_imports_a_kernels_package_has_its_own(self) -> None:
        shell: dict[str, Any] = {"args": [sys.executable, "-i"], "input": TELL, "capture_output": True, "text": True, "timeout": 60}
        assert subprocess.run(**shell).stdout != subprocess.run(**shell).stdout
        Path("ipykernel.py").touch()
        Path("train.py").write_text(f"import ipykernel\n{TELL}")
        assert self.told("train.py") == default_run_id(["train.py"])

    def test_arguments_do_not_run_together(self) -> None:
        commands = [["train.py", "a b"], ["train.py", "a", "b"], ["train.py", json.dumps(["a", "b"])]]
        assert len(set(map(default_run_id, commands))) == 3
