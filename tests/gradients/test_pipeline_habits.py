"""Habits of other people's scripts: a gradient pipeline gives what plain DDP gives, or names what it cannot do."""

from __future__ import annotations

from typing import Any

import pipeline_habits_case
import pytest
from agent_kit import preload
from pipeline_case import several
from rank_kit import on_ranks

preload("pipeline_habits_case")
NAMES = [habit.__name__ for habit in pipeline_habits_case.HABITS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Habit -> what each rank found wrong."""
    cases = [(habit, ()) for habit in pipeline_habits_case.HABITS]
    ranks = on_ranks(tmp_path_factory.mktemp("habits"), 2, several, *cases)
    return dict(zip(NAMES, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("habit", NAMES)
def test_a_habit_gives_what_ddp_gives_or_is_named(habit: str, found: dict[str, list[Any]]) -> None:
    assert found[habit] == [[], []]
