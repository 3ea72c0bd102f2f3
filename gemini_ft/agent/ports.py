"""The interfaces by which the parts of a stream know each other, so that their modules stay apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gemini_ft.agent.memory import Budget
from gemini_ft.agent.vault import Vault
from gemini_ft.core.protocol import Effect, Host
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.messages import Claims, Message, SessionSpec


class WorkerPort(Protocol):
    """The agent's end of a worker's socket."""

    rank: int
    incarnation: Incarnation | None

    @property
    def alive(self) -> bool: ...

    def send(self, message: Message, fds: Sequence[int] = ()) -> None: ...


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
    workers: dict[int, WorkerPort]
    spec: SessionSpec | None
    counters: dict[str, int]

    def perform(self, effects: list[Effect]) -> None:
        """Carries out the protocol's decisions."""

    def tell_workers(self, message: Message) -> None: ...

    def notify(self, text: str) -> None:
        """Tells the workers something for the user."""

    def report(self, message: Message) -> None:
        """Tells the leader."""

    def claims(self, role: str, to: str) -> Claims:
        """This host's introduction when it dials a peer."""

    def version(self, iteration: int) -> Version:
        """The version of an iteration in the present incarnation."""

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard of a committed version: all of them at the leader, at other hosts those of what they hold."""

    def log(self, text: str) -> None: ...
