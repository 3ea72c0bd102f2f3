"""The switch: a process that adds up packets of workers.

`SwitchServer` has the socket and the clock. `Jobs` decides who joins and leaves, and what memory there is for it, and `Slots` what becomes
of a packet; both are pure: addresses and times are given, and replies are returned.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from . import switch_packets as packet
from .switch_adders import ADDERS, Adder

Address: TypeAlias = tuple[object, ...]
_COOKIE_SECONDS = 60.0  # a cookie is good for one to two times as long
_PER_ROW = 40  # bytes beside the registers


@dataclass(kw_only=True)
class PacketEffects:
    """Effects of packets that have come: ``everybody`` gets the sums that they completed, their sender those that it asked for again."""

    everybody: list[packet.Packets] = field(default_factory=list)
    again: list[packet.Packets] = field(default_factory=list)


class Slots:
    """The pool of one job: the switch's side of the pool protocol of SwitchML (Sapio et al., NSDI 2021, section 3.5).

    It is much smaller than a tensor. A slot goes through rounds; in each of them every worker gives one packet, and the last one completes
    the sum, which goes to all. Two copies of each slot take turns: while one collects a round, the other keeps the sum of the round
    before, for workers that have not received it. That is enough: a worker gives a packet for a round only when it has the sum of the
    round before, so no worker is more than one round ahead of another.

    The paper's packets carry only which copy they are for, so that a duplicate that arrives two rounds late would be taken for a new
    packet. Here they carry the number of the round, and what does not belong to the copy that is being collected changes nothing.

    Args:
        adder: registers, with two rows for each slot.
        largest: whether the sum's side word is the largest of those given, else the smallest.
    """

    def __init__(self, world: int, slots: int, adder: Adder, *, largest: bool) -> None:
        self._world, self._size, self._adder = world, slots, adder
        self._join = np.maximum if largest else np.minimum
        # By row: copy * slots + slot. Copy 1 begins as if it had completed a round before the first.
        self._round = np.repeat(np.array([-2, -1]), slots)
        self._given = np.zeros(2 * slots, np.uint64)  # a bit for every worker that gave its packet
        self._missing = np.repeat(np.array([world, 0]), slots)
        self._filled = np.zeros(2 * slots, np.bool_)  # whether any worker gave values
        self._side = np.zeros(2 * slots, np.int64)
        self.counts: Counter[str] = adder.counts  # packets by what became of them

    def take(self, rank: int, packets: packet.Packets) -> PacketEffects:
        """Takes packets of one worker, in any order, and any of them again."""
        outcome = PacketEffects()
        inside = packets.slots < self._size
        if not inside.all():
            self.counts["malformed"] += int((~inside).sum())
            packets = packets.pick(inside)
        if not (packets.slots[1:] > packets.slots[:-1]).all():
            packets = self._distinct(packets)
        for each in packets.apart():
            self._take(rank, each, outcome)
        return outcome

    def _distinct(self, packets: packet.Packets) -> packet.Packets:
        """Selects the packets that may matter, each once: what is recorded and sent a thousand times must not cost a thousand turns."""
        held = self._round[(packets.rounds & 1) * self._size + packets.slots]
        near = packets.pick((packets.rounds == held) | (packets.rounds == held + 2))
        found = near.pick(np.unique(near.rounds * self._size + near.slots, return_index=True)[1])
        self.counts["duplicate"] += len(packets) - len(found)
        return found

    def _take(self, rank: int, packets: packet.Packets, outcome: PacketEffects) -> None:
        rows = (packets.rounds & 1) * self._size + packets.slots
        other = np.where(rows < self._size, rows + self._size, rows - self._size)
        held = self._round[rows]
        begins = (packets.rounds == held + 2) & (self._round[other] == held + 1) & (self._missing[other] == 0)
        begun = rows[begins]
        self._round[begun], self._given[begun], self._missing[begun], self._filled[begun] = packets.rounds[begins], 0, self._world, False
        known = (self._given[rows] >> np.uint64(rank)) & np.uint64(1) != 0
        current = (packets.rounds == held) | begins
        fresh = current & ~known
        repeated = current & known & (self._missing[rows] == 0)
        self.counts["added"] += (count := int(fresh.sum()))
        if count < len(packets):
            self.counts["again"] += (asked := int(repeated.sum()))
            self.counts["duplicate"] += len(packets) - count - asked
            outcome.again += self._read(rows[repeated], packets.pick(repeated), copied=True)
            rows, packets = rows[fresh], packets.pick(fresh)
        self._add(rank, rows, packets)
        complete = self._missing[rows] == 0
        outcome.everybody += self._read(rows[complete], packets.pick(complete) if not complete.all() else packets)

    def _add(self, rank: int, rows: packet.Array, packets: packet.Packets) -> None:
        first = self._given[rows] == 0
        self._side[rows] = np.where(first, packets.sides, self._join(self._side[rows], packets.sides))
        self._given[rows] |= np.uint64(1) << np.uint64(rank)
        self._missing[rows] -= 1
        if packets.values is None:
            return
        filled = self._filled[rows]
        if filled.all():
            self._adder.add(rows, packets.values)
        elif not filled.any():
            self._adder.store(rows, packets.values)
        else:
            self._adder.store(rows[~filled], packets.values[~filled])
            self._adder.add(rows[filled], packets.values[filled])
        self._filled[rows] = True

    def _read(self, rows: packet.Array, packets: packet.Packets, copied: bool = False) -> Iterator[packet.Packets]:
        """The sums in these rows, those with values apart from those without.

        A sum that everybody is about to get stays in its row: nobody can be two rounds ahead of it. One that is given again has to be
        copied. The packet that asked for it may be an old one, and a newer one beside it may take the row; then other values would be
        sealed with a nonce that has been used, which would give the key away.
        """
        filled = self._filled[rows]
        for mask, values in ((filled, True), (~filled, False)):
            if mask.any():
                some = rows[mask]
                sums = self._adder.read(some) if values else None
                if copied and sums is not None:
                    sums = sums.copy()
                yield packet.Packets(slots=packets.slots[mask], rounds=packets.rounds[mask], sides=self._side[some], values=sums)


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

    wanted: packet.Join
    slots: Slots
    key: AESGCM
    nbytes: int
    heard: float
    members: dict[int, Address] = field(default_factory=dict)


class Jobs:
    """All jobs of one switch.

    ``boot``: made up at the start, 32 hexadecimal digits. ``part``, ``parts``: of the slots that this switch has, from 0 on.
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

    def control(self, message: packet.Message, address: Address, now: float) -> packet.Message | None:
        """Takes a message that is properly sealed; returns the reply, if it gets one."""
        match message:
            case packet.SwitchHello():
                return packet.SwitchWelcome(boot=self._boot, cookie=self._cookie(address, now), part=self.part, parts=self._parts)
            case packet.Join():
                return self._join(message, address, now)
            case packet.SwitchLeave() if message.job in self._jobs:
                self._end(message.job)
        return None

    def counts(self) -> dict[str, int]:
        """Numbers of jobs, and packets by what became of them."""
        total = self._past + sum((job.slots.counts for job in self._jobs.values()), Counter[str]())
        return {"jobs": len(self._jobs), "jobs_over": self._over, "memory": self._used(), **total}

    def _join(self, join: packet.Join, address: Address, now: float) -> packet.Message | None:
        cookies = (self._cookie(address, moment) for moment in (now, now - _COOKIE_SECONDS))
        if not any(hmac.compare_digest(join.cookie, cookie) for cookie in cookies):
            return None  # it can say hello again
        job = self._jobs.get(join.job)
        if (reason := self._objection(join, job, address, now)) is not None:
            return packet.SwitchRefused(job=join.job, reason=reason)
        if job is None:
            adder = ADDERS[join.adder](2 * join.slots, join.nbytes)
            slots = Slots(join.world, join.slots, adder, largest=join.largest)
            job = self._jobs[join.job] = SwitchJob(
                wanted=join, slots=slots, key=packet.job_key(self._key, self._boot, join.job), nbytes=join.nbytes, heard=now
            )
        self._move(address, job, join.rank)
        return packet.Joined(job=join.job, rank=join.rank)

    def _objection(self, join: packet.Join, job: SwitchJob | None, address: Address, now: float) -> str | None:
        if job is not None:
            if join != job.wanted.model_copy(update={"cookie": join.cookie, "rank": join.rank}):
                return "the ranks of the job ask for different things"
            if job.members.get(join.rank, address) != address:
                return f"rank {join.rank} has joined from another address already"
            return None
        if join.adder not in ADDERS:
            return f"adder {join.adder!r}: this switch has {', '.join(ADDERS)}; use the same version on all sides"
        if join.world > packet.MOST_RANKS or join.rank >= join.world:
            return f"rank {join.rank} of {join.world} workers: a job takes up to {packet.MOST_RANKS}; use another scheme"
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


