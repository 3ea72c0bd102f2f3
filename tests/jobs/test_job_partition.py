"""A network that falls apart: at most one job of a run goes on, and it is the one of the hosts that took part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_kit import assert_same_bits, finish, job, reached

from gemini_ft.launch.endings import OVERTAKEN
from gemini_ft.testing import EmulatedHosts, Network

ALONE = "this one begins nothing without them"


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := Network.unavailable()) is not None:
        pytest.skip(f"needs hosts with a network of their own: {reason}")
    with Network() as network:
        yield network


def storage(folder: Path) -> dict[str, str]:
    return {"GEMINI_STORAGE__URL": f"file://{folder}/store", "GEMINI_STORAGE__EVERY_STEPS": "10"}


def newest(hosts: EmulatedHosts, *names: str) -> int:
    return max((event["iteration"] for event in hosts.events("committed") if not names or event["host"] in names), default=0)


def test_a_spare_begins_nothing_by_itself_and_a_host_that_comes_back_does(tmp_path: Path) -> None:
    """Whether the host of the job is dead or cut off cannot be seen from the spare's side."""
    with job(tmp_path, 1, **storage(tmp_path)) as hosts:
        hosts.wait_for(lambda: hosts.events("joined"))
        hosts.add()
        hosts.wait_for(lambda: reached(hosts, 12) and list((tmp_path / "store").rglob("manifest.json")))
        hosts.kill("host0")
        hosts.wait_for(lambda: ALONE in (tmp_path / "host1.log").read_text() or len(hosts.events("joined")) > 1)
        assert {event["host"] for event in hosts.events("joined")} == {"host0"}
        hosts.restart("host0")
        hosts.wait_for(lambda: hosts.events("resumed"))
        finish(hosts)
        assert hosts.events("resumed")[-1]["iteration"] >= 10
        assert {event["host"] for event in hosts.events("joined")} == {"host0"}
    assert_same_bits(tmp_path)


def test_a_job_begins_nothing_anew_while_hosts_that_may_have_its_state_are_absent(tmp_path: Path) -> None:
    with job(tmp_path, 2, options=["--rdzv-conf=is_host=0,join_timeout=300"], GEMINI_REPLICAS="1") as hosts:
        hosts.wait_for(lambda: reached(hosts, 5))
        hosts.replace("host1")
        said = "these hosts may: host1. Nothing is begun without them"
        hosts.wait_for(lambda: said in (tmp_path / "host0.log").read_text() or len(hosts.events("joined")) > 2)
        assert len(hosts.events("joined")) == 2
        hosts.wait_for(lambda: "the job waits for them, for 300 s at most (join_timeout)" in (tmp_path / "host0.log").read_text())


@pytest.mark.soak
@pytest.mark.parametrize("with_storage", [False, True])
def test_spares_that_are_cut_off_together_with_a_store_wait_and_come_back(network: Network, tmp_path: Path, with_storage: bool) -> None:
    env = storage(tmp_path) if with_storage else {}
    with job(tmp_path, 2, network=network, stores=("store0", "store1"), **env) as hosts:
        hosts.wait_for(lambda: hosts.events("joined"))
        spares = hosts.add(), hosts.add()
        hosts.wait_for(lambda: reached(hosts, 100))
        network.part(*spares, "store1")
        hosts.wait_for(lambda: all(ALONE in (tmp_path / f"{spare}.log").read_text() for spare in spares))
        time.sleep(30)  # for which they wait, too
        assert {event["host"] for event in hosts.events("joined")} == {"host0", "host1"}
        for name in (*spares, "store1"):
            network.heal(name)
        time.sleep(10)  # until they are back
        committed = newest(hosts)
        hosts.kill("host1")
        hosts.wait_for(lambda: {event["host"] for event in hosts.events("resumed")} & {*spares})
        assert hosts.events("resumed")[-1]["iteration"] >= committed
        finish(hosts)
        assert "run id" not in (tmp_path / "host0.log").read_text()  # no upload was refused
    assert_same_bits(tmp_path)


@pytest.mark.soak
def test_of_two_parts_that_each_have_a_host_of_the_job_one_ends_when_they_meet(network: Network, tmp_path: Path) -> None:
    """Two hosts, a spare and a store beside each: either side could be the one that is left."""
    with job(tmp_path, 2, network=network, stores=("store0", "store1")) as hosts:
        hosts.wait_for(lambda: hosts.events("joined"))
        hosts.add(), hosts.add()
        hosts.wait_for(lambda: reached(hosts, 100))
        network.part("host1", "host3", "store1")
        hosts.wait_for(lambda: {event["host"] for event in hosts.events("resumed")} >= {"host0", "host1", "host2", "host3"})
        for name in ("host1", "host3", "store1"):
            network.heal(name)
        hosts.wait_for(lambda: hosts.alive == ["host0", "host2"])
        assert {hosts.status(name) for name in ("host1", "host3")} == {OVERTAKEN}
        assert "another part of this job goes on" in (tmp_path / "host1.log").read_text()
        before = newest(hosts, "host0")
        hosts.wait_for(lambda: newest(hosts, "host0") > before + 100)
