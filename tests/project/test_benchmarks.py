"""The quick form of every benchmark, as its page has it: that it runs to its end and says what it found."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = re.findall(r"^python (benchmarks/\S+ --quick)", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
NEEDS_ROOT = ("interference", "switch", "sparse_sync", "compression", "pipelines")  # networks of their own, of a given rate


def test_every_benchmark_with_a_quick_form_is_on_the_page() -> None:
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py") if '"--quick"' in path.read_text()}
    assert programs <= {Path(command.split()[0]).name for command in QUICK}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", [command for command in QUICK if "/gpu/" not in command])
def test_runs_to_its_end_and_says_what_it_found(command: str) -> None:
    program, *arguments = shlex.split(command)
    if Path(program).stem in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: networks of a given rate are namespaces")
    run = subprocess.run([sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert run.returncode == 0, run.stderr[-4000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert set(said) == {"benchmark", "hardware", "results", "ratios"}
    assert said["results"]
