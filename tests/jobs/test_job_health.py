"""A host that is not well does not join, and one that is slow leaves its place to a spare."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gemini_ft.cli.main import main
from gemini_ft.launch.endings import LEFT
from gemini_ft.launch.health import UNHEALTHY
from gemini_ft.launch.out_of_use import out_of_use
from gemini_ft.testing import EmulatedHosts

KIT = Path(__file__).parents[1] / "kit"
SCRIPT, LAUNCHER = str(KIT / "slow_host.py"), (sys.executable, "-X", "warm", str(KIT / "hasty_launcher.py"))


def test_a_sick_host_does_not_join_and_a_slow_one_is_drained_when_a_spare_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    env = {"GEMINI_HEALTH": 'test "$GEMINI_HOST_ID" != host0', "GEMINI_STRAGGLER": "drain", "XDG_RUNTIME_DIR": str(tmp_path)}
    with EmulatedHosts(2, [SCRIPT, "250", "host2"], tmp_path, env=env, launcher=LAUNCHER) as hosts:
        hosts.add()
        hosts.wait_for(lambda: hosts.events("committed"))
        hosts.wait_for(lambda: hosts.status("host0") == UNHEALTHY)
        why = "the health command ended with status 1"
        assert out_of_use(hosts.run) == {"host0": why}
        assert main(["status", "--run-id", hosts.run, "--host", "host1"]) == 0
        assert f"out of use: host host0: {why}" in capsys.readouterr().out
        hosts.add()
        assert hosts.wait_for(lambda: hosts.status("host2")) == LEFT
        assert "this host is slow, and is drained" in (tmp_path / "host2.log").read_text()
        hosts.wait_for(lambda: (hosts.status("host1"), hosts.status("host3")) == (0, 0))
        worlds = [sorted(event["hosts"]) for event in hosts.events("joined") if event["rank"] == 0]
    assert worlds == [["host1", "host2"], ["host1", "host3"]]


@pytest.mark.parametrize("mode", ["sleeps", pytest.param("flips", marks=pytest.mark.soak)])
def test_a_host_that_hangs_or_miscomputes_is_judged_and_listed_and_a_spare_takes_its_place(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command is content until its rank falls asleep, or one of its weights changes in memory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    health = f'test "$GEMINI_HOST_ID" != host1 || test ! -e {tmp_path}/sick || {{ echo broken; exit 9; }}'
    env = {"GEMINI_HEALTH": health, "GEMINI_HANG_TIMEOUT": "4", "XDG_RUNTIME_DIR": str(tmp_path)}
    with EmulatedHosts(2, [SCRIPT, "30", "host1", mode], tmp_path, env=env, launcher=LAUNCHER) as hosts:
        hosts.wait_for(lambda: hosts.events("committed"))
        hosts.add()
        hosts.wait_for(lambda: hosts.status("host1") == UNHEALTHY)
        rank = rank_of(hosts, "host1")
        hangs = {(hang["cause"], *hang["ranks"]) for hang in hosts.events("hang")}
        assert hangs == ({("asleep", rank)} if mode == "sleeps" else set())
        assert {key for event in hosts.events("replayed") for key in event["ranks"]} == ({str(rank)} if mode == "flips" else set())
        why = "the health command ended with status 9: broken"
        assert out_of_use(hosts.run) == {"host1": why}
        assert main(["hosts", "--run-id", hosts.run]) == 0
        assert main(["status", "--run-id", hosts.run, "--host", "host0"]) == 0
        listed, shown = capsys.readouterr().out.split("out of use: ")
        assert f"host1  {why}" in listed
        assert shown.startswith(f"host host1: {why}; taken back by `gemini hosts --take-back host1`")
        assert main(["hosts", "--run-id", hosts.run, "--take-back", "host1"]) == 0  # by the launchers at work
        assert out_of_use(hosts.run) == {}
        hosts.wait_for(lambda: (hosts.status("host0"), hosts.status("host2")) == (0, 0))


def rank_of(hosts: EmulatedHosts, name: str) -> int:
    """The rank on a host at first."""
    return int(next(event["hosts"] for event in hosts.events("joined")).index(name))
