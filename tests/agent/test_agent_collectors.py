"""Agents that report by way of collectors, as processes: one is killed, another stopped, and the leader is gone for a while."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from agent_kit import WAIT, Job, Rank, end_agent, eventually, stopped

from gemini_ft.agent import lifecycle
from gemini_ft.core.decisions import Abort
from gemini_ft.core.effects import Copies, Gathered, GatheredSkips
from gemini_ft.storage.checkpoints import list_checkpoints
from gemini_ft.storage.local import LocalStorage
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.messages import MAX_MESSAGE
from gemini_ft.wire.peer_messages import Admitted, AllFinished, Rejoin, Relayed, ReportFinished, Silent
from gemini_ft.wire.trust import tls_context
from gemini_ft.wire.worker_messages import AskDrain, Draining

HOSTS = "abcde"  # "a" leads; "b" collects for "c", and "d" for "e", as no more than two may report to the leader


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def start(job: Job, **fields: Any) -> list[Rank]:
    """Every shard on two hosts, agents that nobody takes for hung, and a first commit."""
    holders = {owner: [host, HOSTS[owner - 1]] for owner, host in enumerate(HOSTS)}
    ranks = job.start(*HOSTS, hello={"agent_timeout": 0.0}, holders=holders, fan_in=2, **fields)
    job.commit(ranks, 1)
    return ranks


def test_uploads_a_drain_and_the_end_of_the_job_are_told_by_way_of_collectors_too(job: Job, tmp_path: Path) -> None:
    ranks = start(job, storage={"url": (tmp_path / "storage").as_uri(), "every_steps": 1000})
    assert isinstance(lifecycle.ask(job.run, "e", AskDrain(host="c")), Draining)
    ranks[2].wait_for("stop_after_step")
    ranks[2].wait_for("commit", digest_at=2)  # the next version is due for storage, as a host is leaving
    for rank in ranks:
        rank.snapshot(2, digest="of all")
    eventually(lambda: [info.iteration for info in list_checkpoints(LocalStorage(tmp_path / "storage"))] == [2], "the manifest")
    for rank in ranks:
        rank.goodbye()
    eventually(lambda: all(job.stream(host)["finished"] for host in HOSTS), "the word that all have finished")


def give_up(ranks: list[Rank], giving_up: Rank, hearing: list[Rank], iteration: int) -> None:
    """One rank's word reaches the leader, and the leader's the others: which takes a way in each direction, and no copy."""
    for rank in ranks:
        rank.request(iteration)
    giving_up.give_up(iteration)
    for rank in hearing:
        if rank is not giving_up:
            rank.wait_for("abort", iteration=iteration)


def test_hosts_of_a_collector_that_is_killed_go_elsewhere_and_commits_go_on_when_its_agent_is_back(job: Job) -> None:
    ranks = start(job)
    _, collector, below, _, _ = ranks
    os.kill(pid := job.pid("b"), signal.SIGKILL)
    others = [rank for rank in ranks if rank is not collector]
    give_up(others, below, others, 2)
    collector.reconnect(job.version(1))
    assert job.pid("b") != pid
    job.commit(ranks, 3, 4)


def test_hosts_of_a_collector_that_is_stopped_go_elsewhere_and_what_it_says_of_them_later_changes_nothing(job: Job) -> None:
    ranks = start(job)
    _, collector, below, _, _ = ranks
    others = [rank for rank in ranks if rank is not collector]
    with stopped(job.pid("b")):
        for rank in others:
            rank.snapshot(2)  # of which what "c" has is under way to the collector
        eventually(lambda: "is silent; another one is asked" in job.log("c"), "the end of c's patience")
        give_up(others, below, others, 3)
    collector.snapshot(2)
    for rank in ranks:
        rank.wait_for("commit", iteration=2)
    job.commit(ranks, 4, 5)


def test_a_leader_that_was_restarted_hears_all_hosts_of_its_collectors_again(job: Job) -> None:
    ranks = start(job)
    for rank in ranks[1:]:
        rank.snapshot(2)
    end_agent(job.run, "a")
    ranks[0].reconnect(job.version(1))
    ranks[0].snapshot(2)
    for rank in ranks:
        rank.wait_for("commit", iteration=2)
    job.commit(ranks, 3)


def test_commits_go_on_by_way_of_a_collector_that_strangers_and_a_member_attack(job: Job) -> None:
    """Rubbish, frames that are too long or never end, reports that are played again, and words that are for others to say."""
    holders = {owner: [host, HOSTS[owner - 1]] for owner, host in enumerate(HOSTS)}
    ranks = job.join(HOSTS, agent_timeout=0.0)
    job.open(ranks, addresses={rank.host: rank.address for rank in ranks} | {"test": ("127.0.0.1", 1)}, holders=holders, fan_in=2)
    job.commit(ranks, 1)
    address, incarnation = ranks[1].address, ranks[0].spec.incarnation
    copies = Copies(host="test", version=job.version(1), layout="l", digest="d", roots={2: "r"})
    claims = job.claims("report", to="b", incarnation=incarnation)
    lies = [
        *(Relayed.of(["c"], message) for message in (copies, ReportFinished(rank=2))),
        Gathered(version=job.version(2), layout="l", digest="d", roots={"c": "r"}),
        GatheredSkips(job.version(2), "late", {"c": [2]}), Silent(hosts=["c"]),
        Abort(job.version(2), "no"), AllFinished(), Admitted(host="c", attempt=1), claims,
        Copies(host="c", version=job.version(2), layout="l", digest="d", roots={2: "r"}),
    ]  # fmt: skip
    with ExitStack() as stack:
        for data in (bytes(4), (MAX_MESSAGE + 1).to_bytes(4, "big"), (2**16).to_bytes(4, "big") + bytes(2**15)):
            stranger = stack.enter_context(socket.create_connection(address, WAIT))
            stranger.sendall(data)
            plain = stack.enter_context(socket.create_connection(address, WAIT))
            stack.enter_context(tls_context(b"s" * 16, server=False).wrap_socket(plain)).sendall(data)
        for lie in lies:
            stack.enter_context(closing(BlockingWire(address, claims, b"s" * 16, WAIT))).send(lie)
        again = stack.enter_context(closing(BlockingWire(address, claims, b"s" * 16, WAIT)))
        for message in [Rejoin(committed=None, uploading=None, attempt=1), copies] * 50:
            again.send(message)
        job.commit(ranks, 2, 3)
        assert not any(job.stream(host)["finished"] for host in HOSTS)
