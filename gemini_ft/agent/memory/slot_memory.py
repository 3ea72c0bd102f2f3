"""Memory that outlives the worker: sealed memfds that describe themselves.

A slot's memfd, front to back:

    header    4096 bytes   magic, length, msgpack map with the identity, xxh3_64 of the map; in its last 8 bytes this once more,
                           when the version is known to be committed
    digests   8 bytes per chunk, little endian xxh3_64, in chunk order
    layout    the shard's layout, as gemini_ft.core.layout writes it
    data      page aligned; the shard's tensor bytes, then its extras

Only the agent writes the first three; a worker writes data. An agent that takes the memfd over from a worker
finds everything it needs in the header, so its predecessor's death loses nothing. A header that gives the slot a version
has the root of the copy too (`gemini_ft.core.roots`), which ties all four parts together.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import msgpack
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from gemini_ft.agent.memory import slot_files
from gemini_ft.agent.memory.slot_files import SlotFiles
from gemini_ft.core.roots import checksum, layout_digest, running_checksum, shard_root
from gemini_ft.core.versions import MOST, Version
from gemini_ft.errors import CorruptDataError, FormatError

_MAGIC = b"GEMINIFT"
_OF_SHAPE = ("run", "stream", "owner", "world_size", "layout_hash", "data_bytes", "extras_capacity", "chunk_bytes")
FORMAT = 6  # of a slot's header, and of all that lies behind it
EXTRAS_ROOM = 2**20  # bytes of small state a slot has room for at least
_HEADER_BYTES = 4096
_MARK_AT = _HEADER_BYTES - 8  # of a committed version
_PAGE = 2 * 2**20  # data starts on a huge-page border, so that the kernel may use huge pages for it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SLICE = 2**19  # bytes that are read and hashed in turn, so that the hash finds them in the core's cache
_MADV_POPULATE_WRITE = 23
_MADV_DONTFORK = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """The shard that a slot was made for. Sizes in bytes."""

    run: str
    stream: str
    owner: int
    world_size: int
    layout_hash: str
    layout: bytes
    data_bytes: int
    extras_capacity: int
    chunk_bytes: int

    @property
    def capacity(self) -> int:
        return self.data_bytes + self.extras_capacity

    @property
    def max_chunks(self) -> int:
        # extras are cut apart from the tensors, so both ends may have a short chunk
        return -(-self.data_bytes // self.chunk_bytes) + -(-self.extras_capacity // self.chunk_bytes)

    @cached_property
    def layout_digest(self) -> bytes:
        """The digest of the layout, as it enters the root of every version."""
        return layout_digest(self.layout)

    @property
    def layout_offset(self) -> int:
        return _HEADER_BYTES + 8 * self.max_chunks

    @cached_property
    def data_offset(self) -> int:
        return _round_up(self.layout_offset + len(self.layout), _PAGE)

    @property
    def total(self) -> int:
        return self.data_offset + max(1, self.capacity)


def extras_room(nbytes: int) -> int:
    """Bytes to reserve for small state that takes ``nbytes`` now: it may grow, and slots made at other times must be equal."""
    return max(EXTRAS_ROOM, 1 << (nbytes + nbytes // 4).bit_length())


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(memory: mmap.mmap, length: int, wanted: Callable[[], bool] = lambda: True) -> None:
    """Faults pages in ahead of time (a fresh page costs 4-5x the copy into it), as long as they are ``wanted``; releases the GIL."""
    base = address_of(memory)
    for offset in range(0, length, 64 * 2**20):
        if not wanted():
            return
        _libc.madvise(base + offset, min(64 * 2**20, length - offset), _MADV_POPULATE_WRITE)


def use_huge_pages(memory: mmap.mmap, start: int, length: int) -> None:
    """Asks for huge pages for all of a part that whole ones fit into, before its first page is there.

    Fresh 4 KiB pages of shared memory cost ten times the copy into them, and each mapping of them twice that again. Whether the
    kernel has huge ones for memfds its administrator says (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``).
    """
    first, end = _round_up(start, _PAGE), (start + length) // _PAGE * _PAGE
    if end > first:
        with contextlib.suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE, first, end - first)


def keep_from_children(memory: mmap.mmap) -> None:
    """Keeps a forked child (a data loader) from inheriting or copying the mapping."""
    _libc.madvise(address_of(memory), len(memory), _MADV_DONTFORK)


class SlotMemory:
    """The memfd of one slot, mapped."""

    def __init__(self, shape: SlotShape, fd: int) -> None:
        self.shape = shape
        self.fd = fd
        self.memory = mmap.mmap(fd, shape.total)
        use_huge_pages(self.memory, shape.data_offset, shape.capacity)
        self._view = memoryview(self.memory)
        self.version: Version | None = None
        self.root = ""  # of the copy that is here; empty exactly when there is no version
        self.committed = False  # the version is known to be
        self._digest = b""  # of the header
        self.extras_bytes = 0
        self.chunks: dict[int, tuple[int, int, int]] = {}  # index -> (offset, nbytes, digest) of each chunk that is laid down
        self.unchanged: set[int] = set()  # those that equal the bytes that the slot held there before
        # As `chunks`, of any version: the bytes in the slot where a peer writes, the last reported ones where a worker does.
        self._held: dict[int, tuple[int, int, int]] = {}
        self.completed_at = 0.0

    @classmethod
    def create(cls, shape: SlotShape, files: SlotFiles | None = None) -> SlotMemory:
        """Makes a file in ``files``, or a sealed memfd: a client that truncated it would kill every process that maps it."""
        fd = files.make(shape.total) if files is not None else _sealed(f"gemini:{shape.stream}:{shape.owner}", shape.total)
        try:
            slot = cls(shape, fd)
        except OSError:
            slot_files.forget(fd)
            os.close(fd)
            raise
        slot._view[shape.layout_offset : shape.layout_offset + len(shape.layout)] = shape.layout
        slot.clear()
        return slot

    @classmethod
    def adopt(cls, fd: int) -> SlotMemory:
        """Takes over a memfd another agent made.

        Raises:
            CorruptDataError: the header is not whole; or layout and checksums are not those of the version it names.
            FormatError: the header is of another format.
        """
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS and not slot_files.is_safe(fd, _HEADER_BYTES):
            raise CorruptDataError("a slot's memory is not sealed: a process that truncated it would kill this one")
        with mmap.mmap(fd, _HEADER_BYTES, prot=mmap.PROT_READ) as head:
            raw = head[:]
        header, digest = _read_header(raw, os.fstat(fd).st_size)
        slot = cls(header.shape(os.pread(fd, header.layout_bytes, header.layout_offset)), fd)
        if header.version is not None:
            slot.version, slot.root, slot.extras_bytes = header.version, header.root, header.extras_bytes
            slot.completed_at, slot.committed, slot._digest = header.completed_at, raw[_MARK_AT:] == digest, digest
            cuts = slot.cuts(slot.extras_bytes)
            slot.chunks = {i: (*cut, digest) for i, (cut, digest) in enumerate(zip(cuts, slot._checksums(), strict=True))}
            if not slot.is_genuine:
                what = f"rank {slot.shape.owner}'s copy of {slot.version} in this host's memory"
                slot._release()
                raise CorruptDataError(f"{what} is damaged: its layout or its checksums are not those that its root was formed of")
        return slot

    def _checksums(self) -> list[int]:
        """The checksums of the present chunks, as they are in the memory itself."""
        return list(struct.unpack_from(f"<{len(self.cuts(self.extras_bytes))}Q", self._view, _HEADER_BYTES))

    def _root(self, version: Version, extras_bytes: int, layout: bytes, checksums: Sequence[int]) -> str:
        return shard_root(self.shape.owner, version, layout, (self.shape.data_bytes, extras_bytes, self.shape.chunk_bytes), checksums)

    @property
    def is_genuine(self) -> bool:
        """Whether layout and checksums in the memory, and those known here, are the ones that the root was formed of."""
        if self.version is None:
            return False
        shape, known = self.shape, [self.chunks[i][2] for i in range(len(self.cuts(self.extras_bytes)))]
        layout = layout_digest(bytes(self._view[shape.layout_offset : shape.layout_offset + len(shape.layout)]))
        return known == self._checksums() and self.root == self._root(self.version, self.extras_bytes, layout, known)

    def cuts(self, extras_bytes: int) -> list[tuple[int, int]]:
        """(offset, nbytes) of every chunk: the tensors' first, then the extras'."""
        step, data = self.shape.chunk_bytes, self.shape.data_bytes
        ends = [(0, data), (data, data + extras_bytes)]
        return [(at, min(step, stop - at)) for start, stop in ends for at in range(start, stop, step)]

    def data(self, offset: int, nbytes: int) -> memoryview:
        start = self.shape.data_offset + offset
        return self._view[start : start + nbytes]

    def read(self, offset: int, places: Sequence[memoryview]) -> int:
        """Reads the data from ``offset`` on into ``places``, one after the other; returns the `checksum` of the bytes that are there then.

        Raises OSError: the file ends before that.
        """
        formed, at = running_checksum(), self.shape.data_offset + offset
        for piece in (place[low : low + _SLICE] for place in places for low in range(0, place.nbytes, _SLICE)):
            done = 0
            while done < piece.nbytes:
                if not (count := os.preadv(self.fd, [piece[done:]], at + done)):
                    raise OSError(f"the slot's file ends at byte {at + done}")
                done += count
            formed.update(piece)
            at += done
        return formed.intdigest()

    def clear(self) -> None:
        """Declares the slot's bytes worthless, from now on and after a crash as well."""
        self.version, self.root, self.extras_bytes, self.chunks, self.unchanged = None, "", 0, {}, set()
        self._write_header()

    def forget(self, index: int | None = None) -> None:
        """Records that a chunk is about to be overwritten: it counts again when it is put. None: `keep` finds no chunk any more."""
        if index is None:
            self._held.clear()
        else:
            self._held.pop(index, None)
            self.chunks.pop(index, None)
            self.unchanged.discard(index)

    def admits(self, index: int, offset: int, nbytes: int) -> bool:
        """Whether a chunk is at its own place in this slot; anywhere else it could overwrite others that have been verified."""
        step, data = self.shape.chunk_bytes, self.shape.data_bytes
        of_tensors = -(-data // step)
        if 0 <= index < of_tensors:
            return (offset, nbytes) == (index * step, min(step, data - index * step))
        place = data + (index - of_tensors) * step
        return of_tensors <= index < self.shape.max_chunks and offset == place and 0 < nbytes <= min(step, self.shape.capacity - place)

    def put_chunk(self, index: int, offset: int, nbytes: int, digest: int) -> None:
        """Records a chunk that has been laid down, and matches its digest."""
        self.chunks[index] = (offset, nbytes, digest)
        if self._held.get(index) == self.chunks[index]:
            self.unchanged.add(index)
        self._held[index] = self.chunks[index]
        struct.pack_into("<Q", self._view, _HEADER_BYTES + 8 * index, digest)

    def keep(self, index: int, offset: int, nbytes: int, digest: int) -> bool:
        """Lets a chunk of the version before be one of the next, if it is still there and the same.

        Its bytes are checked: memory that is never written again would collect what fails in it.
        """
        if self._held.get(index) != (offset, nbytes, digest):
            return False
        if checksum(self.data(offset, nbytes)) != digest:
            self.forget(index)
            return False
        self.put_chunk(index, offset, nbytes, digest)
        return True

    def is_whole(self, extras_bytes: int) -> bool:
        cuts = self.cuts(extras_bytes)
        return self.chunks.keys() >= set(range(len(cuts))) and all(self.chunks[i][:2] == cut for i, cut in enumerate(cuts))

    def finish(self, version: Version, extras_bytes: int, root: str | None) -> bool:
        """Gives the slot its identity, if every chunk is there and they amount to ``root`` (None: there is none to compare with)."""
        if not self.is_whole(extras_bytes):
            return False
        checksums = [self.chunks[i][2] for i in range(len(self.cuts(extras_bytes)))]
        found = self._root(version, extras_bytes, self.shape.layout_digest, checksums)
        if root not in (None, found):
            return False
        self.version, self.root, self.extras_bytes, self.completed_at = version, found, extras_bytes, time.time()
        self._write_header()
        return True

    def note_commit(self) -> None:
        """Marks the version as committed, for an agent after this one."""
        self.committed = True
        self._view[_MARK_AT:_HEADER_BYTES] = self._digest

    def damaged(self, pool: ThreadPoolExecutor | None = None) -> list[int]:
        """Checks every chunk against its digest; returns the indices that do not match. ``pool``: of threads that do it."""
        chunks = list(self.chunks.items())
        found = (pool.map if pool is not None else map)(checksum, [self.data(at, nbytes) for _, (at, nbytes, _) in chunks])
        return [index for (index, (*_, digest)), formed in zip(chunks, found, strict=True) if formed != digest]

    def _write_header(self) -> None:
        shape = self.shape
        fields = {
            "format": FORMAT,
            "run": shape.run,
            "stream": shape.stream,
            "owner": shape.owner,
            "world_size": shape.world_size,
            "layout_hash": shape.layout_hash,
            "layout_offset": shape.layout_offset,
            "layout_bytes": len(shape.layout),
            "data_bytes": shape.data_bytes,
            "extras_capacity": shape.extras_capacity,
            "chunk_bytes": shape.chunk_bytes,
            "version": self.version,
            "root": self.root,
            "extras_bytes": self.extras_bytes,
            "completed_at": self.completed_at,
        }
        body = msgpack.packb(fields)
        self.committed, self._digest = False, struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
        head = _MAGIC + struct.pack("<I", len(body)) + body + self._digest
        self._view[: len(head)] = head

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    @property
    def age(self) -> float:
        """Seconds since the slot was completed."""
        return max(0.0, time.time() - self.completed_at)

    def close(self) -> None:
        self._release()
        os.close(self.fd)

    def drop(self) -> None:
        """Closes the slot for good: no later agent finds it."""
        slot_files.forget(self.fd)
        self.close()

    def _release(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):  # a reader still has a view: the mapping goes with it
            self.memory.close()


def _sealed(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class _Header(BaseModel):
    """The fields of a slot's header, as they lie in its memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    run: str
    stream: str
    owner: int = Field(ge=0)
    world_size: int = Field(gt=0)
    layout_hash: str
    layout_offset: int
    layout_bytes: int = Field(ge=0)
    data_bytes: int = Field(ge=0)
    extras_capacity: int = Field(ge=0)
    chunk_bytes: int = Field(gt=0)
    version: Version | None
    root: str
    extras_bytes: int = Field(ge=0)
    completed_at: float

    def shape(self, layout: bytes) -> SlotShape:
        return SlotShape(layout=layout, **{name: getattr(self, name) for name in _OF_SHAPE})

    def is_of(self, nbytes: int) -> bool:
        """Whether a slot of ``nbytes`` bytes can have this header."""
        if self.version is not None and not (0 <= self.version.incarnation.number <= MOST and 0 <= self.version.iteration <= MOST):
            return False
        shape = self.shape(b"")
        total = _round_up(shape.layout_offset + self.layout_bytes, _PAGE) + max(1, shape.capacity)
        return self.layout_offset == shape.layout_offset and self.extras_bytes <= self.extras_capacity and total <= nbytes


def _read_header(raw: bytes, nbytes: int) -> tuple[_Header, bytes]:
    """The header of a slot of ``nbytes`` bytes, and its checksum."""
    if raw[:8] != _MAGIC:
        raise CorruptDataError("a slot's header has no magic number; it was not made by gemini-ft")
    (length,) = struct.unpack_from("<I", raw, 8)
    body, digest = raw[12 : 12 + length], raw[12 + length : 20 + length]
    if len(digest) != 8 or xxhash.xxh3_64_intdigest(body) != struct.unpack("<Q", digest)[0]:
        raise CorruptDataError("a slot's header does not match its checksum; the slot is ignored")
    try:
        fields = msgpack.unpackb(body)
        if fields["format"] != FORMAT:
            raise FormatError(f"a slot has format {fields['format']}, this gemini-ft reads format {FORMAT}; use the version that wrote it")
        header = _Header.model_validate(fields)
    except (LookupError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise CorruptDataError(f"a slot's header is none of format {FORMAT} ({str(error).splitlines()[0]}); the slot is ignored") from None
    if not header.is_of(nbytes):
        raise CorruptDataError(f"a slot of {nbytes:,} bytes cannot be what its header says; the slot is ignored")
    return header, digest
