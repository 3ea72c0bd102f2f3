"""Agrees on what to resume: the newest version that is whole, sound, and not known to fail. Collective, before the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import NoReturn

from gemini_ft.agent.client import AgentClient
from gemini_ft.config import GeminiConfig
from gemini_ft.core.goodput import RunTime
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import CorruptDataError, ObjectGoneError, PeerError, StorageError, StorageUnclearError, WorldSizeError
from gemini_ft.events import EventLog
from gemini_ft.hosts import is_earlier_boot, uptime
from gemini_ft.launch import notes
from gemini_ft.recovery.plan import RecoveryPlan, genuine, in_doubt, plan_recovery, require
from gemini_ft.storage.base import Storage
from gemini_ft.storage.checkpoints import Manifest
from gemini_ft.storage.decisions import (
    CanResume,
    Descent,
    Look,
    Sighting,
    Unclear,
    about_to_begin,
    continued,
    decide,
    describe,
    gives_way,
    is_of,
    left_aside,
)
from gemini_ft.storage.lookout import Lookout, within
from gemini_ft.storage.retention import reading
from gemini_ft.wire.worker_messages import SessionSpec, Stage, Staged, Verified, Verify, Visit, Visited
from gemini_ft.worker.introductions import Introduction
from gemini_ft.worker.rendezvous import exchange, exchange_or_raise

_log = logging.getLogger("gemini_ft")
_VERIFY_SECONDS = 600.0  # reading all of a host's copies may take that long
_STAGE_SECONDS = 6 * 3600.0  # reading a host's part of a checkpoint from storage too
_QUICK_LOOK_SECONDS = 10.0  # where memory is whole
_ABSENT_SECONDS = 5.0  # until the hosts come together anew, which those that were absent may then
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0  # seconds between two looks at storage that is away

Told = tuple[tuple[Incarnation, Descent], ...]  # incarnations, and where they come from


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision of the ranks on what to resume."""

    plan: RecoveryPlan
    given_up: frozenset[Version]
    descent: Descent = field(default_factory=Descent)  # of the incarnation that resumes it
    damaged: frozenset[str] = frozenset()  # folders of checkpoints in storage that turned out to be damaged
    present: frozenset[str] = frozenset()  # folders in storage that are not of its ancestors
    time: RunTime | None = None  # of the run, as storage has it
    waited: float = 0.0  # seconds for which rank 0 waited for storage; 0 on others


@dataclass(frozen=True)
class Stored:
    """Rank 0's findings in storage, for all ranks."""

    manifest: Manifest | None = None  # the checkpoint to resume; None: none, or it cannot be told
    unclear: str = ""  # why it cannot be told; empty: it can
    told: Told = ()  # incarnations in storage, and where they come from
    aside: frozenset[Incarnation] = frozenset()  # of these, those that the user's choice of a history leaves aside
    present: tuple[tuple[str, Version], ...] = ()  # everything that is there, by folder


