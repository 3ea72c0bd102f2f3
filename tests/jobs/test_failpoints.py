"""Processes that end, stop or fail exactly at a moment of their work: the script has the bits that it has plain."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_kit import Job, agent_pid, eventually
from witnessed import read, violations, witness

from gemini_ft import failpoints
from gemini_ft.agent import lifecycle
from gemini_ft.core.faults import PROCESS_MOMENTS, World, parse
from gemini_ft.errors import ConfigError
from gemini_ft.testing import EmulatedHosts, assert_identical
from gemini_ft.wire.worker_messages import Launch

SCRIPT = Path(__file__).parents[2] / "examples" / "plain_loop.py"
STEPS = 50
# The script without gemini-ft.
STUB = """
class Nothing:
    def __init__(self, *_, **__): ...
    def __enter__(self): return self
    def __exit__(self, *_): ...
    def resume(self): return 0
    def step(self): ...

class gemini_ft:
    Checkpointer, init_process_group = Nothing, dist.init_process_group
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final state of plain DDP."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "script.py").write_text(SCRIPT.read_text().replace("import gemini_ft\n", STUB))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(folder / "script.py")]
    command += ["--steps", str(STEPS), "--out", str(folder / "final.pt")]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=100)
    return torch.load(folder / "final.pt")


Hit = Callable[..., Any]


@pytest.fixture
def run_hit(tmp_path: Path, plain: Any) -> Hit:
    """Runs the script on two hosts with faults, restarts each of the ``lost`` hosts that these cost, and compares the end."""

    def run(faults: str, lost: int = 0) -> None:
        storage = f'{{"url": "file://{tmp_path}/store", "every_steps": 10}}'
        env = {"GEMINI_ON_LATE": "wait", "GEMINI_FAULTS": faults, "GEMINI_STORAGE": storage, **witness(tmp_path)}
        program = [str(SCRIPT), "--steps", str(STEPS), "--out", str(tmp_path / "final.pt")]
        with EmulatedHosts(2, program, tmp_path, env=env) as job:
            for _ in range(lost):
                job.restart(job.wait_for(lambda: job.lost)[0])
            job.finish(100)
        assert {path.read_text().strip() for path in (tmp_path / "faults").glob("*")} == {each.text for each in parse(faults)}
        assert_identical(torch.load(tmp_path / "final.pt"), plain)
        assert list((tmp_path / "store").glob(f"*/*/step-{STEPS:08}-*/manifest.json"))
        history = read(tmp_path)
        assert violations(history) == []
        assert {"agent began", "opened", "copy", "dropped", "commit", "heard", "resumed"} <= {event["event"] for event in history}

    return run


@pytest.mark.timeout(200)
def test_agents_that_end_between_two_of_their_deeds(run_hit: Hit) -> None:
    run_hit(
        "step=4:rank=0:moment=agent_copied:sigkill; step=8:rank=1:moment=agent_received:sigkill; step=14:moment=agent_decides:sigkill;"
        "step=17:host=host1:moment=agent_commits:exit; step=20:rank=0:moment=agent_uploads:sigkill; step=30:moment=agent_manifest:sigkill;"
        "step=40:rank=1:moment=agent_stored:exception; step=45:rank=1:moment=agent_received:exception;"
        "step=47:rank=1:moment=agent_copied:delay:seconds=1"
    )


@pytest.mark.timeout(200)
def test_workers_that_end_before_and_after_an_incarnation_is_opened(run_hit: Hit) -> None:
    run_hit(
        "step=10:rank=1:sigkill; step=9:rank=0:moment=worker_chosen:sigkill; step=9:rank=1:moment=worker_opened:exception;"
        "step=9:host=host0:moment=agent_opens:sigkill; step=30:rank=0:agent; rank=0:moment=worker_hands_over:sigkill"
    )


@pytest.mark.timeout(200)
def test_launchers_that_end_before_they_restart_workers(run_hit: Hit) -> None:
    run_hit("step=10:rank=1:sigkill; moment=launcher_restarts:sigkill; host=host1:moment=launcher_starts:delay:seconds=1", lost=1)


def test_that_are_off_cost_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_FAULTS", raising=False)
    failpoints.arm("run", "host")
    assert failpoints.armed is None
    failpoints.reached("agent_copied", 1, 0)


