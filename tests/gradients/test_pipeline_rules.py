"""What a pipeline's rules may be, which parameter has which, and what is said where they are wrong."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DataParallel

from gemini_ft.compression.methods import COMPRESSORS, METHOD_OPTIONS, METHODS, REDUCERS
from gemini_ft.errors import ConfigError
from gemini_ft.pipeline.plan import NO_RULE, assign, trained
from gemini_ft.pipeline.rules import SCHEME_OPTIONS, SYNCS, Buckets, Groups, check_world, load_rules
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.hierarchical import Hierarchical
from gemini_ft.sync.schemes import LOSSY_SCHEMES, SCHEMES, SWITCH_SCHEMES

NEEDED: dict[str, dict[str, Any]] = {"hard_threshold": {"count": 10}, "hierarchical": {"local_size": 1}} | {
    name: {"switch": "host:1"} for name in SWITCH_SCHEMES
}


def all_parameters(**options: Any) -> list[dict[str, Any]]:
    return [{"params": "*", **options}]


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rules(source)
    return str(caught.value)


class TestRules:
    def test_the_short_form_of_everything(self) -> None:
        [rule] = load_rules([{"params": "*embed*", "sync": "zen", "compress": "topk"}])
        assert rule.params == ("*embed*",)
        assert (rule.sync.scheme, rule.sync.options) == ("zen", {})
        assert rule.compress is not None
        assert (rule.compress.method, rule.compress.feedback, rule.compress.two_phase) == ("topk", None, False)
        assert rule.fusion == Buckets(bucket=25 * 2**20)

    def test_options_reach_what_they_are_of(self) -> None:
        sync = {"scheme": "hierarchical", "local_size": 4, "inter": "agsparse"}
        [rule] = load_rules(all_parameters(sync=sync, compress={"method": "topk", "ratio": 0.5, "feedback": 0.9}))
        scheme: Any = rule.sync.make()
        assert (scheme.local_size, scheme.inter.name) == (4, "agsparse")
        assert rule.compress is not None
        made: Any = rule.compress.make()
        assert (made.beta, made.inner.ratio) == (0.9, 0.5)

    @pytest.mark.parametrize(
        ("given", "fusion"),
        [("layer-wise", "layer-wise"), ({"bucket": "1MiB"}, Buckets(bucket=2**20)), ({"groups": 4}, Groups(groups=4))],
    )
    def test_fusions(self, given: Any, fusion: Any) -> None:
        assert load_rules(all_parameters(fusion=given))[0].fusion == fusion

    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_can_be_named(self, method: str) -> None:
        [rule] = load_rules(all_parameters(compress={"method": method, **NEEDED.get(method, {})}))
        assert rule.compress is not None
        assert rule.compress.make() is not rule.compress.make()  # memories are not shared

    @pytest.mark.parametrize("scheme", SYNCS)
    def test_every_scheme_can_be_named(self, scheme: str) -> None:
        [rule] = load_rules(all_parameters(sync={"scheme": scheme, **NEEDED.get(scheme, {})}))
        assert rule.sync.make().name == scheme

    @pytest.mark.parametrize("nothing", [None, [], (), {"gradient_pipeline": None}])
    def test_no_rules_are_none(self, nothing: Any) -> None:
        assert load_rules(nothing) == ()

    def test_rules_that_are_rules_already_stay(self) -> None:
        rules = load_rules(all_parameters(compress="bf16"))
        assert load_rules(rules) is rules


class TestRefusals:
    @pytest.mark.parametrize(
        ("source", "words"),
        [
            (5, "gradient_pipeline=5: must be a list of rules, for example [{'params': '*', 'compress': 'bf16'}]"),
            ({"train": 1, "fp16": 2}, "has no gradient_pipeline, only train, fp16; it must be a list of rules under that name"),
            ({}, "has no gradient_pipeline; it must be a list of rules under that name"),
            ({"gradient_pipeline": "zen"}, "gradient_pipeline='zen': must be a list of rules"),
            (["*"], "rule 1: '*' is no rule; a rule is a mapping such as {'params': '*', 'compress': 'bf16'}"),
            ([{}], "rule 1, params={}: Field required"),
            ([{"params": ""}], "rule 1, params='': must be a glob such as '*embed*', or a list of globs; '*' matches every parameter"),
            ([{"params": []}], "rule 1, params=[]: must be a glob"),
        ],
    )
    def test_what_is_no_list_of_rules(self, source: Any, words: str) -> None:
        assert words in refusal(source)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"compres": "topk"}, "compres='topk': unknown option; a rule has params, sync, compress, fusion"),
            ({"sync": "zenn"}, f"sync 'zenn': must be one of {', '.join(SYNCS)}"),
            ({"sync": {"local_size": 2}}, "sync.scheme={'local_size': 2}: Field required"),
            ({"sync": {"scheme": "zen", "seeds": 1}}, "sync zen has no option 'seeds'; it has hashing, seed"),
            ({"sync": {"scheme": "auto", "seed": 1}}, "sync auto has no option 'seed'; it has none"),
            (
                {"sync": {"scheme": "zen", "hashing": "md5"}},
                "sync zen: hashing='md5': must be one of its names (how units are divided, rotation or hierarchical)",
            ),
            ({"sync": "hierarchical"}, "sync hierarchical needs the option 'local_size'; it has local_size, inter"),
            ({"sync": {"scheme": "hierarchical", "local_size": 2, "outer": "zen"}}, "has no option 'outer'; it has local_size, inter"),
            (
                {"sync": {"scheme": "hierarchical", "local_size": 2, "inter": "ring"}},
                "inter='ring': must be one of its names (the scheme between hosts, one of dense, agsparse",
            ),
            (
                {"sync": {"scheme": "hierarchical", "local_size": "2"}},
                "sync hierarchical: local_size='2': must be a whole number (ranks of a host, 1 or more",
            ),
            ({"compress": "topkk"}, f"compress 'topkk': must be one of {', '.join(METHODS)}; is it 'topk'?"),
            ({"compress": {"ratio": 0.1}}, "compress.method={'ratio': 0.1}: Field required"),
            ({"compress": {"method": "topk", "rate": 1}}, "compress topk has no option 'rate'; it has ratio, feedback, two_phase"),
            ({"compress": {"method": "dgc", "rate": 1}}, "compress dgc has no option 'rate'; it has momentum, nesterov, clip_norm, ratio"),
            (
                {"compress": {"method": "topk", "ratio": 5}},
                "ratio=5: must be a number (part of each tensor that travels, above 0 and at most 1, for example 0.01)",
            ),
            ({"compress": {"method": "topk", "ratio": "a"}}, "compress topk: ratio='a': must be a number (part of each tensor"),
            ({"compress": {"method": "dgc", "clip_norm": -1}}, "compress dgc: clip_norm=-1: must be a number (L2 norm"),
            ({"compress": {"method": "dgc", "warmup_steps": -5}}, "warmup_steps=-5: must be a whole number"),
            ({"compress": {"method": "dgc", "seed": 1}}, "compress dgc has no option 'seed'"),
            ({"compress": {"method": "terngrad", "clip": math.nan}}, "clip=nan: must be a number (standard deviations"),
            ({"compress": {"method": "qsgd", "levels": 3.7}}, "levels=3.7: must be a whole number (from 1 to 127"),
            ({"compress": {"method": "qsgd", "seed": "x"}}, "seed='x': must be a whole number"),
            ({"compress": {"method": "hard_threshold", "count": 2.5}}, "count=2.5: must be a whole number"),
            ({"compress": {"method": "powersgd", "least_rate": math.nan}}, "least_rate=nan: must be a number"),
            ({"compress": {"method": "powersgd", "rank": 2.5}}, "rank=2.5: must be a whole number"),
            ({"compress": {"method": "powersgd", "rank": True}}, "rank=True: must be a whole number"),
            ({"compress": {"method": "topk", "feedback": math.nan}}, "compress.feedback=nan"),
            ({"compress": "hard_threshold"}, "compress hard_threshold needs the option 'count'; it has count, feedback, two_phase"),
            ({"compress": {"method": "dgc", "feedback": 1}}, "'dgc' has its own memory and aggregation: feedback and two_phase cannot"),
            ({"compress": {"method": "topk", "feedback": 3}}, "compress.feedback=3: Input should be less than or equal to 1"),
            ({"compress": {"method": "randomk", "two_phase": True}}, "needs payloads of one length, such as those of ScaledSign"),
            ({"compress": {"method": "topk", "two_phase": True, "feedback": 0.5}}, "feedback=0.5: with two_phase it must be 0 or 1"),
            ({"fusion": "bucket"}, "fusion='bucket': must be layer-wise, cupcake, espresso, auto, {bucket: bytes} or {groups: number}"),
            ({"fusion": {"bucket": "25XB"}}, "fusion={'bucket': '25XB'}: must be layer-wise"),
            ({"fusion": {"groups": 0}}, "fusion={'groups': 0}: must be layer-wise"),
            (
                {"fusion": "auto", "compress": "efsignsgd"},
                "efsignsgd does not train as all-reduce does: leave it out, ",
            ),
            ({"fusion": "auto", "sync": "ring8"}, "ring8 does not train as all-reduce does: leave it out, "),
            ({"fusion": "auto", "sync": "ring8", "quality": "all-reduce"}, "ring8 does not train as all-reduce does: leave it out, "),
            (
                {"quality": "all-reduce"},
                "quality all-reduce has fusion auto choose among all-reduces: give it fusion: auto",
            ),
            ({"quality": "loss"}, "quality loss has fusion auto choose DiLoCo, or what trains alike: give it fusion: auto"),
            ({"fusion": "auto", "compress": "topk", "quality": "loss"}, "give it fusion: auto, without sync, and without compress"),
            ({"fusion": "auto", "quality": "any"}, "quality any lets fusion auto choose the method of compress, or ring8: give both"),
            ({"fusion": "cupcake", "compress": "topk", "quality": "any"}, "quality any lets fusion auto choose the method of compress"),
            ({"fusion": "auto", "compress": "bf16", "quality": "any"}, "quality any lets fusion auto choose the method of compress"),
            ({"fusion": "espresso"}, "fusion espresso chooses between compressing and not; add compress"),
            ({"sync": "zen", "fusion": "cupcake"}, "sync zen takes gradients one by one; leave fusion out, or add compress"),
            (
                {"sync": "zen", "compress": "qsgd"},
                "sync zen adds up what a sparsifier has picked, such as topk or sidco_e; qsgd is none",
            ),
            ({"sync": "zen", "compress": "adaq"}, "adaq is none: leave one of the two out"),
            ({"sync": "zen", "compress": {"method": "topk", "two_phase": True}}, "topk with two_phase is none: leave one of the two out"),
        ],
    )
    def test_what_is_wrong_with_a_rule(self, options: dict[str, Any], words: str) -> None:
        text = refusal(all_parameters(**options))
        assert text.startswith("gradient_pipeline: rule 1")
        assert words in text
        assert text.count("rule 1") == 1  # said once

    def test_all_faults_at_once(self) -> None:
        text = refusal([{"params": "*", "compress": "x"}, {"params": "*"}, {"params": "*", "sync": "y", "fusion": 3}])
        assert re.findall(r"rule \d, \w+", text) == ["rule 1, compress", "rule 3, sync", "rule 3, fusion"]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("pipeline.yaml", "gradient_pipeline:\n  - {params: '*', compress: {method: topk, ratio: 0.1}}\n"),
            ("pipeline.yml", "- params: '*'\n  compress: {method: topk, ratio: 0.1}\n"),
            ("pipeline.json", json.dumps(all_parameters(compress={"method": "topk", "ratio": 0.1}))),
            (
                "ds_config.json",
                json.dumps(
                    {"zero_optimization": {"stage": 1}, "gradient_pipeline": all_parameters(compress={"method": "topk", "ratio": 0.1})}
                ),
            ),
        ],
    )
    def test_all_kinds_say_the_same(self, name: str, text: str, tmp_path: Path) -> None:
        file = tmp_path / name
        file.write_text(text)
        expected = load_rules(all_parameters(compress={"method": "topk", "ratio": 0.1}))
        assert load_rules(file) == expected
        assert load_rules(str(file)) == expected

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("broken.yaml", b"a: [1", "not valid .yaml: expected ',' or ']'"),
            ("broken.json", b"{", "not valid .json: Expecting property name"),
            ("other.json", b'{"train_batch_size": 8}', "has no gradient_pipeline, only train_batch_size"),
            ("number.yaml", b"3", "=3: must be a list of rules"),
            ("binary.json", b"\xff\xfe\x00", "cannot be read (it is no text); give a JSON or YAML file"),
            ("empty.yaml", b"# later", "is empty; give a JSON or YAML file with a gradient_pipeline"),
            ("wrong.yaml", b"gradient_pipeline: [{params: '*', sync: y}]", "rule 1, sync={'scheme': 'y'}"),
        ],
    )
    def test_faults_name_the_file(self, name: str, content: bytes, words: str, tmp_path: Path) -> None:
        file = tmp_path / name
        file.write_bytes(content)
        text = refusal(file)
        assert text.startswith(str(file))
        assert words in text

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        file = tmp_path / "no.yaml"
        assert refusal(file) == f"{file}: cannot be read (No such file or directory); give a JSON or YAML file"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(4)


def rule_of(rules: list[Any], model: nn.Module | None = None) -> dict[str, int]:
    return {tensor.name: tensor.rule for tensor in assign(model or Model(), load_rules(rules))}


class TestAssignment:
    def test_the_first_match_decides(self) -> None:
        found = rule_of([{"params": "embed.*", "sync": "zen"}, {"params": ["layers.?.weight", "norm*"], "compress": "bf16"}])
        assert list(found.items()) == [  # the last parameter first
            ("norm.bias", 1),
            ("norm.weight", 1),
            ("layers.1.bias", NO_RULE),
            ("layers.1.weight", 1),
            ("layers.0.bias", NO_RULE),
            ("layers.0.weight", 1),
            ("embed.weight", 0),
        ]

    def test_a_rest_of_nothing_is_no_error(self) -> None:
        assert set(rule_of([{"params": "*"}, {"params": "*"}]).values()) == {0}

    def test_case_matters(self) -> None:
        with pytest.raises(ConfigError, match="matches no parameter"):
            rule_of([{"params": "Norm*"}])

    def test_wrappers_frozen_and_tied_parameters(self) -> None:
        model = Model()
        model.layers[1] = model.layers[0]
        model.norm.requires_grad_(False)
        wrapped = DataParallel(model)
        assert list(trained(wrapped)) == ["embed.weight", "layers.0.weight", "layers.0.bias"]
        tensors = {tensor.name: tensor for tensor in assign(wrapped, ())}
        assert tensors["embed.weight"].sparse
        assert not tensors["layers.0.weight"].sparse
        assert (tensors["embed.weight"].shape, tensors["embed.weight"].nbytes) == ((20, 4), 320)

    @pytest.mark.parametrize(
        ("rules", "words"),
        [
            (
                [{"params": "*", "compress": "topk"}],
                "rule 1 (params='*', sync=dense, compress=topk) would compress embed.weight, whose gradient is a sparse tensor (its module "
                "has sparse=True); put a rule with params: 'embed.weight' and sync: zen before it",
            ),
            ([{"params": "embde*"}], "rule 1 (params='embde*', sync=dense) matches no parameter; there are 7, for example embed.weight"),
            ([{"params": "zzz"}], "matches no parameter; there are 7, for example embed.weight, layers.0.weight, layers.0.bias"),
            (
                [{"params": "*", "sync": "zen"}, {"params": "norm*"}],
                "rule 2 (params='norm*', sync=dense) never applies: the rules before it take all it matches, norm.weight for example by "
                "(params='*', sync=zen); move it up",
            ),
            (
                [{"params": ["norm*", "*.bias"], "compress": "powersgd"}],
                "powersgd factors matrices, and layers.0.bias is a vector like all that the rule matches; they would travel whole: leave "
                "compress out for them, or take another method",
            ),
            (
                [{"params": "layers*", "compress": "dgc", "fusion": "espresso"}],
                "fusion espresso needs payloads of one length that anybody can add up, as topk, randomk and qsgd make; "
                "dgc makes none: take one of these, or fusion cupcake",
            ),
        ],
    )
    def test_what_cannot_be_applied(self, rules: list[Any], words: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(words)):
            rule_of(rules)

    def test_what_cannot_be_compressed(self) -> None:
        for model, words in (
            (nn.Linear(3, 3).double(), "would compress weight, which is torch.float64: only float32, float16 and bfloat16 can be; put"),
            (nn.ParameterList([nn.Parameter(nn.Linear(3, 1).weight[:0])]), "would compress 0, which has no elements (its shape is (0, 3))"),
            (nn.Linear(3, 3).requires_grad_(False), "the model has no parameter that requires a gradient; build the pipeline after"),
        ):
            with pytest.raises(ConfigError, match=re.escape(words)):
                rule_of(all_parameters(compress="topk"), model)
        assert rule_of([{"params": "weight"}, *all_parameters(compress="topk")], nn.Linear(2, 2).half()) == {"weight": 0, "bias": 1}


CONFIGS = sorted(file for file in (Path(__file__).parents[2] / "configs").iterdir() if "gradient_pipeline" in file.read_text())


class Transformer(nn.Module):
    """Names as the globs of the configurations expect them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_configurations_can_be_used(file: Path) -> None:
    rules = load_rules(file)
    used = {tensor.rule for tensor in assign(Transformer(), rules)}
    assert used - {NO_RULE} == set(range(len(rules)))


