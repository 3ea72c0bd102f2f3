"""Shards on their way to a peer, and shards that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemini_ft.core.slots import SlotState
from gemini_ft.core.versions import Version
from miniature.truth import check
from miniature.wire import CHUNKS, Bytes, Connection, Memory, Step, Tag

if TYPE_CHECKING:
    from miniature.host import Node


@dataclass(eq=False)
class Outgoing:
    """One shard on its way to one peer."""

    owner: int
    version: Version
    slot: int
    memory: Memory
    copied: int = 0
    end: tuple[str, str, str] | None = None
    cursor: int = 0
    begun: bool = False
    end_sent: bool = False
    cancelled: bool = False
    drop_sent: bool = False

    def restart(self) -> None:
        self.cursor, self.begun, self.end_sent = 0, False, False


class Link:
    """Everything one host sends to one peer; several shards and iterations may be under way at once."""

    def __init__(self, node: Node, peer: str) -> None:
        self.node, self.peer = node, peer
        self.active: list[Outgoing] = []
        self.connection: Connection | None = None

    def events(self) -> Iterator[Step]:
        if self.connection is None:
            if self.active and self.node.job.accepts(self.node, self.peer):
                yield self, self._dial
            return
        for out in self.active:
            frame = self._next(out)
            if frame is not None:
                yield self, lambda out=out, frame=frame: self._send(out, frame)  # type: ignore[misc]

    def _dial(self) -> None:
        self.connection = self.node.job.connect(self.node, self.peer, "replicate", self)
        for out in self.active:
            out.restart()

    def _next(self, out: Outgoing) -> tuple[Any, ...] | None:
        if out.cancelled:
            return None if out.drop_sent else ("drop", out.owner, out.version)
        if not out.begun:
            return "begin", out.owner, out.version, self.node.host.slots(out.owner).committed, out.memory.shape
        if out.cursor < out.copied:
            return "chunk", out.owner, out.version, out.cursor, Bytes(out.memory, out.cursor)
        if out.end is not None and not out.end_sent:
            return "end", out.owner, out.version, *out.end
        return None

    def _send(self, out: Outgoing, frame: tuple[Any, ...]) -> None:
        assert self.connection is not None
        self.connection.forward.append(frame)
        out.drop_sent |= frame[0] == "drop"
        out.begun |= frame[0] == "begin"
        out.cursor += frame[0] == "chunk"
        out.end_sent |= frame[0] == "end"

    def cancel(self, owner: int, version: Version) -> None:
        for out in [out for out in self.active if (out.owner, out.version) == (owner, version)]:
            out.cancelled = True
            if self.connection is None or not out.begun:
                self._over(out)

    def on(self, kind: str, *args: Any) -> None:
        for out in [out for out in self.active if (out.owner, out.version) == args]:
            if kind == "again":
                out.restart()
            elif kind == "kept" or out.drop_sent:
                self._over(out)

    def lost(self) -> None:
        self.connection = None
        for out in [out for out in self.active if out.cancelled]:
            self._over(out)

    def _over(self, out: Outgoing) -> None:
        """Only now does nobody refer to the slot any more: that the last chunk was handed over proves nothing."""
        self.active.remove(out)
        out.memory.readers.remove(out)
        self.node.perform(self.node.host.sent(out.owner, out.slot, self.peer))

    def insist(self) -> None:
        """The agent's duty: a peer that does not even answer that it forgets a shard is cut off."""
        if self.connection is not None and self.connection.is_silent and any(out.drop_sent for out in self.active):
            self.connection.close_near()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close_near()
        for out in list(self.active):
            self._over(out)


