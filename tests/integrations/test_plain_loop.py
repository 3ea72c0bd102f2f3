"""A plain torch loop around the Checkpointer: killed in every way, it ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import end_agent
from plain_case import Case, side_by_side, train
from rank_kit import World
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.errors import UnsupportedStateError
from gemini_ft.recovery import readers
from gemini_ft.testing import digest


def check(folder: Path, case: Case, faults: str) -> list[Any]:
    """Run a case with faults and without, compare every bit, and return what the ranks of the last attempt said."""
    results, expected = side_by_side(folder, partial(train, case), faults)
    assert [said["state"] for said in results] == [said["state"] for said in expected]
    return results


KILLED = "step=5:rank=0:sigkill; step=9:rank=1:sigkill:moment=in_copy; step=12:rank=0:sigkill:moment=before_update"
WAIT_FOR_COMMIT = {"on_late": "wait"}  # a loop this fast would otherwise leave most steps out


class TestSameBits:
    def test_five_kills_in_one_run(self, tmp_path: Path) -> None:
        faults = f"{KILLED}; step=2:rank=1:sigkill; step=15:rank=1:exit"
        results = check(tmp_path, Case(options=WAIT_FOR_COMMIT), faults)
        assert results[0]["start"] >= 13  # the snapshot of 14 had a slot, so that of 13 was committed
        assert set(results[0]["restored"]) == {"own memory"}  # where the replica of the other shard is too

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param(Case(accumulate=2), marks=pytest.mark.soak),
            Case(accumulate=2, options={"interval": 3}),
            Case(overflow_every=4),
            Case(optimizers=2),
            pytest.param(Case(options={"interval": 3}), marks=pytest.mark.soak),
            Case(options={"verify": True, "on_late": "wait", "chunk_bytes": 512}),
        ],
        ids=["accumulation", "interval in an accumulation", "overflows", "two optimizers", "interval", "verify, small chunks"],
    )
    def test_whatever_a_step_is(self, tmp_path: Path, case: Case) -> None:
        check(tmp_path, case, KILLED)


def train_unevenly(steps: int) -> tuple[float, list[str]]:
    """Each rank makes one step more than the one before it; returns how long the farewell took, in seconds, and what was said."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gemini_ft").addHandler(listener)
    gemini_ft.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gemini_ft.Checkpointer(model, optimizer) as checkpointer:
        checkpointer.resume()
        with model.join():
            for step in range(steps + int(os.environ["RANK"])):
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                if step < steps:
                    checkpointer.flush()
                else:
                    time.sleep(0.5)  # the copy is whole before the end of `join` writes to the weights
        begin = time.monotonic()
    return time.monotonic() - begin, [message for message in said if "inside join()" in message]


def test_with_uneven_inputs_nobody_waits_for_a_rank_that_has_finished(tmp_path: Path) -> None:
    with World(tmp_path, 2) as ranks:
        (one, said), (another, unsaid) = ranks.outcome(train_unevenly, 4)
    assert max(one, another) < 10  # less than the timeout, after which a snapshot is given up
    assert (len(said), len(unsaid)) == (1, 0)  # by the first rank


# -- what does not change

ROWS, CHUNK = 2**14, 64 * 2**10


