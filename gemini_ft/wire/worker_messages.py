"""The two directions between a worker and the agent of its host (a Unix socket; launchers and readers speak on it too).

Descriptors travel beside Adopt, Watch, Reserved, Mapped and Custody.
"""

from __future__ import annotations

from typing import Literal

from gemini_ft.config import DEFAULT_TRAFFIC, LEADER_TIMEOUT, TrafficConfig
from gemini_ft.core.decisions import Abort, Commit
from gemini_ft.core.goodput import PastTime, RunTime
from gemini_ft.core.stragglers import WorkTime
from gemini_ft.core.traffic import Profile
from gemini_ft.core.tree import FAN_IN
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.wire.messages import (
    PROTOCOL_VERSION,
    Answer,
    Call,
    Channel,
    Chunk,
    Failed,
    Message,
    Notice,
    Paced,
    ShardAnswer,
    ShardCall,
    ShardLayout,
    Text,
)


class SlotInfo(Message):
    """A slot of an inventory."""

    owner: int
    version: Version
    world_size: int
    layout_hash: str
    data_bytes: int
    extras_bytes: int
    age: float  # seconds since its last byte was written
    root: str  # of the copy (gemini_ft.core.roots)
    committed: bool  # its host knows of the commit, and the root is the committed one


class HostInfo(Message):
    """An agent's account of its host."""

    host: str
    machine: str  # boot id: two hosts with the same one share a machine
    address: tuple[str, int]
    further: list[str] = []  # its addresses in other networks, at which the same port is open
    known: Incarnation | None
    fingerprint: str  # of the run secret in use; empty when there is none yet
    memory_limit: int
    memory_used: int
    domain: str = ""


OF_RUN = "gemini-run:"  # before the id of a launch by `gemini run`; no hostname has a colon, with which the ids of others begin


class Launch(Message):
    """One start of a job by its user, with all the restarts that follow; as one host knows it. It never leaves the host."""

    id: str  # the same on all hosts
    pid: int  # of the launcher, or of the process itself
    ticks: int  # when that began, in the kernel's clock ticks: no later process of its number is taken for it
    started: float  # the same by the system's clock, in seconds
    command: list[str]
    folder: str
    script: str  # digest; empty: unknown
    environ: dict[str, str]  # what may be told of the variables that a script may read

    @property
    def is_of_run(self) -> bool:
        """Whether it is one of `gemini run`, which asks at the end what was stored."""
        return self.id.startswith(OF_RUN)

    def is_same(self, other: Launch) -> bool:
        """Whether both are one launch. Where rank 0 moves, the name may be another, and the launcher here is not."""
        return self.id == other.id or (self.pid, self.ticks) == (other.pid, other.ticks)


class SessionSpec(Message):
    """An incarnation of one stream, the same on all hosts."""

    stream: str
    incarnation: Incarnation
    world_size: int
    hosts: list[str]  # host of each rank
    addresses: dict[str, tuple[str, int]]
    further: dict[str, list[str]] = {}  # host -> its addresses in other networks, at which the same port is open
    holders: dict[int, list[str]]
    leader: str
    fan_in: int = FAN_IN  # hosts that report to the leader; more of them do by way of collectors
    resumed: Version | None
    lineage: list[Version] = []  # versions that this incarnation descends from, oldest first; the last one is what it resumed
    overtaken: list[Incarnation] = []  # incarnations that it knows of and does not descend from, or only in part
    aside: list[Incarnation] = []  # of these, those that the user has left aside: their checkpoints stay
    sources: dict[int, list[str]] = {}  # the hosts that hold the resumed version of each shard
    given_up: list[Version] = []  # versions that led to failure after failure
    damaged: list[str] = []  # folders of checkpoints in storage that turned out to be damaged
    present: list[str] | None = None  # folders in storage beside its ancestors' when it was decided what to resume; None: not known
    replica_timeout: float = 30.0
    leader_timeout: float = LEADER_TIMEOUT  # seconds; 0: no other host ever leads
    hang_timeout: float | None = None
    straggler_factor: float = 0.0
    chunk_bytes: int = 8 * 2**20
    storage: dict[str, object] | None = None  # StorageConfig, as checked on every rank
    interval: int | None = 1  # steps between snapshots; None: as many as the network needs
    traffic: TrafficConfig = DEFAULT_TRAFFIC
    roots: dict[int, str] = {}  # owner -> root of its shard of the resumed version, where it is known


