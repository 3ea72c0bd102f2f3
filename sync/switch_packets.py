"""All that travels between workers and a switch: packets, many at once, messages about jobs, and the sockets that carry both.

A packet's datagram is a header of 36 bytes and, unless it only says its ``side``, the values of one packet. Numbers are little-endian:

    kind u8 | rank u8 | part u16 | slot u32 | round u32 | tag 16 bytes | side i64 | values

The tag is AES-GMAC (NIST SP 800-38D) under the key of one job, with the first twelve bytes as the nonce. They are never the same
for two contents: within a job a rank gives a round of a slot once, and what is sent again is the same. Every job has a key of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

GIVEN, SUMMED = 1, 2  # kinds: of a worker, of the switch
SWITCH = 255  # the rank in what the switch sends
MOST_RANKS = 64  # bits of a slot's bitmap
HEADER = np.dtype([("kind", "u1"), ("rank", "u1"), ("part", "<u2"), ("slot", "<u4"), ("round", "<u4"), ("tag", "u1", 16), ("side", "<i8")])
_NONE: Array = np.zeros(0, np.int64)
_NONCE, _TAGGED = 12, 28  # where the nonce ends, and where begins what follows the tag
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104  # linux/udp.h
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h; above net.core.rmem_max, for root
_MOST_SEGMENTS, _MOST_BYTES = 64, 65_000  # of one call
_MOST_RECEIVED, _ROOM = 2**16, 2**20  # bytes of one call, and of what is received at once
MOST_CALLS = 1024  # that receive at once: of the smallest datagrams, a flood would never fill the room
_UNABLE = (errno.EINVAL, errno.EIO, errno.ENOPROTOOPT, errno.EMSGSIZE)  # a device, or a path, on which the kernel cannot cut
MARK = b"gemini switch 1\n"
_TAG = 32  # bytes of the tag of a control message
_MOST = 1200  # bytes of a control message
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True, kw_only=True)
class Packets:
    """Packets of one sender."""

    slots: Array  # int64 [k]
    rounds: Array  # int64 [k], how often the slot was used before in this job
    sides: Array  # int64 [k], the word beside the values: an exponent, or the next block
    values: Array | None  # uint8 [k, bytes], or None where only the sides are said

    def __len__(self) -> int:
        return len(self.slots)

    def pick(self, chosen: Array) -> Packets:
        """Selects the packets at the given places, or where a mask is set."""
        values = self.values[chosen] if self.values is not None else None
        return Packets(slots=self.slots[chosen], rounds=self.rounds[chosen], sides=self.sides[chosen], values=values)

    def apart(self) -> Iterator[Packets]:
        """The same in portions in which no slot occurs twice."""
        rest = self
        while not (rest.slots[1:] > rest.slots[:-1]).all():  # ascending is how they come, unless they were lost or reordered
            first = np.unique(rest.slots, return_index=True)[1]
            yield rest.pick(first)
            rest = rest.pick(np.setdiff1d(np.arange(len(rest)), first))
        if len(rest):
            yield rest

    @staticmethod
    def join(parts: Sequence[Packets]) -> list[Packets]:
        """The same packets in as few portions as possible: those with values, and those without."""
        kinds = ([part for part in parts if part.values is not None], [part for part in parts if part.values is None])
        return [_concatenate(kind) if len(kind) > 1 else kind[0] for kind in kinds if kind]


def _concatenate(parts: Sequence[Packets]) -> Packets:
    slots, rounds, sides = (np.concatenate([getattr(part, name) for part in parts]) for name in ("slots", "rounds", "sides"))
    values = [part.values for part in parts if part.values is not None]
    return Packets(slots=slots, rounds=rounds, sides=sides, values=np.concatenate(values) if values else None)


def span(places: Array) -> Array | slice:
    """The same places as a slice if they follow each other, since numpy copies nothing then."""
    count = len(places)
    if count and places[-1] - places[0] == count - 1 and (places[1:] - places[:-1] == 1).all():
        return slice(int(places[0]), int(places[0]) + count)
    return places


def encode(packets: Packets, kind: int, rank: int, part: int, key: AESGCM) -> Array:
    """Sealed datagrams, uint8 [k, length]."""
    width = 0 if packets.values is None else packets.values.shape[1]
    datagrams = np.empty((len(packets), HEADER.itemsize + width), np.uint8)
    header = datagrams[:, : HEADER.itemsize].view(HEADER)[:, 0]
    header["kind"], header["rank"], header["part"] = kind, rank, part
    header["slot"], header["round"], header["side"] = packets.slots, packets.rounds, packets.sides
    if packets.values is not None:
        datagrams[:, HEADER.itemsize :] = packets.values
    lines, length, seal = datagrams.reshape(-1).data, datagrams.shape[1], key.encrypt
    for at in range(0, len(lines), length):
        lines[at + _NONCE : at + _TAGGED] = seal(lines[at : at + _NONCE], b"", lines[at + _TAGGED : at + length])
    return datagrams


def decode(datagrams: Array, kind: int, rank: int, part: int, key: AESGCM) -> tuple[Packets, int]:
    """The packets in datagrams of equal length that are from this sender and sealed by it, and how many are not."""
    length, unseal = datagrams.shape[1], key.decrypt
    if length < HEADER.itemsize:
        return Packets(slots=_NONE, rounds=_NONE, sides=_NONE, values=None), len(datagrams)
    header = datagrams[:, : HEADER.itemsize].view(HEADER)[:, 0]
    good = (header["kind"] == kind) & (header["rank"] == rank) & (header["part"] == part)
    lines = np.ascontiguousarray(datagrams).reshape(-1).data
    for number in np.flatnonzero(good).tolist():
        at = number * length
        try:
            unseal(lines[at : at + _NONCE], lines[at + _NONCE : at + _TAGGED], lines[at + _TAGGED : at + length])
        except InvalidTag:
            good[number] = False
    if not good.all():
        datagrams, header = datagrams[good], header[good]
    values = datagrams[:, HEADER.itemsize :] if length > HEADER.itemsize else None
    packets = Packets(
        slots=header["slot"].astype(np.int64), rounds=header["round"].astype(np.int64), sides=header["side"].astype(np.int64), values=values
    )
    return packets, len(good) - len(packets)


class Datagrams:
    """A UDP socket. The kernel cuts one buffer into datagrams (UDP_SEGMENT), and gives neighbours that came together as one (UDP_GRO).

    So a batch is a two-dimensional array on both sides, for one system call and one way through the kernel. With recvmmsg and sendmmsg
    each datagram would still be a packet of its own in the kernel, which costs more than the call.

    Args:
        bound: an unconnected socket, or a connected one, which hears when nobody listens at the other end.
        buffer: bytes that may wait in the kernel in each direction; it may give less (net.core.rmem_max, wmem_max).
    """

    def __init__(self, bound: socket.socket, buffer: int = 2**23) -> None:
        self.socket = bound
        self._segments = True
        self._room = np.empty(_ROOM, np.uint8)
        self._ancillary = socket.CMSG_SPACE(struct.calcsize("i"))
        for force, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            bound.setsockopt(socket.SOL_SOCKET, plain, buffer)
            with contextlib.suppress(OSError):
                bound.setsockopt(socket.SOL_SOCKET, force, buffer)
        with contextlib.suppress(OSError):  # without it datagrams come one by one
            bound.setsockopt(_SOL_UDP, _UDP_GRO, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def receive(self) -> list[tuple[Array, Any]]:
        """Datagrams that have come, with their senders; nothing if there are none, and no more than fit the buffer or `MOST_CALLS` bring.

        Returns uint8 [k, length] arrays of datagrams with one sender and length. They are valid until the next call.

        Raises ConnectionRefusedError: nobody listens at the other end of a connected socket.
        """
        found: list[tuple[int, int, int, Any]] = []  # begin, end, length, sender; what continues the one before is added to it
        at = 0
        for _ in range(MOST_CALLS):
            if at + _MOST_RECEIVED > len(self._room):
                break
            try:
                count, ancillary, _, sender = self.socket.recvmsg_into([self._room[at:].data], self._ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            length = next((struct.unpack("i", data)[0] for level, kind, data in ancillary if (level, kind) == (_SOL_UDP, _UDP_GRO)), count)
            whole = at + count // length * length if length else at
            for begin, end, each in ((at, whole, length), (whole, at + count, at + count - whole)):
                if begin < end and found and found[-1][1:] == (begin, each, sender):
                    found[-1] = (found[-1][0], end, each, sender)
                elif begin < end:
                    found.append((begin, end, each, sender))
            at += count
        return [(self._room[begin:end].reshape(-1, length), sender) for begin, end, length, sender in found]

    def send(self, datagrams: Array, address: Any = None) -> None:
        """Sends uint8 [k, length]; waits while the kernel's buffer is full.

        Raises ConnectionRefusedError: nobody listens at the other end of a connected socket.
        """
        count, length = datagrams.shape
        step = max(1, min(_MOST_SEGMENTS, _MOST_BYTES // max(1, length))) if self._segments else 1
        where = () if address is None else (address,)
        for at in range(0, count, step):
            part = datagrams[at : at + step]
            cut = [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", length))] if len(part) > 1 else []
            try:
                self.socket.sendmsg([part.data], cut, 0, *where)
            except OSError as error:
                if error.errno not in _UNABLE or len(part) == 1:
                    raise
                self._segments = False
                return self.send(datagrams[at:], address)
        return None


def await_any(sockets: Sequence[Datagrams | socket.socket], seconds: float | None = None) -> set[int]:
    """Waits until one of the sockets can be read, or for so long; the descriptors of those that can.

    Not with ``select``, which takes no descriptor from 1024 on: a training process may have that many files open.
    """
    poll = select.poll()
    for each in sockets:
        poll.register(each.fileno(), select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)}


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
    return AESGCM(derive(key, b"job " + bytes.fromhex(boot + job), 16))


class Envelope:
    """Seals control messages and opens them. Workers and a switch agree by them on a job, before its first packet and after its last.

        worker -> switch  Hello                   switch -> worker  Welcome(boot, cookie, part, parts)
        worker -> switch  Join(cookie, job, ...)  switch -> worker  Joined, or Refused with the reason
        worker -> switch  Leave

    Each is a datagram: a mark, a tag (HMAC-SHA256), JSON. All of a switch's workers share one key with it. Keys of jobs are derived from
    it, the name of the job, which its workers make up for this one time, and ``boot``, which a switch makes up when it starts: nothing that
    was recorded in one job or before a restart is good for another. A cookie proves that a worker receives what is sent to its address.
    """

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
