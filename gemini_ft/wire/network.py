"""Chooses the networks of a host that replicas travel on, and of a peer's those that work.

A host's own networks are the user's choice, or the route to the job's master. What peers may use of an agent is shared between their
addresses (`FairShare`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from gemini_ft.config import processors
from gemini_ft.errors import ConfigError, GeminiError, PeerError, SecretError

T = TypeVar("T")
_LARGEST_PORT = 2**16 - 1
SYSTEM = Path("/sys")  # where the kernel tells of its devices
# Seconds for a network to take a connection in, which the peer's kernel does however busy the agent is; then another one is tried, and this
# one carries nothing of the connection. Two must be tried before a host counts as silent.
_PATIENCE = 0.4
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")  # for documentation only, so on no local network: the default route leads there


def bind_addresses(interfaces: Sequence[str], master: str | None = None) -> list[str]:
    """Addresses of this host that its agent listens on, one for each of ``interfaces``, in their order.

    Args:
        interfaces: names of interfaces (``ib0``) or CIDRs (``10.1.0.0/16``, ``fd00::/8``); empty: the route to ``master``.
        master: a host; default: MASTER_ADDR, or else 127.0.0.1.

    Raises ConfigError: no such interface, or none with an address in that network, where the message lists what there is; or one address
    twice.
    """
    if not interfaces:
        return [_route_to(master or os.environ.get("MASTER_ADDR", "127.0.0.1"))]
    found = _addresses()
    chosen = [_address_of(interface, found) for interface in interfaces]
    if len(set(chosen)) < len(chosen):
        named = ", ".join(f"{interface} is {address}" for interface, address in zip(interfaces, chosen, strict=True))
        raise ConfigError(f"interface={','.join(interfaces)!r} names one address twice ({named}); name each network once")
    return chosen


def _address_of(interface: str, found: Mapping[str, list[str]]) -> str:
    if interface in found:
        return found[interface][0]
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        raise ConfigError(f"interface={interface!r}: no such interface, and not a CIDR; this host has {_listing(found)}") from None
    for addresses in found.values():
        for address in addresses:
            if ipaddress.ip_address(address) in network:
                return address
    raise ConfigError(f"interface={interface!r}: no address of this host is in that network; it has {_listing(found)}")


def bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """A socket of that kind at ``host:port``, of any free port if that is 0; one for streams listens there, and nowhere else.

    Raises ConfigError: there is no such address on this machine, or its port is taken.
    """
    try:
        if port > _LARGEST_PORT:
            raise OSError(f"the largest port is {_LARGEST_PORT}")  # the resolver would cut it to 16 bits
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=kind)[0]
        if kind is socket.SOCK_STREAM:
            return socket.create_server(address[:2], family=family, backlog=1024)
        with contextlib.ExitStack() as unless_bound:
            found = unless_bound.enter_context(socket.socket(family, kind, protocol))
            found.bind(address)
            unless_bound.pop_all()
            return found
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); give an address of this machine and a free port") from error


class Addresses:
    """The addresses of an agent, one for each network, for whoever dials several sockets to it.

    ``address``: which is tried first. ``further``: its addresses in other networks, at which the same port is open.
    """

    def __init__(self, address: tuple[str, int], further: Sequence[str]) -> None:
        self._all = [address, *((host, address[1]) for host in further)]
        self._failed: set[tuple[str, int]] = set()

    @property
    def patience(self) -> float | None:
        """Seconds for the next try; None: it is the last one."""
        return _PATIENCE if len(self._all) - len(self._failed) > 1 else None

    def for_socket(self, number: int) -> list[tuple[str, int]]:
        """The addresses to try for a socket: the networks in turn, beginning with another one for each number; none that has failed."""
        turn = number % len(self._all)
        return [each for each in self._all[turn:] + self._all[:turn] if each not in self._failed]

    @contextlib.contextmanager
    def trying(self, number: int) -> Iterator[tuple[str, int]]:
        """The address to try next for a socket. An OSError says that it does not answer, and is raised if no other address is left."""
        address = self.for_socket(number)[0]
        try:
            yield address
        except ssl.SSLError:
            raise  # an agent, or another process, has answered: this network works
        except OSError:
            self._failed.add(address)
            if len(self._failed) == len(self._all):
                raise

    async def target(self) -> dict[str, Any]:
        """Where to connect to the agent, as options of asyncio: where it has several networks, a socket that one of them has connected."""
        return {"sock": await self.dialled(0, connected)} if len(self._all) > 1 else dict(zip(("host", "port"), self._all[0], strict=True))

    async def dialled(self, number: int, dial_at: Callable[[tuple[str, int]], Awaitable[T]]) -> T:
        """The socket of that number, dialled in the first network that carries it. Raises OSError: none does."""
        while True:
            with self.trying(number) as address:
                async with asyncio.timeout(self.patience):
                    return await dial_at(address)


async def connected(address: tuple[str, int]) -> socket.socket:
    """A socket for streams that does not block, connected to an address. Raises OSError: nobody answers there."""
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def as_peer_error(error: BaseException, where: str, seconds: float) -> BaseException:
    """The error that a failed handshake with ``where``, which was given some time for it, stands for."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return SecretError(f"{where}: the peer does not know this run's secret; something else listens at its address")
    if isinstance(error, ssl.SSLError):
        return PeerError(f"{where}: no TLS handshake ({error.reason or error}); it is not an agent, or one of another gemini-ft")
    if isinstance(error, TimeoutError):
        return PeerError(f"{where} did not answer within {seconds:g} s ({str(error) or 'timeout'}); is its host up, and its port open?")
    if isinstance(error, OSError):
        return PeerError(f"{where} does not answer ({str(error) or type(error).__name__}); is its host up, and its port open?")
    if isinstance(error, GeminiError):
        return type(error)(f"{where}: {error}")
    return error


