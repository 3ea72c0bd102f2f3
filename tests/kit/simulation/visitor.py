"""A process that is no worker and reads the newest snapshot out of the agents' memory, as `gemini export` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gemini_ft.errors import GeminiError
from gemini_ft.recovery import agent_memory
from gemini_ft.storage.lookout import newest_whole
from gemini_ft.storage.retention import reading
from gemini_ft.storage.shard import StoredShard
from gemini_ft.wire.worker_messages import Visit
from simulation.loop import PROCESS, Fiber, Process, sleep
from simulation.made import EXTRAS, content, text
from simulation.storage import SimulatedStorage

if TYPE_CHECKING:
    from simulation.world import World


def visit(world: World, host: str, pause: float) -> None:
    """Begins to read, on a host, by a process that ends when it has read all, or can read nothing; ``pause``: seconds before each shard."""
    process, begun = Process(world.loop, f"visitor of {host}", host), world.loop.time() - 1e6

    def work() -> None:
        if not (found := agent_memory.remembered(world.run)):
            return
        committed = found[0].committed
        version, shards = agent_memory.open_newest(found[0], None)
        for shard, owner in zip(shards, range(len(shards)), strict=True):
            sleep(pause)
            data, extras = b"".join(bytes(view) for _, view in shard.chunks()), shard.extras()
            if (data, extras) != (content(owner, version, world.size_at(version.iteration)), EXTRAS):
                world.record("wrong bytes", rank=owner, host=host, version=text(version), where=shard.where)
            shard.close()
        world.record(
            "visited",
            host=host,
            version=text(version),
            of=len(shards),
            committed=text(committed) if committed is not None else None,
            begun=begun,
        )

    _begin(world, process, work, lambda error: world.record("visit failed", host=host, error=str(error), begun=begun))


def read_stored(world: World, host: str, pause: float) -> None:
    """Begins to read the newest checkpoint in storage; ``pause``: seconds before each shard."""
    process = Process(world.loop, f"visitor of storage on {host}", host)

    def work() -> None:
        storage = SimulatedStorage(world.bucket, True)
        if (manifest := newest_whole(storage, world.run, "main")) is not None:
            with reading(storage, world.run, "main", manifest.version):
                for owner, record in manifest.shards.items():
                    sleep(pause)
                    found = StoredShard(storage, record).extras
                    if found != EXTRAS:
                        world.record("wrong bytes", rank=owner, host=host, version=text(manifest.version), where="storage")

    _begin(world, process, work, lambda error: None)


def _begin(world: World, process: Process, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
    def over(_: Any, error: BaseException | None) -> None:
        if error is not None:
            failed(error)
        if error is not None and not isinstance(error, GeminiError):
            world.loop.errors.append(f"a visitor fails: {error!r}")
        world.loop.outside(0.0, end)

    def end() -> None:
        if process.alive:
            leave(world, process)

    process.at(world.loop.time() + 1e-5, process.run(Fiber, process, work, over).go_on)


def leave(world: World, process: Process) -> None:
    """Ends a visitor, whether it has read all or not."""
    process.kill()
    world.network.lose_process(process)
    agent_memory._kept.clear()
    agent_memory._keeper = None


class _Thread:
    """In place of `threading.Thread`."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target

    def start(self) -> None:
        process = PROCESS.get()
        assert process is not None
        process.soon(Fiber(process, self._target, lambda value, error: None).go_on)


def seams(world: World) -> Sequence[tuple[Any, str, Any]]:
    """(module, name, double) of all that this module stands in for."""

    def ask_all(message: Visit) -> Iterable[Any]:
        agents = [host.agent for host in world.hosts if host.agent is not None and not host.agent.process.is_stopped]
        return [each.process.run(each.requests._visited, message.model_copy(update={"call": 1})) for each in agents]

    return [
        (agent_memory, "lifecycle", SimpleNamespace(ask_all=ask_all)),
        (agent_memory, "threading", SimpleNamespace(Thread=_Thread, Lock=threading.Lock)),
    ]
