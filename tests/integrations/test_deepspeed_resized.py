"""A run goes on with another number of ranks, as if DeepSpeed's own universal checkpoint had been used in between."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

import numpy as np
from deepspeed_case import Case, train_resized
from elastic_case import SAMPLES, engage, fit, samples
from elastic_case import Case as Batches
from plain_case import history
from rank_kit import World, on_ranks

pytestmark = pytest.mark.timeout(300)

SIZES = [(4, 4), (2, 8), (3, 12)]  # ranks, until which step
HOSTS = {4: ["a", "a", "b", "b"], 2: ["a", "b"], 3: ["a", "b", "c"]}


def through_universal_checkpoints(folder: Path, case: Case) -> dict[int, str]:
    """What the losses are with DeepSpeed's own means."""
    saved, out, last = folder / "universal", folder / "expected", 0
    for world, until in SIZES:
        if last:
            arguments = ["--num_extract_workers=1", "--num_merge_workers=1", *(["--inject_missing_state"] if case.stage < 3 else [])]
            on_ranks(
                folder, 1, convert, [*arguments, f"--input_folder={saved}/step{last}", f"--output_folder={saved}/step{last}_universal"]
            )
            (saved / "latest_universal").write_text(f"step{last}_universal")
        with World(folder, world) as ranks:
            said = ranks.outcome(train_resized, case, str(out), until, str(saved))
            assert not any(isinstance(result, Exception) for result in said), said
        last = until
    return history(out, 0)


def convert(arguments: list[str]) -> None:
    """DeepSpeed's command, in a process that has imported it."""
    sys.argv = ["ds_to_universal", *arguments]
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")


def resized(folder: Path, case: Case) -> tuple[dict[int, str], list[list[Any]]]:
    """What they are with ours, and what the ranks of each size said."""
    said = []
    with World(folder, hosts=HOSTS[4]) as ranks:
        for world, until in SIZES:
            ranks.hosts = HOSTS[world]
            said.append(ranks.outcome(train_resized, case, str(folder / "ours"), until))
            assert not any(isinstance(result, Exception) for result in said[-1]), said[-1]
    return history(folder / "ours", 0), said


LONG = [pytest.param(Case(*each), marks=pytest.mark.soak) for each in [(1, False), (1, True), (2, False), (2, True), (3, False)]]


@pytest.fixture(scope="module", params=[*LONG, Case(3, True)], ids=lambda case: f"{case.stage}-{case.bf16}")
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def expected(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return through_universal_checkpoints(tmp_path_factory.mktemp("expected"), case)


def test_universal_checkpoints_of_deepspeed(expected: dict[int, str]) -> None:
    assert sorted(expected) == list(range(12))


def test_four_two_three_ranks(tmp_path: Path, case: Case, expected: dict[int, str]) -> None:
    ours, said = resized(tmp_path, case)
    assert ours == expected
    assert [results[0]["start"] for results in said] == [0, 4, 8]


@pytest.mark.soak
@pytest.mark.parametrize("job", [engage, fit], ids=["plain", "lightning"])
def test_with_elastic_the_batches_and_their_order_stay(tmp_path: Path, job: Callable[..., Any]) -> None:
    """Two ranks, one, and two again, beside two all the time, whose configuration says how many micro-batches two ranks are to have.

    Lightning divides each loss by their number, and the engine divides it once more.
    """
    case, said = Batches(accumulation=3, has_engine=True), []
    launched = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"} if job is fit else {}
    with World(tmp_path, hosts=["a", "b"], **launched) as ranks, World(tmp_path, hosts=["a", "b"], **launched) as others:
        fixed = others.start(job, case, str(tmp_path / "fixed"), 11, LOCAL_WORLD_SIZE="2")
        for hosts, until in ((["a", "b"], 4), (["a"], 8), (["a", "b"], 11)):
            ranks.hosts = hosts
            said.append(ranks.outcome(job, case, str(tmp_path / "ours"), until, LOCAL_WORLD_SIZE=str(len(hosts))))
            assert not any(isinstance(result, Exception) for result in said[-1]), said[-1]
        expected = fixed.results()
    assert [results[0]["start"] for results in said] == [0, 4, 8]
    assert [results[0]["accumulation"] for results in said] == [3, 6, 3]
    ours, theirs = samples(tmp_path / "ours"), samples(tmp_path / "fixed")
    assert sorted(each for ids in ours[0].values() for each in ids) == list(range(SAMPLES))
    assert [{step: sorted(ids) for step, ids in epoch.items()} for epoch in ours.values()] == [
        {step: sorted(ids) for step, ids in epoch.items()} for epoch in theirs.values()
    ]
    np.testing.assert_allclose(said[-1][0]["weights"], expected[0]["weights"], rtol=1e-4, atol=1e-6)
