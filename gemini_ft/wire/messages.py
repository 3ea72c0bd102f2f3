"""Everything agents and workers say to each other: msgpack maps checked against these models, never pickled.

A message that does not fit its model is refused as a whole; unknown fields and unknown kinds too.

A call carries a number of its asker's choice, its answer the same number and the shard it is about: an answer that
comes after its asker's patience has ended must not be taken for the answer to the next call (`check_answer`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gemini_ft.config import DEFAULT_TRAFFIC, TrafficConfig
from gemini_ft.core.traffic import Profile
from gemini_ft.core.versions import Incarnation, Version
from gemini_ft.errors import PeerError

PROTOCOL_VERSION = 6
MAX_MESSAGE = 64 * 2**20  # bytes; layouts of very large models are the longest messages


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Call(_Message):
    """A message that is answered, if only by Failed."""

    call: int = 0  # its number on this connection; 0: the asker never has two of them under way


class _Answer(_Message):
    """A message that is only said when asked for."""

    call: int = 0  # number of the call that is answered


class SlotInfo(_Message):
    """One slot of an inventory."""

    owner: int
    version: Version
    world_size: int
    layout_hash: str
    data_bytes: int
    extras_bytes: int
    age: float  # seconds since its last byte was written
    root: str  # of the copy (gemini_ft.core.roots)
    committed: bool  # its host knows of the commit, and the root is the committed one


class HostInfo(_Message):
    """What an agent says of its host."""

    host: str
    machine: str  # boot id: two hosts with the same one share a machine
    address: tuple[str, int]
    known: Incarnation | None
    fingerprint: str  # of the run secret in use; empty when there is none yet
    memory_limit: int
    memory_used: int
    domain: str = ""


class Launch(_Message):
    """One start of a job by its user, with all the restarts that follow; as one host knows it. It never leaves the host."""

    id: str  # the same on all hosts
    pid: int  # of the launcher, or of the process itself
    ticks: int  # when that began, in the kernel's clock ticks: no later process of its number is taken for it
    started: float  # the same by the system's clock, in seconds
    command: list[str]
    folder: str
    script: str  # digest; empty: unknown
    environ: dict[str, str]  # what may be told of the variables that a script may read

    def is_same(self, other: Launch) -> bool:
        """Whether both are one launch. Where rank 0 moves, the name may be another, and the launcher here is not."""
        return self.id == other.id or (self.pid, self.ticks) == (other.pid, other.ticks)


class SessionSpec(_Message):
    """One incarnation of one stream, the same on all hosts."""

    stream: str
    incarnation: Incarnation
    world_size: int
    hosts: list[str]  # host of each rank
    addresses: dict[str, tuple[str, int]]
    holders: dict[int, list[str]]
    leader: str
    resumed: Version | None
    lineage: list[Version] = []  # what this incarnation descends from, oldest first; the last one is what it resumed
    overtaken: list[Incarnation] = []  # those it knows of and does not descend from, or only in part
    aside: list[Incarnation] = []  # of these, those that the user has left aside: what they have stored stays
    sources: dict[int, list[str]] = {}  # who holds the resumed version of each shard
    given_up: list[Version] = []  # versions that led to failure after failure
    damaged: list[str] = []  # folders of checkpoints in storage that turned out to be damaged
    replica_timeout: float = 30.0
    hang_timeout: float | None = None
    chunk_bytes: int = 8 * 2**20
    storage: dict[str, object] | None = None  # StorageConfig, as checked on every rank
    interval: int | None = 1  # steps between snapshots; None: as many as the network needs
    traffic: TrafficConfig = DEFAULT_TRAFFIC
    roots: dict[int, str] = {}  # owner -> root of its shard of the resumed version, where it is known


# -- worker to agent (Unix socket) ----------------------------------------------------------------


class Hello(_Call):
    """First words of a worker."""

    kind: Literal["hello"] = "hello"
    protocol: int = PROTOCOL_VERSION
    run: str
    stream: str
    rank: int
    secret: bytes
    bind: str
    ports: tuple[int, int] | None = None
    preferred_port: int = 0  # where the agent's predecessor listened
    memory_limit: int | None = None
    domain: str = ""
    linger: float
    encrypt: bool = False  # payloads between hosts are encrypted, and not only sealed
    agent_timeout: float = 10.0  # as in GeminiConfig
    start_timeout: float = 1800.0
    launch: Launch | None = None  # None: one that takes over whoever is at work


class GetInventory(_Call):
    """Ask for all complete slots of the stream on this host."""

    kind: Literal["get_inventory"] = "get_inventory"


class OpenSession(_Call):
    """Begin a new incarnation; every local worker says so, the first one counts."""

    kind: Literal["open_session"] = "open_session"
    spec: SessionSpec
    secret: bytes  # the one all hosts agreed on
    readopt: bool = False  # the agent was restarted within this incarnation: keep what was adopted
    committed: Version | None = None  # the newest commit this worker knows of


class Reserve(_Call):
    """Ask for the memory of this rank's shard."""

    kind: Literal["reserve"] = "reserve"
    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_capacity: int


