"""The processors that agents keep to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_kit import Job

from gemini_ft.agent import lifecycle
from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError

LAST = max(os.sched_getaffinity(0))
ABSENT = 1020  # the kernel counts to 1023, and no test machine has as many


def test_an_agent_keeps_to_its_processors_and_so_do_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_AGENT_CPUS", str(LAST))
    with Job(tmp_path) as job:
        job.commit(job.start("a"), 1)
        threads = [int(task) for task in os.listdir(f"/proc/{job.pid('a')}/task")]
        assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(LAST,)}


def test_an_agent_and_its_threads_do_not_interrupt_computation(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.commit(job.start("a"), 1)
        threads = [int(task) for task in os.listdir(f"/proc/{job.pid('a')}/task")]
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}


@pytest.mark.parametrize(("text", "processors"), [("0", (0,)), ((3, 1, 3), (1, 3)), ("0-3,8", (0, 1, 2, 3, 8)), ("5, 1-2,2", (1, 2, 5))])
def test_processors_are_named_as_for_taskset(text: object, processors: tuple[int, ...]) -> None:
    assert load_config({"agent_cpus": text}).agent_cpus == processors


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "0x1", "0-4294967295", 1, (), (-1,)])
def test_what_names_none_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"agent_cpus.*ranges of them, separated by commas, for example 0-3,8"):
        load_config({"agent_cpus": text})


def test_a_processor_that_is_not_there_is_refused_and_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=f"agent_cpus=0,{ABSENT}: this host, or this process's control group, lacks"):
        lifecycle.keep_to((0, ABSENT))
    assert os.sched_getaffinity(0) == before
