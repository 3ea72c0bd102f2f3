"""Sends everything of one host to its peers in one session: the links, and how often there is something to send."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from gemini_ft.agent.gate import Gate
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.pacing import Pacing
from gemini_ft.agent.ports import AgentServices, Home
from gemini_ft.agent.sending import Link, Outgoing
from gemini_ft.core.traffic import Profile
from gemini_ft.core.versions import Version
from gemini_ft.wire.control_page import ControlPage
from gemini_ft.wire.messages import Dispatch, Dispatched, End, Failed, Message, Notice, SessionSpec
from gemini_ft.wire.tcp import Meter

_SLOW = 100e6  # bytes per second; a gigabit network is faster


class Outbound:
    """The owner of the links (sending.LinkOwner)."""

    def __init__(self, home: Home, agent: AgentServices, spec: SessionSpec) -> None:
        self._home, self._agent, self._spec = home, agent, spec
        self._gate = Gate(spec.traffic)
        self._pacing = Pacing(home.host.name, spec.traffic, self._gate, spec.interval, home.report, home.tell_workers)
        self._links: dict[str, Link] = {}
        self.tags: Iterator[int] = itertools.count()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._gate.close()

    # -- shards

    def send(self, owner: int, version: Version, slot: int, memory: SlotMemory, peer: str) -> None:
        self._link(peer).send(Outgoing(owner, version, slot, memory))

    def cancel(self, owner: int, version: Version, peer: str) -> None:
        self._link(peer).cancel(owner, version)

    def chunk_ready(self, owner: int) -> None:
        """Sends a chunk that the worker has copied."""
        for peer in self._home.host.holders.get(owner, ())[1:]:
            if peer in self._links:
                self._links[peer].chunk_ready()

    def copied(self, owner: int, version: Version, end: End) -> None:
        """Takes note that the worker has copied everything."""
        for link in self._links.values():
            link.copied(owner, version, end)

    # -- when

    def watch(self, rank: int, page: ControlPage) -> None:
        """Takes the page in which a worker shows its use of the network."""
        self._gate.watch(rank, page)

    def observed(self, rank: int, profile: Profile | None) -> None:
        """Takes the profile of a worker's steps, or word that there is none any more."""
        self._pacing.observed(rank, profile)

    def worker_lost(self, rank: int) -> None:
        self._gate.forget(rank)

    def paced(self, interval: int) -> None:
        """Takes the leader's decision on the number of steps between snapshots."""
        self._pacing.paced(interval)

    def left_out(self, owner: int, peer: str) -> None:
        """Stops sending a replica that is not waited for any more."""
        self._pacing.left_out(owner, peer)

    @property
    def needs(self) -> list[Message]:
        """The need that the leader was told last."""
        return [self._pacing.need] if self._pacing.need is not None else []

    def status(self) -> dict[str, object]:
        return self._pacing.status()

    # -- LinkOwner

    def committed_of(self, owner: int) -> Version | None:
        return self._home.host.slots(owner).committed

    def send_over(self, out: Outgoing, peer: str) -> None:
        self._home.counters["replica_bytes"] += out.sent_bytes
        self._home.perform(self._home.host.sent(out.owner, out.slot, peer))

    def peer_refused(self, peer: str, text: str) -> None:
        self._home.log(f"host {peer} refused a replica: {text}")
        self._home.tell_workers(Failed(error="MemoryBudgetError", text=f"host {peer}: {text}", fatal=True))

    def measured(self, peer: str, address: str, rate: float) -> None:
        text = f"replicas travel to host {peer} ({address}) at {rate / 1e6:,.0f} MB/s"
        self._home.log(text)
        if rate < _SLOW:
            self._home.tell_workers(Notice(text=f"{text}: is that the right network? Choose with interface (GEMINI_INTERFACE)"))

    def notify(self, text: str) -> None:
        self._home.notify(text)

    def late_answer(self, text: str) -> None:
        self._home.counters["late_answers"] += 1
        self._home.log(text)

    def log(self, text: str) -> None:
        self._home.log(text)

    def order(self, owner: int, dispatch: Dispatch) -> None:
        self._home.workers[owner].send(dispatch)

    def dispatched(self, message: Dispatched) -> None:
        """Takes a worker's report that it has sent a piece, or could not."""
        for link in self._links.values():
            link.dispatched(message.tag, message.error)

    def arrived(self, out: Outgoing, peer: str, meter: Meter) -> None:
        self._pacing.arrived(out, peer, meter, time.monotonic() - out.begun_at)

    # -- inside

    def _link(self, peer: str) -> Link:
        if peer not in self._links:
            address, claims = self._spec.addresses[peer], self._home.claims("replicate", peer)
            self._links[peer] = Link(self, peer, address, claims, lambda: self._agent.secret, self._spec.traffic, self._gate)
        return self._links[peer]
