"""Assigns each replica's memory to a local worker, so that it survives this agent and the worker can receive into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.errors import AgentError
from gemini_ft.wire.worker_messages import Custody


class Custodians:
    """The custodians of one stream on one host.

    Args:
        workers: of the present incarnation, by rank.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerConnection]]) -> None:
        self._workers = workers
        self._keepers: dict[int, WorkerConnection] = {}  # id of a replica's memory -> the worker that keeps its descriptor

    def entrust(self, memory: SlotMemory) -> None:
        """Lets a local worker keep a replica's descriptor, unless one does: one worker per owner, spread over many owners."""
        keeper = self._keepers.get(id(memory))
        workers = sorted((worker for worker in self._workers() if worker.alive), key=lambda worker: worker.rank)
        if workers and (keeper is None or keeper not in workers):
            keeper = workers[memory.shape.owner % len(workers)]
            self._keepers[id(memory)] = keeper
            try:
                keeper.send(Custody(key=str(id(memory))), (memory.fd,))
            except AgentError:  # no descriptor is free, which has been logged: the next time perhaps
                del self._keepers[id(memory)]

    def take_back(self, memory: SlotMemory) -> None:
        """Takes back memory that holds no replica any more."""
        if (keeper := self._keepers.pop(id(memory), None)) is not None:
            keeper.send(Custody(key=str(id(memory)), drop=True))

    def keeper(self, memory: SlotMemory) -> WorkerConnection | None:
        """The worker that keeps a replica's memory, if it lives."""
        keeper = self._keepers.get(id(memory))
        return keeper if keeper is not None and keeper.alive else None
