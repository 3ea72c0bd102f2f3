"""Hosts of one machine with a network between them: each in a network namespace, joined by shaped links.

    with Network(2, rate="200mbit") as network:
        server = network.run("host0", ["iperf3", "--server"])
        client = network.run("host1", ["iperf3", "--client", network.address("host0")])
        network.cut("host1")

`gemini_ft.testing.EmulatedHosts` starts the hosts of a job in one. Linux, root and iproute2 are needed.

Nothing is left behind. The namespaces have no names: only descriptors of this process and the processes inside keep them,
and the kernel takes bridge, links and shaping away with the last of these. What runs inside is killed at the end; should
this process die before, a guardian does that. Address and interface names are the same in every testbed, and collide with
nothing: there is no way from one to another, nor to the machine's own networks.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import psutil

from gemini_ft.errors import ConfigError, GeminiError
from gemini_ft.hosts import kill

HUB = "hub"  # the place of the bridge, and of processes that must outlive the hosts, such as a rendezvous store
DEVICE = "eth0"  # of every host

_SUBNET = ipaddress.IPv4Network("10.77.0.0/16")
_BRIDGE, _NOWHERE = "bridge", "nowhere"  # the second is never up: it drops all packets
_NOBODY = "02:00:00:00:00:02"  # the bridge sends what is for it to everybody, and nobody takes it
_BRIDGE_ADDRESS = "02:00:00:00:00:01"  # by default a bridge has that of a port: another one whenever a port comes or goes
_HERE = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000  # sched.h
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_BURST_SECONDS, _LEAST_BURST = 0.004, 16_000  # that may pass at once: 4 ms of the rate, or some packets
_QUEUE_SECONDS = 0.05  # a packet that would wait for longer is dropped
END_SECONDS = 20.0  # for processes that were sent SIGKILL
_POLL = 0.02  # seconds
_ON_WATCH = b"!"  # the guardian prints this when it is ready

_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(GeminiError):
    """Hosts cannot be networked on this machine; the text says what is missing."""


class Network:
    """Hosts on a bridge. Each has its own loopback, abstract Unix sockets, and a link of its own, ``eth0``.

    Processes, files and processors are those of the machine. A context manager: afterwards what ran on the hosts is gone.

    Args:
        hosts: how many to begin with: host0, host1, ...; ``add`` makes more.
        rate: of each host's link, in each direction, in bits per second: a number and bit, kbit, mbit or gbit (powers of
            1000), for example ``"200mbit"``. None: as fast as the machine can.

    Raises:
        NetworkError: this machine, or this user, cannot have one.
        ConfigError: no such rate.
    """

    def __init__(self, hosts: int = 0, *, rate: str | None = None) -> None:
        self._shape = _shape(rate)
        self._spaces: dict[str, int] = {}  # host -> descriptor of its namespace
        self._sides = 0  # that `part` has made
        if (reason := _missing()) is not None:
            raise NetworkError(reason)
        self._guardian, self._orders = _start_guardian()
        try:
            self._new(HUB)
            self._ip(HUB, "link set lo up", f"link add {_BRIDGE} address {_BRIDGE_ADDRESS} type bridge", f"link add {_NOWHERE} type bridge")
            self._ip(HUB, f"addr add {self.address(HUB)}/{_SUBNET.prefixlen} dev {_BRIDGE}", f"link set {_BRIDGE} up")
            for number in range(hosts):
                self.add(f"host{number}")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def unavailable() -> str | None:
        """The reason why there can be no network on this machine, to skip a test with; None: there can."""
        try:
            Network(1, rate="1gbit").close()
        except NetworkError as error:
            return str(error)
        return None

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kills all processes on the hosts and on the hub; the kernel takes the network away."""
        _end(self._spaces.values())
        self._orders.close()
        self._guardian.wait(END_SECONDS)
        for space in self._spaces.values():
            os.close(space)
        self._spaces.clear()

    # -- hosts

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, in the order of their making."""
        return [name for name in self._spaces if name != HUB]

    def add(self, host: str) -> None:
        """Adds a host, with the rate that was given at first."""
        if host in self._spaces:
            raise ConfigError(f"there is a host {host!r} already; give another name")
        self._new(host)
        # The other end of a link is made where it belongs: in between its name could be taken.
        link = f"link add {DEVICE} type veth peer name {self._port(host)} netns /proc/{os.getpid()}/fd/{self._spaces[HUB]}"
        address = f"addr add {self.address(host)}/{_SUBNET.prefixlen} dev {DEVICE}"
        self._ip(host, "link set lo up", link, address, f"link set {DEVICE} up")
        self._ip(HUB, f"link set {self._port(host)} master {_BRIDGE} up")
        self._set(host, self._shape)

    def address(self, host: str) -> str:
        """The address at which the others reach a host, or the hub."""
        return str(_SUBNET[1 + self._number(host)])

    def run(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on a host, or on the hub; options are those of Popen."""
        with self.inside(host):
            return subprocess.Popen(command, **options)

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Puts this thread, and no other, on a host meanwhile: processes and sockets made there stay there."""
        space = self._spaces[self._known(host)]
        with _returning():
            _call(_libc.setns, space, _CLONE_NEWNET)
            yield

    # -- actions on the hosts

    def cut(self, host: str) -> None:
        """Cuts a host off without notice: nothing gets out of it or into it; connections stall, their ends stay open."""
        self._ip(HUB, f"link set {self._port(host)} master {_NOWHERE}")

    def part(self, *hosts: str) -> None:
        """Moves hosts to a side of their own: they reach each other, and no others nor the hub."""
        self._sides += 1
        side = f"side{self._sides}"
        moves = [f"link set {self._port(host)} master {side}" for host in hosts]
        self._ip(HUB, f"link add {side} address {_BRIDGE_ADDRESS} type bridge", f"link set {side} up", *moves)

    def silence(self, host: str, *others: str) -> None:
        """Loses what a host sends to these others, without notice; what they send to it still arrives, and only answers do not."""
        self._ip(host, *(f"neigh replace {self.address(other)} lladdr {_NOBODY} nud permanent dev {DEVICE}" for other in others))

    def heal(self, host: str) -> None:
        """Undoes `cut`, `part`, `silence`. Connections go on when TCP tries again: after as long again as they have stalled, or sooner."""
        self._ip(HUB, f"link set {self._port(host)} master {_BRIDGE}")
        self._ip(host, f"neigh flush dev {DEVICE} nud permanent")

    def set_rate(self, host: str, rate: str | None) -> None:
        """Changes the rate of a host's link, in both directions; `Network` names the units. Packets in its queues are lost."""
        self._set(host, _shape(rate))

    def kill(self, host: str) -> None:
        """Kills all processes of a host at once; the others see their connections closed. `cut` it first for a loss of power."""
        _end([self._spaces[self._known(host)]])

    # -- inside

    def _known(self, host: str) -> str:
        if host not in self._spaces:
            raise ConfigError(f"there is no host {host!r}; there are {', '.join(self._spaces)}")
        return host

    def _number(self, host: str) -> int:
        return list(self._spaces).index(self._known(host))

    def _port(self, host: str) -> str:
        if host == HUB:
            raise ConfigError("the hub has no link of its own; give a host")
        return f"port{self._number(host)}"

    def _new(self, name: str) -> None:
        self._spaces[name] = _new_space()
        socket.send_fds(self._orders, [b"."], [self._spaces[name]])

    def _set(self, host: str, shape: str) -> None:
        """Shapes each direction of a link where it leaves: what leaves by one end comes in by the other."""
        for place, device in ((host, DEVICE), (HUB, self._port(host))):
            with self.inside(place):
                # Not in place: a packet in the queue that is longer than the new burst would block the link for ever.
                _run("tc", ["-batch", "-"], "\n".join(f"qdisc replace dev {device} root {each}" for each in ("noqueue", shape)))

    def _ip(self, host: str, *lines: str) -> None:
        with self.inside(host):
            _run("ip", ["-batch", "-"], "\n".join(lines))