def _need(join: packet.Join) -> int:
    """Bytes of a job's slots, two copies of each."""
    return 2 * join.slots * (_PER_ROW + int(join.nbytes * ADDERS[join.adder].register_bytes))


class SwitchServer:
    """Serves on one socket. ``listening``: a bound UDP socket. ``part``, ``parts``: of the slots that this switch has, from 0 on."""

    def __init__(self, listening: socket.socket, key: bytes, limits: Limits | None = None, part: int = 0, parts: int = 1) -> None:
        self._socket = packet.Datagrams(listening)
        self._envelope = packet.Envelope(key)
        self.jobs = Jobs(key, secrets.token_hex(16), limits or Limits(), part, parts)
        self.counts: Counter[str] = Counter()  # datagrams that were dropped before they came to a job, by reason

    def report(self) -> dict[str, int]:
        """The counts of all jobs and of what was dropped."""
        return {**self.jobs.counts(), **self.counts}

    def serve(self, stop: socket.socket) -> None:
        """Serves until ``stop`` can be read."""
        while True:
            if stop.fileno() in packet.await_any([self._socket, stop]):
                return
            self.take(self._socket.receive(), time.monotonic())

    def take(self, received: Sequence[tuple[packet.Array, Any]], now: float) -> None:
        """Takes what has come. Sums that it completes are sent together: the fewer batches there are, the less work they make."""
        by_sender: dict[tuple[Any, int], list[packet.Array]] = {}
        for datagrams, sender in received:
            if bytes(datagrams[0, : len(packet.MARK)]) == packet.MARK:
                for datagram in datagrams:
                    self._control(bytes(datagram), sender, now)
            else:
                by_sender.setdefault((sender, datagrams.shape[1]), []).append(datagrams)
        complete: dict[SwitchJob, list[packet.Packets]] = {}
        for (sender, _), parts in by_sender.items():
            self._add(np.concatenate(parts) if len(parts) > 1 else parts[0], sender, now, complete)
        for job, sums in complete.items():
            self._send(job, sums, list(job.members.values()))

    def _add(self, datagrams: packet.Array, sender: Any, now: float, complete: dict[SwitchJob, list[packet.Packets]]) -> None:
        found = self.jobs.find(sender)
        if found is None:
            self.counts["stranger"] += len(datagrams)
            return
        job, rank = found
        packets, wrong = packet.decode(datagrams, packet.GIVEN, rank, self.jobs.part, job.key)
        if packets.values is not None and packets.values.shape[1] != job.nbytes:
            wrong, packets = wrong + len(packets), packets.pick(packets.slots < 0)
        self.counts["forged"] += wrong
        if len(packets):
            job.heard = now
        outcome = job.slots.take(rank, packets)
        self._send(job, outcome.again, [sender])
        complete.setdefault(job, []).extend(outcome.everybody)

    def _send(self, job: SwitchJob, sums: Sequence[packet.Packets], addresses: Sequence[Any]) -> None:
        for each in packet.Packets.join(sums):
            datagrams = packet.encode(each, packet.SUMMED, packet.SWITCH, self.jobs.part, job.key)
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
