"""Gradient pipelines in DeepSpeed engines: without effect where they compress nothing, and training where they do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from deepspeed.runtime import constants
from deepspeed_case import Case as Job
from deepspeed_case import check
from engine_pipeline_case import ALONE, BF16, BF16_OPTIMIZER, WORDS, Case, every, in_one_process, refusals, skipped, under_lightning
from rank_kit import Batches, World, in_batches, on_ranks

pytestmark = pytest.mark.timeout(300)

STEPS = 30
SAME = [{"params": "*", "compress": "none"}]
TOPK = [{"params": "*", "compress": {"method": "topk", "ratio": 0.1}}]
POWERSGD = [{"params": "*.weight", "compress": {"method": "powersgd", "rank": 2}}]
INT8 = [{"params": "*", "compress": "int8"}]
ZEN = [{"params": "embed*", "sync": "zen"}]
SPLIT = [*ZEN, {"params": "*", "compress": {"method": "topk", "ratio": 0.1}, "fusion": {"groups": 2}}]
PLANNED = [{"params": "*", "compress": {"method": "topk", "ratio": 0.1}, "fusion": "cupcake"}]
STEERED = [{**TOPK[0], "control": {"method": "dc2", "deadline": 1e-9, "every": 1}}]  # a network that is always too slow
LOSSY = {"topk": TOPK, "powersgd": POWERSGD, "int8": INT8, "split": SPLIT}

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
SETTINGS = {
    **{f"fp32 at {stage}": Case(stage, accumulate=2) for stage in range(4)},
    **{f"bf16 at {stage}": Case(stage, accumulate=1 + stage % 2, config=BF16) for stage in range(4)},
    "BF16_Optimizer": Case(1, accumulate=2, config=BF16_OPTIMIZER),
    "offloaded": Case(2, accumulate=2, zero=OFFLOADED, config={"zero_force_ds_cpu_optimizer": False}),
    "offloaded at 3": Case(3, accumulate=2, zero=OFFLOADED, config={"zero_force_ds_cpu_optimizer": False}),
    "overlapped": Case(2, accumulate=2, zero={"overlap_comm": True, "round_robin_gradients": True}),
}
FREE = {"gradient_clipping": 0.0}
ALONE_IN = {
    "alone": Case(0, [ALONE], steps=6, config=FREE),
    "alone at 1": Case(1, [ALONE], 2, steps=6, config=FREE),
    "alone at 2": Case(2, [ALONE], steps=6, config=BF16 | FREE, zero={"round_robin_gradients": True}),
}
# Every stage and every method more than once; the rest of the matrix is a soak, and its cases come last, in batches of their own.
EACH = [(0, "topk"), (0, "int8"), (1, "topk"), (1, "powersgd"), (2, "int8"), (2, "split"), (3, "topk"), (3, "powersgd")]
OTHERS = [each for each in itertools.product(range(4), LOSSY) if each not in EACH]
STRAY = [(0, "int8"), (0, "topk"), (1, "topk"), (2, "int8"), (3, "topk")]  # with counters, or with residuals
CASES = {
    **{f"{name}, base": case for name, case in SETTINGS.items()},
    **{f"{name}, same": replace(case, rules=SAME) for name, case in SETTINGS.items()},
    "fp32 at 0, no rules": Case(0, [], 2),
    "fp32 at 2, no rules": Case(2, [], 2, through="attach"),
    "fp32 at 3, no rules": Case(3, [], 2, through="wrapped"),
    **{f"{stage}, base": Case(stage, steps=STEPS) for stage in range(4)},
    **{f"{stage}, {name}": Case(stage, LOSSY[name], steps=STEPS) for stage, name in EACH},
    **{f"{stage}, zen": Case(stage, ZEN, steps=STEPS) for stage in range(4)},
    **{f"{stage}, {name}, stray": Case(stage, LOSSY[name], steps=6, stray=True) for stage, name in STRAY},
    "1, scaled": Case(1, TOPK, steps=STEPS, scale=1024.0),
    "3, scaled": Case(3, TOPK, steps=STEPS, scale=1024.0),
    "bytes, bf16": Case(2, [], config={"communication_data_type": "bf16"}),
    "0, planned": Case(0, PLANNED, steps=12),
    **{f"{stage}, steered": Case(stage, STEERED, steps=12) for stage in (0, 2, 3)},
    **ALONE_IN,
    "sparse, base": Case(0, steps=6, sparse=True),
    "sparse, no rules": Case(0, [], steps=6, sparse=True),
    "sparse, zen": Case(0, ZEN, steps=6, sparse=True),
    "sparse, idle": Case(0, ZEN, steps=6, sparse=True, idle=True),
    **{f"{stage}, {name}": Case(stage, LOSSY[name], steps=STEPS) for stage, name in OTHERS},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Batches]:
    """By rank."""
    return in_batches(tmp_path_factory, 6, every, CASES)


def assert_same(ran: Sequence[Mapping[str, Any]], one: str, other: str) -> None:
    """Every loss and every weight, on both ranks."""
    for found in ran:
        assert found[one]["losses"] == found[other]["losses"]
        for name, weight in found[one]["weights"].items():
            assert (weight == found[other]["weights"][name]).all(), name


def figures(ran: Sequence[Mapping[str, Any]], case: str, rule: str) -> dict[str, float]:
    (found,) = (figures for label, figures in ran[0][case]["summary"].items() if label.startswith(rule))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_compresses_nothing_changes_no_bit(ran: Sequence[Mapping[str, Any]], setting: str) -> None:
    """With two ranks: with more of them the order of a sum is the scheme's."""
    assert_same(ran, f"{setting}, same", f"{setting}, base")
    case = SETTINGS[setting]
    nbytes, times = 2 if "bf16" in case.config else 4, case.accumulate if case.stage > 1 else 1  # at 2 and 3 every micro-batch is reduced
    elements = WORDS * 8 + 8 * 40 + 40 + 40 + 1
    assert figures(ran, f"{setting}, same", "1:")["bytes_before"] == nbytes * elements * times
    assert ran[0][f"{setting}, same"]["step"] == 4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_without_a_matching_rule(ran: Sequence[Mapping[str, Any]], stage: int) -> None:
    """All-reduce; through each of the doors by which an engine comes to its pipeline."""
    assert_same(ran, f"fp32 at {stage}, no rules", f"fp32 at {stage}, base")
    assert figures(ran, f"fp32 at {stage}, no rules", "no rule")["bytes_after"] > 0


