"""Gradients are averaged as by hand, whatever travels together and in which host; or every rank raises an error."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pipeline_case
import pytest
import torch
from agent_kit import preload
from compression_kit import EVERY, gradients, method, same
from fake_accelerator import installed
from rank_kit import Failed, World, on_ranks
from switch_kit import switches
from torch import nn

from gemini_ft.compression.collective import reduce
from gemini_ft.errors import ConfigError
from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.wire.trust import derive

preload("pipeline_case")


@pytest.mark.parametrize(
    ("world", "ddp", "whole"),
    [
        (2, True, False),
        (3, False, False),
        *(pytest.param(*each, True, marks=pytest.mark.soak) for each in itertools.product((2, 3), (False, True))),
    ],
)
def test_every_method_averages_as_by_hand(world: int, ddp: bool, whole: bool, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, world, pipeline_case.every_method, ddp, whole) == [[]] * world


CASES = [
    pipeline_case.default_methods,
    pipeline_case.two_phases,
    pipeline_case.without_rules,
    pipeline_case.picked_by_sparsifiers,
    pipeline_case.truncated,
    pipeline_case.no_rule_for_sparse,
    pipeline_case.accumulation,
    pipeline_case.unused,
    pipeline_case.unused_ddp,
    pipeline_case.kinds_of_parameters,
    pipeline_case.mixed_precision,
    pipeline_case.clipping,
    pipeline_case.one_rank_groups,
    pipeline_case.telemetry,
    pipeline_case.beside_another_hook,
    pipeline_case.moved_to_processors,
]


ON_THREE = [pipeline_case.without_rules, pipeline_case.unused, pipeline_case.no_rule_for_sparse]


# Ranks, and the cases that share a start of them.
STARTS = [(2, CASES[:8]), (2, CASES[8:]), (3, ON_THREE)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[Any]]]:
    """Case -> rank -> the error at its start. All cases run in one job, which the first test that needs one starts."""

    @functools.cache
    def ran(start: int) -> list[list[Any]]:
        world, cases = STARTS[start]
        ranks = on_ranks(tmp_path_factory.mktemp("ranks"), world, pipeline_case.several, *((case, ()) for case in cases))
        return [list(each) for each in zip(*ranks, strict=True)]

    return ran


@pytest.mark.parametrize(
    ("start", "number"),
    [
        pytest.param(start, number, id=f"{case.__name__}-{world}")
        for start, (world, cases) in enumerate(STARTS)
        for number, case in enumerate(cases)
    ],
)
def test_on_ranks(start: int, number: int, ran: Callable[[int], list[list[Any]]]) -> None:
    assert ran(start)[number] == [[]] * STARTS[start][0]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_sparse_schemes_are_dense_all_reduce(world: int, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, world, pipeline_case.sparse_schemes) == [[]] * world


@pytest.mark.parametrize("scheme", ["switchml", "fpisa", "omnireduce-streaming"])
def test_gradients_go_through_a_switch(scheme: str, tmp_path: Path) -> None:
    """The key that both sides derive from the run secret; what the switch added up shows that gradients went that way."""
    case = pipeline_case.streamed if scheme == "omnireduce-streaming" else partial(pipeline_case.switched, scheme)
    with switches(key=derive(b"of the run", b"switch")) as [switch]:
        assert on_ranks(tmp_path, 2, case, switch.place, GEMINI_SECRET="of the run") == [[]] * 2
        assert switch.stop()["added"] > 0


@pytest.mark.parametrize(("fusion", "ddp", "snapshots"), [("cupcake", False, False), ("cupcake", True, True), ("auto", False, False)])
def test_all_ranks_have_one_plan_and_it_settles(fusion: str, ddp: bool, snapshots: bool, tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, pipeline_case.planned, fusion, ddp, snapshots) == [[]] * 2


@pytest.mark.parametrize("switch", [False, True], ids=["", "through a switch"])
def test_a_fresh_process_goes_on_as_if_never_interrupted(switch: bool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    with switches(count=int(switch), key=derive(b"of the run", b"switch")) as made:
        place = made[0].place if switch else ""
        cases = [(pipeline_case.interrupted, (str(folder), 0, last, place)) for folder, last in ((whole, 6), (parts, 3))]
        expected, first = zip(*on_ranks(tmp_path, 2, pipeline_case.several, *cases, GEMINI_SECRET="of the run"), strict=True)
        second = on_ranks(tmp_path, 2, pipeline_case.interrupted, str(parts), 3, 6, place, GEMINI_SECRET="of the run")
        assert all(each.stop()["added"] > 0 for each in made)
    names = ("switchml", "fpisa") if switch else pipeline_case.PIPELINES
    for rank in range(2):
        assert set(expected[rank]) == {f"{name}, DDP={ddp}" for name in names for ddp in (False, True)}
        for key, steps in expected[rank].items():
            assert len(set(steps)) == 6
            assert first[rank][key] + second[rank][key] == steps, key


def test_states_of_something_else_are_refused(tmp_path: Path) -> None:
    for parameters, rules in on_ranks(tmp_path, 2, pipeline_case.foreign_states):
        assert (
            "StateError: the gradient pipeline's state is of other parameters: conv, norm, odd, scalar, zero_d are on one side only"
            in parameters
        )
        assert "StateError: the gradient pipeline's state is of other rules: it has" in rules
        assert "'compress': {'method': 'topk'" in rules
        assert "'compress': {'method': 'qsgd'}" in rules


def test_unused_parameters_are_an_error_without_the_option(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, pipeline_case.unused_refused)
    way_out = "the backward pass left them out. Give find_unused_parameters=True, or use them in the loss"
    everything = f"StateError: no gradient for zero_d, scalar, odd, norm, conv and others (6 of 6): {way_out}"
    assert first == [f"StateError: no gradient for odd, conv (2 of 6): {way_out}", "fine", everything]
    assert others == [["", "fine", everything]] * 2


def test_a_second_backward_without_synchronize_is_an_error(tmp_path: Path) -> None:
    for plain, ddp in on_ranks(tmp_path, 2, pipeline_case.twice):
        assert (
            "is ready a second time in one step: run all but the last backward of a step inside no_sync(), and call synchronize()" in plain
        )
        assert ddp == "StateError: DistributedDataParallel waits for its communication hook by itself: leave synchronize() out"


def test_what_differs_between_ranks_is_an_error_on_all(tmp_path: Path) -> None:
    first, *others = on_ranks(tmp_path, 3, pipeline_case.disagreements)
    assert others == [first] * 2
    method, option, shape, name, dtype, on_one, on_all, setting, pattern, world, afterwards = first
    assert all(text.startswith("ConfigError: ") for text in first[:-1])
    assert "gradient_pipeline differs between ranks: rank 0 has" in method
    assert "rank 2 has" in method
    assert "ratio=0.5" in option
    assert "rank 0 has embed of shape (3, 4) where rank 2 has embed of shape (3, 5)" in shape
    assert "rank 0 has embed of shape (3, 4) where rank 2 has more of shape (3,)" in name
    assert "ConfigError: rank 2: gradient_pipeline: rule 1" in dtype
    assert "ConfigError: rank 2: gradient_pipeline: rule 1" in on_one
    assert on_all.startswith("ConfigError: gradient_pipeline: rule 1")
    assert "find_unused_parameters differs between ranks: rank 0 has False, rank 2 has True" in setting
    assert "ConfigError: rank 2: " in pattern
    assert "matches no parameter" in pattern
    assert "local_size=2: 3 ranks are no multiple of it" in world
    assert afterwards == "True"


NAMED = "AveragingError: rank 0 has failed, and averages no gradients any more: "


def test_a_rank_that_fails_hangs_nobody(tmp_path: Path) -> None:
    cases = list(itertools.product((False, True), repeat=2))
    first, *others = on_ranks(tmp_path, 3, pipeline_case.failing, "raises", *cases)
    assert first == [["Broken: no memory left"] * 2] * 4  # it stays so
    assert others == [[[f"{NAMED}Broken: no memory left"] * 2] * 4] * 2


@pytest.mark.parametrize(
    ("how", "ddp", "is_compressed"),
    [("killed", False, True), ("killed", True, False), ("killed between steps", False, True), ("killed while planning", False, True)],
)
def test_a_rank_that_is_killed_is_named_by_the_others(how: str, ddp: bool, is_compressed: bool, tmp_path: Path) -> None:
    with World(tmp_path, 3) as world:
        first, *others = world.outcome(pipeline_case.failing, how, (ddp, is_compressed))
    assert isinstance(first, Failed)
    named = f"{NAMED}its process has ended without a word, as one does that is killed"
    assert others == [[["" if "between" in how else named, named, named]]] * 2


def test_one_process_without_a_group() -> None:
    given = gradients(0)
    for name in EVERY:
        by_hand = method(name)
        options = {"two_phase": True} if "+" in name else {}
        model = pipeline_case.Leaves()
        synchronizer = GradientSynchronizer(model, pipeline_case.rule(compress=pipeline_case.compress(name.partition("+")[0]) | options))
        for step in range(2):
            model.zero_grad()
            model(given).backward()
            synchronizer.synchronize()
            assert same(pipeline_case.found(model), reduce(by_hand, given, step)), name
        synchronizer.close()


def test_devices_must_be_one() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="parameters lie on cpu, meta: they must all be on one device"):
        GradientSynchronizer(model, [])


def test_a_device_is_waited_for_once_for_all_parameters_that_no_rank_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As idle experts are after `zero_grad(set_to_none=False)`."""
    waits = 0
    with installed(0) as fake:
        model = nn.ParameterList([nn.Parameter(fake.tensor(torch.ones(5))) for _ in range(20)])
        for param in model:
            param.grad = fake.tensor(torch.zeros(5))
        with closing(GradientSynchronizer(model, [], find_unused_parameters=True)) as synchronizer:
            fake.synchronize()
            run_until = fake.run_until

            def waited(is_over: Callable[[], bool]) -> None:
                nonlocal waits
                waits += 1
                run_until(is_over)

            monkeypatch.setattr(fake, "run_until", waited)
            synchronizer.synchronize()
    assert waits == 1
