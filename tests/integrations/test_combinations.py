"""Combinations of traits that a seed draws end with the bits of plain DDP, whether undisturbed or killed, or are refused by name.

`COMBINATIONS=100:500 make soak PART=combinations` runs the seeds from 100 to 499. A combination that differs is shrunk to the
traits that it needs, which the failure names. One that plain DDP cannot run, or that ends without a kill, shows nothing: it is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from combinations import FOUND, draw, drifts, judged, killed, legal, plainest, run, shown, shrunk
from rank_kit import Failed, World

SUITE = [5]
FIRST, END = map(int, os.environ.get("COMBINATIONS", "0:400").split(":"))
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("seed", [*SUITE, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(FIRST, END) if seed not in SUITE)])
def test_a_drawn_combination_ends_as_plain_ddp_does(seed: int, tmp_path: Path) -> None:
    traits = draw(seed)
    verdict, found = run(traits, tmp_path / "drawn")
    kills = killed(tmp_path / "drawn")
    if verdict in ("different", "failed"):
        traits = shrunk(traits, tmp_path, verdict)
    assert verdict in (("same",) if seed in SUITE else ("same", "refused", "impossible")), f"seed {seed}: {shown(traits)}: {found}"
    assert kills or seed not in SUITE
    if verdict == "impossible":
        pytest.skip(f"needs a combination that plain DDP can run: take another seed than {seed}, with which it ends in {found}")
    if verdict == "same" and not kills:
        pytest.skip(f"needs a kill: take another seed than {seed}, which draws moments that are not reached: {traits['kills']}")


def _die_with_a_child(until: Path) -> None:
    if os.fork() == 0:
        while not until.exists():  # with the pipe by which its parent would have answered
            time.sleep(0.05)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_was_killed_is_not_waited_for_while_a_process_that_it_has_forked_lives(tmp_path: Path) -> None:
    with World(tmp_path, 1) as world:
        attempt = world.start(_die_with_a_child, tmp_path / "end")
        assert not attempt.wait()
        (tmp_path / "end").touch()
    assert str(attempt.said[0]) == "rank 0 died with exit code -9"


def test_a_divergence_of_ranks_is_a_refusal_where_those_of_plain_ddp_drift_apart_too(tmp_path: Path) -> None:
    for rank, weight in enumerate(("a", "b")):
        lines = [[0, "final[0]/net.weight", weight], [0, "final[0]/net.bias", "c"], [0, "epoch 0 batch 0 of 0", rank]]
        (tmp_path / f"rank-{rank}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert drifts(tmp_path, "ReplicaDivergedError: model.net.weight is 1 on ranks [0], 2 on ranks [1]")
    assert not drifts(tmp_path, "ReplicaDivergedError: model.net.bias is 1 on ranks [0], 2 on ranks [1]")


def test_of_a_refusal_at_least_one_rank_of_a_way_says_the_reason() -> None:
    silent, refused = Failed("rank 0 died with exit code -11"), "refused: UnsupportedStateError: a generator of its own"
    lost = "refused: PeerError: the agent did not answer"
    for undisturbed, killed_ones, verdict in (
        (["done", "done"], ["done", "done"], "done"),
        (["done", "done"], [refused, silent], "refused"),
        ([refused, refused], [refused, refused], "refused"),
        ([silent, silent], [silent, silent], "failed"),
        ([refused, refused], [silent, silent], "failed"),
        ([refused, ValueError("odd")], ["done", "done"], "failed"),
        (["done", "done"], [lost, silent], "failed"),
    ):
        assert judged({"ddp": ["done", "done"], "undisturbed": undisturbed, "killed": killed_ones})[0] == verdict
    assert judged({"ddp": ["done", silent], "undisturbed": [refused, refused], "killed": ["done", "done"]})[0] == "impossible"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str, tmp_path: Path) -> None:
    assert run(legal(plainest() | FOUND[name]), tmp_path) == ("same", [])
    assert killed(tmp_path)
