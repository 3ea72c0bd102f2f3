"""The part of one host in one stream of snapshots, as a pure state machine.

Events come in as method calls, effects come out as a list; memory, sockets and clocks are elsewhere
(``gemini_ft.agent``). The other half, which decides on commits, is ``gemini_ft.core.ledger``.

Life of a version on its owner's host:

    request -> Grant -> (bytes are copied; a Send per peer runs beside it) -> completed -> Report(Completed)
    -> committed(version): the slot of the version before becomes free

and on a peer: receive -> (bytes arrive) -> completed -> Report(Completed).

A Tell, or a Lacking, comes last in a list of effects: on the leader's own host it may lead to the next decision at once.

Source: GEMINI (SOSP'23), section 5: two buffers per replica, one complete and one in progress; the rule
that a buffer is reused only after the newer version is complete everywhere is stated there implicitly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from gemini_ft.core.effects import (
    CancelSend,
    Completed,
    Damaged,
    Effect,
    Free,
    Grant,
    Lacking,
    Report,
    Send,
    Skipped,
    Tell,
    Upload,
    Withdraw,
)
from gemini_ft.core.slots import Slot, SlotSet, SlotState
from gemini_ft.core.versions import Incarnation, Version

MOST_ABORTED = 1024  # versions remembered as aborted; one that is forgotten is aborted again if it is reported, as its owner has gone on
NO_ROOTS: Mapping[int, str] = MappingProxyType({})
T = TypeVar("T")


def note_aborted(aborted: dict[Version, T], version: Version, about: T) -> None:
    """Notes that a version is aborted, and forgets the one noted first where these are more than ``MOST_ABORTED``."""
    aborted[version] = about
    if len(aborted) > MOST_ABORTED:
        del aborted[next(iter(aborted))]


@dataclass(kw_only=True)
class Host:
    """The part of one host in one stream: the shards its ranks own, and the replicas it holds for others."""

    name: str
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)  # owner -> hosts, the owner's own first
    shards: dict[int, SlotSet] = field(default_factory=dict)
    waiting: dict[int, Version] = field(default_factory=dict)  # requests of local owners not granted yet
    skipped: dict[int, Version] = field(default_factory=dict)  # newest version each local owner gave up, or had to
    details: dict[tuple[int, Version], tuple[str, str]] = field(default_factory=dict)  # layout and digest as reported
    aborted: dict[Version, None] = field(default_factory=dict)  # above the committed one, the oldest first
    committed: Version | None = None  # the newest version this host knows to be complete everywhere
    agreed: Version | None = None  # the newest of them in which all ranks were found to agree, or with which all began
    roots: dict[int, str] = field(default_factory=dict)  # owner -> root of its committed shard, as far as it was said with the commit
    incarnation: Incarnation | None = None  # the present one
    reopened: bool = False  # whether this agent was restarted in the middle of it, and may have lost what was here
    sealed: bool = False  # between ``seal`` and ``open`` or ``unseal``; the same for every shard, those that come later too

    # -- incarnations

    def seal(self) -> None:
        """Stops changes until ``open``: nothing here becomes complete, and nothing complete is overwritten or freed.

        Said before the inventory from which a new incarnation chooses its version. The former one may still be at
        work: a copy that became complete after the inventory could be what its ledger needs to commit, and that
        commit would let the hosts not asked yet overwrite the version that this inventory promises.
        """
        self._set_sealed(True)

    def unseal(self) -> list[Effect]:
        """Ends a seal: the new incarnation has not come about, the present one goes on, and slots aborted meanwhile go."""
        self._set_sealed(False)
        for slots in self.shards.values():
            for version in self.aborted:
                slots.abort(version)
        return [effect for owner in self.shards for effect in [*self._reap(owner), *self._grant(owner)]]

    def open(
        self,
        holders: Mapping[int, Sequence[str]],
        resumed: Version | None,
        roots: Mapping[int, str] = NO_ROOTS,
        incarnation: Incarnation | None = None,
    ) -> list[Effect]:
        """Begins a new incarnation from ``resumed`` (None: from nothing). Versions above it will never be committed.

        They stay until a worker takes the first step, and so does the last commit: this incarnation may never come about.
        The former incarnation's connections must be closed. Shards that are no longer held here stay readable
        until the next commit: nobody else may have a copy yet. ``roots``: of the shards of ``resumed``.
        """
        self.holders = {owner: tuple(hosts) for owner, hosts in holders.items()}
        self.waiting.clear()
        self.skipped.clear()
        self.details.clear()
        self.aborted.clear()
        self.committed, self.roots, self.incarnation, self.reopened = resumed, dict(roots), incarnation, False
        self.agreed = resumed
        for slots in self.shards.values():
            slots.rewind(resumed)
        self._set_sealed(False)
        self._retire_strangers()
        return self._discard_damaged()

    def reopen(self, holders: Mapping[int, Sequence[str]], committed: Version | None, incarnation: Incarnation) -> None:
        """Continues the present incarnation after this host's agent has lost its memory, but not the slots.

        ``committed``: the newest version known here, at least the one that was resumed. Complete versions above it
        stay: those of this incarnation may have been committed meanwhile, or still will be.
        """
        self.holders = {owner: tuple(hosts) for owner, hosts in holders.items()}
        self.committed, self.roots, self.incarnation, self.reopened = committed, {}, incarnation, True
        for slots in self.shards.values():
            slots.commit(committed)
            slots.resume(incarnation)
        self._retire_strangers()

    def adopt(self, owner: int, index: int, version: Version | None, root: str = "", committed: bool = False) -> Slot:
        """Takes over a slot that was here before this host's agent was: COMPLETE with ``version``, or EMPTY.

        Workers hand slots back one by one, so that it may come after ``reopen``, or when a new incarnation has been opened long since.
        ``committed``: whether it bears the mark of a commit; the newest version that does stays until all hosts have opened the next
        incarnation. The mark says nothing about the present one, which may have resumed something older.
        """
        slots = self.slots(owner)
        slot = slots.adopt(index, version, root, marked=committed)
        if self.incarnation is not None:
            slots.resume(self.incarnation)
        slot.retired = self.is_stranger(owner)
        return slot

    def is_stranger(self, owner: int) -> bool:
        """Whether the present incarnation keeps no copy of a shard here."""
        return bool(self.holders) and self.name not in self.holders.get(owner, ())

    def may_be_committed(self, version: Version) -> bool:
        """Whether a version can have been committed: then this host has an own shard that is at least as new, unless it has lost all."""
        own = [slot.version for owner, slots in self.shards.items() if self.owns(owner) for slot in slots.slots.values() if slot.version]
        known = [*own, *([self.committed] if self.committed is not None else [])]
        return version <= max(known) if known else self.reopened

    def owns(self, owner: int) -> bool:
        return self.holders.get(owner, ("",))[0] == self.name

    def slots(self, owner: int) -> SlotSet:
        return self.shards.setdefault(owner, SlotSet(self.committed, self.sealed))

    def renew(self, owner: int, count: int) -> tuple[list[Slot], list[Effect]]:
        """Gives the shard new slots (first use, another layout, or a former writer that may still live)."""
        slots = self.slots(owner)
        slots.retire()
        fresh = slots.add(count)
        return fresh, self._reap(owner)

    # -- the owner's side

    def request(self, owner: int, version: Version) -> list[Effect]:
        """Takes the worker's wish to write ``version``; the Grant comes now or when a slot becomes free.

        A worker asks only after it has stopped writing whatever it wrote before.
        """
        self._settle_torn(owner)
        if version in self.aborted:
            return [Withdraw(owner, version)]
        self.waiting[owner] = version
        return self._grant(owner)

    def give_up(self, owner: int, version: Version, reason: str) -> list[Effect]:
        """Records that the worker will not finish ``version`` (late, torn, or dead), and has stopped writing it."""
        if self.waiting.get(owner) == version:
            del self.waiting[owner]
        slots = self.slots(owner)
        if slots.complete_version(version) is not None:
            return []  # too late to take back: it may already be committed
        effects = self._cancel_sends(owner, version)
        slots.let_go(version)
        self._skip(owner, version)
        return [*effects, *self._reap(owner), *self._grant(owner), Tell(Skipped(owner, version, reason))]

    def worker_lost(self, owner: int) -> list[Effect]:
        """Records that the local worker that owns the shard is dead: the version it was writing will never be whole."""
        self.waiting.pop(owner, None)
        self._settle_torn(owner)
        unfinished = [slot.version for slot in self._written_by_worker(owner) if slot.version is not None]
        return [effect for version in unfinished for effect in self.give_up(owner, version, "its worker died")]

    def arrived(self, owner: int, version: Version) -> list[Effect]:
        """Records how far a local worker came with the agent before this one: it does not write ``version`` any more.

        What it said of it may have died with that agent. Unless the copy is whole it counts as given up; otherwise an earlier version
        that the worker has given up, too, would be waited for without end.
        """
        decided = self.committed is not None and version <= self.committed
        return [] if decided else self.give_up(owner, version, "the agent of its host was restarted")

    def completed(self, owner: int, version: Version, layout: str = "", digest: str = "", root: str = "") -> list[Effect]:
        """Marks a shard as complete here: its worker has laid every byte down, or all have come from a peer and were verified."""
        if not self.slots(owner).complete(version, root):
            return []
        if damaged := self._discard_damaged():  # it was committed meanwhile without this copy
            return damaged
        self.details[owner, version] = (layout, digest)
        return [Tell(Completed(owner=owner, host=self.name, version=version, layout=layout, digest=digest, root=root))]

    def send_again(self, owner: int) -> list[Effect]:
        """Sends what a local worker had copied with the agent before this one: it may not have reached all peers.

        The ledger would wait for them until it leaves them out.
        """
        whole = self._undecided(self.slots(owner)) if self.owns(owner) else []
        adopted = [(slot, version) for slot, version in whole if (owner, version) not in self.details]
        return [effect for slot, version in adopted for effect in self._sends(owner, slot, version)]

    def sent(self, owner: int, slot_index: int, peer: str) -> list[Effect]:
        """Records that the peer acknowledged all bytes, or the connection is closed: nothing refers to the slot any more."""
        return self.release(owner, slot_index, f"send:{peer}")

    # -- the holder's side

    def receive(self, owner: int, version: Version, committed: Version | None) -> Slot | None:
        """Grants a slot for a peer's shard. None: none can be given right now, or the shard is complete already.

        The slot is the connection's until ``completed`` or ``receive_failed``, one of which is due in any case.
        """
        slots = self.slots(owner)
        slots.drop_past()
        slots.supersede(version, committed)
        return None if version in self.aborted else slots.begin(version)

    def receive_failed(self, owner: int, version: Version) -> list[Effect]:
        """Records that the sender is gone or gave up before its shard was whole; no more bytes of it will come."""
        self.slots(owner).let_go(version)
        return [*self._reap(owner), *self._grant(owner)]

    def rebuild(self, owner: int, version: Version) -> Slot | None:
        """Grants a slot for a lost copy of the resumed ``version``. None: the copy is here, or there is no room now.

        The slot is the fetch's until ``rebuilt`` or ``receive_failed``.
        """
        return self.slots(owner).begin(version)

    def rebuilt(self, owner: int, version: Version, root: str = "") -> list[Effect]:
        """Records that every byte of the lost copy is here again, verified: the copy kept in its stead may be overwritten."""
        self.slots(owner).complete(version, root)
        return [*self._reap(owner), *self._grant(owner)]

    # -- readers

    def hold(self, owner: int, version: Version, reader: str) -> Slot | None:
        """Pins a complete version for a reader (recovery of a peer, upload)."""
        slot = self.slots(owner).complete_version(version)
        if slot is not None:
            slot.readers.add(reader)
        return slot

    def release(self, owner: int, slot_index: int, reader: str) -> list[Effect]:
        slots = self.slots(owner)
        if (slot := slots.slots.get(slot_index)) is None:
            return []
        slot.readers.discard(reader)
        return [*self._reap(owner), *self._grant(owner)]

    # -- decisions of the ledger

    def on_commit(
        self, version: Version, freeze: bool, roots: Mapping[int, str] = NO_ROOTS, agreed: bool = False, *, compared: bool = False
    ) -> list[Effect]:
        """Records that ``version`` is complete everywhere. ``freeze``: it is also the one to upload, on all hosts alike.

        A send of an older version is of no more use to anybody; a peer that has hung must not keep its slot. ``roots``: of the shards
        that are held here; a copy that has another one was left out of this commit, and is damaged. ``agreed``: they are those of
        the copies here, as this host has reported them. ``compared``: all ranks were found to hold alike what they must.
        """
        if agreed:
            copies = {owner: slots.complete_version(version) for owner, slots in self.shards.items() if not self.is_stranger(owner)}
            roots = {owner: slot.root for owner, slot in copies.items() if slot is not None and slot.root}
        if self.committed is None or version > self.committed:
            self.committed, self.roots = version, {}
        if version == self.committed:
            self.roots.update(roots)
        self.aborted = {other: None for other in self.aborted if other > version}
        if compared and (self.agreed is None or version > self.agreed):
            self.agreed = version
        self.details = {key: value for key, value in self.details.items() if key[1] > version}
        effects: list[Effect] = self._discard_damaged()
        for owner, slots in self.shards.items():
            slots.commit(version)
            if freeze and self.owns(owner):
                effects += self._freeze(owner, version)
            for slot in slots.slots.values():
                if slot.version is not None and slot.version < version:
                    effects += self._cancel_sends(owner, slot.version)
            effects += [*self._reap(owner), *self._grant(owner)]
        own = [owner for owner in self.holders if self.owns(owner)] if freeze else []
        return [*effects, *(Lacking(owner, version) for owner in own if self.slots(owner).complete_version(version) is None)]

    def on_abort(self, version: Version) -> list[Effect]:
        """Records that ``version`` will never be complete everywhere; no leader decides that of another incarnation's."""
        if (self.committed is not None and version <= self.committed) or not self._is_of_present(version):
            return []
        note_aborted(self.aborted, version, None)
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            asked = self.waiting.get(owner) == version
            if asked:
                del self.waiting[owner]
            if self.owns(owner) and (asked or slots.find(version) is not None):
                self._skip(owner, version)  # another ledger must hear of it, too
                effects += [*self._cancel_sends(owner, version), Withdraw(owner, version)]
            slots.abort(version)
            effects += [*self._reap(owner), *self._grant(owner)]
        return effects

    def on_exclude(self, owner: int, peer: str) -> list[Effect]:
        """Releases the slots that a peer still reads, as it has been left out of the commit."""
        slots = self.shards.get(owner)
        if slots is None or not self.owns(owner):
            return []
        return [CancelSend(owner, s.version, peer) for s in slots.slots.values() if f"send:{peer}" in s.readers and s.version]

    def thawed(self, version: Version) -> list[Effect]:
        """Records that the upload of ``version`` is over, whether it succeeded or failed."""
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            slot = slots.find(version)
            if slot is not None and slot.frozen:
                slot.frozen = False
                effects += [*self._reap(owner), *self._grant(owner)]
        return effects

    def finish(self) -> list[Effect]:
        """Ends the job: only the last committed version of every shard still deserves its memory."""
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            still = [s for s in slots.slots.values() if s.state in (SlotState.EMPTY, SlotState.COMPLETE) and not s.readers and not s.frozen]
            spare = [slot for slot in still if slot.version is None or slot.version != slots.committed]
            effects += [Free(owner=owner, slot=slot.index) for slot in spare]
            for slot in spare:
                del slots.slots[slot.index]
        return effects

    @property
    def heard_roots(self) -> dict[int, str]:
        """Owner -> root said with the present incarnation's newest commit, for all shards held here; empty: it was not heard.

        A ledger that lost its memory learns them from the hosts, and they from it if they have lost theirs.
        """
        if self.committed is None or self.committed.incarnation != self.incarnation:
            return {}
        return {owner: self.roots.get(owner, "") for owner, hosts in self.holders.items() if self.name in hosts}

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard, for what is held here, if ``version`` is the newest that was committed; else nothing."""
        return self.roots if version == self.committed else NO_ROOTS

    def reports(self) -> list[Report]:
        """Everything that a ledger needs to hear again, because it or the way to it was lost.

        In the order of versions: a ledger takes what an owner says of a later version as the end of the earlier ones.
        """
        out: list[Report] = [Skipped(owner, version, "repeated") for owner, version in self.skipped.items()]
        for owner, slots in self.shards.items():
            for slot, version in self._undecided(slots):
                layout, digest = self.details.get((owner, version), ("", ""))
                out.append(Completed(owner=owner, host=self.name, version=version, layout=layout, digest=digest, root=slot.root))
        return sorted(out, key=lambda report: report.version)

    # -- inside

    def _is_of_present(self, version: Version) -> bool:
        return self.incarnation in (None, version.incarnation)

    def _undecided(self, slots: SlotSet) -> list[tuple[Slot, Version]]:
        """Whole copies that the present incarnation will commit or abort.

        Where a worker of the past has a new agent go on with its incarnation, there may be copies of the next one, too.
        """
        whole = [(slot, slot.version) for slot in slots.undecided() if slot.state is SlotState.COMPLETE and slot.version]
        return [(slot, version) for slot, version in whole if self._is_of_present(version)]

    def _skip(self, owner: int, version: Version) -> None:
        self.skipped[owner] = max(version, self.skipped.get(owner, version))

    def _set_sealed(self, sealed: bool) -> None:
        self.sealed = sealed
        for slots in self.shards.values():
            slots.sealed = sealed

    def _retire_strangers(self) -> None:
        for owner, slots in self.shards.items():
            if self.is_stranger(owner):
                slots.retire()

    def _discard_damaged(self) -> list[Effect]:
        """Discards copies of the committed version whose roots are not the committed ones."""
        effects: list[Effect] = []
        if (version := self.committed) is None:
            return effects
        for owner, slots in self.shards.items():
            slot = slots.complete_version(version)
            if slot is not None and slot.root != self.roots.get(owner, slot.root):
                slots.discard(version)
                effects += [Damaged(owner, version), *self._reap(owner), *self._grant(owner)]
        return effects

    def _grant(self, owner: int) -> list[Effect]:
        version, slots = self.waiting.get(owner), self.slots(owner)
        if version is None:
            return []
        slots.drop_past()
        if (slot := slots.begin(version)) is None:
            return []
        del self.waiting[owner]
        return [Grant(owner=owner, slot=slot.index, version=version), *self._sends(owner, slot, version)]

    def _sends(self, owner: int, slot: Slot, version: Version) -> list[Effect]:
        """Sends a slot to the peers to which it is not on its way yet."""
        peers = [peer for peer in self.holders.get(owner, ()) if peer != self.name and f"send:{peer}" not in slot.readers]
        slot.readers.update(f"send:{peer}" for peer in peers)
        return [Send(owner=owner, slot=slot.index, version=version, peer=peer) for peer in peers]

    def _settle_torn(self, owner: int) -> None:
        """Records that the local worker does not write into the slots of aborted versions any more."""
        for slot in self._written_by_worker(owner):
            if slot.state is SlotState.TORN:
                slot.clear()

    def _written_by_worker(self, owner: int) -> list[Slot]:
        """The worker's slots that are not complete. A committed version may be on its way here, too: a lost copy, rebuilt from a peer."""
        slots = self.slots(owner)
        incomplete = [slot for slot in slots.slots.values() if slot.state in (SlotState.WRITING, SlotState.TORN)]
        return [slot for slot in incomplete if slot.version and (slots.committed is None or slot.version > slots.committed)]

    def _freeze(self, owner: int, version: Version) -> list[Effect]:
        slots = self.slots(owner)
        for slot in slots.slots.values():
            slot.frozen = False  # never two uploads at once: that an earlier one is over can be lost on the way, this cannot
        chosen = slots.complete_version(version)
        if chosen is None:
            return []
        chosen.frozen = True
        return [Upload(owner=owner, slot=chosen.index, version=version)]

    def _cancel_sends(self, owner: int, version: Version) -> list[Effect]:
        slot = self.slots(owner).find(version)
        readers = slot.readers if slot is not None else ()
        return [CancelSend(owner, version, peer) for peer in self.holders.get(owner, ()) if f"send:{peer}" in readers]

    def _reap(self, owner: int) -> list[Effect]:
        return [Free(owner=owner, slot=slot.index) for slot in self.slots(owner).reap()]
