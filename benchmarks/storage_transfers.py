"""Bytes to an S3 server and back: gemini-ft's slots beside boto3's own transfers, in turns, in one process.

Prints one JSON object: way -> seconds of every round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from gemini_ft.agent.memory.slot_memory import EXTRAS_ROOM, SlotMemory, SlotShape
from gemini_ft.agent.storing import StoredCopy
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.shard import ShardRecord, write_shard
from gemini_ft.wire.worker_messages import Stage

BUCKET = "bucket"
CHUNK = 8 * 2**20
VERSION = Version(Incarnation(1, "bench"), 1)
# What `aws s3 cp` does is boto3's default: parts of 8 MiB, ten at a time, each with a CRC32. Without that, and in larger parts:
LEAN = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
WAYS = {
    "default": (None, TransferConfig()),
    "no CRC32": (LEAN, TransferConfig()),
    "no CRC32, parts of 16 MiB": (LEAN, TransferConfig(multipart_chunksize=16 * 2**20)),
    "no CRC32, parts of 64 MiB": (LEAN, TransferConfig(multipart_chunksize=64 * 2**20)),
}


class Transfers:
    """The same bytes in a slot and in a file in memory."""

    def __init__(self, megabytes: int, endpoint: str, folder: Path) -> None:
        self._url, self.endpoint, self._folder = f"s3://{BUCKET}/bench", endpoint, folder
        self._layout = build_layout([TensorSpec(name="weights", dtype="uint8", shape=(megabytes * 10**6,), group=(0,))], 0, 1)
        self._slot = SlotMemory.create(_shape(self._layout))
        data = self._slot.data(0, self._layout.nbytes)
        block = os.urandom(2**20)
        for start in range(0, len(data), len(block)):
            data[start : start + len(block)] = block[: len(data) - start]
        self._file = folder / "source"
        self._file.write_bytes(data)
        self._storage = open_storage(self._url, endpoint)
        self._record: ShardRecord | None = None

    def upload(self) -> None:
        """From the slot, with checksums, as the agent does it."""
        self._record = write_shard(self._storage, "run/main/shard", self._layout, self._slot.data(0, self._layout.nbytes), b"extras")

    def download(self) -> None:
        """Into a new slot, every chunk checked, as the agent does it."""
        assert self._record is not None
        settings: dict[str, object] = {"url": self._url, "endpoint_url": self.endpoint, "every_steps": 1}
        order = Stage(owner=0, version=VERSION, record=self._record.model_dump_json(), storage=settings)
        context: Any = SimpleNamespace(run=SimpleNamespace(run_id="bench"), name="main", log=lambda text: None)
        copy = StoredCopy(context, order)
        memory = SlotMemory.create(copy.shape)
        copy.fill(memory)
        memory.close()

    def upload_file(self, client: Any, config: TransferConfig) -> None:
        client.upload_file(str(self._file), BUCKET, "bench/file", Config=config)

    def download_file(self, client: Any, config: TransferConfig) -> None:
        target = self._folder / "target"
        client.download_file(BUCKET, "bench/file", str(target), Config=config)
        target.unlink()


def _shape(layout: Layout) -> SlotShape:
    blob = layout.to_bytes()
    return SlotShape(
        run="bench",
        stream="main",
        owner=0,
        world_size=1,
        layout_hash=layout.logical_hash,
        layout=blob,
        data_bytes=layout.nbytes,
        extras_capacity=EXTRAS_ROOM,
        chunk_bytes=CHUNK,
    )


def measure(transfers: Transfers, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, round after round over all of them in random order; the first round only warms up."""
    ways: dict[str, Callable[[], None]] = {"gemini-ft up": transfers.upload, "gemini-ft down": transfers.download}
    for name, (settings, config) in WAYS.items():
        client = boto3.client("s3", endpoint_url=transfers.endpoint, config=settings)
        ways[f"boto3 up, {name}"] = partial(transfers.upload_file, client, config)
        ways[f"boto3 down, {name}"] = partial(transfers.download_file, client, config)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        uploads = [name for name in ways if " up" in name]  # first, as the others fetch what these have brought
        downloads = [name for name in ways if name not in uploads]
        for name in (*random.sample(uploads, len(uploads)), *random.sample(downloads, len(downloads))):
            begin = time.perf_counter()
            ways[name]()
            if turn:
                found[name].append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("megabytes", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("endpoint")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(measure(Transfers(arguments.megabytes, arguments.endpoint, Path(folder)), arguments.rounds)))


if __name__ == "__main__":
    main()
