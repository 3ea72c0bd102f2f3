"""Habits of DeepSpeed scripts: without gemini, undisturbed under it and killed they end with the same bits, or it is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from agent_kit import WAIT, agent_pid, eventually
from engine_habits_case import (
    adversaries,
    batches,
    ends_well,
    goes_universal,
    held_ones,
    left_to_itself,
    of_an_older_version,
    rolls_back,
    walks,
    with_an_odd_optimizer,
    writes_masters,
    writes_weights,
)
from rank_kit import World
from three_ways import Cell, differing

from gemini_ft.deepspeed.several import Engines, engines
from gemini_ft.errors import GeminiError, ReplicaDivergedError, StateError

pytestmark = pytest.mark.timeout(300)

JOBS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    # Two engines: behind the first iteration, and later ones.
    "in turns": (partial(adversaries, critic=1, deferred=False), ["0:maker:0", "1:maker:3"]),
    # As the script says where its iteration ends.
    "deferred": (partial(adversaries, critic=1, deferred=True), ["0:maker:4"]),
    "three to one": (partial(adversaries, critic=3, deferred=True), ["1:maker:3"]),
    "rolls back": (rolls_back, ["0:5", "1:7"]),
    "writes masters": (partial(writes_masters, often=False), ["1:4", "0:6"]),
    # In the step behind the universal checkpoint, and later.
    "universal 1": (partial(goes_universal, stage=1, bf16=True), ["1:4", "0:7"]),
    "universal 2": (partial(goes_universal, stage=2, bf16=False), ["1:4", "0:7"]),
    "universal 3": (partial(goes_universal, stage=3, bf16=False), ["1:4", "0:7"]),
}


@pytest.mark.parametrize(
    "name",
    [
        "in turns",
        "deferred",
        "rolls back",
        "writes masters",
        "universal 2",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("three to one", "universal 1", "universal 3")),
    ],
)
def test_habits_of_deepspeed_scripts_three_ways(name: str, tmp_path: Path) -> None:
    """Several engines; optimizers with state of their own; generators of model-parallel layers; other batches; checkpoints in between."""
    job, kills = JOBS[name]
    folders = {way: tmp_path / way for way in ("ddp", "undisturbed", "killed")}
    with World(tmp_path, 2) as plain, World(tmp_path, 2) as calm, World(tmp_path, 2) as ranks:
        attempts = [world.start(job, str(folders[way]), [], world is plain) for world, way in ((plain, "ddp"), (calm, "undisturbed"))]
        ranks.finish(job, str(folders["killed"]), kills, False)
        assert ranks.restarts == len(kills)
        assert not any(isinstance(said, Exception) for attempt in attempts for said in attempt.results())
    assert differing(folders, "", Cell(kills=kills)) == []


def test_masters_that_are_written_after_each_step_are_refused(tmp_path: Path) -> None:
    """Their weights follow at the next step, and those of a resumed engine at once."""
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(writes_masters, str(tmp_path / "files"), [], False, True)
    assert isinstance(said, StateError)
    assert "write them before engine.step()" in str(said)


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, True), (3, False)])
def test_weights_that_are_written_after_each_step_are_refused(stage: int, bf16: bool, tmp_path: Path) -> None:
    """A resumed engine makes them of the masters."""
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(writes_weights, stage, bf16, "data")
    assert isinstance(said, StateError)
    assert "the weights of 1.weight are not what their masters give" in str(said)


@pytest.mark.parametrize(("how", "count"), [("once", 1), ("swap", 0)])
def test_weights_that_are_written_once_are_named_and_those_that_are_put_back_are_not(how: str, count: int, tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (told,) = ranks.outcome(writes_weights, 1, False, how)
    assert sum("the weights of 1.weight are not what their masters give" in text for text in told) == count, told


def test_what_no_snapshot_of_an_engine_has_is_named(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        told = [text for fail in (True, False) for text in ranks.outcome(left_to_itself, str(tmp_path / "files"), fail)[0]]
    for text in (
        "load_checkpoint has taken the engine back to step 2, although it was resumed at step 5",
        "this script changes average",
        "this loop draws from the generator drawn",
        "the model is evaluated after engine.step()",
    ):
        assert any(text in line for line in told), (text, told)
    assert not any("THE LOOP HAS BEGUN AGAIN" in line for line in told)


def test_what_an_older_version_has_kept_of_an_engine_is_resumed(tmp_path: Path) -> None:
    """It knew of no other engines, no attributes of optimizers, and no trackers of generators."""
    with World(tmp_path, 1) as ranks:
        assert [ranks.outcome(of_an_older_version, older) for older in (True, False)] == [[0], [3]]


def test_an_optimizer_that_holds_another_one_is_refused_by_the_name_of_that(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(held_ones)
    assert [text.partition(",")[0] for text in said] == [
        f"UnsupportedStateError: the optimizer holds another one ({name})" for name in ("AdamW", "Adam")
    ]


def test_what_an_optimizer_has_that_no_snapshot_can_have_ends_no_job(tmp_path: Path) -> None:
    """It is named, and all else goes on; so does a job that was begun before such an optimizer was refused."""
    with World(tmp_path, 1) as ranks:
        ((first, seen, told),) = ranks.outcome(with_an_odd_optimizer, False)
        assert (first, seen) == (0, 3)
        for name in ("net", "view"):
            assert sum(f"{name} of the optimizer is in no snapshot" in text for text in told) == 1, told
        ((first, seen, told),) = ranks.outcome(with_an_odd_optimizer, True)
    assert (first, seen) == (3, 6)
    assert any("drawn of the optimizer is in no snapshot" in text for text in told), told
    assert any("the optimizer holds another one (Adam), whose state is in no snapshot" in text for text in told), told


@pytest.mark.parametrize(("then", "now"), [(4, (6, 2)), (8, (4, 1))])
def test_a_batch_that_the_training_changed_is_resumed_unless_the_configuration_has_changed_too(
    then: int, now: tuple[int, int], tmp_path: Path
) -> None:
    with World(tmp_path, 1) as ranks:
        assert ranks.outcome(batches, then) == [now]


def test_generators_that_are_tracked_later_can_still_be_added(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker refuses a name that it has; and those that the snapshot lacks stay."""
    import deepspeed

    from gemini_ft.deepspeed.versions import put_back_trackers
    from gemini_ft.state.rng import rng_trackers

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    for name in ("before", "later"):
        tracker.add(name, len(name))
    saved = {kind: {**each.get_states()} for kind, each in rng_trackers().items()}
    tracker.reset()
    for name in ("before", "new"):
        tracker.add(name, 50 + len(name))
    put_back_trackers(saved)
    tracker.add("later", 60)
    (states,) = saved.values()
    assert torch.equal(tracker.get_states()["before"], states["before"])
    assert {*tracker.get_states()} == {"before", "later", "new"}
    assert "the generators later of get_cuda_rng_tracker() are in the snapshot" in caplog.text
    tracker.reset()


