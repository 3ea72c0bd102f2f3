"""`elastic: exact`: whatever number of workers carries the logical ranks, and whatever was lost, the bits are the same."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exact_case
import pytest
import torch
from agent_kit import end_agent, preload
from elastic_case import Case as Batches
from elastic_case import engage, fabricate, fit
from elastic_hosts import go_and_come
from exact_case import COUNT, Case, Even, Fitting, loader_of, made, oracle, refusals, train
from exact_case import fit as fit_exactly
from lightning.pytorch.callbacks import EarlyStopping
from rank_kit import World, on_ranks
from torch.utils.data import WeightedRandomSampler

import gemini_ft
from gemini_ft.errors import ConfigError, GeminiError, StateError
from gemini_ft.lightning.logical import Turns

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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fits_on_other_numbers_of_workers_go_on_with_the_same_bits(tmp_path: Path, accumulation: int) -> None:
    """By Lightning's Trainer: samples, model and hooks draw, validations too, and a worker is lost in the middle of a step."""
    case = Fitting(accumulation=accumulation)
    with World(tmp_path, 1, **LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}) as ranks:
        [alone] = ranks.outcome(fit_exactly, case, END)
    plain, seen, starts = alone["bits"], set(), []
    kill = "step=3:rank=1:moment=before_update:sigkill"
    with World(tmp_path, 4, **LAUNCHED) as ranks:
        for workers, until, environ in ((4, 2, {}), (2, END, {"GEMINI_FAULTS": kill}), (2, 4, {}), (1, 5, {}), (4, END, {})):
            kept = ranks.hosts[::2] if workers < len(ranks.hosts) else ranks.hosts  # not the first ones alone
            for host in set(ranks.hosts) - set(kept):
                end_agent(ranks.run, host)
            ranks.hosts = kept + [f"host{number}" for number in range(4, 4 + workers - len(kept))]
            results = ranks.outcome(fit_exactly, case, until, LOCAL_WORLD_SIZE=str(workers), **environ)
            if environ:
                assert any(isinstance(each, Exception) for each in results), results
                continue
            seen |= with_bits_of_the_oracle(results, alone)
            starts.append(results[0]["start"])
    assert seen == set(plain)
    assert starts in ([0, 2, 4, 5], [0, 3, 4, 5])
    assert len(set(plain.values())) == 12 // accumulation + 1
    turns = 16 // COUNT  # of an epoch
    assert alone["numbers"] == [number for _ in range(case.epochs) for number in range(turns) for _ in range(COUNT)]


def test_a_fit_has_the_bits_of_lightnings_own_ddp(tmp_path: Path) -> None:
    """A sum of two has one order only, and the script draws nothing: the generators of DDP's workers are others."""
    case, bits = Fitting(ranks=2, accumulation=2, draws=False), []
    for workers, ranks in ((2, None), (2, 2), (1, 2)):
        with World(tmp_path, workers, **LAUNCHED | {"LOCAL_WORLD_SIZE": str(workers)}) as world:
            bits.append(world.outcome(fit_exactly, replace(case, ranks=ranks), END)[0]["bits"])
    assert bits[0] == bits[1] == bits[2]


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(Even())


