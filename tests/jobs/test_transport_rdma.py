"""Agents read replicas by RDMA: the same bits as over TCP, whatever the fabric brings, or fails to bring.

The fabric is NIXL's own over TCP on the loopback where it is installed, and a double (tests/kit/rdma_double) everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_kit import end_agent, eventually
from plain_case import Case, history, train
from rank_kit import World

from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.wire import network
from gemini_ft.wire.network import check_rdma, rdma_variables

DOUBLE = Path(__file__).parents[1] / "kit" / "rdma_double"
FALLS_BACK = "travel from agent to agent from now on"
OPTIONS = {"on_late": "wait", "traffic": {"transport": "rdma", "when": "ready"}}


def _train(case: Case, out: str) -> Any:
    """Trains in a process that finds the double, if its host has it."""
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path]
    return train(case, out)


def _world(folder: Path, fabric: Path, **variables: str) -> World:
    return World(folder, 2, PYTHONPATH=str(DOUBLE), FABRIC=str(fabric), **variables)


def _without_loss(tmp_path: Path, world: World) -> list[Any]:
    with world as ranks:
        results = ranks.outcome(_train, Case(width=4096, options=OPTIONS), str(tmp_path / "undisturbed"))
        assert not any(FALLS_BACK in ranks.log(host) for host in ranks.hosts)
    return results


REAL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL: pip install 'gemini-ft[rdma]'")


@pytest.mark.parametrize("fabric", ["double", pytest.param("NIXL over TCP", marks=REAL)])
def test_killed_and_resumed_with_the_same_bits(tmp_path: Path, fabric: str) -> None:
    """Replicas that were read are what a lost host is restored from."""
    case = Case(width=4096, options=OPTIONS)
    worlds = [_world(tmp_path, tmp_path / "fabric") if fabric == "double" else World(tmp_path, 2) for _ in range(2)]
    expected = _without_loss(tmp_path, worlds[0])
    with worlds[1] as ranks:
        first = ranks.start(_train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS="step=8:rank=1:sigkill")
        assert not first.wait()
        first.kill()
        end_agent(ranks.run, "host1")  # and with it everything that was in the memory of this host
        results = ranks.outcome(_train, case, str(tmp_path / "disturbed"))
    assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
    for rank in range(2):
        assert history(tmp_path / "disturbed", rank) == history(tmp_path / "undisturbed", rank)
        assert results[rank]["state"] == expected[rank]["state"]


REASONS = {
    "changes": "a piece was changed on its way",
    "hangs": "did not come in 5 s",
    "fails": "RDMA: ERR",
    "dies": "its process has ended",
}


@pytest.mark.parametrize("does", REASONS)
def test_a_fabric_that_fails_costs_no_copy(tmp_path: Path, does: str) -> None:
    """The agents send from then on, say why, and a host that is lost is restored from what they have sent."""
    fabric, case = tmp_path / "fabric", Case(width=4096, options=OPTIONS)
    with _world(tmp_path, fabric) as ranks:
        fabric.write_text(does)
        first = ranks.start(_train, case, str(tmp_path / "disturbed"), GEMINI_FAULTS="step=8:rank=1:sigkill")
        assert not first.wait()
        first.kill()
        assert all(FALLS_BACK in ranks.log(host) for host in ranks.hosts)
        assert any(REASONS[does] in ranks.log(host) for host in ranks.hosts)
        fabric.unlink()
        end_agent(ranks.run, "host1")
        results = ranks.outcome(_train, case, str(tmp_path / "disturbed"))
    assert [set(result["restored"]) for result in results] == [{"own memory"}, {"peer host0"}]
    expected = _without_loss(tmp_path, _world(tmp_path, fabric))
    assert [result["state"] for result in results] == [result["state"] for result in expected]


def test_the_process_ends_with_its_agent(tmp_path: Path) -> None:
    """It maps slots, so it may not be there when another agent has them."""

    def readers(run: str) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if b"rdma_process" in command and str(tmp_path).encode() in environment:
                found.append(int(folder.name))
        return found

    with _world(tmp_path, tmp_path / "fabric") as ranks:
        first = ranks.start(_train, Case(width=4096, options=OPTIONS), str(tmp_path / "out"), GEMINI_FAULTS="step=8:rank=1:sigkill")
        assert not first.wait()
        first.kill()
        assert len(readers(ranks.run)) == 2
        end_agent(ranks.run, "host1")
        eventually(lambda: len(readers(ranks.run)) == 1, "one process only")


def test_is_refused_where_nobody_proves_who_sends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "SYSTEM", tmp_path)
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs NIXL: pip install 'gemini-ft"):
        check_rdma(["127.0.0.1"])
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: object())
    assert rdma_variables(["127.0.0.1"]) == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    check_rdma(["127.0.0.1"])
    with pytest.raises(ConfigError, match=r"this host \(10.1.2.3\) has no RDMA device, and UCX's TCP does not prove who sends"):
        check_rdma(["10.1.2.3"])
    (tmp_path / "class/infiniband/mlx5_1").mkdir(parents=True)
    assert rdma_variables(["10.1.2.3"]) == {"UCX_TLS": "^tcp"}
    found = {name: [SimpleNamespace(address=at, family=socket.AF_INET)] for name, at in (("ib0", "10.1.2.3"), ("eth0", "10.9.9.9"))}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)
    (tmp_path / "class/net/ib0/device/infiniband/mlx5_1").mkdir(parents=True)
    (tmp_path / "class/net/eth0/device/infiniband/mlx5_0").mkdir(parents=True)
    assert rdma_variables(["10.1.2.3"]) == {"UCX_TLS": "^tcp", "UCX_NET_DEVICES": "mlx5_1:1"}


def test_does_not_go_with_encryption() -> None:
    with pytest.raises(ConfigError, match=re.escape("encrypt=True with traffic.transport='rdma', which encrypts nothing")):
        load_config({"encrypt": True, "traffic": {"transport": "rdma"}})
