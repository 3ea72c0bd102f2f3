"""Hosts, their agents, launchers that start attempts anew, and faults; all of it drawn from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from gemini_ft import failpoints
from gemini_ft.agent import main as agent_main
from gemini_ft.agent import uploads
from gemini_ft.agent.commit.collector import CollectorPort
from gemini_ft.agent.commit.leader import MemberPort
from gemini_ft.agent.context import RunContext
from gemini_ft.agent.memory import budget, slot_memory, slot_store, staging
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.replication import rebuild
from gemini_ft.agent.replication.send import PeerLink
from gemini_ft.agent.requests import Requests
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.streams import Streams
from gemini_ft.config import GeminiConfig
from gemini_ft.core.decisions import Abort, Commit, Holders, Thaw
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, CorruptDataError, FormatError, GeminiError, PeerError
from gemini_ft.hosts import began
from gemini_ft.launch import notes
from gemini_ft.storage import checkpoints, lookout, shard
from gemini_ft.storage.checkpoints import MANIFEST, Manifest, checked, checkpoint_folder
from gemini_ft.wire.peer_messages import PeerMessage
from gemini_ft.wire.tcp import Connection
from gemini_ft.wire.worker_messages import Launch
from gemini_ft.worker import rendezvous, resume_choice, storage_check
from gemini_ft.worker import session as joining
from simulation import network as networking
from simulation import visitor
from simulation.audit import Audit
from simulation.loop import PROCESS, Fiber, Killed, Lock, Process, SimulatedLoop, sleep, within
from simulation.network import Network
from simulation.storage import READING, URL, Bucket, SimulatedStorage
from simulation.worker import Script, SimulatedClient, content, text

Event = dict[str, Any]
_LOOK = 0.5  # seconds between looks of the launchers
_PROBES = 3  # single faults after all that came at once
_COMES_UP = 240.0  # seconds after such a fault until steps are committed again, at the latest
_USUAL = ("] upload of", "speaks for incarnation", "more of this kind")  # in agents' logs, also when nothing fails
_COMMITS = 3  # that must be heard of then
_ENDS = 200.0  # seconds until a job that has finished is over on all hosts


class _Run(RunContext):
    """Keeps the lines of an agent's log."""

    world: World

    def log(self, text: str) -> None:
        self.world.say(self.host, text)


class Agent:
    """One agent process."""

    def __init__(self, world: World, host: Host, slots: str = "", identity: int = -1) -> None:
        self.world, self.host = world, host
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
            asyncio.BaseEventLoop.call_soon(self.world.loop, self.world.kill_agent, self)

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
    name: str
    agent: Agent | None = None
    worker: Script | None = None
    is_up: bool = True
    notes: list[str] = field(default_factory=list)  # of the launcher
    ready_at: float = 0.0  # when its launcher may begin another attempt
    lingers_until: float = 0.0  # a worker of a broken attempt is left alone until then


class Attempt:
    """Ranks that came together, and what they say to each other."""

    def __init__(self, world: World, hosts: list[Host], number: int) -> None:
        self.world, self.hosts, self.number = world, hosts, number
        self.scripts: list[Script] = []
        self.broken = False
        self._said: dict[int, dict[int, bytes]] = {}
        self._turn: dict[int, int] = {}

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
        pause, end = 0.001, self.world.loop.time() + timeout
        while self.world.loop.time() < end:
            yield self.world.rng.expovariate(1 / pause)
            pause = min(0.5, 2 * pause)
        raise PeerError(f"ranks did not come within {timeout:g} s")

    def _heard(self, script: Script) -> list[bytes] | None:
        reached = all(host is script.host or self.world.network.reaches(script.host.name, host.name) for host in self.hosts)
        if reached and len(said := self._said[self._turn[script.rank]]) == len(self.hosts):
            return [said[rank] for rank in range(len(self.hosts))]
        if self.broken and reached:
            raise PeerError("another rank was lost while the ranks exchanged what they know")
        return None