class Request(_Message):
    """Ask for a slot to write ``iteration`` into; a sign of life too."""

    kind: Literal["request"] = "request"
    iteration: int


class Chunk(_Message):
    """A chunk is in the slot (worker to agent), or follows on the wire (agent to agent)."""

    kind: Literal["chunk"] = "chunk"
    owner: int
    iteration: int
    index: int
    offset: int
    nbytes: int
    digest: int


class Copied(_Message):
    """All chunks of the iteration are in the slot."""

    kind: Literal["copied"] = "copied"
    iteration: int
    extras_bytes: int
    digest: str = ""
    root: str  # of the copy, as its owner formed it (gemini_ft.core.roots)


class GiveUp(_Message):
    """No snapshot of this iteration will come from this rank."""

    kind: Literal["give_up"] = "give_up"
    iteration: int
    reason: str


class Progress(_Message):
    """A sign of life; ``suspended``: no next sign is due (validation, saving)."""

    kind: Literal["progress"] = "progress"
    iteration: int
    suspended: bool = False


class Watch(_Message):
    """The worker's control page and bell come beside this (gemini_ft.wire.control_page)."""

    kind: Literal["watch"] = "watch"
    count: int = 2


class Observed(_Message):
    """The worker's steps have a profile, or have none any more."""

    kind: Literal["observed"] = "observed"
    profile: Profile | None


class Figures(_Message):
    """What the gradients took in the last step, for ``gemini status``."""

    kind: Literal["figures"] = "figures"
    figures: dict[str, dict[str, float]]  # rule or group -> figure -> value, see gemini_ft.state.gradients.GradientState


class Dispatched(_Message):
    """A piece has left, or could not."""

    kind: Literal["dispatched"] = "dispatched"
    tag: int
    error: str = ""


class Collected(_Message):
    """A piece is in the agent's memory, or could not be received."""

    kind: Literal["collected"] = "collected"
    source: int
    tag: int
    error: str = ""


class Excuse(_Message):
    """What was resumed does not fit this script: the failure that follows does not count against it."""

    kind: Literal["excuse"] = "excuse"


class Verify(_Call):
    """Ask for a check of every local copy of ``version`` against its checksums."""

    kind: Literal["verify"] = "verify"
    version: Version


class Verified(_Answer):
    """Answer to Verify: owners whose copies are sound; damaged ones have been discarded."""

    kind: Literal["verified"] = "verified"
    version: Version
    sound: list[int]


class Stage(_Call):
    """Ask for a shard of a stored checkpoint to be laid down in this host's memory, as complete as if it had been replicated here."""

    kind: Literal["stage"] = "stage"
    owner: int
    version: Version
    record: str  # gemini_ft.storage.shard.ShardRecord as JSON
    storage: dict[str, object]  # gemini_ft.config.StorageConfig


class Staged(_Answer):
    """Answer to Stage."""

    kind: Literal["staged"] = "staged"
    owner: int
    version: Version


class Map(_Call):
    """Ask for a local slot's descriptor, to read it."""

    kind: Literal["map"] = "map"
    owner: int
    version: Version


class Adopt(_Message):
    """Hand slots back to an agent that was restarted; descriptors travel beside it."""

    kind: Literal["adopt"] = "adopt"
    count: int
    shared: list[bool] = []  # of each, whether another process may still write to it; none: no other can
    incarnation: Incarnation | None = None  # of the worker that hands them back, and may go on writing to them


class Ping(_Message):
    """Ask for a sign of life; allowed before Hello."""

    kind: Literal["ping"] = "ping"


class Goodbye(_Message):
    """The worker leaves: its work is finished, or it was interrupted by the user."""

    kind: Literal["goodbye"] = "goodbye"
    finished: bool


class GetStatus(_Call):
    """Ask what the agent holds and does (``gemini status``)."""

    kind: Literal["get_status"] = "get_status"


class Visit(_Call):
    """A process that is no worker asks what can be read here (``gemini export``, ``gemini checkpoints``); changes nothing."""

    kind: Literal["visit"] = "visit"


class Leave(_Message):
    """Tell the agent of a run to go (the launcher, after the job)."""

    kind: Literal["leave"] = "leave"
    run: str
    finished: bool = False  # the job is, and its last upload is worth waiting for; answered when the agent leaves


