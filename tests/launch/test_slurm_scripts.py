"""The batch scripts of examples/slurm, run by bash with stand-ins for SLURM's programs; real jobs are in tests/jobs/test_job_slurm.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"
# Agents and `gemini leave` are steps, too; the training's says which variables it has inherited, and how it ends is the test's choice.
SRUN = """#!/bin/bash
case "$*" in *gemini\\ agent | *gemini\\ leave) exit 0 ;; esac
env | grep ^SLURM_STEP_
echo "step"
exit "$STEP_STATUS"
"""

# The only use of `gemini` outside of a step; the script has to end it, or reads no output to its end.
STORE = """#!/bin/bash
[ "$1" = store ] || exit 1
echo "store ready on 0.0.0.0:29400"
exec sleep 600
"""

# Runs the tasks of a step, one after the other, with a `gemini` that ends as the test wants it on that node; a step in a step has one task.
TASKS = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
if [[ "$*" != *gemini\\ run* ]]; then exec "$@"; fi
gemini() { return "$STATUS"; }
export -f gemini
export SLURM_NODEID
read -ra statuses <<<"$STATUSES"
for ((SLURM_NODEID = 0; SLURM_NODEID < ${#statuses[@]}; SLURM_NODEID++)); do
    STATUS=${statuses[$SLURM_NODEID]} "$@"
done
"""


def run(
    script: str, folder: Path, status: int, srun: str = SRUN, state: str = "COMPLETING", **environ: str
) -> subprocess.CompletedProcess[str]:
    stands_in = {"srun": srun, "squeue": f"#!/bin/bash\necho {state}\n", "scontrol": "#!/bin/bash\necho requeued\n", "gemini": STORE}
    for name, text in stands_in.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n0", "STEP_STATUS": str(status)}
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    command = ["bash", str(SCRIPTS / script), "train.py"]
    return subprocess.run(
        command, env={**os.environ, **job, **environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("script", ["train.sbatch", "lightning.sbatch"])
def test_a_job_that_a_step_has_submitted_is_not_taken_for_that_step(script: str, tmp_path: Path) -> None:
    output = run(script, tmp_path, 0, SLURM_STEP_ID="3", SLURM_STEP_RESV_PORTS="12000-12003", ATTEMPTS="1").stdout
    assert "step\n" in output
    assert "SLURM_STEP_" not in output


@pytest.mark.parametrize(("status", "steps"), [(0, 1), (74, 1), (85, 1), (9, 2)])
def test_a_step_that_is_over_before_the_script_looks_has_its_status_all_the_same(status: int, steps: int, tmp_path: Path) -> None:
    (tmp_path / "bash_env").write_text('kill() { command wait $step; command kill "$@"; }\n')  # so that it is over for certain
    done = run("lightning.sbatch", tmp_path, status, ATTEMPTS="2", BASH_ENV=str(tmp_path / "bash_env"))
    assert done.returncode == status, done.stderr
    assert done.stdout.count("step\n") == steps


@pytest.mark.parametrize(
    ("statuses", "ends_with"),
    [
        ("0 0 0", 0),
        ("85 0 0", 0),  # the first node was drained, and a spare has finished the job in its place
        ("85 85 0", 0),  # and another one, too
        ("85 85 85", 85),  # the whole job is preempted
        ("85 1 1 0", 85),  # the others have failed afterwards, without a spare's having been needed
        ("1 1 1", 1),
    ],
)
def test_a_job_is_requeued_unless_it_has_finished_whoever_was_drained(statuses: str, ends_with: int, tmp_path: Path) -> None:
    done = run("train.sbatch", tmp_path, 0, TASKS, "RUNNING", STATUSES=statuses, TMPDIR=str(tmp_path))
    assert done.returncode == ends_with, done.stdout + done.stderr
    assert ("requeued" in done.stdout) == (ends_with != 0)
    assert not list(tmp_path.glob("tmp.*"))


def test_a_range_of_hosts_is_the_launchers(tmp_path: Path) -> None:
    """With `elastic: batch` all nodes train, and fewer of them go on."""
    tasks = TASKS.replace('return "$STATUS"', '[ "$1" != run ] || echo "$@ with $GEMINI_ELASTIC"; return "$STATUS"')
    done = run("train.sbatch", tmp_path, 0, tasks, STATUSES="0 0", TMPDIR=str(tmp_path), HOSTS="1:2", GEMINI_ELASTIC="batch")
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [line for line in done.stdout.splitlines() if line.startswith("run ")]
    assert len(starts) == 2
    assert all("--nnodes 1:2 " in start and start.endswith("train.py with batch") for start in starts)


def test_links_that_another_user_lays_beside_its_files_lead_nowhere(tmp_path: Path) -> None:
    """He can list the temporary folder, and make links there with names that the script may use later."""
    victim = tmp_path / "victim"
    victim.touch()
    lays = 'gemini() { for each in "$TMPDIR"/tmp.*; do ln -sf "$VICTIM" "$each.others"; done; return "$STATUS"; }'
    tasks = TASKS.replace('gemini() { return "$STATUS"; }', lays)
    done = run("train.sbatch", tmp_path, 0, tasks, "RUNNING", STATUSES="85 0 0", TMPDIR=str(tmp_path), VICTIM=str(victim))
    assert done.returncode == 0, done.stdout + done.stderr
    assert victim.read_text() == ""
