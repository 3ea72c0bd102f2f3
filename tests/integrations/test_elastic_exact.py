"""`elastic: exact`: whatever number of workers carries the logical ranks, and whatever was lost, the bits are the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import end_agent, preload
from elastic_case import Case as Batches
from elastic_case import engage, fabricate, fit
from exact_case import COUNT, Case, loader_of, made, oracle, train
from rank_kit import World, on_ranks

import gemini_ft
from gemini_ft.errors import ConfigError, GeminiError, StateError

pytestmark = pytest.mark.timeout(300)

preload("exact_case", "elastic_case")

LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
END = 10**9
PLAIN, ACCUMULATED = Case(seed=0), Case(seed=1, accumulation=2)


def inner(results: list[dict[str, Any]]) -> dict[int, str]:
    return {number: found for each in results for number, found in each["ranks"].items()}


def with_bits_of_the_oracle(results: list[dict[str, Any]], plain: dict[str, Any]) -> set[int]:
    """Asserts that all steps of all workers have the bits of the oracle; returns these steps."""
    assert not any(isinstance(each, Exception) for each in results), results
    for each in results:
        assert each["bits"] == {step: plain["bits"][step] for step in each["bits"]}
    return {step for each in results for step in each["bits"]}


@pytest.mark.parametrize(
    ("case", "workers"),
    [(PLAIN, 1), (PLAIN, 2), (PLAIN, 3), (PLAIN, 4), (ACCUMULATED, 3)],
    ids=["1 worker", "2 workers", "3 workers", "4 workers", "3 workers, accumulated"],
)
def test_undisturbed_workers_have_the_bits_of_a_single_process(tmp_path: Path, case: Case, workers: int) -> None:
    [plain] = on_ranks(tmp_path, 1, oracle, case)
    with World(tmp_path, workers, **LAUNCHED) as ranks:
        results = ranks.outcome(train, case, END)
    assert with_bits_of_the_oracle(results, plain) == set(plain["bits"])
    assert inner(results) == plain["ranks"]
    assert {each["common"] for each in results} == {plain["common"]}
    assert len(set(plain["bits"].values())) == 20 // case.accumulation + 1
    assert len(set(plain["ranks"].values())) == COUNT


@pytest.mark.parametrize("case", [PLAIN, ACCUMULATED], ids=["each batch", "accumulated"])
@pytest.mark.parametrize("worlds", [(4, 2, 1), (1, 3, 4)], ids=["shrinking", "growing"])
def test_other_numbers_of_workers_go_on_with_the_same_bits(tmp_path: Path, case: Case, worlds: tuple[int, int, int]) -> None:
    """The second number of workers loses one in the middle of a step, is started again, and ends by itself."""
    [plain] = on_ranks(tmp_path, 1, oracle, case)
    unit, seen = 4 // case.accumulation, set()
    with World(tmp_path, worlds[0], **LAUNCHED) as ranks:

        def go_on(workers: int, until: int, **environ: Any) -> list[Any]:
            kept = ranks.hosts[::2] if workers < len(ranks.hosts) else ranks.hosts  # not the first ones alone
            for host in set(ranks.hosts) - set(kept):
                end_agent(ranks.run, host)
            ranks.hosts = kept + [f"host{number}" for number in range(4, 4 + workers - len(kept))]
            return ranks.outcome(train, case, until, **environ)

        seen |= with_bits_of_the_oracle(go_on(worlds[0], unit), plain)
        killed = go_on(worlds[1], END, GEMINI_FAULTS=f"step={unit + 1}:rank={worlds[1] - 1}:moment=before_update:sigkill")
        assert any(isinstance(each, Exception) for each in killed), killed
        again = go_on(worlds[1], 3 * unit)
        assert 0 < again[0]["start"] <= unit + 1
        seen |= with_bits_of_the_oracle(again, plain)
        last = go_on(worlds[2], END)
        seen |= with_bits_of_the_oracle(last, plain)
    assert [last[0]["start"], seen] == [3 * unit, set(plain["bits"])]
    assert inner(last) == plain["ranks"]
    assert {each["common"] for each in last} == {plain["common"]}


def unlike(what: str) -> None:
    """One step in which the workers differ."""
    rank, model, optimizer, _ = int(os.environ["RANK"]), *made(PLAIN)
    gemini_ft.init_process_group("gloo")
    checkpointer = gemini_ft.Checkpointer(model, optimizer, elastic="exact")
    if what == "model":
        model.last.bias.data += rank
    ranks = checkpointer.logical_ranks(COUNT, lambda number: gemini_ft.resumable(loader_of(number)))
    checkpointer.resume()
    turns = ranks.batches(rank if what == "epoch" else 0)
    for _ in range(2):
        for logical, batch in next(turns):
            with logical:
                model(batch).sum().backward()
        if what == "draws" and rank:
            torch.rand(())
        ranks.reduce()
        optimizer.step()
        checkpointer.step(**({"loss": rank} if what == "values" else {}))


UNLIKE = {
    "model": "the model before the first step",
    "epoch": "the workers differ in the position in the data",
    "draws": "the workers differ in random generators outside of logical ranks",
    "values": r"the workers differ in the values that step\(\) was given",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_workers_that_differ_in_what_is_the_jobs_are_refused(what: str, tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        results = ranks.outcome(unlike, what)
    for result in results:
        assert isinstance(result, GeminiError), results
        assert re.search(UNLIKE[what], str(result))


@pytest.mark.parametrize("job", [fit, fabricate, engage], ids=["lightning", "fabric", "deepspeed"])
def test_jobs_that_have_no_logical_ranks_are_refused_before_they_join(job: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"elastic='exact' is for plain loops with checkpointer.logical_ranks\(\); leave it out here"):
        on_ranks(tmp_path, 1, job, Batches(options={"elastic": "exact"}), str(tmp_path / "out"), 1, LOCAL_WORLD_SIZE="1")


def without() -> int:
    model, optimizer, _ = made(PLAIN)
    gemini_ft.init_process_group("gloo")
    return gemini_ft.Checkpointer(model, optimizer).resume()


def test_a_snapshot_of_logical_ranks_is_not_resumed_without_them(tmp_path: Path) -> None:
    with World(tmp_path, 1, **LAUNCHED) as ranks:
        assert ranks.outcome(train, PLAIN, 2)[0]["start"] == 0
        [error] = ranks.outcome(without)
    assert isinstance(error, StateError)
    assert "made with logical ranks and this job has none" in str(error)
