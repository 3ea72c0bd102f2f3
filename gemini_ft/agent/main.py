"""The host agent: owns the memory that outlives the workers. ``python -m gemini_ft.agent.main --run R --host H``.

It never imports torch. It ends when the job has finished, when it is told to leave, or when no worker has been
connected for ``linger`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence

from gemini_ft.agent.departure import Departure
from gemini_ft.agent.hangs import HangWatch
from gemini_ft.agent.home import HostRun
from gemini_ft.agent.identity import Identity, Past
from gemini_ft.agent.launches import Launches
from gemini_ft.agent.lifecycle import raise_descriptor_limit, set_oom_score, socket_name, yield_to_training
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.sparing import Sparing
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.vault import Giver
from gemini_ft.agent.workers import Desk, WorkerConnection
from gemini_ft.core.versions import Incarnation
from gemini_ft.errors import AgentError, CorruptDataError, GeminiError, SecretError, SupersededError
from gemini_ft.hosts import machine_id
from gemini_ft.wire.control_page import ControlPage
from gemini_ft.wire.handshake import Listener, listen
from gemini_ft.wire.messages import PROTOCOL_VERSION, kind_of
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.tcp import Connection, Handler
from gemini_ft.wire.trust import fingerprint
from gemini_ft.wire.worker_messages import (
    Adopt,
    GetInventory,
    GetStatus,
    Goodbye,
    Hello,
    HostInfo,
    Inventory,
    Launch,
    Leave,
    Map,
    Mapped,
    Opened,
    OpenSession,
    Ping,
    Pong,
    Progress,
    Request,
    Stage,
    Staged,
    Status,
    StreamInfo,
    ToAgent,
    Verified,
    Verify,
    Visit,
    Visited,
    Watch,
    Welcome,
)

_TICK = 0.2  # seconds between looks at hangs and at whether to leave


class Agent(HostRun):
    """Everything that one host keeps for one run."""

    def __init__(self, run: str, host: str) -> None:
        super().__init__(run, host)
        self.streams: dict[str, Stream] = {}
        self._workers: set[WorkerConnection] = set()
        self._launches = Launches()
        self._hangs = HangWatch(self.log)
        self._departure = Departure(self.streams, self._workers)
        self._domain = ""
        self._agent_timeout = 0.0  # as the job has it; this agent only repeats it to its watchmen
        self._identity = Identity()
        self._leaving = asyncio.Event()
        self._server: Listener | None = None
        self._listening: asyncio.Task[None] | None = None
        self._known: Incarnation | None = None
        self._tasks = Tasks()

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is time to leave."""
        desk = Desk(self, listener)
        self.log(f"agent {os.getpid()} of run {self.run_id!r} on host {self.host!r}; may hold {self.budget.limit:,} bytes")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        while not self._leaving.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _TICK)
            self._hangs.kill_hanging()
            if self._departure.is_due():
                break
        self._departure.tell_askers()
        desk.close()
        await asyncio.sleep(_TICK)  # the last messages, such as that all have finished, must get out before connections close
        for stream in self.streams.values():
            stream.close_session()
        self.log("leaving")

    # -- Office

    def on_worker_message(self, worker: WorkerConnection, message: ToAgent, fds: list[int]) -> None:
        """Handles one message from a worker, in order."""
        if not isinstance(message, Ping):  # which a thread sends that never hangs
            self._hangs.heard(worker)
        match message:
            case Hello():
                self._hello(worker, message)
            case GetStatus():
                worker.send(Status(call=message.call, document=self._status()))
            case Visit():
                worker.send(self._visited(message))
            case Leave(finished=finished):
                self._departure.ask(worker, finished)
            case Ping():
                worker.send(Pong(agent_timeout=self._agent_timeout))
                return
            case Adopt(shared=shared):
                self.adopt(fds, shared, Giver(worker, message.incarnation) if worker.stream else None)
            case _ if not worker.stream:
                raise AgentError(f"{kind_of(message)!r} before hello")
            case GetInventory():
                stream = self._stream(worker)
                stream.seal(worker)
                worker.send(Inventory(call=message.call, slots=stream.home.vault.inventory(), given_up=sorted(stream.given_up)))
            case OpenSession():
                self._open_session(worker, message)
            case Verify():
                self._tasks.spawn(self._answer(worker, message, self._verify(worker, message)))
            case Stage():
                self._tasks.spawn(self._answer(worker, message, self._stage(worker, message)))
            case Map():
                self._map(worker, message)
            case Goodbye(finished=finished):
                self._goodbye(worker, finished)
            case Watch():
                page = ControlPage.take(*fds)
                try:
                    self._current(worker).session.outbound.gate.watch(worker.rank, page)
                except SupersededError:
                    page.close()
                    raise
            case Progress(suspended=suspended):
                self._current(worker)
                self._hangs.progress(worker, suspended)
            case _:
                stream = self._current(worker)
                if isinstance(message, Request):
                    self._hangs.progress(worker)
                stream.on_worker_message(worker, message)

    def _current(self, worker: WorkerConnection) -> Stream:
        """The worker's stream, if the worker is of its present incarnation."""
        stream = self._stream(worker)
        if not stream.home.is_present(worker):
            current = stream.home.spec.incarnation if stream.home.spec is not None else "none"
            raise SupersededError(f"incarnation {worker.incarnation} is over, {current} has taken over; this process must stop")
        return stream

    def on_worker_dead(self, worker: WorkerConnection) -> None:
        self._workers.discard(worker)
        self._hangs.end(worker)
        if worker.stream:
            self.log(f"rank {worker.rank} (pid {worker.pid}) is gone")
            self._stream(worker).worker_lost(worker)
            self._stream(worker).unseal(worker)

    def on_worker_hung_up(self, worker: WorkerConnection) -> None:
        self._hangs.end(worker)
        if worker.stream:
            self._stream(worker).unseal(worker)
        else:  # a process that only asked for the status
            self._workers.discard(worker)
            worker.close()

    # -- answers

    def _stream(self, worker: WorkerConnection) -> Stream:
        return self.streams[worker.stream]

    def _open_session(self, worker: WorkerConnection, message: OpenSession) -> None:
        self._stream(worker).check_inventory(worker)
        incarnation = message.spec.incarnation
        worker.incarnation = incarnation
        self._known = incarnation if self._known is None else max(self._known, incarnation)
        self.secret = message.secret
        self._stream(worker).open(message.spec, message.readopt, message.committed)
        self._stream(worker).launch = worker.launch
        self._remember()
        self._hangs.open(worker, message.spec.hang_timeout, message.readopt)
        worker.send(Opened(call=message.call))

    def _remember(self) -> None:
        """Notes the secret and all sessions for a successor."""
        origins = {name: stream.origin for name, stream in self.streams.items() if stream.origin is not None}
        self._identity.write(Past(self.secret, self._known, origins))

    async def _verify(self, worker: WorkerConnection, asked: Verify) -> None:
        sound = await self._stream(worker).home.vault.verify(asked.version)
        worker.send(Verified(call=asked.call, version=asked.version, sound=sound))

    async def _stage(self, worker: WorkerConnection, order: Stage) -> None:
        await self._stream(worker).stagings.stage(order)
        worker.send(Staged(call=order.call, owner=order.owner, version=order.version))

    async def _answer(self, worker: WorkerConnection, message: ToAgent, work: Coroutine[None, None, None]) -> None:
        """Gives an answer that takes time; an error meanwhile becomes the answer."""
        try:
            await work
        except GeminiError as error:
            worker.refuse(message, error)
        except Exception as error:
            self.log(traceback.format_exc())
            worker.refuse(message, AgentError(f"the agent failed at {kind_of(message)!r}: {type(error).__name__}: {error}"))

    def _hello(self, worker: WorkerConnection, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise AgentError(
                f"this agent speaks protocol {PROTOCOL_VERSION}, the worker {hello.protocol}: another gemini-ft started it; "
                f"end it with `gemini leave --run-id {self.run_id}` or wait until it has gone"
            )
        if self.secret and hello.secret and hello.secret != self.secret and any(w.alive and w.stream for w in self._workers):
            mine, theirs = fingerprint(self.secret), fingerprint(hello.secret)
            raise SecretError(
                f"the agent of run {self.run_id!r} has secret {mine}, rank {hello.rank} brings {theirs}; "
                "give all workers of a run the same GEMINI_SECRET_FILE"
            )
        if hello.launch is not None:
            self._launches.refuse_second(self.run_id, self.host, hello.launch, self._at_work())
            self._launches.note(hello.launch)
        self.secret = hello.secret or self.secret or secrets.token_bytes(32)
        self._domain, self._agent_timeout = hello.domain, hello.agent_timeout
        self._remember()
        if hello.memory_limit is not None:
            self.budget.limit, self.budget.stated = hello.memory_limit, True
        worker.rank, worker.stream, worker.launch = hello.rank, hello.stream, hello.launch
        self._workers.add(worker)
        self._hangs.begin(worker, hello.start_timeout)
        self._departure.stay(hello.linger)
        self.streams.setdefault(hello.stream, Stream(hello.stream, self)).encrypt = hello.encrypt
        self._tasks.spawn(self._welcome(worker, hello))

    async def _welcome(self, worker: WorkerConnection, hello: Hello) -> None:
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen(hello))
        try:
            await self._listening
        except GeminiError as error:
            self._listening = None
            worker.refuse(hello, error)
            return
        assert self._server is not None
        address = self._server.address
        info = HostInfo(
            host=self.host,
            machine=machine_id(),
            address=address,
            known=self._known,
            fingerprint=fingerprint(self.secret),
            memory_limit=self.budget.limit,
            memory_used=self.budget.used,
            domain=self._domain,
        )
        stream = self._stream(worker)
        worker.send(
            Welcome(
                call=hello.call,
                info=info,
                secret=self.secret,
                pid=os.getpid(),
                resumed=stream.stuck_at,
                attempts=stream.attempts,
                finished=stream.finished,
                launch=stream.launch,
                **(stream.origin._asdict() if stream.origin is not None else {}),
            )
        )

    async def _listen(self, hello: Hello) -> None:
        self._server = await listen(
            hello.bind, hello.ports, lambda: self.secret, self._accept, Sparing(self.log), self._encrypts, hello.preferred_port
        )

    def _encrypts(self, stream: str) -> bool:
        return self.streams[stream].encrypt

    def _accept(self, connection: Connection, claims: Claims) -> Handler:
        if claims.to != self.host:
            raise AgentError(f"host {claims.host!r} takes this host for {claims.to!r}, but it is {self.host!r}; two hosts share an address")
        if claims.run != self.run_id or claims.stream not in self.streams:
            raise AgentError(
                f"host {claims.host!r} asks for stream {claims.stream!r} of run {claims.run!r}; this agent serves {self.run_id!r}"
            )
        return self.streams[claims.stream].incoming.accept(connection, claims)

    def adopt(self, fds: Sequence[int], shared: Sequence[bool] = (), giver: Giver | None = None) -> None:
        """Takes over slots that another agent has made; ``shared``: those that a process other than the giver may still write to."""
        for fd, is_shared in zip(fds, shared or [False] * len(fds), strict=True):
            try:
                memory = SlotMemory.adopt(fd)
                self.streams.setdefault(memory.shape.stream, Stream(memory.shape.stream, self)).adopt(memory, is_shared, giver)
            except (CorruptDataError, OSError, ValueError) as error:
                self.log(f"a slot could not be adopted: {error}")
                os.close(fd)

    def inherit(self, slots: str, identity: int) -> None:
        """Begins with a former agent's estate: ``5,6!`` are descriptors of its slots, ! those that others may still write to."""
        entries = [entry for entry in slots.split(",") if entry]
        fds = [int(entry.rstrip("!")) for entry in entries]
        for fd in [*fds, *([identity] if identity >= 0 else [])]:
            os.set_inheritable(fd, False)
        self.adopt(fds, [entry.endswith("!") for entry in entries])
        if identity >= 0:
            past = self._identity.take_over(identity)
            self.secret, self._known = past.secret, past.known
            for name, origin in past.origins.items():
                self.streams.setdefault(name, Stream(name, self)).inherited = origin
        self.log(f"begins with {len(fds)} slots of an agent that hung")

    def _map(self, worker: WorkerConnection, message: Map) -> None:
        stream = self._stream(worker)
        for (owner, _), memory in stream.home.vault.memory.items():
            if owner == message.owner and memory.version == message.version:
                shape = memory.shape
                mapped = Mapped(
                    call=message.call,
                    owner=message.owner,
                    version=message.version,
                    data_offset=shape.data_offset,
                    data_bytes=shape.data_bytes,
                    extras_bytes=memory.extras_bytes,
                )
                worker.send(mapped, (memory.fd,))
                return
        raise AgentError(f"host {self.host} has no copy of rank {message.owner}'s shard of {message.version} any more")

    def _goodbye(self, worker: WorkerConnection, finished: bool) -> None:
        self._hangs.end(worker)
        if finished:
            self._stream(worker).on_finished(worker.rank)
        else:
            self._departure.interrupt(worker)

    def _visited(self, visit: Visit) -> Visited:
        streams = {
            name: StreamInfo(slots=stream.home.vault.inventory(), committed=stream.home.host.committed, spec=stream.home.spec)
            for name, stream in self.streams.items()
        }
        address = self._server.address if self._server is not None else None
        return Visited(call=visit.call, run=self.run_id, host=self.host, address=address, secret=self.secret, streams=streams)

    def _at_work(self) -> list[tuple[int, Launch]]:
        return [(worker.pid, worker.launch) for worker in self._workers if worker.alive and worker.launch is not None]

    def _status(self) -> str:
        document = {
            "run": self.run_id,
            "host": self.host,
            "pid": os.getpid(),
            "launches": [launch.model_dump(exclude={"environ"}) for launch in self._launches.alive(self._at_work())],
            "memory": {"limit": self.budget.limit, "used": self.budget.used},
            "linger": self._departure.linger,
            "idle": time.monotonic() - self._departure.idle_since,
            "workers": {w.rank: w.pid for w in self._workers if w.alive and w.rank >= 0},
            "streams": {name: stream.status() for name, stream in self.streams.items()},
        }
        return json.dumps(document)


def _bind(run: str, host: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(socket_name(run, host))
    listener.listen(256)
    return listener


def main(argv: list[str] | None = None) -> int:
    """Runs the agent; returns 0 also when another agent of this run is already there."""
    parser = argparse.ArgumentParser(prog="gemini agent", description="Own the snapshot memory of one host and run.")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--host", required=True, help="host id")
    parser.add_argument("--inherit", default="", help=argparse.SUPPRESS)
    parser.add_argument("--identity", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    raise_descriptor_limit()
    yield_to_training()
    set_oom_score(0)  # a worker that restarted us has raised its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the workers; they say goodbye

    async def run() -> None:
        agent = Agent(options.run, options.host)
        if options.inherit or options.identity >= 0:
            agent.inherit(options.inherit, options.identity)
        with contextlib.suppress(OSError):  # another agent is there already
            listener = _bind(options.run, options.host)
            await agent.serve(listener)
        os._exit(0)  # asyncio would wait for a thread that hangs in storage, and the memory stay as long

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
