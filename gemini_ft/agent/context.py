"""The knowledge that the parts of one stream on one host share, their voice to its workers and peers, and who keeps its replicas' memory.

Each replica's memory is assigned to a local worker too, so that it survives this agent, and so that the worker can receive into it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gemini_ft.agent.figures import Measures
from gemini_ft.agent.memory.budget import Budget
from gemini_ft.agent.memory.slot_files import SlotFiles
from gemini_ft.agent.memory.slot_memory import SlotMemory
from gemini_ft.agent.memory.slot_store import SlotStore
from gemini_ft.agent.workers import WorkerConnection
from gemini_ft.core.protocol import Host
from gemini_ft.core.versions import Version
from gemini_ft.errors import AgentError, ConfigError, printable
from gemini_ft.events import EventLog
from gemini_ft.wire.messages import Notice
from gemini_ft.wire.peer_messages import Claims
from gemini_ft.wire.worker_messages import Custody, SessionSpec, ToWorker

if TYPE_CHECKING:
    from gemini_ft.agent.replication.rdma import Rdma
    from gemini_ft.agent.stream import Stream


class Custodians:
    """The custodians of one stream on one host. ``workers``: of the present incarnation, by rank."""

    def __init__(self, workers: Mapping[int, WorkerConnection]) -> None:
        self._workers = workers
        self._keepers: dict[int, WorkerConnection] = {}  # id of a replica's memory -> the worker that keeps its descriptor

    def entrust(self, memory: SlotMemory) -> None:
        """Lets a local worker keep a replica's descriptor, unless one does: one worker per owner, spread over many owners."""
        keeper = self._keepers.get(id(memory))
        workers = sorted((worker for worker in self._workers.values() if worker.alive), key=lambda worker: worker.rank)
        if workers and (keeper is None or keeper not in workers):
            keeper = workers[memory.shape.owner % len(workers)]
            self._keepers[id(memory)] = keeper
            try:
                keeper.send(Custody(key=str(id(memory))), (memory.fd,))
            except AgentError:  # no descriptor is free, which has been logged: the next time perhaps
                del self._keepers[id(memory)]

    def take_back(self, memory: SlotMemory) -> None:
        """Takes back memory that holds no replica any more."""
        if (keeper := self._keepers.pop(id(memory), None)) is not None:
            keeper.send(Custody(key=str(id(memory)), drop=True))

    def keeper(self, memory: SlotMemory) -> WorkerConnection | None:
        """The worker that keeps a replica's memory, if it lives."""
        keeper = self._keepers.get(id(memory))
        return keeper if keeper is not None and keeper.alive else None


_COUNTED = "committed", "aborted", "damaged", "replica_bytes", "uploads", "failed_uploads", "late_answers", "leader_changes", "divergences"


class RunContext:
    """One run on one host: what all its streams there have in common."""

    def __init__(self, run_id: str, host: str, files: SlotFiles | None = None) -> None:
        self.run_id, self.host = run_id, host
        self.rdma: Rdma | None = None  # the process that reads slots of other hosts, once there is one
        self.files = files  # where slots are made; None: in memory without a name
        self.secret = b""  # known to all agents of the run; empty until a worker brings it
        self.budget = Budget(None)  # bytes that the slots of all streams may take
        # Launchers (process id, beginning) of a drained host: the workers that they start meanwhile have to leave as well.
        self.leaving: set[tuple[int, int]] = set()
        self.metrics: str | None = None  # address at which figures are served; empty: none yet; None: they are not asked for
        self.has_page = False  # whether the web page is served there, too
        # Hosts that wait to take another's place, and those that the job lacks, as the launcher here sees; None: it has not said.
        self.spares: dict[str, int] | None = None
        self.account: Callable[[], dict[str, Any]] = dict  # this agent's account of itself, but for what never leaves the host

    def log(self, text: str) -> None:
        lines = "\n    ".join(map(printable, text.splitlines()))  # no text passes for another line
        with contextlib.suppress(OSError):  # a full disk costs the log, and nothing else
            print(f"{time.strftime('%H:%M:%S')} {lines}", file=sys.stderr, flush=True)


