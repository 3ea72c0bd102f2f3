"""Hosts of a simulated job: their agents, and the attempts in which their ranks come together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from gemini_ft.agent import main as agent_main
from gemini_ft.agent.context import RunContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.requests import Requests
from gemini_ft.agent.streams import Streams
from gemini_ft.errors import PeerError
from simulation.loop import Process

if TYPE_CHECKING:
    from simulation.client import SimulatedClient
    from simulation.worker import Script
    from simulation.world import World

T = TypeVar("T")


class _Run(RunContext):
    """Keeps the lines of an agent's log."""

    world: World

    def log(self, text: str) -> None:
        self.world.say(self.host, text)


class Agent:
    """One agent process."""

    def __init__(self, world: World, host: Host, slots: str = "", identity: int = -1) -> None:
        self.world, self.host, self.born = world, host, world.loop.time()
        self.process = Process(world.loop, f"agent of {host.name}", host.name)
        self.ends: list[SimulatedClient] = []
        self.run = _Run(world.run, host.name)
        self.run.world = world
        self.streams: Streams = self.process.run(Streams, self.run)
        self.requests: Requests
        if slots or identity >= 0:
            self.process.run(self.streams.inherit, slots, identity)
        self.process.run(self._begin)

    def _begin(self) -> None:
        def listener(requests: Requests, _: Any) -> Any:
            self.requests = requests
            return SimpleNamespace(close=lambda: None)

        async def serve() -> None:
            await agent_main._serve(self.run, self.streams, listener)  # type: ignore[arg-type]
            self.world.record("left", host=self.host.name)
            self.world.loop.outside(0.0, self.world.kill_agent, self)

        self._task = self.world.loop.create_task(serve())
        self.requests = Requests(self.run, self.streams)  # replaced when the task begins; a client may come before

    @property
    def memory(self) -> list[SlotMemory]:
        return [memory for stream in self.streams.by_name.values() for memory in stream.context.slot_store.memory.values()]

    def release(self) -> None:
        """The kernel closes its descriptors."""
        for memory in self.memory:
            memory.close()
        os.close(self.streams._identity._fd)


@dataclass
class Host:
    """A host, and the processes that run on it at the moment."""

    name: str
    agent: Agent | None = None
    workers: list[Script] = field(default_factory=list)  # of the present attempt
    is_up: bool = True
    notes: list[str] = field(default_factory=list)  # of the launcher
    ready_at: float = 0.0  # when its launcher may begin another attempt
    bereft_at: float = -1e9  # when its last agent ended
    lingers_until: float = 0.0  # a worker of a broken attempt is left alone until then

    @property
    def worker(self) -> Script | None:
        """The first of its workers."""
        return self.workers[0] if self.workers else None


class Attempt:
    """Ranks that came together, and what they say to each other."""

    def __init__(self, world: World, hosts: list[Host], number: int) -> None:
        self.world, self.hosts, self.number = world, hosts, number
        self.scripts: list[Script] = []
        self.broken = False
        self._said: dict[int, dict[int, bytes]] = {}
        self._all: dict[int, list[bytes]] = {}  # the same in rank order, when all have come
        self._turn: dict[int, int] = {}
        self._results: dict[tuple[int, str], Any] = {}

    def exchange(self, script: Script, blob: bytes, timeout: float) -> list[bytes]:
        """An all-gather: ends when all have come and this rank reaches them, or with an error."""
        fiber, said = script.fiber, None
        for pause in self._waits(script, blob, timeout):
            fiber.sleep(pause)
            if (said := self._heard(script)) is not None:
                break
        assert said is not None
        return said

    async def meet(self, script: Script, timeout: float) -> None:
        """The same, on the loop and without words."""
        for pause in self._waits(script, b"", timeout):
            await asyncio.sleep(pause)
            if self._heard(script) is not None:
                return

    def _waits(self, script: Script, blob: bytes, timeout: float) -> Iterator[float]:
        turn = self._turn[script.rank] = self._turn.get(script.rank, 0) + 1
        self._said.setdefault(turn, {})[script.rank] = blob
        self._said.pop(turn - 2, None)
        self._all.pop(turn - 2, None)
        pause, end = 0.001, self.world.loop.time() + timeout
        while self.world.loop.time() < end:
            yield self.world.rng.expovariate(1 / pause)
            pause = min(0.5, 2 * pause)
        raise PeerError(f"ranks did not come within {timeout:g} s")

    def _heard(self, script: Script) -> list[bytes] | None:
        reached = self.world.network.is_sound or all(
            host is script.host or self.world.network.reaches(script.host.name, host.name) for host in self.hosts
        )
        turn = self._turn[script.rank]
        if reached and len(said := self._said[turn]) == self.world.ranks:
            if turn not in self._all:
                self._all[turn] = [said[rank] for rank in range(self.world.ranks)]
            return self._all[turn]
        if self.broken and reached:
            raise PeerError("another rank was lost while the ranks exchanged what they know")
        return None

    def once(self, script: Script, work: Callable[..., T]) -> Callable[..., T]:
        """The same as ``work``, a pure function of what all ranks have said last: one of them calls it, and the others have its result."""

        def result(*args: Any) -> T:
            key = self._turn[script.rank], work.__name__
            if key not in self._results:
                self._results = {known: value for known, value in self._results.items() if known[0] >= key[0] - 1}
                self._results[key] = work(*args)
            found: T = self._results[key]
            return found

        return result
