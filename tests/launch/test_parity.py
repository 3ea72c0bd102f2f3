"""``gemini run`` beside torchrun: a table of scripts, and every difference in the documented table."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from parity_kit import BEGIN, DIFFERENCES, END, LAUNCHERS, PAGE, Outcome, differences, run, table

FOLDER = Path(__file__).parents[1] / "kit" / "parity"
SAY = """
import json, os, sys
said = [os.environ["RANK"], 0, {"argv": sys.argv, "path": sys.path[0], "name": __name__}, {}]
sys.stdout.write(json.dumps(said) + "\\n")
"""


REPORT = ("report.py", 2, "--max-restarts", "1")
WORK = ("work.py", 1)


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The outcome of a script under a launcher, where it runs once; in the same folder under all."""
    folder = tmp_path_factory.mktemp("jobs") / "job"

    @functools.cache
    def outcome_of(launcher: str, script: str, workers: int, *arguments: str) -> Outcome:
        folder.mkdir()
        shutil.copy(FOLDER / script, folder)
        outcome = run(launcher, [*arguments, script, "--lr", "a b", ""], folder, workers)
        folder.rename(folder.with_name(f"{script} under {launcher}"))
        assert outcome.status == 0, outcome.err
        assert outcome.lines, outcome.err
        return outcome

    return outcome_of


def test_under_torchrun_processes_report_what_they_see(outcome_of: Callable[..., Outcome]) -> None:
    assert [line[:2] for line in outcome_of("torchrun", *REPORT).lines] == [["0", 0], ["0", 1], ["1", 0], ["1", 1]]


OURS = pytest.mark.parametrize("launcher", ["gemini run", pytest.param("gemini run --cold", marks=pytest.mark.soak)])


@OURS
def test_what_a_process_sees_of_itself(launcher: str, outcome_of: Callable[..., Outcome]) -> None:
    """In two ranks and two attempts; the differences are those of the table, no more and no less."""
    differing = differences(outcome_of("torchrun", *REPORT), outcome_of(launcher, *REPORT))
    documented = {name for name, (launchers, _) in DIFFERENCES.items() if launcher in launchers}
    assert differing.keys() == documented, str({name: differing.get(name) for name in differing.keys() ^ documented})


@pytest.mark.soak
@OURS
def test_what_scripts_do_with_further_processes(launcher: str, outcome_of: Callable[..., Outcome]) -> None:
    """Pools, executors and loaders of each start method, with classes of __main__."""
    assert differences(outcome_of("torchrun", *WORK), outcome_of(launcher, *WORK)) == {}


def test_the_documented_table_is_the_one_that_is_checked() -> None:
    assert BEGIN + table() + END in PAGE.read_text(), "run: python tests/kit/parity_kit.py"


@pytest.mark.parametrize(
    "launcher", ["gemini run", *(pytest.param(name, marks=pytest.mark.soak) for name in ("torchrun", "gemini run --cold"))]
)
@pytest.mark.parametrize("through", ["-", *(pytest.param(name, marks=pytest.mark.soak) for name in ("/dev/stdin", "fifo"))])
def test_a_script_through_a_pipe(through: str, launcher: str, tmp_path: Path) -> None:
    """Two ranks run it under gemini run; under torchrun they would race for its text."""
    workers, stdin = (1 if launcher == "torchrun" else 2), "" if through == "fifo" else SAY
    writer = None
    if through == "fifo":
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "text").write_text(SAY)
        writer = subprocess.Popen(["cp", str(tmp_path / "text"), str(tmp_path / "fifo")])
    outcome = run(launcher, [through, "--lr", "1"], tmp_path, workers, stdin)
    assert outcome.status == 0, outcome.err
    assert writer is None or writer.wait(30) == 0
    path = {"-": "", "fifo": str(tmp_path)}.get(through, "")
    for line in outcome.lines if through == "/dev/stdin" else ():
        line[2]["path"] = ""  # as Python has it: a folder of this process in /proc
    expected = {"argv": [through, "--lr", "1"], "path": path, "name": "__main__"}
    assert outcome.lines == [[str(rank), 0, expected, {}] for rank in range(workers)]