class World:
    """One run over simulated time: a job of three ranks, each on a host of its own, and a spare. It has no end.

    Args:
        seed: everything is drawn from it.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, Random(seed)
        rng = self.rng
        self.loop = SimulatedLoop(Random(rng.random()))
        self.network = Network(self.loop, Random(rng.random()), latency=rng.choice([0.0002, 0.001, 0.02]))
        self.loop.dial = lambda factory, host, port, secret: networking.create_connection(self.network, factory, host, port, secret)
        self.history: list[Event] = []
        self.lines: list[str] = []
        self.bucket = Bucket(Random(rng.random()), self._on_storage)
        self.bucket.slowness = rng.choice([0.02, 0.02, 2.0])
        self.haste = rng.choice([0.0, 0.3])  # probability that a fault strikes while ranks join
        self.run, self.numbers, self.pids = f"simulated-{seed}", itertools.count(1), itertools.count(1_000_000)
        self.nbytes, self.ranks = rng.choice([64, 512, 1536]), rng.choice([3, 3, 5])
        self.growth = rng.choice([0, 0, 7, 40])  # steps after which the state has another size; 0: never
        self.fan_in = rng.choice([64, 1, 2])  # hosts that report to the leader, beyond which there are collectors
        self.on_device = rng.random() < 0.3  # whether agents form the checksums of what the ranks have laid down
        self.step = rng.choice([0.5, 2.0, 5.0])
        self.copying = rng.choice([0.001, 0.02, 0.2]) * self.step
        self.linger = 3600.0
        self.hosts = [Host(f"h{number}") for number in range(self.ranks + 1)]
        self.fault_seconds = rng.choice([4.0, 12.0, 40.0])
        storage = {"url": URL, "every_steps": rng.choice([3, 10, 30]), "keep_last": rng.choice([1, 2]), "patience": 60.0}
        settings = {
            "run_id": self.run,
            "replicas": rng.choice([2, 2, 3]),
            "chunk_bytes": 512,
            "replica_timeout": rng.choice([5.0, 20.0]),
            "leader_timeout": rng.choice([3.0, 10.0]),
            "timeout": 30.0,
            "storage": storage if rng.random() < 0.8 else None,
        }
        self.config = GeminiConfig.model_validate(settings)
        self.launch = Launch(
            id="launch", pid=os.getpid(), ticks=began(os.getpid()) or 0, started=0.0, command=[], folder="", script="", environ={}
        )
        self.attempts: list[Attempt] = []
        self.is_quiet, self.commits = False, 0
        self.pid_of_process: dict[Process, int] = {}
        self.weights = {name: rng.choice([0.0, 1.0, 1.0, 3.0]) for name in FAULTS}
        self.weights["kill_worker"] = max(1.0, self.weights["kill_worker"])
        self.folder = Path()
        self.suddenness = rng.choice([0.0, 0.0, 0.003, 0.02])  # probability that a process dies at one of `PROCESS_MOMENTS`
        self.full: set[str] = set()  # hosts without free memory
        self.skew: dict[str, float] = {}  # host -> seconds by which its system's clock is wrong
        self.last: int | None = None  # iteration with which the job ends

    def size_at(self, iteration: int) -> int:
        """The bytes of a shard after ``iteration`` iterations."""
        return self.nbytes * (1 + iteration // self.growth % 3) if self.growth else self.nbytes

    # -- what is recorded

    def record(self, event: str, **facts: Any) -> None:
        self.history.append({"event": event, "at": round(self.loop.time() - 1e6, 6), **facts})

    def say(self, host: str, line: str) -> None:
        self.lines.append(f"{self.loop.time() - 1e6:12.6f} {host}: {line}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(json.dumps(event, sort_keys=True) for event in self.history).encode()).hexdigest()

    def _on_storage(self, event: str, key: str, **facts: Any) -> None:
        facts["key"] = key
        if event == "put" and key.endswith(MANIFEST):
            body = json.loads(self.bucket.objects[key])
            manifest = Manifest.model_validate({name: value for name, value in body.items() if name != "xxh3"})
            facts |= {
                "version": text(manifest.version),
                "shards": sorted(record.key for record in manifest.shards.values()),
                "lineage": [text(version) for version in manifest.lineage or ()],
            }
        elif event == "put" and key.endswith(".stored.json"):
            facts["stored"] = text(checkpoints.Mark.model_validate(checked(self.bucket.objects[key])).version)
        elif event == "put" and READING in key:
            facts["holds"] = json.loads(self.bucket.objects[key])["folder"]
        process = PROCESS.get()
        self.record(event, by=process.name if process is not None else "", **facts)

    def copies(self, hosts: list[Host], only: Version | None = None) -> dict[str, dict[int, list[str]]]:
        """Version -> owner -> hosts that have all bytes of its shard, as they were made, in memory that lives."""
        found: dict[str, dict[int, list[str]]] = {}
        for host in hosts:
            seen = set()
            for fd in self._descriptors(host):
                if (inode := os.fstat(fd).st_ino) not in seen:
                    seen.add(inode)
                    if (copy := _sound(fd, self.size_at, only)) is not None and host.name not in (
                        where := found.setdefault(text(copy[1]), {}).setdefault(copy[0], [])
                    ):
                        where.append(host.name)
        return found

    def _descriptors(self, host: Host) -> list[int]:
        fds = [memory.fd for memory in host.agent.memory] if host.agent is not None else []
        if host.worker is not None:
            fds += host.worker.fds
            if host.worker.client is not None:
                fds += host.worker.client.custody.values()
        return fds

    def on_decision(self, stream: Stream, message: PeerMessage) -> None:
        """A host hears a decision, the leader's own before it has told anybody."""
        name, spec = stream.context.host.name, stream.context.spec
        assert spec is not None
        if isinstance(message, Commit):
            session = stream._session
            leads = session is not None and session.failover.leader is not None
            facts: dict[str, Any] = {"host": name, "version": text(message.version), "leads": leads, "freeze": message.freeze}
            facts |= {"of": str(spec.incarnation), "resumed": text(spec.resumed) if spec.resumed is not None else None}
            if leads:
                assert session is not None
                assert session.failover.leader is not None
                book = session.failover.leader.book
                self.commits += 1
                facts["epoch"] = session.succession.epoch
                facts["folder"] = checkpoint_folder(self.run, stream.context.name, message.version)
                facts["copies"] = self.copies(self.hosts, message.version).get(text(message.version), {})
                facts["holders"] = {owner: list(hosts) for owner, hosts in spec.holders.items()}
                facts["excluded"] = sorted(map(list, book.excluded))
            self.record("commit", **facts)
        elif isinstance(message, Abort):
            self.record("abort", host=name, version=text(message.version))
        elif isinstance(message, Thaw):
            self.record("thaw", host=name, folder=checkpoint_folder(self.run, stream.context.name, message.version), error=message.error)
        elif isinstance(message, Holders):
            self.record("holders", host=name, excluded=sorted(map(list, message.excluded)))

    def on_choice(self, script: Script, choice: Any) -> None:
        if script.rank == 0:
            version = choice.plan.version
            self.record(
                "chosen",
                kind=choice.plan.kind,
                version=text(version) if version is not None else None,
                given_up=sorted(map(text, choice.given_up)),
                hosts=[host.name for host in script.attempt.hosts],
                ranks=self.ranks,
                copies=self.copies(script.attempt.hosts),
                lineage=[text(each) for each in choice.descent.lineage or ()],
            )

    # -- processes

    def pid_of(self, process: Process) -> int:
        return self.pid_of_process.setdefault(process, next(self.pids))

    def agent_of(self, host: Host) -> Agent:
        """The host's agent; a worker starts one where there is none."""
        if host.agent is None:
            fiber = Fiber.here()
            assert fiber is not None
            fiber.sleep(self.rng.uniform(0.1, 0.6))
            fiber.on_loop(lambda: self._begin_agent(host))
            fiber.sleep(0.01)
        if host.agent is None:
            raise AgentError("the agent ended")
        return host.agent

    def _begin_agent(self, host: Host) -> None:
        if host.agent is None:
            host.agent = Agent(self, host)

    def kill_agent(self, agent: Agent) -> None:
        if not agent.process.alive:
            return
        agent.process.kill()
        self.network.lose_process(agent.process)
        for client in agent.ends:
            if not client.lost:
                client.hung_up_soon()
        agent.release()
        if agent.host.agent is agent:
            agent.host.agent = None

    def replace_agent(self, agent: Agent) -> None:
        """An agent that hangs is killed, and its successor has its memory."""
        if not agent.process.alive:
            return
        host = agent.host
        held = {os.fstat(fd).st_ino for fd in host.worker.fds} if host.worker is not None else set()
        fds = [os.dup(memory.fd) for memory in agent.memory]
        identity = os.dup(agent.streams._identity._fd)
        slots = ",".join(f"{fd}{'!' * (os.fstat(fd).st_ino in held)}" for fd in fds)
        self.record("replaced", host=host.name)
        self.kill_agent(agent)
        host.agent = Agent(self, host, slots, identity)

    def reached(self, moment: str, *_: Any) -> None:
        """Stands in for `gemini_ft.failpoints.Failpoints`: the process that comes to this moment dies there, or not."""
        process = PROCESS.get()
        if self.is_quiet or process is None or not process.alive or self.rng.random() >= self.suddenness:
            return
        self.record("sudden", process=process.name, moment=moment)
        for host in self.hosts:
            if host.agent is not None and host.agent.process is process:
                self.record("agent killed", host=host.name)
                self.kill_agent(host.agent)
        self._kill_process(process, moment)
        raise Killed

    def kill_soon(self, process: Process, why: str) -> None:
        asyncio.BaseEventLoop.call_soon(self.loop, self._kill_process, process, why)

    def _kill_process(self, process: Process, why: str) -> None:
        for host in self.hosts:
            if host.worker is not None and host.worker.process is process:
                self.kill_worker(host, why)

    def kill_worker(self, host: Host, why: str) -> None:
        script = host.worker
        if script is None:
            return
        if not script.has_finished:
            self.record("killed", host=host.name, why=why)
        host.worker = None
        host.ready_at = self.loop.time() + self.rng.uniform(0.2, 3.0) + 15.0 * script.lacks  # it gives way to others
        script.attempt.broken |= not script.has_finished
        script.process.kill()
        self.network.lose_process(script.process)
        script.lose_memory()

    def _end_soon(self, script: Script, error: BaseException | None) -> None:
        asyncio.BaseEventLoop.call_soon(self.loop, self._ended, script, error)

    def _ended(self, script: Script, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, GeminiError):
            self.loop.errors.append("".join(traceback.format_exception(error)))
        self.say(script.host.name, f"rank {script.rank} ends: {error}")
        if script.host.worker is script:
            self.kill_worker(script.host, "error" if error is not None else "end")

    # -- launchers

    def _launchers(self) -> None:
        asyncio.BaseEventLoop.call_at(self.loop, self.loop.time() + _LOOK, self._launchers)
        now = self.loop.time()
        for host in self.hosts:
            if host.worker is not None and host.worker.attempt.broken:
                if not host.lingers_until:
                    cut = any(not self.network.reaches(host.name, other.name) for other in self.hosts if other is not host)
                    host.lingers_until = now + self.rng.uniform(0.5, 60.0 if cut else 4.0)
                elif now >= host.lingers_until:
                    self.kill_worker(host, "its launcher")
            else:
                host.lingers_until = 0.0
        free = [host for host in self.hosts if host.is_up and host.worker is None and now >= host.ready_at]
        if len(free) < self.ranks or any(script.has_finished for each in self.attempts[-1:] for script in each.scripts):
            return
        self.rng.shuffle(free)
        for first in free:
            crew = [first]
            for other in free:
                if other is not first and all(self.network.reaches(other.name, each.name) for each in crew):
                    crew.append(other)
            if len(crew) >= self.ranks:
                self._start(crew[: self.ranks])
                return

    def _start(self, crew: list[Host]) -> None:
        if self.rng.random() < 0.7:
            crew.sort(key=lambda host: host.name)
        attempt = Attempt(self, crew, len(self.attempts))
        self.attempts.append(attempt)
        self.record("attempt", number=attempt.number, hosts=[host.name for host in crew])
        if not self.is_quiet and self.rng.random() < self.haste:
            at, name = self.loop.time() + self.rng.uniform(0.0, 12.0), self.rng.choice(PROBES)
            asyncio.BaseEventLoop.call_at(self.loop, at, lambda: None if self.is_quiet else FAULTS[name](self))
        for rank, host in enumerate(crew):
            process = Process(self.loop, f"rank {rank} on {host.name}", host.name)
            script = host.worker = Script(self, attempt, host, rank, process)
            attempt.scripts.append(script)
            SCRIPTS[process] = script

            def over(value: Any, error: BaseException | None, script: Script = script) -> None:
                if error is None:
                    self.loop.create_task(script.train()).add_done_callback(lambda task: self._end_soon(script, task.exception()))
                else:
                    self._end_soon(script, error)

            def begin(script: Script = script, over: Any = over) -> None:
                Fiber(script.process, script.main, over).go_on()

            process.at(self.loop.time() + self.rng.uniform(0.05, 0.5), begin)

    # -- faults

    def _fault(self) -> None:
        if not self.is_quiet:
            names = [name for name, weight in self.weights.items() if weight]
            name = self.rng.choices(names, [self.weights[each] for each in names])[0]
            FAULTS[name](self)
        seconds = self.rng.expovariate(1 / self.fault_seconds) * self.rng.choice([0.02, 1.0, 1.0])
        asyncio.BaseEventLoop.call_at(self.loop, self.loop.time() + seconds, self._fault)

    def _up(self) -> list[Host]:
        return [host for host in self.hosts if host.is_up]

    def lose_host(self, host: Host) -> None:
        """Power is lost, and comes back in a while: nothing is left of its memory."""
        if not host.is_up:
            return
        self.record("host lost", host=host.name)
        host.is_up = False
        self.network.dark.add(host.name)
        self.network.lose_host(host.name)
        self.kill_worker(host, "its host")
        if host.agent is not None:
            self.kill_agent(host.agent)
        host.notes.clear()
        asyncio.BaseEventLoop.call_at(self.loop, self.loop.time() + self.rng.expovariate(1 / 60.0), self._boot, host)

    def _boot(self, host: Host) -> None:
        host.is_up = True
        host.ready_at = self.loop.time() + self.rng.uniform(1.0, 10.0)
        self.network.dark.discard(host.name)
        self.record("host up", host=host.name)

    def flip(self) -> None:
        """A bit of a copy in memory changes: in its bytes, its checksums or its header."""
        held = [
            (host, memory, slot.version)
            for host in self._up()
            if host.agent is not None
            for stream in host.agent.streams.by_name.values()
            for (owner, index), memory in stream.context.slot_store.memory.items()
            if (slot := stream.context.host.slots(owner).slots.get(index)) is not None and slot.version is not None
        ]
        if held:
            host, memory, version = self.rng.choice(held)
            shape = memory.shape
            at = self.rng.choice([shape.data_offset + self.rng.randrange(shape.data_bytes), 4096 + self.rng.randrange(8)])
            self.record("flip", host=host.name, owner=shape.owner, version=text(version))
            memory._view[at] ^= 1 << self.rng.randrange(8)

    # -- a whole run

    def simulate(self, seconds: float, quiet: float = 0.0) -> list[Event]:
        """Lets it run, and then without faults; returns what was recorded."""
        with self._seams():

            async def work() -> None:
                storage = self.config.storage
                self.record("settings", keep_last=(storage.kept or 1) if storage is not None else 1)
                self._launchers()
                asyncio.BaseEventLoop.call_at(self.loop, self.loop.time() + self.rng.expovariate(1 / self.fault_seconds), self._fault)
                await asyncio.sleep(seconds)
                if quiet:
                    self._calm()
                    begun = len(self.history)
                    patience = quiet + 80 * self.step  # thirty steps from one checkpoint to the next, and their copies
                    await self._until(patience, self.commits + _COMMITS, lambda: self._is_well(begun))
                    self.record("end", **self._state())
                    self.record("cruise")
                    said = len(self.lines)
                    await asyncio.sleep(12 * self.step)
                    crew = {f"{host.name}:" for host in self.hosts if host.worker is not None}  # a leader of the past may complain
                    lines = [line for line in self.lines[said:] if line.split()[1] in crew and not any(text in line for text in _USUAL)]
                    self.record("cruise end", lines=lines, slots=[] if self.growth else [*self._slots()])
                    for name in self.rng.choices(PROBES, k=_PROBES):
                        self.record("probe", fault=name)
                        FAULTS[name](self)
                        await self._until(_COMES_UP, self.commits + _COMMITS)
                        self.record("probe end", fault=name)
                    await self._end_job()

            try:
                self.loop.run_until_complete(work())
            finally:
                self._close()
        return self.history

    async def _until(self, seconds: float, commits: int, holds: Callable[[], bool] = lambda: True) -> None:
        """Waits until so many commits have been heard of and ``holds``, or for that time."""
        end = self.loop.time() + seconds
        while self.loop.time() < end and not (self.commits >= commits and holds()):
            await asyncio.sleep(2.0)

    async def _end_job(self) -> None:
        """Lets the ranks end well, and their agents leave."""
        crew = [host for host in self.hosts if host.worker is not None]
        self.last = 3 + max((host.worker.at for host in crew if host.worker is not None), default=0)
        end = self.loop.time() + _ENDS
        while self.loop.time() < end and any(host.worker is not None or host.agent is not None for host in crew):
            await asyncio.sleep(2.0)
        self.record(
            "finished",
            at_work=[host.name for host in crew if host.worker is not None],
            waiting=[host.name for host in crew if host.agent is not None],
            unstored=[stream.unstored for host in crew if host.agent is not None for stream in host.agent.streams.by_name.values()],
            last=self.last,
            stores=self.config.storage is not None,
        )

    def _is_well(self, begun: int) -> bool:
        """Whether every holder counts, and something has been stored since an event of that number."""
        stored = self.config.storage is None or any("stored" in event for event in self.history[begun:])
        return stored and not self._state()["excluded"]

    def _slots(self) -> Iterator[tuple[str, int, int, int]]:
        """(host, owner, slots there, slots that there should be)."""
        for host in self.hosts:
            for stream in host.agent.streams.by_name.values() if host.agent is not None and host.worker is not None else ():
                own, holders = 2 + (self.config.storage is not None), stream.context.host.holders
                for owner, slots in stream.context.host.shards.items():
                    due = {True: own, False: 2 * (host.name in holders[owner])}[holders[owner][0] == host.name]
                    yield host.name, owner, len(slots.slots), due

    def _state(self) -> dict[str, Any]:
        """The state at the end: who is left out of the commits, and what memory is counted and what there is."""
        streams = [(host, stream) for host in self.hosts if host.agent is not None for stream in host.agent.streams.by_name.values()]
        sessions = [stream.session for _, stream in streams if stream._session is not None]
        books = [(each._spec.incarnation, each.leads_in, each.failover.leader) for each in sessions if each.leads_in is not None]
        _, _, leader = max(books, key=lambda each: each[:2], default=(None, None, None))
        return {
            "excluded": sorted(map(list, leader.book.excluded)) if leader is not None else [],
            "stores": self.config.storage is not None,
            "memory": [
                [host.name, host.agent.run.budget.used, sum(memory.shape.total for memory in host.agent.memory)]
                for host, _ in streams
                if host.agent is not None
            ],
        }

    def _calm(self) -> None:
        """From now on nothing fails any more."""
        self.is_quiet = True
        self.record("calm")
        self.bucket.failing, self.bucket.lagging, self.bucket.slowness, self.bucket.down = 0.0, 0.0, 0.02, False
        self.bucket.away.clear()
        self.bucket.mend()
        self.network.garbling = 0
        self.network.slow.clear()
        self.full.clear()
        for host in self.hosts:
            if not host.is_up:
                self._boot(host)

    def _close(self) -> None:
        for host in self.hosts:
            host.is_up = False
            self.kill_worker(host, "the end")
            if host.agent is not None:
                self.kill_agent(host.agent)
        SCRIPTS.clear()
        GRAVEYARD.append(self)

    @contextlib.contextmanager
    def _seams(self) -> Iterator[None]:
        def here() -> Script:
            process = PROCESS.get()
            assert process is not None
            return SCRIPTS[process]

        def storage(url: str, endpoint_url: Any = None, max_bandwidth: Any = None, deletes: bool = True) -> SimulatedStorage:
            return SimulatedStorage(self.bucket, deletes)

        def host_folder() -> Path:
            process = PROCESS.get()
            assert process is not None
            return self.folder / process.host

        def said(word: str) -> None:
            here().host.notes.append(word)
            if word == notes.LACKS:
                here().lacks = True

        def words() -> list[str]:
            return list(here().host.notes)

        def here_or_nowhere() -> str:
            process = PROCESS.get()
            return process.host if process is not None else ""

        make_spec = joining._make_spec
        on_decision, choose, finish = Stream._on_decision, resume_choice.Chooser.choose, SlotMemory.finish

        def finished(memory: SlotMemory, version: Version, extras_bytes: int, root: str | None) -> bool:
            whole = finish(memory, version, extras_bytes, root)
            process = PROCESS.get()
            assert process is not None
            if whole and _sound(memory.fd, self.size_at) is not None:
                self.record("copy", host=process.host, owner=memory.shape.owner, version=text(version), root=memory.root)
            return whole

        def decided(stream: Stream, message: PeerMessage) -> None:
            self.on_decision(stream, message)
            on_decision(stream, message)

        def chosen(chooser: Any) -> Any:
            choice = choose(chooser)
            self.on_choice(here(), choice)
            return choice

        made = itertools.count()

        def number_of(which: Any) -> int:
            """The order in sets must not depend on where things lie in memory."""
            if not hasattr(which, "simulated_hash"):
                which.simulated_hash = next(made)
            number: int = which.simulated_hash
            return number

        tokens = Random(self.rng.random())
        world_size = SimpleNamespace(
            is_initialized=lambda: True, get_world_size=lambda: self.ranks, get_rank=lambda: here().rank, is_available=lambda: True
        )
        no_process = SimpleNamespace(set_oom_score=lambda *_: None, write_stacks_on_request=lambda *_: None, shares_fate=lambda _: False)
        # Up to Python 3.11 a property that is cached holds a lock of its class while it is formed.
        cached = [each for each in vars(shard.StoredShard).values() if hasattr(each, "attrname") and hasattr(each, "lock")]
        seams: list[tuple[Any, str, Any]] = [
            *((each, "lock", contextlib.nullcontext()) for each in cached),
            (uploads, "threading", SimpleNamespace(Lock=Lock)),
            (shard, "threading", SimpleNamespace(Lock=Lock)),
            *networking.seams(self.network),
            (failpoints, "armed", self),
            *visitor.seams(self),
            *Audit(self).seams(),
            (time, "monotonic", self.loop.time),
            (time, "monotonic_ns", lambda: int(self.loop.time() * 1e9)),
            (time, "time", lambda: 1.7e9 + self.loop.time() + self.skew.get(here_or_nowhere(), 0.0)),
            (time, "perf_counter", self.loop.time),
            (time, "sleep", sleep),
            (rebuild.Throttle.__init__, "__defaults__", (self.loop.time, asyncio.sleep)),
            (secrets, "token_hex", lambda n=16: tokens.randbytes(n).hex()),
            (agent_main, "WorkerListener", lambda requests, listener: listener(requests, None)),
            *((each, "available_memory", lambda: 0 if here_or_nowhere() in self.full else 2**40) for each in (budget, slot_store)),
            (joining, "_make_spec", lambda *given: make_spec(*given).model_copy(update={"fan_in": self.fan_in})),
            (slot_store, "populate", lambda *_: None),
            (uploads, "open_storage", storage),
            (staging, "open_storage", storage),
            (storage_check, "open_storage", storage),
            (storage_check, "within", within),
            (resume_choice, "within", within),
            (lookout, "within", within),
            (checkpoints, "state_folder", host_folder),
            (notes, "_words_here", words),
            (notes, "say", said),
            (rendezvous, "dist", world_size),
            (rendezvous, "exchange_bytes", lambda blob, timeout: here().attempt.exchange(here(), blob, timeout)),
            (joining, "lifecycle", no_process),
            *((each, "__hash__", number_of) for each in HASHED),
            (Stream, "_on_decision", decided),
            (SlotMemory, "finish", finished),
            (resume_choice.Chooser, "choose", chosen),
        ]
        before = [(where, name, getattr(where, name)) for where, name, _ in seams]
        state, level = random.getstate(), logging.getLogger("gemini_ft").level
        random.seed(self.seed)
        logging.getLogger("gemini_ft").setLevel(logging.CRITICAL)
        self.folder = Path(tempfile.mkdtemp(prefix="gemini-simulation-"))
        staging.hang_up()
        try:
            for where, name, double in seams:
                setattr(where, name, double)
            yield
        finally:
            for where, name, value in before:
                setattr(where, name, value)
            random.setstate(state)
            logging.getLogger("gemini_ft").setLevel(level)
            shutil.rmtree(self.folder, ignore_errors=True)


