"""The slots that one host keeps for one shard: pure state, no memory, no clock.

    EMPTY -> WRITING -> COMPLETE      ``begin``, ``complete``
             WRITING -> TORN          ``discard``: given up, but its writer may still lay bytes down
             WRITING, TORN -> EMPTY   ``let_go``: its writer has stopped
             COMPLETE -> EMPTY        ``discard``, ``abort``, ``drop_past``; or straight to WRITING once a newer version is committed
                      -> COMPLETE     ``adopt``: found in memory, or read from storage before a session opens

The newest state that is safe everywhere is never overwritten, a slot that is read or may still be written is
never granted, and a slot that is being uploaded is out of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gemini_ft.core.versions import Incarnation, Version


class SlotState(StrEnum):
    """The value of a slot's bytes."""

    EMPTY = "empty"
    WRITING = "writing"
    TORN = "torn"
    COMPLETE = "complete"


@dataclass(kw_only=True)
class Slot:
    """Memory for one iteration of one shard."""

    index: int
    state: SlotState = SlotState.EMPTY
    version: Version | None = None  # None exactly when EMPTY; no two slots of a shard have the same
    frozen: bool = False  # being uploaded; only a COMPLETE slot is frozen
    retired: bool = False  # of an earlier layout, an earlier placement, or a writer that may still live; never granted again
    past: bool = False  # COMPLETE, and to be kept until it is certain that all hosts have left it behind
    marked: bool = False  # COMPLETE, and known to be committed by the mark of the agent before this one
    root: str = ""  # of a COMPLETE slot: the root of its bytes (gemini_ft.core.roots)
    readers: set[str] = field(default_factory=set)  # readers that may still look at the bytes, whatever has become of the version

    def clear(self) -> None:
        self.state, self.version, self.frozen, self.past, self.marked, self.root = SlotState.EMPTY, None, False, False, False, ""


