"""A rank is killed while its agent, which is stopped, has not answered its first message."""

from __future__ import annotations

import asyncio
import os

from simulation.hosts import Agent, Attempt
from simulation.loop import Fiber, Process
from simulation.seams import SCRIPTS, seams
from simulation.worker import Script
from simulation.world import World


async def _die_unwelcomed(world: World) -> list[bool]:
    """Whether the agent counts the rank as there, before it is killed and after."""
    host = world.hosts[0]
    host.agent = agent = Agent(world, host)
    await asyncio.sleep(1.0)
    agent.process.stop(5.0)
    process = Process(world.loop, "rank 0", host.name)
    SCRIPTS[process] = script = Script(world, Attempt(world, world.hosts[: world.width], 0), host, 0, process)
    host.workers = [script]
    process.soon(Fiber(process, script.main, lambda value, error: None).go_on)
    await asyncio.sleep(2.0)
    said = bool(agent.ends)
    world.kill_worker(host, "the case")
    await asyncio.sleep(5.0)
    return [said, bool(agent.requests.status()["workers"])]


if __name__ == "__main__":
    world = World(1)
    with seams(world):
        found = world.loop.run_until_complete(_die_unwelcomed(world))
    print("rank 0 is there:", ", ".join(map(str, found)), flush=True)
    os._exit(0)  # what a simulated process that was killed has left is never cleaned up
