"""`elastic: batch`: other numbers of ranks go on with the same global batches, and with each sample of an epoch once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from agent_kit import end_agent, preload
from elastic_case import BATCH, GLOBAL, SAMPLES, Case, Net, fabricate, fit, loader_of, samples, sharded, train
from elastic_hosts import go_and_come
from rank_kit import World, on_ranks
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.dcp import GeminiWriter
from gemini_ft.errors import ConfigError, StateError, UnsupportedStateError
from gemini_ft.testing import EmulatedHosts

pytestmark = pytest.mark.timeout(300)

preload("elastic_case")


KINDS = ["plain", "sharded", "lightning", pytest.param("lightning sharded", marks=pytest.mark.soak), "fabric"]
JOBS = {"plain": train, "sharded": train, "lightning": fit, "fabric": fabricate}
CASE = Path(__file__).parents[1] / "kit" / "elastic_case.py"
LAUNCHED = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "3"}


@pytest.fixture(scope="module", params=KINDS)
def resized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three ranks; two after the loss of a host and its agent, which fail before their first commit and begin once more; one from storage,
    after the loss of all agents; three again. And three all the time.
    """
    folder, job = tmp_path_factory.mktemp("resized"), JOBS[request.param.split()[0]]
    case = Case(is_sharded="sharded" in request.param)
    stored = replace(case, options=case.options | {"storage": {"url": f"file://{folder / 'stored'}", "every_steps": 1}})
    with World(folder, 3, **LAUNCHED) as ranks, World(folder, 3, **LAUNCHED) as others:
        fixed = others.start(job, case, str(folder / "fixed"), 12)
        said = [ranks.outcome(job, stored, str(folder / "ours"), 4)]
        end_agent(ranks.run, "host2")  # and with it the owner's copy of its shard
        ranks.hosts = ["host0", "host1"]
        if job is not train:  # what reads the state is the same
            said.append(ranks.outcome(job, stored, str(folder / "ours"), 9))
            ranks.hosts = ["host0", "host1", "host3"]
            said.append(ranks.outcome(job, stored, str(folder / "ours"), 12))
            yield {"said": said, "fixed": fixed.results(), "folder": folder}
            return
        if not case.is_sharded:
            failed = ranks.outcome(job, stored, str(folder / "ours"), 9, GEMINI_FAULTS="step=4:rank=1:moment=before_update:sigkill")
            assert any(isinstance(each, Exception) for each in failed)
        said.append(ranks.outcome(job, stored, str(folder / "ours"), 8))
        for host in ranks.hosts:
            end_agent(ranks.run, host)
        ranks.hosts = ["host3"]
        said.append(ranks.outcome(job, stored, str(folder / "ours"), 9))
        ranks.hosts = ["host3", "host4", "host5"]
        said.append(ranks.outcome(job, stored, str(folder / "ours"), 12))
        yield {"said": said, "fixed": fixed.results(), "folder": folder}


def test_the_newest_commit_of_another_number_of_ranks_is_resumed(resized: dict[str, Any]) -> None:
    """A failure of the new ranks before their first commit leaves the old ranks' commit; storage may have no later step than some."""
    for results in resized["said"]:
        assert not any(isinstance(each, Exception) for each in results), results
    starts = [sorted({each["start"] for each in results}) for results in resized["said"]]
    assert starts[:2] + starts[-1:] == [[0], [4], [9]]
    assert all(4 <= from_storage <= 8 for [from_storage] in starts[2:-1])
    assert [results[0]["accumulation"] for results in resized["said"]] == [2, 3, *[6] * (len(starts) - 3), 2]


def test_weights_and_moments_are_those_of_the_step_that_is_resumed(resized: dict[str, Any]) -> None:
    """In every bit, on each number of ranks: as if a full checkpoint of that step had been loaded."""
    made: dict[int, str] = {}
    for results in resized["said"]:
        assert len({str(each.get("wholes")) for each in results}) == 1
        start, wholes = results[0]["start"], results[0].get("wholes", {})  # of plain loops
        assert not wholes or wholes[start] == made.get(start, wholes[start])
        made |= wholes


