"""``gemini pipeline`` shows what training would do, and refuses what training would refuse."""

from __future__ import annotations

import json
import math
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_kit import EVERY, OPTIONS, SHAPES, gradients, measured, method
from pipeline_case import Leaves
from torch import nn

from gemini_ft.cli import main as cli
from gemini_ft.cli import pipeline_advice
from gemini_ft.cli.pipeline_costs import describe
from gemini_ft.compression.base import Bundle, Turn
from gemini_ft.pipeline.qualities import ACCURACY, WAYS, WORDS
from gemini_ft.pipeline.rules import Rule, load_rules

RULES: list[dict[str, Any]] = [
    {"params": "embed.*", "sync": "zen"},
    {"params": "*.bias"},
    {"params": "layers.0.*", "compress": {"method": "topk", "ratio": 0.01, "feedback": 0.9}, "fusion": "layer-wise"},
    {"params": "layers.1.*", "compress": {"method": "dgc", "ratio": 0.01}, "fusion": "cupcake"},
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 100, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(100, 50) for _ in range(3)])


def looking() -> nn.Module:
    """A model that cannot be built on the meta device."""
    model = Model()
    assert float(model.layers[0].weight.sum()) != 0.5  # type: ignore[operator, union-attr]
    return model


def no_model() -> int:
    return 3


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps(RULES))
    return str(file)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["pipeline", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("function", ["Model", "looking"])
def test_who_gets_what(function: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, config, "--model", f"{__name__}:{function}", "--ranks", "4", "--rate", "200mbit").splitlines()
    cells = [re.split(r"  +", line) for line in lines]
    assert cells[0] == ["parameter", "shape", "rule", "sync", "compression", "error feedback", "group"]
    assert cells[1:8] == [
        ["layers.2.bias", "50", "2", "dense", "-", "-", "3"],
        ["layers.2.weight", "50x100", "-", "dense", "-", "-", "1"],
        ["layers.1.bias", "50", "2", "dense", "-", "-", "3"],
        ["layers.1.weight", "50x100", "4", "dense", "dgc(ratio=0.01)", "own", "2"],
        ["layers.0.bias", "50", "2", "dense", "-", "-", "3"],
        ["layers.0.weight", "50x100", "3", "dense", "topk(ratio=0.01)", "0.9", "4"],
        ["embed.weight", "1000x100", "1", "zen", "-", "-", "5"],
    ]
    assert lines[9] == "4 ranks at 200 Mbit/s; seconds on the network alone"
    costs = {row[0]: row[1:] for row in cells[11:]}
    assert costs["no rule"][:2] == ["20,000", "20,000"]
    assert costs["1: params='embed.*', sync=zen"] == [
        *("400,000", "?", "?", "0.0240", "0.0120"),
        "depends on the data: rows that are not zero",
    ]
    assert costs["3: params='layers.0.*', sync=dense, compress=topk"] == ["20,000", "400", "0.0000", "0.0012", "0.0006", "formula"]
    assert costs["4: params='layers.1.*', sync=dense, compress=dgc"][1] == "400"
    assert costs["4: params='layers.1.*', sync=dense, compress=dgc"][-1] == "ratio 0.01; depends on the data"
    tables = {name: dict(zip(row, below, strict=False)) for row, below in pairwise(cells) for name in row}
    assert tables["parameter server"]["parameter server"] == "0.1475"  # 2 alpha + 2 * 4 ranks * 115 150 elements of 4 bytes
    through = tables["switchml"]
    assert (through["switchml"], through["fpisa, 16 bits"]) == ("0.0202", "0.0103")  # 1472 bytes a packet for 1408 of values, 64 ahead


def test_for_programs(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, config, "--model", f"{__name__}:Model", "--json"))
    assert (document["ranks"], document["rate"]) == (8, 1e9)
    assert len(document["parameters"]) == 7
    assert document["parameters"][1] == {
        "parameter": "layers.2.weight",
        "shape": [50, 100],
        "rule": None,
        "sync": "dense",
        "compression": "-",
        "error_feedback": "-",
        "group": 1,
    }
    [embedding] = [rule for rule in document["rules"] if "embed" in rule["rule"]]
    assert (embedding["wire_bytes"], embedding["seconds"]) == (None, None)
    assert embedding["fp32_seconds"] == pytest.approx(2 * 7 / 8 * 400_000 * 8 / 1e9)


