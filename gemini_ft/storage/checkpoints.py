"""Checkpoints in storage: their keys, the manifest that makes one exist, and the marks that a run has stored something.

    <run>/<stream>/step-00001234-inc-7-<nonce>/shard-00003.safetensors    one per owner
                                              /manifest.json              last: the commit

What has no manifest is torn, and no checkpoint. One mark is in storage, found without a listing, and one on every host that has taken part:
a folder that is not mounted, or a listing that comes back empty, then does not look like a run that has never begun.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from gemini_ft.core.goodput import MOST_FAILURES, Phase, RunTime
from gemini_ft.core.versions import MOST, Incarnation, Version
from gemini_ft.errors import ConfigError, CorruptDataError, FormatError, ObjectGoneError, StorageError
from gemini_ft.storage.base import WORD, Storage
from gemini_ft.storage.decisions import Descent
from gemini_ft.storage.shard import ShardRecord
from gemini_ft.wire.messages import MOST_VALUES

FORMAT_VERSION: Final = 5  # of the manifest, and of all that it leads to: shards, layouts, the small state

_log = logging.getLogger(__name__)
_FOLDER = rf"(?P<run>{WORD})/(?P<stream>{WORD})/step-(?P<step>\d{{8,15}})-inc-(?P<number>\d{{1,15}})-(?P<nonce>{WORD})"
_MOST_BYTES = 2**27  # of a document
_MOST = 2**16  # fields of a manifest, and entries of each of its lists
_KEY = re.compile(rf"(?P<folder>{_FOLDER})/(?P<file>manifest\.json|shard-\d{{5,}}\.safetensors)")
MANIFEST: Final = "manifest.json"


def checkpoint_folder(run: str, stream: str, version: Version) -> str:
    """Key prefix of one checkpoint, without a slash at its end. Raises ConfigError: ``run`` or ``stream`` cannot be a part of a key."""
    for option, value in (("run_id", run), ("name", stream)):
        if not re.fullmatch(WORD, value):
            raise ConfigError(f"{option}={value!r}: must be letters, digits and . _ -, not beginning with a dot, to be a name in storage")
    return f"{run}/{stream}/step-{version.iteration:08}-inc-{version.incarnation.number}-{version.incarnation.nonce}"


def shard_key(folder: str, owner: int) -> str:
    """Key of the shard that rank ``owner`` owns."""
    return f"{folder}/shard-{owner:05}.safetensors"


class Manifest(BaseModel):
    """The description of one checkpoint; every rank has a shard, even an empty one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[5] = FORMAT_VERSION
    run: str
    stream: str
    incarnation: Incarnation
    iteration: int = Field(ge=0)
    world_size: int = Field(gt=0)
    logical_hash: str  # of the layouts
    shards: dict[int, ShardRecord]  # by owner
    lineage: tuple[Version, ...] | None = None  # versions that it descends from, oldest first; None: not known
    overtaken: tuple[Incarnation, ...] = ()  # incarnations that its own knew of beside its ancestors
    aside: tuple[Incarnation, ...] = ()  # of these, those that the user has left aside
    versions: dict[str, str] = {}  # of the software that wrote it
    time: RunTime | None = None  # of the run, as the host that wrote it had seen it; None: not known
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def version(self) -> Version:
        return Version(self.incarnation, self.iteration)

    @property
    def folder(self) -> str:
        """Key prefix of the checkpoint."""
        return checkpoint_folder(self.run, self.stream, self.version)

    @property
    def descent(self) -> Descent:
        return Descent(lineage=self.lineage, overtaken=frozenset(self.overtaken), aside=frozenset(self.aside))

    @model_validator(mode="before")
    @classmethod
    def _one_by_one(cls, body: Any) -> Any:
        """Refuses the first shard that is none, and lists without end: an error for each of a million takes minutes, and a gigabyte."""
        if not isinstance(body, dict) or len(body) > _MOST or not isinstance(shards := body.get("shards"), dict):
            raise ValueError("no fields, or too many, or no shards")
        for name in ("lineage", "overtaken", "aside", "versions"):
            if isinstance(found := body.get(name), Sized) and len(found) > _MOST:
                raise ValueError(f"{len(found):,} entries of {name}")
        return body | {"shards": {int(owner): ShardRecord.model_validate(record) for owner, record in shards.items()}}

    @field_validator("time", mode="wrap")
    @classmethod
    def _believed(cls, given: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> RunTime | None:
        """Takes a ledger that cannot be, or is of an attempt to come, for one that is not known: no figure may cost a checkpoint."""
        try:
            found: RunTime | None = check(given) if _is_short(given) else None
        except ValidationError:
            return None
        own = info.data.get("incarnation")
        return found if found is not None and own is not None and found.incarnation <= own.number else None

    @model_validator(mode="after")
    def _complete(self) -> Manifest:
        named = (self.incarnation, *self.overtaken, *self.aside, *(version.incarnation for version in self.lineage or ()))
        if beyond := [incarnation for incarnation in named if not 0 <= incarnation.number <= MOST]:
            raise ValueError(f"incarnation {beyond[0]}: no job comes that far")
        if self.created.tzinfo is None:
            raise ValueError(f"created {self.created}: a time without a zone")
        if len(self.shards) != self.world_size or sorted(self.shards) != list(range(self.world_size)):
            raise ValueError(f"shards of owners {sorted(self.shards)}, expected 0 to {self.world_size - 1}")
        if wrong := [record.key for owner, record in self.shards.items() if record.key != shard_key(self.folder, owner)]:
            raise ValueError(f"shard {wrong[0]} does not belong to {self.folder}")
        return self


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as far as its keys tell."""

    folder: str
    run: str
    stream: str
    version: Version

    @property
    def iteration(self) -> int:
        """Iterations done in it."""
        return self.version.iteration


def _is_short(time: Any) -> bool:
    """Whether the time of a run can be checked at once: an error for each of a million values takes minutes, and a gigabyte."""
    if not isinstance(time, dict):
        return True
    failures = time.get("failures", ())
    if not isinstance(failures, list | tuple) or len(failures) > MOST_FAILURES:
        return False
    spent = [time.get("seconds"), *(failure.get("seconds") for failure in failures if isinstance(failure, dict))]
    return all(not isinstance(seconds, Sized) or len(seconds) <= len(Phase) for seconds in spent)


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Writes the manifest, which makes the checkpoint exist. Its shards must be there.

    Raises StorageError: a shard is missing, or the storage failed.
    """
    present = set(storage.list(f"{manifest.folder}/"))
    if missing := sorted({record.key for record in manifest.shards.values()} - present):
        raise StorageError(f"{storage.url}: {missing[0]} is missing ({len(missing)} in all); without it this is no checkpoint")
    storage.put(f"{manifest.folder}/{MANIFEST}", [with_checksum(manifest)])


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Reads and checks a checkpoint's manifest.

    Raises:
        CorruptDataError: it is damaged.
        FormatError: it is sound, and of a format that this version cannot read.
        StorageError: the storage failed.
    """
    key = f"{folder}/{MANIFEST}"
    try:
        body = checked(storage.get(key))
    except ValueError as error:
        raise CorruptDataError(f"{storage.url}: {key} is damaged: {error}; use an older checkpoint") from None
    if body.get("format") != FORMAT_VERSION:
        raise FormatError(
            f"{storage.url}: {key} has format {body.get('format')!r}, this gemini_ft reads format {FORMAT_VERSION}; "
            f"use the gemini_ft that wrote it ({body.get('versions')}), another run_id, or resume='never'"
        )
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        raise CorruptDataError(f"{storage.url}: {key} is no manifest: {error}") from None
    if manifest.folder != folder:
        raise CorruptDataError(f"{storage.url}: {key} is the manifest of {manifest.folder}; use an older checkpoint")
    return manifest


def list_checkpoints(storage: Storage, run: str | None = None, stream: str | None = None) -> list[CheckpointInfo]:
    """All checkpoints that have a manifest, of one run and stream or of all; of each line the newest first."""
    return [info for info, files in scan(storage, run, stream).items() if MANIFEST in files]


def examine(storage: Storage, run: str | None = None) -> Iterator[tuple[CheckpointInfo, Manifest | None, str]]:
    """Everything that is, was, or may become a checkpoint, newest first in each line.

    With each its manifest, if that can be read, and what is wrong with it; empty: it is whole. Of shards only their presence
    is looked at; `gemini_ft.storage.shard.StoredShard.verify` reads them.
    """
    for info, files in scan(storage, run, None).items():
        yield info, *_examine(storage, info, files)


def _examine(storage: Storage, info: CheckpointInfo, files: Collection[str]) -> tuple[Manifest | None, str]:
    if MANIFEST not in files:
        return None, f"incomplete: no manifest, {len(files)} shards (a torn upload, or one under way)"
    try:
        manifest = read_manifest(storage, info.folder)
    except CorruptDataError:
        return None, "damaged: its manifest"
    except StorageError as error:
        return None, f"unreadable: {error}"
    missing = missing_shards(manifest, files)
    return manifest, f"damaged: {missing[0].rpartition('/')[2]} is missing ({len(missing)} in all)" if missing else ""


def missing_shards(manifest: Manifest, files: Collection[str]) -> list[str]:
    """Keys of shards that are not among these files."""
    return sorted(record.key for record in manifest.shards.values() if record.key.rpartition("/")[2] not in files)


def scan(storage: Storage, run: str | None, stream: str | None) -> dict[CheckpointInfo, set[str]]:
    """Every checkpoint, whole or torn, and its files; sorted by run and stream, then newest first.

    Raises StorageError: the storage failed.
    """
    prefix = "" if run is None else f"{run}/" if stream is None else f"{run}/{stream}/"
    found: dict[CheckpointInfo, set[str]] = {}
    for key in storage.list(prefix):
        if match := _KEY.fullmatch(key):
            version = Version(Incarnation(int(match["number"]), match["nonce"]), int(match["step"]))
            info = CheckpointInfo(folder=match["folder"], run=match["run"], stream=match["stream"], version=version)
            if stream in (None, info.stream):
                found.setdefault(info, set()).add(match["file"])
    newest_first = sorted(found, key=lambda info: info.version, reverse=True)
    return {info: found[info] for info in sorted(newest_first, key=lambda info: (info.run, info.stream))}


def files_of(storage: Storage, folder: str) -> list[str]:
    """Keys of a checkpoint's files, the manifest first. Files of other programs beside them are left out.

    Raises StorageError: the storage failed.
    """
    found = [key for key in storage.list(f"{folder}/") if (match := _KEY.fullmatch(key)) and match["folder"] == folder]
    return sorted(found, key=lambda key: (not key.endswith(f"/{MANIFEST}"), key))


def with_checksum(document: BaseModel) -> bytes:
    """JSON of a document, with its own checksum."""
    body = document.model_dump(mode="json")
    return json.dumps({**body, "xxh3": body_checksum(body)}, indent=1).encode()


def document(blob: bytes) -> dict[str, Any]:
    """The fields of a JSON document in storage, which anyone who can write there may have written.

    Raises ValueError: it is no JSON object, or has more bytes or values than any manifest (they are counted before it is parsed).
    """
    if not blob.isascii() or len(blob) > _MOST_BYTES or sum(map(blob.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes, {MOST_VALUES:,} values, or characters beyond ASCII")
    try:
        body = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ValueError(f"it is no document but {type(body).__name__}")
    return body


def checked(blob: bytes) -> dict[str, Any]:
    """The document that `with_checksum` wrote. Raises ValueError: it is damaged."""
    body = document(blob)
    if body.pop("xxh3", None) != body_checksum(body):
        raise ValueError("it does not match its own checksum")
    return body


def body_checksum(body: dict[str, Any]) -> str:
    """XXH3-64 of the manifest without this very field, in one canonical spelling."""
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


class Mark(BaseModel):
    """The newest version that was reported as stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    stream: str
    version: Version
    url: str = ""  # on a host: in which storage
    at: float = Field(default_factory=time.time)  # when, on the clock of the host


def mark_key(run: str, stream: str) -> str:
    return f"{run}/{stream}.stored.json"


def write_mark(storage: Storage, run: str, stream: str, version: Version) -> None:
    """Writes the mark to storage; a checkpoint counts as stored once it is there. Raises StorageError: the storage failed."""
    storage.put(mark_key(run, stream), [with_checksum(Mark(run=run, stream=stream, version=version))])


def read_mark(storage: Storage, run: str, stream: str) -> Version | None:
    """The newest version that was reported as stored; None: the store says that there is no mark.

    Raises CorruptDataError: what came is no mark of this run. StorageError: the storage failed.
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
