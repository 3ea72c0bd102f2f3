"""A real S3 server on loopback for tests: ``rclone serve s3`` over a folder, with keys."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "test-key", "test-secret-0123456789"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """One server; ``start`` and ``stop`` it at will, its address stays."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str) -> None:
        rclone = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
        assert rclone is not None, "rclone is missing; `make venv` installs it"
        command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}", *options, str(self.root)]
        self._process = process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("rclone serve s3 did not come up within 20 s")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def serve(root: Path, *buckets: str) -> Iterator[Server]:
    """A server with these buckets; ended whatever happens."""
    for bucket in buckets:
        (root / bucket).mkdir(parents=True)
    server = Server(root)
    try:
        server.start()
        yield server
    finally:
        server.stop()