class Left(_Message):
    """Answer to a Leave after a finished job."""

    kind: Literal["left"] = "left"
    unstored: str = ""  # why the last upload failed for good


class Inject(_Message):
    """Fault injection (gemini_ft.faults.inject): flip a bit in every copy of ``owner``'s shard on this host."""

    kind: Literal["inject"] = "inject"
    fault: Literal["corrupt"]
    owner: int


# -- agent to worker ------------------------------------------------------------------------------


class Welcome(_Answer):
    """Answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    info: HostInfo
    secret: bytes
    pid: int
    resumed: Version | None  # what the last session resumed, if nothing has been committed since
    attempts: int  # sessions in a row that resumed it
    finished: bool  # this stream's work was already finished in this run
    launch: Launch | None = None  # that opened this stream last
    incarnation: Incarnation | None = None  # the last one of this stream here
    lineage: list[Version] = []  # of that one, see SessionSpec
    overtaken: list[Incarnation] = []
    aside: list[Incarnation] = []


class Inventory(_Answer):
    """Answer to GetInventory."""

    kind: Literal["inventory"] = "inventory"
    slots: list[SlotInfo]
    given_up: list[Version] = []


class Opened(_Answer):
    """The session is open."""

    kind: Literal["opened"] = "opened"


class Reserved(_Answer):
    """The slots' descriptors travel beside this message, in the order of ``slots``."""

    kind: Literal["reserved"] = "reserved"
    layout_hash: str
    slots: list[int]
    data_offset: int
    capacity: int


class Room(_Message):
    """There was no room for all slots of this rank, and there is now: reserve again."""

    kind: Literal["room"] = "room"


class Granted(_Message):
    """The worker may write ``iteration`` into ``slot``."""

    kind: Literal["granted"] = "granted"
    iteration: int
    slot: int


class Committed(_Message):
    """``iteration`` is complete everywhere. Also agent to agent."""

    kind: Literal["committed"] = "committed"
    iteration: int
    freeze: bool = False
    digest_at: int | None = None
    roots: dict[int, str] = {}  # owner -> root of its shard, for those that the addressed host holds


class Aborted(_Message):
    """``iteration`` will never be complete everywhere. Also agent to agent."""

    kind: Literal["aborted"] = "aborted"
    iteration: int
    reason: str


class Failed(_Answer):
    """A request was refused, or (``fatal``) the job must not go on. ``error`` names a class of gemini_ft.errors."""

    kind: Literal["failed"] = "failed"
    error: str
    text: str
    fatal: bool = False


class Notice(_Message):
    """Something the user should read once."""

    kind: Literal["notice"] = "notice"
    text: str


class SpanUse(_Message):
    """What a snapshot sent in one span of idle network."""

    step: int  # steps that the worker had ended
    begun: int  # collectives that it had begun since
    nbytes: int
    first: float  # when the first bytes were let go, seconds of the host's monotonic clock
    last: float  # when the last were


class Travelled(_Message):
    """How a snapshot got to one peer."""

    kind: Literal["travelled"] = "travelled"
    iteration: int
    peer: str
    nbytes: int
    outside: int  # of these, bytes that could not wait for idle network any more
    spans: list[SpanUse]  # that the others were sent in
    seconds: float  # from the first byte to the acknowledgement of the last
    expected: float | None = None  # of these, by the cost model; None: there was no profile yet


class Dispatch(_Message):
    """Send a piece of a slot to another host's worker, in the process group of the replicas."""

    kind: Literal["dispatch"] = "dispatch"
    tag: int
    target: int  # rank
    slot: int
    offset: int
    nbytes: int


class Collect(_Message):
    """Receive a piece of a replica from another host's worker."""

    kind: Literal["collect"] = "collect"
    tag: int
    source: int  # rank
    key: str  # of the memory, as in Custody; empty: throw the bytes away
    position: int  # in that memory
    nbytes: int


class Mapped(_Answer):
    """Answer to Map; the descriptor travels beside it."""

    kind: Literal["mapped"] = "mapped"
    owner: int
    version: Version
    data_offset: int
    data_bytes: int
    extras_bytes: int


class Pong(_Message):
    """Answer to Ping."""

    kind: Literal["pong"] = "pong"
    agent_timeout: float  # seconds of silence after which an agent of this job hangs; 0: never


class Custody(_Message):
    """A replica's descriptor for safe-keeping, so that it survives this agent."""

    kind: Literal["custody"] = "custody"
    key: str
    drop: bool = False


