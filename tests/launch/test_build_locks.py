"""A worker that was killed while torch built an extension does not hold the next one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_launcher import Job, launch
from torch.utils import file_baton

from gemini_ft.launch import build_locks as module

__all__ = ["launch"]  # the fixture

BUILD = """
import os
from torch.utils.cpp_extension import load
open("worker", "w").write(str(os.getpid()))
load("tiny", ["tiny.cpp"], build_directory=".", is_python_module=False)
print("built", os.path.exists("lock"))
"""
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) mkdir killed && kill -9 $(cat worker) && exit 1 ;; esac
exec g++ "$@"
"""


@pytest.mark.skipif(not shutil.which("g++") or not shutil.which("ninja"), reason="needs g++ and ninja: apt-get install g++ ninja-build")
@pytest.mark.parametrize("options", [pytest.param((), id="forked"), pytest.param(("--cold",), id="cold", marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_in_a_build_does_not_hold_the_next(
    options: tuple[str, ...], tmp_path: Path, launch: Callable[..., Job]
) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    (tmp_path / "tiny.cpp").write_text("int one() { return 1; }\n")
    (tmp_path / "cxx").write_text(COMPILER)
    (tmp_path / "cxx").chmod(0o755)
    job = launch(*options, "build.py", CXX=str(tmp_path / "cxx"))
    assert job.wait() == 0
    assert job.out == "built False\n"
    assert (tmp_path / "killed").exists()
    assert f"{tmp_path / 'lock'} is taken away: process " in job.err


@pytest.fixture
def baton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that has not been acquired."""
    monkeypatch.setattr(file_baton.FileBaton, "try_acquire", file_baton.FileBaton.try_acquire)
    module.install()
    return file_baton.FileBaton(str(tmp_path / "lock"))


HOLDER = """
import sys
from gemini_ft.launch import build_locks
build_locks.install()
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_living_process_keeps_its_lock_until_it_is_dead(baton: Any) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, baton.lock_file_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not baton.try_acquire()
        holder.kill()
    assert baton.try_acquire()
    baton.release()
    assert not os.path.exists(baton.lock_file_path)


@pytest.mark.parametrize("text", ["", "another-machine 4026531836 1 7\n", "something else\n"], ids=["empty", "another machine", "unknown"])
def test_what_cannot_be_told_stays_and_an_old_one_without_a_name_is_said(
    text: str, baton: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(baton.lock_file_path)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert not baton.try_acquire()
        assert caplog.messages == []
        os.utime(path, (0, 0))
        assert not baton.try_acquire()
    assert [message.partition(", which is")[0] for message in caplog.messages] == [f"torch waits for the lock {path}"] * (not text)
    assert path.read_text() == text
