"""Models that are unlike the usual ones get the right averages, or an error that names the reason, at construction."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pipeline_odd_case
import pytest
import torch
from agent_kit import preload
from compression_kit import METHODS
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pipeline_case import several
from plain_case import side_by_side
from rank_kit import World, on_ranks

from gemini_ft.errors import ConfigError
from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.state.gradients import announced
from gemini_ft.testing import first_difference

preload("pipeline_odd_case")


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Dtype -> what each rank found wrong."""
    cases = [(pipeline_odd_case.every_dtype, (dtype,)) for dtype in pipeline_odd_case.DTYPES]
    ranks = on_ranks(tmp_path_factory.mktemp("dtypes"), 2, several, *cases)
    return dict(zip(pipeline_odd_case.DTYPES, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("dtype", [*pipeline_odd_case.DTYPES, *pipeline_odd_case.REFUSED])
def test_every_dtype_is_averaged_or_refused_by_name(dtype: str, averaged: dict[str, list[Any]]) -> None:
    if dtype in pipeline_odd_case.DTYPES:
        assert averaged[dtype] == [[]] * 2
        return
    model = torch.nn.Linear(2, 2)
    model.register_parameter("odd", torch.nn.Parameter(torch.zeros(3).to(getattr(torch, dtype))))
    for pipeline in ([], [{"params": "weight", "compress": "bf16"}], [{"params": "*", "sync": "zen"}]):
        with pytest.raises(ConfigError, match=f"odd is torch.{dtype}, which no backend adds up"):
            GradientSynchronizer(model, pipeline)


RANKS, SAVED = st.integers(0, 1), st.integers(0, 5)
MOVES = st.one_of(
    st.just(("step",)),
    st.just(("step",)),
    st.just(("save",)),
    st.tuples(st.just("read"), RANKS),
    st.tuples(st.just("load"), SAVED),
    st.tuples(st.just("stray"), st.integers(-1, 1), SAVED),
)
WITHOUT_SHRINKING = [Phase.explicit, Phase.generate]  # an example takes seconds
PROGRAMS = st.tuples(st.booleans(), st.lists(MOVES, min_size=4, max_size=10).map(lambda moves: [*moves, ("step",)]))


@settings(max_examples=1, deadline=None, phases=WITHOUT_SHRINKING)
@given(st.fixed_dictionaries(dict.fromkeys(METHODS, PROGRAMS)))
def test_a_rollback_is_as_good_as_a_restart(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, Any]) -> None:
    assert on_ranks(tmp_path_factory.mktemp("rollback"), 2, pipeline_odd_case.rolled_back, programs) == [[]] * 2


@pytest.mark.soak
@settings(max_examples=40, deadline=None, phases=WITHOUT_SHRINKING)
@given(st.fixed_dictionaries(dict.fromkeys(METHODS, PROGRAMS)))
def test_many_rollbacks_are_as_good_as_restarts(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, Any]) -> None:
    assert on_ranks(tmp_path_factory.mktemp("rollback"), 2, pipeline_odd_case.rolled_back, programs) == [[]] * 2


def test_a_pending_backward_pass_is_counted_before_a_load(tmp_path: Path) -> None:
    moves = [("step",), ("save",), ("stray", -1, 1), ("step",), ("stray", 0, 1), ("step",), ("stray", 1, 0), ("step",), ("step",)]
    programs = {name: (ddp, moves) for ddp, name in ((True, "randomk"), (True, "qsgd"), (True, "dgc"), (False, "terngrad"))}
    assert on_ranks(tmp_path, 2, pipeline_odd_case.rolled_back, programs) == [[]] * 2


def test_ranks_that_have_drifted_apart_are_told(tmp_path: Path) -> None:
    for each in on_ranks(tmp_path, 3, pipeline_odd_case.stray_and_drifting):
        assert len(each) == 2
        for saved, stepped, loaded, tuned in each:
            assert saved == ""
            assert stepped.startswith(
                "AveragingError: the ranks of the gradient pipeline have drifted apart, their rounds differ: rank 0 has 2, "
            )
            assert loaded.startswith("RecoveryError: the gradient pipeline's state is of different steps or plans on ranks 0 and 1")
            assert tuned.startswith("RecoveryError: the gradient pipeline's state is of ranks that had drifted apart, their trials differ")


