"""examples/ray_train.py on a real Ray, a raylet for each host: what is lost, from where it is restored, and the last weights' bits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_ft.events import read_events
from gemini_ft.testing import Network
from gemini_ft.testing.network import DEVICE, HUB

pytestmark = pytest.mark.timeout(900)
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
PORT = "6379"
SECONDS = 240


class Cluster:
    """A head that trains nothing, and hosts with room for one worker each, on a network. A context manager."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self._network, self._processes = folder, network, list[subprocess.Popen[str]]()
        self._short = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have a limit
        self._address = f"{network.address(HUB)}:{PORT}"
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("GEMINI_", "RAY_"))}
        self._env = ours | {
            "GEMINI_EVENTS": str(folder / "events"),
            "GEMINI_LOG_DIR": str(folder),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
            # A host that vanishes is missed after half a minute, by default after a minute.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
        }

    def __enter__(self) -> Cluster:
        options = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self._short}"]
        try:
            self._start_node(HUB, options)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()
        for process in self._processes:
            process.wait(30)
        shutil.rmtree(self._short, ignore_errors=True)

    def add(self) -> str:
        """Starts a host with nothing in its memory; returns its id."""
        self._network.add(host := f"host{len(self._network.hosts)}")
        options = [f"--address={self._address}", "--num-cpus=1", f"--object-store-memory={80 * 10**6}"]
        self._start_node(host, [*options, "--include-log-monitor=false"])  # the head's reads the files of all hosts here
        return host

    def kill(self, host: str) -> None:
        """Ends everything of a host at once, as a loss of power does: the raylet, its workers, the agent."""
        self._network.cut(host)
        self._network.kill(host)

    def fit(self, name: str) -> subprocess.Popen[str]:
        options = ["--address", self._address, "--name", name, "--folder", str(self.folder), "--epochs", "40"]
        return self._start(HUB, name, [sys.executable, str(EXAMPLE), *options])

    def weights(self, driver: subprocess.Popen[str], name: str) -> str:
        """The last weights of a run that has finished, in hex."""
        assert driver.wait(SECONDS) == 0, self.log(name)
        found = re.search(r"^weights (\w+)$", self.log(name), re.MULTILINE)
        assert found is not None, self.log(name)
        return found[1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder / "events") if event["event"] == kind]

    def committed(self) -> int:
        return max((event["iteration"] for event in self.events("committed")), default=0)

    def wait_for(self, reached: Callable[[], bool], name: str) -> None:
        end = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < end, self.log(name)[-6000:]
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_node(self, place: str, options: list[str]) -> None:
        """Returns when it is there. Ray gives a raylet 30 s to begin, which on a busy machine may not be enough."""
        command = [*RAY, f"--node-ip-address={self._network.address(place)}", *options]
        node = self._start(place, place, command)

        def is_there() -> bool:
            nonlocal node
            if node.poll() is not None:
                node = self._start(place, place, command)
            return "Ray runtime started" in self.log(place)

        self.wait_for(is_there, place)

    def _start(self, place: str, name: str, command: list[str]) -> subprocess.Popen[str]:
        with open(self.folder / f"{name}.log", "w") as log:
            env = self._env | {"GEMINI_HOST_ID": place}
            process = self._network.run(place, command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
        self._processes.append(process)
        return process


def resumed(cluster: Cluster, before: int) -> list[dict[str, Any]]:
    """Both ranks' resumptions after the first ``before``: they go on at one step, from memory."""
    found = cluster.events("resumed")[before : before + 2]
    assert len({event["iteration"] for event in found}) == 1
    assert "storage" not in {source for event in found for source in event["sources"]}
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray.train", reason="needs ray: pip install 'gemini-ft[ray]'")
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")
    with Cluster(tmp_path, Network()) as cluster:
        yield cluster


def test_a_worker_and_a_host_are_lost(cluster: Cluster) -> None:
    hosts = [cluster.add(), cluster.add()]
    undisturbed = cluster.weights(cluster.fit("undisturbed"), "undisturbed")
    assert not cluster.events("resumed")
    (cluster.folder / "events").unlink()

    driver = cluster.fit("disturbed")
    cluster.wait_for(lambda: cluster.committed() >= 30, "disturbed")
    os.kill(cluster.events("joined")[-1]["pid"], signal.SIGKILL)
    cluster.wait_for(lambda: len(cluster.events("resumed")) >= 2, "disturbed")
    # The other worker has been ended by Ray, which ends a worker's children as well; no agent has gone with it.
    assert {source for event in resumed(cluster, 0) for source in event["sources"]} == {"own memory"}

    reached = cluster.committed()
    cluster.wait_for(lambda: cluster.committed() >= reached + 30, "disturbed")
    cluster.kill(hosts[1])
    newcomer = cluster.add()
    cluster.wait_for(lambda: len(cluster.events("resumed")) >= 4, "disturbed")
    sources = {event["host"]: set(event["sources"]) for event in resumed(cluster, 2)}
    assert sources[newcomer] == {f"peer {hosts[0]}"}
    assert cluster.weights(driver, "disturbed") == undisturbed


def test_a_run_of_the_same_name_goes_on_where_its_driver_was_killed(cluster: Cluster) -> None:
    """The controller, the workers and all of Ray's knowledge of the run end with the driver."""
    for _ in range(2):
        cluster.add()
    driver = cluster.fit("run")
    cluster.wait_for(lambda: cluster.committed() >= 30, "run")
    driver.kill()
    driver.wait(30)
    reached, again = cluster.committed(), cluster.fit("run")
    cluster.wait_for(lambda: len(cluster.events("resumed")) >= 2, "run")
    assert {event["iteration"] >= reached for event in resumed(cluster, 0)} == {True}
    assert cluster.weights(again, "run")
    assert "what another launch has left is resumed" in cluster.log("run")
