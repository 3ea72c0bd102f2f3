"""The storage nemesis as a long test: see benchmarks/storage_nemesis.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "storage_nemesis.py"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(20261122, 20261126))
def test_fifty_rounds_of_storage_that_lies_lags_and_is_away(seed: int) -> None:
    """200 in all."""
    command = [sys.executable, str(SCRIPT), "--rounds", "50", "--seed", str(seed), "--no-report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-4000:]
