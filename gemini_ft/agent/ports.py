"""The interfaces by which the parts of a stream know each other, so that their modules stay apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gemini_ft.agent.memory import Budget
from gemini_ft.agent.vault import Vault
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.effects import Effect
from gemini_ft.core.protocol import Host
from gemini_ft.core.versions import Version
from gemini_ft.wire.peer_messages import Claims, PeerMessage
from gemini_ft.wire.worker_messages import SessionSpec, ToWorker


class AgentServices(Protocol):
    """The services that a stream asks of its agent."""

    run: str
    host: str
    secret: bytes
    budget: Budget

    def log(self, text: str) -> None: ...


class Home(Protocol):
    """A stream, as the parts that send, receive and serve its shards see it."""

    name: str
    host: Host
    vault: Vault
    workers: dict[int, WorkerConnection]
    spec: SessionSpec | None
    counters: dict[str, int]

    def perform(self, effects: list[Effect]) -> None:
        """Carries out the protocol's decisions."""

    def tell_workers(self, message: ToWorker) -> None: ...

    def notify(self, text: str) -> None:
        """Tells the workers something for the user."""

    def report(self, message: PeerMessage) -> None:
        """Tells the leader."""

    def claims(self, role: str, to: str) -> Claims:
        """This host's introduction when it dials a peer."""

    def version(self, iteration: int) -> Version:
        """The version of an iteration in the present incarnation."""

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard of a committed version: all of them at the leader, at other hosts those of what they hold."""

    def log(self, text: str) -> None: ...
