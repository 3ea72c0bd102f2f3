"""A shard on its way to one peer: its progress, and the network time that it has used."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from gemini_ft.agent.gate import Pass
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.core.versions import Version
from gemini_ft.wire.peer_messages import End
from gemini_ft.wire.tcp import Meter
from gemini_ft.wire.worker_messages import SpanUse


@dataclass
class Outgoing:
    """A shard on its way to one peer."""

    owner: int
    version: Version
    slot: int
    memory: SlotMemory
    end: End | None = None  # known once the worker has copied everything
    cursor: int = 0
    begun: bool = False
    end_sent: bool = False
    cancelled: bool = False
    drop_sent: bool = False
    resend: deque[int] = field(default_factory=deque)
    resends: int = 0
    presumed: set[int] = field(default_factory=set)  # chunks that were announced as unchanged, and not sent
    sent_bytes: int = 0
    sent_before: int = 0  # of these, in attempts that were broken off
    begun_at: float = 0.0
    busy_before: Meter | None = None  # the connection's counters when it began
    outside: int = 0  # bytes that could not wait for idle network any more
    spans: dict[tuple[int, int], SpanUse] = field(default_factory=dict)  # of idle network that were used

    @property
    def sent(self) -> int:
        """Bytes, in the attempt that succeeded."""
        return self.sent_bytes - self.sent_before

    def went(self, leave: Pass) -> None:
        """Counts bytes that the gate has just let go."""
        self.outside += leave.nbytes * leave.outside
        if leave.span is not None:
            now = time.monotonic()
            use = self.spans.get(leave.span) or SpanUse(step=leave.span[0], begun=leave.span[1], nbytes=0, first=now, last=now)
            self.spans[leave.span] = use.model_copy(update={"nbytes": use.nbytes + leave.nbytes, "last": now})

    def restart(self) -> None:
        self.cursor, self.begun, self.end_sent = 0, False, False
        self.outside, self.spans = 0, {}
        self.resend.clear()
        self.presumed.clear()


def end_of(owner: int, memory: SlotMemory, digest: str = "") -> End:
    """The message that ends a shard which is complete here."""
    assert memory.version is not None
    return End(
        owner=owner,
        iteration=memory.version.iteration,
        extras_bytes=memory.extras_bytes,
        chunks=len(memory.chunks),
        layout=memory.shape.layout_hash,
        digest=digest,
        root=memory.root,
    )
