"""Agreeing on what to resume: the newest version that is whole, sound, and not known to fail. Collective, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gemini_ft.agent.client import AgentClient
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import CorruptDataError, ObjectGoneError
from gemini_ft.faults import Orders
from gemini_ft.messages import Inventory, Stage, Staged, Verified, Verify, Welcome
from gemini_ft.recovery import Holding, Plan, plan_recovery, require
from gemini_ft.rendezvous import exchange_or_raise
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import Manifest, newest_whole
from gemini_ft.versions import Version

_log = logging.getLogger("gemini_ft")
_VERIFY_SECONDS = 600.0  # reading all of a host's copies may take that long
_STAGE_SECONDS = 6 * 3600.0  # reading a host's part of a checkpoint from storage too


@dataclass(frozen=True)
class Introduction:
    """What a rank tells the others of itself and its host."""

    run: str
    welcome: Welcome
    inventory: Inventory
    configured_secret: str  # fingerprint, empty when none was configured
    config: str
    orders: Orders


@dataclass(frozen=True)
class Choice:
    """What the ranks have agreed to resume."""

    plan: Plan
    given_up: frozenset[Version]


class Chooser:
    """Finds what to resume, the same on every rank: collective."""

    def __init__(
        self,
        config: GeminiConfig,
        client: AgentClient,
        everyone: Sequence[Introduction],
        stream: str,
        storage: Storage | None,
        rank: int,
        resizable: bool,
    ) -> None:
        self._config, self._client, self._everyone, self._stream = config, client, everyone, stream
        self._storage, self._rank, self._resizable = storage, rank, resizable
        self._holdings = {about.welcome.info.host: Holding(about.welcome.info.host, about.inventory.slots) for about in everyone}
        self._damaged: set[str] = set()  # folders in storage

    def choose(self) -> Choice:
        """Obey ``resume``, and leave out what has led to failure after failure, unless there is nothing else.

        Raises:
            WorldSizeError: all there is was made by another number of ranks.
            RecoveryError: there is nothing to resume, and something is required.
            StorageError: the newest checkpoint is of a format that cannot be read.
        """
        stuck = self._stuck()
        given_up = frozenset(version for about in self._everyone for version in about.inventory.given_up) | stuck.keys()
        if self._config.resume == "never":
            return Choice(Plan("nothing"), given_up)
        choice = self._find(given_up)
        if choice.plan.version is None and given_up:
            choice = self._find(frozenset())  # rather one more failure than to start over what took weeks
        for version, attempts in stuck.items():
            then = "giving it up" if version != choice.plan.version else "there is nothing else, so it is tried again"
            self._warn("%s was resumed %d times in a row without one step of progress: %s", version, attempts, then)
        if self._config.resume == "require":
            require(choice.plan)
        return choice

    def _stuck(self) -> dict[Version, int]:
        """Versions that every attempt since has failed to get beyond, and the number of attempts."""
        welcomes = [about.welcome for about in self._everyone if about.welcome.attempts >= self._config.max_retries]
        return {welcome.resumed: welcome.attempts for welcome in welcomes if welcome.resumed is not None}

    def _find(self, refused: frozenset[Version]) -> Choice:
        """Plan, check the copies the plan needs against their checksums, and plan again without those that are damaged."""
        while True:
            manifest = exchange_or_raise(lambda: self._newest(refused) if self._rank == 0 else None, self._config.timeout)[0]
            stored, size = (manifest.version, manifest.world_size) if manifest is not None else (None, None)
            holdings, world_size = list(self._holdings.values()), len(self._everyone)
            plan = plan_recovery(holdings, world_size, stored, size, sorted(refused), self._resizable)
            if plan.kind == "memory":
                if not (damaged := self._damaged_in_memory(plan)):
                    return Choice(plan, refused)
                self._holdings = {h: _without(holding, plan.version, damaged.get(h, set())) for h, holding in self._holdings.items()}
            elif plan.kind == "storage" and manifest is not None and self._storage is not None:
                if all(exchange_or_raise(partial(self._stage, manifest), _STAGE_SECONDS)):
                    hosts = [about.welcome.info.host for about in self._everyone]
                    sources = {owner: (hosts[owner % world_size],) for owner in range(plan.world_size)}
                    return Choice(replace(plan, sources=sources), refused)
                self._warn("%s in storage is damaged or gone: trying the one before", manifest.folder)
                self._damaged.add(manifest.folder)
            else:
                return Choice(plan, refused)

    def _newest(self, refused: frozenset[Version]) -> Manifest | None:
        passed = set(self._damaged)
        while self._storage is not None:
            manifest = newest_whole(self._storage, self._everyone[0].run, self._stream, passed)
            if manifest is None or manifest.version not in refused:
                return manifest
            passed.add(manifest.folder)
        return None

    def _damaged_in_memory(self, plan: Plan) -> dict[str, set[int]]:
        """Host -> owners whose copies of the planned version are damaged there."""
        assert plan.version is not None
        question = Verify(version=plan.version)
        sound = exchange_or_raise(lambda: self._client.call(question, Verified, timeout=_VERIFY_SECONDS)[0].sound, _VERIFY_SECONDS)
        by_host = dict(zip((about.welcome.info.host for about in self._everyone), sound, strict=True))
        damaged: dict[str, set[int]] = {}
        for owner, hosts in plan.sources.items():
            for host in hosts:
                if owner not in by_host[host]:
                    damaged.setdefault(host, set()).add(owner)
        for host, owners in damaged.items():
            text = "host %s: the copies of ranks %s of %s do not match their checksums and are ignored"
            self._warn(text, host, sorted(owners), plan.version)
        return damaged

    def _stage(self, manifest: Manifest) -> bool:
        """Get our part of the shards into our host's memory; False if one is damaged in storage, or has been deleted.

        That is the shard of our own number, unless the checkpoint was made by another number of ranks.

        Raises:
            StorageError: the storage cannot be read. That is no reason to go back to an older checkpoint, or to none.
        """
        assert self._config.storage is not None
        storage, chunk_bytes = self._config.storage.model_dump(), self._config.chunk_bytes
        for owner in range(self._rank, manifest.world_size, len(self._everyone)):
            record = manifest.shards[owner].model_dump_json()
            order = Stage(owner=owner, version=manifest.version, record=record, storage=storage, chunk_bytes=chunk_bytes)
            try:
                self._client.call(order, Staged, timeout=_STAGE_SECONDS)
            except (CorruptDataError, ObjectGoneError) as error:
                _log.warning("%s", error)
                return False
        return True

    def _warn(self, text: str, *values: object) -> None:
        if self._rank == 0:
            _log.warning(text, *values)


def _without(holding: Holding, version: Version | None, owners: set[int]) -> Holding:
    return replace(holding, slots=[s for s in holding.slots if s.version != version or s.owner not in owners])
