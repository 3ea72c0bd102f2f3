"""A rank that is slow in a job is named, with its host, before thirty steps are over."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from rank_kit import World
from session_case import drag, loop

from gemini_ft.events import read_events

SINCE = 12


def test_the_rank_that_all_wait_for_is_named(tmp_path: Path) -> None:
    with World(tmp_path, hosts=["a", "b", "b"], GEMINI_EVENTS=str(tmp_path / "events")) as world:
        results = world.outcome(partial(loop, SINCE + 33, during=partial(drag, "sleeps", 1, SINCE, 0.12), pause=0.02))
        assert not any(isinstance(result, Exception) for result in results), results
        told = [event for event in read_events(tmp_path / "events") if event["event"] == "straggler"]
        assert sorted((event["host"], event["ranks"]) for event in told) == [("a", [1]), ("b", [1])]
        said = r"stragglers: since step (\d+) all ranks wait for rank 1 \(host b\), which works \S+ s of each step .*; \S+ s is usual"
        begin = re.fullmatch(said, told[0]["text"])
        assert begin is not None, told
        assert int(begin[1]) + 23 <= SINCE + 30
        for host in "ab":
            assert told[0]["text"] in world.log(host)
        assert all(told[0]["text"] in result["told"] for result in results)
