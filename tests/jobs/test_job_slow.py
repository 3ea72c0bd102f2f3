"""Whole jobs with a process that is slow instead of dead: no stop of the commits is longer than the bound in docs/failure_model.md."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from rank_kit import World
from session_case import loop, until_another_agent_commits

from gemini_ft.events import read_events

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow.py"
OPTIONS = {"agent_timeout": 1.5, "replica_timeout": 1.5, "timeout": 60.0, "on_late": "skip", "pause": 0.02}
BOUND = 3.0 + 5.0  # seconds: both timeouts, and the start of an agent on a busy machine


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)], ids=["leader", "member"])
def test_an_agent_that_gets_a_fiftieth_of_the_processor_is_replaced(tmp_path: Path, victim: int) -> None:
    """It answers every ping: nothing but the lack of commits shows that it is of no use."""
    with World(tmp_path, size=2, GEMINI_EVENTS=str(tmp_path / "events")) as world:
        training = partial(loop, 5000, during=until_another_agent_commits, **OPTIONS)
        results = world.outcome(training, VICTIM=str(victim), GEMINI_FAULTS=f"step=3:rank={victim}:slow:share=0.02:seconds=600")
        commits = sorted(event["at"] for event in read_events(tmp_path / "events") if event["event"] == "committed" and event["rank"] == 0)
        longest = max(later - earlier for earlier, later in pairwise(commits))
        print(f"{longest:.1f} s without a commit")
        for result in results:
            assert not isinstance(result, Exception), result
            assert result["committed"] > 20
        assert longest < BOUND
        assert any("and most of the time it owed answers" in text for text in results[victim]["told"])
        assert "of an agent that hung" in world.log(world.hosts[victim])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_slow_process_stops_commits_for_longer_than_promised() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--no-report"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-4000:]
