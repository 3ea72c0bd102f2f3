"""Gradient pipelines under Lightning and Fabric: bits, hooks of the user's own, figures in the logs, and residuals after a kill."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

import local_steps_case
from agent_kit import preload
from lightning_pipeline_case import Case, every
from rank_kit import Batches, World, in_batches

import gemini_ft.lightning
import gemini_ft.pytorch_lightning
from gemini_ft.errors import ConfigError

preload("lightning.pytorch", "torchmetrics", "deepspeed.runtime.zero.muon.original_muon")
pytestmark = pytest.mark.timeout(300)

SAME = [{"params": "*", "compress": "none"}]
TOPK = [{"params": "*", "compress": {"method": "topk", "ratio": 0.1}}]
MIXED = [{"params": "*bias", "compress": "int8"}, *TOPK]  # with counters, and with residuals
LOCAL = [{"params": "*embed*", "every": 3, "outer": {}, "compress": {"method": "topk", "ratio": 0.1}}, {"params": "*", "every": 2}]
CHOOSES = [local_steps_case.CHOOSES]
STEERED = [{**TOPK[0], "control": {"method": "dc2", "deadline": 1e-9, "every": 1}}]  # a network that is always too slow
ZEN = [{"params": "*embed*", "sync": "zen"}]
SMALL = {"bucket_cap_mb": 0.0005}
ZERO2 = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 300}, "zero_allow_untested_optimizer": True}
CASES = {
    "base": Case(),
    "no rules": Case([]),
    "accumulated, base": Case(accumulate=2),
    "accumulated, same": Case(SAME, accumulate=2),
    "hook": Case(ZEN, hook="sum", options=SMALL),
    "hook, accumulated": Case(ZEN, accumulate=2, hook="sum", options=SMALL),
    "hook, nothing of its own": Case([{"params": "*", "sync": "dense"}], hook="sum", options=SMALL),
    "built-in hook": Case(ZEN, hook="builtin"),
    "bf16": Case(TOPK, precision="bf16-mixed"),
    "topk": Case(TOPK, log_every=5),
    "steered": Case(STEERED),
    "fabric, steered": Case(STEERED, fabric=True),
    "planned": Case([{**TOPK[0], "fusion": "cupcake"}]),
    "fabric, base": Case(accumulate=2, fabric=True),
    "fabric, same": Case(SAME, accumulate=2, fabric=True),
    "fabric, bf16": Case(TOPK, precision="bf16-mixed", fabric=True),
    "engine, same": Case(SAME, accumulate=2, config=ZERO2),
    "engine, topk": Case(TOPK, accumulate=2, config=ZERO2),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Batches]:
    """By rank: what came of each case."""
    return in_batches(tmp_path_factory, 6, every, CASES)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """All weights, and all losses that both have seen."""
    common = min(len(one["losses"]), len(other["losses"]))
    assert one["losses"][-common:] == other["losses"][-common:]
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in one["weights"].items():
        assert (weight == other["weights"][name]).all(), name


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        ("no rules", "base"),
        ("accumulated, same", "accumulated, base"),
        ("hook", "base"),
        ("hook, accumulated", "accumulated, base"),
        ("hook, nothing of its own", "base"),
        ("fabric, same", "fabric, base"),
    ],
)
def test_what_compresses_nothing_changes_no_bit(ran: list[Batches], ours: str, base: str) -> None:
    """With two ranks: with more of them the order of a sum is the scheme's."""
    for found in ran:
        assert not isinstance(found[ours], str), found[ours]
        assert_same(found[ours], found[base])
        assert found[ours]["steps"] == found[base]["steps"]


def test_a_hook_of_the_users_has_what_no_rule_matches(ran: list[Batches]) -> None:
    """On a CPU too, where Lightning leaves hooks out. Of the gradients in a bucket with matching ones the pipeline takes care."""
    others = 8 * 40 + 40 + 40 + 1
    assert 23 * others <= ran[0]["hook"]["hook"] <= 24 * others  # DDP's first step may have all in one bucket
    assert 11 * others <= ran[0]["hook, accumulated"]["hook"] <= 12 * others
    assert ran[0]["hook, nothing of its own"]["hook"] == 0
    assert ran[0]["base"]["hook"] == 0


def test_a_built_in_hook_is_refused(ran: list[Batches]) -> None:
    assert "ddp_comm_hook=DDPCommHookType.ALLREDUCE is built into DistributedDataParallel" in ran[0]["built-in hook"]


@pytest.mark.parametrize("case", ["topk", "bf16", "planned", "fabric, bf16", "engine, same", "engine, topk"])
def test_training(ran: list[Batches], case: str) -> None:
    found = ran[0][case]
    assert not isinstance(found, str), found
    assert fmean(found["losses"][-6:]) < 0.75 * fmean(found["losses"][:3])
    for name, weight in ran[1][case]["weights"].items():
        assert (weight == found["weights"][name]).all(), name


