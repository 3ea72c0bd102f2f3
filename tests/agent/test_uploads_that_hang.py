"""An agent whose storage hangs goes on: nothing that happens on its event loop waits for a thread that uses storage."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from gemini_ft.agent.uploads import Term, Uploader
from gemini_ft.config import StorageConfig
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.worker_messages import SessionSpec

pytestmark = pytest.mark.timeout(60)


def test_the_end_of_a_failed_upload_does_not_wait_for_a_deletion_that_hangs(tmp_path: Path) -> None:
    incarnation = Incarnation(1, "a")
    spec = SessionSpec(
        stream="main", incarnation=incarnation, world_size=1, hosts=["a"], addresses={}, holders={0: ["a"]}, leader="a", resumed=None,
        storage=StorageConfig(url=f"file://{tmp_path}", every_steps=1).model_dump(),
    )  # fmt: skip
    hangs, lets_go = threading.Event(), threading.Event()

    def delete(key: str) -> None:
        hangs.set()
        assert lets_go.wait(30)

    async def fail_twice() -> None:
        uploader = Uploader(spec, "run", print, cast("Term", None))
        uploader._storage.delete = delete  # type: ignore[method-assign]
        first, second = Version(incarnation, 1), Version(incarnation, 2)
        uploader._written |= {first: {"run/first"}, second: {"run/second"}}
        uploader.over(first, "503")
        await asyncio.to_thread(hangs.wait, 30)
        done = threading.Event()
        watchman = threading.Timer(3.0, lets_go.set)  # the loop would hang for good otherwise
        watchman.start()
        uploader.over(second, "503")
        if not lets_go.is_set():
            done.set()
        watchman.cancel()
        lets_go.set()
        assert done.is_set(), "the event loop has waited for storage"
        while uploader.background.busy:
            await asyncio.sleep(0.01)
        assert not uploader._leftovers

    asyncio.run(fail_twice())
