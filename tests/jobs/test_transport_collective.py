"""Workers carry replicas: the same bits as with agents, every replica count and placement, and memory that does not grow."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import end_agent
from plain_case import Case, history, train
from rank_kit import World

import gemini_ft
from gemini_ft.config import TrafficConfig
from gemini_ft.state.copy_plan import MappedSlot
from gemini_ft.wire.worker_messages import Collect, Dispatch, ToAgent
from gemini_ft.worker.courier import Courier

FALLS_BACK = "travel from agent to agent from now on"
SMALL = {"transport": "collective", "buffer_bytes": 16384, "sub_buffers": 4}
VARIANTS = {
    "pieces": SMALL,
    "one sub-buffer": {**SMALL, "sub_buffers": 1},
    "larger than the shard": {**SMALL, "buffer_bytes": 2**20},
    "at once": {**SMALL, "when": "ready"},
}


@pytest.mark.parametrize("variant", [pytest.param(name, marks=() if name == "pieces" else pytest.mark.soak) for name in VARIANTS])
def test_killed_and_resumed_with_the_same_bits(tmp_path: Path, variant: str) -> None:
    """Replicas that workers have carried are what a lost host is restored from."""
    case = Case(width=4096, options={"on_late": "wait", "traffic": VARIANTS[variant]})
    with World(tmp_path, 2) as ranks:
        expected = ranks.outcome(train, case, str(tmp_path / "undisturbed"))
        assert not any(FALLS_BACK in ranks.log(host) for host in ranks.hosts)
    with World(tmp_path, 2) as ranks:
        first = ranks.start(train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS="step=8:rank=1:sigkill")
        assert not first.wait()
        first.kill()
        end_agent(ranks.run, "host1")  # and with it everything that was in the memory of this host
        results = ranks.outcome(train, case, str(tmp_path / "disturbed"))
    assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
    for rank in range(2):
        assert history(tmp_path / "disturbed", rank) == history(tmp_path / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]


def test_three_replicas_and_a_mixed_placement(tmp_path: Path) -> None:
    case = Case(width=512, options={"on_late": "wait", "replicas": 3, "traffic": SMALL})
    with World(tmp_path, 4) as ranks:
        results = ranks.outcome(train, case, str(tmp_path / "out"))
        assert all(result["start"] == 0 for result in results)
        assert not any(FALLS_BACK in ranks.log(host) for host in ranks.hosts)
        assert all(ranks.log(host).count("damaged") == 0 for host in ranks.hosts)


def _close() -> tuple[int, int]:
    """The courier's threads that are left after its end, and the transfers that the agent is told of; rank 1 sends late."""
    gemini_ft.init_process_group("gloo")
    rank, nbytes = torch.distributed.get_rank(), 16384
    with open(os.memfd_create("replica"), "wb") as replica:
        replica.truncate(nbytes)
        traffic = TrafficConfig.model_validate({"transport": "collective"})
        slot, told = MappedSlot(os.dup(replica.fileno()), 0, nbytes), list[ToAgent]()
        courier = Courier(traffic, 60.0, told.append, lambda: {0: slot}, lambda: {"replica": replica.fileno()})
        if rank == 0:
            courier.collect(Collect(tag=1, source=1, key="replica", position=0, nbytes=nbytes))
        else:
            time.sleep(2.0)
            courier.dispatch(Dispatch(tag=1, target=0, slot=0, offset=0, nbytes=nbytes))
        courier.close()
        courier.collect(Collect(tag=2, source=1 - rank, key="replica", position=0, nbytes=nbytes))
        left = sum(each.name == "gemini-courier" for each in threading.enumerate())
        torch.distributed.barrier()  # the other one's end would end the transfer as well
    return left, len(told)


def test_transfers_under_way_end_with_the_courier(tmp_path: Path) -> None:
    """Their threads are in the middle of torch, and would abort the process at its end."""
    with World(tmp_path, 2) as ranks:
        assert ranks.outcome(_close) == [(0, 1), (0, 1)]


def _held(megabytes: int, options: dict[str, Any]) -> int:
    """The bytes by which this process's own memory grows while snapshots of so many megabytes travel."""
    gemini_ft.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(1, megabytes * 250_000, bias=False)
    with gemini_ft.Checkpointer(model, hooks=False, replicated=False, interval=1, traffic=options) as checkpointer:
        checkpointer.open()
        checkpointer.save(1, None)
        checkpointer.flush()
        before = _private()
        for iteration in range(2, 6):
            with torch.no_grad():
                model.weight.add_(1.0)  # what has not changed does not travel
            checkpointer.save(iteration, None)
            checkpointer.flush()
        stats = checkpointer.stats
        sent = sum(travel.nbytes for each in stats.traffic.values() for travel in each)
        if stats.committed != 5 or sent < 4 * megabytes * 10**6:  # the last may be committed before this rank hears how it got there
            raise RuntimeError(str(stats))
        return _private() - before


def _private() -> int:
    """Bytes of this process that no other one has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@pytest.mark.parametrize("megabytes", [8, 64])
def test_memory_is_the_buffer_whatever_the_size_of_the_state(tmp_path: Path, megabytes: int) -> None:
    options = {"transport": "collective", "buffer_bytes": 2**20, "sub_buffers": 4}
    with World(tmp_path, 2) as ranks:
        results = ranks.outcome(_held, megabytes, options)
        assert all(isinstance(grown, int) and grown < 4 * 2**20 for grown in results), results
