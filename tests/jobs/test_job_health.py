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
