"""``every`` in a rule: steps that ranks make alone, outer steps as in one process, and the same bits after a kill."""

from __future__ import annotations

import copy
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import local_steps_case
import numpy as np
import pytest
import torch
from agent_kit import end_agent, preload
from plain_case import history, side_by_side
from rank_kit import World, on_ranks
from torch import nn

import gemini_ft
from gemini_ft.compression.sparse import TopK
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline.averager import Averager
from gemini_ft.pipeline.rules import load_rules
from gemini_ft.testing import digest

preload("local_steps_case")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """By rank: case -> where it differs from the same in one process."""
    return on_ranks(tmp_path_factory.mktemp("local"), 2, local_steps_case.differences, local_steps_case.CASES)


@pytest.mark.parametrize("case", local_steps_case.CASES)
def test_ranks_end_with_the_bits_of_one_process(case: str, found: list[dict[str, str | None]]) -> None:
    assert [rank[case] for rank in found] == [None, None]


@pytest.mark.soak
def test_weights_are_those_of_torchft(tmp_path: Path) -> None:
    """After each step, by its LocalSGD and its DiLoCo, whole and in fragments, on gloo with its own managers and lighthouse.

    A manager waits for others' heartbeats, which a machine that is overloaded does not get done.
    """
    pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
    import torchft_case

    for rank in on_ranks(tmp_path, 2, torchft_case.differences):
        assert rank == dict.fromkeys(torchft_case.CASES)


def test_hosts_whose_ranks_train_together_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    for rank in on_ranks(tmp_path, 4, local_steps_case.differences, local_steps_case.WITHIN):
        assert rank == dict.fromkeys(local_steps_case.WITHIN)


def test_hosts_that_compress_are_alike_within_and_after_an_average(tmp_path: Path) -> None:
    for found in on_ranks(tmp_path, 4, local_steps_case.hosts_that_compress):
        assert list(found.values()) == [True, True], found


def test_hosts_of_unequal_size_are_refused(tmp_path: Path) -> None:
    for said in on_ranks(tmp_path, 3, local_steps_case.hosts_of_unequal_size):
        assert "within: host needs as many ranks on each host, and they have 2, 1: " in said


def test_a_state_is_loaded_while_an_average_is_under_way(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, local_steps_case.roll_back_under_way) == [True, True]


def test_a_rank_that_fails_is_named_by_its_number_among_all(tmp_path: Path) -> None:
    first, second, third, _ = on_ranks(tmp_path, 4, local_steps_case.failing, True)
    assert first == second == ""
    assert third == "AveragingError: rank 3 has failed, and averages no gradients any more: ValueError: no memory left"


def test_a_rank_that_fails_while_an_average_begins_is_named_by_its_error(tmp_path: Path) -> None:
    first, _ = on_ranks(tmp_path, 2, local_steps_case.failing, False)
    assert first == "AveragingError: rank 1 has failed, and averages no gradients any more: ValueError: no memory left"


def test_an_average_under_way_is_not_asked_for_its_state() -> None:
    """A thread may be changing it: dictionaries changed their size meanwhile."""
    goes_on, asked, compress, state_dict = threading.Event(), list[Averager](), TopK.compress, Averager.state_dict

    def waits(self: TopK, *given: Any) -> Any:
        assert goes_on.wait(10)
        return compress(self, *given)

    def seen(self: Averager) -> Any:
        asked.append(self)
        return state_dict(self)

    model, rule = local_steps_case.network(), {"params": "*", "every": 2, "delay": 1, "compress": local_steps_case.TOPK}
    optimizer, gradients = torch.optim.SGD(model.parameters(), 1e-2), gemini_ft.GradientSynchronizer(model, [rule])
    with patch.object(TopK, "compress", waits), closing(gradients):
        for step in range(2):
            local_steps_case.loss_of(model, step, 0, 0, torch.float32).backward()
            gradients.synchronize()
            optimizer.step()
        with patch.object(Averager, "state_dict", seen):
            gradients.state_dict()
        goes_on.set()
    assert asked == [gradients.averager]  # which has nothing to average


