"""The switch: a process that adds up packets of workers.

`SwitchServer` has the socket and the clock. `Jobs` decides who joins and leaves, and what memory there is for it, and `switch_slots.Slots`
what becomes of a packet; both are pure: addresses and times are given, and replies are returned.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .switch_adders import ADDERS
from .switch_packets import (
    GIVEN,
    MARK,
    MOST_RANKS,
    SUMMED,
    SWITCH,
    Array,
    Datagrams,
    Envelope,
    Join,
    Joined,
    Message,
    Packets,
    SwitchHello,
    SwitchLeave,
    SwitchRefused,
    SwitchWelcome,
    await_any,
    decode,
    encode,
    job_key,
)
from .switch_slots import Slots

Address: TypeAlias = tuple[object, ...]
_COOKIE_SECONDS = 60.0  # a cookie is good for one to two times as long
_PER_ROW = 40  # bytes beside the registers


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Attributes:
    memory: bytes for the slots of all jobs.
    jobs: at once.
    idle: seconds after which a job that is silent makes room for one that lacks it.
    """

    memory: int = 2**28
    jobs: int = 64
    idle: float = 120.0


@dataclass(eq=False, kw_only=True)
class SwitchJob:
    """Attributes:
    wanted: how its first worker joined, but for cookie and rank.
    members: by rank, where workers are; a worker's place never changes within a job.
    heard: when it was last heard of.
    """

    wanted: Join
    slots: Slots
    key: AESGCM
    nbytes: int
    heard: float
    members: dict[int, Address] = field(default_factory=dict)


class Jobs:
    """All jobs of one switch.

    Args:
        boot: made up at the start, 32 hexadecimal digits.
        part, parts: of the slots that this switch has, from 0 on.
    """

    def __init__(self, key: bytes, boot: str, limits: Limits, part: int = 0, parts: int = 1) -> None:
        self._key, self._boot, self._limits = key, boot, limits
        self.part, self._parts = part, parts
        self._jobs: dict[str, SwitchJob] = {}
        self._places: dict[Address, tuple[SwitchJob, int]] = {}
        self._past: Counter[str] = Counter()  # counts of jobs that are over
        self._over = 0

    def find(self, address: Address) -> tuple[SwitchJob, int] | None:
        """The job and the rank of the worker at an address, which anybody can write on a datagram."""
        return self._places.get(address)

    def control(self, message: Message, address: Address, now: float) -> Message | None:
        """Takes a message that is properly sealed; returns the reply, if it gets one."""
        match message:
            case SwitchHello():
                return SwitchWelcome(boot=self._boot, cookie=self._cookie(address, now), part=self.part, parts=self._parts)
            case Join():
                return self._join(message, address, now)
            case SwitchLeave() if message.job in self._jobs:
                self._end(message.job)
        return None

    def counts(self) -> dict[str, int]:
        """Numbers of jobs, and packets by what became of them."""
        total = self._past + sum((job.slots.counts for job in self._jobs.values()), Counter[str]())
        return {"jobs": len(self._jobs), "jobs_over": self._over, "memory": self._used(), **total}

    def _join(self, join: Join, address: Address, now: float) -> Message | None:
        cookies = (self._cookie(address, moment) for moment in (now, now - _COOKIE_SECONDS))
        if not any(hmac.compare_digest(join.cookie, cookie) for cookie in cookies):
            return None  # it can say hello again
        job = self._jobs.get(join.job)
        if (reason := self._objection(join, job, address, now)) is not None:
            return SwitchRefused(job=join.job, reason=reason)
        if job is None:
            adder = ADDERS[join.adder](2 * join.slots, join.nbytes)
            slots = Slots(join.world, join.slots, adder, largest=join.largest)
            job = self._jobs[join.job] = SwitchJob(
                wanted=join, slots=slots, key=job_key(self._key, self._boot, join.job), nbytes=join.nbytes, heard=now
            )
        self._move(address, job, join.rank)
        return Joined(job=join.job, rank=join.rank)

    def _objection(self, join: Join, job: SwitchJob | None, address: Address, now: float) -> str | None:
        if job is not None:
            if join != job.wanted.model_copy(update={"cookie": join.cookie, "rank": join.rank}):
                return "the ranks of the job ask for different things"
            if job.members.get(join.rank, address) != address:
                return f"rank {join.rank} has joined from another address already"
            return None
        if join.adder not in ADDERS:
            return f"adder {join.adder!r}: this switch has {', '.join(ADDERS)}; use the same version on all sides"
        if join.world > MOST_RANKS or join.rank >= join.world:
            return f"rank {join.rank} of {join.world} workers: a job takes up to {MOST_RANKS}; use another scheme"
        return self._make_room(_need(join), now)

    def _make_room(self, need: int, now: float) -> str | None:
        """Ends jobs that are silent, the longest silent first, until there is room; else says what is lacking."""
        while (full := len(self._jobs) >= self._limits.jobs) or self._used() + need > self._limits.memory:
            oldest = min(self._jobs, key=lambda name: self._jobs[name].heard, default=None)
            if oldest is None or now - self._jobs[oldest].heard < self._limits.idle:
                lack = f"{self._limits.jobs} jobs" if full else f"{self._limits.memory:,} bytes, of which {self._used():,} are taken"
                return f"no room for a job that needs {need:,} bytes: this switch takes {lack}; give it more (--memory, --jobs)"
            self._end(oldest)
        return None

    def _move(self, address: Address, job: SwitchJob, rank: int) -> None:
        if (before := self._places.get(address)) is not None and before[0] is not job:
            self._end(before[0].wanted.job)  # the port belongs to another process now, so a worker of that job is gone
        job.members[rank] = address
        self._places[address] = (job, rank)

    def _end(self, name: str) -> None:
        job = self._jobs.pop(name)
        self._past.update(job.slots.counts)
        self._over += 1
        for address in job.members.values():
            self._places.pop(address, None)

    def _used(self) -> int:
        return sum(_need(job.wanted) for job in self._jobs.values())

    def _cookie(self, address: Address, now: float) -> str:
        text = f"{int(now // _COOKIE_SECONDS)} {address!r} {self._boot}"
        return hmac.digest(self._key, b"cookie " + text.encode(), "sha256")[:16].hex()


