"""A rank: its end of the agent's socket, and a script that joins, resumes and trains bytes in place of tensors.

Joining, choosing and reading are the package's own; what `Snapshotter` and `Recorder` do with tensors is done here with bytes, in the same
order of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.client import AgentClient, as_error
from gemini_ft.core.decisions import Abort, Commit
from gemini_ft.core.layout import Layout, TensorSpec, build_layout
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, GeminiError
from gemini_ft.launch import notes
from gemini_ft.wire.messages import Chunk, Failed
from gemini_ft.wire.trust import fingerprint
from gemini_ft.wire.worker_messages import (
    Adopt,
    Copied,
    Ended,
    GiveUp,
    Goodbye,
    Granted,
    Hello,
    Landed,
    Noted,
    Opened,
    OpenSession,
    Progress,
    Queued,
    Request,
    Reserve,
    Reserved,
    Room,
    ToWorker,
)
from gemini_ft.worker import session as joining
from gemini_ft.worker.introductions import introduced
from gemini_ft.worker.rendezvous import exchange_or_raise
from simulation.client import SimulatedClient
from simulation.loop import Fiber, Process
from simulation.made import EXTRAS, content, text

if TYPE_CHECKING:
    from simulation.hosts import Attempt, Host
    from simulation.world import World


class Script:
    """One rank of one attempt."""

    def __init__(self, world: World, attempt: Attempt, host: Host, rank: int, process: Process) -> None:
        self.world, self.attempt, self.host, self.rank, self.process = world, attempt, host, rank, process
        self.client: SimulatedClient | None = None
        self.clients: list[SimulatedClient] = []  # all that it has had, also those whose agent has not answered yet
        self.fds: list[int] = []
        self.maps: dict[int, mmap.mmap] = {}
        self.inodes: dict[int, int] = {}  # of the slots
        self.writing = -1  # inode of the slot that is being written
        self._offset = 0
        self._granted: dict[int, int] = {}
        self._over: set[int] = set()  # iterations that were aborted
        self.committed: int | None = None
        self.newest: int | None = None  # the last iteration that was asked for
        self._fatal: GeminiError | None = None
        self._changed = asyncio.Event()
        self._room = False
        self.has_finished = False
        self.lacks = False  # whether others must be here for the state to be whole
        self.at = 0
        self.copied: int | None = None  # the last iteration that was copied as a whole
        self.is_resting = False

    @property
    def fiber(self) -> Fiber:
        fiber = Fiber.here()
        assert fiber is not None
        return fiber

    # -- joining

    def main(self) -> None:
        world, config = self.world, self.world.config
        hello = Hello(
            run=world.run, stream="main", rank=self.rank, secret=b"s" * 16, bind="simulated", linger=world.linger,
            memory_limit=2**33, agent_timeout=config.agent_timeout, start_timeout=600.0, launch=world.launch,
        )  # fmt: skip
        clients: list[AgentClient] = []

        def introduce() -> Any:
            self.client = SimulatedClient(world, self.host, self.process, hello, self._on_event, config.timeout, self.clients)
            clients.append(self.client)
            return joining._introduction(config, self.client, world.run, "main", fingerprint(hello.secret), world.launch)

        try:
            everyone = introduced(introduce, config.timeout + 10)
            self.session = joining._agree(config, clients, hello, everyone, self.rank, False)
        except BaseException:
            for client in clients:
                client.close()
            raise
        self._resume()
        self._reserve_first()

    def _resume(self) -> None:
        """Reads this rank's shard of the version that was chosen."""
        session, plan = self.session, self.session.plan
        version = plan.version
        if version is not None:
            where = session.sources.read(self.rank, self.rank, lambda shard: self._check(shard, version))
            notes.say_committed(session.run, session.spec.stream, {*session.spec.hosts})
            self.world.record("read", rank=self.rank, host=self.host.name, version=text(version), where=where)
            self.at = version.iteration
        session.forget_sources()

    def _check(self, shard: Any, version: Version) -> str:
        data = b"".join(bytes(view) for _, view in shard.chunks())
        extras = shard.extras()
        expected = content(self.rank, version, self.world.size_at(version.iteration))
        if data != expected or extras != EXTRAS:
            self.world.record("wrong bytes", rank=self.rank, host=self.host.name, version=text(version), where=shard.where)
        return str(shard.where)

    def _reserve_first(self) -> None:
        exchange_or_raise(self._reserve, self.world.config.timeout + 10)

    def _reserve(self) -> None:
        nbytes, world_size = self.world.size_at(self.at), self.session.world_size
        self._nbytes = nbytes
        specs = [TensorSpec(name="weight", dtype="uint8", shape=(nbytes * world_size,), group=tuple(range(world_size)))]
        self.layout: Layout = build_layout(specs, self.rank, world_size)
        layout = self.layout
        message = Reserve(layout=layout.to_bytes(), layout_hash=layout.logical_hash, data_bytes=layout.nbytes, extras_capacity=2**12)
        assert self.client is not None
        reserved, fds = self.client.call(message, Reserved)
        for memory in self.maps.values():
            memory.close()
        for fd in self.fds:
            os.close(fd)
        self.fds, self._offset = list(fds), reserved.data_offset
        size = reserved.data_offset + reserved.capacity
        self.maps = {slot: mmap.mmap(fd, size) for slot, fd in zip(reserved.slots, fds, strict=True)}
        self.inodes = {slot: os.fstat(fd).st_ino for slot, fd in zip(reserved.slots, fds, strict=True)}
        self._room = False

    # -- training

    async def train(self) -> None:
        """Makes steps until the end, or until something is wrong."""
        world, loop = self.world, self.world.loop
        while world.last is None or self.at < world.last:
            await self.attempt.meet(self, world.config.timeout)  # the gradients
            await asyncio.sleep(world.step * world.rng.uniform(0.8, 1.2))
            if self._fatal is not None:
                raise self._fatal
            self.at += 1
            assert self.client is not None
            try:
                with contextlib.suppress(AgentError):  # its death is noticed, and mended, at the snapshot
                    self.client.tell(Progress(iteration=self.at))
                if self._room or world.size_at(self.at) != self._nbytes:
                    await loop.run_in_executor(None, self._reserve)
                await self._snapshot(self.at)
                if world.recess.is_due(self.at):
                    await self._rest()
            except AgentError:
                if not self.client.lost:
                    raise
                await loop.run_in_executor(None, self._reconnect)
        await loop.run_in_executor(None, self._finish)

    async def _rest(self) -> None:
        """Does something that is no step, for long."""
        assert self.client is not None
        self.client.tell(Progress(iteration=self.at, suspended=True))
        self.is_resting = True
        await self.world.recess.rest()
        self.is_resting = False
        self.client.tell(Progress(iteration=self.at))

    def _finish(self) -> None:
        """Does what `Recorder.close` and the end of the process do."""
        end = self.world.loop.time() + self.world.config.timeout
        while self.at not in (self.committed, *self._over) and self.world.loop.time() < end:
            self.fiber.sleep(0.05)
        self.has_finished = True
        assert self.client is not None
        self.client.tell(Goodbye(finished=True))
        self.client.call(Ended(), Noted)

    async def _snapshot(self, iteration: int) -> None:
        assert self.client is not None
        world, client = self.world, self.client
        self.newest = iteration
        client.tell(Request(iteration=iteration))
        world.record("begin", rank=self.rank, version=text(self._version(iteration)))
        end = world.loop.time() + world.step
        while iteration not in self._granted and iteration not in self._over and world.loop.time() < end:
            if client.lost:
                raise AgentError("the agent ended")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await self._changed.wait()
        if iteration in self._over:
            return
        slot = self._granted.pop(iteration, None)
        if slot is None or slot not in self.maps:
            client.tell(GiveUp(iteration=iteration, reason="late"))
        else:
            self.writing = self.inodes[slot]
            try:
                await self._copy(iteration, self.maps[slot])
            finally:
                self.writing = -1

    async def _copy(self, iteration: int, memory: mmap.mmap) -> None:
        assert self.client is not None
        world, client, at = self.world, self.client, self._offset
        version, nbytes, chunk = self._version(iteration), self.layout.nbytes, self.session.spec.chunk_bytes
        body = content(self.rank, version, nbytes) + EXTRAS
        cuts = [(start, min(chunk, nbytes - start)) for start in range(0, nbytes, chunk)] + [(nbytes, len(EXTRAS))]
        checksums = []
        for index, (start, size) in enumerate(cuts):
            await asyncio.sleep(world.rng.expovariate(1 / world.copying))
            memory[at + start : at + start + size] = body[start : start + size]
            checksums.append(checksum(body[start : start + size]))
            said = checksums[-1]
            if world.misspeaking and not world.on_device:
                world.misspeaking, said = world.misspeaking - 1, said ^ 1 << world.rng.randrange(64)
                world.record("misspoken", rank=self.rank, version=text(version))
            if world.on_device and start < nbytes:
                client.tell(Landed(iteration=iteration, upto=start + size))
            else:
                client.tell(Chunk(owner=self.rank, iteration=iteration, index=index, offset=start, nbytes=size, digest=said))
        root = shard_root(self.rank, version, layout_digest(self.layout.to_bytes()), (nbytes, len(EXTRAS), chunk), checksums)
        client.tell(
            Copied(iteration=iteration, extras_bytes=len(EXTRAS), digest=f"digest of {iteration}", root="" if world.on_device else root)
        )
        self.copied = iteration
        world.record("copied", rank=self.rank, version=text(version), root=root)

    def _version(self, iteration: int) -> Version:
        return Version(self.session.spec.incarnation, iteration)

    # -- another agent

    def _reconnect(self) -> None:
        """Does what `Recorder._start_another` does."""
        session, spec = self.session, self.session.spec
        old = self.client
        assert old is not None
        kept = [*self.fds, *old.custody.values()]
        hello = session.hello.model_copy(update={"secret": session.secret, "preferred_port": spec.addresses[session.host][1]})
        client = SimulatedClient(self.world, self.host, self.process, hello, self._on_event, self.world.config.timeout, self.clients)
        try:
            client.tell(Adopt(count=len(kept), incarnation=spec.incarnation), kept)
            client.call(OpenSession(spec=spec, secret=session.secret, readopt=True, committed=self._committed, reached=self.newest), Opened)
        except GeminiError:
            client.close()
            raise
        self.client = session.client = client
        self.world.record("reconnected", rank=self.rank, host=self.host.name)
        old.close()
        self._granted.clear()
        client.tell(Progress(iteration=self.at))
        self._reserve()
        if self.copied != self.at:  # else it was copied while the other agent lived, and is handed over
            client.tell(GiveUp(iteration=self.at, reason="this host's agent was restarted"))

    @property
    def _committed(self) -> Version | None:
        resumed = self.session.plan.version
        if self.committed is None or (resumed is not None and self.committed == resumed.iteration):
            return resumed
        return self._version(self.committed)

    # -- what the agent says

    def _on_event(self, message: ToWorker) -> None:
        match message:
            case Room():
                self._room = True
            case Granted(iteration=iteration, slot=slot):
                self._granted[iteration] = slot
            case Queued():
                return
            case Commit(version=version):
                self.committed = version.iteration
                notes.say_committed(self.world.run, "main", {*self.session.spec.hosts})
                self.world.record(
                    "heard", rank=self.rank, host=self.host.name, version=text(version), of=str(self.session.spec.incarnation)
                )
            case Abort(version):
                self._over.add(version.iteration)
            case Failed():
                self._fatal = as_error(message)
        self._changed.set()

    def lose_memory(self) -> None:
        """The process is dead, and what only it had open is gone."""
        for memory in self.maps.values():
            memory.close()
        for fd in self.fds:
            os.close(fd)
        self.maps, self.fds = {}, []
        for client in self.clients:
            client.died()
