"""The tutorial's commands, typed as slowly as by a newcomer on a machine where others train, print what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


@pytest.mark.soak
def test_its_commands_print_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(python|console|text)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script, *rest = [text for kind, text in blocks if kind == "python"]
    assert not rest
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "gemini").write_text(f'#!/bin/sh\nexec {sys.executable} -m gemini_ft.cli.main "$@"\n')
    (tmp_path / "gemini").chmod(0o755)
    commands = [text for kind, text in blocks if kind == "console"]
    expected = [text for kind, text in blocks if kind == "text"]
    mark = "=== next block"
    environ = {**os.environ, "GEMINI_LOG_DIR": str(tmp_path), "GEMINI_HOST_ID": tmp_path.name}
    environ["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with open(tmp_path / "neighbour", "w") as output:
        others = ["gemini", "run", "--run-id", f"neighbour-{os.getpid()}", "train.py"]
        neighbour = subprocess.Popen(others, cwd=tmp_path, env={**environ, "STEPS": "1000000"}, stdout=output, stderr=output)
    try:
        done = subprocess.run(
            ["bash", "-m", "-c", f"\necho '{mark}'\nsleep 4\n".join(commands)],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
    finally:
        neighbour.send_signal(signal.SIGINT)
        neighbour.wait(60)
    printed = done.stdout.split(f"{mark}\n")
    assert len(printed) == len(commands)
    for block, text in zip(_with_output(blocks), expected, strict=True):
        lines = iter(printed[block].splitlines())
        for pattern in text.splitlines():
            assert any(fnmatchcase(line, pattern.replace("[", "[[]")) for line in lines), f"{pattern!r} is not in:\n{printed[block]}"


def _with_output(blocks: list[tuple[str, str]]) -> list[int]:
    """Numbers of the console blocks that a text follows."""
    numbers, number = [], -1
    for kind, _ in blocks:
        number += kind == "console"
        if kind == "text":
            numbers.append(number)
    return numbers
