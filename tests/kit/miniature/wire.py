"""Memory that remembers who wrote it, and connections whose bytes are read when they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from gemini_ft.core.versions import Version

if TYPE_CHECKING:
    from miniature.host import Node
    from miniature.job import Job
    from miniature.worker import Worker

CHUNKS = 2
Tag = tuple[Version, int]  # which version of which owner's shard a chunk belongs to
Step = tuple[object, Callable[[], None]]  # who acts, and what happens then


@dataclass(eq=False)
class Memory:
    """One slot's memfd."""

    shape: int
    chunks: list[Tag | None] = field(default_factory=lambda: [None] * CHUNKS)
    header: Version | None = None
    readers: list[object] = field(default_factory=list)  # who really reads it, whatever the protocol believes
    mapped: list[Worker] = field(default_factory=list)  # who was handed its descriptor for writing

    def holds(self, version: Version, owner: int) -> bool:
        return self.chunks == [(version, owner)] * CHUNKS

    def root(self, version: Version, owner: int) -> str:
        """What an agent, or a worker, forms of the bytes that are here."""
        return f"{version} of rank {owner}, shape {self.shape}: {self.chunks}"


@dataclass(frozen=True)
class Bytes:
    """A chunk on the wire: a reference to its sender's memory until it arrives, as after ``sendfile``."""

    memory: Memory
    index: int


def _arrived(value: Any) -> Any:
    return value.memory.chunks[value.index] if isinstance(value, Bytes) else value


class Handler(Protocol):
    """One end of a connection."""

    node: Node

    def on(self, kind: str, *args: Any) -> None: ...

    def lost(self) -> None: ...


@dataclass(eq=False)
class Connection:
    """Frames in order, both ways. The near end dialled."""

    job: Job
    role: str
    names: tuple[str, str]
    near: Handler
    far: Handler
    forward: deque[tuple[Any, ...]] = field(default_factory=deque)
    backward: deque[tuple[Any, ...]] = field(default_factory=deque)
    near_open: bool = True
    far_open: bool = True

    @property
    def hangs(self) -> bool:
        """Nothing passes, and neither end is told."""
        return self.role == "replicate" and self.names in self.job.hung and self.near_open and self.far_open

    @property
    def is_silent(self) -> bool:
        """The near end hears nothing from the far one."""
        return self.hangs or self.far.node in self.job.stopped

    def events(self) -> Iterator[Step]:
        if self.forward and self.far_open and not self.hangs and self.far.node not in self.job.stopped:
            yield (self, "forward"), self._deliver_forward
        if self.backward and self.near_open and not self.hangs and self.near.node not in self.job.stopped:
            yield (self, "backward"), self._deliver_backward

    def _deliver_forward(self) -> None:
        kind, *args = self.forward.popleft()
        if kind == "lost":
            self.far_open = False
            self.far.lost()
        else:
            self.far.on(kind, *map(_arrived, args))

    def _deliver_backward(self) -> None:
        kind, *args = self.backward.popleft()
        if kind == "lost":
            self.near_open = False
            self.near.lost()
        else:
            self.near.on(kind, *map(_arrived, args))

    def close_near(self, rng: Random | None = None, tell: bool = True) -> None:
        """The dialling end closes, or died. Some of what it sent has arrived, as bytes, and will still be looked at."""
        if not self.near_open:
            return
        self.near_open = False
        kept = rng.randint(0, len(self.forward)) if rng else len(self.forward)
        self.forward = deque(tuple(map(_arrived, frame)) for frame in list(self.forward)[:kept])
        self.forward.append(("lost",))
        self.backward.clear()
        if tell:
            self.near.lost()

    def close_far(self, tell: bool = True) -> None:
        """The accepting end closes, or died. The other one will notice, and lets its slots be read until then."""
        if not self.far_open:
            return
        self.far_open = False
        self.forward.clear()
        self.backward.clear()
        self.backward.append(("lost",))
        if tell:
            self.far.lost()