class Receiver:
    """Everything one peer sends to this host over one connection."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection: Connection | None = None
        self.open: dict[int, tuple[Version, Memory | None, set[int]]] = {}  # owner -> (version, where it goes, what is there)
        self.again: list[tuple[int, Version]] = []  # what to ask for once more, after a pause

    def fills(self, memory: Memory) -> bool:
        return any(target is memory for _, target, _ in self.open.values())

    def on(self, kind: str, *args: Any) -> None:
        getattr(self, f"_{kind}")(*args)

    def _begin(self, owner: int, version: Version, committed: Version | None, shape: int) -> None:
        if owner in self.open and version < self.open[owner][0]:
            return  # an older one that starts over: it must not push the newer one out
        if owner in self.open:
            self._abandon(owner, self.open[owner][0])
        self.node.ensure(owner, shape, 2)
        memory = self.node.grant(owner, lambda: self.node.host.receive(owner, version, committed))
        self.open[owner] = (version, memory, set())
        if memory is None and self.node.host.slots(owner).complete_version(version) is None:
            self.again.append((owner, version))

    def _chunk(self, owner: int, version: Version, index: int, content: Tag | None) -> None:
        now, memory, there = self.open.get(owner, (None, None, set()))
        if now == version and memory is not None:
            if self.node.job.lies > 0:  # something on the way exchanges bytes and their checksum
                self.node.job.lies -= 1
                content = (version, owner + 1)
            memory.chunks[index] = content  # where bytes go was settled when the shard began: they may be half read already
            there.add(index)

    def _end(self, owner: int, version: Version, layout: str, digest: str, root: str) -> None:
        now, memory, there = self.open.get(owner, (None, None, set()))
        slots = self.node.host.slots(owner)
        slot = slots.find(version)
        if now == version and memory is not None and len(there) == CHUNKS and slot is not None and slot.state is SlotState.WRITING:
            if memory.root(version, owner) != root:  # the agent's duty: all of it comes again
                self._abandon(owner, version)
                self.again.append((owner, version))
                return
            del self.open[owner]
            memory.header = version
            self.node.perform(self.node.host.completed(owner, version, layout, digest, root))
        elif now == version and memory is not None and (slot is None or slot.state is SlotState.TORN):
            self._abandon(owner, version)  # what an earlier connection still had to say has taken the slot away
            self.again.append((owner, version))
        if slots.complete_version(version) is not None:
            self._reply("kept", owner, version)

    def _drop(self, owner: int, version: Version) -> None:
        self._abandon(owner, version)
        self._reply("dropped", owner, version)

    def _abandon(self, owner: int, version: Version) -> None:
        now, memory, _ = self.open.get(owner, (None, None, set()))
        if now == version:
            del self.open[owner]
            if memory is not None:
                self.node.perform(self.node.host.receive_failed(owner, version))

    def _reply(self, *frame: Any) -> None:
        assert self.connection is not None
        self.connection.backward.append(frame)

    def ask_again(self) -> None:
        for owner, version in self.again:
            self._reply("again", owner, version)
        self.again.clear()

    def lost(self) -> None:
        self.again.clear()
        for owner, (version, _, _) in list(self.open.items()):
            self._abandon(owner, version)


class Server:
    """Serves one reader; the slot is pinned until the reader hangs up."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection: Connection | None = None
        self._held: tuple[int, int, Memory] | None = None

    def on(self, kind: str, *args: Any) -> None:
        assert self.connection is not None
        if kind == "describe":
            self.connection.backward.append(self._pin(*args))
        else:
            assert self._held is not None
            self.connection.backward.append(("data", args[0], Bytes(self._held[2], args[0])))

    def _pin(self, owner: int, version: Version) -> tuple[Any, ...]:
        slot = self.node.host.hold(owner, version, f"fetch:{id(self)}")
        if slot is None:
            return ("refused",)
        self._held = (owner, slot.index, self.node.memory[owner, slot.index])
        self._held[2].readers.append(self)
        return ("described",)

    def lost(self) -> None:
        if self._held is not None:
            owner, index, memory = self._held
            memory.readers.remove(self)
            self.node.perform(self.node.host.release(owner, index, f"fetch:{id(self)}"))


class Fetch:
    """Reads one shard of the resumed version from a peer: for a worker that starts, or to rebuild a lost replica."""

    def __init__(self, node: Node, owner: int, version: Version, target: Memory | None, done: Callable[[bool], None]) -> None:
        self.node, self.owner, self.version, self.target, self._done = node, owner, version, target, done
        self._connection: Connection | None = None

    def start(self, source: str) -> None:
        self._connection = self.node.job.connect(self.node, source, "fetch", self)
        if self._connection is None:
            self._finish(False)
        else:
            self._connection.forward.append(("describe", self.owner, self.version))

    def on(self, kind: str, *args: Any) -> None:
        if kind == "refused":
            self._finish(False)
        elif kind == "described":
            self._ask(0)
        else:
            index, content = args
            check(content == (self.version, self.owner), f"a reader of {self.version} was given {content}")
            if self.target is not None:
                self.target.chunks[index] = content
            self._ask(index + 1)

    def _ask(self, index: int) -> None:
        assert self._connection is not None
        if index < CHUNKS:
            self._connection.forward.append(("fetch", index))
        else:
            self._finish(True)

    def lost(self) -> None:
        self._finish(False)

    def cancel(self) -> None:
        self._finish(False)

    def _finish(self, whole: bool) -> None:
        if self in self.node.fetches:
            self.node.fetches.remove(self)
            if self._connection is not None:
                self._connection.close_near(tell=False)
            self._done(whole)