def test_there_is_a_configuration_of_each_kind() -> None:
    rules = [rule for file in CONFIGS for rule in load_rules(file)]
    assert {rule.fusion for rule in rules} >= {"cupcake", "espresso", "auto"}
    assert {rule.sync.scheme for rule in rules} >= {"zen"}
    assert {rule.compress.method for rule in rules if rule.compress is not None} >= {"powersgd", "dgc", "int8", "topk"}
    assert {file.suffix for file in CONFIGS} == {".yaml", ".json"}


@pytest.mark.parametrize("name", [*METHODS, *SYNCS])
def test_every_argument_of_methods_and_schemes_is_an_option_with_a_description(name: str) -> None:
    makers: dict[str, Any] = {**COMPRESSORS, **REDUCERS, **SCHEMES, **LOSSY_SCHEMES, **SWITCH_SCHEMES}
    makers |= {"auto": Auto, "hierarchical": Hierarchical}
    fields = {**METHOD_OPTIONS, **SCHEME_OPTIONS}[name].model_fields
    assert set(fields) | {"key", "distribution"} >= set(inspect.signature(makers[name]).parameters)
    assert all(field.description for field in fields.values())


def test_worlds_are_checked() -> None:
    check_world(load_rules(all_parameters(sync={"scheme": "hierarchical", "local_size": 2}, compress="topk")), 4)
    with pytest.raises(ConfigError, match=r"rule 1 .*: local_size=2: 3 ranks are no multiple of it"):
        check_world(load_rules(all_parameters(sync={"scheme": "hierarchical", "local_size": 2})), 3)
    with pytest.raises(ConfigError, match="int8 works on up to 127 ranks, and there are 128"):
        check_world(load_rules(all_parameters(compress="int8")), 128)