HASHED = (Connection, MemberPort, CollectorPort, PeerLink)  # stand in sets and dicts
GRAVEYARD: list[World] = []  # tasks of dead processes are never collected: that would let them clean up
SCRIPTS: dict[Process, Script] = {}


def _sound(fd: int, size_at: Callable[[int], int], only: Version | None = None) -> tuple[int, Version] | None:
    """(owner, version) of the copy in a slot, if its bytes are those that its owner has made."""
    try:
        header, _ = slot_memory._read_header(os.pread(fd, 4096, 0), os.fstat(fd).st_size)
    except (CorruptDataError, FormatError):
        return None
    version = header.version
    if version is None or only not in (None, version):
        return None
    shape = header.shape(b"\0" * header.layout_bytes)
    nbytes = size_at(version.iteration)
    data = os.pread(fd, nbytes, shape.data_offset)
    return (shape.owner, version) if data == content(shape.owner, version, nbytes) else None


# -- faults


def _kill_worker(world: World) -> None:
    if hosts := [host for host in world.hosts if host.worker is not None]:
        world.kill_worker(world.rng.choice(hosts), "a fault")


def _kill_agent(world: World) -> None:
    if hosts := [host for host in world.hosts if host.agent is not None]:
        host = world.rng.choice(hosts)
        world.record("agent killed", host=host.name)
        assert host.agent is not None
        world.kill_agent(host.agent)