def test_fewer_and_more_ranks_go_on_with_local_steps(tmp_path: Path) -> None:
    """Three, then two in the middle of a period, then three again, where the new one begins as the twin of the first."""
    with World(tmp_path, 3, TORCHELASTIC_RUN_ID="1", GROUP_RANK="0", LOCAL_WORLD_SIZE="3") as ranks:
        for hosts, start, until in (("012", 0, 4), ("01", 4, 8), ("013", 8, 12)):
            for name in {f"host{host}" for host in "012"} - {f"host{host}" for host in hosts} if until == 8 else ():
                end_agent(ranks.run, name)
            ranks.hosts = [f"host{host}" for host in hosts]
            found = ranks.outcome(local_steps_case.train_elastic, until)
            assert [each["start"] for each in found] == [start] * len(hosts), found
    expected = local_steps_case.elastic_in_one_process()
    for each in found:
        np.testing.assert_allclose(each["weights"], expected, rtol=1e-12)


def test_ranks_that_train_together_now_are_told_what_differs() -> None:
    rule = {"params": "*", "every": 2}
    with closing(gemini_ft.GradientSynchronizer(local_steps_case.network(), [rule])) as gradients:
        state = gradients.state_dict()
    with (
        closing(gemini_ft.GradientSynchronizer(local_steps_case.network(), [rule | {"within": "host"}])) as gradients,
        pytest.raises(StateError, match=r"state is of other rules: it has .*, this job .*'within': 'host'"),
    ):
        gradients.load_state_dict(state)


def test_ranks_that_compress_are_together_after_each_average_and_only_then(tmp_path: Path) -> None:
    for alike_between, alike_after, (before, after) in on_ranks(tmp_path, 2, local_steps_case.compressed):
        assert not alike_between
        assert alike_after
        assert after < before == 4 * (6 * 5 + 5 + 5 * 2 + 2)


def test_each_rank_goes_on_with_its_own_state_after_kills(tmp_path: Path) -> None:
    """Between two averages, and with part of a period over; each rank's weights, anchors and residuals are its own."""
    starts, begins = side_by_side(tmp_path, local_steps_case.train, "step=6:rank=0:sigkill; step=11:rank=1:sigkill:moment=in_copy")
    assert begins == [0, 0]
    assert min(starts) >= 9
    first, second = (history(tmp_path / "disturbed", rank) for rank in range(2))
    assert any(first[step].split()[1] != second[step].split()[1] for step in first)


@pytest.mark.parametrize("method", local_steps_case.METHODS)
def test_a_killed_training_has_the_bits_of_an_undisturbed_one_by_each_new_method(method: str, tmp_path: Path) -> None:
    train = partial(local_steps_case.train, method=method)
    starts, begins = side_by_side(tmp_path, train, "step=6:rank=0:sigkill; step=11:rank=1:sigkill:moment=in_copy")
    assert begins == [0, 0]
    assert min(starts) >= 9
    first, second = ([line.split()[1] for line in history(tmp_path / "disturbed", rank).values()] for rank in range(2))
    alike = [one == other for one, other in zip(first, second, strict=True)]
    assert alike == ([True] * 16 if method.startswith("ring8") else [step % 4 == 3 for step in range(16)])


def test_ranks_that_have_chosen_to_train_alone_go_on_in_the_same_bits_after_kills(tmp_path: Path) -> None:
    """By ``quality: loss``: killed before the choice, in the middle of a period, and after an average."""
    kills = "step=3:rank=0:sigkill; step=14:rank=1:sigkill:moment=in_copy; step=34:rank=0:sigkill"
    starts, begins = side_by_side(tmp_path, local_steps_case.train_to_a_loss, kills)
    assert begins == [0, 0]
    assert min(starts) >= 30
    first, second = (history(tmp_path / "disturbed", rank) for rank in range(2))
    assert [first[step] == second[step] for step in (0, 20, 39)] == [True, False, False]


@pytest.mark.parametrize("ddp", [False, True])
def test_ranks_come_to_train_alone_and_do_so_as_by_diloco(ddp: bool, tmp_path: Path) -> None:
    for found in on_ranks(tmp_path, 2, local_steps_case.goes_apart, ddp):
        assert found == [True] * len(found)


