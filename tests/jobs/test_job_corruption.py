"""A bit that flips in one rank's memory: found when ranks are compared, the rank named, and the job resumed from before it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rank_kit import World
from session_case import flip_in, loop, wait_for_upload

from gemini_ft.errors import ReplicaDivergedError
from gemini_ft.events import read_events
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

AT = 5


def _during(place: str, iteration: int, *rest: Any) -> None:
    flip_in(place, AT, iteration, *rest)
    wait_for_upload(iteration, *rest)


def job(world: World, place: str, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Trains until the flip is found, and then to the end; what ranks were told of it, and the second attempt's results."""
    during = partial(_during, place)
    failed = world.outcome(partial(loop, 10**6, during=during, interval=1, **options))
    errors = [str(error) for error in failed if isinstance(error, ReplicaDivergedError)]
    assert errors, failed
    return errors, world.outcome(partial(loop, 3, during=during, interval=1, **options))


@pytest.mark.parametrize(
    "place", ["moment", *(pytest.param(each, marks=pytest.mark.soak) for each in ("weight", "gradient"))]
)  # other tests flip weights
def test_is_found_within_the_promised_steps_and_storage_has_what_was_before_it(tmp_path: Path, place: str) -> None:
    """Memory has only versions that came after the flip and were not compared: none of them may be resumed."""
    events = tmp_path / "events"
    storage = {"url": f"file://{tmp_path}/store", "every_steps": 4}
    with World(tmp_path, hosts=["a", "b", "c"], GEMINI_EVENTS=str(events)) as world:
        errors, again = job(world, place, storage=storage, compare_every=4)
        assert all("the largest group of ranks holds something else than rank 1 (host b)" in error for error in errors)
        assert [result["start"] for result in again] == [4, 4, 4], again
    told = [event for event in read_events(events) if event["event"] == "diverged"]
    assert sorted((event["host"], event["ranks"]) for event in told) == [("a", [1]), ("b", [1]), ("c", [1])]


def test_at_the_last_step_is_found_as_well_and_the_end_of_the_job_stores_nothing_of_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    storage = {"url": url, "every_steps": 4}
    with World(tmp_path, hosts=["a", "b", "c"]) as world:
        during = partial(_during, "weight")
        results = world.outcome(partial(loop, 8, during=during, interval=1, storage=storage, compare_every=4, close=True))
        assert any("the largest group of ranks holds something else than rank 1 (host b)" in str(result) for result in results), results
    assert [each.version.iteration for each in list_checkpoints(open_storage(url))] == [4]


def test_where_each_step_is_compared_memory_has_what_was_before_it(tmp_path: Path) -> None:
    with World(tmp_path, hosts=["a", "b"]) as world:
        errors, again = job(world, "weight", compare_every=1)
        assert all("it cannot be told which of rank 0 (host a), rank 1 (host b) is wrong" in error for error in errors)
        starts = [result["start"] for result in again]
        assert starts in ([AT, AT], [AT + 1, AT + 1])  # its own snapshot may have been taken before the flip


def test_where_there_is_nothing_else_what_may_be_wrong_is_resumed_and_said(two: World) -> None:
    _, again = job(two, "weight", compare_every=4)
    assert all(result["start"] > AT for result in again)
    assert any("had been given up, and is resumed as there is nothing else" in text for text in again[0]["told"])
