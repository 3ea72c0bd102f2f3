"""The training jobs of storage.py: they write down iterations, commits, uploads under way, and how long resuming took.

Every rank has a state of its own, as under FSDP. With ``--uploader boto3`` each rank lets a process of its own upload as
many bytes with ``upload_fileobj``, again and again; with ``gemini`` the agents upload what GEMINI_STORAGE says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gemini_ft
from gemini_ft.agent import lifecycle
from gemini_ft.hosts import host_id
from load import Load

UPLOADER = """
import io, os, sys, boto3
content = io.BytesIO(os.urandom(2**20) * (int(sys.argv[1]) // 2**20 + 1))
content.truncate(int(sys.argv[1]))
client = boto3.client("s3", endpoint_url=sys.argv[2])
for line in sys.stdin:
    content.seek(0)
    client.upload_fileobj(io.BytesIO(content.getbuffer()), "bucket", "boto3/" + sys.argv[3])
    print("done", flush=True)
"""


class Log:
    """Appends one line of JSON per event to the file of all ranks."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **more: Any) -> None:
        line = {"event": event, "at": time.time(), "rank": dist.get_rank(), "pid": os.getpid(), **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Boto3Upload:
    """One upload at a time by another process."""

    def __init__(self, nbytes: int, endpoint: str) -> None:
        argv = [sys.executable, "-c", UPLOADER, str(nbytes), endpoint, str(dist.get_rank())]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._under_way = False

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._under_way = True

    def under_way(self) -> bool:
        assert self._process.stdout is not None
        if self._under_way and self._process.stdout.readline():
            self._under_way = False
        if self._process.poll() is not None:
            raise RuntimeError(f"the uploading process has ended with {self._process.returncode}")
        return self._under_way

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def agent_uploads(run: str, host: str) -> bool:
    """Whether this host's agent uploads at this moment."""
    status = lifecycle.status(run, host)
    storage = json.loads(status)["streams"]["main"]["storage"] if status is not None else None
    return bool(storage and storage["uploading"])


def train(arguments: argparse.Namespace, log: Log) -> None:
    """Iterations with a snapshot each; uploads, where there are any, begin every so many of them."""
    load = Load(arguments.megabytes * 10**6, arguments.tokens, seed=dist.get_rank())
    checkpointer = gemini_ft.Checkpointer(load.model, load.optimizer, replicated=False)
    begin = time.perf_counter()
    start = checkpointer.resume()
    log.write("resumed", seconds=time.perf_counter() - begin, iteration=start, sources=checkpointer.stats.restored)
    other = Boto3Upload(arguments.megabytes * 10**6, arguments.endpoint) if arguments.uploader == "boto3" else None
    run, host = os.environ["GEMINI_RUN_ID"], host_id()

    def uploading() -> bool:
        """The same questions in both modes: they cost time as well."""
        return any([agent_uploads(run, host), other is not None and other.under_way()])

    before, said = uploading(), set[int]()
    begin = time.perf_counter()
    for iteration in range(start, start + arguments.steps):
        load.gradients()
        load.update()
        checkpointer.step()
        now = uploading()
        ended = time.perf_counter()
        log.write("step", iteration=iteration + 1, seconds=ended - begin, uploading=[before, now])
        begin = ended
        if other is not None and not now and (iteration + 1) % arguments.every == 0:
            other.start()
            now = True
        before = now
        for committed, took in checkpointer.stats.commit_seconds.copy().items():
            if committed not in said:
                said.add(committed)
                log.write("committed", iteration=committed, seconds=took)
    if other is not None:
        other.close()
    checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--uploader", choices=("gemini", "boto3"), default="gemini")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--events", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gemini_ft.init_process_group("gloo", timeout=timedelta(seconds=120))
    train(arguments, Log(arguments.events))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