@pytest.mark.parametrize(("scheme", "wire"), [("switchml", 6_000_000), ("fpisa", 3_000_000)])
def test_a_rule_that_goes_through_a_switch_costs_no_ring(scheme: str, wire: int) -> None:
    """Each rank sends and receives once, 1472 bytes for 1408 of values; those of SwitchML have 4 bytes each."""
    model = nn.Linear(1000, 1500, bias=False, dtype=torch.bfloat16)
    rules = load_rules([{"params": "*", "sync": {"scheme": scheme, "switch": "10.0.0.1:7000"}}])
    [cost] = describe(model, rules, ranks=4, rate=1e9).rules
    assert cost.wire_bytes == wire
    assert cost.seconds == pytest.approx(8 * wire / 1e9 * 1472 / 1408, rel=0.01)
    [alone] = describe(model, rules, ranks=1, rate=1e9).rules
    assert alone.seconds == 0


@pytest.mark.parametrize(("words", "wire"), [("int8", 1_500_000 + 4 * 11_719), ("bf16", 3_000_000 + 4 * 11_719)])
def test_a_quantised_ring_sends_its_words_and_scales(words: str, wire: int) -> None:
    rules = load_rules([{"params": "*", "sync": {"scheme": "ring8", "words": words}}])
    [cost] = describe(nn.Linear(1000, 1500, bias=False), rules, 4, 1e9).rules
    assert (cost.wire_bytes, cost.by) == (wire, "formula")
    assert cost.seconds == pytest.approx(2 * 3 / 4 * 8 * wire / 1e9)


def test_local_steps_cost_a_part_of_their_average_in_each_step() -> None:
    model, dense = nn.Linear(1000, 1500, bias=False), [{"params": "*"}]
    [each], [tenth] = (describe(model, load_rules(rules), 4, 1e9).rules for rules in (dense, [{**dense[0], "every": 10}]))
    assert (each.wire_bytes, tenth.wire_bytes) == (6_000_000, 600_000)
    assert tenth.seconds == pytest.approx(each.seconds / 10)
    assert tenth.by == "formula; once in 10 steps"


