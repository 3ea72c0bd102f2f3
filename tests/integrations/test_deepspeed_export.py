"""What is exported of an engine, DeepSpeed without this package continues from, and other tools read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from agent_kit import eventually
from deepspeed_case import Case, continue_plainly, train_resized
from plain_case import history
from rank_kit import World
from safetensors.torch import load_file

from gemini_ft.cli.export import command
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.opening import open_storage

pytestmark = pytest.mark.timeout(300)

BF16_OPTIMIZER = Case(1, bf16=True, config={"data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"}})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(0), marks=pytest.mark.soak),
        Case(1, groups=2),
        pytest.param(Case(2, bf16=True, zero={"round_robin_gradients": True}), marks=pytest.mark.soak),
        Case(3, bf16=True, groups=2),
        pytest.param(BF16_OPTIMIZER, marks=pytest.mark.soak),
    ],
    ids=["stage 0", "stage 1", "stage 2, bf16", "stage 3, bf16", "BF16_Optimizer"],
)
def test_deepspeed_goes_on_from_it(tmp_path: Path, case: Case) -> None:
    case = dataclasses.replace(case, options={"storage": {"url": f"file://{tmp_path / 'store'}", "every_steps": 4}})
    with World(tmp_path, 2) as ranks:
        said = ranks.outcome(train_resized, case, str(tmp_path / "ours"), 4)
        assert not any(isinstance(result, Exception) for result in said), said
        weights = torch.load(tmp_path / "ours.weights")
        for form in ("deepspeed", "safetensors"):
            assert command(["latest", "--format", form, "--to", str(tmp_path / form), "--run-id", ranks.run]) == 0
        eventually(lambda: list_checkpoints(open_storage(f"file://{tmp_path / 'store'}")), "the upload of step 4")
        ranks.outcome(train_resized, case, str(tmp_path / "ours"), 7)
    assert command(["4", "--format", "deepspeed", "--to", str(tmp_path / "stored"), "--from", f"file://{tmp_path / 'store'}"]) == 0

    exported = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) and exported[name].dtype == weights[name].dtype for name in weights)
    expected = {step: line for step, line in history(tmp_path / "ours", 0).items() if step >= 4}
    for folder in ("deepspeed", "stored"):
        with World(tmp_path, 2) as ranks:
            assert ranks.outcome(continue_plainly, case, str(tmp_path / f"from-{folder}"), str(tmp_path / folder), 7) == [4, 4]
        assert history(tmp_path / f"from-{folder}", 0) == expected