def _shape(rate: str | None) -> str:
    """Tc's words for a rate."""
    if rate is None:
        return "noqueue"
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate.strip().lower())
    bits = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if bits < 8:
        raise ConfigError(f"rate={rate!r}: give a number and bit, kbit, mbit or gbit (per second), for example 200mbit")
    burst = max(int(bits / 8 * _BURST_SECONDS), _LEAST_BURST)
    return f"tbf rate {bits}bit burst {burst} latency {_QUEUE_SECONDS * 1000:g}ms"


# -- the machine


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _missing() -> str | None:
    absent = [name for name in ("ip", "tc") if _tool(name) is None]
    if absent:
        return f"needs iproute2: there is no {' and no '.join(absent)}"
    return None if os.geteuid() == 0 else "needs root: only root may make network namespaces"


def _run(tool: str, arguments: list[str], text: str = "") -> None:
    command = [_tool(tool) or tool, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)} {text}: {(done.stderr or done.stdout).strip()}")


def _call(function: Any, *arguments: int) -> None:
    if function(*arguments):
        raise NetworkError(f"network namespaces are not permitted here: {function.__name__}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Afterwards this thread is in the network namespace in which it is now."""
    home = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _call(_libc.setns, home, _CLONE_NEWNET)
        finally:
            os.close(home)


def _new_space() -> int:
    """Descriptor of a new network namespace."""
    with _returning():
        _call(_libc.unshare, _CLONE_NEWNET)
        return os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)


