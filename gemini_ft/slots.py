"""The slots one host keeps for one shard: pure state, no memory, no clock.

A slot is EMPTY, WRITING (its bytes are being laid down) or COMPLETE (all bytes are there and verified).
The newest state that is safe everywhere is never overwritten, a slot that somebody reads is never
overwritten, and a slot that is being uploaded is out of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gemini_ft.versions import Version


class SlotState(StrEnum):
    """What a slot's bytes are worth."""

    EMPTY = "empty"
    WRITING = "writing"
    COMPLETE = "complete"


@dataclass
class Slot:
    """Memory for one iteration of one shard."""

    index: int
    state: SlotState = SlotState.EMPTY
    version: Version | None = None  # None exactly when EMPTY
    frozen: bool = False  # being uploaded; only a COMPLETE slot is frozen
    retired: bool = False  # of an earlier layout or a writer that may still live; never granted again
    readers: set[str] = field(default_factory=set)  # who may still look at the bytes

    def clear(self) -> None:
        self.state, self.version, self.frozen = SlotState.EMPTY, None, False


class SlotSet:
    """All slots of one shard on one host."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.committed: Version | None = None  # newest version known to be complete everywhere

    def add(self, count: int) -> list[Slot]:
        """Put ``count`` fresh slots into the rotation."""
        first = max(self.slots, default=-1) + 1
        fresh = [Slot(index) for index in range(first, first + count)]
        self.slots.update((slot.index, slot) for slot in fresh)
        return fresh

    def adopt(self, index: int, version: Version | None) -> Slot:
        """Take over a slot found in memory: COMPLETE with ``version``, or EMPTY."""
        slot = Slot(index, SlotState.COMPLETE if version else SlotState.EMPTY, version)
        self.slots[index] = slot
        return slot

    def retire(self) -> None:
        """Take all present slots out of the rotation; they stay readable until ``reap``."""
        for slot in self.slots.values():
            slot.retired = True
            if slot.state is SlotState.WRITING:
                slot.clear()

    def find(self, version: Version) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.version == version), None)

    def complete_version(self, version: Version) -> Slot | None:
        slot = self.find(version)
        return slot if slot is not None and slot.state is SlotState.COMPLETE else None

    @property
    def newest(self) -> Version | None:
        """The newest complete version here."""
        return max((s.version for s in self.slots.values() if s.version and s.state is SlotState.COMPLETE), default=None)

    def _is_free(self, slot: Slot, keep: Version | None) -> bool:
        if slot.retired or slot.frozen or slot.readers or slot.state is SlotState.WRITING:
            return False
        return slot.state is SlotState.EMPTY or slot.version != keep

    def begin(self, version: Version) -> Slot | None:
        """Grant a slot for writing ``version``, or None while none may be overwritten.

        A complete version above the committed one still waits for its commit, so it is as untouchable as
        the committed one itself; ``commit``, ``discard`` or ``supersede`` decide its fate first.
        """
        if (present := self.find(version)) is not None:
            return present if present.state is SlotState.WRITING else None
        pending = [s for s in self.slots.values() if s.version and (self.committed is None or s.version > self.committed)]
        if any(not slot.retired for slot in pending):
            return None
        keep = self.committed if self.committed and self.complete_version(self.committed) else self.newest
        free = [slot for slot in self.slots.values() if self._is_free(slot, keep)]
        if not free:
            return None
        slot = min(free, key=lambda s: (s.state is not SlotState.EMPTY, s.version or version))
        slot.state, slot.version = SlotState.WRITING, version
        return slot

    def supersede(self, version: Version, committed: Version | None) -> list[Slot]:
        """Learn from the owner, about to send ``version``, what is committed; everything between was aborted."""
        self.commit(committed)
        stale = [s for s in self.slots.values() if s.version and (committed is None or s.version > committed)]
        cleared = [s for s in stale if s.version is not None and s.version < version and not s.frozen]
        for slot in cleared:
            slot.clear()
        return cleared

    def complete(self, version: Version) -> bool:
        """All bytes are there; False when the slot was discarded meanwhile."""
        slot = self.find(version)
        if slot is None or slot.state is not SlotState.WRITING:
            return False
        slot.state = SlotState.COMPLETE
        return True

    def discard(self, version: Version) -> Slot | None:
        """Give ``version`` up (aborted, torn, or its writer died). Readers keep the slot from being reused."""
        slot = self.find(version)
        if slot is not None:
            slot.clear()
        return slot

    def commit(self, version: Version | None) -> None:
        """``version`` is complete everywhere; the committed version never moves back."""
        if version is not None and (self.committed is None or version > self.committed):
            self.committed = version

    def rewind(self, resumed: Version | None) -> list[Slot]:
        """Start a new incarnation from ``resumed``: every newer version belongs to a history that is over."""
        gone = [s for s in self.slots.values() if s.version and (resumed is None or s.version > resumed or s.state is SlotState.WRITING)]
        for slot in gone:
            slot.clear()
        for slot in self.slots.values():
            slot.frozen = False
        self.committed = resumed
        return gone

    def reap(self) -> list[Slot]:
        """Drop retired slots nobody needs: those that are read no more and are not the committed version's last copy."""
        safe = self.committed is not None and any(
            s.version == self.committed and s.state is SlotState.COMPLETE and not s.retired for s in self.slots.values()
        )
        gone = [s for s in self.slots.values() if s.retired and not s.readers and not s.frozen and (safe or s.state is SlotState.EMPTY)]
        for slot in gone:
            del self.slots[slot.index]
        return gone
