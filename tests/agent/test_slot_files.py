"""Slots as files: whoever is killed, the next agent of the run finds them, and no other user can have prepared them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
import xxhash
from agent_kit import Job, end_agent, eventually, slot_store
from disks import small_disk

from gemini_ft import Checkpointer
from gemini_ft.agent import lifecycle
from gemini_ft.agent.context import RunContext
from gemini_ft.agent.memory import slot_files
from gemini_ft.agent.memory.budget import Budget
from gemini_ft.agent.memory.slot_files import SlotFiles
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.streams import AgentIdentity, Past, Streams
from gemini_ft.agent.watchdog import LeftMemory
from gemini_ft.cli.main import main
from gemini_ft.core.protocol import Host
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import ConfigError, CorruptDataError, MemoryBudgetError, SupersededError
from gemini_ft.hosts import host_id
from gemini_ft.wire.worker_messages import SessionSpec

SHAPE = SlotShape(
    run="run",
    stream="main",
    owner=0,
    world_size=1,
    layout_hash="0" * 16,
    layout=b"layout",
    data_bytes=64,
    extras_capacity=8,
    chunk_bytes=32,
)
VERSION = Version(Incarnation(1, "nonce"), 7)


@pytest.fixture
def root() -> Iterator[Path]:
    root = Path("/dev/shm", f"gemini-test-{secrets.token_hex(6)}")
    yield root
    shutil.rmtree(root)


def slots(files: SlotFiles) -> list[str]:
    return [path.name for path in files.folder.iterdir() if path.name.startswith("gemini-slot-")]


def complete(files: SlotFiles) -> SlotMemory:
    slot = SlotMemory.create(SHAPE, files)
    slot.data(0, 64)[:] = bytes(range(64))
    for index, (at, nbytes) in enumerate(slot.cuts(0)):
        slot.put_chunk(index, at, nbytes, checksum(slot.data(at, nbytes)))
    assert slot.finish(VERSION, 0, None)
    return slot


def test_the_next_agent_finds_what_was_complete_and_the_secret(root: Path) -> None:
    files = SlotFiles(root, "run", "a")
    first = complete(files)
    identity = AgentIdentity()
    identity.take_over(files.identity())
    identity.write(Past(b"secret", VERSION.incarnation))
    first.close()  # as at its process's death: nothing is removed
    again = SlotFiles(root, "run", "a")
    (fd,) = again.left()
    found = SlotMemory.adopt(fd)
    assert (found.version, bytes(found.data(0, 64)), found.damaged()) == (VERSION, bytes(range(64)), [])
    assert AgentIdentity().take_over(again.identity()).secret == b"secret"
    assert SlotFiles(root, "run", "b").left() == []  # another host's, and another run's
    assert SlotFiles(root, "other", "a").left() == []
    estate = LeftMemory.of(os.getpid())  # as the successor of an agent that hangs sees it
    assert any(os.fstat(one).st_ino == found.inode for one in estate.slots)
    estate.close()
    found.close()
    again.clear()
    assert not again.folder.exists()


def spec_of(*hosts: str) -> SessionSpec:
    ranks = {rank: [host] for rank, host in enumerate(hosts)}
    common = {"stream": "main", "incarnation": VERSION.incarnation, "leader": hosts[0], "resumed": None, "addresses": {}}
    return SessionSpec(world_size=len(hosts), hosts=list(hosts), holders=ranks, **common)


def test_what_an_agent_knew_is_found_as_a_whole_or_not_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may end a write in the middle when it kills the writer; both halves could be read together."""
    fd, identity = SlotFiles(root, "run", "a").identity(), AgentIdentity()
    identity.take_over(os.dup(fd))
    before, after = (Past(b"secret", VERSION.incarnation, {"main": spec_of("a", other)}) for other in "bc")
    identity.write(before)
    old = os.pread(fd, 2**16, 0)
    identity.write(after)
    new = os.pread(fd, 2**16, 0)
    assert AgentIdentity().take_over(os.dup(fd)) == after
    for cut in range(0, 1000, 7):
        os.pwrite(fd, new[:cut] + old[cut:], 0)
        assert AgentIdentity().take_over(os.dup(fd)) in (before, after, Past())
    os.pwrite(fd, old, 0)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    identity.write(Past(b"other", None, {"main": spec_of(*("x" * 999 + str(number) for number in range(2000)))}))
    assert AgentIdentity().take_over(fd) == before


