"""An agent whose storage hangs goes on: nothing that happens on its event loop waits for a thread that uses storage."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from agent_kit import stream_context

from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape
from gemini_ft.agent.uploads import Uploader
from gemini_ft.config import StorageConfig
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import StorageError
from gemini_ft.storage.local import LocalStorage
from gemini_ft.wire.worker_messages import SessionSpec

pytestmark = pytest.mark.timeout(60)
INCARNATION = Incarnation(1, "a")


def _copy(owner: int, version: Version) -> SlotMemory:
    layout = build_layout([TensorSpec(name="weight", dtype="uint8", shape=(128,), group=(0, 1))], owner, 2)
    size = layout.nbytes
    memory = SlotMemory.create(
        SlotShape(
            run="run",
            stream="main",
            owner=owner,
            world_size=2,
            layout_hash=layout.logical_hash,
            layout=layout.to_bytes(),
            data_bytes=size,
            extras_capacity=64,
            chunk_bytes=size,
        )
    )
    memory.put_chunk(0, 0, size, checksum(memory.data(0, size)))
    assert memory.finish(version, 0, None)
    return memory


def test_the_end_of_a_failed_upload_does_not_wait_for_a_deletion_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StorageConfig.model_validate({"url": f"file://{tmp_path}/stored", "every_steps": 1}).model_dump()
    spec = SessionSpec(
        stream="main", incarnation=INCARNATION, world_size=2, hosts=["a", "a"], addresses={}, holders={0: ["a"], 1: ["a"]}, leader="a",
        resumed=None, storage=settings,
    )  # fmt: skip
    hangs, lets_go, calls = threading.Event(), threading.Event(), itertools.count()

    def delete(storage: LocalStorage, key: str) -> None:
        if next(calls) < 2:
            raise StorageError("503")
        hangs.set()
        assert lets_go.wait(30)

    monkeypatch.setenv("GEMINI_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(LocalStorage, "delete", delete)

    async def fail_twice() -> bool:
        uploader, first, second = Uploader(spec, stream_context(), cast("Any", None)), Version(INCARNATION, 1), Version(INCARNATION, 2)
        for version in (first, second):  # what is left of the first cannot be deleted, and the second is written beside it
            await uploader.start(0, _copy(0, version), version)
            if version is first:
                uploader.over(first, "503")
                while uploader.background.busy:
                    await asyncio.sleep(0.01)
        uploader.start(1, _copy(1, second), second)
        await asyncio.to_thread(hangs.wait, 30)
        watchman = threading.Timer(3.0, lets_go.set)  # the loop would hang for good otherwise
        watchman.start()
        uploader.over(second, "a host was lost")
        goes_on = not lets_go.is_set()
        watchman.cancel()
        lets_go.set()
        while uploader.background.busy or uploader.busy:
            await asyncio.sleep(0.01)
        return goes_on

    assert asyncio.run(fail_twice()), "the event loop has waited for storage"