# -- worker to agent


class Hello(Call):
    """The first message of a worker."""

    protocol: int = PROTOCOL_VERSION
    run: str
    stream: str
    rank: int
    secret: bytes
    bind: str
    further: list[str] = []  # addresses of this host in other networks
    ports: tuple[int, int] | None = None
    preferred_port: int = 0  # where the agent's predecessor listened
    memory_limit: int | None = None
    domain: str = ""
    linger: float
    encrypt: bool = False  # payloads between hosts are encrypted, and not only sealed
    agent_timeout: float = 10.0  # as in GeminiConfig
    start_timeout: float = 1800.0
    launch: Launch | None = None  # None: this worker may take over from a launch that is still alive


class GetInventory(Call):
    """Asks for all complete slots of the stream on this host."""


class OpenSession(Call):
    """Begins a new incarnation; every local worker sends it, the first one counts."""

    spec: SessionSpec
    secret: bytes  # the one all hosts agreed on
    readopt: bool = False  # the agent was restarted within this incarnation: keep what was adopted
    committed: Version | None = None  # the newest commit this worker knows of
    past: PastTime = PastTime()
    reached: int | None = None  # with readopt: the newest iteration that this worker has asked a slot for; it does not write it any more


class Reserve(ShardLayout, Call):
    """Asks for the memory of this rank's shard."""


class Request(Message):
    """Asks for a slot to write ``iteration`` into; a sign of life too. The agent answers at once: Granted, Queued, or an Abort."""

    iteration: int
    held: list[tuple[float, float]] = []  # seconds, see gemini_ft.worker.outcomes.Stats.unsaid


class Landed(Message):
    """Reports that a device has laid down the tensors' bytes from the slot's beginning to ``upto``: the agent forms their checksums."""

    iteration: int
    upto: int


class HoldsBack(Message):
    """Reports how many steps apart snapshots must be for the copies of this rank's device, which take longer than its steps leave."""

    steps: int
    why: str  # in figures


class Copied(Message):
    """Reports that all chunks of the iteration are in the slot."""

    iteration: int
    extras_bytes: int
    digest: str = ""
    root: str  # of the copy, as its owner formed it (gemini_ft.core.roots); empty: the agent forms it


ENDING = "the process ends"
LATE = "the previous snapshot was still uncommitted at the next update"
WRITTEN = "written during the copy (write inside `with checkpointer.mutate():`)"  # behind the names of tensors


class GiveUp(Message):
    """Reports that no snapshot of this iteration will come from this rank."""

    iteration: int
    reason: str


class Progress(Message):
    """A sign of life; ``suspended``: no next sign is due (validation, saving)."""

    iteration: int
    suspended: bool = False
    validated: float = 0.0  # seconds for which the loop was paused until now


class Watch(Message):
    """Brings the worker's control page and bell (gemini_ft.wire.control_page), as descriptors."""

    count: int = 2


class Observed(Message):
    """The profile of the worker's steps, or word that there is none any more."""

    profile: Profile | None


class Worked(Message):
    """The times of the worker's steps in a window (gemini_ft.core.stragglers)."""

    window: int  # the iteration at which it has ended
    times: WorkTime


class Figures(Message):
    """The costs of the gradients in the last step, for ``gemini status``."""

    figures: dict[str, dict[str, float]]  # rule or group -> figure -> value, see gemini_ft.state.gradients.GradientState


class Dispatched(Message):
    """Reports that a piece has left, or could not."""

    tag: int
    error: str = ""


class Collected(Message):
    """Reports that a piece is in the agent's memory, or could not be received."""

    source: int
    tag: int
    error: str = ""