@pytest.mark.parametrize(("stage", "method"), [*EACH, *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHERS)])
def test_lossy_methods_train(ran: Sequence[Mapping[str, Any]], stage: int, method: str) -> None:
    base, lossy = (ran[0][name] for name in (f"{stage}, base", f"{stage}, {method}"))
    first, last = fmean(lossy["losses"][:5]), fmean(lossy["losses"][-5:])
    assert base["losses"] != lossy["losses"]
    assert last < 0.25 * first
    sent = sum(figures.get("bytes_after", 0) for figures in lossy["summary"].values())
    assert sent < 0.4 * sum(figures.get("bytes_before", 0) for figures in lossy["summary"].values())
    assert lossy["summary"]["step"]["ms"] > 0
    for found in ran:  # all ranks have the same weights
        assert all((weight == lossy["weights"][name]).all() for name, weight in found[f"{stage}, {method}"]["weights"].items())


@pytest.mark.parametrize("stage", range(4))
def test_zen_takes_dense_stored_gradients_row_by_row(ran: Sequence[Mapping[str, Any]], stage: int) -> None:
    assert_same(ran, f"{stage}, zen", f"{stage}, base")
    assert figures(ran, f"{stage}, zen", "1:")["density"] <= 8 / WORDS


@pytest.mark.parametrize(("stage", "method"), STRAY)
def test_a_pending_backward_pass_leaves_nothing_behind_after_a_load(ran: Sequence[Mapping[str, Any]], stage: int, method: str) -> None:
    """Neither in residuals nor in the counters that random numbers are drawn by."""
    for found in ran:
        assert found[f"{stage}, {method}, stray"]["losses"] == found[f"{stage}, {method}"]["losses"][:6]


def test_every_group_of_the_pipeline_has_the_time_limit_of_the_run(ran: Sequence[Mapping[str, Any]]) -> None:
    assert ran[0]["0, topk, stray"]["limits"] == [77.0, 77.0]


@pytest.mark.parametrize("stage", [1, 3])
def test_residuals_are_kept_without_the_scale_of_the_loss(ran: Sequence[Mapping[str, Any]], stage: int) -> None:
    """The scale is a power of two that changes at every step: whoever keeps residuals with it ends with other bits."""
    assert_same(ran, f"{stage}, scaled", f"{stage}, topk")


