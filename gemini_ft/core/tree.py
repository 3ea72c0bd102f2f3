"""The way of a host's reports to the leader, and the succession of leaders. Every host computes the same. Pure; time is an argument.

Hosts report directly, or above a fan-in by way of a collector.

An epoch is a number that names a leader and only grows, on every host. A lost leader is followed by the next candidate, which begins with
an empty ledger and hears from every host what that host knows (`Rejoin`, `gemini_ft.core.protocol.Host.reports`); docs/decisions/016 says
why no vote is needed for that to be safe. A host reports, and obeys, in one epoch only, and never in a lower one than before (its promise).
A candidate takes over only if another host asks it to and it has lost the leader itself. Patience doubles with each change, to eight times
that of the first leader.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, pairwise
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)

FAN_IN = 64  # hosts that report to one other, as long as there are no more than its square


def ways_up(hosts: Iterable[str], leader: str, fan_in: int) -> dict[str, tuple[str, ...]]:
    """Decides to whom each host reports, and to whom else it turns, in this order; the last one is the leader, for collectors the only one.

    Two levels are enough: a leader of ``fan_in`` collectors is the busiest process up to some ten thousand hosts. Beyond
    the square of ``fan_in`` collectors take more hosts, the leader does not.

    Args:
        hosts: all of the session, perhaps several times, in an order that all hosts know.
        fan_in: the most that report to the leader, while all of these are in order.
    """
    others = [host for host in dict.fromkeys(hosts) if host != leader]
    if len(others) <= fan_in:
        return dict.fromkeys(others, (leader,))
    count = min(fan_in, -(-len(others) // (fan_in + 1)))
    cuts = [number * len(others) // count for number in range(count + 1)]
    groups = [others[start:end] for start, end in pairwise(cuts)]
    found = dict[str, tuple[str, ...]]()
    for number, (collector, *below) in enumerate(groups):
        following = groups[(number + 1) % count][0]
        found[collector] = (leader,)
        found.update(dict.fromkeys(below, tuple(dict.fromkeys((collector, following, leader)))))
    return found


def collectors(ways: Mapping[str, Sequence[str]]) -> set[str]:
    """The hosts to which others report, the leader apart."""
    return {up for ups in ways.values() for up in ups[:-1]}


class Ways(Generic[W]):
    """The leader's knowledge of where each host can be reached: on its own connection, or on a collector's.

    A host that has turned elsewhere may still have words under way on the way that it has left, and the agent that said them may be gone
    with what it had. So each way begins with a greeting, greetings of a host are in order, and nothing counts but what comes
    by the way of the newest one, after it.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}  # host -> that of its newest greeting
        self._ways: dict[str, W] = {}  # host -> the way on which that came; none: it was lost
        self._hosts: dict[W, set[str]] = {}  # the same, seen from the other side

    def greet(self, host: str, attempt: int, way: W) -> bool:
        """Records that a host can be reached on this way. False: it has greeted on another one since."""
        if attempt < self._attempts.get(host, attempt):
            return False
        self._leave(host)
        self._attempts[host], self._ways[host] = attempt, way
        self._hosts.setdefault(way, set()).add(host)
        return True

    def forget_lost(self, host: str) -> None:
        """Forgets the greetings of a host, unless it is reached, so that the next one counts whatever its number is."""
        if host not in self._ways:
            self._attempts.pop(host, None)

    def counts(self, host: str, way: W) -> bool:
        """Whether what this host has said on this way counts."""
        return host in self._ways and self._ways[host] == way

    def lose(self, way: W) -> set[str]:
        """Records that a way is closed; returns the hosts that cannot be reached any more."""
        lost = self._hosts.pop(way, set())
        for host in lost:
            del self._ways[host]
        return lost

    def through(self, way: W) -> set[str]:
        return self._hosts.get(way, set())

    @property
    def open(self) -> list[W]:
        return list(self._hosts)

    def audiences(self, apart: AbstractSet[str]) -> Iterator[tuple[W, set[str] | None]]:
        """Divides all hosts that are reached: each of those ``apart`` alone, the others by their ways. None: all on it."""
        for way, hosts in self._hosts.items():
            odd = hosts & apart
            if not odd:
                yield way, None
                continue
            if hosts - odd:
                yield way, hosts - odd
            for host in sorted(odd):
                yield way, {host}

    def _leave(self, host: str) -> None:
        if host in self._ways:
            way = self._ways.pop(host)
            self._hosts[way].discard(host)
            if not self._hosts[way]:
                del self._hosts[way]


