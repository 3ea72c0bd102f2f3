"""Tells the agent of a host from other processes that know the run secret and give the name of that host.

Each process has a certificate of its own (`gemini_ft.wire.trust`), which does not name its host. But the workers of a session have agreed
on the address of each host: where two processes give one name, the process that answers at that address is taken for the host.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

from gemini_ft.agent.commit.collector import HEARTBEAT
from gemini_ft.agent.tasks import Tasks
from gemini_ft.errors import AgentError
from gemini_ft.wire.tcp import Connection

MOST_OF_A_HOST = 8  # connections at a time; one that has been lost may not be known to be so when the host dials again
_SILENCE = 5 * HEARTBEAT  # seconds after which a process that cannot be called back is given up
_TCP_INFO = struct.Struct("=52xI")  # of linux/tcp.h: tcpi_last_data_recv


class Callers:
    """The hosts that have dialled this one in a session, and the certificate by which each is known.

    Args:
        certificate_of: calls a host back at its address, and returns the certificate that is shown there.
        disown: called with a host's name when the connections of another process that used it are gone; forgets what that has said.
    """

    def __init__(
        self, certificate_of: Callable[[str], Awaitable[bytes]], log: Callable[[str], None], disown: Callable[[str], None]
    ) -> None:
        self._certificate_of, self._log, self._disown = certificate_of, log, disown
        self._open: dict[str, list[Connection]] = {}  # by host; all connections of one host have the same certificate
        self._proved: dict[str, bytes] = {}  # by host: the certificate that it showed when it was called back
        self._asked: set[str] = set()  # hosts that are being called back
        self._tasks = Tasks()

    def close(self) -> None:
        self._tasks.cancel()

    def let_in(self, connection: Connection, host: str) -> None:
        """Takes in a connection of a host, which is believed as long as no other process gives that host's name.

        Raises:
            AgentError: another process gives it, too. The host is called back, and the one of the two that is the host may dial again.
        """
        there = [each for each in self._open.get(host, ()) if not each.closed.is_set()]
        known = self._proved.get(host) or (there[0].certificate if there else connection.certificate)
        if connection.certificate != known:
            if host not in self._asked:
                self._asked.add(host)
                self._tasks.spawn(self._call_back(host))
            raise AgentError(f"another process is known here as host {host!r}, which is called back at its address; dial again")
        self._open[host] = [*there, connection]
        if len(there) >= MOST_OF_A_HOST:
            there[0].abort(f"host {host} has dialled {MOST_OF_A_HOST} times since")

    async def _call_back(self, host: str) -> None:
        try:
            self._proved[host] = found = await self._certificate_of(host)
        except Exception:  # of any kind. Nobody answers there: once the present connections are gone, the next process is believed
            self._proved.pop(host, None)
            self._give_up_if_silent(host)
        else:
            if impostors := [each for each in self._open.get(host, ()) if each.certificate != found and not each.closed.is_set()]:
                self._log(f"a process that is not at its address has called itself host {host!r}: its connections are closed")
                for connection in impostors:
                    connection.abort(f"it is not host {host}")
                for connection in impostors:
                    await connection.closed.wait()
                self._disown(host)
        finally:
            self._asked.discard(host)

    def _give_up_if_silent(self, host: str) -> None:
        """Ends the connections of a process that has been lost, or stopped, and keeps the host's next one out: its kernel may live on."""
        there = [each for each in self._open.get(host, ()) if not each.closed.is_set()]
        if there and min(map(silence_of, there)) > _SILENCE:
            self._log(f"host {host!r} is not at its address, and has been silent for more than {_SILENCE:g} s: its connections are closed")
            for connection in there:
                connection.abort(f"host {host} is silent, and another process gives its name")


def silence_of(connection: Connection) -> float:
    """Seconds since anything has come from a peer, be it a message or a part of a payload; that its kernel lives does not count."""
    found = float("inf")
    sockets = [connection.transport.get_extra_info("socket")] if connection.transport is not None else []
    for sock in [*sockets, *connection.payload_sockets]:
        with contextlib.suppress(OSError):  # it has been closed
            (milliseconds,) = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
            found = min(found, milliseconds / 1000)
    return found
