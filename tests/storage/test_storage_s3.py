"""S3 storage against a real server: whole objects, parts, ranges, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import psutil
import pytest
import s3_server
from agent_kit import eventually
from botocore.exceptions import ClientError
from botocore.httpsession import URLLib3SSLError
from botocore.loaders import JSONFileLoader

from gemini_ft.core.layout import TensorSpec, build_layout
from gemini_ft.errors import ConfigError, CorruptDataError, StorageError
from gemini_ft.storage.base import Storage, exists
from gemini_ft.storage.opening import open_storage
from gemini_ft.storage.s3errors import explained
from gemini_ft.storage.s3parts import PART_BYTES, joined, regroup
from gemini_ft.storage.shard import StoredShard, write_shard
from gemini_ft.testing.s3_proxy import S3Fault, S3Proxy, S3Request

BIG = os.urandom(2 * PART_BYTES + 12_345)
SMALL = build_layout([TensorSpec(name="w", dtype="uint8", shape=(8_000_000,), group=(0,))], 0, 1)  # of a shard that comes in one answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.Server]:
    with s3_server.serve(tmp_path_factory.mktemp("s3"), "bucket") as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def storage(server: s3_server.Server, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"s3://bucket/{request.node.name}/deep".replace("[", "-").replace("]", ""), server.endpoint)


def test_objects_come_back_whole(storage: Storage) -> None:
    storage.put("run/small", [b"ab", memoryview(b"cd")])
    storage.put("run/empty", [])
    storage.put("run/big", [memoryview(BIG)[at : at + 3_000_000] for at in range(0, len(BIG), 3_000_000)])
    assert storage.get("run/small") == b"abcd"
    assert storage.get("run/empty") == b""
    assert storage.get("run/big") == BIG
    assert storage.list() == ["run/big", "run/empty", "run/small"]
    assert storage.list("run/s") == ["run/small"]


def test_an_upload_copies_nothing_of_what_it_sends(storage: Storage) -> None:
    tracemalloc.start()
    try:
        storage.put("big", [BIG])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < PART_BYTES / 4


def test_the_checksum_of_an_object_is_made_of_those_of_its_parts() -> None:
    pieces = list(regroup([BIG[:100], b"", BIG[100 : PART_BYTES + 7], memoryview(BIG)[PART_BYTES + 7 :]]))
    assert [piece.nbytes for piece in pieces] == [PART_BYTES, PART_BYTES, 12_345]
    assert joined((piece.crc32(), piece.nbytes) for piece in pieces) == zlib.crc32(BIG)
    for _ in range(2):  # as for a request that is made again
        assert b"".join(block for piece in pieces for block in iter(piece.read, b"")) == BIG
        for piece in pieces:
            piece.seek(0)
    with pytest.raises(ValueError, match="only be read from its beginning"):
        pieces[0].seek(1)


def test_ranges_are_read_into_memory(storage: Storage) -> None:
    storage.put("big", [BIG])
    out = bytearray(1000)
    storage.get_range("big", PART_BYTES - 500, memoryview(out))
    assert out == BIG[PART_BYTES - 500 : PART_BYTES + 500]


@pytest.mark.parametrize("offset", [len(BIG) - 10, len(BIG) + 10])
def test_an_object_that_ends_early_is_damaged(storage: Storage, offset: int) -> None:
    storage.put("big", [BIG])
    with pytest.raises(CorruptDataError, match="more are due"):
        storage.get_range("big", offset, memoryview(bytearray(100)))


def test_an_answer_that_breaks_within_tls_is_an_error_of_the_storage() -> None:
    with (
        pytest.raises(StorageError, match="cannot read a: decryption failed; is the endpoint up"),
        explained("s3://bucket", "cannot read a", 1),
    ):
        raise URLLib3SSLError("decryption failed")


def test_descriptions_of_the_service_are_read_once(server: s3_server.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    open_storage("s3://bucket/one", server.endpoint)
    read = JSONFileLoader.load_file
    files: list[Any] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: files.append(path) or read(self, path))
    open_storage("s3://bucket/another", server.endpoint)
    assert files == []


def test_deleting_is_idempotent(storage: Storage) -> None:
    storage.put("a", [b"1"])
    storage.delete("a")
    storage.delete("a")
    assert storage.list() == []


def test_check_leaves_nothing(storage: Storage) -> None:
    storage.check()
    assert storage.list() == []


def test_a_failed_upload_leaves_nothing(storage: Storage) -> None:
    def parts() -> Iterator[bytes]:
        yield BIG
        raise RuntimeError("the slot is gone")

    with pytest.raises(RuntimeError, match="the slot is gone"):
        storage.put("big", parts())
    assert storage.list() == []


def test_bandwidth_is_bounded(server: s3_server.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("gemini_ft.storage.s3.time.sleep", waits.append)
    storage = open_storage("s3://bucket/paced", server.endpoint, max_bandwidth=PART_BYTES)
    storage.put("big", [BIG])
    assert sum(waits) > 1  # the second part waits for the first one's second, the third for two


def test_missing_bucket(server: s3_server.Server) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket; create the bucket"):
        open_storage("s3://nowhere/x", server.endpoint).check()


def test_wrong_credentials_are_explained_and_not_shown(server: s3_server.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-nobody-may-see")
    with pytest.raises(StorageError, match="check the credentials") as caught:
        open_storage("s3://bucket/x", server.endpoint).check()
    assert "a-secret" not in str(caught.value)
    assert s3_server.KEY not in str(caught.value)


def test_an_endpoint_that_is_down_and_comes_back(tmp_path: Path) -> None:
    with s3_server.serve(tmp_path, "bucket") as server:
        storage = open_storage("s3://bucket/x", server.endpoint)
        storage.put("a", [b"1"])
        server.stop()
        with pytest.raises(StorageError, match="is the endpoint up"):
            storage.get("a")
        server.start()
        assert storage.get("a") == b"1"


class TestFaults:
    """What networks and stores do on a bad day, by a proxy in front of the server. Nobody waits between two attempts."""

    @pytest.fixture(autouse=True)
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setattr("gemini_ft.storage.s3.PAUSE", 0)

    @pytest.fixture
    def proxy(self, server: s3_server.Server) -> Iterator[S3Proxy]:
        with S3Proxy(server.port) as running:
            yield running

    @pytest.fixture
    def storage(self, proxy: S3Proxy, request: pytest.FixtureRequest) -> Storage:
        return open_storage(f"s3://bucket/{request.node.name}".replace("[", "-").replace("]", "").replace(" ", "-"), proxy.endpoint)

    @staticmethod
    def is_part(request: S3Request) -> bool:
        return "partNumber" in request.path

    @pytest.mark.parametrize("kind", ["reset", "503 SlowDown", "500 InternalError"])
    def test_of_single_parts_cost_nothing_but_time(self, storage: Storage, proxy: S3Proxy, kind: str) -> None:
        proxy.faults.append(S3Fault(kind, 2, self.is_part))
        storage.put("big", [BIG])
        assert not proxy.faults
        assert storage.get("big") == BIG

    def test_an_answer_cut_short_is_taken_up_where_it_broke(self, storage: Storage, proxy: S3Proxy) -> None:
        storage.put("big", [BIG])
        proxy.faults.append(S3Fault("cut", 2, lambda request: request.method == "GET"))
        out = bytearray(len(BIG))
        storage.get_range("big", 0, memoryview(out))
        assert out == BIG
        assert not proxy.faults

    @pytest.mark.parametrize(
        ("kind", "way_out"),
        [
            ("503 SlowDown", "overloaded; lower storage.max_bandwidth"),
            ("403 AccessDenied", "let these credentials list, read, write"),
            ("404 NoSuchBucket", "create the bucket"),
            ("507 XInsufficientStorage", "see the store's documentation"),
        ],
    )
    def test_that_stay_are_explained_and_leave_nothing(self, storage: Storage, proxy: S3Proxy, kind: str, way_out: str) -> None:
        storage.put("before", [b"1"])
        proxy.faults.append(S3Fault(kind, 100, self.is_part))
        with pytest.raises(StorageError, match=f"cannot write big: {kind.split()[1]}; .*{way_out}"):
            storage.put("big", [BIG])
        proxy.faults.clear()
        assert storage.list() == ["before"]

    def test_a_store_that_answers_slowly_gets_all_the_time_it_needs(self, storage: Storage, proxy: S3Proxy) -> None:
        proxy.rate = 40e6
        storage.put("big", [BIG])
        proxy.rate = None
        assert storage.get("big") == BIG

    def test_every_connection_breaks_after_a_mebibyte_and_the_object_comes_whole(self, storage: Storage, proxy: S3Proxy) -> None:
        storage.put("big", [BIG[: 10 * 2**20]])
        proxy.fail(f"cut {2**20}", "GetObject")
        out = bytearray(10 * 2**20)
        storage.get_range("big", 0, memoryview(out))
        assert out == BIG[: 10 * 2**20]
        assert len(proxy.met) >= 9

    @pytest.mark.parametrize("cut", ["", "cut 0", "cut 10", "cut front", "cut 3000000"])
    def test_a_small_shard_that_breaks_off_is_taken_up_where_it_broke(self, storage: Storage, proxy: S3Proxy, cut: str) -> None:
        """Its data is read from the answer that has brought its layout, however much later."""
        record = write_shard(storage, "shard", SMALL, memoryview(BIG), b"extras")
        if cut:
            proxy.fail(cut.replace("front", str(record.data.offset)), "GetObject", count=1)
        shard, out = StoredShard(storage, record, whole=True), bytearray(SMALL.nbytes)
        assert (shard.layout, shard.extras) == (SMALL, b"extras")
        shard.read(0, memoryview(out))
        assert out == BIG[: SMALL.nbytes]
        assert sum(request.operation == "GetObject" for request in proxy.requests) == (2 if cut else 1)

    def test_an_answer_that_breaks_while_it_waits_is_asked_for_again_at_once(
        self, storage: Storage, proxy: S3Proxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        record = write_shard(storage, "shard", SMALL, memoryview(BIG), b"extras")
        proxy.fail(f"cut {record.data.offset}", "GetObject", count=1)
        out = memoryview(bytearray(SMALL.nbytes))
        StoredShard(storage, record, whole=True).read(0, out)
        assert out == BIG[: SMALL.nbytes]
        assert not caplog.records

    def test_a_small_shard_of_which_only_the_front_is_read_keeps_no_connection(self, storage: Storage, proxy: S3Proxy) -> None:
        record = write_shard(storage, "shard", SMALL, memoryview(BIG), b"extras")
        for _ in range(10):
            assert StoredShard(storage, record, whole=True).extras == b"extras"
        open_ones = [each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == proxy.server_port]
        assert len(open_ones) <= 2  # boto3 keeps one for the next request

    @pytest.mark.parametrize("kind", ["whole", "half", "cut 0"])
    def test_bytes_that_were_not_asked_for_are_neither_taken_nor_called_damage(self, storage: Storage, proxy: S3Proxy, kind: str) -> None:
        storage.put("a", [BIG[:1000]])
        out = bytearray(100)
        proxy.fail(kind, "GetObject", count=1)
        storage.get_range("a", 500, memoryview(out))
        assert out == BIG[500:600]
        proxy.fail(kind, "GetObject")
        with pytest.raises(StorageError, match="cannot read a: "):
            storage.get_range("a", 500, memoryview(out))

    @pytest.mark.parametrize("kind", ["cut 10", "cut 0"])
    def test_a_small_object_that_breaks_off_is_read_again(self, storage: Storage, proxy: S3Proxy, kind: str) -> None:
        storage.put("a", [BIG[:1000]])
        proxy.fail(kind, "GetObject", count=2)
        assert storage.get("a") == BIG[:1000]

    @pytest.mark.parametrize("kind", ["empty", "html"])
    def test_an_answer_that_is_no_listing_is_not_nothing(self, storage: Storage, proxy: S3Proxy, kind: str) -> None:
        storage.put("a", [b"1"])
        proxy.fail(kind, "ListObjects", count=1)
        assert storage.list() == ["a"]
        proxy.fail(kind, "ListObjects")
        with pytest.raises(StorageError, match=r"cannot list the prefix: the answer is no .*says nothing about the stored objects"):
            storage.list()

    def test_a_listing_of_something_else_is_refused(self, storage: Storage, proxy: S3Proxy) -> None:
        """As a cache gives it that does not look at the query."""
        storage.put("run/a", [b"1"])
        storage.put("run-2/a", [b"1"])
        storage.list("run-2/")
        (other,) = proxy.listings.values()
        proxy.listings = _Always(other)
        proxy.fail("stale", "ListObjects")
        with pytest.raises(StorageError, match="no listing of it"):
            storage.list("run/")

    def test_an_answer_that_hangs_after_its_headers_is_given_up_and_read_again(
        self, storage: Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("gemini_ft.storage.s3.READ_SILENCE", 0.3)
        storage = open_storage(storage.url, proxy.endpoint)
        storage.put("a", [BIG[:1000]])
        out = bytearray(1000)
        proxy.fail("hang", "GetObject", count=1)
        storage.get_range("a", 0, memoryview(out))
        assert out == BIG[:1000]
        assert "cannot read a: the store fell silent, no byte came for 0.3 s" in caplog.text
        proxy.fail("hang", "GetObject")
        with pytest.raises(StorageError, match=r"the store fell silent, no byte came for 0\.3 s"):
            storage.get_range("a", 0, memoryview(out))

    @pytest.mark.parametrize("kind", ["cut 10", "hang"])
    @pytest.mark.parametrize("operation", ["ListObjects", "GetObject"])
    def test_an_answer_of_xml_that_breaks_off_or_hangs_is_read_again_and_an_error_of_the_storage(
        self, storage: Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, operation: str, kind: str
    ) -> None:
        """boto3 reads it itself: also that of a refusal, and passes on what the library below it says."""
        monkeypatch.setattr("gemini_ft.storage.s3.READ_SILENCE", 0.5)
        storage = open_storage(storage.url, proxy.endpoint)

        def look() -> bool:
            return bool(storage.list()) if operation == "ListObjects" else exists(storage, "a")

        proxy.fail(kind, operation, count=1)
        assert not look()
        proxy.fail(kind, operation)
        with pytest.raises(StorageError, match=r"is the endpoint up|fell silent"):
            look()

    @pytest.mark.parametrize("operation", ["PutObject", "CreateMultipartUpload", "UploadPart", "HeadObject"])
    @pytest.mark.parametrize("kind", ["empty", "html"])
    def test_an_answer_that_says_nothing_of_what_was_written_is_an_error_of_the_storage(
        self, storage: Storage, proxy: S3Proxy, kind: str, operation: str
    ) -> None:
        """Such as a gateway gives to whatever it does not know."""
        proxy.fail(kind, operation)
        with pytest.raises(StorageError, match="cannot write a: "):
            storage.put("a", [BIG if "art" in operation else BIG[:1000]])
        proxy.faults.clear()
        assert storage.list() == []

    def test_what_the_store_did_not_keep_is_an_error_and_taken_away(self, storage: Storage, proxy: S3Proxy) -> None:
        proxy.fail("torn", "PutObject")
        with pytest.raises(StorageError, match="cannot write a: the store said that all is well and has kept 500 of 1000 bytes"):
            storage.put("a", [BIG[:1000]])
        proxy.faults.clear()
        proxy.fail("torn", "UploadPart", count=1)
        with pytest.raises(StorageError, match="cannot write big: the store said that all is well and has kept"):
            storage.put("big", [BIG])
        assert storage.list() == []

    def test_a_checksum_that_the_store_keeps_is_compared(self, storage: Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server of the tests keeps the checksum that it is told, and looks at no byte for it."""
        answers = iter(["AAAAAA==", "AAAAAQ=="])
        monkeypatch.setattr("gemini_ft.storage.s3.checksum_of_all", lambda head: next(answers))
        with pytest.raises(StorageError, match="has kept other bytes"):
            storage.put("a", [b"1"])
        assert storage.list() == []

    @pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"])
    def test_a_store_that_knows_no_checksums_is_given_none(self, storage: Storage, proxy: S3Proxy, operation: str) -> None:
        proxy.fail("400 InvalidArgument", operation, count=1)
        size = 1000 if operation == "PutObject" else len(BIG)
        storage.put("a", [BIG[:size]])
        assert storage.get("a") == BIG[:size]

    def test_an_upload_whose_end_was_not_answered_is_there(self, storage: Storage, proxy: S3Proxy) -> None:
        proxy.fail("lost", "CompleteMultipartUpload", count=1)
        storage.put("big", [BIG])
        assert storage.get("big") == BIG
        assert "AbortMultipartUpload" not in [request.operation for request in proxy.requests]

    @pytest.mark.parametrize(("nbytes", "tags"), [(100, True), (101, True), (101, False)], ids=["as-long", "longer", "no-tag"])
    def test_what_another_job_writes_in_the_same_place_meanwhile_is_not_taken_for_damage(
        self, server: s3_server.Server, storage: Storage, proxy: S3Proxy, nbytes: int, tags: bool
    ) -> None:
        """All jobs of a run write one mark; a gateway may say that all is well, and nothing more."""
        other = open_storage(storage.url, server.endpoint)
        if not tags:
            proxy.fail("empty", "PutObject", count=1)
        proxy.fail("hold", "HeadObject", count=1)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(storage.put, "mark", [bytes(100)])
            eventually(lambda: "hold" in proxy.met, "the question for what was kept")
            other.put("mark", [b"1" * nbytes])
            proxy.release()
            with pytest.raises(StorageError, match="another process has written it meanwhile"):
                writing.result(20)
        assert storage.get("mark") == b"1" * nbytes

    @pytest.mark.parametrize("answer", ["409 OperationAborted", "409 ConditionalRequestConflict", "412 PreconditionFailed"])
    def test_an_answer_that_denies_what_was_carried_out_loses_nothing(self, storage: Storage, proxy: S3Proxy, answer: str) -> None:
        for key, body, operation in (("small", b"1", "PutObject"), ("big", BIG, "CompleteMultipartUpload")):
            proxy.fail(f"but {answer}", operation, count=1)
            with contextlib.suppress(StorageError):  # which is tried again
                storage.put(key, [body])
            assert storage.get(key) == body
            storage.put(key, [body])
        assert storage.list() == ["big", "small"]

    def test_an_object_of_before_is_not_taken_for_the_upload(
        self, storage: Storage, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.put("big", [bytes(len(BIG))])
        monkeypatch.setattr("gemini_ft.storage.s3.SLACK", timedelta(days=-1))  # as if the object were a day old
        proxy.fail("403 AccessDenied", "CompleteMultipartUpload")
        with pytest.raises(StorageError, match="AccessDenied"):
            storage.put("big", [BIG])

    def test_an_upload_that_could_not_be_aborted_is_before_the_next(self, storage: Storage, proxy: S3Proxy) -> None:
        proxy.fail("403 AccessDenied", "UploadPart", "AbortMultipartUpload")
        with pytest.raises(StorageError, match="AccessDenied"):
            storage.put("big", [BIG])
        proxy.faults.clear()
        storage.put("other", [b"1"])
        aborted = [request for request in proxy.requests if request.operation == "AbortMultipartUpload"]
        assert [request.key.rpartition("/")[2] for request in aborted] == ["big", "big"]

    @pytest.mark.parametrize(
        ("kind", "way_out"),
        [
            ("400 ExpiredToken", "have run out: renew them"),
            ("403 RequestTimeTooSkewed", "set this host's clock, it is .* s (ahead of|behind) the store's"),
            ("301 PermanentRedirect", "in another region: set AWS_DEFAULT_REGION"),
            ("403 AccessDenied", r"\(denied: ListObjectsV2\)"),
        ],
    )
    def test_of_credentials_clock_and_region_say_what_to_do(self, storage: Storage, proxy: S3Proxy, kind: str, way_out: str) -> None:
        proxy.fail(kind, "ListObjects")
        with pytest.raises(StorageError, match=f"cannot list the prefix: {kind.split()[1]}; .*{way_out}"):
            storage.list()

    def test_a_store_that_redirects_everything_is_an_error_like_any_other(self, storage: Storage, proxy: S3Proxy) -> None:
        proxy.fail("301 PermanentRedirect")
        with pytest.raises(StorageError, match="redirected in a circle; the bucket is in another region"):
            storage.list()


class _Always(dict[str, bytes]):
    """One answer to every path."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def __contains__(self, path: object) -> bool:
        return True

    def __getitem__(self, path: str) -> bytes:
        return self._answer


def test_names_that_are_no_keys_are_left_out_of_listings(server: s3_server.Server, storage: Storage) -> None:
    storage.put("a", [b"1"])
    other = f"{storage.url.removeprefix('s3://bucket/')}/a file.txt"
    boto3.client("s3", endpoint_url=server.endpoint).put_object(Bucket="bucket", Key=other, Body=b"of another program")
    assert storage.list() == ["a"]


class TestUnfinishedUploads:
    """Parts that no listing shows, of writers that have died."""

    KEY = "run/main/step-00000002-inc-1-x/shard-00000.safetensors"

    @pytest.fixture
    def client(self, server: s3_server.Server) -> Any:
        return boto3.client("s3", endpoint_url=server.endpoint)

    def unfinished(self, client: Any) -> list[str]:
        return [upload["Key"] for upload in client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])]

    @pytest.fixture(autouse=True)
    def begun(self, client: Any, storage: Storage) -> Iterator[str]:
        key = f"{storage.url.removeprefix('s3://bucket/')}/{self.KEY}"
        upload = client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
        yield key
        with contextlib.suppress(ClientError):
            client.abort_multipart_upload(Bucket="bucket", Key=key, UploadId=upload)

    def test_of_the_living_stay_when_this_host_has_a_wrong_clock(
        self, storage: Storage, client: Any, begun: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Ahead(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return datetime.now(tz) + timedelta(days=3)

        monkeypatch.setattr("gemini_ft.storage.s3.datetime", Ahead)
        storage.check()
        assert self.unfinished(client) == [begun]

    def test_of_the_dead_are_aborted(self, storage: Storage, client: Any, begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gemini_ft.storage.s3.ABANDONED", timedelta(seconds=-5))
        storage.check()
        assert self.unfinished(client) == []


def test_an_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_storage("s3:///prefix")