CASES = {
    "exit 3": "import sys; sys.exit(3)",
    "text at exit": "import sys; sys.exit('said at the end')",
    "exception": "raise ValueError('the reason')",
    "exception whose text fails": "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
    "five megabytes of exception": "raise ValueError('x' * 5_000_000)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "os._exit": "import os; os._exit(0)",
    "exit in a thread": "import sys, threading; threading.Thread(target=sys.exit, args=(3,)).start()",
    "syntax": "this is not Python",
    "warnings are errors": "import warnings; warnings.simplefilter('error'); import json",
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_endings(case: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CASES[case])
    outcomes = {launcher: run(launcher, ["--max-restarts", "0", "script.py"], tmp_path) for launcher in LAUNCHERS}
    assert len({outcome.status for outcome in outcomes.values()}) == 1
    assert len({"exitcode  : " in outcome.err and outcome.err.split("exitcode  : ")[1].split()[0] for outcome in outcomes.values()}) == 1
    for outcome in outcomes.values():
        assert len(outcome.err) < 5_020_000  # not twice


FAILS = """
import atexit, io, sys, threading, time, weakref
sys.stdout = io.TextIOWrapper(sys.stdout.detach())
class Last:
    def __del__(self, sleep=time.sleep, seconds=float(sys.argv[1])):
        sleep(seconds)
file, last = open("kept", "w"), Last()
file.write("kept")
def unregister():  # not where the interpreter is not taken apart
    assert sys.argv[1] == "0" or print("unregistered", flush=True)
unregister.__module__ = "torch.library"
weakref.finalize(last, unregister), weakref.finalize(last, print, "finalizer", flush=True)
weakref.finalize(last, weakref.proxy(type("Gone", (), {})())).atexit = False  # nobody may look at it
atexit.register(lambda: print("exit handler", sys.last_value, flush=True))
threading.Thread(target=lambda: (time.sleep(0.3), print("thread", flush=True))).start()
raise ValueError("the reason")
"""


def test_a_script_that_fails_ends_as_under_python_but_is_not_taken_apart(tmp_path: Path) -> None:
    """The other ranks wait for its end, and modules of torch and Lightning take half a second."""
    (tmp_path / "fails.py").write_text(FAILS)
    found = []
    for program in (["fails.py", "0"], ["-c", "from gemini_ft.launch.script import run; run(['fails.py', '60'])"]):
        begin = time.monotonic()
        done = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        found.append((done.returncode, done.stdout, done.stderr.splitlines()[-1], (tmp_path / "kept").read_text()))
    assert found == [(1, "thread\nexit handler the reason\nfinalizer\n", "ValueError: the reason", "kept")] * 2
    assert time.monotonic() - begin < 30.0


@pytest.mark.parametrize(("hook", "status", "said"), [("print", 0, "ended=3\n"), ("1 .real", 1, "")])
def test_a_script_has_ended_well_only_once_what_is_called_at_its_end_has(hook: str, status: int, said: str, tmp_path: Path) -> None:
    """DeepSpeed's last snapshot may fail there; the launcher had named the rank as one that had ended with status 0."""
    script, notes = tmp_path / "ends.py", tmp_path / "notes"
    for path in (script, notes):
        path.touch()
    program = f"from gemini_ft.launch import hooks, script; hooks.at_end[lambda: ({hook})()] = None; script.run([{str(script)!r}])"
    environ = os.environ | {"GEMINI_NOTES_FILE": str(notes), "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, notes.read_text()) == (status, said), done.stderr


ODD = ["a b/ü'$x.py", "link.py", "-m module", "-m package", "-m cProfile -s calls script.py"]
ENVIRONMENTS = [{"PYTHONDEVMODE": "1"}, {"PYTHONWARNINGS": "error::ResourceWarning"}, {"PYTHONHASHSEED": "7"}, {"PYTHONSAFEPATH": "1"}]


@pytest.mark.soak
@pytest.mark.parametrize(("odd", "environ"), [*((odd, {}) for odd in ODD), *(("script.py", environ) for environ in ENVIRONMENTS)])
def test_odd_names_and_environments(odd: str, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    for path in ("script.py", "a b/ü'$x.py", "module.py", "package/__main__.py", "package/__init__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("" if "__init__" in path else SAY)
    (tmp_path / "link.py").symlink_to("a b/ü'$x.py")
    arguments = odd.split() if odd.startswith("-m") else [odd]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(tmp_path)]))
    outcomes = {launcher: run(launcher, arguments, tmp_path, PYTHONPATH=path, **environ) for launcher in LAUNCHERS}
    assert {outcome.status for outcome in outcomes.values()} == {0}, [outcome.err for outcome in outcomes.values()]
    assert outcomes["gemini run"].lines == outcomes["gemini run --cold"].lines == outcomes["torchrun"].lines
    assert len(outcomes["torchrun"].lines) == 1
    assert "unclosed" not in outcomes["gemini run"].err