class SlotSet:
    """All slots of one shard on one host."""

    def __init__(self, committed: Version | None = None, sealed: bool = False) -> None:
        self.slots: dict[int, Slot] = {}
        self.committed = committed  # newest version known to be complete everywhere
        self.sealed = sealed  # a new incarnation is choosing a version to resume: nothing becomes complete, nothing complete goes

    def add(self, count: int) -> list[Slot]:
        """Puts ``count`` fresh slots into the rotation."""
        first = max(self.slots, default=-1) + 1
        fresh = [Slot(index=index) for index in range(first, first + count)]
        self.slots.update((slot.index, slot) for slot in fresh)
        return fresh

    def adopt(self, index: int, version: Version | None, root: str = "", marked: bool = False) -> Slot:
        """Takes over a slot found in memory: COMPLETE with ``version``, or EMPTY."""
        slot = Slot(index=index, state=SlotState.COMPLETE if version else SlotState.EMPTY, version=version, root=root, marked=marked)
        self.slots[index] = slot
        return slot

    def retire(self) -> None:
        """Takes all present slots out of the rotation; they stay readable until ``reap``."""
        for slot in self.slots.values():
            slot.retired = True
            if slot.state is SlotState.WRITING:
                slot.state = SlotState.TORN

    def find(self, version: Version) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.version == version), None)

    def complete_version(self, version: Version) -> Slot | None:
        slot = self.find(version)
        return slot if slot is not None and slot.state is SlotState.COMPLETE else None

    @property
    def newest(self) -> Version | None:
        """The newest complete version here, of the present history."""
        return max((s.version for s in self.slots.values() if s.version and s.state is SlotState.COMPLETE and not s.past), default=None)

    def undecided(self) -> list[Slot]:
        """Slots whose version will be committed or aborted."""
        hopeful = [s for s in self.slots.values() if s.state in (SlotState.WRITING, SlotState.COMPLETE)]
        return [s for s in hopeful if s.version and not s.past and (self.committed is None or s.version > self.committed)]

    def _is_free(self, slot: Slot, keep: Version | None) -> bool:
        if slot.retired or slot.past or slot.frozen or slot.readers:
            return False
        return slot.state is SlotState.EMPTY or (slot.state is SlotState.COMPLETE and slot.version != keep)

    def begin(self, version: Version) -> Slot | None:
        """Grants a slot for writing ``version``, or None while none may be overwritten.

        A complete version above the committed one still waits for its commit, so it is as untouchable as
        the committed one itself, retired or not; ``commit``, ``discard`` or ``supersede`` decide its fate first.
        """
        if self.sealed or self.find(version) is not None or self.undecided():
            return None
        keep = self.newest  # with nothing undecided, that is the committed version wherever it is here at all
        free = [slot for slot in self.slots.values() if self._is_free(slot, keep)]
        if not free:
            return None
        slot = min(free, key=lambda s: (s.state is not SlotState.EMPTY, s.version or version))
        slot.state, slot.version, slot.marked, slot.root = SlotState.WRITING, version, False, ""
        return slot

    def supersede(self, version: Version, committed: Version | None) -> None:
        """Learns from the owner, about to send ``version``, what is committed; everything between was aborted."""
        self.commit(committed)
        for slot in self.undecided():
            if slot.version is not None and slot.version < version:
                self.abort(slot.version)

    def complete(self, version: Version, root: str = "") -> bool:
        """Marks a slot as complete; returns False when that comes too late (it was given up, or sealed): the slot is free then."""
        slot = self.find(version)
        if slot is None or slot.state is not SlotState.WRITING or self.sealed:
            self.let_go(version)
            return False
        slot.state, slot.root = SlotState.COMPLETE, root
        return True

    def discard(self, version: Version) -> None:
        """Gives ``version`` up. A slot that is being written stays out of reach until its writer is known to have stopped."""
        slot = self.find(version)
        if slot is not None and slot.state is SlotState.WRITING:
            slot.state = SlotState.TORN
        elif slot is not None and slot.state is SlotState.COMPLETE:
            slot.clear()

    def abort(self, version: Version) -> None:
        """Records that ``version`` will never be committed. While sealed, a complete copy stays: an inventory may have promised it."""
        if not self.sealed or self.complete_version(version) is None:
            self.discard(version)

    def let_go(self, version: Version) -> None:
        """Records that the writer of ``version`` writes no more bytes. A complete version stays as it is."""
        slot = self.find(version)
        if slot is not None and slot.state in (SlotState.WRITING, SlotState.TORN):
            slot.clear()

    def commit(self, version: Version | None) -> None:
        """Records that ``version`` is complete everywhere; the committed version never moves back."""
        if version is not None and (self.committed is None or version > self.committed):
            self.committed = version
            self.drop_past()

    def rewind(self, resumed: Version | None) -> None:
        """Starts a new incarnation from ``resumed``: every newer version belongs to a history that is over.

        Complete ones stay until `drop_past`, and so does what was committed before. Some host may fail before it has opened this
        incarnation, which then has never been: those that go on with the former one need not keep ``resumed``, so what they have in
        common with this host is what was committed there. An agent that was restarted may know of that by the newest mark alone.

        Whoever wrote for the former incarnation must have been shut out: its connections closed, its workers
        dead or their slots retired before anything is granted.
        """
        marked = max((slot.version for slot in self.slots.values() if slot.version and slot.marked), default=None)
        for slot in self.slots.values():
            slot.frozen = False
            if slot.state is not SlotState.COMPLETE:
                slot.clear()
            elif slot.version is not None:
                left = resumed is None or slot.version > resumed or slot.version in (self.committed, marked)
                slot.past = slot.version != resumed and (slot.past or left)
        self.committed = resumed

    def resume(self, incarnation: Incarnation) -> None:
        """Continues an incarnation in an unknown state: as if it had begun just now, and all hosts might not have opened it."""
        for slot in self.slots.values():
            if slot.version is not None and slot.state is SlotState.COMPLETE:
                slot.past = slot.version != self.committed and slot.version.incarnation < incarnation

    def drop_past(self) -> None:
        """Drops slots of the past once the new incarnation trains, so that all hosts have opened it. Nothing goes while sealed."""
        for slot in self.slots.values():
            if slot.past and not self.sealed:
                slot.past = False
                if self.committed is None or (slot.version is not None and slot.version > self.committed):
                    slot.clear()

    def reap(self) -> list[Slot]:
        """Drops retired slots without readers or writers, whose version will not be needed again."""
        gone = [s for s in self.slots.values() if s.retired and not s.readers and not s.frozen and self._is_spent(s)]
        for slot in gone:
            del self.slots[slot.index]
        return gone

    def _is_spent(self, slot: Slot) -> bool:
        if slot.state is SlotState.EMPTY:
            return True
        outdated = self.committed is not None and slot.version is not None and slot.version < self.committed
        return slot.state is SlotState.COMPLETE and outdated and not slot.past and not self.sealed
