"""Answers the workers of a host, and whoever else asks its agent: launchers, `gemini status`, exports."""

from __future__ import annotations

import json
import os
import secrets
import time
import traceback
from typing import Any

from gemini_ft.agent.context import RunContext
from gemini_ft.agent.departure import Departure, Launches
from gemini_ft.agent.hangs import HangWatch
from gemini_ft.agent.memory.slot_store import SlotDonor
from gemini_ft.agent.stream import Stream
from gemini_ft.agent.streams import Streams
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.errors import AgentError, GeminiError, ProtocolError, SecretError, SupersededError
from gemini_ft.hosts import machine_id
from gemini_ft.wire import worker_messages as wire
from gemini_ft.wire.control_page import ControlPage
from gemini_ft.wire.messages import PROTOCOL_VERSION, kind_of
from gemini_ft.wire.trust import fingerprint


class Requests:
    """The part of an agent that answers workers."""

    def __init__(self, run: RunContext, streams: Streams) -> None:
        self._run, self._streams = run, streams
        self._workers: set[WorkerConnection] = set()
        self._over: set[WorkerConnection] = set()  # still connected, but have said that their attempt is over
        self._launches = Launches()
        self.hangs = HangWatch(self)
        self.departure = Departure(streams.by_name, self._workers, self._launches)
        self._domain, self._began = "", time.time()
        self._agent_timeout = 0.0  # as the job has it; this agent only repeats it to its watchmen
        self._tasks = Tasks()
        self.log = run.log
        run.account = self._account

    def on_worker_message(self, worker: WorkerConnection, message: wire.ToAgent, fds: list[int]) -> None:
        if not isinstance(message, wire.Ping):  # which a thread sends that never hangs
            self.hangs.heard(worker)
            if worker in self._over:  # a thread that the attempt has left behind may ask, and must get no slot
                for fd in fds:
                    os.close(fd)
                raise SupersededError("this process has said that its attempt is over")
        match message:
            case wire.Hello():
                self._hello(worker, message)
            case wire.GetStatus():
                worker.send(wire.Status(call=message.call, document=json.dumps(self.status())))
            case wire.Visit():
                worker.send(self._visited(message))
            case wire.AskDrain():
                worker.send(self._drain(message))
            case wire.Ended(refused=refused):
                self._ended(worker.pid, refused)
                worker.send(wire.Noted(call=message.call))
            case wire.TellSpares(waiting=waiting, lacking=lacking):
                self._run.spares = {"waiting": waiting, "lacking": lacking}
                worker.send(wire.Noted(call=message.call))
            case wire.Leave(finished=finished):
                self.departure.ask(worker, finished)
                if finished:
                    for stream in self._streams.by_name.values():
                        stream.finish_unclosed()
            case wire.Ping():
                worker.send(wire.Pong(agent_timeout=self._agent_timeout))
            case wire.Adopt(shared=shared):
                self._streams.adopt(fds, shared, SlotDonor(worker, message.incarnation) if worker.stream else None)
            case _ if not worker.stream:
                raise AgentError(f"{kind_of(message)!r} before hello")
            case _:
                self._on_member_message(worker, message, fds)

    def _on_member_message(self, worker: WorkerConnection, message: wire.ToAgent, fds: list[int]) -> None:
        """Takes a message of a worker that has said hello."""
        match message:
            case wire.GetInventory():
                stream = self._stream(worker)
                stream.seal(worker)
                worker.send(
                    wire.Inventory(call=message.call, slots=stream.context.slot_store.inventory(), given_up=sorted(stream.given_up))
                )
            case wire.OpenSession():
                self._open_session(worker, message)
            case wire.Verify() | wire.Stage():
                self._tasks.spawn(self._answer(worker, message))
            case wire.Map():
                self._map(worker, message)
            case wire.Goodbye():
                self._goodbye(worker, message)
            case wire.Over(failed=failed):
                worker.end("failed" if failed else "goodbye")
                self._over.add(worker)
                self._lost(worker, "has ended its attempt")
            case wire.Watch():
                page = ControlPage.take(*fds)
                try:
                    self._current(worker).session.outbound.gate.watch(worker.rank, page)
                except SupersededError:
                    page.close()
                    raise
            case wire.Progress(iteration=iteration, suspended=suspended, validated=seconds):
                stream = self._current(worker)
                stream.reached(iteration)
                if seconds:
                    stream.context.measures.time.validated(time.monotonic(), seconds)
                self.hangs.progress(worker, suspended)
            case _:
                stream = self._current(worker)
                if isinstance(message, wire.Request):
                    self.hangs.progress(worker)
                    stream.reached(message.iteration, message.held)
                stream.on_worker_message(worker, message)

    def _current(self, worker: WorkerConnection) -> Stream:
        stream = self._stream(worker)
        if not stream.context.is_present(worker):
            current = stream.context.spec.incarnation if stream.context.spec is not None else "none"
            raise SupersededError(f"incarnation {worker.incarnation} is over, {current} has taken over; this process must stop")
        return stream

    def on_worker_dead(self, worker: WorkerConnection) -> None:
        if worker in self._workers:
            self._lost(worker, "is gone")

    def on_worker_hung_up(self, worker: WorkerConnection) -> None:
        self.hangs.end(worker)
        self._over.discard(worker)
        if worker.stream and worker in self._workers:
            self._stream(worker).unseal(worker)
        else:  # a process that only asked for the status, or whose attempt is over
            self._workers.discard(worker)
            worker.close()

    def _lost(self, worker: WorkerConnection, how: str) -> None:
        self._workers.discard(worker)
        self.hangs.end(worker)
        self._run.log(f"rank {worker.rank} (pid {worker.pid}) {how}")
        self._stream(worker).worker_lost(worker)
        self._stream(worker).unseal(worker)

    async def examine(self, worker: WorkerConnection) -> None:
        """Looks, in bounded time, at why a worker hangs, before it is killed."""
        await self._stream(worker).examine(worker)

    # -- answers

    def _stream(self, worker: WorkerConnection) -> Stream:
        return self._streams.by_name[worker.stream]

    def _open_session(self, worker: WorkerConnection, message: wire.OpenSession) -> None:
        stream = self._stream(worker)
        stream.check_inventory(worker)
        worker.incarnation = message.spec.incarnation
        self._streams.note(worker.incarnation)
        self._run.secret = message.secret
        stream.open(message.spec, message.readopt, message.committed, message.past)
        stream.launch = worker.launch
        if message.reached is not None:
            stream.perform(stream.context.host.arrived(worker.rank, stream.context.version(message.reached)))
        self._streams.remember()
        self.hangs.open(worker, message.spec.hang_timeout, message.readopt)
        worker.send(wire.Opened(call=message.call))

    async def _answer(self, worker: WorkerConnection, message: wire.Verify | wire.Stage) -> None:
        """Gives an answer that takes time; an error meanwhile becomes the answer."""
        stream = self._stream(worker)
        try:
            if isinstance(message, wire.Verify):
                sound = await stream.context.slot_store.verify(message.version)
                worker.send(wire.Verified(call=message.call, version=message.version, sound=sound))
            else:
                await stream.stagings.stage(message)
                worker.send(wire.Staged(call=message.call, owner=message.owner, version=message.version))
        except GeminiError as error:
            worker.refuse(message, error)
        except Exception as error:
            self._run.log(traceback.format_exc())
            worker.refuse(message, AgentError(f"the agent failed at {kind_of(message)!r}: {type(error).__name__}: {error}"))

    def _hello(self, worker: WorkerConnection, hello: wire.Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"this agent speaks protocol {PROTOCOL_VERSION}, the worker {hello.protocol}: another gemini-ft started it, and only that "
                "one can go on from its memory. Run the job with that one until storage has the last step, or export the step with it "
                f"(`gemini export`), or end the agent: `gemini leave --run-id {self._run.run_id}`; what it alone holds is lost then"
            )
        if self._run.secret and hello.secret and hello.secret != self._run.secret and any(w.alive and w.stream for w in self._workers):
            mine, theirs = fingerprint(self._run.secret), fingerprint(hello.secret)
            raise SecretError(
                f"the agent of run {self._run.run_id!r} has secret {mine}, rank {hello.rank} brings {theirs}; "
                "give all workers of a run the same GEMINI_SECRET_FILE"
            )
        if hello.launch is not None:
            self._launches.refuse_again(hello.launch)
            self._launches.refuse_second(self._run.run_id, self._run.host, hello.launch, self._at_work())
            self._launches.note(hello.launch)
        self._run.secret = hello.secret or self._run.secret or secrets.token_bytes(32)
        self._domain, self._agent_timeout = hello.domain, hello.agent_timeout
        self._streams.remember()
        if hello.memory_limit is not None:
            self._run.budget.limit, self._run.budget.stated = hello.memory_limit, True
        worker.rank, worker.stream, worker.launch = hello.rank, hello.stream, hello.launch
        self._workers.add(worker)
        self.hangs.begin(worker, hello.start_timeout)
        self.departure.stay(hello.linger)
        self._streams.named(hello.stream).context.encrypt = hello.encrypt
        self._tasks.spawn(self._welcome(worker, hello))

    async def _welcome(self, worker: WorkerConnection, hello: wire.Hello) -> None:
        try:
            await self._streams.listen(hello)
        except GeminiError as error:
            worker.refuse(hello, error)
            return
        assert self._streams.address is not None
        info = wire.HostInfo(
            host=self._run.host,
            machine=machine_id(),
            address=self._streams.address,
            further=self._streams.further,
            known=self._streams.known,
            fingerprint=fingerprint(self._run.secret),
            memory_limit=self._run.budget.limit,
            memory_used=self._run.budget.used,
            domain=self._domain,
        )
        stream = self._stream(worker)
        last = stream.last_spec
        worker.send(
            wire.Welcome(
                call=hello.call,
                info=info,
                secret=self._run.secret,
                pid=os.getpid(),
                resumed=stream.stuck_at,
                attempts=stream.attempts,
                finished=stream.finished,
                launch=stream.launch,
                time=stream.context.measures.kept(),
                memory_folder=str(self._run.files.root.absolute()) if self._run.files is not None else "",
                **({name: getattr(last, name) for name in ("incarnation", "lineage", "overtaken", "aside")} if last is not None else {}),
            )
        )

    def _map(self, worker: WorkerConnection, message: wire.Map) -> None:
        stream = self._stream(worker)
        for (owner, _), memory in stream.context.slot_store.memory.items():
            if owner == message.owner and memory.version == message.version:
                shape = memory.shape
                mapped = wire.Mapped(
                    call=message.call,
                    owner=message.owner,
                    version=message.version,
                    data_offset=shape.data_offset,
                    data_bytes=shape.data_bytes,
                    extras_bytes=memory.extras_bytes,
                )
                worker.send(mapped, (memory.fd,))
                return
        raise AgentError(f"host {self._run.host} has no copy of rank {message.owner}'s shard of {message.version} any more")

    def _goodbye(self, worker: WorkerConnection, message: wire.Goodbye) -> None:
        self.hangs.end(worker)
        worker.parting = "goodbye"
        self._stream(worker).context.left(worker, message.finished)
        if message.finished:
            if not message.last:
                self.departure.finish(worker)
            self._stream(worker).on_finished(worker.rank)
        else:
            self.departure.interrupt(worker)

    def _ended(self, pid: int, refused: str) -> None:
        if not refused:
            self.departure.ended(pid)
        for worker in [each for each in self._workers if each.pid == pid]:
            if not refused:
                worker.parting = "goodbye"
            elif worker.launch is not None:
                self._launches.note_refusal(worker.launch, refused)

    def _visited(self, visit: wire.Visit) -> wire.Visited:
        streams = {
            name: wire.StreamInfo(
                slots=stream.context.slot_store.inventory(),
                committed=stream.context.host.committed,
                spec=stream.last_spec,
                leader=stream.leader,
            )
            for name, stream in self._streams.by_name.items()
        }
        run, address = self._run, self._streams.address
        return wire.Visited(call=visit.call, run=run.run_id, host=run.host, address=address, secret=run.secret, streams=streams)

    def drain(self) -> int:
        """Drains this host; returns the number of workers that have been told."""
        return sum(stream.drain() for stream in self._streams.by_name.values())

    def _drain(self, wish: wire.AskDrain) -> wire.Draining:
        if wish.host in ("", self._run.host):
            return wire.Draining(call=wish.call, workers=self.drain(), relayed=False)
        streams = self._streams.by_name.values()
        if not [stream for stream in streams if stream.drain_other(wish.host)]:
            hosts = sorted({host for stream in streams if stream.context.spec is not None for host in stream.context.spec.hosts})
            raise AgentError(f"run {self._run.run_id!r} has no host {wish.host!r} at work; its hosts are {', '.join(hosts) or 'none'}")
        return wire.Draining(call=wish.call, workers=0, relayed=True)

    def _at_work(self) -> list[tuple[int, wire.Launch]]:
        return [(worker.pid, worker.launch) for worker in self._workers if worker.alive and worker.launch is not None]

    def status(self) -> dict[str, Any]:
        return {
            "run": self._run.run_id,
            "host": self._run.host,
            "pid": os.getpid(),
            "began": self._began,
            "launches": [launch.model_dump(exclude={"environ"}) for launch in self._launches.alive(self._at_work())],
            "memory": {"limit": self._run.budget.limit, "used": self._run.budget.used},
            "metrics": self._run.metrics,
            "page": self._run.has_page,
            "spares": self._run.spares,
            "hangs": self.hangs.killed,
            "linger": self.departure.linger,
            "idle": time.monotonic() - self.departure.idle_since,
            "workers": {w.rank: w.pid for w in self._workers if w.alive and w.rank >= 0},
            "streams": {name: stream.status() for name, stream in self._streams.by_name.items()},
        }

    def _account(self) -> dict[str, Any]:
        """The same for other hosts and the web page: without commands and folders of launches, which never leave the host."""
        own = self.status()
        streams = {name: {figure: value for figure, value in of.items() if figure != "command"} for name, of in own["streams"].items()}
        return {**own, "launches": [], "streams": streams}

    def job(self) -> dict[str, Any]:
        """The accounts of all hosts that this agent knows: of the job where it leads the commits, else its own.

        Each has ``heard``, the seconds since it came, and ``account``, as JSON. All hosts of a stream that this one leads are asked anew.
        """
        now, found = time.monotonic(), dict[str, tuple[float, str]]()
        for stream in self._streams.by_name.values():
            for host, (at, account) in stream.accounts().items():
                found[host] = max(found.get(host, (0.0, "")), (at, account))
        found[self._run.host] = (now, json.dumps(self._account()))
        hosts = {host: {"heard": now - at, "account": account} for host, (at, account) in sorted(found.items())}
        return {"run": self._run.run_id, "host": self._run.host, "at": time.time(), "hosts": hosts}
