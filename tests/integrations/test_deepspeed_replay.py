"""`verify: replay` of engines: a bit that flips is found under ZeRO 0 to 2, and the job ends with the bits of one without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

from deepspeed_case import Case
from engine_replay_case import late, refused, train
from rank_kit import World

from gemini_ft.errors import ReplayError

pytestmark = pytest.mark.timeout(300)
FLIPS = "step=7:rank=0:flip:of=weight:moment=in_copy; step=10:rank=1:flip:of=moment:moment=in_copy"
CASES = {
    "stage 0": Case(steps=12),
    "stage 1": Case(stage=1, bf16=True, steps=12, groups=2),
    "stage 2": Case(stage=2, steps=12, accumulate=2, groups=2),
}
SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in ("stage 0", "stage 1")]


@pytest.mark.parametrize("name", [*SOAK, "stage 2"])
def test_a_flipped_bit_is_found_and_the_job_ends_with_the_very_bits(name: str, tmp_path: Path) -> None:
    case, errors = CASES[name], list[str]()
    (tmp_path / "calm").mkdir()
    with World(tmp_path / "calm", hosts=["a", "b"]) as calm, World(tmp_path, hosts=["a", "b"], GEMINI_FAULTS=FLIPS) as ranks:
        undisturbed = calm.start(partial(train, case))
        while True:
            results = ranks.outcome(partial(train, case, gradient_at=5, update_at=8, verify="replay", compare_every=1))
            if not all(isinstance(result, ReplayError) for result in results):
                break
            assert len({str(result) for result in results}) == 1  # on all ranks
            errors.append(str(results[0]).partition(" came out at ")[2].partition(". Something")[0].partition(" (in memory)")[0])
        expected = undisturbed.results()
    assert [result["state"] for result in results] == [result["state"] for result in expected]
    assert not any("no longer compared" in text or "cannot be computed again" in text for text in results[0]["told"]), results
    weight, last = ("module.scale", "module.scale") if case.stage == 0 else ("parameter 0 of group 0", "parameter 0 of group 1")
    assert errors == [
        "rank 1 (host b): the gradient of module.body.weight",
        f"rank 0 (host a): {weight}",
        f"rank 0 (host a): {last}",
        f"rank 1 (host b): exp_avg of {weight}",
    ]


def test_where_a_script_writes_weights_after_steps_only_checked_iterations_have_hooks(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    with World(tmp_path / "calm", 1) as calm, World(tmp_path, 1) as ranks:
        undisturbed = calm.start(late)
        (result,) = ranks.outcome(partial(late, verify="replay", compare_every=2))
        (expected,) = undisturbed.results()
    assert result["state"] == expected["state"]
    assert not any("no longer compared" in text or "cannot be computed again" in text for text in result["told"]), result["told"]
    assert any("written after engine.step()" in text for text in result["told"]), result["told"]
    checked = [(True, True), (False, False)]
    assert result["hooks"][-6:] in (checked * 3, checked[::-1] * 3)


def test_what_cannot_be_computed_again_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with World(tmp_path, 1) as ranks:
        (said,) = ranks.outcome(refused)
    assert said == (
        "verify='replay' is not possible here: ZeRO 3 gathers and releases parameters by the order of calls that it has recorded; "
        "give verify=True"
    )