def _kill_all_agents(world: World) -> None:
    for host in world.hosts:
        if host.agent is not None and world.rng.random() < 0.7:
            world.record("agent killed", host=host.name)
            world.kill_agent(host.agent)


def _lose_host(world: World) -> None:
    world.lose_host(world.rng.choice(world.hosts))


def _kill_leader(world: World) -> None:
    """Kills the agent that leads, and often the next one soon."""
    for host in world.hosts:
        session = host.agent.streams.by_name["main"]._session if host.agent is not None and "main" in host.agent.streams.by_name else None
        if session is not None and session.leads_in is not None:
            world.record("agent killed", host=host.name)
            assert host.agent is not None
            world.kill_agent(host.agent)


def _lose_all(world: World) -> None:
    """All memory is lost, but perhaps that of one host."""
    spared = world.rng.choice([None, None, *world.hosts])
    for host in world.hosts:
        if host is not spared:
            world.lose_host(host)


def _garble(world: World) -> None:
    world.network.garbling += world.rng.choice([1, 1, 5])


def _rot(world: World) -> None:
    world.bucket.rot()
    if world.rng.random() < 0.3:
        _lose_all(world)


def _restart_all(world: World) -> None:
    for host in world.hosts:
        if world.rng.random() < 0.8:
            world.kill_worker(host, "a restart")


