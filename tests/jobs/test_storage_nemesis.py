"""The storage nemesis as a long test: see benchmarks/storage_nemesis.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "storage_nemesis.py"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_rounds_of_storage_that_lies_lags_and_is_away() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--rounds", "200", "--no-report"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-4000:]
