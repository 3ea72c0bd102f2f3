"""The nemesis of partitions as a long test: see benchmarks/partitions.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemini_ft.testing import Network

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "partitions.py"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_ten_rounds_of_networks_that_fall_apart(first: int) -> None:
    """100 in all."""
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")
    command = [sys.executable, str(SCRIPT), "--first", str(first), "--rounds", str(first + 10), "--no-report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-4000:]