def processors_near(address: str) -> set[int]:
    """Numbers of the processors on the NUMA node of the network card with this address, of those that this thread may use.

    Empty: unknown, as for virtual cards and on machines with one node, or none of them is allowed.
    """
    name = next((name for name, addresses in _addresses().items() if address in addresses), "")
    try:
        node = int((SYSTEM / f"class/net/{name}/device/numa_node").read_text())
        listed = processors((SYSTEM / f"devices/system/node/node{node}/cpulist").read_text().strip())  # a node may have none
    except (OSError, ValueError):
        return set()
    return set(listed or ()) & os.sched_getaffinity(0)


def rdma_variables(addresses: Sequence[str]) -> dict[str, str]:
    """Variables by which UCX uses the RDMA devices of these networks, or all there are where it is not known which those are.

    Between addresses of the loopback it uses TCP, so that it can be tried.

    Raises ConfigError: this host has no RDMA device.
    """
    if all(map(is_loopback, addresses)):
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    if not any(SYSTEM.glob("class/infiniband/*")):
        text = "has no RDMA device, and UCX's TCP does not prove who sends; choose traffic.transport='tcp'"
        raise ConfigError(f"traffic.transport='rdma': this host ({', '.join(addresses)}) {text}")
    names = [name for name, found in _addresses().items() if not {*found}.isdisjoint(addresses)]
    near = [f"{device.name}:1" for name in names for device in SYSTEM.glob(f"class/net/{name}/device/infiniband/*")]
    return {"UCX_TLS": "^tcp"} | ({"UCX_NET_DEVICES": ",".join(near)} if near else {})


def check_rdma(addresses: Sequence[str]) -> None:
    """Raises ConfigError: NIXL is not installed, or this host has no RDMA device."""
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("traffic.transport='rdma' needs NIXL: pip install 'gemini-ft[rdma]', or choose traffic.transport='tcp'")
    rdma_variables(addresses)


def _addresses() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [a.address.partition("%")[0] for a in sorted(entries, key=lambda a: a.family) if a.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _listing(found: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in sorted(found.items()))


def _route_to(master: str) -> str:
    """Our address on the way to ``master``."""
    try:
        address = _source_address(master)
    except OSError as error:
        hint = "set interface (GEMINI_INTERFACE) to the network of the training hosts"
        raise ConfigError(f"no route to the master {master!r} ({error}); {hint}") from None
    if is_loopback(address) and master != "localhost" and not is_loopback(master):
        # Many systems give their own name to 127.0.1.1: we are the master, and others come over the network.
        for elsewhere in _ELSEWHERE:
            with contextlib.suppress(OSError):
                return _source_address(elsewhere)
    return address


def _source_address(destination: str) -> str:
    """The source address towards a peer; a connected datagram socket sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether this is an address that only its own machine can reach."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


U = TypeVar("U")


class FairShare(Generic[U]):
    """At most ``most`` units in use. For more, the oldest users from the address that has the most units lose theirs.

    Anyone can take ports, names and certificates by the thousand, but an address only where packets reach him. So one who asks for more and
    more displaces what he has himself, and a peer that asks for little keeps it.

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
