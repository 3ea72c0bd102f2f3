"""The traffic of one host: shards on their way, the cost of sending, and the number of steps that a snapshot needs.

The workers say what their steps look like, the kernel how fast the links are, the last snapshot how much there is to send.
From these follows how many steps of idle network carry one snapshot (`gemini_ft.core.traffic`); the leader takes the most that any
host needs, and tells all (`gemini_ft.core.traffic.Pace`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication.gate import Gate, Pass
from gemini_ft.core.traffic import LinkCost, Profile, Transfer, arrival, common, schedule, steps_per_snapshot
from gemini_ft.core.versions import Version
from gemini_ft.wire.lane_thread import Meter
from gemini_ft.wire.messages import Notice
from gemini_ft.wire.peer_messages import End, ReportNeed
from gemini_ft.wire.worker_messages import SessionSpec, SpanUse, Travelled


@dataclass(kw_only=True)
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


_SAMPLES = 8  # newest transfers from which the cost of sending is known
_MEASURABLE = 2**16  # bytes below which one says nothing
_SPANS = 128  # of a step, that the account tells of
_TELLING = 8 * 2**20  # bytes after which a transfer that is still on its way says enough


class Pacing:
    """The pacing of one stream on one host, for one session."""

    def __init__(self, context: StreamContext, spec: SessionSpec, gate: Gate) -> None:
        self._context, self._host, self._traffic, self._gate = context, context.host.name, spec.traffic, gate
        self._fixed = spec.interval  # steps between snapshots, where the user says so
        gate.interval = spec.interval or 1
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._delays: deque[float] = deque(maxlen=_SAMPLES)
        self._nbytes: dict[tuple[int, str], int] = {}  # (owner, peer) -> bytes that the last snapshot sent
        self._copies: dict[int, tuple[int, str]] = {}  # rank -> steps between snapshots that its device's copies need, and why
        self.need: ReportNeed | None = None  # as it was said last
        self._used: dict[
            tuple[int, str], Counter[int]
        ] = {}  # (owner, peer) -> span of the step -> bytes of the last snapshot that went in it
        self._totals = {"bytes": 0, "bytes_outside": 0, "spans": 0}

    def observed(self, rank: int, profile: Profile | None) -> None:
        """Takes the profile of a worker's steps, or word that there is none any more."""
        if profile is None:
            self._gate.profiles.pop(rank, None)
        else:
            self._gate.profiles[rank] = profile
        self._gate.poke()
        self._judge()

    def held_back(self, rank: int, steps: int, why: str) -> None:
        """Records that the copies of a rank's device hold its updates back unless snapshots are ``steps`` apart."""
        self._copies[rank] = steps, f"host {self._host}, rank {rank}: {why}"
        self._judge()

    def under_way(self, out: Outgoing, meter: Meter) -> None:
        """Learns from the first snapshot before it is there: while the link's speed is not known, next to nothing travels at a time."""
        if self._gate.link is None and out.busy_before is not None and meter.acked - out.busy_before.acked >= _TELLING:
            self._learn(out, meter)

    def arrived(self, out: Outgoing, peer: str, meter: Meter, seconds: float) -> None:
        """Records that a shard got to a peer, ``seconds`` after its first byte could be sent."""
        self._learn(out, meter)
        first = (out.owner, peer) not in self._nbytes
        self._nbytes[out.owner, peer] = out.sent
        self._totals["bytes"] += out.sent
        self._totals["bytes_outside"] += out.outside
        self._totals["spans"] += len(out.spans)
        self._used[out.owner, peer] = used = Counter[int]()
        for use in out.spans.values():
            used[use.begun] += use.nbytes
        self._context.tell_workers(
            Travelled(
                iteration=out.version.iteration,
                peer=peer,
                nbytes=out.sent,
                outside=out.outside,
                spans=list(out.spans.values()),
                seconds=seconds,
                expected=self._expected(),
            )
        )
        if first:
            self._judge()

    def left_out(self, owner: int, peer: str) -> None:
        """Records a replica that is not waited for any more."""
        self._nbytes.pop((owner, peer), None)
        self._used.pop((owner, peer), None)

    def paced(self, interval: int) -> None:
        self._gate.interval = interval

    def status(self) -> dict[str, object]:
        link, profile = self._gate.link, self._profile
        return {
            "interval": self._gate.interval,
            "bandwidth": link.bandwidth if link is not None else None,
            "step_seconds": self._gate.step_seconds,
            "idle_seconds": profile.idle if profile is not None else None,
            "idle_spread_seconds": max(profile.spread) if profile is not None else None,
            "idle_spans": self._spans(profile) if profile is not None else [],
            **self._totals,
        }

    # -- inside

    def _spans(self, profile: Profile) -> list[tuple[float, float, int]]:
        """The longest idle spans of a step: when each begins, its seconds, and the bytes that left in it at the last snapshot."""
        used = sum(self._used.values(), Counter[int]())
        spans = [(begin, seconds, used[at]) for at, (begin, seconds) in enumerate(zip(profile.begins, profile.gaps, strict=False))]
        return sorted(sorted([span for span in spans if span[1] > 0], key=lambda span: (span[2] > 0, span[1]))[-_SPANS:])

    def _learn(self, out: Outgoing, meter: Meter) -> None:
        before = out.busy_before
        if before is None or out.sent < _MEASURABLE or meter.busy <= before.busy:
            return
        self._rates.append((meter.acked - before.acked) / (meter.busy - before.busy))
        self._delays.append(meter.rtt)
        rates = sorted(self._rates)
        self._gate.link = LinkCost(alpha=min(self._delays), bandwidth=rates[3 * len(rates) // 4])

    @property
    def _profile(self) -> Profile | None:
        """The network profile of this host; None: its workers have none."""
        profiles = list(self._gate.profiles.values())
        return common(profiles) if profiles else None

    @property
    def _transfer(self) -> Transfer:
        traffic = self._traffic
        return Transfer(
            nbytes=sum(self._nbytes.values()), copies=1, buffer_bytes=traffic.buffer_bytes, parts=traffic.sub_buffers, gamma=traffic.gamma
        )

    def _expected(self) -> float | None:
        """Seconds, by the cost model, until everything that a snapshot sends from here has arrived."""
        link, profile = self._gate.link, self._profile
        if link is None or profile is None:
            return None
        return arrival(profile.begins, profile.gaps, profile.seconds, self._transfer, link)

    def _judge(self) -> None:
        """Decides whether idle network and devices carry a snapshot per step and, if not, how many steps it takes."""
        needs = [*self._copies.values()]
        link, profile, transfer = self._gate.link, self._profile, self._transfer
        if link is not None and profile is not None and self._nbytes:
            carried = transfer.nbytes - schedule(profile.gaps, transfer, link).overflow_bytes
            why = (
                f"host {self._host} sends {transfer.nbytes:,} bytes per snapshot at {link.bandwidth / 1e6:,.1f} MB/s; "
                f"a step of {profile.seconds:.3f} s leaves {profile.idle:.3f} s of idle network, which carry {carried:,} bytes"
            )
            needs.append((steps_per_snapshot(profile.gaps, transfer, link), why))
        if not needs:
            return
        steps, why = max(needs)
        before, self.need = self.need, ReportNeed(host=self._host, steps=steps, interval=self._gate.interval, why=why)
        if self._fixed is None:
            self._context.report(self.need)
        elif steps > self._fixed and (before is None or steps != before.steps):
            self._context.tell_workers(
                Notice(text=f"{why}: with interval={self._fixed} the rest delays the training (interval={steps} would not)")
            )
