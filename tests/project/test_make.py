"""The environment is made in stages, the long tests have parts, and what was compiled once for a machine is not compiled again."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# -- the Makefile


def commands(target: str, venv: Path) -> str:
    """The commands that `make` would run in a new clone."""
    variables = [f"VENV={venv}", f"TORCH_EXTENSIONS_DIR={venv / 'torch_extensions'}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of the one that runs the tests
    return subprocess.run(["make", "-n", target, *variables], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_demo_waits_for_no_more_than_it_needs(tmp_path: Path) -> None:
    demo, test = commands("demo", tmp_path / "new"), commands("test", tmp_path / "new")
    assert "'.[lightning]'" in demo
    assert "deepspeed" not in demo
    assert test.startswith(demo[: demo.index("touch")])  # the same stage, and then the rest
    assert "'.[lightning,deepspeed," in test
    assert "scripts/build_deepspeed_ops" in test


def test_nothing_is_installed_where_all_is_there(tmp_path: Path) -> None:
    for number, stamp in enumerate([".demo-is-up-to-date", ".up-to-date", "torch_extensions/.up-to-date"]):
        path = tmp_path / stamp
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (2**33 + number,) * 2)
    for target in ("demo", "test"):
        assert len(commands(target, tmp_path).splitlines()) == 1


def test_every_long_test_is_in_one_part(tmp_path: Path) -> None:
    soak = runpy.run_path(str(ROOT / "scripts" / "soak"))
    found = sorted(file for files in soak["files"]().values() for file in files)
    assert found == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    for number in range(1, 8):
        (tmp_path / f"test_{number}.py").write_text("def test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, "-p", "conftest", "--collect-only", "-q", tmp_path]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "kit")])}
    shares = [
        re.findall(r"test_(\d)\.py", subprocess.run([*command, "--share", share], stdout=subprocess.PIPE, text=True, env=environ).stdout)
        for share in ("1/3", "2/3", "3/3")
    ]
    assert shares == [["1", "2"], ["3", "4"], ["5", "6", "7"]]


def test_soak_without_arguments_says_which_parts_there_are(tmp_path: Path) -> None:
    command = ["make", "soak", f"VENV={tmp_path / 'none'}", f"PYTHON={sys.executable}", "ARGS=", "PART="]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "\n  chaos-1 to -5 " in output
    assert "\n  drain  " in output
    refused = subprocess.run([sys.executable, ROOT / "scripts" / "soak", "--part", "all"], stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 1
    assert refused.stderr.startswith("there is no part 'all' of the long tests; there are chaos-1, ")


# -- the verdict


# Whole runs of the tests fail, or lose a process, as often as FAILS and DIES say; what failed is well the second time unless BROKEN is set.
MAKE = """#!/bin/sh
echo "make $*" >>calls
case "$*" in
    test) echo x >>runs; run=$(wc -l <runs)
        [ "$run" -gt "$DIES" ] || echo "gw1: worker restarting disabled $run"
        [ "$run" -gt "$FAILS" ] || { printf '==== FAILURES ====\\nE first text of run %s\\n' "$run"; exit 1; } ;;
    test*--last-failed*) [ -z "$BROKEN" ] || exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("environ", "runs", "status", "kept"),
    [
        ({}, 1, 0, ""),
        ({"FAILS": "1"}, 1, 0, "==== FAILURES ====\nE first text of run 1\n"),
        ({"FAILS": "1", "BROKEN": "1"}, 1, 1, "==== FAILURES ====\nE first text of run 1\n"),
        ({"FAILS": "1", "DIES": "1"}, 2, 0, "gw1: worker restarting disabled 1\n==== FAILURES ====\nE first text of run 1\n"),
        ({"FAILS": "2", "DIES": "2"}, 2, 1, "gw1: worker restarting disabled 1\n==== FAILURES ====\nE first text of run 1\n"),
    ],
    ids=["all well", "well at the second try", "broken", "a process died", "a process dies"],
)
def test_what_was_well_only_at_the_second_try_is_said_and_kept(
    environ: dict[str, str], runs: int, status: int, kept: str, tmp_path: Path
) -> None:
    for file, text in {".ci/run": (ROOT / ".ci" / "run").read_text(), "bin/make": MAKE, ".venv/bin/python": "#!/bin/sh\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o755)
    variables = {"FAILS": "0", "DIES": "0", "BROKEN": "", **environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert (tmp_path / "runs").read_text().count("x") == runs
    assert ("--last-failed" in (tmp_path / "calls").read_text()) == (runs == 1 and bool(kept))
    found = tmp_path / "build" / "second-try.txt"
    assert (found.read_text() if found.exists() else "") == kept
    told = done.stdout.partition("=== what passed only at the second try (build/second-try.txt) ===\n")[2]
    assert told == (f"{kept}\n=== all green ===\n" if kept and not status else "")


# -- the compiler that remembers


FAKE = """#!/bin/sh
case "$*" in *" -E "*) echo "$PROCESSOR" >&2; exit ;; esac
echo "$@" >>"$LOG"
eval "$MEANWHILE"
while [ $# -gt 0 ]; do case $1 in -o) out=$2 ;; -MF) list=$2 ;; -c) source=$2 ;; esac; shift; done
{ cat "$source"; echo "$PROCESSOR"; } >"$out"
echo "$out: $source $SITE/torch/header.h" >"$list"
"""


BUILDERS = """
import os
class Builder:
    def load(self, verbose):
        os.makedirs(folder := os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam"), exist_ok=True)
        os.path.exists(built := os.path.join(folder, "built")) or open(built, "w").close()
ShareMemCommBuilder = CPUAdamBuilder = FusedAdamBuilder = Builder
"""
CACHING = ROOT / "scripts" / "caching"
EMPTY: Mapping[str, str] = {}


class Machine:
    """Clones of the project on one machine, each with an environment of its own, and a compiler that takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        compiler = folder / "bin" / "c++"
        compiler.parent.mkdir()
        compiler.write_text(FAKE)
        compiler.chmod(0o755)
        (compiler.parent / "python").symlink_to(sys.executable)

    def environment(self, clone: str, *, torch: str = "2.13.0", deepspeed: str = "0.19.8") -> dict[str, str]:
        """The variables of a process in a clone that has these versions."""
        site = self.folder / clone / "site packages"
        for name, version in {"torch": torch, "deepspeed": deepspeed}.items():
            for file, text in {
                f"{name}/__init__.py": "",
                f"{name}/op.cpp": "int one;\n",
                f"{name}/ops/op_builder.py": BUILDERS,
                f"{name}-0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            }.items():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).write_text(text)
        told = {"PYTHONPATH": str(site), "SITE": str(site).replace(" ", "\\ "), "LOG": str(self.folder / "log"), "PROCESSOR": "one"}
        told |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "TORCH_EXTENSIONS_DIR": str(self.folder / clone / "extensions")}
        return os.environ | told | {"PATH": f"{CACHING}:{self.folder / 'bin'}:{os.environ['PATH']}"}

    def start(self, clone: str, flag: str = "-O3", *, versions: Mapping[str, str] = EMPTY, **variables: str) -> subprocess.Popen[bytes]:
        """Compiles in a clone, as ninja does."""
        environ, build = self.environment(clone, **versions) | variables, self.folder / clone / "build"
        build.mkdir(exist_ok=True)
        site = environ["PYTHONPATH"]
        command = [sys.executable, CACHING / "c++", "-MMD", "-MF", "op.o.d", f"-I{site}/torch", flag, "-c", f"{site}/deepspeed/op.cpp"]
        return subprocess.Popen([*command, "-o", "op.o"], cwd=build, env=environ)

    def compile(self, clone: str, *flags: str, versions: Mapping[str, str] = EMPTY, **variables: str) -> int:
        return self.start(clone, *flags, versions=versions, **variables).wait(60)

    @property
    def times(self) -> int:
        """How often something was compiled."""
        return len((self.folder / "log").read_text().splitlines())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_another_clone_has_what_was_compiled_with_its_own_headers(machine: Machine, tmp_path: Path) -> None:
    for clone in ("one", "another"):
        assert machine.compile(clone) == 0
        assert (tmp_path / clone / "build" / "op.o").read_text() == "int one;\none\n"
        site = tmp_path / clone / "site packages"
        escaped = str(site).replace(" ", "\\ ")
        assert (tmp_path / clone / "build" / "op.o.d").read_text().endswith(f" {escaped}/torch/header.h\n")
        shutil.rmtree(site)
    assert machine.times == 1


@pytest.mark.parametrize(
    ("flags", "versions", "processor"),
    [((), {}, "another"), ((), {"torch": "2.14.0"}, "one"), ((), {"deepspeed": "0.19.9"}, "one"), (("-O2",), {}, "one")],
    ids=["processor or compiler", "torch", "DeepSpeed", "options"],
)
def test_what_differs_is_compiled_again(
    machine: Machine, tmp_path: Path, flags: tuple[str, ...], versions: dict[str, str], processor: str
) -> None:
    assert machine.compile("one") == 0
    assert machine.compile("another", *flags, versions=versions, PROCESSOR=processor) == 0
    assert machine.times == 2
    assert (tmp_path / "another" / "build" / "op.o").read_text() == f"int one;\n{processor}\n"


def test_two_at_once_compile_once(machine: Machine) -> None:
    both = [machine.start(clone, MEANWHILE="sleep 1") for clone in ("one", "another")]
    assert [process.wait(60) for process in both] == [0, 0]
    assert machine.times == 1


def test_one_that_was_cut_off_is_begun_anew(machine: Machine, tmp_path: Path) -> None:
    assert machine.compile("one", MEANWHILE="echo half >op.o; kill -9 $PPID; exit 1") == -9
    assert machine.compile("another", MEANWHILE="exit 3") == 3
    assert machine.compile("one") == 0
    assert (tmp_path / "one" / "build" / "op.o").read_text() == "int one;\none\n"
    assert machine.compile("another") == 0
    assert machine.times == 3


def test_a_home_that_cannot_be_written_to_is_no_obstacle(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert machine.compile("one") == 0
    assert (tmp_path / "one" / "build" / "op.o").exists()


def test_what_was_built_for_another_torch_is_not_left_to_ninja(machine: Machine, tmp_path: Path) -> None:
    """Which does not look at torch's headers."""
    built = tmp_path / "one" / "extensions" / "cpu_adam" / "built"
    for torch, remains in [("2.13.0", False), ("2.13.0", True), ("2.14.0", False)]:
        environ = machine.environment("one", torch=torch)
        said = subprocess.run([sys.executable, ROOT / "scripts" / "build_deepspeed_ops"], env=environ, stdout=subprocess.PIPE, check=True)
        assert said.stdout.startswith(b"building DeepSpeed's C++ parts: minutes, unless")
        assert (built.read_text() == "before") is remains
        built.write_text("before")
