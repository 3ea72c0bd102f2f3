"""Recovery in place: the workers that live when another one fails keep their processes, and the job ends with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemini_ft.cli.goodput import ledgers
from gemini_ft.errors import FINAL
from gemini_ft.events import read_events
from gemini_ft.launch.endings import ENDED_ELSEWHERE
from gemini_ft.testing import EmulatedHosts

KIT = Path(__file__).parents[1] / "kit"
SCRIPT = str(KIT / "in_place_case.py")
OTHERS = {
    "trainer": str(KIT / "in_place_trainer_case.py"),
    "fabric": str(KIT / "in_place_trainer_case.py"),
    "transformers": str(KIT / "in_place_transformers_case.py"),
}
LAUNCHER = ("-m", "gemini_ft.cli.main", "run", "--standalone")


@dataclass
class Rank:
    """What a rank has written down."""

    pids: list[str]  # of its attempts
    first: set[str]  # the first random number of each
    steps: dict[str, str]  # step -> loss
    end: str


@dataclass
class Outcome:
    """What has become of a job."""

    status: int
    output: str
    ranks: list[Rank]
    failures: list[tuple[str, int]]  # cause, and the steps that were lost

    @property
    def bits(self) -> list[tuple[dict[str, str], str]]:
        return [(rank.steps, rank.end) for rank in self.ranks]


def read(folder: Path) -> list[Rank]:
    ranks = []
    for path in sorted(folder.glob("rank-*")):
        rank = Rank([], set(), {}, "")
        for word, *values in map(str.split, path.read_text().splitlines()):
            if word == "attempt":
                rank.pids.append(values[0])
                rank.first.add(values[1])
            elif word == "step":
                assert rank.steps.setdefault(values[0], values[1]) == values[1], f"{path.name}, step {values[0]}"
            else:
                rank.end = values[0]
        ranks.append(rank)
    return ranks


def job(
    folder: Path,
    *deeds: str,
    keeper: str = "gemini",
    restart: str = "in_place",
    workers: int = 2,
    timeout: str = "60",
    late: str = "skip",
    wrapper: Sequence[str] = (),
    steps: int = 12,
) -> Outcome:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GEMINI_")}
    env |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "GEMINI_RUN_ID": f"in-place-{os.getpid()}-{folder.parent.name}-{folder.name}",
        "GEMINI_LINGER": "30",
    }
    events = folder.with_suffix(".events")
    env |= {"GEMINI_IN_PLACE_TIMEOUT": timeout, "GEMINI_ON_LATE": late, "GEMINI_EVENTS": str(events), "CASE_STEPS": str(steps)}
    env |= {"GEMINI_WRAP": "0"} if keeper == "transformers-alone" else {}
    script = next((path for kind, path in OTHERS.items() if keeper.startswith(kind)), SCRIPT)
    program = [*wrapper, script, str(folder), keeper, *deeds]
    command = [sys.executable, *LAUNCHER, f"--restart={restart}", f"--nproc-per-node={workers}", "--max-restarts=30", *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    known = [failure for ledger in ledgers(read_events(events)).values() for failure in ledger.failures] if events.exists() else []
    failures = [(failure.cause, failure.step - (failure.resumed or 0)) for failure in known]
    return Outcome(done.returncode, done.stdout + done.stderr, read(folder), failures)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same loop by DDP alone."""
    outcome = job(tmp_path_factory.mktemp("jobs") / "plain", keeper="nothing", restart="process")
    assert outcome.status == 0, outcome.output
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same loop on one rank."""
    outcome = job(tmp_path_factory.mktemp("jobs") / "alone", keeper="nothing", restart="process", workers=1)
    assert outcome.status == 0, outcome.output
    return outcome


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder and the outcome of Lightning's trainer with its own strategy."""
    folder = tmp_path_factory.mktemp("jobs") / "trainers"
    outcome = job(folder, keeper="trainer-ddp", restart="process")
    assert outcome.status == 0, outcome.output
    return folder, outcome


