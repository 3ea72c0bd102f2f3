"""``control: dc2``: the ratio of a rule follows the network, alike on all ranks, and is training state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import steered_case
from agent_kit import preload
from plain_case import history, side_by_side
from rank_kit import on_ranks

from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.control import Controls
from gemini_ft.pipeline.plan import Tensor
from gemini_ft.pipeline.rules import load_rules

preload("steered_case")


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
def test_the_ratio_goes_where_the_deadline_lets_it(ddp: bool, tmp_path: Path) -> None:
    """No time at all: the smallest ratio; more than enough: a dense all-reduce, whose averages are exact."""
    first, second = on_ranks(tmp_path, 2, steered_case.extremes, ddp)
    for case, (ratio, dense, is_exact, alike) in first.items():
        assert alike, case
        assert (ratio, dense, is_exact) == ((1.0, True, True) if case.endswith(" 100") else (0.001, False, False)), case
    assert {case: outcome[:2] for case, outcome in second.items()} == {case: outcome[:2] for case, outcome in first.items()}


def test_without_a_deadline_it_is_the_time_that_a_step_computes(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path, 2, steered_case.default_deadline)
    assert first == second
    deadline, seen = first
    assert 0 < deadline < 1.0  # what it is before it is known
    assert seen >= 5


def test_nothing_is_lost_while_the_ratio_moves(tmp_path: Path) -> None:
    for lost in on_ranks(tmp_path, 2, steered_case.losses_nothing):
        assert max(lost) < 1e-4


def test_ratio_and_model_of_the_network_survive_kills(tmp_path: Path) -> None:
    """With delays by a script, every iteration has the bits of a run that nobody has killed; the ratio has moved meanwhile."""
    starts, begins = side_by_side(tmp_path, steered_case.train, "step=5:rank=0:sigkill; step=11:rank=1:sigkill:moment=in_copy")
    assert begins == [0, 0]
    assert min(starts) >= 9
    for rank in range(2):
        assert len({line.split()[2] for line in history(tmp_path / "disturbed", rank).values()}) >= 3


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"control": "dc2"}, "no compress as it is given here is none that it knows"),
        ({"control": "dc2", "compress": "qsgd"}, "compress qsgd as it is given here is none that it knows: take topk"),
        ({"control": "dc2", "compress": "chunked_topk"}, "compress chunked_topk as it is given here is none that it knows: take topk"),
        ({"control": "dc2", "compress": {"method": "topk", "two_phase": True}}, "compress topk as it is given here"),
        ({"control": "dc2", "compress": {"method": "topk", "feedback": 0}}, "compress topk as it is given here"),
        ({"control": "dc2", "compress": "topk", "fusion": "auto"}, "take fusion cupcake"),
        ({"control": "dc3", "compress": "topk"}, "dc2"),
        ({"control": {"method": "dc2", "deadline": -1}, "compress": "topk"}, "greater than 0"),
    ],
)
def test_what_cannot_be_steered_is_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_rules([{"params": "*", **rule}])


def test_ratios_of_other_rules_are_refused_where_all_ranks_hear_of_it() -> None:
    """One rank with such a state raised a KeyError when the others had begun to train; and one rank alone has no use for any."""
    rules = load_rules([{"params": "*", "control": "dc2", "compress": "topk"}])
    tensors = [Tensor(name="a", shape=(10,), itemsize=4, rule=0, sparse=False)]
    several, alone = Controls(rules, tensors, 2), Controls(rules, tensors, 1)
    state = several.state_dict()
    assert several.problem(state, 2) is None
    text = several.problem({**state, "7": state["0"]}, 2)
    assert text is not None
    assert "ratios under control of rules 7, which control nothing here" in text
    assert alone.problem(state, 1) is None
    alone.load_state_dict(state)
    assert alone.state_dict() == {}
