"""Failures on purpose: the language, who is hit and when, and real jobs that are hit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_disk
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.faults import KINDS, MOMENTS, Fault, World, parse
from gemini_ft.errors import ConfigError
from gemini_ft.events import EventLog
from gemini_ft.faults import inject as faults
from gemini_ft.testing import EmulatedHosts, assert_identical

PLAIN_LOOP = str(Path(__file__).parents[2] / "examples" / "plain_loop.py")
FOUR = World(
    ["a", "b", "c", "d"],
    {0: ["a", "b"], 1: ["b", "a"], 2: ["c", "d"], 3: ["d", "c"]},
)
TWO_EACH = World(["a", "a", "b", "b"], {0: ["a", "b"], 1: ["a", "b"], 2: ["b", "a"], 3: ["b", "a"]})


def one(text: str) -> Fault:
    (fault,) = parse(text)
    return fault


# -- the language


def test_the_issues_own_example() -> None:
    kill_worker, kill_host, kill_group = parse("step=20:rank=1:sigkill; step=40:host=2:kill; step=60:group=0:kill")
    assert (kill_worker.kind, kill_worker.step, kill_worker.doers(FOUR, 20)) == ("sigkill", 20, [1])
    assert (kill_host.kind, kill_host.step, kill_host.doers(FOUR, 40)) == ("kill", 40, [2])
    assert (kill_group.kind, kill_group.step, kill_group.doers(FOUR, 60)) == ("kill", 60, [0, 1])


def test_an_empty_text_has_no_faults() -> None:
    assert parse("") == parse(" ; \n;") == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_asked_for(kind: str) -> None:
    assert one(f"step=1:rank=0:{kind}").kind == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "step=20:rank=1:sigkil",
            r"GEMINI_FAULTS, 'step=20:rank=1:sigkil': unknown kind 'sigkil' \(did you mean 'sigkill'\?\); allowed: ",
        ),
        ("step=20:rnk=1:sigkill", r"unknown key 'rnk' \(did you mean 'rank'\?\); allowed: step, .*code"),
        ("step=20:rank=1", "needs exactly one kind, has 0; allowed: sigkill"),
        ("step=20:rank=1:exit:sigkill", "needs exactly one kind, has 2"),
        ("step=soon:rank=1:exit", "step=soon must be a whole number from 1"),
        ("step=0:rank=1:exit", "step=0 must be a whole number from 1"),
        ("step=1:rank=-1:exit", "rank=-1 must be a whole number from 0, or 'all'"),
        ("step=1:step=2:rank=1:exit", "step is given twice"),
        ("step=1:rank=1:moment=lunch:exit", "moment=lunch must be one of end_of_step, in_copy"),
        ("rank=1:exit", "say when: step=20, or probability=0.01:seed=7"),
        ("step=1:exit", r"say who: rank=1 \(or rank=all\), host=0, or group=0"),
        ("step=1:rank=1:host=1:exit", "give only one of rank, host and group"),
        ("probability=0.5:exit", "a random fault needs a seed"),
        ("probability=2:seed=1:exit", "probability=2 must be above 0 and at most 1"),
        ("step=1:rank=1:seed=1:exit", "seed goes with probability"),
        ("step=1:rank=1:until=5:exit", "until goes with probability or storage_full"),
        ("step=9:rank=1:until=5:storage_full", "until=5 is before step=9"),
        ("step=1:rank=1:owner=0:exit", "owner goes with corrupt"),
        ("step=1:rank=1:code=3:sigkill", "code goes with exit"),
        ("step=1:rank=1:share=0.5:agent", "share goes with slow"),
        ("step=1:rank=1:seconds=5:sigkill", "seconds go with slow and delay"),
        ("step=1:rank=1:share=0:slow", "share=0 must be above 0 and below 1"),
        ("step=1:rank=1:seconds=inf:slow", "seconds=inf must be above 0"),
    ],
)
def test_typos_are_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(f"step=5:rank=0:agent; {text}")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ConfigError:
        return
    assert all(fault.kind in KINDS and fault.moment in MOMENTS for fault in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=1:rank=4:exit", "rank=4, but this job has 4 of them, counted from 0"),
        ("step=1:host=4:kill", "host=4, but this job has 4"),
        ("step=1:group=2:kill", "group=2, but this job has 2"),
        ("step=1:host=a:owner=9:corrupt", "owner=9, but this job has 4"),
    ],
)
def test_what_the_job_does_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(text).check(FOUR)
    one("step=1:host=not-there-yet:kill").check(FOUR)  # a spare may join


# -- who and when


@pytest.mark.parametrize(
    ("target", "kind", "doers"),
    [
        ("rank=2", "sigkill", [2]),
        ("rank=2", "kill", [2]),
        ("rank=3", "kill", [2]),  # the first worker of its host does it
        ("host=b", "sigkill", [2, 3]),
        ("host=1", "kill", [2]),
        ("rank=all", "sigstop", [0, 1, 2, 3]),
        ("rank=all", "agent", [0, 2]),
        ("group=0", "kill", [0, 2]),
        ("host=elsewhere", "kill", []),
    ],
)
def test_who_acts(target: str, kind: str, doers: list[int]) -> None:
    assert one(f"step=1:{target}:{kind}").doers(TWO_EACH, 1) == doers


def test_whose_copies_are_damaged() -> None:
    assert one("step=1:rank=2:corrupt").owners(FOUR, "c") == [2]
    assert one("step=1:host=c:corrupt").owners(FOUR, "c") == [2, 3]
    assert one("step=1:host=d:owner=2:corrupt").owners(FOUR, "d") == [2]


def test_a_scheduled_fault_waits_for_its_moment() -> None:
    fault = one("step=20:rank=0:moment=validation_start:sigkill")
    assert not fault.is_due(19, "validation_start")
    assert not fault.is_due(20, "end_of_step")
    assert fault.is_due(23, "validation_start")
    assert fault.occurrence(20) == fault.occurrence(23)


def test_random_faults_are_the_same_on_all_ranks_and_come_as_often_as_asked() -> None:
    fault, again = one("probability=0.1:seed=7:sigkill"), one("probability=0.1:seed=7:sigkill")
    hits = [iteration for iteration in range(1, 4001) if fault.is_due(iteration, "end_of_step")]
    assert hits == [iteration for iteration in range(1, 4001) if again.is_due(iteration, "end_of_step")]
    assert 300 < len(hits) < 500  # five standard deviations around 400
    assert hits != [i for i in range(1, 4001) if one("probability=0.1:seed=8:sigkill").is_due(i, "end_of_step")]
    assert {doer for iteration in hits for doer in fault.doers(FOUR, iteration)} == {0, 1, 2, 3}
    assert len({fault.occurrence(iteration) for iteration in hits}) == len(hits)


def test_random_faults_keep_to_their_window_and_target() -> None:
    fault = one("probability=1:seed=1:step=10:until=12:rank=3:sigkill")
    assert [i for i in range(1, 30) if fault.is_due(i, "end_of_step")] == [10, 11, 12]
    assert fault.doers(FOUR, 10) == [3]


def test_equal_entries_are_two_faults() -> None:
    first, second = parse("step=5:rank=0:sigkill; step=5:rank=0:sigkill")
    assert first.occurrence(5) != second.occurrence(5)


# -- orders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEMINI_FAULTS_DIR", str(tmp_path / "faults"))
    (tmp_path / "faults").mkdir()
    return tmp_path / "faults"


def test_ranks_tell_each_other_what_has_happened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_FAULTS", "step=5:rank=0:sigkill")
    (folder / "this-one").write_text("")
    here = faults.Orders.read("run")
    elsewhere = faults.Orders(here.text, frozenset({"another"}))
    assert faults.Orders.agree([elsewhere, here]).happened == {"this-one", "another"}


def test_a_run_is_restarted_if_any_of_its_hosts_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_FAULTS", "step=5:rank=0:sigkill")
    first = faults.Orders.read("run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not faults.Orders.agree([first, first]).restarted
    assert faults.Orders.agree([first, faults.Orders.read("run")]).restarted


def test_ranks_with_other_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 1 has GEMINI_FAULTS='', rank 0 'step=5:rank=0:exit'; give all hosts the same"):
        faults.Orders.agree([faults.Orders("step=5:rank=0:exit"), faults.Orders("")])


def test_without_the_variable_nothing_is_read(folder: Path) -> None:
    (folder / "of-an-earlier-time").write_text("")
    assert faults.Orders.read("run") == faults.Orders("")


def test_a_first_start_removes_what_earlier_runs_have_noted_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "drill", None)  # what is armed here ends here
    text = "step=5:rank=0:exit; probability=0.5:seed=1:exit"
    noted = [fault.occurrence(7) for fault in parse(text)]
    for name in noted:
        (folder / name).write_text(f"{text}\n")
    (folder / "thesis.tex").write_text("years of work")
    (folder / "data" / noted[0]).mkdir(parents=True)
    (folder / "data" / noted[0] / "set").write_text("more of it")
    scene = faults.Scene(
        run="run",
        has_past=False,
        rank=0,
        world=World(["a"], {0: ["a"]}),
        storage=None,
        client=lambda: pytest.fail("no agent is needed"),
        events=EventLog(),
    )
    faults.arm(faults.Orders(text, frozenset(noted)), scene)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left == [f"data/{noted[0]}/set", "thesis.tex"]


ADOPTS = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to this process, as else to init
bystander = subprocess.Popen(["sleep", "60"])
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
os.wait()  # for the orphan
print(bystander.poll())
bystander.kill()
"""
LAUNCHES = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()  # it has armed itself, and loses its launcher now
"""
IS_KILLED = """
import os, time
from gemini_ft.faults import inject
launcher, parent = inject.own_launcher(), os.getppid()
assert launcher.pid == parent
print("armed", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
inject._kill_host(0, launcher)
"""


def test_a_drill_without_its_launcher_kills_nobody_who_has_adopted_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    init = subprocess.run([sys.executable, "-c", ADOPTS, LAUNCHES, IS_KILLED], stdout=subprocess.PIPE, text=True)
    assert (init.returncode, init.stdout) == (0, "None\n")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert faults.own_launcher() is None


# -- real jobs


STEPS = 60
# steps lost by each of eight failures: the step itself at its end, perhaps none once its copy was under way
_LOST = [[1, 1, 1, in_copy, before_update, 1, 1, 1] for in_copy in (0, 1) for before_update in (0, 1)]


def run_job(
    folder: Path, hosts: int, faults: str = "", replacements: int = 0, restarted: Collection[str] = (), **env: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Two ranks on one or two hosts, hit by faults; their final state and the events. No step goes without a snapshot.

    Hosts that are lost are replaced first; those that are all lost in the end come back, as no other would begin without them.
    """
    folder.mkdir()
    env["GEMINI_ON_LATE"] = "wait"
    program = [PLAIN_LOOP, "--steps", str(STEPS), "--out", str(folder / "final.pt")]
    with EmulatedHosts(hosts, program, folder, workers=2 // hosts, env={"GEMINI_FAULTS": faults, **env}) as job:
        for number in range(1, replacements + 1):
            job.wait_for(lambda number=number: len(job.lost) >= number)
            job.add()
        job.wait_for(lambda: {*restarted} <= {*job.lost})
        for host in restarted:
            job.restart(host)
        job.finish(150)
        return torch.load(folder / "final.pt"), job.events()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state, events = run_job(tmp_path_factory.mktemp("undisturbed") / "job", 1)
    assert not [event for event in events if event["event"] == "fault"]
    return state


def resumptions(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "resumed"]


@pytest.mark.timeout(400)
def test_whatever_happens_to_workers_the_result_has_the_same_bits(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Every kind of a rank's own fault, the agent's death and a damaged copy, in one job of one host."""
    ordered = [
        "step=10:rank=1:sigkill",
        "step=16:rank=0:exception",
        "step=22:rank=all:exit",
        "step=28:rank=0:moment=in_copy:sigkill",
        "step=34:rank=1:moment=before_update:exit:code=3",
        "step=40:rank=1:sigstop",
        "step=48:rank=0:agent",
        "probability=0.4:seed=8:step=54:until=57:exit",
    ]
    by_chance = [step for step in range(54, 58) if parse("; ".join(ordered))[-1].is_due(step, "end_of_step")]
    assert by_chance == [54, 57]
    state, events = run_job(tmp_path / "job", 1, "; ".join(ordered), GEMINI_HANG_TIMEOUT="3")
    assert_identical(state, undisturbed)
    done = [(event["fault"], event["iteration"]) for event in events if event["event"] == "fault"]
    expected = list(zip(ordered[:-1], [10, 16, 22, 28, 34, 40, 48], strict=True)) + [(ordered[-1], step) for step in by_chance]
    assert list(dict.fromkeys(done)) == expected  # both ranks do the third, if the launcher lets the second come to it
    # by both ranks, at most one step back; after the agent's death nothing needs to be resumed
    resumed = [event["iteration"] for event in resumptions(events)][::2]
    assert [step - iteration for step, iteration in zip([10, 16, 22, 28, 34, 40, *by_chance], resumed, strict=True)] in _LOST
    assert {source for event in resumptions(events) for source in event["sources"]} == {"own memory"}


@pytest.mark.timeout(400)
def test_whatever_happens_to_hosts_the_result_has_the_same_bits(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """A damaged copy is passed over for the peer's, a lost host's is too; with the whole group storage is what is left."""
    storage = f'{{"url": "{(tmp_path / "checkpoints").as_uri()}", "every_steps": 5}}'
    ordered = "step=10:host=0:corrupt; step=10:rank=0:sigkill; step=20:host=host1:kill; step=50:group=0:kill"
    state, events = run_job(tmp_path / "job", 2, ordered, replacements=1, restarted=["host0", "host2"], GEMINI_STORAGE=storage)
    assert_identical(state, undisturbed)
    damaged, lost, group = [resumptions(events)[i : i + 2] for i in (0, 2, 4)]
    assert ["peer host1" in event["sources"] for event in damaged if event["host"] == "host0"] == [True]
    assert [list(event["sources"]) for event in lost if event["host"] == "host2"] == [["peer host0"]]
    assert [("storage" in event["sources"], event["iteration"] < 49) for event in group] == [(True, True)] * 2
    assert len([event for event in events if event["event"] == "fault" and event["fault"] == "step=50:group=0:kill"]) == 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, mounted for this test."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        yield disk


@pytest.mark.timeout(300)
def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path: Path, tiny_disk: Path, undisturbed: dict[str, Any]) -> None:
    storage = f'{{"url": "{tiny_disk.as_uri()}", "every_steps": 5}}'
    state, events = run_job(tmp_path / "job", 1, "step=20:rank=0:until=40:storage_full", GEMINI_STORAGE=storage)
    assert_identical(state, undisturbed)
    assert not resumptions(events)
    log = (tmp_path / "job" / "host0.log").read_text() + "".join(path.read_text() for path in (tmp_path / "job").glob("agent-*.log"))
    assert "No space left on device" in log
    assert not list(tiny_disk.glob(".gemini-fault-filler"))


def test_a_disk_that_others_need_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_FAULTS_FILL_LIMIT", "4KiB")
    with pytest.raises(ConfigError, match=r"at most 4,096 are written for a drill .*mount -t tmpfs"):
        faults.check_room(tmp_path.as_uri())
    for wrong in ("much", "4 KIB OF", "1e999"):
        monkeypatch.setenv("GEMINI_FAULTS_FILL_LIMIT", wrong)
        with pytest.raises(ConfigError, match=r"^GEMINI_FAULTS_FILL_LIMIT=.*; give a size, for example 256MiB"):
            faults.check_room(tmp_path.as_uri())


@pytest.mark.parametrize("url", [None, "s3://bucket/run"])
def test_only_a_folder_can_be_filled(url: str | None) -> None:
    with pytest.raises(ConfigError, match=r"only a local folder \(file:///...\) can be filled"):
        faults.check_room(url)


ENDS_TOO_EARLY = """
import logging
logging.warning("Loading data...")
import torch, gemini_ft
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gemini_ft.Checkpointer(model, optimizer) as checkpointer:
    for step in range(checkpointer.resume(), 4):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        checkpointer.step()
"""


def test_a_script_that_has_used_the_root_logger_is_told_all_and_of_a_fault_that_never_happened(tmp_path: Path) -> None:
    environ = os.environ | {
        "GEMINI_RUN_ID": f"early-{os.getpid()}",
        "GEMINI_FAULTS": "step=50:rank=0:sigkill",
        "GEMINI_FAULTS_DIR": str(tmp_path),
    }
    command = [sys.executable, "-X", "warm", "-c", ENDS_TOO_EARLY]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    assert "INFO:gemini_ft:run early-" in done.stderr
    assert "the job has ended, and these have never happened: step=50:rank=0:sigkill" in done.stderr