@pytest.mark.soak
def test_a_snapshot_of_ranks_that_had_drifted_apart_is_given_up_for_an_older_one(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        assert ranks.finish(pipeline_odd_case.drifted_and_saved, str(tmp_path)) == [4, 4]
        assert ranks.restarts == 4  # when the drift is seen, and three times with the snapshot that has it


def test_a_snapshot_waits_for_no_peer(tmp_path: Path) -> None:
    """One that has made its averages, and is late with the rest of its step."""
    assert on_ranks(tmp_path, 2, pipeline_odd_case.saved_alone) == [[True, True], []]


def test_models_can_be_compiled_copied_pickled_and_exported(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_odd_case.copied_and_compiled) == [[]] * 2


def test_sparse_gradients_of_plain_parameters(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_odd_case.functional_embedding) == [[]] * 2


def test_parameters_without_elements_in_sparse_schemes(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_odd_case.empty_gradients) == [[]] * 2


def test_reentrant_checkpointing_gets_the_right_advice(tmp_path: Path) -> None:
    for refused, fine in on_ranks(tmp_path, 2, pipeline_odd_case.used_twice_under_checkpointing):
        assert "is ready a second time in one step" in refused
        assert "used more than once under torch.utils.checkpoint: give it use_reentrant=False" in refused
        assert fine == ""


def test_a_checkpointer_finds_the_synchronizer_of_its_model(tmp_path: Path) -> None:
    starts, begins = side_by_side(tmp_path, pipeline_odd_case.found_by_itself, "step=4:rank=1:sigkill")
    assert begins == [0, 0]
    assert min(starts) > 0


@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_synchronizer_that_comes_after_resume_or_the_first_snapshot_is_refused(snapshots: int, tmp_path: Path) -> None:
    """At a first start too, where there was nothing to resume: no restart could resume it."""
    (said,) = on_ranks(tmp_path, 1, pipeline_odd_case.made_too_late, snapshots)
    assert said == "; " * snapshots + (
        "StateError: a GradientSynchronizer was given to the model after resume(), or after the first snapshot, so that its residuals "
        "would be missing in snapshots; make it before the Checkpointer resumes, or close() it"
    )


def test_a_synchronizer_that_is_made_before_fabric_loads_is_in_the_first_snapshot(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
    assert on_ranks(tmp_path, 1, pipeline_odd_case.made_before_fabric_loads) == [("", True)]


def test_several_synchronizers_are_one_state() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    rules = [{"params": "*", "compress": "topk"}]
    made = [GradientSynchronizer(model, rules) for model in (first, second)]
    found = announced([*first.parameters(), *second.parameters()])
    assert found is not None
    assert announced(first.parameters()) is made[0]
    for model, synchronizer in zip((first, second), made, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        synchronizer.synchronize()
    state = copy.deepcopy(found.state_dict())
    found.load_state_dict(state)
    assert first_difference(found.state_dict(), state) is None
    assert [synchronizer.averager.step for synchronizer in made] == [1, 1]
    assert len(found.summary()) == 4
    for synchronizer in made:
        synchronizer.close()
    assert announced(first.parameters()) is None


def test_what_is_kept_can_be_forgotten(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_odd_case.forgotten) == [[]] * 2


def test_gradients_that_are_thrown_away_can_be_discarded(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_odd_case.discarded_in_part) == [[]] * 2


def test_a_discriminator_learns_nothing_of_its_generators_steps(tmp_path: Path) -> None:
    cases = [(pipeline_odd_case.adversaries, (discarding,)) for discarding in (False, True)]
    polluted, clean = on_ranks(tmp_path, 2, several, *cases)[0]
    assert clean["steps"] == 200
    assert polluted["error"] > 5 * clean["error"], (polluted, clean)


def test_trials_of_schemes_go_on_after_a_resume(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    steps = [(whole, 0, 120), (parts, 0, 40), (parts, 40, 120)]
    cases = [(pipeline_odd_case.trials, (str(folder), first, last)) for folder, first, last in steps]
    for expected, first, second in on_ranks(tmp_path, 2, several, *cases):
        assert first[:-1] + second == expected
        assert "None" not in expected[-1]
