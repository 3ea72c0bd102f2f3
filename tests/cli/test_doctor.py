"""`gemini doctor` says what is wrong with a host and what to do, and its exit status is for scripts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import psutil
import pytest

from gemini_ft.cli import doctor
from gemini_ft.cli.main import main


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Options with which there is nothing to say."""
    (tmp_path / "secret").write_text("of the run")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("GEMINI_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("GEMINI_STORAGE__URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("GEMINI_STORAGE__EVERY_STEPS", "100")
    monkeypatch.setenv("GEMINI_INTERFACE", "lo")
    return tmp_path


def test_a_healthy_host_passes_and_is_described(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hosts", "1"]) == 0
    said = capsys.readouterr().out
    for about in ("host", "network", "ports", "memory", "limits", "group", "clock", "secret", "storage", "versions", "placement"):
        assert re.search(rf"^(ok|warn) +{about} ", said, re.MULTILINE), about
    assert main(["doctor", "--hosts", "0"]) == 2
    assert main(["doctor", "--hosts", "4"]) == 1  # which could not reach each other by the loopback
    assert "4 hosts, 2 replicas" in (said := capsys.readouterr().out)
    assert re.search(r"^wrong +network +127.0.0.1 reaches this machine only; name the network", said, re.MULTILINE)
    assert not any(path.name.startswith("gemini-check") for path in (healthy / "store").rglob("*"))


@pytest.mark.parametrize(
    ("variable", "value", "about", "text"),
    [
        ("GEMINI_SECRET_FILE", "/etc/passwd", "secret", "mode 0644 and may be read by others; `chmod 600 /etc/passwd`"),
        ("GEMINI_STORAGE__URL", "file:///proc/gemini", "storage", "/proc/gemini"),
        ("GEMINI_INTERFACE", "ib7", "network", "no such interface, and not a CIDR; this host has"),
        ("GEMINI_MEMORY_LIMIT", "900TB", "memory", "are available here .* lower it"),
        ("GEMINI_MEMORY__FOLDER", "/var/tmp", "memory", "not on a tmpfs"),
        ("GEMINI_PORT_RANGE", "PORT-PORT", "ports", "no port from .* is free"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(
    healthy: Path, variable: str, value: str, about: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv(variable, value.replace("PORT", str(taken.getsockname()[1])))
        assert main(["doctor", "--hosts", "1"]) == 1
    (line,) = re.findall(r"^wrong +.*", capsys.readouterr().out, re.MULTILINE)
    assert re.match(rf"wrong +{about} +.*{text}", line)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network without routes: run it as root")
def test_a_host_without_a_default_route_is_told_to_name_its_network(healthy: Path) -> None:
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "alone"]
    command = [*alone, sys.executable, "-m", "gemini_ft.cli.main", "doctor", "--hosts", "2"]
    env = {name: value for name, value in os.environ.items() if name != "GEMINI_INTERFACE"} | {"MASTER_ADDR": "10.1.2.3"}
    done = subprocess.run(command, env=env, cwd=healthy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"^wrong +network +no route to the master '10.1.2.3' .*; set interface \(GEMINI_INTERFACE\)", done.stdout, re.MULTILINE
    )


def test_each_of_several_networks_is_judged(healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    networks = {"fast": ("10.1.0.1", 100_000), "slow": ("10.2.0.1", 1000), "lo": ("127.0.0.1", 0)}
    cards = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, (address, _) in networks.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(speed=speed) for name, (_, speed) in networks.items()})
    monkeypatch.setenv("GEMINI_INTERFACE", "fast,slow,lo")
    assert main(["doctor", "--hosts", "2"]) == 1
    assert re.findall(r"^(\w+) +network +(.*?)[,;]", said := capsys.readouterr().out, re.MULTILINE) == [
        ("ok", "replicas leave by fast (10.1.0.1)"),
        ("warn", "replicas leave by slow (10.2.0.1)"),
        ("wrong", "127.0.0.1 reaches this machine only"),
    ], said


def test_pages_of_slots_are_advised_on(healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    setting = healthy / "shmem_enabled"
    monkeypatch.setattr(doctor, "SHARED_PAGES", setting)
    for text, told in (("always within_size advise [never] deny force", 1), ("always within_size [advise] never deny force", 0)):
        setting.write_text(text)
        assert main(["doctor", "--hosts", "1"]) == 0
        assert capsys.readouterr().out.count(f"`echo advise > {setting}`") == told


def test_what_could_be_better_is_a_warning(healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A group that is ended as a whole, memory that may not be locked, few descriptors, a version that nobody has tried."""
    (healthy / "cgroup").write_text("0::/system.slice/train.service\n")
    monkeypatch.setattr(doctor, "CONTROL_GROUP", healthy / "cgroup")
    monkeypatch.setattr(doctor, "GPUS", healthy)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.1" if name == "torch" else version(name))
    limits = {resource.RLIMIT_MEMLOCK: (2**16, 2**16), resource.RLIMIT_NOFILE: (1024, 1024)}
    get = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or get(which))
    assert main(["doctor", "--hosts", "1"]) == 0
    said = capsys.readouterr().out
    for about, text in (
        ("group", "an agent that is started here ends with its workers, when /system.slice/train.service is ended: start it elsewhere"),
        ("limits", r"65,536 bytes may be locked \(ulimit -l\), and workers on GPUs lock their slots: `ulimit -l unlimited`"),
        ("limits", r"at most 1024 descriptors \(ulimit -Hn\)"),
        ("versions", r"torch 1.13.1 is outside of \S*>=2"),
    ):
        assert re.search(rf"^warn +{about} +{text}", said, re.MULTILINE), said
    limits[resource.RLIMIT_NOFILE] = (100, 100)
    assert main(["doctor", "--hosts", "1"]) == 1
    assert re.search("^wrong +limits +at most 100 descriptors", capsys.readouterr().out, re.MULTILINE)


def test_storage_that_hangs_is_said_to_hang(healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    released = Event()
    monkeypatch.setattr(doctor, "open_storage", lambda *_: SimpleNamespace(check=lambda: released.wait(10)))
    monkeypatch.setattr(doctor, "STORAGE_SECONDS", 0.05)
    assert main(["doctor", "--hosts", "1"]) == 1
    released.set()
    assert re.search(r"^wrong +storage .*did not answer within 0.05 s; does it hang", capsys.readouterr().out, re.MULTILINE)


def test_warnings_count_when_asked(healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GEMINI_REPLIKAS", "3")
    assert main(["doctor", "--hosts", "1"]) == 0
    assert "is GEMINI_REPLICAS meant?" in capsys.readouterr().out
    assert main(["doctor", "--hosts", "1", "--strict"]) == 1
