"""Takes in the peers that dial this host: readers at any time, senders and reporting hosts only in their own incarnation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gemini_ft.agent.context import StreamContext
from gemini_ft.agent.replication.receive import Inbound, Receiver
from gemini_ft.agent.replication.serve import Fetcher
from gemini_ft.agent.session import AgentSession
from gemini_ft.core.versions import Version
from gemini_ft.errors import SupersededError
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.tcp import Connection, Handler


class Incoming:
    """The connections that peers have opened for one stream; ``session``: the present one, if there is one."""

    def __init__(self, context: StreamContext, inbound: Inbound, session: Callable[[], AgentSession | None]) -> None:
        self._context, self._inbound, self._session = context, inbound, session
        self._connections: set[Connection] = set()  # that may hold slots
        self._senders: dict[str, Connection] = {}  # host -> the one on which it sends its shards

    def close(self) -> None:
        """Ends all connections that may hold slots."""
        for connection in list(self._connections):
            connection.abort("the session is over")

    def accept(self, connection: Connection, claims: Claims) -> Handler:
        """Takes in a peer that has proved to know the secret."""
        spec, session = self._context.spec, self._session()
        if claims.role == "fetch":
            return self._tracked(connection, Fetcher(self._context, connection, claims.host, self._committed_roots))
        if spec is None or session is None or claims.incarnation != spec.incarnation:
            mine = spec.incarnation if spec is not None else "none"
            raise SupersededError(f"host {claims.host!r} speaks for incarnation {claims.incarnation}, this host is at {mine}")
        if claims.role == "report":
            return session.join(connection, claims)
        if (earlier := self._senders.get(claims.host)) is not None:
            # Bytes on their way there must not land in a slot that this connection fills from now on.
            earlier.abort(f"host {claims.host} has dialled again")
        self._senders[claims.host] = connection
        return self._tracked(connection, Receiver(self._inbound, connection, claims.host))

    def _committed_roots(self, version: Version) -> Mapping[int, str]:
        return (self._session() or self._context.host).committed_roots(version)

    def _tracked(self, connection: Connection, handler: Handler) -> Handler:
        """Keeps a handler's connection, to end it with the session."""
        self._connections.add(connection)

        def gone(reason: str) -> None:
            self._connections.discard(connection)
            if connection.refused:
                self._context.log(f"{connection.peer}: {reason}")

        return _Tracked(handler, gone)


class _Tracked:
    """A handler whose end is noticed."""

    def __init__(self, inner: Handler, gone: Callable[[str], None]) -> None:
        self._inner, self._gone = inner, gone
        self.on_message, self.on_bytes = inner.on_message, inner.on_bytes

    def on_lost(self, reason: str) -> None:
        self._gone(reason)
        self._inner.on_lost(reason)
