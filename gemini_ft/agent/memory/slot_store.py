"""The memory of one stream on one host: the memfds behind the protocol's slots, kept in step with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gemini_ft.agent.memory.budget import available_memory
from gemini_ft.agent.memory.slot_memory import SlotMemory, SlotShape, populate
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.effects import Free
from gemini_ft.core.slots import SlotState
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import MemoryBudgetError, SupersededError
from gemini_ft.wire.worker_messages import SlotInfo

if TYPE_CHECKING:
    from gemini_ft.agent.context import StreamContext
    from gemini_ft.agent.storing import StoredCopy

_Made = TypeVar("_Made")

ROOMY_COMMITS = 3  # in a row at which there must have been room that other processes have left


@dataclass(frozen=True)
class SlotDonor:
    """A worker that has handed a slot back to this agent. ``incarnation``: the one it works for."""

    worker: WorkerConnection
    incarnation: Incarnation | None


class SlotStore:
    """Makes, finds and frees the slot memory of one stream. The protocol (``context.host``) decides what a slot's bytes are worth."""

    def __init__(self, context: StreamContext) -> None:
        self.memory: dict[tuple[int, int], SlotMemory] = {}  # (owner, slot) -> its memfd
        self._context, self._host, self._budget, self._files = context, context.host, context.run.budget, context.run.files
        self._donors: dict[tuple[int, int], SlotDonor | None] = {}
        self._wanted: dict[int, tuple[SlotShape, int]] = {}  # owner -> the shape of its slots, and how many there should be
        self._roomy: dict[int, int] = {}  # owner -> commits in a row at which there was room to spare for the slots that it lacks
        self._checks: dict[Version, asyncio.Task[list[int]]] = {}  # under way
        self._making = asyncio.Lock()  # held while a thread makes files, so that the same room is not promised twice

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
                root=memory.root,
                committed=version == self._host.committed or memory.committed,
            )
            for owner, memory, version in complete
        ]

    async def verify(self, version: Version) -> list[int]:
        """Checks all copies of ``version`` here; those that do not match their checksums are discarded.

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

        def look() -> list[list[int]]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "gemini-verify") as pool:
                return [memory.damaged(pool) for _, memory in copies]

        damages = await asyncio.to_thread(look)
        for (owner, memory), damaged in zip(copies, damages, strict=True):
            if memory.version != version:  # a newer one is whole, and the slot is written anew
                continue
            if not damaged and memory.is_genuine:
                sound.append(owner)
                continue
            where = f"chunks {damaged[:8]}" if damaged else "its layout or checksums"
            self._context.log(f"rank {owner}'s {version} is damaged in {where}: discarded")
            self._context.note_damage(owner, version)
            self._host.slots(owner).discard(version)
            memory.clear()
            memory.forget()
        return sorted(sound)

    def adopt(self, memory: SlotMemory, shared: bool = False, donor: SlotDonor | None = None) -> bool:
        """Takes over a slot from before this agent's own time; it counts, but is never refused: the memory is in use already.

        Args:
            shared: a process that has not handed it back may still write to it: it can be read, and is not granted.
            donor: the worker that hands it back.

        Returns whether that brought a complete copy that was not here.
        """
        owner = memory.shape.owner
        slots = self._host.slots(owner)
        same = [index for (of, index), held in self.memory.items() if of == owner and held.inode == memory.inode]
        if same and not shared:
            slots.slots[same[0]].retired = self._host.is_stranger(owner) or self.is_outgrown(memory)  # its writer has come to us
            self._donors[owner, same[0]] = donor
        if same:
            memory.close()  # from another worker, or from one that only believed this agent to be dead
            return False
        if memory.version is not None and slots.find(memory.version) is not None:
            memory.drop()
            return False
        self._budget.take_over(memory.shape.total)
        index = max(slots.slots, default=-1) + 1
        self._host.adopt(owner, index, memory.version, memory.root, memory.committed).retired |= shared or self.is_outgrown(memory)
        self.memory[owner, index], self._donors[owner, index] = memory, donor
        return memory.version is not None

    def donors(self, owner: int) -> list[SlotDonor]:
        """Workers that have handed slots of a shard back, and may write to them."""
        return [donor for (of, _), donor in self._donors.items() if of == owner and donor is not None]

    async def stage(self, copy: StoredCopy, version: Version, wanted: Callable[[], bool]) -> None:
        """Lays a complete version down in a slot of its own, in place of slots that hold nothing.

        ``wanted``: asked when it is there, a long time later; if not, it is dropped.

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
            (memory,) = await self._beside(lambda: [SlotMemory.create(shape, self._files)], _drop_all)
            await asyncio.to_thread(copy.fill, memory)
            slots = self._host.slots(shape.owner)
            if wanted() and slots.find(version) is None:
                index = max(slots.slots, default=-1) + 1
                slots.adopt(index, version, memory.root)
                self.memory[shape.owner, index] = memory
                adopted = True
        finally:
            if not adopted:
                self._budget.give_back(shape.total)
                if memory is not None:
                    memory.drop()

    def _drop_empty(self, owner: int, keep: int) -> None:
        """Frees empty slots that have no readers, until ``keep`` are left."""
        slots = self._host.slots(owner)
        for index in [index for index, slot in slots.slots.items() if slot.state is SlotState.EMPTY and not slot.readers]:
            if len(slots.slots) > keep:
                del slots.slots[index]
                self.free(owner, index)

    def ensure(self, owner: int, shape: SlotShape, count: int, reuse: bool) -> list[int]:
        """Keeps ``count`` slots of ``shape`` in rotation; new ones where the present ones do not fit or must not be reused.

        Where there is no room for one of them beside what is still needed, there is one less until then (`short`).

        Returns the slots in rotation. Retired ones that are still needed stay until ``Free``.

        Raises MemoryBudgetError: there is no room for them beside what is still needed.
        """
        missing, others = self._clear_way(owner, shape, count, reuse)
        return self._enter(owner, shape, count, self._make(shape, count, missing, others))

    @property
    def is_slow(self) -> bool:
        """Whether `ensure` stops the agent for long: the pages of a file are reserved when it is made, 0.27 s for each GiB."""
        return self._files is not None

    async def ensure_beside(
        self, owner: int, shape: SlotShape, count: int, reuse: Callable[[], bool], wanted: Callable[[], bool] = lambda: True
    ) -> list[int]:
        """Does what `ensure` does, on a thread where that takes long: an agent that is silent meanwhile is taken for one that hangs.

        Args:
            reuse: asked when those are made for which others have asked before; see `ensure`.
            wanted: asked when the memory is there; if not, it is given back.

        Raises MemoryBudgetError: as `ensure` does. SupersededError: nobody wants it any more.
        """
        async with self._making:
            return await self._ensure_beside(owner, shape, count, reuse(), wanted)

    async def _ensure_beside(self, owner: int, shape: SlotShape, count: int, reuse: bool, wanted: Callable[[], bool]) -> list[int]:
        missing, others = self._clear_way(owner, shape, count, reuse)
        made = await self._beside(lambda: self._make(shape, count, missing, others), self._unmake)
        if not wanted():
            self._unmake(made)
            raise SupersededError(f"rank {owner}'s shard got memory when its incarnation was over")
        return self._enter(owner, shape, count, made)

    async def _beside(self, make: Callable[[], _Made], unmake: Callable[[_Made], None]) -> _Made:
        """Calls ``make`` on a thread of its own; what it still makes for a caller that was cancelled goes to ``unmake``."""
        if not self.is_slow:
            return make()
        loop, executor = asyncio.get_running_loop(), ThreadPoolExecutor(1, "gemini-slots")
        try:
            making = loop.run_in_executor(executor, make)
        except RuntimeError:  # no thread can be started
            return make()
        finally:
            executor.shutdown(wait=False)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: unmake(done.result()) if done.exception() is None else None)
            raise

    def _clear_way(self, owner: int, shape: SlotShape, count: int, reuse: bool) -> tuple[int, int]:
        """Gives back slots that are not needed; returns how many of ``count`` are missing then, and how many others there are."""
        slots = self._host.slots(owner)
        mine = self._rotation(owner)
        fits = [index for index in mine if self.memory[owner, index].shape == shape]
        if reuse and fits and len(fits) == len(mine):
            self._drop_empty(owner, keep=count)
        else:  # slots that are not needed are given back before memory is taken
            _, effects = self._host.renew(owner, 0)
            for effect in effects:
                if isinstance(effect, Free):
                    self.free(effect.owner, effect.slot)
        return count - len(self._rotation(owner)), len(slots.slots)

    def _enter(self, owner: int, shape: SlotShape, count: int, made: list[SlotMemory]) -> list[int]:
        for slot, memory in zip(self._host.slots(owner).add(len(made)), made, strict=True):
            self.memory[owner, slot.index] = memory
        self._wanted[owner] = (shape, count)
        return self._rotation(owner)

    def _rotation(self, owner: int) -> list[int]:
        return [index for index, slot in self._host.slots(owner).slots.items() if not slot.retired]

    def _make(self, shape: SlotShape, count: int, missing: int, others: int) -> list[SlotMemory]:
        """Memory for ``missing`` of ``count`` slots, or for one less where there is no room beside ``others`` that are still needed."""
        what = f"rank {shape.owner}'s shard ({count} slots of {shape.total:,} bytes)"
        try:
            return self._create(shape, max(0, missing), what)
        except MemoryBudgetError as error:
            if missing < 1 or others + missing - 1 < 2:  # one slot alone could never be overwritten
                raise
            made = self._create(shape, missing - 1, what)
            self._context.log(f"{error} Continuing with one slot less until there is room")
            return made

    def _create(self, shape: SlotShape, number: int, what: str) -> list[SlotMemory]:
        """Creates all of the slots, or none."""
        self._budget.take(number * shape.total, what)
        made: list[SlotMemory] = []
        try:
            for _ in range(number):
                made.append(SlotMemory.create(shape, self._files))
        except OSError as error:
            _drop_all(made)
            self._budget.give_back(number * shape.total)
            raise MemoryBudgetError(
                f"{what}: the kernel gives no memory or descriptor for it ({error.strerror}); "
                "see `ulimit -n`, `ulimit -v` and the limits of the control group"
            ) from None
        return made

    def _unmake(self, made: list[SlotMemory]) -> None:
        self._budget.give_back(sum(memory.shape.total for memory in made))
        _drop_all(made)

    def is_outgrown(self, memory: SlotMemory) -> bool:
        """Whether its shard has slots of another shape by now."""
        wanted = self._wanted.get(memory.shape.owner)
        return wanted is not None and wanted[0] != memory.shape

    @property
    def owners(self) -> Collection[int]:
        """The owners for which there are slots, or should be."""
        return self._wanted.keys()

    def short(self, among: Collection[int] | None = None, spare: int = 0) -> list[int]:
        """Owners that have fewer slots than they should, and for which there is room now, beside what those before them will take.

        Args:
            among: the owners whose slots would be made now, the others take no room; None: all.
            spare: how many times the size of a slot must stay available to other processes.
        """
        lacking = [(owner, shape, count - len(self._rotation(owner))) for owner, (shape, count) in self._wanted.items()]
        lacking = [each for each in lacking if each[2] > 0 and self._rotation(each[0]) and (among is None or each[0] in among)]
        if not lacking:
            return []
        found, allowed, available, taken = list[int](), self._budget.limit - self._budget.used, available_memory(), 0
        for owner, shape, missing in lacking:
            if taken + shape.total <= min(allowed, available - spare * shape.total):
                found.append(owner)
                taken += missing * shape.total
        return found

    def lastingly_short(self, among: Collection[int]) -> list[int]:
        """Owners as in `short`, at a commit, for which other processes have left room, and as much again, at the last commits too.

        What they leave for a moment is theirs: a slot that took it would stay, and whatever needs memory next meets the kernel's killer.
        """
        self._roomy = {owner: self._roomy.get(owner, 0) + 1 for owner in self.short(among, spare=1)}
        found = [owner for owner, commits in self._roomy.items() if commits >= ROOMY_COMMITS]
        for owner in found:
            del self._roomy[owner]
        return found

    async def top_up(self, owner: int) -> None:
        """Makes the slots that there was no room for before."""
        async with self._making:  # another shape may be wanted by then
            if self.short([owner]):
                shape, count = self._wanted[owner]
                with contextlib.suppress(MemoryBudgetError, SupersededError):
                    await self._ensure_beside(owner, shape, count, True, lambda: len(self._rotation(owner)) > 0)

    async def prefault(self, owner: int, indices: list[int]) -> None:
        """Faults pages in before the first bytes arrive, beside everything else the agent does."""
        for index in indices:
            if (memory := self.memory.get((owner, index))) is not None:
                with contextlib.suppress(RuntimeError):  # no thread can be started: the pages come with the first bytes
                    await asyncio.to_thread(populate, memory.memory, memory.shape.total)

    def free(self, owner: int, slot: int) -> None:
        memory = self.memory.pop((owner, slot))
        self._donors.pop((owner, slot), None)
        self._budget.give_back(memory.shape.total)
        self._context.custodians.take_back(memory)
        memory.drop()

    def writing(self, owner: int, version: Version) -> SlotMemory | None:
        """The memory into which ``version`` is being written."""
        slot = self._host.slots(owner).find(version)
        return self.memory[owner, slot.index] if slot is not None and slot.state is SlotState.WRITING else None

    def forget(self) -> None:
        """Forgets which bytes are in the slots, as their writers may change, except where the protocol knows them."""
        for memory in self.memory.values():
            memory.forget()

    def sync_headers(self) -> None:
        """Clears in memory, too, the slots that the protocol has cleared, before anything is written to them; marks what is committed."""
        for (owner, index), memory in self.memory.items():
            slot = self._host.slots(owner).slots.get(index)
            if memory.version is not None and (slot is None or slot.state is not SlotState.COMPLETE):
                memory.clear()
            elif memory.version is not None and memory.version == self._host.committed and not memory.committed:
                memory.note_commit()

    def damage(self, owner: int) -> int:
        """Flips a bit in every copy of a shard, as a failing memory module would: fault injection. Returns how many."""
        copies = [m for (o, _), m in self.memory.items() if o == owner and m.version is not None and m.shape.data_bytes]
        for memory in copies:
            memory.data(0, 1)[0] ^= 1
        return len(copies)


def _drop_all(made: list[SlotMemory]) -> None:
    for memory in made:
        memory.drop()
