"""Objects in any S3-compatible store, through boto3: multipart and parallel, with bounded memory and bandwidth.

Credentials come only from boto3's own chain. Nothing of them is in a message of ours: errors say the store's error
code and what to do about it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from gemini_ft.config import without_passwords
from gemini_ft.errors import ConfigError, CorruptDataError, StorageError
from gemini_ft.storage.base import SMALL, UNCOUNTED, RangeReader, TransferCount, check_key, check_small, is_key, round_trip
from gemini_ft.storage.s3errors import S3_ERRORS, BrokenError, GarbledError, explained, store_time
from gemini_ft.storage.s3parts import PartBody, RateLimit, checksum_of_all, encoded, joined, regroup

_BLOCK = 256 * 1024  # bytes taken from a connection at a time, and lost when it breaks; with a quarter of that a GB takes a fourth longer
_PARALLEL = 4  # parts under way at a time
_TRIES = 4  # readings in a row that may fail without a byte of progress
PAUSE = 0.25  # seconds before the second of them, doubled for each further one
READ_SILENCE, _WRITE_SILENCE = 20, 60  # seconds without an answer, or the next byte of one
_OURS = re.compile(r"/step-\d{8,}-inc-[^/]+/shard-\d+\.safetensors$")
ABANDONED = timedelta(days=1)  # age by the store's clock at which another writer's unfinished upload counts as dead
SLACK = timedelta(seconds=2)  # times of S3 are whole seconds
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NO_CHECKSUMS = {"InvalidArgument", "InvalidRequest", "NotImplemented", "XNotImplemented", "BadRequest", "400", "501"}
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class S3Storage:
    """A `Storage` of objects under ``s3://bucket/prefix``, in a bucket that exists; `gemini_ft.config.StorageConfig` has the options."""

    is_one_place = True

    def __init__(
        self, bucket: str, prefix: str = "", endpoint_url: str | None = None, max_bandwidth: int | None = None, deletes: bool = True
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._pace, self._deletes = RateLimit(max_bandwidth), deletes
        self._checksums = True  # until the store refuses a request that has one
        self._unaborted: list[dict[str, str]] = []  # uploads that could not be aborted, to be tried again
        with self._explain("cannot be used"):
            try:
                session = _session()
                self._client: Any = session.client("s3", endpoint_url=endpoint_url, config=_config(_WRITE_SILENCE, 5))
                self._reader: Any = session.client("s3", endpoint_url=endpoint_url, config=_config(READ_SILENCE, 3))
            except ValueError as error:  # botocore's way to refuse an endpoint
                raise ConfigError(
                    without_passwords(f"storage.endpoint_url={endpoint_url!r}: {error}; it must begin with http:// or https://")
                ) from None

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        """Implements `Storage.put`. Up to one part goes in one request, more in a multipart upload that is aborted when it fails.

        Afterwards the store is asked what it has kept: the size, and the CRC-32 of the whole where it keeps that.
        """
        name = self._prefix + check_key(key)
        bodies = regroup(parts)
        first, second = next(bodies, PartBody(())), next(bodies, None)
        with self._explain(f"cannot write {key}", _WRITE_SILENCE):
            self._abort(*self._unaborted)
            if second is None:
                self._pace.take(first.nbytes)
                size, checksum = first.nbytes, encoded(first.crc32())
                tag = self._call("put_object", {"ChecksumCRC32": checksum}, Key=name, Body=first).get("ETag", "")
                transfer.add(size)
            else:
                size, checksum = self._put_in_parts(name, chain((first, second), bodies), transfer)
                tag = None
            self._confirm(key, size, checksum, tag)

    def get(self, key: str) -> bytes:
        return self.insist(lambda: self._get(key))

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        with closing(self.open_range(key, offset, out.nbytes)) as answer:
            answer.read(out)

    def open_range(self, key: str, offset: int, nbytes: int) -> RangeReader:
        return _ResumedAnswer(self, key, offset, nbytes)

    def list(self, prefix: str = "") -> Sequence[str]:
        return self.insist(lambda: self._list(prefix))

    def delete(self, key: str) -> None:
        if not self._deletes:
            return
        with self._explain(f"cannot delete {key}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + check_key(key))

    def check(self) -> None:
        """Implements `Storage.check`. Abandoned multipart uploads under the prefix are aborted: they cost money unseen."""
        round_trip(self)
        with suppress(StorageError), self._explain("cannot list unfinished uploads"):
            for page in self._reader.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix):
                now = store_time(page)  # this host's clock may be anywhere
                known = [upload for upload in page.get("Uploads", []) if upload.keys() >= {"Key", "UploadId", "Initiated"}]
                old = [upload for upload in known if now is not None and upload["Initiated"] < now - ABANDONED]
                self._abort(*({"Key": upload["Key"], "UploadId": upload["UploadId"]} for upload in old if _OURS.search(upload["Key"])))

    # -- reading

    def insist(self, read: Callable[[], _T]) -> _T:
        """Repeats a read that broke, or gave an impossible answer, on a new connection; boto3 has retried errors of the store."""
        for attempt in range(1, _TRIES):
            try:
                return read()
            except (BrokenError, GarbledError) as error:
                _log.log(logging.WARNING if attempt == 1 else logging.DEBUG, "%s (reading it again: %d of %d)", error, attempt + 1, _TRIES)
                time.sleep(PAUSE * 2 ** (attempt - 1))
        return read()

    def _get(self, key: str) -> bytes:
        what = f"cannot read {key}"
        with self._explain(what):
            answer = self._reader.get_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
        body = answer["Body"]
        with self.unbroken(what), closing(body):  # its own context manager is the raw connection, whose errors are urllib3's
            if (length := answer.get("ContentLength")) is not None:
                check_small(f"{self.url}: {key}", length)
                return bytes(body.read())
            data = bytes(body.read(SMALL + 1))  # an answer in pieces, whose number is not announced
            check_small(f"{self.url}: {key}", len(data))
            return data

    def ask(self, key: str, offset: int, nbytes: int) -> Any:
        """The body of the store's answer to a request for these bytes."""
        span = f"bytes={offset}-{offset + nbytes - 1}"
        with self._explain(f"cannot read {key}"):
            try:
                answer: dict[str, Any] = self._reader.get_object(Bucket=self._bucket, Key=self._prefix + check_key(key), Range=span)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") not in ("InvalidRange", "416"):
                    raise
                why = f"{self.url}: {key} ends before byte {offset}, {nbytes} more are due; use an older checkpoint"
                raise CorruptDataError(why) from None
        try:
            self._check_range(key, answer, offset, nbytes)
        except Exception:
            answer["Body"].close()
            raise
        return answer["Body"]

    def _check_range(self, key: str, answer: Mapping[str, Any], offset: int, nbytes: int) -> None:
        """Compares the range that the store sends with the one that was asked for.

        Some stores say 200 in place of 206; all say in Content-Range where the bytes are from.
        """
        what, length = f"cannot read {key}", answer.get("ContentLength")
        found = _RANGE.fullmatch(answer.get("ContentRange") or "")
        if found is None and (offset, length) == (0, nbytes):
            return  # the whole object was asked for
        if found is None:
            raise GarbledError(
                self.url, what, f"bytes {offset} to {offset + nbytes} were asked for, and the whole object came ({length} bytes)"
            )
        first, last, whole = map(int, found.groups())
        if whole < offset + nbytes:
            missing = offset + nbytes - whole
            raise CorruptDataError(f"{self.url}: {key} ends at byte {whole}, {missing} more are due; use an older checkpoint")
        if first != offset or last >= offset + nbytes or length != last - first + 1:
            asked = f"bytes {offset} to {offset + nbytes} were asked for"
            raise GarbledError(self.url, what, f"{asked}, and {length} bytes came as {answer['ContentRange']!r}")

    def _list(self, prefix: str) -> Sequence[str]:
        wanted, what = self._prefix + prefix, f"cannot list {prefix or 'the prefix'}"
        found = []
        with self._explain(what):
            for page in self._reader.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=wanted):
                if "Name" not in page or "IsTruncated" not in page or page.get("Prefix", wanted) != wanted:
                    raise GarbledError(self.url, what, "the answer is no listing of it")
                if page["IsTruncated"] and not page.get("NextContinuationToken"):
                    raise GarbledError(self.url, what, "the listing breaks off without saying how it goes on")
                found += [str(item["Key"]) for item in page.get("Contents", [])]
        if strange := [name for name in found if not name.startswith(wanted)]:
            raise GarbledError(self.url, what, f"the listing has {strange[0]!r} in it")
        return sorted(filter(is_key, (name.removeprefix(self._prefix) for name in found)))

    # -- writing

    def _call(self, operation: str, checksum: Mapping[str, str], needed: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Calls the store with a checksum, or without any once it has refused one.

        Raises GarbledError: the answer lacks the field ``needed``.
        """
        answer = self._ask(operation, checksum, arguments)
        if needed is not None and needed not in answer:
            raise GarbledError(
                self.url, f"cannot write {arguments['Key'].removeprefix(self._prefix)}", f"the answer to {operation} has no {needed}"
            )
        return answer

    def _ask(self, operation: str, checksum: Mapping[str, str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        call = getattr(self._client, operation)
        if self._checksums:
            try:
                answer: dict[str, Any] = call(Bucket=self._bucket, **arguments, **checksum)
                return answer
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code"))
                if code not in _NO_CHECKSUMS:
                    raise
                _log.debug("%s: %s with checksums: %s; doing without", self.url, operation, code)
        plain: dict[str, Any] = call(Bucket=self._bucket, **arguments)
        self._checksums = False
        return plain

    def _confirm(self, key: str, size: int, checksum: str, tag: str | None) -> None:
        """Makes sure that the store has kept what it was given.

        ``tag``: the store's name for what it has kept, by its answer; empty: the answer had none; None: nobody else writes there.

        Raises StorageError: it has not, and what it has kept is deleted; or another process has written there meanwhile.
        """
        head = self._head(key)
        kept, found = head["ContentLength"], checksum_of_all(head)
        if kept == size and found in (None, checksum):
            return
        if tag is not None and head.get("ETag") not in (None, tag):
            raise StorageError(f"{self.url}: {key} is not as it was written: another process has written it meanwhile")
        with suppress(*S3_ERRORS):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)
        wrong = f"{kept} of {size} bytes" if kept != size else "other bytes"
        raise StorageError(
            f"{self.url}: cannot write {key}: the store said that all is well and has kept {wrong}; do not trust this storage"
        )

    def _head(self, key: str) -> dict[str, Any]:
        mode = {"ChecksumMode": "ENABLED"} if self._checksums else {}
        head: dict[str, Any] = self._reader.head_object(Bucket=self._bucket, Key=self._prefix + key, **mode)
        if "ContentLength" not in head:
            raise GarbledError(self.url, f"cannot look at {key}", "the answer says no length")
        return head

    def _put_in_parts(self, name: str, bodies: Iterator[PartBody], transfer: TransferCount) -> tuple[int, str]:
        """Uploads an object in parts; returns bytes and checksum of the whole."""
        begun = self._call("create_multipart_upload", {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}, "UploadId", Key=name)
        where = {"Key": name, "UploadId": str(begun["UploadId"])}
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                done = self._send_parts(pool, where, bodies, transfer)
            size, checksum = sum(part.nbytes for part in done), encoded(joined((part.crc, part.nbytes) for part in done))
            self._complete(where, [part.answer for part in done], size=size, checksum=checksum, begun=store_time(begun))
        except BaseException:
            self._abort(where)
            raise
        return size, checksum

    def _complete(
        self, where: dict[str, str], parts: Sequence[dict[str, Any]], *, size: int, checksum: str, begun: datetime | None
    ) -> None:
        """Makes the parts one object. If the answer is lost, the object itself shows whether that has happened."""
        fields = {"ChecksumCRC32": checksum, "ChecksumType": "FULL_OBJECT"}
        try:
            self._call("complete_multipart_upload", fields, **where, MultipartUpload={"Parts": parts})
        except S3_ERRORS as error:
            with suppress(*S3_ERRORS):
                head = self._head(where["Key"].removeprefix(self._prefix))
                same = head["ContentLength"] == size and checksum_of_all(head) in (None, checksum)
                if same and begun is not None and "LastModified" in head and head["LastModified"] >= begun - SLACK:
                    _log.info("%s: %s is there, though its end was not answered (%s)", self.url, where["Key"], error)
                    return
            raise

    def _abort(self, *uploads: dict[str, str]) -> None:
        """Gives up multipart uploads; those for which this fails are tried again before the next object is written."""
        for upload in uploads:
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, **upload)
            except S3_ERRORS as error:
                gone = isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") in ("NoSuchUpload", "404")
                if not gone and upload not in self._unaborted:
                    self._unaborted.append(upload)
                    continue
            if upload in self._unaborted:
                self._unaborted.remove(upload)

    def _send_parts(
        self, pool: ThreadPoolExecutor, where: dict[str, str], bodies: Iterator[PartBody], transfer: TransferCount
    ) -> Sequence[_Sent]:
        done, under_way = list[_Sent](), set[Future[_Sent]]()
        for number, body in enumerate(bodies, 1):  # the caller hashes what it yields, shortly before it is sent
            self._pace.take(body.nbytes)
            under_way.add(pool.submit(self._send_part, where, number, body, transfer))
            if len(under_way) == _PARALLEL:
                over, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                done += [future.result() for future in over]  # after an error the rest would be sent for nothing
        return sorted([*done, *(future.result() for future in under_way)], key=lambda sent: sent.answer["PartNumber"])

    def _send_part(self, where: dict[str, str], number: int, body: PartBody, transfer: TransferCount) -> _Sent:
        checksum = {"ChecksumCRC32": encoded(crc := body.crc32())}
        answer = self._call("upload_part", checksum, "ETag", **where, PartNumber=number, Body=body)
        transfer.add(body.nbytes)
        line = {"PartNumber": number, "ETag": str(answer["ETag"]), **(checksum if self._checksums else {})}
        return _Sent(answer=line, nbytes=body.nbytes, crc=crc)

    # -- errors

    def _explain(self, what: str, silence: float | None = None) -> AbstractContextManager[None]:
        return explained(self.url, what, READ_SILENCE if silence is None else silence)

    @contextmanager
    def unbroken(self, what: str) -> Iterator[None]:
        """Turns any failure of an answer's body into a `BrokenError`: it is worth another connection."""
        try:
            with self._explain(what):
                yield
        except StorageError as error:
            raise BrokenError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A part that the store has taken: its line in the list of parts, and its bytes and their CRC-32."""

    answer: dict[str, Any]
    nbytes: int
    crc: int


class _ResumedAnswer:
    """A `RangeReader`. An answer that breaks is resumed where it broke, any number of times, while it makes progress."""

    def __init__(self, storage: S3Storage, key: str, offset: int, nbytes: int) -> None:
        self._storage, self._key, self._offset, self._left = storage, key, offset, nbytes
        self._body: Any = None

    def read(self, out: memoryview) -> None:
        while out.nbytes:
            out = out[self._storage.insist(partial(self._some, out)) :]

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _some(self, out: memoryview) -> int:
        """Reads as much as comes in one answer: of a new one at least a byte, or it is an error; one that was open may be dead by now."""
        what, got, is_new = f"cannot read {self._key}", 0, self._body is None
        if is_new:
            self._body = self._storage.ask(self._key, self._offset, self._left)
        try:
            with self._storage.unbroken(what):
                while got < out.nbytes and (count := self._body.readinto(out[got : got + _BLOCK])):
                    got += count
        except BrokenError as error:
            self.close()
            if is_new and not got:
                raise
            _log.debug("%s: resuming %d bytes further on", error, got)
        self._offset, self._left = self._offset + got, self._left - got
        if got < out.nbytes or not self._left:
            self.close()
        if is_new and not got:
            raise BrokenError(f"{self._storage.url}: {what}: the answer has no body")
        return got


def _session() -> boto3.session.Session:
    """A session of its own, which asks boto3's chain for credentials anew, but reads no description of a service a second time (0.2 s)."""
    core, loader = botocore.session.Session(), _loader()
    core.register_component("data_loader", loader)
    session = boto3.session.Session(botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds boto3's
    return session


@cache
def _loader() -> Any:
    """The loader of the descriptions of AWS's services, which keeps those that this process has read."""
    return botocore.session.Session().get_component("data_loader")


def _config(silence: int, attempts: int) -> Config:
    return Config(
        retries={"total_max_attempts": attempts, "mode": "standard"},
        connect_timeout=10,
        read_timeout=silence,
        max_pool_connections=4 * _PARALLEL,
        request_checksum_calculation="when_required",  # else boto3 sends trailers, which hardly any store but AWS understands
        response_checksum_validation="when_required",
    )
