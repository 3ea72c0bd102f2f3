"""The store of a rendezvous is lost, comes back, or is not where the others are: what a launcher does then."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, c10d_rendezvous_backend
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from gemini_ft.cli.store import open_store
from gemini_ft.launch import stores
from gemini_ft.launch.spares import members_of
from gemini_ft.launch.stores import Standby

HERE = "127.0.0.1"


def state(number: int, complete: bool = False) -> bytes:
    """A rendezvous in a round."""
    found = _RendezvousState()
    found.round, found.complete = number, complete
    return pickle.dumps(found)


def seen(standby: Standby) -> bytes | None:
    found = standby.get_state()
    return found[0] if found is not None else None


def launcher(*ports: int) -> Standby:
    return Standby("run", [(HERE, port) for port in ports], 10.0)


class Places:
    """Stores by their ports."""

    def __init__(self) -> None:
        self._open: dict[int, TCPStore] = {}

    def serve(self, port: int = 0) -> int:
        store = open_store(HERE, port)
        self._open[store.port] = store
        return int(store.port)

    def lose(self, port: int) -> None:
        del self._open[port]


@pytest.fixture
def places() -> Places:
    return Places()


def test_a_store_that_comes_back_empty_is_told_what_was_known(places: Places) -> None:
    port = places.serve()
    one, other = launcher(port), launcher(port)
    one.set_state(state(3, complete=True))
    assert seen(other) == state(3, complete=True)
    places.lose(port)
    for each in (one, other):
        with pytest.raises(RendezvousConnectionError, match=f"{HERE}:{port}"):
            each.get_state()
    places.serve(port)
    assert seen(other) == seen(one) == state(3, complete=True)
    token = one.get_state()
    assert token is not None
    assert other.set_state(state(4), token[1]) is not None
    assert seen(one) == state(4)
    assert min(one.moved_at, other.moved_at) > 0  # nobody has been silent before


@pytest.mark.parametrize("first", [0, 1])
def test_the_furthest_of_what_launchers_know_counts_whoever_comes_first(places: Places, first: int) -> None:
    ports = places.serve(), places.serve()
    launchers = [launcher(*ports), launcher(*ports)]
    launchers[0].set_state(state(3, complete=True))
    seen(launchers[1])
    token = launchers[0].get_state()
    assert token is not None
    launchers[0].set_state(state(4), token[1])
    places.lose(ports[0])
    seen(launchers[first])
    assert [seen(each) for each in launchers] == [state(4)] * 2


def test_a_newcomer_goes_to_the_store_that_is_in_use(places: Places) -> None:
    ports = places.serve(), places.serve()
    one = launcher(*ports)
    one.set_state(state(1, complete=True))
    places.lose(ports[0])
    seen(one)
    places.serve(ports[0])  # empty, and the first in the order
    assert seen(launcher(*ports)) == state(1, complete=True)


def test_hosts_that_miss_others_look_where_the_rendezvous_has_moved(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is lost, and both stores are alive: the one that was moved to later counts."""
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.0)
    ports = places.serve(), places.serve()
    stays = launcher(*ports)
    stays.set_state(state(2, complete=True))
    unreachable = places.serve()
    places_of_the_other = unreachable, ports[1]  # the first of which is not the others' first
    moves = launcher(*places_of_the_other)
    moves.set_state(state(2, complete=True))
    places.lose(unreachable)
    seen(moves)
    assert seen(stays) == state(2, complete=True)  # it misses nobody
    token = moves.get_state()
    assert token is not None
    moves.set_state(state(3), token[1])
    token = stays.get_state()
    assert token is not None
    stays.set_state(state(3), token[1])
    seen(stays)
    assert stays.store.port == moves.store.port == ports[1]


def told(side: Standby) -> tuple[bytes, Any] | None:
    """Returns the state that a launcher is told; a store that does not answer in time is asked again, for up to 30 s."""
    end = time.monotonic() + 30
    while True:
        try:
            return side.get_state()
        except RendezvousConnectionError:
            if time.monotonic() > end:
                raise


def write(side: Standby, number: int, world: str, host: str, complete: bool = True) -> None:
    """A rendezvous in which a host has a place and shows that it lives."""
    found = _RendezvousState()
    node = _NodeDesc(host, 1, 0)
    found.round, found.complete, found.participants = number, complete, {node: 0}
    found.last_heartbeats[node] = datetime.now(UTC)
    setattr(found, "gemini_world", world)  # noqa: B010  # as spares.py does
    token = told(side)
    side.set_state(pickle.dumps(found), token[1] if token is not None else None)


