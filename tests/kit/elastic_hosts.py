"""Emulated hosts of a job that loses one and takes in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemini_ft.testing import EmulatedHosts


def go_and_come(program: Sequence[str], folder: Path, restart: str) -> None:
    """Runs a job on three hosts to its end, that goes on with two of them, and then with a new one, too.

    With ``restart`` "in_place" each worker that lives is one process all the time.
    """
    launched = ["--nnodes=2:3", "--rdzv-conf=is_host=0,last_call_timeout=1", *program]
    with EmulatedHosts(3, launched, folder, env={"GEMINI_RESTART": restart}) as hosts:

        def sizes() -> list[int]:
            return [len(event["hosts"]) for event in hosts.events("joined") if event["rank"] == 0]

        def goes_on() -> bool:
            steps = hosts.events("step")
            return bool(steps) and steps[-1]["iteration"] > reached + 3

        reached = 0
        hosts.wait_for(goes_on)
        hosts.kill("host2")
        hosts.wait_for(lambda: sizes()[-1] == 2)
        reached = hosts.events("step")[-1]["iteration"]
        hosts.wait_for(goes_on)
        hosts.add()
        hosts.finish(200)
        assert sizes() == [3, 2, 3]
        for host in ("host0", "host1"):
            pids = [event["pid"] for event in hosts.events("joined") if event["host"] == host]
            assert (len(pids), len({*pids})) == (3, 1 if restart == "in_place" else 3), pids