def test_computing_is_watched_while_nothing_travels(tmp_path: Path) -> None:
    """Training alone is predicted from steps whose averages, on the same processors, begin after the last gradient."""
    for rule, is_undisturbed in ((local_steps_case.CHOOSES, True), ({"params": "*", "fusion": "auto"}, False)):
        assert on_ranks(tmp_path, 2, local_steps_case.begins_after_the_last_gradient, rule) == [is_undisturbed] * 2


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "DDP"])
def test_training_alone_is_predicted_from_steps_that_were_watched(ddp: bool, tmp_path: Path) -> None:
    """Not from one of which nothing is known after a resume, nor from one that is shorter than the others."""
    for found in on_ranks(tmp_path, 2, local_steps_case.predictions, ddp):
        assert len(found) > 4
        assert min(found) >= 0.02, found


def test_ranks_stay_together_where_training_alone_takes_longer_to_a_loss(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, local_steps_case.stays_together) == [(True, True)] * 2


def test_each_host_goes_on_with_its_own_state_after_a_kill(tmp_path: Path) -> None:
    """Ranks 0 and 1 are one host, 2 and 3 another, which loses a rank while averages are under way. Residuals are with ranks 0 and 2."""
    train = partial(local_steps_case.train, delay=3, within="host")
    starts, _ = side_by_side(tmp_path, train, "step=13:rank=3:sigkill", 4)
    assert min(starts) == 12  # one is under way since step 10 and taken after step 13; another was made in step 12
    first, second, third, fourth = ([line.split()[1] for line in history(tmp_path / "disturbed", rank).values()] for rank in range(4))
    assert first == second != third == fourth


def test_a_state_with_an_average_under_way_goes_on_in_the_same_bits() -> None:
    """From each step of a period of both rules, of which one averages while the other's, of elements that are drawn, is under way."""
    drawn = {"method": "randomk", "ratio": 0.5}
    rules = [
        {"params": "2.*", "every": 3, "compress": local_steps_case.TOPK},
        {"params": "*", "every": 4, "delay": 3, "outer": {}, "compress": drawn},
    ]

    def begun(state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer, gemini_ft.GradientSynchronizer]:
        model = local_steps_case.network()
        optimizer, gradients = torch.optim.AdamW(model.parameters(), 1e-2), gemini_ft.GradientSynchronizer(model, rules)
        for each, value in zip((model, optimizer, gradients), state or (), strict=False):
            each.load_state_dict(value)
        return model, optimizer, gradients

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Any, steps: range) -> dict[int, Any]:
        states = {}
        for step in steps:
            optimizer.zero_grad()
            local_steps_case.loss_of(model, step, 0, 0, torch.float32).backward()
            gradients.synchronize()
            optimizer.step()
            states[step] = copy.deepcopy([each.state_dict() for each in (model, optimizer, gradients)])
        gradients.close()
        return states

    states = train(*begun(), range(20))
    for step in range(4, 16):
        assert digest(train(*begun(states[step]), range(step + 1, 20))[19][:2]) == digest(states[19][:2]), step


def test_what_lets_no_rank_train_alone_is_refused(tmp_path: Path) -> None:
    for said_of in on_ranks(tmp_path, 2, local_steps_case.refusals):
        sharded, wrapped, joined, once, searching, named, later_sharded, later_named = said_of
        assert not once
        assert "an optimizer has the loss evaluated several times in a step" in searching
        for said in (named, later_named):
            assert "an optimizer of the kind LBFGS has the loss evaluated several times in a step" in said
        for said in (sharded, wrapped, later_sharded):
            assert "ZeroRedundancyOptimizer sends each parameter from the one rank that updates it to all others" in said
        assert "join() lets a rank whose inputs have ended answer the others' collectives" in joined


class FailingSGD(torch.optim.SGD):
    """Fails once it has evaluated the loss."""

    def step(self, closure: Any = None) -> Any:
        closure()
        raise ValueError("no update")


