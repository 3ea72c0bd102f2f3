"""Deletes the checkpoints that the newest one has superseded: `gemini_ft.storage.decisions.superseded_by` decides."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, GeminiError, ObjectGoneError, StorageError
from gemini_ft.storage.base import Storage, exists
from gemini_ft.storage.checkpoints import MANIFEST, Manifest, checkpoint_folder, document, files_of, read_manifest
from gemini_ft.storage.decisions import Sighting, fenced, left_torn, superseded_by
from gemini_ft.storage.lookout import Lookout
from gemini_ft.storage.shard import StoredShard

READER_SECONDS = 6 * 3600.0  # for which this process has seen a reader's note, and the reader then counts as dead


def read_back(storage: Storage, manifest: Manifest) -> None:
    """Makes sure that a stored checkpoint is there: its manifest as it was written, every shard to its end, and samples of the bytes.

    Raises CorruptDataError: something of it is not as it was written. StorageError: the storage failed.
    """
    if read_manifest(storage, manifest.folder) != manifest:
        raise CorruptDataError(f"{storage.url}: {manifest.folder}/{MANIFEST} is not as it was written")
    for record in manifest.shards.values():
        StoredShard(storage, record).sample()


class Retention:
    """Deletes old checkpoints of one run and stream, after each that has been stored.

    ``present``: folders beside its ancestors that this incarnation saw when it chose what to resume; see `fenced`.
    """

    def __init__(
        self,
        reopen: Callable[[], Storage],  # opens the storage, with connections of its own
        run: str,
        stream: str,
        keep_last: int | None,  # newest checkpoints to keep, all of them read back as sound; None: nothing is deleted
        keep_every: int | None = None,  # also keep those whose iteration divides by this; of one iteration, the newest
        *,
        damaged: frozenset[str] = frozenset(),  # folders of checkpoints that are known to be damaged; they count for nothing
        may_delete: Callable[[], bool] = lambda: True,  # whether this process decides what is deleted; asked before each checkpoint
        present: Collection[str] | None = None,
    ) -> None:
        self._may_delete, self._present = may_delete, present
        self._reopen, self._run, self._stream = reopen, run, stream
        self._keep_last, self._keep_every, self._damaged = keep_last, keep_every, set(damaged)
        self._sound: set[str] = set()
        self._known: dict[str, Sighting] = {}  # by folder: seen or stored, and not deleted
        self._readers: dict[str, float] = {}  # readers' notes, and when each was seen first, in seconds of the monotonic clock
        self._storage: Storage | None = None

    def stored(self, newest: Manifest) -> Sighting:
        """Records a checkpoint that this process has stored and read back."""
        self._sound.add(newest.folder)
        self._known[newest.folder] = Sighting(newest.folder, newest.version, "whole", newest.descent, newest.created)
        return self._known[newest.folder]

    def tidy(self, this: Sighting) -> list[str]:
        """Deletes old checkpoints, and leftovers of earlier incarnations' uploads: on a full disk nothing else could be stored.

        ``this``: newest state of the incarnation that this process is of, or one that it will store; only what it knows is touched.

        Returns:
            Folders deleted, oldest first. A manifest goes before its shards, so that nothing half deleted is a checkpoint.

        Raises StorageError: the storage failed, or something could not be deleted; all else has been deleted.
        """
        keep_last = self._keep_last
        if keep_last is None:
            return []
        storage = self._storage = self._storage or self._reopen()
        every = self._look(storage)
        tip = self._examine(storage, this, every, keep_last)
        every = [Sighting(o.folder, o.version, "damaged", o.descent) if o.folder in self._damaged else o for o in every]
        doomed = {one.folder: one for one in left_torn(every, this)}
        if tip is not None:
            others = [one for one in every if one.folder != tip.folder]
            doomed |= {one.folder: one for one in superseded_by(others, tip, self._sound, keep_last, self._keep_every)}
        fence = fenced(every, this, self._present)
        free = [one for one in doomed.values() if one.version.incarnation not in this.descent.aside and one.folder not in fence]
        return self._delete_all(storage, sorted(free, key=lambda one: one.version))

    def _look(self, storage: Storage) -> list[Sighting]:
        """Lists everything that is there.

        Raises StorageError: that cannot be told now, or a listing is incomplete: old checkpoints could stay, unseen, for ever.
        """
        look = Lookout(lambda: storage, self._run, self._stream).look(self._damaged)
        if look.trouble:
            raise StorageError(look.trouble)
        seen = {one.folder: one for one in look.sightings}
        left_out = [look.left_out] if look.left_out else []
        for folder in self._known.keys() - seen.keys():
            if exists(storage, f"{folder}/{MANIFEST}"):
                left_out.append(folder)
            else:
                del self._known[folder]
        if left_out:
            raise StorageError(f"{storage.url}: the listing leaves out {min(left_out)}, which exists: old checkpoints cannot be identified")
        self._known |= {one.folder: one for one in look.sightings if one.condition not in ("torn", "gone")}
        return list(look.sightings)

    def _delete_all(self, storage: Storage, doomed: list[Sighting]) -> list[str]:
        held = held_by_readers(storage, self._run, self._stream, self._readers)
        deleted, failures = [], []
        for one in doomed:
            if not self._may_delete():
                break
            if one.folder in held:
                continue
            try:
                self._delete(storage, one)
                self._known.pop(one.folder, None)
                deleted.append(one.folder)
            except GeminiError as error:
                failures.append(str(error))
        if failures:
            raise StorageError(f"{len(failures)} old checkpoints could not be deleted: {failures[0]}")
        return deleted

    def _examine(self, storage: Storage, this: Sighting, every: list[Sighting], keep_last: int) -> Sighting | None:
        """Reads back as many of the newest ancestors as are to be kept, each once; returns the newest that is sound.

        Where there are no more than that, none of them can go, and none is read.
        """
        line = [one for one in every if one.readable and this.descends_from(one.version)]
        few = len(line) <= keep_last
        found: list[Sighting] = []
        for one in sorted(line, key=lambda one: one.version, reverse=True):
            if len(found) >= keep_last:
                break
            if not few and one.folder not in self._sound | self._damaged:
                is_sound = _is_sound(storage, one.folder) or _is_sound(self._reopen(), one.folder)
                (self._sound if is_sound else self._damaged).add(one.folder)
            if one.folder in self._sound:
                found.append(one)
        return found[0] if found else None

    def _delete(self, storage: Storage, one: Sighting) -> None:
        """Deletes a checkpoint, its manifest first and by name: a listing may have left it out."""
        manifest = f"{one.folder}/{MANIFEST}"
        if one.condition == "torn" and exists(storage, manifest):
            return
        storage.delete(manifest)
        for key in files_of(storage, one.folder):
            storage.delete(key)


@contextmanager
def reading(storage: Storage, run: str, stream: str, version: Version) -> Iterator[None]:
    """Inside, no other process's retention deletes this checkpoint; where nothing can be written, it is read without that."""
    key = f"{run}/{stream}.reading-{secrets.token_hex(8)}.json"
    said = json.dumps({"folder": checkpoint_folder(run, stream, version)}).encode()
    with suppress(StorageError):
        storage.put(key, [said])
    try:
        yield
    finally:
        with suppress(StorageError):
            storage.delete(key)


def held_by_readers(storage: Storage, run: str, stream: str, seen: dict[str, float]) -> set[str]:
    """The folders that readers hold; leftovers of dead readers are cleared away.

    A reader's clock may be hours off, and says nothing of its age: ``seen`` has each note with the time at which it was seen here first.

    Raises StorageError: the storage failed.
    """
    held: set[str] = set()
    now, notes = time.monotonic(), storage.list(f"{run}/{stream}.reading-")
    for key in seen.keys() - set(notes):
        del seen[key]
    for key in notes:
        try:
            folder = str(document(storage.get(key))["folder"])
        except ObjectGoneError:
            continue
        except (ValueError, KeyError):
            folder = ""
        if folder and now - seen.setdefault(key, now) < READER_SECONDS:
            held.add(folder)
        else:
            storage.delete(key)
    return held


def _is_sound(storage: Storage, folder: str) -> bool:
    try:
        read_back(storage, read_manifest(storage, folder))
    except (CorruptDataError, ObjectGoneError):
        return False
    return True