def test_undisturbed_it_is_the_plain_loop(plain: Outcome, tmp_path: Path) -> None:
    outcome = job(tmp_path / "job")
    assert outcome.status == 0, outcome.output
    assert outcome.bits == plain.bits


def test_an_exception_costs_no_process_and_a_kill_one(plain: Outcome, tmp_path: Path) -> None:
    """A script may also destroy the process group in a ``finally`` of its own, while its model lives: DDP had the last reference to the
    group then, and waited for the group's thread without end."""
    raised = [
        f"{number}:{rest}" for number, step in ((0, 4), (2, 10)) for rest in (f"0:{step}:behind", f"1:{step}:ahead", f"1:{step}:raise")
    ]
    outcome = job(tmp_path / "job", *raised, "1:0:8:kill", "2:0:leaving:destroy", "2:1:leaving:destroy", timeout="20")
    assert outcome.status == 0, outcome.output
    assert outcome.bits == plain.bits
    assert "in_place_timeout" not in outcome.output  # the loaders' processes end when they are told
    (one, *_, another), kept = outcome.ranks[0].pids, outcome.ranks[1].pids
    assert outcome.ranks[0].pids == [one, one, another, another]
    assert kept == [kept[0]] * 4
    assert one != another
    assert all(rank.first == other.first for rank, other in zip(outcome.ranks, plain.ranks, strict=True))
    assert "bad luck" in outcome.output
    assert [cause for cause, _ in outcome.failures] == ["failed", "died", "failed"]
    assert outcome.failures[0][1] <= 1
    assert outcome.failures[1][1] <= 2  # the last step's snapshot may have been on its way when the worker was killed
    assert outcome.failures[2][1] <= 1


