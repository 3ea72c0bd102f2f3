"""Jobs that hang as jobs do: before a worker is killed, the report names the rank that keeps the others waiting, and why."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hang_case import SUMMARY, Act, broadcasts, computes, hang, hangs, leaves, locks, stops
from rank_kit import World

CULPRIT = 1
ACTS = [
    (stops, "stopped", "is stopped, by SIGSTOP or a debugger"),
    (locks, "asleep", "is asleep outside of all collectives"),
    (computes, "at work", "is at work outside of all collectives"),
    (broadcasts, "mismatch", "is not the same on all ranks: rank 0"),
    (leaves, "left", "is done: it has left the loop"),
]


@pytest.mark.parametrize(("act", "cause", "why"), ACTS)
@pytest.mark.parametrize("hosts", [["a", "b", "c"], pytest.param(["a", "a", "a"], marks=pytest.mark.soak)], ids=["three hosts", "one host"])
def test_the_rank_that_keeps_the_others_waiting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str], act: Act, cause: str, why: str
) -> None:
    """The report has the account of NCCL, too, where it answers in a process of the job."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    with World(tmp_path, hosts=hosts, GEMINI_EVENTS=str(tmp_path / "events"), NCCL_RAS_ADDR=address) as world:
        results = world.outcome(hang, act, CULPRIT)
        assert [isinstance(result, Exception) for result in results] == [act is not leaves or rank != CULPRIT for rank in range(3)]
        told = hangs(tmp_path / "events")
        assert sorted(event["host"] for event in told) == sorted({*hosts})
        for event in told:
            assert (event["cause"], event["ranks"]) == (cause, [CULPRIT])
            assert why in event["text"]
            assert "wait in allreduce_ float32[49]" in event["text"]
            report = Path(event["report"]).read_text()
            assert event["text"] in report
            for rank in range(3):
                assert f"threads of rank {rank} (host {hosts[rank]}" in report
            assert f"What NCCL says of the job (RAS):\nOK\n{SUMMARY}" in report
            stacks, missing = report.count("in hang\n"), report.count("could not be had")  # in time, on a busy machine
            assert stacks
            assert stacks + missing == 3
            assert missing or act in (leaves, stops) or f"in {act.__name__}" in report
            assert event["report"] in world.log(event["host"])
        records = [*tmp_path.glob("hang-*-rank_*")]  # of those that were not killed first
        assert records
        assert any(b"gloo:" in record.read_bytes() for record in records)