def _partition(world: World) -> None:
    host, seconds = world.rng.choice(world.hosts), world.rng.choice([0.5, 5.0, 40.0, 150.0])
    world.record("cut", host=host.name, seconds=seconds)
    for other in world.hosts:
        if other is not host:
            world.network.block(host.name, other.name, seconds)
            world.network.block(other.name, host.name, seconds)


def _one_way(world: World) -> None:
    near, far = world.rng.sample(world.hosts, 2)
    seconds = world.rng.choice([0.5, 5.0, 40.0, 150.0])
    world.record("one way", near=near.name, far=far.name, seconds=seconds)
    world.network.block(near.name, far.name, seconds)


def _stop(world: World) -> None:
    if processes := world.loop.processes:
        process, seconds = world.rng.choice(processes), world.rng.choice([0.05, 1.0, 4.0, 15.0])
        world.record("stop", process=process.name, seconds=seconds)
        process.stop(seconds)


def _slow(world: World) -> None:
    host = world.rng.choice(world.hosts).name
    world.network.slow[host] = world.rng.choice([1.0, 1.0, 10.0, 50.0])


def _reset(world: World) -> None:
    world.network.reset(world.rng)


def _flip(world: World) -> None:
    """Bits flip, and often that is found out at once: ranks must choose again."""
    for _ in range(world.rng.choice([1, 1, 3])):
        world.flip()
    if world.rng.random() < 0.5:
        world.rng.choice([_kill_worker, _restart_all])(world)