@pytest.mark.parametrize("case", ["steered", "fabric, steered"])
def test_a_ratio_follows_the_network(ran: list[Batches], case: str) -> None:
    assert not isinstance(ran[0][case], str), ran[0][case]
    assert [found[case]["ratios"] for found in ran] == [[0.001]] * 2


def test_figures_are_logged_when_lightning_logs(ran: list[Batches]) -> None:
    logged = ran[0]["topk"]["logged"]
    assert list(logged) == [4, 9, 14, 19]
    assert logged[9]["gradients/step/number"] == 9
    assert 0 < logged[9]["gradients/rule_1/bytes_after"] < logged[9]["gradients/rule_1/bytes_before"] / 2
    assert [metrics["gradients/step/number"] for metrics in ran[0]["engine, topk"]["logged"].values()] == list(range(12))
    assert "gradients/no_rule/bytes_after" in ran[0]["hook"]["logged"][0]
    assert ran[0]["base"]["logged"] == {}


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, accumulate=2, warm=True),
        Case(MIXED, fabric=True, saved=True, warm=True),
        Case(LOCAL, accumulate=2, validates=True),
        Case(CHOOSES, alone=True),
    ],
    ids=["Trainer", "Fabric", "Trainer, local steps", "Trainer, chosen local steps"],
)
def test_residuals_survive_a_kill(tmp_path: Path, case: Case) -> None:
    """What follows has the bits of a run that nobody has killed, though a backward pass is pending at each resume."""
    with World(tmp_path, 2) as others, World(tmp_path, 2) as ranks:
        undisturbed = others.start(every, {"run": case})
        faults = f"step=3:rank=0:sigkill; step={20 if case.alone else 6}:rank=1:sigkill:moment=in_copy"
        results = ranks.finish(every, {"run": case}, GEMINI_FAULTS=faults)
        assert ranks.restarts == 2
        expected = undisturbed.results()
    for found, other in zip(results, expected, strict=True):
        assert not isinstance(other["run"], str), other
        assert not isinstance(found["run"], str), found
        assert 0 < len(found["run"]["losses"]) <= len(other["run"]["losses"])  # a list on a module is restored with it
        assert_same(found["run"], other["run"])
        assert found["run"]["steps"] == other["run"]["steps"]
    weights = [found["run"]["weights"] for found in results]  # local steps end with an average, too, unless they are chosen late
    assert all((weight == weights[1][name]).all() for name, weight in weights[0].items()) is not case.alone


@pytest.mark.parametrize("module", [gemini_ft.lightning, gemini_ft.pytorch_lightning], ids=["lightning", "pytorch_lightning"])
class TestOptions:
    @pytest.mark.parametrize("name", ["GeminiModelParallelStrategy", "GeminiFabricModelParallelStrategy"])
    def test_fsdp2_is_refused(self, module: Any, name: str) -> None:
        options = {"parallelize_fn": lambda model, mesh: model} if "Fabric" in name else {}
        with pytest.raises(ConfigError, match=f"{name}: gradient_pipeline is not supported, because fully_shard reduces gradients itself"):
            getattr(module, name)(gradient_pipeline=TOPK, **options)

    @pytest.mark.parametrize("name", ["GeminiStrategy", "GeminiFabricStrategy"])
    def test_rules_are_checked_when_the_strategy_is_made(self, module: Any, name: str) -> None:
        with pytest.raises(ConfigError, match=r"compress 'topc': must be one of .*; is it 'topk'\?"):
            getattr(module, name)(gradient_pipeline=[{"params": "*", "compress": "topc"}])

    def test_a_file_of_rules(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "rules.yaml").write_text("gradient_pipeline:\n  - {params: '*embed*', sync: zen}\n")
        strategy = module.GeminiStrategy(gradient_pipeline=str(tmp_path / "rules.yaml"))
        assert [rule.sync.scheme for rule in strategy.gemini_rules] == ["zen"]

    def test_buckets_are_small_unless_the_user_says(self, module: Any) -> None:
        assert "bucket_cap_mb" not in module.GeminiStrategy()._ddp_kwargs
        assert module.GeminiStrategy(gradient_pipeline=TOPK)._ddp_kwargs["bucket_cap_mb"] == 1
        assert module.GeminiStrategy(gradient_pipeline=TOPK, bucket_cap_mb=25)._ddp_kwargs["bucket_cap_mb"] == 25

    def test_code_wins_over_the_section(self, module: Any) -> None:
        config = {**ZERO2, "gradient_pipeline": TOPK}
        (rule,) = module.GeminiDeepSpeedStrategy(config=config).gemini_rules
        assert rule.compress.method == "topk"
        strategy = module.GeminiDeepSpeedStrategy(config=config, gradient_pipeline=[{"params": "*", "compress": "int8"}])
        assert strategy.gemini_rules[0].compress.method == "int8"
        assert "gradient_pipeline" not in strategy.config