class Excuse(Message):
    """Reports that the resumed state does not fit this script: the failure that follows does not count against it."""


class Miscomputed(Message):
    """Reports that an iteration which was computed again came out with other bits; one rank of each host says so."""


class Verify(Call):
    """Asks for a check of every local copy of ``version`` against its checksums."""

    version: Version


class Stage(ShardCall):
    """Asks the agent to lay a shard of a stored checkpoint down in its memory, like a shard that was replicated here."""

    record: str  # gemini_ft.storage.shard.ShardRecord as JSON
    storage: dict[str, object]  # gemini_ft.config.StorageConfig


class Map(ShardCall):
    """Asks for a local slot's descriptor, to read it."""


class Adopt(Message):
    """Hands slots back to an agent that was restarted; descriptors travel beside it."""

    count: int
    shared: list[bool] = []  # of each, whether another process may still write to it; none: no other can
    incarnation: Incarnation | None = None  # of the worker that hands them back, and may go on writing to them


class Ping(Message):
    """Asks for a sign of life; allowed before Hello."""


class Goodbye(Message):
    """The worker's farewell: its work is finished, or it was interrupted by the user."""

    finished: bool
    last: bool = False  # no word will come when the process ends: whoever runs it kills it


class Over(Message):
    """Tells that this worker's attempt in place is over. Its process may make another one, but the agent takes this worker for dead."""

    failed: bool  # it has raised an exception itself


class Ended(Call):
    """Tells that this process, which may have been a worker, is about to end well; or that it ends because its state was refused."""

    refused: str = ""  # the refusal


class TellSpares(Call):
    """Tells how many hosts wait to take the place of a lost one, and how many the job lacks, as the launcher of this host sees."""

    waiting: int
    lacking: int


class GetStatus(Call):
    """Asks for the agent's status (``gemini status``)."""


class Visit(Call):
    """A question of a process that is no worker: what can be read here (``gemini export``, ``gemini checkpoints``)? Changes nothing."""


class Leave(Message):
    """Tells the agent of a run to go (the launcher, after the job)."""

    run: str
    finished: bool = False  # the job has finished, and its last upload is waited for; answered when the agent leaves


class AskDrain(Call):
    """Asks for a host of the run to be drained: its workers end after a step that is committed. Allowed before Hello."""

    host: str = ""  # id; empty: the agent's own


class Inject(Message):
    """Injects a fault (gemini_ft.faults.inject): flips a bit in every copy of ``owner``'s shard on this host."""

    fault: Literal["corrupt"]
    owner: int


ToAgent = (
    Hello | GetInventory | OpenSession | Reserve | Request | Copied | GiveUp | Progress | Watch | Observed | Worked | Figures | Dispatched
    | Collected | Excuse | Verify | Stage | Map | Adopt | Ping | Goodbye | Over | Ended | GetStatus | Visit | Leave | AskDrain | Inject
    | Chunk | Landed | HoldsBack | TellSpares | Miscomputed
)  # fmt: skip
to_agent: Channel[ToAgent] = Channel(ToAgent)


# -- agent to worker


class Verified(Answer):
    """The answer to Verify: owners whose copies are sound; damaged ones have been discarded."""

    version: Version
    sound: list[int]


class Staged(ShardAnswer):
    """The answer to Stage."""


class Noted(Answer):
    """The answer to Ended and TellSpares."""


class Left(Message):
    """The answer to a Leave after a finished job."""

    unstored: Text = ""  # why the last upload failed for good


class Welcome(Answer):
    """The answer to Hello."""

    info: HostInfo
    secret: bytes
    pid: int
    resumed: Version | None  # the version that the last session resumed, if nothing has been committed since
    attempts: int  # sessions in a row that resumed it
    finished: bool  # this stream's work was already finished in this run
    launch: Launch | None = None  # that opened this stream last
    incarnation: Incarnation | None = None  # the last one of this stream here
    lineage: list[Version] = []  # of that one, see SessionSpec
    overtaken: list[Incarnation] = []
    aside: list[Incarnation] = []
    time: RunTime | None = None  # of the run, as this agent has seen it
    memory_folder: str = ""  # where this agent makes slots as files; empty: in memory without a name


