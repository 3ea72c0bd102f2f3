"""One stream of snapshots on one host: turns messages of workers and peers into protocol events, and effects into deeds.

Everything runs on the agent's event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from gemini_ft.agent.custody import Custodians
from gemini_ft.agent.identity import Origin
from gemini_ft.agent.inbound import REPLICA_SLOTS, Inbound, may_be_written_by_another, shape_of
from gemini_ft.agent.leadership import Leader, MemberLink
from gemini_ft.agent.memory import SlotMemory
from gemini_ft.agent.outbound import Outbound
from gemini_ft.agent.ports import AgentServices
from gemini_ft.agent.receiving import Receiver
from gemini_ft.agent.serving import Fetcher, rebuild
from gemini_ft.agent.storing import Stagings, Storing
from gemini_ft.agent.vault import Giver, Vault
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.config import StorageConfig
from gemini_ft.core.effects import CancelSend, Damaged, Effect, Free, Grant, Send, Tell, Upload, Withdraw
from gemini_ft.core.ledger import Abort, Cadence, Commit, Fatal, Holders, Ledger, Thaw
from gemini_ft.core.protocol import Host
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, PeerError, RecoveryError, SupersededError
from gemini_ft.wire.handshake import dial
from gemini_ft.wire.messages import Failed, Notice, Paced, kind_of
from gemini_ft.wire.peer_messages import AllFinished, Claims, End, PeerMessage, Rejoin, ReportFinished
from gemini_ft.wire.tcp import Connection, Handler
from gemini_ft.wire.worker_messages import Copied, GiveUp, Granted, Inject, Launch, Request, Reserve, Reserved, Room, SessionSpec, ToWorker


class Stream:
    """The shards this host owns or holds for one stream, and its share of the commit."""

    def __init__(self, name: str, agent: AgentServices) -> None:
        self.name = name
        self._agent = agent
        self.spec: SessionSpec | None = None
        self.launch: Launch | None = None  # that opened the last session
        self.inherited: Origin | None = None  # of the last session of an agent before this one
        self.encrypt = True  # payloads between hosts; as the job that runs has it, which may not be the one that started this agent
        self.host = Host(agent.host)
        self.workers: dict[int, WorkerConnection] = {}
        custodians = Custodians(self.workers.values)
        self.vault = Vault(self.host, agent.budget, self.log, custodians.take_back)
        self.finished = False
        self.finishing = False  # a rank of this host has, and of the others and the last upload it is not known
        self.unstored = ""  # why the last upload failed for good
        self.attempts = 0  # sessions in a row that resumed the same version and committed nothing
        self._excused = False  # the present attempt does not count
        self.given_up: set[Version] = set()
        self.excluded: list[tuple[int, str]] = []
        counted = "committed", "aborted", "damaged", "replica_bytes", "uploads", "failed_uploads", "late_answers"
        self.counters = dict.fromkeys(counted, 0)
        self.figures: dict[int, dict[str, dict[str, float]]] = {}  # rank -> its last figures of the gradients
        self._progressed = True
        self._candidates: set[WorkerConnection] = set()  # workers that have asked for the inventory, to open a new incarnation
        self._misinformed: set[WorkerConnection] = set()  # those of them whose inventory lacks a copy that was handed back after it
        self.inbound = Inbound(self, agent, custodians)
        self._outbound: Outbound | None = None
        self._incoming: set[Connection] = set()
        self._leader: Leader | None = None
        self._member: MemberLink | None = None
        self.storing: Storing | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self.stagings = Stagings(self, agent.run, self._end_rebuilding)

    def log(self, text: str) -> None:
        self._agent.log(f"[{self.name}] {text}")

    # -- sessions

    @property
    def origin(self) -> Origin | None:
        """The origin of the last session."""
        spec = self.spec
        return Origin(spec.incarnation, spec.lineage, spec.overtaken, spec.aside) if spec is not None else self.inherited

    def open(self, spec: SessionSpec, readopt: bool, committed: Version | None) -> None:
        """Begins an incarnation; ``readopt``: continues the present one, after this agent was restarted in its middle.

        Raises:
            SupersededError: a newer one, or another with the same number, is already under way.
        """
        if self.spec is not None and spec.incarnation == self.spec.incarnation:
            if readopt:
                self._repeat_reports()
            return
        if self.spec is not None and spec.incarnation.number <= self.spec.incarnation.number:
            raise SupersededError(
                f"incarnation {spec.incarnation} comes after {self.spec.incarnation} began; this process belongs to the past and must stop"
            )
        self.close_session()
        holders = {owner: tuple(hosts) for owner, hosts in spec.holders.items()}
        if readopt:
            self.host.reopen(holders, committed, spec.incarnation)
        else:
            stuck = self.spec is not None and not self._progressed and spec.resumed == self.spec.resumed
            self.attempts = self.attempts + 1 if stuck else 1
            self._progressed, self.finished, self._excused = False, False, False
            self.finishing, self.unstored = False, ""
            self.given_up.update(spec.given_up)
            self.perform(self.host.open(holders, spec.resumed, spec.roots, spec.incarnation))
            self.vault.forget()
        self.spec = spec
        self.figures.clear()
        self._connect(spec)
        if readopt:
            self._repeat_reports()  # workers that are choosing go on, and the copies they were shown are kept
        else:
            self._candidates.clear()
        if not readopt and spec.resumed is not None and spec.sources:
            self._rebuilding = asyncio.get_running_loop().create_task(rebuild(self, self.inbound, spec, self._agent))
        self.log(f"incarnation {spec.incarnation} of {spec.world_size} ranks, from {spec.resumed or 'nothing'}")

    def adopt(self, memory: SlotMemory, shared: bool, giver: Giver | None) -> None:
        """Takes over a slot from before this agent's own time; a slot from a worker of the past can be read, and is not granted."""
        past = giver is not None and self.spec is not None and giver.incarnation != self.spec.incarnation
        if self.vault.adopt(memory, shared or past, giver):
            self._misinformed |= self._candidates

    def excuse(self) -> None:
        """Excuses the resumed version from the failure of the present session. Every worker of it says so."""
        self.attempts -= not self._excused
        self._excused = True

    def seal(self, worker: WorkerConnection) -> None:
        """Seals the stream while a worker chooses a version to resume: until then nothing here changes."""
        self._candidates.add(worker)
        self._misinformed.discard(worker)
        self.host.seal()

    def check_inventory(self, worker: WorkerConnection) -> None:
        """Refuses a choice that could not take account of all copies here.

        Raises:
            RecoveryError: a copy was handed back after the worker had asked for the inventory.
        """
        if worker in self._misinformed:
            raise RecoveryError(
                f"host {self.host.name!r} was handed copies back after rank {worker.rank} had asked what it holds, because its agent was "
                "restarted at that moment; what is resumed must be chosen again: start the job once more, the copies count then"
            )

    def unseal(self, worker: WorkerConnection) -> None:
        """Ends the seal of a worker that is gone. If the choosing ranks could not open their incarnation, the present one goes on."""
        self._misinformed.discard(worker)
        if worker in self._candidates:
            self._candidates.discard(worker)
            if not self._candidates:
                self.perform(self.host.unseal())

    @property
    def stuck_at(self) -> Version | None:
        """The version that the last session resumed, if nothing has been committed since."""
        return self.spec.resumed if self.spec is not None and not self._progressed else None

    def close_session(self) -> None:
        """Closes the present incarnation's connections; memory stays."""
        self.inbound.end_session()
        for connection in list(self._incoming):
            connection.abort("the session is over")
        for part in (self._outbound, self._leader, self._member, self.storing.uploader if self.storing is not None else None):
            if part is not None:
                part.close()
        self._outbound = self._leader = self._member = self.storing = None
        if self._rebuilding is not None:
            self._rebuilding.cancel()

    async def _end_rebuilding(self) -> None:
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])

    def _connect(self, spec: SessionSpec) -> None:
        self._outbound = Outbound(self, self._agent, spec)
        if spec.storage is not None:
            self.storing = Storing(self, spec, self._agent.run)
        if spec.leader == self.host.name:
            cadence = None
            if spec.storage is not None:
                start = spec.resumed.iteration if spec.resumed else 0
                every_steps, every_seconds = spec.storage.get("every_steps"), spec.storage.get("every_seconds")
                cadence = Cadence(every_steps, every_seconds, start, asyncio.get_running_loop().time())  # type: ignore[arg-type]
            book = Ledger(self.host.holders, self.host.committed, spec.replica_timeout, cadence)
            if spec.storage is not None:
                book.obstacle = "storage has not been looked through yet"
            self._leader = Leader(book, spec.world_size, self.storing, self.on_decision, self.patience)
        else:
            address, claims = spec.addresses[spec.leader], self.claims("report", spec.leader)
            self._member = MemberLink(
                lambda handler: dial(address, claims, self._agent.secret, handler), self.on_decision, self.rejoin_reports, self.log
            )

    def _repeat_reports(self) -> None:
        """Reports again what was complete here and not committed yet: the ledger may have forgotten it, or never heard of it."""
        for report in self.host.reports():
            self.report(report)

    def claims(self, role: str, to: str) -> Claims:
        """This host's introduction when it dials a peer."""
        incarnation = self.spec.incarnation if self.spec is not None else None
        return Claims(run=self._agent.run, stream=self.name, host=self.host.name, to=to, role=role, incarnation=incarnation)  # type: ignore[arg-type]

    def accept(self, connection: Connection, claims: Claims) -> Handler:
        """Takes in a peer that has proved to know the secret."""
        if claims.role == "fetch":
            return self._tracked(connection, Fetcher(self, connection, claims.host))
        if self.spec is None or claims.incarnation != self.spec.incarnation:
            mine = self.spec.incarnation if self.spec is not None else "none"
            raise SupersededError(f"host {claims.host!r} speaks for incarnation {claims.incarnation}, this host is at {mine}")
        if claims.role == "report":
            if self._leader is None:
                raise PeerError(f"host {self.host.name!r} does not lead this run")
            return self._leader.join(connection, claims.host)
        return self._tracked(connection, Receiver(self.inbound, connection, claims.host))

    def _tracked(self, connection: Connection, handler: Handler) -> Handler:
        """Keeps a handler whose connection holds slots, to end it with the session."""
        self._incoming.add(connection)

        def gone(reason: str) -> None:
            self._incoming.discard(connection)
            if connection.refused:
                self.log(f"{connection.peer}: {reason}")

        return _Tracked(handler, gone)

    # -- workers

    def reserve(self, worker: WorkerConnection, message: Reserve) -> None:
        """Gives a worker the memory of its shard: the slots it had, if no other process can still write to them."""
        assert self.spec is not None
        owner = worker.rank
        shape = shape_of(self, self._agent, owner, message)
        count = REPLICA_SLOTS + (self.spec.storage is not None)
        reuse = not may_be_written_by_another(self, owner, worker)
        self.workers[owner] = worker
        indices = self.vault.ensure(owner, shape, count, reuse)
        fds = [self.vault.memory[owner, index].fd for index in indices]
        reserved = Reserved(
            call=message.call,
            layout_hash=message.layout_hash,
            slots=indices,
            data_offset=shape.data_offset,
            capacity=shape.capacity,
        )
        worker.send(reserved, fds)
        self.inbound.entrust_all()

    def version(self, iteration: int) -> Version:
        assert self.spec is not None
        return Version(self.spec.incarnation, iteration)

    def committed_roots(self, version: Version) -> Mapping[int, str]:
        """Owner -> root of its shard; the leader knows all, of the last few commits."""
        if self._leader is not None:
            return self._leader.committed_roots(version)
        return self.host.roots if self.host.committed == version else {}

    def on_request(self, worker: WorkerConnection, message: Request) -> None:
        self.perform(self.host.request(worker.rank, self.version(message.iteration)))

    def on_chunk(self, worker: WorkerConnection, iteration: int, index: int, offset: int, nbytes: int, digest: int) -> None:
        """Takes note of a chunk that the worker has copied: it may travel."""
        memory = self.vault.writing(worker.rank, self.version(iteration))
        if memory is not None:
            if not memory.admits(index, offset, nbytes):
                raise AgentError(f"rank {worker.rank} copied chunk {index} to {offset}+{nbytes}, outside its slot")
            memory.put_chunk(index, offset, nbytes, digest)
            for link in self.outbound.links_of(worker.rank):
                link.chunk_ready()

    def on_copied(self, worker: WorkerConnection, message: Copied) -> None:
        version, owner = self.version(message.iteration), worker.rank
        memory = self.vault.writing(owner, version)
        if memory is None:
            return
        if not memory.is_whole(message.extras_bytes):
            raise AgentError(f"rank {owner} declared iteration {message.iteration} copied, but chunks are missing")
        if not memory.finish(version, message.extras_bytes, message.root):
            self._damaged(owner, version)
            self.perform(self.host.give_up(owner, version, "its checksums did not come here as they left the worker"))
            return
        end = End(
            owner=owner,
            iteration=message.iteration,
            extras_bytes=message.extras_bytes,
            chunks=len(memory.chunks),
            layout=memory.shape.layout_hash,
            digest=message.digest,
            root=memory.root,
        )
        self.outbound.copied(owner, version, end)
        self.perform(self.host.copied(owner, version, memory.shape.layout_hash, message.digest, memory.root))

    def on_give_up(self, worker: WorkerConnection, message: GiveUp) -> None:
        self.perform(self.host.give_up(worker.rank, self.version(message.iteration), message.reason))

    def on_finished(self, rank: int) -> None:
        self.finishing = True
        self.report(ReportFinished(rank=rank))

    def worker_lost(self, worker: WorkerConnection) -> None:
        """Takes note that a worker is proven dead."""
        if self.workers.get(worker.rank) is worker and self.spec is not None and worker.incarnation == self.spec.incarnation:
            self.outbound.gate.forget(worker.rank)
            self.inbound.worker_lost(worker.rank)
            self.perform(self.host.worker_lost(worker.rank))

    @property
    def outbound(self) -> Outbound:
        """The sending side of this session."""
        assert self._outbound is not None
        return self._outbound

    def tell_workers(self, message: ToWorker) -> None:
        for worker in self.workers.values():
            if self.spec is not None and worker.incarnation == self.spec.incarnation:
                worker.send(message)

    # -- effects

    def perform(self, effects: list[Effect]) -> None:
        """Carries out the protocol's decisions."""
        self.vault.sync_headers()
        for effect in effects:
            match effect:
                case Grant(owner, slot, version):
                    self.vault.memory[owner, slot].clear()
                    if owner in self.workers:
                        self.workers[owner].send(Granted(iteration=version.iteration, slot=slot))
                case Send(owner, slot, version, peer):
                    self.outbound.send(owner, version, slot, self.vault.memory[owner, slot], peer)
                case CancelSend(owner, version, peer):
                    self.outbound.cancel(owner, version, peer)
                case Tell(report):
                    self.report(report)
                case Withdraw(owner, version):
                    if owner in self.workers:
                        self.workers[owner].send(Abort(version, "withdrawn"))
                case Upload(owner, slot, version):
                    assert self.storing is not None
                    self.storing.upload(owner, slot, version)
                case Free(owner, slot):
                    self.vault.free(owner, slot)
                case Damaged(owner, version):
                    self._damaged(owner, version)
        if any(isinstance(effect, Free) for effect in effects):
            self._use_room()

    def _use_room(self) -> None:
        """Makes slots that there was no room for before: a replica's at once, a worker's own when it asks."""
        for owner in self.vault.short():
            if not self.host.owns(owner):
                self.vault.top_up(owner)
                self.inbound.entrust_all()
            elif owner in self.workers:
                self.workers[owner].send(Room())

    def report(self, message: PeerMessage) -> None:
        if self._leader is not None:
            self._leader.take(message)
        elif self._member is not None:
            self._member.take(message)

    # -- decisions

    def on_decision(self, message: PeerMessage) -> None:
        """Carries out a decision of the leader."""
        match message:
            case Commit(version, freeze, roots=roots):
                self.counters["committed"] += 1
                self._progressed = True
                self.perform(self.host.on_commit(version, freeze, roots))
                self.tell_workers(message)
            case Abort(version):
                self.counters["aborted"] += version not in self.host.aborted  # it is repeated for workers that may not have heard it
                self.perform(self.host.on_abort(version))
                self.tell_workers(message)
            case Holders(epoch, excluded, newly):
                self._holders_changed(epoch, sorted(excluded), sorted(newly))
            case Thaw(version, error):
                self.counters["failed_uploads" if error else "uploads"] += 1
                if self.storing is not None:
                    self.storing.over(version, error)
            case Paced(interval=interval, why=why):
                self.outbound.pacing.paced(interval)
                self.log(f"a snapshot every {interval} steps: {why}")
                self.tell_workers(message)
            case Fatal(error, text):
                self.log(text)
                self.tell_workers(Failed(error=error, text=text, fatal=True))
            case Notice(text=text):
                self.log(text)
                self.tell_workers(message)
            case AllFinished(unstored=unstored):
                self.finished = self._progressed = True
                self.finishing, self.unstored = False, unstored
                if unstored:
                    self.log(f"the job has finished, and its last upload has not: {unstored}")
                self.perform(self.host.finish())
            case _:
                raise PeerError(f"{kind_of(message)!r} is not a decision")

    def _holders_changed(self, epoch: int, excluded: list[tuple[int, str]], newly: list[tuple[int, str]]) -> None:
        self.excluded = excluded
        late = ", ".join(f"host {host} (shard of rank {owner})" for owner, host in excluded)
        text = f"commits go on without {late}, which did not acknowledge in time" if excluded else "every replica counts again"
        text = f"epoch {epoch}: {text}"
        self.notify(text)
        for owner, peer in newly:
            self.outbound.pacing.left_out(owner, peer)
            self.perform(self.host.on_exclude(owner, peer))

    def _damaged(self, owner: int, version: Version) -> None:
        self.counters["damaged"] += 1
        self.notify(f"host {self.host.name}'s copy of rank {owner}'s shard of {version} is not the one that its owner made: discarded")

    def rejoin_reports(self) -> list[PeerMessage]:
        uploading, said = (self.storing.uploader.version, self.storing.said) if self.storing is not None else (None, [])
        rejoin = Rejoin(committed=self.host.committed, uploading=uploading, roots=self.host.heard_roots)
        need = self.outbound.pacing.need
        return [rejoin, *self.host.reports(), *said, *([need] if need is not None else [])]

    def notify(self, text: str) -> None:
        """Tells the workers something for the user."""
        self.log(text)
        self.tell_workers(Notice(text=text))

    @property
    def patience(self) -> float:
        """Seconds for which the last upload of the job is tried again."""
        settings = self.spec.storage if self.spec is not None else None
        return StorageConfig.model_validate(settings).patience if settings is not None else 0.0

    @property
    def uploading(self) -> bool:
        """Whether this host still reads a slot for storage, or waits for others to do so before it writes the manifest."""
        awaited = self._leader is not None and (self._leader.book.uploading is not None or self._leader.ending)
        return awaited or (self.storing is not None and self.storing.uploader.busy)

    def inject(self, message: Inject) -> None:
        """Injects a fault."""
        copies = self.vault.damage(message.owner)
        self.log(f"fault injection: flipped a bit in {copies} copies of rank {message.owner}'s shard")

    def status(self) -> dict[str, object]:
        """The figures that ``gemini status`` shows of this stream."""
        spec, committed = self.spec, self.host.committed
        ages = [slot.age for slot in self.vault.inventory() if slot.version == committed]
        return {
            "incarnation": str(spec.incarnation) if spec else None,
            "world_size": spec.world_size if spec else None,
            "leader": spec.leader if spec else None,
            "committed": committed.iteration if committed else None,
            "committed_age": min(ages, default=None),
            "command": self.launch.command if self.launch is not None else [],
            "finished": self.finished,
            "excluded": self.excluded,
            "storage": self.storing.uploader.status() if self.storing is not None else None,
            "counters": self.counters,
            "traffic": self._outbound.pacing.status() if self._outbound is not None else None,
            "gradients": {str(rank): figures for rank, figures in sorted(self.figures.items())},
            "shards": {
                str(owner): [f"{s.state}:{s.version.iteration if s.version else '-'}" for s in slots.slots.values()]
                for owner, slots in self.host.shards.items()
            },
        }


class _Tracked:
    """A handler whose end is noticed."""

    def __init__(self, inner: Handler, gone: Callable[[str], None]) -> None:
        self._inner, self._gone = inner, gone
        self.on_message, self.on_bytes = inner.on_message, inner.on_bytes

    def on_lost(self, reason: str) -> None:
        self._gone(reason)
        self._inner.on_lost(reason)
