"""The messages between agents of different hosts (TCP), and to workers that read from an agent of another host.

Reports and decisions of the commit protocol travel as gemini_ft.core has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gemini_ft.core.autopsy import RankFound
from gemini_ft.core.decisions import Abort, Commit, Fatal, Holders, Thaw
from gemini_ft.core.effects import Completed, Copies, Gathered, GatheredSkips, Skipped
from gemini_ft.core.stragglers import WorkTime
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
    pack,
)

MOST_LANES = 64  # of a connection
READER_LANES = 4  # of one that reads


class Claims(Message):
    """The first message of the dialling side; role ``replicate`` brings shards, ``report`` talks to the leader or a
    collector, ``fetch`` reads.

    TLS has proved by then that both sides know the run secret.
    """

    protocol: int = PROTOCOL_VERSION
    run: str
    stream: str
    host: str
    to: str  # id of the host that is meant; no other accepts
    role: Literal["replicate", "report", "fetch"]
    incarnation: Incarnation | None
    epoch: int = 0  # with ``report``: the one that the other host is asked to lead, unless it knows of a newer one
    promised: int = 0  # with ``report``: the newest one of which the dialling host knows that it is led
    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)] = 1  # for payloads; with ``report`` there are none
    encrypt: bool = False  # whether this side wants payloads encrypted; they are if either does

    @property
    def lanes_due(self) -> int:
        """The number of lanes that the connection gets."""
        return {"replicate": self.lanes, "report": 0, "fetch": min(self.lanes, READER_LANES)}[self.role]


class Accepted(Message):
    """The listening side's consent."""

    lanes: list[bytes]  # what opens each lane for payloads: ID_BYTES that name it, and its key of KEY_BYTES
    encrypt: bool  # whether payloads are encrypted


class Offer(ShardLayout, Call):
    """Announces a shard that will be sent: the holder makes room."""

    owner: int


class Ready(Answer):
    """Reports that there is room for the offered shard."""

    owner: int
    rank: int | None = None  # of the worker that keeps the replica's memory, and can receive for it


class Refused(Answer):
    """Reports that there is no room, or that the offer makes no sense."""

    owner: int
    text: Text


class Begin(Message):
    """Announces that chunks of ``iteration`` follow."""

    owner: int
    iteration: int
    committed: Version | None


class End(Message):
    """Reports that all chunks of ``iteration`` have been sent."""

    owner: int
    iteration: int
    extras_bytes: int
    chunks: int
    layout: str
    digest: str
    root: str  # of the owner's copy


class Drop(Message):
    """Reports that the sender gave ``iteration`` up."""

    owner: int
    iteration: int


class Ack(Message):
    """Acknowledges every byte up to End or Drop; after End (``ok``) all are verified and kept."""

    owner: int
    iteration: int
    ok: bool


class ChunkPart(Message):
    """A piece of a chunk that comes by another way than a lane; ``tag`` is its number in the sender's session."""

    chunk: Chunk
    start: int  # in the chunk
    nbytes: int
    tag: int
    source: int = -1  # rank of the worker that sends it; -1: none does


class Parcel(ChunkPart):
    """Announces that a piece is on its way from worker to worker."""

    target: int


class Exposed(Message):
    """Says how slots of this host are found, of which pieces may be read."""

    name: str
    metadata: bytes  # NIXL's
    key: bytes  # of the tags of pieces on this connection


class Readable(ChunkPart):
    """Asks the receiver to read a piece."""

    address: int
    seal: bytes  # its tag of AES-GMAC


class Taken(Message):
    """Reports that a piece was read."""

    tag: int


class Astray(Message):
    """Reports that pieces did not arrive by way of workers or by RDMA: send them from agent to agent."""

    text: Text


class Unchanged(Message):
    """Stands for a chunk that equals the sender's former bytes in the same place: the receiver's probably do too."""

    chunk: Chunk


class Resend(Message):
    """Asks for chunks that did not match their digest, or are not here as before (or came while no slot was free: all of them)."""

    owner: int
    iteration: int
    chunks: list[int]
    restart: bool = False


class ReportUploaded(Message):
    """Reports that a shard is in storage (``error`` empty), or could not be put there."""

    owner: int
    version: Version
    record: str = ""
    error: Text = ""


class ReportFinished(Message):
    """Reports that a rank has finished its work, or that it is lost: its process or its attempt has ended without a word."""

    rank: int
    lost: bool = False


class Heartbeat(Message):
    """A sign of life of a host that has had nothing to say for a while."""


