"""Hosts that are judged before they join, put out of use, taken back, and drained when they are slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_kit import eventually
from test_elastic import HOSTS, SPARE, Scene
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

from gemini_ft.cli import main
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.launch import health
from gemini_ft.launch.health import HealthOptions, HostHealth, UnhealthyError, judge
from gemini_ft.launch.notes import SUSPECTED, say
from gemini_ft.launch.out_of_use import out_of_use

RUN = "r/1"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def scene_with(
    command: str | None = None, drains: bool = False, slow: Callable[[], list[int]] = list, clock: Callable[[], float] = time.monotonic
) -> tuple[Scene, HostHealth, list[float]]:
    """A host that comes to an open round, and the times at which it was drained."""
    scene, drained = Scene(), list[float]()
    options = HealthOptions(command=command, seconds=5.0, drains=drains)

    def account() -> dict[str, Any]:
        return {"streams": {"main": {"stragglers": slow()}}}

    found = HostHealth(RUN, options, scene.host.notes, account, lambda: drained.append(clock()), clock)
    scene.host.health, found.name = found, "spare"
    found.ranks = {3}
    scene.state.redundancy_list.clear()
    scene.open_round(HOSTS[1])
    return scene, found, drained


def test_a_host_that_is_not_well_does_not_join_and_is_listed_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    scene, _, _ = scene_with("echo a DIMM is bad; exit 3")
    assert scene.action() is _Action.KEEP_ALIVE  # which writes the list
    why = "the health command ended with status 3: a DIMM is bad"
    with pytest.raises(UnhealthyError, match=why):
        scene.action()
    assert not scene.state.participants.keys() & {SPARE}
    again, _, _ = scene_with("true")  # another launcher of that host
    again.state = scene.state
    with pytest.raises(UnhealthyError, match="--take-back spare"):
        again.action()
    assert out_of_use(RUN) == {"spare": why}
    assert main.main(["hosts", "--run-id", RUN]) == 0
    assert f"spare  {why}" in capsys.readouterr().out
    _, others, _ = scene_with()
    thread = threading.Thread(target=lambda: [others.tend(scene.state) or time.sleep(0.01) for _ in range(500) if out_of_use(RUN)])
    thread.start()  # as launchers at work do
    assert main.main(["hosts", "--run-id", RUN, "--take-back", "spare"]) == 0
    thread.join()
    assert main.main(["hosts", "--run-id", RUN, "--take-back", "spare"]) == 2
    assert "not out of use" in capsys.readouterr().err
    last, _, _ = scene_with("true")
    last.state = scene.state
    assert last.actions(3)[-1] is _Action.ADD_TO_PARTICIPANTS


def test_a_host_is_judged_again_only_when_it_is_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, found, _ = scene_with(f"echo >> {tmp_path}/judged; test ! -e {tmp_path}/bad")
    monkeypatch.setenv("GEMINI_NOTES_FILE", scene.host.notes.path)

    def judged() -> int:
        return (tmp_path / "judged").read_text().count("\n")

    scene.actions(3)
    assert judged() == 1
    say(SUSPECTED)
    scene.actions(3)
    assert judged() == 2
    (tmp_path / "bad").touch()
    found.suspect("as it kept the job waiting")
    assert scene.action() is _Action.KEEP_ALIVE
    with pytest.raises(UnhealthyError):
        scene.action()


def test_a_command_that_hangs_has_failed(tmp_path: Path) -> None:
    assert judge(f"sleep 60 & echo $! > {tmp_path}/pid; wait", 0.5) == "the health command took longer than 0.5 s"
    pid = (tmp_path / "pid").read_text().strip()
    eventually(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)


def complete(scene: Scene, spare: bool) -> Any:
    scene.state.complete = True
    scene.state.redundancy_list = {HOSTS[0]} if spare else set()
    scene.state.last_heartbeats[HOSTS[0]] = datetime.now(UTC)
    return scene.state


def test_a_slow_host_is_drained_where_a_spare_waits_and_not_one_after_the_other() -> None:
    clock, slow = [1000.0], [[3]]
    scene, host, drained = scene_with(drains=True, slow=lambda: slow[0], clock=lambda: clock[0])

    def looks(seconds: int, spare: bool = True) -> bool:
        changed = False
        for _ in range(seconds):
            clock[0] += 1.0
            changed |= host.at_work(complete(scene, spare))
        return changed

    assert not looks(30, spare=False)
    slow[0] = [2]  # of another host
    assert not looks(30)
    slow[0] = [3]
    assert not looks(9)
    assert looks(5)
    assert len(drained) == 1
    assert not looks(30), "the host in its place is slow, too"
    clock[0] += 600.0
    assert not looks(30), "the rank is slow wherever it is"
    slow[0], host.ranks = [4], {4}
    assert looks(30)
    assert len(drained) == 2


def test_a_slow_host_that_is_not_well_is_put_out_of_use_when_a_spare_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(health, "LOOK", 0.0)
    scene, host, drained = scene_with("exit 1", slow=lambda: [3])
    while not host.reason:
        assert not host.at_work(complete(scene, spare=False))
        time.sleep(0.01)
    assert host.at_work(complete(scene, spare=True))
    assert drained
    with pytest.raises(UnhealthyError):
        host.stays_away(scene.state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verify": "replays"}, "verify='replays'.*true, false or replay"),
        ({"straggler": "kill"}, "straggler='kill'.*'warn' or 'drain'"),
        ({"straggler": "drain", "straggler_factor": 0}, "straggler_factor=0"),
        ({"health": ""}, "health=''.*at least 1"),
        ({"health_timeout": 0}, "health_timeout=0.*greater than 0"),
    ],
)
def test_bad_values_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(options, {})