class StreamContext:
    """One stream on one host, as the parts that send, receive, serve and store its shards see it."""

    def __init__(self, name: str, run: RunContext, stream: Stream) -> None:
        self.name, self.run = name, run
        self.perform = stream.perform  # carries out effects of the protocol on this host
        self.report = stream.report  # sends a message to the leader
        self.spec: SessionSpec | None = None  # the present session, or the last one; None: there has been none
        # whether payloads between hosts are to be; as the job that runs has it, which may not be the one that started this agent
        self.encrypt = True
        # the verdict on the hang that the job is in, or that ended this session, as in its event; None: there is none
        self.hang: dict[str, Any] | None = None
        self._hung_at: Version | None = None  # the newest version that was under way here then
        self.stragglers: list[int] = []  # ranks that are slow now, as the leader has said
        self.host = Host(name=run.host)  # this host's part of the protocol
        self.workers: dict[int, WorkerConnection] = {}  # rank -> its worker, which may be one of the past
        self.custodians = Custodians(self.workers)  # the workers that keep replicas' memory safe
        self.slot_store = SlotStore(self)  # the memory of all slots
        self.counters = dict.fromkeys(_COUNTED, 0)  # figures for ``gemini status``
        self.measures = Measures(run.host)  # figures that ``gemini top``, ``gemini watch`` and ``/metrics`` need besides

    def log(self, text: str) -> None:
        self.run.log(f"[{self.name}] {text}")

    def version(self, iteration: int) -> Version:
        assert self.spec is not None
        return Version(self.spec.incarnation, iteration)

    def claims(self, role: str, to: str) -> Claims:
        incarnation = self.spec.incarnation if self.spec is not None else None
        return Claims(
            run=self.run.run_id,
            stream=self.name,
            host=self.host.name,
            to=to,
            role=role,  # type: ignore[arg-type]
            incarnation=incarnation,
            encrypt=self.encrypt,
        )

    def is_present(self, worker: WorkerConnection) -> bool:
        return self.spec is not None and worker.incarnation == self.spec.incarnation

    def tell_workers(self, message: ToWorker) -> None:
        for worker in self.workers.values():
            if self.is_present(worker):
                worker.send(message)

    def notify(self, text: str) -> None:
        """Tells the workers something for the user."""
        self.log(text)
        self.tell_workers(Notice(text=text))

    def led(self, epoch: int, leader: str) -> None:
        """Records that another host leads the commits of this stream."""
        self.counters["leader_changes"] += 1
        self.log(f"host {leader!r} leads the commits, in epoch {epoch}")
        if leader == self.host.name:
            self._write_event("leader", epoch=epoch, leader=leader)

    def left(self, worker: WorkerConnection, finished: bool) -> None:
        """Records the orderly end of a worker."""
        if self.is_present(worker):
            self.measures.time.ended(time.monotonic(), is_interrupted=not finished)

    def lost(self, worker: WorkerConnection) -> None:
        """Records the end of a worker of the present incarnation, unless the worker had left before."""
        if worker.parting == "goodbye":
            return
        leaves = worker.launch is not None and (worker.launch.pid, worker.launch.ticks) in self.run.leaving
        cause = worker.parting or ("drain" if leaves else "died")
        stood = worker.stood if cause == "hang" else 0.0
        self.measures.lost(cause, stood)
        number = worker.incarnation.number if worker.incarnation is not None else None
        self._write_event("lost", rank=worker.rank, cause=cause, incarnation=number, stood=stood)

    def note_hang(self, **verdict: Any) -> None:
        """Records why the job hangs: ``cause``, ``ranks``, ``text`` and the path of the ``report``."""
        self.hang = verdict
        versions = [slot.version for slots in self.host.shards.values() for slot in slots.slots.values() if slot.version is not None]
        self._hung_at = max([*versions, *self.host.waiting.values()], default=None)
        self._write_event("hang", **verdict)
        self.notify(f"the job hangs: {verdict['text']}; {verdict['report']} has the report")

    def note_commit(self, version: Version) -> None:
        """Records a commit. One that was not under way when the job hung shows that this is over: no launcher may say that it ended it."""
        if self.hang is not None and (self._hung_at is None or version > self._hung_at):
            self.hang = None

    def note_stragglers(self, ranks: list[int], text: str) -> None:
        """Records the ranks that are slow from now on; a leader repeats it to a host that joins it."""
        if ranks == self.stragglers:
            return
        self.stragglers = ranks
        self._write_event("straggler", ranks=ranks, text=text)
        self.notify(text)

    def note_divergence(self, **facts: Any) -> None:
        """Records that ranks differ in what they must hold alike: ``ranks``, and the ``text`` of the error."""
        self.counters["divergences"] += 1
        self._write_event("diverged", **facts)

    def _write_event(self, event: str, **facts: Any) -> None:
        try:
            events = EventLog(self.run.run_id, host=self.host.name, rank=None, stream=self.name)
        except ConfigError as error:
            self.log(str(error))
        else:
            events.write(event, **facts)
            events.close()

    def note_damage(self, owner: int, version: Version) -> None:
        """Records a copy here that had to be discarded."""
        self.counters["damaged"] += 1
        self._write_event("damaged", owner=owner, iteration=version.iteration)
        self.notify(f"host {self.host.name}'s copy of rank {owner}'s shard of {version} is not the one that its owner made: discarded")