class Chooser:
    """Finds what to resume, the same on every rank: collective."""

    def __init__(
        self,
        config: GeminiConfig,
        client: AgentClient,
        everyone: Sequence[Introduction],  # what all ranks have said, by rank
        stream: str,
        reopen: Callable[[], Storage] | None,  # opens the storage anew; None: there is none
        *,
        rank: int,
        resizable: bool,  # whether what another number of ranks has made can be loaded
    ) -> None:
        self._config, self._client, self._everyone, self._stream = config, client, everyone, stream
        self._reopen, self._rank, self._resizable = reopen, rank, resizable
        own = [about for about in everyone if about.goes_on] if config.resume == "never" else []
        self._resume = "auto" if own else config.resume  # what this launch has done itself is resumed
        self._left = frozenset(incarnation for about in own for incarnation in about.welcome.overtaken)  # what it has begun without
        self._welcomes = [about.welcome for about in {about.welcome.info.host: about for about in everyone}.values()]
        slots = {about.welcome.info.host: about.inventory.slots for about in everyone}
        self._holdings = {h: [s for s in each if s.version.incarnation not in self._left] for h, each in slots.items()}
        self._damaged: set[str] = set()  # folders in storage
        self._since: float | None = None  # when storage was first found to be away, on the monotonic clock
        self._waited = 0.0  # seconds since then, when it was back
        self._stored = Stored()
        remembered = {about.stored for about in everyone if about.stored is not None}
        run = everyone[0].run
        self._lookout = Lookout(reopen, run, stream, remembered) if reopen is not None else None

    def choose(self) -> Choice:
        """Obeys ``resume``, and leaves out versions that have led to failure after failure, unless there is nothing else.

        ``never`` speaks of what was there before this launch.

        Raises:
            WorldSizeError: all there is was made by another number of ranks.
            RecoveryError: there is nothing to resume, and something is required.
            PeerError: what was committed is not whole in memory, and hosts that had the rest are absent.
            StorageUnclearError: storage cannot say what there is, and memory does not have it.
            StorageError: the newest checkpoint is of a format that cannot be read.
        """
        # Versions that every attempt since has failed to get beyond, and the number of attempts
        welcomes = [welcome for welcome in self._welcomes if welcome.attempts >= self._config.max_retries]
        stuck = {welcome.resumed: welcome.attempts for welcome in welcomes if welcome.resumed is not None}
        given_up = frozenset(version for about in self._everyone for version in about.inventory.given_up) | stuck.keys()
        if self._resume == "never":
            self._stored = self._look(frozenset(), insist=self._config.storage is not None and self._config.storage.required)
            return self._chosen(RecoveryPlan(kind="nothing"), given_up)
        plan = self._find(given_up)
        if plan.version is None and given_up:
            plan = self._find(frozenset())  # one more failure is better than starting over after weeks of work
            if plan.version is not None and plan.version not in stuck:
                self._warn("%s had been given up, and is resumed as there is nothing else", plan.version)
        for version, attempts in stuck.items():
            then = "it is left aside" if version != plan.version else "there is no other, so it is tried again"
            self._warn("%s was resumed %d times in a row without one step of progress: %s", version, attempts, then)
        if self._resume == "require":
            require(plan)
        if self._resume != "found" and (plan.version is None or (plan.kind == "memory" and self._stored.manifest is None)):
            self._refuse_to_lose(plan.version, given_up)
        return self._chosen(plan, given_up)

    def _refuse_to_lose(self, instead: Version | None, given_up: frozenset[Version]) -> None:
        """Lets nothing begin, and nothing older go on, while hosts are absent that held what was committed: cut off, they may be at work.

        Args:
            instead: the version that would be resumed; None: nothing.
            given_up: versions that led to failure after failure: older ones are resumed in place of them.

        Raises PeerError: there are some; after a while.
        """
        slots = [(host, info) for host, each in self._holdings.items() for info in each]
        sizes = {info.version: info.world_size for _, info in slots if info.committed}
        newer = [version for version in sizes if instead is None or (version > instead and version not in given_up)]
        if instead is not None and not newer:
            self._refuse_to_go_back(instead)
            return
        version = max(newer, default=None)
        here = {info.owner for _, info in genuine([(host, info) for host, info in slots if info.version == version])}
        lost = [owner for owner in range(sizes[version]) if owner not in here] if version is not None else []
        told = exchange_or_raise(partial(self._hosts_of, version, lost), self._config.timeout)
        rebooted = self._rebooted(version, {host for hosts, _, _ in told for host in hosts}, [up for _, _, up in told])
        if not (absent := sorted({host for _, holders, _ in told for host in holders} - self._holdings.keys() - rebooted)):
            return
        what = "something was committed, and no host here has any of it"
        if version is not None:
            what = f"step {version.iteration} was committed, and no host here has the shards of ranks {lost}"
        then, way = "Nothing is begun", "start the command with GEMINI_RESUME=never, or with another --run-id"
        if instead is not None:
            then, way = "Nothing older is resumed", f"GEMINI_RESUME=found goes on from step {instead.iteration}"
        self._refuse(f"{what}; these hosts may: {', '.join(absent)}. {then}", way, {host for hosts, _, _ in told for host in hosts})

    def _refuse_to_go_back(self, instead: Version) -> None:
        """Does not resume a version that is whole here, if hosts that are absent have committed since, as this launch knows.

        It does where the last that it knows of are those of the session that has made the version, or that has resumed it last.
        The hosts that are here may have resumed it themselves, and have failed before their launchers heard of it.

        Raises PeerError: there are some; after a while.
        """
        here = frozenset(self._holdings)
        known = set(exchange(notes.hosts_of_commits(self._everyone[0].run, self._stream), self._config.timeout))
        if not any(hosts - here for hosts in known):
            return
        told = exchange_or_raise(partial(self._session_with, instead), self._config.timeout)
        others = known - {hosts for hosts, _, _ in told}
        if any(hosts == here and is_resumed for hosts, is_resumed, _ in told):
            return
        newer = {host for hosts in others for host in hosts}
        if absent := sorted(newer - here - self._rebooted(instead, newer, [up for _, _, up in told])):
            what = f"step {instead.iteration} is whole here, and other hosts have committed since; these hosts may have it"
            way = f"GEMINI_RESUME=found goes on from step {instead.iteration}"
            self._refuse(f"{what}: {', '.join(absent)}. Nothing older is resumed", way, newer)

    def _refuse(self, what: str, way: str, had: Collection[str]) -> NoReturn:
        """Raises PeerError, after a while; ``had``: the hosts that others give way to."""
        notes.say(notes.WAITS)
        if self._client.welcome.info.host not in had:
            notes.say(notes.LACKS)
        time.sleep(_ABSENT_SECONDS)
        raise PeerError(
            f"{what} without them. One of them that is here under another name, as it was "
            f"renamed or booted since, counts as absent: GEMINI_HOST_ID gives a host a name that stays. If they are lost for good, {way}"
        )

    def _rebooted(self, version: Version | None, hosts: set[str], uptimes: Sequence[float]) -> set[str]:
        """Hosts of the session that are here under the name of a later boot, and have therefore lost all their memory.

        Only what was booted since the version was written can be such a host, and not another machine of the same hostname.
        """
        age = min((about.ages[version] for about in self._everyone if version in about.ages), default=0.0) if version is not None else 0.0
        found = dict[str, str]()
        for about, up in zip(self._everyone, uptimes, strict=True):
            this = about.welcome.info
            before = {host for host in hosts if is_earlier_boot(host, this.host, this.machine)}
            found |= dict.fromkeys(before, this.host) if up < age and len(before) == 1 else {}
        for host, now in found.items():
            text = "host %s is here as %s, booted since: its copies of %s, and of whatever came later, are lost, and it is not waited for"
            self._warn(text, host, now, version)
        return {*found}

    def _hosts_of(self, version: Version | None, owners: Sequence[int]) -> tuple[set[str], set[str], float]:
        """The hosts of the session that committed a version or resumed it last, those that held some owners' shards, and this uptime.

        Without a version: those of which this launch knows that they had something.
        """
        if version is None:
            hosts = {*notes.hosts_of_commits(self._everyone[0].run, self._stream)}
            return hosts, hosts, uptime()
        if (spec := self._spec_with(version)) is None:
            return set(), set(), uptime()
        holders = {host for owner in owners for host in (*spec.holders.get(owner, ()), *spec.sources.get(owner, ()))}
        return set(spec.hosts), holders, uptime()

    def _session_with(self, version: Version) -> tuple[frozenset[str], bool, float]:
        """The hosts of the session that committed a version or resumed it last, whether it has resumed it, and this uptime."""
        spec = self._spec_with(version)
        return frozenset(spec.hosts if spec is not None else ()), spec is not None and spec.resumed == version, uptime()

    def _spec_with(self, version: Version) -> SessionSpec | None:
        """The last session of this host, if that committed a version or resumed it."""
        streams = self._client.call(Visit(), Visited)[0].streams
        spec = streams[self._stream].spec if self._stream in streams else None
        return spec if spec is not None and (spec.incarnation == version.incarnation or spec.resumed == version) else None

    def _chosen(self, plan: RecoveryPlan, given_up: frozenset[Version]) -> Choice:
        descent = self._descent(plan.version)
        this = about_to_begin(descent)
        present = frozenset(folder for folder, version in self._stored.present if not this.descends_from(version))
        manifest = self._stored.manifest
        return Choice(
            plan=plan,
            given_up=given_up,
            descent=descent,
            damaged=frozenset(self._damaged),
            present=present,
            time=manifest.time if manifest is not None else None,
            waited=self._waited,
        )

    def _find(self, refused: frozenset[Version]) -> RecoveryPlan:
        """Plans, has copies checked against their checksums, and plans again without those that are damaged.

        These are the copies of the planned version, and before it those of a newer one that is whole but for two copies that differ:
        it may have been committed, or be just now.
        """
        checked = set[Version]()
        while True:
            in_memory = self._best_in_memory(refused)
            memory = in_memory.version if in_memory is not None else None
            if (newer := in_doubt(self._holdings, refused | checked, memory)) is not None:
                checked.add(newer)
                self._drop_damaged(newer)
                continue
            history = self._config.storage.history if self._config.storage is not None else None
            turned_down = memory is not None and history is not None and not is_of(memory, self._told_by_sessions(), history)
            stored = self._stored = self._look(refused, insist=memory is None or turned_down)
            if stored.unclear and memory is not None:
                self._warn("storage cannot say which checkpoints it has (%s); the job resumes from memory, which is whole", stored.unclear)
            if memory is not None and self._gives_way(memory, stored):
                self._warn("%s in memory is not of the history that storage.history names: it is left aside", memory)
                refused |= {memory}
                continue
            if in_memory is not None and stored.manifest is None:
                plan = in_memory
            else:
                version, size = (stored.manifest.version, stored.manifest.world_size) if stored.manifest is not None else (None, None)
                plan = plan_recovery(self._holdings, len(self._everyone), version, size, sorted(refused), self._resizable)
            if plan.kind == "memory":
                assert plan.version is not None
                if plan.version in checked or not self._drop_damaged(plan.version):
                    return replace(plan, age=min(about.ages[plan.version] for about in self._everyone if plan.version in about.ages))
            elif plan.kind == "storage" and stored.manifest is not None:
                if (staged := self._staged(plan, stored.manifest)) is not None:
                    return staged
            else:
                return plan

    def _best_in_memory(self, refused: frozenset[Version]) -> RecoveryPlan | None:
        try:
            return plan_recovery(self._holdings, len(self._everyone), None, None, sorted(refused), self._resizable)
        except WorldSizeError:
            return None

    # -- storage

    def _look(self, refused: frozenset[Version], insist: bool) -> Stored:
        """The findings of rank 0 in storage; ``insist``: it waits for an answer, and raises an error if there is none.

        Raises StorageUnclearError: there was none in time, or the user has to choose.
        """
        patience = self._patience if insist else 0.0
        stored = exchange_or_raise(
            lambda: self._ask(refused, patience, insist) if self._rank == 0 else None, patience + 3 * self._config.timeout
        )[0]
        assert stored is not None
        return stored

    @property
    def _patience(self) -> float:
        return self._config.storage.patience if self._config.storage is not None else 0.0

    def _ask(self, refused: frozenset[Version], patience: float, insist: bool) -> Stored:
        """On rank 0, asks until there is an answer, or until ``patience`` seconds have passed since there was first none."""
        if self._lookout is None:
            return Stored()
        pause = _FIRST_PAUSE
        while True:
            stored, final = self._ask_once(refused, self._config.timeout if insist else _QUICK_LOOK_SECONDS)
            if not stored.unclear or not insist:
                self._note_wait()
                return stored
            self._since, first = self._since or time.monotonic(), self._since is None
            left = 0.0 if final else self._since + patience - time.monotonic()
            if left <= 0:
                raise self._unclear(stored.unclear)
            if first:
                text = "memory is not whole, and storage cannot say what it has (%s); asking again for up to %g s (storage.patience)"
                _log.warning(text, stored.unclear, patience)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._damaged.clear()  # the damage may have happened on the way

    def _ask_once(self, refused: frozenset[Version], seconds: float) -> tuple[Stored, bool]:
        """The findings, and whether asking again is of no use."""
        settings, lookout = self._config.storage, self._lookout
        assert settings is not None
        assert lookout is not None
        try:
            look = within(min(self._config.timeout, seconds), settings.url, lambda: lookout.look(self._damaged))
        except StorageError as error:
            if type(error) is not StorageError:
                raise
            look = Look(trouble=str(error))
        told = tuple((sighting.version.incarnation, sighting.descent) for sighting in look.sightings)
        present = tuple((sighting.folder, sighting.version) for sighting in look.sightings)
        if self._resume == "never":  # checkpoints must be known, so that they count as older, and no more
            return Stored(unclear=look.trouble, told=told, present=present), False
        left = self._left
        look = replace(
            look,
            sightings=tuple(one for one in look.sightings if one.version.incarnation not in left),
            marks=tuple(mark for mark in look.marks if mark.incarnation not in left),
        )
        answer = decide(look, settings.history, self._resume == "found")
        known = Stored(told=told, aside=left_aside(look, settings.history), present=present)
        if isinstance(answer, Unclear):
            return replace(known, unclear=answer.why), answer.contested
        if isinstance(answer, CanResume) and settings.history is not None and answer.aside:
            text = "storage.history=%s leaves aside, as it is: %s. Remove the setting if that is not intended"
            _log.warning(text, settings.history, "; ".join(map(describe, answer.aside)))
        for sighting in answer.order if isinstance(answer, CanResume) else ():
            if sighting.version not in refused:
                manifest = lookout.read(sighting.folder)
                if manifest is None:
                    return replace(known, unclear=f"{sighting.folder} is not sound"), False
                return replace(known, manifest=manifest), False
        return known, False

    def _unclear(self, why: str) -> StorageUnclearError:
        settings = self._config.storage
        assert settings is not None
        return StorageUnclearError(
            f"{settings.url}: {why}. Nothing has been begun; start the same command again when storage is well. To start from the "
            f"beginning on purpose, give another run id (GEMINI_RUN_ID={self._everyone[0].run}-2): what is stored stays as it is. "
            "To accept the newest checkpoint that can be found, set resume='found' (GEMINI_RESUME=found)"
        )

    def _gives_way(self, memory: Version, stored: Stored) -> bool:
        """Whether memory is left aside for the user's choice in storage.

        Raises StorageUnclearError: they are of two histories, and the user has not chosen.
        """
        manifest, settings = stored.manifest, self._config.storage
        if manifest is None or settings is None:
            return False
        found = Sighting(manifest.folder, manifest.version, "whole", manifest.descent, manifest.created)
        answer = gives_way(memory, self._told_by_sessions(), found, settings.history)
        if isinstance(answer, Unclear):
            raise self._unclear(
                f"{answer.why}. Choose one by storage.history (GEMINI_STORAGE__HISTORY=NUMBER-NONCE); `gemini leave` on all hosts "
                "gives up what is in memory"
            )
        return answer

    def _told_by_sessions(self) -> Told:
        told = (
            (w.incarnation, Descent(lineage=tuple(w.lineage), overtaken=frozenset(w.overtaken), aside=frozenset(w.aside)))
            for w in self._welcomes
            if w.incarnation is not None
        )
        return tuple(dict.fromkeys(told))  # nearly all say the same

    def _descent(self, resumed: Version | None) -> Descent:
        """The descent of the incarnation that is about to begin."""
        by_hosts = dict.fromkeys((name, Descent()) for welcome in self._welcomes if (name := welcome.info.known) is not None)
        told = (*self._told_by_sessions(), *by_hosts, *self._stored.told)
        if resumed is not None:
            descent = continued(resumed, told)
            return replace(descent, aside=descent.aside | self._stored.aside & descent.overtaken)
        known = {incarnation for incarnation, _ in told}
        for _, descent in told:
            known |= {*descent.overtaken, *(version.incarnation for version in descent.lineage or ())}
        return Descent(lineage=(), overtaken=frozenset(known))

    def _staged(self, plan: RecoveryPlan, manifest: Manifest) -> RecoveryPlan | None:
        """Stages as `_stage_all` does, and keeps other jobs of this run from deleting the checkpoint meanwhile."""
        if self._rank != 0 or self._reopen is None:
            return self._stage_all(plan, manifest)
        with reading(self._reopen(), self._everyone[0].run, self._stream, manifest.version):
            return self._stage_all(plan, manifest)

    def _stage_all(self, plan: RecoveryPlan, manifest: Manifest) -> RecoveryPlan | None:
        """The plan, once all shards are in memory; None: one is damaged in storage, or gone.

        Raises StorageError: the storage cannot be read. That is no reason to go back to an older checkpoint, or to none.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                done = exchange_or_raise(partial(self._stage, manifest), _STAGE_SECONDS)
            except StorageError as error:
                self._since = self._since or time.monotonic()
                left = exchange(self._since + self._patience - time.monotonic(), self._config.timeout)[0]
                if left <= 0:
                    raise StorageUnclearError(
                        f"{error}. Nothing has been begun; start the same command when storage is well again"
                    ) from None
                self._warn("%s; asking again for up to %.0f s (storage.patience)", error, left)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            if all(done):
                self._note_wait()
                hosts, world_size = [about.welcome.info.host for about in self._everyone], len(self._everyone)
                sources = {owner: (hosts[owner % world_size],) for owner in range(plan.world_size)}
                age = (datetime.now(UTC) - manifest.created).total_seconds()
                return replace(
                    plan, sources=sources, age=age, roots={o: record.root for o, record in manifest.shards.items() if record.root}
                )
            self._warn("%s in storage is damaged or gone; trying an older one", manifest.folder)
            self._damaged.add(manifest.folder)
            return None

    def _note_wait(self) -> None:
        """Writes down, on rank 0, for how long storage was waited for."""
        if self._rank == 0 and self._since is not None:
            self._waited = time.monotonic() - self._since
            events = EventLog(self._everyone[0].run, stream=self._stream, rank=0, host=self._everyone[0].welcome.info.host)
            events.write("waited", seconds=self._waited)
            events.close()

    def _stage(self, manifest: Manifest) -> bool:
        """Gets our part of the shards into our host's memory; False if one is damaged in storage, or has been deleted.

        That is the shard of our own number, unless the checkpoint was made by another number of ranks.

        Raises StorageError: the storage cannot be read.
        """
        assert self._config.storage is not None
        storage = self._config.storage.model_dump()
        for owner in range(self._rank, manifest.world_size, len(self._everyone)):
            record = manifest.shards[owner].model_dump_json()
            order = Stage(owner=owner, version=manifest.version, record=record, storage=storage)
            try:
                self._client.call(order, Staged, timeout=_STAGE_SECONDS)
            except (CorruptDataError, ObjectGoneError) as error:
                _log.warning("%s", error)
                return False
        return True

    # -- memory

    def _drop_damaged(self, version: Version) -> bool:
        """Has every host check its copies of a version, and leaves out those that are damaged; returns whether there are any."""
        question = Verify(version=version)
        sound = exchange_or_raise(lambda: self._client.call(question, Verified, timeout=_VERIFY_SECONDS)[0].sound, _VERIFY_SECONDS)
        by_host = dict(zip((about.welcome.info.host for about in self._everyone), sound, strict=True))
        damaged = {
            host: sorted({info.owner for info in each if info.version == version}.difference(by_host[host]))
            for host, each in self._holdings.items()
        }
        for host, owners in damaged.items():
            if owners:
                text = "host %s: the copies of ranks %s of %s do not match their checksums and are ignored"
                self._warn(text, host, owners, version)
        self._holdings = {
            host: [info for info in each if info.version != version or info.owner not in damaged[host]]
            for host, each in self._holdings.items()
        }
        return any(damaged.values())

    def _warn(self, text: str, *values: object) -> None:
        if self._rank == 0:
            _log.warning(text, *values)
