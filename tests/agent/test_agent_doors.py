"""An agent's two doors, the Unix socket and the TCP port, and when it leaves: strangers, rubbish, and the end of the job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgpack
import pytest
from agent_kit import WAIT, Job, Rank, end_agent, eventually, open_fds, stopped, versions
from disks import small_disk

from gemini_ft.agent import lifecycle, watchdog
from gemini_ft.agent.departure import Departure, Launches
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import (
    AgentError,
    AgentTimeoutError,
    ConfigError,
    GeminiError,
    MemoryBudgetError,
    PeerError,
    ProtocolError,
    SecretError,
)
from gemini_ft.wire.frames import BlockingWire
from gemini_ft.wire.messages import MAX_MESSAGE, PROTOCOL_VERSION, Failed, Notice, pack
from gemini_ft.wire.peer_messages import Heartbeat, Rejoin, WayUp
from gemini_ft.wire.trust import tls_context
from gemini_ft.wire.worker_messages import AskDrain, Draining, GetInventory, Goodbye, Hello, Launch, Left, Request

SECRET = b"s" * 16  # of the kit's ranks


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def said(sock: socket.socket) -> bytes:
    """Everything the other side says until it hangs up."""
    sock.settimeout(WAIT)
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def frame(content: object) -> bytes:
    body = msgpack.packb(content)
    return len(body).to_bytes(4, "big") + body


RUBBISH = [
    b"\x00\x00\x00\x20" + bytes(range(32)),
    b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
    (MAX_MESSAGE + 1).to_bytes(4, "big"),
    bytes(4),
    frame({"kind": "self_destruct"}),
    frame({"kind": "get_status", "also": 1}),
    frame([]),
    frame({"kind": "verify", "version": [[1, "x"], "one"]}),
]


class TestUnixSocket:
    def test_rubbish_ends_the_connection_and_nothing_else(self, job: Job) -> None:
        (rank,) = job.start("a")
        for data in RUBBISH:
            sock = lifecycle.try_connect(job.run, "a")
            assert sock is not None
            with sock:
                sock.sendall(data)
                assert said(sock) == b""
        job.commit([rank], 1, 2)

    def test_a_user_of_another_uid_is_turned_away(self, job: Job) -> None:
        job.rank("a", 0)
        name = lifecycle.socket_name(job.run, "a")
        if os.getuid() != 0:
            pytest.skip("needs another user: run as root, who can become one")
        stranger = f"""
import os, socket
os.setgid(65534), os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect({name!r})
try:
    sock.sendall({pack(Hello(run=job.run, stream="main", rank=0, secret=SECRET, bind="127.0.0.1", linger=1.0))!r})
    answer = sock.recv(100)
except ConnectionError:
    answer = b""
