"""Marks that a run has stored something: one in storage, found without a listing, and one on every host that has taken part.

A folder that is not mounted, or a listing that comes back empty, then does not look like a run that has never begun.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, ObjectGoneError
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import checked, with_checksum

_log = logging.getLogger(__name__)


class Mark(BaseModel):
    """The newest version that was reported as stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    stream: str
    version: Version
    url: str = ""  # on a host: in which storage
    at: float = Field(default_factory=time.time)  # when, on the clock of the host


def mark_key(run: str, stream: str) -> str:
    """Key of the mark in storage."""
    return f"{run}/{stream}.stored.json"


def write_mark(storage: Storage, run: str, stream: str, version: Version) -> None:
    """Writes the mark to storage; a checkpoint counts as stored once it is there.

    Raises:
        StorageError: the storage failed.
    """
    storage.put(mark_key(run, stream), [with_checksum(Mark(run=run, stream=stream, version=version))])


def read_mark(storage: Storage, run: str, stream: str) -> Version | None:
    """The newest version that was reported as stored; None: the store says that there is no mark.

    Raises:
        CorruptDataError: what came is no mark of this run.
        StorageError: the storage failed.
    """
    key = mark_key(run, stream)
    try:
        mark = Mark.model_validate(checked(storage.get(key)))
    except ObjectGoneError:
        return None
    except ValueError as error:  # pydantic's errors are some
        raise CorruptDataError(f"{storage.url}: {key} is damaged: {error}") from None
    if (mark.run, mark.stream) != (run, stream):
        raise CorruptDataError(f"{storage.url}: {key} is the mark of {mark.run}/{mark.stream}")
    return mark.version


def note_on_host(url: str, run: str, stream: str, version: Version) -> None:
    """Notes on this host that ``version`` was stored; if the note cannot be written, it warns and goes on."""
    path = note_path(url, run, stream)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_bytes(with_checksum(Mark(run=run, stream=stream, version=version, url=url)))
        part.replace(path)
    except OSError as error:
        _log.warning("%s: cannot be written (%s): after a restart this host will not know that the run has stored anything", path, error)
        with suppress(OSError):
            part.unlink()


def recall_on_host(url: str, run: str, stream: str) -> Mark | None:
    """The last note of `note_on_host`; None: nothing, or it cannot be read."""
    try:
        mark = Mark.model_validate(checked(note_path(url, run, stream).read_bytes()))
    except (OSError, ValueError):
        return None
    return mark if (mark.url, mark.run, mark.stream) == (url, run, stream) else None


def state_folder() -> Path:
    """The folder of this host's notes: GEMINI_STATE_DIR, or gemini-ft in XDG_STATE_HOME, or in ~/.local/state."""
    if given := os.environ.get("GEMINI_STATE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "gemini-ft"


def note_path(url: str, run: str, stream: str) -> Path:
    """The file in which this host notes what was stored."""
    place = xxhash.xxh3_64_hexdigest(url.rstrip("/").encode())
    return state_folder() / f"{run}-{stream}-{place}.json"
