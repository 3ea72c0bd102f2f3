"""Peers that ask for more memory, descriptors and time than are theirs: an agent gives them little, and the others what they need."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from agent_kit import CHUNK, WAIT, Job, Rank, agent_pid, content, eventually, open_fds

from gemini_ft.agent import lifecycle, session
from gemini_ft.agent.session import MOST_OF_A_HOST, Incoming
from gemini_ft.core.protocol import Host
from gemini_ft.recovery.readers import PeerShard
from gemini_ft.wire import frames
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.handshake import STRANGERS
from gemini_ft.wire.messages import MAX_MESSAGE, pack
from gemini_ft.wire.network import FairShare
from gemini_ft.wire.peer_messages import READER_LANES, Claims, Describe, Fetch

SECRET = b"s" * 16  # of the kit's ranks
DESCRIPTORS = 1024  # of agent a
MIB = 2**20


class Attack:
    """A job of two hosts, and one who knows its secret, at an address of his own."""

    def __init__(self, job: Job) -> None:
        self.job, self.next = job, 2
        lifecycle.spawn(job.run, "a")
        self.pid = eventually(lambda: agent_pid(job.run, "a"))
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        self.ranks = job.join(["a", "b"])
        job.open(self.ranks, addresses={rank.host: rank.address for rank in self.ranks} | {"test": ("127.0.0.1", 1)})
        job.commit(self.ranks, 1)
        self.wires: list[BlockingWire] = []

    def dial(self, role: str = "fetch", lanes: int = 1) -> BlockingWire:
        claims = self.job.claims(role, incarnation=self.ranks[0].spec.incarnation, lanes=lanes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frames, "connect", lambda address, timeout: socket.create_connection(address, timeout, ("127.0.0.2", 0)))
            self.wires.append(BlockingWire(self.ranks[0].address, claims, SECRET, WAIT))
        return self.wires[-1]

    def say(self, wire: BlockingWire, data: bytes) -> None:
        wire.socket.sendall(data)

    def end(self) -> None:
        """Hang up; the job has gone on, with the same agent."""
        for wire in self.wires:
            wire.close()
        self.wires.clear()
        self.job.commit(self.ranks, self.next, self.next + 1)
        self.next += 2
        assert self.job.pid("a") == self.pid

    def memory(self, name: str) -> int:
        """MiB of the agent: ``VmRSS`` now, ``VmHWM`` at most so far."""
        return int(Path(f"/proc/{self.pid}/status").read_text().split(f"{name}:")[1].split()[0]) // 1024


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    with Job(tmp_path_factory.mktemp("floods")) as job:
        yield Attack(job)


@pytest.fixture
def attack(attacked: Attack) -> Iterator[Attack]:
    yield attacked
    attacked.end()


@pytest.mark.parametrize("role", ["fetch", "report"])
def test_memory_is_taken_for_bytes_that_have_come_and_not_for_a_length(attack: Attack, role: str) -> None:
    """A megabyte for each of four bytes would be enough to end any host's agent, and the job with it."""
    before = attack.memory("VmRSS")
    for _ in range(MOST_OF_A_HOST):
        attack.say(attack.dial(role), MAX_MESSAGE.to_bytes(4, "big"))
    attack.job.status("a")  # after it has heard these
    assert attack.memory("VmRSS") < before + 20