SPECS = [{"main": "{}"}, {"main": 5}, []]
NUMBERS = [[1], [10**15, "n"], [-1, "n"], ["1", "n"], [1, 1]]


@pytest.mark.parametrize("body", [5, [1, 2, 3], *([b"s", None, specs] for specs in SPECS), *([b"s", known, {}] for known in NUMBERS)])
def test_what_no_agent_of_this_release_has_written_is_nothing(root: Path, body: object) -> None:
    fd, packed = SlotFiles(root, "run", "a").identity(), msgpack.packb(body)
    for digest in (b"", xxhash.xxh3_64_digest(packed)):
        os.pwrite(fd, len(packed).to_bytes(4, "big") + digest + packed, 0)
        assert AgentIdentity().take_over(os.dup(fd)) == Past()
    os.close(fd)


def test_a_folder_has_one_agent_and_an_agent_that_leaves_takes_nothing_from_the_next(root: Path) -> None:
    leaving, coming = SlotFiles(root, "run", "a"), SlotFiles(root, "run", "a")
    held = leaving.claim()
    assert held is not None
    assert coming.claim() is None  # the same user in another container, or an agent that still clears the folder
    leaving.clear()
    os.close(held)
    held = coming.claim()
    assert held is not None
    complete(coming).close()
    assert len(slots(coming)) == 1
    assert leaving.claim() is None
    os.close(held)


def test_a_file_that_is_no_slot_is_given_back_unless_another_release_can_read_it(root: Path) -> None:
    files = SlotFiles(root, "run", "a")
    os.close(files.make(2**20))  # its maker was killed before there was a header
    complete(files).close()
    torn = complete(files)
    torn.memory[20] ^= 1
    torn.close()
    other = complete(files)
    other.memory[:12] = b"GEMINIFT" + (len(body := msgpack.packb({"format": 1}))).to_bytes(4, "little")
    other.memory[12 : 20 + len(body)] = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    kept = os.readlink(f"/proc/self/fd/{other.fd}")
    other.close()
    streams = Streams(RunContext("run", "a", files))
    streams.adopt(files.left())
    (sound,) = streams.by_name["main"].context.slot_store.memory.values()
    assert sound.version == VERSION
    assert {str(files.folder / name) for name in slots(files)} == {os.readlink(f"/proc/self/fd/{sound.fd}"), kept}


def test_memory_that_is_given_back_has_no_file_any_more(root: Path) -> None:
    files = SlotFiles(root, "run", "a")
    vault = slot_store(Host(name="a", holders={0: ("a",)}), budget := Budget(2**30), files=files)
    made = vault.ensure(0, SHAPE, 2, reuse=True)
    assert len(slots(files)) == 2
    for index in made:
        vault.free(0, index)
    assert (slots(files), budget.used) == ([], 0)


def test_no_file_is_taken_that_others_could_have_prepared(root: Path) -> None:
    files = SlotFiles(root, "run", "a")
    complete(files).close()
    (name,) = slots(files)
    (files.folder / "gemini-slot-link").symlink_to(files.folder / name)
    (files.folder / "gemini-slot-open").write_bytes(b"x" * 8192)
    (files.folder / "gemini-slot-open").chmod(0o666)
    (fd,) = files.left()
    assert os.readlink(f"/proc/self/fd/{fd}").endswith(name)
    os.truncate(fd, 5000)  # what a seal would have prevented
    with pytest.raises((CorruptDataError, ValueError)):
        SlotMemory.adopt(fd)
    os.close(fd)


def test_a_folder_that_is_no_memory_or_not_this_users_alone_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not on a tmpfs.*Name a folder under /dev/shm"):
        SlotFiles(Path("/var/tmp") / root.name, "run", "a")
    root.touch()
    with pytest.raises(ConfigError, match=r"memory.folder=.*; name one on a tmpfs that this user may write to"):
        SlotFiles(root, "run", "a")
    root.unlink()
    SlotFiles(root, "run", "a")
    (root / f"gemini-ft-{os.getuid()}").chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777, so that others may write to it"):
        SlotFiles(root, "run", "a")