CANDIDATES = 8  # hosts that may lead: where more are lost at the same time, so are shards, and the job restarts with other hosts
GRACE = 0.3  # seconds for which a connection may be lost: whoever is there takes it again within a few milliseconds
OPENING = 10.0  # seconds for which the first leader's agent may be behind the others in opening the session
_DOUBLED = 3  # times that patience doubles
_MOST_AHEAD = 10**6  # epochs, of seconds each, that one word may be ahead: no number may grow too large to be sent
_FRUITLESS = 5  # rounds after which a candidate asks also those that come after itself: the hosts that should ask it may not reach it


def candidates(hosts: Iterable[str], leader: str, ways: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The hosts that lead, in their order: the first leader, then others in the order of ranks. No collector: its connections stay."""
    busy = collectors(ways)
    others = (host for host in dict.fromkeys(hosts) if host != leader and host not in busy)
    return (leader, *islice(others, CANDIDATES - 1))


class Succession:
    """One host's knowledge of who leads.

    Args:
        order: the candidates; the same on all hosts.
        timeout: seconds without a sign of life after which the first leader counts as lost; 0: never.
        goes_on: whether the session has begun long ago, and this host's agent is another one.
    """

    def __init__(self, name: str, order: Sequence[str], size: int, now: float, timeout: float, goes_on: bool = False) -> None:
        self.name, self._order, self._size, self._timeout = name, order, size, timeout
        self.epoch = 0  # the newest one of which this host knows that it is led; it obeys no older one
        self._lost: float | None = now if goes_on else now + OPENING  # since when the leader is not reached; None: it is, or who knows
        is_alone = len(order) == 1 or not timeout  # no other host ever leads
        self.begins_as_leader = name == order[0] and (not goes_on or is_alone)  # else another one may lead by now, and is asked

    def leader_of(self, epoch: int) -> str:
        return self._order[epoch % len(self._order)]

    @property
    def leader(self) -> str:
        return self.leader_of(self.epoch)

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which the leader counts as lost; 0: it never does."""
        return self._timeout * self._patience

    @property
    def _patience(self) -> int:
        return 1 << min(self.epoch, _DOUBLED)

    # -- what is seen

    def reach(self) -> None:
        self._lost = None

    def lose(self, now: float) -> None:
        """Records that the leader is not reached, which may pass."""
        if self._lost is None:
            self._lost = now

    def give_up(self) -> None:
        """Records that the leader is lost: it has been silent for as long as it may."""
        self._lost = -math.inf

    def suspects(self, now: float) -> bool:
        """Whether this host has lost the leader."""
        return bool(self._timeout) and self._lost is not None and now - self._lost >= GRACE * self._patience

    # -- what follows

    def follow(self, epoch: int, now: float) -> bool:
        """Records an epoch that is led; returns whether it is newer than all that were known."""
        if not self._is_ahead(epoch):
            return False
        self.epoch, self._lost = epoch, now
        return True

    def _is_ahead(self, epoch: int) -> bool:
        return self.epoch < epoch <= self.epoch + _MOST_AHEAD

    def is_asked(self, epoch: int, now: float) -> bool:
        """Whether this host leads from now on, as another one asks it to. False: that one hears of the present epoch."""
        return self._is_ahead(epoch) and self.leader_of(epoch) == self.name and self.suspects(now)

    def own_turn(self, now: float) -> int | None:
        """The epoch that this host leads from now on without being asked, as there is no third one that could ask; None: it waits."""
        ahead = self.epoch + 1
        return ahead if self._size == 2 and self.leader_of(ahead) == self.name and self.suspects(now) else None

    def to_ask(self, now: float, rounds: int = 0) -> list[int]:
        """The epochs for whose leaders this host asks now, one after the other until one of them answers.

        A candidate leaves it to the hosts after itself to ask it. ``rounds``: those without success so far: the others may not reach it.
        """
        if not self.suspects(now):
            return []
        ahead = list(range(self.epoch + 1, self.epoch + len(self._order)))
        own = next((at for at, epoch in enumerate(ahead) if self.leader_of(epoch) == self.name), len(ahead))
        return ahead[:own] if rounds < _FRUITLESS else ahead[:own] + ahead[own + 1 :]
