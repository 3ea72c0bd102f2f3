"""What one host does for one stream of snapshots, as a pure state machine.

Events come in as method calls, effects come out as a list; memory, sockets and clocks are elsewhere
(``gemini_ft.agent``). The other half, which decides what is committed, is ``gemini_ft.ledger``.

Life of a version on its owner's host:

    request -> Grant -> (bytes are copied; a Send per peer runs beside it) -> copied -> Report(Completed)
    -> committed(version): the slot of the version before becomes free

and on a peer: receive -> (bytes arrive) -> received -> Report(Completed).

Source: GEMINI (SOSP'23), section 5: two buffers per replica, one complete and one in progress; the rule
that a buffer is reused only after the newer version is complete everywhere is stated there implicitly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemini_ft.slots import Slot, SlotSet, SlotState
from gemini_ft.versions import Version


@dataclass(frozen=True)
class Completed:
    """``host`` holds every byte of ``owner``'s shard of ``version``, verified."""

    owner: int
    host: str
    version: Version
    layout: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Skipped:
    """``owner`` has no snapshot of ``version``: it can never be committed."""

    owner: int
    version: Version
    reason: str


Report = Completed | Skipped


@dataclass(frozen=True)
class Grant:
    """The worker that owns the shard may write ``version`` into the slot."""

    owner: int
    slot: int
    version: Version


@dataclass(frozen=True)
class Withdraw:
    """The version was aborted; its worker need not finish copying it."""

    owner: int
    version: Version


@dataclass(frozen=True)
class Send:
    """Send the slot's bytes to a peer, chunk by chunk as they are copied. ``sent`` ends it."""

    owner: int
    slot: int
    version: Version
    peer: str


@dataclass(frozen=True)
class CancelSend:
    """Stop sending; ``sent`` is still due, once no byte of the slot is referenced any more."""

    owner: int
    version: Version
    peer: str


@dataclass(frozen=True)
class Tell:
    """Pass a report to the leader's ledger."""

    report: Report


@dataclass(frozen=True)
class Upload:
    """Write the frozen slot to storage. ``thawed`` ends it."""

    owner: int
    slot: int
    version: Version


@dataclass(frozen=True)
class Free:
    """Nobody needs the slot's memory any more."""

    owner: int
    slot: int


Effect = Grant | Withdraw | Send | CancelSend | Tell | Upload | Free


