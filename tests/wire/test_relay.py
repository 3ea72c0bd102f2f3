"""An attacker between two hosts, or with connections of his own: he learns no message, changes nothing, stops nothing for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_kit import CHUNK, WAIT, Job, Rank, content, eventually, stream_context
from relay import Relay

from gemini_ft.agent.replication.gate import Gate
from gemini_ft.agent.replication.send import PeerLink
from gemini_ft.config import TrafficConfig
from gemini_ft.errors import PeerError
from gemini_ft.recovery import readers
from gemini_ft.recovery.readers import PeerShard
from gemini_ft.wire.lane import ID_BYTES, MARK
from gemini_ft.wire.peer_messages import Claims

SECRET = b"s" * 16  # of the kit's ranks


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def start_behind(job: Job, relay: Relay, ranks: list[Rank]) -> None:
    """Host a reaches host b through the relay only."""
    spec = job.make_spec(ranks, addresses={"a": ranks[0].address, "b": relay.address})
    for rank in ranks:
        rank.open(spec)
        rank.reserve(4 * CHUNK)


def shard(job: Job, address: tuple[str, int], owner: int, iteration: int) -> bytes:
    with contextlib.closing(PeerShard("b", address, job.claims(), SECRET, owner, job.version(iteration), timeout=10.0)) as read:
        return b"".join(bytes(view) for _, view in read.chunks())


def sees(relay: Relay, payload: bytes) -> bool:
    """Whether a part of it has passed in the clear."""
    return any(payload[at : at + 64] in lane for at in range(0, len(payload), CHUNK) for lane in relay.lanes)


class Once:
    """Changes one piece that is long enough, and notes that it did."""

    def __init__(self, at: int = 100) -> None:
        self.done = False
        self._at = at

    def __call__(self, piece: bytearray) -> None:
        if not self.done and len(piece) > self._at:
            piece[self._at] ^= 1
            self.done = True


class Splice:
    """Exchanges the names of the first two lanes, so that each brings its bytes to the other's connection."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._both = threading.Barrier(2)

    def __call__(self, piece: bytearray) -> None:
        if piece.startswith(MARK) and len(self.names) < 2:
            mine = bytes(piece[len(MARK) :][:ID_BYTES])
            self.names.append(mine)
            self._both.wait(WAIT)
            (other,) = [name for name in self.names if name != mine]
            piece[len(MARK) : len(MARK) + ID_BYTES] = other


