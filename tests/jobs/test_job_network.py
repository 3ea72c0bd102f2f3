"""Jobs on slow links that break: what they end with is what they would have ended with, on either transport."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_ft.testing import EmulatedHosts, Network, assert_identical

CASE = str(Path(__file__).parents[1] / "kit" / "network_case.py")
STEPS = 40
SLOW = "100mbit"  # a snapshot takes 0.2 s
FALLS_BACK = "travel from agent to agent from now on"


def program(folder: Path, steps: int = STEPS, **options: Any) -> list[str]:
    return [CASE, str(steps), str(folder / "final.pt"), json.dumps(options)]


def options(transport: str, **more: Any) -> dict[str, Any]:
    return {"interval": 1, "replica_timeout": 3, "traffic": {"transport": transport, "buffer_bytes": 2**20}, **more}


@pytest.fixture(scope="module")
def permitted() -> None:
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")


@pytest.fixture(scope="module")
def undisturbed(permitted: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On loopback."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with EmulatedHosts(1, program(folder), folder, workers=2) as hosts:
        hosts.finish(120)
    return torch.load(folder / "final.pt")


@pytest.fixture
def network(permitted: None) -> Iterator[Network]:
    with Network(2, rate=SLOW) as network:
        yield network


def newest(hosts: EmulatedHosts, kind: str) -> int:
    return max((event["iteration"] for event in hosts.events(kind)), default=0)


def in_the_middle(hosts: EmulatedHosts, step: int) -> int:
    """Wait until a snapshot of at least this step is on its way; returns which."""

    def under_way() -> int | None:
        at = newest(hosts, "step")
        return at if at >= step and newest(hosts, "committed") < at else None

    found: int = hosts.wait_for(under_way)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp", "collective"])
def test_a_link_that_is_cut_in_the_middle_of_a_chunk(network: Network, tmp_path: Path, undisturbed: Any, transport: str) -> None:
    """For a moment, and for longer than a replica may be late: the job goes on where it stood, with nothing lost."""
    with EmulatedHosts(2, program(tmp_path, **options(transport)), tmp_path, network=network) as hosts:
        for step, seconds in ((8, 0.5), (16, 5.0)):
            in_the_middle(hosts, step)
            network.cut("host1")
            time.sleep(seconds)
            network.heal("host1")
        hosts.finish(120)
        assert not hosts.events("resumed")
        assert newest(hosts, "committed") == STEPS
    assert_identical(torch.load(tmp_path / "final.pt"), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["collective", "tcp"])
def test_a_host_that_is_killed_in_the_middle_of_a_commit(network: Network, tmp_path: Path, undisturbed: Any, transport: str) -> None:
    """A spare takes its place; no iteration is mixed with another."""
    with EmulatedHosts(2, program(tmp_path, **options(transport)), tmp_path, network=network) as hosts:
        in_the_middle(hosts, 8)
        committed = newest(hosts, "committed")
        hosts.replace("host1")
        hosts.finish(120)
        resumed = {event["iteration"] for event in hosts.events("resumed")}
    assert len(resumed) == 1
    assert committed <= resumed.pop() <= committed + 2
    assert_identical(torch.load(tmp_path / "final.pt"), undisturbed)


@pytest.mark.soak
def test_a_worker_that_hangs_makes_replicas_late_and_breaks_nothing(network: Network, tmp_path: Path, undisturbed: Any) -> None:
    """What its threads do not receive in time, its agent does."""
    with EmulatedHosts(2, program(tmp_path, **options("collective")), tmp_path, network=network) as hosts:
        in_the_middle(hosts, 8)
        assert FALLS_BACK not in (tmp_path / "host0.log").read_text()
        pid = next(event["pid"] for event in hosts.events("step") if event["host"] == "host1")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(pid, signal.SIGCONT)
        hosts.finish(120)
        assert not hosts.events("resumed")
        assert newest(hosts, "committed") == STEPS
        assert FALLS_BACK in (tmp_path / "host0.log").read_text()
    assert_identical(torch.load(tmp_path / "final.pt"), undisturbed)


@pytest.mark.soak
def test_the_interval_follows_the_network(permitted: None, tmp_path: Path) -> None:
    """Up when the idle network cannot carry a snapshot per step any more, down when it can again; all ranks alike."""
    traffic = {"profile_steps": 5}
    with (
        Network(2, rate="1gbit") as network,
        EmulatedHosts(2, program(tmp_path, 10_000, pause=0.1, traffic=traffic), tmp_path, network=network) as hosts,
    ):
        hosts.wait_for(lambda: newest(hosts, "committed") >= 20)
        assert not [event for event in hosts.events("paced") if event["interval"] > 2]
        for host in network.hosts:
            network.set_rate(host, "50mbit")
        slow = hosts.wait_for(lambda: [event for event in hosts.events("paced") if event["interval"] > 3])
        for host in network.hosts:
            network.set_rate(host, "1gbit")
        hosts.wait_for(lambda: [e for e in hosts.events("paced") if e["iteration"] > slow[0]["iteration"] and e["interval"] <= 2])
        said = {(event["iteration"], event["interval"]) for event in hosts.events("paced") if event["rank"] == 0}
        hosts.wait_for(lambda: said <= {(event["iteration"], event["interval"]) for event in hosts.events("paced") if event["rank"] == 1})
        assert newest(hosts, "committed") > slow[0]["iteration"]


@pytest.mark.soak
def test_a_forced_interval_keeps_every_step_and_reports_what_that_costs(network: Network, tmp_path: Path) -> None:
    traffic = {"profile_steps": 5}
    case = program(tmp_path, pause=0.05, interval=1, traffic=traffic)
    with EmulatedHosts(2, case, tmp_path, network=network) as hosts:
        hosts.finish(120)
        assert {event["iteration"] for event in hosts.events("committed")} == set(range(1, STEPS + 1))
        assert not hosts.events("skipped", "paced")
        travels = [event for event in hosts.events("travelled") if event["rank"] == 0]
        assert {event["iteration"] for event in travels} == set(range(1, STEPS + 1))
        assert all(event["nbytes"] > 1_900_000 for event in travels)
        assert sum(event["outside"] for event in travels) > 0
        assert "with interval=1 the rest delays the training" in (tmp_path / "host0.log").read_text()


def second_cards(network: Network) -> None:
    """Gives host0 and host1 an eth1 each, with a cable between them."""
    with network.run("host1", ["sleep", "60"]) as there:
        lines = f"link add eth1 type veth peer name eth1 netns {there.pid}\naddr add 10.78.0.1/24 dev eth1\nlink set eth1 up\n"
        network.run("host0", ["ip", "-batch", "-"], stdin=subprocess.PIPE).communicate(lines.encode())
        lines = "addr add 10.78.0.2/24 dev eth1\nlink set eth1 up\n"
        network.run("host1", ["ip", "-batch", "-"], stdin=subprocess.PIPE).communicate(lines.encode())
        there.kill()


def carried(network: Network) -> int:
    """Bytes that host0 has sent by its second card."""
    counts = network.run("host0", ["cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True).communicate()[0]
    (line,) = [line for line in counts.splitlines() if "eth1:" in line]
    return int(line.partition(":")[2].split()[8])


@pytest.mark.soak
@pytest.mark.parametrize("interface", ["eth0,eth1", "eth1,eth0"])
def test_of_two_network_cards_one_is_cut_and_the_other_goes_on(network: Network, tmp_path: Path, interface: str) -> None:
    """Lanes are spread over both; no worker is started anew. The training itself has the first card."""
    second_cards(network)
    case = program(tmp_path, 100_000, pause=0.05, interface=interface, replica_timeout=3, chunk_bytes=2**18, traffic={"lanes": 4})
    with EmulatedHosts(2, case, tmp_path, network=network) as hosts:
        hosts.wait_for(lambda: newest(hosts, "committed") >= 10)
        assert carried(network) > 2_000_000
        network.run("host1", ["ip", "link", "set", "eth1", "down"]).wait(10)
        cut = newest(hosts, "step")
        hosts.wait_for(lambda: newest(hosts, "committed") >= cut + 20)
        assert not hosts.events("resumed")
