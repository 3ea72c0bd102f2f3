"""The bytes that go over each host's link while a job that has lost a host resumes, as the network cards count them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from restore_case import STEPS

from gemini_ft.testing import EmulatedHosts, Network

CASE = str(Path(__file__).parents[1] / "kit" / "restore_case.py")
ELEMENTS = 2_000_000
STATE = 2 * 4 * ELEMENTS  # bytes: weights and momentum


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")


def resume_after_a_loss(folder: Path, hosts: int, workers: int, **options: Any) -> list[dict[str, Any]]:
    """Returns each rank's account of its host after one of the hosts was replaced by an empty one."""
    program = [CASE, str(ELEMENTS), str(folder), json.dumps({"interval": 1, **options})]
    with Network(hosts) as network, EmulatedHosts(hosts, program, folder, workers=workers, network=network) as job:
        job.wait_for(lambda: any(event["iteration"] >= STEPS for event in job.events("committed")))
        job.replace(f"host{hosts - 1}")
        job.finish(120)
    said = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(said) == hosts * workers
    return said


@pytest.mark.soak
@pytest.mark.parametrize(("hosts", "workers"), [(2, 4), (2, 2), (4, 1)])
def test_no_host_sends_or_receives_more_than_twice_the_state(tmp_path: Path, hosts: int, workers: int) -> None:
    said = resume_after_a_loss(tmp_path, hosts, workers)
    print(json.dumps(said))
    assert {each["start"] for each in said} == {STEPS}
    assert max(max(each["sent"], each["received"]) for each in said) < 2.1 * STATE
