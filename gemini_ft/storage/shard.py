"""One shard as one object: a safetensors file, written by hand so that the slot's bytes are not copied on their way.

    8 bytes      size of the header
    header       JSON: where each of the following lies; the pieces are flat tensors ``name@start:stop``
    __layout__   `Layout.to_bytes`
    __extras__   the small state that is no tensor, as the codec encoded it
    __digests__  XXH3-64 of each `CHUNK_BYTES` of the data, so that a part of it can be checked alone
    data         the slot as it is

Everything begins at a multiple of 64 bytes. safetensors allows no gaps, so a gap is a tensor ``__pad__@start:stop``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from random import randrange
from struct import pack, unpack

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gemini_ft.core.layout import ALIGNMENT, Layout
from gemini_ft.core.roots import checksum, layout_digest, shard_root
from gemini_ft.core.versions import Version
from gemini_ft.errors import CorruptDataError, StorageError
from gemini_ft.storage.base import SMALL, UNCOUNTED, RangeReader, Storage, TransferCount

CHUNK_BYTES = 8 * 2**20
_HEADER = 64 * 1024  # bytes; a header up to here is read with what follows it
ONE_REQUEST = CHUNK_BYTES + 2**20  # bytes; up to here a journey to the storage costs more than the bytes
LARGEST = 2**50  # bytes; no store takes larger objects
MOST_EXTRAS = 2**32  # bytes; a file with holes has as many as it says
_LARGEST_CHUNK = 2**35  # bytes; `GeminiConfig` allows less, and earlier releases allowed a chunk as large as a shard

# The dtypes that safetensors readers know. Any other one is stored as plain bytes and named in the metadata.
CODES: Mapping[str, str] = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    **{f"{kind}{bits}": f"{code}{bits}" for kind, code in (("uint", "U"), ("int", "I")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"float8_{kind}": f"F8_{code}" for kind, code in (("e4m3fn", "E4M3"), ("e5m2", "E5M2"))},
    **{f"float8_{kind}": f"F8_{kind.upper()}" for kind in ("e4m3fnuz", "e5m2fnuz")},
}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Span(_Record):
    """Bytes ``offset:offset + nbytes`` of an object."""

    offset: int = Field(ge=0, le=LARGEST)
    nbytes: int = Field(ge=0, le=LARGEST)
    xxh3: str = ""  # none for the data: its chunks have digests


class ShardRecord(_Record):
    """The manifest's record of one shard's object. Checksums are XXH3-64 in 16 hex digits, as ``xxhsum -H3`` prints them."""

    key: str
    nbytes: int = Field(ge=0, le=LARGEST)
    xxh3: str  # of the whole object
    layout: Span
    extras: Span
    digests: Span
    data: Span
    chunk_bytes: int = Field(gt=0, le=LARGEST)  # of data, per digest
    root: str = ""  # of the committed copy (gemini_ft.core.roots); empty where it was not known

    @model_validator(mode="after")
    def _is_read_in_one_piece(self) -> ShardRecord:
        chunk = min(self.chunk_bytes, self.data.nbytes)
        if what := _too_large(self.layout.nbytes, self.extras.nbytes, self.digests.nbytes, chunk):
            raise ValueError(f"shard {self.key}: {what}")
        return self


def _too_large(layout: int, extras: int, digests: int, chunk: int) -> str:
    """Says which of these, in bytes, is too large to be read in one piece; an empty string if none is."""
    limits = {
        "layout": (layout, SMALL),
        "small state": (extras, MOST_EXTRAS),
        "checksums": (digests, SMALL),
        "chunk": (chunk, _LARGEST_CHUNK),
    }
    found = (f"its {name}: {nbytes:,} bytes, more than {most:,}" for name, (nbytes, most) in limits.items() if nbytes > most)
    return next(found, "")


@dataclass(frozen=True)
class Committed:
    """The identity that a shard's bytes must have, wherever they are read."""

    owner: int
    version: Version
    root: str
    chunk_bytes: int

    def check(self, key: str, layout: bytes, checksums: Sequence[int], nbytes: int, extras: memoryview | bytes) -> None:
        """Forms the root of a shard, and compares it with the committed one. Raises CorruptDataError: they differ."""
        view, step = memoryview(extras), self.chunk_bytes
        every = [*checksums, *(checksum(view[at : at + step]) for at in range(0, len(view), step))]
        found = shard_root(self.owner, self.version, layout_digest(layout), (nbytes, len(view), step), every)
        if found != self.root:
            what = f"rank {self.owner}'s shard of {self.version}"
            raise CorruptDataError(f"{key}: this is not {what} as it was committed (root {found}, should be {self.root})")


