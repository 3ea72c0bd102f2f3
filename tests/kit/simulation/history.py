"""Checks what was recorded of a run; pure.

The events of a run, in the order in which they happened, are dicts with ``event`` and ``at``, in seconds. Versions are texts,
``3-0a1b2c3d:120``: incarnation and iteration. What must hold:

``commit``    every holder that counts has made a whole copy, and has it unless something has happened to it since;
              commits of one leader go on, and nothing that was aborted is committed
``heard``     a rank is told of no commit but one that a leader has decided
``chosen``    nothing that was committed is passed over while memory of the hosts that choose has a sound copy of every shard, and nothing
              that is stored while storage has all of it
``read``      what is resumed has the bytes that were made, and is what was chosen
``put``       a manifest is written only of what was committed, and when all of its shards are there
``delete``    a checkpoint that is whole, and was reported as stored, goes only when a newer one is; that of an upload that failed may go
``end``       when nothing fails any more, the job comes up and commits
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
MANIFEST = "/manifest.json"
_HARM = frozenset({"host lost", "agent killed", "replaced", "left", "flip", "killed"})  # events after which a host may lack what it had


def order(version: str) -> tuple[int, str, int]:
    """A version as it is compared with others."""
    incarnation, _, iteration = version.rpartition(":")
    number, _, nonce = incarnation.partition("-")
    return int(number), nonce, int(iteration)


def violations(history: Iterable[Event]) -> list[str]:
    """Everything in a history that must not be."""
    check = _Check()
    for event in history:
        check.take(event)
    return check.found


class _Check:
    def __init__(self) -> None:
        self.found: list[str] = []
        self.copies: dict[tuple[str, int, str], float] = {}  # (host, owner, version) -> when a sound copy was made there
        self.harm: dict[str, float] = {}  # host -> when something happened to it last
        self.committed: set[str] = set()
        self.aborted: set[str] = set()
        self.newest: dict[tuple[str, str, int], tuple[int, str, int]] = {}  # (incarnation, leader, epoch) -> its last commit
        self.chosen: str | None = None
        self.objects: set[str] = set()
        self.stored: set[str] = set()  # versions that were reported as stored
        self.manifests: dict[str, tuple[str, set[str]]] = {}  # folder -> version, and the keys of its shards
        self.commits_since_calm: int | None = None

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind in _HARM and "host" in event:
            self.harm[event["host"]] = event["at"]
        judge = getattr(self, f"_{kind.replace(' ', '_')}", None)
        if judge is not None:
            judge(event)

    def _must(self, holds: bool, event: Event, text: str) -> None:
        if not holds:
            self.found.append(f"{event['at']:.6f}: {text}")

    # -- commits

    def _copy(self, event: Event) -> None:
        self.copies.setdefault((event["host"], event["owner"], event["version"]), event["at"])

    def _abort(self, event: Event) -> None:
        self._must(event["version"] not in self.committed, event, f"{event['version']} was committed, and is aborted")
        self.aborted.add(event["version"])

    def _commit(self, event: Event) -> None:
        version, host = event["version"], event["host"]
        if not event["leads"]:
            self._must(version in self.committed, event, f"host {host} hears of a commit of {version}, which no leader has decided")
            return
        place = version.rpartition(":")[0], host, event["epoch"]
        before = self.newest.setdefault(place, order(version))
        self._must(order(version) >= before, event, f"the leader on {host} commits {version} after iteration {before[2]}")
        self.newest[place] = max(before, order(version))
        if self.commits_since_calm is not None:
            self.commits_since_calm += 1
        if version in self.committed:
            return  # it is said again, by this leader or the next
        self.committed.add(version)
        self._must(version not in self.aborted, event, f"{version} was aborted, and is committed")
        excluded = {(owner, name) for owner, name in event["excluded"]}
        for owner, hosts in event["holders"].items():
            self._must((owner, hosts[0]) not in excluded, event, f"{version} is committed without rank {owner}'s own copy")
            for name in hosts:
                if (owner, name) not in excluded:
                    self._holds(event, version, owner, name)

    def _holds(self, event: Event, version: str, owner: int, host: str) -> None:
        made = self.copies.get((host, owner, version))
        self._must(made is not None, event, f"{version} is committed, and {host} has never had rank {owner}'s shard of it")
        if made is not None and self.harm.get(host, -1.0) < made:
            has = host in event["copies"].get(owner, [])
            self._must(has, event, f"{version} is committed, and {host} has rank {owner}'s shard of it no more")

    def _heard(self, event: Event) -> None:
        version = event["version"]
        self._must(version in self.committed, event, f"rank {event['rank']} hears of a commit of {version}, which no leader has decided")

    # -- resuming

    def _chosen(self, event: Event) -> None:
        self.chosen = version = event["version"]
        at = order(version) if version is not None else (0, "", 0)
        ranks = range(event["ranks"])
        passed_over = [other for other in self.committed - {*event["given_up"]} if order(other) > at]
        for other in sorted(passed_over, key=order):
            held = event["copies"].get(other, {})
            whole = all(held.get(owner) for owner in ranks)
            self._must(not whole, event, f"{other} is committed and whole on {event['hosts']}, and {version} is resumed")
        for folder, (stored, _) in self.manifests.items():
            if order(stored) > at and stored not in event["given_up"]:
                self._must(not self._is_whole(folder), event, f"{stored} is whole in storage, and {version} is resumed")

    def _read(self, event: Event) -> None:
        what = f"rank {event['rank']} resumes {event['version']}, and {self.chosen} was chosen"
        self._must(event["version"] == self.chosen, event, what)

    def _wrong_bytes(self, event: Event) -> None:
        self._must(False, event, f"rank {event['rank']} reads other bytes of {event['version']} from {event['where']} than were made")

    # -- storage

    def _is_whole(self, folder: str) -> bool:
        return folder in self.manifests and folder + MANIFEST in self.objects and self.manifests[folder][1] <= self.objects

    def _put(self, event: Event) -> None:
        key = event["key"]
        self.objects.add(key)
        self.stored |= {event["stored"]} if "stored" in event else set()
        if key.endswith(MANIFEST):
            folder = key.removesuffix(MANIFEST)
            self.manifests[folder] = event["version"], {*event["shards"]}
            self._must(event["version"] in self.committed, event, f"a manifest of {event['version']} is written, which is not committed")
            self._must(self._is_whole(folder), event, f"a manifest of {event['version']} is written, and shards of it are not there")

    def _delete(self, event: Event) -> None:
        key, folder = event["key"], event["key"].rpartition("/")[0]
        if self._is_whole(folder) and key in {folder + MANIFEST, *self.manifests[folder][1]}:
            version = self.manifests[folder][0]
            newer = [other for other, (stored, _) in self.manifests.items() if order(stored) > order(version) and self._is_whole(other)]
            self._must(bool(newer) or version not in self.stored, event, f"{key} is deleted, and nothing newer than {version} is stored")
        self.objects.discard(key)

    # -- the end

    def _calm(self, event: Event) -> None:
        self.commits_since_calm = 0

    def _end(self, event: Event) -> None:
        self._must(bool(self.commits_since_calm), event, "nothing fails any more, and nothing is committed")
