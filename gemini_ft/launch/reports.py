"""The folder for reports of failed workers: one that is removed, where torch leaves one behind for every launch."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from gemini_ft.errors import ConfigError
from gemini_ft.hosts import began
from gemini_ft.wire.private import newest_first, runtime_folder

_NAME = "launch-"
_KEPT = 20  # folders of jobs that have failed


@contextmanager
def own_log_dir(options: argparse.Namespace) -> Iterator[None]:
    """Inside, ``options.log_dir`` is set, unless the user has given one or wants the workers' output in files.

    The folder is removed when the job ends well; those of failed jobs, and of launchers that were killed, when there are many.

    Raises:
        ConfigError: it cannot be made.
    """
    if options.log_dir or (options.redirects, options.tee) != ("0", "0"):
        yield
        return
    try:
        folder = runtime_folder()
        _sweep(folder)
        options.log_dir = mkdtemp(prefix=f"{_NAME}{os.getpid()}-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"there is no place for the reports of workers ({error}): make room there, or name another folder (--log-dir, TMPDIR)"
        ) from None
    yield
    shutil.rmtree(options.log_dir, ignore_errors=True)


def _sweep(folder: Path) -> None:
    left = [path for path in folder.glob(f"{_NAME}*") if began(int(path.name.split("-")[1])) is None]
    for _, path in newest_first(left)[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