def test_a_folder_in_whose_place_another_user_can_put_an_old_one_is_refused(root: Path) -> None:
    """Files with the owner's mode, in his own folder, below one of somebody who can rename it."""
    if os.getuid() != 0:
        pytest.skip("needs root: only root may give a folder to another user")
    below = root / "of" / "others"
    below.mkdir(parents=True)
    os.chown(root / "of", 4711, -1)
    for way in (below, root / "of"):
        with pytest.raises(ConfigError, match=rf"{root}/of belongs to uid 4711, .*; name another folder"):
            SlotFiles(way, "run", "a")
    os.chown(root / "of", 0, -1)
    (root / "of").chmod(0o777)
    with pytest.raises(ConfigError, match=rf"of has mode 0777, .*`chmod \+t {root}/of`"):
        SlotFiles(below, "run", "a")
    (root / "of").chmod(0o1777)
    SlotFiles(below, "run", "a")
    (root / "link").symlink_to(below)
    os.lchown(root / "link", 4711, -1)
    with pytest.raises(ConfigError, match="link belongs to uid 4711"):
        SlotFiles(root / "link", "run", "a")


def test_a_folder_without_any_room_is_refused_before_an_agent_begins(tmp_path: Path) -> None:
    with small_disk(tmp_path / "memory", "1m") as root:
        with pytest.raises(OSError, match="No space left"):
            (root / "others").write_bytes(bytes(2**21))
        with pytest.raises(ConfigError, match=rf"memory.folder='{root}': No space left on device; make room there"):
            SlotFiles(root, "run", "a")
        (root / "others").unlink()
        os.close(SlotFiles(root, "run", "a").claim() or -1)


def test_a_full_folder_is_an_error_with_the_numbers_and_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SlotFiles(root, "run", "a")
    vault = slot_store(Host(name="a", holders={0: ("a",)}), budget := Budget(2**60), files=files)

    def full(fd: int, at: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError, match="No space left on device"):
        vault.ensure(0, SHAPE, 2, reuse=True)
    assert (slots(files), budget.used) == ([], 0)


