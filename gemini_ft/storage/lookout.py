"""Looks at a run's storage with distrust: damage is believed after a second reading, absence after a second question."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import wait
from typing import TypeVar

from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, FormatError, ObjectGoneError, StorageError, StorageUnclearError, SupersededError
from gemini_ft.ordered import on_thread
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import (
    MANIFEST,
    CheckpointInfo,
    Manifest,
    checkpoint_folder,
    list_checkpoints,
    missing_shards,
    read_manifest,
    read_mark,
    scan,
)
from gemini_ft.storage.decisions import CanResume, Condition, Descent, Look, NothingStored, Sighting, decide

_T = TypeVar("_T")
_LOOKS = 3  # listings to ask for where one names a missing object: retention may have been at work in between
_PAUSE = 0.2  # seconds before the second one, doubled for the third

_log = logging.getLogger("gemini_ft")


@functools.lru_cache(maxsize=1000)
def _warn(text: str) -> None:
    """Warns once in a process: storage is looked at for each upload, and what is damaged there stays as it is."""
    _log.warning("%s", text)


class Lookout:
    """Looks at one run and stream.

    ``reopen``: opens the storage, with connections of its own. ``remembered``: versions that hosts remember as stored.
    """

    def __init__(self, reopen: Callable[[], Storage], run: str, stream: str, remembered: Collection[Version] = ()) -> None:
        self._reopen, self._run, self._stream = reopen, run, stream
        self._remembered = tuple(remembered)
        self._storage: Storage | None = None
        self.manifests: dict[str, Manifest] = {}  # folder -> the manifest that was read

    def look(self, passed: Collection[str] = ()) -> Look:
        """Looks at the storage. Of each incarnation the newest sound manifest is read, the others only when they are needed.

        ``passed``: folders of checkpoints whose shards turned out to be damaged or gone when they were read.

        Raises FormatError: one is of a format that this version cannot read; going back to an older one silently would lose work.
        """
        try:
            for attempt in range(_LOOKS):
                look = self._look(passed)
                if not any(sighting.condition == "gone" for sighting in look.sightings):
                    break
                time.sleep(_PAUSE * 2**attempt)
        except FormatError:
            raise
        except (CorruptDataError, StorageError) as error:
            return Look(trouble=str(error))
        return look

    def read(self, folder: str) -> Manifest | None:
        """The manifest of a checkpoint that the last look has listed; None: it is not sound, or not there.

        Raises StorageError: the storage failed.
        """
        if folder not in self.manifests:
            try:
                self.manifests[folder] = self._twice(self._opened(), lambda at: read_manifest(at, folder))
            except (CorruptDataError, ObjectGoneError) as error:
                _warn(str(error))
                return None
        return self.manifests[folder]

    def _look(self, passed: Collection[str]) -> Look:
        storage = self._opened()
        mark, damaged_mark = self._mark(storage)
        try:
            listed = scan(storage, self._run, self._stream)
        except ObjectGoneError:  # there is no such bucket, or folder
            listed = {}
        unlisted = ""
        if mark is not None:
            info = CheckpointInfo(folder=checkpoint_folder(self._run, self._stream, mark), run=self._run, stream=self._stream, version=mark)
            if MANIFEST not in listed.setdefault(info, set()):
                unlisted = info.folder
            listed[info].add(MANIFEST)
        known: dict[Incarnation, Descent] = {}
        newest_first = sorted(listed, key=lambda info: info.version, reverse=True)
        sightings = [self._sight(storage, info, listed[info], known, passed, info.folder == unlisted) for info in newest_first]
        marks = tuple(version for version in (mark, *self._remembered) if version is not None)
        left_out = next((one.folder for one in sightings if one.folder == unlisted and one.condition != "gone"), "")
        return Look(sightings=tuple(sightings), marks=marks, damaged_mark=damaged_mark, left_out=left_out)

    def _opened(self) -> Storage:
        if self._storage is None:
            self._storage = self._reopen()
        return self._storage

    def _mark(self, storage: Storage) -> tuple[Version | None, bool]:
        try:
            return self._twice(storage, lambda at: read_mark(at, self._run, self._stream)), False
        except CorruptDataError as error:
            _warn(str(error))
            return None, True

    def _sight(
        self,
        storage: Storage,
        info: CheckpointInfo,
        files: set[str],
        known: dict[Incarnation, Descent],
        passed: Collection[str],
        is_unlisted: bool,
    ) -> Sighting:
        incarnation = info.version.incarnation
        if MANIFEST not in files:
            return Sighting(info.folder, info.version, "torn")
        if info.folder in passed:
            return Sighting(info.folder, info.version, "damaged")
        # One that no listing names may be gone: the mark is older where a leader was lost before it wrote the next.
        if incarnation in known and not is_unlisted:
            return Sighting(info.folder, info.version, "listed", known[incarnation])
        try:
            manifest = self._twice(storage, lambda at: read_manifest(at, info.folder))
        except ObjectGoneError:
            return Sighting(info.folder, info.version, "gone")
        except CorruptDataError as error:
            _warn(f"{error} (read twice)")
            return Sighting(info.folder, info.version, "damaged")
        self.manifests[info.folder] = manifest
        condition: Condition = "whole"
        if missing := self._missing(storage, manifest, files):
            _warn(f"{storage.url}: {missing[0]} is missing")
            condition = "lacking"
        else:
            known[incarnation] = manifest.descent
        return Sighting(info.folder, info.version, condition, manifest.descent, manifest.created)

    def _missing(self, storage: Storage, manifest: Manifest, files: set[str]) -> list[str]:
        """Shards that no listing names and that cannot be read either."""
        missing = missing_shards(manifest, files)
        if missing:
            missing = missing_shards(manifest, {key.rpartition("/")[2] for key in storage.list(f"{manifest.folder}/")})
        return [key for key in missing if not _is_there(storage, key)]

    def _twice(self, storage: Storage, read: Callable[[Storage], _T]) -> _T:
        """Calls ``read``; an object that is damaged or gone is read again on a new connection before that is believed."""
        try:
            return read(storage)
        except CorruptDataError as error:
            _warn(f"{error}; reading it again")
            return read(self._reopen())
        except ObjectGoneError:
            return read(self._reopen())


def newest_whole(storage: Storage, run: str, stream: str) -> Manifest | None:
    """The checkpoint that a job would resume; None: storage proves that there never was one.

    Raises:
        StorageUnclearError: there is one, or there has been, and which cannot be told.
        FormatError: the newest is of a format that this version cannot read.
    """
    lookout = Lookout(lambda: storage, run, stream)
    match decide(lookout.look()):
        case CanResume(order=order):
            return lookout.manifests[order[0].folder]
        case NothingStored():
            return None
        case unclear:
            raise StorageUnclearError(f"{storage.url}: {unclear.why}; `gemini checkpoints {storage.url}` says what is wrong with each")


def check_not_superseded(storage: Storage, manifest: Manifest) -> None:
    """Makes sure that no other job has the same run id: its checkpoints would be mixed with this one's.

    Raises SupersededError: an incarnation that this one knows nothing of has stored a checkpoint here. StorageError: the storage failed.
    """
    listed = (_unknown(storage, manifest, info.version) for info in list_checkpoints(storage, manifest.run, manifest.stream))
    if found := next(filter(None, listed), None) or other_by_mark(storage, manifest):
        raise SupersededError(
            f"{storage.url}: {found.folder} is of an incarnation that this job's, {manifest.incarnation}, does not know: another job has "
            f"taken run id {manifest.run!r} over. End one of the two, or give them different run ids (GEMINI_RUN_ID). If that was a part "
            "of this job that was cut off, start the same command again with one of two options: storage.history="
            f"{manifest.incarnation} goes on from what this part has stored, storage.history={found.incarnation} from the other's"
        )


def other_by_mark(storage: Storage, manifest: Manifest) -> Manifest | None:
    """The checkpoint that the run's mark names, which a listing may not show yet, if another job has stored it.

    Raises StorageError: the storage failed.
    """
    try:
        marked = read_mark(storage, manifest.run, manifest.stream)
    except CorruptDataError as error:
        _warn(str(error))
        return None
    return _unknown(storage, manifest, marked) if marked is not None else None


def _unknown(storage: Storage, manifest: Manifest, version: Version) -> Manifest | None:
    """The checkpoint of that version, if its incarnation is none that this manifest's knows, and it can be read."""
    if Sighting(manifest.folder, manifest.version, "whole", manifest.descent).knows(version.incarnation):
        return None
    try:
        return read_manifest(storage, checkpoint_folder(manifest.run, manifest.stream, version))
    except (CorruptDataError, ObjectGoneError) as error:
        _warn(str(error))
        return None


def within(seconds: float, what: str, work: Callable[[], _T]) -> _T:
    """Calls ``work`` in a thread and returns its result; a call that takes longer is left to itself.

    Raises StorageError: it did not come to an end in time. Else whatever ``work`` raises.
    """
    outcome = on_thread(work, "gemini-storage")
    if not wait([outcome], seconds).done:
        raise StorageError(f"{what}: storage did not answer within {seconds:g} s; does it hang?")
    return outcome.result()


def _is_there(storage: Storage, key: str) -> bool:
    try:
        storage.get_range(key, 0, memoryview(bytearray(1)))
    except (ObjectGoneError, CorruptDataError):
        return False
    return True
