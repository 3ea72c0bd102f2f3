"""What happens to slots, seen from below the protocol: each change of each slot of each agent becomes an event of the history."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_store import SlotStore
from gemini_ft.agent.stream import Stream
from gemini_ft.core.effects import Completed
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.protocol import Host as Holder
from gemini_ft.core.slots import Slot, SlotSet, SlotState
from gemini_ft.core.versions import Version
from simulation.loop import PROCESS
from simulation.made import EXTRAS, content, text

if TYPE_CHECKING:
    from simulation.hosts import Agent
    from simulation.world import World

_UNHEARD = 12.0  # seconds of silence after which a leader has noticed it, also by way of a collector on a slow network
_VERBS = ("begin", "complete", "discard", "abort", "let_go", "supersede", "commit", "rewind", "drop_past", "reap")


class Audit:
    """Records what becomes of slots.

    ``granted``   a slot is given to a writer, with whoever still reads or writes it
    ``whole``     a slot becomes complete
    ``dropped``   a complete copy is given up, with whether its bytes were sound
    ``report``    a host says that its copy is complete
    ``opened``    a host has begun an incarnation, and of which shards its slots do not know what it knows to be committed
    ``moved back``  slots know of an older commit than before, in the same incarnation
    ``unheld``    a reader is given a slot that may be overwritten meanwhile
    ``taken back``  a host counts what is committed as aborted
    ``promised``  a host says that it has copies, of which its slots know nothing
    ``sealing``   a worker has asked for what a host holds
    ``left out``  a ledger goes on without holders, with the hosts of which nobody can have heard for a while
    ``led``       a host hears of an epoch
    """

    def __init__(self, world: World) -> None:
        self._world, self._is_inside = world, False

    def seams(self) -> list[tuple[Any, str, Any]]:
        """(class, name, double) of all that is watched."""
        return [
            *((SlotSet, verb, self._watched(getattr(SlotSet, verb))) for verb in _VERBS),
            (Holder, "open", self._opens(Holder.open)),
            (Holder, "reopen", self._opens(Holder.reopen)),
            (Stream, "report", self._reports(Stream.report)),
            (Holder, "reports", self._repeats(Holder.reports)),
            (Holder, "hold", self._holds(Holder.hold)),
            (Holder, "on_abort", self._aborts(Holder.on_abort)),
            (Stream, "seal", self._seals(Stream.seal)),
            (SlotStore, "inventory", self._promises(SlotStore.inventory)),
            (Ledger, "tick", self._ticks(Ledger.tick)),
            (StreamContext, "led", self._leads(StreamContext.led)),
        ]

    def _agent(self) -> Agent | None:
        process = PROCESS.get()
        assert process is not None
        host = self._world.by_name.get(process.host)
        return host.agent if host is not None and host.agent is not None and host.agent.process is process else None

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(slots: SlotSet, *args: Any) -> Any:
            if self._is_inside:
                return method(slots, *args)
            before = [(slot, slot.state, slot.version, slot.frozen, slots.sealed) for slot in slots.slots.values()]
            committed = slots.committed if method.__name__ != "rewind" else None
            self._is_inside = True
            try:
                return method(slots, *args)
            finally:
                self._is_inside = False
                for each in before:
                    self._compare(slots, *each)
                if committed is not None and (slots.committed is None or slots.committed < committed):
                    now = text(slots.committed) if slots.committed is not None else None
                    self._world.record("moved back", version=text(committed), now=now)

        return call

    def _compare(self, slots: SlotSet, slot: Slot, state: SlotState, version: Version | None, frozen: bool, sealed: bool) -> None:
        is_there = slots.slots.get(slot.index) is slot
        granted = is_there and slot.state is SlotState.WRITING and (state, version) != (SlotState.WRITING, slot.version)
        whole = is_there and slot.state is SlotState.COMPLETE and state is SlotState.WRITING
        dropped = state is SlotState.COMPLETE and (not is_there or (slot.state, slot.version) != (state, version))
        agent = self._agent() if granted or whole or dropped else None
        found = (
            [
                (stream, owner)
                for stream in agent.streams.by_name.values()
                for owner, of in stream.context.host.shards.items()
                if of is slots
            ]
            if agent is not None
            else []
        )
        for stream, owner in found:
            context = stream.context
            memory = context.slot_store.memory.get((owner, slot.index))
            facts: dict[str, Any] = {"host": context.host.name, "owner": owner, "sealed": sealed}
            if dropped and version is not None and memory is not None:
                nbytes = self._world.size_at(version.iteration)
                made = content(owner, version, nbytes) + EXTRAS
                sound = bytes(memory.data(0, len(made))) == made
                self._world.record("dropped", **facts, version=text(version), sound=sound, of=str(context.host.incarnation))
            if granted and slot.version is not None and memory is not None:
                assert agent is not None
                written = any(script.writing == memory.inode for script in self._world.scripts_on(agent.host))
                self._world.record(
                    "granted", **facts, version=text(slot.version), readers=sorted(slot.readers), frozen=frozen, written=written
                )
            if whole and slot.version is not None:
                self._world.record("whole", **facts, version=text(slot.version))

    def _opens(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(holder: Holder, *args: Any) -> Any:
            result = method(holder, *args)
            hosts, agent = sorted({host for each in holder.holders.values() for host in each}), self._agent()
            resumed = text(holder.committed) if holder.committed is not None else None
            self._world.record(
                "opened",
                host=holder.name,
                of=str(holder.incarnation),
                resumed=resumed,
                hosts=hosts,
                behind=[owner for owner, of in holder.shards.items() if holder.committed is not None and not _knows(of, holder.committed)],
                agent=agent.born if agent is not None else 0.0,
            )
            return result

        return call

    def _holds(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(holder: Holder, owner: int, version: Version, reader: str) -> Any:
            slot = method(holder, owner, version, reader)
            if slot is not None and reader not in slot.readers:
                self._world.record("unheld", host=holder.name, owner=owner, version=text(version), reader=reader)
            return slot

        return call

    def _aborts(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(holder: Holder, version: Version) -> Any:
            result = method(holder, version)
            if holder.committed is not None and any(each <= holder.committed for each in holder.aborted):
                self._world.record("taken back", host=holder.name, version=text(version))
            return result

        return call

    def _reports(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(stream: Stream, message: Any) -> Any:
            self._said(stream.context.host, message)
            return method(stream, message)

        return call

    def _repeats(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(holder: Holder) -> Any:
            said = method(holder)
            for message in said:
                self._said(holder, message)
            return said

        return call

    def _said(self, holder: Holder, message: Any) -> None:
        if isinstance(message, Completed):
            slot = holder.slots(message.owner).complete_version(message.version)
            whole = slot is not None and slot.root == message.root
            self._world.record("report", host=holder.name, whole=whole, owner=message.owner, version=text(message.version))

    def _seals(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(stream: Stream, worker: Any) -> Any:
            result = method(stream, worker)
            held = all(slots.sealed for slots in stream.context.host.shards.values())
            self._world.record("sealing", host=stream.context.host.name, held=held)
            return result

        return call

    def _promises(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: SlotStore) -> Any:
            said = method(store)
            kept = store._host.shards
            if lost := [f"{of.owner} of {text(of.version)}" for of in said if not kept[of.owner].complete_version(of.version)]:
                self._world.record("promised", host=store._host.name, lost=lost)
            return said

        return call

    def _ticks(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(ledger: Ledger, now: float, absent: Collection[str] = ()) -> Any:
            before = {*ledger.excluded}
            result = method(ledger, now, absent)
            if newly := ledger.excluded - before:
                owners = {owner: hosts[0] for owner, hosts in ledger.holders.items()}
                agent = self._agent()  # which leads, and hears its own host
                others = [host for host in self._world.hosts if agent is None or host is not agent.host]
                unheard = [host.name for host in others if self._world.unheard(host) > _UNHEARD]
                self._world.record("left out", pairs=sorted(map(list, newly)), owners=owners, silent=sorted({*absent, *unheard}))
            return result

        return call

    def _leads(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(context: StreamContext, epoch: int, leader: str) -> None:
            agent, of = self._agent(), context.spec.incarnation if context.spec is not None else None
            self._world.record("led", host=context.host.name, of=str(of), epoch=epoch, agent=agent.born if agent is not None else 0.0)
            method(context, epoch, leader)

        return call


def _knows(slots: SlotSet, committed: Version) -> bool:
    return slots.committed is not None and slots.committed >= committed
