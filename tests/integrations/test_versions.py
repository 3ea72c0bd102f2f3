"""What lies outside the versions that have been tried is refused by name; what differs inside them is told apart."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

import deepspeed

from gemini_ft.deepspeed import versions
from gemini_ft.deepspeed.state import unsupported
from gemini_ft.errors import ConfigError, UnsupportedStateError
from gemini_ft.lightning import compat
from gemini_ft.transformers_versions import SUPPORTED, counts, told_of_epochs, transformers

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("version", ["0.18.5", "0.17.6", "0.20.0", "1.0"])
def test_a_deepspeed_that_is_not_known_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(UnsupportedStateError, match=re.escape(f"deepspeed {version} is not supported; install {EXTRAS['deepspeed'][0]}")):
        versions.check_version()


@pytest.mark.parametrize("version", ["0.18.6", "0.18.9+cu130", "0.19.0", "0.19.10", "installed"])
def test_a_deepspeed_that_is_known_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version != "installed":
        monkeypatch.setattr(deepspeed, "__version__", version)
    versions.check_version()


@pytest.mark.parametrize("version", ["2.4.0", "2.7.0", "3.0.0"])
def test_a_lightning_that_is_not_known_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.__version__", version)
    with pytest.raises(ConfigError, match=re.escape(f"lightning.pytorch {version} is not supported; install {EXTRAS['lightning'][0]}")):
        compat.check_lightning("lightning.pytorch")


def test_the_installer_allows_the_transformers_that_the_refusal_names() -> None:
    assert EXTRAS["huggingface"][0] == SUPPORTED


def test_parameters_lie_end_to_end_where_deepspeed_has_no_alignment() -> None:
    params = [torch.empty(3, 4), torch.empty(0), torch.empty(5)]
    older = SimpleNamespace(round_robin_bit16_groups=[[], params])
    newer = SimpleNamespace(round_robin_bit16_groups=[[], params], round_robin_bit16_offsets=[[], [0, 16, 16]])
    assert versions.offsets_in_group(older, 1) == [0, 12, 12]
    assert versions.offsets_in_group(newer, 1) == [0, 16, 16]


def test_sub_groups_have_one_process_group_where_deepspeed_has_no_other() -> None:
    older = SimpleNamespace(dp_process_group="all", fp16_groups=[[], []])
    newer = SimpleNamespace(dp_process_group="all", fp16_groups=[[], []], sub_group_process_groups=["all", "experts"])
    assert versions.groups_of_sub_groups(older) == ["all", "all"]
    assert versions.groups_of_sub_groups(newer) == ["all", "experts"]


def test_what_an_engine_or_a_trainer_does_not_count_is_left_out() -> None:
    assert versions.counters(SimpleNamespace(global_steps=3, micro_steps=6)) == {"global_steps": 3, "micro_steps": 6}
    assert counts(SimpleNamespace(current_flos=1.0)) == {"current_flos": 1.0}


def test_an_older_engine_manages_accumulation() -> None:
    assert versions.manages_accumulation(SimpleNamespace())
    assert not versions.manages_accumulation(SimpleNamespace(managed_gradient_accumulation=lambda: False))


@pytest.mark.parametrize(
    ("attributes", "sections"),
    [
        (
            {"progressive_layer_drop": None, "quantizer": None, "compression_scheduler": SimpleNamespace(different_compression_methods={})},
            [],
        ),
        ({"progressive_layer_drop": object()}, ["progressive_layer_drop"]),
        ({"quantizer": object()}, ["compression_training"]),
        ({"compression_scheduler": SimpleNamespace(different_compression_methods={"row_pruning": {"enabled": False}})}, []),
        (
            {"compression_scheduler": SimpleNamespace(different_compression_methods={"row_pruning": {"enabled": True}})},
            ["compression_training"],
        ),
    ],
)
def test_schedules_of_an_older_deepspeed_are_refused_where_they_are_used(attributes: dict[str, Any], sections: list[str]) -> None:
    engine = Engine()
    vars(engine).update(attributes)
    assert [why.partition(" ")[0] for found, why in unsupported(engine) if found] == sections


class Engine:
    """As much of an engine as the refusals ask for. Whatever it lacks is looked for in the module, as DeepSpeed's own does."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1)
        self.module.quantizer = torch.nn.Identity()  # the user's own
        self.optimizer, self.has_moe_layers = None, False
        for name in ("zero_offload_optimizer", "zero_offload_param", "zenflow_config", "super_offload"):
            setattr(self, name, lambda: None)
        for name in ("random_ltd_enabled", "curriculum_learning_enabled", "zero_hpz_partition_size", "autotp_size"):
            setattr(self, name, lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@pytest.mark.parametrize(("version", "told"), [("5.16.1", 1), ("5.17.0", 2), ("", None)])
def test_a_sampler_is_told_of_epochs_where_the_trainer_tells_it(version: str, told: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last case compares with the Trainer's own source."""
    sampler = SimpleNamespace(set_epoch=print)
    loader = SimpleNamespace(set_epoch=print, batch_sampler=SimpleNamespace(batch_sampler=sampler))
    if told is None:
        source = Path(transformers.trainer.__file__).read_text()
        told = 2 if re.search(r"getattr\(\w+, \"batch_sampler\", None\)\n *if hasattr\(\w+, \"set_epoch\"\)", source) else 1
    if version:
        monkeypatch.setattr(transformers, "__version__", version)
    assert told_of_epochs(loader) == [loader, sampler][:told]