print(answer)
"""
        done = subprocess.run([sys.executable, "-c", stranger], capture_output=True, text=True, timeout=WAIT)
        assert (done.stdout, done.stderr) == ("b''\n", "")
        assert "of uid 65534: this agent serves uid 0 only" in job.log("a")

    def test_a_worker_of_another_version_is_told_so(self, job: Job) -> None:
        with pytest.raises(
            ProtocolError, match=rf"this agent speaks protocol {PROTOCOL_VERSION}, the worker 0: .* or end the agent: `gemini leave"
        ):
            job.rank("a", 0, protocol=0)

    def test_nothing_is_answered_before_hello(self, job: Job) -> None:
        job.rank("a", 0)
        answer = lifecycle.ask(job.run, "a", GetInventory())
        assert isinstance(answer, Failed)
        assert answer.text == "'get_inventory' before hello"

    def test_a_worker_that_has_not_opened_an_incarnation_gets_no_slot(self, job: Job) -> None:
        rank = job.rank("a", 0)
        rank.client.tell(Request(iteration=1))
        failed = rank.wait_for("failed")
        assert (failed.error, failed.fatal) == ("SupersededError", True)

    def test_a_second_secret_is_refused(self, job: Job) -> None:
        job.rank("a", 0)
        with pytest.raises(SecretError, match=r"has secret [0-9a-f]{16}, rank 1 brings [0-9a-f]{16}; give all workers of a run the same"):
            job.rank("a", 1, secret=b"t" * 16)

    def test_too_little_memory_is_said_with_what_is_needed_and_what_is_allowed(self, job: Job) -> None:
        (rank,) = job.join(["a"], memory_limit=2**23)
        rank.open(job.make_spec([rank]))
        numbers = (
            r"rank 0's shard \(2 slots of [0-9,]+ bytes\) needs [0-9,]+ bytes; this host's agent may hold 8,388,608 .* Raise memory_limit"
        )
        with pytest.raises(MemoryBudgetError, match=numbers):
            rank.reserve(2**24)
        rank.reserve(2**20)
        job.commit([rank], 1)

    def test_a_peer_with_too_little_memory_stops_the_job(self, job: Job) -> None:
        ranks = [job.rank("a", 0), job.rank("b", 1, memory_limit=2**23)]
        spec = job.make_spec(ranks)
        for rank in ranks:
            rank.open(spec)
        ranks[0].reserve(2**21)
        ranks[1].reserve(2**10)
        ranks[0].snapshot(1)
        failed = ranks[0].wait_for("failed")
        assert (failed.error, failed.fatal) == ("MemoryBudgetError", True)
        assert failed.text.startswith("host b: rank 0's shard")

    def test_an_agent_that_hangs_is_given_up_after_the_timeout(self, job: Job) -> None:
        rank = job.rank("a", 0, timeout=1.0)
        with stopped(job.pid("a")):
            with pytest.raises(AgentTimeoutError, match="did not answer 'get_inventory' within 1 s"):
                rank.inventory()
            with pytest.raises(AgentError, match=r"is gone \(it took nothing in for 1 s\)"):
                all(rank.progress(iteration) is None for iteration in range(100_000))
            with pytest.raises(AgentError, match="its connection is closed"):
                rank.progress(1)


def receive_all(wire: BlockingWire) -> None:
    """Takes signs of life and the answer to a reporting host, until the other end hangs up."""
    while isinstance(wire.receive(), WayUp | Heartbeat):
        pass


class TestTcpPort:
    @staticmethod
    def with_another_member(job: Job) -> list[Rank]:
        """Two ranks, and a host "test" of theirs that has none; the first iteration is committed."""
        ranks = job.join(["a", "b"])
        job.open(ranks, addresses={rank.host: rank.address for rank in ranks} | {"test": ("127.0.0.1", 1)})
        job.commit(ranks, 1)
        return ranks

    def test_rubbish_ends_the_connection_and_nothing_else(self, job: Job) -> None:
        ranks = job.start()
        for data in RUBBISH:
            with socket.create_connection(ranks[1].address, WAIT) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                assert said(sock)[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
        context = tls_context(SECRET, server=False)
        for data in [
            *RUBBISH,
            (2**16 + 1).to_bytes(4, "big"),
        ]:  # of one who knows the secret; the last: too much at once
            with socket.create_connection(ranks[1].address, WAIT) as plain, context.wrap_socket(plain) as sock:
                sock.sendall(data)
                assert said(sock) == b""
        job.commit(ranks, 1, 2)

    def test_a_host_that_dials_again_hangs_up_what_it_dialled_before(self, job: Job) -> None:
        ranks = self.with_another_member(job)
        claims = job.claims("replicate", to="b", incarnation=ranks[0].spec.incarnation)
        first, second = (BlockingWire(ranks[1].address, claims, SECRET, WAIT) for _ in range(2))
        with contextlib.closing(first), contextlib.closing(second), pytest.raises(PeerError) as caught:
            first.receive()
        assert "timed out" not in str(caught.value)
        job.commit(ranks, 1, 2)

    def test_a_member_that_takes_another_hosts_name_is_refused_and_cuts_nothing_off(self, job: Job) -> None:
        """It knows the secret, and the host is connected."""
        ranks = job.start()
        job.commit(ranks, 1)
        for role, name, to in (("report", "b", "a"), ("replicate", "b", "a"), ("replicate", "a", "b")):
            claims = job.claims(role, host=name, to=to, incarnation=ranks[0].spec.incarnation)
            for _ in range(3):
                with pytest.raises(PeerError, match=f"another process is known here as host '{name}'"):
                    BlockingWire(ranks["ab".index(to)].address, claims, SECRET, WAIT)
        job.commit(ranks, 2)
        assert "has dialled again" not in job.log("a") + job.log("b")
        assert "the peer closed the connection" not in job.log("b")
        assert job.log("b").count("made sure that this host is at its address, and hung up") == 1

    def test_a_member_that_took_another_hosts_name_before_that_host_came_is_put_out(self, job: Job) -> None:
        """The host is called back at its address; the other may come again as often as it likes. What it has said is forgotten."""
        ranks = job.join(["a", "b"])
        spec = job.make_spec(ranks)
        ranks[0].open(spec)
        claims = job.claims("report", host="b", incarnation=spec.incarnation)
        wire = BlockingWire(ranks[0].address, claims, SECRET, WAIT)
        wire.send(Rejoin(attempt=2**63 - 1, committed=None, uploading=None))  # after which no other greeting of the host would count
        ranks[1].open(spec)
        with contextlib.closing(wire), pytest.raises(PeerError, match=r"closed the connection|stopped answering"):
            receive_all(wire)
        with pytest.raises(PeerError, match="another process is known here as host 'b'"):
            BlockingWire(ranks[0].address, claims, SECRET, WAIT)
        for rank in ranks:
            rank.reserve()
        job.commit(ranks, 1, 2)
        ranks[1].close()
        end_agent(job.run, "b")
        job.open([ranks[0], job.rank("b", 1)])  # its next agent has another certificate
        assert "a process that is not at its address has called itself host 'b'" in job.log("a")

    def test_a_stranger_without_the_secret_gets_nothing(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)
        for role in ("fetch", "replicate", "report"):
            claims = job.claims(role, incarnation=ranks[0].spec.incarnation)
            with pytest.raises(SecretError, match="does not know this run's secret; something else listens at its address"):
                BlockingWire(ranks[0].address, claims, b"guessed", 10.0)
        eventually(lambda: "does not know this run's secret" in job.log("a"))
        assert SECRET.decode() not in job.log("a")

    def test_a_stranger_who_checks_nothing_gets_no_further(self, job: Job) -> None:
        """The listening side asks for a certificate of its own accord."""
        ranks = job.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(ranks[0].address, WAIT) as plain, context.wrap_socket(plain) as sock:
            sock.sendall(pack(job.claims()))
            with contextlib.suppress(ssl.SSLError):  # an alert, or only the end
                assert sock.recv(1) == b""
        eventually(lambda: "refused 127.0.0.1" in job.log("a"))

    def test_strangers_do_not_fill_the_disk(self, job: Job) -> None:
        rank = job.rank("a", 0)
        for _ in range(300):
            with socket.create_connection(rank.address, WAIT) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        eventually(lambda: "no more of this kind is logged" in job.log("a"))
        assert job.log("a").count("refused") < 100

    def test_a_host_that_was_not_meant_refuses(self, job: Job) -> None:
        ranks = job.start()
        for meant in ("b", ""):
            with pytest.raises(PeerError, match=f"host 'test' takes this host for '{meant}', but it is 'a'; two hosts share an address"):
                BlockingWire(ranks[0].address, job.claims(to=meant), SECRET, 10.0)

    def test_a_host_of_another_incarnation_or_of_none_is_refused_by_name(self, job: Job) -> None:
        ranks = job.start()
        with pytest.raises(PeerError, match="host 'test' speaks for incarnation None, this host is at 1-nonce1"):
            BlockingWire(ranks[0].address, job.claims("replicate"), SECRET, 10.0)
        for role in ("report", "replicate"):
            with pytest.raises(PeerError, match="host 'test' has no part in incarnation 1-nonce1"):
                BlockingWire(ranks[0].address, job.claims(role, incarnation=ranks[0].spec.incarnation), SECRET, 10.0)

    def test_another_run_or_stream_is_refused_by_name(self, job: Job) -> None:
        ranks = job.start()
        for fields in ({"run": "other"}, {"stream": "other"}):
            with pytest.raises(PeerError, match=f"this agent serves '{job.run}'"):
                BlockingWire(ranks[0].address, job.claims(**fields), SECRET, 10.0)

    def test_only_the_leader_takes_reports(self, job: Job) -> None:
        ranks = self.with_another_member(job)
        wire = BlockingWire(ranks[1].address, job.claims("report", to="b", incarnation=ranks[1].spec.incarnation), SECRET, 10.0)
        assert wire.receive() == WayUp(is_open=False, epoch=0)
        wire.send(Rejoin(committed=None, uploading=None))
        with pytest.raises(PeerError, match=r"closed the connection|stopped answering"):
            wire.receive()
        wire.close()

    def test_a_member_that_claims_a_commit_that_cannot_be_is_not_believed(self, job: Job) -> None:
        """A committed version is whole in the leader's own memory, too. If it believed the claim, nothing would be committed any more."""
        ranks = self.with_another_member(job)
        wire = BlockingWire(ranks[0].address, job.claims("report", incarnation=ranks[0].spec.incarnation), SECRET, 10.0)
        for attempt, claimed in enumerate([job.version(10**6), Version(Incarnation(10**15, "n"), 1)], start=1):
            wire.send(Rejoin(committed=claimed, uploading=None, attempt=attempt))
        job.commit(ranks, 2)
        assert job.stream("a")["committed"] == 2
        wire.close()

    def test_a_host_that_the_leader_cannot_be_asked_to_drain_is_not_said_to_be_drained(self, job: Job) -> None:
        ranks = job.start()
        job.commit(ranks, 1)  # so that host b reaches the leader
        answer = lifecycle.ask(job.run, "b", AskDrain(host="a"))
        assert isinstance(answer, Draining)
        assert answer.relayed
        ranks[0].close()
        os.kill(job.pid("a"), signal.SIGKILL)
        eventually(lambda: isinstance(lifecycle.ask(job.run, "b", AskDrain(host="a")), Failed), "the end of the connection")
        refused = lifecycle.ask(job.run, "b", AskDrain(host="a"))
        assert isinstance(refused, Failed)
        assert "host 'a', which leads the run, cannot be reached from here now" in refused.text

    def test_a_peer_that_says_what_it_must_not_is_hung_up_on(self, job: Job) -> None:
        ranks = self.with_another_member(job)
        for role in ("fetch", "replicate", "report"):
            wire = BlockingWire(ranks[0].address, job.claims(role, incarnation=ranks[0].spec.incarnation), SECRET, 10.0)
            wire.send(GetInventory())
            with pytest.raises(PeerError, match=r"closed the connection|stopped answering"):
                receive_all(wire)
            wire.close()
        job.commit(ranks, 2)

    def test_a_run_on_the_ipv6_loopback(self, job: Job) -> None:
        ranks = job.start(hello={"bind": "::1"})
        assert all(":" in rank.address[0] for rank in ranks)
        job.commit(ranks, 1, 2)

    def test_a_port_range_is_kept_to_and_its_end_is_said(self, job: Job) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"port_range=\({port}, {port}\): no port of it can be listened on .*in use"):
                job.rank("a", 0, ports=(port, port))
        rank = job.rank("a", 0, ports=(port, port))
        assert rank.address == ("127.0.0.1", port)


