"""The socket between an agent and a worker, without the socket: its two ends."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gemini_ft.agent.client import AgentClient
from gemini_ft.agent.requests import Requests
from gemini_ft.agent.workers import WorkerConnection, _duplicates
from gemini_ft.errors import AgentError, AgentTimeoutError
from gemini_ft.wire.frames import FrameBuffer
from gemini_ft.wire.messages import Answer, Call, pack
from gemini_ft.wire.worker_messages import (
    Hello,
    Ping,
    ToAgent,
    ToWorker,
    Welcome,
    to_worker,
)
from simulation.loop import Fiber, Process

if TYPE_CHECKING:
    from simulation.hosts import Host
    from simulation.world import World

_PIPE = 0.0002  # seconds that a message takes to the agent or back, in the mean


class AgentEnd(WorkerConnection):
    """The agent's end of a worker's socket, without the socket."""

    def __init__(self, handler: Requests, client: SimulatedClient, pid: int) -> None:
        self.rank, self.stream, self.parting, self.stood = -1, "", "", 0.0
        self.incarnation = self.launch = None
        self.pid, self._pidfd = pid, -1
        self._handler, self._client = handler, client
        self._loop = asyncio.get_running_loop()
        self._frames, self._fds = FrameBuffer(), []
        self._alive = self._connected = True
        self.number = next(client.world.numbers)

    def __hash__(self) -> int:
        return int(self.number)

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        if self._connected:
            self._client.to_worker(pack(message), _duplicates(fds))

    def go_on(self, *, writes_stacks: bool) -> None: ...

    def kill(self) -> None:
        self._client.world.kill_soon(self._client.process, "its agent")

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            self._client.hung_up_soon()
            for fd in self._fds:
                os.close(fd)
            self._fds = []

    def arrive(self, frame: bytes, fds: list[int]) -> None:
        if self._connected:
            self._fds += fds
            self._parse(memoryview(frame))

    def hung_up(self) -> None:
        self._hang_up()

    def died(self) -> None:
        self._alive = False
        self.close()
        self._handler.on_worker_dead(self)


class SimulatedClient(AgentClient):
    """An `AgentClient` whose socket, and whose listening thread, are on the simulated loop.

    Args:
        among: all clients of its process, which it joins before it says anything: the kernel tells an agent that a process is dead.
    """

    def __init__(
        self,
        world: World,
        host: Host,
        process: Process,
        hello: Hello,
        on_event: Callable[[ToWorker], None],
        timeout: float,
        among: list[SimulatedClient],
    ) -> None:
        self.world, self.process = world, process
        self._run, self._host, self.on_event, self._timeout = hello.run, host.name, on_event, timeout
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Answer, list[int]] | None]] = {}
        self.late_answers, self.lost, self.custody = 0, False, {}
        self._last = [0.0, 0.0]  # when the last message arrives, there and here
        self._more: list[int] = []
        self._heard = world.loop.time()
        self.agent = world.agent_of(host)
        fiber = Fiber.here()
        assert fiber is not None
        self.end = fiber.on_loop(lambda: AgentEnd(self.agent.requests, self, world.pid_of(process)))
        self.agent.ends.append(self)
        among.append(self)
        if not self.agent.process.alive:
            raise AgentError("the agent ended")
        self._agent_timeout = hello.agent_timeout
        process.at(world.loop.time() + hello.agent_timeout / 3, self._look)
        self.welcome = self.call(hello, Welcome)[0]

    # -- there

    def tell(self, message: ToAgent | Call, fds: Sequence[int] = ()) -> None:
        fiber = Fiber.here()
        if fiber is not None:
            fiber.check()
        if self.lost:
            raise self._gone("its connection is closed")
        self._depart(pack(message), _duplicates(fds))

    def offer(self, message: ToAgent) -> bool:
        if not self.lost:
            self._depart(pack(message), [])
        return not self.lost

    def _depart(self, frame: bytes, fds: list[int]) -> None:
        if self.agent.process.alive:
            self.agent.process.at(self._arrival(0), self.end.arrive, frame, fds)

    def _arrival(self, way: int) -> float:
        loop = self.world.loop
        self._last[way] = max(self._last[way] + 1e-9, loop.time() + loop.rng.expovariate(1 / _PIPE))
        return self._last[way]

    def died(self) -> None:
        """The worker's process is dead; what it said before counts."""
        for fd in self.custody.values():
            os.close(fd)
        self.custody.clear()
        if self.agent.process.alive:
            self.agent.process.at(self._arrival(0), self.end.died)

    # -- here

    def to_worker(self, frame: bytes, fds: list[int]) -> None:
        if self.process.alive:
            self.process.at(self._arrival(1), self._arrive, frame, fds)

    def _arrive(self, frame: bytes, fds: list[int]) -> None:
        self._heard = self.world.loop.time()
        if self.lost:
            for fd in fds:
                os.close(fd)
            return
        self._more = self._route(to_worker.unpack(frame[4:]), [*self._more, *fds])

    def hung_up_soon(self) -> None:
        if self.process.alive:
            self.process.at(self._arrival(1), self.hear_no_more)

    def hear_no_more(self) -> None:
        self.lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    def _answered(self, message: Answer, fds: list[int]) -> None:
        waiting = self._waiting.pop(message.call, None)
        if waiting is None or waiting.done():
            for fd in fds:
                os.close(fd)
        else:
            waiting.set_result((message, fds))

    def _await_answer(self, message: Call, seconds: float) -> tuple[Answer, list[int]] | None:
        fiber = Fiber.here()
        assert fiber is not None
        if self.lost:
            return None
        answer = self._waiting[message.call] = self.world.loop.create_future()
        try:
            self.tell(message)
            if not fiber.wait_for(answer, seconds):
                raise AgentTimeoutError(f"the agent on host {self._host!r} did not answer within {seconds:g} s")
            found: tuple[Answer, list[int]] | None = answer.result()
            return found
        finally:
            self._waiting.pop(message.call, None)

    def _look(self) -> None:
        """As the listening thread: an agent that is silent is replaced."""
        if self.lost:
            return
        if self.world.loop.time() - self._heard > self._agent_timeout:
            self._heard = self.world.loop.time()
            self.world.replace_agent(self.agent)
            return
        self.offer(Ping())
        self.process.at(self.world.loop.time() + self._agent_timeout / 3, self._look)

    @property
    def log(self) -> str:
        return f"the log of {self._host}"

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            if self.agent.process.alive:
                self.agent.process.at(self._arrival(0), self.end.hung_up)
        for fd in self.custody.values():
            os.close(fd)
        self.custody.clear()
