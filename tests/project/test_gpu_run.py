"""The runner of `make gpu`: it has everything that is marked, installs from its kit, and tells all that came of a run."""

from __future__ import annotations

import ensurepip
import lzma
import re
import shutil
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROBE = "gemini_kit_probe"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of benchmarks/gpu as a module."""
    loader = SourceFileLoader(f"gpu_{name}", str(ROOT / "benchmarks" / "gpu" / f"{name}.py"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, as it is with GEMINI_FAKE_GPU=1."""
    monkeypatch.setenv("GEMINI_FAKE_GPU", "1")
    return script("run", monkeypatch)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit with one package that this machine lacks, and pip."""
    bundled = list(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
    if not bundled:
        pytest.skip("needs the wheel of pip in ensurepip: a Python that was built from python.org's sources (pyenv, uv) has it")
    folder = tmp_path / "kit"
    folder.mkdir()
    shutil.copy(bundled[0], folder)
    with zipfile.ZipFile(folder / f"{PROBE}-1.0-py3-none-any.whl", "w") as wheel:
        about = f"{PROBE}-1.0.dist-info"
        wheel.writestr(f"{PROBE}.py", "print('found', __file__)")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {PROBE}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return folder


def test_everything_that_is_marked_is_in_one_part(runner: Any) -> None:
    named = [word for part in runner.PARTS for word in part.command if word.startswith("tests/")]
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py") if file != Path(__file__)]
    marked = [file for file in files if re.search(r"\bmark\.gpu\b", (ROOT / file).read_text())]
    assert sorted(named) == sorted(marked)


def test_every_benchmark_and_drill_is_in_one_part(runner: Any) -> None:
    run = {word for part in runner.PARTS for word in part.command if word.startswith("benchmarks/")}
    own = {str(file.relative_to(ROOT)) for file in ROOT.glob("benchmarks/gpu/*.py") if file.name != "run.py"}
    assert run == own | {"benchmarks/byte_costs.py", "benchmarks/lanes.py"}


def test_cells_and_rows_of_parts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_FAKE_GPU", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    overhead = script("overhead", monkeypatch)
    parts = [part.command for part in script("run", monkeypatch).PARTS if part.command[0].endswith("overhead.py")]
    words = [" ".join(command).partition("--cells ")[2].partition(" --rows ") for command in parts]
    cells, rows = ({word for each in words for word in each[index].split()} for index in (0, 2))
    assert cells == {cell.name for cell in overhead.CELLS} - {"1GB_1rank_runs_ahead"}
    assert rows == overhead.ROWS.keys()


def test_the_courier_has_the_kits_nccl(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl.so.2.xz").write_bytes(lzma.compress(b"no library"))
    tell = ["-c", "import os; print(os.environ.get('LD_PRELOAD'))"]
    monkeypatch.setattr(runner, "PARTS", [runner.Part(name, "tells", 60, tell) for name in ("courier", "another")])
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), "--kit", str(tmp_path)])
    assert runner.main() == 0
    assert (tmp_path / "out" / "courier.txt").read_text().splitlines()[-1] == str(tmp_path / "libnccl.so.2")
    assert (tmp_path / "out" / "another.txt").read_text() == "None\n"
    assert (tmp_path / "libnccl.so.2").read_bytes() == b"no library"


def test_each_part_has_its_own_end_and_the_report_says_what_came_of_it_and_that_it_is_fake(
    runner: Any, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        runner.Part("endless", "never ends", 1, ["-c", "import time; print('begun', flush=True); time.sleep(600)"]),
        runner.Part("broken", "fails", 60, ["-c", "raise SystemExit(3)"]),
        runner.Part("installed", "has what the kit has", 60, ["-c", f"import {PROBE}"]),
    ]
    monkeypatch.setattr(runner, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), "--kit", str(kit)])
    assert runner.main() == 1
    report, log = ((tmp_path / "out" / name).read_text() for name in ("report.md", "log.txt"))
    assert report.startswith("# FAKE")
    assert log.startswith("# FAKE")
    verdicts = dict(re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \|", report, re.MULTILINE))
    assert {name: verdicts[name] for name in ("endless", "broken", "installed")} == {
        "endless": "cut off after 1 s",
        "broken": "failed (3)",
        "installed": "passed (fake)",
    }
    assert "\n## endless (fake)\n\n```\nbegun\n```" in report
    assert f"found {kit / 'installed' / PROBE}.py" in report


def test_where_no_time_is_left_the_rest_is_named(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--kit", str(tmp_path), "--budget", "0", "order", "hashing"])
    assert runner.main() == 1
    assert (tmp_path / "report.md").read_text().count("| no time was left | 0 |") == 2
