"""Habits of DeepSpeed scripts: without gemini, undisturbed under it and killed they end with the same bits, or it is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from agent_kit import WAIT, agent_pid, eventually
from engine_habits_case import adversaries, ends_well, left_to_itself, of_an_older_version, rolls_back
from rank_kit import World
from three_ways import Cell, differing

from gemini_ft.errors import GeminiError, RecoveryError, ReplicaDivergedError

pytestmark = pytest.mark.timeout(300)

JOBS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    # Between the steps of two engines, at the end of a turn, and in the first turn.
    "in turns": (partial(adversaries, critic=1, deferred=False), ["0:judge:0:0", "1:judge:3:1", "0:maker:5"]),
    # As the script says where its iteration ends: between the snapshots of two engines.
    "deferred": (partial(adversaries, critic=1, deferred=True), ["0:between:4"]),
    "three to one": (partial(adversaries, critic=3, deferred=False), ["1:judge:3:4"]),
    "rolls back": (rolls_back, ["0:5", "1:7"]),
}


@pytest.mark.parametrize("name", ["in turns", pytest.param("three to one", marks=pytest.mark.soak), "deferred", "rolls back"])
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
    """An engine's protection without an engine; ``kept``: (number of a snapshot, numbers of the others in it), the oldest first."""

    def __init__(self, name: str, *kept: tuple[int, dict[str, int]]) -> None:
        self.name, self.checkpointer = name, self
        self.saved: list[int] = []
        self.is_updated = False
        self._kept = [SimpleNamespace(iteration=step, extras={"beside": {"steps": beside, "order": None}}) for step, beside in kept]
        self.resume()

    def resume(self, before: int | None = None) -> None:
        older = [found for found in self._kept if before is None or found.iteration < before]
        self.found = older[-1] if older else None
        self.iteration = self.number = self.found.iteration if self.found else 0

    def put_back_generators(self) -> None:
        pass

    def due(self, before: int, now: int) -> bool:
        return now > before

    def next_number(self) -> int:
        return self.number + 1

    def reaches(self, number: int, is_due: bool) -> None:
        self.number, self.is_updated = number, is_due

    def ends_turn(self) -> None:
        if self.is_updated:
            self.is_updated, self.iteration = False, self.number
            self.saved.append(self.number)


TURNS = {  # the steps of engines -> the numbers of their snapshots
    "DGDGDG": {"D": [1, 2, 3], "G": [1, 2, 3]},
    "DDGDDGDD": {"D": [2, 4], "G": [2, 4]},
    "A" * 40 + "BBB": {"A": [*range(33, 42)], "B": [41, 42, 43]},
    "AABAABB" + "A" * 3: {"A": [2, 4, 5, 6, 7], "B": [2, 4, 5]},
}


@pytest.mark.parametrize("steps", TURNS)
def test_engines_are_saved_at_the_end_of_each_turn(steps: str) -> None:
    from gemini_ft.deepspeed.turns import Turns

    turns: Any = Turns()
    engines = {name: Stepping(name) for name in sorted({*steps})}
    for engine in engines.values():
        turns.join(engine)
    for name in steps:
        engines[name].is_updated, engines[name].number = True, engines[name].next_number()
        turns.stepped(engines[name])
    assert {name: engine.saved for name, engine in engines.items()} == TURNS[steps]


def test_an_engine_that_is_ahead_of_another_one_goes_back_if_it_can() -> None:
    from gemini_ft.deepspeed.turns import Turns

    turns: Any = Turns()
    maker, judge = Stepping("G", (3, {"D": 3})), Stepping("D", (3, {"G": 3}), (4, {"G": 4}))
    for engine in (maker, judge):
        turns.join(engine)
    turns.agree()
    assert (maker.iteration, judge.iteration) == (3, 3)
    turns.join(third := Stepping("E", (4, {"G": 4, "D": 4})))
    with pytest.raises(RecoveryError, match="engine E was resumed at step 4"):
        turns.agree()
    assert third.found is None


class Closing:
    """An engine's protection that fails to leave the run."""

    name = "deepspeed-0"

    def __init__(self, error: GeminiError | None) -> None:
        self.error, self.is_closed = error, False

    def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


def test_the_end_of_a_script_closes_every_engine_and_then_raises_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemini_ft.deepspeed import engine
    from gemini_ft.deepspeed.turns import turns

    engines = [Closing(error) for error in (None, ReplicaDivergedError("engines differ"), None)]
    monkeypatch.setattr(turns, "open", engines)
    with pytest.raises(ReplicaDivergedError, match="engines differ"):
        engine.finish()
    assert all(each.is_closed for each in engines)