@pytest.fixture
def at_ease(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The kernel gives a file its pages when this is set, and says that it cannot when that takes too long."""
    allowed, genuine = threading.Event(), os.posix_fallocate

    def slow(fd: int, at: int, nbytes: int) -> None:
        if nbytes != slot_files.KNOWLEDGE and not allowed.wait(20):
            raise OSError(errno.EIO, "the agent did nothing else meanwhile")
        genuine(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    yield allowed
    allowed.set()


def test_an_agent_answers_others_while_slots_get_their_memory(root: Path, at_ease: threading.Event) -> None:
    """The memory comes only when the agent has done something else."""
    files = SlotFiles(root, "run", "a")
    vault = slot_store(Host(name="a", holders={0: ("a",)}), budget := Budget(2**30), files=files)

    async def answer() -> None:
        at_ease.set()

    async def serve() -> None:
        first, second, _ = await asyncio.gather(*(vault.ensure_beside(0, SHAPE, 2, lambda: True) for _ in range(2)), answer())
        assert (first, len(slots(files)), budget.used) == (second, 2, 2 * SHAPE.total)

    asyncio.run(serve())


def test_memory_that_comes_when_nobody_wants_it_any_more_is_given_back(root: Path, at_ease: threading.Event) -> None:
    files = SlotFiles(root, "run", "a")
    vault = slot_store(host := Host(name="a", holders={0: ("a",)}), budget := Budget(2**30), files=files)

    async def serve() -> None:
        hung_up = asyncio.create_task(vault.ensure_beside(0, SHAPE, 2, lambda: True))
        await asyncio.sleep(0)
        hung_up.cancel()
        await asyncio.wait([hung_up])
        at_ease.set()
        with pytest.raises(SupersededError, match="rank 0's shard got memory when its incarnation was over"):
            await vault.ensure_beside(0, SHAPE, 2, lambda: True, wanted=lambda: False)
        while slots(files) or budget.used:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(serve(), 20))
    assert not host.slots(0).slots


def test_a_slot_that_was_missing_has_the_shape_that_is_wanted_when_its_turn_comes(root: Path, at_ease: threading.Event) -> None:
    """Another session with other tensors may have asked for memory in between, and has been given it."""
    files, wider = SlotFiles(root, "run", "a"), replace(SHAPE, data_bytes=2 * SHAPE.data_bytes)
    vault = slot_store(host := Host(name="a", holders={0: ("a",), 1: ("a",)}), budget := Budget(2 * SHAPE.total), files=files)
    at_ease.set()
    assert len(vault.ensure(0, SHAPE, 3, reuse=True)) == 2
    budget.limit = 2**30
    at_ease.clear()

    async def serve() -> None:
        before = asyncio.create_task(vault.ensure_beside(1, replace(SHAPE, owner=1), 2, lambda: True))
        asked = asyncio.create_task(vault.ensure_beside(0, wider, 3, lambda: True))
        assert vault.short() == [0]
        topped_up = asyncio.create_task(vault.top_up(0))
        await asyncio.sleep(0)
        at_ease.set()
        await asyncio.gather(before, asked, topped_up)
        assert asked.result() == list(host.slots(0).slots)

    asyncio.run(serve())
    assert [memory.shape for (owner, _), memory in vault.memory.items() if owner == 0] == [wider] * 3


def test_slots_whose_writer_comes_while_others_get_memory_are_not_used_again(root: Path, at_ease: threading.Event) -> None:
    files = SlotFiles(root, "run", "a")
    vault = slot_store(Host(name="a", holders={0: ("a",), 1: ("a",)}), Budget(2**30), files=files)
    at_ease.set()
    free_again = vault.ensure(0, SHAPE, 2, reuse=True)
    at_ease.clear()
    may_be_written = False

    async def serve() -> list[int]:
        nonlocal may_be_written
        before = asyncio.create_task(vault.ensure_beside(1, replace(SHAPE, owner=1), 2, lambda: True))
        asked = asyncio.create_task(vault.ensure_beside(0, SHAPE, 2, lambda: not may_be_written))
        await asyncio.sleep(0)
        may_be_written = True
        at_ease.set()
        return (await asyncio.gather(before, asked))[1]

    paths = slots(files)
    assert len(asyncio.run(serve())) == len(free_again)
    assert not set(paths) & set(slots(files))


def test_where_no_thread_can_be_started_slots_get_their_memory_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SlotFiles(root, "run", "a")
    vault = slot_store(Host(name="a", holders={0: ("a",)}), Budget(2**30), files=files)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert len(asyncio.run(vault.ensure_beside(0, SHAPE, 2, lambda: True))) == len(slots(files)) == 2


def test_an_agent_that_is_told_to_leave_a_job_at_work_leaves_the_files_to_the_next(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers hand their memory back to it; without names it would not outlive them."""
    monkeypatch.setenv("GEMINI_MEMORY__FOLDER", str(root))
    with Job(tmp_path) as job:
        ranks = job.start("a")
        job.commit(ranks, 1)
        files = SlotFiles(root, job.run, "a")
        before = slots(files)
        assert main(["leave", "--run-id", job.run, "--host", "a"]) == 0
        assert "is at work" in capsys.readouterr().out
        job.gone("a")
        assert before
        assert slots(files) == before
        ranks[0].close()


def test_files_of_an_agent_that_cannot_be_reached_are_not_forgotten(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMINI_MEMORY__FOLDER", str(root))
    files = SlotFiles(root, run := f"unreachable-{os.getpid()}", "a")
    held = files.claim()
    assert held is not None
    complete(files).close()
    leave = ["leave", "--run-id", run, "--host", "a"]
    assert main(leave) == 1
    assert "does not listen here" in capsys.readouterr().err
    assert len(slots(files)) == 1
    os.close(held)
    assert main(leave) == 0
    assert not files.folder.exists()


def test_agents_read_the_same_options_wherever_their_folder_is(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their working directory is the root of the file system."""
    (tmp_path / "options.json").write_text(json.dumps({"memory": {"folder": str(root)}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMINI_CONFIG", "options.json")
    process = lifecycle.spawn(run := f"folder-{os.getpid()}", "a")
    try:
        eventually(lambda: lifecycle.is_listening(run, "a"), "the agent")
        assert slot_files.folder_of(root, run, "a").is_dir()
    finally:
        end_agent(run, "a")
        process.wait(30)


def test_a_folder_that_comes_too_late_for_the_agent_is_not_passed_over_in_silence(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_id()
    process = lifecycle.spawn(run := f"late-{os.getpid()}", host)
    try:
        eventually(lambda: lifecycle.is_listening(run, host), "the agent")
        for folder, warnings in (("", 0), (str(root), 1)):
            if folder:
                monkeypatch.setenv("GEMINI_MEMORY__FOLDER", folder)
            checkpointer = Checkpointer(torch.nn.Linear(2, 2), run_id=run, replicas=1)
            checkpointer.resume()
            checkpointer.close(finished=False)
            said = [text for text in caplog.messages if text.startswith(f"memory.folder={str(root)!r} has no effect: the agent")]
            assert len(said) == warnings
        assert f"(pid {process.pid}) was started before, and keeps slots in memory that has no name" in said[0]
        assert f"gemini leave --run-id {run} --host {host}" in said[0]
    finally:
        end_agent(run, host)
        process.wait(30)
