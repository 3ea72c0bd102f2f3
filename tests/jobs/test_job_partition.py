"""A network that falls apart: at most one job of a run goes on, and it is the one of the hosts that took part."""

from __future__ import annotations

from pathlib import Path

from weights_kit import SCRIPT, assert_same_bits, reached

from gemini_ft.testing import EmulatedHosts

STEPS = 40
ALONE = "this one begins nothing without them"


def program(folder: Path, steps: int) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    return [str(folder / "train.py"), str(steps), str(folder / "weights")]


def storage(folder: Path) -> dict[str, str]:
    return {"GEMINI_STORAGE__URL": f"file://{folder}/store", "GEMINI_STORAGE__EVERY_STEPS": "10"}


def test_a_spare_begins_nothing_by_itself_and_a_host_that_comes_back_does(tmp_path: Path) -> None:
    """Whether the host of the job is dead or cut off cannot be seen from the spare's side."""
    with EmulatedHosts(1, program(tmp_path, STEPS), tmp_path, env=storage(tmp_path)) as hosts:
        hosts.wait_for(lambda: hosts.events("joined"))
        hosts.add()
        hosts.wait_for(lambda: reached(hosts, 12) and list((tmp_path / "store").rglob("manifest.json")))
        hosts.kill("host0")
        hosts.wait_for(lambda: ALONE in (tmp_path / "host1.log").read_text() or len(hosts.events("joined")) > 1)
        assert {event["host"] for event in hosts.events("joined")} == {"host0"}
        hosts.restart("host0")
        hosts.finish()
        assert hosts.events("resumed")[-1]["iteration"] >= 10
        assert {event["host"] for event in hosts.events("joined")} == {"host0"}
    assert_same_bits(tmp_path, STEPS)