def _storage(world: World) -> None:
    bucket, rng = world.bucket, world.rng
    bucket.failing, bucket.lagging = rng.choice([0.0, 0.0, 0.1, 0.5]), rng.choice([0.0, 0.0, 0.5])
    bucket.slowness, bucket.down = rng.choice([0.01, 0.05, 1.0]), rng.random() < 0.15
    bucket.late = rng.choice([5.0, 60.0])
    bucket.away = {host.name for host in world.hosts if rng.random() < 0.1}


def _full(world: World) -> None:
    """Other processes of a host take all memory that is left there, for a while."""
    host, seconds = world.rng.choice(world.hosts).name, world.rng.choice([5.0, 60.0])
    world.full.add(host)
    asyncio.BaseEventLoop.call_at(world.loop, world.loop.time() + seconds, world.full.discard, host)


def _clock(world: World) -> None:
    """The system's clock of a host is set."""
    world.skew[world.rng.choice(world.hosts).name] = world.rng.choice([-86400.0, -30.0, 0.0, 30.0, 86400.0])


def _visit(world: World) -> None:
    """Another process reads the newest snapshot."""
    visitor.visit(world, world.rng.choice(world.hosts).name)


FAULTS = {
    "kill_worker": _kill_worker,
    "kill_agent": _kill_agent,
    "kill_all_agents": _kill_all_agents,
    "kill_leader": _kill_leader,
    "lose_host": _lose_host,
    "lose_all": _lose_all,
    "restart_all": _restart_all,
    "partition": _partition,
    "one_way": _one_way,
    "stop": _stop,
    "slow": _slow,
    "reset": _reset,
    "flip": _flip,
    "garble": _garble,
    "rot": _rot,
    "storage": _storage,
    "full": _full,
    "clock": _clock,
    "visit": _visit,
}
PROBES = ("kill_worker", "kill_agent", "kill_leader", "stop", "reset", "restart_all", "visit")