class Status(_Answer):
    """Answer to GetStatus: a JSON document."""

    kind: Literal["status"] = "status"
    document: str


class StreamInfo(_Message):
    """What an agent has of one stream."""

    slots: list[SlotInfo]
    committed: Version | None
    spec: SessionSpec | None  # of the newest incarnation


class Visited(_Answer):
    """Answer to Visit: all a reader needs to fetch shards, here and from the other hosts."""

    kind: Literal["visited"] = "visited"
    run: str
    host: str
    address: tuple[str, int] | None  # None: no worker has come yet, so there is nothing to read
    secret: bytes
    streams: dict[str, StreamInfo]


# -- agent to agent (TCP) -------------------------------------------------------------------------


class Claims(_Message):
    """First words of the dialling side; role ``replicate`` brings shards, ``report`` talks to the leader, ``fetch`` reads.

    TLS has proved by then that both sides know the run secret.
    """

    kind: Literal["claims"] = "claims"
    protocol: int = PROTOCOL_VERSION
    run: str
    stream: str
    host: str
    to: str  # id of the host that is meant; nobody else accepts
    role: Literal["replicate", "report", "fetch"]
    incarnation: Incarnation | None


class Accepted(_Message):
    """The listening side will do what the role needs. Payloads travel on a lane of their own, or, without one, encrypted like messages."""

    kind: Literal["accepted"] = "accepted"
    lane: bytes  # names the connection to which a lane belongs; empty: there is none
    key: bytes  # for the tags of the lane's payloads


class Offer(_Call):
    """A shard that will be sent: the holder makes room."""

    kind: Literal["offer"] = "offer"
    owner: int
    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_capacity: int


class Ready(_Answer):
    """There is room for the offered shard."""

    kind: Literal["ready"] = "ready"
    owner: int
    rank: int | None = None  # of the worker that keeps the replica's memory, and can receive for it


class Refused(_Answer):
    """There is no room, or the offer makes no sense."""

    kind: Literal["refused"] = "refused"
    owner: int
    text: str


class Begin(_Message):
    """Chunks of ``iteration`` follow."""

    kind: Literal["begin"] = "begin"
    owner: int
    iteration: int
    committed: Version | None


class End(_Message):
    """All chunks of ``iteration`` have been sent."""

    kind: Literal["end"] = "end"
    owner: int
    iteration: int
    extras_bytes: int
    chunks: int
    layout: str
    digest: str
    root: str  # of the owner's copy


class Drop(_Message):
    """The sender gave ``iteration`` up."""

    kind: Literal["drop"] = "drop"
    owner: int
    iteration: int


class Ack(_Message):
    """Every byte up to End or Drop has arrived; after End (``ok``) all are verified and kept."""

    kind: Literal["ack"] = "ack"
    owner: int
    iteration: int
    ok: bool


class Parcel(_Message):
    """A piece of a chunk is on its way from worker to worker."""

    kind: Literal["parcel"] = "parcel"
    chunk: Chunk
    start: int  # in the chunk
    nbytes: int
    tag: int
    source: int  # rank
    target: int


class Astray(_Message):
    """What workers should have carried did not arrive: send it from agent to agent."""

    kind: Literal["astray"] = "astray"
    text: str


class Unchanged(_Message):
    """In place of a chunk that is what the sender's slot held there before: the receiver's probably does too."""

    kind: Literal["unchanged"] = "unchanged"
    chunk: Chunk


class Resend(_Message):
    """These chunks did not match their digest, or are not here as they were before (or came while no slot was free: all of them)."""

    kind: Literal["resend"] = "resend"
    owner: int
    iteration: int
    chunks: list[int]
    restart: bool = False


class ReportCompleted(_Message):
    """See gemini_ft.core.protocol.Completed."""

    kind: Literal["report_completed"] = "report_completed"
    owner: int
    host: str
    version: Version
    layout: str
    digest: str
    root: str


class ReportSkipped(_Message):
    """See gemini_ft.core.protocol.Skipped."""

    kind: Literal["report_skipped"] = "report_skipped"
    owner: int
    version: Version
    reason: str


class ReportUploaded(_Message):
    """A shard is in storage (``error`` empty), or could not be put there."""

    kind: Literal["report_uploaded"] = "report_uploaded"
    owner: int
    version: Version
    record: str = ""
    error: str = ""


class ReportFinished(_Message):
    """A rank has finished its work."""

    kind: Literal["report_finished"] = "report_finished"
    rank: int


class Heartbeat(_Message):
    """A host is there, though it has nothing to report."""

    kind: Literal["heartbeat"] = "heartbeat"


