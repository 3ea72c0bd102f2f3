"""Where an export is written: to a local folder or an S3 prefix; it appears whole, or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.storage.base import Storage, open_storage

_PART = 16 * 2**20  # bytes read at a time
_WAY_OUT = "choose another --to, or give --overwrite"


@dataclass(frozen=True)
class Target:
    """What one format writes.

    Attributes:
        name: the one file; None: a folder of several.
        last: of these, the one without which the others are no checkpoint.
        own: what such a folder holds, files in folders by their first part.
    """

    name: str | None = None
    last: str = ""
    own: str = ""


DCP = Target(last=".metadata", own=r"\.metadata|.*\.distcp")
DEEPSPEED = Target(last="latest", own=r"latest|global_step\d+(/.*)?")


@contextmanager
def staged(to: str, target: Target, overwrite: bool = False, endpoint_url: str | None = None) -> Iterator[Path]:
    """A folder to write into; what is in it appears in ``to`` when the block ends well.

    Args:
        to: local folder, ``file:///folder`` or ``s3://bucket/prefix``. For the latter the files lie in the temporary directory first.
        target: what will be written.
        overwrite: replace what exists: that file, or that folder if there is nothing else in it.
        endpoint_url: of an S3-compatible store.

    Raises:
        ConfigError: the target exists already.
        StorageError: it cannot be written.
    """
    scheme = urlsplit(to).scheme
    if scheme not in ("", "file", "s3"):
        raise ConfigError(f"--to {to}: must be a local folder, file:///folder or s3://bucket/prefix")
    if scheme == "s3":
        try:
            with tempfile.TemporaryDirectory(prefix="gemini-export-") as stage:
                storage = open_storage(to, endpoint_url)
                old = _existing(storage.list(), target, to, overwrite)
                yield Path(stage)
                _upload(storage, Path(stage), target, old)
        except OSError as error:
            temporary = tempfile.gettempdir()
            raise StorageError(f"{temporary}: cannot write there: {error.strerror or error}; set TMPDIR to a folder with room") from error
        return
    folder = Path(unquote(urlsplit(to).path) if scheme == "file" else to).resolve()
    if target.name is None and folder.is_mount():
        raise ConfigError(f"{folder} is a mount point, which cannot be exchanged for what is written; choose a folder below it")
    try:
        yield from _local(folder, target, overwrite)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write there: {error.strerror or error}; choose a folder you may write to, with room"
        ) from error


def _local(folder: Path, target: Target, overwrite: bool) -> Iterator[Path]:
    name = target.name
    old = _existing([path.name for path in folder.iterdir()] if folder.exists() else [], target, str(folder), overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder.mkdir(exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".gemini-export-", dir=folder.parent if name is None else folder))
    try:
        stage.chmod(0o777 & ~_umask())
        yield stage
        for path in (stage, *stage.rglob("*")):
            _sync(path)
        if name is not None:
            (stage / name).replace(folder / name)
        else:
            for key in old:
                shutil.rmtree(folder / key) if (folder / key).is_dir() else (folder / key).unlink()
            stage.replace(folder)  # rename(2) takes the place of an empty folder
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _existing(found: Sequence[str], target: Target, to: str, overwrite: bool) -> Sequence[str]:
    """What will be replaced.

    Raises:
        ConfigError: it must not be.
    """
    name = target.name
    old = [path for path in found if name in (None, path)]
    if old and not overwrite:
        raise ConfigError(f"{to}{'' if name is None else '/' + name} exists already; {_WAY_OUT}")
    if name is None and (others := [path for path in old if not re.fullmatch(target.own, path)]):
        raise ConfigError(f"{to} has {others[0]} in it ({len(others)} files that are of no export); choose an empty or a new folder")
    return sorted(old, key=lambda path: path != target.last)


def _upload(storage: Storage, stage: Path, target: Target, old: Sequence[str]) -> None:
    files = [str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file()]
    new = sorted(files, key=lambda path: path == target.last)
    if target.name is None:  # several objects: nothing is to be seen while they are exchanged
        for key in old:
            storage.delete(key)
    for key in new:
        storage.put(key, _read(stage / key))


def _read(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while part := file.read(_PART):
            yield part


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
