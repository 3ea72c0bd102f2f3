"""Whole jobs on a device whose queues lag behind: each snapshot has the state of its own step, and lacks it where a wait is taken away."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agent_kit import preload
from device_case import OPTIMIZERS, SAVED, Case, Missing, end_without_close, train, undisturbed
from device_waits import WAITS
from rank_kit import World

preload("gemini_ft.worker.recorder", "gemini_ft.worker.courier")

WAIT = {"on_late": "wait"}
CARRIED = WAIT | {"replicas": 2, "traffic": {"transport": "collective", "buffer_bytes": 16384, "sub_buffers": 4}}
JOBS = {
    "late training": Case(WAIT, training_lag=0.4),
    "late copies": Case(WAIT, lag=0.3, training_lag=0.01),
    "skips": Case(lag=0.05),
    "couriers": Case(CARRIED, lag=0.05),
    "verified": Case(WAIT | {"verify": True}),
    **{name: Case(WAIT, name, training_lag=0.02) for name in OPTIMIZERS if name != "momentum"},
    "compared": Case(WAIT | {"replicated": True, "replicas": 2, "compare_every": 1}, lag=0.05, training_lag=0.02),
    "hit": Case(WAIT | {"verify": True}, is_hit=True),
}
# Scenario of a wait (`device_waits`): its module, and the jobs of which one misses it. Two are missed by their units alone: when an agent
# dies, another is there only when the copies have long been made, and a transfer over gloo is over when it has been waited for.
SCENARIOS = {
    "snapshot": ("gemini_ft.worker.snapshot", ["late copies", "late training"]),
    "several batches": ("gemini_ft.worker.snapshot", ["late copies"]),
    "one after the other": ("gemini_ft.worker.snapshot", ["late training"]),
    "lateness": ("gemini_ft.worker.snapshot", ["skips"]),
    "events": ("gemini_ft.accelerator", ["late copies"]),
    "readiness": ("gemini_ft.state.copy_plan", ["late training"]),
    "staging": ("gemini_ft.state.copy_plan", ["late training"]),
    "courier": ("gemini_ft.worker.courier", ["couriers"]),
}
TAKEN_AWAY = [each for each in WAITS if each[0] in SCENARIOS and each[1] != "module.current_stream(self._device).synchronize()"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Optimizer -> the state before each iteration, where nothing disturbs the job."""

    @functools.cache
    def states(optimizer: str) -> list[str]:
        with World(tmp_path_factory.mktemp("undisturbed"), 1) as ranks:
            (found,) = ranks.outcome(undisturbed, optimizer)
        return list(found)

    return states


def check(folder: Path, expected: Callable[[str], list[str]], job: str, missing: Missing | None = None) -> None:
    """Trains, resumes what was committed last, and compares its bits with those of the undisturbed job."""
    case = replace(JOBS[job], missing=missing)
    with World(folder, 1 + ("replicas" in case.options)) as ranks:
        results = [*ranks.outcome(train, case), *ranks.outcome(train, case)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    for first, second in zip(results, results[len(results) // 2 :], strict=False):
        assert second["start"] >= (first["committed"] or 0)  # where some are skipped, an older one may be committed a little later
        assert second["state"] == expected(case.optimizer)[second["start"]]
        if case.options:
            assert (first["committed"], first["skipped"]) == (SAVED - case.is_hit, case.is_hit)


@pytest.mark.parametrize("job", JOBS)
def test_snapshots_have_the_state_of_their_steps(tmp_path: Path, expected: Callable[[str], list[str]], job: str) -> None:
    check(tmp_path, expected, job)


def test_the_slots_of_copies_that_are_under_way_stay_until_they_are_over_at_the_end_of_a_script_too(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        assert ranks.outcome(end_without_close, 2.0) == [[False, False]]


@pytest.mark.soak
@pytest.mark.parametrize(("scenario", "wait", "instead"), TAKEN_AWAY, ids=[f"{name}: {wait.strip()}" for name, wait, _ in TAKEN_AWAY])
def test_a_wait_that_is_missing_is_found(
    tmp_path: Path, expected: Callable[[str], list[str]], scenario: str, wait: str, instead: str
) -> None:
    module, jobs = SCENARIOS[scenario]
    found: list[Exception] = []  # other bits, a commit that never came, or the end of a process
    for job in jobs:
        try:
            check(tmp_path / job, expected, job, (module, wait, instead))
        except Exception as error:
            found.append(error)
    assert found
