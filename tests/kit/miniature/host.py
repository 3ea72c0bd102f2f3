"""One host: its agent around ``protocol.Host`` and, where it leads, ``ledger.Ledger``; its memory, its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gemini_ft.core.decisions import Abort, Cadence, Commit, Decision, Holders, Thaw, WriteManifest
from gemini_ft.core.effects import (
    CancelSend,
    Completed,
    Copies,
    Damaged,
    Effect,
    Free,
    Gathered,
    GatheredSkips,
    Grant,
    Lacking,
    Send,
    Skipped,
    Tell,
    Upload,
    Withdraw,
)
from gemini_ft.core.gathering import Bundles, Gathering
from gemini_ft.core.ledger import Ledger
from gemini_ft.core.protocol import Host
from gemini_ft.core.slots import Slot, SlotState
from gemini_ft.core.tree import Succession, Ways, candidates, collectors
from gemini_ft.core.versions import Version
from miniature.transfer import Fetch, Link, Outgoing
from miniature.truth import check
from miniature.wire import CHUNKS, Connection, Memory, Step
from miniature.worker import Session, Uploading, Worker

if TYPE_CHECKING:
    from miniature.job import Job

PATIENCE = 10.0  # seconds: replica_timeout


class Node:
    """One host. Its agent may be restarted alone, its workers may be killed alone; the memory is theirs together."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name
        self.alive = True
        self.memory: dict[tuple[int, int], Memory] = {}
        self.workers: list[Worker] = []
        self.manifest: WriteManifest | None = None  # about to be written
        self.session: Session | None = None
        self.interrupted: Session | None = None  # of an agent that was restarted, until a worker of it has come back
        self.greetings = 0  # which no restart of the agent takes back: a clock of the machine
        self.adopted = False  # a slot that was about to be freed is kept by an agent that was not there then
        self._forget()

    def _forget(self) -> None:
        """A new agent process."""
        self.host = Host(name=self.name)
        self.links: dict[str, Link] = {}
        self.fetches: list[Fetch] = []
        self.uploads: list[Uploading] = []
        self.uploading: Version | None = None
        self.said_of_uploads: list[tuple[Any, ...]] = []
        self.ledger: Ledger | None = None
        self._let_manifest_go()
        self.ways: Ways[Member] = Ways()
        self.gathering: Gathering | None = None  # of a collector
        self.below: dict[str, Below] = {}  # host that reports here -> its newest connection
        self.leader: LeaderLink | None = None
        self.succession: Succession | None = None
        self.obeyed = 0  # the newest epoch of which a decision was carried out
        self.written: dict[Version, list[int]] = {}  # owners whose shards this host has stored, of uploads that are not over
        self.orphans: list[tuple[Version, int]] = []  # the same, of uploads during which the leader was lost

    def _let_manifest_go(self) -> None:
        """It may arrive after the end of the process that has sent it, or of its time as the leader."""
        if self.manifest is not None:
            self.job.storage.under_way.append(self.manifest)
        self.manifest = None

    def events(self) -> Iterator[Step]:
        for worker in self.workers:
            yield from worker.events()
        if self in self.job.stopped:
            return
        for link in self.links.values():
            yield from link.events()
        for upload in self.uploads:
            yield upload, upload.read
        if self.leader is not None:
            yield from self.leader.events()
        for name in self.missing():
            yield self, partial(self._call, name)
        if self.gathering is not None and self.gathering.waiting:
            yield (self.gathering, "late"), self.send_gathered
        if self.leader is not None and self.leader.bundles.waiting:
            yield (self.leader, "late"), self.leader.flush
        if self.manifest is not None:
            yield self, self._write_manifest

    def current(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.session is self.session]

    # -- incarnations

    def open(self, session: Session) -> None:
        self._close_session()
        self.interrupted = None
        self.perform(self.host.open(session.holders, session.resumed, session.roots, session.incarnation))
        self._connect(session)
        self.workers += [Worker(self, rank, session) for rank, name in enumerate(session.hosts) if name == self.name]
        for owner, holders in session.holders.items():
            if session.resumed is not None and session.sources and self.name in holders:
                self._rebuild(owner, session.resumed, [name for name in session.sources[owner] if name != self.name])

    def _connect(self, session: Session, goes_on: bool = False) -> None:
        self.session = session
        order = candidates(session.hosts, session.leader, session.ways)
        self.succession = Succession(self.name, order, len(set(session.hosts)), self.job.now, timeout=1.0, goes_on=goes_on)
        if self.succession.begins_as_leader:
            self._lead(0)
        else:
            self._report_up()

    # -- who leads

    def _lead(self, epoch: int) -> None:
        assert self.session is not None
        assert self.succession is not None
        link, self.leader = self.leader, None
        if link is not None and link.connection is not None:
            link.connection.close_near(tell=False)
        begins = not self.succession.follow(epoch, self.job.now)
        self.succession.reach()
        start = self.session.resumed.iteration if self.session.resumed else 0
        cadence = Cadence(every_steps=self.job.every, every_seconds=None, last_iteration=start) if self.job.every else None
        self.ledger, self.ways = Ledger(self.host.holders, self.host.committed, PATIENCE, cadence), Ways()
        if not begins:
            self.hear("rejoin", self.host.committed, self.uploading, self.host.heard_roots, "")
            for frame in [*(("report", report) for report in self.host.reports()), *self.said_of_uploads]:
                self.hear(*frame)

    def lead_unasked(self, epoch: int) -> None:
        """There is no third host that could ask."""
        self._lead(epoch)

    def _report_up(self) -> None:
        assert self.session is not None
        self.leader = LeaderLink(self, self.session.ways.get(self.name, ())[:-1])
        if self.name in collectors(self.session.ways):
            self.gathering = Gathering(self.name, self.host.holders)

    def follow(self, epoch: int) -> None:
        """Hears that an epoch is led."""
        if self.succession is None or not self.succession.follow(epoch, self.job.now):
            return
        if self.ledger is not None:
            self._let_manifest_go()
            self.ledger = None
            for connection in self.job.connections_to(self):
                if isinstance(connection.far, Member):
                    connection.close_far()
            self.ways = Ways()
            self._report_up()
        elif self.leader is not None:
            self.leader.leave()

    def join(self, host: str, epoch: int, promised: int) -> Member | Below | Refusal:
        """Decides what a host is told that wants to report here."""
        assert self.succession is not None
        self.follow(promised)
        if self.ledger is None and self.succession.is_asked(epoch, self.job.now):
            self._lead(epoch)
        if self.ledger is not None:
            return Member(self)
        if self.gathering is not None and host != self.succession.leader:
            return Below(self)
        return Refusal(self)

    def missing(self) -> list[str]:
        """The hosts that have not come to this one, which leads: it makes itself known to them."""
        if self.ledger is None or self.session is None or self.succession is None or not self.succession.epoch:
            return []
        here = {host for way in self.ways.open for host in self.ways.through(way)}
        lost = [name for name in dict.fromkeys(self.session.hosts) if name != self.name and name not in here]
        behind = [name for name in lost if self.job.accepts(self, name)]
        return [name for name in behind if self.job.nodes[name].epoch != self.succession.epoch]

    @property
    def epoch(self) -> int:
        return self.succession.epoch if self.succession is not None else -1

    def _call(self, name: str) -> None:
        """Both hear of the newer epoch, if it is not the same."""
        other = self.job.nodes[name]
        epoch, told = self.epoch, other.epoch
        other.follow(epoch)
        self.follow(told)

    def _close_session(self) -> None:
        """The agent's duty: nothing of the former incarnation comes in any more, not even what has arrived."""
        for link in self.links.values():
            link.close()
        for connection in self.job.connections_to(self):
            connection.close_far(tell=connection.role == "fetch")
        for fetch in list(self.fetches):
            fetch.cancel()
        if self.leader is not None and self.leader.connection is not None:
            self.leader.connection.close_near()
        self.links, self.below, self.ways = {}, {}, Ways()
        self._let_manifest_go()
        self.ledger = self.gathering = self.leader = self.uploading = self.succession = None
        self.obeyed = 0
        self.said_of_uploads.clear()
        self.written, self.orphans = {}, []

    def restart_agent(self) -> None:
        """The agent died and another took its place; each worker hands over the slots that it holds, one worker after the other."""
        session, memory = self.session, self.memory
        assert session is not None
        self.job.stopped.discard(self)
        self.job.disconnect(self)
        self._forget()
        self.adopted, self.session, self.interrupted, self.memory = True, None, session, {}
        self.job.forgotten(self)
        alive = [worker for worker in self.workers if worker.alive]
        mates = [worker for worker in alive if worker.session is session]
        for worker in alive:
            worker.agent_restarted()
        for (owner, _), each in sorted(memory.items()):
            each.readers.clear()
            writers = [worker for worker in alive if worker in each.mapped]
            keepers = [worker for worker in writers if worker in mates] or writers or mates[owner % len(mates) :]
            keepers[0].held.append((owner, each))

    def _take_back(self, worker: Worker, reached: int) -> None:
        """What a worker holds is this agent's again; the first worker of the interrupted session lets it go on."""
        brought, past = False, self.session is not None and worker.session is not self.session
        for owner, memory in worker.held:
            if memory.header is None or self.host.slots(owner).find(memory.header) is None:
                index = max(self.host.slots(owner).slots, default=-1) + 1
                self.memory[owner, index] = memory
                root = memory.root(memory.header, owner) if memory.header is not None else ""
                self.host.adopt(owner, index, memory.header, root).retired |= past or self._is_foreign(memory)
                brought |= memory.header is not None
        worker.held = []
        if worker.session is self.interrupted:
            session, self.interrupted = worker.session, None
            self.host.reopen(session.holders, worker.committed, session.incarnation)
            self._connect(session, goes_on=True)
        if worker.session is self.session:
            for report in self.host.reports():
                self.say("report", report)  # the agent's duty: a new ledger hears its own host too
            if reached > (worker.session.resumed.iteration if worker.session.resumed else 0):
                self.perform(self.host.arrived(worker.rank, Version(worker.session.incarnation, reached)))
            self.perform(self.host.send_again(worker.rank))
        self.job.returned(self, brought)

    # -- memory

    def ensure(self, owner: int, shape: int, count: int, worker: Worker | None = None) -> list[int]:
        """Have slots of one shape in rotation that nobody of the past may write to (the agent's duty)."""
        slots = self.host.slots(owner)
        mine = [index for index, slot in slots.slots.items() if not slot.retired]
        if any(self.memory[owner, index].shape != shape or self._is_foreign(self.memory[owner, index]) for index in mine):
            fresh, effects = self.host.renew(owner, count)
            self.perform(effects)
        else:
            fresh = slots.add(max(0, count - len(mine)))
        for slot in fresh:
            self.memory[owner, slot.index] = Memory(shape)
        return [index for index, slot in slots.slots.items() if not slot.retired]

    def _is_foreign(self, memory: Memory) -> bool:
        """Whether a worker of a former incarnation, not proven dead, may still write to it."""
        present = self.session or self.interrupted
        return any(worker.session is not present and not worker.known_dead for worker in memory.mapped)

    def grant(self, owner: int, choose: Callable[[], Slot | None]) -> Memory | None:
        slot = choose()
        self._sync_headers()
        return self._overwrite(owner, slot.index) if slot is not None else None

    def _overwrite(self, owner: int, index: int) -> Memory:
        memory = self.memory[owner, index]
        check(not memory.readers, f"{self.name}: rank {owner}'s slot {index} was granted while somebody reads it")
        check(not self.job.is_written(memory), f"{self.name}: rank {owner}'s slot {index} was granted while somebody writes to it")
        memory.header = None
        return memory

    def _sync_headers(self) -> None:
        for owner, slots in self.host.shards.items():
            for index, slot in slots.slots.items():
                if slot.state is not SlotState.COMPLETE and (owner, index) in self.memory:
                    self.memory[owner, index].header = None

    def _rebuild(self, owner: int, version: Version, sources: list[str]) -> None:
        slots = self.host.slots(owner)
        if not sources or slots.complete_version(version) is not None:
            return
        self.ensure(owner, self.job.shape_at(version.iteration), 2)
        memory = self.grant(owner, lambda: self.host.rebuild(owner, version))
        if memory is None:
            return

        def done(whole: bool) -> None:
            if whole:
                memory.header = version
            root = memory.root(version, owner)
            self.perform(self.host.rebuilt(owner, version, root) if whole else self.host.receive_failed(owner, version))

        self.fetch(Fetch(self, owner, version, memory, done), sources[0])

    def fetch(self, fetch: Fetch, source: str) -> None:
        self.fetches.append(fetch)
        fetch.start(source)

    # -- what workers say

    def on_worker(self, worker: Worker, kind: str, iteration: int, *args: Any) -> None:
        if kind == "adopt":
            self._take_back(worker, iteration)
        if worker.session is not self.session:
            return  # the agent's duty: superseded workers are told to stop, and not obeyed
        owner, version = worker.rank, Version(worker.session.incarnation, iteration)
        slot = self.host.slots(owner).find(version)
        writing = slot is not None and slot.state is SlotState.WRITING
        match kind:
            case "reserve" if args[0] != worker.shape:
                worker.shape = args[0]
                for index in self.ensure(owner, worker.shape, 3 if self.job.every else 2):
                    self.memory[owner, index].mapped.append(worker)
            case "request":
                self.perform(self.host.request(owner, version))
            case "chunk" if writing:
                for out in self._outgoing(owner, version):
                    out.copied = args[0] + 1
            case "copied":
                details = (f"layout {worker.shape}", *args)
                for out in self._outgoing(owner, version) if writing else ():
                    out.end = details
                if slot is not None and writing:
                    self.memory[owner, slot.index].header = version
                self.perform(self.host.completed(owner, version, *details))
            case "give_up":
                self.perform(self.host.give_up(owner, version, "late"))

    def _outgoing(self, owner: int, version: Version) -> Iterator[Outgoing]:
        for link in self.links.values():
            yield from (out for out in link.active if (out.owner, out.version) == (owner, version))

    def on_dead(self, worker: Worker) -> None:
        worker.known_dead, worker.held = True, []
        if worker.session is self.session:
            self.perform(self.host.worker_lost(worker.rank))

    def _tell(self, owner: int, *frame: Any) -> None:
        for worker in self.current():
            if worker.rank == owner:
                worker.inbox.append(frame)

    # -- effects

    def perform(self, effects: list[Effect]) -> None:
        self._sync_headers()
        for effect in effects:
            match effect:
                case Grant(owner=owner, slot=index, version=version):
                    memory = self._overwrite(owner, index)
                    check(memory.shape == self.job.shape_at(version.iteration), f"{version} was granted a slot of another shape")
                    self._tell(owner, "granted", version.iteration, memory)
                case Send(owner=owner, slot=index, version=version, peer=peer):
                    out = Outgoing(owner=owner, version=version, slot=index, memory=self.memory[owner, index])
                    out.memory.readers.append(out)
                    if out.memory.header == version:  # copied with an agent before this one
                        out.copied, out.end = CHUNKS, (f"layout {out.memory.shape}", "", out.memory.root(version, owner))
                    self.links.setdefault(peer, Link(self, peer)).active.append(out)
                case CancelSend(owner, version, peer):
                    self.links[peer].cancel(owner, version)
                case Tell(report):
                    self.say("report", report)
                case Withdraw(owner, version):
                    self._tell(owner, "aborted", version.iteration)
                case Upload(owner=owner, slot=index, version=version):
                    self._upload(owner, index, version)
                case Lacking(owner, version):
                    self.said_of_uploads.append(("uploaded", owner, version, "no copy"))
                    self.say("uploaded", owner, version, "no copy")
                case Free(owner=owner, slot=index):
                    self._free(owner, index)
                case Damaged(owner, version):
                    check(False, f"{self.name}: rank {owner}'s {version} had another root than it was committed with")

    def _upload(self, owner: int, index: int, version: Version) -> None:
        assert self.session is not None
        self.host.hold(owner, version, "upload")  # the agent's duty: a thaw may come before the thread's end
        upload = Uploading(self, self.session, owner, version, index, self.memory[owner, index])
        upload.memory.readers.append(upload)
        self.uploads.append(upload)
        self.uploading = version

    def _free(self, owner: int, index: int) -> None:
        memory = self.memory.pop((owner, index))
        check(not memory.readers, f"{self.name}: rank {owner}'s slot {index} was freed while somebody reads it")
        check(not self.job.is_filled(memory), f"{self.name}: rank {owner}'s slot {index} was freed while a peer fills it")

    # -- the leader's part

    def say(self, *frame: Any) -> None:
        """To the leader; on its own host at once."""
        if self.ledger is not None:
            self.hear(*frame)
        elif self.leader is not None:
            self.leader.say(*frame)

    def hear(self, kind: str, *args: Any) -> None:
        book, now = self.ledger, self.job.now
        if book is None:
            return
        match kind:
            case "report":
                self._apply(book.report(args[0], now))
            case "uploaded":
                owner, version, error = args
                self._apply(book.upload_over(version, error) if error else book.uploaded(owner, version, "record"))
            case "rejoin":
                committed, uploading, roots, host = args
                self._apply(book.rejoin(committed, now, roots, host))
                if book.uploading is not None and uploading != book.uploading and self.manifest is None:
                    self._apply(book.upload_over(book.uploading, "an agent was restarted"))
                if uploading is not None and uploading != book.uploading:
                    self._announce(Thaw(uploading, "the leader was lost", unclear=True))

    def hear_of(self, host: str, way: Member, kind: str, *args: Any) -> None:
        """What another host says, in the order in which it comes: here, or by way of a collector."""
        if kind == "rejoin":
            epoch, attempt, *args = args  # type: ignore[assignment]
            if epoch != self.epoch or host == self.name or not self.ways.greet(host, attempt, way):
                return
            way.tell("admitted", host, attempt)
        elif not self.ways.counts(host, way):
            return
        self.hear(kind, *args)

    def tick(self) -> None:
        if self.ledger is not None:
            stopped = {node.name for node in self.job.stopped}
            behind = [host for way in self.ways.open if way.host in stopped for host in self.ways.through(way)]
            self._apply(self.ledger.tick(self.job.now, {*stopped, *behind}))

    # -- a collector

    def collect(self, host: str, kind: str, *args: Any) -> None:
        """What a host says that reports here. The agent's duty: nothing goes up before its greeting on the present connection."""
        assert self.leader is not None
        assert self.gathering is not None
        if not self.leader.is_open or (kind != "rejoin" and host not in self.gathering.greeted):
            return
        if kind == "rejoin" and args[0] != self.leader.epoch:
            return  # it has greeted before it has heard the word on the present way
        assert self.leader.connection is not None
        if kind == "report" and isinstance(args[0], Copies):
            self.gather(args[0])
            return
        if kind == "report" and isinstance(args[0], Skipped) and self.gathering.skip(host, args[0]):
            return  # it goes up at any time
        self.send_gathered()
        if kind == "rejoin":
            self.gathering.greet(host, args[1])
        self.leader.connection.forward.append(("relayed", host, kind, *args))

    def gather(self, copies: Copies) -> None:
        assert self.gathering is not None
        if self.gathering.add(copies):
            self.send_gathered()

    def send_gathered(self) -> None:
        assert self.leader is not None
        assert self.leader.connection is not None
        assert self.gathering is not None
        for told in self.gathering.take():
            frame = ("relayed", told.host, "report", told) if isinstance(told, Copies) else ("report", told)
            self.leader.connection.forward.append(frame)

    def pass_down(self, hosts: Sequence[str], decision: Decision, epoch: int) -> None:
        for host in [host for host in hosts if self.gathering is not None and host in self.gathering.admitted]:
            self.below[host].tell("decision", decision, epoch)

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, WriteManifest):
                self.manifest = decision
            else:
                self.job.witness(self, decision)
                self._announce(decision)

    def _write_manifest(self) -> None:
        assert self.manifest is not None
        assert self.ledger is not None
        version, self.manifest = self.manifest.version, None
        self.job.storage.write_manifest(version, set(self.ledger.holders))
        self._apply(self.ledger.upload_over(version))

    def _announce(self, decision: Decision) -> None:
        general, apart = decision, frozenset[str]()
        assert self.ledger is not None
        if isinstance(decision, Commit):
            general, apart = replace(decision, roots={}, agreed=True), frozenset(self.ledger.apart(decision))
        for way, hosts in self.ways.audiences(apart):
            is_apart = hosts is not None and hosts <= apart
            told = self.ledger.addressed(decision, next(iter(hosts))) if is_apart and hosts and isinstance(decision, Commit) else general
            way.tell(*(("decision", told, self.epoch) if hosts is None else ("relayed", sorted(hosts), told, self.epoch)))
        self.obey(self.ledger.addressed(decision, self.name) if isinstance(decision, Commit) else decision, self.epoch)

    def _check_roots(self, version: Version) -> None:
        """A host that is told that its copies agreed holds all of them, with the roots that it would have heard."""
        assert self.session is not None
        held = [owner for owner, names in self.session.holders.items() if self.name in names]
        missing = [owner for owner in held if self.host.slots(owner).complete_version(version) is None]
        check(not missing, f"{self.name} is told that its copies of {version} agree, and has none of ranks {missing}")
        for owner, root in self.host.committed_roots(version).items():
            slot = self.host.slots(owner).complete_version(version)
            memory = self.memory[owner, slot.index] if slot is not None else None
            check(memory is not None and memory.root(version, owner) == root, f"{self.name} took another root of rank {owner}'s {version}")

    def obey(self, decision: Decision, epoch: int) -> None:
        """Commits and aborts name an iteration, of the present incarnation. ``epoch``: of the leader that has decided so."""
        assert self.session is not None
        check(epoch == self.epoch >= self.obeyed, f"{self.name}, in epoch {self.epoch}, obeys {decision} of epoch {epoch}")
        self.obeyed = epoch
        match decision:
            case Commit(version=version, freeze=freeze, digest_at=digest_at, roots=roots, agreed=agreed):
                self.perform(self.host.on_commit(Version(self.session.incarnation, version.iteration), freeze, roots, agreed))
                if agreed:
                    self._check_roots(version)
                for worker in self.current():
                    worker.inbox.append(("committed", version.iteration, digest_at))
            case Abort(version):
                self.perform(self.host.on_abort(Version(self.session.incarnation, version.iteration)))
            case Holders(excluded=excluded, newly=newly):
                if self.leader is not None:
                    self.leader.bundles.exclude(excluded)
                if self.gathering is not None:
                    self.gathering.exclude(excluded)
                for owner, peer in newly:
                    self.perform(self.host.on_exclude(owner, peer))
            case Thaw(version, error, unclear):
                if self.uploading == version:
                    self.uploading = None
                    self.said_of_uploads.clear()
                self._clear_away(version, error, unclear)
                self.perform(self.host.thawed(version))
            case _:
                check(False, f"nobody disagrees here, but: {decision}")

    def _clear_away(self, version: Version, error: str, unclear: bool) -> None:
        """The agent's duty: shards of uploads that have failed are deleted, but not while a manifest may come to name them."""
        mine = [(version, owner) for owner in self.written.pop(version, [])]
        if error and unclear:
            mine, self.orphans = [], [*self.orphans, *mine]
        else:
            storage, orphans, self.orphans = self.job.storage, self.orphans, []
            overtaken = [each for each in orphans if each[0] not in storage.manifests]
            storage.overtaken |= {each for each, _ in overtaken}
            mine = [*(each for each in mine if error and each not in orphans), *overtaken]
        for key in mine:
            self.job.storage.objects.pop(key, None)