@pytest.mark.preloaded("lightning")
def test_lightnings_trainer_begins_anew_in_the_same_process(trainers: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Callbacks, loggers and their files as after any restart."""
    folder, whole = trainers
    outcome = job(tmp_path / "job", "0:1:4:raise", "1:0:8:kill", keeper="trainer-gemini", late="wait")
    assert outcome.status == 0, outcome.output
    assert outcome.bits == whole.bits
    (one, *_, another), kept = outcome.ranks[0].pids, outcome.ranks[1].pids
    assert outcome.ranks[0].pids == [one, one, another]
    assert kept == [kept[0]] * 3
    assert one != another
    assert [cause for cause, _ in outcome.failures] == ["failed", "died"]
    assert outcome.failures[0][1] <= 1
    assert outcome.failures[1][1] <= 2  # the last step's snapshot may have been on its way when the worker was killed
    folders = (folder, tmp_path / "job")
    files = [{path.relative_to(each) for path in each.rglob("*") if path.is_file()} for each in folders]
    assert files[0] == files[1]
    metrics = [(each / "csv/version_0/metrics.csv").read_text() for each in folders]
    assert metrics[0] == metrics[1]


@pytest.mark.preloaded("lightning")
def test_hooks_of_lightning_may_fail_in_place(trainers: tuple[Path, Outcome], tmp_path: Path) -> None:
    hooks = ["setup", "validation", "2", "saving", "epoch", "teardown"]
    deeds = [f"{number}:{number % 2}:{hook}:raise" for number, hook in enumerate(hooks)]
    outcome = job(tmp_path / "job", *deeds, "2:1:leaving:raise", keeper="trainer-gemini", late="wait")
    assert outcome.status == 0, outcome.output
    assert outcome.bits == trainers[1].bits
    assert [len({*rank.pids[:-1]}) for rank in outcome.ranks] == [1, 1], outcome.output  # rank 0 may have left `run` at the last failure
    assert [len(rank.pids) for rank in outcome.ranks] == [len(hooks) + 1] * 2


@pytest.mark.parametrize(
    ("other", "keeper"),
    [
        pytest.param("fabric-ddp", "fabric-gemini", marks=[pytest.mark.preloaded("lightning"), pytest.mark.taken_apart("Fabric")]),
        pytest.param("trainer-fsdp2", "trainer-gemini_fsdp2", marks=[pytest.mark.preloaded("lightning"), pytest.mark.taken_apart("FSDP2")]),
        pytest.param("sharded-alone", "sharded", marks=pytest.mark.soak),
        ("transformers-alone", "transformers"),
        pytest.param("pipeline-alone", "pipeline", marks=pytest.mark.taken_apart("gradient pipeline")),
        pytest.param("pipeline-local-alone", "pipeline-local", marks=pytest.mark.soak),
    ],
)
def test_others_begin_anew_in_the_same_process_too(other: str, keeper: str, tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", keeper=other, restart="process")
    outcome = job(tmp_path / "job", "0:1:4:raise", "1:0:8:kill", keeper=keeper, late="wait")
    assert (whole.status, outcome.status) == (0, 0), whole.output + outcome.output
    assert outcome.bits == whole.bits
    assert [len({*rank.pids}) for rank in outcome.ranks] == [2, 1], outcome.output
    assert [len(rank.pids) for rank in outcome.ranks] == [3, 3]
    assert [cause for cause, _ in outcome.failures] == ["failed", "died"]
    assert outcome.failures[0][1] <= 1
    assert outcome.failures[1][1] <= 2


@pytest.mark.taken_apart("in place")
def test_a_second_failure_in_every_phase_of_the_recovery(plain: Outcome, tmp_path: Path) -> None:
    """A survivor hears of it that waits for the other ranks in this package's hands or in torch's, as a group is made."""
    deeds = ["0:1:4:raise", "0:0:leaving:kill", "1:0:model:raise", "2:1:loading:kill", "3:0:resumed:raise", "4:1:6:raise"]
    deeds += ["5:1:8:raise", "6:1:group:kill", "7:1:start:kill"]
    outcome = job(tmp_path / "job", *deeds)
    assert outcome.status == 0, outcome.output
    assert outcome.bits == plain.bits
    first, second = (rank.pids for rank in outcome.ranks)
    assert first == [first[0], *[first[1]] * (len(first) - 1)]
    assert second == [*[second[0]] * 3, *[second[3]] * 4, *second[7:]]
    assert [len({*pids}) for pids in (first, second)] == [2, 4]
    assert "in_place_timeout" not in outcome.output


def test_a_worker_may_end_in_any_way_and_a_survivor_come_late(plain: Outcome, tmp_path: Path) -> None:
    ends = [f"{number}:1:{number + 1}:{deed}" for number, deed in enumerate(["interrupt", "leave", "exit", "abort"])]
    late = ["4:0:5:late", "4:1:5:raise", "5:0:6:catch", "5:1:6:kill", "6:0:leaving:raise", "6:1:7:raise", "7:0:8:raise", "7:1:8:kill"]
    outcome = job(tmp_path / "job", *ends, *late, "8:0:9:held", "8:1:9:raise", timeout="4")
    assert outcome.status == 0, outcome.output
    assert outcome.bits == plain.bits
    kept, others = (rank.pids for rank in outcome.ranks)
    assert kept == [kept[0]] * 9 + kept[9:], outcome.output
    assert len({*kept}) == 2
    assert others == [*others[:4], *[others[4]] * 2, *[others[6]] * 2, *[others[8]] * 2]
    assert len({*others}) == 7, outcome.output


@pytest.mark.parametrize("restart", ["in_place", "process"])
def test_a_rank_that_ends_early_as_if_it_were_done_is_noticed_at_once(restart: str, plain: Outcome, tmp_path: Path) -> None:
    """The others had waited for their snapshot's outcome for as long as `timeout`, as nothing of that rank could come any more."""
    begin = time.monotonic()
    outcome = job(tmp_path / "job", "0:1:4:finish", "1:0:8:finish", restart=restart)
    assert outcome.status == 0, outcome.output
    assert outcome.bits == plain.bits
    assert [len(rank.pids) for rank in outcome.ranks] == [3, 3]
    for rank in (1, 0):
        assert f"rank {rank} ended with status 0 before others failed" in outcome.output
    assert time.monotonic() - begin < 50.0


def test_a_survivor_that_is_stuck_is_replaced(tmp_path: Path) -> None:
    """And a rank that waits for it stays, unless it waits for one that is stopped while the group is made."""
    deeds = [f"{number}:0:{4 + 2 * number}:{deed}" for number, deed in enumerate(["stop", "sleep", "swallow"])]
    with ThreadPoolExecutor() as threads:  # the job mostly waits
        undisturbed = threads.submit(job, tmp_path / "whole", keeper="nothing", restart="process", workers=3)
        outcome = job(tmp_path / "job", *deeds, "0:1:4:raise", "1:1:6:raise", "2:1:8:raise", "3:1:start:stop", workers=3, timeout="2")
    whole = undisturbed.result()
    assert (whole.status, outcome.status) == (0, 0), outcome.output
    assert outcome.bits == whole.bits
    assert [len({*rank.pids}) for rank in outcome.ranks][:2] == [4, 2], outcome.output
    assert len({*outcome.ranks[2].pids[:4]}) == 1, outcome.output
    assert outcome.output.count("has not come back within 2 s (in_place_timeout)") in (3, 4)
    assert outcome.output.count("was stopped before it had reported a step, for 2 s (in_place_timeout)") == 1


def test_what_an_attempt_leaves_behind_never_meets_the_next_one(alone: Outcome, tmp_path: Path) -> None:
    left = ["keep", "thread", "hold", "child", "hook", "blind", "settings"]
    deeds = [f"{number}:0:{number + 1}:{deed}" for number, each in enumerate(left) for deed in (each, "raise")]
    outcome = job(tmp_path / "job", *deeds, workers=1)
    assert outcome.status == 0, outcome.output
    assert outcome.bits == alone.bits
    *others, sixth, seventh, eighth = outcome.ranks[0].pids
    assert len({*others}) == len(others) == 5
    assert sixth == seventh == eighth not in others
    for why in (
        "what train() has trained is still referenced from outside of it: ",
        "threads or processes that train() has started still run: forgotten",
        "threads or processes that train() has started still run: left alone",
        "train() has registered hooks of all modules or optimizers: doubled",
    ):
        assert why in outcome.output


@pytest.mark.parametrize("keeper", ["gemini", pytest.param("trainer-gemini", marks=pytest.mark.preloaded("lightning"))])
def test_no_failure_leaves_anything_in_any_process(keeper: str, tmp_path: Path) -> None:
    failures = 20 if keeper == "gemini" else 8
    deeds = [f"{number}:0:{number}:raise" for number in range(failures)]
    outcome = job(tmp_path / "job", "*:0:start:count", *deeds, keeper=keeper, workers=1, steps=failures + 1, late="wait")
    assert outcome.status == 0, outcome.output
    assert len({*outcome.ranks[0].pids}) == 1
    counts = [json.loads(line) for line in (tmp_path / "job" / "counts").read_text().splitlines()]
    assert len(counts) == failures + 1
    early, late = counts[2 : 1 + failures // 2], counts[1 + failures // 2 :]
    swing = failures // 4 + 2  # of a moment: connections that are about to be closed
    allowed = {"objects": 20 * failures, "KiB": 400 * failures, "descriptors, agent": swing, "descriptors, launcher": swing}
    for what in late[-1]:
        assert max(each[what] for each in late) <= max(each[what] for each in early) + allowed.get(what, 0), (what, counts)


@pytest.mark.parametrize(("keeper", "kind"), [("generator", "Generator"), ("dataset", "Counting")])
def test_what_outlives_an_attempt_and_has_changed_begins_anew_with_a_new_process(keeper: str, kind: str, tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", workers=1, keeper=keeper)
    outcome = job(tmp_path / "job", "0:0:0:raise", workers=1, keeper=keeper)  # before there is a snapshot
    assert (whole.status, outcome.status) == (0, 0), outcome.output
    assert outcome.bits == whole.bits
    assert [cause for cause, _ in whole.failures + outcome.failures] == ["failed"]
    assert len({*outcome.ranks[0].pids}) == 2
    assert f"what train() has trained is still referenced from outside of it: {kind}" in outcome.output


def test_what_is_compiled_begins_anew_and_what_the_script_has_opened_stays(tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", workers=1, keeper="compiled", steps=4)
    outcome = job(tmp_path / "job", "0:0:2:raise", workers=1, keeper="compiled", steps=4)
    assert (whole.status, outcome.status) == (0, 0), outcome.output
    assert outcome.bits == whole.bits
    (pid,) = {*outcome.ranks[0].pids}
    assert (tmp_path / "job" / "opened").read_text().splitlines() == [f"attempt {pid}"] * 2 + ["received aa"]


def test_a_worker_inside_another_program_is_started_anew(alone: Outcome, tmp_path: Path) -> None:
    between = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-X', 'warm', *sys.argv[1:]]))"
    wrapper = ("--no-python", sys.executable, "-X", "warm", "-c", between)
    outcome = job(tmp_path / "job", "0:0:4:raise", workers=1, wrapper=wrapper)
    assert outcome.status == 0, outcome.output
    assert outcome.bits == alone.bits
    assert len({*outcome.ranks[0].pids}) == 2
    assert "after a failure this worker is started anew, as another program is between it and the launcher" in outcome.output


@pytest.mark.parametrize(
    "keeper", ["gemini", pytest.param("trainer-gemini_fsdp2", marks=[pytest.mark.soak, pytest.mark.preloaded("lightning")])]
)
def test_the_same_error_at_the_same_step_ends_the_job(keeper: str, tmp_path: Path) -> None:
    outcome = job(tmp_path / "job", "*:1:4:raise", keeper=keeper, late="wait")
    assert outcome.status == FINAL, outcome.output
    assert [len({*rank.pids}) for rank in outcome.ranks] == [1, 1]
    assert [len(rank.pids) for rank in outcome.ranks] == [2, 2]
    assert "the same ValueError for the second time, after step 4" in outcome.output


def test_the_lower_rungs_of_a_recovery_cost_no_process_either(plain: Outcome, tmp_path: Path) -> None:
    """Rank 0's own copies are torn; all copies are, and the attempt that reads from storage fails again; the agent dies with rank 0."""
    (tmp_path / "job").mkdir()
    faults = [
        *("step=3:host=0:corrupt:owner=0", "step=3:rank=0:exception"),
        *("step=6:host=0:corrupt", "step=6:host=1:corrupt", "step=6:rank=1:exception", "step=4:moment=worker_opened:rank=0:exception"),
        *("step=9:host=0:agent", "step=9:rank=0:exception"),
    ]
    env = {"GEMINI_RESTART": "in_place", "GEMINI_IN_PLACE_TIMEOUT": "30", "GEMINI_ON_LATE": "wait", "GEMINI_FAULTS": ";".join(faults)}
    env |= {"GEMINI_STORAGE": json.dumps({"url": f"file://{tmp_path}/storage", "every_steps": 1})}
    with EmulatedHosts(2, [SCRIPT, str(tmp_path / "job"), "gemini"], tmp_path, env=env) as hosts:
        hosts.wait_for(lambda: not hosts.alive)
        logs = [(tmp_path / f"{host}.log").read_text() for host in ("host0", "host1")]
        assert [hosts.status(host) for host in ("host0", "host1")] == [0, 0], logs
    ranks = read(tmp_path / "job")
    assert [(rank.steps, rank.end) for rank in ranks] == plain.bits
    assert [len({*rank.pids}) for rank in ranks] == [1, 1], logs
    assert all(len(rank.pids) >= 5 for rank in ranks), logs  # one more failure costs another attempt, and no process
    assert all(f"bytes from {place}" in logs[0] for place in ("peer host1", "storage"))


def test_a_lost_host_costs_no_process_of_another(plain: Outcome, tmp_path: Path) -> None:
    """A worker is killed; then two hosts are lost, and spares take their places: one falls silent without closing a connection, and one,
    with rank 0, is killed. The spares' workers have waited in reserve, and each of them is killed while it loads.
    """
    (tmp_path / "job").mkdir()
    env = {
        "GEMINI_RESTART": "in_place",
        "GEMINI_SPARE": "warm",
        "CASE_RESERVE": "2",
        "GEMINI_IN_PLACE_TIMEOUT": "60",
        "GEMINI_FAULTS": "step=8:rank=0:kill",
    }
    deeds = ["0:1:2:kill", "1:1:4:freeze", "*:0:loading:fall", "*:1:loading:fall"]
    with EmulatedHosts(2, [SCRIPT, str(tmp_path / "job"), "gemini", *deeds], tmp_path, env=env) as hosts:
        names = ["host0", "host1", hosts.add(), hosts.add()]
        hosts.wait_for(lambda: len(hosts.alive) == 1)
        logs = [(tmp_path / f"{name}.log").read_text() for name in names]
        assert sorted(map(str, map(hosts.status, names))) == ["-9", "0", "0", "None"], logs
    ranks = read(tmp_path / "job")
    assert [(rank.steps, rank.end) for rank in ranks] == plain.bits
    pids = {*ranks[0].pids, *ranks[1].pids}
    assert len(pids) == 7, logs  # two, one for the killed worker, and two for each lost host
    assert len(pids & {path.name.removeprefix("reserve-") for path in (tmp_path / "job").glob("reserve-*")}) == 2, logs
    assert "in_place_timeout" not in str(logs)


def test_a_host_that_is_done_comes_back_when_another_one_fails_behind_the_training(plain: Outcome, tmp_path: Path) -> None:
    """The one that had failed had waited for it until torch's launcher gave up, after 300 s, and ended with status 69, the other with 0."""
    (tmp_path / "job").mkdir()
    with EmulatedHosts(2, [SCRIPT, str(tmp_path / "job"), "gemini", "0:0:leaving:behind"], tmp_path) as hosts:
        hosts.wait_for(lambda: not hosts.alive, timeout=250.0)
        logs = [(tmp_path / f"{host}.log").read_text() for host in ("host0", "host1")]
        assert [hosts.status(host) for host in ("host0", "host1")] == [0, 0], logs
    ranks = read(tmp_path / "job")
    assert [len(rank.pids) for rank in ranks] == [2, 2], logs
    assert [(rank.steps, rank.end) for rank in ranks] == plain.bits


@pytest.mark.soak
def test_a_job_whose_only_copy_is_lost_says_so_and_ends(tmp_path: Path) -> None:
    """A host is lost before a replica of its shard is anywhere, and nothing is in storage."""
    (tmp_path / "job").mkdir()
    env = {"GEMINI_RESTART": "in_place", "GEMINI_REPLICAS": "1", "GEMINI_FAULTS": "step=3:rank=1:kill"}
    program = ["--rdzv-conf=is_host=0,join_timeout=20", "--max-restarts=2", SCRIPT, str(tmp_path / "job"), "gemini"]
    with EmulatedHosts(2, program, tmp_path, env=env) as hosts:
        names = ["host0", "host1", hosts.add()]
        hosts.wait_for(lambda: not hosts.alive)
        logs = "".join((tmp_path / f"{name}.log").read_text() for name in names)
        assert sorted(map(hosts.status, names)) in ([-9, 1, 1], [-9, 1, ENDED_ELSEWHERE]), logs
    assert "no host here has the shards of ranks [1]; these hosts may: host" in logs
    assert "GEMINI_RESUME=never" in logs
    assert "have not come back within 20 s (join_timeout): the job ends" in logs
    pids = [pid for rank in read(tmp_path / "job") for pid in rank.pids]
    assert len({*pids}) == 3, logs
    assert len(pids) > 2 + 1 + 2 * 2, logs  # more attempts than restarts
