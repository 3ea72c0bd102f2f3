"""Small file systems for tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_WAIT = 60  # seconds


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of ``size`` (as mount writes it: ``8m``) in ``folder``; the test is skipped where it cannot be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, timeout=_WAIT)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: run as root, with CAP_SYS_ADMIN ({mounted.stderr.decode().strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=_WAIT)
