"""Messages by which workers and a switch agree on a job, before its first packet and after its last.

    worker -> switch  Hello                   switch -> worker  Welcome(boot, cookie, part, parts)
    worker -> switch  Join(cookie, job, ...)  switch -> worker  Joined, or Refused with the reason
    worker -> switch  Leave

Each is a datagram: a mark, a tag (HMAC-SHA256), JSON. All of a switch's workers share one key with it. Keys of jobs are derived from it,
the name of the job, which its workers make up for this one time, and ``boot``, which a switch makes up when it starts: nothing that
was recorded in one job or before a restart is good for another. A cookie proves that a worker receives what is sent to its address.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .switch_packets import MOST_RANKS

MARK = b"gemini switch 1\n"
_TAG = 32
_MOST = 1200  # bytes
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SwitchHello(_Message):
    kind: Literal["hello"] = "hello"


class SwitchWelcome(_Message):
    """Attributes: ``part`` of ``parts`` of the slots is what this switch has, from 0 on."""

    kind: Literal["welcome"] = "welcome"
    boot: _Hex
    cookie: _Hex
    part: int
    parts: int


class Join(_Message):
    """A worker's request to be one of a job's ``world``; all but cookie and rank must be the same for all of them."""

    kind: Literal["join"] = "join"
    cookie: _Hex
    job: _Hex
    rank: int = Field(ge=0, lt=MOST_RANKS)
    world: int = Field(ge=1)
    adder: str = Field(max_length=20)
    largest: bool
    slots: int = Field(ge=1, le=2**16)
    nbytes: int = Field(ge=8, le=2**15, multiple_of=8)


class Joined(_Message):
    kind: Literal["joined"] = "joined"
    job: _Hex
    rank: int


class SwitchRefused(_Message):
    kind: Literal["refused"] = "refused"
    job: _Hex
    reason: str


class SwitchLeave(_Message):
    """A worker's word that its job is over, for all of them."""

    kind: Literal["leave"] = "leave"
    job: _Hex


Message = SwitchHello | SwitchWelcome | Join | Joined | SwitchRefused | SwitchLeave
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def derive(key: bytes, purpose: bytes, length: int = 32) -> bytes:
    """A key for one purpose."""
    return HKDF(hashes.SHA256(), length, salt=None, info=b"gemini-ft switch " + purpose).derive(key)


def job_key(key: bytes, boot: str, job: str) -> AESGCM:
    """The key of a job's packets."""
    return AESGCM(derive(key, b"job " + bytes.fromhex(boot + job), 16))


class Envelope:
    """Seals control messages and opens them."""

    def __init__(self, key: bytes) -> None:
        if not key:
            raise ValueError("an empty key would let everybody in")
        self._key = derive(key, b"control")

    def seal(self, message: Message) -> bytes:
        text = message.model_dump_json().encode()
        return MARK + self._tag(text) + text

    def open(self, datagram: bytes) -> Message | None:
        """The message, or None if it is none or not sealed with this key."""
        text = datagram[len(MARK) + _TAG :]
        if len(datagram) > _MOST or not hmac.compare_digest(datagram[: len(MARK) + _TAG], MARK + self._tag(text)):
            return None
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError:
            return None

    def _tag(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")