def test_each_sample_of_an_epoch_is_used_once(resized: dict[str, Any]) -> None:
    ours, fixed = samples(resized["folder"] / "ours"), samples(resized["folder"] / "fixed")
    for epoch in (0, 1):
        assert sorted(chain.from_iterable(ours[epoch].values())) == list(range(SAMPLES))
        assert {step: sorted(ids) for step, ids in ours[epoch].items()} == {step: sorted(ids) for step, ids in fixed[epoch].items()}
        assert {len(ids) for ids in ours[epoch].values()} == {GLOBAL}
    if "validated" in resized["fixed"][0]:  # which is left before its end
        validated = [[each["validated"] for each in results] for results in resized["said"]]
        assert validated == [[[]] * 3, [[(6, 0), (6, 1)]] * 2, [[(12, 0), (12, 1)]] * 3]


def test_the_weights_are_those_of_a_fixed_world_but_for_rounding(resized: dict[str, Any]) -> None:
    """Sums are formed in another order, in float64: a few units in the last place a step."""
    ours, fixed = resized["said"][-1], resized["fixed"]
    assert len({str(each["weights"]) for each in ours}) == 1
    np.testing.assert_allclose(ours[0]["weights"], fixed[0]["weights"], rtol=1e-11, atol=1e-13)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of one rank of Lightning where two have made three steps: alone, with a newer checkpoint, with a hook's changes."""
    folder = tmp_path_factory.mktemp("alone")
    with World(folder, 2, **LAUNCHED) as ranks:
        begun = ranks.outcome(fit, Case(accumulation=3, saved=str(folder / "saved.ckpt")), str(folder / "ours"), 3)
        assert not any(isinstance(each, Exception) for each in begun), begun
        newer = folder / "newer.ckpt"
        torch.save(torch.load(folder / "saved.ckpt", weights_only=False) | {"global_step": 9}, newer)
        end_agent(ranks.run, "host1")
        ranks.hosts = ["host0"]
        cases = {
            "resumed": Case(accumulation=3),
            "overtaken": Case(accumulation=3, checkpoint=str(newer)),
            "changed": Case(accumulation=3, later=5),
        }
        return {name: ranks.outcome(fit, case, str(folder / name), 99 if case.later else 3)[0] for name, case in cases.items()}


def test_attributes_that_this_process_has_set_are_named_where_they_are_replaced(alone: dict[str, Any]) -> None:
    found = alone["resumed"]
    assert (found["start"], found["accumulation"], found["world"]) == (3, 6, 2)
    [told] = [text for text in found["told"] if "had been set in this process" in text]
    assert "elastic='batch': module.world had been set in this process, and now as on rank 0 of the 2 ranks before" in told


def test_a_newer_checkpoint_has_the_scripts_own_micro_batches(alone: dict[str, Any]) -> None:
    found = alone["overtaken"]
    assert (found["start"], found["accumulation"], found["world"]) == (3, 3, 1)


def test_micro_batches_that_a_hook_changes_while_training_are_refused(alone: dict[str, Any]) -> None:
    assert isinstance(alone["changed"], ConfigError)
    assert "accumulate_grad_batches was 6 and has become 5 while training" in str(alone["changed"])


def change_loaders() -> str:
    """Trains with a loader of another kind from the second epoch on; what it is told."""
    gemini_ft.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = {kind: gemini_ft.resumable(loader_of(Case(kind=kind), 0, 1)) for kind in ("dealt", "shuffled")}
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state=loaders, elastic="batch")
    checkpointer.resume()
    steps = 0
    try:
        for loader in loaders.values():
            for _, batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                checkpointer.step()
                steps += 1
    except UnsupportedStateError as error:
        return f"{steps}: {error}"
    finally:
        checkpointer.close()
    return ""


def test_a_loader_of_a_later_epoch_is_refused_by_name(tmp_path: Path) -> None:
    [told] = on_ranks(tmp_path, 1, change_loaders)
    assert told.startswith(f"{SAMPLES // BATCH}: elastic='batch'")
    assert "shuffled has a RandomSampler as its sampler" in told


def step_each_batch(until: int) -> dict[str, Any]:
    """Steps a scheduler after each micro-batch, up to a step of the optimizer."""
    gemini_ft.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = gemini_ft.resumable(loader_of(Case(), dist.get_rank(), dist.get_world_size()))
    state = {"loader": loader, "scheduler": scheduler}
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state=state, elastic="batch", interval=1)
    start = step = checkpointer.resume()
    told = ""
    try:
        for number, (_, batch) in enumerate(loader, loader.batches_done + 1):
            model(batch).sum().backward()
            scheduler.step()
            if number % checkpointer.accumulation == 0:
                optimizer.step()
                checkpointer.step()
                step += 1
            if step == until:
                break
        checkpointer.flush()
    except StateError as error:
        told = str(error)
    return {"start": start, "accumulation": checkpointer.accumulation, "committed": checkpointer.stats.committed, "told": told}


