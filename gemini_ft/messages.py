"""Everything agents and workers say to each other: msgpack maps checked against these models, never pickled.

A message that does not fit its model is refused as a whole; unknown fields and unknown kinds too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gemini_ft.config import DEFAULT_TRAFFIC, TrafficConfig
from gemini_ft.errors import PeerError
from gemini_ft.traffic import Profile
from gemini_ft.versions import Incarnation, Version

PROTOCOL_VERSION = 3
MAX_MESSAGE = 64 * 2**20  # bytes; layouts of very large models are the longest messages


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlotInfo(_Message):
    """One slot of an inventory."""

    owner: int
    version: Version
    world_size: int
    layout_hash: str
    data_bytes: int
    extras_bytes: int
    age: float  # seconds since its last byte was written


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
    sources: dict[int, list[str]] = {}  # who holds the resumed version of each shard
    given_up: list[Version] = []  # versions that led to failure after failure
    replica_timeout: float = 30.0
    hang_timeout: float | None = None
    chunk_bytes: int = 8 * 2**20
    storage: dict[str, object] | None = None  # StorageConfig, as checked on every rank
    interval: int | None = 1  # steps between snapshots; None: as many as the network needs
    traffic: TrafficConfig = DEFAULT_TRAFFIC


# -- worker to agent (Unix socket) ----------------------------------------------------------------


class Hello(_Message):
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
    tls: dict[str, str] | None = None


class GetInventory(_Message):
    """Ask for all complete slots of the stream on this host."""

    kind: Literal["get_inventory"] = "get_inventory"


class OpenSession(_Message):
    """Begin a new incarnation; every local worker says so, the first one counts."""

    kind: Literal["open_session"] = "open_session"
    spec: SessionSpec
    secret: bytes  # the one all hosts agreed on
    readopt: bool = False  # the agent was restarted within this incarnation: keep what was adopted
    committed: Version | None = None  # the newest commit this worker knows of


class Reserve(_Message):
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
    """The worker's control page and bell come beside this (gemini_ft.controlpage)."""

    kind: Literal["watch"] = "watch"
    count: int = 2


class Observed(_Message):
    """The worker's steps have a profile, or have none any more."""

    kind: Literal["observed"] = "observed"
    profile: Profile | None


class Figures(_Message):
    """What the gradients took in the last step, for ``gemini status``."""

    kind: Literal["figures"] = "figures"
    figures: dict[str, dict[str, float]]  # rule or group -> figure -> value, see gemini_ft.gradients.GradientState


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


class Verify(_Message):
    """Ask for a check of every local copy of ``version`` against its checksums."""

    kind: Literal["verify"] = "verify"
    version: Version


class Verified(_Message):
    """Answer to Verify: owners whose copies are sound; damaged ones have been discarded."""

    kind: Literal["verified"] = "verified"
    sound: list[int]


class Stage(_Message):
    """Ask for a shard of a stored checkpoint to be laid down in this host's memory, as complete as if it had been replicated here."""

    kind: Literal["stage"] = "stage"
    owner: int
    version: Version
    record: str  # gemini_ft.storage.shard.ShardRecord as JSON
    storage: dict[str, object]  # gemini_ft.config.StorageConfig
    chunk_bytes: int


class Staged(_Message):
    """Answer to Stage."""

    kind: Literal["staged"] = "staged"


class Map(_Message):
    """Ask for a local slot's descriptor, to read it."""

    kind: Literal["map"] = "map"
    owner: int
    version: Version


class Adopt(_Message):
    """Hand slots back to an agent that was restarted; descriptors travel beside it."""

    kind: Literal["adopt"] = "adopt"
    count: int


class Goodbye(_Message):
    """The worker leaves: its work is finished, or it was interrupted by the user."""

    kind: Literal["goodbye"] = "goodbye"
    finished: bool


class GetStatus(_Message):
    """Ask what the agent holds and does (``gemini status``)."""

    kind: Literal["get_status"] = "get_status"


class Visit(_Message):
    """A process that is no worker asks what can be read here (``gemini export``, ``gemini checkpoints``); changes nothing."""

    kind: Literal["visit"] = "visit"


class Leave(_Message):
    """Tell the agent of a run to go (the launcher, after the job)."""

    kind: Literal["leave"] = "leave"
    run: str


class Inject(_Message):
    """Fault injection (gemini_ft.faults): flip a bit in every copy of ``owner``'s shard on this host."""

    kind: Literal["inject"] = "inject"
    fault: Literal["corrupt"]
    owner: int


# -- agent to worker ------------------------------------------------------------------------------


class Welcome(_Message):
    """Answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    info: HostInfo
    secret: bytes
    pid: int
    resumed: Version | None  # what the last session resumed, if nothing has been committed since
    attempts: int  # sessions in a row that resumed it
    finished: bool  # this stream's work was already finished in this run


class Inventory(_Message):
    """Answer to GetInventory."""

    kind: Literal["inventory"] = "inventory"
    slots: list[SlotInfo]
    given_up: list[Version] = []


class Opened(_Message):
    """The session is open."""

    kind: Literal["opened"] = "opened"


class Reserved(_Message):
    """The slots' descriptors travel beside this message, in the order of ``slots``."""

    kind: Literal["reserved"] = "reserved"
    slots: list[int]
    data_offset: int
    capacity: int


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


