"""The process beside an agent that reads slots by RDMA, as its agent sees it; what it reads: tests/jobs/test_transport_rdma.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.replication import rdma as module
from gemini_ft.agent.replication.rdma import Rdma, tag_of
from gemini_ft.errors import PeerError
from gemini_ft.wire.messages import Chunk
from gemini_ft.wire.peer_messages import Exposed, Readable

DOUBLE = Path(__file__).parents[1] / "kit" / "rdma_double"
SHAPE = SlotShape(
    run="run",
    stream="main",
    owner=0,
    world_size=1,
    layout_hash="0" * 16,
    layout=b"layout",
    data_bytes=64,
    extras_capacity=8,
    chunk_bytes=64,
)


@pytest.fixture(autouse=True)
def fabric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(DOUBLE))
    monkeypatch.setenv("FABRIC", str(tmp_path / "fabric"))
    return tmp_path / "fabric"


@pytest.fixture
def slots() -> Iterator[list[SlotMemory]]:
    slots = [SlotMemory.create(SHAPE) for _ in range(2)]
    yield slots
    for memory in slots:
        memory.close()


def _is_of(child: psutil.Process, rdma: Rdma) -> bool:
    with contextlib.suppress(psutil.Error):  # one that an earlier test has started has ended just now
        return rdma.name in child.cmdline()
    return False


@contextlib.asynccontextmanager
async def begun() -> AsyncIterator[tuple[Rdma, int]]:
    """A process, and its number."""
    rdma = Rdma(["127.0.0.1"], lambda text: None)
    try:
        yield rdma, next(child.pid for child in psutil.Process().children() if _is_of(child, rdma))
    finally:
        rdma.close("the test is over")


def test_a_process_that_says_nothing_is_given_up_though_nobody_asks_for_long(
    slots: list[SlotMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A carrier may be given up before, as its host is left out of the commit; each time anew, no copy would ever come, by any way."""
    monkeypatch.setattr(module, "START", 0.6)

    async def story() -> None:
        async with begun() as (rdma, pid), asyncio.timeout(20):
            os.kill(pid, signal.SIGSTOP)
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rdma.expose(slots[0]), 0.2)

    with pytest.raises(PeerError, match="a slot was not taken in"):
        asyncio.run(story())


def test_a_notice_to_all_processes_of_a_host_does_not_end_it(slots: list[SlotMemory]) -> None:
    """A scheduler that drains sends SIGTERM to all; the last copies travel after that."""

    async def story() -> None:
        async with begun() as (rdma, pid):
            await rdma.expose(slots[0])
            os.kill(pid, signal.SIGTERM)
            await rdma.expose(slots[1])

    asyncio.run(story())


def test_a_read_that_fails_ends_it(slots: list[SlotMemory], fabric: Path) -> None:
    """Parts that are still on their way may not land where the next copy lies by then."""
    key, content = b"k" * 16, bytes(range(64))

    async def story() -> None:
        async with begun() as (rdma, _):
            slots[0].data(0, 64)[:] = content
            address = await rdma.expose(slots[0])
            exposed, seal = Exposed(name=rdma.name, metadata=rdma.metadata, key=key), tag_of(key, 3, slots[0].data(0, 64))
            chunk = Chunk(owner=0, iteration=1, index=0, offset=0, nbytes=64, digest=0)
            piece = Readable(chunk=chunk, start=0, nbytes=64, tag=3, address=address + SHAPE.data_offset, seal=seal)
            await rdma.pull(exposed, piece, slots[1])
            assert bytes(slots[1].data(0, 64)) == content
            fabric.write_text("fails")
            with pytest.raises(PeerError, match="RDMA: ERR"):
                await rdma.pull(exposed, piece, slots[1])
            assert rdma.is_over

    asyncio.run(story())


def test_tags_are_formed_though_all_threads_of_the_loop_hang_in_storage() -> None:
    async def story() -> None:
        loop, storage = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        hanging = loop.run_in_executor(None, storage.wait)
        try:
            async with begun() as (rdma, _), asyncio.timeout(10):
                assert await rdma.tag(b"k" * 16, 1, memoryview(b"piece")) == tag_of(b"k" * 16, 1, memoryview(b"piece"))
        finally:
            storage.set()
            await hanging

    asyncio.run(story())