def test_other_rules_are_compared(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By whole steps if those of computing are known; what trains otherwise is named with its figure and where that is from."""
    out = shown(capsys, config, "--model", f"{__name__}:Model", "--rate", "200mbit", "--step", "30")
    assert "Plain DDP" in out
    assert out.endswith("30.000 s for a step. Nothing else saves a tenth of that.\n")
    document = json.loads(shown(capsys, config, "--model", f"{__name__}:Model", "--json"))["advice"]
    assert "Exchanges travel beside the backward pass: give --step" in document["verdict"]
    dense = nn.Linear(4096, 1024, bias=False, device="meta")

    def costs(rule: Rule) -> tuple[int | None, float | None]:
        [cost] = describe(dense, (rule,), 4, 5e7).rules
        return cost.wire_bytes, cost.seconds

    found = {way.name: way for way in pipeline_advice.ways(dense, costs, 0.1, 4)}
    assert found["DiLoCo"].network == pytest.approx(found["all-reduce in bfloat16"].network / 25)
    assert found["DiLoCo"].step == pytest.approx(0.1 + found["DiLoCo"].network)
    assert found["all-reduce in float32"].step == pytest.approx(0.1 / 3 + found["all-reduce in float32"].network)
    assert found["SparseLoCo"].compressing > 0
    assert found["ring8"].compressing > 0
    assert re.search(r"SparseLoCo .* 0\.962 +not reached\n", pipeline_advice.shown([*found.values()], 0.1))
    said = pipeline_advice.verdict([found["DiLoCo"], found["all-reduce in bfloat16"]], 0.1)
    assert "DiLoCo takes" in said
    assert f"reached 0.984 of DDP's accuracy in as many steps ({ACCURACY}), and took 1.38 times the words" in said
    assert "SparseLoCo takes" in (said := pipeline_advice.verdict([found["SparseLoCo"], found["all-reduce in bfloat16"]], 0.1))
    assert f"did not reach a loss of DDP's ({WORDS})" in said


def test_quality_is_that_of_the_report() -> None:
    report = (Path(__file__).parents[2] / ACCURACY).read_text()
    accuracy = {row: float(value) for row, value in re.findall(r"^\| ([^|]+) \| 10 \| ([0-9.]+) \|", report, re.MULTILINE)}
    rows = {"all-reduce in bfloat16": "auto", "int8": "int8", "powersgd": "powersgd", "top-k 1 %": "topk 1 %, buckets"}
    for way, row in (rows | {"DiLoCo": "diloco", "SparseLoCo": "sparseloco", "ring8": "ring8"}).items():
        assert WAYS[way].accuracy == pytest.approx(accuracy[row] / accuracy["DDP"], abs=5e-4), way


def test_words_are_those_of_the_report() -> None:
    report = (Path(__file__).parents[2] / WORDS).read_text()
    found = re.findall(r"^\| ([^|]+) \| [0-9.]+ \| [^|]+ \| ([^|]+) \|$", report, re.MULTILINE)
    words = {row: [float(each.replace(",", "")) for each in cell.split(", ")] for row, cell in found if "not reached" not in cell}
    rows = {"all-reduce in bfloat16": "DDP bf16", "ring8": "ring8", "powersgd": "PowerSGD (torch)", "top-k 1 %": "top-k 1 %"}
    for way, row in (rows | {"DiLoCo": "DiLoCo"}).items():
        factors = [mine / base for mine, base in zip(words[row], words["DDP fp32"], strict=True)]
        assert WAYS[way].words == pytest.approx(statistics.fmean(factors), abs=1e-3), way
    assert WAYS["SparseLoCo"].words == math.inf
    assert "SparseLoCo" not in words


def test_only_ways_that_trained_alike_in_every_benchmark_count_as_alike() -> None:
    assert {name for name, known in WAYS.items() if known.is_alike} == {
        "all-reduce in float32",
        "all-reduce in bfloat16",
        "ring8",
        "int8",
    }


@pytest.mark.parametrize("name", EVERY)
def test_bytes_are_those_that_travel(name: str) -> None:
    """Exactly, but for methods of which the data decide, whose bytes come from their ratio, or are not known."""
    bare, _, suffix = name.partition("+")
    options = {"method": bare, **OPTIONS.get(bare, {}), **({"two_phase": True} if suffix else {})}
    [cost] = describe(Leaves(), load_rules([{"params": "*", "compress": options}]), 1, 1e9).rules
    each = method(name)
    bundle = Bundle.of(gradients(0), each.align)
    _, sent = measured(each.exchange(bundle, Turn()))
    assert cost.dense_bytes == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    if cost.by == "formula":
        assert cost.wire_bytes == sent
    elif cost.wire_bytes is None:
        assert bare in ("threshold", "hard_threshold", "threelc", "inceptionn")
    else:
        assert cost.by == f"ratio {options['ratio']:g}; depends on the data"


def test_bytes_that_magnitudes_decide_are_not_claimed() -> None:
    [cost] = describe(Leaves(), load_rules([{"params": "*", "sync": "inceptionn-ring"}]), 8, 1e9).rules
    assert (cost.wire_bytes, cost.seconds, cost.by) == (None, None, "depends on the data: words of 0 to 32 bits")


@pytest.mark.parametrize(
    ("compress", "share"),
    [
        ("bf16", 2 * 7 / 8 / 2),
        ("efsignsgd", 7 / 32),
        ({"method": "efsignsgd", "two_phase": True}, 2 * 7 / 8 / 32),
        ("signsgd", 2 * 7 / 8 / 32),
    ],
)
def test_seconds_follow_from_the_collective(compress: Any, share: float) -> None:
    """Parts of the time that a link needs for the dense gradients, on 8 ranks."""
    model = nn.Linear(4096, 1024, bias=False, device="meta")
    [cost] = describe(model, load_rules([{"params": "*", "compress": compress}]), 8, 1e9).rules
    assert cost.seconds == pytest.approx(share * cost.dense_bytes * 8 / 1e9, rel=1e-3)
    assert cost.fp32_seconds == 2 * cost.bf16_seconds == pytest.approx(2 * 7 / 8 * cost.dense_bytes * 8 / 1e9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nonsense"], "--model 'nonsense': must be module:function, for example train:make_model"),
        (
            ["--model", "no_such_module:f"],
            "--model 'no_such_module:f': No module named 'no_such_module'; run it where",
        ),
        (["--model", f"{__name__}:f"], f"--model '{__name__}:f': {__name__} has no f; name a function that returns the model"),
        (["--model", f"{__name__}:no_model"], f"--model '{__name__}:no_model': returned int; it must return an nn.Module"),
        (["--model", f"{__name__}:Model", "--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--model", f"{__name__}:Model", "--ranks", "9" * 400], "must be at least 1, and at most a million"),
        (["--model", f"{__name__}:Model", "--step", "-1"], "--step -1: must be seconds, at least 0"),
        (["--model", f"{__name__}:Model", "--rate", "-1gbit"], "--rate -1e+09: must be above 0"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{first}={second}" for first, second in zip(arguments[::2], arguments[1::2], strict=True)]
    assert cli.main(["pipeline", config, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemini pipeline: ")
    assert words in error


def test_rules_that_do_not_fit_are_refused_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pipeline.json"
    for rules, words in (
        ([{"params": "*", "compress": "topk"}], "would compress embed.weight, whose gradient is a sparse tensor"),
        ([{"params": "*", "compress": "topkk"}], "is it 'topk'?"),
    ):
        file.write_text(json.dumps(rules))
        assert cli.main(["pipeline", str(file), "--model", f"{__name__}:Model"]) == 2
        assert words in capsys.readouterr().err
