"""A real switch: killed and started again while ranks go on, strangers at its port, several jobs at once."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import switch_case
from agent_kit import WAIT, preload
from rank_kit import World
from switch_kit import KEY, Switch, places, switches

from gemini_ft.sync import switch_packets
from gemini_ft.sync.switch_client import Client, SwitchRefusedError, SwitchTerms
from gemini_ft.sync.switch_packets import Array, Envelope, Join, SwitchHello, SwitchLeave, SwitchWelcome
from gemini_ft.sync.switch_server import Jobs, Limits, SwitchServer
from gemini_ft.sync.switchml import SwitchMLStream

preload("switch_case")
TERMS = SwitchTerms(adder="int32", largest=True, slots=8, nbytes=64, patience=WAIT)
MANY_FILES = 1024  # that training has open already


def test_a_killed_switch_is_gone_for_all_ranks_at_once_and_comes_back(tmp_path: Path) -> None:
    """Every step has the sum of all gradients, by the switch or without it, on all ranks the same bits; the log says each change once."""
    with switches() as [first], World(tmp_path, 3) as world:
        attempt = world.start(switch_case.through_a_death, first.place, str(tmp_path))
        switch_case.await_mark(tmp_path, "killed please")
        first.kill()
        switch_case.await_mark(tmp_path, "another please")
        second = Switch(first.port)
        try:
            results = attempt.results()
        finally:
            second.kill()
    for result in results:
        assert isinstance(result, switch_case.Lived), result
        assert (result.wrong, result.ranks_differ) == ([], False)
        assert (result.before, result.after) == (True, True)
    assert [result.log for result in results[1:]] == [[], []], "one rank speaks for all"
    up, down, again = results[0].log
    assert up == again == f"gradients go through switch {first.place}"
    assert down.endswith("all ranks add gradients up without it until it answers")


def test_ddp_trains_to_the_same_bits_on_all_ranks_through_a_switch(tmp_path: Path) -> None:
    """The hook with a scheme for dense buckets: losses fall as DDP's own do, to the error of the integers."""
    with switches() as [switch], World(tmp_path, 2) as world:
        first, second = world.outcome(switch_case.ddp, switch.place)
        assert not isinstance(first, Exception), first
        counts = switch.stop()
    assert first == second
    weights, plain = first
    np.testing.assert_allclose(weights, plain, rtol=1e-4, atol=1e-6)
    assert weights != plain, "went by DDP's all-reduce"
    assert counts["added"] > 0