def test_the_communication_data_type_is_respected(ran: Sequence[Mapping[str, Any]]) -> None:
    halves, base = figures(ran, "bytes, bf16", "no rule"), figures(ran, "fp32 at 2, no rules", "no rule")
    assert 2 * halves["bytes_after"] == base["bytes_after"] / 2  # which has two micro-batches


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_ratio_follows_the_network(ran: Sequence[Mapping[str, Any]], stage: int) -> None:
    assert [found[f"{stage}, steered"]["ratios"] for found in ran] == [[0.001]] * 2


def test_a_fusion_is_planned_where_all_gradients_are_there_at_once(ran: Sequence[Mapping[str, Any]]) -> None:
    assert ran[0]["0, planned"]["plan"][0].startswith(("cupcake", "even"))
    assert ran[0]["0, planned"]["plan"] == ran[1]["0, planned"]["plan"]


@pytest.mark.parametrize("case", ALONE_IN)
def test_ranks_that_train_alone_end_with_the_bits_of_one_process(ran: Sequence[Mapping[str, Any]], case: str) -> None:
    expected = in_one_process(CASES[case], len(ran))
    for found in ran:
        for name, weight in found[case]["weights"].items():
            assert (weight == expected.get_parameter(name).detach().float().numpy()).all(), name


def test_what_needs_one_optimizer_for_all_is_refused_where_each_rank_has_its_own(ran: Sequence[Mapping[str, Any]]) -> None:
    """Checkpoints also when the pipeline is closed."""
    found = ran[0]["alone at 1"]["refused"]
    for saved, loaded in ((found["saved"], found["loaded"]), (found["saved at the end"], found["loaded at the end"])):
        assert saved.startswith("StateError: DeepSpeed's checkpoints are of one optimizer that all ranks share")
        assert loaded.startswith("StateError: DeepSpeed's checkpoints have each rank's part of one optimizer that all ranks share")
    assert found["moved"].startswith("StateError: offload_states moves the masters that a rule with every averages")
    assert not found["weights loaded"]


def test_a_trainer_that_writes_checkpoints_is_refused_before_it_trains(tmp_path: Path) -> None:
    with World(tmp_path) as ranks:
        (found,) = ranks.outcome(under_lightning, Case(2, [ALONE]), str(tmp_path))
    assert found["ModelCheckpoint"].startswith(
        "ConfigError: gradient_pipeline: ranks that train alone (every) at ZeRO stages 1 and 2 have no"
    )
    assert not found["none"]


@pytest.mark.parametrize("case", [Case(2, [ALONE], config=BF16), Case(2, [ALONE])], ids=["bf16", "float32"])
def test_an_update_that_one_rank_skips_is_an_error_on_all(tmp_path: Path, case: Case) -> None:
    other, skipping = on_ranks(tmp_path, 2, skipped, case)
    assert skipping.startswith("StateError: DeepSpeed has skipped an update whose gradients are infinite")
    assert other.startswith("AveragingError: rank 1 has failed, and averages no gradients any more: StateError: DeepSpeed has skipped")


class TestSparseTensors:
    @pytest.mark.parametrize("rules", ["no rules", "zen"])
    def test_they_are_added_up(self, ran: Sequence[Mapping[str, Any]], rules: str) -> None:
        """DeepSpeed itself gathers entries and leaves adding them up to the optimizer, which rounds otherwise."""
        base, ours = ran[0]["sparse, base"], ran[0][f"sparse, {rules}"]
        assert ours["losses"] == pytest.approx(base["losses"], rel=1e-4)
        for name, weight in base["weights"].items():
            assert ours["weights"][name] == pytest.approx(weight, abs=1e-5)

    def test_a_rank_without_a_gradient_adds_nothing(self, ran: Sequence[Mapping[str, Any]]) -> None:
        idle = [found["sparse, idle"] for found in ran]
        assert idle[0]["losses"] != ran[0]["sparse, zen"]["losses"]
        assert all((weight == idle[1]["weights"][name]).all() for name, weight in idle[0]["weights"].items())
        assert ran[1]["sparse, idle"]["summary"]["1: params='embed*', sync=zen"]["density"] == 0


