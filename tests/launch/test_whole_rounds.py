"""A host that is lost while the hosts come together costs another round, and not the job."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters, api
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from gemini_ft.launch.launched import LAUNCH
from gemini_ft.launch.notes import notes_of_workers
from gemini_ft.launch.spares import better_rendezvous
from gemini_ft.launch.whole_rounds import whole_rounds


@pytest.fixture(autouse=True)
def _launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreed name is for the workers of this process, which are other tests' jobs here."""
    monkeypatch.setenv(LAUNCH, "this test's")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with notes_of_workers() as notes, better_rendezvous(2, notes), whole_rounds():
        yield HashStore()


def host(store: HashStore) -> DynamicRendezvousHandler:
    settings = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2, "join_timeout": 30}
    parameters = RendezvousParameters("c10d", "", "run", 2, 2, local_addr="127.0.0.1", **settings)
    return create_handler(store, C10dRendezvousBackend(store, "run"), parameters)


def take_a_place(handler: Any) -> None:
    """As far as torch calls the round complete; nothing is heard of this host afterwards."""
    deadline = handler._get_deadline(handler._settings.timeout.join)
    handler._op_executor.run(torch_rendezvous._RendezvousJoinOp(), deadline, handler._get_deadline)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_who_dies_in_a_complete_round_is_not_waited_for(store: HashStore, place: int) -> None:
    """Whether it is the one who would have said where the others meet, or another."""
    hosts = [host(store), host(store)]  # in the order of their places
    lost = hosts.pop(place)
    (survivor,) = hosts
    with ThreadPoolExecutor(2) as pool:
        infos = [pool.submit(survivor.next_rendezvous)]
        take_a_place(lost)
        replacement = host(store)
        infos.append(pool.submit(replacement.next_rendezvous))
        ends = [info.result() for info in infos]
    for handler in (survivor, replacement):
        handler._stop_heartbeats()
    assert sorted(end.rank for end in ends) == [0, 1]
    assert len({(end.world_size, end.bootstrap_store_info.master_port) for end in ends}) == 1


def test_who_was_silent_for_too_long_takes_its_place_again(store: HashStore) -> None:
    """A launcher on a busy machine: the round is complete, and it hears of that only when the others have given it up."""
    one, other = host(store), host(store)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(other.next_rendezvous)
        take_a_place(one)
        holder: Any = other._state_holder
        while one._this_node in holder.state.participants:
            time.sleep(0.01)
        infos = [waiting, pool.submit(one.next_rendezvous)]
        assert sorted(info.result().rank for info in infos) == [0, 1]
    for handler in (one, other):
        handler._stop_heartbeats()


def test_who_dies_right_after_all_have_met_costs_the_stores_patience_and_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[Exception | None] = iter([dist.DistStoreError("wait timeout after 60000ms"), None])

    def assign(agent: object, group: object) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", assign)
    with whole_rounds():
        LocalElasticAgent._rendezvous(SimpleNamespace(), SimpleNamespace())
    assert next(answers, "none is left") == "none is left"


def test_the_port_of_an_attempts_store_is_nobody_elses_until_the_next_attempt(store: HashStore) -> None:
    hosts, ports = [host(store), host(store)], []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            infos = [pool.submit(handler.next_rendezvous) for handler in hosts]
            (port,) = {info.result().bootstrap_store_info.master_port for info in infos}
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("", port))
            assert TCPStore("localhost", port, is_master=True, wait_for_workers=False).port == port
            ports.append(port)
    for handler in hosts:
        handler._stop_heartbeats()
    with socket.socket() as other:
        other.bind(("", ports[0]))


def test_torch_is_left_as_it_was() -> None:
    def parts() -> list[Any]:
        names = ("next_rendezvous", "_get_world", "_get_store")
        return [*(getattr(DynamicRendezvousHandler, name) for name in names), SimpleElasticAgent._rendezvous, api.get_free_port]

    before = parts()
    with whole_rounds():
        assert all(one is not other for one, other in zip(parts(), before, strict=True))
    assert parts() == before
