"""A limit on what peers may use of an agent, shared between their addresses: who uses most of it loses some first.

Anyone can take ports, names and certificates by the thousand, but an address only where packets reach him. So one who asks for more and
more displaces what he has himself, and a peer that asks for little keeps it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

U = TypeVar("U")


class FairShare(Generic[U]):
    """At most ``most`` units in use. For more, the oldest users from the address that has the most units lose theirs.

    Args:
        most: units that may be in use at a time; the attribute of this name may be set anew.
        end: ends what a user does that has lost its units.
    """

    def __init__(self, most: int, end: Callable[[U], object]) -> None:
        self.most, self._end = most, end
        self._users: dict[U, tuple[str, int]] = {}  # in the order in which they came -> network, units
        self._in_use = 0

    def take(self, user: U, peer: str, units: int = 1) -> None:
        """Lets a user have units; ``peer``: ``address:port``."""
        self.give_back(user)
        self._users[user] = _network(peer), units
        self._in_use += units
        while self._in_use > self.most:
            used = Counter[str]()
            for network, each in self._users.values():
                used[network] += each
            heaviest, _ = used.most_common(1)[0]  # of equal ones, that of the oldest user
            oldest = next(each for each, (network, _) in self._users.items() if network == heaviest)
            self._lose(oldest)

    def give_back(self, user: U) -> None:
        """Takes a user's units back, if it has any."""
        _, units = self._users.pop(user, ("", 0))
        self._in_use -= units

    def end_all(self) -> None:
        for user in list(self._users):
            self._lose(user)

    def _lose(self, user: U) -> None:
        self.give_back(user)
        self._end(user)


def _network(peer: str) -> str:
    """The address of a peer, an IPv4 one also where it is mapped into IPv6; of IPv6 the first half, as whoever has one of these has all."""
    host = peer.rpartition(":")[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or address.exploded[:19])
