"""Hosts, their agents, launchers that start attempts anew, and faults; all of it drawn from one seed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gemini_ft.agent.stream import Stream
from gemini_ft.config import GeminiConfig
from gemini_ft.errors import AgentError, GeminiError
from gemini_ft.hosts import began
from gemini_ft.wire.worker_messages import Launch
from simulation import network as networking
from simulation import recorded, visitor
from simulation.faults import FAULTS, PROBES, SHARES, THEMES, strike
from simulation.history import Check
from simulation.hosts import Agent, Attempt, Host
from simulation.loop import PROCESS, Fiber, Killed, Process, SimulatedLoop
from simulation.network import Network
from simulation.recess import Recess
from simulation.seams import SCRIPTS, seams
from simulation.storage import URL, Bucket
from simulation.worker import Script

Event = dict[str, Any]
_LOOK = 0.5  # seconds between looks of the launchers
_PROBES = 3  # single faults after all that came at once
_COMES_UP = 240.0  # seconds after such a fault until steps are committed again, at the latest
_USUAL = ("] upload of", "speaks for incarnation", "more of this kind")  # in agents' logs, also when nothing fails
_COMMITS = 3  # that must be heard of then
_ENDS = 200.0  # seconds until a job that has finished is over on all hosts


class World:
    """One run over simulated time: a job on three or five hosts (or ``ranks``), and a spare. In some runs each host has two ranks.

    Args:
        seed: everything is drawn from it.
        ranks: of the job, each on a host of its own; 0: drawn, too.
    """

    def __init__(self, seed: int, ranks: int = 0) -> None:
        self.seed, self.rng = seed, Random(seed)
        rng = self.rng
        self.loop = SimulatedLoop(Random(rng.random()))
        self.network = Network(self.loop, Random(rng.random()), latency=rng.choice([0.0002, 0.001, 0.02]))
        self.loop.dial = lambda factory, host, port, secret: networking.create_connection(self.network, factory, host, port, secret)
        self.history: list[Event] = []
        self.lines: list[str] = []
        self.bucket = Bucket(Random(rng.random()), partial(recorded.on_storage, self))
        self.bucket.slowness, self.bucket.halving = rng.choice([0.02, 0.02, 2.0]), rng.choice([0.0, 0.0, 0.1])
        self.haste = rng.choice([0.0, 0.3, 0.8])  # probability that a fault strikes while ranks join
        self.run, self.numbers, self.pids = f"simulated-{seed}", itertools.count(1), itertools.count(1_000_000)
        self.nbytes, self.width = rng.choice([64, 512, 1536]), rng.choice([3, 3, 5])
        self.per_host = 1 if ranks or seed % 3 else 2
        self.width = ranks or self.width  # hosts that the job needs
        self.ranks = self.width * self.per_host
        self.growth = rng.choice([0, 0, 7, 40])  # steps after which the state has another size; 0: never
        self.fan_in = rng.choice([64, 1, 2])  # hosts that report to the leader, beyond which there are collectors
        self.on_device = rng.random() < 0.3  # whether agents form the checksums of what the ranks have laid down
        self.step = rng.choice([0.5, 2.0, 5.0])
        self.copying = rng.choice([0.001, 0.02, 0.2]) * self.step
        self.linger = 3600.0
        self.boot_seconds = 60.0  # of a host that has lost its power, in the mean
        self.misspeaking = self.forging = 0  # checksums that ranks say, and roots that agents form, in which a bit flips
        self.hosts = [Host(f"h{number}") for number in range(self.width + 1)]
        self.by_name = {host.name: host for host in self.hosts}
        self.fault_seconds = rng.choice([4.0, 8.0, 20.0])
        self.grace = rng.choice([4.0, 4.0, 20.0])  # seconds for which a worker may outlive its attempt
        self.theme = THEMES[seed % len(THEMES)]
        every = rng.choice([3, 10, 30])
        storage = {"url": URL, "every_steps": 3 if self.theme.stores else every, "keep_last": rng.choice([1, 2]), "patience": 60.0}
        settings = {
            "run_id": self.run,
            "replicas": rng.choice([2, 2, 3]),
            "chunk_bytes": 512,
            "replica_timeout": rng.choice([5.0, 14.0, 20.0]),
            "leader_timeout": rng.choice([3.0, 10.0]),
            "timeout": 30.0,
            "storage": storage if rng.random() < 0.8 or self.theme.stores else None,
            **self.theme.settings,
        }
        self.config = GeminiConfig.model_validate(settings)
        self.launch = Launch(
            id="launch", pid=os.getpid(), ticks=began(os.getpid()) or 0, started=0.0, command=[], folder="", script="", environ={}
        )
        self.attempts: list[Attempt] = []
        self.recess = Recess(self)
        self.is_quiet, self.commits = False, 0
        self.pid_of_process: dict[Process, int] = {}
        self._draw_faults()
        vars(self).update(self.theme.of_world)
        vars(self.bucket).update(self.theme.of_storage)
        if self.theme.stores and not self.theme.faults:
            self.weights["storage"], self.bucket.slowness = 0.0, 0.02
        self.folder = Path()
        self.suddenness = rng.choice([0.0, 0.003, 0.02])  # probability that something happens to a process at one of `PROCESS_MOMENTS`
        self.full: set[str] = set()  # hosts without free memory
        self.skew: dict[str, float] = {}  # host -> seconds by which its system's clock is wrong
        self.judge: Check | None = None  # ends the run at the first violation
        self.led_when_listing: dict[tuple[Process | None, str], bool] = {}  # whether the process that began to list this led then
        self.last: int | None = None  # iteration with which the job ends

    def _draw_faults(self) -> None:
        rng = self.rng
        self.weights = {name: rng.choice([0.0, 1.0, 1.0, 3.0]) * SHARES.get(name, 1.0) for name in FAULTS}
        self.weights["kill_worker"] = max(1.0, self.weights["kill_worker"])
        self.weights |= dict.fromkeys(self.theme.faults, 0.7 * sum(self.weights.values()) / max(1, len(self.theme.faults)))

    def size_at(self, iteration: int) -> int:
        """The bytes of a shard after ``iteration`` iterations."""
        return self.nbytes * (1 + iteration // self.growth % 3) if self.growth else self.nbytes

    # -- what is recorded

    def record(self, event: str, **facts: Any) -> None:
        self.history.append({"event": event, "at": round(self.loop.time() - 1e6, 6), **facts})
        if self.judge is not None:
            self.judge.take(self.history[-1])
            if self.judge.found:
                self.loop.stop()

    def say(self, host: str, line: str) -> None:
        self.lines.append(f"{self.loop.time() - 1e6:12.6f} {host}: {line}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(json.dumps(event, sort_keys=True) for event in self.history).encode()).hexdigest()

    def unheard(self, host: Host) -> float:
        """Seconds for which nobody can have heard anything of a host; 0: somebody can."""
        now, others = self.loop.time(), [other.name for other in self.hosts if other is not host]
        cuts = [self.network.cut_at.get((host.name, other), now) if self.network.is_cut(host.name, other) else now for other in others]
        since = host.agent.process.stopped_at if host.agent is not None and host.agent.process.is_stopped else now
        return now - min(max(cuts), since, host.bereft_at if host.agent is None else now)

    # -- processes

    @property
    def leading(self) -> Iterator[Agent]:
        """The agents that lead a session, or believe that they do."""
        for host in self.hosts:
            sessions = [stream.present_session for stream in host.agent.streams.by_name.values()] if host.agent is not None else []
            if host.agent is not None and any(session is not None and session.leads_in is not None for session in sessions):
                yield host.agent

    @property
    def streams(self) -> Iterator[tuple[Host, Stream]]:
        """The streams of all agents."""
        for host in self.hosts:
            for stream in host.agent.streams.by_name.values() if host.agent is not None else ():
                yield host, stream

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
            agent.host.agent, agent.host.bereft_at = None, self.loop.time()

    def replace_agent(self, agent: Agent) -> None:
        """An agent that hangs is killed, and its successor has its memory."""
        if not agent.process.alive:
            return
        host = agent.host
        held = {os.fstat(fd).st_ino for script in self.scripts_on(host) for fd in script.fds}
        fds = [os.dup(memory.fd) for memory in agent.memory]
        identity = os.dup(agent.streams._identity._fd)
        slots = ",".join(f"{fd}{'!' * (os.fstat(fd).st_ino in held)}" for fd in fds)
        self.record("replaced", host=host.name)
        self.kill_agent(agent)
        host.agent = Agent(self, host, slots, identity)

    def reached(self, moment: str, *_: Any) -> None:
        """Stands in for `gemini_ft.failpoints.Failpoints`: something happens to the process that comes to this moment, or nothing."""
        process = PROCESS.get()
        is_themes = moment == self.theme.moment
        if self.is_quiet or process is None or not process.alive or self.rng.random() >= (0.3 if is_themes else self.suddenness):
            return
        self.record("sudden", process=process.name, moment=moment)
        if not strike(self, process, self.theme.deed if is_themes else ""):
            return
        for host in self.hosts:
            if host.agent is not None and host.agent.process is process:
                self.record("agent killed", host=host.name)
                self.kill_agent(host.agent)
        self._kill_process(process, moment)
        raise Killed

    def kill_soon(self, process: Process, why: str) -> None:
        self.loop.outside(0.0, self._kill_process, process, why)

    def _kill_process(self, process: Process, why: str) -> None:
        if (script := SCRIPTS.get(process)) is not None and script in script.host.workers:
            self.kill_worker(script.host, why, first=script)
        elif script is not None:
            self._bury(script)

    def scripts_on(self, host: Host) -> list[Script]:
        """All workers of a host that live, also those whose launcher is lost."""
        return [script for process, script in SCRIPTS.items() if script.host is host and process.alive]

    def kill_worker(self, host: Host, why: str, lives: float = 0.0, first: Script | None = None) -> None:
        """Ends a host's workers, as their launcher does.

        Args:
            host: theirs.
            why: for the history.
            lives: seconds for which they live on, as their launcher knows nothing of them any more.
            first: is dead when the launcher ends the others a moment later.
        """
        if not (scripts := host.workers):
            return
        if not all(script.has_finished for script in scripts):
            self.record("killed", host=host.name, why=why)
        host.workers = []
        host.ready_at = self.loop.time() + self.rng.uniform(0.2, 3.0)
        host.ready_at += 15.0 * any(script.lacks for script in scripts)  # it gives way to others
        for script in scripts:
            script.attempt.broken |= not script.has_finished
            later = lives or (self.rng.uniform(0.0, 0.5) if first not in (None, script) else 0.0)
            if later:
                self.loop.outside(self.loop.time() + later, self._bury, script)
            else:
                self._bury(script)

    def _bury(self, script: Script) -> None:
        if script.process.alive:
            script.process.kill()
            self.network.lose_process(script.process)
            script.lose_memory()

    def _end_soon(self, script: Script, error: BaseException | None) -> None:
        self.loop.outside(0.0, self._ended, script, error)

    def _ended(self, script: Script, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, GeminiError):
            self.loop.errors.append("".join(traceback.format_exception(error)))
        self.say(script.host.name, f"rank {script.rank} ends: {error}")
        if error is None and script in script.host.workers and len(script.host.workers) > 1:  # others of its host have not ended yet
            script.host.workers.remove(script)
        if script in script.host.workers:
            self.kill_worker(script.host, "error" if error is not None else "end", first=script)
        else:
            self._bury(script)

    # -- launchers

    def _launchers(self) -> None:
        self.loop.outside(self.loop.time() + _LOOK, self._launchers)
        now = self.loop.time()
        for host in self.hosts:
            if host.worker is not None and host.worker.attempt.broken:
                if not host.lingers_until:
                    cut = any(not self.network.reaches(host.name, other.name) for other in self.hosts if other is not host)
                    host.lingers_until = now + self.rng.uniform(0.5, 60.0 if cut else self.grace)
                elif now >= host.lingers_until:
                    self.kill_worker(host, "its launcher")
            else:
                host.lingers_until = 0.0
        free = [host for host in self.hosts if host.is_up and host.worker is None and now >= host.ready_at]
        if len(free) < self.width or any(script.has_finished for each in self.attempts[-1:] for script in each.scripts):
            return
        self.rng.shuffle(free)
        for first in free:
            crew = [first]
            for other in free:
                if other is not first and all(self.network.reaches(other.name, each.name) for each in crew):
                    crew.append(other)
            if len(crew) >= self.width:
                self._start(crew[: self.width])
                return

    def _start(self, crew: list[Host]) -> None:
        if self.rng.random() < 0.7:
            crew.sort(key=lambda host: host.name)
        attempt = Attempt(self, crew, len(self.attempts))
        self.attempts.append(attempt)
        self.record("attempt", number=attempt.number, hosts=[host.name for host in crew])
        if not self.is_quiet and self.rng.random() < self.haste:
            at, name = self.loop.time() + self.rng.uniform(0.0, 12.0), self.rng.choice(PROBES)
            self.loop.outside(at, lambda: None if self.is_quiet else FAULTS[name](self))
        for rank, host in enumerate(host for host in crew for _ in range(self.per_host)):
            process = Process(self.loop, f"rank {rank} on {host.name}", host.name)
            script = Script(self, attempt, host, rank, process)
            host.workers.append(script)
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
        self.loop.outside(self.loop.time() + seconds, self._fault)

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
        for script in self.scripts_on(host):
            self._bury(script)
        if host.agent is not None:
            self.kill_agent(host.agent)
        host.notes.clear()
        seconds = self.rng.uniform(1.0, 20.0) if self.is_quiet else self.rng.expovariate(1 / self.boot_seconds)
        self.loop.outside(self.loop.time() + seconds, self._boot, host)

    def _boot(self, host: Host) -> None:
        host.is_up = True
        host.ready_at = self.loop.time() + self.rng.uniform(1.0, 10.0)
        self.network.dark.discard(host.name)
        self.record("host up", host=host.name)

    # -- a whole run

    def simulate(self, seconds: float, quiet: float = 0.0, spells: int = 1, gap: float = 0.0) -> list[Event]:
        """Lets it run, and then without faults; returns what was recorded.

        Args:
            seconds: with faults.
            quiet: without them, within which the job must come up again.
            spells: times with faults, one after the other.
            gap: seconds between two of them, in the mean.
        """
        with seams(self):

            async def work() -> None:
                storage = self.config.storage
                self.record("settings", keep_last=(storage.kept or 1) if storage is not None else 1)
                self._launchers()
                self.loop.outside(self.loop.time() + self.rng.expovariate(1 / self.fault_seconds), self._fault)
                for spell in range(spells):
                    if spell:
                        if not await self._come_up(quiet):
                            return
                        await self._take_recess(gap)
                    await asyncio.sleep(seconds)
                if quiet and await self._come_up(quiet):
                    self.record("cruise")
                    said = len(self.lines)
                    await asyncio.sleep(12 * self.step)
                    crew = {f"{host.name}:" for host in self.hosts if host.worker is not None}  # a leader of the past may complain
                    lines = [line for line in self.lines[said:] if line.split()[1] in crew and not any(text in line for text in _USUAL)]
                    self.record("cruise end", lines=lines, slots=[] if self.growth else [*recorded.slots(self)])
                    drawn = [name for name in self.theme.faults if name in PROBES] + self.rng.choices(PROBES, k=_PROBES)
                    for name in (*drawn[:_PROBES], *(["lose_crew"] if self.config.storage is not None else [])):
                        self.record("probe", fault=name)
                        FAULTS[name](self)
                        await self._until(_COMES_UP / 2 if name == "lose_crew" else _COMES_UP, self.commits + _COMMITS)
                        self.record("probe end", fault=name)
                        self.bucket.lagging = 0.0
                    await self._end_job()

            try:
                self.loop.run_until_complete(work())
            except RuntimeError:
                if self.judge is None or not self.judge.found:
                    raise
            finally:
                self._close()
        return self.history

    async def _come_up(self, quiet: float) -> bool:
        """Lets nothing fail any more, until the job goes on as it should; returns False where only the user can say that it begins anew."""
        self._calm()
        begun, before = len(self.history), self.commits
        patience = quiet + 80 * self.step  # thirty steps from one checkpoint to the next, and their copies
        await self._until(patience, self.commits + _COMMITS, lambda: self._is_well(begun))
        if self.commits == before and self._has_lost_all():
            self.record("lost")
            return False
        self.record("end", **recorded.state(self))
        return True

    def _has_lost_all(self) -> bool:
        """Whether all memory was lost before anything was stored."""
        is_whole = any(len(held) == self.ranks for held in recorded.copies(self, self.hosts).values())
        return not is_whole and not any(key.endswith(".stored.json") for key in self.bucket.objects)

    async def _take_recess(self, gap: float) -> None:
        """Lets a long time pass, after which steps are committed as before, and then other faults come."""
        self.record("probe", fault="recess")
        seconds = self.rng.expovariate(1 / gap)
        self.record("recess", seconds=seconds if await self.recess.take(seconds) else 0.0)
        await self._until(_COMES_UP, self.commits + _COMMITS)
        self.record("probe end", fault="recess")
        self.is_quiet, self.theme = False, self.rng.choice([each for each in THEMES if self.config.storage is not None or not each.stores])
        self._draw_faults()

    async def _until(self, seconds: float, commits: int, holds: Callable[[], bool] = lambda: True) -> None:
        """Waits until so many commits have been heard of and ``holds``, or for that time."""
        end = self.loop.time() + seconds
        while self.loop.time() < end and not (self.commits >= commits and holds()):
            await asyncio.sleep(2.0)

    async def _end_job(self) -> None:
        """Lets the ranks end well, and their agents leave."""
        crew = [host for host in self.hosts if host.worker is not None]
        self.last = 3 + max((worker.at for host in crew for worker in host.workers), default=0)
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
        return stored and not recorded.state(self)["excluded"]

    def _calm(self) -> None:
        """From now on nothing fails any more."""
        self.is_quiet = True
        self.record("calm")
        self.bucket.failing, self.bucket.lagging, self.bucket.slowness, self.bucket.down = 0.0, 0.0, 0.02, False
        self.bucket.halving = self.bucket.deleting = 0.0
        self.bucket.away.clear()
        self.bucket.mend()
        self.network.garbling, self.network.descheduling, self.misspeaking, self.forging = 0, 0.0, 0, 0
        self.network.slow.clear()
        self.full.clear()
        for process in [process for process in self.loop.processes if process.name.startswith("visitor")]:
            visitor.leave(self, process)
        for host in self.hosts:
            if not host.is_up:
                self._boot(host)

    def _close(self) -> None:
        for host in self.hosts:
            host.is_up = False
            self.kill_worker(host, "the end")
            for script in self.scripts_on(host):
                self._bury(script)
            if host.agent is not None:
                self.kill_agent(host.agent)
        SCRIPTS.clear()
        GRAVEYARD.append(self)


GRAVEYARD: list[World] = []  # tasks of dead processes are never collected: that would let them clean up
