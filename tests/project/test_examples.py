"""The examples do what their first lines say. The drill runs in its reduced form."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemini_ft.testing import assert_identical

pytestmark = pytest.mark.preloaded("lightning")  # as the drill itself asks for it

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, timeout: float, **env: str) -> str:
    """Run it to its end; its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, env=os.environ | env)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def cells_of(output: str) -> dict[str, list[str]]:
    """What was killed -> at step, detected, own memory, peers, storage, read in, resumed at, steps lost, next step after."""
    rows = {match[1]: match[0] for match in re.finditer(r"^│ (a \w+).*$", output, re.MULTILINE)}
    return {name: [cell.strip() for cell in row.strip("│").split("│")] for name, row in rows.items()}


def assert_survived(output: str, folder: Path, steps: int, *, all_have_all: bool) -> None:
    cells = cells_of(output)
    assert [cell != "-" for cell in cells["a worker"][3:6]] == [True, not all_have_all, False]
    assert [cell != "-" for cell in cells["a host"][3:6]] == [True, True, False]
    assert all(int(cells[name][8]) >= 1 for name in ("a worker", "a host"))  # more on a busy machine: what was not committed yet
    assert "IDENTICAL: not one bit differs" in output
    states = [torch.load(folder / name / "final.ckpt", weights_only=False) for name in ("undisturbed", "disturbed")]
    assert states[0]["global_step"] == steps
    assert_identical(*(state["optimizer_states"] for state in states))


@pytest.mark.timeout(300)
def test_a_drill_on_two_hosts_survives_the_loss_of_a_worker_and_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("survive_failures")

    class Small(example.Drill):  # type: ignore[misc,name-defined]
        faults = {"a worker": "step=6:rank=1:sigkill", "a host": "step=15:host=1:kill"}  # noqa: RUF012

    monkeypatch.setattr(example, "HOSTS", 2)
    monkeypatch.setenv("GEMINI_ON_LATE", "wait")  # steps take milliseconds here, and there is to be a commit before the first failure
    monkeypatch.setattr(sys, "argv", ["survive_failures.py", "--folder", str(tmp_path)])
    drill = Small(24, ["--width=32", "--layers=1"])
    assert example.main(drill, drill) == 0
    assert_survived(capsys.readouterr().out, tmp_path, drill.steps, all_have_all=True)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("forked", [True, False])
def test_the_drill_survives_three_ways_of_being_killed(
    tmp_path: Path, forked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(EXAMPLES / "survive_failures.py"), "--quick", "--folder", str(tmp_path / "drill")]
    if forked:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(command[0], run_name="__main__")
        output = capsys.readouterr().out
    else:
        output = run(sys.executable, *command, "--cold", timeout=500)
    # each shard is read from storage once, then from peers
    assert [cell != "-" for cell in cells_of(output)["a group"][3:6]] == [False, True, True]
    assert_survived(output, tmp_path / "drill", 24, all_have_all=False)


