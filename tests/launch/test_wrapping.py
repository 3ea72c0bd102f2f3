"""A worker of ``gemini run`` finds a `deepspeed.initialize` that knows the "gemini" section; tried with a deepspeed in miniature."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_ft.launch import hooks
from gemini_ft.launch.script import starter

DEEPSPEED = """
class Engine:
    def __init__(self, config, optimizer):
        self.config, self.basic_optimizer = config, optimizer
def initialize(config=None, optimizer=1):
    return Engine(config, optimizer), None, None, None
"""
ATTACH = """
def attach(engine):
    engine.config["gemini"]["attached"] = engine.config["gemini"].get("attached", 0) + 1
"""
SCRIPT = """
import sys, gemini_ft
sys.modules["gemini_ft.deepspeed"] = __import__("fake_integration")
{}
import deepspeed
def engine(**named):
    return deepspeed.initialize(**named)[0]
print(engine(config={{"gemini": {{}}}}).config, engine(config={{}}).config, engine(config={{"gemini": {{}}}}, optimizer=None).config)
print(deepspeed.initialize.__name__, deepspeed.__loader__ is deepspeed.__spec__.loader, type(deepspeed.__loader__).__name__, sys.argv)
"""
ATTACHED = "{'gemini': {'attached': 1}} {} {'gemini': {}}"
LEFT_ALONE = "{'gemini': {}} {} {'gemini': {}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("deepspeed", DEEPSPEED), ("fake_integration", ATTACH), ("script", SCRIPT.format(""))):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *command: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"]], ids=["script", "module"])
def test_a_cold_worker(program: list[str], folder: Path) -> None:
    attached, rest = run(folder, *starter("gemini_ft.launch.script"), str(os.getpid()), *program, "--lr", "1")
    assert attached == ATTACHED
    name = str(folder / "script.py") if program[0] == "-m" else "script.py"
    assert rest == f"initialize True SourceFileLoader {[name, '--lr', '1']}"


def test_a_worker_runs_the_package_that_has_started_it(tmp_path: Path) -> None:
    """Also where it is not installed, and without its own modules in the way of others."""
    (tmp_path / "script.py").write_text("import importlib.util\nprint(importlib.util.find_spec('lightning'))\n")
    command = [sys.executable, "-S", *starter("gemini_ft.launch.script"), str(os.getpid()), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize(
    "before", ["import deepspeed", "from gemini_ft.launch import autoprotect; autoprotect.install(); autoprotect.install()"]
)
def test_once_whatever_comes_first(before: str, folder: Path) -> None:
    (folder / "script.py").write_text(
        SCRIPT.format(f"from gemini_ft.launch import autoprotect\n{before}\nautoprotect.install()\nautoprotect.install()")
    )
    assert run(folder, "script.py")[0] == ATTACHED


def test_it_can_be_switched_off(folder: Path) -> None:
    assert run(folder, *starter("gemini_ft.launch.script"), str(os.getpid()), "script.py", GEMINI_WRAP="0")[0] == LEFT_ALONE


def test_other_ways_to_start_a_script_change_nothing(folder: Path) -> None:
    assert run(folder, "script.py")[0] == LEFT_ALONE


def test_an_exception_looks_like_the_scripts_own(folder: Path) -> None:
    (folder / "script.py").write_text("def deep():\n    raise ValueError('the reason')\ndeep()\n")
    results = [
        subprocess.run([sys.executable, *how, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        for how in ([], [*starter("gemini_ft.launch.script"), str(os.getpid())])
    ]
    assert [result.returncode for result in results] == [1, 1]
    expected, seen = (result.stderr.replace(str(folder) + "/", "") for result in results)
    assert seen == expected


@pytest.mark.parametrize("launcher", [["--cold"], []], ids=["cold", "warm"])
def test_under_the_launcher(launcher: list[str], folder: Path) -> None:
    command = ["-m", "gemini_ft.cli.main", "run", "--standalone", "--max-restarts", "0", *launcher, "script.py"]
    assert run(folder, *command, PYTHONPATH=os.pathsep.join([str(folder), *sys.path]), GEMINI_LOG_DIR=str(folder))[0] == ATTACHED


def test_an_installed_finder_stays_out_of_other_imports() -> None:
    finder = hooks.Finder(("deepspeed",), pytest.fail)
    assert finder.find_spec("deepspeed.comm", None) is None
    assert finder.find_spec("json", None) is None
    spec = hooks.Finder(("wave",), pytest.fail).find_spec("wave", None)
    assert "class Wave_read" in spec.loader.get_source("wave")  # as debuggers ask for it