class ReportNeed(_Message):
    """How many steps the idle network of a host needs to carry one snapshot."""

    kind: Literal["report_need"] = "report_need"
    host: str
    steps: int
    interval: int  # that the host knows of
    why: str  # in figures


class Paced(_Message):
    """From iteration ``start`` on, snapshots are ``interval`` steps apart."""

    kind: Literal["paced"] = "paced"
    start: int
    interval: int
    why: str


class Rejoin(_Message):
    """A host speaks to the leader for the first time on this connection."""

    kind: Literal["rejoin"] = "rejoin"
    committed: Version | None
    uploading: Version | None
    roots: dict[int, str] = {}  # owner -> root of its committed shard, for those held there; empty where the host does not know it


class HoldersChanged(_Message):
    """See gemini_ft.core.ledger.Holders."""

    kind: Literal["holders_changed"] = "holders_changed"
    epoch: int
    excluded: list[tuple[int, str]]
    newly: list[tuple[int, str]]


class Thawed(_Message):
    """An upload is over; without ``error`` the checkpoint exists."""

    kind: Literal["thawed"] = "thawed"
    version: Version
    error: str = ""


class AllFinished(_Message):
    """Every rank has finished, and the last upload is over: agents may go."""

    kind: Literal["all_finished"] = "all_finished"
    unstored: str = ""  # why the last upload failed for good


class Fetch(_Call):
    """Ask for a range of a complete shard (data and extras are one range)."""

    kind: Literal["fetch"] = "fetch"
    owner: int
    version: Version
    offset: int
    nbytes: int


class Describe(_Call):
    """Ask for a shard's layout and sizes."""

    kind: Literal["describe"] = "describe"
    owner: int
    version: Version


class Description(_Answer):
    """Answer to Describe."""

    kind: Literal["description"] = "description"
    owner: int
    version: Version
    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_bytes: int
    extras_capacity: int
    chunk_bytes: int
    digests: list[int]
    root: str


class GetRoots(_Call):
    """Ask the leader's host which roots were committed."""

    kind: Literal["get_roots"] = "get_roots"
    version: Version


class Roots(_Answer):
    """Answer to GetRoots."""

    kind: Literal["roots"] = "roots"
    version: Version
    roots: dict[int, str]  # owner -> root of its shard, as far as this host knows


class Data(_Answer):
    """``nbytes`` of a fetched shard follow on the wire."""

    kind: Literal["data"] = "data"
    owner: int
    version: Version
    offset: int
    nbytes: int


Message = Annotated[
    Hello | GetInventory | OpenSession | Reserve | Request | Chunk | Copied | GiveUp | Progress | Watch | Observed
    | Figures | Dispatched | Collected | Excuse | Map | Verify | Verified | Stage | Staged | Adopt | Ping | Goodbye | GetStatus | Visit
    | Left | Leave | Pong | Inject | Welcome | Inventory | Opened | Reserved | Granted | Committed | Aborted | Failed | Notice | Travelled
    | Room | Dispatch | Collect | Mapped | Custody | Status | Visited | Claims | Accepted | Offer | Ready | Refused
    | Begin | End | Drop | Ack | Resend | Parcel | Astray | Unchanged | ReportCompleted | ReportSkipped | ReportUploaded
    | ReportFinished | Heartbeat | ReportNeed | Paced | Rejoin | HoldersChanged | Thawed | AllFinished | Fetch | Describe
    | Description | GetRoots | Roots | Data,
    Field(discriminator="kind"),
]  # fmt: skip
_adapter: TypeAdapter[Message] = TypeAdapter(Message)


def check_answer(asked: Message, answer: Message) -> None:
    """Compare an answer with its call: the number, and the shard both speak of.

    Raises:
        PeerError: it answers another call, or speaks of another shard.
    """
    for name in ("call", "owner", "version", "layout_hash"):
        wanted, given = getattr(asked, name, None), getattr(answer, name, None)
        if None not in (wanted, given) and wanted != given:
            raise PeerError(f"{asked.kind!r} asked for {name} {wanted}, the answer {answer.kind!r} is about {name} {given}; it is not used")


def pack(message: _Message) -> bytes:
    """A message as a frame: 4 bytes of length (big endian), then msgpack."""
    body: bytes = msgpack.packb(message.model_dump())
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes | bytearray | memoryview) -> Message:
    """Check one frame's body.

    Raises:
        PeerError: it is not a message of this protocol.
    """
    try:
        return _adapter.validate_python(msgpack.unpackb(body, strict_map_key=False))
    except (ValidationError, ValueError, TypeError, msgpack.UnpackException) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerError(f"not a message of protocol {PROTOCOL_VERSION} ({what}); both sides must run the same gemini-ft") from None
