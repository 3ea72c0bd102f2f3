"""Objects in any S3-compatible store, through boto3: multipart and parallel, with bounded memory and bandwidth.

Credentials come only from boto3's own chain. Nothing of them is in a message of ours: errors say the store's error
code and what to do about it.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from gemini_ft.errors import ConfigError, CorruptDataError, ObjectGoneError, StorageError
from gemini_ft.storage.base import check_key, ignore, round_trip

PART_BYTES = 16 * 2**20  # S3 wants at least 5 MiB, and at most 10,000 parts: 160 GB per shard
_BLOCK = 256 * 1024  # bytes taken from a connection at a time: larger ones would be fresh memory each
_PARALLEL = 4  # parts under way at a time; with PART_BYTES the bound on memory
_OURS = re.compile(r"/step-\d{8,}-inc-[^/]+/shard-\d+\.safetensors$")
_ABANDONED = timedelta(days=1)  # age at which another writer's unfinished upload counts as dead
Piece = bytes | bytearray
_WAY_OUT = {
    "NoSuchBucket": "create the bucket, or correct storage.url",
    "NoSuchKey": "the object is gone; was it deleted while in use?",
    "404": "the object or bucket is gone; check storage.url",
    "AccessDenied": "let these credentials list, read, write and delete under the prefix",
    "403": "let these credentials list, read, write and delete under the prefix",
    "InvalidAccessKeyId": "check the credentials that boto3 finds (environment, profile, instance role)",
    "SignatureDoesNotMatch": "check the credentials that boto3 finds, and the clock of this host",
    "SlowDown": "the store is overloaded; lower storage.max_bandwidth or upload less often",
    "ServiceUnavailable": "the store is overloaded or down",
}


class S3Storage:
    """Objects under ``s3://bucket/prefix``.

    Args:
        bucket: the bucket; it must exist.
        prefix: put before every key; empty for none.
        endpoint_url: of a store that is not AWS; default: boto3's (AWS_ENDPOINT_URL_S3, profile, AWS).
        max_bandwidth: bytes per second uploads may take together; None: no limit.
    """

    def __init__(self, bucket: str, prefix: str = "", endpoint_url: str | None = None, max_bandwidth: int | None = None) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._pace = _Pace(max_bandwidth)
        config = Config(
            retries={"total_max_attempts": 5, "mode": "standard"},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=4 * _PARALLEL,
            request_checksum_calculation="when_required",  # what other stores than AWS understand
            response_checksum_validation="when_required",
        )
        with self._explain("cannot be used"):
            try:
                self._client: Any = boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
            except ValueError as error:  # botocore's way to refuse an endpoint
                raise ConfigError(f"storage.endpoint_url={endpoint_url!r}: {error}; it must begin with http:// or https://") from None

    def put(self, key: str, parts: Iterable[memoryview | bytes], sent: Callable[[int], None] = ignore) -> None:
        """See `Storage.put`. Up to one part goes in one request, more in a multipart upload that is aborted when it fails."""
        name = self._prefix + check_key(key)
        bodies = _regroup(parts)
        first: Piece = next(bodies, b"")
        second = next(bodies, None)
        with self._explain(f"cannot write {key}"):
            if second is None:
                self._pace.take(len(first))
                self._client.put_object(Bucket=self._bucket, Key=name, Body=first)
                sent(len(first))
            else:
                self._put_in_parts(name, chain((first, second), bodies), sent)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        with self._explain(f"cannot read {key}"):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + check_key(key))
            return bytes(answer["Body"].read())

    def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """See `Storage.get_range`. A connection that breaks in the middle is taken up where it broke."""
        name, missing, attempts = self._prefix + check_key(key), out, 5
        while missing.nbytes:
            try:
                with self._explain(f"cannot read {key}"):
                    got = self._read_into(name, offset, missing)
            except StorageError:
                attempts -= 1
                if not attempts:
                    raise
                continue
            if not got:
                raise CorruptDataError(f"{self.url}: {key} ends at byte {offset}, {missing.nbytes} more are due; use an older checkpoint")
            offset, missing = offset + got, missing[got:]

    def list(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.list`."""
        with self._explain(f"cannot list {prefix or 'the prefix'}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
            names = [str(item["Key"]) for page in pages for item in page.get("Contents", [])]
        return sorted(name.removeprefix(self._prefix) for name in names)

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        with self._explain(f"cannot delete {key}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + check_key(key))

    def check(self) -> None:
        """See `Storage.check`. Multipart uploads that were abandoned under the prefix are aborted: they cost money unseen."""
        round_trip(self)
        with suppress(StorageError), self._explain("cannot list unfinished uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                if upload["Initiated"] < datetime.now(UTC) - _ABANDONED and _OURS.search(upload["Key"]):
                    with suppress(ClientError):
                        self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    # -- inside

    def _put_in_parts(self, name: str, bodies: Iterator[Piece], sent: Callable[[int], None]) -> None:
        where = {"Bucket": self._bucket, "Key": name}
        upload = self._client.create_multipart_upload(**where)["UploadId"]
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                tags = self._send_parts(pool, where | {"UploadId": upload}, bodies, sent)
            done = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            self._client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": done})
        except BaseException:
            with suppress(ClientError, BotoCoreError, Boto3Error):
                self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    def _send_parts(
        self, pool: ThreadPoolExecutor, where: dict[str, Any], bodies: Iterator[Piece], sent: Callable[[int], None]
    ) -> Sequence[str]:
        room = threading.Semaphore(_PARALLEL)  # a part is copied out of the slot only when another one has been sent
        futures = deque[Future[str]]()
        for number, body in enumerate(_when(room, bodies), 1):
            self._pace.take(len(body))
            future = pool.submit(self._send_part, where | {"PartNumber": number}, body, sent)
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
            if any(f.done() and f.exception() for f in futures):
                break  # the rest would be sent for nothing
        return [future.result() for future in futures]

    def _send_part(self, where: dict[str, Any], body: Piece, sent: Callable[[int], None]) -> str:
        tag = str(self._client.upload_part(**where, Body=body)["ETag"])
        sent(len(body))
        return tag

    def _read_into(self, name: str, offset: int, out: memoryview) -> int:
        span = f"bytes={offset}-{offset + out.nbytes - 1}"
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=name, Range=span)["Body"]
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("InvalidRange", "416"):
                return 0
            raise
        got = 0
        with body:
            while got < out.nbytes and (count := body.readinto(out[got : got + _BLOCK])):
                got += count
        return got

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Turn boto3's errors into a StorageError that says where, why, and what to do about it."""
        try:
            yield
        except NoCredentialsError:
            way_out = "set up its environment, profile or instance role"
            raise StorageError(f"{self.url}: {what}: boto3 finds no credentials; {way_out}") from None
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "?"))
            way_out = _WAY_OUT.get(code, "see the store's documentation of this error")
            kind = ObjectGoneError if code == "NoSuchKey" else StorageError
            raise kind(f"{self.url}: {what}: {code}; {way_out}") from None
        except (BotoCoreError, Boto3Error, OSError) as error:
            reason = str(error).partition("?")[0]  # a signed URL's query must not be shown
            raise StorageError(f"{self.url}: {what}: {reason}; is the endpoint up and reachable from this host?") from None


class _Pace:
    """Lets callers through at so many bytes per second, all threads together."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + nbytes / self._limit
        time.sleep(wait)


def _regroup(parts: Iterable[memoryview | bytes]) -> Iterator[bytearray]:
    """The same bytes in pieces of `PART_BYTES`, the last one shorter; each byte is copied once."""
    buffer = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            take = min(view.nbytes, PART_BYTES - len(buffer))
            buffer += view[:take]
            view = view[take:]
            if len(buffer) == PART_BYTES:
                yield buffer
                buffer = bytearray()
    if buffer:
        yield buffer


def _when(room: threading.Semaphore, bodies: Iterator[Piece]) -> Iterator[Piece]:
    """Ask for the next piece only when there is room for it."""
    while True:
        room.acquire()
        body = next(bodies, None)
        if body is None:
            return
        yield body
