"""A worker's side of the pool protocol: a tensor's packets through slots, round by round, with timers for what is lost. Pure.

A tensor is cut into packets, and packet p goes through column p mod the number of columns, each of which is a slot of the pool. In
its first round every column only says the side word of its first packet, since every later one is said a round ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from .switch_packets import Array, Packets

_FIRST_TIMEOUT, _LEAST_TIMEOUT, _MOST_TIMEOUT = 0.1, 0.02, 0.25  # seconds
_FEW = 8  # packets that ask what is the matter when everything is late
_MANY = 4  # late are all, if they are more than the columns divided by this


class TensorStream(ABC):
    """One tensor on its way: gives values for each round, and takes their sums. ``columns``: slots that it uses."""

    columns: int

    @abstractmethod
    def first(self) -> Array:
        """The side words of the first round: int64 [columns]."""

    @abstractmethod
    def follow(self, columns: Array, sides: Array, values: Array | None) -> Iterable[tuple[Array, Array, Array | None]]:
        """Takes the sums of a round of some columns; gives (columns, sides, values) of the next round, for those that have one."""


class PacketStream(TensorStream):
    """A tensor of which every packet is added up: each column's, one after the other.

    ``packets``: [k, ...].
    """

    def __init__(self, packets: Array, slots: int) -> None:
        self._packets, self._count = packets, len(packets)
        self.columns = min(slots, self._count)
        self._next = np.arange(self.columns)  # the packet that each column's next round gives
        self.sums = np.empty_like(packets)  # like ``packets``
        # bool [k], the packets whose sums mean nothing, because some rank's values cannot be added there; the same on all ranks
        self.special = np.zeros(self._count, np.bool_)

    def follow(self, columns: Array, sides: Array, values: Array | None) -> Iterable[tuple[Array, Array, Array | None]]:
        if values is not None:
            self._take(columns, self._next[columns], values)
            self._next[columns] += self.columns
        going = self._next[columns] < self._count
        columns, sides = columns[going], sides[going]
        return [(columns, *self._give(columns, self._next[columns], sides))] if len(columns) else []

    @abstractmethod
    def _take(self, columns: Array, packets: Array, values: Array) -> None:
        """Keeps the sums of some packets."""

    @abstractmethod
    def _give(self, columns: Array, packets: Array, sides: Array) -> tuple[Array, Array]:
        """The side words and the values of some packets, by what the ranks have said of them in ``sides``."""


class Timer:
    """The time after which a packet without an answer is sent again: as TCP has it (RFC 6298), with less patience."""

    def __init__(self) -> None:
        self._mean, self._spread, self.seconds = 0.0, 0.0, _FIRST_TIMEOUT

    @property
    def disorder(self) -> float:
        """Seconds by which an answer may be overtaken without being lost: as RACK has it (RFC 8985), a quarter of a round trip."""
        return self._mean / 4

    def measured(self, seconds: float) -> None:
        """Takes in how long an answer took to a packet that was sent once."""
        if self._mean == 0.0:
            self._mean, self._spread = seconds, seconds / 2
        else:
            self._spread += (abs(seconds - self._mean) - self._spread) / 4
            self._mean += (seconds - self._mean) / 8
        self.seconds = min(max(self._mean + 4 * self._spread, _LEAST_TIMEOUT), _MOST_TIMEOUT)

    def stalled(self) -> None:
        """Doubles the time, until an answer is measured again."""
        self.seconds = min(2 * self.seconds, _MOST_TIMEOUT)


class Worker:
    """A worker of one job, for all its tensors one after the other.

    Args:
        nbytes: of a packet's values.
        parts: switches, which have the slots in turn; packets to different ones may overtake each other without a loss.
    """

    def __init__(self, slots: int, nbytes: int, parts: int = 1) -> None:
        self._rounds = np.zeros(slots, np.int64)  # that each slot has completed; the same on all workers when a tensor is done
        self._open = np.zeros(slots, np.bool_)  # whether a packet is under way
        self._sent, self._due = np.zeros(slots), np.zeros(slots)
        self._tries = np.zeros(slots, np.int64)
        self._part = np.arange(slots) % parts
        self._answered = np.full(parts, -np.inf)  # when the latest packet was sent, of those that were sent once and have an answer
        self._sides, self._values = np.zeros(slots, np.int64), np.zeros((slots, nbytes), np.uint8)  # for sending again
        self._has_values = np.zeros(slots, np.bool_)
        self._stream: TensorStream | None = None
        self._columns = 0  # slots that the tensor uses
        self._timer = Timer()
        self.sent_again = 0  # packets that were sent more than once, all times but the first counted
        self.completed = 0  # rounds of all slots

    @property
    def done(self) -> bool:
        """Whether all sums of the tensor are there."""
        return not self._open.any()

    @property
    def rounds(self) -> int:
        """Rounds of the slot that has had most; the same on all workers when a tensor is done."""
        return int(self._rounds.max())

    def start(self, stream: TensorStream, now: float) -> list[Packets]:
        self._stream, self._columns = stream, stream.columns
        return [self._send(np.arange(stream.columns), stream.first(), None, now)]

    def take(self, sums: Packets, now: float) -> list[Packets]:
        """Takes sums, in any order, and any of them again; returns what is to be sent next."""
        assert self._stream is not None
        sent: list[Packets] = []
        inside = sums.slots < len(self._rounds)
        for each in (sums if inside.all() else sums.pick(inside)).apart():
            fresh = self._open[each.slots] & (self._rounds[each.slots] == each.rounds)
            if not fresh.all():
                each = each.pick(fresh)
            if not len(each):
                continue
            if (once := each.slots[self._tries[each.slots] == 1]).size:
                self._timer.measured(now - float(self._sent[once].mean()))
                np.maximum.at(self._answered, self._part[once], self._sent[once])
            self._open[each.slots] = False
            self._rounds[each.slots] += 1
            self.completed += len(each)
            sent += [self._send(*given, now) for given in self._stream.follow(each.slots, each.sides, each.values) if len(given[0])]
        return sent

    def tick(self, now: float) -> list[Packets]:
        """Packets that are to be sent again: those that were overtaken, and those that were not answered in time.

        A packet is taken for lost as soon as a later one to the same switch has its sum; that does not depend on how slow anybody is.
        Time is for those that nothing came after, and each of them waits twice as long from one time to the next. If many are late
        and none was overtaken, they were not lost: a worker, or the switch, is slow. Then a few are sent, and the others wait.
        """
        overtaken = self._open & (self._sent < self._answered[self._part] - self._timer.disorder)
        late = self._open & (self._due <= now) & ~overtaken
        chosen = np.flatnonzero(late)
        if len(chosen) > max(_FEW, self._columns // _MANY):
            self._timer.stalled()
            self._due[chosen] = now + self._timer.seconds
            chosen = chosen[np.argsort(self._sent[chosen], kind="stable")[:_FEW]]
        return self._again(np.union1d(np.flatnonzero(overtaken), chosen), now)

    def _again(self, slots: Array, now: float) -> list[Packets]:
        self.sent_again += len(slots)
        self._tries[slots] += 1
        self._sent[slots] = now
        self._due[slots] = now + np.minimum(self._timer.seconds * 2.0 ** np.minimum(self._tries[slots] - 1, 10), _MOST_TIMEOUT)
        full, bare = slots[self._has_values[slots]], slots[~self._has_values[slots]]
        kinds = ((full, self._values[full]), (bare, None))
        return [
            Packets(slots=some, rounds=self._rounds[some], sides=self._sides[some], values=values) for some, values in kinds if len(some)
        ]

    def _send(self, slots: Array, sides: Array, values: Array | None, now: float) -> Packets:
        self._open[slots], self._tries[slots], self._sent[slots], self._due[slots] = True, 1, now, now + self._timer.seconds
        self._sides[slots], self._has_values[slots] = sides, values is not None
        if values is not None:
            self._values[slots] = values
        return Packets(slots=slots, rounds=self._rounds[slots], sides=sides, values=values)
