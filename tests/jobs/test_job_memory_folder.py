"""Slots in a folder of memory: everything on all hosts is killed at once, and the job goes on from there."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from agent_kit import eventually
from weights_kit import assert_same_bits, finish, job, reached

from gemini_ft.agent.memory.slot_files import folder_of


def test_agents_and_workers_killed_at_once_go_on_from_memory(tmp_path: Path) -> None:
    folder = Path("/dev/shm", f"gemini-test-{secrets.token_hex(6)}")
    folder.mkdir(mode=0o700)
    try:
        with job(tmp_path, 2, GEMINI_MEMORY__FOLDER=str(folder)) as hosts:
            hosts.wait_for(lambda: reached(hosts, 10))
            for host in ("host0", "host1"):
                hosts.kill(host)
            committed = max(event["iteration"] for event in hosts.events("committed"))
            for host in ("host0", "host1"):
                hosts.restart(host)
            finish(hosts)
            resumed = hosts.events("resumed")
            assert {event["iteration"] >= committed for event in resumed} == {True}
            assert {source for event in resumed for source in event["sources"]} <= {"own memory", "peer host0", "peer host1"}
            assert_same_bits(tmp_path)
            for host in ("host0", "host1"):
                left = folder_of(folder, hosts.run, host)
                eventually(lambda left=left: not left.exists(), "the end of the agents, which give the memory back")
    finally:
        shutil.rmtree(folder)
    assert not os.path.exists(folder)
