"""The look at the storage before the first step, with real ranks and folders: each host is asked once, and all of them are compared."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import s3_server
from rank_kit import World

from gemini_ft.config import GeminiConfig
from gemini_ft.errors import ConfigError, StorageError
from gemini_ft.storage.base import UNCOUNTED, Storage, TransferCount
from gemini_ft.storage.decisions import Descent
from gemini_ft.storage.local import LocalStorage
from gemini_ft.storage.opening import open_storage
from gemini_ft.testing import S3Proxy
from gemini_ft.worker.rendezvous import init_process_group
from gemini_ft.worker.storage_check import check_storage

HOSTS = ["a", "a", "b", "b", "c", "c"]


class CountedFolder(LocalStorage):
    """A folder that notes who writes to it."""

    def __init__(self, root: Path, notes: Path) -> None:
        super().__init__(root)
        self._notes = notes

    def put(self, key: str, parts: Iterable[memoryview | bytes], transfer: TransferCount = UNCOUNTED) -> None:
        with open(self._notes, "a") as notes:
            print(os.environ["RANK"], file=notes)
        super().put(key, parts, transfer)


def look(folders: Sequence[Path], notes: Path) -> None:
    init_process_group("gloo")
    _check("file:///shared", lambda: CountedFolder(folders[int(os.environ["RANK"])], notes))


def look_at_bucket(endpoint: str) -> None:
    init_process_group("gloo")
    _check("s3://bucket/run", lambda: open_storage("s3://bucket/run", endpoint))


def look_with_one_host_shut_out(endpoint: str, required: bool) -> None:
    if HOSTS[int(os.environ["RANK"])] == "c":
        for name in s3_server.CREDENTIALS:
            os.environ.pop(name)
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    init_process_group("gloo")
    _check("s3://bucket/run", lambda: open_storage("s3://bucket/run", endpoint), required)


def _check(url: str, reopen: Callable[[], Storage], required: bool = True) -> None:
    config = GeminiConfig(run_id="r", storage={"url": url, "every_steps": 1, "required": required})
    choice: Any = SimpleNamespace(plan=SimpleNamespace(kind="fresh"), descent=Descent(), damaged=frozenset(), present=frozenset())
    hello: Any = SimpleNamespace(rank=int(os.environ["RANK"]), run="r", stream="main")
    check_storage(config, reopen, choice, hello, HOSTS)


def test_each_host_writes_twice_whatever_the_number_of_its_ranks(tmp_path: Path) -> None:
    """Once to prove that it can write, and once for the next host to read."""
    with World(tmp_path, hosts=HOSTS) as world:
        assert world.outcome(look, [tmp_path / "store"] * 6, tmp_path / "notes") == [None] * 6
    assert sorted((tmp_path / "notes").read_text().split()) == ["0", "0", "2", "2", "4", "4"]
    assert LocalStorage(tmp_path / "store").list() == []


def test_a_host_with_a_folder_of_its_own_is_named(tmp_path: Path) -> None:
    """Its ranks see each other's files: only another host's show that the folder is not shared."""
    folders = [tmp_path / ("own" if host == "b" else "store") for host in HOSTS]
    with World(tmp_path, hosts=HOSTS) as world:
        outcome = world.outcome(look, folders, tmp_path / "notes")
    assert all(isinstance(error, ConfigError) for error in outcome)
    assert "host b does not see what host a has just written there" in str(outcome[0])


def test_a_bucket_is_tried_by_one_rank_and_read_once_by_every_other_host(tmp_path: Path) -> None:
    with (
        s3_server.serve(tmp_path / "s3", "bucket") as server,
        S3Proxy(server.port) as proxy,
        World(tmp_path, hosts=HOSTS, **s3_server.CREDENTIALS) as world,
    ):
        assert world.outcome(look_at_bucket, proxy.endpoint) == [None] * 6
        asked = Counter(request.operation for request in proxy.requests)
    assert not [path for path in (tmp_path / "s3").rglob("*") if path.is_file()]
    others = len(set(HOSTS)) - 1
    assert asked == {"PutObject": 2, "HeadObject": 2, "GetObject": 1 + others, "DeleteObject": 2, "ListMultipartUploads": 1}


def test_a_bucket_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    with (
        s3_server.serve(tmp_path / "s3", "bucket") as server,
        S3Proxy(server.port) as proxy,
        World(tmp_path, hosts=HOSTS, **s3_server.CREDENTIALS) as world,
    ):
        proxy.fail("403 AccessDenied", "PutObject", count=None)
        errors = world.outcome(look_at_bucket, proxy.endpoint)
    assert {type(error) for error in errors} == {StorageError}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("rank 0: ")


def test_a_host_that_cannot_reach_the_bucket_is_named_before_the_first_step(tmp_path: Path) -> None:
    """Although another one tries it for all: else its part of every checkpoint would be missing, and the training go on."""
    with (
        s3_server.serve(tmp_path / "s3", "bucket") as server,
        S3Proxy(server.port) as proxy,
        World(tmp_path, hosts=HOSTS, **s3_server.CREDENTIALS) as world,
    ):
        errors = world.outcome(look_with_one_host_shut_out, proxy.endpoint, True)
        assert {type(error) for error in errors} == {StorageError}
        assert len({str(error) for error in errors}) == 1
        assert str(errors[0]).startswith("rank 4: ")
        assert world.outcome(look_with_one_host_shut_out, proxy.endpoint, False) == [None] * 6
    assert not [path for path in (tmp_path / "s3").rglob("*") if path.is_file()]
