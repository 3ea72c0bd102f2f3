"""Long times without a fault, in which ranks rest between two steps and agents only say that they are there.

Such a time takes next to nothing: the clock jumps to its end. The signs of life that agents and ranks would have given are not
simulated one by one; instead, whatever knows when it has heard or said something last knows a later time. All else is found as it
would be after so long: timers are due, time stamps are old, files are of yesterday.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world import World

_SETTLES = 240.0  # seconds, and thirty steps, within which everything is done that was under way


class Recess:
    """The times in which the ranks of a world rest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.begins_at: int | None = None  # iteration after which ranks rest; None: they do not
        self._over = asyncio.Event()
        self.passed = 0.0  # seconds over which the clock has jumped

    def is_due(self, iteration: int) -> bool:
        return self.begins_at is not None and iteration >= self.begins_at

    async def rest(self) -> None:
        """Waits for the end of a recess, as a rank."""
        await self._over.wait()

    async def take(self, seconds: float) -> bool:
        """Lets the ranks rest for so long; returns whether they have come to rest at all."""
        world, end = self._world, self._world.loop.time() + _SETTLES + 30 * self._world.step
        self._over.clear()
        while not (is_still := self._is_still()) and world.loop.time() < end:
            at = [worker.at for host in world.hosts for worker in host.workers]
            if at and not (self.begins_at is not None and max(at) <= self.begins_at <= max(at) + 2):  # another attempt has begun
                self.begins_at = max(at) + 2
            await asyncio.sleep(1.0)
        if is_still:
            self._jump(seconds)
        self.begins_at = None
        self._over.set()
        return is_still

    def _is_still(self) -> bool:
        """Whether nothing is under way on any host, in the network, in storage or between agents."""
        world = self._world
        workers = [worker for host in world.hosts for worker in host.workers]
        busy = any(process.fibers or process.parked or process.is_stopped for process in world.loop.processes)
        rests = len(workers) == world.ranks == sum(len(world.scripts_on(host)) for host in world.hosts)
        if busy or not rests or not all(worker.is_resting for worker in workers) or not all(host.is_up for host in world.hosts):
            return False
        uploading = any(stream.uploading for _, stream in world.streams)
        leaders = [session.failover.leader for session in self._sessions() if session.failover.leader is not None]
        decided = len(leaders) == 1 and not leaders[0].book.is_under_way and not leaders[0].missing(world.loop.time())
        return decided and world.network.is_sound and not uploading

    def _sessions(self) -> Iterator[Any]:
        for _, stream in self._world.streams:
            if stream.present_session is not None:
                yield stream.present_session

    def _jump(self, seconds: float) -> None:
        for worker in [worker for host in self._world.hosts for worker in host.workers]:
            assert worker.client is not None
            worker.client._heard += seconds
        for session in self._sessions():
            member, leader = session.failover.member, session.failover.leader
            ports = [] if leader is None else [*leader._ports]
            if member is not None:
                member._heard, member._spoke = member._heard + seconds, member._spoke + seconds
                ports += member.collector._ports.values() if member.collector is not None else []
            for port in ports:
                port.heard, port.spoke = port.heard + seconds, port.spoke + seconds
        self._world.loop.now += seconds
        self.passed += seconds