def test_a_scheduler_of_micro_batches_is_refused_at_the_first_step_of_other_ranks(tmp_path: Path) -> None:
    """The refusal comes before a snapshot has the scheduler's state: as long as a step is one micro-batch, the two look alike."""
    with World(tmp_path, 2, **LAUNCHED) as ranks:
        begun = ranks.outcome(step_each_batch, 3)
        assert [each["told"] for each in begun] == ["", ""], begun
        end_agent(ranks.run, "host1")
        ranks.hosts = ["host0"]
        [found] = ranks.outcome(step_each_batch, 4)
    assert (found["start"], found["accumulation"], found["committed"]) == (3, 2, 3)
    assert "state['scheduler'] was stepped 2 times for one step of the optimizer" in found["told"]


class LateNumbers(torch.optim.SGD):
    """Begins to keep a number for each parameter with its second step."""

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state["n"] = 1.0
        return super().step(closure)


class Remembering:
    """Stands for a gradient pipeline, whose ranks take local steps."""

    lets_ranks_differ = True

    def __init__(self, is_elastic: bool) -> None:
        self.is_elastic = is_elastic

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass

    def summary(self) -> dict[str, dict[str, float]]:
        return {}


def go_wrong(kind: str) -> tuple[int, str]:
    """The steps that a sharded model makes, and what is told of the next one."""
    gemini_ft.init_process_group("gloo")
    model = sharded(1)
    optimizer = LateNumbers(model.parameters(), lr=0.1, momentum=0.9)
    loader = gemini_ft.resumable(loader_of(Case(), 0, 1))
    gradients = None if kind == "numbers" else Remembering(kind == "local steps")
    checkpointer = gemini_ft.Checkpointer(model, optimizer, state={"loader": loader}, gradients=gradients, elastic="batch", interval=1)
    checkpointer.resume()
    steps = 0
    try:
        for _, batch in islice(loader, 4):
            model(batch).sum().backward()
            optimizer.step()
            checkpointer.step()
            steps += 1
    except ConfigError as error:
        return steps, str(error)
    finally:
        checkpointer.close()
    return steps, ""


@pytest.mark.parametrize(
    ("kind", "steps", "why"),
    [
        ("numbers", 1, "state of LateNumbers that is not sharded as its parameter is (optim0.model.first.weight.n)"),
        ("pipeline", 0, "a gradient pipeline, whose residuals belong to each rank"),
        ("local steps", 0, "a sharded parameter beside local steps (model.first.weight)"),
    ],
)
def test_state_that_other_ranks_could_not_load_is_refused_at_the_step_that_has_it(tmp_path: Path, kind: str, steps: int, why: str) -> None:
    [(made, told)] = on_ranks(tmp_path, 1, go_wrong, kind)
    assert why in told
    assert made == steps


def open_writer() -> int | None:
    gemini_ft.init_process_group("gloo")
    writer = GeminiWriter()
    writer.close()
    return writer.newest


def test_a_writer_takes_no_notice_of_the_option(tmp_path: Path) -> None:
    """The environment is that of all scripts on the machine, and what any number of ranks reads needs no such option."""
    assert on_ranks(tmp_path, 1, open_writer, GEMINI_ELASTIC="batch") == [None]