def test_an_optimizer_without_attributes_of_its_own_costs_no_walk(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        assert ranks.outcome(walks) == [(1, 0)]


@pytest.mark.parametrize(("at_end", "stored"), [(True, 3), (False, 2)])
def test_an_engine_that_ends_well_goes_on_behind_what_is_stored(at_end: bool, stored: int, tmp_path: Path) -> None:
    """With ``storage.at_end`` that is its last step, and the same command has nothing to do."""
    with World(tmp_path, 1) as ranks:
        for resumed in (0, stored):
            attempt = ranks.start(ends_well, str(tmp_path / "store"), 3, at_end)
            assert attempt.results() == [resumed]
            for process in attempt.processes:  # they end well, and are not killed
                process.join(WAIT)
            eventually(lambda: agent_pid(ranks.run, ranks.hosts[0]) is None, "the end of the agent, behind its last upload")


class Stepping:
    """An engine's protection without an engine, resumed or not; it remembers whether its generators have been put back."""

    def __init__(self, name: str, number: int = 0, others: dict[str, int] | None = None) -> None:
        self.name, self.number, self.deferred = name, number, False
        self.found = SimpleNamespace(iteration=number, extras={"others": others or {}}) if number else None
        self.gave_back = 0

    def put_back_generators(self) -> None:
        self.gave_back += 1


@pytest.mark.parametrize(("steps", "warnings"), [("ABAB", 1), ("AABABBA", 1), ("AAABBB", 0), ("AAA", 0), ("CACA", 0)])
def test_engines_that_step_by_turns_are_named_once(
    steps: str, warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that are trained one after the other, and not one (C) that is saved where the script says so."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    several: Any = Engines()
    there = {name: Stepping(name) for name in "ABC"}
    there["C"].deferred = True
    for name in steps:
        several.stepped(there[name])
    assert sum("steps several engines by turns" in line for line in caplog.messages) == warnings


def test_random_numbers_go_on_from_the_newest_snapshot_of_any_engine() -> None:
    several: Any = Engines()
    maker, judge, new = Stepping("G", 5, {"D": 5}), Stepping("D", 5, {"G": 4}), Stepping("E")
    several.open |= {new, maker}
    several.put_back_generators(maker)
    several.open.add(judge)
    several.put_back_generators(judge)
    assert (maker.gave_back, judge.gave_back, new.gave_back) == (2, 0, 0)


@pytest.mark.parametrize(("judges", "said"), [(5, False), (4, True)])
def test_engines_that_go_on_from_different_moments_are_named(
    judges: int, said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failure between the snapshots of two engines that had both stepped."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    several: Any = Engines()
    maker, judge = Stepping("G", 5, {"D": 5}), Stepping("D", judges, {"G": judges})
    several.open |= {maker, judge}
    several.put_back_generators(judge)
    found = [line for line in caplog.messages if "ENGINES GO ON FROM DIFFERENT MOMENTS" in line]
    assert ["that of G, there were 5 steps of D, which goes on from 4." in line for line in found] == [True] * said


class Closing:
    """An engine's protection that may fail to leave the run, and stands in a set where chance has it."""

    def __init__(self, number: int, error: GeminiError | None, closed: list[str]) -> None:
        self.name, self.number, self.error, self.closed = f"deepspeed-{number}", number, error, closed

    def __hash__(self) -> int:
        return -self.number

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


def test_the_end_of_a_script_closes_every_engine_and_then_raises_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order on all ranks: their last snapshots are collective."""
    from gemini_ft.deepspeed import engine

    closed: list[str] = []
    there = [Closing(number, ReplicaDivergedError("engines differ") if number == 1 else None, closed) for number in range(5)]
    monkeypatch.setattr(engines, "open", {*there})
    with pytest.raises(ReplicaDivergedError, match="engines differ"):
        engine.finish()
    assert closed == [each.name for each in there]
