"""The planning tool's formulas against the figures of GEMINI (Wang et al., SOSP 2023), and its simulation against the formulas.

The paper's figures come from its sections 2.2 and 7.4: what is read off a rounded table is compared as rounded.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.forecast import (
    DAY,
    Cluster,
    Failure,
    best,
    choices,
    daly_interval,
    draw,
    forecast,
    in_memory,
    in_storage,
    lost_work,
    quantile,
    wasted_time,
)
from gemini_ft.errors import ConfigError

MINUTE = 60.0
GPT_100B = Cluster(hosts=16, ranks=8, state=1.2e12, step=62.0, bandwidth=340e9, storage_bandwidth=20e9, restart=420.0, replace=720.0)
PAIRS = [[frozenset({host // 2 * 2, host // 2 * 2 + 1})] for host in range(16)]


def young_interval(cost: float, between_failures: float) -> float:
    """The best interval between checkpoints to the first order: J. W. Young, CACM 17(9), 1974."""
    return sqrt(2 * cost * between_failures)


def effective_ratio(failures_per_day: float, wasted: float, writing: float = 0.0) -> float:
    """The part of the time in which training gets on where no failure falls into the recovery of another; GEMINI, section 7."""
    return max(0.0, 1.0 - writing - failures_per_day * wasted / DAY)


# -- formulas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terabytes", "checkpoint", "wasted"),
    [(3.4, 23, 57), (6.4, 43, 108), (6.5, 44, 110)],  # Gopher 280B, MT-NLG 530B, PaLM 540B: minutes at 20 Gbit/s, as often as can be
)
def test_paper_section_2_wasted_time_with_remote_storage(terabytes: float, checkpoint: int, wasted: int) -> None:
    seconds = 8e12 * terabytes / 20e9
    assert seconds / MINUTE == pytest.approx(checkpoint, rel=0.02)
    assert wasted_time(seconds, seconds, seconds) / MINUTE == pytest.approx(wasted, rel=0.02)


def test_paper_section_7_checkpoints_in_memory_waste_thirteen_times_less() -> None:
    remote = wasted_time(GPT_100B.upload, GPT_100B.upload, GPT_100B.upload)
    assert GPT_100B.upload == 480.0
    assert remote / (1.5 * GPT_100B.step) == pytest.approx(12.9, abs=0.05)


@pytest.mark.parametrize(
    ("failures", "gemini", "strawman", "highfreq"),
    [(8.0, 95.0, 37.8, 71.3), (15.0, 90.6, 0.0, 58.6)],  # 15: a thousand machines, of which 1.5 % fail per day
)
def test_paper_section_7_effective_training_ratio(failures: float, gemini: float, strawman: float, highfreq: float) -> None:
    write, restart = 480.0, 6 * MINUTE
    ratios = [
        effective_ratio(failures, 9 * MINUTE),
        effective_ratio(failures, wasted_time(write, 3 * 3600.0, write) + restart),
        effective_ratio(failures, wasted_time(write, write, write) + restart, writing=1 - 480 / 560),
    ]
    assert [round(100 * ratio, 1) for ratio in ratios] == [gemini, strawman, highfreq]


@given(st.floats(1.0, 1e4), st.floats(10.0, 1e7))
def test_dalys_interval_comes_to_youngs_where_failures_are_rare(cost: float, between: float) -> None:
    assert daly_interval(cost, 1e6 * cost) == pytest.approx(young_interval(cost, 1e6 * cost), rel=0.002)
    assert 0 < daly_interval(cost, between) <= max(between, young_interval(cost, between) * 2)


def test_sizes_of_the_papers_model() -> None:
    """100 billion parameters on 16 machines: 75 GB each, 1.8 s at 340 Gbit/s, 300 GB of memory for two replicas."""
    assert GPT_100B.share == 75e9
    assert GPT_100B.replication == pytest.approx(1.8, abs=0.05)
    assert replace(GPT_100B, storage_bandwidth=0.0).memory == 300e9
    assert GPT_100B.memory == 375e9
    assert (GPT_100B.every, replace(GPT_100B, bandwidth=1e9).every) == (1, 10)


# -- one failure ------------------------------------------------------------------------------------


def test_an_upload_that_takes_longer_than_the_interval_is_waited_for_by_the_next() -> None:
    """The first begins after 3 h and is over at 13 h, when the second begins, and is over at 23 h; the third never is."""
    slow = replace(GPT_100B, storage_bandwidth=8 * GPT_100B.state / 36000.0)
    assert (slow.upload, slow.storage_interval) == (10 * 3600.0, 3 * 3600.0)
    for hours, stored in ((12.5, 0), (14, 3), (25, 13)):
        outcome = in_memory(slow, [Failure(hours * 3600.0, (0, 1))], 2 * DAY, PAIRS)
        assert outcome.lost == [pytest.approx((hours - stored) * 3600.0)]


def test_a_failed_process_loses_the_step_it_was_in() -> None:
    outcome = in_memory(GPT_100B, [Failure(10 * 62.0 + 5.0, ())], DAY, PAIRS)
    assert outcome.lost == [pytest.approx(5.0)]
    assert outcome.progress == pytest.approx(DAY - 5.0 - 420.0)


def test_what_is_not_replicated_yet_is_lost_as_well() -> None:
    assert in_memory(GPT_100B, [Failure(10 * 62.0 + 1.0, ())], DAY, PAIRS).lost == [pytest.approx(63.0)]


def test_a_lost_host_is_replaced_and_its_state_read_from_its_peer() -> None:
    outcome = in_memory(GPT_100B, [Failure(10 * 62.0 + 5.0, (3,))], DAY, PAIRS)
    assert outcome.progress == pytest.approx(DAY - 5.0 - 720.0 - 8 * 75e9 / 340e9)


def test_all_holders_of_a_shard_are_lost_at_once_or_soon_after_another() -> None:
    """The first checkpoint in storage is three hours old when the second host of a pair is lost before the first is back."""
    at = 5 * 3600.0
    for failures in ([Failure(at, (2, 3))], [Failure(at, (2,)), Failure(at + 700.0, (3,))]):
        outcome = in_memory(GPT_100B, failures, DAY, PAIRS)
        assert outcome.from_storage == 1
        assert sum(outcome.lost) == pytest.approx(at - 3 * 3600.0, abs=1.0)
    apart = in_memory(GPT_100B, [Failure(at, (2,)), Failure(at + 900.0, (3,))], DAY, PAIRS)
    other = in_memory(GPT_100B, [Failure(at, (2,)), Failure(at + 700.0, (4,))], DAY, PAIRS)
    assert apart.from_storage == other.from_storage == 0


def test_where_nothing_is_stored_everything_is_lost() -> None:
    outcome = in_memory(replace(GPT_100B, storage_bandwidth=0.0), [Failure(DAY / 2, (2, 3))], DAY, PAIRS)
    assert outcome.progress == pytest.approx(DAY / 2 - 720.0)


def test_storage_alone_stops_for_each_checkpoint_and_loses_what_came_after_the_last() -> None:
    outcome = in_storage(GPT_100B, [Failure(3 * 4080.0 + 100.0, ())], 4 * 4080.0, interval=3600.0)
    assert outcome.lost == [100.0]
    assert outcome.progress == 3 * 3600.0 + 4080.0 - 100.0 - 420.0 - 480.0


# -- a month ----------------------------------------------------------------------------------------


def test_the_mean_of_many_runs_is_the_formulas() -> None:
    """GEMINI's t_ckpt + 1 / (2 f), and the ratio, where failures are rare. With this seed the difference is below three standard errors."""
    cluster = replace(GPT_100B, process_failures=0.05)
    found = forecast(cluster, days=30.0, runs=40)
    lost = lost_work(found.memory)
    mean, error = sum(lost) / len(lost), cluster.step / (12 * len(lost)) ** 0.5
    assert abs(mean - wasted_time(cluster.replication, cluster.step, 0.0)) < 3 * error
    expected = effective_ratio(len(lost) / (40 * 30.0), mean + cluster.restart)
    assert found.ratio(found.memory) == pytest.approx(expected, abs=0.001)


