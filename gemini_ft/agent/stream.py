"""One stream of snapshots on one host: turns messages of workers and peers into protocol events, and effects and decisions into deeds.

Everything runs on the agent's event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from gemini_ft import failpoints
from gemini_ft.agent.autopsy import log_stacks
from gemini_ft.agent.context import RunContext, StreamContext
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.memory.slot_store import SlotDonor
from gemini_ft.agent.own_shards import OwnShards
from gemini_ft.agent.replication.rebuild import Rebuilding
from gemini_ft.agent.replication.receive import Inbound
from gemini_ft.agent.session import AgentSession, Incoming
from gemini_ft.agent.storing import Stagings
from gemini_ft.agent.tasks import Tasks
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.decisions import Abort, Commit, Fatal, Holders, Thaw
from gemini_ft.core.effects import CancelSend, Damaged, Effect, Free, Grant, Lacking, Send, Tell, Upload, Withdraw
from gemini_ft.core.goodput import PastTime
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, PeerError, RecoveryError, ReplicaDivergedError, SupersededError
from gemini_ft.wire import worker_messages as wire
from gemini_ft.wire.messages import Failed, Notice, Paced, kind_of
from gemini_ft.wire.peer_messages import (
    AllFinished,
    AskAccount,
    Autopsied,
    DrainHost,
    Examine,
    PeerMessage,
    ReportAccount,
    ReportFinished,
    Stragglers,
    UploadSoon,
)


class Stream:
    """The shards this host owns or holds for one stream, and its share of the commit."""

    def __init__(self, name: str, run: RunContext) -> None:
        self.context = StreamContext(name, run, self)
        self.launch: wire.Launch | None = None  # that opened the last session
        self.inherited: wire.SessionSpec | None = None  # of the last session of an agent before this one
        self.finished = False
        self.finishing = False  # a rank of this host has, and of the others and the last upload it is not known
        self.unstored = ""  # why the last upload failed for good
        self.attempts = 0  # sessions in a row that resumed the same version and committed nothing
        self._excused = False  # the present attempt does not count
        self.given_up: set[Version] = set()
        self._divergence: Fatal | None = None  # of the ranks of this session
        self._excluded: list[tuple[int, str]] = []
        self._figures: dict[int, dict[str, dict[str, float]]] = {}  # rank -> its last figures of the gradients
        self._progressed = True
        self._candidates: set[WorkerConnection] = set()  # workers that have asked for the inventory, to open a new incarnation
        self._misinformed: set[WorkerConnection] = set()  # those of them whose inventory lacks a copy that was handed back after it
        self._inbound = Inbound(self.context)
        self._own = OwnShards(self, self._inbound)
        self.present_session: AgentSession | None = None
        self.incoming = Incoming(self, self._inbound)
        self._rebuilding: Rebuilding | None = None
        self._tasks = Tasks()
        self.stagings = Stagings(self)

    # -- sessions

    @property
    def session(self) -> AgentSession:
        """The present session, of which there must be one."""
        assert self.present_session is not None
        return self.present_session

    @property
    def last_spec(self) -> wire.SessionSpec | None:
        """The last session, perhaps of an agent before this one."""
        return self.context.spec or self.inherited

    @property
    def stuck_at(self) -> Version | None:
        """The version that the last session resumed, if nothing has been committed since."""
        return self.context.spec.resumed if self.context.spec is not None and not self._progressed else None

    def open(self, spec: wire.SessionSpec, readopt: bool, committed: Version | None, past: PastTime) -> None:
        """Begins an incarnation; ``readopt``: continues the present one, after this agent was restarted in its middle.

        Raises SupersededError: a newer one, or another with the same number, is already under way.
        """
        context, before = self.context, self.context.spec
        if before is not None and spec.incarnation == before.incarnation:
            if readopt:
                self._repeat_reports()
            return
        if before is not None and spec.incarnation.number <= before.incarnation.number:
            raise SupersededError(
                f"incarnation {spec.incarnation} comes after {before.incarnation} began; this process belongs to the past and must stop"
            )
        failpoints.reached("agent_opens", spec.resumed.iteration if spec.resumed is not None else None)
        is_unstored = self.present_session is not None and self.present_session.uploads
        self.close_session()
        holders = {owner: tuple(hosts) for owner, hosts in spec.holders.items()}
        if readopt:
            context.host.reopen(holders, committed, spec.incarnation)
        else:
            stuck = before is not None and not self._progressed and spec.resumed == before.resumed
            self.attempts = self.attempts + 1 if stuck else 1
            self._progressed, self.finished, self._excused, self._divergence = False, False, False, None
            self.finishing, self.unstored = False, ""
            context.hang, context.stragglers = None, []
            self.given_up.update(spec.given_up)
            self.perform(context.host.open(holders, spec.resumed, spec.roots, spec.incarnation))
            context.slot_store.forget()
        context.spec = spec
        self._figures.clear()
        is_restart = not readopt and (before is not None or self.inherited is not None)
        context.measures.opened(spec.incarnation.number, spec.resumed, is_restart, past)
        self.present_session = AgentSession(self, spec, readopt)
        if readopt:
            self._repeat_reports()  # workers that are choosing go on, and the copies they were shown are kept
        else:
            self._candidates.clear()
        if is_unstored:  # the upload has died with its session; one that a drain had asked for would not come again by itself
            self.report(UploadSoon())
        if not readopt and spec.resumed is not None and spec.sources:
            self._rebuilding = Rebuilding(context, self._inbound, spec, self.session.outbound.gate)
        context.log(f"incarnation {spec.incarnation} of {spec.world_size} ranks, from {spec.resumed or 'nothing'}")

    def close_session(self) -> None:
        """Closes the present incarnation's connections; memory stays."""
        self._inbound.end_session()
        self.incoming.close()
        if self.present_session is not None:
            self.present_session.close()
            self.present_session = None
        if self._rebuilding is not None:
            self._rebuilding.cancel()

    async def end_rebuilding(self) -> None:
        if self._rebuilding is not None:
            await self._rebuilding.end()

    def _repeat_reports(self) -> None:
        """Reports again what was complete here and not committed yet: the ledger may have forgotten it, or never heard of it."""
        for report in self.context.host.reports():
            self.report(report)

    # -- choosing what to resume

    def adopt(self, memory: SlotMemory, shared: bool, donor: SlotDonor | None) -> None:
        """Takes over a slot from before this agent's own time; a slot from a worker of the past can be read, and is not granted."""
        spec = self.context.spec
        past = donor is not None and spec is not None and donor.incarnation != spec.incarnation
        if self.context.slot_store.adopt(memory, shared or past, donor):
            self._misinformed |= self._candidates

    def seal(self, worker: WorkerConnection) -> None:
        """Seals the stream while a worker chooses a version to resume: until then nothing here changes."""
        self._candidates.add(worker)
        self._misinformed.discard(worker)
        self.context.host.seal()
        if self._divergence is not None:  # what was made since then may hold what one rank alone computed
            versions = {slot.version for slot in self.context.slot_store.inventory()}
            known = [version for version in (self._divergence.agreed, self.context.host.agreed) if version is not None]
            self.given_up |= {version for version in versions if not known or version > max(known)}

    def check_inventory(self, worker: WorkerConnection) -> None:
        """Refuses a choice that could not take account of all copies here.

        Raises RecoveryError: a copy was handed back after the worker had asked for the inventory.
        """
        if worker in self._misinformed:
            raise RecoveryError(
                f"host {self.context.host.name!r} was handed copies back after rank {worker.rank} had asked what it holds, because its "
                "agent was restarted at that moment; what is resumed must be chosen again: start the job once more, the copies count then"
            )

    def unseal(self, worker: WorkerConnection) -> None:
        """Ends the seal of a worker that is gone. If the choosing ranks could not open their incarnation, the present one goes on."""
        self._misinformed.discard(worker)
        if worker in self._candidates:
            self._candidates.discard(worker)
            if not self._candidates:
                self.perform(self.context.host.unseal())

    # -- workers

    def on_worker_message(self, worker: WorkerConnection, message: wire.ToAgent) -> None:
        match message:
            case wire.Observed(profile=profile):
                self.session.outbound.pacing.observed(worker.rank, profile)
            case wire.HoldsBack(steps=steps, why=why):
                self.session.outbound.pacing.held_back(worker.rank, steps, why)
            case wire.Worked(window=window, times=times):
                self.session.worked(worker.rank, window, times)
            case wire.Figures(figures=figures):
                self._figures[worker.rank] = figures
            case wire.Dispatched():
                self.session.outbound.dispatched(message)
            case wire.Collected():
                self._inbound.collected(message)
            case wire.Miscomputed():
                self.context.counters["divergences"] += 1
            case wire.Excuse():  # the resumed version is not to blame for the failure of this session; every worker says so
                self.attempts -= not self._excused
                self._excused = True
            case wire.Inject(owner=owner):
                copies = self.context.slot_store.damage(owner)
                self.context.log(f"fault injection: flipped a bit in {copies} copies of rank {owner}'s shard")
            case _:
                if isinstance(message, wire.GiveUp):
                    self.context.measures.skipped(message.reason)
                elif isinstance(message, wire.Reserve):
                    self.context.measures.reserved()
                self._own.on_message(worker, message)

    def on_finished(self, rank: int) -> None:
        """Records that a rank has finished. The leader is told of its last copies before it is told of the end."""
        self.finishing = not self.finished
        self._own.when_formed(rank, lambda: self.report(ReportFinished(rank=rank)))

    def finish_unclosed(self) -> None:
        """Records that the processes of this host's ranks have ended well, also where the script has not closed its Checkpointer."""
        if self.context.spec is None:  # how the job of an agent before this one ended is not known, and nobody will tell
            self.finishing = self.stores
        elif not self.finished:
            for rank, host in enumerate(self.context.spec.hosts):
                if host == self.context.host.name:
                    self.on_finished(rank)

    def drain(self) -> int:
        """Has this host's workers end after a step that is committed, and is stored if it can be; returns how many there are."""
        present = [worker for worker in self.context.workers.values() if worker.alive and self.context.is_present(worker)]
        if present:
            self.context.log("this host is drained")
            self.context.run.leaving.update((each.launch.pid, each.launch.ticks) for each in present if each.launch is not None)
            self.report(UploadSoon())
            self.context.tell_workers(wire.StopAfterStep())
        return len(present)

    def drain_other(self, host: str) -> bool:
        """Has another host drained, by way of the leader; whether there is such a host.

        Raises AgentError: the leader cannot be told now.
        """
        spec = self.context.spec
        if self.present_session is None or spec is None or host not in spec.hosts:
            return False
        if not self.present_session.reaches_leader:
            leader = self.present_session.succession.leader
            raise AgentError(
                f"host {host!r} cannot be told: host {leader!r}, which leads the run, cannot be reached from here now. Try again, or "
                "ask an agent that is nearer (--host), or signal that host's `gemini run`"
            )
        self.report(DrainHost(host=host))
        return True

    def reached(self, iteration: int, held: Sequence[tuple[float, float]] = ()) -> None:
        """Records how far a worker of the present incarnation has come; ``held``: see `Request`."""
        self.context.measures.reached(iteration, held)
        if self._rebuilding is not None:
            self._rebuilding.reached(iteration)

    def worker_lost(self, worker: WorkerConnection) -> None:
        """Records that a worker is proven dead; what it said before counts, also if checksums are still being formed."""
        is_present = self.context.is_present(worker)
        self._own.when_formed(worker.rank, partial(self._worker_lost, worker))
        if is_present:  # last: no figure may keep the protocol from hearing it
            self.context.lost(worker)

    def _worker_lost(self, worker: WorkerConnection) -> None:
        if self.context.workers.get(worker.rank) is worker and self.context.is_present(worker):
            self.session.outbound.gate.forget(worker.rank)
            self._inbound.worker_lost(worker.rank)
            self.perform(self.context.host.worker_lost(worker.rank))
            self.report(ReportFinished(rank=worker.rank, lost=True))

    async def examine(self, worker: WorkerConnection) -> None:
        """Returns when it is known why a worker hangs, or may not be waited for any longer."""
        if self.present_session is not None and self.context.is_present(worker):
            await self.present_session.autopsy.hold()
            killed = [each for each in self.context.workers.values() if self.context.is_present(each) and each.parting == "hang"]
            if not killed:  # the hang is over, and no launcher may say that it was why workers ended
                self.context.hang = None
        else:  # it joins, or is of the past
            await log_stacks(worker, self.context)

    # -- effects

    def perform(self, effects: list[Effect]) -> None:
        context = self.context
        context.slot_store.sync_headers()
        for effect in effects:
            match effect:
                case Grant(owner=owner, slot=slot, version=version):
                    context.slot_store.memory[owner, slot].clear()
                    if owner in context.workers:
                        context.workers[owner].send(wire.Granted(iteration=version.iteration, slot=slot))
                case Send(owner=owner, slot=slot, version=version, peer=peer):
                    self.session.outbound.send(owner, version, slot, context.slot_store.memory[owner, slot], peer)
                case CancelSend(owner, version, peer):
                    self.session.outbound.cancel(owner, version, peer)
                case Tell(report):
                    self.report(report)
                case Withdraw(owner, version):
                    if owner in context.workers:
                        context.workers[owner].send(Abort(version, "withdrawn"))
                case Upload(owner=owner, slot=slot, version=version):
                    assert self.session.storing is not None
                    failpoints.reached("agent_uploads", version.iteration, owner)
                    self.session.storing.upload(owner, slot, version)
                case Lacking(owner, version):
                    assert self.session.storing is not None
                    self.session.storing.lacks(owner, version)
                case Free(owner=owner, slot=slot):
                    context.slot_store.free(owner, slot)
                case Damaged(owner, version):
                    context.note_damage(owner, version)
        if any(isinstance(effect, Free) for effect in effects):
            self._use_room(context.slot_store.short(self._takers))

    @property
    def _takers(self) -> set[int]:
        """Owners whose slots can be made now: of replicas, and of workers that are here."""
        context = self.context
        return {owner for owner in context.slot_store.owners if owner in context.workers or not context.host.owns(owner)}

    def _use_room(self, owners: Sequence[int]) -> None:
        """Makes slots for which there is room now: a replica's at once, a worker's own when it asks."""
        for owner in owners:
            if not self.context.host.owns(owner):
                self._tasks.spawn(self._top_up(owner))
            else:
                self.context.workers[owner].send(wire.Room())

    async def _top_up(self, owner: int) -> None:
        await self.context.slot_store.top_up(owner)
        self._inbound.entrust_all()

    def accounts(self) -> dict[str, tuple[float, str]]:
        """Asks all hosts for their accounts of themselves, if this one leads; returns those that have come: when, and the account."""
        return self.present_session.accounts() if self.present_session is not None else {}

    def report(self, message: PeerMessage) -> None:
        """Tells the leader, if there is a session."""
        if self.present_session is not None:
            self.present_session.report(message)

    # -- decisions

    def decide(self, message: PeerMessage) -> None:
        """Carries out a decision of the leader."""
        context, host = self.context, self.context.host
        match message:
            case Commit(version=version, freeze=freeze, roots=roots, agreed=agreed, compared=compared):
                failpoints.reached("agent_commits", version.iteration)
                context.counters["committed"] += 1
                context.note_commit(version)
                context.measures.committed(version.iteration)
                self._progressed = self._progressed or context.spec is None or version != context.spec.resumed  # which may be repeated
                self.perform(host.on_commit(version, freeze, roots, agreed, compared=compared))
                self._use_room(context.slot_store.lastingly_short(self._takers))  # which other processes may have left
                context.tell_workers(message)
            case Abort(version):
                context.counters["aborted"] += version not in host.aborted  # it is repeated for workers that may not have heard it
                self.perform(host.on_abort(version))
                context.tell_workers(message)
            case Holders(epoch=epoch, excluded=excluded, newly=newly):
                self._holders_changed(epoch, sorted(excluded), sorted(newly))
            case Thaw(version, error, unclear):
                context.counters["failed_uploads" if error else "uploads"] += 1
                if self.session.storing is not None:
                    self.session.storing.over(version, error, unclear)
            case Paced(interval=interval, why=why):
                self.session.outbound.pacing.paced(interval)
                context.log(f"a snapshot every {interval} steps: {why}")
                context.tell_workers(message)
            case Fatal(error=error, text=text):
                context.log(text)
                if error == ReplicaDivergedError.__name__ and self._divergence is None:  # the next leader may say it again
                    self._divergence = message
                    context.note_divergence(ranks=list(message.ranks), text=text)
                context.tell_workers(Failed(error=error, text=text, fatal=True))
            case Notice(text=text):
                context.log(text)
                context.tell_workers(message)
            case Examine():
                self.session.autopsy.begin()
            case Autopsied():
                self.session.autopsy.conclude(message)
            case Stragglers(ranks=ranks, text=text):
                context.note_stragglers(ranks, text)
            case AskAccount():
                self.report(ReportAccount(host=host.name, document=json.dumps(context.run.account())))
            case ReportFinished():
                pass  # of the leader's own ranks: the next leader hears it from this host (`Failover`)
            case DrainHost(host=name):
                if name == host.name:
                    self.drain()
            case AllFinished(unstored=unstored):
                self.finished = self._progressed = True
                self.finishing, self.unstored = False, unstored
                if unstored:
                    context.log(f"the job has finished, but its last upload has not: {unstored}")
                self.perform(host.finish())
            case _:
                raise PeerError(f"{kind_of(message)!r} is not a decision")

    def _holders_changed(self, epoch: int, excluded: list[tuple[int, str]], newly: list[tuple[int, str]]) -> None:
        if excluded == self._excluded and not newly:  # as a leader says that follows another one
            return
        self._excluded = excluded
        late = ", ".join(f"host {host} (shard of rank {owner})" for owner, host in excluded)
        text = f"commits go on without {late}, which did not acknowledge in time" if excluded else "every replica counts again"
        self.context.notify(f"holder set {epoch}: {text}")
        for owner, peer in newly:
            self.session.outbound.pacing.left_out(owner, peer)
            self.perform(self.context.host.on_exclude(owner, peer))

    # -- figures

    @property
    def leader(self) -> str | None:
        return self.present_session.succession.leader if self.present_session is not None else None

    @property
    def patience(self) -> float:
        """Seconds for which the last upload of the job is tried again."""
        return self.present_session.patience if self.present_session is not None else 0.0

    @property
    def stores(self) -> bool:
        return self.last_spec is not None and self.last_spec.storage is not None

    @property
    def uploading(self) -> bool:
        """Whether memory here is still read for storage, or the manifest still to be written."""
        return self.present_session is not None and self.present_session.uploading

    def status(self) -> dict[str, object]:
        spec, host, session = self.context.spec, self.context.host, self.present_session
        is_at_work = any(worker.alive and worker.parting != "goodbye" for worker in self.context.workers.values())
        ages = [slot.age for slot in self.context.slot_store.inventory() if slot.version == host.committed]
        return {
            "incarnation": str(spec.incarnation) if spec else None,
            "world_size": spec.world_size if spec else None,
            "leader": self.leader,
            "epoch": session.succession.epoch if session is not None else None,
            "reaches_leader": session is not None and session.reaches_leader,
            "job": session.job if session is not None else None,
            "unheard": session.unheard if session is not None else [],
            "committed": host.committed.iteration if host.committed else None,
            "committed_age": min(ages, default=None),
            "command": self.launch.command if self.launch is not None else [],
            "finished": self.finished,
            "finishing": self.finishing and not is_at_work and not self.context.measures.is_failing,
            "left_out": session is not None and session.is_left_out,
            "hang": self.context.hang,
            "stragglers": self.context.stragglers if is_at_work else [],
            "excluded": self._excluded,
            "storage": session.storing.uploader.status() if session is not None and session.storing is not None else None,
            "counters": self.context.counters,
            "measures": self.context.measures.account(),
            "traffic": session.outbound.pacing.status() if session is not None else None,
            "gradients": {str(rank): figures for rank, figures in sorted(self._figures.items())},
            "shards": {
                str(owner): [f"{s.state}:{s.version.iteration if s.version else '-'}" for s in slots.slots.values()]
                for owner, slots in host.shards.items()
            },
        }
