"""What must hold of stored checkpoints (`simulation.history`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]
MANIFEST = "/manifest.json"


def order(version: str) -> tuple[int, str, int]:
    """A version as it is compared with others."""
    incarnation, _, iteration = version.rpartition(":")
    number, _, nonce = incarnation.partition("-")
    return int(number), nonce, int(iteration)


class StorageRules:
    """The checkpoints in storage, as the history tells of them, and the rules for them."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.stained: set[tuple[int, str]] = set()  # (owner, version) of copies that were damaged while they were written
        self.committed: set[str] = set()
        self.objects: set[str] = set()
        self.stored: set[str] = set()  # versions that were reported as stored
        self.manifests: dict[str, tuple[str, set[str]]] = {}  # folder -> version, and the keys of its shards
        self.halved: set[str] = set()  # keys of objects of which storage has kept a half
        self.rotten: set[str] = set()  # keys of objects that were damaged in storage
        self.mended: set[str] = set()  # folders in which something was made good since the present attempt began
        self.passed_over: set[str] = set()  # folders of checkpoints that were damaged when something older was resumed
        self.keep_last = 1
        self.active: dict[str, int] = {}  # folder of an upload that is under way -> the event with which it began
        self.put_at: dict[str, int] = {}  # key -> the event that has written it
        self.refusal = ""  # why the last upload has failed; empty: it has not
        self.readers: dict[str, str] = {}  # key of a reader's note -> the folder that it holds
        self.looked: dict[str, set[str]] = {}  # process -> the readers' notes that it has seen last
        self.number = 0  # of the event
        self.stored_since_calm = False

    def _must(self, holds: bool, event: Event, text: str) -> None:
        """Notes a violation, unless it ``holds``."""
        if not holds:
            self.found.append(f"{event['at']:.6f} {event['event']}: {text}")

    def _is_there(self, folder: str) -> bool:
        """Whether all objects of a checkpoint are there."""
        return folder in self.manifests and folder + MANIFEST in self.objects and self.manifests[folder][1] <= self.objects

    def _is_whole(self, folder: str) -> bool:
        """Whether a checkpoint can be resumed."""
        return self._is_there(folder) and not self.rotten & {folder + MANIFEST, *self.manifests[folder][1]}

    def _rot(self, event: Event) -> None:
        """Remembers a stored object that was damaged."""
        self.rotten.add(event["key"])

    def _mended(self, event: Event) -> None:
        """Remembers a stored object that was made good."""
        self.rotten.discard(event["key"])
        self.halved.discard(event["key"])
        self.mended.add(event["key"].rpartition("/")[0])

    def _settings(self, event: Event) -> None:
        """Remembers how many checkpoints are to be kept."""
        self.keep_last = event["keep_last"]

    def _thaw(self, event: Event) -> None:
        """An upload is over."""
        self.active.pop(event["folder"], None)
        self.refusal = event.get("error", "")

    def _looked(self, event: Event) -> None:
        """Remembers which readers' notes a host has seen."""
        self.looked[event["by"]] = {*event["seen"]}

    def _put(self, event: Event) -> None:
        """A manifest is written of what was committed, when all of its shards are there with the bytes that were made."""
        key = event["key"]
        self.objects.add(key)
        self.rotten.discard(key)
        self.halved.discard(key)
        self.put_at[key] = self.number
        if "holds" in event:
            self.readers[key] = event["holds"]
        if "stored" in event:
            self._on_mark(event, event["stored"])
        if key.endswith(MANIFEST):
            folder = key.removesuffix(MANIFEST)
            self.manifests[folder] = event["version"], {*event["shards"]}
            self._must(event["version"] in self.committed, event, f"a manifest of {event['version']} is written, which is not committed")
            self._must(self._is_there(folder), event, f"a manifest of {event['version']} is written, and shards of it are not there")
            unsound = [
                each for each in event.get("unsound", ()) if each not in self.rotten and not self._is_stained(each, event["version"])
            ]
            self._must(not unsound, event, f"a manifest of {event['version']} is written, and {unsound} have other bytes than were made")

    def _is_stained(self, key: str, version: str) -> bool:
        """Whether a shard was damaged before its owner's own copy was whole."""
        return any(of == version and key.endswith(f"-{owner:05d}.safetensors") for owner, of in self.stained)

    def _halved(self, event: Event) -> None:
        """Remembers an object of which storage has kept a half."""
        self.rotten.add(event["key"])
        self.halved.add(event["key"])

    def _putting(self, event: Event) -> None:
        """Only a host that leads, as far as it has heard, begins to write a manifest."""
        self._must(event["leads"], event, f"{event['by']} writes {event['key']}, and does not lead")

    def _on_mark(self, event: Event, version: str) -> None:
        """A checkpoint is reported as stored when all of it was read back."""
        self.stored.add(version)
        self.stored_since_calm = True
        for folder in [folder for folder, (of, _) in self.manifests.items() if of == version]:
            halved = sorted(self.halved & {folder + MANIFEST, *self.manifests[folder][1]})
            self._must(not halved, event, f"{version} is reported as stored, and storage has kept a half of {halved}")

    def _delete(self, event: Event) -> None:
        """A checkpoint goes when enough newer ones are stored and nobody reads it, its manifest first; nothing goes of an upload."""
        key, folder = event["key"], event["key"].rpartition("/")[0]
        if self._is_there(folder) and key in self.manifests[folder][1] and self.manifests[folder][0] in self.stored:
            self._must(False, event, f"{key} is deleted before its manifest")
        if self._is_there(folder) and key in {folder + MANIFEST, *self.manifests[folder][1]}:
            version = self.manifests[folder][0]
            newer = [other for other, (stored, _) in self.manifests.items() if order(stored) > order(version) and self._is_there(other)]
            kept = len(newer) >= self.keep_last or version not in self.stored or not self._is_whole(folder)
            self._must(
                kept or folder in self.passed_over, event, f"{key} is deleted, and {len(newer) or 'nothing'} newer than {version} is stored"
            )
            held = {note for note in self.looked.get(event.get("by", ""), set()) if self.readers.get(note) == folder}
            self._must(not held, event, f"{key} is deleted, and {sorted(held)} says that it is read")
        if not key.endswith(MANIFEST) and folder in self.active:
            self._must(self.put_at.get(key, 0) < self.active[folder], event, f"{key} is deleted, which an upload under way has written")
        self.objects.discard(key)
        self.readers.pop(key, None)
