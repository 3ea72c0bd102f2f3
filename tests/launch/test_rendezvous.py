"""Real processes, real gloo, and a store that outlives attempts, as torchrun's does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agent_kit import context
from torch._C._distributed_c10d import PrefixStore, TCPStore

import gemini_ft
from gemini_ft.cli.store import open_store
from gemini_ft.errors import GeminiError, PeerError, StateError, WorldSizeError
from gemini_ft.worker import rendezvous, store_listener
from gemini_ft.worker.store_listener import await_store, is_listening


class Ranks:
    """The processes of one attempt; ``results()`` has what each rank's function returned, or the exception it raised."""

    def __init__(self, function: Callable[[], Any], environments: list[dict[str, str]]) -> None:
        self.processes = []
        self._pipes: list[Connection] = []
        for environ in environments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(function, environ, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def result(self, rank: int) -> Any:
        return self._pipes[rank].recv() if self._pipes[rank].poll(60) else TimeoutError("no result within 60 s")

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(len(self._pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(30)


def _run_rank(function: Callable[[], Any], environ: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environ)
    try:
        result = function()
    except Exception as error:
        result = error
    pipe.send(result)


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    """Start the ranks of an attempt; what still runs at the end of the test is killed."""
    started: list[Ranks] = []

    def start(function: Callable[[], Any], environments: list[dict[str, str]]) -> Ranks:
        started.append(Ranks(function, environments))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


def elastic(store: TCPStore, world_size: int) -> list[dict[str, str]]:
    """What torchrun tells its workers when they share its own store."""
    return [
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank in range(world_size)
    ]


@pytest.fixture
def store() -> TCPStore:
    return open_store("127.0.0.1", 0)


def total() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def join_and_add() -> float:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    return total()


def join_and_hang() -> None:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    time.sleep(600)


def join_with_little_patience() -> None:
    gemini_ft.init_process_group("gloo", timedelta(seconds=1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestGroup:
    def test_every_attempt_on_the_same_store_comes_up(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        for _ in range(5):
            attempt = start(join_and_add, elastic(store, 3))
            assert attempt.results() == [3.0, 3.0, 3.0]
            attempt.kill()

    def test_the_hello_of_a_dead_predecessor_is_not_counted(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        environments = elastic(store, 2)
        lone = start(join_and_add, environments[1:])  # says hello, and dies before there is a rank 0
        prefix = PrefixStore("gemini/rendezvous", store)
        prefix.wait(["hello/1"], timedelta(seconds=30))
        stale = prefix.get("hello/1")
        lone.kill()
        first = start(join_and_add, environments[:1])
        prefix.wait([f"answer/{stale.decode()}"], timedelta(seconds=30))  # rank 0 has taken it for a living one
        second = start(join_and_add, environments[1:])
        assert first.results() + second.results() == [2.0, 2.0]

    def test_a_group_comes_up_after_a_kill_in_the_middle_of_joining(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        alone = start(join_and_add, elastic(store, 2)[:1])
        PrefixStore("gemini/rendezvous", store).wait(["attempts"], timedelta(seconds=30))
        alone.kill()
        assert start(join_and_add, elastic(store, 2)).results() == [2.0, 2.0]

    def test_rank_0_names_the_ranks_that_do_not_come(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        environments = elastic(store, 4)
        [error] = start(join_with_little_patience, [environments[0]]).results()
        assert isinstance(error, PeerError)
        assert "ranks 1, 2, 3 of 4 did not join the process group within 1 s" in str(error)

    def test_the_others_name_rank_0(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        [error] = start(join_with_little_patience, elastic(store, 2)[1:]).results()
        assert isinstance(error, PeerError)
        assert "rank 0 did not answer rank 1 within 1 s" in str(error)

    def test_an_unreachable_launcher_is_named(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        environments = [environ | {"MASTER_PORT": str(free_port())} for environ in elastic(store, 2)]
        [error] = start(join_with_little_patience, environments[1:]).results()
        assert isinstance(error, PeerError)
        assert f"the launcher's store at 127.0.0.1:{environments[1]['MASTER_PORT']} did not answer within 1 s" in str(error)

    def test_without_torchrun_it_is_torchs_own(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        port = str(free_port())
        environments = [environ | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": ""} for environ in elastic(store, 2)]
        assert start(join_and_add, environments).results() == [2.0, 2.0]

    def test_a_callers_own_store_is_used(self, store: TCPStore) -> None:
        gemini_ft.init_process_group("gloo", store=PrefixStore("mine", store), rank=0, world_size=1)
        try:
            assert store.num_keys() > 0
            assert not store.check(["gemini/rendezvous/attempts"])
        finally:
            dist.destroy_process_group()

    def test_the_group_is_gone_when_the_interpreter_ends(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import atexit, torch.distributed as dist, gemini_ft\n"
            "atexit.register(lambda: print('left behind:', dist.is_initialized()))\n"  # runs after later handlers
            "gemini_ft.init_process_group('gloo')\n"
        )
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
        done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "left behind: False\n"), done.stderr


def exchange_ranks() -> list[Any]:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    rank = dist.get_rank()
    return [rendezvous.exchange({"rank": rank, "of": round}) for round in range(3)]


def exchange_over_a_group_of_torchs_own() -> list[int]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    return rendezvous.exchange(dist.get_rank()) + rendezvous.exchange(10 * dist.get_rank())


def one_rank_stays_away() -> None:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    rendezvous.exchange("all are here")
    if dist.get_rank() == int(os.environ["ABSENT"]):
        time.sleep(600)
    rendezvous.exchange("who is here?", timeout=1.0)


def one_rank_dies() -> None:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    rendezvous.exchange("all are here")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rendezvous.exchange("who is here?", timeout=5.0)


class TestExchange:
    def test_all_objects_in_rank_order(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        expected = [[{"rank": rank, "of": round} for rank in range(3)] for round in range(3)]
        assert start(exchange_ranks, elastic(store, 3)).results() == [expected] * 3

    def test_over_a_group_of_torchs_own(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        assert start(exchange_over_a_group_of_torchs_own, elastic(store, 2)).results() == [[0, 1, 0, 10]] * 2

    def test_alone(self) -> None:
        thing = object()  # need not even be picklable
        assert rendezvous.exchange(thing) == [thing]

    @pytest.mark.parametrize("absent", [0, 2])
    def test_whoever_does_not_come_is_named_by_all_others(self, absent: int, store: TCPStore, start: Callable[..., Ranks]) -> None:
        environments = [environ | {"ABSENT": str(absent)} for environ in elastic(store, 3)]
        present = [rank for rank in range(3) if rank != absent]
        attempt = start(one_rank_stays_away, environments)
        results = [attempt.result(rank) for rank in present]
        assert all(isinstance(error, PeerError) for error in results), results
        assert {str(error).split(";")[0] for error in results} == {f"rank {absent} of 3 did not answer within 1 s"}

    def test_a_rank_that_dies_is_an_error_on_the_others(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        error = start(one_rank_dies, elastic(store, 2)).result(0)
        assert isinstance(error, PeerError)
        assert "rank 1 of 2 did not answer" in str(error)


class Odd(StateError):
    """A class that other ranks need not have."""


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def fail_as(functions: dict[int, Callable[[], Any]]) -> Any:
    gemini_ft.init_process_group("gloo", timedelta(seconds=30))
    rank = dist.get_rank()
    try:
        return rendezvous.exchange_or_raise(functions.get(rank, lambda: f"value {rank}"))
    except GeminiError as error:
        return type(error), str(error), type(error.__cause__)


def all_succeed() -> Any:
    return fail_as({})


def one_fails() -> Any:
    return fail_as({1: raising(WorldSizeError("made by 4 ranks, not 3"))})


def foreign_error() -> Any:
    return fail_as({2: raising(ValueError("not an error of ours"))})


def several_fail() -> Any:
    return fail_as({0: raising(OSError("disk on fire")), 1: raising(StateError("lost")), 2: raising(StateError("lost"))})


def cannot_travel() -> Any:
    return fail_as({1: lambda: socket.socket()})


def own_subclass() -> Any:
    return fail_as({1: raising(Odd("odd"))})


class TestExchangeOrRaise:
    def test_all_results_in_rank_order(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        assert start(all_succeed, elastic(store, 3)).results() == [["value 0", "value 1", "value 2"]] * 3

    @pytest.mark.parametrize(
        ("function", "kind", "text", "causes"),
        [
            (one_fails, WorldSizeError, "rank 1: made by 4 ranks, not 3", {1: WorldSizeError}),
            (foreign_error, GeminiError, "rank 2: ValueError: not an error of ours", {2: ValueError}),
            (own_subclass, StateError, "rank 1: odd", {1: Odd}),
            (several_fail, GeminiError, "rank 0: OSError: disk on fire; ranks 1, 2: lost", {0: OSError, 1: StateError, 2: StateError}),
        ],
    )
    def test_all_ranks_raise_the_same(
        self,
        function: Callable[[], Any],
        kind: type[GeminiError],
        text: str,
        causes: dict[int, type],
        store: TCPStore,
        start: Callable[..., Ranks],
    ) -> None:
        expected = [(kind, text, causes.get(rank, type(None))) for rank in range(3)]
        assert start(function, elastic(store, 3)).results() == expected

    def test_a_value_that_cannot_travel_is_an_error_everywhere(self, store: TCPStore, start: Callable[..., Ranks]) -> None:
        (kind, text, _), (other_kind, other_text, _) = start(cannot_travel, elastic(store, 2)).results()
        assert kind is other_kind is GeminiError
        assert text == other_text
        assert text.startswith("rank 1: TypeError: cannot pickle 'socket' object")

    def test_alone_the_own_exception_passes(self) -> None:
        with pytest.raises(ValueError, match="as it is"):
            rendezvous.exchange_or_raise(raising(ValueError("as it is")))
        assert rendezvous.exchange_or_raise(lambda: 7) == [7]


class TestStoreThatIsNotThereYet:
    """Torch's client would sleep for as long as three quarters of a second."""

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    def test_the_kernel_says_who_listens(self, family: socket.AddressFamily) -> None:
        with socket.socket(family) as sock, socket.socket(family) as client:
            sock.bind(("", 0))
            port = sock.getsockname()[1]
            assert is_listening(port) is False
            sock.listen()
            assert is_listening(port) is True
            client.connect(sock.getsockname()[:2])
        assert is_listening(port) is False

    def test_a_kernel_that_says_nothing_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError

        monkeypatch.setattr("builtins.open", refuse)
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it was waited for"))
        assert is_listening(1) is None
        await_store({"RANK": "1", "GROUP_RANK": "0", "MASTER_PORT": "1"})

    @pytest.mark.parametrize(
        "environ",
        [{}, {"RANK": "0", "GROUP_RANK": "0"}, {"RANK": "1", "GROUP_RANK": "1"}, {"RANK": "1", "GROUP_RANK": "0", "MASTER_PORT": "x"}],
    )
    def test_those_who_cannot_see_it_or_are_it_do_not_wait(self, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_listener, "is_listening", lambda port: pytest.fail(f"looked for port {port}"))
        await_store({"MASTER_PORT": "1", **environ})

    def test_a_rank_that_the_script_gives_is_not_that_of_the_environment(self, start: Callable[..., Ranks]) -> None:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
        assert start(_alone, [environ]).result(0) == []

    def test_a_store_that_never_comes_is_left_to_torch(self) -> None:
        begin = time.monotonic()
        await_store({"RANK": "1", "GROUP_RANK": "0", "MASTER_PORT": str(free_port())}, seconds=0.3)
        assert time.monotonic() >= begin + 0.3

    def test_a_rank_beside_rank_0_comes_when_it_listens(self, start: Callable[..., Ranks]) -> None:
        port = str(free_port())
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        second = start(_early_or_late, [{**shared, "RANK": "1"}])
        time.sleep(1.0)
        first = start(_early_or_late, [{**shared, "RANK": "0"}])
        assert [first.result(0), second.result(0)] == [None, True]


def _alone() -> list[int]:
    """The ports at which a rank that serves its store itself has looked for one."""
    looked: list[int] = []
    store_listener.is_listening = lambda port: looked.append(port)  # type: ignore[func-returns-value]
    gemini_ft.init_process_group("gloo", rank=0, world_size=1)
    return looked


def _early_or_late() -> bool | None:
    """Whether rank 0's store listened when this rank let torch call it."""
    listened: list[bool | None] = []
    original, port = dist.init_process_group, int(os.environ["MASTER_PORT"])

    def init(*args: Any, **kwargs: Any) -> None:
        listened.append(is_listening(port))
        original(*args, **kwargs)

    dist.init_process_group = init
    gemini_ft.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()  # rank 0's store ends with it, and the other may still be at it
    return listened[0] if os.environ["RANK"] != "0" else None
