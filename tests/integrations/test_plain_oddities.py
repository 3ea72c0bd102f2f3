"""Plain loops whose state hides or changes, killed in mid-run: they end with the bits of an undisturbed run, or are refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from oddities_case import renormalised, stranger, train, unfreezing
from plain_case import side_by_side
from rank_kit import World

from gemini_ft.errors import UnsupportedStateError
from gemini_ft.events import read_events


def check(folder: Path, what: str, world: int, faults: str) -> list[Any]:
    results, expected = side_by_side(folder, partial(train, what, options={}), faults, world, GEMINI_EVENTS=str(folder / "events"))
    assert [(said["state"], said["frozen"]) for said in results] == [(said["state"], said["frozen"]) for said in expected]
    return results


def test_a_loop_in_which_everything_changes_and_an_embedding_writes_its_weight(tmp_path: Path) -> None:
    """SAM, an optimizer that accumulates, a layer that is unfrozen, one that is added, pruning, a buffer that grows, a number, max_norm."""
    faults = "step=6:rank=0:sigkill; step=8:rank=0:sigkill; step=12:rank=0:sigkill:moment=before_update"
    results = check(tmp_path, "everything", 1, faults)
    assert results[0]["start"] >= 10  # copied at the end of the step, the state is protected
    assert [event for event in read_events(tmp_path / "events") if event["event"] == "copied at step"]


def test_what_is_sharded_keeps_its_flags_and_inner_optimizers(tmp_path: Path) -> None:
    results = check(tmp_path, "sharded", 2, "step=6:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy; step=11:rank=0:sigkill")
    assert results[0]["start"] >= 9
    assert results[0]["frozen"] == []


def test_what_power_sgd_remembers(tmp_path: Path) -> None:
    results = check(tmp_path, "power", 2, "step=7:rank=1:sigkill; step=11:rank=0:sigkill:moment=in_copy")
    assert results[0]["start"] >= 9


def test_a_hook_that_lets_ranks_differ_is_refused_at_the_start(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        said = ranks.outcome(train, "local", str(tmp_path / "out"), {})
    assert all("post_localSGD_hook lets the ranks' parameters differ" in str(error) for error in said)
    assert all(type(error) is UnsupportedStateError for error in said)


def test_what_is_unfrozen_and_not_reduced_is_refused(tmp_path: Path) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with World(tmp_path, hosts=["host0", "host0"], GEMINI_ON_LATE="wait", **launched) as ranks:
        for errors in ranks.outcome(unfreezing):
            assert errors.keys() == {"plain", "fabric", "trainer"}
            for kind, (early, late) in errors.items():
                assert re.search(r"model\.0\.weight: the ranks drift|module\.backbone\.weight: the ranks drift", early), kind
                assert late == "", kind


def test_ranks_that_an_embedding_makes_differ_are_found_at_the_next_step(tmp_path: Path) -> None:
    """A resume would give all of them the rows of one; with ``compare_every`` it was found at step 1000."""
    for is_by_rank in (True, False):
        with World(tmp_path, 2) as ranks:
            errors = ranks.outcome(renormalised, is_by_rank)
        assert [bool(error) for error in errors] == [is_by_rank] * 2, errors
        assert any(error.startswith("state that must be the same on all ranks differs") for error in errors) == is_by_rank


def test_an_optimizer_that_was_replaced_is_refused_when_it_steps(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (text,) = ranks.outcome(stranger, str(tmp_path / "error"))
    assert "an optimizer that was not given has stepped, a Adam" in text
    assert "checkpointer.bind(model, optimizers)" in text