def test_a_host_that_was_cut_off_with_a_store_comes_back_to_where_the_job_is_at_work(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has moved to its store later than the job to its own."""
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.0)
    ports, beyond = (places.serve(), places.serve()), places.serve()
    job, cut = launcher(*ports), launcher(beyond, ports[1])
    write(job, 3, "world", "host0")
    write(cut, 3, "world", "host1")
    places.lose(beyond)
    write(cut, 4, "world", "host1", complete=False)
    cut.endpoints = [(HERE, port) for port in ports]
    end = time.monotonic() + 30
    while cut.store.port != ports[0] and time.monotonic() < end:  # a store that answers late counts in the next look
        write(job, 4, "another", "host0")
        told(cut)
    assert cut.store.port == ports[0]
    assert seen(cut) == seen(job)


def test_another_store_that_is_lost_while_it_is_looked_at_costs_nothing(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.0)
    asked = []

    def lost(store: Any, run: str) -> None:
        asked.append(store)
        raise RendezvousConnectionError("lost")

    monkeypatch.setattr(stores, "state_at", lost)
    one = launcher(places.serve(), places.serve())
    one.set_state(state(3, complete=False))
    while not asked:  # a store that answers late counts in the next look
        assert seen(one) == state(3, complete=False)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads: until then one may answer


@pytest.fixture
def start_alone() -> Iterator[Callable[[], tuple[int, int]]]:
    """Starts a store in a process of its own; returns its port and process id."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[int, int]:
        command = [sys.executable, "-m", "gemini_ft.cli.main", "store", "--host", HERE, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline().rpartition(":")[2]), process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_store_that_does_not_answer_is_lost_as_well(
    places: Places, start_alone: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid = start_alone()
    one = launcher(port, places.serve())
    one.set_state(state(5, complete=True))
    stop(pid)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.5)
    assert seen(one) == state(5, complete=True)
    assert one.store.port != port


def test_a_store_that_is_cut_off_when_it_was_just_found_is_waited_for(
    start_alone: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that was started while the network flapped ended with status 1."""
    port, pid = start_alone()
    cut = []

    class Store(TCPStore):
        def compare_set(self, key: str, before: str, wanted: str) -> bytes:
            if before != "?" and not cut:  # no longer the question whether it is there
                stop(pid)
                cut.append(threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)))
                cut[0].start()
            return super().compare_set(key, before, wanted)

    monkeypatch.setattr(stores, "TCPStore", Store)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.5)
    one = launcher(port)
    assert cut
    one.set_state(state(5, complete=True))
    assert seen(one) == state(5, complete=True)


def test_a_store_that_is_lost_when_it_was_just_chosen_leaves_the_next_one_as_it_is(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generation counts for nobody: of two that are alive, the higher one would."""
    ports, key = (places.serve(), places.serve()), "gemini.generation.run"
    held = [TCPStore(HERE, port, is_master=False) for port in ports]
    for store, generation in zip(held, ("7", "2"), strict=True):
        store.set(key, generation)

    def lost(store: TCPStore, run: str) -> Any:
        if store.port == ports[0]:
            places.lose(ports[0])
            raise RendezvousConnectionError("lost")
        return C10dRendezvousBackend(store, run)

    monkeypatch.setattr(stores, "C10dRendezvousBackend", lost)
    assert launcher(*ports).store.port == ports[1]
    assert held[1].get(key) == b"2"


def test_a_name_server_that_hangs_keeps_nobody_from_a_store_and_is_waited_for_no_longer(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, over, resolve = places.serve(), threading.Event(), socket.getaddrinfo
    launcher(port).set_state(state(3, complete=True))

    def hang(host: str, *more: Any, **named: Any) -> Any:
        if host == "unknown":
            over.wait(60)
            raise OSError("Name or service not known")
        return resolve(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    begun = time.monotonic()
    assert seen(Standby("run", [("unknown", 1), (HERE, port)], 0.0)) == state(3, complete=True)
    with pytest.raises(RendezvousConnectionError, match="unknown:1 within 1 s"):
        Standby("run", [("unknown", 1)], 1.0)
    over.set()
    assert time.monotonic() - begun < 30  # each look takes two seconds


def test_a_store_is_found_however_long_torch_asks_for_its_name(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    port = places.serve()

    def slow(*arguments: Any, **named: Any) -> TCPStore:
        time.sleep(2.5)  # longer than a look
        return TCPStore(*arguments, **named)

    monkeypatch.setattr(stores, "TCPStore", slow)
    monkeypatch.setattr(stores, "PROBE_SECONDS", 1.0)
    assert Standby("run", [(HERE, port)], 10.0).get_state() is None


def test_at_a_first_start_every_store_is_asked(places: Places) -> None:
    """One that does not answer may be where the job is at work."""
    ports = places.serve(), places.serve()
    places.lose(ports[0])
    with pytest.raises(RendezvousConnectionError, match=f"{HERE}:{ports[0]} within 0 s.*leave out of --rdzv-endpoint"):
        Standby("run", [(HERE, port) for port in ports], 0.0)
    launcher(ports[1]).set_state(state(1, complete=True))
    assert seen(launcher(*ports)) == state(1, complete=True)


def test_a_host_that_has_not_taken_part_carries_no_rendezvous_to_another_store(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose launcher has ended is taken for nobody who may be at work."""
    monkeypatch.setenv("GEMINI_HOST_ID", "spare")
    ports = places.serve(), places.serve()
    known = _RendezvousState()
    known.round, known.complete = 3, True
    setattr(known, "gemini_members", frozenset({"host0"}))  # noqa: B010  # as spares.py does
    spare = launcher(*ports)
    spare.set_state(pickle.dumps(known))
    spare.sign_off()
    assert seen(spare) == pickle.dumps(known)
    job = launcher(ports[1])
    job.set_state(state(2, complete=True))
    places.lose(ports[0])
    assert seen(spare) == state(2, complete=True)  # the job may be there, and has not come so far
    monkeypatch.setenv("GEMINI_HOST_ID", "host0")
    token = job.get_state()
    assert token is not None
    job.set_state(pickle.dumps(known), token[1])
    job.sign_off()
    assert members_of(pickle.loads(seen(job) or b"")) == frozenset()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_launcher_that_ends_before_the_job_says_so(is_over: bool, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it others may begin then; where the job is over, all that took part stay known."""
    monkeypatch.setenv("GEMINI_HOST_ID", "host0")
    port, known = places.serve(), _RendezvousState()
    known.complete, known.closed = True, is_over
    setattr(known, "gemini_members", frozenset({"host0", "host1"}))  # noqa: B010  # as spares.py does
    with stores.surviving_stores():
        parameters = RendezvousParameters("c10d", f"{HERE}:{port}", "run", 1, 2, is_host="false")
        backend, _ = c10d_rendezvous_backend.create_backend(parameters)
        backend.set_state(pickle.dumps(known))
    left = {"host1"} if not is_over else {"host0", "host1"}
    assert members_of(pickle.loads(seen(launcher(port)) or b"")) == left


# A command that ends while a thread waits in torch's code, and an end that takes longer than that.
GIVEN_UP = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from gemini_ft.cli import main as cli
from gemini_ft.launch import stores

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(5)

def command(arguments):
    store = TCPStore("127.0.0.1", int(arguments[0]), is_master=False, timeout=timedelta(seconds=2))
    try:
        stores._within(0.2, lambda: store.get("nothing"))
    except Exception:
        return 7

slow = Slow()
cli.COMMANDS["run"] = cli.Command("__main__", "command", "")
sys.argv[1:1] = ["run"]
sys.exit(cli.main())
"""


def test_a_store_that_was_given_up_does_not_abort_the_launcher_at_its_end(places: Places) -> None:
    port = places.serve()
    done = subprocess.run([sys.executable, "-c", GIVEN_UP, str(port)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr[-2000:]


def test_a_job_without_any_store_says_where_it_has_looked(places: Places) -> None:
    port = places.serve()
    places.lose(port)
    with pytest.raises(RendezvousConnectionError, match=f"{HERE}:{port} within 0 s"):
        Standby("run", [(HERE, port)], 0.0)


def test_of_two_worlds_that_meet_the_one_that_has_not_come_as_far_ends_and_copies_of_one_are_no_two(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LOOK_SECONDS", 0.0)
    ports = places.serve(), places.serve()
    sides = launcher(*ports), launcher(ports[1])

    def look() -> bool:
        for _ in range(3):  # whether the others live is seen by their signs of life
            write(sides[1], *others)
            sides[0].look_beside()
        return bool(sides[0].overtaken)

    write(sides[0], 3, "world", "host0")
    others = 4, "world", "host1"
    assert not look()
    others = 2, "another", "host1"
    assert not look()
    others = 4, "another", "host1"
    assert look()