class Counted(Even):
    """Samples that count how often they were read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return super().__getitem__(index)


def noting(*_: Any) -> None:
    """Stands for a communication hook."""


WRONG = {
    "no number": (Fitting(ranks=0), "with logical_ranks=None under Lightning"),
    "callback": (Fitting(trainer={"callbacks": [EarlyStopping("loss")]}), "does not go with EarlyStopping"),
    "plateau": (Fitting(monitors=True), "ReduceLROnPlateau"),
    "optimizer": (Fitting(kind="LBFGS"), "LBFGS"),
    "precision": (Fitting(trainer={"precision": "bf16-mixed"}), "precision 'bf16-mixed'"),
    "compiled": (Fitting(compiles=True), "torch.compile"),
    "hook": (Fitting(strategy={"ddp_comm_hook": noting}), "a communication hook"),
    "pipeline": (Fitting(strategy={"gradient_pipeline": [{"params": "*", "compress": "bf16"}]}), "does not go with gradient_pipeline"),
    "batches": (Fitting(trainer={"limit_train_batches": 3}), "limit_train_batches cannot follow"),
    "stream": (Fitting(data=Endless(), loader={}), "is for a DataLoader of a map-style dataset"),
    "sampler": (Fitting(loader={"sampler": WeightedRandomSampler(torch.ones(48), 48)}), "with a DistributedSamplerWrapper"),
    "workers": (Fitting(loader={"num_workers": 1}), "gave a loader with num_workers=1"),
    "counter": (Fitting(data=Counted()), "dataset.reads changed as batches were made"),
}


def test_fits_that_logical_ranks_cannot_carry_are_refused_by_name(tmp_path: Path) -> None:
    with World(tmp_path, 1, **LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}) as ranks:
        [told] = ranks.outcome(refusals, {name: case for name, (case, _) in WRONG.items()})
    assert {name for name, (_, why) in WRONG.items() if why not in told.get(name, "")} == set(), told


@pytest.mark.soak  # in short: the jobs above
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_changes_of_the_number_of_workers_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    """One to six workers of six logical ranks end well, or all at a worker's death in a step; those that go take their agents
    along, and storage has what is lost with them.
    """
    draw, names, size = random.Random(seed), (f"host{number}" for number in itertools.count(3)), 3
    storage = {"storage": {"url": f"file://{tmp_path / 'stored'}", "every_steps": 1}}
    case = Case(seed=seed, count=6, epochs=70, options=storage)
    [plain] = on_ranks(tmp_path, 1, oracle, case)
    done, died, seen, sizes = 0, 0, set[int](), [3]
    with World(tmp_path, 3, **LAUNCHED) as ranks:
        for number in range(51):
            until = done + draw.randrange(1, 5) if number < 50 else END
            moment = draw.choice(["before_update", "in_copy", "end_of_step"])
            fault = f"step={draw.randrange(done + 1, done + 5)}:rank={draw.randrange(size)}:moment={moment}:sigkill"
            faults = {"GEMINI_FAULTS": fault} if 0 < number < 50 and draw.random() < 0.5 else {}
            results = ranks.outcome(train, case, until + 2 * len(faults), **faults)
            if any(isinstance(each, Exception) for each in results):
                assert faults, results
                died += 1
            else:
                seen |= with_bits_of_the_oracle(results, plain)
                done = max(results[0]["bits"])
            size = draw.choice([other for other in range(1, 7) if other != size])
            sizes.append(size)
            kept = draw.sample(ranks.hosts, min(size, len(ranks.hosts)))
            for gone in {*ranks.hosts} - {*kept}:
                end_agent(ranks.run, gone)
            ranks.hosts = [*kept, *itertools.islice(names, size - len(kept))]
    assert done == max(plain["bits"])
    assert {number: found for each in results for number, found in each["ranks"].items()} == plain["ranks"]
    print(f"{done} steps, {len(seen)} compared; {died} attempts died; workers {sizes}")


@pytest.mark.soak  # in short: the jobs above, of a launcher in miniature
@pytest.mark.parametrize(
    ("job", "restart", "hosts"),
    [
        ("plain", "process", {}),
        ("plain", "in_place", {}),
        ("lightning", "process", {}),
        ("lightning", "in_place", {}),
        ("plain", "in_place", {"has_spare": True}),
        ("plain", "in_place", {"hosts": 2, "workers": 2}),
    ],
    ids=["plain", "plain in place", "lightning", "lightning in place", "a spare", "two workers a host"],
)
def test_hosts_that_go_and_come_leave_all_bits(tmp_path: Path, job: str, restart: str, hosts: dict[str, Any]) -> None:
    go_and_come([exact_case.__file__, str(tmp_path / "ours"), job], tmp_path, restart, **hosts)
    with World(tmp_path, 1, **LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}) as ranks:
        alone = partial(oracle, exact_case.PLAIN) if job == "plain" else partial(fit_exactly, exact_case.FITTED, END)
        [plain] = ranks.outcome(alone)
    for found in (json.loads((tmp_path / f"ours.{rank}").read_text()) for rank in range(4 if "workers" in hosts else 3)):
        assert found["start"] > 0
        assert found["bits"] == {step: plain["bits"][int(step)] for step in found["bits"]}
        assert str(max(plain["bits"])) in found["bits"]


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


@pytest.mark.parametrize(
    ("job", "case"),
    [(fit, {}), (fit, {"is_sharded": True}), (fabricate, {}), (engage, {})],
    ids=["lightning", "lightning with FSDP2", "fabric", "deepspeed"],
)
def test_jobs_that_have_no_logical_ranks_are_refused_before_they_join(
    job: Callable[..., Any], case: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"elastic='exact' is for plain loops|logical_ranks=None"):
        on_ranks(tmp_path, 1, job, Batches(options={"elastic": "exact"}, **case), str(tmp_path / "out"), 1, LOCAL_WORLD_SIZE="1")


def test_workers_that_could_carry_unequal_numbers_alone_are_refused_under_lightning() -> None:
    with pytest.raises(ConfigError, match=r"logical_ranks=3 under Lightning: .* start a number of workers that divides it, not 2"):
        Turns(SimpleNamespace(world_size=2), 3)


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
