"""The fault proxy: each fault does to a real server's answers what its line in `FAULTS` says, and no more."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import s3_server
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError

from gemini_ft.errors import ConfigError
from gemini_ft.testing import S3Fault, S3Proxy, S3Request
from gemini_ft.testing.s3_proxy import FAULTS

BODY = bytes(range(1, 251)) * 4000  # 1 MB, without a zero


@pytest.fixture
def server(tmp_path: Path) -> Iterator[s3_server.Server]:
    with s3_server.serve(tmp_path, "bucket") as running:
        yield running


@pytest.fixture
def proxy(server: s3_server.Server) -> Iterator[S3Proxy]:
    with S3Proxy(server.endpoint) as running:
        yield running


@pytest.fixture
def client(proxy: S3Proxy) -> Any:
    """A client that asks once; the object ``a`` is there."""
    config = Config(retries={"total_max_attempts": 1}, read_timeout=5, request_checksum_calculation="when_required")
    session = boto3.session.Session(s3_server.KEY, s3_server.SECRET, region_name="us-east-1")
    made = session.client("s3", endpoint_url=proxy.endpoint, config=config)
    made.put_object(Bucket="bucket", Key="a", Body=BODY)
    return made


def read(client: Any, **options: Any) -> bytes:
    return bytes(client.get_object(Bucket="bucket", Key="a", **options)["Body"].read())


def keys(client: Any) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket="bucket").get("Contents", [])]


def differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_without_faults_nothing_changes(client: Any, proxy: S3Proxy) -> None:
    assert read(client) == BODY
    assert read(client, Range="bytes=5-9") == BODY[5:10]
    assert keys(client) == ["a"]
    assert [request.operation for request in proxy.requests] == ["PutObject", "GetObject", "GetObject", "ListObjects"]
    assert proxy.met == []


def test_bits_flip_and_halves_have_a_length_that_fits(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("flip", "GetObject", count=1)
    assert differing_bits(read(client), BODY) == 1
    proxy.fail("half", "GetObject", count=1)
    assert read(client) == BODY[: len(BODY) // 2]
    assert read(client) == BODY
    assert proxy.met == ["flip", "half"]


def test_range_is_ignored(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("whole", "GetObject")
    answer = client.get_object(Bucket="bucket", Key="a", Range="bytes=5-9")
    content = answer["Body"].read()
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert "ContentRange" not in answer
    assert len(content) == len(BODY)
    assert content[5:10] == BODY[5:10]


@pytest.mark.parametrize(("kind", "whole"), [("cut", len(BODY) // 2), ("cut 1000", 1000)])
def test_a_body_is_cut(client: Any, proxy: S3Proxy, kind: str, whole: int) -> None:
    proxy.fail(kind, "GetObject", count=1)
    body, got = client.get_object(Bucket="bucket", Key="a")["Body"], b""
    with contextlib.suppress(HTTPClientError, IncompleteReadError, OSError):
        while piece := body.read(100):
            got += piece
    assert BODY.startswith(got)
    assert len(got) <= whole


def test_half_of_an_object_is_kept(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("torn", "PutObject", count=1)
    client.put_object(Bucket="bucket", Key="a", Body=BODY)
    assert read(client) == BODY[: len(BODY) // 2]


def test_an_answer_is_lost_although_the_request_was_carried_out(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("lost", "DeleteObject", count=1)
    with pytest.raises(HTTPClientError):
        client.delete_object(Bucket="bucket", Key="a")
    assert keys(client) == []


def test_a_request_is_reset(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("reset", "PutObject", count=1)
    with pytest.raises(HTTPClientError):
        client.put_object(Bucket="bucket", Key="b", Body=BODY)
    assert keys(client) == ["a"]


@pytest.mark.parametrize(("kind", "length"), [("empty", 0), ("html", 106), ("nothing", None)])
def test_pages_in_place_of_an_answer(client: Any, proxy: S3Proxy, kind: str, length: int | None) -> None:
    proxy.fail(kind, "ListObjects", count=1)
    address = urlsplit(proxy.endpoint).netloc
    connection = http.client.HTTPConnection(address, timeout=5)
    connection.request("GET", "/bucket?list-type=2")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200
    assert length in (None, len(body))
    assert b"<Key>" not in body


def test_a_listing_of_before(client: Any, proxy: S3Proxy) -> None:
    client.list_objects_v2(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="b", Body=b"1")
    proxy.fail("stale", "ListObjects", count=1)
    assert keys(client) == ["a"]
    assert keys(client) == ["a", "b"]


def test_errors_have_their_status_and_code(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("403 RequestTimeTooSkewed", key="^a$", count=1)
    with pytest.raises(ClientError, match="RequestTimeTooSkewed"):
        read(client)
    assert read(client) == BODY


@pytest.mark.parametrize("kind", ["hang", "hold"])
def test_what_hangs_goes_on_when_it_is_released(client: Any, proxy: S3Proxy, kind: str) -> None:
    proxy.fail(kind, "GetObject")
    with pytest.raises((HTTPClientError, OSError), match=r"[Tt]ime"):
        read(impatient(proxy))
    proxy.release()
    assert read(client) == BODY


def impatient(proxy: S3Proxy) -> Any:
    config = Config(retries={"total_max_attempts": 1}, read_timeout=0.2)
    session = boto3.session.Session(s3_server.KEY, s3_server.SECRET, region_name="us-east-1")
    return session.client("s3", endpoint_url=proxy.endpoint, config=config)


def test_a_rule_names_operations_keys_and_how_often(client: Any, proxy: S3Proxy) -> None:
    proxy.fail("503 SlowDown", "PutObject", key="/shard-", count=2)
    put = {"Bucket": "bucket", "Body": b"1"}
    client.put_object(Key="run/manifest.json", **put)
    for _ in range(2):
        with pytest.raises(ClientError, match="SlowDown"):
            client.put_object(Key="run/shard-1", **put)
    client.put_object(Key="run/shard-1", **put)
    assert proxy.faults == []


def test_chance_is_seeded(server: s3_server.Server) -> None:
    def drawn(seed: int) -> list[str | None]:
        proxy = S3Proxy(server.port, seed=seed)
        proxy.fail("flip", chance=0.5)
        proxy.server_close()
        return [proxy.take_fault(S3Request(method="GET", path="/bucket/a", nbytes=0)) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {*drawn(1)} == {None, "flip"}


@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/bucket/a/b?uploads", "CreateMultipartUpload"),
        ("PUT", "/bucket/a/b?partNumber=1&uploadId=x", "UploadPart"),
        ("POST", "/bucket/a/b?uploadId=x", "CompleteMultipartUpload"),
        ("DELETE", "/bucket/a/b?uploadId=x", "AbortMultipartUpload"),
        ("GET", "/bucket?uploads&prefix=a", "ListMultipartUploads"),
        ("HEAD", "/bucket/a", "HeadObject"),
    ],
)
def test_operations_have_the_names_of_s3(method: str, path: str, operation: str) -> None:
    assert S3Request(method=method, path=path, nbytes=0).operation == operation


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kind='explode': must be one of 'reset', .*'STATUS CODE'"):
        S3Fault("explode")
    assert all(S3Fault(kind.split(" [")[0].replace("SECONDS", "1").replace("STATUS CODE", "503 SlowDown")) for kind in FAULTS)
