"""Which copies a recovery reads, in which order, where some hosts are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, PeerError, RecoveryError
from gemini_ft.recovery.plan import RecoveryPlan
from gemini_ft.recovery.readers import ShardReaders
from gemini_ft.recovery.restore import read_extras
from gemini_ft.state import codec

VERSION = Version(Incarnation(1, "a"), 7)


class _Shard:
    """A copy on a host that may fall silent."""

    def __init__(self, host: str, hosts: Hosts) -> None:
        self.where, self._hosts = host, hosts

    def read(self) -> str:
        self._hosts.wait_for(self.where)
        return self.where

    def close(self) -> None:
        """Nothing to let go of."""


class Hosts(ShardReaders):
    """ShardReaders of a job of which some hosts are gone: each time one of them is waited for costs a timeout."""

    gone: set[str]
    damaged: set[str]
    waited: list[str]

    def open(self, owner: int, host: str) -> Any:
        self.wait_for(host)
        return _Shard(host, self)

    def wait_for(self, host: str) -> None:
        if host in self.gone:
            self.waited.append(host)
            raise PeerError(f"{host} did not answer")
        if host in self.damaged:
            raise CorruptDataError(f"{host}'s copy is damaged")


@pytest.fixture
def hosts() -> Hosts:
    client: Any = None
    claims: Any = None
    plan = RecoveryPlan(kind="memory", version=VERSION, sources=dict.fromkeys(range(20), ("b", "c")))
    hosts = Hosts(client, "a", plan, {}, claims, b"", 1.0)
    hosts.gone, hosts.damaged, hosts.waited = set(), set(), []
    return hosts


def where(hosts: Hosts, owner: int, keep: bool = False) -> str:
    return hosts.read(owner, 0, lambda shard: shard.read(), keep)  # type: ignore[union-attr]


def test_a_host_that_falls_silent_between_two_readings_is_waited_for_once(hosts: Hosts) -> None:
    assert where(hosts, 0, keep=True) == "b"
    hosts.gone = {"b"}
    assert where(hosts, 0) == "c"
    assert hosts.waited == ["b"]


def test_a_host_that_is_gone_is_waited_for_once_and_not_for_each_shard(hosts: Hosts) -> None:
    hosts.gone = {"b"}
    for keep in (True, False):
        assert {where(hosts, owner, keep) for owner in range(20)} == {"c"}
    assert hosts.waited == ["b"]


def test_the_only_copy_is_asked_for_again(hosts: Hosts) -> None:
    assert where(hosts, 0, keep=True) == "b"
    hosts.gone = {"b", "c"}
    with pytest.raises(RecoveryError, match="b did not answer; c did not answer; b did not answer"):
        where(hosts, 0)
    hosts.gone = {"c"}
    assert where(hosts, 0) == "b"


def test_a_damaged_copy_says_nothing_of_its_hosts_others(hosts: Hosts) -> None:
    hosts.damaged = {"b"}
    assert where(hosts, 0) == "c"
    hosts.damaged = set()
    assert where(hosts, 1) == "b"


@pytest.mark.parametrize(("rank", "turn"), [(2, [2, 3, 0, 1]), (5, [1, 2, 3, 0])])
def test_ranks_of_a_job_of_another_size_do_not_all_begin_with_one_host(rank: int, turn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(owner: int, reader: int, use: Any, keep: bool) -> int:
        read_from.append(owner)
        return owner

    read_from: list[int] = []
    monkeypatch.setattr(codec, "decode", lambda blob, secret, trust_pickle: blob)
    sources: Any = SimpleNamespace(plan=SimpleNamespace(world_size=4), read=read)
    assert list(read_extras(sources, rank, 6, b"", False).items()) == [(owner, owner) for owner in range(4)]
    assert read_from == turn
