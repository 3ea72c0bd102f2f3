"""Ranks that train, die, or live on after their time; and threads that upload."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemini_ft.core.tree import ways_up
from gemini_ft.core.versions import Incarnation, Version
from miniature.transfer import Fetch
from miniature.truth import check
from miniature.wire import CHUNKS, Memory, Step, Tag

if TYPE_CHECKING:
    from miniature.host import Node


@dataclass(frozen=True, eq=False)
class Session:
    """What all hosts of one incarnation were told."""

    incarnation: Incarnation
    hosts: tuple[str, ...]  # of each rank
    holders: dict[int, tuple[str, ...]]
    resumed: Version | None
    sources: dict[int, tuple[str, ...]]  # who has the resumed version in memory; empty when it is in storage
    roots: dict[int, str]  # of its shards
    fan_in: int

    @property
    def leader(self) -> str:
        return self.hosts[0]

    @property
    def ways(self) -> dict[str, tuple[str, ...]]:
        """host -> those to which it may report."""
        return ways_up(self.hosts, self.leader, self.fan_in)


class Worker:
    """A rank's process. Killed or not, it knows nothing of later incarnations and writes where it was allowed to."""

    def __init__(self, node: Node, rank: int, session: Session) -> None:
        self.node, self.rank, self.session = node, rank, session
        self.alive, self.known_dead = True, False
        self.state = "starting"  # then reading, ready, waiting, writing, or failed
        self.iteration = session.resumed.iteration if session.resumed else 0
        self.committed = session.resumed
        self.memory: Memory | None = None  # what it is writing to
        self.shape = -1
        self._copied = 0
        self._digest_at: int | None = None
        self.held: list[tuple[int, Memory]] = []  # (owner, slot) to be handed to an agent that was restarted
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.outbox: deque[tuple[Any, ...]] = deque()

    @property
    def version(self) -> Version:
        return Version(self.session.incarnation, self.iteration)

    def events(self) -> Iterator[Step]:
        """What it does by itself, training aside."""
        hears = self.node not in self.node.job.stopped  # the agent
        if self.outbox and hears:
            yield (self, "agent"), lambda: self.node.on_worker(self, *self.outbox.popleft())
        elif not self.alive and not self.known_dead and hears:  # what it said before it died still counts
            yield (self, "agent"), lambda: self.node.on_dead(self)
        if self.alive and self.inbox:
            yield self, lambda: self._hear(*self.inbox.popleft())
        if self.alive and self.state == "writing":
            yield self, self._copy
        if self.alive and self.state == "starting" and self.node.job.is_open(self.session) and hears:
            yield self, self._read

    # -- training

    def may_train(self) -> bool:
        """Ranks train in step: none is more than one iteration ahead of another."""
        return self.alive and self.state == "ready" and self.iteration <= self.node.job.slowest(self.session)

    def train(self) -> None:
        """One iteration. A slot is asked for; its shard may have another shape than the last."""
        self.iteration += 1
        self.state = "waiting"
        self.outbox.append(("reserve", self.iteration, self.node.job.shape_at(self.iteration)))
        self.outbox.append(("request", self.iteration))

    def _copy(self) -> None:
        assert self.memory is not None
        self.memory.chunks[self._copied] = (self.version, self.rank)
        self.outbox.append(("chunk", self.iteration, self._copied))
        self._copied += 1
        if self._copied == CHUNKS:
            due = self._digest_at is not None and self.iteration >= self._digest_at
            digest = f"digest of {self.iteration}" if due else ""
            self.outbox.append(("copied", self.iteration, digest, self.memory.root(self.version, self.rank)))
            self._stop()

    def _stop(self) -> None:
        self.state, self.memory = "ready", None

    def skip(self, say: bool = True) -> None:
        """Give the snapshot up: it is late, or was disturbed, or (nothing to say then) was aborted."""
        if self.alive and self.state in ("waiting", "writing"):
            self._stop()
            if say:
                self.outbox.append(("give_up", self.iteration))

    def die(self) -> None:
        self.alive, self.memory = False, None

    def _hear(self, kind: str, *args: Any) -> None:
        if kind == "granted" and self.state == "waiting" and args[0] == self.iteration:
            self.state, self.memory, self._copied = "writing", args[1], 0
        elif kind == "aborted" and args[0] == self.iteration:
            self.skip(say=False)
        elif kind == "committed":
            version = Version(self.session.incarnation, args[0])
            self.committed = version if self.committed is None else max(self.committed, version)
            self._digest_at = args[1] if args[1] is not None else self._digest_at

    def agent_restarted(self) -> None:
        """Its agent is another process now, which holds the same memory: what was under way is given up."""
        self.inbox.clear()
        self.outbox.clear()
        self.outbox.append(("adopt", self.iteration))
        if self.session is self.node.interrupted:
            self.skip()
            self.shape = -1  # its slots are assigned anew
            self.state = "starting" if self.state == "reading" else self.state

    # -- recovery

    def _read(self) -> None:
        """Read the resumed state of its shard, from its own host if it can."""
        resumed, node = self.session.resumed, self.node
        self.state = "reading"
        if resumed is None or not self.session.sources:
            self._loaded(resumed is None or node.job.storage.holds(resumed, self.rank))
        elif (slot := node.host.slots(self.rank).complete_version(resumed)) is not None:
            self._loaded(node.memory[self.rank, slot.index].holds(resumed, self.rank))
        else:
            self._fetch(resumed, [name for name in self.session.sources[self.rank] if name != node.name])

    def _fetch(self, resumed: Version, sources: list[str]) -> None:
        if not sources:
            self.state = "failed"
            return

        def done(whole: bool) -> None:
            if whole:
                self._loaded(True)
            elif self.alive and self.node.session is self.session:
                self._fetch(resumed, sources[1:])

        self.node.fetch(Fetch(self.node, self.rank, resumed, None, done), sources[0])

    def _loaded(self, right: bool) -> None:
        check(right, f"rank {self.rank} resumed {self.session.resumed} from bytes that are not all of it")
        self.state = "ready"


@dataclass(eq=False)
class Uploading:
    """A thread that writes a slot to storage. Only its own end stops it, not a decision and not a new incarnation."""

    node: Node
    session: Session
    owner: int
    version: Version
    slot: int
    memory: Memory
    content: list[Tag | None] = field(default_factory=list)

    def read(self) -> None:
        self.content.append(self.memory.chunks[len(self.content)])
        if len(self.content) == CHUNKS:
            self.node.job.storage.objects[self.version, self.owner] = self.content
            if self.node.session is self.session and self.node.uploading == self.version:
                self.node.written.setdefault(self.version, []).append(self.owner)
            self._over("")

    def fail(self) -> None:
        self._over("disk full")

    def _over(self, error: str) -> None:
        self.node.uploads.remove(self)
        self.memory.readers.remove(self)
        self.node.perform(self.node.host.release(self.owner, self.slot, "upload"))
        if self.node.session is self.session:
            self.node.said_of_uploads.append(("uploaded", self.owner, self.version, error))
            self.node.say("uploaded", self.owner, self.version, error)
