"""`verify: replay`: a bit that flips in a gradient, a weight, a moment or a replica is found where ranks cannot be compared, too."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from agent_kit import eventually
from rank_kit import World
from replay_case import train

from gemini_ft.agent import lifecycle
from gemini_ft.errors import ReplayError
from gemini_ft.events import read_events

STEPS = 16
GRADIENT = ["rank 1 (host b): the gradient of model.module.first.weight."]
WRONG = {
    "ddp": GRADIENT,
    "closure": GRADIENT,
    "fsdp2, on the way": ["rank 1 (host b): the gradient of model.first.weight (in memory)."],
    "fsdp2, in copies": [
        "rank 0 (host a): model.first.weight (in memory).",
        "rank 1 (host b): exp_avg of model.first.weight (in memory).",
    ],
}
FAULTS = {
    "ddp": "step=7:host=0:corrupt",
    "closure": "",
    "fsdp2, on the way": "step=3:host=0:corrupt; step=5:rank=1:flip:of=gradient:moment=before_update",
    "fsdp2, in copies": "step=9:rank=0:flip:of=weight:moment=in_copy; step=13:rank=1:flip:of=moment:moment=in_copy",
}


@cache
def undisturbed(kind: str) -> list[Any]:
    """The states of ranks that nothing happens to."""
    with TemporaryDirectory() as folder, World(Path(folder), hosts=["a", "b"]) as world:
        return [result["state"] for result in world.outcome(partial(train, kind, STEPS))]


def run(world: World, kind: str, **options: Any) -> tuple[list[list[str]], list[Any]]:
    """All attempts until the job has ended; what the ranks of those that failed raised, and the results of the last one."""
    errors = list[list[str]]()
    while True:
        results = world.outcome(partial(train, kind, STEPS, **options))
        if not any(isinstance(result, Exception) for result in results):
            return errors, results
        assert all(isinstance(result, ReplayError) for result in results), results
        errors.append([str(result) for result in results])
        for host in world.hosts:
            eventually(lambda host=host: divergences(world.run, host) == len(errors), "a count of the agent's")  # type: ignore[misc]


def divergences(run: str, host: str) -> int:
    """How often ranks have differed from one another, or from themselves, as an agent counts."""
    return int(json.loads(lifecycle.status(run, host) or "")["streams"]["main"]["counters"]["divergences"])


@pytest.mark.parametrize("case", FAULTS)
def test_a_flipped_bit_is_found_its_host_is_named_and_the_job_ends_with_the_very_bits(tmp_path: Path, case: str) -> None:
    events, kind = tmp_path / "events", case.partition(",")[0]
    with World(tmp_path, hosts=["a", "b"], GEMINI_EVENTS=str(events), GEMINI_FAULTS=FAULTS[case]) as world:
        errors, results = run(world, kind, verify="replay", compare_every=1, wrong_at=9)
    assert [result["state"] for result in results] == undisturbed(kind)
    assert [len({*told}) for told in errors] == [1] * len(errors)  # on all ranks
    assert [told[0].partition(" came out at ")[2].partition(" Something")[0] for told in errors] == WRONG[case]
    damaged = {(event["host"], event["owner"]) for event in read_events(events) if event["event"] == "damaged"}
    if "corrupt" in FAULTS[case]:  # both copies; one of them is of no commit any more where the next one came in between
        assert damaged
        assert damaged <= {("a", 0), ("a", 1)}
    else:
        assert not damaged
    assert not any("no longer compared" in text or "cannot be computed again" in text for text in results[0]["told"]), results
