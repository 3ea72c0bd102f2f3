"""The target of an export, a local folder or an S3 prefix; the export appears there whole, or not at all."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.export.stage import clear_leftovers, stage
from gemini_ft.storage.base import Storage
from gemini_ft.storage.opening import open_storage

_PART = 16 * 2**20  # bytes read at a time
_WAY_OUT = "choose another --to, or give --overwrite"


@dataclass(frozen=True)
class Target:
    """The files that one format writes.

    Attributes:
        name: the one file; None: a folder of several.
        last: the file that names the others, and without which they are no checkpoint.
        own: a pattern of the names in such a folder; files in folders go by their first part.
        tagged: ``last`` holds the name of the folder that all others are in.
    """

    name: str | None = None
    last: str = ""
    own: str = ""
    tagged: bool = False


DCP = Target(last=".metadata", own=r"\.metadata|.*\.distcp")
DEEPSPEED = Target(last="latest", own=r"latest|global_step\d+(-[0-9a-f]+)?(/.*)?", tagged=True)


@contextmanager
def staged(to: str, target: Target, overwrite: bool = False, endpoint_url: str | None = None) -> Iterator[Path]:
    """A folder to write into; its files appear in ``to`` when the block ends well.

    Args:
        to: local folder, ``file:///folder`` or ``s3://bucket/prefix``. For the latter the files lie in the temporary directory first.
            Until everything is there, what was there before stays as it was.
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
            with stage(Path(tempfile.gettempdir()), 0o700) as place:
                storage = open_storage(to, endpoint_url)
                old = _existing(storage.list(), target, to, overwrite)
                yield place.folder
                _upload(storage, place.folder, target, old)
        except OSError as error:
            temporary = tempfile.gettempdir()
            raise StorageError(f"{temporary}: cannot write there: {error.strerror or error}; set TMPDIR to a folder with room") from error
        return
    folder = Path(unquote(urlsplit(to).path) if scheme == "file" else to).resolve()
    if target.name is None and folder.is_mount():
        raise ConfigError(f"{folder} is a mount point, which cannot be exchanged for what is written; choose a folder below it")
    try:
        with _local(folder, target, overwrite) as place:
            yield place
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot write there: {error.strerror or error}; choose a folder you may write to, with room"
        ) from error


@contextmanager
def _local(folder: Path, target: Target, overwrite: bool) -> Iterator[Path]:
    name = target.name
    for parent in (folder, folder.parent):  # where one file, and where a folder would have been staged
        clear_leftovers(parent)
    _existing([path.name for path in folder.iterdir()] if folder.exists() else [], target, str(folder), overwrite)
    (folder.parent if name is None else folder).mkdir(parents=True, exist_ok=True)
    with stage(folder.parent if name is None else folder) as place:
        yield place.folder
        for path in (place.folder, *place.folder.rglob("*")):
            _sync(path)
        if name is not None:
            (place.folder / name).replace(folder / name)
            _sync(folder)
        else:
            place.take_place(folder, lambda entry: re.fullmatch(target.own, entry) is not None)
            _sync(folder.parent)


def _existing(found: Sequence[str], target: Target, to: str, overwrite: bool) -> Sequence[str]:
    """The files that will be replaced.

    Raises:
        ConfigError: it must not be.
    """
    name = target.name
    old = [path for path in found if name in (None, path)]
    if old and not overwrite:
        torn = f" (without {target.last}, as an export leaves it that was killed)" if name is None and target.last not in old else ""
        raise ConfigError(f"{to}{'' if name is None else '/' + name} exists already{torn}; {_WAY_OUT}")
    if name is None and (others := [path for path in old if not re.fullmatch(target.own, path)]):
        raise ConfigError(f"{to} has {others[0]} in it ({len(others)} files that are of no export); choose an empty or a new folder")
    return old


def _upload(storage: Storage, folder: Path, target: Target, old: Sequence[str]) -> None:
    """Writes the new files beside the old ones, then replaces the file that names them, and deletes the old ones last."""
    if target.tagged:
        _make_unlike(folder, target, old)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for key in sorted(files, key=lambda path: path == target.last):
        storage.put(key, _read(folder / key))
    if target.name is None:
        for key in sorted({*old} - {*files}):
            storage.delete(key)
        if missing := sorted({*files} - {*storage.list()}):
            raise StorageError(
                f"{storage.url}: {missing[0]} is gone again; was something else exported there at the same time? Do it once more"
            )


def _make_unlike(folder: Path, target: Target, old: Sequence[str]) -> None:
    """Renames the folder of an export if the old export has one of the same name."""
    tag = (folder / target.last).read_text()
    if any(key.startswith(f"{tag}/") for key in old):
        other = f"{tag}-{secrets.token_hex(4)}"
        (folder / tag).rename(folder / other)
        (folder / target.last).write_text(other)


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
