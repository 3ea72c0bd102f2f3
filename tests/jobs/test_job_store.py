"""The store of the rendezvous is killed: the workers go on, and the job can still replace what fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from weights_kit import assert_same_bits, finish, job, reached

from gemini_ft.testing import EmulatedHosts


def newest(hosts: EmulatedHosts) -> int:
    return max((event["iteration"] for event in hosts.events("committed")), default=0)


def goes_on_undisturbed(hosts: EmulatedHosts) -> None:
    """Snapshots are committed, in the same incarnation."""
    joined, before = len(hosts.events("joined")), newest(hosts)
    hosts.wait_for(lambda: reached(hosts, before + 5))
    assert len(hosts.events("joined")) == joined


def goes_on_after_a_failure(hosts: EmulatedHosts) -> None:
    """A worker is killed, and the ranks come together again by what has become of the store."""
    before, committed = len(hosts.events("resumed")), newest(hosts)
    os.kill(hosts.events("joined")[-1]["pid"], signal.SIGKILL)
    hosts.wait_for(lambda: len(hosts.events("resumed")) >= before + 2)
    assert all(event["iteration"] >= committed for event in hosts.events("resumed")[before:])


def test_another_store_takes_over_and_one_that_comes_back_empty_is_filled(tmp_path: Path) -> None:
    with job(tmp_path, 2, stores=2) as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        hosts.kill_store(0)
        goes_on_undisturbed(hosts)
        goes_on_after_a_failure(hosts)
        hosts.restart_store(0)
        hosts.kill_store(1)
        goes_on_after_a_failure(hosts)
        finish(hosts)
    assert_same_bits(tmp_path)


@pytest.mark.soak
def test_the_store_is_killed_ten_times(tmp_path: Path) -> None:
    """The only one as well as either of two; with failures in between, and while none is there."""
    with job(tmp_path, 2, stores=2) as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        for number in range(10):
            hosts.kill_store(number % 2)
            if number % 3 == 2:  # none is left
                hosts.kill_store(1 - number % 2)
                goes_on_undisturbed(hosts)
                hosts.restart_store(1 - number % 2)
            else:
                goes_on_undisturbed(hosts)
            if number % 2:
                goes_on_after_a_failure(hosts)
            else:
                lost = hosts.events("joined")[-1]["host"]
                before = len(hosts.events("resumed"))
                hosts.replace(lost)
                hosts.wait_for(lambda before=before: len(hosts.events("resumed")) >= before + 2)
            hosts.restart_store(number % 2)
