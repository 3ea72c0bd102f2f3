"""Incarnations of one run that store at the same time, beside a reader, in an S3 store that denies what it has carried out, and lags.

Each of them reaches the server through a proxy of its own. Whatever was stored, by its writer's own account, is there and sound at the
end, unless that writer or one that went on from it has stored something newer.
"""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import s3_server
from agent_kit import shape_of, stream_context

from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.uploads import Uploader
from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.core.roots import checksum
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, StorageError
from gemini_ft.storage.checkpoints import checkpoint_folder, list_checkpoints, read_manifest
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.retention import read_back, reading
from gemini_ft.testing import S3Proxy
from gemini_ft.wire.worker_messages import SessionSpec

FAULTS = [
    ("but 409 OperationAborted", ("PutObject", "DeleteObject")),
    ("but 412 PreconditionFailed", ("PutObject",)),
    ("but 500 InternalError", ("PutObject", "DeleteObject")),
    ("lost", ("PutObject", "DeleteObject")),
    ("stale", ("ListObjects",)),
    ("reset", ("PutObject",)),
    ("delay 0.05", ("PutObject", "DeleteObject", "ListObjects")),
    ("503 SlowDown", ("GetObject", "ListObjects", "HeadObject")),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server.serve(tmp_path_factory.mktemp("s3"), "bucket") as running:
        for name, value in s3_server.CREDENTIALS.items():
            patch.setenv(name, value)
        yield running


class Writer:
    """The one host of an incarnation, with a way to the store that fails as the seed has it."""

    leads_in: int | None = 0
    is_obeyed = True

    def __init__(self, server: s3_server.Server, seed: str, incarnation: Incarnation, resumed: Version | None) -> None:
        self.stored: list[Version] = []
        drawn_from = f"{seed} {incarnation}"
        self.proxy = S3Proxy(server.port, seed=zlib.crc32(drawn_from.encode()))
        self._random = random.Random(drawn_from)
        self.proxy.__enter__()
        url = f"s3://bucket/{seed}"
        lineage = [resumed] if resumed is not None else []
        layout = build_layout([TensorSpec(name="w", dtype="int64", shape=(64,), group=(0,))], 0, 1)
        self.memory = SlotMemory.create(shape_of(layout))
        there = [info.folder for info in list_checkpoints(open_storage(url, server.endpoint)) if info.version not in lineage]
        self.spec = SessionSpec(
            stream="main", incarnation=incarnation, world_size=1, hosts=["h"], addresses={"h": ("127.0.0.1", 1)}, holders={0: ["h"]},
            leader="h", resumed=resumed, lineage=lineage, present=there,
            storage={"url": url, "endpoint_url": self.proxy.endpoint, "every_steps": 1, "keep_last": 1},
        )  # fmt: skip
        for kind, operations in FAULTS:
            self.proxy.fail(kind, *operations, chance=self._random.choice([0.0, 0.05, 0.2]))

    def store(self, *iterations: int) -> None:
        asyncio.run(self._store(iterations))

    async def _store(self, iterations: tuple[int, ...]) -> None:
        uploader = Uploader(self.spec, stream_context(), self)  # type: ignore[arg-type]
        for iteration in iterations:
            version = Version(self.spec.incarnation, iteration)
            for index, cut in enumerate(self.memory.cuts(0)):
                self.memory.put_chunk(index, *cut, checksum(self.memory.data(*cut)))
            assert self.memory.finish(version, 0, None)
            record, error = await uploader.start(0, self.memory, version)
            if not error:
                try:
                    await uploader.write_manifest(version, {0: record})
                    self.stored.append(version)
                    await uploader.tidy()
                except StorageError as failure:
                    error = str(failure)
            uploader.over(version, error, unclear=bool(error))
            while uploader.background.busy:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._random.random() / 20)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed > 0)) for seed in range(30)])
def test_what_is_said_to_be_stored_is_there(server: s3_server.Server, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr("gemini_ft.storage.s3.PAUSE", 0)
    monkeypatch.setattr("gemini_ft.agent.uploads.BACKOFF", 0.0)
    name, storage = f"race-{seed}", open_storage(f"s3://bucket/race-{seed}", server.endpoint)
    first = Writer(server, name, Incarnation(1, "a"), None)
    first.proxy.faults.clear()
    first.store(10)
    resumed, over = first.stored[-1], threading.Event()
    late = Writer(server, name, Incarnation(1, "a"), None)
    rivals = [Writer(server, name, Incarnation(2, nonce), resumed) for nonce in "bc"]

    def resume() -> int:
        """Chooses and reads, over and over, as a job does that starts: there is something to resume, or two histories to ask about."""
        count = 0
        while not over.is_set():
            for attempt in range(5):
                try:
                    found = newest_whole(storage, "run", "main")
                    assert found is not None
                    with reading(storage, "run", "main", found.version):
                        read_back(storage, found)
                    break
                except (CorruptDataError, StorageError) as error:
                    if "histories that do not descend from each other" in str(error):
                        break
                    if attempt == 4:
                        raise
            count += 1
        return count

    try:
        with ThreadPoolExecutor(4) as pool:
            reader = pool.submit(resume)
            try:
                for done in [pool.submit(late.store, 12, 14), *(pool.submit(rival.store, 11, 12, 13, 14) for rival in rivals)]:
                    done.result(200)
            finally:
                over.set()
            assert reader.result(200)
    finally:
        for writer in (first, late, *rivals):
            writer.proxy.__exit__(None, None, None)
    newest = [writer.stored[-1] for writer in (late, *rivals) if writer.stored]
    for version in newest:
        folder = checkpoint_folder("run", "main", version)
        read_back(storage, read_manifest(storage, folder))
    if not newest:
        read_back(storage, read_manifest(storage, checkpoint_folder("run", "main", resumed)))