class ReportNeed(Message):
    """Reports how many steps the idle network of a host needs to carry one snapshot."""

    host: str
    steps: int
    interval: int  # that the host knows of
    why: Text  # in figures


class Relayed(Message):
    """Passes a message on by way of a collector: of one host to the leader, or of the leader to some hosts."""

    hosts: list[str]
    body: bytes  # the message, as it is in a frame

    @classmethod
    def of(cls, hosts: list[str], message: PeerMessage) -> Relayed:
        """Wraps a message; ``peers.unpack(body)`` is the way back."""
        return cls(hosts=hosts, body=pack(message)[4:])


class Admitted(Message):
    """Answers a `Rejoin` that came by way of a collector: from here on the leader tells that host what it tells all."""

    host: str
    attempt: int


class Silent(Message):
    """Reports the hosts of a collector of which nothing is heard: all of them, each time that they are others."""

    hosts: list[str]


class WayUp(Message):
    """The first message to a host that reports: whether its reports go to the leader from here, and the epoch that this host knows of.

    A collector says it again when it has lost the leader, and when it has reached one anew, so that its hosts must say everything again.
    """

    is_open: bool
    epoch: int = 0


class Rejoin(Message):
    """The first message of a host to the leader on this connection, or after a collector has reached the leader anew."""

    epoch: int = 0  # in which this host reports from now on; it obeys no older one any more
    attempt: int = 0  # greater than those of all that the host has sent before in this incarnation
    committed: Version | None
    uploading: Version | None
    roots: dict[int, str] = {}  # owner -> root of its committed shard, for those held there; empty where the host does not know it
    unstored: Text = ""  # why the last upload failed of which this host knows the end; empty: it did not


class UploadSoon(Message):
    """Asks the leader for an upload of the next version that can be: a host is leaving."""


class DrainHost(Message):
    """Asks for a host to be drained: first the leader, then, from there, the host itself."""

    host: str


class Examine(Message):
    """Asks a host what its workers do: a worker of the job hangs."""


class Examined(Message):
    """Reports what a host has found of its own workers."""

    host: str
    ranks: list[RankFound]


class Autopsied(Message):
    """Tells why the job hangs (gemini_ft.core.autopsy.Verdict), and the whole report."""

    cause: Text
    ranks: list[int]
    text: Text
    report: str


class ReportWork(Message):
    """Reports the times of this host's ranks in a window of steps (gemini_ft.core.stragglers)."""

    host: str
    window: int  # the iteration at which it has ended
    ranks: dict[int, WorkTime]


class Stragglers(Message):
    """Tells which ranks are slow from now on, and in words what has changed."""

    ranks: list[int]
    text: Text


class AskAccount(Message):
    """Asks a host for its agent's account of itself, as the leader's web page is being read."""


class ReportAccount(Message):
    """Gives a host's account of itself (``gemini status --json``), but for what never leaves the host."""

    host: str
    document: str


class AllFinished(Message):
    """Tells agents that they may go: every rank has finished, and the last upload is over."""

    unstored: Text = ""  # why the last upload failed for good


class Fetch(ShardCall):
    """Asks for a range of a complete shard (data and extras are one range)."""

    offset: int
    nbytes: int


class Describe(ShardCall):
    """Asks for a shard's layout and sizes."""


class Description(ShardLayout, ShardAnswer):
    """The answer to Describe."""

    extras_bytes: int
    chunk_bytes: int
    digests: list[int]
    root: str


class GetRoots(Call):
    """Asks the leader's host which roots were committed."""

    version: Version


class Roots(Answer):
    """The answer to GetRoots."""

    version: Version
    roots: dict[int, str]  # owner -> root of its shard, as far as this host knows


class Data(ShardAnswer):
    """Announces ``nbytes`` of a fetched shard, which follow on the wire."""

    offset: int
    nbytes: int


PeerMessage = (
    Claims | Accepted | Offer | Ready | Refused | Begin | End | Drop | Ack | Parcel | Exposed | Readable | Taken | Astray | Unchanged
    | Resend | ReportUploaded | ReportFinished | Heartbeat | ReportNeed | Rejoin | Relayed | Admitted | Silent | WayUp | UploadSoon
    | DrainHost | AllFinished | Fetch | Describe | Description | GetRoots | Roots | Data | Chunk | Failed | Notice | Paced | Completed
    | Copies | Gathered | GatheredSkips | Skipped | Examine | Examined | Autopsied | ReportWork | Stragglers | AskAccount | ReportAccount
    | Commit | Abort | Holders | Thaw | Fatal
)  # fmt: skip
peers: Channel[PeerMessage] = Channel(PeerMessage)