def test_a_step_that_has_failed_hides_no_other_optimizers_update() -> None:
    model = local_steps_case.network()
    failing, optimizer = FailingSGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    with closing(gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 1}])) as gradients:

        def evaluate() -> None:
            local_steps_case.loss_of(model, 0, 0, 0, torch.float32).backward()
            gradients.synchronize()

        with pytest.raises(ValueError, match="no update"):
            failing.step(evaluate)
        evaluate()
        optimizer.step()
        assert gradients.state_dict()["outer"]["updates"] == 1
        assert gradients.state_dict()["outer"]["due"] == []


@pytest.mark.parametrize(
    ("options", "goes_on"), [({"compress": "topk"}, True), ({"delay": 1}, True), ({"compress": "topk", "delay": 1}, False)]
)
def test_another_number_of_ranks_goes_on_unless_a_new_one_would_send_its_twins_residual(options: dict[str, Any], goes_on: bool) -> None:
    rule = {"params": "*", "every": 2, **options}
    with closing(gemini_ft.GradientSynchronizer(local_steps_case.network(), [rule])) as gradients:
        assert gradients.is_elastic == goes_on


def test_ranks_that_are_not_together_where_they_should_be_are_told(tmp_path: Path) -> None:
    for begun, left_out in on_ranks(tmp_path, 2, local_steps_case.apart):
        assert "their first weights differ on ranks 0 and 1" in begun
        assert "their updates differ: rank 0 has 3, rank 1 has 2" in left_out


def test_all_parameters_are_trained_alone_or_none() -> None:
    with pytest.raises(ConfigError, match=r"a rule has every, or quality: loss, and 2.bias is trained by none such: ranks would clip"):
        gemini_ft.GradientSynchronizer(local_steps_case.network(), [local_steps_case.CHOOSES | {"params": "0.*"}])
    with pytest.raises(ConfigError, match=r"a rule has every, or quality: loss, and 2.bias is trained by none such: ranks would clip"):
        gemini_ft.GradientSynchronizer(local_steps_case.network(), [{"params": "0.*", "every": 2}])
    mixed = [local_steps_case.CHOOSES | {"params": "0.*"}, {"params": "*", "every": 2}]
    for rules in (mixed, [mixed[1] | {"params": "0.*"}, local_steps_case.CHOOSES]):
        with pytest.raises(ConfigError, match=r"has a rule with quality: loss, and .* one with every: ranks would begin"):
            gemini_ft.GradientSynchronizer(local_steps_case.network(), rules)
    scaler = local_steps_case.torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"a loss scaler skips updates on single ranks"):
        gemini_ft.GradientSynchronizer(local_steps_case.network(), [{"params": "*", "every": 2}], scaler=scaler)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"outer": {"lr": 1.0}}, "outer, fragments, delay and within are of local steps: add every"),
        ({"fragments": 2}, "outer, fragments, delay and within are of local steps: add every"),
        ({"every": 2, "fragments": 3}, "fragments=3: at most one for each of the 2 steps of a period"),
        ({"every": 2, "delay": 2}, "delay=2: an average must come before the next one begins, within the 2 steps of a period"),
        ({"every": 2, "min_hosts": 3}, "min_hosts=3: it is given to the launcher: with elastic: batch and gemini run --nnodes MIN:MAX"),
        ({"every": 0}, "greater than or equal to 1"),
        ({"every": 2, "outer": {"lr": 0}}, "greater than 0"),
        ({"every": 2, "outer": {"momentum": 1}}, "less than 1"),
        ({"every": 2, "sync": "zen"}, "every averages what ranks have moved by an all-reduce or by compress"),
        ({"every": 2, "compress": "topk", "fusion": "cupcake"}, "every averages what ranks have moved by an all-reduce or by compress"),
        ({"every": 2, "compress": "topk", "control": "dc2"}, "every averages what ranks have moved by an all-reduce or by compress"),
    ],
)
def test_what_makes_no_local_steps_is_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_rules([{"params": "*", **rule}])


def test_complex_parameters_are_refused() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(local_steps_case.torch.zeros(2, dtype=local_steps_case.torch.complex64))})
    with pytest.raises(ConfigError, match=r"would have ranks move w alone, which is torch.complex64"):
        gemini_ft.GradientSynchronizer(model, [{"params": "*", "every": 2}])
