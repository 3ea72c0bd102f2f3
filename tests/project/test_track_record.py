"""docs/track_record.md: its commits and tests exist, and its command shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "track_record.md").read_text()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def test_each_bug_names_a_commit_of_this_history_that_has_its_test_and_a_test_of_today() -> None:
    rows = re.findall(r"^\| ([0-9a-f]{8})\*? \| .* \| .* \| `(test_\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 40
    today = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert [test for _, test in rows if f"def {test}(" not in today] == []
    if _git("rev-parse", "--is-shallow-repository") != "false":  # an archive, or the newest commits alone
        return
    history = {commit[:8] for commit in _git("rev-list", "HEAD").split()}
    assert [commit for commit, _ in rows if commit not in history] == []
    had = {commit: _git("grep", "-hE", "def test_", commit, "--", "tests") for commit, _ in rows}
    assert [(commit, test) for commit, test in rows if f"def {test}(" not in had[commit]] == []


@pytest.mark.soak
def test_its_command_shows_a_bug() -> None:
    (command,) = re.findall(r"^\.venv/bin/python (.*)$", PAGE, re.MULTILINE)
    run = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout.splitlines()[-1].endswith("it fails, with it it passes")
    assert run.returncode == 0
