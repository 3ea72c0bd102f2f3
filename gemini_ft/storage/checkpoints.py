"""Checkpoints in storage: their keys, and the manifest that makes one exist.

    <run>/<stream>/step-00001234-inc-7-<nonce>/shard-00003.safetensors    one per owner
                                              /manifest.json              last: the commit

What has no manifest is torn, and no checkpoint.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemini_ft.core.versions import MOST, Incarnation, Version
from gemini_ft.errors import ConfigError, CorruptDataError, FormatError, StorageError
from gemini_ft.storage.base import WORD, Storage
from gemini_ft.storage.decisions import Descent
from gemini_ft.storage.shard import ShardRecord

FORMAT_VERSION: Final = 5  # of the manifest, and of all that it leads to: shards, layouts, the small state

_log = logging.getLogger(__name__)
_FOLDER = rf"(?P<run>{WORD})/(?P<stream>{WORD})/step-(?P<step>\d{{8,15}})-inc-(?P<number>\d{{1,15}})-(?P<nonce>{WORD})"
_MOST = 2**16  # fields of a manifest, and entries of each of its lists
_KEY = re.compile(rf"(?P<folder>{_FOLDER})/(?P<file>manifest\.json|shard-\d{{5,}}\.safetensors)")
MANIFEST: Final = "manifest.json"


def checkpoint_folder(run: str, stream: str, version: Version) -> str:
    """Key prefix of one checkpoint, without a slash at its end.

    Raises:
        ConfigError: ``run`` or ``stream`` cannot be a part of a key.
    """
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
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def version(self) -> Version:
        """The version of the state."""
        return Version(self.incarnation, self.iteration)

    @property
    def folder(self) -> str:
        """Key prefix of the checkpoint."""
        return checkpoint_folder(self.run, self.stream, self.version)

    @property
    def descent(self) -> Descent:
        """The descent of the state's incarnation."""
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


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Writes the manifest, which makes the checkpoint exist. Its shards must be there.

    Raises:
        StorageError: a shard is missing, or the storage failed.
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

    Raises:
        StorageError: the storage failed.
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

    Raises:
        StorageError: the storage failed.
    """
    found = [key for key in storage.list(f"{folder}/") if (match := _KEY.fullmatch(key)) and match["folder"] == folder]
    return sorted(found, key=lambda key: (not key.endswith(f"/{MANIFEST}"), key))


def with_checksum(document: BaseModel) -> bytes:
    """JSON of a document, with its own checksum."""
    body = document.model_dump(mode="json")
    return json.dumps({**body, "xxh3": body_checksum(body)}, indent=1).encode()


def checked(blob: bytes) -> dict[str, Any]:
    """The document that `with_checksum` wrote.

    Raises:
        ValueError: it is damaged.
    """
    try:
        body = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ValueError(f"it is no document but {type(body).__name__}")
    if body.pop("xxh3", None) != body_checksum(body):
        raise ValueError("it does not match its own checksum")
    return body


def body_checksum(body: dict[str, Any]) -> str:
    """XXH3-64 of the manifest without this very field, in one canonical spelling."""
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