class Inventory(Answer):
    """The answer to GetInventory."""

    slots: list[SlotInfo]
    given_up: list[Version] = []


class Opened(Answer):
    """The answer to OpenSession: the session is open."""


class Reserved(Answer):
    """The answer to Reserve; the slots' descriptors travel beside it, in the order of ``slots``."""

    layout_hash: str
    slots: list[int]
    data_offset: int
    capacity: int


class Room(Message):
    """Asks the worker to reserve again: there was no room for all slots of this rank, and there is now."""


class Granted(Message):
    """Allows the worker to write ``iteration`` into ``slot``."""

    iteration: int
    slot: int


class Queued(Message):
    """Reports that no slot is free for ``iteration`` now; a Granted or an Abort follows, unless the worker gives it up."""

    iteration: int


class SpanUse(Message):
    """The bytes that a snapshot sent in one span of idle network."""

    step: int  # steps that the worker had ended
    begun: int  # collectives that it had begun since
    nbytes: int
    first: float  # when the first bytes were let go, seconds of the host's monotonic clock
    last: float  # when the last were


class Travelled(Message):
    """The course of a snapshot's way to one peer."""

    iteration: int
    peer: str
    nbytes: int
    outside: int  # of these, bytes that could not wait for idle network any more
    spans: list[SpanUse]  # that the others were sent in
    seconds: float  # from the first byte to the acknowledgement of the last
    expected: float | None = None  # seconds that the cost model had predicted; None: there was no profile yet


class Dispatch(Message):
    """Orders a worker to send a piece of a slot to another host's worker, in the process group of the replicas."""

    tag: int
    target: int  # rank
    slot: int
    offset: int
    nbytes: int


class Collect(Message):
    """Orders a worker to receive a piece of a replica from another host's worker."""

    tag: int
    source: int  # rank
    key: str  # of the memory, as in Custody; empty: throw the bytes away
    position: int  # in that memory
    nbytes: int


class Mapped(ShardAnswer):
    """The answer to Map; the descriptor travels beside it."""

    data_offset: int
    data_bytes: int
    extras_bytes: int


class Pong(Message):
    """The answer to Ping."""

    agent_timeout: float  # seconds of silence after which an agent of this job hangs; 0: never


class Draining(Answer):
    """The answer to AskDrain."""

    workers: int  # of this host that have been told, now or before
    relayed: bool  # the wish has gone to another host


class StopAfterStep(Message):
    """Tells a worker that its host is drained."""


class WriteRecord(Message):
    """Asks a worker of a job that hangs to write what torch's flight recorder has kept, to ``path`` with its rank behind it."""

    path: str


class Custody(Message):
    """A replica's descriptor for safe-keeping, so that it survives this agent."""

    key: str
    drop: bool = False


class Status(Answer):
    """The answer to GetStatus: a JSON document."""

    document: str


class StreamInfo(Message):
    """The copies and facts that an agent has of one stream."""

    slots: list[SlotInfo]
    committed: Version | None
    spec: SessionSpec | None  # of the newest incarnation
    leader: str | None = None  # the host that leads the commits now, as far as is known here


class Visited(Answer):
    """The answer to Visit: all a reader needs to fetch shards, here and from the other hosts."""

    run: str
    host: str
    address: tuple[str, int] | None  # None: no worker has come yet, so there is nothing to read
    secret: bytes
    streams: dict[str, StreamInfo]


ToWorker = (
    Verified | Staged | Noted | Left | Welcome | Inventory | Opened | Reserved | Room | Granted | Queued | Travelled | Dispatch | Collect
    | Mapped | Pong | WriteRecord | Custody | Status | Visited | Draining | StopAfterStep | Commit | Abort | Failed | Notice | Paced
)  # fmt: skip
to_worker: Channel[ToWorker] = Channel(ToWorker)
