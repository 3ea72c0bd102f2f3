"""S3 storage against a real server: whole objects, parts, ranges, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server

from gemini_ft.errors import ConfigError, CorruptDataError, StorageError
from gemini_ft.storage.base import Storage, open_storage
from gemini_ft.storage.s3 import PART_BYTES

BIG = os.urandom(2 * PART_BYTES + 12_345)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.Server]:
    with s3_server.serve(tmp_path_factory.mktemp("s3"), "bucket") as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


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


def test_an_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_storage("s3:///prefix")
