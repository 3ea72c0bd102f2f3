"""One stream's memory on one host: the memfds behind the protocol's slots, kept in step with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemini_ft.agent.memory import Budget, SlotMemory, SlotShape, populate
from gemini_ft.agent.staging import StoredCopy
from gemini_ft.messages import SlotInfo
from gemini_ft.protocol import Free, Host
from gemini_ft.slots import Slot, SlotState
from gemini_ft.versions import Version


class Vault:
    """Makes, finds and frees slot memory. What a slot's bytes are worth is the protocol's business (``host``)."""

    def __init__(self, host: Host, budget: Budget, log: Callable[[str], None], on_free: Callable[[SlotMemory], None]) -> None:
        self.memory: dict[tuple[int, int], SlotMemory] = {}  # (owner, slot) -> its memfd
        self._host, self._budget, self._log, self._on_free = host, budget, log, on_free
        self._checks: dict[Version, asyncio.Task[list[int]]] = {}  # under way

    def inventory(self) -> list[SlotInfo]:
        """Every complete slot; the bytes themselves are checked when a version has been chosen (``verify``)."""
        complete = [(owner, m, m.version) for (owner, _), m in self.memory.items() if m.version is not None]
        return [
            SlotInfo(
                owner=owner,
                version=version,
                world_size=memory.shape.world_size,
                layout_hash=memory.shape.layout_hash,
                data_bytes=memory.shape.data_bytes,
                extras_bytes=memory.extras_bytes,
                age=memory.age,
            )
            for owner, memory, version in complete
        ]

    async def verify(self, version: Version) -> list[int]:
        """Check all copies of ``version`` here; what does not match its checksums is discarded.

        Every local rank asks at about the same time: the bytes are read once for all of them.

        Returns the owners whose copies are sound.
        """
        if version not in self._checks:
            self._checks[version] = asyncio.get_running_loop().create_task(self._check(version))
            self._checks[version].add_done_callback(lambda _: self._checks.pop(version))
        return await asyncio.shield(self._checks[version])

    async def _check(self, version: Version) -> list[int]:
        sound = []
        copies = [(owner, memory) for (owner, _), memory in self.memory.items() if memory.version == version]
        damages = await asyncio.gather(*(asyncio.to_thread(memory.damaged) for _, memory in copies))
        for (owner, memory), damaged in zip(copies, damages, strict=True):
            if not damaged:
                sound.append(owner)
                continue
            self._log(f"rank {owner}'s {version} is damaged in chunks {damaged[:8]}: discarded")
            self._host.slots(owner).discard(version)
            memory.clear()
            memory.forget()
        return sorted(sound)

    def adopt(self, memory: SlotMemory) -> None:
        """Take over a slot from before this agent's own time.

        Raises:
            MemoryBudgetError: there is no room for it.
        """
        owner = memory.shape.owner
        slots = self._host.slots(owner)
        same = any(held.inode == memory.inode for (of, _), held in self.memory.items() if of == owner)
        if same or (memory.version is not None and slots.find(memory.version) is not None):
            memory.close()  # from another worker, or from one that only believed this agent to be dead
            return
        self._budget.take(memory.shape.total, f"adopting rank {owner}'s slot")
        index = max(slots.slots, default=-1) + 1
        slots.adopt(index, memory.version)
        self.memory[owner, index] = memory

    async def stage(self, copy: StoredCopy, version: Version, wanted: Callable[[], bool]) -> None:
        """Lay a complete version down in a slot of its own, in the place of slots that hold nothing.

        Args:
            copy: what to lay down.
            version: which version that is.
            wanted: asked when it is there, a long time later; if not, it is dropped.

        Raises:
            CorruptDataError: it is damaged in storage.
            MemoryBudgetError: there is no room for it.
            StorageError: the storage cannot be read.
        """
        shape = copy.shape
        self._drop_empty(shape.owner, keep=0)
        self._budget.take(shape.total, f"rank {shape.owner}'s shard from storage")
        memory: SlotMemory | None = None
        adopted = False
        try:
            memory = SlotMemory.create(shape)
            await asyncio.to_thread(copy.fill, memory)
            slots = self._host.slots(shape.owner)
            if wanted() and slots.find(version) is None:
                index = max(slots.slots, default=-1) + 1
                slots.adopt(index, version)
                self.memory[shape.owner, index] = memory
                adopted = True
        finally:
            if not adopted:
                self._budget.give_back(shape.total)
                if memory is not None:
                    memory.close()

    def _drop_empty(self, owner: int, keep: int) -> None:
        """Free slots in which there is nothing and which nobody looks at, until ``keep`` are left."""
        slots = self._host.slots(owner)
        for index in [index for index, slot in slots.slots.items() if slot.state is SlotState.EMPTY and not slot.readers]:
            if len(slots.slots) > keep:
                del slots.slots[index]
                self.free(owner, index)

    def ensure(self, owner: int, shape: SlotShape, count: int, reuse: bool) -> list[int]:
        """Have ``count`` slots of ``shape`` in rotation; fresh ones where the present ones do not fit or must not be reused.

        Returns the slots in rotation. Retired ones that are still needed stay until ``Free``.

        Raises:
            MemoryBudgetError: there is no room for them beside what is still needed.
        """
        slots = self._host.slots(owner)
        mine = [index for index, slot in slots.slots.items() if not slot.retired]
        fits = [index for index in mine if self.memory[owner, index].shape == shape]
        fresh: list[Slot] = []
        if reuse and fits and len(fits) == len(mine):
            self._drop_empty(owner, keep=count)
            missing = max(0, count - len(fits))
            self._budget.take(missing * shape.total, f"rank {owner}'s shard")
            fresh = slots.add(missing)
        else:
            self._budget.take(count * shape.total, f"rank {owner}'s shard ({count} slots of {shape.total:,} bytes)")
            fresh, effects = self._host.renew(owner, count)
            for effect in effects:
                if isinstance(effect, Free):
                    self.free(effect.owner, effect.slot)
        for slot in fresh:
            self.memory[owner, slot.index] = SlotMemory.create(shape)
        return [index for index, slot in slots.slots.items() if not slot.retired]

    async def prefault(self, owner: int, indices: list[int]) -> None:
        """Fault pages in before the first bytes arrive, beside everything else the agent does."""
        for index in indices:
            if (memory := self.memory.get((owner, index))) is not None:
                await asyncio.to_thread(populate, memory.memory, 0, memory.shape.total)

    def free(self, owner: int, slot: int) -> None:
        """Give the memory back."""
        memory = self.memory.pop((owner, slot))
        self._budget.give_back(memory.shape.total)
        self._on_free(memory)
        memory.close()

    def writing(self, owner: int, version: Version) -> SlotMemory | None:
        """The memory ``version`` is being laid down in."""
        slot = self._host.slots(owner).find(version)
        return self.memory[owner, slot.index] if slot is not None and slot.state is SlotState.WRITING else None

    def forget(self) -> None:
        """Who writes to a slot may change: what is in it is not known any more, where the protocol does not say so."""
        for memory in self.memory.values():
            memory.forget()

    def sync_headers(self) -> None:
        """A slot the protocol has cleared must say so in memory too, before anybody writes to it."""
        for (owner, index), memory in self.memory.items():
            slot = self._host.slots(owner).slots.get(index)
            if memory.version is not None and (slot is None or slot.state is not SlotState.COMPLETE):
                memory.clear()

    def damage(self, owner: int) -> int:
        """Fault injection: flip a bit in every copy of a shard, as a failing memory module would. Returns how many."""
        copies = [m for (o, _), m in self.memory.items() if o == owner and m.version is not None and m.shape.data_bytes]
        for memory in copies:
            memory.data(0, 1)[0] ^= 1
        return len(copies)
