"""The way of a host's reports to the leader: directly, or above a fan-in by way of a collector. Every host computes the same. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
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
