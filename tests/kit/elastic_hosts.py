"""Emulated hosts of a job that loses one and takes in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemini_ft.testing import EmulatedHosts


def go_and_come(program: Sequence[str], folder: Path, restart: str, *, hosts: int = 3, workers: int = 1, has_spare: bool = False) -> None:
    """Runs a job on some hosts to its end, that goes on with one less, and then with a new one, too.

    With ``restart`` "in_place" each worker that lives is one process all the time.

    ``workers``: of each host. ``has_spare``: whether a host waits with warm workers, and takes the first place that a loss leaves.
    """
    launched = [f"--nnodes={hosts - 1}:{hosts}", "--rdzv-conf=is_host=0,last_call_timeout=1", *program]
    with EmulatedHosts(hosts, launched, folder, workers=workers, env={"GEMINI_RESTART": restart, "GEMINI_SPARE": "warm"}) as emulated:

        def sizes() -> list[int]:
            return [len(event["hosts"]) for event in emulated.events("joined") if event["rank"] == 0]

        def goes_on() -> bool:
            steps = emulated.events("step")
            return bool(steps) and steps[-1]["iteration"] > reached + 3

        reached, expected = 0, [hosts * workers]
        if has_spare:
            emulated.wait_for(goes_on)
            emulated.add()
        for gone in range(hosts - 1, hosts + has_spare):
            emulated.wait_for(goes_on)
            emulated.kill(f"host{gone}")
            expected.append((hosts - (gone == hosts - 1 + has_spare)) * workers)
            emulated.wait_for(lambda: sizes() == expected)
            reached = emulated.events("step")[-1]["iteration"]
        emulated.wait_for(goes_on)
        emulated.add()
        emulated.finish(200)
        assert sizes() == [*expected, hosts * workers]
        for host in range(hosts - 1):
            pids = [event["pid"] for event in emulated.events("joined") if event["host"] == f"host{host}"]
            lived = workers * (1 if restart == "in_place" else len(expected) + 1)
            assert (len(pids), len({*pids})) == (workers * (len(expected) + 1), lived), pids