def test_the_first_process_that_is_meant_is_hit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_FAULTS_DIR", str(tmp_path))
    monkeypatch.setenv("GEMINI_FAULTS", "step=5:rank=1:moment=agent_copied:exception; step=9:rank=1:sigkill")
    monkeypatch.setattr(failpoints, "armed", None)
    failpoints.arm("run", "host")
    for moment in ((4, 1), (5, 0), (None, 1)):
        failpoints.reached("agent_copied", *moment)
    failpoints.reached("agent_received", 5, 1)
    with pytest.raises(failpoints.InjectedFault, match="agent_copied"):
        failpoints.reached("agent_copied", 6, 1)
    failpoints.arm("run", "host")
    failpoints.reached("agent_copied", 6, 1)


def test_an_agent_that_outlives_a_drill_does_nothing_of_it_to_the_next_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lingers for the command that is started again, perhaps in earnest."""
    monkeypatch.setenv("GEMINI_FAULTS_DIR", str(tmp_path / "faults"))
    monkeypatch.setenv("GEMINI_FAULTS", "moment=agent_opens:exit")
    known: dict[str, Any] = {"ticks": 0, "started": 1e9, "command": [], "folder": "", "script": "", "environ": {}}
    with Job(tmp_path) as job:
        lifecycle.spawn(job.run, "a")
        monkeypatch.delenv("GEMINI_FAULTS")
        drill = job.process("a", 0, launch=Launch(id="drill", pid=1, **known))
        agent = agent_pid(job.run, "a")
        drill.kill()
        eventually(lambda: not job.status("a")["workers"])
        (rank,) = job.start("a", hello={"launch": Launch(id="in earnest", pid=2, **known)})
        job.commit([rank], 1)
        assert agent_pid(job.run, "a") == agent
        assert "fault injection: what an earlier launch has asked for is off" in job.log("a")


@pytest.mark.parametrize("text", ["host=a:kill", "group=0:exit", "rank=all:exit", "probability=0.1:seed=1:exit"])
def test_what_cannot_happen_inside_a_process_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at agent_copied goes one of sigkill"):
        parse(f"moment=agent_copied:{text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("moment=launcher_starts:step=5:sigkill", "at launcher_starts goes host=ID; the moment is about no snapshot"),
        ("moment=worker_hands_over:step=5:sigkill", "at worker_hands_over goes rank=N or host=ID; the moment is about no snapshot"),
        ("moment=agent_decides:rank=0:sigkill", "at agent_decides goes step or host=ID; the moment is about no rank"),
        ("moment=launcher_restarts:rank=0:sigkill", "at launcher_restarts goes host=ID; the moment is about no rank"),
        ("moment=agent_copied:until=7:sigkill", "until goes with probability or storage_full"),
        ("moment=agent_copied:owner=1:sigkill", "owner goes with corrupt"),
        ("moment=agent_copied:code=7:sigkill", "code goes with exit"),
        ("moment=agent_copied:share=0.5:sigkill", "share goes with slow"),
        ("moment=agent_copied:seconds=5:sigkill", "seconds go with slow and delay"),
    ],
)
def test_what_would_never_happen_at_a_moment_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


def test_inside_a_process_a_host_is_named_by_its_id() -> None:
    (fault,) = parse("host=0:moment=launcher_starts:sigkill")
    fault.check(World(hosts=["0", "1"]))
    with pytest.raises(ConfigError, match="at launcher_starts host is the id of a host: a, b"):
        fault.check(World(hosts=["a", "b"]))


def test_a_moment_says_of_itself_what_it_is_about() -> None:
    """A fault may name a step or a rank only at a moment whose call of `failpoints.reached` passes one."""
    source = "".join(path.read_text() for path in Path(failpoints.__file__).parent.rglob("*.py"))
    for moment in PROCESS_MOMENTS:
        (told,) = re.findall(rf'failpoints\.reached\("{moment}"(.*)\)', source)
        for key, is_told in (("step", "iteration" in told), ("rank", re.search(r"owner|rank", told) is not None)):
            with contextlib.nullcontext() if is_told else pytest.raises(ConfigError, match="is about no"):
                parse(f"moment={moment}:{key}=1:sigkill")


def test_each_moment_is_reached_in_one_place() -> None:
    package = Path(failpoints.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    assert {moment: source.count(f'failpoints.reached("{moment}"') for moment in PROCESS_MOMENTS} == dict.fromkeys(PROCESS_MOMENTS, 1)
    drills = (package.parent / "docs" / "drills.md").read_text()
    assert all(f"| `{moment}` | {what} |" in drills for moment, what in PROCESS_MOMENTS.items())
