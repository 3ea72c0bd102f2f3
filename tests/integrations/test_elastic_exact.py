"""`elastic: exact`: whatever number of workers carries the logical ranks, and whatever was lost, the bits are the same."""

from __future__ import annotations

from typing import Any

import pytest
from agent_kit import end_agent, preload
from exact_case import COUNT, Case, oracle, train
from rank_kit import World, on_ranks

pytestmark = pytest.mark.timeout(300)

preload("exact_case")

LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
END = 10**9


@pytest.fixture(scope="module", params=[Case(seed=0), Case(seed=1, accumulation=2)], ids=["each batch", "accumulated"])
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four workers; two after the loss of two hosts, with a kill; one; three, with a kill; four. And four all the time, and the oracle."""
    folder, case = tmp_path_factory.mktemp("exact"), request.param
    steps = 20 // case.accumulation
    [plain] = on_ranks(folder, 1, oracle, case)
    with World(folder, 4, **LAUNCHED) as others:
        fixed = others.outcome(train, case, END)
    said = []
    with World(folder, 4, **LAUNCHED) as ranks:

        def go_on(hosts: list[str], until: int, **environ: Any) -> None:
            for host in set(ranks.hosts) - set(hosts):
                end_agent(ranks.run, host)
            ranks.hosts = hosts
            said.append(ranks.outcome(train, case, until, **environ))

        go_on(ranks.hosts, steps // 5)
        go_on(["host0", "host2"], steps, GEMINI_FAULTS=f"step={steps // 5 + 1}:rank=1:moment=before_update:sigkill")
        go_on(["host0", "host2"], 2 * steps // 5)
        go_on(["host0"], 3 * steps // 5)
        go_on(["host0", "host4", "host5"], steps, GEMINI_FAULTS=f"step={3 * steps // 5}:rank=2:moment=before_update:sigkill")
        go_on(["host0", "host4", "host5"], 4 * steps // 5)
        go_on(["host0", "host4", "host5", "host6"], END)
    return {"plain": plain, "fixed": fixed, "said": said, "steps": steps}


def test_undisturbed_workers_have_the_bits_of_a_single_process(jobs: dict[str, Any]) -> None:
    fixed, plain = jobs["fixed"], jobs["plain"]
    assert not any(isinstance(each, Exception) for each in fixed), fixed
    assert all(each["bits"] == plain["bits"] for each in fixed)
    assert {number: found for each in fixed for number, found in each["ranks"].items()} == plain["ranks"]
    assert {each["common"] for each in fixed} == {plain["common"]}


def test_other_numbers_of_workers_have_the_bits_of_each_step(jobs: dict[str, Any]) -> None:
    plain, seen = jobs["plain"], set()
    killed = [results for results in jobs["said"] if any(isinstance(each, Exception) for each in results)]
    assert [len(results) for results in killed] == [2, 3], jobs["said"]
    for results in jobs["said"]:
        if results not in killed:
            for each in results:
                seen |= each["bits"].keys()
                assert each["bits"] == {step: plain["bits"][step] for step in each["bits"]}
    assert seen == set(range(jobs["steps"] + 1))
    assert len(set(plain["bits"].values())) == jobs["steps"] + 1


def test_the_logical_ranks_end_with_the_same_buffers_and_generators(jobs: dict[str, Any]) -> None:
    last = jobs["said"][-1]
    assert {number: found for each in last for number, found in each["ranks"].items()} == jobs["plain"]["ranks"]
    assert len(set(jobs["plain"]["ranks"].values())) == COUNT
    assert {each["common"] for each in last} == {jobs["plain"]["common"]}
