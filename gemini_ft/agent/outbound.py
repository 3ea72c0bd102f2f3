"""Sends everything for the peers in one session: a link per peer, the gate they wait for, and the pacing of snapshots."""

from __future__ import annotations

from gemini_ft.agent.gate import Gate
from gemini_ft.agent.home import Home
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.outgoing import Outgoing, end_of
from gemini_ft.agent.pacing import Pacing
from gemini_ft.agent.sending import Common, PeerLink
from gemini_ft.core.versions import Version
from gemini_ft.wire.peer_messages import End
from gemini_ft.wire.worker_messages import Dispatched, SessionSpec


class Outbound:
    """The links of one session."""

    def __init__(self, home: Home, spec: SessionSpec) -> None:
        self._home, self._spec = home, spec
        self.gate = Gate(spec.traffic)
        self.pacing = Pacing(home.host.name, spec.traffic, self.gate, spec.interval, home.report, home.tell_workers)
        self._common = Common(home, spec.traffic, self.gate, self.pacing, lambda: home.run.secret)
        self._links: dict[str, PeerLink] = {}

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self.gate.close()

    def send(self, owner: int, version: Version, slot: int, memory: SlotMemory, peer: str) -> None:
        if peer not in self._links:
            self._links[peer] = PeerLink(self._common, peer, self._spec.addresses[peer], self._home.claims("replicate", peer))
        end = end_of(owner, memory) if memory.version == version else None  # copied already, with an agent before this one
        self._links[peer].send(Outgoing(owner, version, slot, memory, end))

    def cancel(self, owner: int, version: Version, peer: str) -> None:
        if peer in self._links:
            self._links[peer].cancel(owner, version)

    def links_of(self, owner: int) -> list[PeerLink]:
        """The links on which an owner's shard travels."""
        return [self._links[peer] for peer in self._home.host.holders.get(owner, ())[1:] if peer in self._links]

    def copied(self, owner: int, version: Version, end: End) -> None:
        """Takes note that the worker has copied everything."""
        for link in self._links.values():
            link.copied(owner, version, end)

    def dispatched(self, message: Dispatched) -> None:
        """Takes a worker's report that it has sent a piece, or could not."""
        for link in self._links.values():
            link.dispatched(message.tag, message.error)
