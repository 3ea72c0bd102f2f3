"""The switch's side of the pool protocol of SwitchML (Sapio et al., NSDI 2021, section 3.5). Pure.

A job has a pool of slots, much smaller than a tensor. A slot goes through rounds; in each of them every worker gives one packet, and
the last one completes the sum, which goes to all. Two copies of each slot take turns: while one collects a round, the other keeps the
sum of the round before, for workers that have not received it. That is enough: a worker gives a packet for a round only when it has
the sum of the round before, so no worker is more than one round ahead of another.

The paper's packets carry only which copy they are for, so that a duplicate that arrives two rounds late would be taken for a new packet.
Here they carry the number of the round, and what does not belong to the copy that is being collected changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .switch_adders import Adder
from .switch_packets import Array, Packets


@dataclass(kw_only=True)
class PacketEffects:
    """Effects of packets that have come: ``everybody`` gets the sums that they completed, their sender those that it asked for again."""

    everybody: list[Packets] = field(default_factory=list)
    again: list[Packets] = field(default_factory=list)


class Slots:
    """The pool of one job.

    Args:
        adder: registers, with two rows for each slot.
        largest: whether the sum's side word is the largest of those given, else the smallest.

    Attributes:
        counts: packets by what became of them.
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
        self.counts: Counter[str] = adder.counts

    def take(self, rank: int, packets: Packets) -> PacketEffects:
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

    def _distinct(self, packets: Packets) -> Packets:
        """Selects the packets that may matter, each once: what is recorded and sent a thousand times must not cost a thousand turns."""
        held = self._round[(packets.rounds & 1) * self._size + packets.slots]
        near = packets.pick((packets.rounds == held) | (packets.rounds == held + 2))
        found = near.pick(np.unique(near.rounds * self._size + near.slots, return_index=True)[1])
        self.counts["duplicate"] += len(packets) - len(found)
        return found

    def _take(self, rank: int, packets: Packets, outcome: PacketEffects) -> None:
        rows = (packets.rounds & 1) * self._size + packets.slots
        other = np.where(rows < self._size, rows + self._size, rows - self._size)
        held = self._round[rows]
        begins = (packets.rounds == held + 2) & (self._round[other] == held + 1) & (self._missing[other] == 0)
        self._begin(rows[begins], packets.rounds[begins])
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

    def _begin(self, rows: Array, rounds: Array) -> None:
        self._round[rows], self._given[rows], self._missing[rows], self._filled[rows] = rounds, 0, self._world, False

    def _add(self, rank: int, rows: Array, packets: Packets) -> None:
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

    def _read(self, rows: Array, packets: Packets, copied: bool = False) -> Iterator[Packets]:
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
                yield Packets(slots=packets.slots[mask], rounds=packets.rounds[mask], sides=self._side[some], values=sums)