def write_shard(
    storage: Storage,
    key: str,
    layout: Layout,
    data: memoryview,  # the slot, at least ``layout.nbytes`` bytes; it must not change before the call returns
    extras: memoryview | bytes,
    *,
    transfer: TransferCount = UNCOUNTED,
    committed: Committed | None = None,  # what the chunks must be
) -> ShardRecord:
    """Writes one shard straight from its slot; an object that has this key is replaced.

    Raises:
        CorruptDataError: a chunk is not what was committed, so that nothing is written; or has changed while it was sent: what is there
            under ``key`` then is worth nothing.
        StorageError: ``data`` is too short, the small state too large, or the storage failed; nothing is visible under ``key``.
    """
    if data.nbytes < layout.nbytes:
        raise StorageError(f"{storage.url}: {key} was given {data.nbytes} bytes for a layout of {layout.nbytes}")
    step = committed.chunk_bytes if committed is not None else CHUNK_BYTES
    blob = layout.to_bytes()
    if what := _too_large(len(blob), memoryview(extras).nbytes, 8 * -(-layout.nbytes // step), min(step, layout.nbytes)):
        raise StorageError(f"{storage.url}: {key} is not written, as it could not be read in one piece: {what}")
    chunks = [data[start : min(start + step, layout.nbytes)] for start in range(0, layout.nbytes, step)]

    checksums = [checksum(chunk) for chunk in chunks]
    if committed is not None:
        committed.check(key, blob, checksums, layout.nbytes, extras)  # nothing that is damaged takes the place of an object
    small = {"layout": blob, "extras": extras, "digests": pack(f"<{len(checksums)}Q", *checksums)}
    sizes = {name: len(blob) for name, blob in small.items()} | {"data": layout.nbytes}
    header = _header(layout, _arrange(sizes, base=0))

    front = [header, *(part for blob in small.values() for part in (blob, bytes(-len(blob) % ALIGNMENT)))]
    whole = xxhash.xxh3_64()

    def hashed() -> Iterator[bytes | memoryview]:
        for part in chain(front, chunks):
            whole.update(part)  # here, where it costs no time of its own: parts before are being sent
            yield part

    storage.put(key, hashed(), transfer)
    if committed is not None:  # once more: the client has read the slot until the last byte was sent
        committed.check(key, blob, [checksum(chunk) for chunk in chunks], layout.nbytes, extras)
    spans = _arrange(sizes, base=len(header))
    spans |= {name: spans[name].model_copy(update={"xxh3": xxhash.xxh3_64_hexdigest(blob)}) for name, blob in small.items()}
    nbytes = spans["data"].offset + layout.nbytes
    root = committed.root if committed is not None else ""
    return ShardRecord(key=key, nbytes=nbytes, xxh3=whole.hexdigest(), chunk_bytes=step, root=root, **spans)


class StoredShard:
    """The object of one shard, read in parts that are each checked; small ones are kept.

    Its methods may be called from several threads at once. They raise `CorruptDataError`, which names the object, where
    bytes do not match their checksum, and `StorageError` where the storage fails.

    ``whole``: all of it will be read, so that a small one comes in one request, if its data is read in one go: straight to its place.
    """

    def __init__(self, storage: Storage, record: ShardRecord, whole: bool = False) -> None:
        self.record = record
        self._storage, self._whole = storage, whole
        self._rest: RangeReader | None = None  # of a small one that comes in one request: its data
        self._taking = threading.Lock()

    @cached_property
    def layout(self) -> Layout:
        """Reads the shard's layout and checks that its data is complete."""
        layout, data = Layout.from_bytes(self._small("layout", self.record.layout)), self.record.data
        if layout.nbytes != data.nbytes:
            raise CorruptDataError(
                f"{self._name}: its layout is of {layout.nbytes:,} bytes, its data has {data.nbytes:,}; use an older checkpoint"
            )
        self._is_there(data.offset, data.nbytes)
        return layout

    @cached_property
    def extras(self) -> bytes:
        return self._small("extras", self.record.extras)

    def check_identity(self, owner: int, version: Version) -> None:
        """Compares layout, small state and checksums with the root that was committed, where the record knows it.

        Raises CorruptDataError: they are of another shard, or of another version of it.
        """
        record = self.record
        if record.root:
            committed = Committed(owner, version, record.root, record.chunk_bytes)
            committed.check(self._name, self.layout.to_bytes(), self.digests, record.data.nbytes, self.extras)

    @cached_property
    def digests(self) -> Sequence[int]:
        """XXH3-64 of each chunk of the data."""
        nbytes, chunks = self.record.digests.nbytes, -(-self.record.data.nbytes // self.record.chunk_bytes)
        if nbytes != 8 * chunks:
            raise CorruptDataError(f"{self._name}: {nbytes // 8} checksums of {chunks} chunks; use an older checkpoint")
        return unpack(f"<{chunks}Q", self._small("digests", self.record.digests))

    def read(self, offset: int, out: memoryview) -> None:
        """Fills ``out`` with the shard's bytes from ``offset`` on.

        Chunks are read straight into ``out``, all of them at once; one of which only a part is asked for is read whole and
        copied, so ask for large ranges, or such that begin and end at multiples of ``record.chunk_bytes``.
        """
        stop = offset + out.nbytes
        if not 0 <= offset <= stop <= self.record.data.nbytes:
            raise StorageError(f"{self._name}: bytes {offset} to {stop} were asked for, its shard has {self.record.data.nbytes}")
        indices = range(offset // self.record.chunk_bytes, -(-stop // self.record.chunk_bytes))
        whole = [index for index in indices if offset <= self._chunk(index)[0] and self._chunk(index)[1] <= stop]
        if whole:
            begin, end = self._chunk(whole[0])[0], self._chunk(whole[-1])[1]
            self._read_chunks(whole, out[begin - offset : end - offset])
        for index in set(indices) - set(whole):
            begin, end = self._chunk(index)
            low, high = max(begin, offset), min(end, stop)
            self._is_there(self.record.data.offset + begin, end - begin)
            chunk = memoryview(bytearray(end - begin))
            self._read_chunks([index], chunk)
            out[low - offset : high - offset] = chunk[low - begin : high - begin]

    def verify(self) -> None:
        """Reads the whole object and compares it with its checksum."""
        whole = self._hashed(0, self.record.nbytes, partial(self._storage.get_range, self.record.key))
        self._compare("the object", whole, self.record.xxh3)

    def sample(self) -> None:
        """Reads the small parts and the first, the last and one other chunk: lost, cut or exchanged bytes show without reading all."""
        self._storage.get_range(self.record.key, self.record.nbytes - 1, memoryview(bytearray(1)))  # its end is there
        _ = (self.layout, self.extras, self.digests)
        count = len(self.digests)
        for index in sorted({0, count - 1, randrange(count)}) if count else ():
            begin, end = self._chunk(index)
            found = self._hashed(self.record.data.offset + begin, end - begin, self._get)
            self._compare(f"bytes {begin} to {end} of its data", found, f"{self.digests[index]:016x}")

    @staticmethod
    def _hashed(offset: int, nbytes: int, get: Callable[[int, memoryview], None]) -> str:
        """The checksum of what ``get`` reads, in pieces of `CHUNK_BYTES`: with holes a chunk may be as large as its record claims."""
        whole, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
        for start in range(0, nbytes, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, nbytes - start)]
            get(offset + start, part)
            whole.update(part)
        return whole.hexdigest()

    @property
    def _name(self) -> str:
        return f"{self._storage.url}: {self.record.key}"

    def _small(self, name: str, span: Span) -> bytes:
        self._is_there(span.offset, span.nbytes)
        blob = bytearray(span.nbytes)
        self._get(span.offset, memoryview(blob))
        self._compare(f"its {name}", xxhash.xxh3_64_hexdigest(blob), span.xxh3)
        return bytes(blob)

    @cached_property
    def _front(self) -> tuple[int, memoryview]:
        """Offset and bytes of the small parts, read in one request, with which a small shard's data comes; nothing where they are large."""
        record = self.record
        parts = (record.layout, record.extras, record.digests)
        start, stop = min(span.offset for span in parts), max(span.offset + span.nbytes for span in parts)
        if start <= _HEADER:
            start = 0  # a store that has files behind it may wait 20 ms before it seeks, in case the bytes before are wanted too
        end = record.data.offset + record.data.nbytes
        if is_small := self._whole and stop <= record.data.offset and end - start <= ONE_REQUEST:
            stop = record.data.offset
        blob = memoryview(bytearray(stop - start if stop - start <= ONE_REQUEST else 0))
        if is_small:
            rest = self._storage.open_range(record.key, start, end - start)
            rest.read(blob)
            self._rest = rest
        else:
            self._storage.get_range(record.key, start, blob)
        return start, blob

    def _get(self, offset: int, out: memoryview) -> None:
        start, front = self._front
        if start <= offset and offset + out.nbytes <= start + front.nbytes:
            out[:] = front[offset - start :][: out.nbytes]
            return
        rest = None
        if (offset, out.nbytes) == (self.record.data.offset, self.record.data.nbytes):
            with self._taking:
                rest, self._rest = self._rest, None
        if rest is None:
            self._storage.get_range(self.record.key, offset, out)
            return
        with closing(rest):
            rest.read(out)

    def _is_there(self, offset: int, nbytes: int) -> None:
        """Checks that the object has the bytes, before memory is taken for them: its record may lie."""
        if nbytes > CHUNK_BYTES and self._rest is None:
            self._storage.get_range(self.record.key, offset + nbytes - 1, memoryview(bytearray(1)))

    def _chunk(self, index: int) -> tuple[int, int]:
        begin = index * self.record.chunk_bytes
        return begin, min(begin + self.record.chunk_bytes, self.record.data.nbytes)

    def _read_chunks(self, indices: Sequence[int], out: memoryview) -> None:
        """Reads chunks that lie one after the other, in one go."""
        first, _ = self._chunk(indices[0])
        self._get(self.record.data.offset + first, out)
        for index in indices:
            begin, end = self._chunk(index)
            found = checksum(out[begin - first : end - first])
            self._compare(f"bytes {begin} to {end} of its data", f"{found:016x}", f"{self.digests[index]:016x}")

    def _compare(self, what: str, found: str, expected: str) -> None:
        if found != expected:
            raise CorruptDataError(f"{self._name}: {what} is damaged (XXH3 {found}, should be {expected}); use an older checkpoint")


def _arrange(sizes: Mapping[str, int], base: int) -> dict[str, Span]:
    """Lays blocks end to end from ``base`` on, each at the next multiple of `ALIGNMENT`."""
    starts = accumulate((-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes.values()), initial=base)
    return {name: Span(offset=start, nbytes=nbytes) for (name, nbytes), start in zip(sizes.items(), starts, strict=False)}


def _header(layout: Layout, spans: Mapping[str, Span]) -> bytes:
    """Size and JSON of the header, padded so that what follows is aligned; ``spans`` count from there."""
    tensors: dict[str, object] = {"__metadata__": _metadata(layout)}
    end = 0
    for name, code, count, start, nbytes in _tensors(layout, spans):
        if start > end:
            tensors[f"__pad__@{end}:{start}"] = {"dtype": "U8", "shape": [start - end], "data_offsets": [end, start]}
        end = start + nbytes
        tensors[name] = {"dtype": code, "shape": [count], "data_offsets": [start, end]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return pack("<Q", len(text)) + text


def _tensors(layout: Layout, spans: Mapping[str, Span]) -> Iterator[tuple[str, str, int, int, int]]:
    """Name, dtype code, elements, first byte and bytes of all tensors, by ascending offset."""
    for name in ("layout", "extras", "digests"):
        yield f"__{name}__", "U8", spans[name].nbytes, spans[name].offset, spans[name].nbytes
    begin = spans["data"].offset
    for piece in layout.pieces:
        code, count = (CODES[piece.dtype], piece.stop - piece.start) if piece.dtype in CODES else ("U8", piece.nbytes)
        yield piece.label, code, count, begin + piece.offset, piece.nbytes
    yield "__end__", "U8", 0, begin + layout.nbytes, 0  # so that the padding of the last piece is named as well


def _metadata(layout: Layout) -> dict[str, str]:
    """The header's text for human eyes and other readers of safetensors; recovery reads `Layout`."""
    as_bytes = {piece.label: piece.dtype for piece in layout.pieces if piece.dtype not in CODES}
    return {
        "format": "pt",
        "gemini_ft.world_size": str(layout.world_size),
        "gemini_ft.logical_hash": layout.logical_hash,
        "gemini_ft.stored_as_bytes": json.dumps(as_bytes),
    }