def test_errors_of_fpisa_are_measured_while_training(tmp_path: Path) -> None:
    """Three of seven sums are compared. In 16 bits, what FPISA-A overwrites is no more than FPISA may lose; in 32 it is."""
    with switches() as [switch], World(tmp_path, 3) as world:
        first, *others = world.outcome(switch_case.fpisa_errors, switch.place)
    assert not isinstance(first, Exception), first
    assert others == [first] * 2
    for (full, reduced, is_right), width in zip(first, (4, 2, 2), strict=True):
        assert is_right
        assert (full.sums, full.values, full.beyond) == (7, 3 * 1408 // width, 0)
        assert 0 < full.mean < full.worst
        assert (reduced.sums, reduced.values, reduced.beyond > 0) == (full.sums, full.values, width == 4)


def test_aggregators_on_the_hosts_of_the_ranks(tmp_path: Path) -> None:
    """OmniReduce's colocated aggregators, each with a third of the slots; when one of them is gone, all do without."""
    secret = tmp_path / "secret"
    secret.write_text("of a run")
    secret.chmod(0o600)
    with World(tmp_path, 3, GEMINI_SECRET_FILE=str(secret)) as world:
        results = world.outcome(switch_case.beside_an_aggregator)
    for result in results:
        assert isinstance(result, switch_case.Colocated), result
        assert (result.wrong, result.used) == ([], (True, False))
    assert min(result.added for result in results[:2]) > 100
    assert results[2].added == 0, "a killed process reports nothing"


def test_a_rank_without_a_socket_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with switches() as [switch], World(tmp_path, 2) as world:
        assert world.outcome(switch_case.without_descriptors, switch.place) == [(True, False)] * 2


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for more descriptors than ``select`` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def one_rank(place: str, packets: Array) -> Array:
    client = Client(place.split(","), KEY, 0, 1, TERMS)
    for part in client.parts:
        plain = part.socket.socket
        part.socket.socket = socket.socket(fileno=fcntl.fcntl(plain.fileno(), fcntl.F_DUPFD, MANY_FILES))
        plain.close()
    try:
        assert client.reaches(WAIT) is None
        client.join(os.urandom(16).hex(), WAIT)
        stream = SwitchMLStream(packets, client.slots, 1)
        client.run(stream)
        return stream.sums
    finally:
        client.close()


def test_several_jobs_at_once_keep_apart_and_leave_nothing(many_files: None) -> None:
    noise = np.random.default_rng(0)
    given = [noise.standard_normal((100, 16)).astype(np.float32) for _ in range(6)]
    found: dict[int, Array] = {}
    with switches(3) as made:

        def run(number: int) -> None:
            found[number] = one_rank(places(made), given[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        reports = [switch.stop() for switch in made]
    for number, packets in enumerate(given):
        np.testing.assert_allclose(found[number], packets, rtol=1e-6, atol=1e-8)
    for report in reports:  # the farewell of a job is a datagram, which may be lost: then its silence ends it
        assert report["jobs"] + report["jobs_over"] == len(given)
        assert report["jobs_over"]
        assert (report["memory"] == 0) == (report["jobs"] == 0)


def test_what_belongs_to_no_job_is_dropped_and_counted() -> None:
    """Garbage, another secret, a packet of nobody, a rank's packet that was changed on the way: the sum is right all the same."""
    packets = np.ones((40, 16), np.float32)
    with switches() as [switch], socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", switch.port))
        stranger.send(os.urandom(100))
        stranger.send(b"")
        stranger.send(Envelope(b"another key").seal(SwitchHello()))
        other = Client([switch.place], b"another key", 0, 1, TERMS)
        assert "has it the same secret" in str(other.reaches(0.3))
        other.close()
        client = Client([switch.place], KEY, 0, 1, TERMS)
        assert client.reaches(WAIT) is None
        client.join(os.urandom(16).hex(), WAIT)
        client.parts[0].socket.socket.send(bytes([1, 0]) + os.urandom(98))  # from the right address
        stream = SwitchMLStream(packets, client.slots, 1)
        client.run(stream)
        np.testing.assert_allclose(stream.sums, packets, rtol=1e-6)
        client.close()
        report = switch.stop()
    assert report["stranger"] == 1
    assert report["forged"] >= 3


def test_a_flood_of_the_smallest_datagrams_does_not_keep_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one fills no room, so that room alone would never end a call."""
    monkeypatch.setattr(switch_packets, "MOST_CALLS", 4)
    bound, stranger = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with bound, stranger:
        bound.bind(("127.0.0.1", 0))
        receiver = switch_packets.Datagrams(bound)
        for text in (*[b""] * 6, b"at last"):
            stranger.sendto(text, bound.getsockname())
        assert receiver.receive() == []
        [(datagrams, _)] = receiver.receive()
        assert bytes(datagrams) == b"at last"


def test_switches_in_another_order_than_their_parts_are_refused() -> None:
    with switches(2) as made:
        client = Client([made[1].place, made[0].place], KEY, 0, 1, TERMS)
        assert client.reaches(WAIT) is None
        with pytest.raises(SwitchRefusedError, match=r"has part 2/2, and is given as 1/2: see --part"):
            client.join(os.urandom(16).hex(), WAIT)
        client.close()


# -- the table of jobs


def join(jobs: Jobs, address: tuple[str, int], now: float = 0.0, cookie: str | None = None, **about: object) -> object:
    welcome = jobs.control(SwitchHello(), address, now)
    assert isinstance(welcome, SwitchWelcome)
    wanted = {"job": "0" * 32, "rank": 0, "world": 2, "adder": "int32", "largest": True, "slots": 8, "nbytes": 64, **about}
    reply = jobs.control(Join.model_validate({"cookie": cookie or welcome.cookie, **wanted}), address, now)
    return reply.kind if reply is not None and reply.kind == "joined" else getattr(reply, "reason", None)


def test_a_job_is_let_in_by_its_terms() -> None:
    jobs = Jobs(b"key", "1" * 32, Limits(memory=10_000, jobs=2, idle=100.0))
    assert join(jobs, ("a", 1)) == "joined"
    assert join(jobs, ("a", 1)) == "joined"  # the answer was lost
    assert "another address" in str(join(jobs, ("b", 1)))
    assert "different things" in str(join(jobs, ("b", 1), rank=1, slots=9))
    assert join(jobs, ("b", 1), rank=1) == "joined"
    assert "rank 2 of 2 workers" in str(join(jobs, ("c", 1), job="2" * 32, rank=2))
    assert "takes up to 64" in str(join(jobs, ("c", 1), job="2" * 32, world=65))
    assert "this switch has int32" in str(join(jobs, ("c", 1), job="2" * 32, adder="int64"))
    assert "needs 16,640 bytes" in str(join(jobs, ("c", 1), job="2" * 32, slots=80))
    assert join(jobs, ("c", 1), cookie="0" * 32, job="2" * 32) is None


def test_a_job_is_heard_of_by_what_is_sealed_only() -> None:
    """Whoever writes the address of a worker that has died on a datagram would keep its job, and its memory, for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        server = SwitchServer(bound, KEY, Limits(jobs=1, idle=100.0))
        assert join(server.jobs, ("a", 1), now=0.0) == "joined"
        server.take([(np.zeros((1, 100), np.uint8), ("a", 1))], 90.0)
        assert server.report()["forged"] == 1
        assert join(server.jobs, ("c", 1), now=110.0, job="3" * 32) == "joined"


def test_a_job_ends_before_its_rounds_come_round_again(tmp_path: Path) -> None:
    """32 bits count the rounds of a slot; the next ones would have nonces that were used. A job with a key of its own follows."""
    with switches() as [switch], World(tmp_path, 2) as world:
        assert world.outcome(switch_case.with_few_rounds, switch.place) == [[]] * 2
        assert switch.stop()["jobs_over"] >= 2


def test_a_key_that_one_rank_cannot_have_is_an_error_on_all(tmp_path: Path) -> None:
    with World(tmp_path, 2) as world:
        first, second = world.outcome(switch_case.without_a_key)
    assert first == second
    for text in first:
        assert "rank 1: switchml has no key: " in text
    assert "it is not here" in first[0]
    assert "it is empty" in first[1]


def test_a_cookie_is_for_one_address_and_a_short_time() -> None:
    jobs = Jobs(b"key", "1" * 32, Limits())
    welcome = jobs.control(SwitchHello(), ("a", 1), 0.0)
    assert isinstance(welcome, SwitchWelcome)
    assert join(jobs, ("b", 1), cookie=welcome.cookie) is None
    assert join(jobs, ("a", 1), now=500.0, cookie=welcome.cookie) is None
    assert join(jobs, ("a", 1), now=59.0, cookie=welcome.cookie) == "joined"


def test_a_silent_job_makes_room_and_a_busy_one_does_not() -> None:
    jobs = Jobs(b"key", "1" * 32, Limits(jobs=2, idle=100.0))
    assert join(jobs, ("a", 1), now=0.0) == "joined"
    assert join(jobs, ("b", 1), now=0.0, job="2" * 32) == "joined"
    assert "takes 2 jobs" in str(join(jobs, ("c", 1), now=90.0, job="3" * 32))
    found = jobs.find(("a", 1))
    assert found is not None
    found[0].heard = 90.0
    assert join(jobs, ("c", 1), now=110.0, job="3" * 32) == "joined"
    assert jobs.find(("b", 1)) is None
    assert jobs.find(("a", 1)) is not None
    jobs.control(SwitchLeave(job="0" * 32), ("a", 1), 110.0)
    assert jobs.find(("a", 1)) is None


# -- the command


def test_the_command_serves_until_it_is_stopped_and_reports(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of a run")
    secret.chmod(0o600)
    command = [sys.executable, "-m", "gemini_ft.cli.main", "switch", "--host", "127.0.0.1", "--port", "0", "--part", "2/3"]
    environ = {**os.environ, "GEMINI_SECRET_FILE": str(secret)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("switch ready on 127.0.0.1:")
        assert line.endswith("part 2 of 3\n")
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE)[0] <= 1  # no core has the key in it
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    assert json.loads(out)["jobs"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--part", "3/2"], "--part 3/2: must be K/N"),
        (["--port", "99999"], "the largest port is 65535"),
        (["--port", "0"], "give it and them the same GEMINI_SECRET_FILE"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gemini_ft.cli.main import main

    assert main(["switch", *arguments]) == 2
    assert words in capsys.readouterr().err
