"""The testbed: hosts in network namespaces, whose links are as slow and as broken as they are said to be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_ft.errors import ConfigError
from gemini_ft.testing import EmulatedHosts, Network, NetworkError, assert_identical
from gemini_ft.testing.network import HUB

PLAIN_LOOP = str(Path(__file__).parents[2] / "examples" / "plain_loop.py")
SLEEP = ["sleep", "600"]


@pytest.fixture(scope="module")
def permitted() -> None:
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")


@pytest.fixture(scope="module")
def network(permitted: None) -> Iterator[Network]:
    """Two hosts that the tests share; they leave it as they found it, but for one more host at the end."""
    with Network(2, rate="200mbit") as network:
        yield network


@contextlib.contextmanager
def connected(network: Network, one: str, other: str, timeout: float = 20.0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection. The second takes little in ahead of its reader, so that what is read has just come."""
    with network.inside(other), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
        listener.bind((network.address(other), 0))
        listener.listen()
        with network.inside(one):
            near = socket.create_connection(listener.getsockname(), timeout)
        with near:
            far, _ = listener.accept()
            with far:
                far.settimeout(timeout)
                yield near, far


def bits_per_second(network: Network, one: str, other: str) -> float:
    """How fast one host can send to another, measured over a second."""

    def send(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(bytes(2**16))

    with connected(network, one, other) as (near, far):
        sender = threading.Thread(target=send, args=(near,))
        sender.start()
        received, begin = 0, time.monotonic()
        while time.monotonic() < begin + 0.3:  # the first bytes may pass at once
            far.recv(2**16)
        begin = time.monotonic()
        while time.monotonic() < begin + 1:
            received += len(far.recv(2**16))
        seconds = time.monotonic() - begin
        far.close()  # which ends the sender
        sender.join(20)
    return 8 * received / seconds


def running(process: subprocess.Popen[Any]) -> bool:
    return process.poll() is None


def references(spaces: set[int]) -> list[str]:
    """What keeps network namespaces: processes in them, and descriptors."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for path in [process / "ns" / "net", *(process / "fd").iterdir()]:
                with contextlib.suppress(OSError):
                    if os.readlink(path) in {f"net:[{space}]" for space in spaces}:
                        found.append(str(path))
    return found


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def space_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def until(reached: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- links


def test_links_are_as_fast_as_they_are_said_to_be(network: Network) -> None:
    for one, other in (("host0", "host1"), ("host1", "host0")):
        assert 0.3 * 200e6 < bits_per_second(network, one, other) < 1.1 * 200e6
    network.set_rate("host1", "50mbit")
    for one, other in (("host0", "host1"), ("host1", "host0"), (HUB, "host1")):
        assert 0.3 * 50e6 < bits_per_second(network, one, other) < 1.1 * 50e6


def test_a_link_without_a_rate_is_not_slowed_down(network: Network) -> None:
    for host in network.hosts:
        network.set_rate(host, None)
    assert bits_per_second(network, "host0", "host1") > 1.1 * 200e6
    for host in network.hosts:
        network.set_rate(host, "200mbit")


def test_nothing_passes_a_link_that_is_cut_until_it_heals(network: Network) -> None:
    with connected(network, "host0", "host1") as (near, far):
        near.sendall(b"before")
        assert far.recv(16) == b"before"
        network.cut("host1")
        for sock, other in ((near, far), (far, near)):
            sock.sendall(b"after")
            other.settimeout(0.5)
            with pytest.raises(TimeoutError):
                other.recv(16)
        with pytest.raises(OSError), connected(network, HUB, "host1", timeout=0.5):  # noqa: PT011 - timed out, or no route
            pass
        network.heal("host1")
        for sock in (near, far):
            sock.settimeout(20)
            assert sock.recv(16) == b"after"
    with connected(network, HUB, "host1"):
        pass


def test_hosts_have_loopbacks_and_names_of_their_own(network: Network) -> None:
    """Abstract Unix sockets and ports of 127.0.0.1 that are taken on one host are free on the other."""
    with contextlib.ExitStack() as stack:
        ports = set()
        for host in network.hosts:
            with network.inside(host):
                unix = stack.enter_context(socket.socket(socket.AF_UNIX))
                unix.bind("\0the same")
                local = stack.enter_context(socket.create_server(("127.0.0.1", 4000)))
                stack.enter_context(socket.create_connection(local.getsockname(), 20))
                ports.add(local.getsockname())
        assert len(ports) == 1


def test_only_the_thread_that_asks_is_elsewhere(network: Network) -> None:
    here = interfaces()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(interfaces).result(20) == here
        with network.inside("host0"):
            assert interfaces() == {"lo", "eth0"}
            assert other.submit(interfaces).result(20) == here
    assert interfaces() == here


# -- hosts


def test_a_killed_host_has_no_processes_and_the_others_keep_theirs(permitted: None) -> None:
    with Network(2) as network:
        victims = [network.run("host0", SLEEP), network.run("host0", SLEEP, start_new_session=True, env={})]
        others = [network.run(name, SLEEP) for name in ("host1", HUB)]
        network.kill("host0")
        assert [process.wait(20) for process in victims] == [-signal.SIGKILL] * 2
        assert all(map(running, others))
    assert [process.wait(20) for process in others] == [-signal.SIGKILL] * 2


def test_testbeds_side_by_side_do_not_meet(network: Network) -> None:
    with Network(2) as another, network.inside("host0"), socket.create_server((network.address("host0"), 4000)):
        assert another.address("host0") == network.address("host0")
        with another.inside("host1"), pytest.raises(ConnectionRefusedError):
            socket.create_connection((another.address("host0"), 4000), 20)


def test_what_is_asked_for_wrongly_is_refused(network: Network) -> None:
    with pytest.raises(ConfigError, match="there is no host 'host7'; there are hub, host0, host1"):
        network.kill("host7")
    with pytest.raises(ConfigError, match="there is a host 'host1' already"):
        network.add("host1")
    with pytest.raises(ConfigError, match="the hub has no link of its own"):
        network.cut(HUB)
    for rate in ("fast", "1gb", "0mbit", "-1mbit", "100"):
        with pytest.raises(ConfigError, match="give a number and bit, kbit, mbit or gbit"):
            network.set_rate("host0", rate)


def test_a_host_that_comes_later_has_the_same_network(network: Network) -> None:
    network.add("late")
    assert network.hosts == ["host0", "host1", "late"]
    assert len({network.address(host) for host in (*network.hosts, HUB)}) == 4
    with connected(network, "late", "host0") as (near, far):
        near.sendall(b"hello")
        assert far.recv(16) == b"hello"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Network.unavailable() == "needs root: only root may make network namespaces" or shutil.which("tc") is None
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(NetworkError, match="needs iproute2: there is no ip and no tc"):
        Network(1)


# -- what is left behind


def test_nothing_is_left_behind(permitted: None) -> None:
    before = interfaces(), os.path.exists("/run/netns")
    with Network(2, rate="100mbit") as network:
        processes = [network.run(place, SLEEP) for place in (HUB, "host0", "host1")]
        spaces = {space_of(process.pid) for process in processes}
        assert len(spaces) == 3
        assert references(spaces)
    assert [process.wait(20) for process in processes] == [-signal.SIGKILL] * 3
    assert not references(spaces)
    assert before == (interfaces(), os.path.exists("/run/netns"))


def test_nor_after_a_sudden_death(permitted: None) -> None:
    """Not even what is in a session of its own."""
    code = """if True:
        import os, time
        from gemini_ft.testing.network import Network
        network = Network(2, rate="100mbit")
        sleep = ["sleep", "600"]
        print(*[network.run(place, sleep, start_new_session=True, env={}).pid for place in ("hub", "host0", "host1")], flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        spaces = {space_of(int(pid)) for pid in maker.stdout.readline().split()}
        assert len(spaces) == 3
        maker.kill()
    until(lambda: not references(spaces))


# -- a job


def program(folder: Path, steps: int = 200) -> list[str]:
    return [PLAIN_LOOP, f"--steps={steps}", f"--out={folder / 'final.pt'}"]


ENV = {"GEMINI_ON_LATE": "wait"}  # a loop this fast would otherwise leave most steps out


@pytest.fixture(scope="module")
def undisturbed(permitted: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On loopback."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with EmulatedHosts(1, program(folder), folder, workers=3, env=ENV) as hosts:
        hosts.finish(120)
    return torch.load(folder / "final.pt")


def has_reached(hosts: EmulatedHosts, step: int) -> bool:
    return any(event["iteration"] >= step for event in hosts.events("step"))


@pytest.mark.soak
@pytest.mark.parametrize("power", ["on", "lost"])
def test_a_job_outlives_a_cut_link_and_a_killed_host(tmp_path: Path, undisturbed: Any, power: str) -> None:
    """A link that heals only stops the job for a while. A spare takes the place of a host that is gone."""
    with Network(3, rate="1gbit") as network, EmulatedHosts(3, program(tmp_path), tmp_path, env=ENV, network=network) as hosts:
        hosts.wait_for(lambda: has_reached(hosts, 40))
        network.cut("host1")
        time.sleep(5)  # more than its silence takes to be noticed
        stopped_at = max(event["iteration"] for event in hosts.events("step"))
        network.heal("host1")
        hosts.wait_for(lambda: has_reached(hosts, stopped_at + 20))
        assert not hosts.events("resumed", "left")

        assert hosts.add() == "host3"
        if power == "lost":  # nobody sees its connections close
            network.cut("host1")
        hosts.kill("host1")
        hosts.finish(120)
        resumed = {event["host"] for event in hosts.events("resumed")}
        assert network.hosts == ["host0", "host1", "host2", "host3"]
    assert resumed == {"host0", "host2", "host3"}
    assert_identical(torch.load(tmp_path / "final.pt"), undisturbed)