def hung_up(wire: BlockingWire) -> None:
    """The agent ends a connection."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):  # a reset, or an end without a word
        while wire.socket.recv(2**16):
            pass


def bomb(count: int) -> bytes:
    """A message of a byte for each of ``count`` maps, which take 64 bytes and a reference each."""
    return b"\x82\xa4kind\xa6rejoin\xa5roots\xdd" + count.to_bytes(4, "big") + b"\x80" * count


@pytest.mark.parametrize(
    "body",
    [
        bomb(32 * MIB),
        bomb(2**18),
        msgpack.packb({"kind": "resend", "owner": 0, "iteration": 1, "chunks": [""] * 2**18}),
        msgpack.packb({"kind": "resend", "owner": 0, "iteration": 1, "chunks": [""] * 4 * MIB}),
        msgpack.packb({"kind": "completed"} | {f"field {number}": 1 for number in range(2**17)}),
    ],
    ids=["maps", "fewer maps", "wrong values", "more wrong values", "unknown fields"],
)
def test_a_message_that_unfolds_is_refused_in_little_time_and_memory(attack: Attack, body: bytes) -> None:
    """The error for a list of wrong values alone took longer than a worker waits for its agent."""
    wire, before = attack.dial("report"), attack.memory("VmHWM")
    attack.say(wire, len(body).to_bytes(4, "big") + body)
    hung_up(wire)
    assert attack.memory("VmHWM") < before + len(body) // MIB + 150


@pytest.mark.parametrize("ask", [Describe, lambda **about: Fetch(offset=0, nbytes=4 * CHUNK, **about)], ids=["describe", "fetch"])
def test_a_reader_that_takes_no_answer_in_is_asked_for_no_more_questions(attack: Attack, ask: Callable[..., Describe | Fetch]) -> None:
    wire, questions = attack.dial(), pack(ask(call=1, owner=0, version=attack.job.version(attack.next - 1))) * 1000
    wire.socket.settimeout(2.0)
    with contextlib.suppress(TimeoutError):
        for _ in range(400):
            attack.say(wire, questions)
        pytest.fail("it has heard 400,000 questions")
    assert attack.memory("VmRSS") < 200


def read(attack: Attack, shard: PeerShard) -> None:
    assert b"".join(bytes(view) for _, view in shard.chunks()) == content(0, attack.next - 1, 4 * CHUNK)


def test_readers_without_number_displace_each_other_and_no_reader_of_another_address(attack: Attack) -> None:
    rank: Rank = attack.ranks[0]
    claims, version = attack.job.claims(), attack.job.version(attack.next - 1)
    with contextlib.closing(PeerShard("a", rank.address, claims, SECRET, 0, version, timeout=WAIT)) as shard:
        before = open_fds(attack.pid)
        for _ in range(DESCRIPTORS // 16 + 8):
            attack.dial(lanes=64)
        assert open_fds(attack.pid) <= before + DESCRIPTORS // 16 * (1 + READER_LANES)
        hung_up(attack.wires[0])
        read(attack, shard)
    assert "readers are more than this agent has room for" in attack.job.log("a")


def incoming(monkeypatch: pytest.MonkeyPatch, descriptors: int) -> Incoming:
    """The door of a host that holds two shards of a thousand."""
    monkeypatch.setattr(session, "getrlimit", lambda _: (descriptors, descriptors))
    host = Host(name="a", holders={0: ("a", "b"), 1: ("b", "a"), 2: ("b", "c")})
    context: Any = SimpleNamespace(spec=SimpleNamespace(world_size=1000, replica_timeout=60.0), host=host, log=print)
    return Incoming(SimpleNamespace(context=context, present_session=None), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("descriptors", "kept"), [(resource.RLIM_INFINITY, 2000), (2**20, 2000), (2**14, 2**10), (1, 1)], ids=["any", "many", "few", "one"]
)
def test_all_ranks_of_a_large_job_may_read_from_one_host(descriptors: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def __init__(self, number: int) -> None:
            self.peer = f"10.0.{number // 256}.{number % 256}:1"

        def abort(self, reason: str) -> None:
            cut.append(self)

    async def work() -> None:
        door = incoming(monkeypatch, descriptors)
        claims = Claims(run="r", stream="s", host="t", to="a", role="fetch", incarnation=None)
        for number in range(2100):
            door.accept(Reader(number), claims)  # type: ignore[arg-type]

    cut: list[Reader] = []
    asyncio.run(work())
    assert 2100 - len(cut) == kept


def test_one_ipv4_host_is_one_address_also_where_it_is_mapped_into_ipv6() -> None:
    lost: list[str] = []
    share = FairShare[str](3, lost.append)
    for user, peer in {"one": "::ffff:10.0.0.1:5", "two": "::ffff:10.0.0.2:5", "2": "10.0.0.2:6", "II": "::ffff:10.0.0.2:7"}.items():
        share.take(user, peer)
    assert lost == ["two"]


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    lost: list[str] = []
    share = FairShare[str](2, lost.append)
    for user, peer in {"other": "2001:db8:0:1::1:5", "of it": "2001:db8::1:5", "of it, too": "2001:db8::ffff:2:5"}.items():
        share.take(user, peer)
    assert lost == ["of it"]


def test_reports_without_number_displace_each_other(attack: Attack) -> None:
    for _ in range(MOST_OF_A_HOST + 1):
        attack.dial("report").receive()
    hung_up(attack.wires[0])


def test_strangers_displace_each_other_and_no_host_that_is_slower_than_they_are(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as opened:

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            mine = socket.create_connection(address, timeout)
            strangers = [
                opened.enter_context(socket.create_connection(address, timeout, ("127.0.0.2", 0)))
                for _ in range(STRANGERS + READER_LANES + 1)
            ]
            assert strangers[0].recv(1) == b""  # it has made way for the last one
            return mine

        monkeypatch.setattr(frames, "connect", connect)
        claims, version = attack.job.claims(), attack.job.version(attack.next - 1)
        with contextlib.closing(PeerShard("a", attack.ranks[0].address, claims, SECRET, 0, version, timeout=WAIT)) as shard:
            read(attack, shard)