class Refusal:
    """The end of a connection of a host that this one cannot help: it hears which epoch is led."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection: Connection | None = None

    def welcome(self) -> None:
        assert self.connection is not None
        self.connection.backward.append(("way_up", False, self.node.epoch))

    def on(self, kind: str, *args: Any) -> None:
        check(False, f"{kind} to a host that has refused")

    def lost(self) -> None:
        pass


class Member:
    """The leader's end of another host's connection, on which a collector passes on what others say."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection: Connection | None = None

    @property
    def host(self) -> str:
        assert self.connection is not None
        return self.connection.names[0]

    def on(self, kind: str, *args: Any) -> None:
        if kind == "report" and isinstance(args[0], Gathered | GatheredSkips):
            self.node.hear(kind, args[0].only({host for host in args[0].hosts if self.node.ways.counts(host, self)}))
        elif kind == "relayed":
            self.node.hear_of(args[0], self, *args[1:])
        else:
            self.node.hear_of(self.host, self, kind, *args)

    def tell(self, *frame: Any) -> None:
        assert self.connection is not None
        self.connection.backward.append(frame)

    def welcome(self) -> None:
        self.tell("way_up", True, self.node.epoch)

    def lost(self) -> None:
        self.node.ways.lose(self)


class Below:
    """A collector's end of the connection of a host that reports to it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection: Connection | None = None
        self._host = ""

    def join(self, host: str) -> None:
        self._host, earlier = host, self.node.below.get(host)
        if earlier is not None and earlier.connection is not None:
            earlier.connection.close_far()
        self.node.below[host] = self

    def welcome(self) -> None:
        link = self.node.leader
        assert link is not None
        self.tell("way_up", link.is_open, link.epoch)

    def on(self, kind: str, *args: Any) -> None:
        if self.node.below.get(self._host) is self:
            self.node.collect(self._host, kind, *args)

    def tell(self, *frame: Any) -> None:
        assert self.connection is not None
        self.connection.backward.append(frame)

    def lost(self) -> None:
        if self.node.below.get(self._host) is self and self.node.gathering is not None:
            del self.node.below[self._host]
            self.node.gathering.leave(self._host)


class LeaderLink:
    """Another host's end: reports go out, decisions come in. After a loss, whatever is undecided is said again, perhaps to another."""

    def __init__(self, node: Node, names: Sequence[str]) -> None:
        self.node, self.names = node, names  # of collectors
        self.connection: Connection | None = None
        self.is_open = False
        self.epoch = 0  # on the way that is open
        self.in_vain = 0  # hosts asked since the leader was reached
        self.bundles = Bundles(node.name, node.host.holders)

    @property
    def succession(self) -> Succession:
        assert self.node.succession is not None
        return self.node.succession

    def events(self) -> Iterator[Step]:
        """Any host may be dialled that takes reports, or may come to lead; and a leader is given up that is lost."""
        succession, job, node = self.succession, self.node.job, self.node
        if self.connection is not None:
            if self.connection.far.node in job.stopped and self.connection.names[1] == succession.leader:
                yield self, self.give_up
            return
        for name in filter(partial(job.accepts, node), self.names):
            yield self, partial(self.dial, name)
        if succession.leader != node.name and job.accepts(node, succession.leader):
            if self._is_worth_it(succession.leader, succession.epoch):
                yield self, partial(self.dial, succession.leader)
        elif not succession.suspects(job.now) and job.phase == "running":  # while it begins, the others may be behind
            yield self, self.give_up
        if (own := succession.own_turn(job.now)) is not None:
            yield self, partial(node.lead_unasked, own)
        for epoch in succession.to_ask(job.now, rounds=9):
            if job.accepts(node, succession.leader_of(epoch)) and self._is_worth_it(succession.leader_of(epoch), epoch):
                yield self, partial(self.dial, succession.leader_of(epoch), epoch)

    def _is_worth_it(self, name: str, epoch: int) -> bool:
        """Whether a host is asked: a few times in vain, and then when it will answer otherwise, as it is asked for ever."""
        other = self.node.job.nodes[name]
        assert other.succession is not None
        news = other.ledger is not None or other.epoch > self.node.epoch or other.succession.is_asked(epoch, self.node.job.now)
        return news or self.in_vain < 3

    def give_up(self) -> None:
        """The leader is lost, or seems to be."""
        self.leave()
        self.succession.give_up()

    def leave(self) -> None:
        if self.connection is not None:
            self.connection.close_near()

    def say(self, *frame: Any) -> None:
        """At once if there is nothing more to say of that version, or it is no report of a copy; else ``flush`` happens at any time."""
        if not self.is_open:
            return
        assert self.connection is not None
        if frame[0] == "report" and isinstance(frame[1], Completed):
            if self.bundles.add(frame[1]):
                self.flush()
            return
        self.flush()
        if self.node.gathering is not None:
            self.node.send_gathered()
        self.connection.forward.append(frame)

    def flush(self) -> None:
        assert self.connection is not None
        for copies in self.bundles.take():
            if self.node.gathering is not None:
                self.node.gather(copies)
            else:
                self.connection.forward.append(("report", copies))

    def dial(self, name: str, epoch: int | None = None) -> None:
        asked = self.succession.epoch if epoch is None else epoch
        self.connection = self.node.job.connect(self.node, name, "report", self, asked)

    def _greet(self) -> None:
        host = self.node.host
        self.node.greetings += 1
        self.bundles.forget()
        known = host.committed, self.node.uploading, host.heard_roots, self.node.name
        self.say("rejoin", self.succession.epoch, self.node.greetings, *known)
        for frame in [*(("report", report) for report in host.reports()), *self.node.said_of_uploads]:  # the agent's duty
            self.say(*frame)
        self.flush()

    def on(self, kind: str, *args: Any) -> None:
        node = self.node
        match kind:
            case "way_up":
                self._on_way_up(*args)
            case "admitted" if node.gathering is not None:
                node.gathering.admit(*args)
            case "relayed":
                hosts, *told = args
                if node.name in hosts:
                    node.obey(*told)
                node.pass_down(hosts, *told)
            case "decision":
                node.obey(*args)
                node.pass_down(sorted(node.gathering.admitted) if node.gathering is not None else [], *args)

    def _on_way_up(self, is_open: bool, epoch: int) -> None:
        assert self.connection is not None
        self._shut()
        is_leader, is_collector = self.connection.names[1] == self.succession.leader, self.connection.names[1] in self.names
        is_news = self.succession.follow(epoch, self.node.job.now)
        if epoch < self.succession.epoch or not (is_open or is_collector):
            self.in_vain += not is_news
            self.leave()
            if is_leader and not is_news:
                self.succession.give_up()
        elif is_open:
            self.succession.reach()
            self.is_open, self.epoch, self.in_vain = True, epoch, 0
            if self.node.gathering is not None:
                self.node.gathering.begin()
                self._tell_below()
            self._greet()
        else:
            self.succession.lose(self.node.job.now)

    def _tell_below(self) -> None:
        for below in self.node.below.values():
            below.tell("way_up", self.is_open, self.epoch)

    def _shut(self) -> None:
        was_open, self.is_open = self.is_open, False
        self.bundles.forget()
        if was_open and self.node.gathering is not None:
            self.node.gathering.begin()
            self._tell_below()

    def lost(self) -> None:
        if self.connection is not None and self.connection.names[1] not in self.names:
            self.succession.lose(self.node.job.now)
        self.connection = None
        self._shut()
