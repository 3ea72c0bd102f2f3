"""DeepSpeed engines, killed in the middle of an iteration, end with the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from agent_kit import WAIT, agent_pid, end_agent, eventually
from deepspeed_case import (
    Case,
    check,
    destroyed_in_finally,
    hang,
    refusals,
    train,
    train_average,
    train_data,
    train_on_a_loader_of_its_own,
    train_pipeline,
    train_pipeline_data,
    train_resized,
    with_gradients,
)
from plain_case import side_by_side
from rank_kit import World

from gemini_ft.errors import LayoutMismatchError

pytestmark = pytest.mark.timeout(300)

LONG = pytest.mark.soak  # of the matrix, what `make test` can do without


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=LONG), True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=LONG), 2, 3])
def test_every_stage(tmp_path: Path, stage: int, bf16: bool) -> None:
    results = check(tmp_path, Case(stage, bf16, accumulate=2))
    assert set(results[0]["restored"]) == {"own memory"}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), 3])
def test_four_ranks(tmp_path: Path, stage: int) -> None:
    check(tmp_path, Case(stage, bf16=stage % 2 == 1, steps=6), world=4, faults="step=3:rank=2:sigkill:moment=before_update")


@pytest.mark.parametrize(
    "case",
    [
        Case(1, bf16=True, config={"data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"}}),
        Case(1, groups=2, frozen=True),
        Case(2, bf16=True, groups=2, zero={"round_robin_gradients": True, "overlap_comm": True}),
        Case(3, frozen=True, groups=2, zero={"sub_group_size": 300, "stage3_param_persistence_threshold": 0}),
        pytest.param(Case(3, bf16=True, frozen=True, zero={"stage3_param_persistence_threshold": 10**5}), marks=LONG),
        pytest.param(Case(0, optimizer="AdamW", bf16=True), marks=LONG),
    ],
    ids=["BF16_Optimizer", "groups and frozen", "round robin", "sub-groups", "persistent", "FusedAdam at stage 0"],
)
def test_settings(tmp_path: Path, case: Case) -> None:
    check(tmp_path, case)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=LONG), pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
def test_adam_in_c_plus_plus(tmp_path: Path, stage: int) -> None:
    """DeepSpeedCPUAdam and FusedAdam on a CPU hide powers of beta in an object that no state dict shows."""
    offload = {"offload_optimizer": {"device": "cpu"}} if stage > 1 else {}
    check(tmp_path, Case(stage, accumulate=2, optimizer="AdamW", bf16=stage == 3, zero=offload))


def test_what_a_loop_writes_after_the_step_is_kept(tmp_path: Path) -> None:
    """The first such step is seen to; from the next on, nothing is lost."""
    faults = "step=3:rank=0:sigkill; step=6:rank=0:sigkill:moment=in_copy"
    results = check(tmp_path, Case(0), 1, faults, train_average)
    assert results[0]["start"] >= 5


@pytest.mark.parametrize("job", [train_data, train_pipeline_data])
def test_data_go_on_with_the_next_batch(tmp_path: Path, job: Callable[[Case, str], Any]) -> None:
    """A killed job has the losses and weights of one without protection: with DeepSpeed's own loader, and with one of the script's."""
    case = Case(1, accumulate=2, schedule=False, steps=8)
    unprotected = partial(job, Case(**{**vars(case), "config": {"gemini": None}}))
    results, expected = side_by_side(tmp_path, partial(job, case), "step=4:rank=0:sigkill:moment=before_update", calm=unprotected)
    assert results == expected


def test_pipeline(tmp_path: Path) -> None:
    faults = "step=3:rank=0:sigkill:moment=before_update; step=6:rank=1:sigkill:moment=before_update"  # losses are written between batches
    results = check(tmp_path, Case(1, accumulate=2, schedule=False, steps=8), faults=faults, job=train_pipeline)
    assert set(results[0]["restored"]) == {"own memory"}


class TestWhereFrom:
    @pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=LONG) for stage in range(3)), 3])
    def test_a_peer(self, tmp_path: Path, stage: int) -> None:
        """A host is lost with its agent: its rank's state is at the other host alone."""
        results = check(tmp_path, Case(stage, bf16=True, steps=7), faults="step=4:host=1:kill")
        assert "peer host0" in results[1]["restored"]

    @pytest.mark.parametrize("stage", [pytest.param(0, marks=LONG), 1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
    def test_storage(self, tmp_path: Path, stage: int) -> None:
        store = {"url": f"file://{tmp_path / 'store'}", "every_steps": 2}
        case = Case(stage, steps=7, pause=0.2, options={"storage": store, "replicas": 1})
        results = check(tmp_path, case, faults="step=6:group=0:kill")
        assert results[0]["start"] in (2, 4)
        assert "storage" in results[0]["restored"]

    def test_other_hosts(self, tmp_path: Path) -> None:
        """Ranks come back on each other's hosts."""
        case = Case(3, bf16=True, accumulate=2)
        with World(tmp_path, 2) as others, World(tmp_path, 2) as ranks:
            undisturbed = others.start(train, case, str(tmp_path / "undisturbed"))
            attempt = ranks.start(train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS="step=5:rank=0:sigkill")
            assert not attempt.wait()
            attempt.kill()
            ranks.hosts.reverse()
            results = ranks.outcome(train, case, str(tmp_path / "disturbed"))
            expected = undisturbed.results()
        assert [result["state"] for result in results] == [result["state"] for result in expected]
        assert results[0]["start"] >= 4


def test_what_synchronises_gradients_is_an_attribute_of_the_engine(tmp_path: Path) -> None:
    """Not of its module, which engines show as their own. Other ranks than before begin it anew."""
    with World(tmp_path, 2) as ranks:
        results = ranks.finish(with_gradients, Case(1), GEMINI_FAULTS="step=3:rank=0:sigkill")
        assert ranks.restarts == 1
        assert all(said["resumed"] > 0 and said["loaded"] for said in results)
        refused = ranks.outcome(with_gradients, Case(1), False)
        assert all(isinstance(error, LayoutMismatchError) and "and this job has none" in str(error) for error in refused), refused
        ranks.hosts = ranks.hosts[:1]
        (alone,) = ranks.outcome(with_gradients, Case(1, steps=12))
        assert (alone["resumed"], alone["loaded"]) == (10, False)
        assert any("the gradient state of 2 ranks cannot be used by 1" in text for text in alone["told"])


def test_nothing_is_left_to_a_dead_agent(tmp_path: Path) -> None:
    """The agent dies with the worker, and the other host has everything."""
    case = Case(2, steps=8)
    with World(tmp_path, 2) as ranks:
        attempt = ranks.start(train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS="step=5:rank=0:sigkill")
        assert not attempt.wait()
        attempt.kill()
        end_agent(ranks.run, "host0")
        results = ranks.outcome(train, case, str(tmp_path / "disturbed"))
    assert results[0]["start"] >= 4
    assert set(results[0]["restored"]) == {"peer host1"}


def test_a_hang_becomes_a_restart(tmp_path: Path) -> None:
    case = Case(2, steps=8, options={"hang_timeout": 3.0})
    results = check(tmp_path, case, faults="step=5:rank=1:sigstop", job=hang)
    assert results[0]["timeout"] == 3.0


def test_a_loader_that_no_snapshot_has_is_named(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (told,) = ranks.outcome(train_on_a_loader_of_its_own)
    assert sum("iterates a DataLoader (of a Noisy) whose position is in no snapshot" in text for text in told) == 1, told


REFUSED = {
    "typo": ({"gemini": {"replica": 2}}, "ConfigError: gemini options: unknown option 'replica'; allowed: agent_cpus, agent_timeout"),
    "nested typo": (
        {"gemini": {"storage": {"url": "file:///x", "every": 3}}},
        "unknown option 'storage.every'; allowed: at_end, endpoint_url",
    ),
    "no mapping": ({"gemini": True}, 'ConfigError: the "gemini" section must be a mapping of options, got True'),
    "attach without section": ({"gemini": None}, 'ConfigError: the configuration has no "gemini" section; add one ({} for the defaults)'),
    "twice": ({"gemini": {"run_id": "twice"}}, "ConfigError: this engine is protected already"),
    "no optimizer": ({"optimizer": "none", "zero_optimization": {"stage": 0}}, "UnsupportedStateError: this engine has no optimizer"),
}


def test_refusals(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(refusals, {name: changes for name, (changes, _) in REFUSED.items()})
        end_agent("twice", ranks.hosts[0])  # a run of its own
    for name, (_, text) in REFUSED.items():
        assert text in said[name], name


def test_partitions_of_other_parameters_are_refused_though_their_sizes_are_the_same(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        ranks.outcome(train_resized, Case(2), str(tmp_path / "out"), 2)
        said = ranks.outcome(train_resized, Case(2, zero={"round_robin_gradients": True}), str(tmp_path / "out"), 4)
        assert [type(error) for error in said] == [LayoutMismatchError, LayoutMismatchError]
        assert "the partitions consist of other parameters now, or of the same in another order" in str(said[0])
        said = ranks.outcome(train_resized, Case(2, schedule=False), str(tmp_path / "out"), 4)
        assert "engine's LR scheduler: False now and True in the snapshot" in str(said[0])
        said = ranks.outcome(train_resized, Case(2), str(tmp_path / "out"), 4)
        assert [result["start"] for result in said] == [2, 2]


def test_an_engine_destroyed_on_the_way_out_of_an_error_has_not_finished(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        said = ranks.outcome(destroyed_in_finally, Case(1, steps=5), str(tmp_path / "out"), True)
        assert [str(error) for error in said] == ["out of memory", "out of memory"]
        attempt = ranks.start(destroyed_in_finally, Case(1, steps=5), str(tmp_path / "out"), False)
        assert attempt.results() == [4, 4]
        for process in attempt.processes:  # they end well, and are not killed
            process.join(WAIT)
        eventually(lambda: not any(agent_pid(ranks.run, host) for host in ranks.hosts), "the leaving of the agents")
        assert ranks.outcome(destroyed_in_finally, Case(1, steps=5), str(tmp_path / "out"), False) == [0, 0]  # it has now