def test_the_drill_speaks_before_it_imports_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import survive_failures; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, str(EXAMPLES), timeout=60) == "False\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["gemini_ft.cli.main run --explain", pytest.param("torch.distributed.run", marks=pytest.mark.soak)])
def test_a_plain_loop_survives_under_either_launcher(tmp_path: Path, launcher: str) -> None:
    command = [
        sys.executable,
        "-m",
        *launcher.split(),
        "--nproc-per-node=2",
        "--max-restarts=3",
        str(EXAMPLES / "plain_loop.py"),
        "--steps=60",
    ]
    run_id = f"plain-{os.getpid()}-{tmp_path.name}"
    env = {"GEMINI_RUN_ID": run_id, "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_FAULTS_DIR": str(tmp_path / "faults")}
    env |= {"GEMINI_FAULTS": "step=30:rank=1:sigkill", "GEMINI_LINGER": "60", "GEMINI_ON_LATE": "wait"}
    output = run(*command, timeout=250, **env)
    assert "resuming at iteration 29 from memory" in output
    rows = re.findall(r"gemini: state of rank 0, stream main, after iteration (\d+)\nwhat +where +fate +bytes +how\n", output)
    assert rows == (["1", "30"] if "--explain" in launcher else [])  # at the first snapshot of each process
    assert "step 60: loss" in output


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_trainer_of_transformers_is_killed_twice() -> None:
    for module in ("deepspeed", "transformers", "accelerate"):
        pytest.importorskip(module, reason=f"needs {module}: pip install {module}")
    output = run(sys.executable, str(EXAMPLES / "huggingface_trainer.py"), timeout=250)
    assert output.count("step 32: training loss 0x") == 2
    assert "IDENTICAL: not one bit differs" in output


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_zero_3_survives_the_same_drill(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    output = run(sys.executable, str(EXAMPLES / "deepspeed_zero3.py"), "--quick", "--folder", str(tmp_path / "drill"), timeout=500)
    assert "IDENTICAL: not one bit differs" in output


@pytest.mark.timeout(300)
@pytest.mark.soak
@pytest.mark.parametrize("config", ["deepspeed_zero1", "deepspeed_zero2_offload"])
def test_the_same_training_under_other_stages(tmp_path: Path, config: str) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
    script = [str(EXAMPLES / "deepspeed_zero3.py"), "--train", "--steps=12", "--width=32", "--layers=1"]
    script += [f"--config={EXAMPLES.parent / 'configs' / config}.json"]
    run_id = f"zero-{os.getpid()}-{tmp_path.name}"
    env = {"GEMINI_RUN_ID": run_id, "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_FAULTS_DIR": str(tmp_path / "faults")}
    env |= {"GEMINI_FAULTS": "step=6:rank=1:sigkill", "GEMINI_LINGER": "60", "OMP_NUM_THREADS": "1"}
    states = []
    for plain in (["--plain"], []):
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--nproc-per-node=2", "--max-restarts=3", *script, *plain]
        output = run(*command, f"--out={tmp_path / 'state'}", timeout=140, **env)
        assert ("resumed at iteration 5" in output) is (not plain)
        states.append(torch.load(tmp_path / "state", weights_only=False))
    assert_identical(*states)


@pytest.mark.parametrize(
    "launcher", [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"], pytest.param([], marks=pytest.mark.soak)]
)
def test_an_embedding_is_trained_with_zen(launcher: list[str]) -> None:
    options = ["--steps=3", "--batch=4", "--vocabulary=3000", "--width=16", "--megabytes=0.3"]
    output = run(sys.executable, *launcher, str(EXAMPLES / "zen_language_model.py"), *options, timeout=200)
    rows = re.findall(r"^(DDP, dense|DDP, sparse|Zen) +([\d.]+) +[\d.]+ +([\d.]+) ", output, re.MULTILINE)
    assert [path for path, _, _ in rows] == ["DDP, dense", "DDP, sparse", "Zen"]
    losses = [float(loss) for _, loss, _ in rows]
    assert max(losses) - min(losses) < 1e-3
    assert len(re.findall(r"^Zen against DDP, (?:dense|sparse): saves -?[\d.]+ MB", output, re.MULTILINE)) == 2


@pytest.mark.soak
def test_pipelines_beside_ddp() -> None:
    # It counts what this host sends: with a loopback of its own, nothing of what other tests send.
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "alone"] if os.geteuid() == 0 else []
    output = run(*alone, sys.executable, str(EXAMPLES / "gradient_pipelines.py"), "--quick", timeout=250)
    rows = {row[0].strip(): row[1:] for row in re.findall(r"^(\S.{17}) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+$", output, re.MULTILINE)}
    assert list(rows) == ["DDP", "bf16", "zen", "zen + powersgd", "topk, layer-wise", "topk, cupcake", "auto"]
    losses = {name: float(row[0]) for name, row in rows.items()}
    assert abs(losses["zen"] - losses["DDP"]) < 1e-3
    assert all(4 < loss < 6 for loss in losses.values())  # of 256 bytes, ln 256 is 5.5
    sent = {name: float(row[2]) for name, row in rows.items()}
    assert sent["bf16"] < 0.7 * sent["DDP"]
    assert sent["zen"] < 0.5 * sent["DDP"]