class Aborted(_Message):
    """``iteration`` will never be complete everywhere. Also agent to agent."""

    kind: Literal["aborted"] = "aborted"
    iteration: int
    reason: str


class Failed(_Message):
    """A request was refused, or (``fatal``) the job must not go on. ``error`` names a class of gemini_ft.errors."""

    kind: Literal["failed"] = "failed"
    error: str
    text: str
    fatal: bool = False
    reply_to: str = ""  # kind of the message that was refused


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


class Mapped(_Message):
    """Answer to Map; the descriptor travels beside it."""

    kind: Literal["mapped"] = "mapped"
    data_offset: int
    data_bytes: int
    extras_bytes: int


class Custody(_Message):
    """A replica's descriptor for safe-keeping, so that it survives this agent."""

    kind: Literal["custody"] = "custody"
    key: str
    drop: bool = False


class Status(_Message):
    """Answer to GetStatus: a JSON document."""

    kind: Literal["status"] = "status"
    document: str


class StreamInfo(_Message):
    """What an agent has of one stream."""

    slots: list[SlotInfo]
    committed: Version | None
    spec: SessionSpec | None  # of the newest incarnation


class Visited(_Message):
    """Answer to Visit: all a reader needs to fetch shards, here and from the other hosts."""

    kind: Literal["visited"] = "visited"
    run: str
    host: str
    address: tuple[str, int] | None  # None: no worker has come yet, so there is nothing to read
    secret: bytes
    tls: dict[str, str] | None
    streams: dict[str, StreamInfo]


# -- agent to agent (TCP) -------------------------------------------------------------------------


class Challenge(_Message):
    """First words of the listening side."""

    kind: Literal["challenge"] = "challenge"
    protocol: int = PROTOCOL_VERSION
    nonce: bytes


class Proof(_Message):
    """The dialling side knows the secret; role ``replicate`` brings shards, ``report`` talks to the leader, ``fetch`` reads."""

    kind: Literal["proof"] = "proof"
    run: str
    stream: str
    host: str
    role: Literal["replicate", "report", "fetch"]
    incarnation: Incarnation | None
    nonce: bytes
    mac: bytes


class Accepted(_Message):
    """The listening side knows the secret too."""

    kind: Literal["accepted"] = "accepted"
    mac: bytes


class Offer(_Message):
    """A shard that will be sent: the holder makes room."""

    kind: Literal["offer"] = "offer"
    owner: int
    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_capacity: int


class Ready(_Message):
    """There is room for the offered shard."""

    kind: Literal["ready"] = "ready"
    owner: int
    rank: int | None = None  # of the worker that keeps the replica's memory, and can receive for it


class Refused(_Message):
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
    """See gemini_ft.protocol.Completed."""

    kind: Literal["report_completed"] = "report_completed"
    owner: int
    host: str
    version: Version
    layout: str
    digest: str


class ReportSkipped(_Message):
    """See gemini_ft.protocol.Skipped."""

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


class HoldersChanged(_Message):
    """See gemini_ft.ledger.Holders."""

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
    """Every rank has finished: agents may go."""

    kind: Literal["all_finished"] = "all_finished"


class Fetch(_Message):
    """Ask for a range of a complete shard (data and extras are one range)."""

    kind: Literal["fetch"] = "fetch"
    owner: int
    version: Version
    offset: int
    nbytes: int


class Describe(_Message):
    """Ask for a shard's layout and sizes."""

    kind: Literal["describe"] = "describe"
    owner: int
    version: Version


class Description(_Message):
    """Answer to Describe."""

    kind: Literal["description"] = "description"
    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_bytes: int
    extras_capacity: int
    chunk_bytes: int
    digests: list[int]


class Data(_Message):
    """``nbytes`` of a fetched shard follow on the wire."""

    kind: Literal["data"] = "data"
    offset: int
    nbytes: int
    digest: int


Message = Annotated[
    Hello | GetInventory | OpenSession | Reserve | Request | Chunk | Copied | GiveUp | Progress | Watch | Observed
    | Figures | Dispatched | Collected | Excuse | Map | Verify | Verified | Stage | Staged | Adopt | Goodbye | GetStatus | Visit | Leave
    | Inject | Welcome | Inventory | Opened | Reserved | Granted | Committed | Aborted | Failed | Notice | Travelled
    | Dispatch | Collect | Mapped | Custody | Status | Visited | Challenge | Proof | Accepted | Offer | Ready | Refused
    | Begin | End | Drop | Ack | Resend | Parcel | Astray | Unchanged | ReportCompleted | ReportSkipped | ReportUploaded
    | ReportFinished | Heartbeat | ReportNeed | Paced | Rejoin | HoldersChanged | Thawed | AllFinished | Fetch | Describe
    | Description | Data,
    Field(discriminator="kind"),
]  # fmt: skip
_adapter: TypeAdapter[Message] = TypeAdapter(Message)


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
