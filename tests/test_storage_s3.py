"""S3 storage against a real server: whole objects, parts, ranges, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_proxy
import s3_server
from s3_proxy import Fault, Proxy, Request

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


class TestFaults:
    """What networks and stores do on a bad day, by a proxy in front of the server."""

    @pytest.fixture
    def proxy(self, server: s3_server.Server) -> Iterator[Proxy]:
        with s3_proxy.proxy(server.port) as running:
            yield running

    @pytest.fixture
    def storage(self, proxy: Proxy, request: pytest.FixtureRequest) -> Storage:
        return open_storage(f"s3://bucket/{request.node.name}".replace("[", "-").replace("]", "").replace(" ", "-"), proxy.endpoint)

    @staticmethod
    def is_part(request: Request) -> bool:
        return "partNumber" in request.path

    @pytest.mark.parametrize("kind", ["reset", "503 SlowDown", "500 InternalError"])
    def test_of_single_parts_cost_nothing_but_time(self, storage: Storage, proxy: Proxy, kind: str) -> None:
        proxy.faults.append(Fault(kind, 2, self.is_part))
        storage.put("big", [BIG])
        assert not proxy.faults
        assert storage.get("big") == BIG

    def test_an_answer_cut_short_is_taken_up_where_it_broke(self, storage: Storage, proxy: Proxy) -> None:
        storage.put("big", [BIG])
        proxy.faults.append(Fault("cut", 2, lambda request: request.method == "GET"))
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
    def test_that_stay_are_explained_and_leave_nothing(self, storage: Storage, proxy: Proxy, kind: str, way_out: str) -> None:
        storage.put("before", [b"1"])
        proxy.faults.append(Fault(kind, 100, self.is_part))
        with pytest.raises(StorageError, match=f"cannot write big: {kind.split()[1]}; .*{way_out}"):
            storage.put("big", [BIG])
        proxy.faults.clear()
        assert storage.list() == ["before"]

    def test_a_store_that_answers_slowly_gets_all_the_time_it_needs(self, storage: Storage, proxy: Proxy) -> None:
        proxy.rate = 40e6
        storage.put("big", [BIG])
        proxy.rate = None
        assert storage.get("big") == BIG


def test_an_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_storage("s3:///prefix")
