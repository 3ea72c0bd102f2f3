"""The quick form of every benchmark, as its page has it: that it runs to its end and says what it found."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
QUICK = re.findall(r"^python (benchmarks/\S+ --quick)", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
NEEDS_ROOT = ("interference", "switch", "sparse_sync", "compression", "pipelines", "partitions", "slow")  # networks of a given rate, mounts


def test_every_benchmark_with_a_quick_form_is_on_the_page() -> None:
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py") if '"--quick"' in path.read_text()}
    assert programs <= {Path(command.split()[0]).name for command in QUICK}


def test_the_parts_of_a_recovery_add_up_to_its_phases() -> None:
    import recovery_parts
    import recovery_report

    marks = {"start": 10.0, "noticed": 10.5, "victim": 10.25, "gone": 11.0, "created": 10.75, "started": 12.0, "group": 14.0}
    marks |= {"model": 13.0, "joined": 15.0, "restored": 16.0, "forward": 17.0, "step": 18.0}
    phases, parts = recovery_parts.split(marks)  # a spare's worker was there before the last old one had gone
    assert dict(zip(recovery_parts.PHASES, phases, strict=True)) == {
        "detection": 1.0,
        "rendezvous": 0.0,
        "process start": 1.0,
        "group": 2.0,
        "restore": 2.0,
        "first step": 2.0,
    }
    for phase, seconds in zip(recovery_parts.PHASES, phases, strict=True):
        assert sum(taken for (of, _), taken in parts.items() if of == phase) == seconds
    assert [mark for phase, mark in parts if phase == "detection"] == ["victim", "noticed", "gone"]
    rows = {"torchrun": recovery_report.summary([recovery_report.Recovery(phases, parts, 0)], None)}
    (_, shown) = recovery_parts.explanation(rows)
    assert "| group | 1.00 | the script builds its model: fresh pages, random numbers | script |" in shown
    assert "| rendezvous |" not in shown


def test_comparisons_cost_a_thousandth_of_what_they_cost_in_each_step() -> None:
    import observed

    found = observed.ratios([{"off": each, "watched": 1.01 * each, "compared": 2.01 * each, "replayed": 4.01 * each} for each in (1, 2, 4)])
    middles = {name: round(middle, 6) for name, (middle, _, _) in found.items()}
    assert (middles["observed_vs_not"], middles["observed_and_replayed_vs_not"]) == (1.011, 1.013)


def test_a_failure_costs_all_that_new_steps_have_not_taken() -> None:
    from goodput import Step, account

    before = [Step("a", 0.5 * number, number) for number in range(5)]  # until 2.0
    again = [Step("b", at, number) for at, number in ((5.0, 3), (5.5, 4), (6.0, 5), (6.5, 6))]  # from a file of step 2
    found = account([*before, *again], failures=1)
    assert (found.steps, found.wall, found.step, found.cost) == (6, 6.5, 0.5, 3.5)
    assert found.share(0.25) == 6 * 0.25 / 6.5
    assert found.share_of_rare() == 1 - 3.5 / 600


def test_the_table_of_the_gpt_puts_losses_and_seconds_together(tmp_path: Path) -> None:
    import pipelines_gpt

    losses = {"DDP fp32": [[8.0] * 20 + [4.0] * 100], "DDP bf16": [[4.0] * 120], "DiLoCo": [[8.0] * 120]}
    visits = {
        row: [{"rounds": [seconds], "plan": plan}]
        for row, seconds, plan in (("DDP fp32", 4.0, ""), ("DiLoCo", 1.0, ""), ("auto", 2.0, "bf16 even"))
    }
    assert pipelines_gpt.targets(losses) == [1.02 * 4.0]
    assert pipelines_gpt.times(losses, {"r": visits})["r"] == {"DDP fp32": [40 * 4.0], "DiLoCo": [None], "auto": [2.0]}
    visits["DDP bf16"] = [{"rounds": [1.0], "plan": ""}]
    assert pipelines_gpt.ratios(losses, {"r": visits}) == {
        "ddp_over_best_r": 160.0,
        "auto_to_loss_over_best_r": None,
        "auto_over_best_alike_r": 2.0,
    }
    about = pipelines_gpt.about("losses", "DiLoCo", 4, seed=0)
    for measured in (1, 2):  # by another program, the second time
        assert pipelines_gpt.Cells(tmp_path / "cells").measured(about, lambda measured=measured: {"seconds": measured}) == {"seconds": 1}
    assert pipelines_gpt.Cells(tmp_path / "cells").measured(about | {"code": "other"}, lambda: {"seconds": 3}) == {"seconds": 3}


def test_a_cell_of_the_gpt_is_measured_again_where_anything_behind_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import pipelines_gpt

    def cells() -> list[dict[str, Any]]:
        return [pipelines_gpt.about(part, "DDP fp32", 4) for part in ("losses", "seconds")]

    before, read = cells(), Path.read_text
    with monkeypatch.context() as patch:  # on other hosts a training has the same losses
        patch.setattr(pipelines_gpt, "hardware", lambda: {"cpu": "another", "cores": 1})
        assert [now == then for now, then in zip(cells(), before, strict=True)] == [True, False]
    with monkeypatch.context() as patch:
        patch.setattr(platform, "python_version", lambda: "3.0")
        assert [now == then for now, then in zip(cells(), before, strict=True)] == [False, False]
    for file in ("testing/network.py", "gemini_ft/trials.py", "compression/truncation.py", "gemini_ft/ordered.py"):
        ring = pipelines_gpt.code_of("ring8")
        with monkeypatch.context() as patch:
            patch.setattr(
                Path, "read_text", lambda path, *a, file=file, **k: read(path, *a, **k) + "\nNEW = 1" * path.as_posix().endswith(file)
            )
            assert pipelines_gpt.code_of("ring8") != ring, file
    with monkeypatch.context() as patch:
        patch.setattr(pipelines_gpt, "run_hosts", pipelines_gpt.steps_to)
        assert pipelines_gpt.about("losses", "DDP fp32", 4) != before[0]


def test_a_line_that_was_written_in_part_is_no_cell_of_the_gpt(tmp_path: Path) -> None:
    import pipelines_gpt

    path = tmp_path / "cells"
    for seed in (0, 1):
        pipelines_gpt.Cells(path).measured({"seed": seed}, lambda seed=seed: {"seconds": seed})
    path.write_bytes(path.read_bytes()[:-3])
    for measured in (2, 3):
        cells = pipelines_gpt.Cells(path)
        assert cells.measured({"seed": 1}, lambda measured=measured: {"seconds": measured}) == {"seconds": 2}
        assert cells.measured({"seed": 0}, dict) == {"seconds": 0}
    assert cells.commits == {json.loads(line)["commit"] for line in path.read_text().splitlines()}


def test_cells_of_an_older_commit_count_where_that_is_asked_for_but_for_those_of_auto(tmp_path: Path) -> None:
    import pipelines_gpt

    path = tmp_path / "cells"
    for row in ("ring8", "auto"):
        pipelines_gpt.Cells(path).measured({"row": row, "code": "old"}, lambda: {"seconds": 1})
    [commit] = {json.loads(line)["commit"] for line in path.read_text().splitlines()}
    cells = pipelines_gpt.Cells(path, commit)
    assert [cells.measured({"row": row, "code": "new"}, lambda: {"seconds": 2}) for row in ("ring8", "auto")] == [
        {"seconds": 1},
        {"seconds": 2},
    ]
    assert cells.older == {"ring8"}
    assert "BUT THE FIRST LOSSES OF ring8 ARE OTHERS NOW" in pipelines_gpt.kept({"ring8": False}, commit)
    assert "OTHERS" not in pipelines_gpt.kept({"ring8": True}, commit)


def test_no_round_and_no_cell_drops_out_of_a_ratio() -> None:
    import common
    import recovery_report
    import trials

    def row(*lost: float) -> trials.Measured:
        found = trials.Measured(copies=True, same_state=False, restarts=False)
        found.rounds = {turn: {"lost_s": seconds} for turn, seconds in enumerate(lost)}
        return found

    rows = {"ours": row(2.0, 2.0, 3.0), "base": row(1.0, -1.0, 2.0)}
    middle, low, high = trials.paired(rows, "base", "lost_s")["ours"]
    assert (middle, low, high) == (2.0, 1.5, math.inf)
    assert trials.paired({"ours": row(-1.0), "base": row(-2.0)}, "base", "lost_s")["ours"][0] == 1.0
    assert trials.worst({64: {"a": (2.0, 1.0, 3.0)}, 256: {"a": (2.5, 1.0, 3.0)}}) == {"a": 2.5}
    assert trials.worst({64: {"a": (2.0, 1.0, 3.0)}, 256: {"a": (math.inf, 1.0, math.inf)}}) == {"a": None}
    assert trials.worst({64: {"a": (2.0, 1.0, 3.0)}, 256: {}}) == {"a": None}
    assert trials.by_plan({64: {"a": (2.0, 1.0, math.inf)}}) == {"64": {"a": [2.0, 1.0, None]}}
    for high in (3.0, math.inf):
        assert "*" in trials.ratio_table({64: {"a": (high, 1.0, high)}}).splitlines()[-1]
    assert "*" not in trials.ratio_table({64: {"a": (2.0, 1.95, 2.05)}}).splitlines()[-1]
    four = {"totals_s": [[4.0, 4.0, 4.0]]}
    recovered: dict[str, dict[str, dict[str, Any]]] = {"worker 64 MB": {"gemini_plain": {"totals_s": [[1.0, 1.0, 2.0]]}, "torchrun": four}}
    assert recovery_report.ratios(recovered, "torchrun")["64 MB"]["worker_vs_torchrun"] == (0.25, 0.25, 0.5)
    alike, apart = [[1.0] * 9, [2.0] * 9], [[1.0, 2.0] * 9]  # the same values; a slow round is one piece of evidence
    low, high = common.quotient(alike, [[1.0]])[1:]
    assert (low, high) == (1.0, 2.0)
    assert common.quotient(apart, [[1.0]])[0] == common.quotient(alike, [[1.0]])[0] == 1.5
    recovered["worker 64 MB"]["gemini_plain"]["problem"] = "it came back once"
    assert recovery_report.ratios(recovered, "torchrun")["64 MB"]["worker_vs_torchrun"][0] == math.inf
    del recovered["worker 64 MB"]["gemini_plain"]["problem"]
    recovered["worker 1000 MB"] = {"gemini_plain": {"problem": "it did not come back"}, "torchrun": four}
    assert trials.worst(recovery_report.ratios(recovered, "torchrun")) == {"worker_vs_torchrun": None}
    assert "| 0.250 (0.250 to 0.500) * | inf (inf to inf) * |" in trials.ratio_table(recovery_report.ratios(recovered, "torchrun"))


def test_the_simulation_of_joining_follows_the_code_that_it_plays() -> None:
    """It puts words into the exchanges of a rank that joins."""
    from scale_joining import RANKS, STEPS, joining

    found = joining(3)
    assert (found["resumed"], found["copies_missing"]) == (STEPS[-1], 0)
    assert joining(4, lost=1)["copies_missing"] == 2 * RANKS


def test_the_simulations_of_agents_follow_the_code_that_they_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """They put them on wires of their own."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # else each of their collections looks through all that the tests have imported
    from scale_joining import FAN_IN
    from scale_simulation import changed, simulated

    assert simulated(3, steps=2, latency=1e-5, fan_in=FAN_IN)["leader_ms"] > 0
    assert changed(3, latency=1e-5, fan_in=FAN_IN)["seconds_hung"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", [command for command in QUICK if "/gpu/" not in command])
def test_runs_to_its_end_and_says_what_it_found(command: str) -> None:
    program, *arguments = shlex.split(command)
    if Path(program).stem in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: networks of a given rate, and mounts, are namespaces")
    run = subprocess.run([sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1000)
    assert run.returncode == 0, run.stderr[-4000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert set(said) == {"benchmark", "hardware", "results", "ratios"}
    assert said["results"]