def test_no_other_interval_is_better_than_dalys() -> None:
    cluster = replace(GPT_100B, process_failures=0.25)
    months = [list(draw(cluster, 30 * DAY, Random(run))) for run in range(10)]
    chosen, shorter, longer = (
        sum(in_storage(cluster, month, 30 * DAY, factor * cluster.best_storage_interval).progress for month in months)
        for factor in (1.0, 0.3, 3.0)
    )
    assert chosen > max(shorter, longer)


def test_racks_are_survived_by_a_placement_that_knows_them() -> None:
    racks = replace(GPT_100B, domain=2, domain_failures=0.05)
    assert forecast(racks, runs=5).fallbacks_per_run == 0.0
    one_rack = replace(racks, domain=16)
    found = forecast(one_rack, runs=5)
    assert found.fallbacks_per_run > 0.0
    assert sum(len(run.lost) for run in found.memory) == 5 * found.fallbacks_per_run


def test_a_job_that_never_fails_loses_nothing() -> None:
    found = forecast(GPT_100B, runs=2)
    assert found.ratio(found.memory) == found.ratio(found.storage) == 1.0
    assert lost_work(found.memory) == []
    assert quantile([], 0.5) == 0.0
    assert GPT_100B.best_storage_interval == inf


def test_the_fewest_replicas_are_chosen_after_which_another_gains_nothing() -> None:
    cluster = replace(GPT_100B, host_failures=0.05, domain=4, domain_failures=0.02)
    offered = choices(cluster, memory=1e12, runs=5)
    chosen = best(offered)
    assert chosen is not None
    assert chosen.cluster.replicas == 2
    assert [choice.cluster.replicas for choice in offered] == [1, 2, 3, 4]
    tight = best(choices(cluster, memory=300e9, runs=2))
    assert tight is not None
    assert tight.cluster.replicas == 1
    assert best(choices(cluster, memory=1e9, runs=1)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hosts": 0}, "hosts=0: must be more than 0"),
        ({"replicas": 17}, "replicas=17 needs as many hosts, got 16"),
        ({"restart": -1.0}, "restart=-1.0: must not be negative"),
        ({"domain_failures": 0.1}, "say how many hosts a failure domain has"),
    ],
)
def test_impossible_clusters_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(GPT_100B, **change)  # type: ignore[arg-type]