def test_threads_end_with_their_engine(ran: Sequence[Mapping[str, Any]]) -> None:
    assert not [name for name in CASES if ran[0][name]["threads"]]


@pytest.mark.parametrize(
    "job",
    [
        Job(2, accumulate=2, config={"gradient_pipeline": [POWERSGD[0], TOPK[0]]}),
        Job(0, bf16=True, config={"gradient_pipeline": TOPK}),
        Job(2, bf16=True, config={"gradient_pipeline": [{**TOPK[0], "every": 4, "outer": {}, "delay": 1}]}),
        pytest.param(
            Job(0, config={"gradient_pipeline": [{**TOPK[0], "every": 4, "outer": {}, "delay": 1}], **FREE}), marks=pytest.mark.soak
        ),
    ],
    ids=["stage 2", "stage 0", "alone at 2", "alone"],
)
def test_residuals_survive_a_kill(tmp_path: Path, job: Job) -> None:
    """The losses that follow, and all state at the end, have the bits of a run that nobody has killed."""
    check(tmp_path, job)


REFUSED = {
    "planned": (Case(1, PLANNED), "fusion cupcake cannot be planned at ZeRO stage 1, where zero_optimization.reduce_bucket_size decides"),
    "scattered": (Case(1, [], zero={"reduce_scatter": True}), "zero_optimization.reduce_scatter must be false, or left out, at stage 1"),
    "loose": (Case(2, [], zero={"contiguous_gradients": False}), "zero_optimization.contiguous_gradients must be true, or left out"),
    "whole": (Case(3, [], zero={"reduce_scatter": False}), "zero_optimization.reduce_scatter must be true, or left out, at stage 3"),
    "sparse": (
        Case(1, ZEN, sparse=True),
        "the gradient of embed.weight is a sparse tensor (its module has sparse=True), which ZeRO cannot",
    ),
    "summed": (Case(0, [], config={"gradient_allreduce_op": "sum"}), 'gradient_allreduce_op must be "mean" or left out'),
    "pipeline": (Case(1, []), "a PipelineEngine averages gradients in its own way; leave the section out"),
    "local steps": (
        Case(3, [ALONE]),
        "ranks train alone at ZeRO stages 1 and 2, and at stage 0 in float32; this engine has a DeepSpeedZeroOptimizer_Stage3",
    ),
    "local steps of masters elsewhere": (
        Case(2, [ALONE], zero=OFFLOADED, config={"zero_force_ds_cpu_optimizer": False}),
        "masters in host memory (offload_optimizer) cannot be averaged",
    ),
    "local steps if they pay": (
        Case(0, [{"params": "*", "fusion": "auto", "quality": "loss"}]),
        "quality: loss may have ranks train alone, which DDP and plain loops can begin in between, and no engine: leave it out",
    ),
    "local steps of hosts": (Case(2, [ALONE | {"within": "host"}]), "within: host is of DDP and plain loops: leave it out"),
    "local steps that are clipped": (
        Case(0, [ALONE]),
        "gradient_clipping has DeepSpeed add up the norms of all ranks",
    ),
    "local steps of Adagrad": (Case(2, [ALONE]), "masters cannot be divided anew where DeepSpeed makes one parameter group of several"),
    "no optimizer": (Case(0, []), "this engine has no optimizer, so it averages no gradients"),
    "typo": (Case(1, [{"params": "*", "compres": "topk"}]), "rule 1, compres='topk': unknown option; a rule has params, sync, compress"),
    "no such parameter": (
        Case(3, [{"params": "*bdy*", "compress": "bf16"}]),
        "rule 1 (params='*bdy*', sync=dense, compress=bf16) matches no",
    ),
    "complex": (Case(0, []), "turn is torch.complex64, and DeepSpeed casts gradients to the real numbers"),
}


if not hasattr(constants, "GRADIENT_ALLREDUCE_OP"):  # DeepSpeed 0.19.0 and older take the mean, whatever is asked
    del REFUSED["summed"]


def test_refusals(tmp_path: Path) -> None:
    with World(tmp_path) as ranks:
        (found,) = ranks.outcome(refusals, {name: case for name, (case, _) in REFUSED.items()})
    for name, (_, text) in REFUSED.items():
        assert found[name].startswith("ConfigError: gradient_pipeline: "), (name, found[name])
        assert text in found[name], (name, found[name])
