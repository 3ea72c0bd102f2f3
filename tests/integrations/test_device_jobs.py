"""Whole jobs on a device whose copies lag behind: killed, they end with the bits of undisturbed ones on a CPU.

A unit that is right by itself is of no use to a job that builds it in another way: these call what a script calls. Lightning, Fabric and
FSDP2 are in test_lightning_recovery.py, transformers' Trainer in test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")

import deepspeed_case
import gradient_case
import plain_case
from agent_kit import end_agent
from lagging_device import on_device
from plain_case import history, side_by_side
from rank_kit import World

KILLED = "step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy; step=12:rank=0:sigkill:moment=before_update"
WAIT = {"on_late": "wait"}


def check(folder: Path, train: Callable[[str], Any], *, lag: float, faults: str) -> None:
    """Compares every bit of a job on the device, whose copies lag so many seconds behind, with those of one on the CPU."""
    results, expected = side_by_side(folder, partial(on_device, lag, train), faults, calm=train)
    assert [said.get("state") for said in results] == [said.get("state") for said in expected]
    assert min(said["start"] for said in results) > 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(plain_case.Case(options=WAIT), marks=pytest.mark.soak),
        plain_case.Case(options=WAIT | {"verify": True, "chunk_bytes": 512}),
        plain_case.Case(accumulate=2, pause=0.05),
    ],
    ids=["every step", "verified", "late ones are skipped"],
)
def test_a_plain_loop(tmp_path: Path, case: plain_case.Case) -> None:
    check(tmp_path, partial(plain_case.train, case), lag=0.01, faults=KILLED)


def test_a_gradient_pipeline(tmp_path: Path) -> None:
    """Its residuals are written in the next backward pass, while the copies of the rest are under way."""
    check(tmp_path, gradient_case.train, lag=0.05, faults="step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy")


def test_replicas_that_workers_carry(tmp_path: Path) -> None:
    """A host is lost with its memory; what workers have carried out of slots that a device fills brings it back."""
    case = plain_case.Case(width=1024, options=WAIT | {"traffic": {"transport": "collective", "buffer_bytes": 16384, "sub_buffers": 4}})
    with World(tmp_path, 2) as others, World(tmp_path, 2) as ranks:
        undisturbed = others.start(plain_case.train, case, str(tmp_path / "undisturbed"))
        arguments = (0.01, plain_case.train, case, str(tmp_path / "disturbed"))
        first = ranks.start(on_device, *arguments, GEMINI_FAULTS="step=8:rank=1:sigkill")
        assert not first.wait()
        first.kill()
        end_agent(ranks.run, "host1")
        results = ranks.outcome(on_device, *arguments)
        assert not any("Timed out" in ranks.log(host) for host in ranks.hosts)
        expected = undisturbed.results()
    assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
    for rank in range(2):
        assert history(tmp_path / "disturbed", rank) == history(tmp_path / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.soak) for stage in (0, 1, 3))])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    case = deepspeed_case.Case(stage, bf16=stage == 3, options=WAIT)
    check(tmp_path, partial(deepspeed_case.train, case), lag=0.1, faults="step=4:rank=0:sigkill; step=7:rank=1:sigkill:moment=in_copy")