def look_up(steps: int, everywhere: bool, set_to_none: bool = True, zero_first: bool = False) -> dict[str, Any]:
    """Trains an embedding of which every step touches the first rows, or all; the bytes that each later step takes to the peer."""
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(ROWS, 16, sparse=True))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    rows = torch.arange(ROWS) if everywhere else torch.arange(16)
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait", chunk_bytes=CHUNK)
    sent = [0, 0, 0]
    for _ in range(checkpointer.resume(), steps):
        if zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        model(rows).square().mean().backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        checkpointer.step()
        checkpointer.flush()
        status = lifecycle.status(os.environ["GEMINI_RUN_ID"], os.environ["GEMINI_HOST_ID"])
        assert status is not None
        sent.append(int(json.loads(status)["streams"]["main"]["counters"]["replica_bytes"]))
    weights = digest({"weight": model.module.weight, **optimizer.state_dict()})
    return {"per_step": (sent[-1] - sent[-3]) // 2, "weights": weights}


def test_rows_and_moments_that_nothing_has_touched_do_not_travel(tmp_path: Path) -> None:
    """docs/decisions/011-chunks-that-stay.md: what is still as it was fills whole chunks here, weights and zero moments alike."""
    found = {}
    for everywhere in (False, True):
        with World(tmp_path / str(everywhere), 2) as world:
            ranks = world.outcome(look_up, 8, everywhere)
            assert not any(isinstance(said, Exception) for said in ranks), ranks
            again = world.outcome(look_up, 8, everywhere)  # there is nothing left to do: what was kept is read
            assert [said["weights"] for said in again] == [said["weights"] for said in ranks]
            found[everywhere] = sum(said["per_step"] for said in ranks)
    assert found[True] >= 3 * ROWS * 16 * 4  # weights and both moments
    assert found[False] <= 8 * CHUNK  # a chunk of each, and the small state


@pytest.mark.parametrize("zero_first", [False, True])
def test_sparse_gradients_come_back_sparse(tmp_path: Path, zero_first: bool) -> None:
    """SparseAdam refuses a dense gradient, zeros too; so those that a step has used, or that were zeroed, must stay sparse in a resume."""
    ends = {}
    for name, attempts in (("at once", (8,)), ("in two attempts", (4, 8))):
        with World(tmp_path / name, 2) as world:
            for until in attempts:
                ranks = world.outcome(look_up, until, False, False, zero_first)
                assert not any(isinstance(said, Exception) for said in ranks), ranks
            ends[name] = [said["weights"] for said in ranks]
    assert ends["at once"] == ends["in two attempts"]


def wait_with_zeros() -> str:
    """The error of a snapshot while a sparse gradient waits whose rows all have the value zero."""
    weight, other = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)
    accumulates, steps = torch.optim.SparseAdam(list(weight.parameters())), torch.optim.SGD(other.parameters(), lr=0.1)
    checkpointer = gemini_ft.Checkpointer(nn.ModuleList([weight, other]), [accumulates, steps])
    checkpointer.resume()
    (other(weight(torch.tensor([1, 2]))) * 0).sum().backward()
    steps.step()
    with pytest.raises(UnsupportedStateError) as held:
        checkpointer.step()
    return str(held.value)


def test_rows_of_zeros_that_wait_are_no_absent_gradient(tmp_path: Path) -> None:
    """The optimizer would move these rows by what it remembers of them."""
    with World(tmp_path, 1) as world:
        (said,) = world.outcome(wait_with_zeros)
    assert "waits for its optimizer, and is sparse" in str(said)


def count_dials(until: int) -> list[tuple[int, str]]:
    """Which shards a rank opened at other hosts while it resumed, and where; breaks off afterwards."""
    opened, make = list[tuple[int, str]](), readers.PeerShard.__init__

    def init(self: readers.PeerShard, host: str, *args: Any, **named: Any) -> None:
        opened.append((args[3], host))
        make(self, host, *args, **named)

    readers.PeerShard.__init__ = init  # type: ignore[method-assign]
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = gemini_ft.Checkpointer(model, optimizer, on_late="wait")
    for _ in range(checkpointer.resume(), until):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        checkpointer.step()
    checkpointer.flush()
    return opened


def test_a_host_that_replaces_another_dials_for_each_shard_once(tmp_path: Path) -> None:
    """For its small state, what lies where, and its bytes."""
    with World(tmp_path, 2) as world:
        assert world.outcome(count_dials, 3) == [[], []]
        end_agent(world.run, "host1")
        world.hosts[1] = "host2"
        first, second = world.outcome(count_dials, 5)
        assert first == []
        assert sorted(second) == [(0, "host0"), (1, "host0")]
