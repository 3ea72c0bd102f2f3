"""The form of messages, and those that travel on more than one channel.

Agents and workers exchange msgpack maps that are checked against models, and never pickle. A channel is what one side may say to another
(gemini_ft.wire.worker_messages, gemini_ft.wire.peer_messages): a message of another kind, with an unknown field, or that does not fit its
model is refused as a whole.

A call carries a number of its asker's choice, its answer the same number and the shard it is about: an answer that
comes after its asker's patience has ended must not be taken for the answer to the next call (`check_answer`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sized
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from gemini_ft.core.versions import Version
from gemini_ft.errors import PeerError, printable

PROTOCOL_VERSION = 17
MAX_MESSAGE = 64 * 2**20  # bytes; layouts of very large models are the longest messages
MOST_VALUES = 2**22  # values in lists and maps of a message; each may unfold into 72 bytes
Text = Annotated[str, AfterValidator(printable)]  # which another process has written, for the user's terminal or a log
M = TypeVar("M")
T = TypeVar("T", bound=Sized)
_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # made when a kind is met first


class Message(BaseModel):
    """A message with checked fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Call(Message):
    """A message that is answered, if only by Failed."""

    call: int = 0  # its number on this connection; 0: the asker never has two of them under way


class Answer(Message):
    """A message that is only sent as the answer to a call."""

    call: int = 0  # number of the call that is answered


class ShardCall(Call):
    """A call about one shard of one version."""

    owner: int
    version: Version


class ShardAnswer(Answer):
    """The answer to a `ShardCall`, about the same shard."""

    owner: int
    version: Version


class ShardLayout(Message):
    """The layout and sizes of a shard, by which a slot for it is made."""

    layout: bytes
    layout_hash: str
    data_bytes: int
    extras_capacity: int


class Chunk(Message):
    """A chunk that is in the slot (worker to agent), or follows on the wire (agent to agent)."""

    owner: int
    iteration: int
    index: int
    offset: int
    nbytes: int
    digest: int


class Failed(Answer):
    """The refusal of a request, or (``fatal``) the end of the job. ``error`` names a class of gemini_ft.errors."""

    error: str
    text: Text
    fatal: bool = False


class Notice(Message):
    """A text that the user should read once."""

    text: Text


class Paced(Message):
    """The number of steps between snapshots, ``interval``, from iteration ``start`` on."""

    start: int
    interval: int
    why: Text


class Channel(Generic[M]):
    """The kinds of messages that one side may send to another. ``kinds``: their union, of subclasses of Message and of dataclasses."""

    def __init__(self, kinds: UnionType) -> None:
        self._kinds: dict[str, type[M]] = {kind_of(kind): kind for kind in get_args(kinds)}

    def unpack(self, body: bytes | bytearray | memoryview, most_values: int = MOST_VALUES) -> M:
        """Checks the body of one frame, which may have ``most_values`` values in lists and maps.

        Raises PeerError: it is not a message of this channel.
        """
        try:
            fields = msgpack.unpackb(body, strict_map_key=False, **(_limits(most_values) if len(body) > most_values else {}))
            kind = self._kinds[fields.pop("kind")]
            if dataclasses.is_dataclass(kind) and (unknown := fields.keys() - {field.name for field in dataclasses.fields(kind)}):
                raise ValueError(f"{kind_of(kind)!r} has no {', '.join(map(str, sorted(unknown, key=str)[:3]))}")
            message: M = _adapter(kind).validate_python(fields)
        except (ValidationError, LookupError, ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            if isinstance(error, ValidationError):  # whose text has a paragraph for each of perhaps a million values
                what = f"{error.error_count()} values of {error.title} are wrong"
            else:
                what = (str(error).splitlines() or [type(error).__name__])[0]
            raise PeerError(f"not a message of protocol {PROTOCOL_VERSION} ({what}); both sides must run the same gemini-ft") from None
        return message


def _limits(most_values: int) -> dict[str, Any]:
    """Options of msgpack with which a short message cannot unfold into gigabytes."""
    values = 0

    def counted(part: T) -> T:
        nonlocal values
        if (values := values + len(part)) > most_values:
            raise ValueError(f"more than {most_values:,} values")
        return part

    return {"list_hook": counted, "object_hook": counted, "max_array_len": most_values, "max_map_len": most_values}


def kind_of(message: object) -> str:
    """The name of a message, or of a class of messages, on the wire: ``OpenSession`` is an ``open_session``."""
    kind = message if isinstance(message, type) else type(message)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def pack(message: object) -> bytes:
    """A message as a frame: 4 bytes of length (big endian), then msgpack. Sets travel as sorted lists, bytes that are no UTF-8 escaped."""
    fields = _adapter(type(message)).dump_python(message)
    body: bytes = msgpack.packb({"kind": kind_of(message), **fields}, default=sorted, unicode_errors="backslashreplace")
    return len(body).to_bytes(4, "big") + body


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def check_answer(asked: object, answer: object) -> None:
    """Compares an answer with its call: the number, and the shard that both are about.

    Raises PeerError: it answers another call, or speaks of another shard.
    """
    for name in ("call", "owner", "version", "layout_hash"):
        wanted, given = getattr(asked, name, None), getattr(answer, name, None)
        if None not in (wanted, given) and wanted != given:
            about = f"the answer {kind_of(answer)!r} is about {name} {given}; it is not used"
            raise PeerError(f"{kind_of(asked)!r} asked for {name} {wanted}, {about}")