def end_all(is_meant: Callable[[int], bool]) -> None:
    """Kills the processes that ``is_meant`` recognises, until there are none; OSError: it has ended, or is another user's."""
    until = time.monotonic() + END_SECONDS
    while (pids := [pid for pid in psutil.pids() if pid != os.getpid() and _is(pid, is_meant)]) and time.monotonic() < until:
        for pid in pids:
            kill(pid, is_meant)
        time.sleep(_POLL)


def _is(pid: int, is_meant: Callable[[int], bool]) -> bool:
    with contextlib.suppress(OSError):
        return is_meant(pid)
    return False


def _end(spaces: Iterable[int]) -> None:
    """Kills the processes in these namespaces."""
    inodes = {os.fstat(space).st_ino for space in spaces}
    end_all(lambda pid: _space(pid) in inodes)


def _space(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


# -- the guardian: a process that outlives the one it watches


def _start_guardian() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the guardian; returns it and the socket that gives it the namespaces. It ends with that socket, or with its maker."""
    watched = os.pidfd_open(os.getpid())
    ours, its = socket.socketpair()
    with its:
        try:
            command = [sys.executable, "-m", "gemini_ft.testing.network", str(watched), str(its.fileno())]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[watched, its.fileno()], start_new_session=True
            )
        finally:
            os.close(watched)
    if ours.recv(1) != _ON_WATCH:
        ours.close()
        process.wait(END_SECONDS)
        raise NetworkError(f"the guardian did not start: can `{' '.join(command[:3])}` be run from {os.getcwd()}?")
    return process, ours


def _guard(watched: int, orders: int) -> None:
    """Takes in namespaces until their maker closes the socket or is dead (its forks may have the socket); then ends all in them."""
    spaces: list[int] = []
    with socket.socket(fileno=orders) as sock:
        sock.send(_ON_WATCH)
        waiting = select.poll()
        for descriptor in (orders, watched):
            waiting.register(descriptor, select.POLLIN)
        while orders in dict(waiting.poll()):
            order, given, _, _ = socket.recv_fds(sock, 1, 1)
            if not order:
                break
            spaces += given
    _end(spaces)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), int(sys.argv[2]))