def _need(join: Join) -> int:
    """Bytes of a job's slots, two copies of each."""
    return 2 * join.slots * (_PER_ROW + int(join.nbytes * ADDERS[join.adder].register_bytes))


class SwitchServer:
    """Serves on one socket.

    Args:
        listening: a bound UDP socket.
        part, parts: of the slots that this switch has, from 0 on.

    Attributes:
        counts: datagrams that were dropped before they came to a job, by reason.
    """

    def __init__(self, listening: socket.socket, key: bytes, limits: Limits | None = None, part: int = 0, parts: int = 1) -> None:
        self._socket = Datagrams(listening)
        self._envelope = Envelope(key)
        self.jobs = Jobs(key, secrets.token_hex(16), limits or Limits(), part, parts)
        self.counts: Counter[str] = Counter()

    def report(self) -> dict[str, int]:
        """The counts of all jobs and of what was dropped."""
        return {**self.jobs.counts(), **self.counts}

    def serve(self, stop: socket.socket) -> None:
        """Serves until ``stop`` can be read."""
        while True:
            if stop.fileno() in await_any([self._socket, stop]):
                return
            self.take(self._socket.receive(), time.monotonic())

    def take(self, received: Sequence[tuple[Array, Any]], now: float) -> None:
        """Takes what has come. Sums that it completes are sent together: the fewer batches there are, the less work they make."""
        by_sender: dict[tuple[Any, int], list[Array]] = {}
        for datagrams, sender in received:
            if bytes(datagrams[0, : len(MARK)]) == MARK:
                for datagram in datagrams:
                    self._control(bytes(datagram), sender, now)
            else:
                by_sender.setdefault((sender, datagrams.shape[1]), []).append(datagrams)
        complete: dict[SwitchJob, list[Packets]] = {}
        for (sender, _), parts in by_sender.items():
            self._add(np.concatenate(parts) if len(parts) > 1 else parts[0], sender, now, complete)
        for job, sums in complete.items():
            self._send(job, sums, list(job.members.values()))

    def _add(self, datagrams: Array, sender: Any, now: float, complete: dict[SwitchJob, list[Packets]]) -> None:
        found = self.jobs.find(sender)
        if found is None:
            self.counts["stranger"] += len(datagrams)
            return
        job, rank = found
        packets, wrong = decode(datagrams, GIVEN, rank, self.jobs.part, job.key)
        if packets.values is not None and packets.values.shape[1] != job.nbytes:
            wrong, packets = wrong + len(packets), packets.pick(packets.slots < 0)
        self.counts["forged"] += wrong
        if len(packets):
            job.heard = now
        outcome = job.slots.take(rank, packets)
        self._send(job, outcome.again, [sender])
        complete.setdefault(job, []).extend(outcome.everybody)

    def _send(self, job: SwitchJob, sums: Sequence[Packets], addresses: Sequence[Any]) -> None:
        for each in Packets.join(sums):
            datagrams = encode(each, SUMMED, SWITCH, self.jobs.part, job.key)
            for address in addresses:
                try:
                    self._socket.send(datagrams, address)
                except OSError:  # no way there: as if they were lost on the way
                    self.counts["unsent"] += len(datagrams)

    def _control(self, datagram: bytes, address: Any, now: float) -> None:
        message = self._envelope.open(datagram)
        if message is None:
            self.counts["forged"] += 1
        elif (reply := self.jobs.control(message, address, now)) is not None:
            with contextlib.suppress(OSError):
                self._socket.socket.sendto(self._envelope.seal(reply), address)