class TestBetween:
    def test_sees_no_message_and_no_secret(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1, 2)
            control = b"".join(relay.control)
            assert len(control) > 1000
            for word in (SECRET, b"claims", b"chunk", b"incarnation", job.run.encode()):
                assert word not in control

    def test_sees_no_payload_of_a_job_that_came_back_with_encryption(self, job: Job) -> None:
        """Its agents are those of the job before, which had none."""
        before = [job.process("a", 0), job.process("b", 1)]
        job.open(before)
        for rank in before:
            rank.kill()
        ranks = job.join(["a", "b"], encrypt=True)
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1)
            assert relay.lanes
            assert not sees(relay, content(0, 1, 4 * CHUNK))

    def test_sees_no_payload_that_only_its_sender_wants_encrypted(self, job: Job) -> None:
        ranks = [job.rank("a", 0, encrypt=True), job.rank("b", 1, encrypt=False)]
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1)
            assert relay.lanes
            assert not sees(relay, content(0, 1, 4 * CHUNK))

    def test_sees_no_payload_of_a_stream_with_encryption_beside_one_without(self, job: Job) -> None:
        ranks = job.join(["a", "b"], encrypt=True)
        others = job.join(["a", "b"], stream="other")
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1)
            assert not sees(relay, content(0, 1, 4 * CHUNK))
            spec = job.make_spec(others, stream="other", addresses={"a": ranks[0].address, "b": relay.address})
            for rank in others:
                rank.open(spec)
                rank.reserve(4 * CHUNK)
            job.commit(others, 1)
            assert sees(relay, content(0, 1, 4 * CHUNK))

    def test_a_chunk_that_is_rewritten_is_not_taken(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[1].address) as relay:
            relay.on_lane = once = Once()
            start_behind(job, relay, ranks)
            job.commit(ranks, 1, 2)
            assert once.done
            assert "a payload was changed on its way" in job.log("b")
            assert shard(job, ranks[1].address, 0, 2) == content(0, 2, 4 * CHUNK)

    def test_one_of_several_lanes_that_is_cut_costs_a_new_connection(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        lanes, cut = 3, threading.Event()

        def cut_one(piece: bytearray) -> None:
            if len(relay.lanes) >= lanes and not cut.is_set() and not piece.startswith(MARK):
                cut.set()
                raise OSError  # which the relay's thread ends with, and both of its sockets

        with Relay(ranks[1].address) as relay:
            relay.on_lane = cut_one
            spec = job.make_spec(ranks, addresses={"a": ranks[0].address, "b": relay.address}, traffic=TrafficConfig(lanes=lanes))
            for rank in ranks:
                rank.open(spec)
                rank.reserve(4 * CHUNK)
            job.commit(ranks, 1, 2)
            assert cut.is_set()
            assert len(relay.lanes) == 2 * lanes
            assert shard(job, ranks[1].address, 0, 2) == content(0, 2, 4 * CHUNK)

    def test_a_message_that_is_rewritten_ends_the_connection_and_nothing_else(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1)
            relay.on_control = once = Once(at=20)
            relay.cut()
            job.commit(ranks, 2, 3)
            assert once.done

    def test_a_report_to_the_leader_that_is_rewritten_is_repeated(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[0].address) as relay:
            relay.on_control = once = Once(at=20)
            spec = job.make_spec(ranks, addresses={"a": relay.address, "b": ranks[1].address})
            for rank in ranks:
                rank.open(spec)
                rank.reserve(4 * CHUNK)
            job.commit(ranks, 1)
            relay.on_control = again = Once(at=20)
            relay.cut()
            job.commit(ranks, 2, 3)
            assert once.done
            assert again.done

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_reader_takes_nothing_that_was_rewritten(self, threads: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "threads_of_a_reader", lambda: threads)
        ranks = job.start()
        job.commit(ranks, 1)
        with Relay(ranks[1].address) as relay:
            relay.on_lane = Once()
            with pytest.raises(PeerError, match="a payload was changed on its way; something stands between the two hosts"):
                shard(job, relay.address, 0, 1)
            assert shard(job, relay.address, 0, 1) == content(0, 1, 4 * CHUNK)
            assert len(relay.lanes) == 2 * threads

    def test_cuts_in_the_middle_of_a_payload_cost_a_repetition(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[1].address) as relay:
            seen = 0

            def cut(piece: bytearray) -> None:
                nonlocal seen
                seen += len(piece)
                if CHUNK < seen < 10 * CHUNK:
                    seen = 10 * CHUNK
                    relay.cut()

            relay.on_lane = cut
            start_behind(job, relay, ranks)
            job.commit(ranks, 1, 2)
            assert seen > 10 * CHUNK

    def test_two_sessions_that_are_spliced_end_and_begin_anew(self, job: Job) -> None:
        ranks = job.join(["a", "b", "c"])
        with Relay(ranks[1].address) as relay:
            relay.on_lane = splice = Splice()
            addresses = {rank.host: rank.address for rank in ranks} | {"b": relay.address}
            spec = job.make_spec(ranks, addresses=addresses)
            for rank in ranks:
                rank.open(spec)
                rank.reserve(4 * CHUNK)
            job.commit(ranks, 1)
            assert len(splice.names) == 2
            assert "a payload was changed on its way" in job.log("b")  # of the other one too, unless it was cut by the end of the first
            for owner in (0, 2):
                assert shard(job, ranks[1].address, owner, 1) == content(owner, 1, 4 * CHUNK)


class TestOwnConnections:
    def test_a_session_that_was_recorded_and_is_played_again_opens_nothing(self, job: Job) -> None:
        ranks = job.join(["a", "b"])
        with Relay(ranks[1].address) as relay:
            start_behind(job, relay, ranks)
            job.commit(ranks, 1)
            recorded = [bytes(relay.control[0]), bytes(relay.lanes[0])]
        for said in recorded:
            with socket.create_connection(ranks[1].address, WAIT) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                heard = b""
                with contextlib.suppress(OSError):
                    while part := sock.recv(2**16):
                        heard += part
                assert b"accepted" not in heard
        eventually(lambda: "it brings a lane that no connection waits for" in job.log("b"))

    def test_a_dialler_is_not_turned_into_a_witness(self, job: Job) -> None:
        """Reflection: host a is made to talk to itself, or to a host it did not mean."""
        ranks = job.join(["a", "b", "c"])
        with Relay(ranks[2].address) as to_c:  # b's address leads to c, who knows the secret too
            addresses = {"a": ranks[0].address, "b": to_c.address, "c": ranks[2].address}
            holders = {0: ["a", "b"], 1: ["b", "c"], 2: ["c", "a"]}
            spec = job.make_spec(ranks, addresses=addresses, holders=holders, replica_timeout=60.0)
            for rank in ranks:
                rank.open(spec)
                rank.reserve(4 * CHUNK)
            ranks[0].snapshot(1)
            eventually(lambda: "takes this host for 'b', but it is 'c'" in job.log("c"), "the refusal")
            assert not [slot for slot in ranks[2].inventory() if slot.owner == 0]

    def test_a_stranger_cannot_bring_a_lane_for_somebody_elses_connection(self, job: Job) -> None:
        ranks = job.start()
        for lane in (bytes(ID_BYTES), os.urandom(ID_BYTES)):
            with socket.create_connection(ranks[1].address, WAIT) as sock:
                sock.sendall(MARK + lane)
                with contextlib.suppress(OSError):
                    assert sock.recv(1) == b""
        job.commit(ranks, 1)

    def test_a_thousand_half_open_connections_hold_up_nobody(self, job: Job) -> None:
        ranks = job.start()
        strangers = [socket.create_connection(ranks[1].address, WAIT) for _ in range(1000)]
        try:
            job.commit(ranks, 1, 2)
            assert shard(job, ranks[1].address, 0, 2) == content(0, 2, 4 * CHUNK)
        finally:
            for sock in strangers:
                sock.close()


def test_whoever_breaks_every_connection_does_not_fill_the_log() -> None:
    said: list[str] = []

    async def work() -> None:
        traffic = TrafficConfig()
        session = SimpleNamespace(context=stream_context(said.append), traffic=traffic, gate=Gate(traffic), pacing=None)
        claims = Claims(run="run", stream="main", host="a", to="b", role="replicate", incarnation=None)
        link = PeerLink(session, "b", ("127.0.0.1", 1), claims)  # type: ignore[arg-type]
        link.send(SimpleNamespace(cancelled=False))  # type: ignore[arg-type]
        for _ in range(200):
            link.on_lost("the tag is wrong")

    asyncio.run(work())
    assert len(said) == 51
    assert said[-1].startswith("no more of this kind is logged")