class TestLeaving:
    @pytest.mark.parametrize("overtakes", [False, True], ids=["in order", "the word of the end overtakes that of the work"])
    def test_after_all_ranks_have_finished(self, job: Job, overtakes: bool) -> None:
        """A worker says that its work is done, and that its process ends well, on two connections."""
        ranks = [job.process("a", 0), job.process("b", 1)]
        job.open(ranks)
        job.commit(ranks, 1)
        for rank in ranks:
            for say in (rank.end_well, rank.goodbye) if overtakes else (rank.goodbye, rank.end_well):
                assert all(job.pid(host) for host in "ab")
                say()
            rank.kill()
        job.gone("a", "b")

    def test_at_once_when_the_user_interrupts(self, job: Job) -> None:
        rank = job.rank("a", 0)
        rank.goodbye(finished=False)
        job.gone("a")

    def test_not_before_the_other_workers_have_ended_too(self, job: Job) -> None:
        """One that still lives would start another agent, give it the memory back, and leave it behind."""
        ranks = [job.process("a", 0), job.process("a", 1)]
        job.open(ranks)
        ranks[0].goodbye(finished=False)
        ranks[0].kill()
        eventually(lambda: list(job.status("a")["workers"]) == ["1"], "the death of the first")
        ranks[1].kill()
        job.gone("a")

    def test_not_before_the_last_worker_that_was_not_interrupted_is_gone(self) -> None:
        interrupted, last = (Mock(WorkerConnection, rank=rank, alive=True) for rank in range(2))
        workers = {interrupted, last}
        departure = Departure({}, workers, Launches())
        departure.interrupt(interrupted)
        workers.remove(interrupted)
        assert not departure.is_due()
        workers.remove(last)
        assert departure.is_due()

    @pytest.mark.parametrize("stores", [True, False], ids=["with storage", "without"])
    def test_a_launcher_that_has_waited_in_vain_for_the_last_upload_hears_that_it_is_not_known(self, stores: bool) -> None:
        stream = Mock(Stream, finishing=True, finished=False, unstored="", uploading=False, patience=0.0, stores=stores)
        departure, asker = Departure({"main": stream}, set(), Launches()), Mock(WorkerConnection, pid=1)
        departure.ask(asker, finished=True)
        assert not departure.is_due(), "the word may still come"
        departure.tell_askers()
        expected = "the leader's word on the last upload has not come; whether it has been stored is not known"
        asker.send.assert_called_once_with(Left(unstored=expected if stores else ""))

    def test_not_before_each_launcher_that_lives_has_asked_how_the_last_upload_has_ended(self) -> None:
        """Its absence would be taken for good news, or for bad; launchers wait for each other at the end of a job."""
        stream = Mock(Stream, finished=True, finishing=False, unstored="", uploading=False, patience=0.0, stores=True)
        launches = Mock(Launches)
        launches.alive.return_value = [Mock(Launch, pid=1, is_of_run=True), Mock(Launch, pid=2, is_of_run=True)]
        departure = Departure({"main": stream}, set(), launches)
        departure.linger = 0.0
        assert not departure.is_due()
        departure.ask(Mock(WorkerConnection, pid=1), finished=True)
        assert not departure.is_due()
        departure.ask(Mock(WorkerConnection, pid=2), finished=True)
        assert departure.is_due()
        told_by_the_user = Departure({"main": stream}, set(), launches)
        told_by_the_user.ask(Mock(WorkerConnection, pid=3), finished=False)
        assert told_by_the_user.is_due()
        launches.alive.return_value = [Mock(Launch, pid=1, is_of_run=False)]
        assert Departure({"main": stream}, set(), launches).is_due(), "torchrun will not ask"

    def test_what_a_worker_said_last_counts_also_if_it_is_told_something_before_that_is_read(self) -> None:
        """Its goodbye would be lost, and the agent of a job that has ended well would stay, with a state that the next job would resume."""
        heard = list[object]()
        office = Mock(on_worker_message=lambda _, message, __: heard.append(message))

        async def talk() -> None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.setblocking(False)
            worker = WorkerConnection(office, ours, os.getpid())
            worker.send(Notice(text="of the last step, which the worker does not read"))
            theirs.sendall(pack(Goodbye(finished=True)))
            theirs.close()
            worker.send(Notice(text="of the last copy"))  # while the loop does something else than to read
            await asyncio.sleep(0.01)
            worker.close()

        asyncio.run(talk())
        assert heard == [Goodbye(finished=True)]
        office.on_worker_hung_up.assert_called_once()

    def test_when_it_is_told_to(self, job: Job) -> None:
        job.rank("a", 0)
        lifecycle.leave(job.run, "a")
        job.gone("a")

    def test_not_while_a_crashed_job_may_come_back(self, job: Job) -> None:
        victim = job.process("a", 0)
        job.open([victim])
        job.commit([victim], 1, 2)
        pid = job.pid("a")
        victim.kill()
        rank = job.rank("a", 0)
        assert job.pid("a") == pid
        assert versions(rank.inventory()) == {(0, 1), (0, 2)}

    def test_when_a_crashed_job_has_not_come_back_for_long_enough(self, job: Job) -> None:
        victim = job.process("a", 0, linger=0.3)
        job.open([victim])
        job.commit([victim], 1)
        victim.kill()
        job.gone("a")

    def test_when_linger_is_over_and_the_disk_under_its_memory_is_full(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its workers were served as far as that goes: it knows how long they want it to stay."""
        with small_disk(tmp_path / "memory", "1m") as disk:
            monkeypatch.setenv("GEMINI_MEMORY__FOLDER", str(disk))
            victim = job.process("a", 0, linger=0.3)
            with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            with pytest.raises(GeminiError, match=r"No space left|no room|bytes"):
                job.open([victim])
            victim.kill()
            job.gone("a")

    def test_when_linger_is_over_although_no_worker_has_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that is started in place of another whose workers have gone, by a service manager for example.

        But not before a worker that has started it can have come: the memory that it has inherited would go with it.
        """
        monkeypatch.setenv("GEMINI_LINGER", "0")
        departure = Departure({}, set(), Launches())
        departure.idle_since -= watchdog.START_TIMEOUT - 5
        assert not departure.is_due()
        departure.idle_since -= 10
        assert departure.is_due()
        monkeypatch.setenv("GEMINI_LINGER", "100")
        departure = Departure({}, set(), Launches())
        departure.idle_since -= 90
        assert not departure.is_due()
        departure.stay(0.0)
        assert departure.is_due()

    def test_of_the_leader_that_was_restarted_when_one_of_its_ranks_had_gone(self, job: Job) -> None:
        """The other hosts know that this rank has finished, and tell the next leader."""
        first, second, third = ranks = [job.process(host, rank) for rank, host in enumerate("aab")]
        job.open(ranks)
        job.commit(ranks, 1)
        first.goodbye()
        first.end_well()
        first.kill()
        end_agent(job.run, "a")
        second.reconnect(job.version(1))
        for rank in (second, third):
            rank.goodbye()
            rank.end_well()
            rank.kill()
        job.gone("a", "b")

    def test_on_sigterm(self, job: Job) -> None:
        job.rank("a", 0)
        os.kill(job.pid("a"), signal.SIGTERM)
        job.gone("a")

    def test_on_sigterm_when_the_file_of_its_options_has_been_spoilt_since(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = tmp_path / "gemini.yaml"
        options.write_text("drain_signal: SIGUSR1\n")
        monkeypatch.setenv("GEMINI_CONFIG", str(options))
        job.rank("a", 0)
        options.write_text("drain_signal: [\n")
        os.kill(job.pid("a"), signal.SIGTERM)
        job.gone("a")


class TestDescriptors:
    def test_do_not_pile_up_over_many_sessions(self, job: Job) -> None:
        def session(resumed: int | None) -> None:
            ranks = [job.process("a", 0), job.process("b", 1)]
            version = job.version(resumed) if resumed else None
            sources = {0: ["a", "b"], 1: ["a", "b"]} if resumed else {}
            job.open(ranks, resumed=version, sources=sources)
            first = (resumed or 0) + 1
            job.commit(ranks, first, first + 1)
            for rank in ranks:
                rank.kill()

        def settled() -> list[int]:
            eventually(lambda: all(not job.status(host)["workers"] for host in "ab"), "the death of the workers")
            return [open_fds(job.pid(host)) for host in "ab"]

        session(None)
        session(2)
        before = settled()
        for number in range(2, 12):
            session(2 * number)
        grown = [now - then for now, then in zip(settled(), before, strict=True)]
        assert max(grown) < 5, f"{grown} more descriptors after 10 more sessions"  # a connection or two may be in between
