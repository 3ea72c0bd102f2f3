"""`elastic: batch`: other numbers of ranks go on with the same global batches, and with each sample of an epoch once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from agent_kit import end_agent
from elastic_case import GLOBAL, SAMPLES, Case, samples, train
from rank_kit import World

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three ranks, two after the loss of a host with its agent, three again; and three all the time."""
    folder = tmp_path_factory.mktemp("resized")
    with World(folder, 3) as ranks, World(folder, 3) as others:
        fixed = others.start(train, Case(), str(folder / "fixed"), 12)
        said = [ranks.outcome(train, Case(), str(folder / "ours"), 4)]
        end_agent(ranks.run, "host2")  # and with it the owner's copy of its shard
        ranks.hosts = ["host0", "host1"]
        said.append(ranks.outcome(train, Case(), str(folder / "ours"), 9))
        ranks.hosts = ["host0", "host1", "host3"]
        said.append(ranks.outcome(train, Case(), str(folder / "ours"), 12))
        yield {"said": said, "fixed": fixed.results(), "folder": folder}


def test_three_two_three_ranks(resized: dict[str, Any]) -> None:
    for results in resized["said"]:
        assert not any(isinstance(each, Exception) for each in results), results
    assert [[each["start"] for each in results] for results in resized["said"]] == [[0] * 3, [4] * 2, [9] * 3]
    assert [results[0]["accumulation"] for results in resized["said"]] == [2, 3, 2]


def test_each_sample_of_an_epoch_is_used_once(resized: dict[str, Any]) -> None:
    ours, fixed = samples(resized["folder"] / "ours"), samples(resized["folder"] / "fixed")
    for epoch in (0, 1):
        assert sorted(chain.from_iterable(ours[epoch].values())) == list(range(SAMPLES))
        assert {step: sorted(ids) for step, ids in ours[epoch].items()} == {step: sorted(ids) for step, ids in fixed[epoch].items()}
        assert {len(ids) for ids in ours[epoch].values()} == {GLOBAL}


def test_the_weights_are_those_of_a_fixed_world_but_for_rounding(resized: dict[str, Any]) -> None:
    """Sums are formed in another order, in float64: a few units in the last place a step."""
    ours, fixed = resized["said"][-1], resized["fixed"]
    assert len({each["state"] for each in ours}) == 1
    np.testing.assert_allclose(ours[0]["weights"], fixed[0]["weights"], rtol=1e-11, atol=1e-13)
