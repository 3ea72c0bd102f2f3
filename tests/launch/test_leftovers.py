"""What jobs leave behind under the temporary directory: what helps after a failure, and no more, however many there were."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemini_ft.agent import lifecycle
from gemini_ft.errors import ConfigError
from gemini_ft.launch import endings, launcher
from gemini_ft.wire.private import runtime_folder

DAYS = 86400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's own folder, as on a machine on which nothing is set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("XDG_RUNTIME_DIR", "GEMINI_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return runtime_folder()


def age(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def old_log(folder: Path, number: int, days: float) -> Path:
    path = folder / f"agent-run{number}-host.log"
    path.write_text("of a job that ended long ago")
    return age(path, days * DAYS + number)


def start_agent(run: str) -> None:
    """Starts a real agent, and ends it."""
    process = lifecycle.spawn(run, "host")
    process.terminate()
    process.wait(30)


def test_a_full_disk_under_the_reports_of_workers_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(endings, "mkdtemp", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*make room there, or name another folder \(--log-dir, TMPDIR\)"):
        endings.own_log_dir(launcher.make_parser().parse_args(["train.py"])).__enter__()


class TestLogsOfAgents:
    def test_the_newest_hundred_stay_and_all_of_the_last_day(self, folder: Path) -> None:
        old = [old_log(folder, number, days=2) for number in range(130)]
        (folder / "notes.txt").touch()
        age(folder / "notes.txt", 9 * DAYS)
        start_agent("first")
        left = [path for path in old if path.exists()]
        assert left == old[:100]  # the sweep comes before the new log
        assert (folder / "notes.txt").exists()
        for path in left:
            age(path, 0.5 * DAYS)
        many = [old_log(folder, 1000 + number, days=0.5) for number in range(30)]
        start_agent("second")
        assert all(path.exists() for path in [*left, *many])

    def test_a_folder_that_the_user_has_chosen_is_the_users(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine").mkdir()
        monkeypatch.setenv("GEMINI_LOG_DIR", str(tmp_path / "mine"))
        old = [old_log(tmp_path / "mine", number, days=9) for number in range(110)]
        start_agent("run")
        assert all(path.exists() for path in old)


class TestReportsOfJobs:
    def test_a_job_that_ends_well_leaves_none_and_of_the_others_the_newest_twenty_stay(self, folder: Path, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait(30)
        reports = [folder / f"launch-{dead.pid}-{number}" for number in range(25)]
        reports.append(folder / f"launch-{os.getpid()}-alive")  # older than all, and its launcher is at work
        for number, path in enumerate(reports):
            path.mkdir()
            age(path, number)
        before = {*reports[:20], reports[-1]}

        assert self.run(tmp_path, "pass") == 0
        assert {*folder.glob("launch-*")} == before
        assert self.run(tmp_path, "raise SystemExit(3)") == 1
        (report,) = {*folder.glob("launch-*")} - before
        assert self.run(tmp_path, "pass") == 0
        assert {*folder.glob("launch-*")} == {report, *reports[:19], reports[-1]}

    @staticmethod
    def run(folder: Path, script: str) -> int:
        (folder / "script.py").write_text(f"{script}\n")
        command = [sys.executable, "-m", "gemini_ft.cli.main", "run", "--max-restarts=0", "--cold", "script.py"]
        return subprocess.run(command, cwd=folder, timeout=100, capture_output=True).returncode