@dataclass
class Host:
    """One host's part in one stream: the shards its ranks own, and the replicas it holds for others."""

    name: str
    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)  # owner -> hosts, the owner's own first
    shards: dict[int, SlotSet] = field(default_factory=dict)
    waiting: dict[int, Version] = field(default_factory=dict)  # requests of local owners not granted yet
    skipped: dict[int, Version] = field(default_factory=dict)  # newest version each local owner gave up
    details: dict[tuple[int, Version], tuple[str, str]] = field(default_factory=dict)  # layout and digest as reported

    # -- incarnations

    def open(self, holders: Mapping[int, Sequence[str]], resumed: Version | None) -> list[Effect]:
        """A new incarnation begins from ``resumed`` (None: from nothing). Versions above it are gone for good."""
        self.holders = {owner: tuple(hosts) for owner, hosts in holders.items()}
        self.waiting.clear()
        self.skipped.clear()
        self.details.clear()
        for slots in self.shards.values():
            slots.rewind(resumed)
        return []

    def owns(self, owner: int) -> bool:
        return self.holders.get(owner, ("",))[0] == self.name

    def slots(self, owner: int) -> SlotSet:
        return self.shards.setdefault(owner, SlotSet())

    def renew(self, owner: int, count: int) -> tuple[list[Slot], list[Effect]]:
        """Give the shard fresh slots (first use, another layout, or a former writer that may still live)."""
        slots = self.slots(owner)
        slots.retire()
        if slots.committed is None:
            slots.committed = self.committed
        fresh = slots.add(count)
        return fresh, self._reap(owner)

    @property
    def committed(self) -> Version | None:
        """The newest version this host knows to be complete everywhere."""
        return max((s.committed for s in self.shards.values() if s.committed is not None), default=None)

    # -- the owner's side

    def request(self, owner: int, version: Version) -> list[Effect]:
        """The worker wants to write ``version``; the Grant comes now or when a slot becomes free."""
        self.waiting[owner] = version
        return self._grant(owner)

    def give_up(self, owner: int, version: Version, reason: str) -> list[Effect]:
        """The worker will not finish ``version`` (late, torn, or it died)."""
        self.waiting.pop(owner, None)
        slots = self.slots(owner)
        slot = slots.find(version)
        if slot is not None and slot.state is SlotState.COMPLETE:
            return []  # too late to take back: it may already be committed
        effects: list[Effect] = self._cancel_sends(owner, version)
        slots.discard(version)
        self.skipped[owner] = version
        return [*effects, Tell(Skipped(owner, version, reason)), *self._grant(owner)]

    def worker_lost(self, owner: int) -> list[Effect]:
        """The local worker that owns the shard is proven dead: what it was writing will never be whole."""
        torn = [s.version for s in self.slots(owner).slots.values() if s.state is SlotState.WRITING and s.version]
        self.waiting.pop(owner, None)
        return [effect for version in torn for effect in self.give_up(owner, version, "its worker died")]

    def copied(self, owner: int, version: Version, layout: str = "", digest: str = "") -> list[Effect]:
        """The worker has laid down all bytes of its shard."""
        return self._completed(owner, version, layout, digest)

    def sent(self, owner: int, slot_index: int, peer: str) -> list[Effect]:
        """The peer acknowledged all bytes, or the connection is closed: nothing refers to the slot any more."""
        return self.release(owner, slot_index, f"send:{peer}")

    # -- the holder's side

    def receive(self, owner: int, version: Version, committed: Version | None) -> Slot | None:
        """A peer is about to send its shard. None: no slot can be given right now, or it is complete already."""
        slots = self.slots(owner)
        slots.supersede(version, committed)
        return slots.begin(version)

    def received(self, owner: int, version: Version, layout: str = "", digest: str = "") -> list[Effect]:
        """Every byte of a peer's shard is here and verified."""
        return self._completed(owner, version, layout, digest)

    def receive_failed(self, owner: int, version: Version) -> list[Effect]:
        """The sender is gone or gave up before its shard was whole."""
        slots = self.slots(owner)
        slot = slots.find(version)
        if slot is not None and slot.state is SlotState.WRITING:
            slot.clear()
        return []

    # -- readers

    def hold(self, owner: int, version: Version, reader: str) -> Slot | None:
        """Pin a complete version for a reader (recovery of a peer, upload)."""
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

    def on_commit(self, version: Version, freeze: bool) -> list[Effect]:
        """``version`` is complete everywhere. ``freeze``: it is also the one to upload, on all hosts alike."""
        effects: list[Effect] = []
        for owner in [o for o in self.holders if self.owns(o)] if freeze else []:
            slot = self.slots(owner).complete_version(version)
            if slot is not None:
                slot.frozen = True
                effects.append(Upload(owner, slot.index, version))
        for owner, slots in self.shards.items():
            slots.commit(version)
            effects += [*self._reap(owner), *self._grant(owner)]
        self.details = {key: value for key, value in self.details.items() if key[1] > version}
        return effects

    def on_abort(self, version: Version) -> list[Effect]:
        """``version`` will never be complete everywhere."""
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            slot = slots.find(version)
            if self.waiting.get(owner) == version:
                del self.waiting[owner]
                effects.append(Withdraw(owner, version))
            if slot is None or slots.committed == version:
                continue
            if self.owns(owner):
                effects += self._cancel_sends(owner, version)
                effects.append(Withdraw(owner, version))
            slots.discard(version)
            effects += self._grant(owner)
        return effects

    def on_exclude(self, owner: int, peer: str) -> list[Effect]:
        """A peer has been left out of the commit; let go of the slots it still reads."""
        slots = self.shards.get(owner)
        if slots is None or not self.owns(owner):
            return []
        return [CancelSend(owner, s.version, peer) for s in slots.slots.values() if f"send:{peer}" in s.readers and s.version]

    def thawed(self, version: Version) -> list[Effect]:
        """The upload of ``version`` is over, for better or worse."""
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            slot = slots.find(version)
            if slot is not None and slot.frozen:
                slot.frozen = False
                effects += [*self._reap(owner), *self._grant(owner)]
        return effects

    def finish(self) -> list[Effect]:
        """The job is done: of every shard only the last committed version is still worth its memory."""
        effects: list[Effect] = []
        for owner, slots in self.shards.items():
            spare = [s for s in slots.slots.values() if not s.readers and not s.frozen and (s.version is None or s.version != slots.committed)]
            effects += [Free(owner, slot.index) for slot in spare]
            for slot in spare:
                del slots.slots[slot.index]
        return effects

    def reports(self) -> list[Report]:
        """Everything a ledger that lost its memory, or the way to us, needs to hear again."""
        out: list[Report] = [Skipped(owner, version, "repeated") for owner, version in self.skipped.items()]
        for owner, slots in self.shards.items():
            fresh = [s.version for s in slots.slots.values() if s.state is SlotState.COMPLETE and s.version]
            above = [version for version in fresh if slots.committed is None or version > slots.committed]
            out += [Completed(owner, self.name, version, *self.details.get((owner, version), ("", ""))) for version in above]
        return out

    # -- inside

    def _completed(self, owner: int, version: Version, layout: str, digest: str) -> list[Effect]:
        if not self.slots(owner).complete(version):
            return []
        self.details[owner, version] = (layout, digest)
        return [Tell(Completed(owner, self.name, version, layout, digest))]

    def _grant(self, owner: int) -> list[Effect]:
        version = self.waiting.get(owner)
        if version is None or (slot := self.slots(owner).begin(version)) is None:
            return []
        del self.waiting[owner]
        peers = [peer for peer in self.holders.get(owner, ()) if peer != self.name]
        slot.readers.update(f"send:{peer}" for peer in peers)
        return [Grant(owner, slot.index, version), *(Send(owner, slot.index, version, peer) for peer in peers)]

    def _cancel_sends(self, owner: int, version: Version) -> list[Effect]:
        slot = self.slots(owner).find(version)
        readers = slot.readers if slot is not None else ()
        return [CancelSend(owner, version, peer) for peer in self.holders.get(owner, ()) if f"send:{peer}" in readers]

    def _reap(self, owner: int) -> list[Effect]:
        return [Free(owner, slot.index) for slot in self.slots(owner).reap()]
