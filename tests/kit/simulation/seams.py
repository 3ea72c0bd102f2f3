"""Every seam at which a simulation puts a double below the package, in place of the machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gemini_ft import failpoints
from gemini_ft.agent import main as agent_main
from gemini_ft.agent import storing, uploads
from gemini_ft.agent.commit.collector import CollectorPort
from gemini_ft.agent.commit.leader import MemberPort
from gemini_ft.agent.memory import budget, slot_store
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication import rebuild
from gemini_ft.agent.replication.send import PeerLink
from gemini_ft.agent.stream import Stream
from gemini_ft.core.decisions import Commit
from gemini_ft.core.versions import Version
from gemini_ft.launch import notes
from gemini_ft.storage import checkpoints, lookout, shard
from gemini_ft.wire.peer_messages import PeerMessage
from gemini_ft.wire.tcp import Connection
from gemini_ft.worker import introductions, rendezvous, resume_choice, storage_check
from gemini_ft.worker import session as joining
from simulation import network as networking
from simulation import recorded, visitor
from simulation.audit import Audit
from simulation.faults import forged
from simulation.loop import PROCESS, Lock, Process, sleep, within
from simulation.made import text
from simulation.storage import SimulatedStorage
from simulation.worker import Script

if TYPE_CHECKING:
    from simulation.world import World

HASHED = (Connection, MemberPort, CollectorPort, PeerLink)  # stand in sets and dicts
SCRIPTS: dict[Process, Script] = {}


@contextlib.contextmanager
def seams(world: World) -> Iterator[None]:
    """Puts the doubles in place of the clock, the network, processes, storage and memory, as long as it is open."""

    def here() -> Script:
        process = PROCESS.get()
        assert process is not None
        return SCRIPTS[process]

    def storage(url: str, endpoint_url: Any = None, max_bandwidth: Any = None, deletes: bool = True) -> SimulatedStorage:
        return SimulatedStorage(world.bucket, deletes)

    def host_folder() -> Path:
        process = PROCESS.get()
        assert process is not None
        return world.folder / process.host

    def said(word: str) -> None:
        here().host.notes.append(word)
        if word == notes.LACKS:
            here().lacks = True

    def words() -> list[str]:
        return list(here().host.notes)

    def here_or_nowhere() -> str:
        process = PROCESS.get()
        return process.host if process is not None else ""

    def once(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: here().attempt.once(here(), work)(*args)

    make_spec = joining._make_spec
    on_decision, choose, finish = Stream.decide, resume_choice.Chooser.choose, SlotMemory.finish

    def finished(memory: SlotMemory, version: Version, extras_bytes: int, root: str | None) -> bool:
        whole = finish(memory, version, extras_bytes, root)
        process = PROCESS.get()
        assert process is not None
        if whole:
            event = "copy" if recorded.sound(memory.fd, world.size_at) is not None else "unsound"
            world.record(event, host=process.host, owner=memory.shape.owner, version=text(version), root=memory.root)
            if world.forging and root is not None and root != "" and not owns(process.host, memory.shape.owner):
                world.forging, memory.root = (
                    world.forging - 1,
                    f"{int(memory.root, 16) ^ 1 << world.rng.randrange(64):0{len(memory.root)}x}",
                )
                world.record("flip", host=process.host, owner=memory.shape.owner, version=text(version))
                forged(world, process.host)
        return whole

    def owns(host: str, owner: int) -> bool:
        return any(stream.context.host.owns(owner) for of, stream in world.streams if of.name == host)

    def decided(stream: Stream, message: PeerMessage) -> None:
        recorded.on_decision(world, stream, message)
        on_decision(stream, message)
        if isinstance(message, Commit):
            recorded.on_committed(world, stream, message)

    def chosen(chooser: Any) -> Any:
        choice = choose(chooser)
        recorded.on_choice(world, here(), choice)
        return choice

    made = itertools.count()

    def number_of(which: Any) -> int:
        """The order in sets must not depend on where things lie in memory."""
        if not hasattr(which, "simulated_hash"):
            which.simulated_hash = next(made)
        number: int = which.simulated_hash
        return number

    tokens = Random(world.rng.random())
    world_size = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=lambda: world.ranks, get_rank=lambda: here().rank, is_available=lambda: True
    )
    no_process = SimpleNamespace(set_oom_score=lambda *_: None, write_stacks_on_request=lambda *_: None, shares_fate=lambda _: False)
    # Up to Python 3.11 a property that is cached holds a lock of its class while it is formed.
    cached = [each for each in vars(shard.StoredShard).values() if hasattr(each, "attrname") and hasattr(each, "lock")]
    seams: list[tuple[Any, str, Any]] = [
        *((each, "lock", contextlib.nullcontext()) for each in cached),
        (uploads, "threading", SimpleNamespace(Lock=Lock)),
        (shard, "threading", SimpleNamespace(Lock=Lock)),
        *networking.seams(world.network),
        (failpoints, "armed", world),
        *visitor.seams(world),
        *Audit(world).seams(),
        (time, "monotonic", world.loop.time),
        (time, "monotonic_ns", lambda: int(world.loop.time() * 1e9)),
        (time, "time", lambda: 1.7e9 + world.loop.time() + world.skew.get(here_or_nowhere(), 0.0)),
        (time, "perf_counter", world.loop.time),
        (time, "sleep", sleep),
        (rebuild.Throttle.__init__, "__defaults__", (world.loop.time, asyncio.sleep)),
        (secrets, "token_hex", lambda n=16: tokens.randbytes(n).hex()),
        (agent_main, "WorkerListener", lambda requests, listener: listener(requests, None)),
        (agent_main, "_TICK", 1.0),  # half of all that happened was agents' looks at whether to leave
        *((each, "available_memory", lambda: 0 if here_or_nowhere() in world.full else 2**40) for each in (budget, slot_store)),
        (joining, "_make_spec", lambda *given: make_spec(*given).model_copy(update={"fan_in": world.fan_in})),
        (slot_store, "populate", lambda *_: None),
        (uploads, "open_storage", storage),
        (storing, "open_storage", storage),
        (storage_check, "open_storage", storage),
        (storage_check, "within", within),
        (resume_choice, "within", within),
        (lookout, "within", within),
        (checkpoints, "state_folder", host_folder),
        (notes, "_words_here", words),
        (notes, "say", said),
        (rendezvous, "dist", world_size),
        (rendezvous, "exchange_bytes", lambda blob, timeout: here().attempt.exchange(here(), blob, timeout)),
        *((rendezvous, name, once(getattr(rendezvous, name))) for name in ("_loaded", "_parted", "_alike", "_joined")),
        (introductions, "_put_together", once(introductions._put_together)),
        (joining, "lifecycle", no_process),
        *((each, "__hash__", number_of) for each in HASHED),
        (Stream, "decide", decided),
        (SlotMemory, "finish", finished),
        (resume_choice.Chooser, "choose", chosen),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in seams]
    state, level = random.getstate(), logging.getLogger("gemini_ft").level
    random.seed(world.seed)
    logging.getLogger("gemini_ft").setLevel(logging.CRITICAL)
    world.folder = Path(tempfile.mkdtemp(prefix="gemini-simulation-"))
    storing.hang_up()
    try:
        for where, name, double in seams:
            setattr(where, name, double)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        random.setstate(state)
        logging.getLogger("gemini_ft").setLevel(level)
        shutil.rmtree(world.folder, ignore_errors=True)
