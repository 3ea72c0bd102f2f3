"""Too little of something: memory, descriptors, disk, and slots that a reader does not let go of. It ends in an error or a retry."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from agent_kit import CHUNK, Job, agent_pid, eventually, slot_store, slots_of_this_process

from gemini_ft.agent import lifecycle
from gemini_ft.agent.memory.budget import Budget
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.memory.slot_store import SlotStore
from gemini_ft.agent.replication.serve import Fetcher
from gemini_ft.agent.workers import WorkerConnection, WorkerListener
from gemini_ft.core.decisions import Commit
from gemini_ft.core.protocol import Host
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import AgentError, MemoryBudgetError
from gemini_ft.events import EventLog, read_events
from gemini_ft.launch import launcher
from gemini_ft.state.copy_plan import map_slots
from gemini_ft.wire.frames import BlockingWire, receive_fds
from gemini_ft.wire.handshake import Listener
from gemini_ft.wire.messages import Failed, pack
from gemini_ft.wire.peer_messages import Describe, Description, Fetch, Heartbeat, Rejoin, WayUp
from gemini_ft.wire.worker_messages import GetInventory, Inventory, Reserved
from gemini_ft.worker.outcomes import Stats

SECRET = b"s" * 16


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def shape(owner: int = 0, extras: int = 4096) -> SlotShape:
    return SlotShape(
        run="run",
        stream="main",
        owner=owner,
        world_size=1,
        layout_hash="hash",
        layout=b"layout",
        data_bytes=2**16,
        extras_capacity=extras,
        chunk_bytes=CHUNK,
    )


def vault(limit: int) -> tuple[SlotStore, list[str]]:
    said: list[str] = []
    return slot_store(Host(name="a", holders={0: ("a",)}), Budget(limit), said.append), said


def settled_descriptors(pid: int) -> int:
    """How many descriptors a process has when none has come or gone for a while."""
    counts = [0]

    def settled() -> bool:
        time.sleep(0.05)
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        return len(counts) > 5 and len(set(counts[-5:])) == 1

    eventually(settled, "a constant number of descriptors")
    return counts[-1]


class TestMemory:
    def test_extras_that_grow_make_room_before_they_take_it(self, job: Job) -> None:
        """There is room for two slots of either size, and not for four."""
        (rank,) = job.start("a", hello={"memory_limit": 2 * 2**22})
        job.commit([rank], 1, 2)
        rank.reserve(extras_capacity=2**20)  # one slot of the new size beside the committed one
        assert len(rank.fds) == 1
        assert "Continuing with one slot less" in job.log("a")
        job.commit([rank], 3)
        rank.wait_for("room")
        rank.reserve(extras_capacity=2**20)
        assert len(rank.fds) == 2
        job.commit([rank], 4, 5, 6)
        used = job.status("a")["memory"]["used"]
        assert used == 2 * os.fstat(rank.fds[0]).st_size

    def test_a_slot_for_which_there_was_no_room_is_made_at_the_next_commit_for_which_there_is(self, job: Job, tmp_path: Path) -> None:
        storage = {"url": (tmp_path / "storage").as_uri(), "every_steps": 1000}
        (rank,) = job.start("a", hello={"memory_limit": 5 * 2**20}, storage=storage)
        job.commit([rank], 1)
        assert (len(rank.fds), rank.heard("room")) == (2, False)  # three are due where there is a storage
        job.rank("a", 0, memory_limit=2**30)
        job.commit([rank], 2, 3, 4)
        rank.wait_for("room")
        rank.reserve()
        assert len(rank.fds) == 3

    def test_room_that_other_processes_leave_for_a_moment_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two owners lack a slot each; at last there is room for one of them, with as much to spare."""
        size = shape().total
        host, budget = Host(name="a", holders={0: ("a",), 1: ("a",)}), Budget(0)
        store = slot_store(host, budget)
        for owner in range(2):
            budget.limit += 2 * size
            assert len(store.ensure(owner, shape(owner), 3, reuse=True)) == 2
        budget.limit = 100 * size
        left = 0
        monkeypatch.setattr("gemini_ft.agent.memory.slot_store.available_memory", lambda: left)

        def found(*lefts: int) -> list[list[int]]:
            nonlocal left
            rooms = []
            for each in lefts:
                left = each
                rooms.append(store.lastingly_short({0, 1}))
            return rooms

        assert found(9 * size, 0, 9 * size, 9 * size, size) == [[]] * 5
        assert found(2 * size, 2 * size, 2 * size, 2 * size) == [[], [], [0], []]
        left = size
        assert store.short() == [0]
        left = 2 * size
        assert (store.short(), store.short({1})) == ([0, 1], [1])

    def test_what_would_never_fit_is_refused_with_numbers(self, job: Job) -> None:
        (rank,) = job.start("a", hello={"memory_limit": 2 * 2**22})
        job.commit([rank], 1)
        with pytest.raises(
            MemoryBudgetError, match=r"2 slots of [0-9,]+ bytes\) needs [0-9,]+ bytes; this host's agent may hold 8,388,608"
        ):
            rank.reserve(extras_capacity=2**23)
        assert [slot.version.iteration for slot in rank.inventory()] == [1]

    def test_a_restarted_agent_counts_what_it_takes_back_as_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is available when it starts, because the slots that it is about to take back fill the host."""
        version = Version(Incarnation(1, "nonce"), 7)
        left = SlotMemory.create(shape())
        for index, (offset, nbytes) in enumerate(left.cuts(0)):
            left.put_chunk(index, offset, nbytes, 0)
        assert left.finish(version, 0, None)
        with monkeypatch.context() as full:
            full.setattr("gemini_ft.agent.memory.budget.available_memory", lambda: 0)
            place = slot_store(Host(name="a", holders={0: ("a",)}), budget := Budget(None))
            assert budget.limit == 0
            place.adopt(SlotMemory.adopt(os.dup(left.fd)))
        assert [info.version for info in place.inventory()] == [version]
        assert (budget.used, budget.limit) == (left.shape.total, int(0.6 * left.shape.total))
        stated = Budget(1)
        stated.take_over(left.shape.total)
        assert stated.limit == 1
        left.close()

    @pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
    def test_what_the_kernel_refuses_leaves_no_slot_without_memory(self, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
        host, budget = Host(name="a", holders={0: ("a",)}), Budget(2**30)
        place = slot_store(host, budget, pytest.fail)
        calls = 0
        genuine = getattr(os, call)

        def scarce(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:  # the first slot is made, the second is not
                raise OSError(number, os.strerror(number))
            return genuine(*args)

        slots = slots_of_this_process()
        monkeypatch.setattr(os, call, scarce)
        with pytest.raises(MemoryBudgetError, match="the kernel gives no memory or descriptor"):
            place.ensure(0, shape(), 2, reuse=True)
        assert slots_of_this_process() <= slots
        assert (budget.used, place.memory, host.slots(0).slots) == (0, {}, {})
        assert len(place.ensure(0, shape(), 2, reuse=True)) == len(place.memory) == 2  # as soon as there is some

    def test_a_worker_that_cannot_map_its_slots_says_so_and_keeps_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slots = [SlotMemory.create(shape()) for _ in range(2)]
        reserved = Reserved(layout_hash="hash", slots=[0, 1], data_offset=slots[0].shape.data_offset, capacity=slots[0].shape.capacity)
        kept = slots_of_this_process()
        handed = [os.dup(slot.fd) for slot in slots]
        genuine, calls = mmap.mmap, iter([True, False])

        def scarce(*args: Any) -> mmap.mmap:
            if next(calls):  # the first slot can be mapped, the second cannot
                return genuine(*args)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        with monkeypatch.context() as full:
            full.setattr(mmap, "mmap", scarce)
            with pytest.raises(MemoryBudgetError, match="this worker cannot map 2 slots"):
                map_slots(handed, reserved, None)
        assert slots_of_this_process() <= kept
        for slot in slots:
            slot.close()

    def test_messages_are_taken_into_memory_that_is_there(self) -> None:
        """Memory for the longest message, taken anew for each and cut down to it, left holes that made every worker grow without an end."""
        buffer = memoryview(bytearray(2**18))
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far, open(os.devnull) as file:
            socket.send_fds(near, [b"message"], [file.fileno(), file.fileno()])
            tracemalloc.start()
            try:
                data, fds, flags = receive_fds(far, buffer, 250)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            for fd in fds:
                os.close(fd)
            assert (bytes(data), len(fds), flags & socket.MSG_CTRUNC) == (b"message", 2, 0)
            assert peak < 2**14
            near.close()
            assert len(receive_fds(far, buffer, 250)[0]) == 0

    def test_a_clock_that_jumps_changes_no_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = SlotMemory.create(shape())
        monkeypatch.setattr("time.time", lambda: -1e9)
        assert slot.age == 0.0
        slot.close()


class TestThreads:
    def test_a_worker_that_can_start_none_says_so_and_keeps_no_connection(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        job.rank("a", 0)
        fds = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(AgentError, match="no thread can be started that listens to the agent"):
            job.rank("a", 1)
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds, "the end of the connection")

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_listener_that_breaks_is_a_lost_agent_and_no_silence(self, job: Job) -> None:
        """Nobody waits for answers of an agent that is not listened to; another connection follows."""
        rank = job.rank("a", 0)
        rank.client.on_event = no_thread
        job.open([rank])
        rank.reserve()
        rank.request(1)  # what is granted is an event
        eventually(lambda: rank.client.lost)
        with pytest.raises(AgentError, match="ended"):
            rank.client.call(GetInventory(), Inventory)

    def test_pages_come_later_where_none_can_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place, _ = vault(2**30)
        indices = place.ensure(0, shape(), 2, reuse=True)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(place.prefault(0, indices))


def stop(*args: Any) -> None:
    raise SystemExit


def no_thread(*args: Any) -> None:
    raise RuntimeError("can't start new thread")


class TestDescriptors:
    def test_a_launcher_may_have_as_many_as_the_system_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        monkeypatch.setattr(launcher, "prepare", stop)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
            with pytest.raises(SystemExit):
                launcher.command([__file__])
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_an_agent_may_have_as_many_as_the_system_allows(self, job: Job) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        try:
            job.rank("a", 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert resource.prlimit(job.pid("a"), resource.RLIMIT_NOFILE) == (hard, hard)

    def test_of_a_thousand_a_leader_needs_one_per_member(self, job: Job) -> None:
        members = 600
        (rank,) = job.start("a", addresses=dict.fromkeys(("a", *(f"member{number}" for number in range(members))), ("127.0.0.1", 1)))
        pid = job.pid("a")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
        assert job.spec is not None
        own = job.claims("report", incarnation=job.spec.incarnation)

        def dial(number: int) -> BlockingWire:
            wire = BlockingWire(rank.address, own.model_copy(update={"host": f"member{number}"}), SECRET, 30)
            wire.send(Rejoin(committed=None, uploading=None))
            return wire

        def decision(wire: BlockingWire) -> object:
            while isinstance(message := wire.receive(), WayUp | Heartbeat):
                pass
            return message

        job.commit([rank], 1)

        with ThreadPoolExecutor(16) as pool:
            wires = list(pool.map(dial, range(members)))
        try:
            asked = wires[0], wires[-1]
            told = [decision(wire) for wire in asked]  # the answer to their greeting
            job.commit([rank], 2)
            told += [decision(wire) for wire in asked]
            assert [message.version.iteration for message in told if isinstance(message, Commit)] == [1, 1, 2, 2]
            assert members <= len(os.listdir(f"/proc/{pid}/fd")) < members + 100
        finally:
            for wire in wires:
                wire.close()

    def test_without_any_it_waits_and_then_serves_again(self, job: Job) -> None:
        """The loop does not spin meanwhile, and no connection is left half open."""
        (rank,) = job.start("a")
        pid = job.pid("a")
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (settled_descriptors(pid), limits[1]))
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(lifecycle.socket_name(job.run, "a"))
            eventually(lambda: "no worker can be accepted" in job.log("a"))
            job.commit([rank], 1, 2, 3)
        assert job.log("a").count("no worker can be accepted") < 5
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        job.rank("a", 1)
        assert agent_pid(job.run, "a") == pid

    def test_a_message_without_its_descriptors_ends_the_connection_and_no_slot_is_mistaken(self, job: Job) -> None:
        (rank,) = job.start("a")
        pid = job.pid("a")
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (settled_descriptors(pid) + 1, limits[1]))
        with pytest.raises(Exception, match="descriptor"):
            rank.reserve(nbytes=8 * CHUNK)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        rank.reserve(nbytes=8 * CHUNK)
        job.commit([rank], 1, 2, 3)

    @pytest.mark.parametrize("of", ["workers", "peers"])
    def test_a_listener_without_descriptors_does_not_spin(self, of: str) -> None:
        async def look() -> int:
            attempts = 0

            class Exhausted(socket.socket):
                def accept(self) -> Any:
                    nonlocal attempts
                    attempts += 1
                    raise OSError(errno.EMFILE, "Too many open files")

            class Office:
                def log(self, text: str) -> None: ...

            family, name = (socket.AF_UNIX, f"\0gemini-test-{os.getpid()}") if of == "workers" else (socket.AF_INET, ("127.0.0.1", 0))
            with Exhausted(family) as listener, socket.socket(family) as caller:
                listener.bind(name)
                listener.listen()
                listener.setblocking(False)
                caller.connect(listener.getsockname())
                desk: WorkerListener | Listener = (
                    WorkerListener(Office(), listener)  # type: ignore[arg-type]
                    if of == "workers"
                    else Listener(listener, lambda: SECRET, pytest.fail, print, pytest.fail)  # type: ignore[arg-type]
                )
                for _ in range(50):
                    await asyncio.sleep(0)
                desk.close()
            return attempts

        assert asyncio.run(look()) == 1

    def test_a_worker_that_has_read_everything_at_last_costs_nothing_more(self) -> None:
        """Its socket can be written to all the time, of which an agent is told only while it has something to write."""

        class Counting(selectors.DefaultSelector):
            looks = 0

            def select(self, timeout: float | None = None) -> Any:
                self.looks += 1
                return super().select(timeout)

        async def look() -> int:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with ours, theirs:
                ours.setblocking(False)
                theirs.setblocking(False)
                worker = WorkerConnection(Mock(), ours, os.getpid())
                message = Failed(call=0, error="", text="x" * 2**20, fatal=False)
                worker.send(message)
                left = len(pack(message))
                while left:
                    with contextlib.suppress(BlockingIOError):
                        left -= len(theirs.recv(2**16))
                    await asyncio.sleep(0)
                before = selector.looks
                await asyncio.sleep(0.1)
                worker.close()
                return selector.looks - before

        selector = Counting()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            assert runner.run(look()) < 10


class TestReaders:
    def test_are_sent_the_slots_own_memory_and_nothing_is_hashed_for_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What they ask for may be gigabytes, and the agent does nothing else meanwhile; they compare it with the checksums themselves."""
        version, slot = Version(Incarnation(1, "nonce"), 7), SlotMemory.create(shape())
        for index, (offset, nbytes) in enumerate(slot.cuts(0)):
            slot.put_chunk(index, offset, nbytes, 0)
        assert slot.finish(version, 0, None)
        host = Host(name="a", holders={0: ("a",)})
        place = slot_store(host, Budget(2**30), pytest.fail)
        place.adopt(slot)
        sent: list[memoryview] = []
        connection = SimpleNamespace(send=lambda message, payload: sent.append(payload), peer="b:1", backlog=0, unacknowledged=0)
        context = SimpleNamespace(spec=None, host=host, slot_store=place, log=print, perform=lambda effects: None)

        async def serve() -> None:
            fetcher = Fetcher(context, connection, "b", Mock())  # type: ignore[arg-type]
            monkeypatch.setattr("gemini_ft.agent.memory.slot_memory.checksum", no_thread)
            fetcher.on_message(Fetch(owner=0, version=version, offset=0, nbytes=2**16))
            fetcher.on_lost("")

        asyncio.run(serve())
        assert sum(map(len, sent)) == 2**16
        slot.data(0, 1)[0] = 7
        assert sent[0][0] == 7

    def test_one_that_gives_signs_of_life_for_ever_is_named_and_keeps_no_slot_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is named when the job could use the slot, and loses it after hours: an export may take as long."""
        for name, seconds in (("_LEAST", 0.2), ("_LEASE", 0.2), ("_LONG", 0.5), ("READER_SECONDS", 1.0)):
            monkeypatch.setattr(f"gemini_ft.agent.replication.serve.{name}", seconds)
        version, slot = Version(Incarnation(1, "nonce"), 7), SlotMemory.create(shape())
        for index, (offset, nbytes) in enumerate(slot.cuts(0)):
            slot.put_chunk(index, offset, nbytes, 0)
        assert slot.finish(version, 0, None)
        host, said, ended = Host(name="a", holders={0: ("a",)}), list[str](), list[str]()
        place = slot_store(host, Budget(2**30), pytest.fail)
        place.adopt(slot)
        connection = SimpleNamespace(send=lambda message: None, peer="b:1", backlog=0, unacknowledged=0, abort=ended.append)
        context = SimpleNamespace(spec=None, host=host, slot_store=place, log=said.append, perform=lambda effects: None)

        async def read() -> None:
            fetcher = Fetcher(context, connection, "b", Mock())  # type: ignore[arg-type]
            fetcher.on_message(Describe(owner=0, version=version))
            while not ended:
                await asyncio.sleep(0.01)
                fetcher.on_message(Heartbeat())
                host.committed = Version(version.incarnation, 8)

        asyncio.run(asyncio.wait_for(read(), 20))
        assert ended == ["the reader has read for 1 s, which is the limit"]
        assert "host b at b:1, a reader of rank 0's iteration 7 of incarnation 1, keeps them for" in said[0]
        assert "until it hangs up, or at the latest after 1 s, there may be fewer snapshots, or none" in said[0]
        assert said[1].endswith("has read for 1 s, which is the limit: its slots are taken back")
        assert len(said) == 2

    def test_one_that_is_stopped_keeps_no_slot_for_ever(self, job: Job) -> None:
        ranks = job.start(replica_timeout=1.0)
        job.commit(ranks, 1, 2)
        wire = BlockingWire(ranks[0].address, job.claims(to="a"), SECRET, 10)
        wire.send(Describe(owner=0, version=job.version(2)))
        assert isinstance(wire.receive(), Description)  # and nothing more is heard of it
        job.commit(ranks, 3, 4, 5, 6)
        assert "gave no sign of life for 5 s: its slots are taken back" in job.log("a")
        wire.close()

    def test_one_that_takes_nothing_in_keeps_none_either(self, job: Job) -> None:
        (rank,) = job.join(["a"])
        rank.open(job.make_spec([rank], replica_timeout=1.0))
        rank.reserve(nbytes=256 * CHUNK)
        job.commit([rank], 1, 2)
        wire = BlockingWire(rank.address, job.claims(to="a"), SECRET, 10)
        wire.send(Fetch(owner=0, version=job.version(2), offset=0, nbytes=256 * CHUNK))
        job.commit([rank], 3, 4, 5)
        assert "gave no sign of life for 5 s: its slots are taken back" in job.log("a")
        wire.close()


class TestDisk:
    def test_a_full_one_costs_the_log_and_no_commit(self, job: Job, tmp_path: Path) -> None:
        """The agent's whole output goes to a device that is full."""
        command = [sys.executable, "-m", "gemini_ft.agent.main", "--run", job.run, "--host", "a"]
        with open("/dev/full", "wb") as full, subprocess.Popen(command, stdout=full, stderr=full) as agent:
            eventually(lambda: agent_pid(job.run, "a") == agent.pid)
            (rank,) = job.start("a")
            job.commit([rank], 1, 2)
            agent.kill()

    def test_a_full_one_leaves_an_agent_without_a_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(lifecycle, "open_log", full)
        with lifecycle.agent_log("run", "a") as log:
            assert log.name == os.devnull

    def test_old_logs_are_removed_when_one_is_begun_and_not_whenever_a_worker_joins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There may be thousands, and all ranks wait for each."""
        monkeypatch.delenv("GEMINI_LOG_DIR", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        lifecycle.agent_log("run", "a").close()
        log = lifecycle.log_path("run", "a")
        for number in range(110):
            (log.parent / f"agent-{number}.log").touch()
            os.utime(log.parent / f"agent-{number}.log", (0, 0))
        lifecycle.agent_log("run", "a").close()
        assert len([*log.parent.iterdir()]) == 111
        log.unlink()
        lifecycle.agent_log("run", "a").close()
        assert len([*log.parent.iterdir()]) == 101

    def test_a_full_one_costs_events_and_no_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("GEMINI_EVENTS", str(tmp_path / "events"))
        log = EventLog(rank=0)
        log.write("step", iteration=1)
        genuine = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: genuine(fd, data[:7]))
        log.write("step", iteration=2)  # the disk is full in the middle of it
        monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        log.write("step", iteration=3)
        log.write("step", iteration=4)
        monkeypatch.setattr(os, "write", genuine)
        log.write("step", iteration=5)
        assert [event["iteration"] for event in read_events(tmp_path / "events")] == [1, 5]
        assert caplog.text.count("events are lost") == 1


def test_what_a_process_remembers_of_its_steps_is_bounded() -> None:
    stats = Stats()
    for iteration in range(5 * Stats.KEPT):
        stats.note_blocked(0.0)
        stats.note_commit(iteration, 0.1, 0)
    assert Stats.KEPT <= len(stats.blocked) <= 2 * Stats.KEPT
    assert list(stats.commit_seconds) == list(stats.lag) == list(range(4 * Stats.KEPT, 5 * Stats.KEPT))