@pytest.mark.soak  # in short: the jobs above
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_fifty_changes_of_the_number_of_ranks(tmp_path: Path, is_sharded: bool) -> None:
    """Hosts end well between two steps, or all at a rank's death in a step; those that go take their agents along, and storage has what is
    lost with them.
    """
    draw, names, size = random.Random(int(is_sharded)), (f"host{number}" for number in count(3)), 3
    case = Case(epochs=99, is_sharded=is_sharded)
    stored = replace(case, options=case.options | {"storage": {"url": f"file://{tmp_path / 'stored'}", "every_steps": 1}})
    done, sources, died = 0, Counter[str](), 0
    with World(tmp_path, 3, **LAUNCHED) as ranks:
        for number in range(51):
            until = done + draw.randrange(1, 5)
            moment = draw.choice(["before_update", "in_copy", "end_of_step"])
            fault = f"step={draw.randrange(done + 1, until + 1)}:rank={draw.randrange(size)}:moment={moment}:sigkill"
            faults = {"GEMINI_FAULTS": fault} if number and number < 50 and draw.random() < 0.5 else {}
            # Those that live on are to meet the loss in a collective: two steps more.
            results = ranks.outcome(train, stored, str(tmp_path / "ours"), until + 2 * len(faults), **faults)
            if any(isinstance(each, Exception) for each in results):
                assert faults, results
                died += 1
            else:
                done = max(results[0]["wholes"])
                sources += Counter({place.partition(" ")[0] for place in results[0]["restored"]})
            if number == 49:
                size = 3
            elif number < 49:
                size = draw.choice([other for other in (1, 2, 3, 6) if other != size])
            kept = draw.sample(ranks.hosts, min(size, len(ranks.hosts)))
            for gone in {*ranks.hosts} - {*kept}:
                end_agent(ranks.run, gone)
            ranks.hosts = [*kept, *islice(names, size - len(kept))]
    print(f"{done} steps; {died} attempts died; read from {dict(sources)}")
    with World(tmp_path, 3, **LAUNCHED) as others:
        fixed = others.outcome(train, case, str(tmp_path / "fixed"), done)
    ours, theirs = samples(tmp_path / "ours"), samples(tmp_path / "fixed")
    for epoch, steps in theirs.items():
        assert {step: sorted(ids) for step, ids in ours[epoch].items() if step < done} == {step: sorted(ids) for step, ids in steps.items()}
    np.testing.assert_allclose(results[0]["weights"], fixed[0]["weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.soak  # in short: the jobs above, of a launcher in miniature
@pytest.mark.parametrize(
    ("job", "restart", "micro_batches", "hosts"),
    [
        ("plain", "process", 2, {}),
        ("plain", "in_place", 2, {}),
        ("lightning", "process", 2, {}),
        ("lightning", "in_place", 2, {}),
        ("sharded", "in_place", 2, {}),
        ("plain", "in_place", 2, {"has_spare": True}),
        ("plain", "in_place", 3, {"hosts": 2, "workers": 2}),
    ],
    ids=["plain", "plain in place", "lightning", "lightning in place", "sharded in place", "a spare", "two workers a host"],
)
def test_hosts_that_are_left_go_on_and_take_in_one_that_comes(
    tmp_path: Path, job: str, restart: str, micro_batches: int, hosts: dict[str, Any]
) -> None:
    go_and_come([str(CASE), str(tmp_path / "ours"), "28" if hosts else "14", str(micro_batches), job], tmp_path, restart, **hosts)
    for epoch, steps in samples(tmp_path / "ours").items():
        assert sorted(chain.from_iterable(steps.values())) == list(range(SAMPLES)), epoch


@pytest.mark.soak  # in short: the changes above
@pytest.mark.parametrize("restart", ["process", "in_place"])
def test_hosts_that_are_lost_while_the_job_changes_and_come_back_twice(tmp_path: Path, restart: str) -> None:
    """One goes as soon as the ranks that are left have met, so that too few are left until it comes back, with nothing in its memory."""
    program = ["--nnodes=2:3", "--rdzv-conf=is_host=0,last_call_timeout=1", str(CASE), str(tmp_path / "ours"), "60", "2", "plain"]
    with EmulatedHosts(3, program, tmp_path, env={"GEMINI_RESTART": restart, "GEMINI_REPLICAS": "3"}) as hosts:

        def size() -> int:
            return len([event["hosts"] for event in hosts.events("joined") if event["rank"] == 0][-1])

        def step() -> int:
            return int([0, *(event["iteration"] for event in hosts.events("step"))][-1])

        def goes_on() -> None:
            reached = step()
            hosts.wait_for(lambda: step() > reached + 3)

        goes_on()
        hosts.kill("host2")
        hosts.wait_for(lambda: size() == 2)
        hosts.kill("host1")
        hosts.restart("host1")
        goes_on()
        assert size() == 2
        for _ in range(2):
            hosts.restart("host2")
            hosts.wait_for(lambda: size() == 3)
            goes_on()
            hosts.kill("host2")
            hosts.wait_for(lambda: size() == 2)
        hosts.finish(200)
    for epoch, steps in samples(tmp_path / "ours").items():
        assert sorted(chain.from_iterable(steps.values())) == list(range(SAMPLES)), epoch
